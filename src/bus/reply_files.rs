//! Files of a reply that go by reference, and replies that are too large for a message.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::encoded_reply::EncodedReply;
use super::outbox::Outbox;
use crate::a2a::model::{ArtifactUpdate, File, FileContent, Part, StoredContent};
use crate::files::base64_stream::{Base64Decoder, NotBase64};
use crate::files::{CallFiles, FileDescription, FileError, FileMode, ObjectUrl, StoredFile};
use crate::json::{json_prefix, to_bytes};
use crate::offload;
use crate::reply::Reply;
use crate::reply::outcome::{Outcome, ReplyContent, ReplyFile};
use crate::text::hex;

/// Maximum bytes of the text that is sent with the reference to a whole reply.
const MAX_MESSAGE: usize = 64 << 10;
/// Bytes of a file by reference, without its name and its media type, that a reply has in place of the file's bytes.
const REFERENCE: usize = 256;
/// Room for `full_reply`.
const FULL_REPLY: usize = 384;
const PIECE: usize = 96 << 10;

/// Encodes a reply for a caller of a bridge with a file store.
pub(super) async fn encode(
    reply: &Reply,
    files: &CallFiles,
    outbox: &Outbox,
    overhead: usize,
) -> Result<EncodedReply, FileError> {
    let max_payload = outbox.max_payload();
    let mut reply = reply.clone();
    if let Ok(outcome) = &mut reply {
        describe_received(&outcome.content, files).await?;
        if files.mode == FileMode::Reference {
            *outcome = reference_files(outcome, files, outbox, usize::MAX).await?;
        }
    }
    let mut excess = match try_encode(&reply, outbox, overhead).await {
        Ok(encoded) => return Ok(encoded),
        Err(size) => size.saturating_sub(max_payload),
    };
    while let Ok(outcome) = &mut reply
        && files.mode == FileMode::Fitting
        && outcome.content.files.iter().any(|file| file.bytes.is_some())
    {
        *outcome = reference_files(outcome, files, outbox, excess.max(1)).await?;
        excess = match try_encode(&reply, outbox, overhead).await {
            Ok(encoded) => return Ok(encoded),
            Err(size) => size.saturating_sub(max_payload),
        };
    }
    encode_short(&reply, files, outbox, overhead).await
}

async fn try_encode(reply: &Reply, outbox: &Outbox, overhead: usize) -> Result<EncodedReply, usize> {
    let max_payload = outbox.max_payload();
    let size = EncodedReply::estimate(reply);
    let mut room = outbox.reserve(size.saturating_mul(6).min(max_payload)).await;
    let encoded =
        offload::run(&outbox.agent, size, || EncodedReply::fitting(reply, max_payload, overhead)).await?;
    if let Some(room) = &mut room {
        room.shrink(encoded.body.len());
    }
    Ok(EncodedReply { room, ..encoded })
}

