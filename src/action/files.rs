//! The files of a request: looks up those in the store, and fetches those at URLs that the configuration allows.

use std::time::Duration;

use url::Url;

use crate::a2a::model::{File, FileContent, Part, StoredContent};
use crate::files::fetch::Fetched;
use crate::files::{CallFiles, FileDescription, FileError};
use crate::reply::error::{ActionError, Code};

/// Prepares the files of a request to be sent. Most requests have none.
pub(super) async fn resolve_files(parts: Vec<Part>, timeout: Duration) -> Result<Vec<Part>, ActionError> {
    let needs_resolution = |part: &Part| {
        matches!(part, Part::File(File { content: FileContent::Reference(_) | FileContent::Uri(_), .. }))
    };
    if !parts.iter().any(needs_resolution) {
        return Ok(parts);
    }
    let resolved = Box::pin(tokio::time::timeout(timeout, resolve_all(parts))).await;
    let late =
        || ActionError::new(Code::Timeout, "the files of the request could not be read within the timeout");
    resolved.unwrap_or_else(|_| Err(late()))
}

async fn resolve_all(mut parts: Vec<Part>) -> Result<Vec<Part>, ActionError> {
    let files = CallFiles::current();
    let mut total = 0_u64;
    for part in &mut parts {
        if let Part::File(file) = part {
            resolve(file, files.as_deref(), &mut total).await?;
        }
    }
    Ok(parts)
}

/// `total` is the size of the files so far, in bytes.
async fn resolve(file: &mut File, files: Option<&CallFiles>, total: &mut u64) -> Result<(), ActionError> {
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
            let fetched = files.rules.fetch.fetch(&url, &files.rules, max, store, &mut description).await?;
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
