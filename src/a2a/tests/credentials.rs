//! Which credentials are sent to which host.

use crate::text::error_chain;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use super::fake::{FakeAgent, FakeResponse, ReceivedRequest, ok, v03};
use crate::a2a::card::{self, Card, CardError};
use crate::secrets::Secrets;
use crate::telemetry::trace_context::TraceContext;

/// A card with these requirements and schemes.
fn card(security: &Value, schemes: &Value) -> Value {
    json!({"name": "fake", "protocolVersion": "0.3.0", "security": security, "securitySchemes": schemes})
}

/// The request that the agent receives with these settings.
async fn request_with(lines: &str, card: &Value) -> Result<ReceivedRequest, CardError> {
    let fake = FakeAgent::start(v03).await;
    let chooser = fake.chooser(lines);
    let card = Card::from_value(card.clone()).unwrap();
    let interface = chooser.choose(&card).await?;
    let client = chooser.client(&card, &interface)?;
    let _ = client.get("t", &TraceContext::default()).await;
    Ok(fake.received().pop().unwrap())
}

const SEVERAL: &str = r"auth:
  - bearer: t0ken
  - basic: { user: u, password: p }
  - api_key: { name: X-Key, value: k3y }
  - api_key: { name: key, in: query, value: 'a b&c' }
  - api_key: { name: sid, in: cookie, value: c00kie }
  - scheme: special
    bearer: sp3cial";

#[tokio::test]
async fn the_card_selects_among_several_credentials() {
    let schemes = json!({
        "b": {"type": "http", "scheme": "Bearer"},
        "u": {"httpAuthSecurityScheme": {"scheme": "basic"}},
        "h": {"type": "apiKey", "in": "header", "name": "x-key"},
        "q": {"apiKeySecurityScheme": {"location": "query", "name": "key"}},
        "c": {"type": "apiKey", "in": "cookie", "name": "sid"},
        "special": {"type": "http", "scheme": "bearer"},
        "mtls": {"type": "mutualTLS"},
    });
    let header = |request: &ReceivedRequest, name: &str| request.header(name).map(str::to_owned);
    for (security, authorization, key, query, cookie) in [
        (json!([{"b": []}]), Some("Bearer t0ken"), None, None, None),
        (json!([{"u": []}]), Some("Basic dTpw"), None, None, None),
        (json!([{"h": []}]), None, Some("k3y"), None, None),
        (json!([{"q": []}]), None, None, Some("key=a+b%26c"), None),
        (json!([{"c": []}]), None, None, None, Some("sid=c00kie")),
        (json!([{"special": []}]), Some("Bearer sp3cial"), None, None, None),
        (json!([{"mtls": []}, {"h": [], "u": []}]), Some("Basic dTpw"), Some("k3y"), None, None),
    ] {
        let request = request_with(SEVERAL, &card(&security, &schemes)).await.unwrap();
        assert_eq!(header(&request, "authorization").as_deref(), authorization, "{security}");
        assert_eq!(header(&request, "x-key").as_deref(), key, "{security}");
        assert_eq!(request.query.as_deref(), query, "{security}");
        assert_eq!(header(&request, "cookie").as_deref(), cookie, "{security}");
    }
}

#[tokio::test]
async fn the_error_names_the_missing_credentials() {
    let schemes = json!({
        "k": {"type": "apiKey", "in": "header", "name": "X-Other"},
        "m": {"mtlsSecurityScheme": {}},
        "o": {"type": "oauth2", "flows": {}},
    });
    for (security, expected) in [
        (json!([{"k": []}]), "`k` (an API key in header `X-Other`)"),
        (json!([{"m": []}, {"o": []}]), "`m` (a client certificate), or `o` (OAuth2)"),
        (json!([{"schemes": {"nope": {"list": []}}}]), "`nope` (unknown scheme `nope`)"),
        (json!([{"n".repeat(5000): []}]), "n…` (unknown scheme `n"),
    ] {
        let card = card(&security, &schemes);
        let error = request_with("headers: { X-Unrelated: x }", &card).await.unwrap_err().to_string();
        assert!(error.contains(expected) && error.len() < 400, "{error}");
        // `auth: []` overrides the card.
        request_with("auth: []", &card).await.unwrap();
    }
    let own_header = card(&json!([{"k": []}]), &schemes);
    assert!(request_with("headers: { x-other: v }", &own_header).await.is_ok());
    let v01 = json!({"name": "fake", "authentication": {"schemes": ["Bearer"]}});
    let error = request_with("", &v01).await.unwrap_err().to_string();
    assert!(error.contains("a bearer token"), "{error}");
    assert!(request_with("bearer_token: t", &v01).await.is_ok());
}

#[tokio::test]
async fn an_optional_requirement_needs_no_credentials() {
    for security in [json!([]), json!([{}, {"b": []}]), Value::Null] {
        request_with("", &card(&security, &json!({}))).await.unwrap();
    }
}

#[tokio::test]
async fn the_card_can_have_its_own_credentials() {
    let fake = FakeAgent::start(|_| ok(&json!({"name": "fake"}))).await;
    for (lines, expected) in [
        ("bearer_token: tasks", "Bearer tasks"),
        ("bearer_token: tasks\ncard_auth: { bearer: card }", "Bearer card"),
    ] {
        let (config, chooser) = (fake.config(lines), fake.chooser(lines));
        card::fetch(&chooser.http, &config.url, None, &chooser.card_credentials(), &Secrets::default())
            .await
            .unwrap();
        assert_eq!(fake.received().pop().unwrap().header("authorization"), Some(expected));
    }
}

