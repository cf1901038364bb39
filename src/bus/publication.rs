//! One agent on the mesh: its service, its actions while it is ready, and its place in the registry.

use crate::text::error_chain;
use crate::text::rfc3339;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_nats::Client;
use async_nats::connection::State as Connection;
use serde::Serialize;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::actions::{self, Target};
use super::catalog::{BuiltInAction, Catalog, RegistryEntry};
use super::encoded_reply::EncodedReply;
use super::service::{Service, ServiceContext, ServiceError, ServiceInfo, semver_or_zero};
use super::subject::{Subjects, Token};
use crate::action::actions::TaskUpdate;
use crate::agent::{Agent, AgentState, AgentStatus};
use crate::dispatch::Dispatcher;
use crate::json::first_that_fit;
use crate::tasks::{OnFailure, Tasks};
use crate::text::shorten;

/// The queue group of all endpoints.
const QUEUE_GROUP: &str = "a2a";
/// How often the registry is told, changes or not.
const INTERVAL: Duration = Duration::from_secs(15);
/// Longest description of a service.
const MAX_DESCRIPTION: usize = 2048;
/// Longest error in metadata; the registry has the whole one.
const MAX_ERROR: usize = 512;
pub(super) const BRIDGE: &str = concat!("a2a-bridge/", env!("CARGO_PKG_VERSION"));

/// An agent's presence on the context.
#[derive(Debug)]
pub(crate) struct Publication {
    service: Arc<Service>,
    withdraw: CancellationToken,
    withdrawn: CancellationToken,
    registry: Registry,
    shown: watch::Receiver<Option<AgentState>>,
    announce: Arc<Notify>,
}

impl Publication {
    /// Puts an agent on the mesh; its skills follow when it is ready.
    pub(crate) async fn start(
        dispatcher: Arc<Dispatcher>,
        updates: mpsc::Receiver<TaskUpdate>,
        context: &ServiceContext,
        subjects: &Subjects,
        tasks: &Tasks,
    ) -> Result<Self, ServiceError> {
        let agent = dispatcher.agent().clone();
        let token = Token::new(&agent.name);
        let built_ins = BuiltInAction::ALL
            .iter()
            .map(|&built_in| {
                let handler = actions::handler(&dispatcher, &context.client, Target::BuiltIn(built_in));
                (built_in.endpoint(subjects, &token), handler)
            })
            .collect();
        let first = describe(&agent, &agent.status.borrow(), &Catalog::default());
        let service = Service::start(context, token.clone(), QUEUE_GROUP, first, built_ins).await?;
        let registry = Registry {
            client: context.client.clone(),
            subject: subjects.registry(&token),
            agent: Arc::clone(&agent.name),
            instance: service.id().to_owned(),
        };
        let (withdraw, withdrawn) = (CancellationToken::new(), CancellationToken::new());
        let (state, shown) = watch::channel(None);
        let announce = Arc::new(Notify::new());
        let this = Self {
            service: service.clone(),
            withdraw: withdraw.clone(),
            withdrawn: withdrawn.clone(),
            registry: registry.clone(),
            shown,
            announce: Arc::clone(&announce),
        };
        let subjects = subjects.clone();
        let shown = Shown { agent, token, subjects, service, dispatcher, registry, state, announce };
        let publisher =
            publish_updates(context.client.clone(), shown.subjects.clone(), shown.token.clone(), updates);
        tasks.spawn("task updates", OnFailure::StopBridge, publisher);
        let withdrawn = withdrawn.drop_guard();
        tasks.spawn("publication", OnFailure::StopBridge, async move {
            shown.follow(&withdraw).await;
            drop(withdrawn);
        });
        Ok(this)
    }

    /// The id of this agent's service, which tells replicas apart.
    pub(crate) fn instance(&self) -> String {
        self.registry.instance.clone()
    }

    /// The state whose actions are on the mesh; `None` before the first one.
    pub(crate) fn shown(&self) -> watch::Receiver<Option<AgentState>> {
        self.shown.clone()
    }

    /// Announces the agent in the registry when notified, beside every change and every 15 s.
    pub(crate) fn announcer(&self) -> Arc<Notify> {
        Arc::clone(&self.announce)
    }

