//! Tasks of the principal.

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::agents::control;
use super::calls::about_task;
use crate::bus::control::{TaskSummary, TasksReply};
use crate::gateway::context::{Context, Params, Query};
use crate::gateway::error::{HttpResult, json_response};
use crate::json::to_bytes;

/// Maximum number of tasks in a list.
pub(in crate::gateway) const MAX_TASKS: usize = 500;
const DEFAULT_TASKS: usize = 100;

/// `GET /agents/{agent}/tasks`.
pub(in crate::gateway) async fn list(
    context: Context,
    Params(agent): Params<String>,
    query: Query,
) -> HttpResult {
    let agent = context.agent(&agent)?;
    let limit = query.number("limit", MAX_TASKS)?.unwrap_or(DEFAULT_TASKS);
    let replies = control(&context, &agent, "tasks", json!({ "limit": limit })).await?;
    let replies = replies.into_iter().filter_map(|reply| serde_json::from_value::<TasksReply>(reply).ok());
    let (mut tasks, mut left_out) = (Vec::<TaskSummary>::new(), 0);
    for reply in replies {
        left_out += reply.left_out;
        tasks.extend(reply.tasks);
    }
    // Several replicas may have seen a task; the newest knows best.
    tasks.sort_by(|a, b| (&a.id, b.updated.0).cmp(&(&b.id, a.updated.0)));
    tasks.dedup_by(|next, first| next.id == first.id);
    tasks.sort_by_key(|task| std::cmp::Reverse(task.updated.0));
    left_out += tasks.len().saturating_sub(limit);
    tasks.truncate(limit);
    let body: Value = json!({ "agent": agent.name, "tasks": tasks, "left_out": left_out });
    Ok(json_response(StatusCode::OK, to_bytes(&body)))
}

/// `GET /agents/{agent}/tasks/{id}`.
pub(in crate::gateway) async fn show(
    context: Context,
    Params((agent, id)): Params<(String, String)>,
) -> HttpResult {
    let agent = context.agent(&agent)?;
    let subject = context.gateway.mesh.subjects.get_task(&agent.token);
    about_task(&context, &agent, subject, &id).await
}

/// `POST /agents/{agent}/tasks/{id}/cancel`.
pub(in crate::gateway) async fn cancel(
    context: Context,
    Params((agent, id)): Params<(String, String)>,
) -> HttpResult {
    let agent = context.agent(&agent)?;
    let subject = context.gateway.mesh.subjects.cancel_task(&agent.token);
    about_task(&context, &agent, subject, &id).await
}
