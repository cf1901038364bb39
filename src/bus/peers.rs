//! The other replicas: which are alive, which holds a record, and requests that one runs for another.
//!
//! Replicas are bridges with the same `nats.subject_prefix`. They need core NATS only. Each process has an id, the
//! *instance*, and listens on subjects of its own. Only bridges may publish to them, so what arrives there is believed.
//!
//! | subject below the prefix | body | reply |
//! | --- | --- | --- |
//! | `peer.<instance>.ping` | `Ping`, or empty | `Ping` of the replica |
//! | `peer.<instance>.claim` | [`ClaimQuery`] | [`ClaimAnswer`] |
//! | `peer.<instance>.changed` | [`RecordChanged`] | none |
//! | `peer.<instance>.announce` | [`Announcement`]; the instance is the sender | none |
//! | `peer.<instance>.call.<agent>.<action>` | a forwarded request | see [`forward`] |
//! | `peers.<agent>` | [`FindQuery`] | [`FindAnswer`] of each replica that serves the agent |
//!
//! # Who is alive
//!
//! A replica is alive while its subject has a responder: NATS reports *no responders* the moment a connection is gone.
//! Each replica pings all others every five seconds; [`table`] says what follows from the responses. A round of pings
//! begins with a ping to itself: a replica whose own connection is down, or that lacks permissions, judges nobody.
//!
//! Replicas learn of each other from announcements: at the start, after a reconnect, when the served agents change, when
//! another replica appears, and every 15 seconds. A replica that stops unsubscribes first and announces its leave then,
//! so that the others find *no responders* within milliseconds.

mod answers;
mod calls;
mod forward;
mod liveness;
mod messages;
mod session_calls;
mod table;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use async_nats::connection::State as Connection;
use async_nats::{Client, HeaderMap, RequestErrorKind, Subject};
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, FutureExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Notify, broadcast, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use self::answers::PeerEndpoint;
pub(crate) use self::answers::PeerService;
pub(crate) use self::calls::{ForwardedCalls, Link};
pub(super) use self::forward::PEER;
pub(crate) use self::forward::{ForwardableRequest, Forwarder};
use self::liveness::SharedPings;
use self::messages::{Announcement, ClaimAnswer, ClaimQuery, FindAnswer, FindQuery, RecordChanged};
pub(crate) use self::session_calls::SessionCalls;
use self::table::{PeerTable, Serving, Verdict};
use super::service::{ServiceContext, ServiceError, round_trip};
use super::subject::{ANNOUNCE, ReplyGuard, Subjects, Token};
use crate::background::{BackgroundTasks, OnPanic};
use crate::json::to_bytes;
use crate::state::peers::{ClaimStatus, Death, Holder, InstanceId, Liveness, NoQueries, PeerQueries, Peers};
use crate::state::{RecordKey, RecordKind};

/// How long a replica may take to answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// How long to wait for the answers of all replicas.
const FIND_TIMEOUT: Duration = Duration::from_secs(1);
/// Answers that are read in addition to the expected ones.
const MAX_UNEXPECTED: usize = 16;
/// Maximum bytes of an id in a query. Longer ids are not looked for.
const MAX_ID: usize = 64 << 10;
/// Answers and notices that wait for the connection; further ones are dropped.
const MAX_OUTGOING: usize = 1024;
/// Deaths that a slow subscriber may miss.
const MAX_DEATHS: usize = 1024;

/// A small message that waits for the connection.
#[derive(Debug)]
struct Outgoing {
    to: Subject,
    headers: Option<HeaderMap>,
    body: Bytes,
}

/// Why a replica did not answer a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AskError {
    NoResponders,
    /// No answer in time, or none that could be read.
    NoAnswer,
}

