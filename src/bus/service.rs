//! The NATS service protocol for one agent: endpoints that come and go, true counts, and a stop that
//! loses nothing.
//!
//! A [`Service`] answers `$SRV.PING`, `INFO` and `STATS` (ADR-32) and hands requests to the handlers
//! of its endpoints. Some endpoints are there for as long as the service is, the others are published
//! as one whole set, again and again. What a request means and how it is answered is the
//! handlers' business; which subjects there are is [`subject`](super::subject)'s.
//!
//! # Why not the library's service layer
//!
//! It never removes an endpoint from INFO, counts only replies that it sends itself, and loses requests
//! when it stops.
//!
//! # How an endpoint leaves
//!
//! A client that unsubscribes forgets the subscription at once, while the server goes on sending until
//! it has heard of it: these messages are lost, and with them calls that another replica would gladly
//! have taken. The cure is an order: tell the server, keep reading until it has certainly heard, and
//! only then forget. The library has no call for "tell the server only", but
//! `unsubscribe_after(u64::MAX)` is one. The client takes it for a count that is never reached. The
//! server reads counts of at most nine digits, and takes any other for none, which means at once
//! (`parseSize` and `processUnsub` in nats-server: since 2.2 by the number of digits, before by
//! overflow to -1). After a reconnect the client repeats it, so nothing depends on either side's
//! count of messages. A [`round_trip()`] says that the server has heard. Should a server ever take the
//! number at its word, the endpoint still ends, only as lossy as a plain unsubscribe, and the
//! tests of rolling restarts tell.

mod discovery;
mod endpoint;
mod inner;
mod request;
mod round_trip;

use std::collections::BTreeMap;
use std::sync::Arc;

use async_nats::{Client, SubscribeError};
use tokio::task::JoinError;
use tokio_util::task::TaskTracker;
use tracing::debug;

pub use self::discovery::semver_or_zero;
use self::inner::Inner;
pub use self::request::{Accounting, ServiceRequest};
pub use self::round_trip::{RoundTripError, round_trip};
use super::subject::{ReplyGuard, Token};

/// What all services on one connection share.
#[derive(Debug, Clone)]
pub struct ServiceContext {
    /// The connection. It must not have `no_echo` set.
    pub client: Client,
    /// Which reply subjects are answered.
    pub guard: Arc<ReplyGuard>,
    /// Where the services' tasks run.
    pub tasks: TaskTracker,
}

/// What INFO says about the service; all but its name and id may change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServiceInfo {
    /// A semantic version, see [`semver_or_zero`].
    pub version: String,
    pub description: String,
    pub metadata: BTreeMap<String, String>,
}

/// One endpoint as INFO shows it. Its subject is what makes it the same endpoint or another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointInfo {
    /// Its name within the service.
    pub name: String,
    pub subject: String,
    pub metadata: BTreeMap<String, String>,
}

/// Receives the requests of an endpoint, one after the other. It must not block: what takes longer
/// than a few microseconds is to be spawned, or the endpoint's requests queue up behind it.
pub type Handler = Arc<dyn Fn(ServiceRequest) + Send + Sync>;

/// Why a service could not be started or changed.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The client is closed, or does not like the subject.
    #[error("cannot subscribe to {subject}")]
    Subscribe { subject: String, source: SubscribeError },
    /// The service has been stopped.
    #[error("the service has been stopped")]
    Stopped,
    /// The runtime is shutting down.
    #[error("the service's task was ended")]
    Ended(#[from] JoinError),
}

/// A handle to one running service. It runs until [`stop`](Self::stop), also when all handles are
/// dropped.
#[derive(Clone)]
pub struct Service {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service")
            .field("name", &self.inner.name)
            .field("id", &self.inner.id)
            .finish_non_exhaustive()
    }
}

impl Service {
    /// Starts a service with the endpoints that stay for as long as it runs. It can be called when this
    /// returns; without a connection it returns all the same, and the service is there as soon as
    /// the connection is.
    ///
    /// # Errors
    ///
    /// When the client does not accept a subscription. Nothing is left behind then, nor when the future
    /// is dropped.
    pub async fn start(
        context: &ServiceContext,
        name: Token,
        queue_group: &'static str,
        description: ServiceInfo,
        permanent: Vec<(EndpointInfo, Handler)>,
    ) -> Result<Self, ServiceError> {
        let inner = Inner::start(context.clone(), name, queue_group, description, permanent).await?;
        Ok(Self { inner })
    }

    pub fn id(&self) -> &str {
        &self.inner.id
    }

    /// Changes what INFO says about the service.
    pub fn describe(&self, description: ServiceInfo) {
        self.inner.describe(description);
    }

    /// Makes these the endpoints, beside the permanent ones. One that was there before, by its subject,
    /// is served on without a gap, with the new handler and metadata and the old counts; one that is not
    /// among them any more is gone from INFO at once, and callers get "no responders" when this returns;
    /// if it comes back later, it counts on. Of two with the same subject the first is taken.
    ///
    /// Goes on to its end even if the future is dropped.
    ///
    /// # Errors
    ///
    /// When the client does not accept a subscription; then nothing is changed.
    pub async fn publish(&self, endpoints: Vec<(EndpointInfo, Handler)>) -> Result<(), ServiceError> {
        let inner = Arc::clone(&self.inner);
        self.to_the_end(async move { inner.publish(endpoints).await }).await
    }

    /// Takes all endpoints off the mesh without losing a request, then the service itself. When this
    /// returns, all requests have been handed to their handlers; it does not wait for their replies.
    pub async fn stop(&self) {
        let inner = Arc::clone(&self.inner);
        let stopped = self.to_the_end(async move {
            inner.stop().await;
            Ok(())
        });
        if let Err(error) = stopped.await {
            debug!(%error, "service ended by force");
        }
    }

    /// Half a change would leave endpoints behind that nobody knows of.
    async fn to_the_end(
        &self,
        change: impl Future<Output = Result<(), ServiceError>> + Send + 'static,
    ) -> Result<(), ServiceError> {
        self.inner.context.tasks.spawn(change).await?
    }
}
