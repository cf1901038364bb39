//! Starts and stops the processes of a benchmark, and reads their CPU time and memory from `/proc`.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use async_nats::Client;
use futures_util::StreamExt as _;

const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A process that stops when this value is dropped.
pub struct Process {
    child: Child,
    /// The first line of its output, if it is a role of the benchmark.
    first_line: String,
}

impl Process {
    pub fn start(command: &mut Command) -> anyhow::Result<Self> {
        let child = command
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {:?}", command.get_program()))?;
        Ok(Self { child, first_line: String::new() })
    }

    /// Starts a role of the benchmark itself, and waits for the line that it prints when it is ready.
    fn start_role(mut command: Command, arguments: &[&str]) -> anyhow::Result<Self> {
        let mut process = Self::start(command.args(arguments).stdout(Stdio::piped()))?;
        let stdout = process.child.stdout.take().context("no stdout")?;
        BufReader::new(stdout).read_line(&mut process.first_line)?;
        process.first_line.truncate(process.first_line.trim_end().len());
        ensure!(!process.first_line.is_empty(), "{arguments:?} did not start");
        Ok(process)
    }

    /// User and system CPU time of all threads so far. `schedstat` counts nanoseconds, `stat` only
    /// hundredths of a second.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
        let mut nanoseconds = 0;
        for thread in std::fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            // A thread may have exited in the meantime. Worker threads, which do the work, do not exit.
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

    /// The number of entries in a directory of `/proc`: descriptors in `fd`, threads in `task`.
    pub fn entries(&self, directory: &str) -> anyhow::Result<f64> {
        let entries = std::fs::read_dir(format!("/proc/{}/{directory}", self.child.id()))?;
        Ok(entries.count() as f64)
    }

