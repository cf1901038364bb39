//! Calls of skills, and answers to questions of agents.

use std::sync::Arc;

use async_nats::{HeaderMap as NatsHeaders, HeaderName, Message};
use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{download, large};
use crate::bus::subject::Token;
use crate::gateway::body::Charge;
use crate::gateway::context::{AgentRef, Context, Params};
use crate::gateway::error::{HttpError, HttpResult, json_response};
use crate::gateway::mesh::{MeshRequest, NoReply};
use crate::gateway::sse::{FrameStream, frame_type};
use crate::json::to_bytes;

/// The headers of a request that the gateway passes on. `A2A-Caller` is never one of them.
const PASSED_ON: [(&str, &str); 9] = [
    ("a2a-reply", REPLY),
    ("a2a-timeout", "A2A-Timeout"),
    ("a2a-frames", "A2A-Frames"),
    ("a2a-files", "A2A-Files"),
    ("a2a-on-disconnect", "A2A-On-Disconnect"),
    ("a2a-log", "A2A-Log"),
    ("idempotency-key", "Nats-Msg-Id"),
    ("traceparent", "traceparent"),
    ("tracestate", "tracestate"),
];
/// The headers of a reply that the gateway passes on.
const PASSED_BACK: [&str; 2] = ["A2A-Log", "A2A-Revision"];
const REPLY: &str = "A2A-Reply";
/// Maximum bytes of the value of a header that is passed on.
const MAX_HEADER: usize = 4096;
const EVENT_STREAM: &str = "text/event-stream";

/// `POST /agents/{agent}/skills/{skill}`.
pub(in crate::gateway) async fn call(
    context: Context,
    Params((agent, skill)): Params<(String, String)>,
    headers: HeaderMap,
    body: Body,
) -> HttpResult {
    let agent = context.agent(&agent)?;
    let action = context.gateway.directory.action(&agent.name, &skill);
    let subject = context.gateway.mesh.subjects.action(&agent.token, &action);
    let (body, charge) = context.body(&headers, body).await?;
    let call = Call { context: &context, agent: &agent, action: Some(&action) };
    call.perform(&headers, subject, body, charge).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct AnswerBody {
    response: String,
    files: Option<Box<RawValue>>,
}

#[derive(Serialize)]
struct RequiredInput<'a> {
    follow_up_id: &'a str,
    user_response: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    files: Option<Box<RawValue>>,
}

/// `POST /agents/{agent}/follow-ups/{id}`.
pub(in crate::gateway) async fn answer(
    context: Context,
    Params((agent, id)): Params<(String, String)>,
    headers: HeaderMap,
    body: Body,
) -> HttpResult {
    let agent = context.agent(&agent)?;
    let subject = context.gateway.mesh.subjects.provide_required_input(&agent.token);
    let (body, mut charge) = context.body(&headers, body).await?;
    charge.add(body.len())?;
    // The error never quotes the answer, which may be a secret.
    let AnswerBody { response, files } = serde_json::from_slice(&body).map_err(|_| {
        HttpError::invalid("the body must be `{\"response\": text}`, with `files` if there are any")
    })?;
    let body = to_bytes(&RequiredInput { follow_up_id: &id, user_response: &response, files });
    let call = Call { context: &context, agent: &agent, action: None };
    call.perform(&headers, subject, body, charge).await
}

/// One call of an agent.
struct Call<'a> {
    context: &'a Context,
    agent: &'a AgentRef,
    /// `None` for a built-in action, which exists as long as the agent.
    action: Option<&'a Token>,
}

impl Call<'_> {
    async fn perform(
        self,
        headers: &HeaderMap,
        subject: String,
        body: Bytes,
        mut charge: Charge,
    ) -> HttpResult {
        let body = large::fitting(self.context, body, &mut charge).await?;
        let mut passed_on = call_headers(headers)?;
        let wants_stream = match passed_on.get(REPLY) {
            Some(mode) => mode.as_str().eq_ignore_ascii_case("stream"),
            None => accepts_events(headers),
        };
        if wants_stream {
            passed_on.insert(REPLY, "stream");
        }
        let request = MeshRequest { subject, headers: passed_on, body };
        if wants_stream { self.stream(request).await } else { self.reply(request).await }
    }

    async fn reply(self, request: MeshRequest) -> HttpResult {
        let Context { gateway, principal } = self.context;
        let timeout = gateway.limits().call_timeout;
        match gateway.mesh.call(principal, request, &self.agent.token, timeout).await {
            Ok(reply) => Ok(reply_response(self.context, reply).await),
            Err(reason) => Err(self.failed(&reason).await),
        }
    }

    async fn stream(self, request: MeshRequest) -> HttpResult {
        let Context { gateway, principal } = self.context;
        let place = principal.stream()?;
        let replies = gateway.mesh.request_many(principal, request).await;
        let mut replies = match replies {
            Ok(replies) => replies,
            Err(reason) => return Err(self.failed(&reason).await),
        };
        let first = match replies.first(gateway.limits().call_timeout).await {
            Ok(first) => first,
            Err(reason) => return Err(self.failed(&reason).await),
        };
        // A request that is refused at once has no other frame.
        if let Some(status) = error_status(&first)
            && let Some(reply) = result_of(&first)
        {
            return Ok(json_response(status, reply));
        }
        let (gateway, agent) = (Arc::clone(gateway), self.agent.token.clone());
        Ok(FrameStream { gateway, replies, agent, _place: place }.respond(first))
    }

    async fn failed(&self, reason: &NoReply) -> HttpError {
        match reason {
            NoReply::NoResponders => self.context.absent(self.agent, self.action).await,
            other => HttpError::no_reply(other),
        }
    }
}

