//! Secrets are redacted in outputs, logs, replies and announcements.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use futures_util::StreamExt as _;
use rstest::rstest;
use serde_json::json;
use url::form_urlencoded;

use crate::support::caller::Call;
use crate::support::commands::{command, run};
use crate::support::peer::HttpRequest;
use crate::support::{Answer, Bridge, NatsServer, Peer, attached, launched};

#[tokio::test]
async fn no_secret_appears_in_output_logs_or_on_nats() {
    const TOKEN: &str = "canary-bearer-1f0c";
    const HEADER: &str = "canary-header-2e1d";
    const ENVIRONMENT: &str = "canary-environment-3d2e";
    const PASSWORD: &str = "canary-password-4c3f";
    const RESPONSE: &str = "canary-response-5b40";
    let nats = NatsServer::start_configured(&format!(
        "authorization {{ users: [ {{ user: bridge, password: '{PASSWORD}' }}, {{ user: test, password: test }} ] }}\nno_auth_user: test\n"
    ))
    .await;
    let agent = launched("demo", &["--bearer", TOKEN, "--card-auth"])
        .set("bearer_token", "${CANARY_TOKEN}")
        .set("headers", json!({"X-API-Key": HEADER}))
        .set("env", json!({"SOME_KEY": ENVIRONMENT}));
    let mut bridge = Bridge::with(agent)
        .variable("CANARY_TOKEN", TOKEN)
        .nats("user", "bridge")
        .nats("password", PASSWORD)
        .log("trace")
        .start_on(nats)
        .await;
    let mut everything = bridge.client.subscribe(format!("{}.>", bridge.prefix)).await.unwrap();
    bridge.client.flush().await.unwrap();

    let asked = bridge.prompt("demo.auth", "x").await.expect("AUTH_REQUIRED");
    let done = bridge.answer("demo", &asked.follow_up_id(), RESPONSE).await.expect("COMPLETED");
    let failed = bridge.prompt("demo.http", "500").await.expect_error("agent_error");
    let html = bridge.prompt("demo.html", "x").await.expect_error("agent_error");
    let info = bridge.info("demo").await.to_string();
    let card = bridge.card("demo").await.text;
    bridge.prompt("demo.crash", "x").await;
    bridge.until_logged("agent unavailable").await;
    let registry = bridge.announced("demo", |object| object["last_error"].is_string()).await;
    bridge.stop().await;

    let own = [TOKEN, HEADER, ENVIRONMENT, PASSWORD];
    let shown =
        [bridge.log(), bridge.stdout(), done.text, failed.text, html.text, info, card, registry.to_string()];
    for secret in own {
        for text in &shown {
            assert!(!text.contains(secret), "{secret} in {text}");
        }
    }
    assert!(!bridge.log().contains(RESPONSE), "the answer of the user is in the log");
    // Not `RESPONSE`, which the test itself has published.
    while let Ok(Some(message)) =
        tokio::time::timeout(std::time::Duration::from_millis(50), everything.next()).await
    {
        let text = String::from_utf8_lossy(&message.payload).into_owned();
        assert!(!own.iter().any(|secret| text.contains(secret)), "{text}");
    }
}

#[rstest]
#[case::as_text(|sent: &str| Answer::text(500, "text/plain", sent))]
#[case::as_an_error(|sent: &str| Answer::json(&json!({"jsonrpc": "2.0", "id": 1, "error": {
    "code": -32603, "message": format!("you sent {sent}"), "data": {"headers": [sent]}}})))]
#[tokio::test]
async fn credentials_in_an_agents_error_are_redacted(#[case] repeat: fn(&str) -> Answer) {
    const TOKEN: &str = "canary-bearer-1f0c";
    let peer = Peer::agent(move |seen| repeat(seen.header("authorization").unwrap()));
    let agent = attached("peer", &peer.url()).set("bearer_token", TOKEN);
    let bridge = Bridge::with(agent).log("debug").start().await;
    let failed = bridge.prompt("peer.ask", "x").await.expect_error("agent_error").saying("Bearer ***");
    assert!(!failed.text.contains(TOKEN) && !format!("{:?}", failed.headers).contains(TOKEN), "{failed:?}");
    assert!(!bridge.log().contains(TOKEN), "{}", bridge.log());
}

