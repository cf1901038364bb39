//! One agent's life: process and card make a status. Nothing about NATS.
//!
//! [`Agent::start`] spawns the loop in `life` and returns a handle. The loop writes two watch
//! channels: the [`Status`] for whoever publishes it, and the [`Instance`] that calls go to, which
//! is there exactly while the agent is ready. Orders (start, stop, restart) go the other way.
//!
//! ```text
//! life: place ─> spawn ─> look until ready ─> watch ─┬─> exit, hung, stopped: pause, then again
//!                                                    └─> ordered: end it, then rest or again
//! ```

pub mod calls;
mod life;
mod probe;
mod start;
pub mod status;
mod trouble;
mod watch;

use std::sync::Arc;

use secrecy::SecretString;
use tokio::sync::{Notify, watch as channel};
use tokio_util::sync::CancellationToken;

use crate::a2a::auth::AuthError;
use crate::a2a::{self, Instance};
use crate::config;
use crate::process::child::Host;
use crate::process::output::Output;
use crate::tasks::OnFailure;

use calls::{Calls, Work};
use life::Wanted;

pub use status::{KnownCard, State, Status};

/// A handle to one agent; clone freely.
#[derive(Debug, Clone)]
pub struct Agent {
    /// Its settings.
    pub config: Arc<config::Agent>,
    /// Its name in the settings.
    pub name: Arc<str>,
    /// Where it stands.
    pub status: channel::Receiver<Status>,
    /// Where calls go, while it is ready.
    pub live: channel::Receiver<Option<Arc<Instance>>>,
    /// What its process writes.
    pub output: Output,
    /// Its calls, counted.
    pub calls: Arc<Calls>,
    wanted: channel::Sender<Wanted>,
    recheck: Arc<Notify>,
    stop: CancellationToken,
    ended: CancellationToken,
}

impl Agent {
    /// Begins to launch the agent or to look for it. `hurry` skips the grace time of its end.
    pub fn start(
        config: config::Agent,
        http: &reqwest::Client,
        host: &Host,
        hurry: CancellationToken,
    ) -> Result<Self, AuthError> {
        // Credentials that cannot be sent are an error of the settings, not of a start.
        a2a::chooser(&config, http)?;
        let name: Arc<str> = config.name.as_str().into();
        let config = Arc::new(config);
        let (status_sender, status) = channel::channel(Status::new());
        let (live_sender, live) = channel::channel(None);
        let (wanted, orders) = channel::channel(Wanted { running: true, order: 0 });
        let agent = Self {
            config: Arc::clone(&config),
            name: Arc::clone(&name),
            status,
            live,
            output: Output::new(Arc::clone(&name), secrets(&config)),
            calls: Arc::default(),
            wanted,
            recheck: Arc::default(),
            stop: CancellationToken::new(),
            ended: CancellationToken::new(),
        };
        let life = life::Life {
            config,
            name,
            http: http.clone(),
            host: host.clone(),
            output: agent.output.clone(),
            calls: Arc::clone(&agent.calls),
            status: status_sender,
            live: live_sender,
            wanted: orders,
            recheck: Arc::clone(&agent.recheck),
            stop: agent.stop.clone(),
            hurry,
        };
        let ended = agent.ended.clone().drop_guard();
        host.tasks.spawn("agent", OnFailure::StopBridge, async move {
            life.run().await;
            drop(ended);
        });
        Ok(agent)
    }

    /// A call found nobody there: look at once whether the agent is gone.
    pub fn recheck(&self) {
        self.recheck.notify_one();
    }

    /// A call is in flight for as long as what this gives back lives: the agent is not taken for hung.
    pub fn work(&self) -> Work {
        self.calls.begin()
    }

    /// Tells the agent to run, to rest, or to begin anew. Gives back the number that
    /// [`Status::order`] has once it does so.
    pub fn order(&self, order: Order) -> u64 {
        let state = self.status.borrow().state;
        let runs = matches!(state, State::Starting | State::Ready | State::Unhealthy);
        let mut number = 0;
        self.wanted.send_modify(|wanted| {
            let is_done = match order {
                Order::Start => wanted.running && runs,
                Order::Stop => !wanted.running,
                Order::Restart => false,
            };
            if !is_done {
                wanted.running = order != Order::Stop;
                wanted.order += 1;
            }
            number = wanted.order;
        });
        number
    }

    /// Ends the agent, if the bridge launched it, and waits until it has ended.
    pub async fn stop(&self) {
        self.stop.cancel();
        self.ended.cancelled().await;
    }
}

/// What an agent can be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Run, if it does not; if the bridge waits before the next try, try now.
    Start,
    /// End, and stay so.
    Stop,
    /// End, and start at once.
    Restart,
}

/// What must not show up in the agent's output.
fn secrets(config: &config::Agent) -> Vec<SecretString> {
    let is_secret = |name: &&String| {
        let name = name.to_ascii_lowercase();
        ["token", "secret", "password", "key", "credential"].iter().any(|word| name.contains(word))
    };
    let variables = config.env.iter().filter(|(name, _)| is_secret(name));
    let auth = config.auth.iter().chain(&config.card_auth).flatten().flat_map(|auth| {
        let key = auth.api_key.iter().map(|key| &key.value);
        let password = auth.basic.iter().map(|basic| &basic.password);
        let client = auth.oauth2.iter().map(|oauth| &oauth.client_secret);
        auth.bearer.iter().chain(key).chain(password).chain(client)
    });
    config
        .bearer_token
        .iter()
        .chain(auth)
        .chain(config.headers.values())
        .chain(variables.map(|(_, value)| value))
        .cloned()
        .collect()
}
