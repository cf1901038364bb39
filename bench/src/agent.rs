//! A bare A2A v1.0 agent over JSON-RPC. The path selects the answer, so the agent need not read requests.
//!
//! | path | answer to a message |
//! | --- | --- |
//! | `/echo/<any>` | a completed task with one artifact, immediately |
//! | `/stream/<n>` | server-sent events: a task, `n` chunks of an artifact, the completed state |
//! | `/ask/<any>` | a task that requires input |
//! | `/slow/<any>` | a completed task, after `POST /release`; `POST /hold` makes calls wait again |
//!
//! `GET /waiting` returns the number of calls that wait for the release.

use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt as _;
use bytes::Bytes;
use futures_util::stream;
use tokio::net::TcpListener;
use tokio::sync::watch;

struct Agent {
    origin: String,
    tasks: AtomicU64,
    waiting: AtomicUsize,
    released: watch::Sender<bool>,
}

/// Listens on a free port, prints the URL, and serves until killed.
pub async fn run() -> anyhow::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let agent = Arc::new(Agent {
        origin: format!("http://{address}"),
        tasks: AtomicU64::new(0),
        waiting: AtomicUsize::new(0),
        released: watch::Sender::new(false),
    });
    let routes = Router::new()
        .route("/echo/{which}", post(echo))
        .route("/ask/{which}", post(ask))
        .route("/slow/{which}", post(slow))
        .route("/stream/{count}", post(stream_events))
        .route("/hold", post(hold))
        .route("/release", post(release))
        .route("/waiting", get(waiting))
        .route("/{kind}/{which}/.well-known/agent-card.json", get(card))
        .with_state(agent);
    println!("http://{address}");
    std::io::stdout().flush()?;
    let listener = listener.tap_io(|connection| {
        let _ = connection.set_nodelay(true);
    });
    axum::serve(listener, routes).await?;
    Ok(())
}

type SharedAgent = State<Arc<Agent>>;

impl Agent {
    /// A task id and a context id.
    fn next_ids(&self) -> (String, String) {
        let number = self.tasks.fetch_add(1, Relaxed);
        let id = |kind: u32| format!("{kind:08x}-0000-4000-8000-{number:012x}");
        (id(1), id(2))
    }

    fn completed(&self, request: &Bytes) -> Response {
        let (id, context) = self.next_ids();
        let request = request_id(request);
        json(format!(
            r#"{{"jsonrpc":"2.0","id":"{request}","result":{{"task":{{"id":"{id}","contextId":"{context}","status":{{"state":"TASK_STATE_COMPLETED"}},"artifacts":[{{"artifactId":"a1","name":"answer","parts":[{{"text":"Sunny, 21 degrees, and a light wind from the west."}}]}}]}}}}}}"#
        ))
    }
}

/// The id of a JSON-RPC request, which the response repeats. The floor forwards bodies that have none.
fn request_id(request: &[u8]) -> &str {
    const KEY: &str = r#""id":""#;
    let head = request.get(..request.len().min(128)).unwrap_or_default();
    let id = std::str::from_utf8(head).ok().and_then(|head| head.split_once(KEY)?.1.split_once('"'));
    id.map_or("1", |(id, _)| id)
}

async fn echo(State(agent): SharedAgent, request: Bytes) -> Response {
    agent.completed(&request)
}

async fn ask(State(agent): SharedAgent, request: Bytes) -> Response {
    let (id, context) = agent.next_ids();
    let request = request_id(&request);
    json(format!(
        r#"{{"jsonrpc":"2.0","id":"{request}","result":{{"task":{{"id":"{id}","contextId":"{context}","status":{{"state":"TASK_STATE_INPUT_REQUIRED","message":{{"messageId":"m","role":"ROLE_AGENT","parts":[{{"text":"Which colour?"}}]}}}}}}}}}}"#
    ))
}

async fn slow(State(agent): SharedAgent, request: Bytes) -> Response {
    let mut released = agent.released.subscribe();
    agent.waiting.fetch_add(1, Relaxed);
    let _ = released.wait_for(|released| *released).await;
    agent.waiting.fetch_sub(1, Relaxed);
    agent.completed(&request)
}

async fn hold(State(agent): SharedAgent) {
    agent.released.send_replace(false);
}

async fn release(State(agent): SharedAgent) {
    agent.released.send_replace(true);
}

async fn waiting(State(agent): SharedAgent) -> String {
    agent.waiting.load(Relaxed).to_string()
}

async fn stream_events(State(agent): SharedAgent, Path(count): Path<u32>, request: Bytes) -> Response {
    let (id, context) = agent.next_ids();
    let request = request_id(&request).to_owned();
    let event = move |result: String| {
        Bytes::from(format!("data: {{\"jsonrpc\":\"2.0\",\"id\":\"{request}\",\"result\":{result}}}\n\n"))
    };
    let events = (0..count + 2).map(move |number| {
        let event = if number == 0 {
            event(format!(
                r#"{{"task":{{"id":"{id}","contextId":"{context}","status":{{"state":"TASK_STATE_WORKING"}}}}}}"#
            ))
        } else if number <= count {
            let append = number > 1;
            event(format!(
                r#"{{"artifactUpdate":{{"taskId":"{id}","contextId":"{context}","append":{append},"lastChunk":false,"artifact":{{"artifactId":"a1","name":"answer","parts":[{{"text":"token{number} "}}]}}}}}}"#
            ))
        } else {
            event(format!(
                r#"{{"statusUpdate":{{"taskId":"{id}","contextId":"{context}","status":{{"state":"TASK_STATE_COMPLETED"}}}}}}"#
            ))
        };
        Ok::<_, std::convert::Infallible>(event)
    });
    ([(CONTENT_TYPE, "text/event-stream")], Body::from_stream(stream::iter(events))).into_response()
}

async fn card(State(agent): SharedAgent, Path((kind, which)): Path<(String, String)>) -> Response {
    let origin = &agent.origin;
    json(format!(
        r#"{{"name":"bench","description":"Answers immediately","version":"1.0.0","supportedInterfaces":[{{"url":"{origin}/{kind}/{which}","protocolBinding":"JSONRPC","protocolVersion":"1.0"}}],"capabilities":{{"streaming":true}},"defaultInputModes":["text/plain"],"defaultOutputModes":["text/plain"],"skills":[{{"id":"go","name":"Go","description":"Answers","tags":["bench"]}}]}}"#
    ))
}

fn json(body: String) -> Response {
    ([(CONTENT_TYPE, "application/json")], body).into_response()
}