#[tokio::test]
async fn access_token_in_an_agents_error_is_redacted() {
    const TOKEN: &str = "canary-access-6d51";
    let peer = Peer::agent(|seen| match seen.path.as_str() {
        "/token" => Answer::json(&json!({"access_token": TOKEN, "token_type": "Bearer"})),
        _ => Answer::text(500, "text/plain", seen.header("authorization").unwrap()),
    });
    let oauth =
        json!({"token_url": format!("{}/token", peer.url()), "client_id": "me", "client_secret": "s3cret"});
    let agent = attached("peer", &peer.url()).set("auth", json!([{"oauth2": oauth}]));
    let bridge = Bridge::with(agent).log("debug").start().await;
    let failed = bridge.prompt("peer.ask", "x").await.expect_error("agent_error").saying("Bearer ***");
    assert!(!failed.text.contains(TOKEN) && !bridge.log().contains(TOKEN), "{failed:?}");
}

#[rstest]
#[case::whole("")]
#[case::cut_off_where_the_message_ends("0123456789".repeat(40))]
#[tokio::test]
async fn credentials_in_an_invalid_card_are_redacted(#[case] more: impl AsRef<str>) {
    let token = format!("canary-bearer-1f0c{}", more.as_ref());
    let peer = Peer::start(|seen| Answer::text(200, "text/html", seen.header("authorization").unwrap()));
    let agent = attached("peer", &peer.url()).set("bearer_token", token.as_str());
    let mut bridge = Bridge::with(agent).log("debug").start_early().await;
    let has_error = |object: &serde_json::Value| object["last_error"].is_string();
    let registry = bridge.announced("peer", has_error).await.to_string();
    let card = bridge.card("peer").await.expect_error("agent_unavailable").saying("Bearer ***").text;
    let shown = [registry, card, bridge.info("peer").await.to_string(), bridge.log()];
    for text in shown {
        assert!(text.contains("Bearer ***") && !text.contains("canary"), "{text}");
    }
}

#[rstest]
#[tokio::test]
async fn credentials_in_the_reason_of_a_failed_task_are_redacted(
    #[values(("TASK_STATE_FAILED", "FAILED"), ("TASK_STATE_REJECTED", "REJECTED"))] row: (&str, &str),
) {
    const TOKEN: &str = "canary-bearer-1f0c";
    let (state, status) = (row.0.to_owned(), row.1);
    let peer = Peer::streaming_agent(move |seen| match seen.rpc_method().as_str() {
        "SendStreamingMessage" => {
            let message = json!({"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": TOKEN}]});
            let update =
                json!({"taskId": "t", "contextId": "c", "status": {"state": state, "message": message}});
            Answer::stream(&[json!({ "statusUpdate": update })])
        }
        _ => Answer::task(seen, &state, &format!("401 for {TOKEN}")),
    });
    let agent = attached("peer", &peer.url()).set("bearer_token", TOKEN);
    let bridge = Bridge::with(agent).start().await;
    let mut updates = bridge.task_updates().await;
    let reply = bridge.prompt("peer.ask", "x").await.expect(status).saying("401 for ***");
    let polled = bridge.get_task("peer", &reply.task_id()).await.expect(status).saying("401 for ***");
    bridge.prompt("peer.ask", "x").mode("submit").only_reply().await.expect(status);
    let (_, update) = updates.next().await;
    let streamed = bridge.prompt("peer.ask", "x").stream().await;
    let streamed = format!("{:?} {}", streamed.frames, streamed.result.expect(status).text);
    for text in [reply.text, polled.text, update.to_string(), streamed] {
        assert!(text.contains("***") && !text.contains(TOKEN), "{text}");
    }
}

#[tokio::test]
async fn results_of_the_agent_are_not_redacted() {
    const TOKEN: &str = "canary-bearer-1f0c";
    let peer = Peer::agent(|seen| Answer::task(seen, "TASK_STATE_COMPLETED", TOKEN));
    let bridge = Bridge::with(attached("peer", &peer.url()).set("bearer_token", TOKEN)).start().await;
    bridge.prompt("peer.ask", "x").await.expect("COMPLETED").saying(TOKEN);
}

