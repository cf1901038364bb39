//! Downloads: the gateway asks a bridge for one chunk after the other while the client reads.

use std::io;
use std::time::Duration;

use async_nats::Message;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use serde::Deserialize;
use serde_json::json;

use super::calls::error_status;
use crate::bus::object_store::ObjectStore;
use crate::files::ObjectUrl;
use crate::gateway::context::{Context, Params};
use crate::gateway::error::{HttpError, HttpResult, json_response};
use crate::gateway::etag;
use crate::gateway::mesh::MeshRequest;
use crate::json::to_bytes;

/// How long a bridge may take to read a chunk.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(30);
/// A shorter reply is certainly complete: one that was cut has 64 KiB of text.
const MIN_CUT: usize = 16 << 10;
const FULL_REPLY: &[u8] = b"\"full_reply\":";
/// Browsers neither run nor show what an agent or a caller has stored.
const SANDBOX: &str = "default-src 'none'; sandbox";

/// A chunk of a file, and what the bridge says about the file.
struct Chunk {
    body: Bytes,
    size: u64,
    sha256: String,
    media_type: Option<String>,
    name: Option<String>,
}

impl Chunk {
    async fn read(
        context: &Context,
        url: &str,
        offset: u64,
    ) -> HttpResult<Result<Self, (StatusCode, Bytes)>> {
        let Context { gateway, principal } = context;
        let body = to_bytes(&json!({ "url": url, "offset": offset }));
        let request = MeshRequest::new(gateway.mesh.subjects.files("get"), body);
        let reply = gateway.mesh.request(principal, request, CHUNK_TIMEOUT).await;
        let reply = reply.map_err(|reason| HttpError::no_reply(&reason))?;
        if let Some(status) = error_status(&reply) {
            return Ok(Err((status, reply.payload)));
        }
        let text = |name| text_of(&reply, name);
        let size = text("A2A-Size").and_then(|size| size.parse().ok());
        let size =
            size.ok_or_else(|| HttpError::unavailable("the bridge does not say how large the file is"))?;
        Ok(Ok(Self {
            size,
            sha256: text("A2A-Sha256").unwrap_or_default(),
            media_type: text("A2A-Type"),
            name: text("A2A-Name"),
            body: reply.payload,
        }))
    }
}

fn text_of(reply: &Message, name: &str) -> Option<String> {
    Some(reply.headers.as_ref()?.get(name)?.as_str().to_owned())
}

/// `GET /files/{name}`.
pub(in crate::gateway) async fn file(
    context: Context,
    Params(name): Params<String>,
    headers: HeaderMap,
) -> HttpResult {
    let bucket = ObjectStore::bucket_name(context.gateway.mesh.subjects.prefix());
    // Names consist of plain characters, so that none leaves its place in a subject or a path.
    let url = ObjectUrl::new(&bucket, &name).ok_or_else(|| HttpError::not_found("there is no such file"))?;
    let url = url.to_string();
    let wanted = Range::read(&headers);
    let first = match wanted {
        Some(Range::From { start, .. }) => Chunk::read(&context, &url, start).await?,
        Some(Range::Last(_)) | None => Chunk::read(&context, &url, 0).await?,
    };
    let chunk = match first {
        Ok(chunk) => chunk,
        Err((StatusCode::BAD_REQUEST, _)) if wanted.is_some() => return Ok(unsatisfiable(None)),
        Err((status, body)) => return Ok(json_response(status, body)),
    };
    let tag = format!("\"{}\"", chunk.sha256);
    if etag::has(&headers, &tag) {
        return Ok(etag::not_modified(&tag));
    }
    let is_same = headers.get(header::IF_RANGE).is_none_or(|value| value.as_bytes() == tag.as_bytes());
    let size = chunk.size;
    let Some((start, end)) = wanted.filter(|_| is_same).map_or(Some((0, size)), |range| range.within(size))
    else {
        return Ok(unsatisfiable(Some(size)));
    };
    let is_at_start = match wanted {
        Some(Range::From { start: asked, .. }) => asked == start,
        _ => start == 0,
    };
    let mut response = describe(&chunk, &tag);
    let first = is_at_start.then_some(chunk.body);
    *response.body_mut() = body(context, url, tag, first, (start, end));
    if end - start < size {
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        let range = format!("bytes {start}-{}/{size}", end.saturating_sub(1));
        response.headers_mut().insert(header::CONTENT_RANGE, ascii(&range));
    }
    response.headers_mut().insert(header::CONTENT_LENGTH, (end - start).into());
    Ok(response)
}

/// The headers of a file.
fn describe(chunk: &Chunk, tag: &str) -> Response {
    let mut response = Response::new(Body::empty());
    etag::set(&mut response, tag);
    let headers = response.headers_mut();
    let media_type = chunk.media_type.as_deref().and_then(|text| HeaderValue::from_str(text).ok());
    let media_type = media_type.unwrap_or(HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::CONTENT_TYPE, media_type);
    headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(SANDBOX));
    let disposition = match &chunk.name {
        Some(name) => format!("attachment; filename*=UTF-8''{}", escaped(name)),
        None => "attachment".to_owned(),
    };
    headers.insert(header::CONTENT_DISPOSITION, ascii(&disposition));
    if !chunk.sha256.is_empty() {
        headers.insert("a2a-sha256", ascii(&chunk.sha256));
    }
    response
}

