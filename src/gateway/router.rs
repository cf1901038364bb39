//! The router, made from the table of routes, and what applies to every request.

use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{ConnectInfo, DefaultBodyLimit, Request, State};
use axum::http::{Extensions, HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Version, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use futures_util::FutureExt as _;
use tower_http::CompressionLevel;
use tower_http::compression::CompressionLayer;
use tower_http::compression::predicate::{Predicate as _, SizeAbove};
use tower_http::cors::{AllowOrigin, CorsLayer};
use uuid::Uuid;

use super::Gateway;
use super::auth::Principal;
use super::error::{HttpError, HttpResult};
use super::routes::{Access, Body, ROUTES, Route};
use crate::config::{CallLogging, GatewayRole};
use crate::reply::error::Code;
use crate::text::{millis, shorten};

/// Responses with fewer bytes are not compressed.
const MIN_COMPRESSED: u16 = 1024;
/// Maximum bytes of a request id that a client sends, and of a path in the log.
const MAX_REQUEST_ID: usize = 128;
const MAX_LOGGED_PATH: usize = 200;
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// How long browsers remember what CORS permits.
const PREFLIGHT_AGE: Duration = Duration::from_secs(600);
/// The route of a request that no route matches.
const NO_ROUTE: &str = "none";

/// The route of a response, and who asked, for the access log.
#[derive(Debug, Clone)]
struct Served {
    route: &'static str,
    principal: Option<Arc<Principal>>,
}

#[derive(Clone)]
struct Guard {
    gateway: Arc<Gateway>,
    route: &'static Route,
}

pub(super) fn router(gateway: &Arc<Gateway>) -> Router {
    let mut router = Router::new();
    for route in ROUTES {
        let guard = Guard { gateway: Arc::clone(gateway), route };
        let handler = (route.handler)().layer(middleware::from_fn_with_state(guard, guarded));
        router = router.route(route.path, handler);
    }
    let compression = CompressionLayer::new()
        .quality(CompressionLevel::Fastest)
        .compress_when(SizeAbove::new(MIN_COMPRESSED).and(is_json));
    let mut router = router
        .fallback(|| async { HttpError::not_found("there is nothing at this path; see /docs") })
        .method_not_allowed_fallback(|| async {
            let message = "this path has other methods; see /docs";
            HttpError::invalid(message).with_status(StatusCode::METHOD_NOT_ALLOWED)
        })
        .layer(DefaultBodyLimit::disable())
        .layer(compression);
    let origins = gateway.rules().allowed_origins().to_vec();
    if !origins.is_empty() {
        router = router.layer(cors(&origins));
    }
    router
        .layer(middleware::from_fn_with_state(Arc::clone(gateway), observed))
        .with_state(Arc::clone(gateway))
}

/// What other web pages may do. They authenticate with tokens; browsers never send the cookie for them.
fn cors(origins: &[String]) -> CorsLayer {
    let origins = origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok());
    let request_headers = [
        "authorization",
        "content-type",
        "a2a-reply",
        "a2a-timeout",
        "a2a-frames",
        "a2a-files",
        "a2a-on-disconnect",
        "a2a-log",
        "idempotency-key",
        "if-none-match",
        "range",
        "traceparent",
        "tracestate",
        "x-request-id",
    ];
    let response_headers =
        ["etag", "retry-after", "location", "content-disposition", "a2a-log", "x-request-id"];
    CorsLayer::new()
        .allow_origin(AllowOrigin::list(origins))
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(request_headers.map(HeaderName::from_static))
        .expose_headers(response_headers.map(HeaderName::from_static))
        .max_age(PREFLIGHT_AGE)
}

fn is_json(_: StatusCode, _: Version, headers: &HeaderMap, _: &Extensions) -> bool {
    headers.get(header::CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"application/json"))
}

/// The value of `Host`; HTTP/1.1 requests have exactly one.
fn host(request: &Request) -> Option<&str> {
    let mut values = request.headers().get_all(header::HOST).iter();
    let host = values.next().and_then(|value| value.to_str().ok());
    host.filter(|_| values.next().is_none())
}