#[rstest]
#[case::by_the_type("Content-Type", "text/html; x=")]
#[case::by_the_encoding("Content-Encoding", "gzip, ")]
#[tokio::test]
async fn truncated_credential_in_an_error_is_redacted(
    #[case] header: &'static str,
    #[case] before: &'static str,
) {
    let token = format!("canary-bearer-1f0c{}", "0123456789".repeat(20));
    let peer = Peer::agent(move |seen| {
        let sent = seen.header("authorization").unwrap().replace("Bearer ", before);
        Answer::Http(200, vec![(header, sent)], b"<p>hello".to_vec())
    });
    let agent = attached("peer", &peer.url()).set("bearer_token", token);
    let bridge = Bridge::with(agent).log("debug").start().await;
    let failed = bridge.prompt("peer.ask", "x").await.expect_error("agent_error");
    let failed = failed.saying(&format!("{before}***"));
    assert!(!failed.text.contains("canary") && !bridge.log().contains("canary"), "{failed:?}");
}

#[tokio::test]
async fn truncated_credential_in_a_refused_answer_is_redacted() {
    let token = format!("canary-bearer-1f0c{}", "0123456789".repeat(20));
    let peer = Peer::agent(|seen| match seen.is_answer() {
        true => Answer::text(503, "text/plain", seen.header("authorization").unwrap()),
        false => Answer::task(seen, "TASK_STATE_INPUT_REQUIRED", "which?"),
    });
    let bridge = Bridge::with(attached("peer", &peer.url()).set("bearer_token", token)).start().await;
    let asked = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    let failed = bridge.answer("peer", &asked.follow_up_id(), "red").await.expect_error("agent_error");
    let failed = failed.saying("Bearer ***").saying("the task is still waiting");
    assert!(!failed.text.contains("canary"), "{failed:?}");
}

#[tokio::test]
async fn url_encoded_api_key_in_an_error_is_redacted() {
    let peer = Peer::agent(|seen| Answer::text(500, "text/plain", &format!("no route {}", seen.path)));
    let key = json!({"name": "key", "in": "query", "value": "canary key/1f0c+2e1d"});
    let agent = attached("peer", &peer.url()).set("auth", json!([{ "api_key": key }]));
    let bridge = Bridge::with(agent).start().await;
    let failed = bridge.prompt("peer.ask", "x").await.expect_error("agent_error").saying("key=***");
    assert!(!failed.text.contains("canary"), "{failed:?}");
}

#[tokio::test]
async fn escaped_credential_in_error_data_is_redacted() {
    let data = r#"{"canary\/bearer": [1.50, "a \u0063anary\u002Fbearer"], "n": 12345678901234567890123}"#;
    let body =
        format!(r#"{{"jsonrpc": "2.0", "error": {{"code": -32603, "message": "no", "data": {data}}}}}"#);
    let peer = Peer::agent(move |_| Answer::text(200, "application/json", &body));
    let agent = attached("peer", &peer.url()).set("bearer_token", "canary/bearer");
    let bridge = Bridge::with(agent).start().await;
    let failed = bridge.prompt("peer.ask", "x").await.expect_error("agent_error");
    let expected = r#""a2a_data":{"***": [1.50, "a ***"], "n": 12345678901234567890123}"#;
    assert!(failed.text.contains(expected), "{failed:?}");
}

#[tokio::test]
async fn errors_about_settings_show_no_secrets() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bridge.yaml");
    let yaml = "nats:\n  url: 'nats://user:canary-1@127.0.0.1:4222'\n  tokn: canary-2\nagents:\n  - name: demo\n    url: http://127.0.0.1:9\n    bearer_token: [canary-3]\n    headers: canary-4\n";
    std::fs::write(&file, yaml).unwrap();
    let output = run(command(&["run", "--config"]).arg(&file), "");
    assert_eq!(output.code, 78);
    assert!(!(output.err.contains("canary") || output.out.contains("canary")), "{output:?}");
}

type Repeat = fn(&str) -> String;

/// How a hostile or careless server repeats what it was sent.
const REPEATERS: [(&str, Repeat); 9] = [
    ("raw", str::to_owned),
    ("json", |sent| json!({ "sent": sent, "padding": "…" }).to_string() + "!"),
    ("escaped-json", |sent| {
        let escape = |c: char| format!("\\u{:04x}", u32::from(c));
        format!("{{\"sent\": \"{}\"!", sent.chars().map(escape).collect::<String>())
    }),
    ("base64", |sent| STANDARD.encode(sent)),
    ("base64-of-more", |sent| STANDARD.encode(format!("Authorization: {sent}\r\nHost: x"))),
    ("url-safe-base64", |sent| URL_SAFE_NO_PAD.encode(format!("({sent})"))),
    ("percent", |sent| form_urlencoded::byte_serialize(sent.as_bytes()).collect()),
    ("html", |sent| {
        format!("<p>{}</p>", sent.replace('&', "&amp;").replace('<', "&lt;").replace('\'', "&#x27;"))
    }),
    ("hex", |sent| sent.bytes().map(|byte| format!("{byte:02x}")).collect()),
];

