//! Files for callers without rights on the object store: download, upload, list and delete by requests.
//!
//! | subject | request | reply |
//! | --- | --- | --- |
//! | `<prefix>.files.get` | `{"url", "offset"?}` | up to 512 KiB of the file, with its size, digest, name and media type in headers |
//! | `<prefix>.files.put` | headers `A2A-Name`, `A2A-Type`, `A2A-Size` | `{"upload", "chunk"}`, see [`uploads`] |
//! | `<prefix>.files.list` | `{"limit"?}` | `{"files": […]}`, the newest first |
//! | `<prefix>.files.delete` | `{"url"}` | `{"deleted": url}` |
//!
//! All bridges share the requests; the chunks of an upload go to the bridge that began it.

mod uploads;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use async_nats::{HeaderMap, Message, Subject, Subscriber};
use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::stream::{SelectAll, Stream, StreamExt as _};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::uploads::Uploads;
use super::encoded_reply::EncodedReply;
use super::headers;
use super::identity::Entrance;
use super::object_store::{ObjectStore, RangeError};
use super::outbox::Outbox;
use super::service::{ServiceContext, ServiceError, round_trip};
use super::stoppable_task::StoppableTask;
use crate::background::{BackgroundTasks, OnPanic};
use crate::caller::Caller;
use crate::dispatch::fair_permits::FairPermits;
use crate::files::{FileError, ObjectUrl, StoredFile};
use crate::json::to_bytes;
use crate::memory::{MemoryAccount, MemoryCharge, OutOfMemory};
use crate::reply::error::{ActionError, Code};
use crate::text::{error_chain, shorten};

const QUEUE_GROUP: &str = "a2a";
/// Maximum bytes of a chunk, in both directions.
const CHUNK: usize = 512 << 10;
/// Room in a message for its headers.
const HEADER_ROOM: usize = 2 << 10;
/// Requests that run at the same time. One tenant, or one caller, does not take all of them.
const MAX_CONCURRENT: usize = 64;
/// Refusals that wait to be sent. Further ones are dropped, so that they do not delay requests.
const MAX_REFUSALS: usize = 1024;
/// How long a stop waits for requests that run.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// Files in a list.
const MAX_LISTED: usize = 1000;
const VERBS: [&str; 4] = ["get", "put", "list", "delete"];

#[derive(Debug)]
struct FileService {
    store: Arc<ObjectStore>,
    uploads: Uploads,
    context: ServiceContext,
    outbox: Outbox,
    /// The account for the requests, the replies and the buffers of uploads.
    memory: Arc<MemoryAccount>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct GetRequest {
    url: String,
    #[serde(default)]
    offset: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct DeleteRequest {
    url: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, expecting = "an object")]
struct ListRequest {
    limit: Option<usize>,
}

/// Requests of one subscription.
#[derive(Debug)]
struct Requests {
    subscriber: Subscriber,
    entrance: Entrance,
}

impl Stream for Requests {
    type Item = (Message, Entrance);

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let entrance = self.entrance;
        self.subscriber.poll_next_unpin(context).map(|message| Some((message?, entrance)))
    }
}

/// A reply that is not an error.
struct Answer {
    headers: Option<HeaderMap>,
    body: Bytes,
    /// For the body, until it is sent.
    charge: Option<MemoryCharge>,
}

impl Answer {
    fn json(body: &impl Serialize) -> Self {
        Self { headers: None, body: to_bytes(body), charge: None }
    }
}

/// A file as lists and uploads show it.
#[derive(Debug, Serialize)]
struct ListedFile {
    url: String,
    name: Option<String>,
    mime_type: Option<String>,
    size: u64,
    sha256: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    modified: Option<String>,
}

impl ListedFile {
    fn new(file: StoredFile, modified: Option<String>) -> Self {
        let StoredFile { url, description, size, sha256, .. } = file;
        let (name, mime_type) = (description.name, description.media_type);
        Self { url: url.to_string(), name, mime_type, size, sha256, modified }
    }
}

