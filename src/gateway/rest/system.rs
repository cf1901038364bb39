//! Login, health checks, metrics, and the description of the API.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{ConnectInfo, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde::Deserialize;
use serde_json::json;

use crate::config::GatewayRole;
use crate::gateway::body::{self, Charge};
use crate::gateway::error::{HttpError, HttpResult, json_response};
use crate::gateway::{Gateway, docs_page, etag};
use crate::json::to_bytes;

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Maximum bytes of a login.
const MAX_LOGIN: usize = 16 << 10;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct LoginBody {
    token: String,
}

/// `POST /login`.
pub(in crate::gateway) async fn login(
    State(gateway): State<Arc<Gateway>>,
    ConnectInfo(client): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    body: Body,
) -> HttpResult {
    let mut charge = Charge::new(&gateway.logins);
    let body = body::read(&headers, body, MAX_LOGIN, gateway.limits().body_timeout, &mut charge).await?;
    // The error never quotes the token.
    let LoginBody { token } = serde_json::from_slice(&body)
        .map_err(|_| HttpError::invalid("the body must be `{\"token\": text}`"))?;
    let (principal, cookie) = gateway.rules().login(&token, client.ip())?;
    let is_operator = principal.role == GatewayRole::Operator;
    let role = if is_operator { "operator" } else { "caller" };
    let body = json!({ "principal": principal.name.text, "role": role });
    let mut response = json_response(StatusCode::OK, to_bytes(&body));
    response.headers_mut().insert(header::SET_COOKIE, cookie);
    Ok(response)
}

/// `GET /healthz`.
pub(in crate::gateway) async fn health() -> &'static str {
    "ok\n"
}

/// `GET /readyz`.
pub(in crate::gateway) async fn ready(State(gateway): State<Arc<Gateway>>) -> Response {
    let reason = if gateway.is_stopping() {
        "stopping\n"
    } else if !gateway.mesh.is_connected() {
        "not connected to NATS\n"
    } else if !gateway.directory.is_discovered() {
        "looking for agents\n"
    } else {
        return "ok\n".into_response();
    };
    let mut response = (StatusCode::SERVICE_UNAVAILABLE, reason).into_response();
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("2"));
    response
}

/// `GET /metrics`.
pub(in crate::gateway) async fn metrics(State(gateway): State<Arc<Gateway>>) -> HttpResult {
    let text = gateway.metrics.encode(gateway.mesh.is_connected());
    let text = text.map_err(|_| HttpError::unavailable("cannot encode the metrics"))?;
    Ok(([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response())
}

/// `GET /openapi.json`.
pub(in crate::gateway) async fn openapi(State(gateway): State<Arc<Gateway>>, headers: HeaderMap) -> Response {
    etag::json(&headers, gateway.documents.openapi.clone())
}

/// `GET /docs`.
pub(in crate::gateway) async fn docs(State(gateway): State<Arc<Gateway>>, headers: HeaderMap) -> Response {
    let page = gateway.documents.docs.clone();
    let tag = etag::weak(&page);
    if etag::has(&headers, &tag) {
        return etag::not_modified(&tag);
    }
    let mut response = Response::new(Body::from(page));
    etag::set(&mut response, &tag);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(docs_page::POLICY));
    response
}
