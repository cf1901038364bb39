//! The NATS service protocol (ADR-32) for one agent.
//!
//! A [`Service`] passes requests to the handlers of its endpoints. The [`responder`], which all services on the
//! connection share, answers `$SRV.PING`, `INFO` and `STATS` for it. Permanent endpoints exist as long as the service; the others are published as one set, which
//! replaces the previous set. An endpoint may have a second subject, for gateways: it comes and goes with the endpoint,
//! and its requests count in the same statistics. The handlers decide what a request means and how to answer it;
//! [`subject`](super::subject) decides which subjects exist.
//!
//! # Why not the library's service layer
//!
//! It never removes an endpoint from INFO, counts only replies that it sends itself, and loses requests
//! when it stops.
//!
//! # Removing an endpoint without losing requests
//!
//! A client that unsubscribes forgets the subscription immediately, while the server keeps sending until it has
//! processed the command. Those messages are lost, although another replica could have served them. So the
//! service unsubscribes at the server first, keeps reading until the server has certainly processed the
//! command, and only then drops the subscription. The library cannot unsubscribe at the server only, but
//! `unsubscribe_after(u64::MAX)` has that effect: the client waits for a count that it never reaches, and the
//! server accepts counts of at most nine digits and treats a longer one as no count, which means "unsubscribe now"
//! (`parseSize` and `processUnsub` in nats-server: since 2.2 by the number of digits, before that by
//! overflow to -1). The client repeats the command after a reconnect, so nothing depends on either side's
//! count of messages. A [`round_trip()`] confirms that the server has processed the command. If a server ever
//! took the number literally, the endpoint would still end, but lose requests like a plain unsubscribe; the
//! tests of rolling restarts would fail.

mod discovery;
mod endpoint;
mod latency;
mod request;
mod responder;
mod round_trip;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, PoisonError};
use std::time::SystemTime;

use async_nats::{Client, SubscribeError};
use bytes::Bytes;
use tokio::sync::{Mutex, watch};
use tokio::task::JoinError;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, error, warn};
use uuid::Uuid;

pub(crate) use self::discovery::{MAX_VERSION, semver_or_zero};
use self::endpoint::{EndpointTask, ListedEndpoint, Subscriptions};
pub(crate) use self::latency::LatencyBucket;
pub(crate) use self::request::EndpointData;
use self::request::EndpointStats;
pub use self::request::{Accounting, ServiceRequest};
use self::responder::{Membership, Responder};
pub use self::round_trip::{RoundTripError, round_trip};
use super::identity::Identity;
use super::outbox::{Confirmations, Outbox};
use super::subject::{DiscoveryVerb, ReplyGuard, Token};
use crate::config::IdentityConfig;
use crate::text::Timestamp;

/// Removed endpoints whose statistics are kept. The number is limited because some agents make new skill
/// ids at every start.
const MAX_REMOVED_STATS: usize = 1000;

/// What all services on one connection share.
#[derive(Debug, Clone)]
pub struct ServiceContext {
    /// The connection. It must not have `no_echo` set.
    pub client: Client,
    pub guard: Arc<ReplyGuard>,
    /// Runs the tasks of the services.
    pub tasks: TaskTracker,
    /// `None` if the client is closed.
    pub(crate) confirmations: Option<Arc<Confirmations>>,
    responder: Arc<Responder>,
    identity: Arc<Identity>,
}

impl ServiceContext {
    pub async fn new(client: Client, guard: Arc<ReplyGuard>, tasks: TaskTracker) -> Self {
        let confirmations = Confirmations::start(&client).await.ok();
        let outbox = Outbox::one_at_a_time(client.clone(), confirmations.clone());
        let responder = Arc::new(Responder::new(outbox, Arc::clone(&guard), tasks.clone()));
        let identity = Arc::new(Identity::new(&IdentityConfig::default()));
        Self { client, guard, tasks, confirmations, responder, identity }
    }

