//! Publishes one agent on NATS: its service, its actions while it is ready, and its registry entry.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use async_nats::HeaderMap;
use async_nats::connection::State as Connection;
use bytes::Bytes;
use serde::Serialize;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use super::actions::{self, Target};
use super::catalog::{BuiltInAction, Catalog, RegistryEntry};
use super::encoded_reply::EncodedReply;
use super::outbox::Outbox;
use super::peers::Forwarder;
use super::service::{
    MAX_VERSION, Service, ServiceContext, ServiceError, ServiceInfo, new_id, semver_or_zero,
};
use super::stoppable_task::StoppableTask;
use super::subject::{Subjects, Token};
use crate::action::actions::TaskUpdate;
use crate::agent::{Agent, AgentState, AgentStatus};
use crate::background::{BackgroundTasks, OnPanic};
use crate::dispatch::Dispatcher;
use crate::files::CallFiles;
use crate::json::{first_that_fit, to_bytes};
use crate::reply;
use crate::text::{Timestamp, error_chain, shorten};

const QUEUE_GROUP: &str = "a2a";
/// The registry entry is published at least this often.
const ANNOUNCE_INTERVAL: Duration = Duration::from_secs(15);
/// Maximum bytes of the headers of a task update.
const UPDATE_HEADERS: usize = 64;
/// Maximum bytes of the description of a service.
pub(super) const MAX_DESCRIPTION: usize = 2048;
/// Maximum bytes of an error in metadata; the registry entry has the whole text.
const MAX_ERROR: usize = 512;
/// Separates the card's description from the names of the actions in the description of a service.
pub(crate) const ACTIONS: &str = "\nActions: ";
/// Key in the metadata: the version as the card has it. That of the service must be a semantic version.
pub(crate) const CARD_VERSION: &str = "a2a.card_version";
pub(super) const BRIDGE: &str = concat!("a2a-bridge/", env!("CARGO_PKG_VERSION"));

#[derive(Debug)]
pub(crate) struct Publication {
    registration: Arc<AgentRegistration>,
    publisher: StoppableTask,
}

impl Publication {
    /// Publishes the agent's built-in actions; its skills follow when it is ready.
    pub(crate) async fn start(
        dispatcher: Arc<Dispatcher>,
        updates: mpsc::Receiver<TaskUpdate>,
        context: &ServiceContext,
        outbox: &Outbox,
        subjects: &Subjects,
        forwarder: Arc<Forwarder>,
        tasks: &BackgroundTasks,
    ) -> Result<Self, ServiceError> {
        let bridge_instance: Arc<str> = forwarder.instance().simple().to_string().into();
        let agent = dispatcher.agent();
        let token = Token::new(&agent.name);
        let instance: Arc<str> = new_id().into();
        let built_ins = BuiltInAction::ALL
            .iter()
            .filter(|built_in| **built_in != BuiltInAction::Attach || dispatcher.log().is_some())
            .map(|&built_in| {
                let handler =
                    actions::handler(&dispatcher, outbox, &instance, &forwarder, Target::BuiltIn(built_in));
                (built_in.endpoint(subjects, &token), handler)
            })
            .collect();
        let info = service_info(agent, &bridge_instance, &agent.status.borrow(), &Catalog::default());
        let service = Service::start(context, token.clone(), &instance, QUEUE_GROUP, info, built_ins).await?;
        let registration = Arc::new(AgentRegistration {
            outbox: Outbox::one_at_a_time(context.client.clone(), context.confirmations.clone()),
            subject: subjects.registry(&token),
            agent: Arc::clone(&agent.name),
            bridge_instance,
            service,
            first_published: CancellationToken::new(),
            announce: Arc::default(),
        });
        let updates = publish_updates(outbox.clone(), subjects.clone(), token.clone(), updates);
        tasks.spawn("task updates", OnPanic::StopBridge, updates);
        let subjects = subjects.clone();
        let (outbox, own) = (outbox.clone(), Arc::clone(&registration));
        let publisher =
            Publisher { token, subjects, dispatcher, outbox, instance, forwarder, registration: own };
        let publisher = StoppableTask::spawn(tasks, "publication", |stop| async move {
            // Also ends an announcement that waits for the connection.
            stop.run_until_cancelled(publisher.run()).await;
        });
        Ok(Self { registration, publisher })
    }

    /// The id of this agent's service, which distinguishes replicas.
    pub(crate) fn instance(&self) -> String {
        self.registration.service.id().to_owned()
    }

    /// Waits until the agent's first state is published, and its actions if it is ready.
    pub(crate) async fn wait_until_first_published(&self) {
        self.registration.first_published.cancelled().await;
    }

    /// Announces the agent in the registry when notified, in addition to every change and every 15 s.
    pub(crate) fn announcer(&self) -> Arc<Notify> {
        Arc::clone(&self.registration.announce)
    }

    /// Removes the agent's service without losing a request. Requests that were received still run.
    pub(crate) async fn withdraw(&self) {
        self.publisher.stop().await;
        self.registration.service.stop().await;
    }

