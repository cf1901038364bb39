//! The bundled agent as a process of its own, for bridges that attach to it.

use std::net::{Ipv4Addr, TcpStream};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use super::eventually::eventually;
use super::processes::{free_port, program};

/// A demo agent that the test runs. Dropping it ends it.
pub struct DemoAgent {
    port: u16,
    switches: Vec<String>,
    child: Option<Child>,
}

impl DemoAgent {
    /// An agent that is not running yet.
    pub fn new(switches: &[&str]) -> Self {
        Self {
            port: free_port(),
            switches: switches.iter().map(|&switch| switch.to_owned()).collect(),
            child: None,
        }
    }

    pub async fn start(switches: &[&str]) -> Self {
        let mut agent = Self::new(switches);
        agent.run().await;
        agent
    }

    /// Starts the process, also again after [`kill`](Self::kill), and waits until it listens.
    pub async fn run(&mut self) {
        let child = Command::new(program())
            .args(["demo-agent", "--port", &self.port.to_string()])
            .args(&self.switches)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the demo agent starts");
        self.child = Some(child);
        let port = self.port;
        eventually(|| async move { TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok() }).await;
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// The state of a task, as the agent itself returns it.
    pub async fn state_of(&self, task_id: &str) -> String {
        let task = request_agent(&self.url(), "GetTask", json!({ "id": task_id })).await;
        task["status"]["state"].as_str().unwrap_or_default().to_owned()
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

impl Drop for DemoAgent {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Calls a method of an agent of A2A 1.0 without the bridge, and returns its result.
pub async fn request_agent(url: &str, method: &str, params: Value) -> Value {
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).to_string();
    let request = reqwest::Client::new().post(url).header("A2A-Version", "1.0").body(body);
    let answer = request.send().await.unwrap().bytes().await.unwrap();
    serde_json::from_slice::<Value>(&answer).unwrap()["result"].take()
}