/// Names the files that went to the store while they were received, when nothing was known of them but their bytes.
pub(super) async fn describe_received(content: &ReplyContent, files: &CallFiles) -> Result<(), FileError> {
    for file in content.files.iter().filter(|file| file.bytes.is_none()) {
        let (Some(_), Some(Some(Ok(url)))) = (&file.sha256, file.url.as_deref().map(ObjectUrl::parse)) else {
            continue;
        };
        let description = FileDescription { name: file.name.clone(), media_type: file.mime_type.clone() };
        // A file that has a name keeps it: an earlier reply refers to it, too.
        let known = files.store.description(&url, &files.caller);
        if known.is_some_and(|known| known != FileDescription::default()) {
            continue;
        }
        match files.store.describe(&url, &description, &files.caller).await {
            // A request for a task may show a file that has expired.
            Ok(_) | Err(FileError::NotFound) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Replaces the bytes of files by references, those of the largest files first, until the reply is `excess` bytes shorter.
async fn reference_files(
    outcome: &Outcome,
    files: &CallFiles,
    outbox: &Outbox,
    excess: usize,
) -> Result<Arc<Outcome>, FileError> {
    let lengths = outcome.content.files.iter().enumerate();
    let mut order: Vec<(usize, usize)> =
        lengths.filter_map(|(index, file)| Some((file.bytes.as_ref()?.len(), index))).collect();
    order.sort_unstable_by(|one, other| other.cmp(one));
    let mut stored = HashMap::new();
    let mut saved = 0_usize;
    for (length, index) in order {
        if saved >= excess {
            break;
        }
        let Some(file) = outcome.content.files.get(index) else { continue };
        let description = FileDescription { name: file.name.clone(), media_type: file.mime_type.clone() };
        let base64 = file.bytes.as_deref().unwrap_or_default();
        stored.insert(index, store_base64(base64, &description, files, outbox).await?);
        saved = saved.saturating_add(length.saturating_sub(REFERENCE));
    }
    // The bytes of these files are not copied.
    let Outcome { status, success, content, follow_up, retries, task } = outcome;
    let ReplyContent { message, files: inline, data, artifacts } = content;
    let reply_file = |(index, file): (usize, &ReplyFile)| match stored.get(&index) {
        None => file.clone(),
        Some(stored) => ReplyFile {
            name: file.name.clone(),
            mime_type: file.mime_type.clone(),
            size: file.size,
            sha256: Some(stored.sha256.clone()),
            url: Some(stored.url.to_string()),
            bytes: None,
        },
    };
    Ok(Arc::new(Outcome {
        status: *status,
        success: *success,
        content: ReplyContent {
            message: message.clone(),
            files: inline.iter().enumerate().map(reply_file).collect(),
            data: data.clone(),
            artifacts: artifacts.clone(),
        },
        follow_up: follow_up.clone(),
        retries: retries.clone(),
        task: task.clone(),
    }))
}

/// Stores a file, unless the caller already has the same.
async fn store_base64(
    base64: &str,
    description: &FileDescription,
    files: &CallFiles,
    outbox: &Outbox,
) -> Result<StoredFile, FileError> {
    let (sha256, size) = offload::run(&outbox.agent, base64.len(), || digest(base64)).await?;
    if let Some(same) = files.store.find_same(&files.caller, &sha256, Some(description)).await {
        return Ok(same);
    }
    let mut writer = files.store.create(&files.caller, Some(size)).await?;
    let mut decoder = Base64Decoder::default();
    for piece in base64.as_bytes().chunks(PIECE) {
        decoder.decode(piece, |bytes| writer.push(bytes).map_err(Failure::File))?;
        writer.flush().await?;
        tokio::task::yield_now().await;
    }
    decoder.finish(|bytes| writer.push(bytes).map_err(Failure::File))?;
    writer.finish(description).await
}

async fn store_bytes(
    bytes: &[u8],
    description: &FileDescription,
    files: &CallFiles,
    outbox: &Outbox,
) -> Result<StoredFile, FileError> {
    let sha256 = offload::run(&outbox.agent, bytes.len(), || hex(&Sha256::digest(bytes))).await;
    if let Some(same) = files.store.find_same(&files.caller, &sha256, Some(description)).await {
        return Ok(same);
    }
    let mut writer = files.store.create(&files.caller, Some(bytes.len() as u64)).await?;
    for piece in bytes.chunks(PIECE) {
        writer.push(piece)?;
        writer.flush().await?;
        tokio::task::yield_now().await;
    }
    writer.finish(description).await
}

/// The digest and the size of a file.
fn digest(base64: &str) -> Result<(String, u64), FileError> {
    let (mut hash, mut size, mut decoder) = (Sha256::new(), 0, Base64Decoder::default());
    let mut take = |bytes: &[u8]| {
        hash.update(bytes);
        size += bytes.len() as u64;
        Ok::<_, Failure>(())
    };
    decoder.decode(base64.as_bytes(), &mut take)?;
    decoder.finish(&mut take)?;
    Ok((hex(&hash.finalize()), size))
}

enum Failure {
    NotBase64,
    File(FileError),
}

impl From<NotBase64> for Failure {
    fn from(NotBase64: NotBase64) -> Self {
        Self::NotBase64
    }
}

impl From<Failure> for FileError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::NotBase64 => Self::Invalid("a file of the reply is not base64".to_owned()),
            Failure::File(error) => error,
        }
    }
}

