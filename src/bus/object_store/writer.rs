//! Writes one object: chunks with several acknowledgements outstanding, then the metadata.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use sha2::{Digest as _, Sha256};

use super::jetstream::Acknowledgement;
use super::metadata::{ObjectMetadata, chunk_subject};
use super::quota::Owner;
use super::{ObjectStore, lock};
use crate::caller::Caller;
use crate::files::{FileDescription, FileError, FileWriter, ObjectUrl, StoredFile};
use crate::text::hex;

/// The usual size of a chunk in every NATS client.
const CHUNK: usize = 128 << 10;
/// Room in a message for its headers.
const HEADER_ROOM: usize = 512;
const MAX_OUTSTANDING: usize = 8;
/// The buffer grows in these steps.
const BUFFER_STEP: usize = 16 << 10;
/// A file of unknown size reserves this much of its owner's quota at a time, or what is left of it.
const RESERVATION: u64 = 4 << 20;

/// Chunks that JetStream has not acknowledged. The writer is shared between threads, but only polled through `&mut`.
type Outstanding = std::sync::Mutex<FuturesUnordered<Acknowledgement>>;

pub(crate) struct ObjectWriter {
    store: Arc<ObjectStore>,
    url: ObjectUrl,
    content_id: String,
    caller: Caller,
    chunk_size: usize,
    /// Bytes that are not published yet.
    buffer: BytesMut,
    outstanding: Outstanding,
    hash: Sha256,
    size: u64,
    chunks: u64,
    /// The limit: the expected size, or that of the configuration.
    max_size: u64,
    reserved: u64,
    has_known_size: bool,
    failed: Option<FileError>,
    is_finished: bool,
}

impl std::fmt::Debug for ObjectWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ObjectWriter")
            .field("url", &self.url)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

impl ObjectWriter {
    pub(super) fn new(
        store: Arc<ObjectStore>,
        name: &str,
        content_id: String,
        caller: &Caller,
        size: Option<u64>,
    ) -> Result<Self, FileError> {
        let url = ObjectUrl::new(&store.bucket, name).ok_or_else(|| {
            FileError::Invalid("the subject prefix of the bridge is too long for files".to_owned())
        })?;
        let max_payload = store.jetstream.client().max_payload();
        Ok(Self {
            url,
            content_id,
            caller: caller.clone(),
            chunk_size: CHUNK.min(max_payload.saturating_sub(HEADER_ROOM)).max(1),
            buffer: BytesMut::new(),
            outstanding: Outstanding::default(),
            hash: Sha256::new(),
            size: 0,
            chunks: 0,
            max_size: size.unwrap_or(store.rules.max_size),
            reserved: size.unwrap_or(0),
            has_known_size: size.is_some(),
            failed: None,
            is_finished: false,
            store,
        })
    }

    /// The bytes that were written so far.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// The memory of the bytes that are not published yet.
    pub(crate) fn buffer_size(&self) -> usize {
        self.buffer.capacity()
    }

    /// The most that the buffer takes while `bytes` more are added, in pieces of at most `piece` bytes with a flush after
    /// each.
    pub(crate) fn max_buffer_size(&self, bytes: usize, piece: usize) -> usize {
        let needed = (self.buffer.len() + bytes).min(self.chunk_size + piece);
        needed.next_multiple_of(BUFFER_STEP).max(self.buffer_size())
    }