/// The secret in the forms above, in pieces as short as are still worth something.
fn traces(secret: &str) -> Vec<String> {
    let piece = |text: &str| text.get(..6.min(text.len())).unwrap().to_owned();
    let mut all = vec![piece(secret), piece(&STANDARD.encode(secret))];
    all.push(piece(&form_urlencoded::byte_serialize(secret.as_bytes()).collect::<String>()));
    all.push(secret.bytes().take(4).map(|byte| format!("{byte:02x}")).collect());
    all
}

#[rstest]
#[case::bearer("n0tf0ry0u/t0ken&<'", |secret: &str| json!({ "bearer_token": secret }))]
#[case::short_bearer("n0tf0r", |secret: &str| json!({ "bearer_token": secret }))]
#[case::header("n0tf0ry0u-header", |secret: &str| json!({ "headers": {"A2A-Api-Key": secret} }))]
#[case::cookie("n0tf0ry0u-cookie", |secret: &str| json!({ "headers": {"Cookie": format!("theme=dark; session={secret}")} }))]
#[case::query_key("n0tf0ry0u key/+&", |secret: &str| json!({ "auth": [{"api_key": {"name": "key", "in": "query", "value": secret}}] }))]
#[case::basic("n0tf0ry0u-password", |secret: &str| json!({ "auth": [{"basic": {"user": "me", "password": secret}}] }))]
#[case::card_path("n0tf0ry0u-in-path", |secret: &str| json!({ "card_path": format!("/card?key={secret}") }))]
#[tokio::test]
async fn what_is_not_a_card_shows_no_credentials(
    #[case] secret: &'static str,
    #[case] settings: fn(&str) -> serde_json::Value,
    // Around the length of what an error quotes, so that the quote ends within the secret.
    #[values(0, 66, 74)] before: usize,
) {
    // A value of fewer than 8 characters is recognized only as it is sent.
    let repeaters = if secret.len() < 8 { &REPEATERS[..1] } else { &REPEATERS };
    let mut peers = Vec::new();
    let mut builder = Bridge::without_agents().log("debug");
    for (name, repeat) in repeaters {
        let peer = Peer::start(move |seen| {
            let text = format!("{}{}", "x".repeat(before), repeat(&repeated(seen)));
            Answer::text(200, "text/html", &text)
        });
        let mut agent = attached(name, &peer.url());
        for (key, value) in settings(secret).as_object().unwrap() {
            agent = agent.set(key, value.clone());
        }
        builder = builder.and(agent);
        peers.push(peer);
    }
    let mut bridge = builder.start_early().await;
    let mut shown = Vec::new();
    for (name, _) in repeaters {
        let has_error = |object: &serde_json::Value| object["last_error"].is_string();
        shown.push(bridge.announced(name, has_error).await.to_string());
        let control = format!("{}.control.{name}.show", bridge.prefix);
        shown.push(Call::new(&bridge.client, control, "").await.text);
        shown.push(bridge.info(name).await.to_string());
    }
    let checked = run(command(&["check", "--config"]).arg(bridge.settings_file()), "");
    assert_eq!(checked.out.matches("not an agent card").count(), repeaters.len(), "{checked:?}");
    shown.extend([checked.out, checked.err, bridge.log()]);
    assert!(peers.iter().all(|peer| peer.requests().iter().any(|seen| !repeated(seen).is_empty())));
    for text in shown {
        for trace in traces(secret) {
            assert!(!text.contains(&trace), "{trace:?} in {text}");
        }
    }
}

/// What a server repeats of a request: a header, one cookie of several, or the key in the query.
fn repeated(seen: &HttpRequest) -> String {
    let headers = ["authorization", "cookie", "a2a-api-key"].map(|name| seen.header(name));
    let address = percent_decode(&seen.path);
    let sent = headers.into_iter().flatten().next().unwrap_or(&address);
    let sent = sent.split("session=").last().unwrap_or_default();
    sent.split("key=").last().unwrap_or_default().to_owned()
}

fn percent_decode(path: &str) -> String {
    let pairs = form_urlencoded::parse(path.as_bytes());
    pairs
        .map(|(name, value)| if value.is_empty() { name.into_owned() } else { format!("{name}={value}") })
        .collect()
}
