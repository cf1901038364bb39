//! The NATS service protocol for one agent: endpoints that come and go, true counts, and a stop that
//! loses nothing.
//!
//! A [`Service`] answers `$SRV.PING`, `INFO` and `STATS` (ADR-32) and hands requests to the handlers
//! of its endpoints. Some endpoints are there for as long as the service is, the others are published
//! as one whole set, again and again. What a request means and how it is answered is the
//! handlers' business; which subjects there are is [`subject`](super::subject)'s.
//!
//! ```ignore
//! let service = Service::start(&mesh, name, "a2a", description, vec![(card, answer_card)]).await?;
//! service.publish(vec![(forecast, run_forecast)]).await?;  // the agent is ready
//! service.publish(vec![]).await?;                          // the agent is away: no responders
//! service.stop().await;                                    // every request that was received is handled
//! ```
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
//! count of messages. A [`round_trip`] says that the server has heard. Should a server ever take the
//! number at its word, the endpoint still ends, only as lossy as a plain unsubscribe, and the
//! tests of rolling restarts tell.

mod call;
mod discovery;
mod endpoint;
mod round_trip;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock};

use async_nats::{Client, Message, SubscribeError, Subscriber};
use futures_util::StreamExt;
use futures_util::stream::{BoxStream, SelectAll};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::sync::Mutex;
use tokio::task::{JoinError, JoinHandle};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};
use uuid::Uuid;

pub use self::call::{Call, Request};
pub use self::discovery::semver_or_zero;
use self::endpoint::{Listed, Running};
pub use self::round_trip::{RoundTripError, round_trip};
use super::subject::{ReplyGuard, Subjects, Token, Verb};

/// What all services on one connection share.
#[derive(Debug, Clone)]
pub struct Mesh {
    /// The connection. It must not have `no_echo` set.
    pub client: Client,
    /// Which reply subjects are answered.
    pub guard: Arc<ReplyGuard>,
    /// Where the services' tasks run.
    pub tasks: TaskTracker,
}

/// What INFO says about the service; all but its name and id may change.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Description {
    /// A semantic version, see [`semver_or_zero`].
    pub version: String,
    /// For people.
    pub description: String,
    /// For programs.
    pub metadata: BTreeMap<String, String>,
}

/// One endpoint as INFO shows it. Its subject is what makes it the same endpoint or another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Its name within the service.
    pub name: String,
    /// Where it is asked.
    pub subject: String,
    /// For programs.
    pub metadata: BTreeMap<String, String>,
}

/// Receives the requests of an endpoint, one after the other. It must not block: what takes longer
/// than a few microseconds is to be spawned, or the endpoint's requests queue up behind it.
pub type Handler = Arc<dyn Fn(Request) + Send + Sync>;

/// Why a service could not be started or changed.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The client is closed, or does not like the subject.
    #[error("cannot subscribe to {subject}")]
    Subscribe {
        /// The subject.
        subject: String,
        /// What the client says.
        source: SubscribeError,
    },
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

struct Inner {
    mesh: Mesh,
    name: Token,
    queue_group: &'static str,
    id: String,
    started: String,
    description: RwLock<Arc<Description>>,
    listed: RwLock<Arc<[Listed]>>,
    endpoints: Mutex<Endpoints>,
    ended: CancellationToken,
}

