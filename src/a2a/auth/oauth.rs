//! OAuth2 client credentials (RFC 6749, section 4.4): one token at a time, renewed before it ends.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use reqwest::header::{ACCEPT, CONTENT_TYPE, HeaderValue};
use secrecy::ExposeSecret as _;
use serde::Deserialize;
use serde_json::Value;
use tokio::time::Instant;

use crate::a2a::client::ClientError;
use crate::a2a::http::{Response, connection_error};
use crate::config;
use crate::secrets::Secrets;
use crate::text::shorten;

/// How long the token endpoint may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Largest answer that is read.
const MAX_ANSWER: u64 = 1 << 20;
/// How long a token counts that does not say how long it counts.
const DEFAULT_LIFE: Duration = Duration::from_secs(3600);
/// How long before its end a token is renewed, at most; a fifth of a short life.
const MARGIN: Duration = Duration::from_secs(30);

/// Why there is no access token.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TokenError {
    /// The token endpoint was not reached.
    #[error("cannot reach the token endpoint (`token_url`)")]
    Unreachable(#[source] Arc<ClientError>),
    #[error("no answer from the token endpoint (`token_url`) within {}s", TIMEOUT.as_secs())]
    Timeout,
    /// It refused, or answered with something else.
    #[error("the token endpoint (`token_url`) gave no token: {0}")]
    Refused(String),
}

/// A client and its current token.
#[derive(Debug)]
pub(super) struct OAuth {
    config: config::OAuth2,
    http: reqwest::Client,
    secrets: Secrets,
    token: Mutex<Option<Token>>,
    // Held while a token is being got, so that many calls ask for one only.
    flight: tokio::sync::Mutex<()>,
    failures: Mutex<Failures>,
}

/// Requests for a token that gave none. Whoever waited for one of them shares its failure: to ask again one
/// after the other would make each wait for all those before.
#[derive(Debug, Default)]
struct Failures {
    count: u64,
    last: Option<TokenError>,
}

#[derive(Debug, Clone)]
struct Token {
    header: HeaderValue,
    renew_at: Instant,
}

#[derive(Deserialize)]
struct Answer {
    access_token: Option<String>,
    expires_in: Option<Value>,
    error: Option<String>,
    error_description: Option<String>,
}

impl Failures {
    fn add(&mut self, error: &TokenError) {
        self.count += 1;
        self.last = Some(error.clone());
    }

    /// The last one, if there have been more than `count`.
    fn since(&self, count: u64) -> Option<TokenError> {
        self.last.clone().filter(|_| self.count > count)
    }
}

impl OAuth {
    pub(super) fn new(config: config::OAuth2, http: reqwest::Client, secrets: Secrets) -> Self {
        Self {
            config,
            http,
            secrets,
            token: Mutex::default(),
            flight: tokio::sync::Mutex::default(),
            failures: Mutex::default(),
        }
    }

    /// The current token as a header.
    pub(super) fn current(&self) -> Option<HeaderValue> {
        self.token().map(|token| token.header)
    }

