//! A bridge whose process a test starts, kills and starts again, and the processes of its agents.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use a2a_bridge::internal::AgentReport;
use a2a_bridge::internal::procfs::Stat;
use a2a_bridge::internal::{Subjects, Token};
use async_nats::Client;
use nix::sys::signal::Signal;
use tempfile::TempDir;

use super::eventually::{DEADLINE, eventually_within, wait_until};
use super::nats::NatsServer;
use super::processes::{self, MARK, guards, marked, program};

/// A folder with a settings file, a NATS server, and at most one running bridge. Dropping it ends them all.
pub struct Site {
    pub server: NatsServer,
    pub client: Client,
    pub mark: String,
    dir: TempDir,
    bridge: Option<Child>,
    /// The pids of all bridges so far.
    bridges: Vec<i32>,
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
            bridges: Vec::new(),
        }
    }

    /// A site with these agents and a running bridge.
    pub async fn running(agents: &[(&str, &str)]) -> Self {
        let mut site = Self::new().await;
        site.settings(agents);
        site.start();
        site
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

    /// Writes the settings: each agent is a name and the lines below it.
    pub fn settings(&self, agents: &[(&str, &str)]) {
        self.settings_with("", agents);
    }

    pub fn settings_with(&self, head: &str, agents: &[(&str, &str)]) {
        self.settings_at(&self.server.url(), head, agents);
    }

    /// Writes the settings of a bridge that connects to another NATS URL.
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

    pub fn start(&mut self) -> i32 {
        self.spawn(self.command(&["run"]), self.log_file())
    }

    pub fn start_with_stderr(&mut self, stderr: Stdio) -> i32 {
        self.spawn(self.command(&["run"]), stderr)
    }

    /// Starts a bridge through another command, which gets the bridge's command as its last arguments.
    pub fn start_through(&mut self, wrapper: &[&str]) -> i32 {
        let bridge = self.command(&["run"]);
        let mut command = Command::new(wrapper[0]);
        command.args(&wrapper[1..]).arg(bridge.get_program()).args(bridge.get_args());
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
        self.bridges.push(pid);
        pid
    }

    /// The arguments that connect a command to this NATS server.
    pub fn connection(&self) -> [String; 2] {
        ["--nats".into(), self.server.url()]
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.args(arguments);
        match arguments {
            ["run" | "check" | "health", ..] => command.arg("--config").arg(self.file()),
            _ => command.args(self.connection()),
        };
        // Bridges keep records of their agents there, which other tests must not see.
        command.env("XDG_RUNTIME_DIR", self.dir.path());
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

    /// Stops an agent by command.
    pub async fn stop_agent(&self, agent: &str) {
        let (code, out, error) = self.run(&["agents", "stop", agent]).await;
        assert_eq!(code, 0, "{out}{error}");
    }

    /// Sends the bridge a signal.
    pub fn signal(&self, signal: Signal) {
        processes::signal(self.pid(), signal);
    }

    /// Waits until the bridge has exited; its exit code.
    pub async fn ended(&mut self) -> Option<i32> {
        let mut bridge = self.bridge.take().unwrap();
        tokio::task::spawn_blocking(move || bridge.wait().unwrap().code()).await.unwrap()
    }

    pub async fn kill_9(&mut self) {
        self.signal(Signal::SIGKILL);
        self.ended().await;
    }

    /// Kills the bridge together with the guard of this agent.
    pub async fn kill_9_with_guard_of(&mut self, agent: i32) {
        let guard = guard_of(agent);
        // Both are suspended first, or one of them would see the other die.
        for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
            processes::signal(guard, signal);
            self.signal(signal);
        }
        self.ended().await;
    }

    pub async fn stop(&mut self) -> Option<i32> {
        self.signal(Signal::SIGTERM);
        self.ended().await
    }

    /// The report of the bridge about an agent; `None` while there is none.
    pub async fn show(&self, agent: &str) -> Option<AgentReport> {
        let subject = Subjects::new("a2a").unwrap().control(&Token::new(agent), "show");
        let reply =
            tokio::time::timeout(Duration::from_secs(2), self.client.request(subject, "".into())).await;
        serde_json::from_slice(&reply.ok()?.ok()?.payload).ok()
    }

    pub async fn until(&self, agent: &str, is: impl Fn(&AgentReport) -> bool) -> AgentReport {
        self.until_within(DEADLINE, agent, is).await
    }

    pub async fn until_within(
        &self,
        limit: Duration,
        agent: &str,
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
        self.until(agent, |report| report.state == state).await
    }

    /// Waits until the agent is ready after this many restarts.
    pub async fn until_restarted(&self, agent: &str, restarts: u32) -> AgentReport {
        self.until(agent, |report| report.state == "ready" && report.restarts == restarts).await
    }

    pub async fn until_logged(&self, text: &str) {
        let began = Instant::now();
        while !self.log().contains(text) {
            assert!(began.elapsed() < DEADLINE, "not logged: {text}\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until this file exists in the folder of the site.
    pub async fn until_file(&self, name: &str) {
        let path = self.dir.path().join(name);
        wait_until(|| async { path.exists() }).await;
    }

    /// The living processes of this test's agents, and their guards.
    pub fn processes(&self) -> Vec<i32> {
        let mut all = marked(&self.mark);
        all.extend(guards(&self.bridges));
        all
    }

    /// Waits until no process of an agent and no guard runs; how long that took.
    pub async fn until_nothing_runs(&self, limit: Duration) -> Duration {
        let began = Instant::now();
        eventually_within(limit, || async { self.processes().is_empty().then_some(()) }).await;
        began.elapsed()
    }
}

/// How long the back-off of an agent takes in total.
pub fn back_off(report: &AgentReport) -> Duration {
    report.next_try.unwrap().0.duration_since(report.since.0).unwrap()
}

/// The guard of an agent is the parent of its process.
pub fn guard_of(agent: i32) -> i32 {
    Stat::read(agent).unwrap().parent
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some(mut bridge) = self.bridge.take() {
            let _ = bridge.kill();
            let _ = bridge.wait();
        }
        for pid in self.processes() {
            processes::signal(pid, Signal::SIGKILL);
        }
    }
}

/// The settings of a demo agent with these switches.
pub fn demo(switches: &str) -> String {
    format!(
        "url: http://127.0.0.1:{{port}}\nport: auto\ncommand: {} demo-agent --port {{port}} {switches}",
        program()
    )
}

/// The settings of a demo agent on this port of this host, with a token that no other process may get.
pub fn demo_at(host: &str, port: u16, switches: &str) -> String {
    let command = format!("{} demo-agent --port {port} {switches}", program());
    format!("url: http://{host}:{port}\ncommand: {command}\nbearer_token: s3cret-token")
}

/// The settings of an agent that is a shell line; `DEMO` in it is the demo agent on its port.
pub fn shell(line: &str) -> String {
    let line = line.replace("DEMO", &format!("{} demo-agent --port {{port}}", program()));
    format!("url: http://127.0.0.1:{{port}}\nport: auto\nshell: true\ncommand: '{line}'")
}
