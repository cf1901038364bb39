//! The gateway against hostile and careless clients: tokens, rates, browsers, slow connections.

use std::time::Duration;

use nix::sys::signal::Signal;
use rstest::rstest;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::support::commands::{command_on, repository_file, run};
use crate::support::gateway::{Fetch as _, Gateway, token};
use crate::support::{Bridge, NatsServer, launched, processes, wait_until, within_deadline};

async fn gateway_with(settings: serde_json::Value) -> (Bridge, Gateway) {
    let bridge = Bridge::with_demo(&[]).await;
    let gateway = Gateway::start(&bridge, settings).await;
    (bridge, gateway)
}

#[tokio::test]
async fn a_token_says_who_calls_and_what_they_may_do() {
    let tokens = [
        token("alice", json!({})),
        token("bob", json!({"agents": ["other"]})),
        token("olga", json!({"role": "operator"})),
    ];
    let (bridge, gateway) = gateway_with(json!({ "tokens": tokens })).await;
    for path in ["agents", "agents/demo", "stats", "/docs", "/openapi.json", "/metrics"] {
        let refused = gateway.get(path).reply().await.error(401, "unauthorized");
        assert_eq!(refused.header("www-authenticate"), "Bearer realm=\"a2a-bridge\"");
    }
    gateway.get("agents").by("mallory").reply().await.error(401, "unauthorized");
    for value in ["Bearer", "Bearer ", "Basic token-of-alice", "token-of-alice", "Bearer token-of-alic"] {
        let request = gateway.get("agents").header("authorization", value);
        request.reply().await.error(401, "unauthorized");
    }
    gateway.get("/healthz").reply().await.status(200);
    gateway.get("/readyz").reply().await.status(200);

    gateway.call("demo/echo", "x").by("alice").reply().await.status(200);
    for path in ["agents/demo/start", "agents/demo/stop", "agents/demo/restart"] {
        gateway.post(path, &json!({})).by("alice").reply().await.error(403, "forbidden");
    }
    gateway.get("agents/demo/logs").by("alice").reply().await.error(403, "forbidden");
    gateway.get("/metrics").by("alice").reply().await.error(403, "forbidden");
    gateway.get("agents/demo/logs").by("olga").reply().await.status(200);
    assert!(gateway.get("agents/demo").by("alice").reply().await.status(200).json.get("reports").is_none());

    // For bob, the agent does not exist.
    assert_eq!(gateway.get("agents").by("bob").reply().await.status(200).json, json!({"agents": []}));
    assert_eq!(gateway.get("stats").by("bob").reply().await.status(200).json, json!({"services": []}));
    gateway.call("demo/echo", "x").by("bob").reply().await.error(404, "not_found");
    for path in ["agents/demo", "agents/demo/tasks", "agents/demo/tasks/1"] {
        gateway.get(path).by("bob").reply().await.error(404, "not_found");
    }

    // What belongs to alice does not exist for olga, nor for callers on NATS.
    let submitted = gateway.call("demo/slow", "600").header("a2a-reply", "submit").by("alice").reply().await;
    let id = submitted.json["task"]["id"].as_str().unwrap().to_owned();
    gateway.get(&format!("agents/demo/tasks/{id}")).by("olga").reply().await.error(404, "not_found");
    let of_olga = gateway.get("agents/demo/tasks").by("olga").reply().await.status(200).json;
    assert_eq!(of_olga["tasks"], json!([]));
    let of_alice = gateway.get("agents/demo/tasks").by("alice").reply().await.status(200).json;
    assert_eq!(of_alice["tasks"].as_array().unwrap().len(), 2, "{of_alice}");
    bridge.get_task("demo", &id).await.expect_error("not_found");
    // The caller cannot name itself.
    let forged = gateway.get(&format!("agents/demo/tasks/{id}")).header("a2a-caller", "alice").by("olga");
    forged.reply().await.error(404, "not_found");
    let log = gateway.log() + &bridge.log();
    assert!(!log.contains("token-of-"), "a log shows a token");
}

