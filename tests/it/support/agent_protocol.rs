//! A bridge with a demo agent behind it, as a client of the agent protocol sees them.

use std::sync::{Arc, Mutex};

use a2a_bridge::internal::child::ProcessHost;
use a2a_bridge::internal::{Bridge, FirstConnection};
use a2a_bridge::internal::{Config, parse_config};
use async_nats::{Client, HeaderMap, Message, Subscriber};
use futures_util::{FutureExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::demo_agent::DemoAgent;
use super::eventually::{eventually, within_deadline};
use super::nats::NatsServer;
use super::proxy;

pub const PROMPT: &str = "agents.prompt.a2a.acme.demo";

/// A NATS server, a demo agent, a bridge between them, and a caller.
pub struct Scene {
    pub server: NatsServer,
    pub agent: DemoAgent,
    pub bridge: Bridge,
    pub caller: Client,
}

impl Scene {
    /// `settings` are further settings of the agent, one per line.
    pub async fn start(settings: &str) -> Self {
        Self::of(DemoAgent::start(&[]).await, settings).await
    }

    pub async fn of(agent: DemoAgent, settings: &str) -> Self {
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
        let bridge = bridge(self::settings(&server, name, url.unwrap_or(&agent.url()), settings)).await;
        let scene = Self { server, agent, bridge, caller };
        eventually(|| scene.info()).await;
        scene
    }

    /// Reloads other settings of the agent, or another name for it, without waiting for the grace period.
    pub async fn reload(&self, name: &str, settings: &str) {
        let config = self::settings(&self.server, name, &self.agent.url(), settings);
        within_deadline(self.bridge.reload(config)).await.unwrap();
    }

    /// Stops the bridge without waiting for the grace period.
    pub async fn stop(&self) {
        within_deadline(self.bridge.stop()).await;
    }

    /// The INFO of the agent, if it is published.
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

    pub async fn prompt(&self, body: impl ToString) -> PromptStream {
        self.prompt_bytes(body.to_string().into_bytes()).await
    }

    pub async fn prompt_bytes(&self, body: Vec<u8>) -> PromptStream {
        let inbox = self.caller.new_inbox();
        let messages = self.caller.subscribe(inbox.clone()).await.unwrap();
        self.caller.publish_with_reply(PROMPT, inbox, body.into()).await.unwrap();
        PromptStream { caller: self.caller.clone(), messages }
    }

    /// Prompts and reads to the end.
    pub async fn answer(&self, body: impl ToString) -> PromptAnswer {
        self.prompt(body).await.rest().await
    }

    /// The error of a prompt that must fail: number and text.
    pub async fn error(&self, body: impl ToString) -> (u16, String) {
        self.answer(body).await.error.unwrap()
    }
}

/// Sends a prompt to the agent `demo`.
pub async fn prompt(caller: &Client, body: impl ToString) -> PromptStream {
    let inbox = caller.new_inbox();
    let messages = caller.subscribe(inbox.clone()).await.unwrap();
    caller.publish_with_reply(PROMPT, inbox, body.to_string().into()).await.unwrap();
    PromptStream { caller: caller.clone(), messages }
}

/// The settings of a bridge with one agent. The grace period is longer than any test may take.
fn settings(server: &NatsServer, name: &str, url: &str, settings: &str) -> Config {
    let settings: String = settings.lines().map(|line| format!("    {}\n", line.trim())).collect();
    let text = format!(
        "nats:\n  url: {}\n  agent_protocol: {{ owner: acme }}\nagents:\n  - name: {name}\n    url: {url}\n{settings}shutdown_grace: 10m\n",
        server.url()
    );
    parse_config(&text, "bridge.yaml", &|_| None).unwrap()
}

async fn bridge(config: Config) -> Bridge {
    let bridge = Bridge::connect(&config, ProcessHost::default(), FirstConnection::FailFast).await.unwrap();
    bridge.serve(config).await.unwrap();
    bridge
}

/// The chunks of one answer.
pub struct PromptStream {
    caller: Client,
    messages: Subscriber,
}

/// All chunks of one answer, collected.
#[derive(Debug, Default)]
pub struct PromptAnswer {
    pub chunks: Vec<Value>,
    pub text: String,
    pub texts: Vec<String>,
    pub attachments: Vec<Value>,
    pub error: Option<(u16, String)>,
}

impl PromptStream {
    async fn message(&mut self) -> Message {
        within_deadline(self.messages.next()).await.expect("the connection is up")
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

    /// Drops the chunks that have already arrived.
    pub fn drop_arrived(&mut self) {
        while self.messages.next().now_or_never().is_some() {}
    }

    /// Answers a query.
    pub async fn reply(&self, query: &Value, body: impl ToString) {
        let to = query["reply_subject"].as_str().unwrap().to_owned();
        self.caller.publish(to, body.to_string().into()).await.unwrap();
    }

    /// Reads up to the empty message without headers.
    pub async fn rest(mut self) -> PromptAnswer {
        let mut answer = PromptAnswer::default();
        loop {
            let message = self.message().await;
            if let Some(headers) = message.headers {
                assert_eq!(message.status, None, "no responders");
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

pub fn attachment(name: &str, content: &str) -> Value {
    json!({"filename": name, "content": content})
}

/// A proxy in front of a demo agent that records what the bridge sends.
pub struct RecordingProxy {
    pub url: String,
    sent: Arc<Mutex<Vec<u8>>>,
}

impl RecordingProxy {
    /// The proxy and the agent behind it, whose card names the proxy.
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
        let agent = DemoAgent::start(&["--card-file", card.to_str().unwrap()]).await;
        let sent = Arc::<Mutex<Vec<u8>>>::default();
        let record = Arc::clone(&sent);
        proxy::relay(listener, format!("127.0.0.1:{}", agent.port()), move |chunk| {
            record.lock().unwrap().extend_from_slice(chunk);
            true
        });
        (Self { url, sent }, agent)
    }

    pub fn has_sent(&self, text: &str) -> bool {
        String::from_utf8_lossy(&self.sent.lock().unwrap()).contains(text)
    }
}
