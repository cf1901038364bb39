//! The bridge as people run it: a process, its settings file, its log, and callers on its mesh.

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
use super::eventually::eventually;
use super::nats::NatsServer;
use super::processes::{self, MARK, free_port};
use super::{LATER, SOON};

/// How long a bridge may take to end when a test is over.
const END: Duration = Duration::from_secs(15);

/// How long a service may take to tell about itself.
const QUESTION: Duration = Duration::from_secs(2);

/// The settings of one agent.
pub struct AgentSettings(Map<String, Value>);

/// A demo agent that the bridge launches, with these switches.
pub fn launched(name: &str, switches: &[&str]) -> AgentSettings {
    let port = free_port();
    let mut command = vec![
        env!("CARGO_BIN_EXE_a2a-bridge").to_owned(),
        "demo-agent".to_owned(),
        "--port".to_owned(),
        port.to_string(),
    ];
    command.extend(switches.iter().map(|&switch| switch.to_owned()));
    attached(name, &format!("http://127.0.0.1:{port}")).set("command", json!(command))
}

/// An agent that somebody else runs.
pub fn attached(name: &str, url: &str) -> AgentSettings {
    let settings = json!({"name": name, "url": url});
    AgentSettings(settings.as_object().cloned().unwrap_or_default())
}

impl AgentSettings {
    /// Adds a setting.
    pub fn set(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.0.insert(key.to_owned(), value.into());
        self
    }
}

/// A bridge in the making.
pub struct Builder {
    agents: Vec<AgentSettings>,
    nats: Map<String, Value>,
    more: Map<String, Value>,
    grace: String,
    log: String,
    variables: Vec<(String, String)>,
}

impl Builder {
    /// One more agent.
    pub fn and(mut self, agent: AgentSettings) -> Self {
        self.agents.push(agent);
        self
    }

    /// A setting of the connection.
    pub fn nats(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.nats.insert(key.to_owned(), value.into());
        self
    }

    /// A setting beside `nats` and `agents`.
    pub fn set(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.more.insert(key.to_owned(), value.into());
        self
    }

    /// How long calls may go on when the bridge stops.
    pub fn shutdown_grace(mut self, grace: &str) -> Self {
        self.grace = grace.to_owned();
        self
    }

    /// What is logged.
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

    /// Starts a server and the bridge, and waits until it serves, its agents ready or not.
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
        let child = Command::new(env!("CARGO_BIN_EXE_a2a-bridge"))
            .args(["run", "--config"])
            .arg(&file)
            .env("A2A_BRIDGE_LOG", &self.log)
            .envs(self.variables)
            .stdin(Stdio::null())
            .stdout(File::create(dir.path().join("bridge.out")).unwrap())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .expect("the bridge starts");
        let bridge = Bridge { child, log, client, prefix, registry, mark, nats, dir };
        eventually(SOON, || async { bridge.log().contains("serving; stop with Ctrl-C").then_some(()) }).await;
        bridge
    }
}

/// A running bridge with a server of its own. Dropping it stops it, and checks that nothing is left.
pub struct Bridge {
    child: Child,
    log: PathBuf,
    pub client: Client,
    pub prefix: String,
    /// Everything that is announced, from the start on.
    pub registry: Subscriber,
    mark: String,
    pub nats: NatsServer,
    dir: TempDir,
}

impl Bridge {
    /// A bridge for this agent.
    pub fn of(agent: AgentSettings) -> Builder {
        Self::of_none().and(agent)
    }

    /// A bridge without an agent yet.
    pub fn of_none() -> Builder {
        let (nats, variables) = (Map::new(), Vec::new());
        Builder {
            agents: Vec::new(),
            nats,
            more: Map::new(),
            grace: "500ms".into(),
            log: "info,a2a_bridge=debug".into(),
            variables,
        }
    }

    /// A bridge for one demo agent called `demo`.
    pub async fn of_demo(switches: &[&str]) -> Self {
        Self::of(launched("demo", switches)).start().await
    }

    /// A request to an action, as in `demo.echo`.
    pub fn call(&self, action: &str, body: impl IntoBody) -> Call {
        Call::new(&self.client, self.subject(action), body)
    }

    /// A request with nothing but a prompt.
    pub fn prompt(&self, action: &str, prompt: &str) -> Call {
        self.call(action, json!({ "prompt": prompt }))
    }

    /// An answer to a question of the agent.
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

    /// What `$SRV.<verb>.<name>` answers; `None` when nobody does, or when a service that is about to
    /// leave has taken the question along.
    pub async fn ask(&self, verb: &str, name: &str) -> Option<Value> {
        let question = Call::new(&self.client, format!("$SRV.{verb}.{name}"), "");
        let reply = question.begin().await.reply_within(QUESTION).await?;
        (!reply.is_no_responders()).then_some(reply.body)
    }

    /// The service of an agent as INFO shows it.
    pub async fn info(&self, agent: &str) -> Value {
        self.ask("INFO", agent).await.expect("the service is there")
    }

    /// The state of an agent as INFO shows it.
    pub async fn state(&self, agent: &str) -> Option<String> {
        let info = self.ask("INFO", agent).await?;
        info["metadata"]["a2a.state"].as_str().map(str::to_owned)
    }

