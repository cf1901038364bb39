//! Requests to the control subjects of an agent. Every bridge that serves the agent answers for its own process.

use std::time::Duration;

use async_nats::{HeaderMap, Message};
use serde::de::DeserializeOwned;

use super::client::{JsonFields as _, NatsClient, NoReply, Replies, parse_json};
use super::discover::discover;
use super::output::eprintln_dim;
use super::progress::Spinner;
use super::{CliError, CliResult, FAILED};
use crate::bus::control::ControlRequest;
use crate::bus::subject::Token;

/// Time limit for the first reply to `show` and `logs`.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// Silence after which the log of a script shows how long the command may still wait.
const NOTICE_DELAY: Duration = Duration::from_secs(4);
/// Time limit for further replies after the first one.
const OTHER_REPLIES: Duration = Duration::from_millis(150);

/// Sends a request and collects the replies of all bridges.
pub(super) async fn request_all<T: DeserializeOwned>(
    mesh: &NatsClient,
    agent: &str,
    verb: &str,
    body: &ControlRequest,
    timeout: Duration,
) -> CliResult<Vec<T>> {
    let mut replies = request(mesh, agent, verb, body).await?;
    let spinner = Spinner::new(format!("waiting for the bridge, up to {} s", timeout.as_secs()));
    let first = if spinner.is_enabled() {
        spinner.until(replies.next_within(timeout)).await
    } else {
        match replies.next_within(NOTICE_DELAY.min(timeout)).await {
            Err(NoReply::Timeout(_)) if timeout > NOTICE_DELAY => {
                eprintln_dim(format_args!("no reply yet; waiting up to {}s", timeout.as_secs()));
                replies.next_within(timeout - NOTICE_DELAY).await
            }
            reply => reply,
        }
    };
    let first = match first {
        Ok(first) => first,
        Err(NoReply::NoResponders) => return Err(unknown_agent_error(mesh, agent).await),
        Err(NoReply::Timeout(_)) => {
            return Err(no_reply_error(mesh, agent, verb, NoReply::Timeout(timeout)));
        }
        Err(reason) => return Err(no_reply_error(mesh, agent, verb, reason)),
    };
    let mut all = vec![parse(&first)?];
    while let Ok(message) = replies.next_within(OTHER_REPLIES).await {
        all.push(parse(&message)?);
    }
    Ok(all)
}

pub(super) async fn request(
    mesh: &NatsClient,
    agent: &str,
    verb: &str,
    body: &ControlRequest,
) -> CliResult<Replies> {
    let subject = mesh.subjects.control(&Token::new(agent), verb);
    let body = serde_json::to_vec(body).map_err(CliError::internal)?;
    mesh.request(subject, HeaderMap::new(), body.into()).await
}

pub(super) fn parse<T: DeserializeOwned>(message: &Message) -> CliResult<T> {
    serde_json::from_slice(&message.payload).map_err(|error| {
        match parse_json(message).as_ref().ok().and_then(|reply| reply.text("/message")) {
            Some(message) => CliError::msg(FAILED, message),
            None => CliError::new(FAILED, error).context("cannot parse the reply of the bridge"),
        }
    })
}

/// The error for an agent that no bridge serves, with the names of similar ones.
async fn unknown_agent_error(mesh: &NatsClient, agent: &str) -> CliError {
    match discover(mesh).await {
        Ok(discovery) => discovery.unknown_agent_error(agent, mesh),
        Err(error) => error,
    }
}

fn no_reply_error(mesh: &NatsClient, agent: &str, verb: &str, reason: NoReply) -> CliError {
    let control = format!("{}.control.>", mesh.subjects.prefix());
    let verb = if verb == "logs" { "show the logs of" } else { verb };
    let what = format!("cannot {verb} `{agent}`");
    match reason {
        NoReply::NoResponders | NoReply::Closed => CliError::from(reason).context(what),
        NoReply::Timeout(_) | NoReply::Denied(_) => CliError::from(reason)
            .context(what)
            .hint(format!("this requires the permission to publish to `{control}`")),
    }
}