fn ascii(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static(""))
}

/// RFC 8187, section 3.2.1.
fn escaped(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-' | b'_' | b'~' => {
                text.push(char::from(byte));
            }
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

fn unsatisfiable(size: Option<u64>) -> Response {
    let error =
        HttpError::invalid("the range is outside of the file").with_status(StatusCode::RANGE_NOT_SATISFIABLE);
    let mut response = axum::response::IntoResponse::into_response(error);
    if let Some(size) = size {
        response.headers_mut().insert(header::CONTENT_RANGE, ascii(&format!("bytes */{size}")));
    }
    response
}

/// The bytes of a file from `start` to `end`, read as the client asks for them. If the file changes or cannot be read any
/// more, the body breaks off.
fn body(context: Context, url: String, tag: String, first: Option<Bytes>, (start, end): (u64, u64)) -> Body {
    let state = (context, url, tag, first, start);
    Body::from_stream(stream::try_unfold(state, move |(context, url, tag, first, offset)| async move {
        if offset >= end {
            return Ok(None);
        }
        let bytes = match first {
            Some(bytes) => bytes,
            None => match Chunk::read(&context, &url, offset).await {
                Ok(Ok(chunk)) if format!("\"{}\"", chunk.sha256) == tag => chunk.body,
                _ => return Err(io::Error::other("the file cannot be read any more")),
            },
        };
        if bytes.is_empty() {
            return Err(io::Error::other("the file is shorter than expected"));
        }
        let wanted = usize::try_from(end - offset).unwrap_or(usize::MAX).min(bytes.len());
        let bytes = bytes.slice(..wanted);
        let offset = offset + bytes.len() as u64;
        Ok(Some((bytes, (context, url, tag, None, offset))))
    }))
}

/// A range of bytes that a client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Range {
    From { start: u64, end: Option<u64> },
    Last(u64),
}

impl Range {
    /// The range of a request; `None` for all, also if there are several ranges, as RFC 9110 permits.
    fn read(headers: &HeaderMap) -> Option<Self> {
        let range = headers.get(header::RANGE)?.to_str().ok()?.strip_prefix("bytes=")?;
        let (start, end) = range.split_once('-')?;
        let number = |text: &str| match text.bytes().all(|byte| byte.is_ascii_digit()) {
            true => text.parse::<u64>().ok(),
            false => None,
        };
        match (start.trim(), end.trim()) {
            ("", last) => number(last).map(Self::Last),
            (start, "") => number(start).map(|start| Self::From { start, end: None }),
            (start, end) => {
                let (start, end) = (number(start)?, number(end)?);
                (start <= end).then_some(Self::From { start, end: Some(end) })
            }
        }
    }

    /// The first byte, and the one after the last; `None` if the file has none of them.
    fn within(self, size: u64) -> Option<(u64, u64)> {
        match self {
            Self::From { start, end } => {
                let end = end.map_or(size, |end| end.saturating_add(1).min(size));
                (start < end).then_some((start, end))
            }
            Self::Last(0) => None,
            Self::Last(count) => (size > 0).then_some((size.saturating_sub(count), size)),
        }
    }
}

#[derive(Deserialize)]
struct CutReply {
    full_reply: StoredReply,
}

#[derive(Deserialize)]
struct StoredReply {
    url: String,
}

/// The body of the whole reply, if the bridge has stored it because it does not fit into a message.
pub(super) async fn full_reply(context: &Context, reply: &[u8]) -> Option<Body> {
    if reply.len() < MIN_CUT || memchr::memmem::find(reply, FULL_REPLY).is_none() {
        return None;
    }
    let CutReply { full_reply } = serde_json::from_slice(reply).ok()?;
    let chunk = Chunk::read(context, &full_reply.url, 0).await.ok()?.ok()?;
    let (tag, size) = (format!("\"{}\"", chunk.sha256), chunk.size);
    Some(body(context.clone(), full_reply.url, tag, Some(chunk.body), (0, size)))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("bytes=0-0", Some((0, 1)))]
    #[case("bytes=2-", Some((2, 10)))]
    #[case("bytes=2-99", Some((2, 10)))]
    #[case("bytes=-3", Some((7, 10)))]
    #[case("bytes=-99", Some((0, 10)))]
    #[case("bytes=10-", None)]
    #[case("bytes=-0", None)]
    #[case("bytes=99999999999999999999-", Some((0, 10)))]
    #[case("bytes=5-2", Some((0, 10)))]
    #[case("bytes=0-1,3-4", Some((0, 10)))]
    #[case("bytes=+1-2", Some((0, 10)))]
    #[case("lines=1-2", Some((0, 10)))]
    fn a_range_is_within_the_file(#[case] range: &str, #[case] expected: Option<(u64, u64)>) {
        let mut headers = HeaderMap::new();
        headers.insert(header::RANGE, range.parse().unwrap());
        assert_eq!(Range::read(&headers).map_or(Some((0, 10)), |range| range.within(10)), expected);
    }

    #[test]
    fn a_name_cannot_add_a_header() {
        assert_eq!(escaped("a b\r\n\"é;.png"), "a%20b%0D%0A%22%C3%A9%3B.png");
    }
}