    /// Announces `stopped` in the registry: this instance no longer serves the agent.
    pub(crate) async fn announce_stopped(&self, status: &AgentStatus) {
        self.registration.announce(status, AgentState::Stopped, &Catalog::default()).await;
    }
}

/// Publishes every change of the agent's status.
struct Publisher {
    token: Token,
    subjects: Subjects,
    dispatcher: Arc<Dispatcher>,
    outbox: Outbox,
    instance: Arc<str>,
    forwarder: Arc<Forwarder>,
    registration: Arc<AgentRegistration>,
}

impl Publisher {
    async fn run(self) {
        let mut status = self.dispatcher.agent().status.clone();
        let mut ticks = tokio::time::interval_at(Instant::now() + ANNOUNCE_INTERVAL, ANNOUNCE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let current = status.borrow_and_update().clone();
            let catalog = self.publish(&current).await;
            let announce = || self.registration.announce(&current, current.state, &catalog);
            announce().await;
            self.registration.first_published.cancel();
            loop {
                tokio::select! {
                    biased;
                    changed = status.changed() => match changed {
                        Ok(()) => break,
                        // The agent's supervisor has ended; the last state stays published until the stop.
                        Err(_) => return,
                    },
                    () = self.registration.announce.notified() => announce().await,
                    _ = ticks.tick() => announce().await,
                }
            }
        }
    }

    async fn publish(&self, status: &AgentStatus) -> Catalog {
        let agent = self.dispatcher.agent();
        let catalog = match &status.known {
            Some(known) if status.state == AgentState::Ready => {
                Catalog::new(&known.card, &agent.config.skills, &self.subjects, &self.token)
            }
            _ => Catalog::default(),
        };
        for warning in &catalog.warnings {
            tracing::warn!(agent = %agent.name, "{warning}");
        }
        let registration = &self.registration;
        let describe = || {
            let info = service_info(agent, &registration.bridge_instance, status, &catalog);
            registration.service.describe(info);
        };
        // Whoever reads that the agent is ready must find its actions.
        if catalog.actions.is_empty() {
            describe();
        }
        let endpoints = catalog
            .actions
            .iter()
            .map(|action| {
                let target = Target::Skill(Arc::clone(action));
                let Self { dispatcher, outbox, instance, forwarder, .. } = self;
                let handler = actions::handler(dispatcher, outbox, instance, forwarder, target);
                (action.endpoint.clone(), handler)
            })
            .collect();
        if let Err(error) = registration.service.publish(endpoints).await {
            tracing::error!(agent = %agent.name, error = error_chain(&error), "cannot publish the agent's actions");
        }
        if !catalog.actions.is_empty() {
            describe();
        }
        catalog
    }
}

/// Publishes the updates of submitted tasks until all senders are dropped.
async fn publish_updates(
    outbox: Outbox,
    subjects: Subjects,
    agent: Token,
    mut updates: mpsc::Receiver<TaskUpdate>,
) {
    while let Some(update) = updates.recv().await {
        let TaskUpdate { task_id, reply, revision, caller, charge: _charge, files } = update;
        // Others than the caller may receive it.
        let reply = if caller.is_verified() { reply::without_content(&reply) } else { reply };
        let subject = subjects.task(&agent, &Token::new(&task_id));
        let mut encoded =
            CallFiles::scope_of(files, EncodedReply::prepare(&reply, &outbox, UPDATE_HEADERS)).await;
        // Error headers are for replies only.
        let mut headers = HeaderMap::new();
        headers.insert("A2A-Revision", revision.to_string());
        encoded.headers = Some(headers);
        if let Err(error) = encoded.send(&outbox, subject.into()).await {
            tracing::warn!(%agent, task_id, error = error_chain(&error), "cannot publish a task update");
        }
    }
}

fn service_info(
    agent: &Agent,
    bridge_instance: &str,
    status: &AgentStatus,
    catalog: &Catalog,
) -> ServiceInfo {
    let mut metadata = BTreeMap::new();
    let mut insert = |key: &str, value: &str| metadata.insert(key.to_owned(), value.to_owned());
    insert("bridge", BRIDGE);
    insert("a2a.agent", &agent.name);
    insert("a2a.state", &status.state.to_string());
    insert("a2a.since", &Timestamp(status.since).to_string());
    insert("a2a.restarts", &status.restarts.to_string());
    if let Some(error) = &status.last_error {
        insert("a2a.last_error", &shorten(error, MAX_ERROR));
    }
    if let Some(reason) = &status.reason {
        insert("a2a.reason", &shorten(reason, MAX_ERROR));
    }
    insert("a2a.bridge_id", bridge_id());
    insert("bridge_instance", bridge_instance);
    let (mut version, mut description) = ("0.0.0", String::new());
    if let Some(known) = &status.known {
        let dialect = known.interface.dialect;
        insert("a2a.protocol_version", dialect.protocol_version());
        insert("a2a.binding", dialect.binding());
        insert("a2a.chosen_because", &known.interface.reason);
        insert("a2a.card_hash", &known.card.hash);
        insert(CARD_VERSION, &shorten(&known.card.version, MAX_VERSION));
        version = semver_or_zero(&known.card.version);
        description = shorten(&known.card.description, MAX_DESCRIPTION);
    }
    if catalog.skills_left_out > 0 {
        insert("a2a.skills_left_out", &catalog.skills_left_out.to_string());
    }
    if !catalog.actions.is_empty() {
        let names: Vec<_> = catalog.actions.iter().map(|action| action.token.as_str()).collect();
        description = shorten(&format!("{description}{ACTIONS}{}", names.join(", ")), 2 * MAX_DESCRIPTION);
    }
    ServiceInfo { version: version.to_owned(), description, metadata }
}

