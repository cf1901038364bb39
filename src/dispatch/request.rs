//! A request, independent of its front door.

use std::sync::Arc;

use bytes::Bytes;

pub(crate) use super::permits::Permit;
use crate::action::actions::CallableSkill;
use crate::action::request::{CallOptions, FollowUpAnswer, Invocation, ReplyMode, RequestBody};
use crate::offload;
use crate::reply::error::ActionError;
use crate::state::quota::CallKind;

#[derive(Debug)]
pub(crate) struct Request {
    pub operation: Operation,
    pub options: CallOptions,
    pub idempotency_key: Option<IdempotencyKey>,
    /// From [`Dispatcher::permit`](super::Dispatcher::permit). Without it, the dispatcher takes a permit, or refuses
    /// the request as `busy`.
    pub permit: Option<Permit>,
}

#[derive(Debug)]
pub(crate) enum Operation {
    Invoke {
        /// The name of the action in metrics, spans and idempotency keys.
        action: Arc<str>,
        skill: Arc<CallableSkill>,
        input: Input<Invocation>,
    },
    Answer(Input<FollowUpAnswer>),
    CancelTask(Input<String>),
    GetTask(Input<String>),
}

/// The input of an operation, parsed by the front door or left to the dispatcher.
#[derive(Debug)]
pub(crate) enum Input<T> {
    /// Parsed by a front door with a format of its own.
    Parsed(T),
    /// In the format of the public protocol. The dispatcher parses it once the request has its permit, so that a flood
    /// of refused requests costs little.
    Body(RequestBody),
}

/// The caller's idempotency key, and the body that must be the same in a repeated request.
#[derive(Debug)]
pub(crate) struct IdempotencyKey {
    pub key: String,
    pub body: Bytes,
}

impl Operation {
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Invoke { action, .. } => action,
            Self::Answer(_) => "provide_required_input",
            Self::CancelTask(_) => "cancel_task",
            Self::GetTask(_) => "get_task",
        }
    }

    /// Sets the name of the action for metrics and the call log, if it differs from `current`.
    pub(super) fn label(&self, current: &mut Arc<str>) {
        match self {
            Self::Invoke { action, .. } => Arc::clone_from(current, action),
            _ if **current == *self.name() => {}
            _ => *current = self.name().into(),
        }
    }

    /// Whether the agent works on it. Lookups and cancels have their own limits.
    pub(crate) fn runs_the_agent(&self) -> bool {
        match self {
            Self::Invoke { .. } | Self::Answer(_) => true,
            Self::CancelTask(_) | Self::GetTask(_) => false,
        }
    }

    /// How much of the agent's room for state it may take, if the agent works on it.
    pub(super) fn call_kind(&self, mode: ReplyMode) -> Option<CallKind> {
        match (self, mode) {
            (Self::Invoke { .. }, ReplyMode::Submit) => Some(CallKind::Submission),
            (Self::Invoke { .. }, _) | (Self::Answer(_), ReplyMode::Submit) => Some(CallKind::Call),
            (Self::Answer(_), _) => Some(CallKind::Answer),
            (Self::CancelTask(_) | Self::GetTask(_), _) => None,
        }
    }
}

impl<T> Input<T> {
    /// Parses the body. A large one takes long.
    pub(super) async fn parse(
        self,
        agent: &str,
        parse: impl FnOnce(&RequestBody) -> Result<T, ActionError>,
    ) -> Result<T, ActionError> {
        match self {
            Self::Parsed(value) => Ok(value),
            Self::Body(body) => offload::run(agent, body.len(), || parse(&body)).await,
        }
    }
}
