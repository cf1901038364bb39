//! Files in the object store of NATS, in the layout of ADR-20, so that every NATS client can read them.
//!
//! The library's object store waits for the acknowledgement of each chunk, leaves the chunks of a failed upload behind, follows
//! links into other buckets, and reads ahead without a limit. So this is our own, over the requests of JetStream.
//!
//! | subject | message |
//! | --- | --- |
//! | `$O.<bucket>.C.<content>` | a chunk; `<content>` is `<instance>_<name>`, so that the chunks of a dead bridge can be found |
//! | `$O.<bucket>.M.<name in base64>` | the metadata, written last |
//!
//! The metadata names the owner of a file by a hash of its [`Caller`]. For other callers the file does not exist.
//!
//! Nothing here runs until a file is stored or read: a call without large files sends nothing to JetStream.

mod bucket;
mod catalog;
mod cursors;
mod figures;
mod health;
mod jetstream;
mod metadata;
mod quota;
mod reader;
mod recent;
mod sweeper;
mod writer;

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{Stream, StreamExt as _};
use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;

use self::catalog::Catalog;
use self::cursors::Cursors;
pub(crate) use self::figures::FileFigures;
use self::jetstream::{JetStream, StoreError};
use self::metadata::ObjectMetadata;
use self::quota::{OpenWriters, Owner};
pub(crate) use self::reader::RangeError;
use self::reader::{ObjectReader, read_range};
use self::recent::RecentFiles;
pub(crate) use self::writer::ObjectWriter;
use super::jetstream::Api;
use super::subject::{Subjects, Token};
use crate::background::{BackgroundTasks, OnPanic};
use crate::caller::Caller;
use crate::config::StateReplicas;
use crate::files::{
    FileDescription, FileError, FileReader, FileRules, FileStore, FileWriter, ObjectUrl, StoredFile,
};

/// How long a call is refused after the bucket was found to be missing, before the bridge asks again.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// How often the bridge looks for the bucket while no call needs it.
const SEARCH_INTERVAL: Duration = Duration::from_secs(60);
/// Metadata of files that is read at a time, in messages and bytes.
const BATCH: usize = 256;
const BATCH_BYTES: usize = 1 << 20;
/// Names in a request for the metadata of several files.
const MAX_NAMES: usize = 64;

/// The files of the bridge.
#[derive(Debug)]
pub(crate) struct ObjectStore {
    jetstream: JetStream,
    rules: Arc<FileRules>,
    bucket: String,
    /// Distinguishes the chunks of this bridge from those of others.
    instance: String,
    subjects: Subjects,
    tasks: BackgroundTasks,
    state: Mutex<BucketState>,
    /// Held while the stream is created.
    provisioning: tokio::sync::Mutex<()>,
    /// Never held while the bridge waits for JetStream.
    catalog: Mutex<Catalog>,
    /// Held while the catalog is brought up to date.
    refreshing: tokio::sync::Mutex<Refresh>,
    /// Refreshes that have begun.
    refreshes: AtomicU64,
    cursors: Cursors,
    open: Mutex<OpenWriters>,
    recent: RecentFiles,
    /// Wakes the sweeper.
    swept: Notify,
    /// Notified when the bucket is found to be missing.
    lost: Notify,
}

/// The last refresh of the catalog that has ended.
#[derive(Debug)]
struct Refresh {
    number: u64,
    result: Result<(), FileError>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum BucketState {
    Unknown,
    Ready,
    /// There is no usable JetStream.
    Missing {
        why: String,
        since: Instant,
    },
}

impl ObjectStore {
    pub(crate) fn bucket_name(prefix: &str) -> String {
        format!("{}_files", Token::new(prefix))
    }

    pub(crate) fn new(
        api: Api,
        subjects: Subjects,
        rules: Arc<FileRules>,
        replicas: Option<StateReplicas>,
        tasks: BackgroundTasks,
    ) -> Arc<Self> {
        let bucket = Self::bucket_name(subjects.prefix());
        let instance = Uuid::new_v4().simple().to_string().chars().take(metadata::INSTANCE_LEN).collect();
        Arc::new(Self {
            jetstream: JetStream::new(api, &bucket, &rules.allowed_buckets, replicas, tasks.clone()),
            rules,
            bucket,
            instance,
            subjects,
            tasks,
            state: Mutex::new(BucketState::Unknown),
            provisioning: tokio::sync::Mutex::default(),
            catalog: Mutex::default(),
            refreshing: tokio::sync::Mutex::new(Refresh { number: 0, result: Ok(()) }),
            refreshes: AtomicU64::new(0),
            cursors: Cursors::default(),
            open: Mutex::default(),
            recent: RecentFiles::default(),
            swept: Notify::new(),
            lost: Notify::new(),
        })
    }

