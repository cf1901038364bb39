//! The hostile agent: one HTTP server, with an agent at each path. The prompt of a call selects the answer.

use std::borrow::Cow;
use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::sync::watch;

use super::arena::lower_priority;
use super::shapes::{Shape, UNANSWERED_TASK, shape};
use crate::support::peer::{card, streaming_card};

/// The agents whose card an attack replaces: more than the bridge has threads here, so that none is left for the victim
/// if a card keeps a thread busy.
pub(super) const CARDED: [&str; 4] = ["carded1", "carded2", "carded3", "carded4"];

/// Agents that attack together.
pub(super) const CROWD: [&str; 12] = [
    "crowd1", "crowd2", "crowd3", "crowd4", "crowd5", "crowd6", "crowd7", "crowd8", "crowd9", "crowd10",
    "crowd11", "crowd12",
];

pub(super) struct Hostile {
    port: u16,
    shapes: Mutex<HashMap<String, Arc<OnceLock<Shape>>>>,
    /// The card of all [`CARDED`]; `@N@` in it is the number of the read, so that every read sees another card.
    card: Mutex<Bytes>,
    reads: AtomicU64,
    /// Counts the attacks: calls hang until the next one.
    attack: watch::Sender<u64>,
}

impl Hostile {
    /// Serves on a runtime of its own, so that its work does not delay the callers.
    pub(super) fn start() -> Arc<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let hostile = Arc::new(Self {
            port: listener.local_addr().unwrap().port(),
            shapes: Mutex::default(),
            card: Mutex::new(card(&["ask"]).to_string().into()),
            reads: AtomicU64::new(0),
            attack: watch::Sender::new(0),
        });
        let routes = Router::new()
            .route("/{agent}", post(answer))
            .route("/{agent}/", post(answer))
            .route("/{agent}/.well-known/agent-card.json", get(serve_card))
            .layer(DefaultBodyLimit::disable())
            .with_state(Arc::clone(&hostile));
        std::thread::spawn(move || {
            lower_priority();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                axum::serve(listener, routes).await.unwrap();
            });
        });
        hostile
    }

    pub(super) fn url(&self, agent: &str) -> String {
        format!("http://127.0.0.1:{}/{agent}", self.port)
    }

    /// How often the card of any of [`CARDED`] was read.
    pub(super) fn card_reads(&self) -> u64 {
        self.reads.load(Relaxed)
    }

    /// Replaces the card of [`CARDED`].
    pub(super) fn set_card(&self, card: &Value) {
        *self.card.lock().unwrap() = card.to_string().into();
    }

    /// Creates an answer before the attack that uses it.
    pub(super) fn prepare(&self, name: &str) -> Arc<OnceLock<Shape>> {
        let cell = Arc::clone(self.shapes.lock().unwrap().entry(name.to_owned()).or_default());
        cell.get_or_init(|| shape(name));
        cell
    }

    /// Ends the calls that hang, and forgets the answers of the attack.
    pub(super) fn end_attack(&self) {
        self.attack.send_modify(|attack| *attack += 1);
        self.shapes.lock().unwrap().clear();
    }
}

#[derive(Deserialize)]
struct Call<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    method: &'a str,
    params: Params<'a>,
}

#[derive(Deserialize)]
struct Params<'a> {
    /// Of a task.
    #[serde(borrow)]
    id: Option<Cow<'a, str>>,
    #[serde(borrow)]
    message: Option<Message<'a>>,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    parts: Vec<MessagePart<'a>>,
}

#[derive(Deserialize)]
struct MessagePart<'a> {
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
}

impl Call<'_> {
    /// The name of the answer: the prompt, without the number behind it.
    fn prompt(&self) -> Option<&str> {
        let text = self.params.message.as_ref()?.parts.first()?.text.as_deref()?;
        text.split('#').next().filter(|name| !name.is_empty())
    }
}

