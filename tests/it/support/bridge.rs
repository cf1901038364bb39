//! The bridge as operators run it: a process with a settings file and a log, and callers on its NATS server.

use std::fs::File;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use async_nats::{Client, Subscriber};
use nix::sys::signal::Signal;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use super::caller::{Call, Inbox, IntoBody};
use super::demo_agent::request_agent;
use super::eventually::{eventually, wait_until, within_deadline};
use super::nats::NatsServer;
use super::peer::Peer;
use super::processes::{self, MARK, free_port, program};
use super::updates::TaskUpdates;

/// How long a bridge may take to stop at the end of a test.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);

/// How long a service may take to reply to PING, INFO and STATS.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(2);

/// An entry under `agents` in the settings.
pub struct AgentSettings(Map<String, Value>);

/// A demo agent that the bridge launches, with these switches.
pub fn launched(name: &str, switches: &[&str]) -> AgentSettings {
    let port = free_port();
    let mut command =
        vec![program().to_owned(), "demo-agent".to_owned(), "--port".to_owned(), port.to_string()];
    command.extend(switches.iter().map(|&switch| switch.to_owned()));
    attached(name, &format!("http://127.0.0.1:{port}")).set("command", json!(command))
}

/// A demo agent that each replica launches at a free port of its own.
pub fn launched_at_any_port(name: &str, switches: &[&str]) -> AgentSettings {
    let mut command = vec![program(), "demo-agent", "--port", "{port}"];
    command.extend(switches);
    attached(name, "http://127.0.0.1:{port}").set("command", json!(command)).set("port", "auto")
}

/// An agent that the bridge does not launch.
pub fn attached(name: &str, url: &str) -> AgentSettings {
    let settings = json!({"name": name, "url": url});
    AgentSettings(settings.as_object().cloned().unwrap_or_default())
}

impl AgentSettings {
    pub fn into_value(self) -> Value {
        Value::Object(self.0)
    }

    pub fn set(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.0.insert(key.to_owned(), value.into());
        self
    }
}

/// The settings of a bridge that is not started yet.
pub struct BridgeBuilder {
    agents: Vec<AgentSettings>,
    nats: Map<String, Value>,
    more: Map<String, Value>,
    grace: String,
    log: String,
    variables: Vec<(String, String)>,
}

impl BridgeBuilder {
    pub fn and(mut self, agent: AgentSettings) -> Self {
        self.agents.push(agent);
        self
    }

    /// A setting below `nats`.
    pub fn nats(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.nats.insert(key.to_owned(), value.into());
        self
    }

    /// A setting beside `nats` and `agents`.
    pub fn set(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.more.insert(key.to_owned(), value.into());
        self
    }

    pub fn shutdown_grace(mut self, grace: &str) -> Self {
        self.grace = grace.to_owned();
        self
    }

    /// The filter of the log.
    pub fn log(mut self, filter: &str) -> Self {
        self.log = filter.to_owned();
        self
    }

    /// An environment variable of the bridge.
    pub fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts a server and the bridge, and waits until all agents are ready.
    pub async fn start(self) -> Bridge {
        self.start_on(NatsServer::start().await).await
    }

    /// Starts the bridge on this server, and waits until all agents are ready.
    pub async fn start_on(self, nats: NatsServer) -> Bridge {
        let names: Vec<_> = self.agents.iter().map(|agent| agent.0["name"].clone()).collect();
        let bridge = self.start_early_on(nats).await;
        for name in names {
            bridge.until(name.as_str().unwrap(), "ready").await;
        }
        bridge
    }

    /// Starts a server and the bridge, and waits until the bridge serves, whether its agents are ready or not.
    pub async fn start_early(self) -> Bridge {
        self.start_early_on(NatsServer::start().await).await
    }

