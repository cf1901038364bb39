//! Fetches the card of an agent.

use std::time::Duration;

use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue};
use url::Url;

use super::{Card, CardError};
use crate::a2a::auth::Credentials;
use crate::a2a::client::ClientError;
use crate::a2a::http::{HttpClient, HttpResponse, connection_error};
use crate::offload;
use crate::secrets::Secrets;

/// Size limit of a card.
const MAX_CARD: u64 = 1 << 20;
/// Time limit for one URL.
const CARD_TIMEOUT: Duration = Duration::from_secs(10);
const WELL_KNOWN: [&str; 2] = ["/.well-known/agent-card.json", "/.well-known/agent.json"];

/// Fetches the card of the agent at `base` from `card_path`, or from the well-known paths. The error contains none of
/// `secrets`.
pub(crate) async fn fetch(
    http: &HttpClient,
    base: &Url,
    card_path: Option<&str>,
    credentials: &Credentials,
    secrets: &Secrets,
) -> Result<Card, CardError> {
    get_first(http, candidates(base, card_path), credentials, secrets)
        .await
        .map_err(|error| error.redacted(secrets))
}

/// The card at the first URL that has something.
async fn get_first(
    http: &HttpClient,
    urls: Vec<Url>,
    credentials: &Credentials,
    secrets: &Secrets,
) -> Result<Card, CardError> {
    let (mut responses, mut is_unauthorized) = (Vec::new(), false);
    for url in urls {
        return Err(match tokio::time::timeout(CARD_TIMEOUT, get(http, &url, credentials)).await {
            Ok(Ok((status, body))) if status.is_success() => {
                return offload::run(url.as_str(), body.len(), || parse(&body, secrets)).await;
            }
            Ok(Ok((status, _))) => {
                is_unauthorized |= matches!(status.as_u16(), 401 | 403);
                responses.push(format!("{url} answers {}{}", status.as_u16(), hint(status)));
                continue;
            }
            Ok(Err(ClientError::TooLarge { limit })) => CardError::TooLarge { url: url.into(), limit },
            Ok(Err(source)) => CardError::Fetch { url: url.into(), source: Box::new(source) },
            Err(_) => CardError::Timeout { url: url.into(), limit: CARD_TIMEOUT },
        });
    }
    Err(CardError::Status { responses: responses.join(", "), is_unauthorized })
}

/// What is not a card may repeat the request, and the error quotes its beginning: redact it before it is cut. A card is
/// left as it is, because its addresses have to work.
fn parse(body: &[u8], secrets: &Secrets) -> Result<Card, CardError> {
    Card::parse(body).map_err(|error| {
        let redacted = secrets.redact_json(&String::from_utf8_lossy(body));
        Card::parse(redacted.as_bytes()).err().unwrap_or(error)
    })
}

fn hint(status: reqwest::StatusCode) -> &'static str {
    match status.as_u16() {
        401 | 403 => " (check `bearer_token`, `auth`, `card_auth` or `headers`)",
        300..=399 => " (the bridge does not follow redirects; set `url` to the target)",
        _ => "",
    }
}

async fn get(
    http: &HttpClient,
    url: &Url,
    credentials: &Credentials,
) -> Result<(reqwest::StatusCode, bytes::Bytes), ClientError> {
    credentials.ready().await.map_err(ClientError::Token)?;
    let request = || {
        let (mut headers, mut url) = (HeaderMap::new(), url.clone());
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        credentials.add_to_headers(&mut headers);
        credentials.add_to_url(&mut url);
        (http.reqwest.get(url).headers(headers.clone()), headers)
    };
    let (first, sent) = request();
    let mut response = first.send().await.map_err(connection_error)?;
    if response.status() == reqwest::StatusCode::UNAUTHORIZED
        && credentials.renew(sent.get(AUTHORIZATION)).await
    {
        response = request().0.send().await.map_err(connection_error)?;
    }
    let status = response.status();
    let body = if status.is_success() {
        HttpResponse::from(response).small_body(MAX_CARD).await?
    } else {
        bytes::Bytes::new()
    };
    Ok((status, body))
}

/// The URLs to try: below the configured path first, then at the root, because the configured URL may be that of the
/// endpoint itself.
fn candidates(base: &Url, card_path: Option<&str>) -> Vec<Url> {
    let at = |path: &str| {
        let mut url = base.clone();
        url.set_path(path);
        url
    };
    if let Some(path) = card_path {
        return vec![at(path)];
    }
    let below = base.path().trim_end_matches('/');
    let bases = if below.is_empty() { &[""][..] } else { &[below, ""] };
    bases.iter().flat_map(|base| WELL_KNOWN.map(|path| at(&format!("{base}{path}")))).collect()
}
