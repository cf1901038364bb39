//! The gateway's side of NATS: requests below `<prefix>.gw.`, each in the name of a principal.
//!
//! A request with one reply uses the client's own inbox, so that it needs no subscription. A request with many replies has
//! a subscription of its own: when the reader leaves, the bridge learns that no one listens.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::connection::State;
use async_nats::{Client, HeaderMap, HeaderName, Message, RequestErrorKind, StatusCode, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;

use super::auth::Principal;
use crate::bus::connect::events::ConnectionEvents;
use crate::bus::subject::{DiscoveryVerb, Subjects, Token};

const CALLER: HeaderName = HeaderName::from_static("A2A-Caller");
/// The server reports a denied request on the connection. Most replies arrive before a request waits for such a report.
const DENIAL_DELAY: Duration = Duration::from_millis(250);
/// After this silence, the gateway asks whether the bridge that runs a request is still there. A stream has a keep-alive every
/// 15 s.
pub(super) const SILENCE: Duration = Duration::from_secs(16);
const PING_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a request has no reply.
#[derive(Debug)]
pub(super) enum NoReply {
    NoResponders,
    /// The gateway has no connection.
    Disconnected,
    Denied,
    Timeout(Duration),
    /// The bridge is no longer there.
    Gone,
    TooLarge {
        size: usize,
        max: usize,
    },
}

/// A request, without the principal for whom it is sent.
#[derive(Debug, Default)]
pub(super) struct MeshRequest {
    /// The subject that callers on NATS use; the gateway uses the same below `<prefix>.gw.`.
    pub(super) subject: String,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

impl MeshRequest {
    pub(super) fn new(subject: String, body: Bytes) -> Self {
        Self { subject, headers: HeaderMap::new(), body }
    }
}

#[derive(Debug)]
pub(super) struct Mesh {
    pub(super) client: Client,
    pub(super) subjects: Subjects,
    events: Arc<ConnectionEvents>,
}

impl Mesh {
    pub(super) fn new(client: Client, subjects: Subjects, events: Arc<ConnectionEvents>) -> Self {
        Self { client, subjects, events }
    }

    pub(super) fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Waits for the next connection. There may be one listener only.
    pub(super) async fn reconnected(&self) {
        self.events.connected().await;
    }

    fn address(&self, principal: &Principal, request: &mut MeshRequest) -> Result<String, NoReply> {
        if !self.is_connected() {
            return Err(NoReply::Disconnected);
        }
        request.headers.insert(CALLER, principal.name.value.clone());
        let subject = self.subjects.gateway(&request.subject);
        Ok(subject.expect("all subjects of requests are below the prefix"))
    }

    /// Sends a request with one reply.
    pub(super) async fn request(
        &self,
        principal: &Principal,
        mut request: MeshRequest,
        timeout: Duration,
    ) -> Result<Message, NoReply> {
        let subject = self.address(principal, &mut request)?;
        let (began, size) = (Instant::now(), request.body.len());
        let sent =
            async_nats::Request::new().payload(request.body).headers(request.headers).timeout(Some(timeout));
        let denied = async {
            tokio::time::sleep(DENIAL_DELAY).await;
            self.events.denied(&subject, began).await;
        };
        let reply = tokio::select! {
            biased;
            reply = self.client.send_request(subject.clone(), sent) => reply,
            () = denied => return Err(NoReply::Denied),
        };
        reply.map_err(|error| match error.kind() {
            RequestErrorKind::NoResponders => NoReply::NoResponders,
            RequestErrorKind::TimedOut => NoReply::Timeout(timeout),
            RequestErrorKind::MaxPayloadExceeded => {
                NoReply::TooLarge { size, max: self.client.max_payload() }
            }
            RequestErrorKind::InvalidSubject | RequestErrorKind::Other => NoReply::Disconnected,
        })
    }

    /// As [`Mesh::request`], for a call that may take long: gives up when no bridge serves the agent any more.
    pub(super) async fn call(
        &self,
        principal: &Principal,
        request: MeshRequest,
        agent: &Token,
        timeout: Duration,
    ) -> Result<Message, NoReply> {
        tokio::select! {
            biased;
            reply = self.request(principal, request, timeout) => reply,
            () = self.gone(agent, None) => Err(NoReply::Gone),
        }
    }

    /// Returns when no bridge serves the agent, or the instance of it, any more.
    async fn gone(&self, agent: &Token, instance: Option<&str>) {
        let mut failures = 0;
        while failures < 2 {
            tokio::time::sleep(SILENCE).await;
            failures = if self.is_served(agent, instance).await { 0 } else { failures + 1 };
        }
    }

    /// Whether a bridge serves the agent, as far as the gateway can tell.
    pub(super) async fn is_served(&self, agent: &Token, instance: Option<&str>) -> bool {
        let [_, by_name, by_id] = Subjects::srv(DiscoveryVerb::Ping, agent, instance.unwrap_or_default());
        let subject = if instance.is_some() { by_id } else { by_name };
        let ping = async_nats::Request::new().timeout(Some(PING_TIMEOUT));
        let answer = self.client.send_request(subject, ping).await;
        !self.is_connected() || !answer.is_err_and(|error| error.kind() == RequestErrorKind::NoResponders)
    }

    /// Sends a request with many replies.
    pub(super) async fn request_many(
        &self,
        principal: &Principal,
        mut request: MeshRequest,
    ) -> Result<Replies, NoReply> {
        let subject = self.address(principal, &mut request)?;
        self.ask(subject, request.headers, request.body).await
    }

    /// Asks all services of the discovery protocol.
    pub(super) async fn discover(
        &self,
        verb: DiscoveryVerb,
        agent: Option<&Token>,
    ) -> Result<Replies, NoReply> {
        if !self.is_connected() {
            return Err(NoReply::Disconnected);
        }
        let nobody = Token::new("");
        let [all, by_name, _] = Subjects::srv(verb, agent.unwrap_or(&nobody), "");
        let subject = if agent.is_some() { by_name } else { all };
        self.ask(subject, HeaderMap::new(), Bytes::new()).await
    }

    async fn ask(&self, subject: String, headers: HeaderMap, body: Bytes) -> Result<Replies, NoReply> {
        let (inbox, size) = (self.client.new_inbox(), body.len());
        let messages = self.client.subscribe(inbox.clone()).await.map_err(|_| NoReply::Disconnected)?;
        let began = Instant::now();
        let sent = self.client.publish_with_reply_and_headers(subject.clone(), inbox, headers, body).await;
        sent.map_err(|error| match error.kind() {
            async_nats::client::PublishErrorKind::MaxPayloadExceeded => {
                NoReply::TooLarge { size, max: self.client.max_payload() }
            }
            _ => NoReply::Disconnected,
        })?;
        Ok(Replies { messages, events: Arc::clone(&self.events), subject, began })
    }
}

/// The replies to one request. Dropping them ends the subscription.
#[derive(Debug)]
pub(super) struct Replies {
    messages: Subscriber,
    events: Arc<ConnectionEvents>,
    subject: String,
    began: Instant,
}

impl Replies {
    /// The first reply.
    pub(super) async fn first(&mut self, timeout: Duration) -> Result<Message, NoReply> {
        let denied = async {
            tokio::time::sleep(DENIAL_DELAY).await;
            self.events.denied(&self.subject, self.began).await;
        };
        let message = tokio::select! {
            biased;
            message = tokio::time::timeout(timeout, self.messages.next()) => message,
            () = denied => return Err(NoReply::Denied),
        };
        let message = message.map_err(|_| NoReply::Timeout(timeout))?.ok_or(NoReply::Disconnected)?;
        if message.status == Some(StatusCode::NO_RESPONDERS) {
            return Err(NoReply::NoResponders);
        }
        Ok(message)
    }

    /// The next reply; `None` if the connection is closed.
    pub(super) async fn next(&mut self) -> Option<Message> {
        self.messages.next().await
    }

    /// Collects replies of several bridges, until there are `expected` or none arrives for `pause`.
    pub(super) async fn collect(
        mut self,
        expected: usize,
        first: Duration,
        pause: Duration,
    ) -> Result<Vec<Message>, NoReply> {
        let mut replies = vec![self.first(first).await?];
        while replies.len() < expected.max(1) {
            match tokio::time::timeout(pause, self.messages.next()).await {
                Ok(Some(message)) => replies.push(message),
                Ok(None) | Err(_) => break,
            }
        }
        Ok(replies)
    }
}