/// Serves requests for files until the task is stopped.
pub(crate) async fn start(
    store: Arc<ObjectStore>,
    context: &ServiceContext,
    outbox: Outbox,
    memory: Arc<MemoryAccount>,
    tasks: &BackgroundTasks,
) -> Result<StoppableTask, ServiceError> {
    let mut requests = SelectAll::new();
    let subjects = store.subjects();
    let shared = VERBS.into_iter().map(|verb| (subjects.files(verb), Some(QUEUE_GROUP)));
    let own = [(subjects.upload(store.instance(), "*"), None)];
    for (direct, group) in shared.chain(own) {
        let gateway = subjects.gateway(&direct).map(|subject| (subject, Entrance::Gateway));
        for (subject, entrance) in [(direct, Entrance::Direct)].into_iter().chain(gateway) {
            let subscribed = match group {
                Some(group) => context.client.queue_subscribe(subject.clone(), group.to_owned()).await,
                None => context.client.subscribe(subject.clone()).await,
            };
            let subscriber = subscribed.map_err(|source| ServiceError::Subscribe { subject, source })?;
            requests.push(Requests { subscriber, entrance });
        }
    }
    let (uploads, context) = (Uploads::new(&memory), context.clone());
    let service = Arc::new(FileService { store, uploads, context, outbox, memory });
    let (refusals, refused) = mpsc::channel(MAX_REFUSALS);
    let running = TaskTracker::new();
    let send_refusals = running.track_future(Arc::clone(&service).send_refusals(refused));
    tasks.spawn("refused file requests", OnPanic::Log, send_refusals);
    let server = FileServer {
        service,
        requests,
        permits: FairPermits::new(MAX_CONCURRENT),
        refusals: Some(refusals),
        running,
        tasks: tasks.clone(),
    };
    Ok(StoppableTask::spawn(tasks, "files", |stop| server.run(stop)))
}

/// A request that does not run: where the reply goes, and the error.
type Refusal = (Subject, ActionError);

/// Receives requests, and runs each in a task of its own.
struct FileServer {
    service: Arc<FileService>,
    requests: SelectAll<Requests>,
    permits: Arc<FairPermits>,
    /// `None` when the service stops.
    refusals: Option<mpsc::Sender<Refusal>>,
    /// The requests that run.
    running: TaskTracker,
    tasks: BackgroundTasks,
}

impl FileServer {
    async fn run(mut self, stop: CancellationToken) {
        let mut expiry = tokio::time::interval(uploads::CHECK_INTERVAL);
        expiry.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                request = self.requests.next() => match request {
                    Some((message, entrance)) => self.accept(message, entrance),
                    None => break,
                },
                _ = expiry.tick(), if !self.service.uploads.is_empty() => {
                    self.service.uploads.remove_abandoned();
                }
            }
        }
        self.withdraw().await;
        // Removes the chunks of incomplete uploads.
        self.service.uploads.clear();
    }

    /// Runs a request in a task of its own. Never waits: callers whose requests are refused must not delay others.
    fn accept(&self, message: Message, entrance: Entrance) {
        let service = Arc::clone(&self.service);
        let Some(reply) = message.reply.clone().filter(|reply| service.context.guard.allows(reply)) else {
            return;
        };
        let admitted = service.context.identity().caller(&message, entrance).and_then(|caller| {
            let busy = "too many concurrent requests for files; try again";
            let permit = self.permits.try_acquire(&caller);
            let permit = permit.ok_or_else(|| ActionError::new(Code::Busy, busy))?;
            let mut charge = None;
            service.memory.cover(&mut charge, message.payload.len()).map_err(out_of_memory)?;
            Ok((caller, permit, charge))
        });
        let (caller, permit, charge) = match admitted {
            Ok(admitted) => admitted,
            Err(error) => {
                if let Some(refusals) = &self.refusals {
                    let _ = refusals.try_send((reply, error));
                }
                return;
            }
        };
        let work = async move {
            let answer = service.answer(&message, &caller, entrance).await;
            drop((message, charge));
            service.send(reply, answer).await;
            drop(permit);
        };
        self.tasks.spawn("file request", OnPanic::Log, self.running.track_future(work));
    }

    /// Ends the subscriptions without losing a request, as the module docs of `service` describe, and waits for the replies.
    async fn withdraw(&mut self) {
        for requests in self.requests.iter_mut() {
            let _ = requests.subscriber.unsubscribe_after(u64::MAX).await;
        }
        if let Err(error) = round_trip(&self.service.context.client).await {
            tracing::warn!(%error, "requests for files may be lost");
        }
        while let Some(Some((message, entrance))) =
            tokio::task::unconstrained(self.requests.next()).now_or_never()
        {
            self.accept(message, entrance);
        }
        self.refusals = None;
        self.running.close();
        let _ = tokio::time::timeout(STOP_TIMEOUT, self.running.wait()).await;
    }
}

impl FileService {
    async fn send_refusals(self: Arc<Self>, mut refused: mpsc::Receiver<Refusal>) {
        while let Some((reply, error)) = refused.recv().await {
            self.send(reply, Err(error)).await;
        }
    }

    async fn answer(
        &self,
        message: &Message,
        caller: &Caller,
        entrance: Entrance,
    ) -> Result<Answer, ActionError> {
        let subjects = self.store.subjects();
        let subject = message.subject.as_str();
        let is_for = |own: String| match entrance {
            Entrance::Direct => subject == own,
            Entrance::Gateway => subjects.gateway(&own).as_deref() == Some(subject),
        };
        let verb = VERBS.into_iter().find(|verb| is_for(subjects.files(verb)));
        match verb {
            Some("get") => self.get(message, caller).await,
            Some("put") => self.put(message, caller, entrance).await,
            Some("list") => self.list(message, caller).await,
            Some(_) => self.delete(message, caller).await,
            None => {
                let id = subject.rsplit('.').next().unwrap_or_default();
                let chunk = self.chunk_size();
                match self.uploads.add(id, message, caller, chunk).await? {
                    uploads::Progress::Next { offset } => {
                        Ok(Answer::json(&serde_json::json!({ "offset": offset })))
                    }
                    uploads::Progress::Stored(file) => Ok(Answer::json(&ListedFile::new(file, None))),
                }
            }
        }
    }