#[derive(Serialize)]
struct FullReply {
    url: String,
    size: u64,
    sha256: String,
}

/// Stores a whole reply, and encodes what fits of it.
async fn encode_short(
    reply: &Reply,
    files: &CallFiles,
    outbox: &Outbox,
    overhead: usize,
) -> Result<EncodedReply, FileError> {
    let whole = offload::run(&outbox.agent, EncodedReply::estimate(reply), || match reply {
        Ok(outcome) => outcome.to_json(),
        Err(error) => error.to_json(),
    })
    .await;
    let description = FileDescription {
        name: Some("reply.json".to_owned()),
        media_type: Some("application/json".to_owned()),
    };
    let stored = store_bytes(&whole, &description, files, outbox).await?;
    drop(whole);
    let full = FullReply { url: stored.url.to_string(), size: stored.size, sha256: stored.sha256 };
    let overhead = overhead + FULL_REPLY;
    let short = match reply {
        Ok(outcome) if outcome.follow_up.is_none() => {
            let room = outbox.max_payload().saturating_sub(overhead);
            EncodedReply::from_body(shorten(outcome, room).to_json())
        }
        _ => EncodedReply::new(reply, outbox.max_payload(), overhead),
    };
    let body = add_field(&short.body, "full_reply", &full);
    Ok(EncodedReply { body, ..short })
}

/// The reply without its lists, and with the beginning of its message.
fn shorten(outcome: &Outcome, room: usize) -> Outcome {
    let Outcome { status, success, content, follow_up, retries, task } = outcome;
    let mut short = Outcome {
        status: *status,
        success: *success,
        content: ReplyContent::default(),
        follow_up: follow_up.clone(),
        retries: retries.clone(),
        task: task.clone(),
    };
    let room = room.saturating_sub(short.to_json().len()).min(MAX_MESSAGE);
    short.content.message = json_prefix(&content.message, room).to_owned();
    short
}

/// A JSON object with one more field.
fn add_field(object: &Bytes, name: &str, value: &impl Serialize) -> Bytes {
    let fields = object.strip_suffix(b"}").unwrap_or(object);
    [fields, b",\"", name.as_bytes(), b"\":", &to_bytes(value), b"}"].concat().into()
}

/// Replaces the files of an artifact that do not fit into a frame by references. Without a store they stay as they are, and
/// the frame says that they were left out.
pub(super) async fn reference_parts(update: &mut ArtifactUpdate, outbox: &Outbox, room: usize) {
    let Some(files) = CallFiles::current() else { return };
    let max = match files.mode {
        FileMode::Reference => 0,
        FileMode::Fitting => room,
        FileMode::Inline => return,
    };
    for part in &mut update.artifact.parts {
        let Part::File(File { name, media_type, content }) = part else { continue };
        let description = FileDescription { name: name.clone(), media_type: media_type.clone() };
        let stored = match content {
            FileContent::Base64(base64) if base64.len() > max => {
                store_base64(base64, &description, &files, outbox).await
            }
            FileContent::InStore(received) => {
                files.store.describe(&received.file.url, &description, &files.caller).await
            }
            _ => continue,
        };
        match stored {
            Ok(stored) => *content = StoredContent::received(stored),
            Err(error) => {
                tracing::debug!(agent = %outbox.agent, %error, "cannot store a file of an artifact");
            }
        }
    }
}