#[tokio::test]
async fn a_browser_logs_in_with_a_cookie() {
    let (_bridge, gateway) = gateway_with(json!({"tokens": [token("alice", json!({}))]})).await;
    gateway.post("login", &json!({"token": "wrong"})).reply().await.error(401, "unauthorized");
    for invalid in [json!({}), json!({"token": 1}), json!("token-of-alice")] {
        gateway.post("login", &invalid).reply().await.error(400, "invalid_request");
    }
    let injected = json!({"token": "x; Path=/; Domain=evil.example\r\nSet-Cookie: a=b"});
    gateway.post("login", &injected).reply().await.error(401, "unauthorized");
    let login = gateway.post("login", &json!({"token": "token-of-alice"})).reply().await.status(200);
    assert_eq!(login.json, json!({"principal": "alice", "role": "caller"}));
    let cookie = login.header("set-cookie");
    assert!(cookie.contains("; HttpOnly; SameSite=Strict") && !cookie.contains("Secure"), "{cookie}");
    let cookie = cookie.split(';').next().unwrap();
    gateway.get("agents").header("cookie", format!("x=y; {cookie}")).reply().await.status(200);
    gateway.get("agents").header("cookie", "a2a_token=wrong").reply().await.error(401, "unauthorized");
}

#[tokio::test]
async fn too_many_requests_are_refused() {
    let tokens = [token("alice", json!({"rate": 5})), token("bob", json!({}))];
    let (_bridge, gateway) = gateway_with(json!({ "tokens": tokens })).await;
    let mut statuses = Vec::new();
    for _ in 0..20 {
        statuses.push(gateway.get("agents").by("alice").reply().await.status);
    }
    assert!(statuses[..5].iter().all(|status| *status == 200), "{statuses:?}");
    assert!(statuses.contains(&429), "{statuses:?}");
    wait_until(|| async { gateway.get("agents").by("alice").reply().await.status == 200 }).await;
    for _ in 0..20 {
        gateway.get("agents").by("bob").reply().await.status(200);
    }
    // Guesses are limited for a client, too.
    let mut guesses = Vec::new();
    for n in 0..60 {
        guesses.push(gateway.get("agents").by(&format!("mallory-{n}")).reply().await.status);
    }
    assert!(
        guesses.iter().all(|status| matches!(status, 401 | 429)) && guesses.contains(&429),
        "{guesses:?}"
    );
    gateway.get("agents").by("bob").reply().await.status(200);
}

#[tokio::test]
async fn the_streams_of_a_principal_are_limited() {
    let tokens = [token("alice", json!({})), token("bob", json!({}))];
    let settings = json!({"tokens": tokens, "limits": {"streams": 2}});
    let (_bridge, gateway) = gateway_with(settings).await;
    let stream = |name: &str| gateway.call("demo/slow", "600").by(name).events();
    let (mut first, second) = (stream("alice").await, stream("alice").await);
    let third = gateway.call("demo/slow", "600").by("alice").header("accept", "text/event-stream");
    third.reply().await.error(429, "busy");
    stream("bob").await;
    assert_eq!(first.next().await.unwrap().event, "status");
    drop(second);
    wait_until(|| async {
        let again = gateway.call("demo/echo", "x").by("alice").header("accept", "text/event-stream");
        again.reply().await.status == 200
    })
    .await;
}

