//! The processes: started, looked at in `/proc`, ended.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use async_nats::Client;
use futures_util::StreamExt as _;

const PATIENCE: Duration = Duration::from_secs(60);

/// A process that ends with its owner.
pub struct Process {
    child: Child,
    /// The first line that it wrote.
    pub said: String,
}

impl Process {
    fn start(command: &mut Command) -> anyhow::Result<Self> {
        let child = command
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {:?}", command.get_program()))?;
        Ok(Self { child, said: String::new() })
    }

    /// Starts a part of the benchmark itself, and waits until it says that it is there.
    fn start_part(mut command: Command, arguments: &[&str]) -> anyhow::Result<Self> {
        let mut this = Self::start(command.args(arguments).stdout(Stdio::piped()))?;
        let stdout = this.child.stdout.take().context("no stdout")?;
        BufReader::new(stdout).read_line(&mut this.said)?;
        this.said = this.said.trim().to_owned();
        ensure!(!this.said.is_empty(), "{arguments:?} did not start");
        Ok(this)
    }

    /// CPU time so far of all its threads, user and system. `schedstat` counts nanoseconds, where `stat`
    /// counts hundredths of a second.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
        let mut nanoseconds = 0;
        for thread in std::fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            // A thread that has ended since is no error: worker threads, which do the work, do not end.
            let Ok(stat) = std::fs::read_to_string(thread?.path().join("schedstat")) else { continue };
            nanoseconds += stat.split(' ').next().context("schedstat is empty")?.parse::<u64>()?;
        }
        Ok(Duration::from_nanos(nanoseconds))
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends SIGTERM first, so that a profiler around the process can write its results.
    pub fn stop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        for _ in 0..500 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Resident memory in MiB.
    pub fn rss(&self) -> anyhow::Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).context("no VmRSS")?;
        Ok(kib.trim().parse::<f64>()? / 1024.0)
    }
}

