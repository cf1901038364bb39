//! A request, independent of the front door that it came through.

use std::sync::Arc;

use bytes::Bytes;

pub(crate) use super::permits::Permit;
use crate::action::actions::CallableSkill;
use crate::action::request::{CallOptions, FollowUpAnswer, Invocation, RequestBody};
use crate::reply::error::ActionError;

/// Everything that the dispatcher needs to know. It is complete when it is made.
#[derive(Debug)]
pub(crate) struct Request {
    pub operation: Operation,
    pub options: CallOptions,
    pub idempotency_key: Option<IdempotencyKey>,
    pub admission: Admission,
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

/// What an operation needs to know: read by the front door, or left to the dispatcher.
#[derive(Debug)]
pub(crate) enum Input<T> {
    /// A front door with a form of its own has read it.
    Ready(T),
    /// The contract's own form. It is read once the request has its permit, so that a flood of requests
    /// that are refused costs little.
    Body(RequestBody),
}

/// The caller's key against running the same request twice, and the body that tells whether it is the same.
#[derive(Debug)]
pub(crate) struct IdempotencyKey {
    pub key: String,
    pub body: Bytes,
}

/// How a request gets its permit.
#[derive(Debug)]
pub(crate) enum Admission {
    /// It takes one, and is refused as `busy` if there is none.
    Try,
    /// It has one from [`Dispatcher::permit`](super::Dispatcher::permit).
    Permitted(Permit),
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

    /// Whether the agent works on it. Look-ups and cancels have limits of their own.
    pub(crate) fn runs_the_agent(&self) -> bool {
        match self {
            Self::Invoke { .. } | Self::Answer(_) => true,
            Self::CancelTask(_) | Self::GetTask(_) => false,
        }
    }
}

impl<T> Input<T> {
    pub(super) fn read(
        self,
        read: impl FnOnce(&RequestBody) -> Result<T, ActionError>,
    ) -> Result<T, ActionError> {
        match self {
            Self::Ready(value) => Ok(value),
            Self::Body(body) => read(&body),
        }
    }
}
