//! Uploads: the gateway sends a file to a bridge in chunks, while it receives the file.

use std::time::Duration;

use async_nats::{HeaderMap as NatsHeaders, HeaderValue as NatsValue};
use axum::extract::{FromRequest as _, Multipart, Request};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use futures_util::stream::{BoxStream, StreamExt as _};
use serde::Deserialize;

use super::calls::error_status;
use crate::gateway::context::{Context, Query};
use crate::gateway::error::{HttpError, HttpResult, json_response};
use crate::gateway::mesh::MeshRequest;
use crate::text::is_unprintable;

/// How long a bridge may take to store a chunk.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of a chunk, whatever the bridge permits.
const MAX_CHUNK: usize = 1 << 20;
/// Maximum bytes of the name and of the media type of a file.
const MAX_NAME: usize = 255;

#[derive(Deserialize)]
struct Begun {
    upload: String,
    chunk: usize,
}

/// A file that a client sends.
pub(super) struct Source<'a> {
    pub(super) name: Option<String>,
    pub(super) media_type: Option<String>,
    pub(super) size: Option<u64>,
    pub(super) bytes: BoxStream<'a, Result<Bytes, ()>>,
}

/// `POST /files`: a raw body with `?name=`, or a form with one file.
pub(in crate::gateway) async fn upload(context: Context, query: Query, request: Request) -> HttpResult {
    let content_type = text(request.headers(), &header::CONTENT_TYPE)?;
    let is_form = content_type.as_deref().is_some_and(|text| {
        text.split(';').next().is_some_and(|name| name.trim().eq_ignore_ascii_case("multipart/form-data"))
    });
    if !is_form {
        let size = request.headers().get(header::CONTENT_LENGTH);
        let source = Source {
            name: query.get("name").map(str::to_owned),
            media_type: content_type,
            size: size.and_then(|size| size.to_str().ok()?.parse().ok()),
            bytes: request.into_body().into_data_stream().map(|bytes| bytes.map_err(|_| ())).boxed(),
        };
        return store(&context, source).await;
    }
    let invalid = || HttpError::invalid("the form is not valid `multipart/form-data`");
    let mut form = Multipart::from_request(request, &()).await.map_err(|_| invalid())?;
    let timeout = context.gateway.limits().body_timeout;
    loop {
        let field = tokio::time::timeout(timeout, form.next_field()).await.map_err(|_| late())?;
        let Some(field) = field.map_err(|_| invalid())? else {
            return Err(HttpError::invalid("the form has no file"));
        };
        let Some(name) = field.file_name().map(str::to_owned) else { continue };
        let source = Source {
            name: query.get("name").map(str::to_owned).or(Some(name).filter(|name| !name.is_empty())),
            media_type: field.content_type().map(str::to_owned),
            size: None,
            bytes: field.map(|bytes| bytes.map_err(|_| ())).boxed(),
        };
        return store(&context, source).await;
    }
}

fn late() -> HttpError {
    let message = "the file did not arrive in time (`gateway.limits.body_timeout`)";
    HttpError::invalid(message).with_status(StatusCode::REQUEST_TIMEOUT)
}

async fn store(context: &Context, source: Source<'_>) -> HttpResult {
    match store_file(context, source).await? {
        Ok(reply) => Ok(stored(reply)),
        Err((status, error)) => Ok(json_response(status, error)),
    }
}

/// The reply of a bridge, or the status and the body of its error.
pub(super) type Answer = Result<Bytes, (StatusCode, Bytes)>;

