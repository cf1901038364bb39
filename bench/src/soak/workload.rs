//! The load: callers of every kind, each with a rhythm of its own.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use async_nats::{Client, ConnectOptions, HeaderMap, Request};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::record::Recorder;
use super::site::Site;

const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Agents that are always called; `frail` crashes.
const AGENTS: [&str; 2] = ["steady", "attached"];

type Operation = fn(Caller, u64) -> Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send>>;

/// What a caller does, and how many times a second.
const OPERATIONS: [(&str, f64, Operation); 12] = [
    ("call", 20.0, |caller, number| Box::pin(caller.call(number))),
    ("keyed call and its repeat", 4.0, |caller, number| Box::pin(caller.repeat(number))),
    ("stream", 2.0, |caller, number| Box::pin(caller.stream(number))),
    ("stream, caller leaves", 0.5, |caller, number| Box::pin(caller.leave(number))),
    ("submit and look up", 2.0, |caller, number| Box::pin(caller.submit(number))),
    ("submit and cancel", 1.0, |caller, number| Box::pin(caller.cancel(number))),
    ("question, answered", 1.0, |caller, number| Box::pin(caller.answer(number))),
    ("question, abandoned", 1.0, |caller, number| Box::pin(caller.abandon(number))),
    ("card", 1.0, |caller, number| Box::pin(caller.card(number))),
    ("oversize answer", 0.1, |caller, number| Box::pin(caller.oversize(number))),
    ("malformed messages", 0.05, |caller, _| Box::pin(caller.malformed())),
    ("agent crashes", 0.02, |caller, _| Box::pin(caller.crash())),
];

pub struct Workload {
    callers: Vec<JoinHandle<()>>,
}

