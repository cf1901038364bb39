//! A bridge with a victim and hostile agents, and how attackers call it.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use async_nats::{Client, HeaderMap, Request};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::hostile::{CARDED, CROWD, Hostile};
use super::raw_agents::{reopening_agent, repeating_agent};
use super::shapes::SECRET_LINES;
use crate::support::eventually::eventually_within;
use crate::support::processes::{memory, program};
use crate::support::site::{Site, demo, shell};

/// `limits.memory` of the bridge.
pub(super) const MEMORY: u64 = 512 << 20;
/// The limit of open files that many systems start a service with.
const SOFT_FILES: &str = "ulimit -S -n 1024; exec \"$@\"";
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an attacker waits for the reply to a call.
const PATIENCE: Duration = Duration::from_secs(10);

/// Where the attackers run. They have the lowest priority: in reality, their own work is done on other machines, and
/// here it must not be what delays the victims. What they make the bridge and the server do has the normal priority.
pub(super) static ATTACKERS: LazyLock<Runtime> = LazyLock::new(|| {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(2).enable_all().on_thread_start(lower_priority).build().unwrap()
});

/// Gives this thread, and the threads that it will start, the lowest priority. Where that is not possible, the test
/// is only stricter.
pub(super) fn lower_priority() {
    let thread = nix::unistd::gettid().to_string();
    let _ = Command::new("renice").args(["-n", "19", "-p", &thread]).output();
}

pub(super) struct Arena {
    pub(super) site: Site,
    pub(super) hostile: Arc<Hostile>,
    /// The connection of the attackers.
    pub(super) client: Client,
    /// The connection of the victim's callers.
    pub(super) caller: Client,
    /// The agent `loud` floods its output as long as this file exists.
    pub(super) flood: PathBuf,
    pub(super) pid: i32,
}

impl Arena {
    pub(super) async fn start() -> Arc<Self> {
        let mut site = Site::new().await;
        let hostile = Hostile::start();
        let flood = site.folder().join("flood");
        let attached = |agent: &str, more: &str| format!("url: {}\n{more}", hostile.url(agent));
        let loud = format!(
            "while sleep 0.1; do while [ -e {} ]; do yes this agent talks too much | head -n 100000; done; done & exec DEMO",
            flood.display()
        );
        // A secret of many lines, as a PEM key is.
        let redacted =
            format!(r#"auth: [{{ basic: {{ user: me, password: "{}" }} }}]"#, SECRET_LINES.join(r"\n"));
        let mut agents = vec![
            ("victim", demo("")),
            ("large", demo("")),
            ("hostile", attached("hostile", "")),
            ("streamer", attached("streamer", "")),
            ("bigcard", attached("bigcard", "")),
            ("repeater", format!("url: http://127.0.0.1:{}", repeating_agent())),
            ("loud", shell(&loud)),
            ("places", attached("places", "")),
            ("reopening", reopening_agent()),
            ("redacted", attached("redacted", &redacted)),
        ];
        agents.extend(HANGING.map(|agent| (agent, attached(agent, ""))));
        agents.extend(CROWD.map(|agent| (agent, attached(agent, ""))));
        agents.extend(CARDED.map(|agent| (agent, attached(agent, "card_refresh: 300ms"))));
        let agents: Vec<_> = agents.iter().map(|(name, lines)| (*name, lines.as_str())).collect();
        let head = if has_memory_limit() {
            format!("limits: {{ memory: {}MiB }}", MEMORY >> 20)
        } else {
            String::new()
        };
        site.settings_with(&head, &agents);
        let pid = site.start_through(&["/bin/sh", "-c", SOFT_FILES, "sh"]);
        for (agent, _) in agents {
            site.until_within(START_TIMEOUT, agent, |report| report.state == "ready").await;
        }
        let url = site.server.url();
        let client = ATTACKERS.spawn(async { async_nats::connect(url).await.unwrap() }).await.unwrap();
        let caller = site.server.connect().await;
        eventually_within(START_TIMEOUT, || async {
            caller.request("a2a.action.victim.echo", "hello".into()).await.ok()
        })
        .await;
        Arc::new(Self { site, hostile, client, caller, flood, pid })
    }

    /// Calls an agent from many callers at once, until time or number is over.
    pub(super) async fn load(self: &Arc<Self>, load: Load) -> Tally {
        if !load.prompt.is_empty() {
            self.hostile.prepare(load.prompt);
        }
        let (number, until) = (Arc::new(AtomicUsize::new(0)), Instant::now() + load.time);
        let load = Arc::new(load);
        let mut workers = JoinSet::new();
        for _ in 0..load.callers {
            let (arena, load, number) = (Arc::clone(self), Arc::clone(&load), Arc::clone(&number));
            workers.spawn(async move {
                let mut tally = Tally::default();
                while Instant::now() < until {
                    let index = number.fetch_add(1, Relaxed);
                    if index >= load.calls {
                        break;
                    }
                    tally.count(&arena.attack_call(&load, index).await);
                }
                tally
            });
        }
        let mut tally = Tally::default();
        while let Some(done) = workers.join_next().await {
            tally.add(done.unwrap());
        }
        tally
    }

    async fn attack_call(&self, load: &Load, index: usize) -> Result<Value, String> {
        let mut headers = HeaderMap::new();
        if load.is_keyed {
            headers.insert("Nats-Msg-Id", format!("key-{index}-{}", fastrand::u64(..)));
        }
        let subject = format!("a2a.action.{}.{}", load.agent, load.action);
        let body = (load.body)(load.prompt, index).into();
        if load.streams {
            headers.insert("A2A-Reply", "stream");
            return self.stream(subject, headers, body).await;
        }
        let request = Request::new().headers(headers).payload(body).timeout(Some(PATIENCE));
        let reply = self.client.send_request(subject, request).await.map_err(|error| error.to_string())?;
        serde_json::from_slice(&reply.payload).map_err(|error| error.to_string())
    }

    /// Reads a stream to its end; the reply in its last frame.
    async fn stream(&self, subject: String, headers: HeaderMap, body: bytes::Bytes) -> Result<Value, String> {
        let inbox = self.client.new_inbox();
        let mut frames = self.client.subscribe(inbox.clone()).await.map_err(|error| error.to_string())?;
        let sent = self.client.publish_with_reply_and_headers(subject, inbox, headers, body).await;
        sent.map_err(|error| error.to_string())?;
        let read = async {
            let mut last = bytes::Bytes::new();
            while let Some(frame) = frames.next().await {
                if frame.payload.is_empty() {
                    break;
                }
                last = frame.payload;
            }
            last
        };
        let last = tokio::time::timeout(PATIENCE, read).await.map_err(|_| "timed out".to_owned())?;
        let mut frame: Value = serde_json::from_slice(&last).map_err(|error| error.to_string())?;
        Ok(frame["data"].take())
    }

    /// How often the bridge has lost its NATS connection.
    pub(super) fn disconnects(&self) -> usize {
        self.site.log().matches("NATS connection is down").count()
    }

    pub(super) fn is_running(&self) -> bool {
        // Of a process that has ended, and of a zombie, it is 0.
        memory(self.pid, "VmRSS") > 0
    }
}

pub(super) const HANGING: [&str; 4] = ["hanging1", "hanging2", "hanging3", "hanging4"];

/// Builds before `limits.memory` can be attacked too, to compare.
fn has_memory_limit() -> bool {
    let schema = Command::new(program()).arg("schema").output().unwrap();
    let schema: Value = serde_json::from_slice(&schema.stdout).unwrap();
    schema["properties"].get("limits").is_some()
}

/// How an agent is called.
pub(super) struct Load {
    pub(super) agent: &'static str,
    pub(super) action: &'static str,
    /// Selects the answer; empty if the agent has only one.
    pub(super) prompt: &'static str,
    /// The body of a call, from the prompt and the number of the call.
    pub(super) body: fn(&str, usize) -> String,
    pub(super) streams: bool,
    pub(super) is_keyed: bool,
    pub(super) callers: usize,
    pub(super) calls: usize,
    pub(super) time: Duration,
}

impl Load {
    /// Eight callers at once, for this time.
    pub(super) fn new(agent: &'static str, prompt: &'static str, time: Duration) -> Self {
        Self {
            agent,
            action: "ask",
            prompt,
            body: |prompt, index| json!({ "prompt": format!("{prompt}#{index}") }).to_string(),
            streams: false,
            is_keyed: false,
            callers: 8,
            calls: usize::MAX,
            time,
        }
    }
}

/// The replies to an attack.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// By `error_info.code`, `status`, or the error of the NATS client.
    replies: BTreeMap<String, usize>,
    /// What must not happen to the attackers either.
    pub(super) wrong: Vec<String>,
}

