//! Fetches the card of an agent.

use std::time::Duration;

use reqwest::Method;
use reqwest::header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue};
use url::Url;

use super::{Card, CardError};
use crate::a2a::auth::Credentials;
use crate::a2a::client::ClientError;
use crate::a2a::http::{HttpClient, HttpEndpoint};
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
    let (mut responses, mut statuses) = (Vec::new(), Vec::new());
    for url in urls {
        return Err(match tokio::time::timeout(CARD_TIMEOUT, get(http, &url, credentials)).await {
            Ok(Ok((status, body))) if status.is_success() => {
                return offload::run(url.as_str(), body.len(), || parse(&body, secrets)).await;
            }
            Ok(Ok((status, _))) => {
                statuses.push(status.as_u16());
                responses.push(format!("{url} answers {}{}", status.as_u16(), hint(status)));
                continue;
            }
            Ok(Err(ClientError::TooLarge { limit })) => CardError::TooLarge { url: url.into(), limit },
            Ok(Err(source)) => CardError::Fetch { url: url.into(), source: Box::new(source) },
            Err(_) => CardError::Timeout { url: url.into(), limit: CARD_TIMEOUT },
        });
    }
    let find = |is: fn(&&u16) -> bool| statuses.iter().find(is).copied();
    let status = find(|status| matches!(status, 401 | 403)).or_else(|| find(|status| **status != 404));
    Err(CardError::Status { responses: responses.join(", "), status: status.unwrap_or(404) })
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
    // The request carries credentials, so it needs the same check of the peer as a call.
    let endpoint = HttpEndpoint::for_card(url.clone(), http);
    let headers = || {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
        credentials.add_to_headers(&mut headers);
        headers
    };
    let send = |headers| {
        let mut url = url.clone();
        credentials.add_to_url(&mut url);
        endpoint.send(Method::GET, Some(url), headers, None, false)
    };
    let first = headers();
    let used = first.get(AUTHORIZATION).cloned();
    let mut response = send(first).await?;
    if response.status == reqwest::StatusCode::UNAUTHORIZED && credentials.renew(used.as_ref()).await {
        response = send(headers()).await?;
    }
    let status = response.status;
    let body = if status.is_success() { response.small_body(MAX_CARD).await? } else { bytes::Bytes::new() };
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

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;

    use futures_util::future::BoxFuture;
    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpListener;
    use tokio::time::Instant;

    use super::*;
    use crate::a2a::{PeerCheck, Verdict};

    #[derive(Debug)]
    struct Refusing;

    impl PeerCheck for Refusing {
        fn check(&self, _: SocketAddr, _: Instant) -> BoxFuture<'_, Verdict> {
            Box::pin(async { Verdict::Refuse })
        }
    }

    #[tokio::test]
    async fn a_peer_that_the_check_refuses_gets_no_request() {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", server.local_addr().unwrap()).parse().unwrap();
        let http = crate::a2a::http_client().unwrap().with_peer_check(Arc::new(Refusing));
        let (credentials, secrets) = (Credentials::default(), Secrets::default());
        let fetched = fetch(&http, &url, None, &credentials, &secrets);
        let served = async {
            let (mut stream, _) = server.accept().await.unwrap();
            let mut received = Vec::new();
            let _ = stream.read_to_end(&mut received).await;
            received
        };
        let (fetched, received) = tokio::join!(fetched, served);
        assert!(fetched.unwrap_err().is_unreachable());
        assert_eq!(String::from_utf8_lossy(&received), "");
    }
}
