//! Calls that a request about a session makes: with the identity of its caller, at the replica that can run them.
//!
//! They use the messages with which replicas [forward](super::forward) requests, also to this replica itself.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{HeaderMap, HeaderValue, Message, StatusCode, Subject};
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, FutureExt as _};
use serde_json::json;
use uuid::Uuid;

use super::NatsPeers;
use super::forward::{FORWARD, ForwardInfo, PEER};
use crate::bus::catalog::PROMPT;
use crate::bus::subject::Token;
use crate::caller::Caller;
use crate::events::run_record::RunRecord;
use crate::events::sessions::calls::{AgentCalls, AgentRequest};
use crate::json::to_bytes;
use crate::reply::Reply;
use crate::reply::error::ActionError;
use crate::state::peers::InstanceId;

/// How long an agent may take to cancel a task.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a replica may take to accept a request, and how long errors of it are waited for.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(5);
const ERROR_TIMEOUT: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(crate) struct SessionCalls {
    peers: Arc<NatsPeers>,
}

/// What came back of a request.
enum Answer {
    /// It did not run.
    Gone,
    /// It runs.
    Accepted,
    Reply(Reply),
}

impl SessionCalls {
    pub(crate) fn new(peers: &Arc<NatsPeers>) -> Self {
        Self { peers: Arc::clone(peers) }
    }

    /// Sends a request to a replica. With `needs_reply`, an acceptance is not enough.
    async fn send(
        &self,
        to: InstanceId,
        (agent, action): (&str, &str),
        info: &ForwardInfo,
        body: Bytes,
        needs_reply: bool,
    ) -> Answer {
        let client = &self.peers.client;
        let inbox = Subject::from(client.new_inbox());
        let Ok(mut messages) = client.subscribe(inbox.clone()).await else { return Answer::Gone };
        let mut headers = HeaderMap::new();
        headers.insert(FORWARD, serde_json::to_string(info).unwrap_or_default());
        headers.insert("A2A-Reply", if needs_reply { "final" } else { "submit" });
        headers.insert("Content-Type", "application/json");
        let subject = self.peers.subjects.peer_call(to, &Token::new(agent), action);
        if client.publish_with_reply_and_headers(subject, inbox, headers, body).await.is_err() {
            return Answer::Gone;
        }
        let mut timeout = if needs_reply { CANCEL_TIMEOUT } else { ACCEPT_TIMEOUT };
        let mut answer = Answer::Gone;
        while let Ok(Some(message)) = tokio::time::timeout(timeout, messages.next()).await {
            match kind(&message) {
                _ if message.status == Some(StatusCode::NO_RESPONDERS) => return Answer::Gone,
                "gone" => return Answer::Gone,
                "alive" if !needs_reply => {
                    answer = Answer::Accepted;
                    timeout = ERROR_TIMEOUT;
                }
                kind if kind.starts_with("reply") => {
                    // A reply in several parts is not read; that it came is enough.
                    return match serde_json::from_slice(&message.payload) {
                        Ok(reply) => Answer::Reply(reply),
                        Err(_) => Answer::Accepted,
                    };
                }
                _ => {}
            }
        }
        answer
    }

    fn info(&self, caller: &Caller, has_logged_message: bool) -> ForwardInfo {
        ForwardInfo { from: self.peers.instance, caller: caller.clone(), has_logged_message }
    }
}

fn kind(message: &Message) -> &str {
    let headers = message.headers.as_ref();
    headers.and_then(|headers| headers.get(PEER)).map(HeaderValue::as_str).unwrap_or_default()
}

impl AgentCalls for SessionCalls {
    fn cancel<'a>(&'a self, caller: &'a Caller, run: &'a RunRecord) -> BoxFuture<'a, bool> {
        async move {
            let Some(task_id) = &run.task_id else { return false };
            let body = to_bytes(&json!({ "task_id": task_id }));
            let own = self.peers.instance;
            let runs_at = Uuid::try_parse(&run.instance).ok().filter(|instance| *instance != own);
            for to in runs_at.into_iter().chain([own]) {
                let action = (&*run.agent, "cancel_task");
                match self.send(to, action, &self.info(caller, false), body.clone(), true).await {
                    Answer::Reply(Ok(_)) | Answer::Accepted => return true,
                    // Another replica may follow the task by now.
                    Answer::Gone | Answer::Reply(Err(_)) => {}
                }
            }
            false
        }
        .boxed()
    }

    fn ask<'a>(&'a self, request: AgentRequest<'a>) -> BoxFuture<'a, Result<(), ActionError>> {
        async move {
            let AgentRequest { caller, agent, instance, skill, body } = request;
            let action = skill.map_or_else(|| Token::action(PROMPT), Token::action);
            let (own, info) = (self.peers.instance, self.info(caller, true));
            let last = instance.and_then(|instance| Uuid::try_parse(instance).ok());
            // This bridge may serve other agents than the one that has asked this one.
            for to in [own].into_iter().chain(last.filter(|last| *last != own)) {
                match self.send(to, (agent, action.as_str()), &info, body.clone(), false).await {
                    Answer::Accepted | Answer::Reply(Ok(_)) => return Ok(()),
                    Answer::Reply(Err(error)) => return Err(error),
                    Answer::Gone => {}
                }
            }
            let why = "no bridge that is known to serve it responds";
            Err(ActionError::unavailable(agent, Some(why)))
        }
        .boxed()
    }
}