#[derive(Default)]
struct Endpoints {
    permanent: Vec<Running>,
    published: Vec<Running>,
    /// Answers PING, INFO and STATS; `None` once the service is stopped.
    answering: Option<JoinHandle<()>>,
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
    /// When the client does not accept a subscription. Nothing is left behind then.
    pub async fn start(
        mesh: &Mesh,
        name: Token,
        queue_group: &'static str,
        description: Description,
        permanent: Vec<(Endpoint, Handler)>,
    ) -> Result<Self, ServiceError> {
        let inner = Arc::new(Inner {
            mesh: mesh.clone(),
            name,
            queue_group,
            id: Uuid::new_v4().simple().to_string(),
            started: OffsetDateTime::now_utc().format(&Rfc3339).unwrap_or_default(),
            description: RwLock::new(Arc::new(description)),
            listed: RwLock::new(Arc::new([])),
            endpoints: Mutex::default(),
            ended: CancellationToken::new(),
        });
        let service = Self {
            inner: Arc::clone(&inner),
        };
        service
            .to_the_end(async move {
                let questions = inner.subscribe_questions().await?;
                let mut endpoints = inner.endpoints.lock().await;
                for (endpoint, handler) in distinct(permanent, HashSet::new()) {
                    let subscriber = inner.subscribe(&endpoint.subject).await?;
                    endpoints
                        .permanent
                        .push(Running::start(&inner.mesh, endpoint, handler, subscriber));
                }
                inner.list(&endpoints);
                let answering = inner.mesh.tasks.spawn(Arc::clone(&inner).answer(questions));
                endpoints.answering = Some(answering);
                inner.settle(Vec::new()).await;
                Ok(())
            })
            .await?;
        Ok(service)
    }

    /// This instance's id.
    pub fn id(&self) -> &str {
        &self.inner.id
    }

    /// Changes what INFO says about the service.
    pub fn describe(&self, description: Description) {
        *self
            .inner
            .description
            .write()
            .unwrap_or_else(PoisonError::into_inner) = Arc::new(description);
    }

    /// Makes these the endpoints, beside the permanent ones. One that was there before, by its subject,
    /// is served on without a gap, with the new handler and metadata and the old counts; one that is not
    /// among them any more is gone from INFO at once, and callers get "no responders" when this returns;
    /// if it comes back later, it counts from zero. Of two with the same subject the first is taken.
    ///
    /// Goes on to its end even if the future is dropped.
    ///
    /// # Errors
    ///
    /// When the client does not accept a subscription; then nothing is changed.
    pub async fn publish(&self, endpoints: Vec<(Endpoint, Handler)>) -> Result<(), ServiceError> {
        let inner = Arc::clone(&self.inner);
        self.to_the_end(async move { inner.publish(endpoints).await })
            .await
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
        self.inner.mesh.tasks.spawn(change).await?
    }
}

/// A question, and what is asked.
type Questions = SelectAll<BoxStream<'static, (Verb, Message)>>;

impl Inner {
    async fn publish(&self, wanted: Vec<(Endpoint, Handler)>) -> Result<(), ServiceError> {
        let mut endpoints = self.endpoints.lock().await;
        if self.ended.is_cancelled() {
            return Err(ServiceError::Stopped);
        }
        let wanted = distinct(
            wanted,
            endpoints
                .permanent
                .iter()
                .map(|one| one.subject().to_owned())
                .collect(),
        );

        // What can fail comes first.
        let mut added = HashMap::new();
        for (endpoint, _) in &wanted {
            if !endpoints
                .published
                .iter()
                .any(|one| one.subject() == endpoint.subject)
            {
                added.insert(endpoint.subject.clone(), self.subscribe(&endpoint.subject).await?);
            }
        }

        let mut present: HashMap<String, Running> = endpoints
            .published
            .drain(..)
            .map(|one| (one.subject().to_owned(), one))
            .collect();
        for (endpoint, handler) in wanted {
            if let Some(mut running) = present.remove(&endpoint.subject) {
                running.swap(endpoint, handler);
                endpoints.published.push(running);
            } else if let Some(subscriber) = added.remove(&endpoint.subject) {
                endpoints
                    .published
                    .push(Running::start(&self.mesh, endpoint, handler, subscriber));
            }
        }
        self.list(&endpoints);
        self.settle(present.into_values().collect()).await;
        Ok(())
    }