impl Workload {
    /// Waits until the agents are ready, then starts all callers.
    pub async fn start(site: &Site, recorder: &Arc<Recorder>) -> anyhow::Result<Self> {
        let client = ConnectOptions::new()
            .reconnect_delay_callback(|_| Duration::from_millis(50))
            .connect(site.nats_url())
            .await?;
        let caller = Caller { client, recorder: Arc::clone(recorder), nats_port: site.nats_port };
        let start = Instant::now();
        for agent in ["steady", "frail", "attached"] {
            while caller.request(agent, "echo", &[], json!("hello")).await.is_err() {
                ensure!(start.elapsed() < START_TIMEOUT, "agent {agent} does not become ready");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        let callers = OPERATIONS.iter().map(|&(name, rate, operation)| {
            tokio::spawn(repeat(caller.clone(), name, Duration::from_secs_f64(1.0 / rate), operation))
        });
        Ok(Self { callers: callers.collect() })
    }

    pub async fn stop(self) {
        for caller in &self.callers {
            caller.abort();
        }
        for caller in self.callers {
            let _ = caller.await;
        }
    }
}

/// Begins an operation in every interval, whether the one before has ended or not.
async fn repeat(caller: Caller, name: &'static str, interval: Duration, operation: Operation) {
    let mut ticks = tokio::time::interval_at(
        tokio::time::Instant::now() + interval.min(Duration::from_secs(5)),
        interval,
    );
    for number in 0.. {
        ticks.tick().await;
        let caller = caller.clone();
        tokio::spawn(async move {
            let start = Instant::now();
            let result = operation(caller.clone(), number).await;
            caller.recorder.ended(name, start, &result);
        });
    }
}

#[derive(Clone)]
struct Caller {
    client: Client,
    recorder: Arc<Recorder>,
    nats_port: u16,
}

fn agent(number: u64) -> &'static str {
    AGENTS[usize::from(number % 2 == 1)]
}

impl Caller {
    async fn request(
        &self,
        agent: &str,
        action: &str,
        headers: &[(&str, &str)],
        body: Value,
    ) -> anyhow::Result<Value> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, *value);
        }
        let request =
            Request::new().headers(map).payload(body.to_string().into()).timeout(Some(REPLY_TIMEOUT));
        let reply = self.client.send_request(format!("a2a.action.{agent}.{action}"), request).await?;
        Ok(serde_json::from_slice(&reply.payload)?)
    }

    async fn call(self, number: u64) -> anyhow::Result<()> {
        let text = format!("call {number}");
        let start = Instant::now();
        let reply = self.request(agent(number), "echo", &[], json!(text)).await?;
        ensure!(reply["message"] == text, "{}", reply["message"]);
        self.recorder.latency(start.elapsed());
        Ok(())
    }

    async fn repeat(self, number: u64) -> anyhow::Result<()> {
        let key = format!("soak-{number}");
        let headers = [("Nats-Msg-Id", key.as_str())];
        let first = self.request(agent(number), "echo", &headers, json!("once")).await?;
        let second = self.request(agent(number), "echo", &headers, json!("once")).await?;
        expect(&first, "COMPLETED")?;
        ensure!(first["task"] == second["task"], "the agent ran twice: {first} {second}");
        Ok(())
    }

    async fn open_stream(&self, agent: &str, words: usize) -> anyhow::Result<async_nats::Subscriber> {
        let inbox = self.client.new_inbox();
        let frames = self.client.subscribe(inbox.clone()).await?;
        let mut headers = HeaderMap::new();
        headers.insert("A2A-Reply", "stream");
        let body = json!({ "prompt": "word ".repeat(words) }).to_string();
        let subject = format!("a2a.action.{agent}.stream");
        self.client.publish_with_reply_and_headers(subject, inbox, headers, body.into()).await?;
        Ok(frames)
    }

    async fn stream(self, number: u64) -> anyhow::Result<()> {
        let mut frames = self.open_stream(agent(number), 20).await?;
        let mut last = None;
        loop {
            let frame = tokio::time::timeout(REPLY_TIMEOUT, frames.next()).await?.context("no connection")?;
            if frame.payload.is_empty() {
                break;
            }
            last = Some(frame.payload);
        }
        let last: Value = serde_json::from_slice(&last.context("a stream without frames")?)?;
        expect(&last["data"], "COMPLETED")
    }

    /// Leaves after a few frames.
    async fn leave(self, number: u64) -> anyhow::Result<()> {
        let mut frames = self.open_stream(agent(number), 100).await?;
        for _ in 0..5 {
            tokio::time::timeout(REPLY_TIMEOUT, frames.next()).await?.context("no connection")?;
        }
        Ok(())
    }

    async fn submit_slow(&self, agent: &str, seconds: &str) -> anyhow::Result<Value> {
        let reply = self.request(agent, "slow", &[("A2A-Reply", "submit")], json!(seconds)).await?;
        expect(&reply, "WORKING")?;
        Ok(json!({ "task_id": reply["task"]["id"] }))
    }

    async fn submit(self, number: u64) -> anyhow::Result<()> {
        let agent = agent(number);
        let id = self.submit_slow(agent, "1").await?;
        let start = Instant::now();
        loop {
            let reply = self.request(agent, "get_task", &[], id.clone()).await?;
            if reply["status"] == "COMPLETED" {
                return Ok(());
            }
            expect(&reply, "WORKING")?;
            ensure!(start.elapsed() < REPLY_TIMEOUT, "a task of a second does not end");
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    async fn cancel(self, number: u64) -> anyhow::Result<()> {
        let agent = agent(number);
        let id = self.submit_slow(agent, "60").await?;
        expect(&self.request(agent, "cancel_task", &[], id).await?, "CANCELED")
    }

    async fn ask(&self, agent: &str) -> anyhow::Result<Value> {
        let reply =
            self.request(agent, "report", &[], json!({"topic": "tides", "audience": "sailors"})).await?;
        expect(&reply, "INPUT_REQUIRED")?;
        Ok(reply["data"]["follow_up_id"].clone())
    }

    async fn answer(self, number: u64) -> anyhow::Result<()> {
        let agent = agent(number);
        let id = self.ask(agent).await?;
        let body = json!({"follow_up_id": id, "user_response": "Markdown"});
        expect(&self.request(agent, "provide_required_input", &[], body).await?, "COMPLETED")
    }

    async fn abandon(self, number: u64) -> anyhow::Result<()> {
        self.ask(agent(number)).await.map(drop)
    }

    async fn card(self, number: u64) -> anyhow::Result<()> {
        let subjects =
            [format!("a2a.card.{}", agent(number)), "$SRV.STATS.steady".into(), "$SRV.INFO.attached".into()];
        for subject in subjects {
            let reply = self.client.request(subject, "".into()).await?;
            ensure!(reply.payload.starts_with(b"{"), "not a JSON object");
        }
        Ok(())
    }

    /// More than `max_response_size`.
    async fn oversize(self, number: u64) -> anyhow::Result<()> {
        let reply = self.request(agent(number), "big", &[], json!("20000000")).await?;
        ensure!(reply["error_info"]["code"] == "too_large", "not too large: {}", reply["status"]);
        Ok(())
    }

    /// Messages that nats-server passes on although they are malformed.
    async fn malformed(self) -> anyhow::Result<()> {
        let port = self.nats_port;
        let send = tokio::task::spawn_blocking(move || {
            let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
            BufReader::new(socket.try_clone()?).read_line(&mut String::new())?;
            socket.write_all(b"CONNECT {\"verbose\":false,\"headers\":true}\r\n")?;
            socket.write_all(
                b"HPUB a2a.action.steady.echo _INBOX.m 22 24\r\nNATS/1.0\r\nno colon\r\n\r\nhi\r\n",
            )?;
            socket.write_all(b"PUB a2a.action.steady.echo _INBOX.\xc3\x28 2\r\nhi\r\nPING\r\n")?;
            // The reply shows that the server has read everything.
            BufReader::new(socket).read_line(&mut String::new())
        });
        send.await??;
        Ok(())
    }

    async fn crash(self) -> anyhow::Result<()> {
        match self.request("frail", "crash", &[], json!("now")).await {
            Ok(reply) if reply["success"] == true => bail!("a crash has succeeded: {reply}"),
            // It may still be restarting from the last one.
            Ok(_) | Err(_) => Ok(()),
        }
    }
}

fn expect(reply: &Value, status: &str) -> anyhow::Result<()> {
    ensure!(reply["status"] == status, "{} instead of {status}: {}", reply["status"], reply["message"]);
    Ok(())
}