    /// The rules about who calls.
    pub(super) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// With rules about who calls, in place of the default ones.
    #[must_use]
    pub(crate) fn with_identity(self, identity: Identity) -> Self {
        Self { identity: Arc::new(identity), ..self }
    }
}

/// The part of INFO that describes the service and may change while it runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServiceInfo {
    /// A semantic version, see [`semver_or_zero`].
    pub version: String,
    pub description: String,
    pub metadata: BTreeMap<String, String>,
}

/// One endpoint as INFO shows it. The subject identifies it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointInfo {
    pub name: String,
    pub subject: String,
    /// The subject on which gateways call it.
    pub gateway_subject: Option<String>,
    pub metadata: BTreeMap<String, String>,
}

/// Receives the requests of an endpoint, one after the other. It must not block: requests queue up behind
/// it, so work that takes longer than a few microseconds belongs in a task of its own.
pub type Handler = Arc<dyn Fn(ServiceRequest) + Send + Sync>;

#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The client is closed, or does not accept the subject.
    #[error("cannot subscribe to {subject}")]
    Subscribe { subject: String, source: SubscribeError },
    #[error("the service is stopped")]
    Stopped,
    #[error("the runtime ended the service's task")]
    TaskEnded(#[from] JoinError),
}

/// A new service id, which distinguishes replicas.
pub fn new_id() -> String {
    Uuid::new_v4().simple().to_string()
}

/// One running service. It runs until [`stop`](Self::stop), even if every other reference is dropped.
pub struct Service {
    context: ServiceContext,
    name: Token,
    queue_group: &'static str,
    id: String,
    started: String,
    info: watch::Sender<ServiceInfo>,
    /// The endpoints that INFO and STATS show.
    listed: watch::Sender<Vec<ListedEndpoint>>,
    cached_info: std::sync::Mutex<CachedInfo>,
    endpoints: Mutex<Endpoints>,
    stopped: CancellationToken,
}

#[derive(Default)]
struct Endpoints {
    permanent: Vec<EndpointTask>,
    published: Vec<EndpointTask>,
    /// Statistics of removed endpoints by subject, the oldest first.
    removed: VecDeque<(String, Arc<EndpointStats>)>,
    /// Shows the service in discovery; `None` once the service is stopped.
    membership: Option<Membership>,
}

impl Endpoints {
    fn keep_stats(&mut self, removed: &ListedEndpoint) {
        self.removed.push_back((removed.info.subject.clone(), Arc::clone(&removed.stats)));
        while self.removed.len() > MAX_REMOVED_STATS {
            if let Some((subject, _)) = self.removed.pop_front() {
                debug!(subject, "dropping the statistics of a removed endpoint");
            }
        }
    }

    /// The statistics that the endpoint had before, or new ones.
    fn stats_for(&mut self, subject: &str) -> Arc<EndpointStats> {
        let index = self.removed.iter().position(|(removed, _)| removed == subject);
        index.and_then(|index| self.removed.remove(index)).map(|(_, stats)| stats).unwrap_or_default()
    }
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").field("name", &self.name).field("id", &self.id).finish_non_exhaustive()
    }
}

