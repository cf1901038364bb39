//! Several replicas of the bridge on one NATS server with JetStream.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use async_nats::Client;
use futures_util::StreamExt as _;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::bridge::AgentSettings;
use super::caller::{Call, IntoBody};
use super::commands::command;
use super::eventually::eventually_within;
use super::nats::NatsServer;
use super::processes;
use super::updates::TaskUpdates;

/// How long a replica may take to start or to stop, beside other tests.
const REPLICA_TIMEOUT: Duration = Duration::from_secs(30);

/// Replicas with the same settings. Dropping it kills them.
pub struct Mesh {
    pub client: Client,
    pub prefix: String,
    agents: Vec<String>,
    replicas: Vec<Option<Child>>,
    environment: Vec<(String, String)>,
    _nats: Vec<NatsServer>,
    dir: TempDir,
}

impl Mesh {
    /// A server with JetStream and this many replicas for these agents.
    pub async fn start(agents: Vec<AgentSettings>, replicas: usize) -> Self {
        let nats = NatsServer::with_jetstream().await;
        let (client, url) = (nats.connect().await, nats.url());
        Self::start_on(client, &url, agents, replicas).await.keeping(nats)
    }

    /// The same, with more settings.
    pub async fn start_with(agents: Vec<AgentSettings>, replicas: usize, more: Value) -> Self {
        let nats = NatsServer::with_jetstream().await;
        let (client, url) = (nats.connect().await, nats.url());
        Self::start_configured(client, &url, "auto", agents, replicas, more).await.keeping(nats)
    }

    /// Keeps a server as long as the mesh.
    fn keeping(mut self, nats: NatsServer) -> Self {
        self._nats.push(nats);
        self
    }

    /// On servers of the test.
    pub async fn start_on(client: Client, url: &str, agents: Vec<AgentSettings>, replicas: usize) -> Self {
        Self::start_in_mode(client, url, "auto", agents, replicas).await
    }

    /// With a value of `nats.jetstream.mode`.
    pub async fn start_in_mode(
        client: Client,
        url: &str,
        mode: &str,
        agents: Vec<AgentSettings>,
        replicas: usize,
    ) -> Self {
        Self::start_configured(client, url, mode, agents, replicas, json!({})).await
    }

    async fn start_configured(
        client: Client,
        url: &str,
        mode: &str,
        agents: Vec<AgentSettings>,
        replicas: usize,
        mut more: Value,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let prefix = format!("mesh-{}", fastrand::u32(..));
        let agents: Vec<Value> = agents.into_iter().map(AgentSettings::into_value).collect();
        let names = agents.iter().map(|agent| agent["name"].as_str().unwrap().to_owned()).collect();
        let mut settings = json!({
            "nats": {"url": url, "subject_prefix": prefix, "jetstream": {"mode": mode}},
            "agents": agents,
            "shutdown_grace": "2s",
        });
        settings.as_object_mut().unwrap().append(more.as_object_mut().unwrap());
        std::fs::write(dir.path().join("bridge.yaml"), settings.to_string()).unwrap();
        let mut mesh = Self {
            client,
            prefix,
            agents: names,
            replicas: Vec::new(),
            environment: Vec::new(),
            _nats: Vec::new(),
            dir,
        };
        for _ in 0..replicas {
            mesh.spawn();
        }
        mesh.until_ready().await;
        mesh
    }

    /// Sets an environment variable for replicas that start from now on.
    pub fn set_env(&mut self, name: &str, value: impl Into<String>) {
        self.environment.push((name.to_owned(), value.into()));
    }

    /// Replicas that start from now on have only the environment of the test.
    pub fn clear_env(&mut self) {
        self.environment.clear();
    }

    pub fn pid(&self, replica: usize) -> i32 {
        let child = self.replicas[replica].as_ref().expect("the replica runs");
        i32::try_from(child.id()).unwrap()
    }

    fn log_file(&self, replica: usize) -> PathBuf {
        self.dir.path().join(format!("replica-{replica}.log"))
    }

    /// The log of a replica. Numbers count all replicas that ever started.
    pub fn log(&self, replica: usize) -> String {
        std::fs::read_to_string(self.log_file(replica)).unwrap_or_default()
    }

    fn spawn(&mut self) -> usize {
        let number = self.replicas.len();
        let child = command(&["run", "--config"])
            .arg(self.dir.path().join("bridge.yaml"))
            .env("A2A_BRIDGE_LOG", "info,a2a_bridge=debug")
            .envs(self.environment.iter().cloned())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(self.log_file(number)).unwrap())
            .spawn()
            .unwrap();
        self.replicas.push(Some(child));
        number
    }

    /// Starts another replica, and waits until all are ready.
    pub async fn add(&mut self) -> usize {
        let number = self.spawn();
        self.until_ready().await;
        number
    }

    fn running(&self) -> usize {
        self.replicas.iter().flatten().count()
    }

    /// Waits until every replica that runs is ready with every agent.
    pub async fn until_ready(&self) {
        for agent in &self.agents {
            eventually_within(REPLICA_TIMEOUT, || async {
                (self.ready(agent).await == self.running()).then_some(())
            })
            .await;
        }
    }

    /// The number of replicas that are ready with an agent.
    async fn ready(&self, agent: &str) -> usize {
        let inbox = self.client.new_inbox();
        let mut infos = self.client.subscribe(inbox.clone()).await.unwrap();
        self.client.publish_with_reply(format!("$SRV.INFO.{agent}"), inbox, "".into()).await.unwrap();
        let mut ready = 0;
        while let Ok(Some(info)) = tokio::time::timeout(Duration::from_millis(300), infos.next()).await {
            let info: Value = serde_json::from_slice(&info.payload).unwrap_or_default();
            ready += usize::from(info["metadata"]["a2a.state"] == "ready");
            if ready == self.running() {
                break;
            }
        }
        ready
    }

    /// Kills a replica with SIGKILL.
    pub fn kill(&mut self, replica: usize) {
        if let Some(mut child) = self.replicas[replica].take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Stops a replica in order, and waits until it has ended.
    pub async fn stop(&mut self, replica: usize) {
        if let Some(mut child) = self.replicas[replica].take() {
            processes::signal(i32::try_from(child.id()).unwrap(), Signal::SIGTERM);
            eventually_within(REPLICA_TIMEOUT, || {
                let ended = child.try_wait().unwrap().map(|_| ());
                async move { ended }
            })
            .await;
        }
    }

    /// Whether a replica has exited by itself.
    pub fn has_exited(&mut self, replica: usize) -> bool {
        let exited = match &mut self.replicas[replica] {
            Some(child) => child.try_wait().unwrap().is_some(),
            None => true,
        };
        if exited {
            self.replicas[replica] = None;
        }
        exited
    }

    pub fn call(&self, action: &str, body: impl IntoBody) -> Call {
        Call::new(&self.client, format!("{}.action.{action}", self.prefix), body)
    }

    pub fn prompt(&self, action: &str, prompt: &str) -> Call {
        self.call(action, json!({ "prompt": prompt }))
    }

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

    pub async fn task_updates(&self) -> TaskUpdates {
        TaskUpdates::subscribe(&self.client, &self.prefix).await
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        for replica in 0..self.replicas.len() {
            self.kill(replica);
        }
        if std::thread::panicking() {
            for replica in 0..self.replicas.len() {
                eprintln!("==== replica {replica}\n{}", self.log(replica));
            }
        }
    }
}