#[rstest]
#[case("evil.example", false)]
#[case("127.0.0.1.evil.example:80", false)]
#[case("localhost:1", true)]
#[case("127.0.0.1", true)]
#[case("[::1]:8080", true)]
#[tokio::test]
async fn without_tokens_only_this_machine_is_served(#[case] host: &str, #[case] is_served: bool) {
    let (_bridge, gateway) = gateway_with(json!({})).await;
    let request = format!("GET /api/v1/agents HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    let response = gateway.raw(request.as_bytes()).await;
    assert_eq!(response.starts_with("HTTP/1.1 200 "), is_served, "{response}");
    assert!(is_served || response.starts_with("HTTP/1.1 403 "), "{response}");
    let twice =
        format!("GET /healthz HTTP/1.1\r\nHost: {host}\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    assert!(gateway.raw(twice.as_bytes()).await.starts_with("HTTP/1.1 403 "));
}

#[tokio::test]
async fn other_web_pages_cannot_use_the_gateway() {
    let (_bridge, gateway) = gateway_with(json!({"allowed_origins": ["https://app.example.org"]})).await;
    let call = |origin: &str| gateway.call("demo/echo", "x").header("origin", origin).reply();
    call("https://evil.example").await.error(403, "forbidden");
    call("null").await.error(403, "forbidden");
    let own = format!("http://127.0.0.1:{}", gateway.port);
    assert_eq!(call(&own).await.status(200).header("access-control-allow-origin"), "");
    let allowed = call("https://app.example.org").await.status(200);
    assert_eq!(allowed.header("access-control-allow-origin"), "https://app.example.org");
    let upload =
        gateway.upload("files", "text/plain", b"x".to_vec()).header("origin", "https://evil.example");
    upload.reply().await.error(403, "forbidden");
    // A form of another page has none of these content types.
    for content_type in
        ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx"]
    {
        let form = gateway.upload("agents/demo/skills/echo", content_type, b"\"x\"".to_vec());
        form.reply().await.error(415, "invalid_request");
    }
    let stop = gateway.upload("agents/demo/stop", "text/plain", Vec::new()).reply().await;
    stop.error(415, "invalid_request");
}

#[tokio::test]
async fn every_response_has_an_id_and_headers_for_browsers() {
    let (_bridge, gateway) = gateway_with(json!({"access_log": "all"})).await;
    let reply = gateway.get("agents").header("x-request-id", "req-7").reply().await.status(200);
    assert_eq!(reply.header("x-request-id"), "req-7");
    for (name, value) in [
        ("x-content-type-options", "nosniff"),
        ("x-frame-options", "DENY"),
        ("referrer-policy", "no-referrer"),
        ("content-security-policy", "default-src 'none'; frame-ancestors 'none'"),
    ] {
        assert_eq!(reply.header(name), value);
    }
    let other = gateway.get("/nothing").header("x-request-id", "a b\"c").reply().await.status(404);
    assert_eq!(other.header("x-request-id").len(), 32, "{:?}", other.headers);
    assert_eq!(other.header("x-frame-options"), "DENY");
    wait_until(|| async { gateway.log().contains("path=\"/nothing\"") }).await;
    let log = gateway.log();
    let line = log.lines().find(|line| line.contains("req-7")).expect("a line for the request");
    assert!(line.contains("status=200") && line.contains("path=\"/api/v1/agents\""), "{line}");
}

#[tokio::test]
async fn bodies_are_limited() {
    let (_bridge, gateway) = gateway_with(json!({})).await;
    let head = "POST /api/v1/agents/demo/skills/echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    let announced = format!("{head}Content-Length: 10485761\r\nConnection: close\r\n\r\n");
    assert!(gateway.raw(announced.as_bytes()).await.starts_with("HTTP/1.1 413 "));
    let prompt = format!("\"{}\"", "x".repeat(11 << 20));
    let large =
        gateway.upload("agents/demo/skills/echo", "application/json", prompt.into_bytes()).send().await;
    // The gateway may close the connection while the client still sends.
    assert!(large.is_err() || large.is_ok_and(|response| response.status() == 413));
    // Larger than a message of NATS, and nothing that could be stored first.
    gateway.call("demo/echo", &"x".repeat(2 << 20)).reply().await.error(413, "too_large");
    gateway.call("demo/echo", "still there").reply().await.status(200);
}

#[tokio::test]
async fn slow_and_silent_clients_are_disconnected() {
    let limits = json!({"header_timeout": "500ms", "body_timeout": "500ms"});
    let (_bridge, gateway) = gateway_with(json!({ "limits": limits })).await;
    assert_eq!(gateway.raw(b"").await, "");
    gateway.raw(b"GET /healthz HTTP/1.1\r\nHost: loc").await;
    let after_one = gateway.raw(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    assert!(after_one.starts_with("HTTP/1.1 200 "), "{after_one}");
    let head = "POST /api/v1/agents/demo/skills/echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    let body = gateway.raw(format!("{head}Content-Length: 100\r\n\r\n\"abc").as_bytes()).await;
    assert!(body.starts_with("HTTP/1.1 408 "), "{body}");
    let upload = "POST /api/v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc";
    let upload = gateway.raw(upload.as_bytes()).await;
    assert!(upload.starts_with("HTTP/1.1 "), "{upload}");
    gateway.call("demo/echo", "x").reply().await.status(200);
}

#[tokio::test]
async fn a_client_that_does_not_read_its_stream_is_cut_off() {
    let limits = json!({"body_timeout": "1s"});
    let (_bridge, gateway) = gateway_with(json!({ "limits": limits })).await;
    let body = json!({ "prompt": "14000000" }).to_string();
    let mut stream = TcpStream::connect(("127.0.0.1", gateway.port)).await.unwrap();
    let head = format!(
        "POST /api/v1/agents/demo/skills/big HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Accept: text/event-stream\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    // It reads nothing. Others are served meanwhile, and the connection ends.
    let metric = async |text: &str| gateway.get("/metrics").reply().await.text().contains(text);
    wait_until(|| metric("a2a_gateway_requests_total{route=\"/api/v1/agents/{agent}/skills/{skill}\"")).await;
    gateway.call("demo/echo", "x").reply().await.status(200);
    wait_until(|| metric("a2a_gateway_connections 1\n")).await;
    assert!(metric("a2a_gateway_streams 0\n").await);
    let mut rest = Vec::new();
    let _ = within_deadline(stream.read_to_end(&mut rest)).await;
    let rest = String::from_utf8_lossy(&rest);
    assert!(rest.starts_with("HTTP/1.1 200 ") && !rest.contains("event: result"), "{}", rest.len());
}

#[tokio::test]
async fn idle_connections_take_little_memory() {
    let (_bridge, gateway) = gateway_with(json!({})).await;
    gateway.call("demo/echo", "x").reply().await.status(200);
    let before = processes::memory(gateway.pid(), "VmRSS");
    let mut idle = Vec::new();
    // Both ends need a descriptor; the limit of this process may be low.
    for _ in 0..400 {
        idle.push(TcpStream::connect(("127.0.0.1", gateway.port)).await.unwrap());
    }
    let count = || async { gateway.get("/metrics").reply().await.text() };
    wait_until(|| async { count().await.contains("a2a_gateway_connections 401\n") }).await;
    let each = processes::memory(gateway.pid(), "VmRSS").saturating_sub(before) / 400;
    assert!(each < 8 << 10, "{each} bytes for each idle connection");
    drop(idle);
    wait_until(|| async { count().await.contains("a2a_gateway_connections 1\n") }).await;
}

#[rstest]
#[case("GET /api/v1/agents/%ff HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")]
#[case("GET /api/v1/agents/a%0d%0ab HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")]
#[case("GET /api/v1/agents/%2e%3e%2a HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")]
#[case(
    "GET /api/v1/agents/demo/tasks/a%0d%0aA2A-Caller:%20x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
)]
#[case(
    "POST /api/v1/agents/demo/skills/%3e HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 3\r\nConnection: close\r\n\r\n\"x\""
)]
#[case(
    "POST /api/v1/agents/demo/skills/echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nA2A-Timeout: \u{e9}\r\nContent-Length: 3\r\nConnection: close\r\n\r\n\"x\""
)]
#[case(
    "POST /api/v1/agents/demo/skills/echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n0\r\n\r\n"
)]
#[case("GET / HTTP/1.1\r\nConnection: close\r\n\r\n")]
#[case("GET / HTTP/9.9\r\nHost: localhost\r\n\r\n")]
#[case("\u{0}\u{1}\u{2}\r\n\r\n")]
#[tokio::test]
async fn malformed_requests_are_refused(#[case] request: &str) {
    let (_bridge, gateway) = gateway_with(json!({})).await;
    let response = gateway.raw(request.as_bytes()).await;
    assert!(response.starts_with("HTTP/1.1 4"), "{response}");
    gateway.call("demo/echo", "x").reply().await.status(200);
    assert!(!gateway.log().contains("panicked"), "{}", gateway.log());
}