    async fn start_early_on(mut self, nats: NatsServer) -> Bridge {
        let mark = uuid::Uuid::new_v4().to_string();
        let prefix = format!("it-{}", fastrand::u32(..));
        self.nats.entry("url").or_insert_with(|| nats.url().into());
        self.nats.entry("subject_prefix").or_insert_with(|| prefix.clone().into());
        let prefix = self.nats["subject_prefix"].as_str().unwrap().to_owned();
        let mut agents = Vec::new();
        for AgentSettings(mut agent) in self.agents {
            if agent.contains_key("command") {
                let environment = agent.entry("env").or_insert_with(|| json!({}));
                environment[MARK] = mark.clone().into();
            }
            agents.push(Value::Object(agent));
        }
        let mut settings = json!({"nats": self.nats, "agents": agents, "shutdown_grace": self.grace});
        settings.as_object_mut().unwrap().append(&mut self.more);

        let dir = tempfile::tempdir().expect("a folder for the settings");
        let file = dir.path().join("bridge.yaml");
        std::fs::write(&file, format!("{settings:#}")).expect("the settings are written");
        let client = nats.connect().await;
        let registry = client.subscribe(format!("{prefix}.registry.*")).await.unwrap();
        client.flush().await.unwrap();
        let log = dir.path().join("bridge.log");
        let child = Command::new(program())
            .args(["run", "--config"])
            .arg(&file)
            .env("A2A_BRIDGE_LOG", &self.log)
            .envs(self.variables)
            .stdin(Stdio::null())
            .stdout(File::create(dir.path().join("bridge.out")).unwrap())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .expect("the bridge starts");
        let bridge = Bridge { is_killed: false, child, log, client, prefix, registry, mark, nats, dir };
        bridge.until_logged("serving; stop with Ctrl-C").await;
        bridge
    }
}

/// A running bridge with a server of its own. Dropping it stops it, and checks that no process is left.
pub struct Bridge {
    /// Whether the test has killed it.
    is_killed: bool,
    child: Child,
    log: PathBuf,
    pub client: Client,
    pub prefix: String,
    /// All announcements in the registry since the start.
    pub registry: Subscriber,
    mark: String,
    pub nats: NatsServer,
    dir: TempDir,
}

impl Bridge {
    pub fn with(agent: AgentSettings) -> BridgeBuilder {
        Self::without_agents().and(agent)
    }

    pub fn without_agents() -> BridgeBuilder {
        BridgeBuilder {
            agents: Vec::new(),
            nats: Map::new(),
            more: Map::new(),
            grace: "500ms".into(),
            log: "info,a2a_bridge=debug".into(),
            variables: Vec::new(),
        }
    }

    /// A running bridge that launched one demo agent, called `demo`.
    pub async fn with_demo(switches: &[&str]) -> Self {
        Self::with(launched("demo", switches)).start().await
    }

    /// A running bridge for one fake agent, called `peer`.
    pub async fn with_peer(peer: &Peer) -> Self {
        Self::with(attached("peer", &peer.url())).start().await
    }

    /// A call of an action, as in `demo.echo`.
    pub fn call(&self, action: &str, body: impl IntoBody) -> Call {
        Call::new(&self.client, self.subject(action), body)
    }

    /// A call with nothing but a prompt.
    pub fn prompt(&self, action: &str, prompt: &str) -> Call {
        self.call(action, json!({ "prompt": prompt }))
    }

    /// An answer to a follow-up.
    pub fn answer(&self, agent: &str, follow_up_id: &str, response: &str) -> Call {
        let body = json!({"follow_up_id": follow_up_id, "user_response": response});
        self.call(&format!("{agent}.provide_required_input"), body)
    }

    pub fn get_task(&self, agent: &str, task_id: &str) -> Call {
        self.call(&format!("{agent}.get_task"), json!({ "task_id": task_id }))
    }

    pub fn cancel_task(&self, agent: &str, task_id: &str) -> Call {
        self.call(&format!("{agent}.cancel_task"), json!({ "task_id": task_id }))
    }

    pub fn card(&self, agent: &str) -> Call {
        Call::new(&self.client, format!("{}.card.{agent}", self.prefix), "")
    }

    pub fn subject(&self, action: &str) -> String {
        format!("{}.action.{action}", self.prefix)
    }

    /// The reply to `$SRV.<verb>.<name>`; `None` if there are no responders, or if a service that is stopping
    /// has received the request and does not reply any more.
    pub async fn ask(&self, verb: &str, name: &str) -> Option<Value> {
        let question = Call::new(&self.client, format!("$SRV.{verb}.{name}"), "");
        let reply = question.begin().await.reply_within(DISCOVERY_TIMEOUT).await?;
        (!reply.is_no_responders()).then_some(reply.body)
    }

