//! Reads objects in batches of a few chunks.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use sha2::{Digest as _, Sha256};

use super::cursors::{Cursors, Position};
use super::jetstream::{Batch, JetStream, StreamMessage};
use super::metadata::chunk_subject;
use crate::files::{FileError, FileReader, StoredFile};
use crate::text::hex;

/// A batch has at most this many chunks, and hardly more than this many bytes.
const BATCH: usize = 4;
const BATCH_BYTES: usize = 512 << 10;
/// A copy of the stream that is behind may not have the newest chunks yet.
const MAX_ATTEMPTS: u32 = 6;
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// Reads the chunks of one content in order.
#[derive(Debug)]
struct ChunkReader {
    jetstream: JetStream,
    bucket: String,
    subject: String,
    /// From where the next batch is requested.
    sequence: u64,
    batch: Option<Batch>,
    /// Batches without a chunk, in a row.
    empty: u32,
}

impl ChunkReader {
    fn new(jetstream: JetStream, file: &StoredFile, sequence: u64) -> Self {
        let bucket = file.url.bucket().to_owned();
        let subject = chunk_subject(&bucket, &file.content_id);
        Self { jetstream, bucket, subject, sequence: sequence.max(1), batch: None, empty: 0 }
    }

    /// The next chunk. Fails if there is none: a caller asks only for what must be there.
    async fn next(&mut self) -> Result<StreamMessage, FileError> {
        loop {
            let Self { jetstream, bucket, subject, sequence, batch, .. } = self;
            let batch = match batch {
                Some(batch) => batch,
                none => none.insert(jetstream.batch(bucket, subject, *sequence, BATCH, BATCH_BYTES).await?),
            };
            match batch.next().await? {
                Some(message) => {
                    self.sequence = message.sequence + 1;
                    self.empty = 0;
                    return Ok(message);
                }
                None => {
                    self.batch = None;
                    self.empty += 1;
                    // The first batch request after a full one finds the next chunk at once.
                    if self.empty > MAX_ATTEMPTS {
                        // Removed or expired meanwhile.
                        return Err(FileError::NotFound);
                    }
                    if self.empty > 1 {
                        tokio::time::sleep(RETRY_DELAY * self.empty).await;
                    }
                }
            }
        }
    }
}

/// Reads a whole object, and compares its digest.
pub(super) struct ObjectReader {
    chunks: ChunkReader,
    remaining: u64,
    hash: Sha256,
    sha256: String,
    is_checked: bool,
}

impl ObjectReader {
    pub(super) fn new(jetstream: JetStream, file: StoredFile) -> Self {
        let chunks = ChunkReader::new(jetstream, &file, 0);
        Self { chunks, remaining: file.size, hash: Sha256::new(), sha256: file.sha256, is_checked: false }
    }

    async fn read(&mut self) -> Result<Option<Bytes>, FileError> {
        if self.remaining == 0 {
            return match std::mem::replace(&mut self.is_checked, true) {
                true => Ok(None),
                false => self.check().map(|()| None),
            };
        }
        let chunk = self.chunks.next().await?.payload;
        self.remaining = self.remaining.checked_sub(chunk.len() as u64).ok_or(FileError::Corrupt)?;
        self.hash.update(&chunk);
        if self.remaining == 0 {
            self.is_checked = true;
            self.check()?;
        }
        Ok(Some(chunk))
    }

    fn check(&self) -> Result<(), FileError> {
        match hex(&self.hash.clone().finalize()) == self.sha256 {
            true => Ok(()),
            false => Err(FileError::Corrupt),
        }
    }
}

impl FileReader for ObjectReader {
    fn next(&mut self) -> BoxFuture<'_, Result<Option<Bytes>, FileError>> {
        Box::pin(self.read())
    }
}

/// Why a part of a file cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RangeError {
    #[error("the offset is beyond the end of the file, which has {size} bytes")]
    OffsetTooLarge { size: u64 },
    #[error(transparent)]
    File(#[from] FileError),
}

/// The bytes from `offset` on: at most `max`, fewer only at the end of the file.
pub(super) async fn read_range(
    jetstream: &JetStream,
    cursors: &Cursors,
    file: &StoredFile,
    offset: u64,
    max: usize,
) -> Result<Bytes, FileError> {
    let end = file.size.min(offset.saturating_add(max as u64));
    let mut at = cursors.before(&file.content_id, offset);
    let mut chunks = ChunkReader::new(jetstream.clone(), file, at.sequence);
    let mut bytes = BytesMut::new();
    while at.offset < end {
        let message = chunks.next().await?;
        let (start, length) = (at.offset, message.payload.len() as u64);
        cursors.remember(&file.content_id, Position { offset: start, sequence: message.sequence });
        // The part of the chunk that is in the range.
        let first =
            usize::try_from(offset.saturating_sub(start)).unwrap_or(usize::MAX).min(message.payload.len());
        let last = usize::try_from(end - start).unwrap_or(usize::MAX).min(message.payload.len());
        bytes.extend_from_slice(message.payload.get(first..last).unwrap_or_default());
        at = Position { offset: start + length, sequence: message.sequence + 1 };
    }
    if at.offset < file.size {
        cursors.remember(&file.content_id, at);
    }
    Ok(bytes.freeze())
}