impl Tally {
    pub(super) fn count(&mut self, reply: &Result<Value, String>) {
        let kind = match reply {
            Ok(reply) => reply["error_info"]["code"].as_str().or(reply["status"].as_str()).unwrap_or("other"),
            Err(error) => error.as_str(),
        };
        self.note(kind, 1);
    }

    pub(super) fn note(&mut self, kind: &str, count: usize) {
        *self.replies.entry(kind.to_owned()).or_default() += count;
    }

    pub(super) fn add(&mut self, other: Self) {
        for (kind, count) in other.replies {
            self.note(&kind, count);
        }
        self.wrong.extend(other.wrong);
    }

    pub(super) fn summary(&self) -> String {
        let replies: Vec<_> = self.replies.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        replies.join(", ")
    }
}

/// Memory and descriptors of a process.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Usage {
    /// Resident memory in bytes.
    pub(super) memory: u64,
    /// `None` if the system does not show them: the bridge is not dumpable, so that only root sees them.
    pub(super) files: Option<u64>,
}

impl Usage {
    pub(super) fn of(pid: i32) -> Self {
        let files = std::fs::read_dir(format!("/proc/{pid}/fd")).ok().map(|files| files.count() as u64);
        Self { memory: memory(pid, "VmRSS"), files }
    }

    /// Raises each figure to the greater one of both.
    pub(super) fn raise(&mut self, other: Self) {
        self.memory = self.memory.max(other.memory);
        self.files = self.files.max(other.files);
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB", self.memory >> 20)?;
        match self.files {
            Some(files) => write!(f, ", {files} descriptors"),
            None => write!(f, ", descriptors unknown: this user cannot read them"),
        }
    }
}

/// Samples the usage of a process until it is dropped.
pub(super) struct Sampler {
    peak: Arc<Mutex<Usage>>,
    stopped: Arc<AtomicBool>,
}

impl Sampler {
    pub(super) fn start(pid: i32) -> Self {
        let (peak, stopped) = (Arc::<Mutex<Usage>>::default(), Arc::new(AtomicBool::new(false)));
        let (shared, stop) = (Arc::clone(&peak), Arc::clone(&stopped));
        std::thread::spawn(move || {
            while !stop.load(Relaxed) {
                let usage = Usage::of(pid);
                shared.lock().unwrap().raise(usage);
                std::thread::park_timeout(Duration::from_millis(10));
            }
        });
        Self { peak, stopped }
    }

    pub(super) fn peak(&self) -> Usage {
        *self.peak.lock().unwrap()
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.stopped.store(true, Relaxed);
    }
}
