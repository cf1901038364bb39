//! Runs the requests that other replicas forward to this one. See [`super::forward`] for the messages.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_nats::{HeaderMap, Message, StatusCode, Subject, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::NatsPeers;
use super::forward::{DISCONNECTED, FORWARD, ForwardInfo, KEEP_ALIVE, PEER, WINDOW};
use crate::action::progress::{Listener, Progress, ProgressEvent};
use crate::action::request::ReplyMode;
use crate::agent::AgentState;
use crate::bus::actions::{self, Target};
use crate::bus::catalog::{self, BuiltInAction, Catalog};
use crate::bus::frames::FrameWriter;
use crate::bus::headers::{self, Headers};
use crate::bus::outbox::Outbox;
use crate::bus::per_card::PerCard;
use crate::bus::subject::{Subjects, Token};
use crate::dispatch::Dispatcher;
use crate::dispatch::arrival::Arrival;
use crate::memory::OutOfMemory;
use crate::offload;
use crate::reply::error::ActionError;
use crate::reply::outcome::Outcome;
use crate::reply::{self, Reply};
use crate::telemetry::spans::CallInfo;
use crate::telemetry::trace_context::TraceContext;

/// Bytes of a message in addition to a part of a reply.
const PART_OVERHEAD: usize = 1 << 10;
/// How often a call checks whether its caller has disconnected.
const DISCONNECT_POLL: Duration = Duration::from_secs(1);

/// Runs forwarded requests to one agent.
#[derive(Debug)]
pub(crate) struct ForwardedCalls {
    /// The publication and the calls in flight own it.
    dispatcher: Weak<Dispatcher>,
    outbox: Outbox,
    subjects: Subjects,
    catalog: PerCard<Arc<Catalog>>,
}

impl ForwardedCalls {
    pub(crate) fn new(dispatcher: &Arc<Dispatcher>, outbox: &Outbox, subjects: &Subjects) -> Self {
        Self {
            dispatcher: Arc::downgrade(dispatcher),
            outbox: outbox.clone(),
            subjects: subjects.clone(),
            catalog: PerCard::default(),
        }
    }

    /// The action with this name. A skill needs an agent that is ready.
    fn target(&self, dispatcher: &Dispatcher, action: &Token) -> Result<Target, ActionError> {
        let is_named = |built_in: &&BuiltInAction| built_in.name() == action.as_str();
        if let Some(built_in) = BuiltInAction::ALL.iter().find(is_named) {
            return Ok(Target::BuiltIn(*built_in));
        }
        let agent = dispatcher.agent();
        let status = agent.status.borrow().clone();
        let ready = status.known.as_ref().filter(|_| status.state == AgentState::Ready);
        let Some(known) = ready else {
            return Err(ActionError::unavailable(&agent.name, status.last_error.as_deref()));
        };
        let token = Token::new(&agent.name);
        let catalog = self.catalog.get_or_make(known, || {
            Arc::new(Catalog::new(&known.card, &agent.config.skills, &self.subjects, &token))
        });
        // The log of a session knows skills by their ids, which the configuration may rename.
        let has_id = |published: &&Arc<catalog::Action>| {
            published.skill.id.as_deref().is_some_and(|id| Token::action(id) == *action)
        };
        let named = catalog.actions.iter().find(|published| published.token == *action);
        match named.or_else(|| catalog.actions.iter().find(has_id)) {
            Some(published) => Ok(Target::Skill(Arc::clone(published))),
            None => {
                let why = format!("the replica that has to run the request does not publish `{action}`");
                Err(ActionError::unavailable(&agent.name, Some(&why)))
            }
        }
    }
}

impl NatsPeers {
    /// Runs a request of `peer.<instance>.call.<agent>.<action>`.
    pub(super) fn accept_call(self: &Arc<Self>, message: Message) {
        let Some(to) = message.reply.clone().filter(|reply| self.guard.allows(reply)) else { return };
        if self.try_accept(message, &to).is_none() {
            let mut headers = HeaderMap::new();
            headers.insert(PEER, "gone");
            self.send_bytes(to, Some(headers), Bytes::new());
        }
    }

