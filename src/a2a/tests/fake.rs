//! An agent for tests: one function responds to every request.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::IntoResponse;
use serde_json::{Value, json};
use tokio_util::task::TaskTracker;

use crate::a2a::card::{Card, Interface};
use crate::a2a::choose::{DialectChooser, DialectFallback};
use crate::a2a::client::Client;
use crate::config;
use crate::memory::MemoryAccount;

#[derive(Debug, Clone)]
pub(crate) struct ReceivedRequest {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) query: Option<String>,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl ReceivedRequest {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_default()
    }

    pub(crate) fn rpc_method(&self) -> String {
        self.json()["method"].as_str().unwrap_or_default().to_owned()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

pub(crate) type FakeResponse = (u16, &'static str, String);

/// The agent never responds.
pub(crate) const NO_RESPONSE: FakeResponse = (0, "", String::new());

pub(crate) fn ok(body: &Value) -> FakeResponse {
    (200, "application/json", body.to_string())
}

pub(crate) fn error(code: i64, message: &str) -> FakeResponse {
    ok(&json!({"jsonrpc": "2.0", "id": null, "error": {"code": code, "message": message}}))
}

pub(crate) fn not_found() -> FakeResponse {
    (404, "text/plain", "Not Found".to_owned())
}

/// A running agent; it stops with the runtime of the test.
pub(crate) struct FakeAgent {
    pub(crate) url: String,
    /// The account for its responses.
    pub(crate) memory: Arc<MemoryAccount>,
    received: Arc<Mutex<Vec<ReceivedRequest>>>,
}

impl FakeAgent {
    pub(crate) async fn start(
        respond: impl Fn(&ReceivedRequest) -> FakeResponse + Send + Sync + 'static,
    ) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let received: Arc<Mutex<Vec<ReceivedRequest>>> = Arc::default();
        let (log, respond) = (Arc::clone(&received), Arc::new(respond));
        let handle = move |method: Method, uri: Uri, headers: HeaderMap, body: Bytes| {
            let request = ReceivedRequest {
                method,
                path: uri.path().to_owned(),
                query: uri.query().map(str::to_owned),
                headers,
                text: String::from_utf8_lossy(&body).into_owned(),
            };
            let (status, content_type, body) = respond(&request);
            log.lock().unwrap().push(request);
            async move {
                let Ok(status) = StatusCode::from_u16(status) else {
                    return std::future::pending().await;
                };
                (status, [(header::CONTENT_TYPE, content_type)], body).into_response()
            }
        };
        let router = Router::new().fallback(handle);
        TaskTracker::new().spawn(async move { axum::serve(listener, router).await });
        Self { url, memory: MemoryAccount::unlimited("fake"), received }
    }

    pub(crate) fn received(&self) -> Vec<ReceivedRequest> {
        self.received.lock().unwrap().clone()
    }

    /// How often a JSON-RPC method was called.
    pub(crate) fn count(&self, method: &str) -> usize {
        self.received().iter().filter(|request| request.rpc_method() == method).count()
    }

    /// The configuration of this agent, with these additional lines.
    pub(crate) fn config(&self, lines: &str) -> config::AgentConfig {
        let lines: String = lines.lines().map(|line| format!("    {line}\n")).collect();
        let text = format!("agents:\n  - name: fake\n    url: {}\n{lines}", self.url);
        let parsed = config::parse(&text, "test.yaml", &|_| None);
        parsed.unwrap_or_else(|error| panic!("{error}")).agents.remove(0)
    }

    pub(crate) fn chooser(&self, lines: &str) -> Arc<DialectChooser> {
        let http = crate::a2a::http_client().unwrap();
        let config = self.config(lines);
        let memory = Arc::clone(&self.memory);
        Arc::new(crate::a2a::chooser(&config, &http, &config.secrets(), memory).unwrap())
    }

    /// A client for the dialect that is chosen by this card.
    pub(crate) async fn client(&self, lines: &str, card: &Value) -> (Client, Interface) {
        let chooser = self.chooser(lines);
        let card = Arc::new(Card::from_value(card.clone()).unwrap());
        let interface = chooser.choose(&card).await.unwrap();
        let client = chooser.client(&card, &interface).unwrap();
        let client = client.with_fallback(DialectFallback { chooser, card, changed: Arc::default() });
        (client, interface)
    }
}

/// Speaks v0.3 over JSON-RPC at any path.
pub(crate) fn v03(request: &ReceivedRequest) -> FakeResponse {
    let json = request.json();
    match request.rpc_method().as_str() {
        "message/send" if json["params"]["message"].is_object() => ok(&json!({
            "jsonrpc": "2.0", "id": "foreign",
            "result": {"kind": "task", "id": "t", "contextId": "c", "status": {"state": "completed"},
                       "artifacts": [{"artifactId": "a", "parts": [{"kind": "text", "text": "done in 0.3"}]}]},
        })),
        "message/send" => error(-32602, "message is missing"),
        "tasks/get" => error(-32001, "Task not found"),
        _ => error(-32601, "Method not found"),
    }
}

/// Speaks v0.1 at any path and fails on unknown methods, like an old framework.
pub(crate) fn v01(request: &ReceivedRequest) -> FakeResponse {
    let json = request.json();
    match request.rpc_method().as_str() {
        "tasks/send" => ok(&json!({
            "jsonrpc": "2.0",
            "result": {"id": json["params"]["id"], "sessionId": json["params"]["sessionId"],
                       "status": {"state": "completed"}, "message": {"role": "user"},
                       "artifacts": [{"index": 0, "parts": [{"type": "text", "text": "done in 0.1"}]}]},
        })),
        "tasks/get" => error(-32001, "Task not found"),
        _ => (500, "text/plain", "Internal Server Error".to_owned()),
    }
}

/// Speaks v1.0 over JSON-RPC at any path, and requires the version header.
pub(crate) fn v1(request: &ReceivedRequest) -> FakeResponse {
    if request.header("a2a-version") != Some("1.0") {
        return error(-32009, "version not supported");
    }
    match request.rpc_method().as_str() {
        "SendMessage" => ok(&json!({
            "jsonrpc": "2.0", "id": 1,
            "result": {"task": {"id": "t", "contextId": "c", "status": {"state": "TASK_STATE_COMPLETED"},
                                "artifacts": [{"artifactId": "a", "parts": [{"text": "done in 1.0"}]}]}},
        })),
        "GetTask" => error(-32001, "Task not found"),
        _ => error(-32601, "Method not found"),
    }
}

/// Behaves like Bindu 2026.36.7: v0.3 with all ids from the client, `taskId`, snake_case, and immediate responses.
pub(crate) fn bindu() -> impl Fn(&ReceivedRequest) -> FakeResponse + Send + Sync + 'static {
    let tasks: Mutex<std::collections::BTreeMap<String, Value>> = Mutex::default();
    move |request| {
        let json = request.json();
        let (method, params) = (request.rpc_method(), &json["params"]);
        let mut missing = String::new();
        let mut require = |value: &Value, field: &str| {
            if value.as_str().is_none_or(|id| uuid::Uuid::try_parse(id).is_err()) {
                missing += &format!("{method}.{field}\n  Field required [type=missing]\n");
            }
        };
        require(&json["id"], "id");
        let message = &params["message"];
        match method.as_str() {
            "message/send" | "message/stream" if message.is_object() => {
                require(&message["messageId"], "params.message.messageId");
                require(&message["contextId"], "params.message.contextId");
                require(&message["taskId"], "params.message.taskId");
            }
            "tasks/get" | "tasks/cancel" => require(&params["taskId"], "params.taskId"),
            other => missing += &format!("Input tag '{other}' does not match, or a field is required\n"),
        }
        if !missing.is_empty() {
            let error = json!({"code": -32700, "message": "Failed to parse JSON payload.", "data": missing});
            let body = json!({"jsonrpc": "2.0", "error": error, "id": null});
            return (400, "application/json", body.to_string());
        }
        let mut tasks = tasks.lock().unwrap();
        if message.is_null() {
            let id = params["taskId"].as_str().unwrap();
            let Some(task) = tasks.get_mut(id) else { return error(-32001, "Task not found") };
            if method == "tasks/cancel" {
                task["status"]["state"] = json!("canceled");
            }
            return ok(&json!({"jsonrpc": "2.0", "id": json["id"], "result": task}));
        }
        let (id, context) = (message["taskId"].as_str().unwrap(), &message["contextId"]);
        let text = message["parts"][0]["text"].as_str().unwrap_or_default();
        let agent_message = |text: &str| {
            json!({"role": "agent", "kind": "message", "message_id": uuid::Uuid::new_v4(),
                   "parts": [{"kind": "text", "text": text}]})
        };
        let mut history =
            tasks.get(id).map_or_else(Vec::new, |task| task["history"].as_array().unwrap().clone());
        history.push(json!({"role": "user", "kind": "message", "message_id": message["messageId"],
                            "parts": message["parts"]}));
        let answered = json!({"id": id, "context_id": context, "kind": "task",
                              "status": {"state": "submitted"}, "history": history.clone()});
        let (state, said) = match text.split(' ').next() {
            Some("ask") => ("input-required", "which colour?".to_owned()),
            Some("fail") => ("failed", "Task execution failed: planned failure".to_owned()),
            _ => ("completed", format!("echo: {text}")),
        };
        history.push(agent_message(&said));
        let mut task = json!({"id": id, "context_id": context, "kind": "task",
                              "status": {"state": state}, "history": history});
        let artifact = json!({"artifact_id": uuid::Uuid::new_v4(), "name": "result",
                              "parts": [{"kind": "text", "text": said}]});
        if state == "completed" {
            task["artifacts"] = json!([artifact]);
        }
        tasks.insert(id.to_owned(), task);
        if method == "message/send" {
            return ok(&json!({"jsonrpc": "2.0", "id": json["id"], "result": answered}));
        }
        let status = json!({"kind": "status-update", "task_id": id, "context_id": context,
                            "status": {"state": state}, "final": false});
        let result = json!({"kind": "artifact-update", "task_id": id, "context_id": context,
                            "artifact": artifact, "append": false, "last_chunk": false});
        let events = format!("data: {status}\n\ndata: {result}\n\n");
        (200, "text/event-stream", events)
    }
}
