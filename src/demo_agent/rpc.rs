//! JSON-RPC: from the body of a request to the method, and from its outcome to the response.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, stream};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::time::timeout;

use super::behaviour::{self, Job};
use super::mischief;
use super::model::{Event, Message, Part, State, new_id};
use super::server::Agent;
use super::skills::Skill;
use super::store::{Entry, View};
use super::wire::{Protocol, Query, Send, read};

/// As often as the public SDKs do it.
const PING_EVERY: Duration = Duration::from_secs(15);

/// What is asked for, whatever a version calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Send,
    Stream,
    Get,
    Cancel,
    Subscribe,
    List,
    ExtendedCard,
    Push,
}

/// Why a request is refused; the wires know the codes.
#[derive(Debug)]
pub(super) enum Fault {
    Parse(String),
    BadRequest(&'static str),
    NoSuchMethod,
    BadParams(String),
    NoSuchTask,
    NotCancelable(State),
    NoPush,
    /// A message to, or a subscription of, a task that is over.
    Finished {
        id: String,
        state: State,
    },
    Unsupported(&'static str),
    Version(String),
    /// The `rpc-error` skill.
    Planned(i64),
}

#[derive(Deserialize)]
struct Request<'a> {
    id: Option<Value>,
    method: String,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
}

/// Answers one request.
pub(super) async fn answer(agent: &Arc<Agent>, headers: &HeaderMap, body: &[u8]) -> Response {
    let (id, outcome) = match parse(body) {
        Ok(request) => {
            let params = request.params.map_or("{}", RawValue::get);
            let call = Call { agent, headers, id: request.id.as_ref(), params };
            (request.id.clone(), call.dispatch(&request.method).await)
        }
        Err(fault) => (None, Err(fault)),
    };
    outcome.unwrap_or_else(|fault| json(agent.args.protocol.response(id.as_ref(), Err(&fault))))
}

fn parse(body: &[u8]) -> Result<Request<'_>, Fault> {
    let json: &RawValue = serde_json::from_slice(body).map_err(|error| Fault::Parse(error.to_string()))?;
    if json.get().starts_with('[') {
        return Err(Fault::BadRequest("Batch requests are not supported"));
    }
    let request: Request<'_> =
        serde_json::from_str(json.get()).map_err(|_| Fault::BadRequest("not a JSON-RPC request"))?;
    match request.id {
        Some(Value::Array(_) | Value::Object(_) | Value::Bool(_)) => {
            Err(Fault::BadRequest("id must be a string or a number"))
        }
        _ => Ok(request),
    }
}

/// One request under way.
struct Call<'a> {
    agent: &'a Arc<Agent>,
    headers: &'a HeaderMap,
    id: Option<&'a Value>,
    params: &'a str,
}

