//! Calls without side effects that show which wire an agent speaks.

use std::time::Duration;

use crate::a2a::client::{Client, ClientError, code};
use crate::a2a::dialect::Dialect;
use crate::a2a::retry::Retry;
use crate::telemetry::trace_context::TraceContext;

/// How long one probe may take.
const LIMIT: Duration = Duration::from_secs(4);

/// What a probe says about a wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The agent answered in this wire.
    Yes,
    /// The agent answered, and may speak it.
    Perhaps,
    /// The agent answered, and wants the client to make all ids.
    WantsIds,
    /// The agent does not speak it.
    No,
    /// Nothing of the kind is at this address.
    WrongAddress,
    NoAnswer,
}

/// Asks for a task that nobody has made. Nearly all agents answer that there is none.
pub(super) async fn look_at_no_task(client: &Client) -> Verdict {
    let nobodys = uuid::Uuid::new_v4().to_string();
    let trace = TraceContext::default();
    let looked = client.get_once(&nobodys, &trace);
    match tokio::time::timeout(LIMIT, looked).await {
        Err(_) => Verdict::NoAnswer,
        // One SDK makes a task of anything.
        Ok(Ok(_)) => Verdict::Yes,
        Ok(Err(error)) => judge(&error, client.dialect()),
    }
}

fn judge(error: &ClientError, dialect: Dialect) -> Verdict {
    if error.is_task_not_found() {
        return Verdict::Yes;
    }
    if Retry::on_another_wire(error, Some(dialect)) == Some(Retry::MissingIds) {
        return Verdict::WantsIds;
    }
    match error {
        ClientError::Unreachable(_) | ClientError::Broken(_) | ClientError::Token(_) => Verdict::NoAnswer,
        ClientError::NotA2a { .. } | ClientError::Compressed { .. } | ClientError::TooLarge { .. } => {
            Verdict::No
        }
        ClientError::Refused { http_status, code, .. } => match (http_status, code) {
            (Some(401 | 403 | 429 | 503), _) => Verdict::Perhaps,
            (_, Some(code::METHOD_NOT_FOUND | code::VERSION_NOT_SUPPORTED)) => Verdict::No,
            // v0.2 in Python says this of methods that it does not know.
            (_, Some(-32600 | -32700)) => Verdict::No,
            (_, Some(_)) if !dialect.is_rest() => Verdict::Perhaps,
            (Some(300..=399 | 404 | 405 | 501), _) => Verdict::WrongAddress,
            (Some(400..=499), _) if dialect.is_rest() => Verdict::Perhaps,
            _ => Verdict::No,
        },
    }
}

/// Whether the agent knows `message/send`, which v0.1 does not: asked without a message, the others
/// miss it and do nothing. `None` if the answer does not tell.
pub(super) async fn knows_message_send(client: &Client) -> Option<bool> {
    let trace = TraceContext::default();
    let sent = client.call_once(Dialect::empty_send(), &trace);
    match tokio::time::timeout(LIMIT, sent).await.ok()? {
        Ok(_) => Some(true),
        Err(ClientError::Refused { http_status, code, .. }) => match (http_status, code) {
            (_, Some(code::METHOD_NOT_FOUND)) => Some(false),
            (_, Some(_)) => Some(true),
            // A framework that fails on an unknown method rather than say so.
            (Some(400 | 404 | 405 | 422 | 500 | 501), None) => Some(false),
            _ => None,
        },
        Err(_) => None,
    }
}
