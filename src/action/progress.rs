//! What a front door learns while a call is under way.

use std::sync::Arc;
use std::time::Duration;

use crate::a2a::model::{ArtifactUpdate, TaskState};
use crate::reply::outcome::Outcome;

#[derive(Debug, Clone)]
pub(crate) enum Frame {
    /// The agent has named the task.
    Task {
        /// The agent's id of it.
        id: String,
        context_id: Option<String>,
    },
    /// The agent has told a state.
    State {
        /// The state, which is told in A2A's own words.
        state: TaskState,
        /// What the agent says about it.
        message: String,
    },
    /// A result, or a piece of one.
    Artifact {
        update: ArtifactUpdate,
        /// Whether its text is also passed on as [`Frame::Response`].
        is_answer: bool,
    },
    Response(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Audience {
    /// As far as one can tell.
    There,
    /// Nobody does, and the caller wanted the task cancelled in that case.
    Gone,
}

/// The front door's side of a call. A slow one slows the reading from the agent, and nothing else.
pub(crate) trait Progress: Send {
    /// The request has its permit, or was refused one; the agent has not been called yet. Not called for
    /// the repeat of an earlier request.
    fn started(&mut self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    fn frame(&mut self, frame: Frame) -> impl Future<Output = ()> + Send;

    /// The reply to a submitted task is due, and the task goes on. Called at most once, and only for
    /// [`ReplyMode::Submit`](super::request::ReplyMode::Submit); the later return value is ignored.
    fn accepted(&mut self, _: &Arc<Outcome>) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// Passes on what was held back to be joined with more: the call waits for the agent now.
    fn catch_up(&mut self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// Whether frames about content are wanted; otherwise they are not made.
    fn listens(&self) -> bool {
        true
    }

    /// How long silence may last before [`Progress::keep_alive`] is called.
    fn patience(&self) -> Option<Duration> {
        None
    }

    /// Sends a sign of life.
    fn keep_alive(&mut self) -> impl Future<Output = Audience> + Send {
        std::future::ready(Audience::There)
    }
}

/// Nobody listens: the reply is all that the caller wants.
#[derive(Debug)]
pub(crate) struct Silent;

impl Progress for Silent {
    fn listens(&self) -> bool {
        false
    }

    fn frame(&mut self, _: Frame) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }
}