/// Sends the file to a bridge, with as many bytes in memory as a chunk has.
pub(super) async fn store_file(context: &Context, mut source: Source<'_>) -> HttpResult<Answer> {
    let gateway = &context.gateway;
    let mut headers = NatsHeaders::new();
    if let Some(name) = &source.name {
        headers.insert("A2A-Name", value("name", name)?);
    }
    if let Some(media_type) = &source.media_type {
        headers.insert("A2A-Type", value("type", media_type)?);
    }
    if let Some(size) = source.size {
        headers.insert("A2A-Size", NatsValue::from(size));
    }
    let request = MeshRequest { subject: gateway.mesh.subjects.files("put"), headers, body: Bytes::new() };
    let begun = match send(context, request).await? {
        Ok(reply) => serde_json::from_slice::<Begun>(&reply),
        Err(refused) => return Ok(Err(refused)),
    };
    let unexpected = || HttpError::unavailable("the reply of the bridge is not the expected one");
    let Begun { upload, chunk } = begun.map_err(|_| unexpected())?;
    // The bridge names the subject as the gateway has to use it.
    let subject = gateway.mesh.subjects.direct(&upload).ok_or_else(unexpected)?;
    let room = gateway.mesh.client.max_payload().saturating_sub(1024).max(1);
    let chunk = chunk.clamp(1, MAX_CHUNK).min(room);
    let (mut waiting, mut offset, mut is_last) = (BytesMut::new(), 0_u64, false);
    let timeout = gateway.limits().body_timeout;
    while !is_last {
        while waiting.len() <= chunk && !is_last {
            match tokio::time::timeout(timeout, source.bytes.next()).await.map_err(|_| late())? {
                Some(Ok(bytes)) => waiting.extend_from_slice(&bytes),
                Some(Err(())) => return Err(HttpError::invalid("the file is incomplete")),
                None => is_last = true,
            }
        }
        // All but the last chunk are full, and the last one is there.
        while waiting.len() > chunk || (is_last && (offset == 0 || !waiting.is_empty())) {
            let body = waiting.split_to(chunk.min(waiting.len())).freeze();
            let is_end = is_last && waiting.is_empty();
            let mut headers = NatsHeaders::new();
            headers.insert("A2A-Offset", NatsValue::from(offset));
            if is_end {
                headers.insert("A2A-Last", "true");
            }
            offset += body.len() as u64;
            let request = MeshRequest { subject: subject.clone(), headers, body };
            let reply = match send(context, request).await? {
                Ok(reply) => reply,
                Err(refused) => return Ok(Err(refused)),
            };
            if is_end {
                return Ok(Ok(reply));
            }
        }
    }
    Err(unexpected())
}

async fn send(context: &Context, request: MeshRequest) -> HttpResult<Answer> {
    let Context { gateway, principal } = context;
    let reply = gateway.mesh.request(principal, request, CHUNK_TIMEOUT).await;
    let reply = reply.map_err(|reason| HttpError::no_reply(&reason))?;
    match error_status(&reply) {
        Some(status) => Ok(Err((status, reply.payload))),
        None => Ok(Ok(reply.payload)),
    }
}

/// The response for a file that is complete.
fn stored(reply: Bytes) -> Response {
    #[derive(Deserialize)]
    struct Stored {
        url: String,
    }
    let name = serde_json::from_slice::<Stored>(&reply).ok();
    let name = name.and_then(|stored| stored.url.rsplit('/').next().map(str::to_owned));
    let mut response = json_response(StatusCode::CREATED, reply);
    if let Some(location) = name.and_then(|name| HeaderValue::from_str(&format!("/api/v1/files/{name}")).ok())
    {
        response.headers_mut().insert(header::LOCATION, location);
    }
    response
}

/// The value of a header for the bridge. A name comes from a query, and may be any text.
fn value(what: &str, text: &str) -> HttpResult<NatsValue> {
    let invalid = || {
        let message =
            format!("the {what} of the file is longer than {MAX_NAME} bytes, or has unprintable characters");
        HttpError::invalid(message)
    };
    if text.len() > MAX_NAME || text.contains(is_unprintable) {
        return Err(invalid());
    }
    text.parse().map_err(|_| invalid())
}

fn text(headers: &HeaderMap, name: &header::HeaderName) -> HttpResult<Option<String>> {
    let invalid = || HttpError::invalid(format!("header `{name}` has characters other than ASCII"));
    headers.get(name).map(|value| value.to_str().map(str::to_owned).map_err(|_| invalid())).transpose()
}