    /// Resident memory in MiB.
    pub fn rss(&self) -> anyhow::Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")).context("no VmRSS")?;
        Ok(kib.trim().parse::<f64>()? / 1024.0)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The executable to run.
#[derive(Clone, Copy)]
pub enum Program {
    /// Built together with the benchmark.
    Bridge,
    /// The executable to compare with (`--baseline`).
    Baseline,
}

/// What all measurements share: a NATS server, an agent, and a connection for the callers.
pub struct Testbed {
    pub client: Client,
    /// The URL of the agent.
    agent_url: String,
    nats_url: String,
    pub folder: PathBuf,
    program: PathBuf,
    baseline: Option<PathBuf>,
    /// A command line in front of those of floor and bridges, such as a profiler.
    pub wrapper: Vec<String>,
    bridge_count: std::cell::Cell<u32>,
    _agent: Process,
    _nats: Process,
}

impl Testbed {
    pub async fn start(baseline: Option<PathBuf>) -> anyhow::Result<Self> {
        let wrapper = std::env::var("BENCH_WRAP").unwrap_or_default();
        let folder = std::env::temp_dir().join(format!("a2a-bench-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let server = std::env::var("NATS_SERVER_BIN").unwrap_or_else(|_| "nats-server".to_owned());
        let nats = Process::start(
            Command::new(server)
                .args(["-a", "127.0.0.1", "-p", "-1", "--ports_file_dir"])
                .arg(&folder)
                .stderr(Stdio::null()),
        )?;
        let nats_url = read_nats_url(&folder).await?;
        let agent = Process::start_role(Command::new(std::env::current_exe()?), &["agent"])?;
        Ok(Self {
            client: async_nats::connect(&nats_url).await?,
            agent_url: agent.first_line.clone(),
            nats_url,
            folder,
            program: std::env::current_exe()?.with_file_name("a2a-bridge"),
            baseline,
            wrapper: wrapper.split_whitespace().map(str::to_owned).collect(),
            bridge_count: std::cell::Cell::new(0),
            _agent: agent,
            _nats: nats,
        })
    }

    /// The bridge, and the baseline if there is one.
    pub fn programs(&self) -> &'static [Program] {
        if self.baseline.is_some() { &[Program::Bridge, Program::Baseline] } else { &[Program::Bridge] }
    }

    /// A floor in front of the agent that answers immediately.
    pub fn floor(&self, events: u32) -> anyhow::Result<Process> {
        self.floor_to(&format!("{}/echo/0", self.agent_url), &format!("{}/stream/{events}", self.agent_url))
    }

    /// A floor in front of the agent that answers after a release.
    pub fn slow_floor(&self) -> anyhow::Result<Process> {
        self.floor_to(&format!("{}/slow/0", self.agent_url), &format!("{}/stream/1", self.agent_url))
    }

    fn floor_to(&self, call: &str, stream: &str) -> anyhow::Result<Process> {
        Process::start_role(self.command(&std::env::current_exe()?), &["floor", &self.nats_url, call, stream])
    }

    /// A bridge of each program with the agents at these paths.
    pub async fn bridges(&self, paths: &[String]) -> anyhow::Result<Vec<Bridge>> {
        let mut bridges = Vec::new();
        for &program in self.programs() {
            bridges.push(self.bridge(program, paths).await?);
        }
        Ok(bridges)
    }

    /// A new bridge with the agents at these paths; all their actions are published.
    pub async fn bridge(&self, program: Program, paths: &[String]) -> anyhow::Result<Bridge> {
        let agent = |path: &String| format!("url: \"{}{path}\"", self.agent_url);
        self.bridge_with(program, &paths.iter().map(agent).collect::<Vec<_>>(), "go").await
    }

    /// A new bridge that launches the demo agent of the program under test, for its supervisor skill.
    pub async fn supervisor(&self, program: Program) -> anyhow::Result<Bridge> {
        let agent = format!(
            "command: [\"{}\", demo-agent, --port, \"{{port}}\"], port: auto, url: \"http://127.0.0.1:{{port}}\"",
            self.program.display()
        );
        self.bridge_with(program, &[agent], "supervisor").await
    }

    /// A new bridge with agents of these settings. Callers use one `action` of each agent.
    async fn bridge_with(&self, program: Program, agents: &[String], action: &str) -> anyhow::Result<Bridge> {
        let program = match program {
            Program::Bridge => &self.program,
            Program::Baseline => self.baseline.as_ref().context("there is no baseline")?,
        };
        let number = self.bridge_count.replace(self.bridge_count.get() + 1);
        let prefix = format!("bench{number}");
        let mut configuration =
            format!("nats: {{url: \"{}\", subject_prefix: {prefix}}}\nagents:\n", self.nats_url);
        for (index, agent) in agents.iter().enumerate() {
            configuration += &format!("  - {{name: agent{index}, max_in_flight: 20000, {agent}}}\n");
        }
        let file = self.folder.join(format!("{prefix}.yaml"));
        std::fs::write(&file, configuration)?;
        let mut registry = self.client.subscribe(format!("{prefix}.registry.*")).await?;
        self.client.flush().await?;
        let log = std::fs::File::create(self.folder.join(format!("{prefix}.log")))?;
        let start = Instant::now();
        let process =
            Process::start(self.command(program).arg("run").arg("--config").arg(&file).stderr(log))?;
        let mut first_action = None;
        let mut ready = std::collections::HashSet::new();
        while ready.len() < agents.len() {
            let entry = tokio::time::timeout(START_TIMEOUT, registry.next()).await;
            let entry = entry
                .context("the agents of the bridge did not become ready")?
                .context("the connection is closed")?;
            if serde_json::from_slice::<serde_json::Value>(&entry.payload)?["state"] == "ready" {
                first_action.get_or_insert_with(|| start.elapsed());
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

    fn command(&self, program: &Path) -> Command {
        match self.wrapper.split_first() {
            None => Command::new(program),
            Some((wrapper, arguments)) => {
                let mut command = Command::new(wrapper);
                command.args(arguments).arg(program);
                command
            }
        }
    }

    /// The number of calls that wait at the slow agent.
    pub async fn waiting(&self) -> anyhow::Result<usize> {
        Ok(reqwest::get(format!("{}/waiting", self.agent_url)).await?.text().await?.parse()?)
    }

    /// Makes calls to the slow agent wait.
    pub async fn hold(&self) -> anyhow::Result<()> {
        self.post("hold").await
    }

    /// Lets the slow agent answer.
    pub async fn release(&self) -> anyhow::Result<()> {
        self.post("release").await
    }

    async fn post(&self, path: &str) -> anyhow::Result<()> {
        reqwest::Client::new().post(format!("{}/{path}", self.agent_url)).send().await?;
        Ok(())
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A bridge under test.
pub struct Bridge {
    pub process: Process,
    /// The action of each agent.
    pub subjects: Vec<String>,
    /// Time from its start until the first agent's action was published.
    pub first_action: Duration,
}

async fn read_nats_url(folder: &Path) -> anyhow::Result<String> {
    let start = Instant::now();
    while start.elapsed() < START_TIMEOUT {
        for entry in std::fs::read_dir(folder)?.flatten() {
            let text = std::fs::read_to_string(entry.path())?;
            // nats-server may not have written all of it yet.
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
