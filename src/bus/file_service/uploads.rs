//! Uploads in progress.
//!
//! A caller sends one chunk after the other, each with its offset, and the last one with `A2A-Last: true`. An upload that gets no
//! bytes for half a minute, or takes longer than an hour, is abandoned, and its chunks are removed from the store.
//!
//! Bytes that do not fill a chunk of the store wait in memory for the next ones. They count in the memory budget.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::Message;
use tokio::time::Instant;
use uuid::Uuid;

use super::{headers, out_of_memory};
use crate::bus::object_store::{ObjectStore, ObjectWriter};
use crate::caller::Caller;
use crate::dispatch::fair_permits::{FairPermit, FairPermits};
use crate::files::{FileDescription, FileError, FileWriter as _, StoredFile};
use crate::memory::{MemoryAccount, MemoryCharge};
use crate::reply::error::{ActionError, Code};
use crate::text::shorten;

/// How often abandoned uploads are removed.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(5);
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
/// A caller that sends a byte now and then must not keep its place for ever.
const MAX_DURATION: Duration = Duration::from_secs(3600);
/// A chunk of a caller goes to the store in pieces of this size, so that the buffer stays small.
const PIECE: usize = 64 << 10;
const MAX_UPLOADS: usize = 1024;
/// Uploads of one caller, so that one caller does not take the places of others.
const MAX_UPLOADS_PER_CALLER: usize = 128;

#[derive(Debug)]
pub(super) struct Uploads {
    entries: Mutex<HashMap<String, Entry>>,
    /// A tenant does not take the places of others, however many users it has.
    places: Arc<FairPermits>,
    memory: Arc<MemoryAccount>,
}

#[derive(Debug)]
struct Entry {
    caller: Caller,
    _place: FairPermit,
    activity: Activity,
    /// `None` while the upload begins.
    upload: Option<Arc<tokio::sync::Mutex<Upload>>>,
}

/// When an upload began, and when it last got bytes.
#[derive(Debug)]
struct Activity {
    began: Instant,
    last_progress: Instant,
}

impl Activity {
    fn new() -> Self {
        Self { began: Instant::now(), last_progress: Instant::now() }
    }

    /// An empty chunk does not keep an upload.
    fn received(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.last_progress = Instant::now();
        }
    }

    fn is_over(&self) -> bool {
        self.last_progress.elapsed() > IDLE_TIMEOUT || self.began.elapsed() > MAX_DURATION
    }
}

#[derive(Debug)]
struct Upload {
    writer: ObjectWriter,
    description: FileDescription,
    size: Option<u64>,
    /// For the buffer of the writer.
    charge: Option<MemoryCharge>,
}

/// The state of an upload after a chunk.
pub(super) enum Progress {
    Next { offset: u64 },
    Stored(StoredFile),
}

/// Gives back the place of an upload that did not begin.
struct Place<'a>(&'a Uploads, Option<String>);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.1.take() {
            self.0.remove(&id);
        }
    }
}