    fn token(&self) -> Option<Token> {
        self.token.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes sure that there is a token with some life left.
    pub(super) async fn ready(&self) -> Result<(), TokenError> {
        let is_fresh = || self.token().is_some_and(|token| Instant::now() < token.renew_at);
        if is_fresh() {
            return Ok(());
        }
        self.obtain_unless(is_fresh).await
    }

    /// Gets a new token in place of one that the agent refused, unless somebody did already.
    pub(super) async fn renew(&self, refused: Option<&HeaderValue>) -> Result<(), TokenError> {
        self.obtain_unless(|| self.current().is_some_and(|current| Some(&current) != refused)).await
    }

    /// Gets a token. Many callers ask for one only, and learn of its failure together.
    async fn obtain_unless(&self, is_there: impl Fn() -> bool) -> Result<(), TokenError> {
        let before = self.failures().count;
        let _flight = self.flight.lock().await;
        if is_there() {
            return Ok(());
        }
        if let Some(error) = self.failures().since(before) {
            return Err(error);
        }
        let obtained = self.obtain().await;
        if let Err(error) = &obtained {
            self.failures().add(error);
        }
        obtained
    }

    fn failures(&self) -> MutexGuard<'_, Failures> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn obtain(&self) -> Result<(), TokenError> {
        let asked_at = Instant::now();
        // RFC 6749, section 2.3.1: HTTP Basic is what every server takes; some take only the body.
        let mut answer = self.ask(true).await?;
        if matches!(&answer, (400 | 401, _)) {
            answer = self.ask(false).await?;
        }
        let (status, body) = answer;
        let parsed: Option<Answer> = serde_json::from_slice(&body).ok();
        let refused = |why: String| Err(TokenError::Refused(why));
        let Some(parsed) = parsed else {
            return refused(format!("HTTP status {status}, and the body is no JSON object"));
        };
        // The body is not shown: it may hold the token.
        let Some(token) = parsed.access_token.filter(|_| (200..300).contains(&status)) else {
            let words = [parsed.error, parsed.error_description];
            let words: Vec<_> = words.into_iter().flatten().collect();
            let mut words = shorten(&format!("HTTP status {status} {}", words.join(": ")), 300);
            self.secrets.redact(&mut words);
            return refused(words);
        };
        let Ok(mut header) = HeaderValue::from_str(&format!("Bearer {token}")) else {
            return refused("the token has characters that a header cannot have".to_owned());
        };
        header.set_sensitive(true);
        self.secrets.learn(&token);
        let life = match parsed.expires_in {
            Some(Value::Number(seconds)) => seconds.as_f64(),
            Some(Value::String(seconds)) => seconds.trim().parse().ok(),
            _ => None,
        };
        let life = life
            .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
            .unwrap_or(DEFAULT_LIFE)
            .min(Duration::from_secs(30 * 24 * 3600));
        let token = Token { header, renew_at: asked_at + life.saturating_sub(MARGIN.min(life / 5)) };
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

    async fn ask(&self, with_basic: bool) -> Result<(u16, bytes::Bytes), TokenError> {
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
        let ask = async {
            let sent = request.body(form).send().await;
            let response = sent.map_err(|error| unreachable(connection_error(error)))?;
            let status = response.status().as_u16();
            let body = Response::Common(response).body(MAX_ANSWER).await.map_err(unreachable)?;
            Ok((status, body))
        };
        tokio::time::timeout(TIMEOUT, ask).await.unwrap_or(Err(TokenError::Timeout))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;
    use serde_json::json;

    use super::*;
    use crate::a2a::tests::fake::{FakeAgent, ok};

    /// A token endpoint that gives this many tokens and then fails, and what counts its requests.
    async fn endpoint(tokens: usize) -> (OAuth, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
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
        (OAuth::new(auth, http, Secrets::default()), asked)
    }

    fn failure(result: &Result<(), TokenError>) -> String {
        result.as_ref().unwrap_err().to_string()
    }

    #[tokio::test]
    async fn those_who_wait_for_a_token_share_its_failure_and_who_comes_later_tries_again() {
        let (oauth, asked) = endpoint(0).await;
        let results = join_all((0..20).map(|_| oauth.ready())).await;
        assert!(failure(&results[0]).contains("no. 0"), "{results:?}");
        assert!(results.iter().all(|result| failure(result) == failure(&results[0])), "{results:?}");
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        assert!(failure(&oauth.ready().await).contains("no. 1"));
    }

    #[tokio::test]
    async fn those_who_wait_for_a_new_token_share_its_failure_too() {
        let (oauth, asked) = endpoint(1).await;
        oauth.ready().await.unwrap();
        let refused = oauth.current();
        let results = join_all((0..20).map(|_| oauth.renew(refused.as_ref()))).await;
        assert!(results.iter().all(|result| failure(result).contains("no. 1")), "{results:?}");
        assert_eq!(asked.load(Ordering::Relaxed), 2);
        assert!(failure(&oauth.renew(refused.as_ref()).await).contains("no. 2"));
    }
}