    /// `None` if this replica does not run the request.
    fn try_accept(self: &Arc<Self>, mut message: Message, to: &Subject) -> Option<()> {
        let subject = message.subject.clone();
        let mut tokens = subject.rsplit('.');
        let (action, agent) = (Token::parse(tokens.next()?)?, Token::parse(tokens.next()?)?);
        let endpoint = self.lock_agents().get(&agent).cloned()?;
        let calls = Arc::clone(endpoint.calls.as_ref()?);
        let dispatcher = calls.dispatcher.upgrade()?;
        let info = message.headers.as_ref()?.get(FORWARD)?.as_str();
        let info: ForwardInfo = serde_json::from_str(info).ok()?;
        let target = calls.target(&dispatcher, &action);
        let operation = match &target {
            Ok(target) => Some(actions::operation(target, &message)?),
            Err(_) => None,
        };
        // New work is for other replicas; a shutdown waits for the present calls.
        if operation.as_ref().is_none_or(|operation| operation.runs_the_agent()) && endpoint.is_withdrawn() {
            return None;
        }
        drop(operation);
        self.saw(info.from);
        let Message { payload, length, .. } = &mut message;
        let arrival = dispatcher.arrive(&action.as_str().into(), *length, payload)?;
        let trace = headers::trace(&message);
        let call_info =
            CallInfo { agent: &dispatcher.agent().name, action: action.as_str(), subject: &subject };
        let call = ForwardedCall {
            dispatcher: Arc::clone(&dispatcher),
            outbox: calls.outbox.clone(),
            to: to.clone(),
            info,
            target,
        };
        let serving = Box::pin(call.serve(message, arrival, trace.clone()));
        dispatcher.spawn(call_info, &trace, serving);
        Some(())
    }
}

struct ForwardedCall {
    dispatcher: Arc<Dispatcher>,
    outbox: Outbox,
    to: Subject,
    info: ForwardInfo,
    target: Result<Target, ActionError>,
}

impl ForwardedCall {
    async fn serve(self, message: Message, mut arrival: Arrival, trace: TraceContext) {
        let client = self.outbox.client.clone();
        let control = Subject::from(client.new_inbox());
        let Ok(notices) = client.subscribe(control.clone()).await else { return };
        let link = Arc::new(Link::new(self.outbox.clone(), self.to.clone(), control));
        let headers = Headers::read(&message, self.info.caller.clone(), trace);
        let (frames, cancel_on_disconnect, wants_ack) = match &headers {
            Ok(headers) => (headers.frames, headers.cancel_on_disconnect, headers.wants_ack),
            Err(_) => Default::default(),
        };
        let request = match (headers, self.target) {
            (Ok(headers), Ok(target)) => match actions::operation(&target, &message) {
                Some(operation) => {
                    let mut request = actions::dispatcher_request(headers, operation, &message);
                    // The replica that the caller asked has reserved the key.
                    request.idempotency_key = None;
                    request.options.is_forwarded = true;
                    request.options.has_logged_message = self.info.has_logged_message;
                    Ok(request)
                }
                None => return,
            },
            (Err(error), _) | (_, Err(error)) => Err(error),
        };
        drop(message);
        let mode = request.as_ref().map_or(ReplyMode::Final, |request| request.options.mode);
        let reports = match mode {
            ReplyMode::Stream => Reports::All,
            ReplyMode::Final if wants_ack => Reports::Task,
            ReplyMode::Final | ReplyMode::Submit => Reports::Nothing,
        };
        let keep_alive = self.dispatcher.agent().config.stream_keepalive;
        let mut writer = FrameWriter::new(self.outbox.clone(), self.to, keep_alive, "".into(), frames, false);
        writer.set_link(Arc::clone(&link));
        let mut responder = PeerResponder {
            dispatcher: &self.dispatcher,
            link: &link,
            writer,
            reports,
            cancel_on_disconnect,
            is_answered: false,
        };
        let running = async {
            let reply = match request {
                Ok(request) => self.dispatcher.call(request, &mut arrival, &mut responder).await,
                Err(error) => self.dispatcher.refuse(error, &mut arrival, &mut responder).await,
            };
            responder.answer(&reply).await;
        };
        tokio::select! {
            () = running => {}
            () = link.keep_alive(notices) => {}
        }
    }
}

/// The way to the replica that has forwarded the request.
#[derive(Debug)]
pub(crate) struct Link {
    outbox: Outbox,
    to: Subject,
    /// Where this replica reads messages about the call.
    control: Subject,
    /// Bytes since the other replica has last confirmed that it relayed everything.
    sent: AtomicUsize,
    synced: Notify,
    is_disconnected: AtomicBool,
    /// Cancelled when the reply is sent, or the other replica is gone.
    ended: CancellationToken,
}

impl Link {
    fn new(outbox: Outbox, to: Subject, control: Subject) -> Self {
        Self {
            outbox,
            to,
            control,
            sent: AtomicUsize::new(0),
            synced: Notify::new(),
            is_disconnected: AtomicBool::new(false),
            ended: CancellationToken::new(),
        }
    }

    async fn publish(&self, kind: &str) {
        let mut headers = HeaderMap::new();
        headers.insert(PEER, kind);
        let control = Some(self.control.clone());
        if let Err(error) = self.outbox.publish(self.to.clone(), Some(headers), control, Bytes::new()).await {
            tracing::debug!(%error, "cannot send a message to the replica that has forwarded a request");
        }
    }

