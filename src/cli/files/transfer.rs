//! Transfers files in chunks. A file is never in memory as a whole.

use std::io::{Read as _, Write};
use std::time::Duration;

use async_nats::{HeaderMap, Message};
use bytes::Bytes;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::LocalFile;
use crate::cli::client::{JsonFields as _, NatsClient, parse_json};
use crate::cli::output::one_line;
use crate::cli::progress::ProgressBar;
use crate::cli::{CliError, CliResult, FAILED};
use crate::text::hex;

/// How long a bridge may take for one chunk.
const TIMEOUT: Duration = Duration::from_secs(30);
const MAX_CHUNK: u64 = 8 << 20;

async fn send(mesh: &NatsClient, subject: String, headers: HeaderMap, body: Bytes) -> CliResult<Message> {
    let mut replies = mesh.request(subject, headers, body).await?;
    let reply = replies.next_within(TIMEOUT).await.map_err(CliError::from)?;
    let is_error =
        reply.headers.as_ref().is_some_and(|headers| headers.get("Nats-Service-Error-Code").is_some());
    if !is_error {
        return Ok(reply);
    }
    let error = parse_json(&reply)?;
    let message = one_line(error.text("/message").unwrap_or("the bridge refuses the request"));
    let hint = match error.text("/error_info/code") {
        Some("state_unavailable") => "files need JetStream on the NATS server; see \"Files\" in the manual",
        Some("not_found") => "files expire, and you see only your own; `a2a-bridge files ls` lists them",
        Some("too_large" | "busy") => "the settings under `files` of the bridge have the limits",
        _ => "`a2a-bridge files --help` explains the commands",
    };
    Err(CliError::msg(FAILED, message).hint(hint))
}

/// A request about files with a JSON body and reply.
pub(in crate::cli) async fn request(mesh: &NatsClient, verb: &str, body: &Value) -> CliResult<Value> {
    let reply = send(mesh, mesh.subjects.files(verb), HeaderMap::new(), body.to_string().into()).await?;
    parse_json(&reply)
}

/// Uploads a file. Returns its `url`, `size` and `sha256`.
pub(in crate::cli) async fn upload(mesh: &NatsClient, file: &LocalFile) -> CliResult<Value> {
    let read_error = |error: std::io::Error| {
        CliError::new(FAILED, error).context(format!("cannot read {}", file.path.display()))
    };
    let mut source = std::fs::File::open(&file.path).map_err(read_error)?;
    let mut headers = HeaderMap::new();
    let name: String = file.name.chars().filter(|c| !c.is_control()).collect();
    headers.insert("A2A-Name", name.as_str());
    let media_type: String = file.media_type.chars().filter(|c| !c.is_control()).collect();
    headers.insert("A2A-Type", media_type.as_str());
    headers.insert("A2A-Size", file.size.to_string());
    let begun = parse_json(&send(mesh, mesh.subjects.files("put"), headers, Bytes::new()).await?)?;
    let subject = begun.text("/upload").map(str::to_owned);
    let chunk_size = begun.get("chunk").and_then(Value::as_u64).filter(|size| (1..=MAX_CHUNK).contains(size));
    let (Some(subject), Some(chunk_size)) = (subject, chunk_size) else {
        return Err(CliError::msg(FAILED, "unexpected reply of the bridge to an upload"));
    };
    let mut progress = ProgressBar::new(&file.name, file.size);
    let mut offset = 0;
    loop {
        let mut chunk = Vec::new();
        (&mut source)
            .take(chunk_size.min(file.size.saturating_sub(offset)))
            .read_to_end(&mut chunk)
            .map_err(read_error)?;
        let next = offset + chunk.len() as u64;
        let is_last = next >= file.size || chunk.is_empty();
        let mut headers = HeaderMap::new();
        headers.insert("A2A-Offset", offset.to_string());
        if is_last {
            headers.insert("A2A-Last", "true");
        }
        let reply = send(mesh, subject.clone(), headers, chunk.into()).await?;
        offset = next;
        progress.set(offset);
        if is_last {
            return parse_json(&reply);
        }
    }
}

async fn get(mesh: &NatsClient, url: &str, offset: u64) -> CliResult<Message> {
    let body = json!({"url": url, "offset": offset}).to_string();
    send(mesh, mesh.subjects.files("get"), HeaderMap::new(), body.into()).await
}

fn header<'m>(message: &'m Message, name: &str) -> Option<&'m str> {
    Some(message.headers.as_ref()?.get(name)?.as_str())
}

/// The name that a file was stored with.
pub(super) async fn stored_name(mesh: &NatsClient, url: &str) -> CliResult<Option<String>> {
    let reply = get(mesh, url, 0).await?;
    Ok(header(&reply, "A2A-Name").map(str::to_owned))
}

/// Downloads a file, and compares its digest. Returns its size.
pub(in crate::cli) async fn download(mesh: &NatsClient, url: &str, to: &mut impl Write) -> CliResult<u64> {
    let (mut offset, mut hash) = (0_u64, Sha256::new());
    let mut progress: Option<ProgressBar> = None;
    loop {
        let reply = get(mesh, url, offset).await?;
        let size = header(&reply, "A2A-Size").and_then(|size| size.parse::<u64>().ok());
        let (Some(size), Some(sha256)) = (size, header(&reply, "A2A-Sha256")) else {
            return Err(CliError::msg(FAILED, "unexpected reply of the bridge to a download"));
        };
        to.write_all(&reply.payload)
            .map_err(|error| CliError::new(FAILED, error).context("cannot write the file"))?;
        hash.update(&reply.payload);
        offset += reply.payload.len() as u64;
        progress.get_or_insert_with(|| ProgressBar::new(url, size)).set(offset);
        if offset >= size {
            if hex(&hash.finalize()) != sha256 {
                return Err(CliError::msg(FAILED, "the content of the file does not match its digest")
                    .hint("try again"));
            }
            return Ok(size);
        }
        if reply.payload.is_empty() {
            return Err(
                CliError::msg(FAILED, "the bridge stopped sending the file before its end").hint("try again")
            );
        }
    }
}
