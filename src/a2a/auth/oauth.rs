//! OAuth2 client credentials (RFC 6749, section 4.4): one token at a time, renewed before it expires.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderValue};
use secrecy::ExposeSecret as _;
use serde::Deserialize;
use serde_json::Value;
use tokio::time::Instant;

use crate::a2a::client::ClientError;
use crate::a2a::http::{HttpResponse, connection_error};
use crate::config;
use crate::secrets::Secrets;
use crate::text::shorten;

const TOKEN_TIMEOUT: Duration = Duration::from_secs(10);
/// No server accepts a header this long. Old tokens stay in memory in all forms in which they are redacted.
const MAX_TOKEN_RESPONSE: u64 = 64 << 10;
/// Maximum bytes of a token. Web servers accept 8 to 16 KiB of headers, and longer tokens make redaction slow.
const MAX_TOKEN: usize = 16 << 10;
/// Lifetime of a token without `expires_in`.
const DEFAULT_LIFETIME: Duration = Duration::from_secs(3600);
/// How long before it expires a token is renewed; for a short-lived token, a fifth of its lifetime.
const RENEWAL_MARGIN: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, thiserror::Error)]
pub enum TokenError {
    #[error("cannot reach the token endpoint (`token_url`)")]
    Unreachable(#[source] Arc<ClientError>),
    #[error("no response from the token endpoint (`token_url`) within {}s", TOKEN_TIMEOUT.as_secs())]
    Timeout,
    #[error("the token endpoint (`token_url`) issued no token: {0}")]
    Refused(String),
}

#[derive(Debug)]
pub(super) struct OAuth {
    config: config::OAuth2,
    http: reqwest::Client,
    secrets: Secrets,
    token: Mutex<Option<Token>>,
    /// Held while a token is requested, so that many calls request one token. Contains the last failure.
    requesting: tokio::sync::Mutex<Option<TokenError>>,
    failures: AtomicU64,
}

#[derive(Debug, Clone)]
struct Token {
    header: HeaderValue,
    renew_at: Instant,
}

#[derive(Deserialize)]
struct TokenResponse {
    access_token: Option<String>,
    expires_in: Option<Value>,
    error: Option<String>,
    error_description: Option<String>,
}

impl OAuth {
    pub(super) fn new(config: config::OAuth2, http: reqwest::Client, secrets: Secrets) -> Self {
        Self {
            config,
            http,
            secrets,
            token: Mutex::default(),
            requesting: tokio::sync::Mutex::default(),
            failures: AtomicU64::new(0),
        }
    }

    /// The `Authorization` header with the current token.
    pub(super) fn current(&self) -> Option<HeaderValue> {
        self.token().map(|token| token.header)
    }

