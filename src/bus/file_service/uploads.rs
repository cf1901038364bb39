//! Uploads in progress.
//!
//! A caller sends one chunk after the other, each with its offset, and the last one with `A2A-Last: true`. An upload without a
//! chunk for half a minute is abandoned, and its chunks are removed from the store.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::Message;
use tokio::time::Instant;
use uuid::Uuid;

use super::headers;
use crate::bus::object_store::{ObjectStore, ObjectWriter};
use crate::caller::Caller;
use crate::dispatch::fair_permits::{FairPermit, FairPermits};
use crate::files::{FileDescription, FileError, FileWriter as _, StoredFile};
use crate::reply::error::{ActionError, Code};
use crate::text::shorten;

/// How often abandoned uploads are removed.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_secs(5);
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_UPLOADS: usize = 1024;
/// Uploads of one caller, so that one caller does not take the places of others.
const MAX_UPLOADS_PER_CALLER: usize = 128;

#[derive(Debug)]
pub(super) struct Uploads {
    entries: Mutex<HashMap<String, Entry>>,
    /// A tenant does not take the places of others, however many users it has.
    places: Arc<FairPermits>,
}

#[derive(Debug)]
struct Entry {
    caller: Caller,
    _place: FairPermit,
    last_used: Instant,
    /// `None` while the upload begins.
    upload: Option<Arc<tokio::sync::Mutex<Upload>>>,
}

#[derive(Debug)]
struct Upload {
    writer: ObjectWriter,
    description: FileDescription,
    size: Option<u64>,
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

impl Default for Uploads {
    fn default() -> Self {
        Self { entries: Mutex::default(), places: FairPermits::new(MAX_UPLOADS) }
    }
}

impl Uploads {
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
        let abandoned: Vec<_> =
            self.lock().extract_if(|_, entry| entry.last_used.elapsed() > IDLE_TIMEOUT).collect();
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
                true => self.places.try_acquire(&caller.tenant()),
                false => None,
            };
            let Some(place) = place else {
                return Err(ActionError::new(Code::Busy, "too many uploads at the same time; try again"));
            };
            let (caller, last_used) = (caller.clone(), Instant::now());
            let entry = Entry { caller, _place: place, last_used, upload: None };
            uploads.insert(id.clone(), entry);
        }
        let mut place = Place(self, Some(id.clone()));
        let writer = store.create(caller, size).await?;
        let upload = Arc::new(tokio::sync::Mutex::new(Upload { writer, description, size }));
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
            entry.last_used = Instant::now();
            entry.upload.clone().ok_or_else(unknown)?
        };
        let mut upload = upload.lock().await;
        let expected = upload.writer.size();
        if offset != expected {
            let message = format!("the offset {offset} is wrong; the next chunk begins at {expected}");
            return Err(ActionError::invalid(message));
        }
        let added = upload.add(&message.payload, max, is_last).await;
        match &added {
            Ok(Progress::Next { .. }) => {
                if let Some(entry) = self.lock().get_mut(id) {
                    entry.last_used = Instant::now();
                }
            }
            // Complete, or it never will be.
            Ok(Progress::Stored(_)) | Err(_) => self.remove(id),
        }
        Ok(added?)
    }
}

impl Upload {
    async fn add(&mut self, bytes: &[u8], max: usize, is_last: bool) -> Result<Progress, FileError> {
        if bytes.len() > max {
            return Err(FileError::TooLarge(format!("a chunk has at most {max} bytes")));
        }
        self.writer.push(bytes)?;
        self.writer.flush().await?;
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
