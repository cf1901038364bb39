//! The front door for requests about sessions, such as `<prefix>.sessions.list`.
//!
//! It is a service of its own, because sessions belong to callers and not to an agent. All bridges share the requests.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Message, StatusCode, Subject};
use bytes::Bytes;
use futures_util::StreamExt as _;
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::encoded_reply::EncodedReply;
use super::inbox::subscribe_once;
use super::outbox::Outbox;
use super::service::{
    self, EndpointInfo, Handler, Service, ServiceContext, ServiceError, ServiceInfo, ServiceRequest,
};
use super::subject::{Subjects, Token};
use crate::background::{BackgroundTasks, OnPanic};
use crate::caller::Caller;
use crate::dispatch::fair_permits::FairPermits;
use crate::events::event::index_position;
use crate::events::follow::Follower;
use crate::events::sessions::page::EventsRequest;
use crate::events::sessions::projector::SessionRef;
use crate::events::sessions::reading::MAX_LISTED;
use crate::events::sessions::service::{Sessions, parse};
use crate::reply::error::{ActionError, Code};
use crate::text::error_chain;

const QUEUE_GROUP: &str = "a2a";
/// The name of the service. Agents do not have such names.
const NAME: &str = "a2a-sessions";
/// Room in a message for its headers, and for what is around its data.
const ROOM: usize = 2 << 10;
/// Requests that run at the same time, and callers that follow events. One tenant does not take all of them.
const MAX_CONCURRENT: usize = 64;
const MAX_FOLLOWERS: usize = 4096;
/// A follower that hears nothing for this long gets a keep-alive, and is asked whether it still listens.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How long the server may take to say that nobody listens.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a stop waits for requests that run.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

const VERBS: [&str; 10] =
    ["create", "list", "get", "events", "fork", "rename", "delete", "redact", "runs", "rebuild"];

/// The service while it runs.
#[derive(Debug)]
pub(crate) struct SessionService {
    service: Arc<Service>,
    running: TaskTracker,
    /// Ends the streams of followers.
    stopping: CancellationToken,
}

#[derive(Debug)]
struct SessionEndpoint {
    sessions: Arc<Sessions>,
    verb: &'static str,
    outbox: Outbox,
    requests: Arc<FairPermits>,
    followers: Arc<FairPermits>,
    stopping: CancellationToken,
}

impl SessionService {
    pub(crate) async fn start(
        sessions: Arc<Sessions>,
        context: &ServiceContext,
        subjects: &Subjects,
        outbox: Outbox,
        tasks: &BackgroundTasks,
    ) -> Result<Self, ServiceError> {
        let (running, stopping) = (TaskTracker::new(), CancellationToken::new());
        let (requests, followers) = (FairPermits::new(MAX_CONCURRENT), FairPermits::new(MAX_FOLLOWERS));
        let endpoints = VERBS.into_iter().map(|verb| {
            let endpoint = Arc::new(SessionEndpoint {
                sessions: Arc::clone(&sessions),
                verb,
                outbox: outbox.clone(),
                requests: Arc::clone(&requests),
                followers: Arc::clone(&followers),
                stopping: stopping.clone(),
            });
            let (running, tasks) = (running.clone(), tasks.clone());
            let handler: Handler = Arc::new(move |request| {
                let serving = Arc::clone(&endpoint).serve(request);
                tasks.spawn("session request", OnPanic::Log, running.track_future(serving));
            });
            let subject = subjects.sessions(verb);
            let gateway_subject = subjects.gateway(&subject);
            (
                EndpointInfo { name: verb.to_owned(), subject, gateway_subject, metadata: BTreeMap::new() },
                handler,
            )
        });
        let info = ServiceInfo {
            version: service::semver_or_zero(env!("CARGO_PKG_VERSION")).to_string(),
            description: "Sessions of a2a-bridge".to_owned(),
            metadata: BTreeMap::new(),
        };
        let (name, id) = (Token::new(NAME), service::new_id());
        let service = Service::start(context, name, &id, QUEUE_GROUP, info, endpoints.collect()).await?;
        Ok(Self { service, running, stopping })
    }

    pub(crate) async fn stop(&self) {
        self.service.stop().await;
        self.stopping.cancel();
        self.running.close();
        let _ = tokio::time::timeout(STOP_TIMEOUT, self.running.wait()).await;
    }
}