    /// The number of replies to `$SRV.<verb>.<name>`: that of the replicas.
    pub async fn ask_all(&self, verb: &str, name: &str) -> usize {
        let mut inbox = Call::new(&self.client, format!("$SRV.{verb}.{name}"), "").begin().await;
        let mut replies = 0;
        while let Some(reply) = inbox.reply_within(Duration::from_millis(200)).await {
            replies += usize::from(!reply.is_no_responders());
        }
        replies
    }

    /// The service of an agent as INFO shows it.
    pub async fn info(&self, agent: &str) -> Value {
        self.ask("INFO", agent).await.expect("the service replies")
    }

    /// The state of an agent as INFO shows it.
    pub async fn state(&self, agent: &str) -> Option<String> {
        let info = self.ask("INFO", agent).await?;
        info["metadata"]["a2a.state"].as_str().map(str::to_owned)
    }

    /// Waits until the agent is in this state; its skills are published in state `ready` only.
    pub async fn until(&self, agent: &str, state: &str) {
        eventually(|| async {
            let info = self.ask("INFO", agent).await?;
            let skills = info["endpoints"].as_array()?.len() > BUILT_IN.len();
            (info["metadata"]["a2a.state"] == state && skills == (state == "ready")).then_some(())
        })
        .await;
    }

    /// Waits until a skill of an unavailable agent is withdrawn. Calls before that get `agent_unavailable`.
    pub async fn until_no_responders(&self, action: &str) {
        eventually(|| async {
            let reply = self.prompt(action, "x").await;
            if reply.is_no_responders() {
                return Some(());
            }
            reply.expect_error("agent_unavailable");
            None
        })
        .await;
    }

    /// Waits until a skill of a replaced or removed agent is withdrawn. Calls before that are served.
    pub async fn until_withdrawn(&self, action: &str) {
        wait_until(|| async { self.prompt(action, "x").await.is_no_responders() }).await;
    }

    /// The names of an agent's endpoints without the built-in ones.
    pub async fn actions(&self, agent: &str) -> Vec<String> {
        let info = self.info(agent).await;
        let endpoints = info["endpoints"].as_array().expect("a list of endpoints");
        let names = endpoints.iter().filter_map(|endpoint| endpoint["name"].as_str());
        let is_built_in = |name: &&str| BUILT_IN.contains(name);
        names.filter(|name| !is_built_in(name)).map(str::to_owned).collect()
    }

    /// The STATS of one endpoint, once they count this many requests.
    pub async fn stats(&self, agent: &str, endpoint: &str, requests: u64) -> Value {
        eventually(|| async {
            let stats = self.ask("STATS", agent).await?;
            let all = stats["endpoints"].as_array()?;
            let found = all.iter().find(|one| one["name"] == endpoint)?.clone();
            (found["num_requests"] == requests).then_some(found)
        })
        .await
    }

    /// The next announcement of `agent` for which the predicate is true.
    pub async fn announced(&mut self, agent: &str, is: impl Fn(&Value) -> bool) -> Value {
        use futures_util::StreamExt as _;
        let wanted = async {
            loop {
                let message = self.registry.next().await.expect("the connection is up");
                let object: Value = serde_json::from_slice(&message.payload).expect("the registry is JSON");
                if object["agent"] == agent && is(&object) {
                    return object;
                }
            }
        };
        within_deadline(wanted).await
    }

    /// Begins a call that takes this many seconds.
    pub async fn begin_slow(&self, agent: &str, seconds: u32) -> Inbox {
        let call = self.prompt(&format!("{agent}.slow"), &seconds.to_string());
        call.begin().await
    }

    /// The id of the one task that a demo agent works on, once the bridge knows it. The agent must return
    /// tasks at once (`--ignore-blocking`), or the bridge learns the id only at the end of the task.
    pub async fn working_task(&self, agent: &str) -> String {
        eventually(|| async {
            let task = self.tasks(agent).await.into_iter().find(is_working)?;
            let id = task["id"].as_str()?.to_owned();
            self.get_task(agent, &id).await.is("WORKING").then_some(id)
        })
        .await
    }