impl Service {
    /// Starts a service with its permanent endpoints, which are reachable when this returns. Without a
    /// connection it returns as well, and the service appears when the connection is up. The caller makes the id with
    /// [`new_id`], so that the handlers can know it.
    ///
    /// # Errors
    ///
    /// When the client does not accept a subscription. Neither an error nor dropping the future leaves
    /// anything behind.
    pub async fn start(
        context: &ServiceContext,
        name: Token,
        id: &str,
        queue_group: &'static str,
        info: ServiceInfo,
        permanent: Vec<(EndpointInfo, Handler)>,
    ) -> Result<Arc<Self>, ServiceError> {
        let (info, listed) = (watch::Sender::new(info), watch::Sender::default());
        let cached_info = CachedInfo { info: info.subscribe(), listed: listed.subscribe(), encoded: None };
        let service = Arc::new(Self {
            context: context.clone(),
            name,
            queue_group,
            id: id.to_owned(),
            started: Timestamp(SystemTime::now()).to_string(),
            info,
            listed,
            cached_info: std::sync::Mutex::new(cached_info),
            endpoints: Mutex::default(),
            stopped: CancellationToken::new(),
        });
        let mut endpoints = Endpoints::default();
        for (info, handler) in distinct(permanent, HashSet::new()) {
            let subscriptions = service.subscribe(&info).await?;
            let endpoint = EndpointTask::start(context, info, handler, subscriptions, Arc::default());
            endpoints.permanent.push(endpoint);
        }
        service.list(&endpoints);
        // After the endpoints: whoever discovers the service can call them.
        endpoints.membership = Some(context.responder.join(&service).await?);
        service.wait_until_applied(Vec::new()).await;
        // Up to here `endpoints` is not part of the service: if this future is dropped, they and the membership end.
        *service.endpoints.lock().await = endpoints;
        Ok(service)
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    pub fn describe(&self, info: ServiceInfo) {
        self.info.send_replace(info);
    }

    /// Replaces all endpoints except the permanent ones. An endpoint whose subject was published
    /// before is served without a gap, with the new handler and metadata and the old statistics. A removed
    /// endpoint disappears from INFO immediately, and callers get "no responders" when this returns; if it is
    /// published again later, it continues its statistics. Of two with the same subject the first is taken.
    ///
    /// The change completes even if the future is dropped: half of it would leave subscriptions behind that
    /// nothing refers to.
    ///
    /// # Errors
    ///
    /// When the client does not accept a subscription; then nothing changes.
    pub async fn publish(
        self: &Arc<Self>,
        endpoints: Vec<(EndpointInfo, Handler)>,
    ) -> Result<(), ServiceError> {
        let service = Arc::clone(self);
        self.context.tasks.spawn(async move { service.replace_endpoints(endpoints).await }).await?
    }

    /// Removes all endpoints without losing a request, then the service itself. When this returns, the
    /// handlers have received all requests; it does not wait for their replies. Completes even if the
    /// future is dropped.
    pub async fn stop(self: &Arc<Self>) {
        let service = Arc::clone(self);
        if let Err(error) = self.context.tasks.spawn(async move { service.remove_all().await }).await {
            debug!(%error, "the runtime ended the service");
        }
    }

    async fn replace_endpoints(&self, wanted: Vec<(EndpointInfo, Handler)>) -> Result<(), ServiceError> {
        let mut endpoints = self.endpoints.lock().await;
        if self.stopped.is_cancelled() {
            return Err(ServiceError::Stopped);
        }
        let taken = endpoints.permanent.iter().map(|endpoint| endpoint.subject().to_owned()).collect();
        let wanted = distinct(wanted, taken);

        // Subscribing can fail, so it comes before any change.
        let mut subscriptions = HashMap::new();
        for (info, _) in &wanted {
            if !endpoints.published.iter().any(|endpoint| endpoint.subject() == info.subject) {
                subscriptions.insert(info.subject.clone(), self.subscribe(info).await?);
            }
        }

        let mut previous: HashMap<String, EndpointTask> =
            endpoints.published.drain(..).map(|endpoint| (endpoint.subject().to_owned(), endpoint)).collect();
        for (info, handler) in wanted {
            if let Some(mut endpoint) = previous.remove(&info.subject) {
                endpoint.update(info, handler);
                endpoints.published.push(endpoint);
            } else if let Some(subscriptions) = subscriptions.remove(&info.subject) {
                let stats = endpoints.stats_for(&info.subject);
                let endpoint = EndpointTask::start(&self.context, info, handler, subscriptions, stats);
                endpoints.published.push(endpoint);
            }
        }
        previous.values().for_each(|removed| endpoints.keep_stats(&removed.listed));
        self.list(&endpoints);
        self.wait_until_applied(previous.into_values().collect()).await;
        Ok(())
    }

    async fn remove_all(&self) {
        let mut endpoints = self.endpoints.lock().await;
        let Endpoints { permanent, published, membership, .. } = std::mem::take(&mut *endpoints);
        let Some(membership) = membership else { return };
        self.list(&endpoints);
        self.wait_until_applied(permanent.into_iter().chain(published).collect()).await;
        self.stopped.cancel();
        membership.end().await;
    }

    /// Waits until the server knows all new subscriptions, and until the removed endpoints have read their
    /// last message. One round trip serves them all.
    async fn wait_until_applied(&self, removed: Vec<EndpointTask>) {
        let applied = CancellationToken::new();
        removed.iter().for_each(|endpoint| endpoint.drain(&applied));
        let confirmed = async {
            for endpoint in &removed {
                endpoint.unsubscribed.cancelled().await;
            }
            round_trip(&self.context.client).await
        };
        let confirmed = tokio::time::timeout(round_trip::TIMEOUT, confirmed).await;
        if let Err(error) = confirmed.unwrap_or(Err(RoundTripError::TimedOut)) {
            let removed = removed.len();
            warn!(service = %self.name, removed, %error, "cannot confirm the change of endpoints; continuing");
        }
        applied.cancel();
        for EndpointTask { listed, task, .. } in removed {
            if let Err(error) = task.await {
                error!(subject = listed.info.subject, %error, "endpoint task failed");
            }
        }
    }

    async fn subscribe(&self, endpoint: &EndpointInfo) -> Result<Subscriptions, ServiceError> {
        let subscribe = async |subject: &str| {
            let subscriber =
                self.context.client.queue_subscribe(subject.to_owned(), self.queue_group.to_owned()).await;
            subscriber.map_err(|source| ServiceError::Subscribe { subject: subject.to_owned(), source })
        };
        let direct = subscribe(&endpoint.subject).await?;
        let gateway = match &endpoint.gateway_subject {
            Some(subject) => Some(subscribe(subject).await?),
            None => None,
        };
        Ok(Subscriptions { direct, gateway })
    }

    fn response(&self, verb: DiscoveryVerb, max_payload: usize) -> Bytes {
        match verb {
            DiscoveryVerb::Info => {
                let mut cached = self.cached_info.lock().unwrap_or_else(PoisonError::into_inner);
                cached.get(self, max_payload)
            }
            DiscoveryVerb::Ping | DiscoveryVerb::Stats => discovery::response(verb, self, max_payload),
        }
    }

    fn list(&self, endpoints: &Endpoints) {
        let all = endpoints.permanent.iter().chain(&endpoints.published);
        self.listed.send_replace(all.map(|endpoint| endpoint.listed.clone()).collect());
    }
}

/// The response to INFO, which can be large and changes seldom.
struct CachedInfo {
    info: watch::Receiver<ServiceInfo>,
    listed: watch::Receiver<Vec<ListedEndpoint>>,
    /// The limit for which it was encoded, and the response.
    encoded: Option<(usize, Bytes)>,
}

impl CachedInfo {
    fn get(&mut self, service: &Service, max_payload: usize) -> Bytes {
        // The senders live as long as the service.
        let is_changed = self.info.has_changed().unwrap_or(true) || self.listed.has_changed().unwrap_or(true);
        if let Some((_, response)) = self.encoded.as_ref().filter(|(of, _)| !is_changed && *of == max_payload)
        {
            return response.clone();
        }
        self.info.mark_unchanged();
        self.listed.mark_unchanged();
        let response = discovery::response(DiscoveryVerb::Info, service, max_payload);
        self.encoded = Some((max_payload, response.clone()));
        response
    }
}

/// Drops endpoints whose subject is in `taken` or belongs to an earlier one.
fn distinct(
    mut endpoints: Vec<(EndpointInfo, Handler)>,
    mut taken: HashSet<String>,
) -> Vec<(EndpointInfo, Handler)> {
    endpoints.retain(|(info, _)| {
        let is_new = taken.insert(info.subject.clone());
        if !is_new {
            warn!(subject = info.subject, endpoint = info.name, "subject is taken; ignoring the endpoint");
        }
        is_new
    });
    endpoints
}
