//! The real program: a bridge with the demo agent, and commands that call it.

use std::io::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use super::eventually::eventually;
use super::nats::NatsServer;

/// How long an agent may take to be ready, and a program to end.
const PATIENCE: Duration = Duration::from_secs(20);

/// The program's path.
pub fn binary() -> &'static str {
    env!("CARGO_BIN_EXE_a2a-bridge")
}

/// The program without anything that the tester's shell sets.
pub fn program() -> Command {
    let mut command = Command::new(binary());
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("NATS_") || name.starts_with("A2A_BRIDGE_") || name == "NO_COLOR" {
            command.env_remove(name);
        }
    }
    command
}

/// How a command ended and what it said.
#[derive(Debug)]
pub struct Said {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Said {
    /// Stdout as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Runs a command to its end, with this on stdin.
pub fn run(mut command: Command, input: &str) -> Said {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // It may not read it.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    Said {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// A command on this server, given as words.
pub fn on(url: &str, arguments: &[&str]) -> Command {
    let mut command = program();
    command.args(arguments).env("NATS_URL", url);
    command
}

/// A running bridge. Dropping it ends it in order.
pub struct Bridge {
    child: Child,
    pub dir: TempDir,
}

impl Bridge {
    /// Runs a bridge with these settings, and waits until all of its agents are ready.
    pub async fn start(server: &NatsServer, settings: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a2a-bridge.yaml");
        std::fs::write(&file, settings).unwrap();
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let child = program()
            .args(["run", "--config"])
            .arg(&file)
            .env("NATS_URL", server.url())
            .env("A2A_BRIDGE_BIN", binary())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        Self { child, dir }
    }

    /// A bridge with the demo agent of `config/demo.yaml`, ready to be called.
    pub async fn demo(server: &NatsServer) -> Self {
        let settings = std::fs::read_to_string(root().join("config/demo.yaml")).unwrap();
        let settings = settings.replace("${DEMO_PORT:-9000}", &free_port().to_string());
        let bridge = Self::start(server, &settings).await;
        bridge.ready(&server.url(), &[]).await;
        bridge
    }

    /// Waits until the bridge's agents are ready, as `agents` sees it with these arguments.
    pub async fn ready(&self, url: &str, arguments: &[&str]) {
        eventually(PATIENCE, || async {
            let mut command = on(url, &["agents", "--json"]);
            command.args(arguments);
            let said = run(command, "");
            let agents: Value = serde_json::from_str(&said.out).ok()?;
            let agents = agents.as_array().filter(|agents| !agents.is_empty())?;
            agents.iter().all(|agent| agent["state"] == "ready").then_some(())
        })
        .await;
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        interrupt(&self.child, Signal::SIGTERM);
        let _ = self.child.wait();
        if std::thread::panicking() {
            println!("the bridge's log:\n{}", self.log());
        }
    }
}

/// Sends a signal to a child of ours that has not been waited for.
pub fn interrupt(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(child.id().try_into().unwrap());
    kill(pid, signal).unwrap();
}

/// Waits for a child to end.
pub async fn ended(child: &mut Child) -> ExitStatus {
    eventually(PATIENCE, || {
        let status = child.try_wait().unwrap();
        async move { status }
    })
    .await
}

/// The top folder.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    listener.local_addr().unwrap().port()
}