impl Uploads {
    /// Buffers are charged to `memory`.
    pub(super) fn new(memory: &Arc<MemoryAccount>) -> Self {
        let places = FairPermits::new(MAX_UPLOADS);
        Self { entries: Mutex::default(), places, memory: Arc::clone(memory) }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove(&self, id: &str) {
        let removed = self.lock().remove(id);
        drop(removed);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    pub(super) fn clear(&self) {
        let all = std::mem::take(&mut *self.lock());
        drop(all);
    }

    pub(super) fn remove_abandoned(&self) {
        let abandoned: Vec<_> = self.lock().extract_if(|_, entry| entry.activity.is_over()).collect();
        for (id, _) in abandoned {
            tracing::debug!(upload = id, "removing an abandoned upload");
        }
    }

    /// Begins an upload, and returns its id.
    pub(super) async fn begin(
        &self,
        store: &Arc<ObjectStore>,
        message: &Message,
        caller: &Caller,
    ) -> Result<String, ActionError> {
        let size = match headers::value(message, "A2A-Size") {
            None => None,
            Some(text) => Some(number("A2A-Size", text)?),
        };
        let text = |name| headers::value(message, name).filter(|text| !text.is_empty()).map(str::to_owned);
        let description = FileDescription { name: text("A2A-Name"), media_type: text("A2A-Type") };
        let id = Uuid::new_v4().simple().to_string();
        {
            let mut uploads = self.lock();
            let own = uploads.values().filter(|entry| entry.caller == *caller).count();
            let place = match own < MAX_UPLOADS_PER_CALLER {
                true => self.places.try_acquire(caller),
                false => None,
            };
            let Some(place) = place else {
                return Err(ActionError::new(Code::Busy, "too many uploads at the same time; try again"));
            };
            let (caller, activity) = (caller.clone(), Activity::new());
            let entry = Entry { caller, _place: place, activity, upload: None };
            uploads.insert(id.clone(), entry);
        }
        let mut place = Place(self, Some(id.clone()));
        let writer = store.create(caller, size).await?;
        let upload = Arc::new(tokio::sync::Mutex::new(Upload { writer, description, size, charge: None }));
        if let Some(entry) = self.lock().get_mut(&id) {
            entry.upload = Some(upload);
        }
        place.1 = None;
        Ok(id)
    }

    /// Adds a chunk of at most `max` bytes.
    pub(super) async fn add(
        &self,
        id: &str,
        message: &Message,
        caller: &Caller,
        max: usize,
    ) -> Result<Progress, ActionError> {
        let bytes = &message.payload;
        // Before it waits for the chunk before it.
        if bytes.len() > max {
            return Err(FileError::TooLarge(format!("a chunk has at most {max} bytes")).into());
        }
        let offset = headers::value(message, "A2A-Offset")
            .ok_or_else(|| ActionError::invalid("header `A2A-Offset` is missing"))?;
        let offset = number("A2A-Offset", offset)?;
        let is_last = match headers::value(message, "A2A-Last") {
            None => false,
            Some(text) if text.eq_ignore_ascii_case("true") => true,
            Some(text) if text.eq_ignore_ascii_case("false") => false,
            Some(_) => return Err(ActionError::invalid("header `A2A-Last` must be `true` or `false`")),
        };
        let unknown = || {
            ActionError::new(
                Code::NotFound,
                "this upload is unknown, complete, or was abandoned; begin a new one",
            )
        };
        let upload = {
            let mut uploads = self.lock();
            let entry = uploads.get_mut(id).filter(|entry| entry.caller == *caller).ok_or_else(unknown)?;
            entry.activity.received(bytes);
            entry.upload.clone().ok_or_else(unknown)?
        };
        let mut upload = upload.lock().await;
        let expected = upload.writer.size();
        if offset != expected {
            let message = format!("the offset {offset} is wrong; the next chunk begins at {expected}");
            return Err(ActionError::invalid(message));
        }
        let Upload { writer, charge, .. } = &mut *upload;
        // The upload stays: the caller can send the chunk again.
        self.memory.cover(charge, writer.max_buffer_size(bytes.len(), PIECE)).map_err(out_of_memory)?;
        let added = upload.add(bytes, is_last).await;
        match &added {
            Ok(Progress::Next { .. }) => {
                let Upload { writer, charge, .. } = &mut *upload;
                // A charge can always shrink.
                let _ = self.memory.cover(charge, writer.buffer_size());
                if let Some(entry) = self.lock().get_mut(id) {
                    entry.activity.received(bytes);
                }
            }
            // Complete, or it never will be.
            Ok(Progress::Stored(_)) | Err(_) => self.remove(id),
        }
        Ok(added?)
    }
}

impl Upload {
    async fn add(&mut self, bytes: &[u8], is_last: bool) -> Result<Progress, FileError> {
        for piece in bytes.chunks(PIECE) {
            self.writer.push(piece)?;
            self.writer.flush().await?;
        }
        let offset = self.writer.size();
        if !is_last {
            return Ok(Progress::Next { offset });
        }
        if let Some(size) = self.size.filter(|size| *size != offset) {
            let message = format!("the file has {offset} bytes, but `A2A-Size` was {size}");
            return Err(FileError::Invalid(message));
        }
        Ok(Progress::Stored(self.writer.finish(&self.description).await?))
    }
}

fn number(name: &str, text: &str) -> Result<u64, ActionError> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| is_number);
    number.ok_or_else(|| {
        ActionError::invalid(format!("header `{name}: {}` is not a number", shorten(text, 40)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_upload_ends_without_bytes_for_a_while_and_after_an_hour_in_any_case() {
        let mut activity = Activity::new();
        tokio::time::advance(IDLE_TIMEOUT).await;
        assert!(!activity.is_over());
        tokio::time::advance(Duration::from_secs(1)).await;
        activity.received(b"");
        assert!(activity.is_over());
        while activity.began.elapsed() <= MAX_DURATION {
            activity.received(b"x");
            assert!(!activity.is_over());
            tokio::time::advance(IDLE_TIMEOUT / 2).await;
        }
        activity.received(b"x");
        assert!(activity.is_over());
    }
}
