//! Commands of the program, and a bridge with the demo agent for them to call.

use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use super::eventually::eventually;
use super::nats::NatsServer;
use super::processes::{free_port, program};

/// The program with these arguments, and without the variables of the bridge that the tester's shell sets.
pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.args(arguments);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("NATS_") || name.starts_with("A2A_BRIDGE_") || name == "NO_COLOR" {
            command.env_remove(name);
        }
    }
    command
}

#[derive(Debug)]
pub struct CommandOutput {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl CommandOutput {
    /// Stdout as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Runs a command to its end with this input.
pub fn run(command: &mut Command, input: &str) -> CommandOutput {
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The command may not read it.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    CommandOutput {
        code: output.status.code().unwrap_or(-1),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

/// The program with these arguments, connecting to this NATS server.
pub fn command_on(url: &str, arguments: &[&str]) -> Command {
    let mut command = command(arguments);
    command.env("NATS_URL", url);
    command
}

/// A bridge that runs with a settings file of the repository. Dropping it stops it.
pub struct BundledBridge {
    child: Child,
    dir: TempDir,
}

impl BundledBridge {
    pub async fn start(server: &NatsServer, settings: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a2a-bridge.yaml");
        std::fs::write(&file, settings).unwrap();
        let log = std::fs::File::create(dir.path().join("log")).unwrap();
        let child = command(&["run", "--config"])
            .arg(&file)
            .env("NATS_URL", server.url())
            .env("A2A_BRIDGE_BIN", program())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        Self { child, dir }
    }

    /// A bridge with the demo agent of `config/demo.yaml`, ready to be called.
    pub async fn demo(server: &NatsServer) -> Self {
        let bridge = Self::start(server, &demo_settings()).await;
        bridge.until_ready(&server.url(), &[]).await;
        bridge
    }

    /// Waits until `agents` with these arguments lists the bridge's agents as ready.
    pub async fn until_ready(&self, url: &str, arguments: &[&str]) {
        eventually(|| async {
            let output = run(command_on(url, &["agents", "--json"]).args(arguments), "");
            let agents: Value = serde_json::from_str(&output.out).ok()?;
            let agents = agents.as_array().filter(|agents| !agents.is_empty())?;
            agents.iter().all(|agent| agent["state"] == "ready").then_some(())
        })
        .await;
    }

    pub fn signal(&self, signal: Signal) {
        send_signal(&self.child, signal);
    }

    /// Ends the bridge with SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }
}

impl Drop for BundledBridge {
    fn drop(&mut self) {
        send_signal(&self.child, Signal::SIGTERM);
        let _ = self.child.wait();
        if std::thread::panicking() {
            println!("the bridge's log:\n{}", self.log());
        }
    }
}

/// Sends a signal to a child that has not been waited for.
pub fn send_signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(child.id().try_into().unwrap());
    kill(pid, signal).unwrap();
}

pub async fn exit_status(child: &mut Child) -> ExitStatus {
    eventually(|| {
        let status = child.try_wait().unwrap();
        async move { status }
    })
    .await
}

/// A file of the repository.
pub fn repository_file(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// `config/demo.yaml` with a free port.
pub fn demo_settings() -> String {
    repository_file("config/demo.yaml").replace("${DEMO_PORT:-9000}", &free_port().to_string())
}