    async fn stop(&self) {
        let mut endpoints = self.endpoints.lock().await;
        let Endpoints {
            permanent,
            published,
            answering,
        } = std::mem::take(&mut *endpoints);
        let Some(answering) = answering else { return };
        self.list(&endpoints);
        self.settle(permanent.into_iter().chain(published).collect())
            .await;
        self.ended.cancel();
        if let Err(error) = answering.await {
            warn!(service = %self.name, %error, "the task that answers for the service failed");
        }
    }

    /// Waits until the server knows all new subscriptions, and has those who leave read their last
    /// message. One round trip serves them all.
    async fn settle(&self, leaving: Vec<Running>) {
        let settled = CancellationToken::new();
        leaving.iter().for_each(|one| one.leave(&settled));
        let told = async {
            for one in &leaving {
                one.told().await;
            }
            round_trip(&self.mesh.client).await
        };
        let told = tokio::time::timeout(round_trip::LIMIT, told).await;
        if let Err(error) = told.unwrap_or(Err(RoundTripError::TimedOut)) {
            warn!(service = %self.name, leaving = leaving.len(), %error, "no word from NATS, going on");
        }
        settled.cancel();
        for one in leaving {
            one.ended().await;
        }
    }

    async fn subscribe(&self, subject: &str) -> Result<Subscriber, ServiceError> {
        self.mesh
            .client
            .queue_subscribe(subject.to_owned(), self.queue_group.to_owned())
            .await
            .map_err(|source| ServiceError::Subscribe {
                subject: subject.to_owned(),
                source,
            })
    }

    /// Exact subjects and no queue group: every service answers for itself, and a question to a name
    /// that does not exist gets "no responders".
    async fn subscribe_questions(&self) -> Result<Questions, ServiceError> {
        let mut questions = SelectAll::new();
        for verb in Verb::ALL {
            for subject in Subjects::srv(verb, &self.name, &self.id) {
                let asked = self.mesh.client.subscribe(subject.clone()).await;
                let asked = asked.map_err(|source| ServiceError::Subscribe { subject, source })?;
                questions.push(asked.map(move |message| (verb, message)).boxed());
            }
        }
        Ok(questions)
    }

    async fn answer(self: Arc<Self>, mut questions: Questions) {
        while let Some(Some((verb, message))) = self.ended.run_until_cancelled(questions.next()).await {
            let Some(reply) = message.reply.filter(|reply| self.mesh.guard.allows(reply)) else {
                continue;
            };
            let client = &self.mesh.client;
            let answer = match discovery::response(verb, &self, client.max_payload()) {
                Ok(answer) => answer,
                Err(error) => {
                    warn!(service = %self.name, %error, "cannot describe the service");
                    continue;
                }
            };
            let sent = self
                .ended
                .run_until_cancelled(client.publish(reply, answer.into()))
                .await;
            if let Some(Err(error)) = sent {
                warn!(service = %self.name, verb = verb.as_str(), %error, "cannot answer");
            }
        }
    }

    fn list(&self, endpoints: &Endpoints) {
        let listed = endpoints
            .permanent
            .iter()
            .chain(&endpoints.published)
            .map(Running::listed)
            .collect();
        *self.listed.write().unwrap_or_else(PoisonError::into_inner) = listed;
    }

    fn listed(&self) -> Arc<[Listed]> {
        Arc::clone(&self.listed.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn description(&self) -> Arc<Description> {
        Arc::clone(&self.description.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The endpoints whose subjects are neither taken nor come twice.
fn distinct(endpoints: Vec<(Endpoint, Handler)>, mut taken: HashSet<String>) -> Vec<(Endpoint, Handler)> {
    let is_new = |(endpoint, _): &(Endpoint, Handler)| {
        let new = taken.insert(endpoint.subject.clone());
        if !new {
            warn!(
                subject = endpoint.subject,
                endpoint = endpoint.name,
                "subject is taken, endpoint left out"
            );
        }
        new
    };
    endpoints.into_iter().filter(is_new).collect()
}