/// The response with a reply object. If the bridge has stored the whole reply, because it is too large for a message, it is
/// the whole one.
pub(in crate::gateway) async fn reply_response(context: &Context, reply: Message) -> Response {
    if let Some(status) = error_status(&reply) {
        return json_response(status, reply.payload);
    }
    let mut response = match download::full_reply(context, &reply.payload).await {
        Some(whole) => json_response(StatusCode::OK, whole),
        None => json_response(StatusCode::OK, reply.payload),
    };
    for name in PASSED_BACK {
        let value = reply.headers.as_ref().and_then(|headers| headers.get(name));
        if let Some(value) = value.and_then(|value| HeaderValue::from_str(value.as_str()).ok()) {
            response.headers_mut().insert(name, value);
        }
    }
    response
}

/// The HTTP status of a reply that is an error.
pub(in crate::gateway) fn error_status(reply: &Message) -> Option<StatusCode> {
    let number = reply.headers.as_ref()?.get("Nats-Service-Error-Code")?;
    let number = number.as_str().parse().ok().filter(|number| (400..600).contains(number));
    Some(number.and_then(|number| StatusCode::from_u16(number).ok()).unwrap_or(StatusCode::BAD_GATEWAY))
}

/// The reply object of the last frame.
fn result_of(frame: &Message) -> Option<Bytes> {
    let is_result = frame_type(&frame.payload) == "result";
    let data = frame.payload.strip_prefix(br#"{"type":"result","data":"#.as_slice())?.strip_suffix(b"}")?;
    is_result.then(|| frame.payload.slice_ref(data))
}

/// The NATS headers of a call. Values come from HTTP, so they have no line breaks.
fn call_headers(headers: &HeaderMap) -> HttpResult<NatsHeaders> {
    let mut passed_on = NatsHeaders::new();
    passed_on.insert(HeaderName::from_static("Content-Type"), "application/json");
    for (from, to) in PASSED_ON {
        let Some(value) = headers.get(from) else { continue };
        let value = value.to_str().ok().filter(|value| value.len() <= MAX_HEADER);
        let value = value.and_then(|value| value.parse::<async_nats::HeaderValue>().ok());
        let invalid =
            || HttpError::invalid(format!("header `{from}` is too long, or has characters other than ASCII"));
        passed_on.insert(HeaderName::from_static(to), value.ok_or_else(invalid)?);
    }
    Ok(passed_on)
}

/// Whether a client accepts events and prefers them to JSON.
pub(in crate::gateway) fn accepts_events(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let mut quality = [0.0; 2];
    for range in values.flat_map(|value| value.split(',')).take(64) {
        let mut parts = range.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default();
        let weight = parts.find_map(|part| part.strip_prefix("q=")?.parse::<f32>().ok()).unwrap_or(1.0);
        for (quality, wanted) in quality.iter_mut().zip([EVENT_STREAM, "application/json"]) {
            if name.eq_ignore_ascii_case(wanted) {
                *quality = weight;
            }
        }
    }
    quality[0] > 0.0 && quality[0] >= quality[1]
}

/// A request for a built-in action, about one task.
pub(in crate::gateway) async fn about_task(
    context: &Context,
    agent: &AgentRef,
    subject: String,
    id: &str,
) -> HttpResult {
    let request = MeshRequest::new(subject, to_bytes(&serde_json::json!({ "task_id": id })));
    let call = Call { context, agent, action: None };
    call.reply(request).await
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("text/event-stream", true)]
    #[case("application/json", false)]
    #[case("*/*", false)]
    #[case("application/json, text/event-stream", true)]
    #[case("application/json, text/event-stream;q=0.5", false)]
    #[case("Text/Event-Stream; q=0.1", true)]
    #[case("text/event-stream;q=0", false)]
    #[case("text/event-stream;q=x", true)]
    fn a_client_asks_for_events(#[case] accept: &str, #[case] wants: bool) {
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT, accept.parse().unwrap());
        assert_eq!(accepts_events(&headers), wants);
    }

    #[test]
    fn only_certain_headers_are_passed_on() {
        let mut headers = HeaderMap::new();
        for name in
            ["a2a-caller", "a2a-timeout", "idempotency-key", "nats-msg-id", "nats-request-info", "a2a-other"]
        {
            headers.insert(name, "1s".parse().unwrap());
        }
        let passed_on = call_headers(&headers).unwrap();
        let mut names: Vec<_> = passed_on.iter().map(|(name, _)| name.to_string()).collect();
        names.sort();
        assert_eq!(names, ["A2A-Timeout", "Content-Type", "Nats-Msg-Id"]);
        headers.insert("a2a-timeout", HeaderValue::from_bytes(b"\xff").unwrap());
        assert!(call_headers(&headers).is_err());
    }
}
