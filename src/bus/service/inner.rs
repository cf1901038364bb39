//! One running service: which endpoints there are, how they change, and who answers for it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, PoisonError, RwLock};

use async_nats::{Message, Subscriber};
use futures_util::StreamExt;
use futures_util::stream::{BoxStream, SelectAll};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};
use uuid::Uuid;

use super::endpoint::{Listed, Running};
use super::request::EndpointStats;
use super::round_trip::{self, RoundTripError, round_trip};
use super::{EndpointInfo, Handler, ServiceContext, ServiceError, ServiceInfo, discovery};
use crate::bus::subject::{DiscoveryVerb, Subjects, Token};

/// Most endpoints that are away and whose counts are kept: some agents make new ids at every start.
const MAX_AWAY: usize = 1000;

/// One running service; [`Service`](super::Service) is the handle to it.
pub(super) struct Inner {
    pub(super) context: ServiceContext,
    pub(super) name: Token,
    pub(super) queue_group: &'static str,
    pub(super) id: String,
    pub(super) started: String,
    description: RwLock<Arc<ServiceInfo>>,
    listed: RwLock<Arc<[Listed]>>,
    endpoints: Mutex<Endpoints>,
    ended: CancellationToken,
}

#[derive(Default)]
struct Endpoints {
    permanent: Vec<Running>,
    published: Vec<Running>,
    away: Away,
    /// Answers PING, INFO and STATS; `None` once the service is stopped.
    answering: Option<JoinHandle<()>>,
}

/// The counts of endpoints that are not published right now, by subject; the oldest go first.
#[derive(Default)]
struct Away(VecDeque<(String, Arc<EndpointStats>)>);

impl Away {
    fn keep(&mut self, gone: &Listed) {
        self.0.push_back((gone.endpoint.subject.clone(), Arc::clone(&gone.stats)));
        while self.0.len() > MAX_AWAY {
            if let Some((subject, _)) = self.0.pop_front() {
                debug!(subject, "counts of an endpoint that left are forgotten");
            }
        }
    }

    /// The counts to go on with: those from before, or none.
    fn take(&mut self, subject: &str) -> Arc<EndpointStats> {
        let index = self.0.iter().position(|(away, _)| away == subject);
        index.and_then(|index| self.0.remove(index)).map(|(_, stats)| stats).unwrap_or_default()
    }
}

/// A question, and what is asked.
type Questions = SelectAll<BoxStream<'static, (DiscoveryVerb, Message)>>;

impl Inner {
    pub(super) async fn start(
        context: ServiceContext,
        name: Token,
        queue_group: &'static str,
        description: ServiceInfo,
        permanent: Vec<(EndpointInfo, Handler)>,
    ) -> Result<Arc<Self>, ServiceError> {
        let inner = Self {
            context,
            name,
            queue_group,
            id: Uuid::new_v4().simple().to_string(),
            started: OffsetDateTime::now_utc().format(&Rfc3339).unwrap_or_default(),
            description: RwLock::new(Arc::new(description)),
            listed: RwLock::new(Arc::new([])),
            endpoints: Mutex::default(),
            ended: CancellationToken::new(),
        };
        let questions = inner.subscribe_questions().await?;
        let mut endpoints = Endpoints::default();
        for (endpoint, handler) in distinct(permanent, HashSet::new()) {
            let subscriber = inner.subscribe(&endpoint.subject).await?;
            let running = Running::start(&inner.context, endpoint, handler, subscriber, Arc::default());
            endpoints.permanent.push(running);
        }
        inner.list(&endpoints);
        inner.settle(Vec::new()).await;
        // Only now is there a task that keeps the service alive: if this future is dropped earlier,
        // the endpoints end with it.
        let inner = Arc::new(inner);
        endpoints.answering = Some(inner.context.tasks.spawn(Arc::clone(&inner).answer(questions)));
        *inner.endpoints.lock().await = endpoints;
        Ok(inner)
    }

