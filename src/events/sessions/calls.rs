//! What sessions need of agents.

use std::fmt;

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::caller::Caller;
use crate::events::run_record::RunRecord;
use crate::reply::error::ActionError;

/// Reaches the agents of a mesh, for requests about sessions.
pub(crate) trait AgentCalls: fmt::Debug + Send + Sync {
    /// Cancels the task of a run. Returns whether the agent has accepted that.
    fn cancel<'a>(&'a self, caller: &'a Caller, run: &'a RunRecord) -> BoxFuture<'a, bool>;

    /// Asks an agent, and returns once the request has reached it. The last message of the session, which the body repeats,
    /// is in the log already.
    fn ask<'a>(&'a self, request: AgentRequest<'a>) -> BoxFuture<'a, Result<(), ActionError>>;
}

/// A call in a session.
#[derive(Debug)]
pub(crate) struct AgentRequest<'a> {
    pub caller: &'a Caller,
    pub agent: &'a str,
    /// The replica that has asked the agent last.
    pub instance: Option<&'a str>,
    /// `None` for the agent as a whole.
    pub skill: Option<&'a str>,
    /// As in a request for an action.
    pub body: Bytes,
}
