//! The victims: well-behaved agents that are called all the time, and what the bridge has promised their callers.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_nats::{Client, HeaderMap, Request};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

/// How a victim is called.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) name: &'static str,
    pub(super) agent: &'static str,
    action: &'static str,
    interval: Duration,
    /// What a call sends, and the answer that it expects, from the numbers of its phase and its own.
    exchange: fn(usize, usize) -> (String, String),
}

/// Called 20 times a second.
pub(super) const SMALL: Target = Target {
    name: "small",
    agent: "victim",
    action: "echo",
    interval: Duration::from_millis(50),
    exchange: |phase, number| {
        let text = format!("hello {phase} {number}");
        (text.clone(), text)
    },
};

/// Its answers are 200 KB: they must not wait behind those of a hostile agent.
pub(super) const LARGE: Target = Target {
    name: "large",
    agent: "large",
    action: "big",
    interval: Duration::from_millis(200),
    exchange: |_, _| ("200000".into(), "x".repeat(200_000)),
};

/// Not an agent, but a [responder](respond) on the same server: what the machine and the server add to every call.
pub(super) const CONTROL: Target = Target { name: "control", agent: "control", ..SMALL };

/// Answers calls of [`CONTROL`], on a runtime and a connection of its own, until the server is gone.
pub(super) async fn respond(url: String) {
    let (ready, is_ready) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = async_nats::ConnectOptions::new().max_reconnects(1).connect(url).await.unwrap();
            let Target { agent, action, .. } = CONTROL;
            let mut calls = client.subscribe(format!("a2a.action.{agent}.{action}")).await.unwrap();
            client.flush().await.unwrap();
            ready.send(()).unwrap();
            while let Some(call) = calls.next().await {
                let body: Value = serde_json::from_slice(&call.payload).unwrap();
                let answer = json!({ "message": body["prompt"] }).to_string();
                let _ = client.publish(call.reply.unwrap(), answer.into()).await;
            }
        });
    });
    is_ready.await.unwrap();
}

/// A call that takes longer counts as lost.
const PATIENCE: Duration = Duration::from_secs(15);

/// The calls of one phase.
#[derive(Debug, Default, Clone)]
pub(super) struct Calls {
    taken: Vec<Duration>,
    pub(super) lost: Vec<String>,
    begun: usize,
}

impl Calls {
    /// The time within which this share of the calls was answered.
    pub(super) fn quantile(&self, share: f64) -> Duration {
        let mut taken = self.taken.clone();
        taken.sort_unstable();
        let rank = (taken.len() as f64 * share).ceil() as usize;
        taken.get(rank.max(1) - 1).copied().unwrap_or(PATIENCE)
    }

    pub(super) fn count(&self) -> usize {
        self.begun
    }
}

/// Calls an agent until it is dropped.
pub(super) struct Victim {
    phases: Arc<Mutex<Vec<Calls>>>,
    stopped: Arc<AtomicU64>,
}

