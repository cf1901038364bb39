//! What a caller can be told while a task is under way.

use std::time::Duration;

use super::outcome::Outcome;
use crate::a2a::model::ArtifactUpdate;

/// One piece of news.
#[derive(Debug, Clone)]
pub enum Frame {
    /// The agent has named the task.
    Task {
        /// The agent's id of it.
        id: String,
        /// The conversation.
        context_id: Option<String>,
    },
    /// The agent has told a state.
    State {
        /// The state, in A2A's own words.
        state: String,
        /// What the agent says about it.
        message: String,
    },
    /// A result, or a piece of one.
    Artifact(ArtifactUpdate),
    /// Text of the answer.
    Response(String),
}

/// Whether anybody still listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Audience {
    /// As far as one can tell.
    There,
    /// Nobody does, and the caller wanted the task cancelled in that case.
    Gone,
}

/// Somebody who is told. A slow one slows the reading from the agent, and nothing else.
pub trait Progress: Send {
    /// Tells one piece of news.
    fn frame(&mut self, frame: Frame) -> impl Future<Output = ()> + Send;

    /// Says that the task waits for something that may happen elsewhere, and is followed on.
    fn waits(&mut self, _: &Outcome) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// Tells what was held back to be joined with more: now the agent is waited for.
    fn catch_up(&mut self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// Whether anybody hears frames about content; without, they are not made.
    fn listens(&self) -> bool {
        true
    }

    /// How long silence may last before [`Progress::keep_alive`] is called.
    fn patience(&self) -> Option<Duration> {
        None
    }

    /// Says that the task is still under way.
    fn keep_alive(&mut self) -> impl Future<Output = Audience> + Send {
        std::future::ready(Audience::There)
    }
}

/// Nobody listens: the reply is all that the caller wants.
#[derive(Debug)]
pub struct Silent;

impl Progress for Silent {
    fn listens(&self) -> bool {
        false
    }

    fn frame(&mut self, _: Frame) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }
}
