//! Responses that a client can keep, and ask whether they have changed.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use super::error::json_response;
use crate::text::{head, hex};

/// A response with JSON that has no body if the client has the same already.
pub(super) fn json(request: &HeaderMap, body: Bytes) -> Response {
    let tag = weak(&body);
    if has(request, &tag) {
        return not_modified(&tag);
    }
    let mut response = json_response(StatusCode::OK, body);
    set(&mut response, &tag);
    response
}

/// The tag of a body. It is weak, because the body may be compressed.
pub(super) fn weak(body: &[u8]) -> String {
    format!("W/\"{}\"", head(&hex(&Sha256::digest(body)), 32))
}

/// Whether the client has a response with this tag. RFC 9110, section 13.1.2: the comparison is weak.
pub(super) fn has(request: &HeaderMap, tag: &str) -> bool {
    let opaque = |tag: &str| tag.trim().trim_start_matches("W/").to_owned();
    let values = request.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).any(|one| one.trim() == "*" || opaque(one) == opaque(tag))
}

pub(super) fn set(response: &mut Response, tag: &str) {
    if let Ok(tag) = HeaderValue::from_str(tag) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("private, no-cache"));
}

pub(super) fn not_modified(tag: &str) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NOT_MODIFIED;
    set(&mut response, tag);
    response
}