    /// Waits until a demo agent works on a task.
    pub async fn until_working(&self, agent: &str) {
        wait_until(|| async { self.tasks(agent).await.iter().any(is_working) }).await;
    }

    /// All tasks of a demo agent of A2A 1.0, as the agent itself lists them.
    pub async fn tasks(&self, agent: &str) -> Vec<Value> {
        let card = self.card(agent).await;
        let url = card["supportedInterfaces"][0]["url"].as_str().expect("an address");
        let tasks = request_agent(url, "ListTasks", json!({})).await;
        tasks["tasks"].as_array().cloned().unwrap_or_default()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn settings_file(&self) -> PathBuf {
        self.dir.path().join("bridge.yaml")
    }

    pub fn stdout(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("bridge.out")).unwrap_or_default()
    }

    /// The processes of its agents, without the guards: those are the bridge's own.
    pub fn launched(&self) -> Vec<i32> {
        processes::marked(&self.mark)
    }

    pub fn kill_agents(&self) {
        for pid in self.launched() {
            processes::signal(pid, Signal::SIGKILL);
        }
    }

    pub async fn until_logged(&self, text: &str) {
        wait_until(|| async { self.log().contains(text) }).await;
    }

    pub async fn until_logged_times(&self, text: &str, count: usize) {
        wait_until(|| async { self.log().matches(text).count() >= count }).await;
    }

    /// The updates of all submitted tasks from now on.
    pub async fn task_updates(&self) -> TaskUpdates {
        TaskUpdates::subscribe(&self.client, &self.prefix).await
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        processes::signal(i32::try_from(self.child.id()).unwrap(), signal);
    }

    /// Changes the settings and has the bridge reload them.
    pub fn reload(&self, change: impl Fn(&mut Value)) {
        let file = self.dir.path().join("bridge.yaml");
        let mut settings = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        change(&mut settings);
        std::fs::write(&file, format!("{settings:#}")).unwrap();
        self.signal(Signal::SIGHUP);
    }

    /// Waits until the bridge has exited.
    pub async fn ended(&mut self) -> ExitStatus {
        let child = std::cell::RefCell::new(&mut self.child);
        eventually(|| async { child.borrow_mut().try_wait().unwrap() }).await
    }

    pub async fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.ended().await
    }

    /// The test has killed the bridge, which is no failure.
    pub fn forget(mut self) {
        self.is_killed = true;
    }

    fn end(&mut self) -> Result<(), String> {
        let status = match self.child.try_wait() {
            Ok(Some(status)) => status,
            _ => {
                self.signal(Signal::SIGTERM);
                wait(&mut self.child)?
            }
        };
        let left = self.launched();
        for pid in &left {
            processes::signal(*pid, Signal::SIGKILL);
        }
        match (left.as_slice(), status.code(), status.signal()) {
            ([], Some(0), _) => Ok(()),
            ([], _, Some(_)) if self.is_killed => Ok(()),
            ([], ..) => Err(format!("the bridge ended with {status}")),
            (left, ..) => Err(format!("the bridge left processes behind: {left:?}")),
        }
    }
}

pub fn is_working(task: &Value) -> bool {
    task["status"]["state"] == "TASK_STATE_WORKING"
}

/// The endpoints that every agent has.
const BUILT_IN: [&str; 4] = ["provide_required_input", "cancel_task", "get_task", "card"];

#[expect(clippy::disallowed_methods, reason = "a drop cannot await")]
fn wait(child: &mut Child) -> Result<ExitStatus, String> {
    let deadline = Instant::now() + STOP_TIMEOUT;
    while Instant::now() < deadline {
        if let Ok(Some(status)) = child.try_wait() {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    let _ = child.wait();
    Err(format!("the bridge did not end within {STOP_TIMEOUT:?}"))
}

impl Drop for Bridge {
    fn drop(&mut self) {
        let ended = self.end();
        if std::thread::panicking() || ended.is_err() {
            println!("--- the bridge's log\n{}---", self.log());
        }
        if let (Err(problem), false) = (ended, std::thread::panicking()) {
            panic!("{problem}");
        }
    }
}