    /// Takes everything off the mesh without losing a request. What was received is still worked on.
    pub(crate) async fn withdraw(&self) {
        self.withdraw.cancel();
        self.withdrawn.cancelled().await;
        self.service.stop().await;
    }

    /// Announces `stopped` in the registry: this instance does not serve the agent any more.
    pub(crate) async fn farewell(&self, status: &AgentStatus) {
        self.registry.announce(status, AgentState::Stopped, &Catalog::default()).await;
    }
}

struct Shown {
    agent: Agent,
    token: Token,
    subjects: Subjects,
    service: Arc<Service>,
    dispatcher: Arc<Dispatcher>,
    registry: Registry,
    state: watch::Sender<Option<AgentState>>,
    announce: Arc<Notify>,
}

impl Shown {
    /// Shows every change of the agent's status, until told to withdraw.
    async fn follow(&self, withdraw: &CancellationToken) {
        let mut status = self.agent.status.clone();
        let mut ticks = tokio::time::interval_at(Instant::now() + INTERVAL, INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let now = status.borrow_and_update().clone();
            let catalog = self.show(&now).await;
            self.registry.announce(&now, now.state, &catalog).await;
            self.state.send_replace(Some(now.state));
            loop {
                tokio::select! {
                    biased;
                    () = withdraw.cancelled() => return,
                    changed = status.changed() => match changed {
                        Ok(()) => break,
                        // The agent's loop has ended; what is shown stays until we are told.
                        Err(_) => return withdraw.cancelled().await,
                    },
                    () = self.announce.notified() => self.registry.announce(&now, now.state, &catalog).await,
                    _ = ticks.tick() => self.registry.announce(&now, now.state, &catalog).await,
                }
            }
        }
    }

    async fn show(&self, status: &AgentStatus) -> Catalog {
        let catalog = match &status.known {
            Some(known) if status.state == AgentState::Ready => {
                Catalog::new(&known.card, &self.agent.config.skills, &self.subjects, &self.token)
            }
            _ => Catalog::default(),
        };
        for warning in &catalog.warnings {
            tracing::warn!(agent = %self.agent.name, "{warning}");
        }
        self.service.describe(describe(&self.agent, status, &catalog));
        let endpoints = catalog
            .actions
            .iter()
            .map(|action| {
                let target = Target::Skill(Arc::clone(action));
                (action.endpoint(), actions::handler(&self.dispatcher, &self.registry.client, target))
            })
            .collect();
        if let Err(error) = self.service.publish(endpoints).await {
            tracing::error!(agent = %self.agent.name, error = error_chain(&error), "cannot publish the agent's actions");
        }
        catalog
    }
}

/// Publishes the changes of submitted tasks, until nobody can cause any.
async fn publish_updates(
    client: Client,
    subjects: Subjects,
    agent: Token,
    mut updates: mpsc::Receiver<TaskUpdate>,
) {
    while let Some(TaskUpdate { task_id, reply }) = updates.recv().await {
        let subject = subjects.task(&agent, &Token::new(&task_id));
        // Error headers belong to the reply of a request.
        let encoded = EncodedReply { headers: None, ..EncodedReply::new(&reply, client.max_payload(), 0) };
        if let Err(error) = encoded.send(&client, subject.into()).await {
            tracing::warn!(%agent, task_id, error = error_chain(&error), "cannot publish a change of a task");
        }
    }
}

