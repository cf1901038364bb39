//! The bundled agent as a process of its own, for bridges that attach to it.

use std::net::{Ipv4Addr, TcpStream};
use std::process::{Child, Command, Stdio};

use super::SOON;
use super::eventually::eventually;
use super::processes::free_port;

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

    /// A running agent.
    pub async fn start(switches: &[&str]) -> Self {
        let mut agent = Self::new(switches);
        agent.run().await;
        agent
    }

    /// Starts it and waits until it listens.
    pub async fn run(&mut self) {
        let child = Command::new(env!("CARGO_BIN_EXE_a2a-bridge"))
            .args(["demo-agent", "--port", &self.port.to_string()])
            .args(&self.switches)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the demo agent starts");
        self.child = Some(child);
        let port = self.port;
        eventually(SOON, || async move { TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok() }).await;
    }

    /// Ends it as a crash would.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// The state of a task, asked for at the agent itself.
    pub async fn state_of(&self, task_id: &str) -> String {
        let body =
            serde_json::json!({"jsonrpc": "2.0", "id": 1, "method": "GetTask", "params": {"id": task_id}});
        let request = reqwest::Client::new().post(self.url()).header("A2A-Version", "1.0");
        let answer = request.body(body.to_string()).send().await.unwrap().bytes().await.unwrap();
        let answer: serde_json::Value = serde_json::from_slice(&answer).unwrap();
        answer["result"]["status"]["state"].as_str().unwrap_or_default().to_owned()
    }

    /// Where it listens.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}

impl Drop for DemoAgent {
    fn drop(&mut self) {
        self.kill();
    }
}
