//! Forwards a request to the replica that has to run it, and relays what comes back.
//!
//! The replica that the caller asked stays the only one that answers the caller. It sends the request on with an inbox of
//! its own, and gets these messages. `A2A-Peer` is a header.
//!
//! | message | meaning |
//! | --- | --- |
//! | status 503 (*no responders*), or `A2A-Peer: gone` | the request did not run |
//! | `A2A-Peer: alive` | sent at the start, and every five seconds; the replies to it go to the replica that runs the request |
//! | `A2A-Seq: <n>` | a frame for the caller, without a number for the caller |
//! | `A2A-Peer: sync` | wants an empty reply once everything before it is relayed |
//! | `A2A-Peer: reply <n>` | the next bytes of the reply, which has `n` bytes in all |
//!
//! The reply is a [`Reply`] in the form of the store, so that the front door encodes it like one of its own. If the caller
//! has disconnected, the replica that runs the request gets the message `disconnected`.
//!
//! The sender waits for a `sync` after every [`WINDOW`] bytes, so that a slow caller slows the agent, and does not fill the
//! memory of the replica in between. Both replicas charge requests and replies to the memory account of the agent.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::{HeaderMap, HeaderName, HeaderValue, Message, PublishErrorKind, StatusCode, Subject};
use bytes::Bytes;
use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use tokio::sync::broadcast::error::RecvError;

use super::NatsPeers;
use crate::action::actions::CallShutdown;
use crate::action::progress::{ForwardError, Listener, Progress as _};
use crate::action::request::{CallOptions, ReplyMode};
use crate::bus::frames::{FrameWriter, SEQUENCE};
use crate::bus::headers::Headers;
use crate::bus::outbox::Outbox;
use crate::bus::subject::Token;
use crate::caller::Caller;
use crate::events::selection::FrameSelection;
use crate::files::FileMode;
use crate::memory::{MemoryAccount, MemoryCharge, OutOfMemory};
use crate::offload;
use crate::reply::error::{ActionError, Code};
use crate::reply::{self, Reply};
use crate::state::peers::{InstanceId, Liveness, Peers as _};
use crate::text::error_chain;

pub(in crate::bus) const PEER: HeaderName = HeaderName::from_static("A2A-Peer");
/// Marks a forwarded request, and has what only bridges know about it.
pub(super) const FORWARD: HeaderName = HeaderName::from_static("A2A-Forward");
pub(super) const DISCONNECTED: &[u8] = b"disconnected";
/// Bytes that may be on the way before the sender waits.
pub(super) const WINDOW: usize = 256 << 10;
/// How often the replica that runs a request shows that it does.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// After this time without a message, the replica that runs a request counts as gone.
const MAX_SILENCE: Duration = Duration::from_secs(15);

/// What the header [`FORWARD`] contains.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ForwardInfo {
    pub from: InstanceId,
    /// As the replica that the caller asked has verified it.
    pub caller: Caller,
    /// Whether the log of the session has the message already.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_logged_message: bool,
}

/// Forwards the requests of one agent.
#[derive(Debug)]
pub(crate) struct Forwarder {
    peers: Arc<NatsPeers>,
    agent: Token,
    /// Whether conversations are bound to a process that the bridge has launched.
    is_launched: bool,
    outbox: Outbox,
    memory: Arc<MemoryAccount>,
    shutdown: CallShutdown,
}

/// A request as long as it may be forwarded.
#[derive(Debug)]
pub(crate) struct ForwardableRequest {
    forwarder: Arc<Forwarder>,
    action: Arc<str>,
    /// `None` once another replica may have run the request.
    body: Option<Bytes>,
    is_json: bool,
    /// Without its memory account, trace and caller it is small.
    options: CallOptions,
    frames: FrameSelection,
    cancel_on_disconnect: bool,
    wants_ack: bool,
    /// For the body; later for the reply.
    memory: Result<Option<MemoryCharge>, OutOfMemory>,
}

