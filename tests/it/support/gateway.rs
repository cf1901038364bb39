//! The gateway as operators run it: a process of its own, and HTTP clients.

use std::fs::File;
use std::process::{Child, Command, ExitStatus, Stdio};

use nix::sys::signal::Signal;
use reqwest::header::{CONTENT_TYPE, HeaderMap};
use reqwest::{Method, RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::bridge::Bridge;
use super::eventually::{eventually, within_deadline};
use super::processes::{self, program};

/// An entry of `gateway.tokens` for a principal whose token is `token-of-<name>`.
pub fn token(name: &str, more: Value) -> Value {
    let digest = Sha256::digest(format!("token-of-{name}"));
    let sha256: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut entry = json!({"name": name, "sha256": sha256});
    if let (Value::Object(entry), Value::Object(more)) = (&mut entry, more) {
        entry.extend(more);
    }
    entry
}

/// A running gateway. Dropping it stops it.
pub struct Gateway {
    child: Child,
    dir: TempDir,
    pub port: u16,
}

impl Gateway {
    /// A gateway for the agents of a bridge, with these settings below `gateway`.
    pub async fn start(bridge: &Bridge, settings: Value) -> Self {
        let nats = json!({"url": bridge.nats.url(), "subject_prefix": bridge.prefix});
        Self::start_with(json!({"nats": nats, "gateway": settings, "shutdown_grace": "2s"})).await
    }

    /// A gateway with this configuration; it listens on a free port.
    pub async fn start_with(mut config: Value) -> Self {
        if config["gateway"]["listen"].is_null() {
            config["gateway"]["listen"] = "127.0.0.1:0".into();
        }
        let is_tls = !config["gateway"]["tls"].is_null();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("gateway.yaml");
        std::fs::write(&file, config.to_string()).unwrap();
        let child = Command::new(program())
            .args(["gateway", "--config"])
            .arg(&file)
            .env("A2A_BRIDGE_LOG", "info,a2a_bridge=debug")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(dir.path().join("gateway.log")).unwrap())
            .spawn()
            .expect("the gateway starts");
        let mut gateway = Self { child, dir, port: 0 };
        gateway.port = eventually(|| async { port_in(&gateway.log()) }).await;
        if !is_tls {
            eventually(|| async {
                let response = gateway.get("/readyz").send().await.ok()?;
                (response.status() == StatusCode::OK).then_some(())
            })
            .await;
        }
        gateway
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("gateway.log")).unwrap_or_default()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Changes the configuration and has the gateway reload it.
    pub fn reload(&self, change: impl Fn(&mut Value)) {
        let file = self.dir.path().join("gateway.yaml");
        let mut config = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        change(&mut config);
        std::fs::write(&file, config.to_string()).unwrap();
        self.signal(Signal::SIGHUP);
    }

    pub fn signal(&self, signal: Signal) {
        processes::signal(i32::try_from(self.child.id()).unwrap(), signal);
    }

    pub async fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        let child = std::cell::RefCell::new(&mut self.child);
        eventually(|| async { child.borrow_mut().try_wait().unwrap() }).await
    }

    pub fn url(&self, path: &str) -> String {
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/api/v1/{path}") };
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    fn request(&self, method: Method, path: &str) -> RequestBuilder {
        reqwest::Client::new().request(method, self.url(path))
    }

    /// A GET request; a path without a slash is below `/api/v1/`.
    pub fn get(&self, path: &str) -> RequestBuilder {
        self.request(Method::GET, path)
    }

    /// A POST request with a JSON body.
    pub fn post(&self, path: &str, body: &Value) -> RequestBuilder {
        self.request(Method::POST, path).header(CONTENT_TYPE, "application/json").body(body.to_string())
    }

    /// A POST request with bytes.
    pub fn upload(&self, path: &str, content_type: &str, body: Vec<u8>) -> RequestBuilder {
        self.request(Method::POST, path).header(CONTENT_TYPE, content_type).body(body)
    }

    /// A call of a skill, as in `demo/echo`, with a prompt.
    pub fn call(&self, skill: &str, prompt: &str) -> RequestBuilder {
        let (agent, skill) = skill.split_once('/').unwrap();
        self.post(&format!("agents/{agent}/skills/{skill}"), &json!({ "prompt": prompt }))
    }

    /// Sends bytes on a connection of their own, and returns all that comes back until the gateway closes it.
    pub async fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        let mut text = Vec::new();
        let _ = within_deadline(stream.read_to_end(&mut text)).await;
        String::from_utf8_lossy(&text).into_owned()
    }
}