impl SessionEndpoint {
    async fn serve(self: Arc<Self>, request: ServiceRequest) {
        let ServiceRequest { message, caller, accounting } = request;
        let Some(to) = message.reply.clone() else { return };
        let answer = match caller {
            Ok(caller) => self.answer(&message, &caller, &to).await,
            Err(error) => Err(error),
        };
        let error = match answer {
            // A follower has got everything.
            Ok(None) => None,
            Ok(Some(body)) => {
                self.send(to, body).await;
                None
            }
            Err(error) => {
                let encoded = EncodedReply::new(&Err(error), self.outbox.max_payload(), 0);
                let error = encoded.error;
                if let Err(error) = encoded.send(&self.outbox, to).await {
                    tracing::warn!(error = error_chain(&error), "cannot answer a request about sessions");
                }
                error
            }
        };
        accounting.end(error);
    }

    async fn send(&self, to: Subject, body: Bytes) {
        if let Err(error) = self.outbox.publish(to, None, None, body).await {
            tracing::warn!(error = error_chain(&error), "cannot answer a request about sessions");
        }
    }

    async fn answer(
        &self,
        message: &Message,
        caller: &Caller,
        to: &Subject,
    ) -> Result<Option<Bytes>, ActionError> {
        let busy = || ActionError::new(Code::Busy, "too many concurrent requests about sessions; try again");
        let permit = self.requests.try_acquire(&caller.tenant()).ok_or_else(busy)?;
        let (sessions, body) = (&self.sessions, &*message.payload);
        let room = self.outbox.max_payload().saturating_sub(ROOM);
        let reply = match self.verb {
            "create" => sessions.create(caller, body).await?,
            "list" => sessions.list(caller, body, room).await?,
            "get" => sessions.get(caller, body, room).await?,
            "fork" => sessions.fork(caller, body).await?,
            "rename" => sessions.rename(caller, body).await?,
            "delete" => sessions.delete(caller, body).await?,
            "redact" => sessions.redact(caller, body).await?,
            "runs" => sessions.runs(caller, body, room).await?,
            "rebuild" => sessions.rebuild(caller, body).await?,
            _ => {
                let EventsRequest { id, after, limit, follow } = parse(body)?;
                let session = Sessions::session(caller, &id)?;
                let limit = limit.unwrap_or(MAX_LISTED).clamp(1, MAX_LISTED);
                if follow {
                    drop(permit);
                    let _permit = self.followers.try_acquire(&caller.tenant()).ok_or_else(busy)?;
                    self.follow(&session, after, limit, to).await?;
                    return Ok(None);
                }
                sessions.events(&session, after, limit, room).await?.to_json()
            }
        };
        Ok(Some(reply))
    }

    /// Sends the events of a session, and goes on with new ones until nobody listens.
    async fn follow(
        &self,
        session: &SessionRef,
        mut after: u64,
        limit: usize,
        to: &Subject,
    ) -> Result<(), ActionError> {
        let room = self.outbox.max_payload().saturating_sub(ROOM);
        // Before the events are read, so that none is missed in between.
        let found = self.sessions.find(session).await?;
        let last = index_position(found.summary.last_index).0;
        let mut follower = Follower::start(&self.sessions.log.store, session.key.clone(), last).await?;
        loop {
            let page = self.sessions.events(session, after, limit, room).await?;
            after = page.last;
            // Even without events: the caller learns that it follows.
            self.send(to.clone(), page.to_json()).await;
            if !page.has_more {
                break;
            }
        }
        let mut probed = Instant::now();
        loop {
            let pause = KEEP_ALIVE.saturating_sub(probed.elapsed());
            tokio::select! {
                biased;
                () = self.stopping.cancelled() => return Err(stopping()),
                // Also while there are events: their receiver may be gone.
                () = tokio::time::sleep(pause) => {
                    if !self.is_heard(to).await {
                        return Ok(());
                    }
                    // A session that was deleted meanwhile has no events.
                    self.sessions.find(session).await?;
                    probed = Instant::now();
                }
                batch = follower.next() => {
                    // Events that were read already are received, too.
                    for page in Sessions::pages(session, &batch?, after, room)? {
                        after = page.last;
                        self.send(to.clone(), page.to_json()).await;
                    }
                }
            }
        }
    }

    /// Sends a keep-alive, and asks the server whether anyone is subscribed to the caller's inbox.
    async fn is_heard(&self, to: &Subject) -> bool {
        let (reply, answers) = subscribe_once(&self.outbox.client).await.unzip();
        let body = crate::json::to_bytes(&json!({ "events": [] }));
        let _ = self.outbox.publish(to.clone(), None, reply, body).await;
        let Some(mut answers) = answers else { return true };
        let answer = tokio::time::timeout(PROBE_TIMEOUT, answers.next()).await;
        !matches!(answer, Ok(Some(answer)) if answer.status == Some(StatusCode::NO_RESPONDERS))
    }
}

fn stopping() -> ActionError {
    ActionError::new(Code::StateUnavailable, "the bridge stops; follow the session again")
}