/// Which executable to run.
#[derive(Clone, Copy)]
pub enum Program {
    /// The one that was built with the benchmark.
    Bridge,
    /// The one that it is compared with (`--baseline`).
    Baseline,
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What all measurements share: a server, an agent, a connection for the callers.
pub struct Stage {
    pub client: Client,
    pub agent: String,
    nats_url: String,
    pub folder: PathBuf,
    program: PathBuf,
    baseline: Option<PathBuf>,
    /// A command line that is put before those of floor and bridges.
    wrap: Vec<String>,
    bridges: std::cell::Cell<u32>,
    _agent: Process,
    _nats: Process,
}

impl Stage {
    pub async fn start(baseline: Option<PathBuf>) -> anyhow::Result<Self> {
        let wrap = std::env::var("BENCH_WRAP").unwrap_or_default();
        let folder = std::env::temp_dir().join(format!("a2a-bench-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let server = std::env::var("NATS_SERVER_BIN").unwrap_or_else(|_| "nats-server".to_owned());
        let nats = Process::start(
            Command::new(server)
                .args(["-a", "127.0.0.1", "-p", "-1", "--ports_file_dir"])
                .arg(&folder)
                .stderr(Stdio::null()),
        )?;
        let nats_url = ports_file(&folder).await?;
        let agent = Process::start_part(Command::new(std::env::current_exe()?), &["agent"])?;
        Ok(Self {
            client: async_nats::connect(&nats_url).await?,
            agent: agent.said.clone(),
            nats_url,
            folder,
            program: std::env::current_exe()?.with_file_name("a2a-bridge"),
            baseline,
            wrap: wrap.split_whitespace().map(str::to_owned).collect(),
            bridges: std::cell::Cell::new(0),
            _agent: agent,
            _nats: nats,
        })
    }

    /// Puts a command line before those of floor and bridges that are started from now on.
    pub fn wrap(&mut self, command: Vec<String>) {
        self.wrap = command;
    }

    /// The bridge, and the baseline if there is one.
    pub fn programs(&self) -> &'static [Program] {
        if self.baseline.is_some() { &[Program::Bridge, Program::Baseline] } else { &[Program::Bridge] }
    }

    /// A floor to the agent that answers at once.
    pub fn floor(&self, events: u32) -> anyhow::Result<Process> {
        self.floor_to(&format!("{}/echo/0", self.agent), &format!("{}/stream/{events}", self.agent))
    }

    /// A floor to the agent that answers when it is released.
    pub fn slow_floor(&self) -> anyhow::Result<Process> {
        self.floor_to(&format!("{}/slow/0", self.agent), &format!("{}/stream/1", self.agent))
    }

    fn floor_to(&self, call: &str, stream: &str) -> anyhow::Result<Process> {
        Process::start_part(self.wrapped(&std::env::current_exe()?), &["floor", &self.nats_url, call, stream])
    }

    /// A bridge of each program to the agents at these paths.
    pub async fn bridges(&self, paths: &[String]) -> anyhow::Result<Vec<Bridge>> {
        let mut bridges = Vec::new();
        for &program in self.programs() {
            bridges.push(self.bridge(program, paths).await?);
        }
        Ok(bridges)
    }

    /// A fresh bridge to the agents at these paths, with every action published.
    pub async fn bridge(&self, program: Program, paths: &[String]) -> anyhow::Result<Bridge> {
        let at = |path: &String| format!("url: \"{}{path}\"", self.agent);
        self.bridge_with(program, &paths.iter().map(at).collect::<Vec<_>>(), "go").await
    }

    /// A fresh bridge that runs the demo agent of the new program: its supervisor.
    pub async fn supervisor(&self, program: Program) -> anyhow::Result<Bridge> {
        let agent = format!(
            "command: [\"{}\", demo-agent, --port, \"{{port}}\"], port: auto, url: \"http://127.0.0.1:{{port}}\"",
            self.program.display()
        );
        self.bridge_with(program, &[agent], "supervisor").await
    }

    /// A fresh bridge to agents with these settings, of whose actions one is called.
    async fn bridge_with(&self, program: Program, agents: &[String], action: &str) -> anyhow::Result<Bridge> {
        let program = match program {
            Program::Bridge => &self.program,
            Program::Baseline => self.baseline.as_ref().context("there is no baseline")?,
        };
        let number = self.bridges.replace(self.bridges.get() + 1);
        let prefix = format!("bench{number}");
        let mut settings =
            format!("nats: {{url: \"{}\", subject_prefix: {prefix}}}\nagents:\n", self.nats_url);
        for (index, agent) in agents.iter().enumerate() {
            settings += &format!("  - {{name: agent{index}, max_in_flight: 20000, {agent}}}\n");
        }
        let file = self.folder.join(format!("{prefix}.yaml"));
        std::fs::write(&file, settings)?;
        let mut registry = self.client.subscribe(format!("{prefix}.registry.*")).await?;
        self.client.flush().await?;
        let log = std::fs::File::create(self.folder.join(format!("{prefix}.log")))?;
        let began = Instant::now();
        let process =
            Process::start(self.wrapped(program).arg("run").arg("--config").arg(&file).stderr(log))?;
        let mut first_action = None;
        let mut ready = std::collections::HashSet::new();
        while ready.len() < agents.len() {
            let entry = tokio::time::timeout(PATIENCE, registry.next()).await;
            let entry = entry.context("the bridge's agents do not get ready")?.context("closed")?;
            if serde_json::from_slice::<serde_json::Value>(&entry.payload)?["state"] == "ready" {
                first_action.get_or_insert_with(|| began.elapsed());
                ready.insert(entry.subject.to_string());
            }
        }
        let subjects = (0..agents.len()).map(|index| format!("{prefix}.action.agent{index}.{action}"));
        Ok(Bridge {
            process,
            subjects: subjects.collect(),
            first_action: first_action.context("a bridge without agents")?,
        })
    }

    fn wrapped(&self, program: &Path) -> Command {
        match self.wrap.split_first() {
            None => Command::new(program),
            Some((first, words)) => {
                let mut command = Command::new(first);
                command.args(words).arg(program);
                command
            }
        }
    }

    /// How many calls wait at the slow agent.
    pub async fn waiting(&self) -> anyhow::Result<usize> {
        Ok(reqwest::get(format!("{}/waiting", self.agent)).await?.text().await?.parse()?)
    }

    /// Has the slow agent wait.
    pub async fn hold(&self) -> anyhow::Result<()> {
        reqwest::Client::new().post(format!("{}/hold", self.agent)).send().await?;
        Ok(())
    }

    /// Lets the slow agent answer.
    pub async fn release(&self) -> anyhow::Result<()> {
        reqwest::Client::new().post(format!("{}/release", self.agent)).send().await?;
        Ok(())
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A bridge under test.
pub struct Bridge {
    pub process: Process,
    /// The action of each agent.
    pub subjects: Vec<String>,
    /// From its start until the first agent's action was published.
    pub first_action: Duration,
}

async fn ports_file(folder: &Path) -> anyhow::Result<String> {
    let began = Instant::now();
    while began.elapsed() < PATIENCE {
        for entry in std::fs::read_dir(folder)?.flatten() {
            let text = std::fs::read_to_string(entry.path())?;
            // It may be half written.
            if let Ok(ports) = serde_json::from_str::<serde_json::Value>(&text)
                && let Some(url) = ports["nats"][0].as_str()
            {
                return Ok(url.to_owned());
            }
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    bail!("nats-server did not start");
}