    /// Waits until a message of `bytes` bytes may be sent. Returns whether anyone receives it.
    pub(crate) async fn pass(&self, bytes: usize) -> bool {
        let sent = self.sent.load(Relaxed);
        let mut is_full = sent > 0 && sent + bytes > WINDOW;
        while is_full && !self.ended.is_cancelled() {
            self.publish("sync").await;
            is_full = tokio::select! {
                () = self.synced.notified() => false,
                () = self.ended.cancelled() => true,
                // A message may be lost when a connection is. If the other replica is gone, the next keep-alive finds
                // no responders.
                () = tokio::time::sleep(KEEP_ALIVE) => true,
            };
            self.sent.store(0, Relaxed);
        }
        self.sent.fetch_add(bytes, Relaxed);
        !self.ended.is_cancelled()
    }

    /// Shows the other replica that the call runs, and reads its messages. Never ends: the call goes on without it.
    async fn keep_alive(&self, mut notices: Subscriber) {
        loop {
            tokio::select! {
                () = self.ended.cancelled() => break,
                () = tokio::time::sleep(KEEP_ALIVE) => self.publish("alive").await,
                notice = notices.next() => match notice {
                    // No one is subscribed to the inbox of the other replica.
                    Some(notice) if notice.status == Some(StatusCode::NO_RESPONDERS) => {
                        self.is_disconnected.store(true, Relaxed);
                        self.ended.cancel();
                    }
                    Some(notice) if *notice.payload == *DISCONNECTED => {
                        self.is_disconnected.store(true, Relaxed);
                    }
                    Some(_) => self.synced.notify_one(),
                    None => break,
                },
            }
        }
        drop(notices);
        std::future::pending::<()>().await;
    }
}

/// Which events the other replica needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reports {
    Nothing,
    Task,
    All,
}

struct PeerResponder<'a> {
    dispatcher: &'a Dispatcher,
    link: &'a Link,
    writer: FrameWriter,
    reports: Reports,
    cancel_on_disconnect: bool,
    is_answered: bool,
}

impl PeerResponder<'_> {
    /// Sends the reply, in as many messages as it needs. Only the first call has an effect.
    async fn answer(&mut self, reply: &Reply) {
        if std::mem::replace(&mut self.is_answered, true) {
            return;
        }
        self.writer.flush().await;
        let agent = self.dispatcher.agent();
        // Escapes make a text longer, so this is an estimate until the reply is encoded.
        let size = reply::allocated(reply);
        let mut charge = agent.memory.charge(size);
        let encode = || serde_json::to_vec(reply).map(|encoded| (encoded.capacity(), Bytes::from(encoded)));
        let encoded = match charge.as_mut().map_err(|error| *error) {
            Ok(charge) => match offload::run(&agent.name, size, encode).await {
                Ok((capacity, encoded)) => charge.resize(capacity).map(|()| encoded),
                Err(_) => Err(OutOfMemory),
            },
            Err(error) => Err(error),
        };
        let encoded = encoded.unwrap_or_else(|error| {
            let mut error = ActionError::from(error).after_reaching_agent();
            error.info.retryable = false;
            error.task =
                reply.as_ref().map_or_else(|error| error.task.clone(), |outcome| Some(outcome.task.clone()));
            serde_json::to_vec(&Reply::Err(error)).unwrap_or_default().into()
        });
        let total = encoded.len();
        let max = self.link.outbox.max_payload().saturating_sub(PART_OVERHEAD).max(PART_OVERHEAD);
        let (kind, mut rest) = (format!("reply {total}"), encoded);
        while !rest.is_empty() {
            let part = rest.split_to(rest.len().min(max));
            self.writer.send_to_peer(&kind, part).await;
        }
        self.link.ended.cancel();
    }
}

impl Progress for PeerResponder<'_> {
    async fn started(&mut self) {
        self.link.publish("alive").await;
    }

    async fn report(&mut self, event: ProgressEvent) {
        match (self.reports, &event) {
            (Reports::All, _) | (Reports::Task, ProgressEvent::Task { .. }) => {
                self.writer.report(event).await;
            }
            _ => {}
        }
    }

    async fn accepted(&mut self, outcome: &Arc<Outcome>) {
        self.answer(&Ok(Arc::clone(outcome))).await;
    }

    async fn flush(&mut self) {
        Progress::flush(&mut self.writer).await;
    }

    fn logged(&mut self) {
        self.writer.logged();
    }

    fn wants_content(&self) -> bool {
        self.reports == Reports::All
    }

    fn keep_alive_interval(&self) -> Option<Duration> {
        // The interval begins again with every event of the agent, so it must not delay what is known already.
        let is_disconnected = self.link.is_disconnected.load(Relaxed);
        let interval = if is_disconnected { Duration::ZERO } else { DISCONNECT_POLL };
        self.cancel_on_disconnect.then_some(interval)
    }

    async fn keep_alive(&mut self) -> Listener {
        match self.link.is_disconnected.load(Relaxed) {
            true => Listener::Disconnected,
            false => Listener::Connected,
        }
    }
}