    fn token(&self) -> Option<Token> {
        self.token.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Gets a token unless there is one that does not expire soon.
    pub(super) async fn ready(&self) -> Result<(), TokenError> {
        let is_fresh = || self.token().is_some_and(|token| Instant::now() < token.renew_at);
        if is_fresh() {
            return Ok(());
        }
        self.obtain_unless(is_fresh).await
    }

    /// Replaces a token that the agent rejected, unless another call has done so.
    pub(super) async fn renew(&self, rejected: Option<&HeaderValue>) -> Result<(), TokenError> {
        self.obtain_unless(|| self.current().is_some_and(|current| Some(&current) != rejected)).await
    }

    /// Requests a token, once for all concurrent calls. They also share a failure: if each tried again in turn, each
    /// would wait for all those before it.
    async fn obtain_unless(&self, is_available: impl Fn() -> bool) -> Result<(), TokenError> {
        let failures = self.failures.load(Relaxed);
        let mut last_error = self.requesting.lock().await;
        if is_available() {
            return Ok(());
        }
        if self.failures.load(Relaxed) > failures
            && let Some(error) = &*last_error
        {
            return Err(error.clone());
        }
        let obtained = self.obtain().await;
        if let Err(error) = &obtained {
            self.failures.fetch_add(1, Relaxed);
            *last_error = Some(error.clone());
        }
        obtained
    }

    async fn obtain(&self) -> Result<(), TokenError> {
        let requested_at = Instant::now();
        // RFC 6749, section 2.3.1: every server supports HTTP Basic. Some nevertheless accept only the body.
        let mut response = self.request(true).await?;
        if matches!(&response, (400 | 401, _)) {
            response = self.request(false).await?;
        }
        let (status, body) = response;
        let refused = |why: String| Err(TokenError::Refused(why));
        let Ok(parsed) = serde_json::from_slice::<TokenResponse>(&body) else {
            return refused(format!("HTTP status {status}, and the body is not a JSON object"));
        };
        // The message does not show the body, which may contain the token.
        let Some(token) = parsed.access_token.filter(|_| (200..300).contains(&status)) else {
            let reasons = [parsed.error, parsed.error_description];
            let reasons: Vec<_> = reasons.into_iter().flatten().collect();
            let mut reason = format!("HTTP status {status} {}", reasons.join(": "));
            self.secrets.redact(&mut reason);
            return refused(shorten(&reason, 300));
        };
        if token.len() > MAX_TOKEN {
            return refused(format!("the token has more than {MAX_TOKEN} bytes"));
        }
        let Ok(header) = super::bearer(&token) else {
            return refused("the token has characters that are not allowed in a header".to_owned());
        };
        self.secrets.learn(&token);
        let lifetime = match parsed.expires_in {
            Some(Value::Number(seconds)) => seconds.as_f64(),
            Some(Value::String(seconds)) => seconds.trim().parse().ok(),
            _ => None,
        };
        let lifetime = lifetime
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .unwrap_or(DEFAULT_LIFETIME)
            .min(Duration::from_secs(30 * 24 * 3600));
        let renew_at = requested_at + lifetime.saturating_sub(RENEWAL_MARGIN.min(lifetime / 5));
        let token = Token { header, renew_at };
        *self.token.lock().unwrap_or_else(PoisonError::into_inner) = Some(token);
        Ok(())
    }

    fn form(&self, with_basic: bool) -> String {
        let config = &self.config;
        let mut form = url::form_urlencoded::Serializer::new(String::new());
        form.append_pair("grant_type", "client_credentials");
        if !config.scopes.is_empty() {
            form.append_pair("scope", &config.scopes.join(" "));
        }
        if let Some(audience) = &config.audience {
            form.append_pair("audience", audience);
        }
        if !with_basic {
            form.append_pair("client_id", &config.client_id);
            form.append_pair("client_secret", config.client_secret.expose_secret());
        }
        form.finish()
    }

    async fn request(&self, with_basic: bool) -> Result<(u16, bytes::Bytes), TokenError> {
        let config = &self.config;
        let secret = config.client_secret.expose_secret();
        let form = self.form(with_basic);
        let mut request = self
            .http
            .post(config.token_url.clone())
            .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
            .header(ACCEPT, "application/json");
        if with_basic {
            let encoded =
                |text: &str| url::form_urlencoded::byte_serialize(text.as_bytes()).collect::<String>();
            request = request.basic_auth(encoded(&config.client_id), Some(encoded(secret)));
        }
        let unreachable = |error| TokenError::Unreachable(Arc::new(error));
        let exchange = async {
            let sent = request.body(form).send().await;
            let response = sent.map_err(|error| unreachable(connection_error(error)))?;
            let status = response.status().as_u16();
            let body =
                HttpResponse::from(response).small_body(MAX_TOKEN_RESPONSE).await.map_err(unreachable)?;
            Ok((status, body))
        };
        tokio::time::timeout(TOKEN_TIMEOUT, exchange).await.unwrap_or(Err(TokenError::Timeout))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;
    use serde_json::json;

    use super::*;
    use crate::a2a::tests::fake::{FakeAgent, ok};

    /// A token endpoint that issues this many tokens and then fails, and the number of its requests.
    async fn endpoint(tokens: usize) -> (OAuth, Arc<AtomicUsize>) {
        let requests = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&requests);
        let fake = FakeAgent::start(move |_| match count.fetch_add(1, Ordering::Relaxed) {
            number if number < tokens => ok(&json!({"access_token": "t0ken", "expires_in": 3600})),
            number => (503, "application/json", json!({"error": format!("no. {number}")}).to_string()),
        })
        .await;
        let url = &fake.url;
        let lines = format!(
            "auth:\n  - oauth2: {{ token_url: '{url}/token', client_id: me, client_secret: s3cret }}"
        );
        let auth = fake.config(&lines).auth.unwrap().remove(0).oauth2.unwrap();
        let http = crate::a2a::http_client().unwrap().reqwest;
        (OAuth::new(auth, http, Secrets::default()), requests)
    }

    fn failure(result: &Result<(), TokenError>) -> String {
        result.as_ref().unwrap_err().to_string()
    }

    #[tokio::test]
    async fn concurrent_calls_share_the_failure_to_get_a_token_and_later_calls_try_again() {
        let (oauth, requests) = endpoint(0).await;
        let results = join_all((0..20).map(|_| oauth.ready())).await;
        assert!(failure(&results[0]).contains("no. 0"), "{results:?}");
        assert!(results.iter().all(|result| failure(result) == failure(&results[0])), "{results:?}");
        assert_eq!(requests.load(Ordering::Relaxed), 1);
        assert!(failure(&oauth.ready().await).contains("no. 1"));
    }

    #[tokio::test]
    async fn concurrent_calls_share_the_failure_to_renew_a_token() {
        let (oauth, requests) = endpoint(1).await;
        oauth.ready().await.unwrap();
        let rejected = oauth.current();
        let results = join_all((0..20).map(|_| oauth.renew(rejected.as_ref()))).await;
        assert!(results.iter().all(|result| failure(result).contains("no. 1")), "{results:?}");
        assert_eq!(requests.load(Ordering::Relaxed), 2);
        assert!(failure(&oauth.renew(rejected.as_ref()).await).contains("no. 2"));
    }
}