    /// Looks for JetStream, and logs once whether there is one. Then keeps the bucket, and removes what dead bridges have
    /// left, as often as there may be something.
    pub(crate) async fn run(self: Arc<Self>) {
        match self.ready().await {
            Ok(()) => {
                let bucket = &self.bucket;
                tracing::info!(bucket, "large files are stored in JetStream and passed by reference");
            }
            Err(error) => {
                let reason = error.to_string();
                tracing::info!(reason, "no JetStream for files; files must fit into one message");
            }
        }
        if self.jetstream.is_permitted() {
            tokio::join!(self.keep_bucket(), sweeper::run(&self));
        }
    }

    /// Creates the bucket again when it was lost, and looks for JetStream while there is none.
    async fn keep_bucket(&self) {
        loop {
            match self.ready().await {
                Ok(()) => self.lost.notified().await,
                Err(_) => tokio::time::sleep(SEARCH_INTERVAL).await,
            }
        }
    }

    pub(crate) fn rules(&self) -> &Arc<FileRules> {
        &self.rules
    }

    pub(crate) fn subjects(&self) -> &Subjects {
        &self.subjects
    }

    pub(crate) fn bucket(&self) -> &str {
        &self.bucket
    }

    pub(crate) fn instance(&self) -> &str {
        &self.instance
    }

    /// Whether files can be stored, as far as the bridge knows without asking.
    pub(crate) fn is_available(&self) -> bool {
        *lock(&self.state) == BucketState::Ready && self.jetstream.is_reachable()
    }

    /// Whether this bridge is writing the content.
    pub(crate) fn is_writing(&self, content_id: &str) -> bool {
        lock(&self.open).contains(content_id)
    }

    /// Makes sure that the bucket exists.
    pub(crate) async fn ready(&self) -> Result<(), FileError> {
        if *lock(&self.state) == BucketState::Ready {
            return Ok(());
        }
        let _provisioning = self.provisioning.lock().await;
        match lock(&self.state).clone() {
            BucketState::Ready => return Ok(()),
            BucketState::Missing { why, since } if since.elapsed() < RETRY_INTERVAL => {
                return Err(FileError::Unavailable(why));
            }
            BucketState::Unknown | BucketState::Missing { .. } => {}
        }
        // Boxed, because it is rare.
        let provisioned = Box::pin(self.jetstream.provision(&self.bucket, &self.rules)).await;
        *lock(&self.state) = match &provisioned {
            Ok(()) => BucketState::Ready,
            Err(why) => BucketState::Missing { why: why.clone(), since: Instant::now() },
        };
        provisioned.map_err(FileError::Unavailable)
    }

    /// The error for the caller. If the bucket is missing, it is created again.
    fn failed(&self, error: StoreError) -> FileError {
        if error == StoreError::NoBucket {
            tracing::warn!(bucket = self.bucket, "the bucket for files is missing; creating it again");
            *lock(&self.state) = BucketState::Unknown;
            self.lost.notify_one();
        }
        error.into()
    }

    async fn metadata(&self, url: &ObjectUrl, caller: &Caller) -> Result<ObjectMetadata, FileError> {
        self.rules.check_bucket(url)?;
        let is_own = url.bucket() == self.bucket;
        if is_own {
            self.ready().await?;
        }
        let subject = metadata::metadata_subject(url);
        let found = match self.jetstream.last_message(url.bucket(), &subject).await {
            Err(StoreError::NoBucket) if is_own => {
                self.failed(StoreError::NoBucket);
                // With the bucket, its files are gone.
                return self.ready().await.and(Err(FileError::NotFound));
            }
            Err(StoreError::NoBucket) => return Err(FileError::NotFound),
            found => found?,
        };
        let found = ObjectMetadata::parse(&found, url).ok_or(FileError::NotFound)?;
        let is_visible = !is_own || found.belongs_to(caller);
        if !is_visible || !found.is_readable() {
            return Err(FileError::NotFound);
        }
        Ok(found)
    }

    /// Brings the catalog up to date. Calls that come while this runs share the next run, so that a slow store does not
    /// delay one after the other.
    async fn refresh(&self) -> Result<(), FileError> {
        let wanted = self.refreshes.load(Relaxed) + 1;
        let mut last = self.refreshing.lock().await;
        if last.number >= wanted {
            return last.result.clone();
        }
        let number = self.refreshes.fetch_add(1, Relaxed) + 1;
        let result = match self.read_new_files().await {
            Err(StoreError::NoBucket) => {
                self.failed(StoreError::NoBucket);
                match self.ready().await {
                    Ok(()) => self.read_new_files().await.map_err(|error| self.failed(error)),
                    Err(error) => Err(error),
                }
            }
            read => read.map_err(FileError::from),
        };
        *last = Refresh { number, result: result.clone() };
        result
    }