    fn chunk_size(&self) -> usize {
        CHUNK.min(self.outbox.max_payload().saturating_sub(HEADER_ROOM)).max(1)
    }

    async fn get(&self, message: &Message, caller: &Caller) -> Result<Answer, ActionError> {
        let GetRequest { url, offset } = parse(message)?;
        let url = object_url(&url)?;
        // The bytes, and the chunks of the file that have them.
        let mut charge = None;
        self.memory.cover(&mut charge, 2 * self.chunk_size()).map_err(out_of_memory)?;
        let range = self.store.range(&url, caller, offset, self.chunk_size()).await;
        let (file, body) = range.map_err(|error| match error {
            RangeError::File(error) => error.into(),
            too_large @ RangeError::OffsetTooLarge { .. } => ActionError::invalid(too_large.to_string()),
        })?;
        let mut headers = HeaderMap::new();
        headers.insert("A2A-Size", file.size.to_string());
        headers.insert("A2A-Sha256", file.sha256.as_str());
        headers.insert("A2A-Offset", offset.to_string());
        let default_type = "application/octet-stream";
        headers.insert("A2A-Type", file.description.media_type.as_deref().unwrap_or(default_type));
        if let Some(name) = &file.description.name {
            headers.insert("A2A-Name", name.as_str());
        }
        Ok(Answer { headers: Some(headers), body, charge })
    }

    async fn put(
        &self,
        message: &Message,
        caller: &Caller,
        entrance: Entrance,
    ) -> Result<Answer, ActionError> {
        let id = self.uploads.begin(&self.store, message, caller).await?;
        let subjects = self.store.subjects();
        let direct = subjects.upload(self.store.instance(), &id);
        let upload = match entrance {
            Entrance::Direct => direct,
            // Gateways may publish nowhere else.
            Entrance::Gateway => subjects.gateway(&direct).unwrap_or(direct),
        };
        Ok(Answer::json(&serde_json::json!({ "upload": upload, "chunk": self.chunk_size() })))
    }

    async fn list(&self, message: &Message, caller: &Caller) -> Result<Answer, ActionError> {
        let ListRequest { limit } = parse(message)?;
        let found = self.store.list(caller, limit.unwrap_or(MAX_LISTED).min(MAX_LISTED)).await?;
        let listed = found.into_iter().filter_map(|metadata| {
            let url = ObjectUrl::new(self.store.bucket(), &metadata.name)?;
            let modified = metadata.modified.as_str().map(str::to_owned);
            Some(ListedFile::new(metadata.into_file(url), modified))
        });
        let room = self.outbox.max_payload().saturating_sub(HEADER_ROOM);
        let files = crate::json::first_that_fit(listed.collect(), 0, room);
        Ok(Answer::json(&serde_json::json!({ "files": files })))
    }

    async fn delete(&self, message: &Message, caller: &Caller) -> Result<Answer, ActionError> {
        let DeleteRequest { url } = parse(message)?;
        let url = object_url(&url)?;
        self.store.delete(&url, caller).await?;
        Ok(Answer::json(&serde_json::json!({ "deleted": url.to_string() })))
    }

    async fn send(&self, to: Subject, answer: Result<Answer, ActionError>) {
        let sent = match answer {
            Ok(Answer { headers, body, charge: _charge }) => {
                self.outbox.publish(to, headers, None, body).await
            }
            Err(error) => {
                EncodedReply::new(&Err(error), self.outbox.max_payload(), 0).send(&self.outbox, to).await
            }
        };
        if let Err(error) = sent {
            tracing::warn!(error = error_chain(&error), "cannot answer a request for files");
        }
    }
}

fn out_of_memory(_: OutOfMemory) -> ActionError {
    let message = "the bridge has no memory left for requests for files (`limits.memory`); try again";
    ActionError::new(Code::Busy, message)
}

fn object_url(text: &str) -> Result<ObjectUrl, FileError> {
    let no_reference = || Err(FileError::Invalid("`url` must have the form `obj://bucket/name`".to_owned()));
    ObjectUrl::parse(text).unwrap_or_else(no_reference)
}

fn parse<'m, T: Deserialize<'m>>(message: &'m Message) -> Result<T, ActionError> {
    let body = if message.payload.is_empty() { b"{}".as_slice() } else { &message.payload };
    serde_json::from_slice(body)
        .map_err(|error| ActionError::invalid(format!("invalid body: {}", shorten(&error.to_string(), 300))))
}
