//! The processes of a soak: a NATS server, an attached agent, and the bridge with the agents that it launches.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use crate::testbed::Process;

const START_TIMEOUT: Duration = Duration::from_secs(60);

pub struct Site {
    folder: PathBuf,
    program: PathBuf,
    pub nats_port: u16,
    nats: Option<Process>,
    attached_port: u16,
    attached: Option<Process>,
    pub bridge: Process,
    reloads: u32,
}

impl Site {
    pub async fn start() -> anyhow::Result<Self> {
        let folder = std::env::temp_dir().join(format!("a2a-soak-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let program = match std::env::var_os("A2A_BRIDGE_BIN") {
            Some(program) => program.into(),
            None => std::env::current_exe()?.with_file_name("a2a-bridge"),
        };
        let (nats_port, attached_port) = (free_port()?, free_port()?);
        let nats = start_nats(nats_port)?;
        let attached = start_agent(&program, attached_port)?;
        write_configuration(&folder, &program, nats_port, attached_port, 0)?;
        let log = std::fs::File::create(folder.join("bridge.log"))?;
        let mut command = Command::new(&program);
        command.arg("run").arg("--config").arg(folder.join("bridge.yaml")).args(["--log", "warn"]);
        let bridge = Process::start(command.stdout(Stdio::null()).stderr(log))?;
        Ok(Self {
            folder,
            program,
            nats_port,
            nats: Some(nats),
            attached_port,
            attached: Some(attached),
            bridge,
            reloads: 0,
        })
    }

    pub fn nats_url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.nats_port)
    }

    pub fn restart_nats(&mut self) -> anyhow::Result<()> {
        self.nats = None;
        self.nats = Some(start_nats(self.nats_port)?);
        Ok(())
    }

    /// Reloads a configuration that differs from the one before.
    pub fn reload(&mut self) -> anyhow::Result<()> {
        self.reloads += 1;
        write_configuration(&self.folder, &self.program, self.nats_port, self.attached_port, self.reloads)?;
        signal("HUP", self.bridge.id())
    }

    /// Kills the attached agent and starts it again. The load makes a launched one crash, too.
    pub fn kill_agent(&mut self) -> anyhow::Result<()> {
        if let Some(agent) = &self.attached {
            signal("KILL", agent.id())?;
        }
        self.attached = None;
        self.attached = Some(start_agent(&self.program, self.attached_port)?);
        Ok(())
    }

    /// Stops the bridge first, and with it the agents that it launched.
    pub fn stop(mut self) {
        self.bridge.stop();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn signal(name: &str, pid: u32) -> anyhow::Result<()> {
    let status = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status()?;
    ensure!(status.success(), "cannot send SIG{name} to {pid}");
    Ok(())
}

/// Below the range from which the system takes ports for outgoing connections, so that it stays free.
fn free_port() -> anyhow::Result<u16> {
    let start = 20_000 + u16::try_from(std::process::id() % 10_000)?;
    let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
    static NEXT: std::sync::atomic::AtomicU16 = std::sync::atomic::AtomicU16::new(0);
    let next = start + NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    (next..32_000).find(is_free).context("no port is free")
}

fn start_nats(port: u16) -> anyhow::Result<Process> {
    let server = std::env::var("NATS_SERVER_BIN").unwrap_or_else(|_| "nats-server".to_owned());
    let mut command = Command::new(server);
    command.args(["-a", "127.0.0.1", "-p", &port.to_string()]);
    started(&mut command, port)
}

fn start_agent(program: &PathBuf, port: u16) -> anyhow::Result<Process> {
    started(Command::new(program).args(["demo-agent", "--port", &port.to_string()]), port)
}

/// Starts a process that listens on this port.
fn started(command: &mut Command, port: u16) -> anyhow::Result<Process> {
    let process = Process::start(command.stdout(Stdio::null()).stderr(Stdio::null()))?;
    let start = Instant::now();
    while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
        ensure!(start.elapsed() < START_TIMEOUT, "{:?} does not listen", command.get_program());
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(process)
}

/// What the bridge remembers expires soon, so that its memory is steady after some minutes.
fn write_configuration(
    folder: &PathBuf,
    program: &PathBuf,
    nats_port: u16,
    attached_port: u16,
    reloads: u32,
) -> anyhow::Result<()> {
    let program = program.display();
    let launched = format!(
        "url: \"http://127.0.0.1:{{port}}\", port: auto, command: [\"{program}\", demo-agent, --port, \"{{port}}\"]"
    );
    let text = format!(
        "nats: {{ url: \"nats://127.0.0.1:{nats_port}\" }}
limits: {{ memory: 512MiB }}
agents:
  - {{ name: steady, {launched}, task_ttl: 1m, input_required_ttl: 20s }}
  - {{ name: frail, {launched}, task_ttl: 1m, max_restarts: 1000, card_refresh: {}s }}
  - {{ name: attached, url: \"http://127.0.0.1:{attached_port}\", task_ttl: 1m, input_required_ttl: 20s }}
",
        60 + reloads % 2
    );
    let text = if has_limits(&program.to_string()) {
        text
    } else {
        text.replace("limits: { memory: 512MiB }\n", "")
    };
    Ok(std::fs::write(folder.join("bridge.yaml"), text)?)
}

/// Builds before `limits.memory` can be soaked too, to compare.
fn has_limits(program: &str) -> bool {
    let schema = Command::new(program).arg("schema").output();
    schema.is_ok_and(|schema| String::from_utf8_lossy(&schema.stdout).contains("\"limits\""))
}
