//! A bridge as its own process, agents with a mark, and looking at what runs.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use a2a_bridge::internal::AgentReport;
use a2a_bridge::internal::procfs::{self, Stat};
use a2a_bridge::internal::{Subjects, Token};
use async_nats::Client;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use super::eventually::eventually;
use super::nats::NatsServer;

/// Long enough for a machine that does much else.
pub const SOON: Duration = Duration::from_secs(20);
/// The variable that marks the processes of one test.
pub const MARK: &str = "A2A_TEST_MARK";

/// The program under test.
pub fn program() -> &'static str {
    env!("CARGO_BIN_EXE_a2a-bridge")
}

/// A settings file, a broker, and whatever bridge runs there now. Dropping it ends everything.
pub struct Site {
    pub server: NatsServer,
    pub client: Client,
    pub mark: String,
    dir: TempDir,
    bridge: Option<Child>,
}

impl Site {
    pub async fn new() -> Self {
        let server = NatsServer::start().await;
        let client = server.connect().await;
        Self {
            server,
            client,
            mark: uuid::Uuid::new_v4().to_string(),
            dir: tempfile::tempdir().unwrap(),
            bridge: None,
        }
    }

    pub fn folder(&self) -> &Path {
        self.dir.path()
    }

    pub fn file(&self) -> PathBuf {
        self.dir.path().join("bridge.yaml")
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Writes the settings: each agent is a block of lines below its name.
    pub fn settings(&self, agents: &[(&str, &str)]) {
        self.settings_with("", agents);
    }

    pub fn settings_with(&self, head: &str, agents: &[(&str, &str)]) {
        self.settings_at(&self.server.url(), head, agents);
    }

    /// The same for a bridge that finds its broker elsewhere.
    pub fn settings_at(&self, url: &str, head: &str, agents: &[(&str, &str)]) {
        let mut text = format!("{head}\nnats: {{ url: '{url}' }}\nshutdown_grace: 1s\nagents:\n");
        for (name, lines) in agents {
            text.push_str(&format!("  - name: {name}\n"));
            if lines.contains("command:") {
                text.push_str(&format!("    env: {{ {MARK}: '{}' }}\n", self.mark));
            }
            for line in lines.lines() {
                text.push_str(&format!("    {line}\n"));
            }
        }
        std::fs::write(self.file(), text).unwrap();
    }

    /// Starts a bridge.
    pub fn start(&mut self) -> i32 {
        self.spawn(self.command(&["run"]), self.log_file())
    }

    /// Starts a bridge that logs elsewhere.
    pub fn start_with_stderr(&mut self, stderr: Stdio) -> i32 {
        self.spawn(self.command(&["run"]), stderr)
    }

    /// Starts a bridge by way of another command, which gets the bridge's as its last arguments.
    pub fn start_by(&mut self, way: &[&str]) -> i32 {
        let bridge = self.command(&["run"]);
        let mut command = Command::new(way[0]);
        command.args(&way[1..]).arg(bridge.get_program()).args(bridge.get_args());
        command.env("XDG_RUNTIME_DIR", self.dir.path());
        self.spawn(command, self.log_file())
    }

    fn log_file(&self) -> Stdio {
        let path = self.dir.path().join("log");
        File::options().create(true).append(true).open(path).unwrap().into()
    }

    fn spawn(&mut self, mut command: Command, stderr: Stdio) -> i32 {
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        self.bridge = Some(child);
        pid
    }

    /// How a command finds the mesh.
    pub fn connection(&self) -> [String; 2] {
        ["--nats".into(), self.server.url()]
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.args(arguments);
        match arguments {
            ["run" | "check", ..] => command.arg("--config").arg(self.file()),
            _ => command.args(self.connection()),
        };
        command
            // Records of this test only.
            .env("XDG_RUNTIME_DIR", self.dir.path());
        command
    }

    /// Runs a command of the program: exit code, stdout, stderr.
    pub async fn run(&self, arguments: &[&str]) -> (i32, String, String) {
        let mut command = tokio::process::Command::from(self.command(arguments));
        let output = command.stdin(Stdio::null()).output().await.unwrap();
        (
            output.status.code().unwrap_or(-1),
            String::from_utf8_lossy(&output.stdout).into_owned(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    }

    pub fn pid(&self) -> i32 {
        self.bridge.as_ref().map_or(0, |bridge| i32::try_from(bridge.id()).unwrap())
    }

    /// Sends the bridge a signal.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// Waits until the bridge has ended; its exit code.
    pub async fn ended(&mut self) -> Option<i32> {
        let mut bridge = self.bridge.take().unwrap();
        tokio::task::spawn_blocking(move || bridge.wait().unwrap().code()).await.unwrap()
    }

    pub async fn kill_9(&mut self) {
        self.signal(Signal::SIGKILL);
        self.ended().await;
    }

    pub async fn stop(&mut self) -> Option<i32> {
        self.signal(Signal::SIGTERM);
        self.ended().await
    }

    /// What the bridge says of an agent; `None` before it does.
    pub async fn show(&self, agent: &str) -> Option<AgentReport> {
        let subject = Subjects::new("a2a").unwrap().control(&Token::new(agent), "show");
        let reply =
            tokio::time::timeout(Duration::from_secs(2), self.client.request(subject, "".into())).await;
        serde_json::from_slice(&reply.ok()?.ok()?.payload).ok()
    }

    pub async fn until(
        &self,
        agent: &str,
        limit: Duration,
        is: impl Fn(&AgentReport) -> bool,
    ) -> AgentReport {
        let began = Instant::now();
        loop {
            let report = self.show(agent).await;
            if let Some(report) = report.as_ref().filter(|report| is(report)) {
                return report.clone();
            }
            assert!(began.elapsed() < limit, "after {limit:?}: {report:#?}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub async fn until_state(&self, agent: &str, state: &str) -> AgentReport {
        self.until(agent, SOON, |report| report.state == state).await
    }

    /// The living processes of this test's agents, guards included.
    pub fn processes(&self) -> Vec<i32> {
        marked(&self.mark)
    }

    pub async fn until_nothing_runs(&self, limit: Duration) -> Duration {
        let began = Instant::now();
        eventually(limit, || async { self.processes().is_empty().then_some(()) }).await;
        began.elapsed()
    }
}

/// The living processes with this mark.
pub fn marked(mark: &str) -> Vec<i32> {
    procfs::all()
        .filter(|pid| procfs::variable(*pid, MARK).as_deref() == Some(mark))
        .filter(|pid| Stat::read(*pid).is_some_and(|stat| !stat.has_exited()))
        .collect()
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some(mut bridge) = self.bridge.take() {
            let _ = bridge.kill();
            let _ = bridge.wait();
        }
        for pid in self.processes() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// Lines for an agent that is the demo agent with these switches.
pub fn demo(switches: &str) -> String {
    format!(
        "url: http://127.0.0.1:{{port}}\nport: auto\ncommand: {} demo-agent --port {{port}} {switches}",
        program()
    )
}

/// Lines for an agent that is a shell line; `DEMO` in it is the demo agent on its port.
pub fn shell(line: &str) -> String {
    let line = line.replace("DEMO", &format!("{} demo-agent --port {{port}}", program()));
    format!("url: http://127.0.0.1:{{port}}\nport: auto\nshell: true\ncommand: '{line}'")
}
