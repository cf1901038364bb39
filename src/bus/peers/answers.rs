//! What this replica answers to the others.

use std::sync::Arc;

use async_nats::{Message, Subscriber};
use futures_util::StreamExt as _;
use tokio_util::sync::CancellationToken;

use super::messages::{ClaimAnswer, ClaimQuery, FindAnswer, FindQuery, Ping, RecordChanged};
use super::{ForwardedCalls, NatsPeers};
use crate::bus::service::ServiceError;
use crate::bus::subject::Token;
use crate::state::RecordKey;

/// An agent that this replica serves, as the others see it.
#[derive(Debug)]
pub(super) struct PeerEndpoint {
    agent: Arc<str>,
    /// `None` if it runs no requests of others.
    pub(super) calls: Option<Arc<ForwardedCalls>>,
    /// Cancelled when the agent is withdrawn.
    withdrawn: CancellationToken,
}

impl PeerEndpoint {
    pub(super) fn is_withdrawn(&self) -> bool {
        self.withdrawn.is_cancelled()
    }
}

/// Lets other replicas find the records of an agent, and runs requests of theirs, until it is dropped.
#[derive(Debug)]
pub(crate) struct PeerService {
    peers: Arc<NatsPeers>,
    token: Token,
    endpoint: Arc<PeerEndpoint>,
}

impl PeerService {
    /// This replica no longer serves the agent. While calls are in flight, others can still read and cancel tasks here.
    pub(crate) fn withdraw(&self) {
        self.endpoint.withdrawn.cancel();
        self.peers.announce.notify_one();
    }
}

impl Drop for PeerService {
    fn drop(&mut self) {
        self.withdraw();
        let mut agents = self.peers.lock_agents();
        // A reload may have replaced it.
        if agents.get(&self.token).is_some_and(|current| Arc::ptr_eq(current, &self.endpoint)) {
            agents.remove(&self.token);
        }
    }
}

impl NatsPeers {
    pub(super) async fn subscribe(&self, subject: String) -> Result<Subscriber, ServiceError> {
        let subscriber = self.client.subscribe(subject.clone()).await;
        subscriber.map_err(|source| ServiceError::Subscribe { subject, source })
    }

    /// Reads a subscription until this replica leaves. `handle` must not block.
    pub(super) fn read(
        self: &Arc<Self>,
        mut subscriber: Subscriber,
        handle: impl Fn(&Arc<Self>, Message) + Send + 'static,
    ) {
        let this = Arc::clone(self);
        let tracked = self.readers.token();
        self.spawn("requests of replicas", async move {
            while let Some(Some(message)) = this.leaving.run_until_cancelled(subscriber.next()).await {
                handle(&this, message);
            }
            let _ = subscriber.unsubscribe().await;
            drop(tracked);
        });
    }

    /// Answers `peer.<instance>.*`.
    pub(super) fn answer(&self, message: Message) {
        let reply = message.reply.filter(|reply| self.guard.allows(reply));
        let body = message.payload.as_ref();
        match (message.subject.rsplit('.').next().unwrap_or_default(), reply) {
            ("ping", Some(reply)) => {
                self.send(reply, &Ping { instance: self.instance });
                if let Ok(Ping { instance }) = serde_json::from_slice(body) {
                    self.saw(instance);
                }
            }
            ("claim", Some(reply)) => {
                if let Ok(ClaimQuery { nonce }) = serde_json::from_slice(body) {
                    self.send(reply, &ClaimAnswer { status: self.queries().claim_status(nonce) });
                }
            }
            ("changed", _) => {
                if let Ok(RecordChanged { kind, agent, id }) = serde_json::from_slice(body) {
                    self.queries().record_changed(kind.into(), &RecordKey::new(&agent.into(), id));
                }
            }
            _ => {}
        }
    }

    /// Lets other replicas find the records of an agent, and runs requests of theirs.
    pub(crate) async fn serve(
        self: &Arc<Self>,
        agent: &Arc<str>,
        calls: Option<ForwardedCalls>,
    ) -> Result<PeerService, ServiceError> {
        let token = Token::new(agent);
        let mut queries = self.subscribe(self.subjects.peers(&token)).await?;
        let endpoint = Arc::new(PeerEndpoint {
            agent: Arc::clone(agent),
            calls: calls.map(Arc::new),
            withdrawn: CancellationToken::new(),
        });
        self.lock_agents().insert(token.clone(), Arc::clone(&endpoint));
        self.announce.notify_one();
        let this = Arc::clone(self);
        let own = Arc::clone(&endpoint);
        self.spawn("queries of replicas", async move {
            let stopping = async {
                tokio::select! {
                    () = own.withdrawn.cancelled() => {}
                    () = this.leaving.cancelled() => {}
                }
            };
            let reading = async {
                while let Some(message) = queries.next().await {
                    this.answer_query(&own.agent, &message);
                }
            };
            tokio::select! {
                () = stopping => {}
                () = reading => {}
            }
        });
        Ok(PeerService { peers: Arc::clone(self), token, endpoint })
    }

    /// Answers `peers.<agent>`.
    fn answer_query(&self, agent: &Arc<str>, message: &Message) {
        let Some(reply) = message.reply.as_ref().filter(|reply| self.guard.allows(reply)) else { return };
        let Ok(FindQuery { from, kind, id, caller }) = serde_json::from_slice(&message.payload) else {
            return;
        };
        if from != self.instance {
            let has = self.queries().has(kind.into(), &RecordKey::new(agent, id).of_caller(&caller));
            self.send(reply.clone(), &FindAnswer { instance: self.instance, has });
        }
    }
}
