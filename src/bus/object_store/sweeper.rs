//! Removes the chunks of files that were never completed, because the bridge that wrote them was killed.
//!
//! A bridge announces to the others that it writes, so that those that survive it look for its chunks; a new bridge looks when it
//! starts. Chunks without metadata are removed if no bridge serves the instance that wrote them, or if that instance no longer
//! knows them. No clock is involved, and a slow upload is not mistaken for an abandoned one.
//!
//! The catalog only says which chunks may be incomplete. Before chunks are removed, the leader of the stream confirms that there
//! is no metadata for them. In any doubt they stay; they expire like all files.

use std::time::Duration;

use async_nats::{Message, RequestErrorKind, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt as _;

use super::jetstream::StoreError;
use super::metadata::{self, ObjectMetadata, parse_content_id};
use super::{ObjectStore, lock};
use crate::files::{FileError, ObjectUrl};
use crate::text::error_chain;

/// The time between two sweeps while other bridges may be writing.
const INTERVAL: Duration = Duration::from_secs(10);
/// How long the owner of chunks may take to answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Sweeps after the last announcement.
const SWEEPS: u32 = 3;
/// The answer of an instance about a content that it is not writing.
pub(super) const UNKNOWN: &[u8] = b"unknown";

/// Tells the other bridges that this one writes a file.
pub(super) async fn announce(store: &ObjectStore) {
    let sent =
        store.jetstream.client().publish(store.subjects.file_writers(), store.instance.clone().into()).await;
    if let Err(error) = sent {
        tracing::debug!(error = error_chain(&error), "cannot announce the upload of a file");
    }
}

/// Sweeps at the start, and while bridges write. Also answers the sweepers of other bridges. Ends when the client is closed.
pub(super) async fn run(store: &ObjectStore) {
    let client = store.jetstream.client();
    let (Ok(announcements), Ok(probes)) = (
        client.subscribe(store.subjects.file_writers()).await,
        client.subscribe(store.subjects.file_writer(&store.instance)).await,
    ) else {
        return;
    };
    // At the same time: others wait for an answer, and a sweep may take long.
    tokio::join!(sweep_when_needed(store, announcements), answer_all(store, probes));
}

async fn sweep_when_needed(store: &ObjectStore, mut announcements: Subscriber) {
    let mut sweeps = 1;
    let mut next = tokio::time::Instant::now();
    loop {
        tokio::select! {
            announcement = announcements.next() => {
                let Some(announcement) = announcement else { return };
                if announcement.payload != store.instance.as_bytes() {
                    if sweeps == 0 {
                        next = tokio::time::Instant::now() + INTERVAL;
                    }
                    sweeps = SWEEPS;
                }
            }
            () = store.swept.notified() => {
                sweeps = SWEEPS;
                next = tokio::time::Instant::now() + INTERVAL;
            }
            () = tokio::time::sleep_until(next), if sweeps > 0 => {
                match sweep(store).await {
                    // Bridges still write.
                    Ok(true) => sweeps = SWEEPS,
                    Ok(false) => sweeps -= 1,
                    Err(error) => {
                        tracing::debug!(%error, "cannot look for incomplete files");
                        sweeps -= 1;
                    }
                }
                next = tokio::time::Instant::now() + INTERVAL;
            }
        }
    }
}

async fn answer_all(store: &ObjectStore, mut probes: Subscriber) {
    while let Some(probe) = probes.next().await {
        answer(store, probe).await;
    }
}

/// Answers whether this bridge writes a content.
async fn answer(store: &ObjectStore, probe: Message) {
    // Only bridges may publish here, but a reply must not go anywhere else in any case.
    let inbox = store.jetstream.client().new_inbox();
    let inboxes = inbox.rsplit_once('.').map_or("", |(prefix, _)| prefix);
    let is_inbox =
        |reply: &async_nats::Subject| reply.strip_prefix(inboxes).is_some_and(|rest| rest.starts_with('.'));
    let Some(reply) = probe.reply.filter(is_inbox) else { return };
    let is_known = std::str::from_utf8(&probe.payload).is_ok_and(|id| store.is_writing(id));
    let body = if is_known { Bytes::new() } else { Bytes::from_static(UNKNOWN) };
    let _ = store.jetstream.client().publish(reply, body).await;
}

/// Removes chunks without an owner. Returns whether chunks of other bridges without metadata are left.
async fn sweep(store: &ObjectStore) -> Result<bool, FileError> {
    if !store.is_available() {
        return Ok(false);
    }
    let mut contents = unknown_contents(store).await.map_err(|error| store.failed(error))?;
    if contents.is_empty() {
        return Ok(false);
    }
    // Some may be complete by now.
    store.refresh().await?;
    {
        let catalog = lock(&store.catalog);
        contents.retain(|id| parse_content_id(id).is_some_and(|(_, name)| !catalog.contains(name)));
    }
    let mut is_written = false;
    for id in contents {
        let Some((instance, _)) = parse_content_id(&id) else { continue };
        let is_own = instance == store.instance;
        if is_own && store.is_writing(&id) {
            continue;
        }
        if !is_own && is_writing(store, instance, &id).await {
            is_written = true;
            continue;
        }
        if !is_incomplete(store, &id).await {
            continue;
        }
        store.purge(&id).await?;
        tracing::info!(content = id, "removed an incomplete file");
    }
    Ok(is_written)
}

/// The contents of bridges in the bucket of which the catalog has no file.
async fn unknown_contents(store: &ObjectStore) -> Result<Vec<String>, StoreError> {
    let bucket = &store.bucket;
    let prefix = format!("$O.{bucket}.C.");
    let (mut unknown, mut offset) = (Vec::new(), 0);
    loop {
        let page = store.jetstream.subjects(bucket, &format!("{prefix}*"), offset).await?;
        if page.is_empty() {
            return Ok(unknown);
        }
        offset += page.len();
        let catalog = lock(&store.catalog);
        let is_unknown = |id: &&str| parse_content_id(id).is_some_and(|(_, name)| !catalog.contains(name));
        let ids = page.iter().filter_map(|subject| subject.strip_prefix(&prefix));
        unknown.extend(ids.filter(is_unknown).map(str::to_owned));
    }
}

/// Whether a content certainly has no metadata, as the leader of the stream says. The catalog may be behind.
async fn is_incomplete(store: &ObjectStore, id: &str) -> bool {
    let url = parse_content_id(id).and_then(|(_, name)| ObjectUrl::new(&store.bucket, name));
    let Some(url) = url else { return false };
    match store.jetstream.last_message(&store.bucket, &metadata::metadata_subject(&url)).await {
        Err(StoreError::NoMessage) => true,
        Err(_) => false,
        // The chunks of a deleted file may be left.
        Ok(found) => ObjectMetadata::parse(&found, &url)
            .is_some_and(|found| found.is_deleted() && found.content_id == id),
    }
}

/// Whether another bridge still writes a content. Without an answer, it may.
async fn is_writing(store: &ObjectStore, instance: &str, id: &str) -> bool {
    let subject = store.subjects.file_writer(instance);
    let request = store.jetstream.client().request(subject, id.to_owned().into());
    match tokio::time::timeout(PROBE_TIMEOUT, request).await {
        Ok(Ok(answer)) => answer.payload != UNKNOWN,
        Ok(Err(error)) => error.kind() != RequestErrorKind::NoResponders,
        Err(_) => true,
    }
}