#[tokio::test]
async fn a_host_that_only_the_card_names_gets_no_credentials() {
    let elsewhere = FakeAgent::start(v03).await;
    let fake = FakeAgent::start(v03).await;
    let card = json!({"name": "fake", "protocolVersion": "0.3.0", "url": elsewhere.url});
    let lines = "bearer_token: t\nheaders: { X-API-Key: k }";
    let (_, interface) = fake.client(lines, &card).await;
    assert_eq!(interface.url.as_str(), format!("{}/", fake.url));
    assert!(elsewhere.received().is_empty());
    // `use_card_url` allows the host, but sends no credentials.
    fake.client(&format!("use_card_url: true\n{lines}"), &card).await;
    let seen = elsewhere.received().pop().unwrap();
    assert_eq!((seen.header("authorization"), seen.header("x-api-key")), (None, None));
    // A host in `allowed_hosts` gets them.
    let host = elsewhere.url.trim_start_matches("http://");
    fake.client(&format!("allowed_hosts: ['{host}']\n{lines}"), &card).await;
    let seen = elsewhere.received().pop().unwrap();
    assert_eq!((seen.header("authorization"), seen.header("x-api-key")), (Some("Bearer t"), Some("k")));
}

/// A token endpoint that numbers its tokens, and an agent that accepts those from `first` on.
async fn oauth_agent(expires_in: Value, first: usize) -> (FakeAgent, Arc<AtomicUsize>) {
    let issued = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&issued);
    let fake = FakeAgent::start(move |request| -> FakeResponse {
        if request.path == "/token" {
            if request.header("authorization") != Some("Basic bWU6czNjcmV0") {
                return (401, "application/json", r#"{"error":"invalid_client"}"#.into());
            }
            let number = count.fetch_add(1, Ordering::Relaxed) + 1;
            return ok(&json!({"access_token": format!("tok{number}"), "expires_in": expires_in}));
        }
        let token = request.header("authorization").and_then(|value| value.strip_prefix("Bearer tok"));
        match token.and_then(|number| number.parse::<usize>().ok()) {
            Some(number) if number >= first => v03(request),
            _ => (401, "text/plain", "Unauthorized".to_owned()),
        }
    })
    .await;
    (fake, issued)
}

fn oauth(fake: &FakeAgent) -> String {
    let url = &fake.url;
    format!(
        "auth:\n  - oauth2: {{ token_url: '{url}/token', client_id: me, client_secret: s3cret, scopes: [a, b] }}"
    )
}

#[tokio::test]
async fn many_calls_request_one_token_and_use_it_until_it_expires() {
    let (fake, issued) = oauth_agent(json!(3600), 1).await;
    let (client, _) = fake.client(&oauth(&fake), &json!({"name": "fake", "protocolVersion": "0.3"})).await;
    let trace = TraceContext::default();
    let calls = (0..20).map(|_| client.get("t", &trace));
    for result in futures_util::future::join_all(calls).await {
        assert!(result.unwrap_err().is_task_not_found());
    }
    assert_eq!(issued.load(Ordering::Relaxed), 1);
    let form = fake.received().iter().find(|request| request.path == "/token").unwrap().text.clone();
    assert_eq!(form, "grant_type=client_credentials&scope=a+b");
}

#[tokio::test]
async fn a_token_is_renewed_before_it_expires_and_once_after_a_401() {
    let (fake, issued) = oauth_agent(json!("0"), 1).await;
    let (client, _) = fake.client(&oauth(&fake), &json!({"name": "fake", "protocolVersion": "0.3"})).await;
    let before = issued.load(Ordering::Relaxed);
    let _ = client.get("t", &TraceContext::default()).await;
    assert_eq!(issued.load(Ordering::Relaxed), before + 1, "the token had expired");

    let (fake, issued) = oauth_agent(json!(3600), 2).await;
    let (client, _) = fake.client(&oauth(&fake), &json!({"name": "fake", "protocolVersion": "0.3"})).await;
    assert!(client.get("t", &TraceContext::default()).await.unwrap_err().is_task_not_found());
    assert_eq!(issued.load(Ordering::Relaxed), 2);

    let (fake, issued) = oauth_agent(json!(3600), 99).await;
    let (client, _) = fake.client(&oauth(&fake), &json!({"name": "fake", "protocolVersion": "0.3"})).await;
    let before = issued.load(Ordering::Relaxed);
    client.get("t", &TraceContext::default()).await.unwrap_err();
    assert_eq!(issued.load(Ordering::Relaxed), before + 1, "once for each call");
}

#[tokio::test]
async fn the_error_for_a_rejected_client_does_not_show_its_secret() {
    let (fake, _) = oauth_agent(json!(1), 1).await;
    let lines = oauth(&fake).replace("s3cret", "wr0ng");
    let (client, _) = fake.client(&lines, &json!({"name": "fake", "protocolVersion": "0.3"})).await;
    let error = client.get("t", &TraceContext::default()).await.unwrap_err();
    assert!(!error.may_have_reached_agent());
    let text = error_chain(&error);
    assert!(text.contains("HTTP status 401 invalid_client"), "{text}");
    for text in [text, format!("{error:?}"), format!("{client:?}"), format!("{:?}", fake.config(&lines))] {
        assert!(!text.contains("wr0ng"), "{text}");
    }
}
