//! Answers PING, INFO and STATS for all services on one connection.
//!
//! Services share their subscriptions: if each had its own, every request to `$SRV.INFO` would reach the connection once
//! for each agent, and a few megabytes of requests would make the server end the connection as a slow consumer. A
//! [`Group`] is the services that answer the same subjects: all of them (`$SRV.INFO`), those with one name
//! (`$SRV.INFO.weather`), or one instance. It subscribes when its first service joins, and unsubscribes when its last
//! one leaves. Each service answers for itself, with its own id.
//!
//! # Limits
//!
//! A group always reads its subscriptions, and keeps only the reply subjects of waiting requests, in at most
//! [`MAX_WAITING`] bytes; it drops further requests. It answers one request after the other, so that a flood of requests
//! for all services does not delay those for one name. All groups together have one reply in the NATS client, and encode
//! a reply only when the one before it has left: calls never wait behind many replies to discovery requests.

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use async_nats::{Message, Subject};
use futures_util::StreamExt as _;
use futures_util::stream::{BoxStream, SelectAll};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{error, warn};

use super::{Service, ServiceError};
use crate::bus::outbox::Outbox;
use crate::bus::subject::{DiscoveryVerb, ReplyGuard, Subjects};
use crate::telemetry::log_limit::LogLimit;

/// Bytes of waiting requests in one group; about a thousand requests.
const MAX_WAITING: usize = 128 << 10;
/// Approximate bytes of a waiting request without its reply subject.
const WAITING_OVERHEAD: usize = 64;

#[derive(Debug)]
pub(super) struct Responder {
    guard: Arc<ReplyGuard>,
    tasks: TaskTracker,
    outbox: Outbox,
    /// The groups by their first subject. The task of a group owns it.
    groups: Mutex<HashMap<String, Weak<Group>>>,
    dropped: LogLimit,
}

type Requests = SelectAll<BoxStream<'static, (DiscoveryVerb, Message)>>;

/// The services that answer the same subjects.
#[derive(Debug)]
struct Group {
    members: Mutex<Members>,
    /// Cancelled when the last service has left. No service joins after that.
    empty: CancellationToken,
    /// Cancelled when the subscriptions are dropped.
    ended: CancellationToken,
}

#[derive(Debug, Default)]
struct Members {
    next: u64,
    services: BTreeMap<u64, Arc<Service>>,
}

/// A request that waits for its turn.
struct Waiting {
    verb: DiscoveryVerb,
    reply: Subject,
    _place: OwnedSemaphorePermit,
}

/// A service's places in its groups. Dropping it removes the service from discovery.
#[derive(Debug)]
pub(super) struct Membership {
    responder: Arc<Responder>,
    places: Vec<Place>,
}

#[derive(Debug)]
struct Place {
    key: String,
    group: Weak<Group>,
    ended: CancellationToken,
    number: u64,
}

impl Responder {
    pub(super) fn new(outbox: Outbox, guard: Arc<ReplyGuard>, tasks: TaskTracker) -> Self {
        Self { guard, tasks, outbox, groups: Mutex::default(), dropped: LogLimit::default() }
    }

    /// Answers for a service from now on. Dropping the future leaves nothing behind.
    pub(super) async fn join(self: &Arc<Self>, service: &Arc<Service>) -> Result<Membership, ServiceError> {
        let mut membership = Membership { responder: Arc::clone(self), places: Vec::new() };
        let [ping, info, stats] = DiscoveryVerb::ALL
            .map(|verb| Subjects::srv(verb, &service.name, &service.id).map(|subject| (verb, subject)));
        for ((ping, info), stats) in ping.into_iter().zip(info).zip(stats) {
            let subjects = [ping, info, stats];
            membership.places.push(self.join_group(&subjects, service).await?);
        }
        Ok(membership)
    }

    async fn join_group(
        self: &Arc<Self>,
        subjects: &[(DiscoveryVerb, String); 3],
        service: &Arc<Service>,
    ) -> Result<Place, ServiceError> {
        let [(_, key), ..] = subjects;
        if let Some(place) = join_existing(&self.lock(), key, service) {
            return Ok(place);
        }
        let requests = self.subscribe(subjects).await?;
        let mut groups = self.lock();
        // Another service may have been faster; then these subscriptions are dropped.
        if let Some(place) = join_existing(&groups, key, service) {
            return Ok(place);
        }
        let group = Arc::new(Group {
            members: Mutex::default(),
            empty: CancellationToken::new(),
            ended: CancellationToken::new(),
        });
        let place = group.add(key, service);
        groups.insert(key.clone(), Arc::downgrade(&group));
        self.tasks.spawn(group.run(Arc::clone(self), requests));
        Ok(place)
    }