impl Forwarder {
    pub(crate) fn new(
        peers: &Arc<NatsPeers>,
        outbox: &Outbox,
        memory: &Arc<MemoryAccount>,
        is_launched: bool,
        shutdown: &CallShutdown,
    ) -> Arc<Self> {
        Arc::new(Self {
            peers: Arc::clone(peers),
            agent: Token::new(&memory.agent),
            is_launched,
            outbox: outbox.clone(),
            memory: Arc::clone(memory),
            shutdown: shutdown.clone(),
        })
    }

    /// The id of this process.
    pub(crate) fn instance(&self) -> InstanceId {
        self.peers.instance()
    }

    /// Whether a request may have to be forwarded. An attached agent can be called from every replica.
    pub(crate) fn may_forward(&self, is_skill: bool) -> bool {
        !self.peers.is_alone() && (self.is_launched || !is_skill)
    }

    /// Keeps a request until this replica runs it.
    pub(crate) fn keep(
        self: &Arc<Self>,
        action: Arc<str>,
        message: &Message,
        headers: &Headers,
    ) -> Box<ForwardableRequest> {
        let mut charge = None;
        let covered = self.memory.cover(&mut charge, message.payload.len());
        let body = covered.is_ok().then(|| message.payload.clone());
        Box::new(ForwardableRequest {
            forwarder: Arc::clone(self),
            action,
            body,
            is_json: crate::bus::headers::body(message).is_declared_json(),
            options: headers.options.clone(),
            frames: headers.frames,
            cancel_on_disconnect: headers.cancel_on_disconnect,
            wants_ack: headers.wants_ack,
            memory: covered.map(|()| charge),
        })
    }
}

impl ForwardableRequest {
    /// Sends the request to another replica, relays its frames, and returns its reply. Keep `self` until the reply is
    /// encoded: it charges the reply's memory.
    pub(crate) async fn run(
        &mut self,
        to: InstanceId,
        mut frames: Option<&mut FrameWriter>,
    ) -> Result<Reply, ForwardError> {
        if let Err(error) = &self.memory {
            return Ok(Err((*error).into()));
        }
        let Some(body) = self.body.clone() else { return Err(ForwardError::NotKept) };
        let forwarder = Arc::clone(&self.forwarder);
        let peers = &forwarder.peers;
        // Before the request is sent, so that no death is missed.
        let mut deaths = peers.deaths();
        if !peers.is_connected() || peers.lock_table().without_asking(to) == Liveness::Dead {
            return Err(ForwardError::Gone);
        }
        let inbox = Subject::from(peers.client.new_inbox());
        let Ok(mut messages) = peers.client.subscribe(inbox.clone()).await else {
            return Err(ForwardError::Gone);
        };
        if let Some(refused) = self.send(to, body, inbox).await? {
            return Ok(Err(refused));
        }
        let mut relay = Relay { forwarder: &forwarder, to, control: None, next_frame: 0, parts: Vec::new() };
        let mut last_heard = Instant::now();
        let mut is_abandoned = false;
        loop {
            let keep_alive = frames.as_ref().and_then(|frames| frames.keep_alive_interval());
            let keep_alive = keep_alive.filter(|_| !is_abandoned).unwrap_or(Duration::MAX);
            let silence = MAX_SILENCE.saturating_sub(last_heard.elapsed());
            tokio::select! {
                biased;
                message = messages.next() => {
                    let Some(message) = message else { return Err(self.silent(to)) };
                    if relay.is_gone(&message) {
                        return Err(ForwardError::Gone);
                    }
                    // From now on the request may run there, so it is not sent again.
                    self.body = None;
                    if let Some(reply) = relay.receive(message, frames.as_deref_mut(), &mut self.memory).await? {
                        return Ok(reply);
                    }
                    // Afterwards, because the caller may be slow.
                    last_heard = Instant::now();
                }
                death = deaths.recv() => match death {
                    Ok(death) if death.instance != to => {}
                    Err(RecvError::Lagged(_)) if peers.lock_table().without_asking(to) != Liveness::Dead => {}
                    _ => return Err(self.silent(to)),
                },
                () = forwarder.shutdown.grace_over.cancelled() => return Err(self.silent(to)),
                () = tokio::time::sleep(silence) => return Err(self.silent(to)),
                () = tokio::time::sleep(keep_alive) => {
                    if let Some(frames) = &mut frames {
                        is_abandoned = frames.keep_alive().await == Listener::Disconnected;
                    }
                    if is_abandoned {
                        relay.tell_disconnected();
                    }
                }
            }
        }
    }

