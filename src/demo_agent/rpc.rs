//! The JSON-RPC methods.

use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::{Stream, StreamExt as _, stream};
use serde::Deserialize;
use serde_json::error::Category;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::behaviour::{SkillTurn, number_in};
use super::card;
use super::protocol::{MethodError, ProtocolVersion, RawJson, SendMessageParams, new_id, raw, read_params};
use super::server::DemoAgent;
use super::skills::DemoSkill;
use super::tasks::TaskView;

/// The interval of the public SDKs.
const PING_INTERVAL: Duration = Duration::from_secs(15);
const CRASH_EXIT_CODE: i32 = 3;

#[derive(Deserialize)]
struct RpcRequest<'a> {
    id: Option<Value>,
    method: String,
    #[serde(borrow)]
    params: Option<&'a RawValue>,
}

/// The parameters of every method but the sends; each method uses what it needs.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct QueryParams {
    id: Option<String>,
    context_id: Option<String>,
    history_length: Option<usize>,
}

pub(super) async fn answer(agent: Arc<DemoAgent>, headers: HeaderMap, body: &[u8]) -> Response {
    let version = agent.args.protocol;
    match read_request(body) {
        Ok(RpcRequest { id, method, params }) => {
            let params = params.map_or("{}", RawValue::get);
            let call = RpcCall { agent, version, headers, id: id.clone() };
            let outcome = call.run(&method, params).await;
            outcome.unwrap_or_else(|error| json_response(version.response(id.as_ref(), Err(error))))
        }
        Err(error) => json_response(version.response(None, Err(error))),
    }
}

fn read_request(body: &[u8]) -> Result<RpcRequest<'_>, MethodError> {
    let request: RpcRequest<'_> = serde_json::from_slice(body).map_err(|error| match error.classify() {
        Category::Data => MethodError::new(-32600, "INVALID_REQUEST", "not a JSON-RPC request"),
        Category::Syntax | Category::Eof | Category::Io => MethodError::new(-32700, "", error.to_string()),
    })?;
    match request.id {
        Some(Value::Array(_) | Value::Object(_) | Value::Bool(_)) => {
            Err(MethodError::new(-32600, "INVALID_REQUEST", "id must be a string or a number"))
        }
        _ => Ok(request),
    }
}

struct RpcCall {
    agent: Arc<DemoAgent>,
    version: ProtocolVersion,
    headers: HeaderMap,
    id: Option<Value>,
}

impl RpcCall {
    async fn run(self, method: &str, params: &str) -> Result<Response, MethodError> {
        use ProtocolVersion::{V1, V03};
        let (version, tasks) = (self.version, &self.agent.tasks);
        // An agent of 1.0 refuses other versions; 0.3 has no version header.
        if version == V1 && self.headers.get("a2a-version").is_some_and(|it| it != "1.0") {
            return Err(MethodError::new(-32009, "VERSION_NOT_SUPPORTED", "this agent speaks A2A 1.0 only"));
        }
        match (version, method) {
            (V1, "SendMessage") | (V03, "message/send") => return self.send(params, false).await,
            (V1, "SendStreamingMessage") | (V03, "message/stream") => return self.send(params, true).await,
            _ => {}
        }
        let query: QueryParams = read_params(params)?;
        let entry = || tasks.get(query.id.as_deref().ok_or_else(|| MethodError::bad_params("id: required"))?);
        let result = match (version, method) {
            (V1, "GetTask") | (V03, "tasks/get") => raw(&entry()?.task().with_history(query.history_length)),
            (V1, "CancelTask") | (V03, "tasks/cancel") => raw(&entry()?.cancel()?),
            (V1, "SubscribeToTask") => return Ok(self.stream(entry()?.follow()?, true)),
            // The public SDK of 0.3 sends only the events that follow.
            (V03, "tasks/resubscribe") => return Ok(self.stream(entry()?.follow()?, false)),
            (V1, "ListTasks") => {
                let tasks = tasks.list(query.context_id.as_deref());
                let total = tasks.len();
                raw(&json!({"tasks": tasks, "pageSize": total, "totalSize": total, "nextPageToken": ""}))
            }
            (V1, "GetExtendedAgentCard") | (V03, "agent/getAuthenticatedExtendedCard") => {
                return Err(MethodError::new(-32004, "UNSUPPORTED_OPERATION", "there is no extended card"));
            }
            _ => return Err(MethodError::new(-32601, "", "Method not found")),
        };
        Ok(self.result(result))
    }