fn port_in(log: &str) -> Option<u16> {
    let address = log.split("serving the gateway at http").nth(1)?.split('/').nth(2)?;
    address.rsplit(':').next()?.parse().ok()
}

impl Drop for Gateway {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            self.signal(Signal::SIGTERM);
        }
        let status = self.child.wait().unwrap();
        if std::thread::panicking() {
            println!("--- the gateway's log\n{}---", self.log());
        } else {
            assert!(status.success(), "the gateway ended with {status}");
        }
    }
}

/// A response with its body.
#[derive(Debug)]
pub struct HttpReply {
    pub status: u16,
    pub headers: HeaderMap,
    pub bytes: Vec<u8>,
    pub json: Value,
}

impl HttpReply {
    pub async fn of(request: RequestBuilder) -> Self {
        let response = within_deadline(request.send()).await.expect("the gateway responds");
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let bytes = within_deadline(response.bytes()).await.expect("the body is complete").to_vec();
        let json = serde_json::from_slice(&bytes).unwrap_or_default();
        Self { status, headers, bytes, json }
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// Asserts the HTTP status.
    #[track_caller]
    pub fn status(self, expected: u16) -> Self {
        assert_eq!(self.status, expected, "{} {:?}", String::from_utf8_lossy(&self.bytes), self.headers);
        self
    }

    /// Asserts that it is an error object with this status and code.
    #[track_caller]
    pub fn error(self, status: u16, code: &str) -> Self {
        let this = self.status(status);
        assert_eq!(this.json["error_info"]["code"], code, "{}", this.json);
        assert_eq!((&this.json["success"], &this.json["status"]), (&json!(false), &json!("ERROR")));
        assert!(this.json["files"].is_array() && this.json["data"].is_object(), "{}", this.json);
        assert_eq!(this.header("content-type"), "application/json");
        if matches!(status, 429 | 503) {
            assert!(!this.header("retry-after").is_empty(), "{:?}", this.headers);
        }
        this
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// Sends requests and reads the response.
pub trait Fetch {
    fn reply(self) -> impl Future<Output = HttpReply>;
    /// The request in the name of a principal.
    fn by(self, name: &str) -> Self;
    /// The events of the response.
    fn events(self) -> impl Future<Output = Events>;
}

impl Fetch for RequestBuilder {
    async fn reply(self) -> HttpReply {
        HttpReply::of(self).await
    }

    fn by(self, name: &str) -> Self {
        self.header("authorization", format!("Bearer token-of-{name}"))
    }

    async fn events(self) -> Events {
        let request = self.header("accept", "text/event-stream");
        let response = within_deadline(request.send()).await.expect("the gateway responds");
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Events { response, text: String::new() }
    }
}

/// One server-sent event.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SseEvent {
    pub id: Option<u64>,
    pub event: String,
    pub data: Value,
    /// The lines as they were sent.
    pub text: String,
}

/// The events of a response, as they arrive.
pub struct Events {
    response: Response,
    text: String,
}

impl Events {
    /// The next event or comment; `None` at the end.
    pub async fn next(&mut self) -> Option<SseEvent> {
        while !self.text.contains("\n\n") {
            let chunk = within_deadline(self.response.chunk()).await.expect("the stream ends cleanly")?;
            self.text.push_str(std::str::from_utf8(&chunk).unwrap());
        }
        let (text, rest) = self.text.split_once("\n\n").unwrap();
        let (text, rest) = (text.to_owned(), rest.to_owned());
        self.text = rest;
        let mut event = SseEvent::default();
        for line in text.lines() {
            match line.split_once(": ") {
                Some(("id", id)) => event.id = id.parse().ok(),
                Some(("event", name)) => name.clone_into(&mut event.event),
                Some(("data", data)) => event.data = serde_json::from_str(data).unwrap(),
                _ => {}
            }
        }
        event.text = text;
        Some(event)
    }

    /// All events until the end, without comments.
    pub async fn all(mut self) -> Vec<SseEvent> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            if !event.event.is_empty() {
                events.push(event);
            }
        }
        events
    }
}