    fn add(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        self.size += bytes.len() as u64;
        if self.size > self.max_size {
            return Err(match self.has_known_size {
                true => FileError::TooLarge(format!(
                    "the file is larger than its declared size of {} bytes",
                    self.max_size
                )),
                false => FileError::too_large("the file", self.max_size, "files.max_size"),
            });
        }
        self.hash.update(bytes);
        let needed = self.buffer.len() + bytes.len();
        if needed > self.buffer.capacity() {
            // In small steps: the buffer of an upload that pauses would otherwise take up to twice its content.
            let mut grown = BytesMut::with_capacity(needed.next_multiple_of(BUFFER_STEP));
            grown.extend_from_slice(&self.buffer);
            self.buffer = grown;
        }
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    /// Publishes the buffer as far as it fills chunks, or all of it.
    async fn publish(&mut self, all: bool) -> Result<(), FileError> {
        let published = self.chunks;
        while self.buffer.len() >= self.chunk_size || (all && !self.buffer.is_empty()) {
            if self.size > self.reserved && !self.has_known_size {
                let needed = self.size - self.reserved;
                let bytes = needed..=needed.max(RESERVATION);
                self.reserved += self.store.reserve(&self.content_id, &self.caller, bytes).await?;
            }
            while outstanding(&mut self.outstanding).len() >= MAX_OUTSTANDING {
                self.acknowledged().await?;
            }
            let length = self.buffer.len().min(self.chunk_size);
            let chunk = Bytes::copy_from_slice(self.buffer.get(..length).unwrap_or_default());
            let subject = chunk_subject(&self.store.bucket, &self.content_id);
            // If this future is dropped while it waits, nothing is published, and the chunk is still in the buffer.
            let sent = self.store.jetstream.publish(subject, chunk).await;
            let acknowledgement = sent.map_err(|error| self.store.failed(error))?;
            let _ = self.buffer.split_to(length);
            outstanding(&mut self.outstanding).push(acknowledgement);
            self.chunks += 1;
        }
        // An upload may pause for long. What is left of the buffer must not keep the memory of what was published.
        if self.chunks > published {
            self.buffer = BytesMut::from(&*self.buffer);
        }
        Ok(())
    }

    /// Waits until JetStream has acknowledged a chunk, if there is one without an acknowledgement.
    async fn acknowledged(&mut self) -> Result<(), FileError> {
        let acknowledged = outstanding(&mut self.outstanding).next().await.unwrap_or(Ok(()));
        acknowledged.map_err(|error| self.store.failed(error))
    }

    async fn complete(&mut self, description: &FileDescription) -> Result<StoredFile, FileError> {
        self.publish(true).await?;
        while !outstanding(&mut self.outstanding).is_empty() {
            self.acknowledged().await?;
        }
        let digest = self.hash.clone().finalize();
        let mut metadata =
            ObjectMetadata::new(&self.url, &self.content_id, &self.caller, self.size, self.chunks, &digest);
        metadata.describe(description);
        let written = self.store.jetstream.write_metadata(&self.url, &metadata).await;
        written.map_err(|error| self.store.failed(error))?;
        self.is_finished = true;
        let file = metadata.into_file(self.url.clone());
        self.store.recent.add(Owner::new(&self.caller), &file);
        Ok(file)
    }

    /// After an error the file is never completed.
    fn check<T>(&mut self, result: Result<T, FileError>) -> Result<T, FileError> {
        if let Err(error) = &result {
            self.failed.get_or_insert_with(|| error.clone());
        }
        result
    }

    fn check_failed(&self) -> Result<(), FileError> {
        self.failed.clone().map_or(Ok(()), Err)
    }
}

fn outstanding(outstanding: &mut Outstanding) -> &mut FuturesUnordered<Acknowledgement> {
    outstanding.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl FileWriter for ObjectWriter {
    fn push(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        self.check_failed()?;
        let added = self.add(bytes);
        self.check(added)
    }

    fn sha256(&self) -> String {
        hex(&self.hash.clone().finalize())
    }

    fn flush(&mut self) -> BoxFuture<'_, Result<(), FileError>> {
        Box::pin(async {
            self.check_failed()?;
            let published = self.publish(false).await;
            self.check(published)
        })
    }

    fn finish<'a>(
        &'a mut self,
        description: &'a FileDescription,
    ) -> BoxFuture<'a, Result<StoredFile, FileError>> {
        Box::pin(async move {
            self.check_failed()?;
            let completed = self.complete(description).await;
            self.check(completed)
        })
    }
}

impl Drop for ObjectWriter {
    fn drop(&mut self) {
        if self.is_finished {
            lock(&self.store.open).remove(&self.content_id);
        } else {
            let unacknowledged = std::mem::take(outstanding(&mut self.outstanding));
            self.store.purge_later(std::mem::take(&mut self.content_id), unacknowledged);
        }
    }
}
