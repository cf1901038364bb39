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

mod catalog;
mod cursors;
mod jetstream;
mod metadata;
mod reader;
mod sweeper;
mod writer;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::Client;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;

use self::catalog::{Catalog, owner_id};
use self::cursors::Cursors;
use self::jetstream::JetStream;
use self::metadata::ObjectMetadata;
pub(crate) use self::reader::RangeError;
use self::reader::{ObjectReader, read_range};
pub(crate) use self::writer::ObjectWriter;
use super::subject::{Subjects, Token};
use crate::background::{BackgroundTasks, OnPanic};
use crate::caller::Caller;
use crate::config::StateReplicas;
use crate::files::{
    FileDescription, FileError, FileReader, FileRules, FileStore, FileWriter, ObjectUrl, StoredFile,
};

/// How long the bridge waits before it asks again whether there is a JetStream.
const RETRY_INTERVAL: Duration = Duration::from_secs(15);
/// Stored files whose digests are remembered, so that the same reply does not store its files again.
const MAX_REMEMBERED: usize = 1024;

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
    catalog: tokio::sync::Mutex<Catalog>,
    cursors: Cursors,
    open: Mutex<OpenWriters>,
    same: Mutex<RememberedFiles>,
    /// Wakes the sweeper.
    swept: Notify,
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

/// The files that this bridge is writing.
#[derive(Debug, Default)]
struct OpenWriters {
    /// By content id; the bytes that count towards the quota of the owner.
    writers: HashMap<String, (u128, u64)>,
}

impl OpenWriters {
    fn reserved_by(&self, owner: u128) -> u64 {
        self.writers.values().filter(|(of, _)| *of == owner).map(|(_, bytes)| bytes).sum()
    }
}

#[derive(Debug, Default)]
struct RememberedFiles {
    files: HashMap<(u128, String, FileDescription), (StoredFile, Instant)>,
}

impl ObjectStore {
    pub(crate) fn bucket_name(prefix: &str) -> String {
        format!("{}_files", Token::new(prefix))
    }

    pub(crate) fn new(
        client: Client,
        subjects: Subjects,
        rules: Arc<FileRules>,
        replicas: Option<StateReplicas>,
        tasks: BackgroundTasks,
    ) -> Arc<Self> {
        let bucket = Self::bucket_name(subjects.prefix());
        let instance = Uuid::new_v4().simple().to_string().chars().take(metadata::INSTANCE_LEN).collect();
        Arc::new(Self {
            jetstream: JetStream::new(client, replicas),
            rules,
            bucket,
            instance,
            subjects,
            tasks,
            state: Mutex::new(BucketState::Unknown),
            provisioning: tokio::sync::Mutex::default(),
            catalog: tokio::sync::Mutex::default(),
            cursors: Cursors::default(),
            open: Mutex::default(),
            same: Mutex::default(),
            swept: Notify::new(),
        })
    }

    /// Looks for JetStream, and logs once whether there is one. Then removes what dead bridges have left, as often as there
    /// may be something.
    pub(crate) async fn run(self: Arc<Self>) {
        match self.ready().await {
            Ok(()) => tracing::info!(bucket = self.bucket, "large files go by reference"),
            Err(error) => {
                let reason = error.to_string();
                tracing::info!(reason, "no JetStream for files; files must fit into one message");
            }
        }
        sweeper::run(self).await;
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
        *lock(&self.state) == BucketState::Ready
    }

    /// Whether this bridge is writing the content.
    pub(crate) fn is_writing(&self, content_id: &str) -> bool {
        lock(&self.open).writers.contains_key(content_id)
    }