    fn silent(&mut self, to: InstanceId) -> ForwardError {
        self.body = None;
        let agent = &self.forwarder.memory.agent;
        tracing::warn!(%agent, replica = %to, "the replica that runs a forwarded request stopped responding");
        ForwardError::Silent
    }

    /// Publishes the request. Returns an error for the caller if it cannot be forwarded at all.
    async fn send(
        &self,
        to: InstanceId,
        body: Bytes,
        inbox: Subject,
    ) -> Result<Option<ActionError>, ForwardError> {
        let Forwarder { peers, agent, outbox, memory, .. } = &*self.forwarder;
        let subject = peers.subjects.peer_call(to, agent, &self.action);
        let size = body.len();
        match outbox.publish(subject.into(), Some(self.headers()), Some(inbox), body).await {
            Ok(()) => Ok(None),
            Err(error) if error.kind() == PublishErrorKind::MaxPayloadExceeded => {
                let message = format!(
                    "the request has {size} bytes, which is too much to forward it to the replica that has to run it"
                );
                Ok(Some(ActionError::new(Code::TooLarge, message)))
            }
            Err(error) => {
                tracing::warn!(agent = %memory.agent, error = error_chain(&error), "cannot forward a request");
                Err(ForwardError::Gone)
            }
        }
    }

    /// The headers of the caller, as far as they matter to the replica that runs the request. The idempotency key stays
    /// here, because this replica has reserved it.
    fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        let info = ForwardInfo {
            from: self.forwarder.peers.instance(),
            caller: self.options.caller.clone(),
            has_logged_message: self.options.has_logged_message,
        };
        // JSON has neither line breaks nor control characters.
        headers.insert(FORWARD, serde_json::to_string(&info).unwrap_or_default());
        let mode = match self.options.mode {
            ReplyMode::Final => "final",
            ReplyMode::Stream => "stream",
            ReplyMode::Submit => "submit",
        };
        headers.insert("A2A-Reply", mode);
        let frames = match self.frames {
            FrameSelection::All => "all",
            FrameSelection::Text => "text",
            FrameSelection::Artifacts => "artifacts",
        };
        headers.insert("A2A-Frames", frames);
        match self.options.files {
            FileMode::Fitting => {}
            FileMode::Inline => headers.insert("A2A-Files", "inline"),
            FileMode::Reference => headers.insert("A2A-Files", "reference"),
        }
        if let Some(timeout) = self.options.timeout {
            headers.insert("A2A-Timeout", format!("{}ms", timeout.as_millis().max(1)));
        }
        if self.cancel_on_disconnect {
            headers.insert("A2A-On-Disconnect", "cancel");
        }
        if self.options.is_logged {
            headers.insert("A2A-Log", "on");
        }
        if self.wants_ack {
            headers.insert("A2A-Ack", "yes");
        }
        if self.is_json {
            headers.insert("Content-Type", "application/json");
        }
        let trace = [("traceparent", &self.options.trace.parent), ("tracestate", &self.options.trace.state)];
        for (name, value) in trace {
            if let Some(value) = value.as_ref().and_then(|value| value.to_str().ok()) {
                headers.insert(name, value);
            }
        }
        headers
    }
}

/// The messages of the replica that runs the request.
struct Relay<'a> {
    forwarder: &'a Forwarder,
    to: InstanceId,
    /// Where that replica reads messages about the call.
    control: Option<Subject>,
    next_frame: u64,
    /// The reply so far, if it has several parts.
    parts: Vec<u8>,
}