    async fn send(self, params: &str, streaming: bool) -> Result<Response, MethodError> {
        let SendMessageParams { message, configuration } = self.version.read_send(params)?;
        let waits = self.version.waits(&configuration) && !self.agent.args.ignore_blocking;
        let tasks = &self.agent.tasks;
        let references = message.reference_task_ids.iter();
        let referenced: Vec<_> = references.filter_map(|id| tasks.get(id).ok()).collect();

        let is_new = message.task_id.is_none();
        let (view, turn, argument) = if let Some(id) = &message.task_id {
            let (entry, argument) = (tasks.get(id)?, message.text());
            let (view, turn) = entry.resume(message)?;
            (view, turn, argument)
        } else {
            let (skill, argument) = DemoSkill::chosen_by(&message);
            let skill = skill.or(referenced.first().map(|entry| entry.skill)).unwrap_or(DemoSkill::Echo);
            let context_id = message.context_id.clone().unwrap_or_else(new_id);
            if let Some(response) = self.answer_without_task(skill, &argument, &context_id, streaming).await?
            {
                return Ok(response);
            }
            let (view, turn) = tasks.open(self.version.new_task(context_id), skill, message);
            (view, Some(turn), argument)
        };
        if let Some(turn) = turn {
            let (agent, headers) = (self.agent.clone(), self.headers.clone());
            let accepted_output_modes = configuration.accepted_output_modes;
            let turn = SkillTurn { agent, turn, argument, referenced, headers, accepted_output_modes };
            self.agent.background.spawn(turn.run());
        }

        if streaming {
            return Ok(self.stream(view, is_new));
        }
        let outcome = if waits { view.log.outcome().await } else { None };
        let task = outcome.unwrap_or(view.task).with_history(configuration.history_length);
        Ok(self.result(self.version.wrap("task", &task)))
    }

    /// The answer of a skill that opens no task; `None` for the others.
    async fn answer_without_task(
        &self,
        skill: DemoSkill,
        argument: &str,
        context_id: &str,
        streaming: bool,
    ) -> Result<Option<Response>, MethodError> {
        Ok(Some(match skill {
            DemoSkill::Hang => pending().await,
            DemoSkill::Crash => super::exit(CRASH_EXIT_CODE),
            DemoSkill::RpcError => {
                let code = number_in(argument).unwrap_or(-32603);
                return Err(MethodError::new(code, "PLANNED_ERROR", "planned error"));
            }
            DemoSkill::Http => {
                let status = number_in(argument).and_then(|code| StatusCode::from_u16(code).ok());
                (status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), "planned status").into_response()
            }
            DemoSkill::Html => card::web_page(),
            DemoSkill::Garbage => json_response(r#"{"weather":"fine"}"#),
            DemoSkill::Message => {
                let text = if argument.is_empty() { "direct reply" } else { argument };
                let message = self.version.agent_message(context_id, vec![self.version.text(text)]);
                let answer = self.version.wrap("message", &message);
                if streaming { self.sse(stream::iter([answer])) } else { self.result(answer) }
            }
            _ => return Ok(None),
        }))
    }

    /// The events that follow `view`, after the task itself if `with_task`.
    fn stream(&self, view: TaskView, with_task: bool) -> Response {
        let task = with_task.then(|| self.version.wrap("task", &view.task));
        let events = stream::unfold((view.log, view.next), |(log, next)| async move {
            let event = log.event(next).await?;
            Some((event, (log, next + 1)))
        });
        self.sse(stream::iter(task).chain(events))
    }

    fn sse(&self, results: impl Stream<Item = RawJson> + Send + 'static) -> Response {
        let (version, id) = (self.version, self.id.clone());
        let events = results.map(move |result| version.response(id.as_ref(), Ok(result)));
        let events = events.map(|event| Ok::<_, Infallible>(SseEvent::default().data(event)));
        let keep_alive = KeepAlive::new().interval(PING_INTERVAL).text("ping");
        let headers = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")];
        (headers, Sse::new(events).keep_alive(keep_alive)).into_response()
    }

    fn result(&self, result: RawJson) -> Response {
        json_response(self.version.response(self.id.as_ref(), Ok(result)))
    }
}

pub(super) fn json_response(body: impl Into<String>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body.into()).into_response()
}