    /// Waits until the agent is in this state and its actions are what they are in it.
    pub async fn until(&self, agent: &str, state: &str) {
        eventually(LATER, || async {
            let info = self.ask("INFO", agent).await?;
            let skills = info["endpoints"].as_array()?.len() > BUILT_IN;
            (info["metadata"]["a2a.state"] == state && skills == (state == "ready")).then_some(())
        })
        .await;
    }

    /// Waits until nobody listens to a skill any more. What is asked while it leaves is told so.
    pub async fn until_no_responders(&self, action: &str) {
        eventually(SOON, || async {
            let reply = self.prompt(action, "x").await;
            if reply.is_no_responders() {
                return Some(());
            }
            reply.expect_error("agent_unavailable");
            None
        })
        .await;
    }

    /// Waits until an agent that is replaced or removed listens to a skill no more. It serves what arrives before.
    pub async fn until_withdrawn(&self, action: &str) {
        eventually(SOON, || async { self.prompt(action, "x").await.is_no_responders().then_some(()) }).await;
    }

    /// The names of an agent's endpoints, the built-in ones left out.
    pub async fn actions(&self, agent: &str) -> Vec<String> {
        names(&self.info(agent).await)
    }

    /// The counts of one endpoint, once `requests` are counted.
    pub async fn stats(&self, agent: &str, endpoint: &str, requests: u64) -> Value {
        eventually(SOON, || async {
            let stats = self.ask("STATS", agent).await?;
            let all = stats["endpoints"].as_array()?;
            let found = all.iter().find(|one| one["name"] == endpoint)?.clone();
            (found["num_requests"] == requests).then_some(found)
        })
        .await
    }

    /// The next announcement of `agent` that `is` what the test waits for.
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
        tokio::time::timeout(LATER, wanted).await.expect("it is announced in time")
    }

    /// Begins a call that takes this long.
    pub async fn begin_slow(&self, agent: &str, seconds: u32) -> Inbox {
        let call = self.prompt(&format!("{agent}.slow"), &seconds.to_string());
        call.begin().await
    }

    /// The id of the one task that a demo agent works on, once the bridge knows it. The agent has to
    /// give tasks back at once (`--ignore-blocking`), or the bridge knows it only at its end.
    pub async fn working_task(&self, agent: &str) -> String {
        eventually(SOON, || async {
            let task = self.tasks(agent).await.into_iter().find(is_working)?;
            let id = task["id"].as_str()?.to_owned();
            self.get_task(agent, &id).await.is("WORKING").then_some(id)
        })
        .await
    }

    /// Waits until a demo agent works on something.
    pub async fn until_working(&self, agent: &str) {
        eventually(SOON, || async { self.tasks(agent).await.iter().any(is_working).then_some(()) }).await;
    }

    /// All tasks that a demo agent of A2A 1.0 has, asked for at the agent itself.
    pub async fn tasks(&self, agent: &str) -> Vec<Value> {
        let card = self.card(agent).await;
        let url = card["supportedInterfaces"][0]["url"].as_str().expect("an address");
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": "ListTasks", "params": {}});
        let request = reqwest::Client::new().post(url).header("A2A-Version", "1.0");
        let answer = request.body(body.to_string()).send().await.unwrap();
        let answer: Value = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap();
        answer["result"]["tasks"].as_array().cloned().unwrap_or_default()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// What it wrote to stdout.
    pub fn output(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("bridge.out")).unwrap_or_default()
    }

    /// The processes that it has launched, and theirs.
    pub fn launched(&self) -> Vec<i32> {
        processes::marked(&self.mark)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        processes::signal(i32::try_from(self.child.id()).unwrap(), signal);
    }

    /// Has it read its settings again, with this change.
    pub fn reload(&self, change: impl Fn(&mut Value)) {
        let file = self.dir.path().join("bridge.yaml");
        let mut settings = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        change(&mut settings);
        std::fs::write(&file, format!("{settings:#}")).unwrap();
        self.signal(Signal::SIGHUP);
    }

    /// Waits until the bridge has ended.
    pub async fn ended(&mut self) -> ExitStatus {
        let child = std::cell::RefCell::new(&mut self.child);
        eventually(LATER, || async { child.borrow_mut().try_wait().unwrap() }).await
    }

    /// Stops it in order.
    pub async fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.ended().await
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
            ([], ..) => Err(format!("the bridge ended with {status}")),
            (left, ..) => Err(format!("the bridge left processes behind: {left:?}")),
        }
    }
}

fn is_working(task: &Value) -> bool {
    task["status"]["state"] == "TASK_STATE_WORKING"
}

/// How many endpoints every agent has.
const BUILT_IN: usize = 4;

/// The names of a service's endpoints, the built-in ones left out.
pub fn names(info: &Value) -> Vec<String> {
    let all = info["endpoints"].as_array().expect("a list of endpoints");
    all.iter()
        .filter_map(|endpoint| endpoint["name"].as_str())
        .filter(|name| !["provide_required_input", "cancel_task", "get_task", "card"].contains(name))
        .map(str::to_owned)
        .collect()
}

#[expect(clippy::disallowed_methods, reason = "a drop cannot await")]
fn wait(child: &mut Child) -> Result<ExitStatus, String> {
    let deadline = Instant::now() + END;
    while Instant::now() < deadline {
        if let Ok(Some(status)) = child.try_wait() {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    let _ = child.wait();
    Err(format!("the bridge did not end within {END:?}"))
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
