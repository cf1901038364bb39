//! Calls, errors and latency of the agents.

use std::collections::HashMap;
use std::time::Duration;

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::bus::subject::{DiscoveryVerb, Token};
use crate::gateway::context::Context;
use crate::gateway::error::{HttpError, HttpResult, json_response};
use crate::gateway::mesh::NoReply;
use crate::json::to_bytes;

const FIRST_REPLY: Duration = Duration::from_secs(2);
const NEXT_REPLY: Duration = Duration::from_millis(300);

/// `GET /stats`.
pub(in crate::gateway) async fn stats(context: Context) -> HttpResult {
    let Context { gateway, principal } = &context;
    let agents = gateway.directory.list(|agent| principal.may_use(agent)).await;
    let names: HashMap<_, _> =
        agents.iter().map(|agent| (Token::new(&agent.agent).to_string(), agent.agent.as_str())).collect();
    let ask = async {
        let replies = gateway.mesh.discover(DiscoveryVerb::Stats, None).await?;
        // Other programs may answer, too, and the agent protocol has services of its own.
        replies.collect(usize::MAX, FIRST_REPLY, NEXT_REPLY).await
    };
    let replies = match ask.await {
        Ok(replies) => replies,
        Err(NoReply::NoResponders | NoReply::Timeout(_)) => Vec::new(),
        Err(reason) => return Err(HttpError::no_reply(&reason)),
    };
    let mut services = Vec::new();
    for reply in &replies {
        let Ok(stats) = serde_json::from_slice::<Value>(&reply.payload) else { continue };
        let name = stats["name"].as_str().unwrap_or_default();
        let Some(agent) = names.get(name) else { continue };
        services.push(json!({
            "agent": agent, "instance": stats["id"], "started": stats["started"], "endpoints": stats["endpoints"],
        }));
    }
    services.sort_by(|a, b| {
        let key = |value: &Value| (value["agent"].to_string(), value["instance"].to_string());
        key(a).cmp(&key(b))
    });
    Ok(json_response(StatusCode::OK, to_bytes(&json!({ "services": services }))))
}