impl Relay<'_> {
    /// Whether the replica did not run the request.
    fn is_gone(&self, message: &Message) -> bool {
        let is_unreachable = message.status == Some(StatusCode::NO_RESPONDERS);
        if is_unreachable {
            self.forwarder.peers.lock_table().unreachable(self.to, Instant::now());
        }
        is_unreachable || header(message, PEER) == Some("gone")
    }

    /// Returns the reply when it is complete.
    async fn receive(
        &mut self,
        message: Message,
        frames: Option<&mut FrameWriter>,
        memory: &mut Result<Option<MemoryCharge>, OutOfMemory>,
    ) -> Result<Option<Reply>, ForwardError> {
        self.forwarder.peers.saw(self.to);
        if let Some(number) = header(&message, SEQUENCE) {
            // A gap would be hidden from the caller, because its frames have numbers of their own.
            if number.parse() != Ok(self.next_frame) {
                return Err(ForwardError::Silent);
            }
            self.next_frame += 1;
            if let Some(frames) = frames {
                frames.relay(message.payload).await;
            }
            return Ok(None);
        }
        let (kind, total) = header(&message, PEER).map_or(("", None), |value| match value.split_once(' ') {
            Some((kind, total)) => (kind, total.parse::<usize>().ok()),
            None => (value, None),
        });
        match kind {
            "alive" => self.control = message.reply.filter(|reply| self.forwarder.peers.guard.allows(reply)),
            "sync" => {
                if let Some(reply) = message.reply.filter(|reply| self.forwarder.peers.guard.allows(reply)) {
                    self.forwarder.peers.send_bytes(reply, None, Bytes::new());
                }
            }
            "reply" if self.parts.is_empty() && total == Some(message.payload.len()) => {
                return self.decode(&message.payload, memory).await.map(Some);
            }
            "reply" => {
                let total = total.unwrap_or_default();
                // The parts have one buffer, which is charged before it is allocated.
                if self.parts.capacity() == 0 {
                    if let Err(OutOfMemory) = self.charge(memory, total) {
                        return Ok(Some(Err(out_of_memory())));
                    }
                    self.parts.reserve_exact(total);
                }
                let left = self.parts.capacity().min(total).saturating_sub(self.parts.len());
                if message.payload.is_empty() || message.payload.len() > left {
                    return Err(ForwardError::Silent);
                }
                self.parts.extend_from_slice(&message.payload);
                if self.parts.len() == total {
                    let parts = std::mem::take(&mut self.parts);
                    return self.decode(&parts, memory).await.map(Some);
                }
            }
            _ => {}
        }
        Ok(None)
    }

    async fn decode(
        &self,
        bytes: &[u8],
        memory: &mut Result<Option<MemoryCharge>, OutOfMemory>,
    ) -> Result<Reply, ForwardError> {
        let agent = &self.forwarder.memory.agent;
        if self.charge(memory, bytes.len()).is_err() {
            return Ok(Err(out_of_memory()));
        }
        let decode = || {
            let reply: Reply = serde_json::from_slice::<Reply>(bytes)?;
            Ok::<_, serde_json::Error>((reply::allocated(&reply), reply))
        };
        match offload::run(agent, bytes.len(), decode).await {
            Ok((allocated, reply)) => Ok(match self.charge(memory, allocated) {
                Ok(()) => reply,
                Err(OutOfMemory) => Err(out_of_memory()),
            }),
            Err(error) => {
                tracing::warn!(%agent, replica = %self.to, %error, "cannot read the reply of another replica");
                Err(ForwardError::Silent)
            }
        }
    }

    fn charge(
        &self,
        memory: &mut Result<Option<MemoryCharge>, OutOfMemory>,
        bytes: usize,
    ) -> Result<(), OutOfMemory> {
        match memory {
            Ok(charge) => self.forwarder.memory.cover(charge, bytes),
            Err(error) => Err(*error),
        }
    }

    fn tell_disconnected(&self) {
        if let Some(control) = &self.control {
            self.forwarder.peers.send_bytes(control.clone(), None, Bytes::from_static(DISCONNECTED));
        }
    }
}

fn header(message: &Message, name: HeaderName) -> Option<&str> {
    message.headers.as_ref()?.get(name).map(HeaderValue::as_str)
}

/// Unlike a request that is refused as `busy`, this one has run.
fn out_of_memory() -> ActionError {
    let mut error = ActionError::from(OutOfMemory).after_reaching_agent();
    error.info.retryable = false;
    error
}