    /// Reads the metadata that is new in the bucket.
    async fn read_new_files(&self) -> Result<(), StoreError> {
        let info = self.jetstream.info(&self.bucket).await?;
        let next = lock(&self.catalog).begin(&info);
        let Some(mut next) = next else { return Ok(()) };
        let filter = format!("$O.{}.M.>", self.bucket);
        loop {
            let mut batch = self.jetstream.batch(&self.bucket, &filter, next, BATCH, BATCH_BYTES).await?;
            let mut pending = 0;
            while let Some(message) = batch.next().await? {
                (next, pending) = (message.sequence + 1, message.pending);
                lock(&self.catalog).add(&message.payload, message.sequence);
            }
            if pending == 0 {
                return Ok(());
            }
        }
    }

    /// The bytes from `offset` on, at most `max` of them, and the file.
    pub(crate) async fn range(
        &self,
        url: &ObjectUrl,
        caller: &Caller,
        offset: u64,
        max: usize,
    ) -> Result<(StoredFile, Bytes), RangeError> {
        let file = self.find(url, caller).await?;
        if offset > file.size {
            return Err(RangeError::OffsetTooLarge { size: file.size });
        }
        let bytes = read_range(&self.jetstream, &self.cursors, &file, offset, max).await?;
        Ok((file, bytes))
    }

    /// The files of a caller, newest first.
    pub(crate) async fn list(&self, caller: &Caller, max: usize) -> Result<Vec<ObjectMetadata>, FileError> {
        self.ready().await?;
        self.refresh().await?;
        let names = lock(&self.catalog).names_of(Owner::new(caller), max);
        let mut files = Vec::new();
        for names in names.chunks(MAX_NAMES) {
            let urls = names.iter().filter_map(|name| ObjectUrl::new(&self.bucket, name));
            let subjects: Vec<_> = urls.map(|url| metadata::metadata_subject(&url)).collect();
            let batch = self.jetstream.last_messages(&self.bucket, &subjects).await;
            let mut batch = batch.map_err(|error| self.failed(error))?;
            let mut found = HashMap::new();
            while let Some(message) = batch.next().await.map_err(|error| self.failed(error))? {
                if let Ok(metadata) = serde_json::from_slice::<ObjectMetadata>(&message.payload) {
                    found.insert(metadata.name.clone(), metadata);
                }
            }
            let is_listed = |metadata: &ObjectMetadata| metadata.is_readable() && metadata.belongs_to(caller);
            files.extend(names.iter().filter_map(|name| found.remove(name)).filter(is_listed));
        }
        Ok(files)
    }

    /// Deletes a file of the caller in the bridge's own bucket.
    pub(crate) async fn delete(&self, url: &ObjectUrl, caller: &Caller) -> Result<(), FileError> {
        if url.bucket() != self.bucket {
            let message = format!("the bridge deletes files in its own bucket `{}` only", self.bucket);
            return Err(FileError::Invalid(message));
        }
        let metadata = self.metadata(url, caller).await?;
        let deleted = self.jetstream.write_metadata(url, &metadata.deleted()).await;
        deleted.map_err(|error| self.failed(error))?;
        self.recent.remove(url);
        Ok(self.purge(&metadata.content_id).await?)
    }

    /// Removes the chunks of a content.
    async fn purge(&self, content_id: &str) -> Result<(), StoreError> {
        self.jetstream.purge(&self.bucket, &metadata::chunk_subject(&self.bucket, content_id)).await
    }

    /// Removes the chunks of a content that is not complete, once none of them is on the way.
    fn purge_later(
        self: &Arc<Self>,
        content_id: String,
        unacknowledged: impl Stream + Unpin + Send + 'static,
    ) {
        let store = Arc::clone(self);
        self.tasks.spawn("file removal", OnPanic::Log, async move {
            unacknowledged.for_each(|_| std::future::ready(())).await;
            let purged = store.purge(&content_id).await;
            lock(&store.open).remove(&content_id);
            if let Err(error) = purged {
                // The sweeper tries again.
                let error = FileError::from(error);
                tracing::debug!(%error, "cannot remove the chunks of an incomplete file yet");
                store.swept.notify_one();
            }
        });
    }

