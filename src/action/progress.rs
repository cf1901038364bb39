//! The interface through which a front door follows a call in flight.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::a2a::model::{ArtifactUpdate, Part, TaskState};
use crate::reply::Reply;
use crate::reply::error::ActionError;
use crate::reply::outcome::Outcome;
use crate::state::peers::InstanceId;
use crate::state::run_link::{LiveRunLink, RunLink};

#[derive(Debug, Clone)]
pub(crate) enum ProgressEvent {
    /// The agent has assigned the task id.
    Task {
        id: String,
        context_id: Option<String>,
    },
    /// The agent has reported a state, with an optional message.
    State {
        state: TaskState,
        message: String,
    },
    /// An artifact, or a piece of one.
    Artifact {
        update: ArtifactUpdate,
        /// Whether the text also goes out as [`ProgressEvent::Response`].
        is_response: bool,
    },
    Response(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Listener {
    /// The caller listens, or its absence cannot be detected.
    Connected,
    /// No caller listens, and the request asks to cancel the task in that case.
    Disconnected,
}

/// Why another replica did not run a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ForwardError {
    #[error("this front door cannot forward requests")]
    Unsupported,
    /// No other replica was known when the request arrived, or another one may have run it already.
    #[error("this request can no longer be forwarded")]
    NotKept,
    /// The request did not reach it.
    #[error("the replica is not connected")]
    Gone,
    /// It may have run the request.
    #[error("the replica stopped responding")]
    Silent,
}

/// What a call is about to send to the agent, for the event log.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunStart<'a> {
    pub session_id: Option<&'a str>,
    /// `None` for an answer, which may be a secret.
    pub message: Option<&'a [Part]>,
    pub skill: Option<&'a str>,
    pub context_id: Option<&'a str>,
    pub card_hash: &'a str,
    /// For an answer: the run of the question.
    pub continues: Option<&'a RunLink>,
}

/// A call that is logged.
#[derive(Debug)]
pub(crate) struct BegunRun {
    pub link: Arc<LiveRunLink>,
    /// What was said in the session before, for an agent that does not know it.
    pub history: Option<Part>,
}

/// The front door's side of a call. A slow implementation slows only the reading from the agent.
pub(crate) trait Progress: Send {
    /// The request is about to run, or was refused; the agent has not been called yet. Not called for a repeated
    /// request.
    fn started(&mut self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// The message is about to be sent. Returns where the call is logged, if it is.
    fn begin_run(
        &mut self,
        _: RunStart<'_>,
    ) -> impl Future<Output = Result<Option<BegunRun>, ActionError>> + Send {
        std::future::ready(Ok(None))
    }

    fn report(&mut self, event: ProgressEvent) -> impl Future<Output = ()> + Send;

    /// The call is logged: what is reported from now on must reach the caller as it is, and with the reply comes
    /// [`Self::logged_result`].
    fn logged(&mut self) {}

    /// The log of the call is incomplete.
    fn log_failed(&mut self) {}

    /// The reply as it is logged, for the caller.
    fn logged_result(&mut self, _: Bytes) {}

    /// The running task is recorded. Not called for a task that has settled before the bridge records it.
    fn recorded(&mut self, _is_submitted: bool) {}

    /// The reply to a submitted task is due, and the task goes on. Called at most once, and only for
    /// [`ReplyMode::Submit`](super::request::ReplyMode::Submit); the value that the call returns later is ignored.
    fn accepted(&mut self, _: &Arc<Outcome>) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// This replica runs the request, and does not [forward](Self::forward) it.
    fn runs_here(&mut self) {}

    /// Lets another replica run the request in place of this one, passes its progress to the caller, and returns its
    /// reply. A front door without a way to do so runs the request here.
    fn forward(&mut self, _to: InstanceId) -> impl Future<Output = Result<Reply, ForwardError>> + Send {
        std::future::ready(Err(ForwardError::Unsupported))
    }

    /// Sends coalesced events, because the call waits for the agent now.
    fn flush(&mut self) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// Whether to report events with content.
    fn wants_content(&self) -> bool {
        true
    }

    /// How long a call may be silent before [`Progress::keep_alive`] is called.
    fn keep_alive_interval(&self) -> Option<Duration> {
        None
    }

    fn keep_alive(&mut self) -> impl Future<Output = Listener> + Send {
        std::future::ready(Listener::Connected)
    }
}

/// For calls that need only the reply.
#[derive(Debug)]
pub(crate) struct NoProgress;

impl Progress for NoProgress {
    fn wants_content(&self) -> bool {
        false
    }

    fn report(&mut self, _: ProgressEvent) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }
}
