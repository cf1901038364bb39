//! A bridge with a demo agent behind it, as a client of the agent protocol sees them.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use a2a_bridge::internal::Bridge;
use a2a_bridge::internal::{Config, parse_config};
use async_nats::{Client, HeaderMap, Message, Subscriber};
use futures_util::{FutureExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::TaskTracker;

use super::eventually::eventually;
use super::nats::NatsServer;

pub const SOON: Duration = Duration::from_secs(20);
pub const PROMPT: &str = "agents.prompt.a2a.acme.demo";

/// The bundled agent as a separate process. Dropping it ends the process.
pub struct DemoAgent {
    child: Child,
    pub url: String,
}

impl DemoAgent {
    pub fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_a2a-bridge"))
            .args(["demo-agent"])
            .args(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("listening on ").unwrap().to_owned();
        Self { child, url }
    }

    pub fn port(&self) -> &str {
        self.url.rsplit(':').next().unwrap()
    }

    pub fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for DemoAgent {
    fn drop(&mut self) {
        self.end();
    }
}

/// A server, a demo agent, a bridge between them, and a client that prompts.
pub struct Scene {
    pub server: NatsServer,
    pub agent: DemoAgent,
    pub bridge: Bridge,
    pub caller: Client,
}

impl Scene {
    /// `settings` are further settings of the agent, one per line.
    pub async fn start(settings: &str) -> Self {
        let agent = DemoAgent::start(&[]);
        Self::with(NatsServer::start().await, agent, "demo", None, settings).await
    }

    pub async fn with(
        server: NatsServer,
        agent: DemoAgent,
        name: &str,
        url: Option<&str>,
        settings: &str,
    ) -> Self {
        let caller = server.connect().await;
        let bridge = bridge(self::settings(&server, name, url.unwrap_or(&agent.url), settings)).await;
        let scene = Self { server, agent, bridge, caller };
        eventually(SOON, || scene.info()).await;
        scene
    }

    /// Reloads the bridge with other settings or another name of the agent.
    pub async fn reload(&self, name: &str, settings: &str) {
        let config = self::settings(&self.server, name, &self.agent.url, settings);
        tokio::time::timeout(SOON, self.bridge.reload(config)).await.expect("no wait for the grace").unwrap();
    }

    pub async fn stop(&self) {
        tokio::time::timeout(SOON, self.bridge.stop()).await.expect("no wait for the grace");
    }

    /// INFO of the agent's service, if there is one.
    pub async fn info(&self) -> Option<Value> {
        let answer = self.caller.request("$SRV.INFO.agents", "".into()).await.ok()?;
        serde_json::from_slice(&answer.payload).ok()
    }

    /// The last error of `prompt` in STATS.
    pub async fn last_error(&self) -> String {
        self.stats().await["last_error"].as_str().unwrap_or_default().to_owned()
    }

    async fn stats(&self) -> Value {
        let answer = self.caller.request("$SRV.STATS.agents", "".into()).await.unwrap();
        let mut stats: Value = serde_json::from_slice(&answer.payload).unwrap();
        stats["endpoints"][0].take()
    }

    /// The counts of `prompt`: requests and errors.
    pub async fn counts(&self) -> (u64, u64) {
        let prompt = self.stats().await;
        (prompt["num_requests"].as_u64().unwrap(), prompt["num_errors"].as_u64().unwrap())
    }

    /// Sends a prompt.
    pub async fn prompt(&self, body: impl ToString) -> Stream {
        self.prompt_bytes(body.to_string().into_bytes()).await
    }

    pub async fn prompt_bytes(&self, body: Vec<u8>) -> Stream {
        let inbox = self.caller.new_inbox();
        let messages = self.caller.subscribe(inbox.clone()).await.unwrap();
        self.caller.publish_with_reply(PROMPT, inbox, body.into()).await.unwrap();
        Stream { caller: self.caller.clone(), messages }
    }

    /// Prompts and reads to the end.
    pub async fn answer(&self, body: impl ToString) -> Answer {
        self.prompt(body).await.rest().await
    }

    /// The error of a prompt that must have one: number and text.
    pub async fn error(&self, body: impl ToString) -> (u16, String) {
        self.answer(body).await.error.unwrap()
    }
}

/// The configuration of a bridge with one agent. The grace period is longer than any test, so a test that
/// waits for it fails.
fn settings(server: &NatsServer, name: &str, url: &str, settings: &str) -> Config {
    let settings: String = settings.lines().map(|line| format!("    {}\n", line.trim())).collect();
    let text = format!(
        "nats:\n  url: {}\n  agent_protocol: {{ owner: acme }}\nagents:\n  - name: {name}\n    url: {url}\n{settings}shutdown_grace: 10m\n",
        server.url()
    );
    parse_config(&text, "bridge.yaml", &|_| None).unwrap()
}

async fn bridge(config: Config) -> Bridge {
    let bridge = Bridge::connect(&config).await.unwrap();
    bridge.serve(config).await.unwrap();
    bridge
}

/// The chunks of one answer.
pub struct Stream {
    caller: Client,
    messages: Subscriber,
}

/// All chunks of one answer, combined.
#[derive(Debug, Default)]
pub struct Answer {
    pub chunks: Vec<Value>,
    pub text: String,
    pub texts: Vec<String>,
    pub attachments: Vec<Value>,
    pub error: Option<(u16, String)>,
}

impl Stream {
    async fn message(&mut self) -> Message {
        let next = tokio::time::timeout(SOON, self.messages.next()).await;
        next.expect("a chunk in time").expect("a subscription")
    }

    /// The next chunk; panics at the end and at errors.
    pub async fn chunk(&mut self) -> Value {
        let message = self.message().await;
        assert_eq!(message.headers, None, "{message:?}");
        serde_json::from_slice(&message.payload).unwrap()
    }

    /// The next chunk of this type.
    pub async fn chunk_of(&mut self, kind: &str) -> Value {
        loop {
            let mut chunk = self.chunk().await;
            if chunk["type"] == kind {
                return chunk["data"].take();
            }
            assert_ne!(chunk["type"], "query", "{chunk}");
        }
    }

    /// Skips the chunks that have arrived.
    pub fn skip_arrived(&mut self) {
        while self.messages.next().now_or_never().is_some() {}
    }

    /// Answers a question.
    pub async fn reply(&self, query: &Value, body: impl ToString) {
        let to = query["reply_subject"].as_str().unwrap().to_owned();
        self.caller.publish(to, body.to_string().into()).await.unwrap();
    }

    /// Reads on until the empty message without headers.
    pub async fn rest(mut self) -> Answer {
        let mut answer = Answer::default();
        loop {
            let message = self.message().await;
            if let Some(headers) = message.headers {
                assert_eq!(message.status, None, "nobody took the prompt");
                answer.error = Some(error(&headers));
                continue;
            }
            assert!(answer.error.is_none() || message.payload.is_empty(), "{message:?}");
            if message.payload.is_empty() {
                return answer;
            }
            let chunk: Value = serde_json::from_slice(&message.payload).unwrap();
            if chunk["type"] == "response" {
                let data = &chunk["data"];
                let text = data.as_str().or(data["text"].as_str()).unwrap();
                answer.text.push_str(text);
                answer.texts.push(text.to_owned());
                answer.attachments.extend(data["attachments"].as_array().into_iter().flatten().cloned());
            }
            answer.chunks.push(chunk);
        }
    }
}

fn error(headers: &HeaderMap) -> (u16, String) {
    let value = |name| headers.get(name).unwrap().as_str().to_owned();
    (value("Nats-Service-Error-Code").parse().unwrap(), value("Nats-Service-Error"))
}

/// An attachment in an envelope.
pub fn attachment(name: &str, content: &str) -> Value {
    json!({"filename": name, "content": content})
}

/// A proxy in front of a demo agent that records what the bridge sends.
pub struct RecordingProxy {
    pub url: String,
    received: Arc<Mutex<Vec<u8>>>,
}

impl RecordingProxy {
    /// Also starts the agent, whose card has the URL of the proxy.
    pub async fn start() -> (Self, DemoAgent) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let card = tempfile::NamedTempFile::new().unwrap();
        let content = json!({
            "name": "demo", "description": "recorded", "version": "1.0.0",
            "supportedInterfaces": [{"url": url, "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}],
            "capabilities": {"streaming": true}, "defaultInputModes": ["text/plain"],
            "defaultOutputModes": ["text/plain"], "skills": [],
        });
        std::fs::write(&card, content.to_string()).unwrap();
        let (_, card) = card.keep().unwrap();
        let agent = DemoAgent::start(&["--card-file", card.to_str().unwrap()]);
        let received = Arc::<Mutex<Vec<u8>>>::default();
        TaskTracker::new().spawn(proxy(
            listener,
            agent.url.strip_prefix("http://").unwrap().to_owned(),
            Arc::clone(&received),
        ));
        (Self { url, received }, agent)
    }

    pub fn has_received(&self, text: &str) -> bool {
        String::from_utf8_lossy(&self.received.lock().unwrap()).contains(text)
    }
}

async fn proxy(listener: TcpListener, to: String, received: Arc<Mutex<Vec<u8>>>) {
    while let Ok((near, _)) = listener.accept().await {
        let Ok(far) = TcpStream::connect(&to).await else {
            continue;
        };
        let (mut from_bridge, mut to_bridge) = near.into_split();
        let (mut from_agent, mut to_agent) = far.into_split();
        let received = Arc::clone(&received);
        TaskTracker::new().spawn(async move {
            let mut buffer = vec![0; 1 << 16];
            while let Ok(count @ 1..) = from_bridge.read(&mut buffer).await {
                received.lock().unwrap().extend_from_slice(&buffer[..count]);
                if to_agent.write_all(&buffer[..count]).await.is_err() {
                    break;
                }
            }
        });
        TaskTracker::new().spawn(async move { tokio::io::copy(&mut from_agent, &mut to_bridge).await });
    }
}