/// Distinguishes the bridges of one configuration: the host, and the process on it.
fn bridge_id() -> &'static str {
    static ID: LazyLock<String> = LazyLock::new(|| {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = Some(host.trim()).filter(|host| !host.is_empty()).unwrap_or("bridge");
        format!("{}:{}", shorten(host, 64), std::process::id())
    });
    &ID
}

/// Publishes an announcement unless the connection is down: the client would queue it, and it would be
/// outdated when it arrives.
pub(super) async fn publish_if_connected(outbox: &Outbox, agent: &str, subject: String, body: Bytes) {
    if outbox.client.connection_state() == Connection::Connected
        && let Err(error) = outbox.publish(subject.into(), None, None, body).await
    {
        tracing::warn!(%agent, error = error_chain(&error), "cannot publish the registry entry or the heartbeat of the agent");
    }
}

/// The agent's service and its registry entry. Must not hold the dispatcher: `publish_updates` ends only when the
/// dispatcher, which holds the sender, is dropped.
#[derive(Debug)]
struct AgentRegistration {
    /// Not that of the agent, whose replies may wait for slow readers.
    outbox: Outbox,
    subject: String,
    agent: Arc<str>,
    /// Identifies this process, for all of its agents.
    bridge_instance: Arc<str>,
    service: Arc<Service>,
    /// Cancelled when the agent's first state is published.
    first_published: CancellationToken,
    announce: Arc<Notify>,
}

#[derive(Serialize)]
struct Announcement<'a> {
    agent: &'a str,
    state: AgentState,
    since: Timestamp,
    instance: &'a str,
    bridge: &'static str,
    bridge_instance: &'a str,
    actions: Vec<RegistryEntry<'a>>,
    /// Number of published actions that are not in `actions` because they do not fit into a message.
    #[serde(skip_serializing_if = "Option::is_none")]
    actions_left_out: Option<usize>,
    /// Number of skills that the configuration selects but the bridge does not publish.
    #[serde(skip_serializing_if = "Option::is_none")]
    skills_left_out: Option<usize>,
    card_hash: Option<&'a str>,
    restarts: u32,
    last_error: Option<&'a str>,
    reason: Option<&'a str>,
    protocol_version: Option<&'static str>,
    binding: Option<&'static str>,
    chosen_because: Option<&'a str>,
    interval_s: u64,
}

impl AgentRegistration {
    async fn announce(&self, status: &AgentStatus, state: AgentState, catalog: &Catalog) {
        let body = self.encode(status, state, catalog);
        publish_if_connected(&self.outbox, &self.agent, self.subject.clone(), body).await;
    }

    fn encode(&self, status: &AgentStatus, state: AgentState, catalog: &Catalog) -> Bytes {
        let since = if state == status.state { status.since } else { SystemTime::now() };
        let known = status.known.as_ref();
        let dialect = known.map(|known| known.interface.dialect);
        let if_any = |count: usize| Some(count).filter(|count| *count > 0);
        let announcement = |actions, left_out| Announcement {
            agent: &self.agent,
            state,
            since: Timestamp(since),
            instance: self.service.id(),
            bridge: BRIDGE,
            bridge_instance: &self.bridge_instance,
            actions,
            actions_left_out: if_any(left_out),
            skills_left_out: if_any(catalog.skills_left_out),
            card_hash: known.map(|known| known.card.hash.as_str()),
            restarts: status.restarts,
            last_error: status.last_error.as_deref(),
            reason: status.reason.as_deref(),
            protocol_version: dialect.map(|dialect| dialect.protocol_version()),
            binding: dialect.map(|dialect| dialect.binding()),
            chosen_because: known.map(|known| known.interface.reason.as_str()),
            interval_s: ANNOUNCE_INTERVAL.as_secs(),
        };
        let (limit, count) = (self.outbox.max_payload(), catalog.actions.len());
        let entries = || catalog.actions.iter().map(|action| action.registry_entry());
        let body = to_bytes(&announcement(entries().collect(), 0));
        if body.len() <= limit {
            return body;
        }
        let used = to_bytes(&announcement(Vec::new(), count)).len();
        let kept = first_that_fit(entries().map(RegistryEntry::without_details).collect(), used, limit);
        let left_out = count - kept.len();
        to_bytes(&announcement(kept, left_out))
    }
}