    /// Reserves as many of these bytes as the caller may store, and returns their number.
    async fn reserve(
        &self,
        content_id: &str,
        caller: &Caller,
        bytes: RangeInclusive<u64>,
    ) -> Result<u64, FileError> {
        self.refresh().await?;
        let (catalog, mut open) = (lock(&self.catalog), lock(&self.open));
        let granted = catalog.quota(&open, self.rules.max_per_caller).grant(caller, &bytes)?;
        open.reserve(content_id, Owner::new(caller), granted);
        Ok(granted)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A handle that can create writers, which hold the store.
#[derive(Debug, Clone)]
pub(crate) struct Files(pub(crate) Arc<ObjectStore>);

impl FileStore for Files {
    fn is_available(&self) -> bool {
        self.0.is_available()
    }

    fn max_inline(&self) -> usize {
        self.0.jetstream.client().max_payload()
    }

    fn find<'a>(
        &'a self,
        url: &'a ObjectUrl,
        caller: &'a Caller,
    ) -> BoxFuture<'a, Result<StoredFile, FileError>> {
        Box::pin(self.0.find(url, caller))
    }

    fn read(&self, file: &StoredFile) -> Box<dyn FileReader> {
        Box::new(ObjectReader::new(self.0.jetstream.clone(), file.clone()))
    }

    fn create<'a>(
        &'a self,
        caller: &'a Caller,
        size: Option<u64>,
    ) -> BoxFuture<'a, Result<Box<dyn FileWriter>, FileError>> {
        Box::pin(async move {
            let writer: Box<dyn FileWriter> = Box::new(self.0.create(caller, size).await?);
            Ok(writer)
        })
    }

    fn find_same<'a>(
        &'a self,
        caller: &'a Caller,
        sha256: &'a str,
        description: Option<&'a FileDescription>,
    ) -> BoxFuture<'a, Option<StoredFile>> {
        Box::pin(self.0.find_same(caller, sha256, description))
    }

    fn description(&self, url: &ObjectUrl, caller: &Caller) -> Option<FileDescription> {
        self.0.recent.description(Owner::new(caller), url)
    }

    fn forget(&self, url: &ObjectUrl) {
        self.0.recent.remove(url);
    }

    fn delete_later(&self, url: &ObjectUrl, caller: &Caller) {
        let (store, url, caller) = (Arc::clone(&self.0), url.clone(), caller.clone());
        self.0.tasks.spawn("file removal", OnPanic::Log, async move {
            if let Err(error) = store.delete(&url, &caller).await {
                tracing::debug!(%error, "cannot delete a temporary file; it expires");
            }
        });
    }

    fn describe<'a>(
        &'a self,
        url: &'a ObjectUrl,
        description: &'a FileDescription,
        caller: &'a Caller,
    ) -> BoxFuture<'a, Result<StoredFile, FileError>> {
        Box::pin(async move {
            let mut metadata = self.0.metadata(url, caller).await?;
            metadata.describe(description);
            let written = self.0.jetstream.write_metadata(url, &metadata).await;
            written.map_err(|error| self.0.failed(error))?;
            let file = metadata.into_file(url.clone());
            self.0.recent.add(Owner::new(caller), &file);
            Ok(file)
        })
    }
}

impl ObjectStore {
    pub(crate) async fn find(&self, url: &ObjectUrl, caller: &Caller) -> Result<StoredFile, FileError> {
        Ok(self.metadata(url, caller).await?.into_file(url.clone()))
    }

    pub(crate) async fn create(
        self: &Arc<Self>,
        caller: &Caller,
        size: Option<u64>,
    ) -> Result<ObjectWriter, FileError> {
        if let Some(size) = size {
            self.rules.check_size(size)?;
        }
        self.ready().await?;
        let name = Uuid::new_v4().simple().to_string();
        let content_id = metadata::content_id(&self.instance, &name);
        let size_or_none = size.unwrap_or(0);
        self.reserve(&content_id, caller, size_or_none..=size_or_none).await?;
        // From here on the writer gives the reservation back, even if this future is dropped.
        let writer = ObjectWriter::new(Arc::clone(self), &name, content_id, caller, size)?;
        sweeper::announce(self).await;
        Ok(writer)
    }

    /// The file that the caller stored lately with the same content.
    async fn find_same(
        &self,
        caller: &Caller,
        sha256: &str,
        description: Option<&FileDescription>,
    ) -> Option<StoredFile> {
        // What the caller gets must not expire before it has read it.
        let max_age = self.rules.ttl / 2;
        let known = self.recent.find(Owner::new(caller), sha256, description, max_age)?;
        match self.find(&known.url, caller).await {
            Ok(found) if found.sha256 == sha256 => Some(found),
            // Deleted, for example through another replica.
            Ok(_) | Err(FileError::NotFound) => {
                self.recent.remove(&known.url);
                None
            }
            // A new file cannot be stored either, and most likely this one is still there.
            Err(_) => Some(known),
        }
    }
}