    /// Makes sure that the bucket exists.
    pub(crate) async fn ready(&self) -> Result<(), FileError> {
        if self.is_available() {
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
        let provisioned = self.jetstream.provision(&self.bucket, &self.rules).await;
        *lock(&self.state) = match &provisioned {
            Ok(()) => BucketState::Ready,
            Err(why) => BucketState::Missing { why: why.clone(), since: Instant::now() },
        };
        provisioned.map_err(FileError::Unavailable)
    }

    /// Forgets whether the bucket exists, after a request that says it does not.
    fn recheck(&self) {
        *lock(&self.state) = BucketState::Unknown;
    }

    async fn metadata(&self, url: &ObjectUrl, caller: &Caller) -> Result<ObjectMetadata, FileError> {
        self.rules.check_bucket(url)?;
        let is_own = url.bucket() == self.bucket;
        if is_own {
            self.ready().await?;
        }
        let subject = metadata::metadata_subject(url);
        let found = match self.jetstream.last_message(url.bucket(), &subject).await {
            Err(error @ FileError::Unavailable(_)) if is_own => {
                self.recheck();
                return Err(error);
            }
            found => found?,
        };
        let found = ObjectMetadata::parse(&found, url).ok_or(FileError::NotFound)?;
        let is_visible = !is_own || found.owner_id() == owner_id(caller);
        if !is_visible || !found.is_readable() {
            return Err(FileError::NotFound);
        }
        Ok(found)
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
        let names = {
            let mut catalog = self.catalog.lock().await;
            catalog.refresh(&self.jetstream, &self.bucket, self.rules.ttl).await?;
            catalog.names_of(owner_id(caller), max)
        };
        let mut files = Vec::new();
        for name in names {
            let Some(url) = ObjectUrl::new(&self.bucket, &name) else { continue };
            match self.metadata(&url, caller).await {
                Ok(metadata) => files.push(metadata),
                Err(FileError::NotFound) => {}
                Err(error) => return Err(error),
            }
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
        self.jetstream.write_metadata(url, &metadata.deleted()).await?;
        self.forget_same(url);
        self.purge(&metadata.content_id).await
    }

    /// Removes the chunks of a content.
    async fn purge(&self, content_id: &str) -> Result<(), FileError> {
        self.jetstream.purge(&self.bucket, &metadata::chunk_subject(&self.bucket, content_id)).await
    }

    fn purge_later(self: &Arc<Self>, content_id: String) {
        let store = Arc::clone(self);
        self.tasks.spawn("file removal", OnPanic::Log, async move {
            let purged = store.purge(&content_id).await;
            lock(&store.open).writers.remove(&content_id);
            if let Err(error) = purged {
                // The sweeper tries again.
                tracing::debug!(%error, "cannot remove the chunks of an incomplete file yet");
                store.swept.notify_one();
            }
        });
    }

    /// Checks that the owner may store this many further bytes, and reserves them for a content.
    async fn reserve(&self, content_id: &str, owner: u128, bytes: u64) -> Result<(), FileError> {
        let stored = {
            let mut catalog = self.catalog.lock().await;
            catalog.refresh(&self.jetstream, &self.bucket, self.rules.ttl).await?;
            catalog.bytes_of(owner)
        };
        self.reserve_beside(content_id, owner, bytes, stored)
    }

    fn reserve_beside(
        &self,
        content_id: &str,
        owner: u128,
        bytes: u64,
        stored: u64,
    ) -> Result<(), FileError> {
        let mut open = lock(&self.open);
        let reserved = open.reserved_by(owner);
        let limit = self.rules.max_per_caller;
        if stored.saturating_add(reserved).saturating_add(bytes) > limit {
            let message = format!(
                "the files of this caller would take more than {limit} bytes (`files.max_per_caller`); delete files, or wait \
                 until they expire"
            );
            return Err(FileError::Full(message));
        }
        match open.writers.entry(content_id.to_owned()) {
            Entry::Occupied(mut writer) => writer.get_mut().1 += bytes,
            Entry::Vacant(writer) => {
                writer.insert((owner, bytes));
            }
        }
        Ok(())
    }

    fn remember_same(&self, owner: u128, file: &StoredFile) {
        let mut same = lock(&self.same);
        if same.files.len() >= MAX_REMEMBERED {
            let oldest = same.files.iter().min_by_key(|(_, (_, at))| *at).map(|(key, _)| key.clone());
            oldest.map(|key| same.files.remove(&key));
        }
        let key = (owner, file.sha256.clone(), file.description.clone());
        same.files.insert(key, (file.clone(), Instant::now()));
    }

    fn forget_same(&self, url: &ObjectUrl) {
        lock(&self.same).files.retain(|_, (file, _)| file.url != *url);
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

    fn find_same(&self, caller: &Caller, sha256: &str, description: &FileDescription) -> Option<StoredFile> {
        self.0.find_same(caller, sha256, description)
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
            self.0.jetstream.write_metadata(url, &metadata).await?;
            let file = metadata.into_file(url.clone());
            self.0.remember_same(owner_id(caller), &file);
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
        let owner = owner_id(caller);
        self.reserve(&content_id, owner, size.unwrap_or(0)).await?;
        // From here on the writer gives the reservation back, even if this future is dropped.
        let writer = ObjectWriter::new(Arc::clone(self), &name, content_id, caller, size)?;
        sweeper::announce(self).await;
        Ok(writer)
    }

    pub(crate) fn find_same(
        &self,
        caller: &Caller,
        sha256: &str,
        description: &FileDescription,
    ) -> Option<StoredFile> {
        let key = (owner_id(caller), sha256.to_owned(), description.clone());
        let same = lock(&self.same);
        let (file, stored_at) = same.files.get(&key)?;
        // What the caller gets must not expire before it has read it.
        (stored_at.elapsed() < self.rules.ttl / 2).then(|| file.clone())
    }
}