/// Checks who sends a request for a route, and whether they may.
async fn guarded(State(guard): State<Guard>, mut request: Request, next: Next) -> Response {
    let mut served = Served { route: guard.route.path, principal: None };
    let mut response = match guard.admit(&request) {
        Ok(principal) => {
            served.principal.clone_from(&principal);
            if let Some(principal) = principal {
                request.extensions_mut().insert(principal);
            }
            next.run(request).await
        }
        Err(error) => error.into_response(),
    };
    response.extensions_mut().insert(served);
    response
}

impl Guard {
    fn admit(&self, request: &Request) -> HttpResult<Option<Arc<Principal>>> {
        let (rules, headers) = (self.gateway.rules(), request.headers());
        if self.route.is_change() {
            rules.check_origin(headers, host(request))?;
        }
        let principal = match self.route.access {
            Access::Everyone => None,
            Access::Caller | Access::Operator => {
                let client = request.extensions().get::<ConnectInfo<SocketAddr>>();
                let client = client.map_or_else(|| [0; 4].into(), |ConnectInfo(client)| client.ip());
                let principal = rules.authenticate(headers, client)?;
                principal.admit()?;
                if self.route.access == Access::Operator && principal.role != GatewayRole::Operator {
                    return Err(HttpError::forbidden("this is for operators only"));
                }
                Some(principal)
            }
        };
        if self.route.is_change() && self.route.body != Body::File && !is_json_request(headers) {
            let error = HttpError::invalid("this request needs the header `Content-Type: application/json`");
            return Err(error.with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE));
        }
        Ok(principal)
    }
}

fn is_json_request(headers: &HeaderMap) -> bool {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let name = value.and_then(|value| value.split(';').next());
    name.is_some_and(|name| name.trim().eq_ignore_ascii_case("application/json"))
}

/// Numbers, counts and logs every request, and adds the headers of every response.
async fn observed(State(gateway): State<Arc<Gateway>>, mut request: Request, next: Next) -> Response {
    let began = Instant::now();
    let id = request_id(request.headers());
    request.headers_mut().insert(REQUEST_ID, id.clone());
    let logging = gateway.access_log();
    let line = (logging != CallLogging::Off)
        .then(|| (request.method().clone(), shorten(request.uri().path(), MAX_LOGGED_PATH)));
    let mut response = match gateway.rules().check_host(host(&request)) {
        Ok(()) => match AssertUnwindSafe(next.run(request)).catch_unwind().await {
            Ok(response) => response,
            Err(_) => {
                tracing::error!(request = ?id, "a request panicked; please report this bug");
                HttpError::new(Code::Internal, "the gateway failed to handle this request; see its log")
                    .into_response()
            }
        },
        Err(error) => error.into_response(),
    };
    let served = response.extensions_mut().remove::<Served>();
    let route = served.as_ref().map_or(NO_ROUTE, |served| served.route);
    let (status, took) = (response.status(), began.elapsed());
    gateway.metrics.count(route, status.as_u16(), took);
    if let Some((method, path)) = line
        && (logging == CallLogging::All || status.is_client_error() || status.is_server_error())
    {
        let principal = served.as_ref().and_then(|served| served.principal.as_ref());
        let principal = principal.map_or("-", |principal| &principal.name.text);
        let (status, took_ms) = (status.as_u16(), millis(took));
        tracing::info!(%method, path, status, took_ms, principal, request = ?id, "HTTP request");
    }
    secure(&gateway, response.headers_mut());
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// The id that the client has given a request, or a new one.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.:+/=".contains(byte);
    let given = headers
        .get(REQUEST_ID)
        .filter(|id| (1..=MAX_REQUEST_ID).contains(&id.len()) && id.as_bytes().iter().all(is_plain));
    given.cloned().unwrap_or_else(|| {
        let mut buffer = Uuid::encode_buffer();
        let id = Uuid::new_v4().simple().encode_lower(&mut buffer);
        HeaderValue::from_str(id).unwrap_or(HeaderValue::from_static("-"))
    })
}

/// Headers that keep browsers from doing anything with a response but reading it.
fn secure(gateway: &Gateway, headers: &mut HeaderMap) {
    const DEFAULTS: [(HeaderName, &str); 6] = [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
        (header::CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    for (name, value) in DEFAULTS {
        headers.entry(name).or_insert(HeaderValue::from_static(value));
    }
    if gateway.is_tls() {
        let value = HeaderValue::from_static("max-age=31536000");
        headers.insert(header::STRICT_TRANSPORT_SECURITY, value);
    }
}
