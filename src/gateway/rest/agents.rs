//! Agents: the list, one agent, its output, and commands of operators.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode};
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::calls::error_status;
use crate::bus::control::LogsReply;
use crate::config::GatewayRole;
use crate::gateway::context::{AgentRef, Context, Params, Query};
use crate::gateway::directory::AgentDetails;
use crate::gateway::error::{HttpError, HttpResult, json_response};
use crate::gateway::etag;
use crate::gateway::mesh::{MeshRequest, NoReply, Replies};
use crate::json::to_bytes;

/// How long a bridge may take to answer what it knows itself.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// How long to wait for more bridges.
const NEXT_REPLY: Duration = Duration::from_millis(300);
/// How long a bridge may take to start or stop an agent: up to the agent's `stop_grace`, and ten seconds.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(120);
const COMMAND_NEXT: Duration = Duration::from_secs(15);
/// Lines of output in a response.
pub(in crate::gateway) const MAX_LINES: usize = 1000;
const DEFAULT_LINES: usize = 100;

/// `GET /agents`.
pub(in crate::gateway) async fn list(context: Context, headers: HeaderMap) -> HttpResult {
    let agents = context.gateway.directory.list(|agent| context.principal.may_use(agent)).await;
    Ok(etag::json(&headers, to_bytes(&json!({ "agents": agents }))))
}

#[derive(Serialize)]
struct ShownAgent {
    #[serde(flatten)]
    details: AgentDetails,
    card: Option<Box<RawValue>>,
    /// For operators.
    #[serde(skip_serializing_if = "Option::is_none")]
    reports: Option<Vec<Value>>,
}

/// `GET /agents/{agent}`.
pub(in crate::gateway) async fn show(
    context: Context,
    Params(agent): Params<String>,
    headers: HeaderMap,
) -> HttpResult {
    let agent = context.agent(&agent)?;
    let Some(details) = context.gateway.directory.details(&agent.name).await else {
        return Err(context.absent(&agent, None).await);
    };
    let (card, reports) = tokio::join!(card(&context, &agent), reports(&context, &agent));
    Ok(etag::json(&headers, to_bytes(&ShownAgent { details, card, reports })))
}

/// The card, unless the agent has none yet.
async fn card(context: &Context, agent: &AgentRef) -> Option<Box<RawValue>> {
    let Context { gateway, principal } = context;
    let request = MeshRequest::new(gateway.mesh.subjects.card(&agent.token), "".into());
    let reply = gateway.mesh.request(principal, request, REPLY_TIMEOUT).await.ok()?;
    if error_status(&reply).is_some() {
        return None;
    }
    serde_json::from_slice(&reply.payload).ok()
}

/// What each bridge reports about the agent, for operators.
async fn reports(context: &Context, agent: &AgentRef) -> Option<Vec<Value>> {
    if context.principal.role != GatewayRole::Operator {
        return None;
    }
    control(context, agent, "show", json!({})).await.ok()
}

async fn ask(context: &Context, agent: &AgentRef, verb: &str, body: &Value) -> Result<Replies, NoReply> {
    let Context { gateway, principal } = context;
    let subject = gateway.mesh.subjects.control(&agent.token, verb);
    gateway.mesh.request_many(principal, MeshRequest::new(subject, to_bytes(body))).await
}

async fn failed(context: &Context, agent: &AgentRef, reason: &NoReply) -> HttpError {
    match reason {
        NoReply::NoResponders => context.absent(agent, None).await,
        other => HttpError::no_reply(other),
    }
}

/// The replies of all bridges that serve an agent. Fails if all of them do.
pub(super) async fn control(
    context: &Context,
    agent: &AgentRef,
    verb: &str,
    body: Value,
) -> HttpResult<Vec<Value>> {
    control_within(context, agent, verb, &body, (REPLY_TIMEOUT, NEXT_REPLY)).await
}