/// The service as INFO shows it.
fn describe(agent: &Agent, status: &AgentStatus, catalog: &Catalog) -> ServiceInfo {
    let mut metadata = BTreeMap::from([
        ("bridge".to_owned(), BRIDGE.to_owned()),
        ("a2a.agent".to_owned(), agent.name.to_string()),
        ("a2a.state".to_owned(), status.state.to_string()),
        ("a2a.since".to_owned(), rfc3339(status.since)),
        ("a2a.restarts".to_owned(), status.restarts.to_string()),
    ]);
    if let Some(error) = &status.last_error {
        metadata.insert("a2a.last_error".to_owned(), shorten(error, MAX_ERROR));
    }
    let (mut version, mut description) = ("0.0.0".to_owned(), String::new());
    if let Some(known) = &status.known {
        let dialect = known.interface.dialect;
        metadata.insert("a2a.protocol_version".to_owned(), dialect.protocol_version().to_owned());
        metadata.insert("a2a.binding".to_owned(), dialect.binding().to_owned());
        metadata.insert("a2a.chosen_because".to_owned(), known.interface.reason.clone());
        metadata.insert("a2a.card_hash".to_owned(), known.card.hash().to_owned());
        version = semver_or_zero(&known.card.version).to_owned();
        description = shorten(&known.card.description, MAX_DESCRIPTION);
    }
    if catalog.skills_left_out > 0 {
        metadata.insert("a2a.skills_left_out".to_owned(), catalog.skills_left_out.to_string());
    }
    if !catalog.actions.is_empty() {
        let names: Vec<_> = catalog.actions.iter().map(|action| action.token.as_str()).collect();
        let separator = if description.is_empty() { "" } else { " " };
        description =
            shorten(&format!("{description}{separator}Actions: {}", names.join(", ")), 2 * MAX_DESCRIPTION);
    }
    ServiceInfo { version, description, metadata }
}

/// The agent's place in the registry.
#[derive(Debug, Clone)]
struct Registry {
    client: Client,
    subject: String,
    agent: Arc<str>,
    instance: String,
}

#[derive(Serialize)]
struct Announcement<'a> {
    agent: &'a str,
    state: AgentState,
    since: String,
    instance: &'a str,
    bridge: &'static str,
    actions: Vec<RegistryEntry<'a>>,
    /// How many published actions are not in `actions`, as they do not fit into a message.
    #[serde(skip_serializing_if = "Option::is_none")]
    actions_left_out: Option<usize>,
    /// How many skills the settings choose and the bridge does not publish; they have no action.
    #[serde(skip_serializing_if = "Option::is_none")]
    skills_left_out: Option<usize>,
    card_hash: Option<&'a str>,
    restarts: u32,
    last_error: Option<&'a str>,
    protocol_version: Option<&'static str>,
    binding: Option<&'static str>,
    chosen_because: Option<&'a str>,
    interval_s: u64,
}

impl Registry {
    async fn announce(&self, status: &AgentStatus, state: AgentState, catalog: &Catalog) {
        // While the connection is down publishes pile up, and the news would be old by then.
        if self.client.connection_state() != Connection::Connected {
            return;
        }
        let since = if state == status.state { status.since } else { SystemTime::now() };
        let dialect = status.known.as_ref().map(|known| known.interface.dialect);
        let if_any = |count: usize| Some(count).filter(|count| *count > 0);
        let announcement = |actions, unlisted: usize| Announcement {
            agent: &self.agent,
            state,
            since: rfc3339(since),
            instance: &self.instance,
            bridge: BRIDGE,
            actions,
            actions_left_out: if_any(unlisted),
            skills_left_out: if_any(catalog.skills_left_out),
            card_hash: status.known.as_ref().map(|known| known.card.hash()),
            restarts: status.restarts,
            last_error: status.last_error.as_deref(),
            protocol_version: dialect.map(|dialect| dialect.protocol_version()),
            binding: dialect.map(|dialect| dialect.binding()),
            chosen_because: status.known.as_ref().map(|known| known.interface.reason.as_str()),
            interval_s: INTERVAL.as_secs(),
        };
        let written = || {
            let (limit, count) = (self.client.max_payload(), catalog.actions.len());
            let entries = || catalog.actions.iter().map(|action| action.entry());
            let body = serde_json::to_vec(&announcement(entries().collect(), 0))?;
            if body.len() <= limit {
                return Ok(body);
            }
            let used = serde_json::to_vec(&announcement(Vec::new(), count))?.len();
            let kept = first_that_fit(entries().map(RegistryEntry::without_details).collect(), used, limit)?;
            let unlisted = count - kept.len();
            serde_json::to_vec(&announcement(kept, unlisted))
        };
        let body: serde_json::Result<Vec<u8>> = written();
        let body = body.expect("strings, numbers and schemas always serialize");
        if let Err(error) = self.client.publish(self.subject.clone(), body.into()).await {
            tracing::warn!(agent = %self.agent, error = error_chain(&error), "cannot announce the agent");
        }
    }
}