impl Victim {
    /// Calls on a runtime and a connection of its own, so that the attackers do not delay it here.
    pub(super) fn start(url: String, target: Target) -> Self {
        let phases = Arc::new(Mutex::new(vec![Calls::default()]));
        let stopped = Arc::new(AtomicU64::new(0));
        let (shared, stop) = (Arc::clone(&phases), Arc::clone(&stopped));
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let client = async_nats::connect(url).await.unwrap();
                let mut ticks = tokio::time::interval(target.interval);
                ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
                let mut calls = JoinSet::new();
                while stop.load(Relaxed) == 0 {
                    ticks.tick().await;
                    while calls.try_join_next().is_some() {}
                    calls.spawn(call(client.clone(), target, Arc::clone(&shared)));
                }
            });
        });
        Self { phases, stopped }
    }

    /// Begins a new phase.
    pub(super) fn begin(&self) {
        self.phases.lock().unwrap().push(Calls::default());
    }

    /// Ends the phase, and waits for its calls.
    pub(super) async fn end(&self) -> Calls {
        let phase = {
            let mut phases = self.phases.lock().unwrap();
            phases.push(Calls::default());
            phases.len() - 2
        };
        loop {
            let calls = self.phases.lock().unwrap()[phase].clone();
            if calls.taken.len() + calls.lost.len() == calls.begun {
                return calls;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.stopped.store(1, Relaxed);
    }
}

async fn call(client: Client, target: Target, phases: Arc<Mutex<Vec<Calls>>>) {
    let (phase, number) = {
        let mut phases = phases.lock().unwrap();
        let phase = phases.len() - 1;
        phases[phase].begun += 1;
        (phase, phases[phase].begun)
    };
    let Target { agent, action, exchange, .. } = target;
    let (prompt, expected) = exchange(phase, number);
    let began = Instant::now();
    let reply = request_of(&client, agent, action, HeaderMap::new(), &json!({ "prompt": prompt })).await;
    let taken = began.elapsed();
    let calls = &mut phases.lock().unwrap()[phase];
    match reply {
        Ok(reply) if reply["message"] == expected => calls.taken.push(taken),
        Ok(reply) => calls.lost.push(reply["message"].to_string().chars().take(200).collect()),
        Err(error) => calls.lost.push(error),
    }
}

async fn request(client: &Client, action: &str, headers: HeaderMap, body: &Value) -> Result<Value, String> {
    request_of(client, SMALL.agent, action, headers, body).await
}

async fn request_of(
    client: &Client,
    agent: &str,
    action: &str,
    headers: HeaderMap,
    body: &Value,
) -> Result<Value, String> {
    let request = Request::new().headers(headers).payload(body.to_string().into()).timeout(Some(PATIENCE));
    let reply = client.send_request(format!("a2a.action.{agent}.{action}"), request).await;
    let reply = reply.map_err(|error| error.to_string())?;
    serde_json::from_slice(&reply.payload).map_err(|error| error.to_string())
}

/// What the bridge has promised to callers of the victim: a running task, an idempotency key and an open question.
pub(super) struct Promises {
    running: String,
    key: String,
    keyed: String,
    follow_up: String,
}

impl Promises {
    pub(super) async fn make(client: &Client) -> Result<Self, String> {
        let submit = headers(&[("A2A-Reply", "submit")]);
        let running = request(client, "slow", submit, &json!({"prompt": "600"})).await?;
        let key = uuid::Uuid::new_v4().to_string();
        let keyed =
            request(client, "echo", headers(&[("Nats-Msg-Id", &key)]), &json!({"prompt": "once"})).await?;
        let question =
            request(client, "report", HeaderMap::new(), &json!({"prompt": "report on tides"})).await?;
        Ok(Self {
            running: text(&running["task"]["id"])?,
            key,
            keyed: text(&keyed["task"]["id"])?,
            follow_up: text(&question["data"]["follow_up_id"])?,
        })
    }

    /// Which of them the bridge has broken. Afterwards, nothing of them is left.
    pub(super) async fn broken(&self, client: &Client) -> Vec<String> {
        let id = json!({"task_id": self.running});
        let answer = json!({"follow_up_id": self.follow_up, "user_response": "Markdown"});
        let key = headers(&[("Nats-Msg-Id", &self.key)]);
        let checks = [
            ("running task", request(client, "get_task", HeaderMap::new(), &id).await, "WORKING"),
            ("cancel", request(client, "cancel_task", HeaderMap::new(), &id).await, "CANCELED"),
            (
                "answer",
                request(client, "provide_required_input", HeaderMap::new(), &answer).await,
                "COMPLETED",
            ),
        ];
        let mut broken = Vec::new();
        for (what, reply, status) in checks {
            match reply {
                Ok(reply) if reply["status"] == status => {}
                Ok(reply) => broken.push(format!("{what}: {} {}", reply["status"], reply["message"])),
                Err(error) => broken.push(format!("{what}: {error}")),
            }
        }
        match request(client, "echo", key, &json!({"prompt": "once"})).await {
            Ok(reply) if reply["task"]["id"] == self.keyed => {}
            Ok(reply) if reply["success"] == true => broken.push("key: the agent ran twice".into()),
            Ok(reply) => broken.push(format!("key: {}", reply["message"])),
            Err(error) => broken.push(format!("key: {error}")),
        }
        broken
    }
}

fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.insert(*name, *value);
    }
    headers
}

fn text(value: &Value) -> Result<String, String> {
    value.as_str().map(str::to_owned).ok_or_else(|| "a call of the victim has no id in its reply".into())
}