/// The other replicas on one connection.
#[derive(Debug)]
pub(crate) struct NatsPeers {
    /// For tasks that it starts.
    this: Weak<Self>,
    instance: InstanceId,
    client: Client,
    subjects: Subjects,
    guard: Arc<ReplyGuard>,
    table: Mutex<PeerTable>,
    /// How many others are in the table and have responded, for calls: they do not lock it.
    known: AtomicUsize,
    /// When the last of the others was removed from the table, or this replica started.
    alone_since: Mutex<Instant>,
    pings: SharedPings,
    deaths: broadcast::Sender<Death>,
    queries: OnceLock<Arc<dyn PeerQueries>>,
    /// What this replica serves.
    agents: Mutex<HashMap<Token, Arc<PeerEndpoint>>>,
    outgoing: mpsc::Sender<Outgoing>,
    announce: Notify,
    tasks: BackgroundTasks,
    /// Cancelled when this replica leaves: its readers unsubscribe.
    leaving: CancellationToken,
    readers: TaskTracker,
}

impl NatsPeers {
    /// Subscribes, announces this replica, and begins to ping the others.
    pub(crate) async fn start(
        context: &ServiceContext,
        subjects: &Subjects,
        tasks: &BackgroundTasks,
    ) -> Result<Arc<Self>, ServiceError> {
        let (outgoing, queue) = mpsc::channel(MAX_OUTGOING);
        let this = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            instance: Uuid::new_v4(),
            client: context.client.clone(),
            subjects: subjects.clone(),
            guard: Arc::new(own_replies(&context.client, &context.guard)),
            table: Mutex::default(),
            known: AtomicUsize::new(0),
            alone_since: Mutex::new(Instant::now()),
            pings: SharedPings::default(),
            deaths: broadcast::Sender::new(MAX_DEATHS),
            queries: OnceLock::new(),
            agents: Mutex::default(),
            outgoing,
            announce: Notify::new(),
            tasks: tasks.clone(),
            leaving: CancellationToken::new(),
            readers: TaskTracker::new(),
        });
        let requests = this.subscribe(subjects.peer(this.instance, "*")).await?;
        let calls = this.subscribe(subjects.peer_calls(this.instance)).await?;
        let announcements = this.subscribe(subjects.peer_announcements()).await?;
        this.read(requests, |this, message| this.answer(message));
        this.read(calls, Self::accept_call);
        this.read(announcements, |this, message| this.read_announcement(&message));
        this.spawn("replies to replicas", Self::send_outgoing(this.client.clone(), queue));
        this.spawn("pings of replicas", Arc::clone(&this).ping_periodically());
        this.spawn("announcements to replicas", Arc::clone(&this).announce_periodically());
        Ok(this)
    }

    /// Who answers what others ask about the records of this process. Only the first call has an effect.
    pub(crate) fn set_queries(&self, queries: Arc<dyn PeerQueries>) {
        let _ = self.queries.set(queries);
    }

    fn queries(&self) -> &dyn PeerQueries {
        self.queries.get().map_or(&NoQueries, |queries| &**queries)
    }

    /// The replicas that stop or no longer respond, from now on. A receiver that falls behind by a thousand of them has
    /// to ask for the liveness of every replica that it depends on.
    pub(crate) fn deaths(&self) -> broadcast::Receiver<Death> {
        self.deaths.subscribe()
    }

    /// Unsubscribes, and announces that this replica stops. All state must be written by then, because others take over
    /// from here. Its last message is on its way when this returns, not at the server.
    pub(crate) async fn leave(&self) {
        self.leaving.cancel();
        self.readers.close();
        let leaving = async {
            self.readers.wait().await;
            // The others must find no responders when they receive the announcement.
            if self.is_connected() && round_trip(&self.client).await.is_ok() {
                self.publish_announcement(true).await;
            }
        };
        // Without a connection, nothing can be sent.
        let _ = tokio::time::timeout(REQUEST_TIMEOUT, leaving).await;
    }

    fn spawn(&self, name: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        let stop = self.tasks.stop.clone();
        self.tasks.spawn(name, OnPanic::StopBridge, async move {
            stop.run_until_cancelled(work).await;
        });
    }

    fn is_connected(&self) -> bool {
        self.client.connection_state() == Connection::Connected
    }

    /// How often the connection was made.
    fn connects(&self) -> u64 {
        self.client.statistics().connects.load(Relaxed)
    }

    async fn publish_announcement(&self, is_leaving: bool) {
        // Without a connection, the message would be outdated when it arrives.
        if !self.is_connected() {
            return;
        }
        let served = |(token, endpoint): (&Token, &Arc<PeerEndpoint>)| {
            (!endpoint.is_withdrawn()).then(|| token.to_string())
        };
        let agents = self.lock_agents().iter().filter_map(served).collect();
        let body = to_bytes(&Announcement { agents: Some(agents), is_leaving });
        let body = match body.len() <= self.client.max_payload() {
            true => body,
            false => to_bytes(&Announcement { agents: None, is_leaving }),
        };
        let subject = self.subjects.peer(self.instance, ANNOUNCE);
        if let Err(error) = self.client.publish(subject, body).await {
            tracing::warn!(%error, "cannot announce this bridge to other replicas");
        }
    }

    /// Publishes answers and notices one after the other, so that readers never wait for the connection.
    async fn send_outgoing(client: Client, mut queue: mpsc::Receiver<Outgoing>) {
        while let Some(Outgoing { to, headers, body }) = queue.recv().await {
            let published = match headers {
                Some(headers) => client.publish_with_headers(to, headers, body).await,
                None => client.publish(to, body).await,
            };
            if let Err(error) = published {
                tracing::debug!(%error, "cannot send a message to another replica");
            }
        }
    }

    fn send(&self, to: Subject, body: &impl Serialize) {
        self.send_bytes(to, None, to_bytes(body));
    }

    fn send_bytes(&self, to: Subject, headers: Option<HeaderMap>, body: Bytes) {
        // Whoever waits for the message asks again, or gives up after a while.
        let _ = self.outgoing.try_send(Outgoing { to, headers, body });
    }

    /// Sends a request to one replica.
    async fn ask<A: DeserializeOwned>(
        &self,
        instance: InstanceId,
        verb: &str,
        body: &impl Serialize,
    ) -> Result<A, AskError> {
        let request = async_nats::Request::new().payload(to_bytes(body)).timeout(Some(REQUEST_TIMEOUT));
        let subject = self.subjects.peer(instance, verb);
        match self.client.send_request(subject, request).await {
            Ok(answer) => serde_json::from_slice(&answer.payload).map_err(|_| AskError::NoAnswer),
            Err(error) if error.kind() == RequestErrorKind::NoResponders => Err(AskError::NoResponders),
            Err(_) => Err(AskError::NoAnswer),
        }
    }

    async fn ask_for_record(&self, kind: RecordKind, key: &RecordKey) -> Holder {
        let mut serving = self.lock_table().serving(&Token::new(&key.agent));
        let asking = self.ask_serving(&mut serving, kind, key);
        match tokio::time::timeout(FIND_TIMEOUT, asking).await.unwrap_or_default() {
            Some(instance) => Holder::At(instance),
            None if serving.certain.is_empty() && !serving.has_silent => Holder::Nowhere,
            None => Holder::Unknown,
        }
    }

    /// Asks the replicas that serve an agent for a record, and removes those that do not have it.
    async fn ask_serving(
        &self,
        serving: &mut Serving,
        kind: RecordKind,
        key: &RecordKey,
    ) -> Option<InstanceId> {
        let expected = serving.certain.len() + serving.possible.len();
        if key.id.len() > MAX_ID {
            *serving = Serving::default();
        }
        if serving.is_empty() || !self.is_connected() {
            return None;
        }
        let (id, caller) = (key.id.as_str().into(), key.caller.clone());
        let query = FindQuery { from: self.instance, kind: kind.into(), id, caller };
        let inbox = self.client.new_inbox();
        let mut answers = self.client.subscribe(inbox.clone()).await.ok()?;
        let subject = self.subjects.peers(&Token::new(&key.agent));
        self.client.publish_with_reply(subject, inbox, to_bytes(&query)).await.ok()?;
        for _ in 0..expected + MAX_UNEXPECTED {
            // *No responders* is a status without a body.
            let answer = answers.next().await.filter(|answer| answer.status.is_none())?;
            let Ok(FindAnswer { instance, has }) = serde_json::from_slice(&answer.payload) else { continue };
            if has && instance != self.instance {
                return Some(instance);
            }
            serving.certain.remove(&instance);
            serving.possible.remove(&instance);
            if serving.is_empty() {
                return None;
            }
        }
        None
    }

    fn update_known(&self, table: &PeerTable) {
        if self.known.swap(table.len(), Relaxed) > 0 && table.len() == 0 {
            *self.alone_since.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        }
    }

    fn lock_table(&self) -> MutexGuard<'_, PeerTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_agents(&self) -> MutexGuard<'_, HashMap<Token, Arc<PeerEndpoint>>> {
        self.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What replicas may reply to: what callers may ask for, and the inboxes of this bridge. Replicas share their settings, so
/// the inboxes of the others have the same prefix.
fn own_replies(client: &Client, guard: &ReplyGuard) -> ReplyGuard {
    let inbox = client.new_inbox();
    match inbox.rsplit_once('.') {
        Some((prefix, _)) => guard.clone().and_below(prefix),
        None => guard.clone(),
    }
}

impl Peers for NatsPeers {
    fn instance(&self) -> InstanceId {
        self.instance
    }

    fn is_alone(&self) -> bool {
        self.known.load(Relaxed) == 0
    }

    fn others(&self) -> usize {
        self.known.load(Relaxed)
    }

    fn alone_for(&self) -> Option<Duration> {
        let since = *self.alone_since.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_alone().then(|| since.elapsed())
    }

    fn liveness(&self, instance: InstanceId) -> BoxFuture<'_, Liveness> {
        async move {
            if instance == self.instance {
                return Liveness::Alive;
            }
            let verdict = self.lock_table().verdict(instance, Instant::now());
            match verdict {
                Verdict::Known(liveness) => liveness,
                Verdict::Ask => self.ask_for_life(instance).await,
                Verdict::AskUntracked => match self.ping(instance).await {
                    Ok(()) => Liveness::Alive,
                    Err(_) => Liveness::Unreachable,
                },
            }
        }
        .boxed()
    }

    fn may_return(&self, instance: InstanceId) -> bool {
        self.lock_table().may_return(instance, Instant::now())
    }

    fn claim_status(&self, instance: InstanceId, nonce: Uuid) -> BoxFuture<'_, Option<ClaimStatus>> {
        async move {
            if instance == self.instance {
                return Some(self.queries().claim_status(nonce));
            }
            if !self.is_connected() {
                return None;
            }
            match self.ask::<ClaimAnswer>(instance, "claim", &ClaimQuery { nonce }).await {
                Ok(answer) => {
                    self.saw(instance);
                    Some(answer.status)
                }
                Err(_) => {
                    self.lock_table().unreachable(instance, Instant::now());
                    None
                }
            }
        }
        .boxed()
    }

    fn find<'a>(&'a self, kind: RecordKind, key: &'a RecordKey) -> BoxFuture<'a, Holder> {
        self.ask_for_record(kind, key).boxed()
    }

    fn record_changed(&self, instance: InstanceId, kind: RecordKind, key: &RecordKey) {
        if instance != self.instance && key.id.len() <= MAX_ID {
            let changed =
                RecordChanged { kind: kind.into(), agent: (&*key.agent).into(), id: key.id.as_str().into() };
            self.send(self.subjects.peer(instance, "changed").into(), &changed);
        }
    }
}