    /// Exact subjects, so that a request for a name that does not exist gets "no responders", and no queue group, so
    /// that other bridges answer too.
    async fn subscribe(&self, subjects: &[(DiscoveryVerb, String); 3]) -> Result<Requests, ServiceError> {
        let mut requests = Requests::new();
        for (verb, subject) in subjects {
            let verb = *verb;
            let subscriber = self.outbox.client.subscribe(subject.clone()).await;
            let subscriber =
                subscriber.map_err(|source| ServiceError::Subscribe { subject: subject.clone(), source })?;
            requests.push(subscriber.map(move |message| (verb, message)).boxed());
        }
        Ok(requests)
    }

    /// Removes a service from one of its groups.
    fn leave(&self, place: &Place) {
        let mut groups = self.lock();
        let Some(group) = place.group.upgrade() else { return };
        let mut members = group.lock();
        let left = members.services.remove(&place.number);
        if members.services.is_empty() {
            group.empty.cancel();
            if groups.get(&place.key).is_some_and(|current| current.ptr_eq(&place.group)) {
                groups.remove(&place.key);
            }
        }
        drop(members);
        drop(groups);
        // This may be the last reference to the service, whose membership locks the groups when it is dropped.
        drop((left, group));
    }

    /// Counts a dropped request.
    fn count_dropped(&self) {
        if let Some(dropped) = self.dropped.add(Instant::now()) {
            warn!(
                dropped,
                "discovery requests arrive faster than they can be answered; dropped some (logged once a minute)"
            );
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Weak<Group>>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn join_existing(groups: &HashMap<String, Weak<Group>>, key: &str, service: &Arc<Service>) -> Option<Place> {
    let group = groups.get(key)?.upgrade()?;
    (!group.empty.is_cancelled()).then(|| group.add(key, service))
}

impl Membership {
    /// Removes the service from discovery. When this returns, subscriptions that no other service needs are dropped.
    pub(super) async fn end(mut self) {
        let places = std::mem::take(&mut self.places);
        places.iter().for_each(|place| self.responder.leave(place));
        for place in places {
            let is_last = place.group.upgrade().is_none_or(|group| group.empty.is_cancelled());
            if is_last {
                place.ended.cancelled().await;
            }
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.places.iter().for_each(|place| self.responder.leave(place));
    }
}

impl Group {
    fn add(self: &Arc<Self>, key: &str, service: &Arc<Service>) -> Place {
        let mut members = self.lock();
        let number = members.next;
        members.next += 1;
        members.services.insert(number, Arc::clone(service));
        Place { key: key.to_owned(), group: Arc::downgrade(self), ended: self.ended.clone(), number }
    }

    /// The first service that joined after the one with the number `last`.
    fn next_member(&self, last: Option<u64>) -> Option<(u64, Arc<Service>)> {
        let members = self.lock();
        let mut next = members.services.range(last.map_or(0, |last| last + 1)..);
        next.next().map(|(number, service)| (*number, Arc::clone(service)))
    }

    /// Answers requests until the last service has left, or the client is closed.
    async fn run(self: Arc<Self>, responder: Arc<Responder>, requests: Requests) {
        // Dropped last.
        let _ended = self.ended.clone().drop_guard();
        // The places limit the channel.
        let (sender, receiver) = mpsc::unbounded_channel();
        tokio::select! {
            () = self.empty.cancelled() => {}
            () = read(&responder, requests, sender) => {}
            () = self.answer(&responder, receiver) => {}
        }
    }

    async fn answer(&self, responder: &Responder, mut requests: mpsc::UnboundedReceiver<Waiting>) {
        while let Some(Waiting { verb, reply, _place }) = requests.recv().await {
            let mut last = None;
            loop {
                // Before the response is encoded, so that only one exists at a time, whatever its size.
                let room = responder.outbox.reserve(usize::MAX).await;
                let Some((number, service)) = self.next_member(last) else { break };
                last = Some(number);
                let max_payload = responder.outbox.max_payload();
                // A panic for one service must not end the discovery of the others.
                let response = catch_unwind(AssertUnwindSafe(|| service.response(verb, max_payload)));
                let Ok(response) = response else {
                    error!(service = %service.name, verb = verb.as_str(), "cannot encode the response: panic");
                    continue;
                };
                let sent = responder.outbox.publish_in(room, reply.clone(), None, None, response).await;
                if let Err(error) = sent {
                    warn!(service = %service.name, verb = verb.as_str(), %error, "cannot send the response");
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads requests without ever waiting for their answers: the subscriptions of the client have room for many messages
/// of any size.
async fn read(responder: &Responder, mut requests: Requests, waiting: mpsc::UnboundedSender<Waiting>) {
    let places = Arc::new(Semaphore::new(MAX_WAITING));
    while let Some((verb, message)) = requests.next().await {
        let Some(reply) = message.reply.filter(|reply| responder.guard.allows(reply)) else {
            continue;
        };
        let size = u32::try_from(WAITING_OVERHEAD + reply.len()).unwrap_or(u32::MAX);
        match Arc::clone(&places).try_acquire_many_owned(size) {
            // The receiver lives as long as this future. The client has copied the subject, so that it does not keep
            // the body.
            Ok(place) => drop(waiting.send(Waiting { verb, reply, _place: place })),
            Err(_) => responder.count_dropped(),
        }
    }
}