impl Call<'_> {
    async fn dispatch(&self, method: &str) -> Result<Response, Fault> {
        let (protocol, store) = (self.agent.args.protocol, &self.agent.store);
        let method = protocol.method(method).ok_or(Fault::NoSuchMethod)?;
        self.agent.check_version(self.headers)?;
        if let Method::Send | Method::Stream = method {
            return self.send(protocol.send(self.params)?, method == Method::Stream).await;
        }
        let query: Query = read(self.params)?;
        let entry = || match query.id.as_deref() {
            Some(id) => store.get(id),
            None => Err(Fault::BadParams("id: required".into())),
        };
        let result = match method {
            Method::Get => protocol.task(&entry()?.task().with_history(query.history_length)),
            Method::Cancel => protocol.task(&entry()?.cancel()?),
            Method::List => protocol.list(&store.list(query.context_id.as_deref())),
            Method::Subscribe => {
                let entry = entry()?;
                let view = entry.follow()?;
                // The public SDK of 0.3 sends only what is new.
                return Ok(self.stream(entry, view, protocol == Protocol::V1));
            }
            Method::ExtendedCard => return Err(Fault::Unsupported("there is no extended card")),
            Method::Push => return Err(Fault::NoPush),
            Method::Send | Method::Stream => unreachable!("handled above"),
        };
        Ok(self.result(result))
    }

    async fn send(&self, send: Send, streaming: bool) -> Result<Response, Fault> {
        let Send { message, accepted_output_modes, blocking, history_length } = send;
        let (store, protocol) = (&self.agent.store, self.agent.args.protocol);
        self.agent.messages.fetch_add(1, Ordering::Relaxed);
        let references = message.reference_task_ids.iter();
        let referenced: Vec<_> = references.filter_map(|id| store.get(id).ok()).collect();

        let is_new = message.task_id.is_none();
        let (entry, view, turn, argument) = if let Some(id) = &message.task_id {
            let entry = store.get(id)?;
            if message.context_id.as_ref().is_some_and(|context| *context != entry.context_id) {
                return Err(Fault::BadParams("message.contextId: not that of the task".into()));
            }
            let argument = message.text();
            let (view, turn) = entry.resume(message)?;
            (entry, view, turn, argument)
        } else {
            let (skill, argument) = Skill::chosen_by(&message);
            let refined = referenced.first().map(|entry| entry.skill);
            let skill = skill.or(refined).unwrap_or(Skill::Echo);
            if let Some(response) = mischief::answer(skill, &argument, streaming).await? {
                return Ok(response);
            }
            let context_id = message.context_id.clone().unwrap_or_else(new_id);
            if skill == Skill::Message {
                return Ok(self.direct(&context_id, &argument, streaming));
            }
            let (view, turn) = store.open(skill, context_id, message);
            (turn.entry.clone(), view, Some(turn), argument)
        };
        if let Some(turn) = turn {
            let headers = self.headers.clone();
            let delays = self.agent.args.delays();
            let job = Job { turn, argument, referenced, headers, accepted_output_modes, delays };
            self.agent.tasks.spawn(behaviour::run(job));
        }

        if streaming {
            return Ok(self.stream(entry, view, is_new));
        }
        let task = if blocking && !self.agent.args.ignore_blocking {
            view.run.outcome().await.unwrap_or(view.task)
        } else {
            view.task
        };
        Ok(self.result(protocol.task_answer(&task.with_history(history_length))))
    }

    fn direct(&self, context_id: &str, argument: &str, streaming: bool) -> Response {
        let text = if argument.is_empty() { "direct reply" } else { argument };
        let message = Message::from_agent(context_id, None, vec![Part::text(text)]);
        let answer = self.agent.args.protocol.message_answer(&message);
        let answer = self.agent.args.protocol.response(self.id, Ok(answer));
        if streaming { sse(stream::iter([Ok(format!("data: {answer}\n\n"))])) } else { json(answer) }
    }

    fn result(&self, result: Box<RawValue>) -> Response {
        json(self.agent.args.protocol.response(self.id, Ok(result)))
    }

    /// The events from `view` on, as server-sent events; `snapshot` says whether the task as it
    /// is comes first.
    fn stream(&self, entry: Arc<Entry>, view: View, snapshot: bool) -> Response {
        let (id, protocol) = (self.id.cloned(), self.agent.args.protocol);
        let cut = entry.skill == Skill::Cut;
        let first = snapshot.then_some(view.task);
        let events = stream::unfold((first, view.at), move |(first, at)| {
            let (id, entry, run) = (id.clone(), entry.clone(), view.run.clone());
            async move {
                let line = |result| format!("data: {}\n\n", protocol.response(id.as_ref(), Ok(result)));
                if let Some(task) = first {
                    return Some((Ok(line(protocol.task_answer(&task))), (None, at)));
                }
                match timeout(PING_EVERY, run.event(at)).await {
                    Err(_) => Some((Ok(": ping\n\n".to_owned()), (None, at))),
                    Ok(Some(Event::Artifact(..))) if cut => {
                        Some((Err(io::Error::other("planned cut")), (None, at)))
                    }
                    Ok(Some(event)) => {
                        let event = protocol.event(&entry.id, &entry.context_id, &event);
                        Some((Ok(line(event)), (None, at + 1)))
                    }
                    Ok(None) => None,
                }
            }
        });
        sse(events)
    }
}

fn json(body: String) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn sse(events: impl Stream<Item = io::Result<String>> + std::marker::Send + 'static) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-store"),
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(events)).into_response()
}
