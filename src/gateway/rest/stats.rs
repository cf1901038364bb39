//! Calls, errors and latency of the agents.

use std::collections::HashMap;
use std::time::Duration;

use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;

use crate::bus::subject::{DiscoveryVerb, Token};
use crate::gateway::context::Context;
use crate::gateway::error::{HttpError, HttpResult, json_response};
use crate::gateway::mesh::NoReply;
use crate::json::to_bytes;

const FIRST_REPLY: Duration = Duration::from_secs(2);
const NEXT_REPLY: Duration = Duration::from_millis(300);

/// The part of a STATS reply that the response has.
#[derive(Deserialize)]
struct ServiceStats {
    name: String,
    #[serde(rename = "id")]
    instance: String,
    started: Option<String>,
    endpoints: Option<Box<RawValue>>,
}

#[derive(Serialize)]
struct AgentStats<'a> {
    agent: &'a str,
    instance: String,
    started: Option<String>,
    endpoints: Option<Box<RawValue>>,
}

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
        let Ok(stats) = serde_json::from_slice::<ServiceStats>(&reply.payload) else { continue };
        if let Some(agent) = names.get(&stats.name) {
            let ServiceStats { instance, started, endpoints, .. } = stats;
            services.push(AgentStats { agent, instance, started, endpoints });
        }
    }
    services.sort_by(|a, b| (a.agent, &a.instance).cmp(&(b.agent, &b.instance)));
    Ok(json_response(StatusCode::OK, to_bytes(&json!({ "services": services }))))
}