async fn control_within(
    context: &Context,
    agent: &AgentRef,
    verb: &str,
    body: &Value,
    (first, next): (Duration, Duration),
) -> HttpResult<Vec<Value>> {
    let expected = context.gateway.directory.instances(&agent.name);
    let collected = async { ask(context, agent, verb, body).await?.collect(expected, first, next).await };
    let replies = match collected.await {
        Ok(replies) => replies,
        Err(reason) => return Err(failed(context, agent, &reason).await),
    };
    let (mut values, mut error) = (Vec::new(), None);
    for reply in replies {
        let value: Value = serde_json::from_slice(&reply.payload).unwrap_or_default();
        match error_status(&reply) {
            Some(status) => error = Some((status, value)),
            None => values.push(value),
        }
    }
    match error {
        Some((status, value)) if values.is_empty() => {
            let message = value.get("message").and_then(Value::as_str);
            let message = message.unwrap_or("the bridge refuses this request");
            Err(HttpError::invalid(message).with_status(status))
        }
        _ => Ok(values),
    }
}

async fn command(context: &Context, agent: &str, verb: &str) -> HttpResult {
    let agent = context.agent(agent)?;
    tracing::info!(
        agent = %agent.name, command = verb, principal = context.principal.name.text, "received a command over HTTP"
    );
    let times = (COMMAND_TIMEOUT, COMMAND_NEXT);
    let reports = control_within(context, &agent, verb, &json!({}), times).await?;
    let body = json!({ "agent": agent.name, "reports": reports });
    Ok(json_response(StatusCode::OK, to_bytes(&body)))
}

/// `POST /agents/{agent}/start`.
pub(in crate::gateway) async fn start(context: Context, Params(agent): Params<String>) -> HttpResult {
    command(&context, &agent, "start").await
}

/// `POST /agents/{agent}/stop`.
pub(in crate::gateway) async fn stop(context: Context, Params(agent): Params<String>) -> HttpResult {
    command(&context, &agent, "stop").await
}

/// `POST /agents/{agent}/restart`.
pub(in crate::gateway) async fn restart(context: Context, Params(agent): Params<String>) -> HttpResult {
    command(&context, &agent, "restart").await
}

/// `GET /agents/{agent}/logs`.
pub(in crate::gateway) async fn logs(
    context: Context,
    Params(agent): Params<String>,
    query: Query,
) -> HttpResult {
    let agent = context.agent(&agent)?;
    let lines = query.number("lines", MAX_LINES)?.unwrap_or(DEFAULT_LINES);
    let expected = context.gateway.directory.instances(&agent.name).max(1);
    let collected = async {
        let mut replies = ask(&context, &agent, "logs", &json!({ "lines": lines })).await?;
        let mut instances = BTreeMap::<String, LogsReply>::new();
        let mut complete = 0;
        let mut reply = Some(replies.first(REPLY_TIMEOUT).await?);
        while let Some(message) = reply {
            if let Ok(mut part) = serde_json::from_slice::<LogsReply>(&message.payload) {
                complete += usize::from(!part.more);
                let known = instances.get_mut(&part.instance);
                match known {
                    Some(known) => {
                        known.lines.append(&mut part.lines);
                        (known.next, known.more) = (part.next, part.more);
                    }
                    None => _ = instances.insert(part.instance.clone(), part),
                }
            }
            if complete >= expected {
                break;
            }
            reply = tokio::time::timeout(NEXT_REPLY, replies.next()).await.ok().flatten();
        }
        Ok(instances)
    };
    let instances = match collected.await {
        Ok(instances) => instances,
        Err(reason) => return Err(failed(&context, &agent, &reason).await),
    };
    let instances: Vec<_> = instances
        .into_values()
        .map(|logs| json!({ "instance": logs.instance, "lines": logs.lines, "next": logs.next }))
        .collect();
    let body = json!({ "agent": agent.name, "instances": instances });
    Ok(json_response(StatusCode::OK, to_bytes(&body)))
}