#[tokio::test]
async fn the_gateway_serves_https_and_reads_the_certificate_again() {
    let bridge = Bridge::with_demo(&[]).await;
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tls");
    let tls = json!({"cert": format!("{fixtures}/server.pem"), "key": format!("{fixtures}/server.key")});
    let settings = json!({"tls": tls, "tokens": [token("alice", json!({}))]});
    let gateway = Gateway::start(&bridge, settings).await;
    let ca = reqwest::Certificate::from_pem(&std::fs::read(format!("{fixtures}/ca.pem")).unwrap()).unwrap();
    let client = || reqwest::Client::builder().tls_certs_only([ca.clone()]).tls_info(true).build().unwrap();
    let url = |path: &str| format!("https://localhost:{}{path}", gateway.port);
    let health = client().get(url("/healthz")).reply().await.status(200);
    assert!(health.header("strict-transport-security").starts_with("max-age="));
    let login = client().post(url("/api/v1/login")).header("content-type", "application/json");
    let login = login.body(json!({"token": "token-of-alice"}).to_string()).reply().await.status(200);
    let cookie = login.header("set-cookie");
    assert!(cookie.starts_with("__Host-a2a_token=") && cookie.ends_with("; Secure"), "{cookie}");
    let certificate = async || {
        let response = client().get(url("/healthz")).send().await.ok()?;
        let info = response.extensions().get::<reqwest::tls::TlsInfo>()?;
        info.peer_certificate().map(<[u8]>::to_vec)
    };
    let former = certificate().await;
    assert!(former.is_some());
    // A certificate that cannot be used keeps the former one.
    gateway.reload(|config| config["gateway"]["tls"]["cert"] = "/nonexistent.pem".into());
    wait_until(|| async { gateway.log().contains("keeping its current configuration") }).await;
    client().get(url("/healthz")).reply().await.status(200);
    gateway.reload(|config| {
        config["gateway"]["tls"]["cert"] = format!("{fixtures}/client.pem").into();
        config["gateway"]["tls"]["key"] = format!("{fixtures}/client.key").into();
    });
    wait_until(|| async { gateway.log().contains("configuration of the gateway reloaded") }).await;
    assert_ne!(certificate().await, former, "new connections get the new certificate");
    // No clear text.
    assert!(!gateway.raw(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n").await.contains("200"));
}

#[tokio::test]
async fn a_configuration_that_serves_everyone_without_tokens_is_refused() {
    let server = NatsServer::start().await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("gateway.yaml");
    std::fs::write(&file, json!({"gateway": {"listen": "0.0.0.0:0"}}).to_string()).unwrap();
    let refused = run(command_on(&server.url(), &["gateway", "--config"]).arg(&file), "");
    assert_eq!(refused.code, 78, "{refused:?}");
    assert!(refused.err.contains("loopback"), "{refused:?}");
}

#[tokio::test]
async fn nats_may_be_away_for_a_while() {
    let mut bridge = Bridge::with(launched("demo", &[])).start().await;
    let gateway = Gateway::start(&bridge, json!({})).await;
    bridge.nats.end();
    wait_until(|| async { gateway.get("/readyz").reply().await.status == 503 }).await;
    gateway.get("/healthz").reply().await.status(200);
    gateway.call("demo/echo", "x").reply().await.error(503, "agent_unavailable");
    bridge.nats.restart().await;
    wait_until(|| async { gateway.call("demo/echo", "x").reply().await.status == 200 }).await;
    gateway.get("/readyz").reply().await.status(200);
}

#[tokio::test]
async fn a_second_signal_skips_the_grace_period() {
    let (bridge, gateway) = gateway_with(json!({})).await;
    drop(gateway);
    let nats = json!({"url": bridge.nats.url(), "subject_prefix": bridge.prefix});
    let config = json!({"nats": nats, "gateway": {}, "shutdown_grace": "600s"});
    let mut gateway = Gateway::start_with(config).await;
    let mut stream = gateway.call("demo/slow", "600").events().await;
    assert_eq!(stream.next().await.unwrap().event, "status");
    gateway.signal(Signal::SIGTERM);
    wait_until(|| async { gateway.log().contains("Send it again") }).await;
    let ended =
        tokio::time::timeout(Duration::from_secs(10), gateway.stop()).await.expect("it stops at once");
    assert!(ended.success());
}

#[tokio::test]
async fn the_shipped_permissions_of_a_gateway_suffice() {
    let mut conf = repository_file("deploy/nats-permissions.conf");
    for name in ["BRIDGE", "OPERATOR", "GATEWAY", "ALICE", "BOB"] {
        conf = conf.replace(&format!("${name}_PASSWORD"), "secret");
    }
    let conf = conf.replacen("users = [", "users = [\n    { user: test, password: secret }", 1);
    let conf = format!("{conf}\nno_auth_user: test\njetstream {{ store_dir: \"$STORE_DIR\" }}\n");
    let mut bridge = Bridge::with(launched("demo", &[]))
        .nats("user", "bridge")
        .nats("password", "secret")
        .nats("subject_prefix", "a2a")
        .nats("inbox_prefix", "_INBOX.bridge")
        .start_on(NatsServer::start_configured(&conf).await)
        .await;
    let nats = json!({
        "url": bridge.nats.url(), "user": "gateway", "password": "secret", "inbox_prefix": "_INBOX.gateway",
    });
    let gateway = Gateway::start_with(json!({"nats": nats, "gateway": {}, "shutdown_grace": "2s"})).await;
    gateway.call("demo/echo", "x").reply().await.status(200);
    gateway.call("demo/stream", "one two").events().await.all().await;
    gateway.get("agents/demo").reply().await.status(200);
    gateway.get("stats").reply().await.status(200);
    gateway.get("agents/demo/tasks").reply().await.status(200);
    gateway.post("agents/demo/restart", &json!({})).reply().await.status(200);
    let stored = gateway.upload("files", "text/plain", b"abc".to_vec()).reply().await.status(201);
    gateway.get(stored.header("location")).reply().await.status(200);
    bridge.stop().await;
    for log in [gateway.log(), bridge.log()] {
        assert!(!log.contains("ermissions Violation"), "{log}");
    }
}