    pub(super) async fn publish(&self, wanted: Vec<(EndpointInfo, Handler)>) -> Result<(), ServiceError> {
        let mut endpoints = self.endpoints.lock().await;
        if self.ended.is_cancelled() {
            return Err(ServiceError::Stopped);
        }
        let wanted =
            distinct(wanted, endpoints.permanent.iter().map(|one| one.subject().to_owned()).collect());

        // What can fail comes first.
        let mut added = HashMap::new();
        for (endpoint, _) in &wanted {
            if !endpoints.published.iter().any(|one| one.subject() == endpoint.subject) {
                added.insert(endpoint.subject.clone(), self.subscribe(&endpoint.subject).await?);
            }
        }

        let mut present: HashMap<String, Running> =
            endpoints.published.drain(..).map(|one| (one.subject().to_owned(), one)).collect();
        for (endpoint, handler) in wanted {
            if let Some(mut running) = present.remove(&endpoint.subject) {
                running.swap(endpoint, handler);
                endpoints.published.push(running);
            } else if let Some(subscriber) = added.remove(&endpoint.subject) {
                let stats = endpoints.away.take(&endpoint.subject);
                endpoints.published.push(Running::start(&self.context, endpoint, handler, subscriber, stats));
            }
        }
        present.values().for_each(|gone| endpoints.away.keep(&gone.listed()));
        self.list(&endpoints);
        self.settle(present.into_values().collect()).await;
        Ok(())
    }

    pub(super) async fn stop(&self) {
        let mut endpoints = self.endpoints.lock().await;
        let Endpoints { permanent, published, answering, .. } = std::mem::take(&mut *endpoints);
        let Some(answering) = answering else { return };
        self.list(&endpoints);
        self.settle(permanent.into_iter().chain(published).collect()).await;
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
            round_trip(&self.context.client).await
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
        self.context
            .client
            .queue_subscribe(subject.to_owned(), self.queue_group.to_owned())
            .await
            .map_err(|source| ServiceError::Subscribe { subject: subject.to_owned(), source })
    }

    /// Exact subjects and no queue group: every service answers for itself, and a question to a name
    /// that does not exist gets "no responders".
    async fn subscribe_questions(&self) -> Result<Questions, ServiceError> {
        let mut questions = SelectAll::new();
        for verb in DiscoveryVerb::ALL {
            for subject in Subjects::srv(verb, &self.name, &self.id) {
                let asked = self.context.client.subscribe(subject.clone()).await;
                let asked = asked.map_err(|source| ServiceError::Subscribe { subject, source })?;
                questions.push(asked.map(move |message| (verb, message)).boxed());
            }
        }
        Ok(questions)
    }

    async fn answer(self: Arc<Self>, mut questions: Questions) {
        while let Some(Some((verb, message))) = self.ended.run_until_cancelled(questions.next()).await {
            let Some(reply) = message.reply.filter(|reply| self.context.guard.allows(reply)) else {
                continue;
            };
            let client = &self.context.client;
            let answer = match discovery::response(verb, &self, client.max_payload()) {
                Ok(answer) => answer,
                Err(error) => {
                    warn!(service = %self.name, %error, "cannot describe the service");
                    continue;
                }
            };
            let sent = self.ended.run_until_cancelled(client.publish(reply, answer.into())).await;
            if let Some(Err(error)) = sent {
                warn!(service = %self.name, verb = verb.as_str(), %error, "cannot answer");
            }
        }
    }

    fn list(&self, endpoints: &Endpoints) {
        let listed = endpoints.permanent.iter().chain(&endpoints.published).map(Running::listed).collect();
        *self.listed.write().unwrap_or_else(PoisonError::into_inner) = listed;
    }

    pub(super) fn listed(&self) -> Arc<[Listed]> {
        Arc::clone(&self.listed.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn describe(&self, description: ServiceInfo) {
        *self.description.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(description);
    }

    pub(super) fn description(&self) -> Arc<ServiceInfo> {
        Arc::clone(&self.description.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The endpoints whose subjects are neither taken nor come twice.
fn distinct(
    endpoints: Vec<(EndpointInfo, Handler)>,
    mut taken: HashSet<String>,
) -> Vec<(EndpointInfo, Handler)> {
    let is_new = |(endpoint, _): &(EndpointInfo, Handler)| {
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
