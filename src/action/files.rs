//! The files of a request: looks up those in the store, and fetches those at URLs that the configuration allows.

use std::sync::Arc;

use tokio::time::Instant;
use url::Url;

use crate::a2a::model::{File, FileContent, Part, StoredContent};
use crate::files::fetch::{FetchMemory, Fetched};
use crate::files::{CallFiles, FileDescription, FileError};
use crate::memory::{MemoryAccount, MemoryCharge};
use crate::reply::error::{ActionError, Code};

/// The parts of a request whose files can be sent.
#[derive(Debug, Default)]
pub(super) struct ResolvedParts {
    pub parts: Vec<Part>,
    /// For the files that the bridge has fetched and holds in memory.
    pub charge: Option<MemoryCharge>,
}

/// Prepares the files of a request to be sent, until a point in time. Most requests have none.
pub(super) async fn resolve_files(
    parts: Vec<Part>,
    until: Instant,
    memory: &Arc<MemoryAccount>,
) -> Result<ResolvedParts, ActionError> {
    let needs_resolution = |part: &Part| {
        matches!(part, Part::File(File { content: FileContent::Reference(_) | FileContent::Uri(_), .. }))
    };
    if !parts.iter().any(needs_resolution) {
        return Ok(ResolvedParts { parts, charge: None });
    }
    let resolved = Box::pin(tokio::time::timeout_at(until, resolve_all(parts, memory))).await;
    let late =
        || ActionError::new(Code::Timeout, "the files of the request could not be read within the timeout");
    resolved.unwrap_or_else(|_| Err(late()))
}

async fn resolve_all(
    mut parts: Vec<Part>,
    memory: &Arc<MemoryAccount>,
) -> Result<ResolvedParts, ActionError> {
    let files = CallFiles::current();
    let (mut total, mut memory) = (0_u64, FetchMemory::new(memory));
    for part in &mut parts {
        if let Part::File(file) = part {
            resolve(file, files.as_deref(), &mut total, &mut memory).await?;
        }
    }
    Ok(ResolvedParts { parts, charge: memory.into_charge() })
}

/// `total` is the size of the files so far, in bytes.
async fn resolve(
    file: &mut File,
    files: Option<&CallFiles>,
    total: &mut u64,
    memory: &mut FetchMemory,
) -> Result<(), ActionError> {
    match (&file.content, files) {
        (FileContent::Reference(_), None) => {
            let message = "files by reference are not supported here; send `bytes`";
            return Err(ActionError::invalid(message));
        }
        (FileContent::Reference(url), Some(files)) => {
            let stored = files.store.find(url, &files.caller).await?;
            files.rules.check_size(stored.size)?;
            add(total, stored.size, files)?;
            let FileDescription { name, media_type } = stored.description.clone();
            *file = File { name, media_type, content: StoredContent::to_send(stored) };
        }
        (FileContent::Uri(text), Some(files)) => {
            let Some(url) = Url::parse(text).ok().filter(|url| files.rules.fetch.includes(url)) else {
                return Ok(());
            };
            let mut description =
                FileDescription { name: file.name.clone(), media_type: file.media_type.clone() };
            let max = files.rules.max_request.saturating_sub(*total);
            let store = Some(files).filter(|files| files.store.is_available());
            let fetch = files.rules.fetch.fetch(&url, &files.rules, max, store, memory, &mut description);
            let fetched = fetch.await?;
            let content = match fetched {
                Fetched::Small(base64) => {
                    add(total, base64.len() as u64 / 4 * 3, files)?;
                    FileContent::Base64(base64)
                }
                Fetched::Stored(stored) => {
                    add(total, stored.size, files)?;
                    StoredContent::to_send(stored)
                }
            };
            *file = File { name: description.name, media_type: description.media_type, content };
        }
        _ => {}
    }
    Ok(())
}

fn add(total: &mut u64, size: u64, files: &CallFiles) -> Result<(), FileError> {
    *total = total.saturating_add(size);
    let max = files.rules.max_request;
    match *total > max {
        true => Err(FileError::too_many("the files of the request", max)),
        false => Ok(()),
    }
}