async fn answer(State(hostile): State<Arc<Hostile>>, body: Bytes) -> Response {
    let Ok(call) = serde_json::from_slice::<Call<'_>>(&body) else {
        return axum::http::StatusCode::BAD_REQUEST.into_response();
    };
    let id = call.id.map_or("null", RawValue::get);
    let head = format!(r#"{{"jsonrpc":"2.0","id":{id},"#);
    if !call.method.starts_with("Send") {
        if call.params.id.as_deref() == Some(UNANSWERED_TASK) {
            return late(&hostile, head).await;
        }
        return json_body([head, r#""error":{"code":-32001,"message":"Task not found"}}"#.into()]);
    }
    // An answer to a question has no prompt.
    let cell = hostile.prepare(call.prompt().unwrap_or("small"));
    // It may be large, and the call may hang.
    drop(body);
    let result = format!(r#"{head}"result":"#);
    match cell.get().unwrap() {
        Shape::Result(text) => json_body([Bytes::from(result), fresh_id(text), "}".into()]),
        Shape::Error(text) => json_body([format!(r#"{head}"error":"#).into(), text.clone(), "}".into()]),
        Shape::Stream(events) => {
            let event = move |text: Bytes| {
                stream::iter([Bytes::from(format!("data: {result}")), text, "}\n\n".into()].map(ok))
            };
            event_stream(stream::iter(events()).flat_map(event))
        }
        Shape::Endless(bytes) => {
            let working = r#"{"task":{"id":"t","contextId":"c","status":{"state":"TASK_STATE_WORKING"}}}"#;
            let first = Bytes::from(format!("data: {result}{working}}}\n\n"));
            let (mut attack, bytes) = (hostile.attack.subscribe(), bytes.clone());
            let until = async move {
                let _ = attack.changed().await;
            };
            let flood = stream::repeat(bytes).take_until(until);
            event_stream(stream::once(async { first }).chain(flood).map(ok))
        }
        Shape::Hang => late(&hostile, head).await,
    }
}

/// Hangs until the end of the attack.
async fn late(hostile: &Hostile, head: String) -> Response {
    let _ = hostile.attack.subscribe().changed().await;
    json_body([format!(r#"{head}"error":{{"code":-32000,"message":"late"}}}}"#)])
}

/// A small task gets an id of its own, as the bridge remembers each.
fn fresh_id(text: &Bytes) -> Bytes {
    if text.len() > 1_000 {
        return text.clone();
    }
    let text = String::from_utf8_lossy(text);
    text.replace("11111111-0000-4000-8000-000000000001", &uuid::Uuid::new_v4().to_string()).into()
}

fn ok(bytes: Bytes) -> Result<Bytes, Infallible> {
    Ok(bytes)
}

fn json_body<const N: usize>(pieces: [impl Into<Bytes>; N]) -> Response {
    let pieces = pieces.map(|piece| ok(piece.into()));
    ([(CONTENT_TYPE, "application/json")], Body::from_stream(stream::iter(pieces))).into_response()
}

fn event_stream(
    events: impl futures_util::Stream<Item = Result<Bytes, Infallible>> + Send + 'static,
) -> Response {
    ([(CONTENT_TYPE, "text/event-stream")], Body::from_stream(events)).into_response()
}

async fn serve_card(State(hostile): State<Arc<Hostile>>, Path(agent): Path<String>) -> Response {
    let text = match agent.as_str() {
        name if CARDED.contains(&name) => {
            let number = hostile.reads.fetch_add(1, Relaxed);
            let card = hostile.card.lock().unwrap().clone();
            String::from_utf8_lossy(&card).replace("@N@", &number.to_string())
        }
        name if name == "streamer" || CROWD.contains(&name) => streaming_card(&["ask"]).to_string(),
        "bigcard" => big_card().to_string(),
        "places" => card_of_places().to_string(),
        _ => card(&["ask"]).to_string(),
    };
    // The URL of a card is relative to its host, not to its path.
    json_body([text.replace(r#""url":"/""#, &format!(r#""url":"/{agent}""#))])
}

/// A card of 0.93 MB, which still fits into one message.
fn big_card() -> Value {
    let mut card = card(&["ask"]);
    card["description"] = "d".repeat(930_000).into();
    card
}

/// A card whose skill has 1,024 places for one value.
fn card_of_places() -> Value {
    let mut card = card(&["ask"]);
    card["skills"][0]["description"] = "{a}".repeat(1_024).into();
    card
}

/// A card with this many opening braces in the description of its skill.
pub(super) fn card_of_braces(count: usize) -> Value {
    let mut card = card(&["ask"]);
    card["version"] = "1.0.@N@".into();
    card["skills"][0]["description"] = "{".repeat(count).into();
    card
}

/// A card with many skills.
pub(super) fn card_of_skills(count: usize) -> Value {
    let names: Vec<_> = (0..count).map(|index| format!("s{index}")).collect();
    let mut card = card(&names.iter().map(String::as_str).collect::<Vec<_>>());
    card["version"] = "1.0.@N@".into();
    card
}
