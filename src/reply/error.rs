//! The one error that crosses a wire, and the table of its codes.

use crate::text::error_chain;
use bytes::Bytes;
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

use super::outcome::{Metadata, TaskRef};
use crate::a2a::client::ClientError;
use crate::a2a::retry::{Retries, Retry};
use crate::json;
use crate::secrets::Secrets;

/// The contract's codes. Names and numbers are public interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Code {
    /// Body, parameter, header or reply mode not understood.
    InvalidRequest,
    /// Task or follow-up never seen here, or forgotten.
    NotFound,
    /// The follow-up was answered already.
    FollowUpUsed,
    /// The follow-up's time is over.
    FollowUpExpired,
    /// The task is in a final state, or the agent refuses to cancel it.
    NotCancelable,
    /// Request, reply or file over a limit.
    TooLarge,
    /// A limit is reached, most often the agent's `max_in_flight`.
    Busy,
    /// The agent answered with an error, or not in A2A.
    AgentError,
    /// The agent is not there.
    AgentUnavailable,
    /// The agent instance that held the task is gone.
    TaskLost,
    /// No end within the limit.
    Timeout,
    /// The connection broke and nobody could be asked.
    OutcomeUnknown,
    /// The store that the request needs cannot be reached.
    StateUnavailable,
    /// A defect of the bridge.
    Internal,
    /// Not an error of the call: the agent's task failed. Actions reply with an outcome; only the agent
    /// protocol reports it as an error.
    TaskFailed,
    /// The same for a task that the agent rejected.
    TaskRejected,
    /// The same for a task that somebody cancelled.
    TaskCanceled,
}

impl Code {
    const ALL: [Self; 17] = [
        Self::InvalidRequest,
        Self::NotFound,
        Self::FollowUpUsed,
        Self::FollowUpExpired,
        Self::NotCancelable,
        Self::TooLarge,
        Self::Busy,
        Self::AgentError,
        Self::AgentUnavailable,
        Self::TaskLost,
        Self::Timeout,
        Self::OutcomeUnknown,
        Self::StateUnavailable,
        Self::Internal,
        Self::TaskFailed,
        Self::TaskRejected,
        Self::TaskCanceled,
    ];

    pub(crate) fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|code| code.name() == name)
    }

    /// The stable name and the number for `Nats-Service-Error-Code`.
    const fn row(self) -> (&'static str, u16) {
        match self {
            Self::InvalidRequest => ("invalid_request", 400),
            Self::NotFound => ("not_found", 404),
            Self::FollowUpUsed => ("follow_up_used", 409),
            Self::FollowUpExpired => ("follow_up_expired", 410),
            Self::NotCancelable => ("not_cancelable", 409),
            Self::TooLarge => ("too_large", 413),
            Self::Busy => ("busy", 429),
            Self::AgentError => ("agent_error", 502),
            Self::AgentUnavailable => ("agent_unavailable", 503),
            Self::TaskLost => ("task_lost", 503),
            Self::Timeout => ("timeout", 504),
            Self::OutcomeUnknown => ("outcome_unknown", 504),
            Self::StateUnavailable => ("state_unavailable", 503),
            Self::Internal => ("internal", 500),
            Self::TaskFailed => ("task_failed", 0),
            Self::TaskRejected => ("task_rejected", 0),
            Self::TaskCanceled => ("task_canceled", 0),
        }
    }

    pub(crate) const fn name(self) -> &'static str {
        self.row().0
    }

    /// The number for service headers and HTTP.
    pub(crate) const fn number(self) -> u16 {
        self.row().1
    }
}

impl Serialize for Code {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// What a reply says about an error, beside its message.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ErrorInfo {
    pub code: Code,
    /// Whether the same request may succeed later.
    pub retryable: bool,
    pub a2a_code: Option<i64>,
    pub a2a_data: Option<Box<RawValue>>,
    /// The agent's HTTP status, when it is an error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http_status: Option<u16>,
    /// After a timeout: whether the task was cancelled at the agent; `null` when no id was known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cancelled: Option<Option<bool>>,
    /// Why the message went to the agent more than once; the reply has it in `metadata`.
    #[serde(skip)]
    pub retries: Vec<Retry>,
}

impl ErrorInfo {
    /// An error about which no more is known than its code.
    pub(crate) fn new(code: Code) -> Self {
        let retryable = matches!(code, Code::Busy | Code::AgentUnavailable | Code::StateUnavailable);
        Self {
            code,
            retryable,
            a2a_code: None,
            a2a_data: None,
            http_status: None,
            cancelled: None,
            retries: Vec::new(),
        }
    }
}

/// A request that ended in an error.
#[derive(Debug, Clone)]
pub(crate) struct ActionError {
    pub info: Box<ErrorInfo>,
    pub message: String,
    /// The task, when one is known.
    pub task: Option<TaskRef>,
    /// Whether the agent may have begun to work. Only such an error is remembered for repeats of
    /// the same request.
    pub reached_agent: bool,
    /// Whether the message may repeat what a user answered, which nobody but the caller shall see.
    pub is_private: bool,
}

impl ActionError {
    /// The same without the agent's credentials, which some agents repeat.
    #[must_use]
    pub(crate) fn redacted(mut self, secrets: &Secrets) -> Self {
        secrets.redact(&mut self.message);
        if let Some(data) = self.info.a2a_data.take() {
            self.info.a2a_data = RawValue::from_string(secrets.redact_json(data.get())).ok();
        }
        self
    }

    /// An error from before the agent was reached.
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            info: Box::new(ErrorInfo::new(code)),
            message: message.into(),
            task: None,
            reached_agent: false,
            is_private: false,
        }
    }

    /// The message, redacted for anyone but the caller.
    pub(crate) fn for_logs(&self) -> &str {
        if self.is_private { "not shown, as it may hold an answer" } else { &self.message }
    }

    /// The request is not understood.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidRequest, message)
    }

    /// The agent is not there; `why` is what is known about it.
    pub(crate) fn unavailable(agent: &str, why: Option<&str>) -> Self {
        let why = why.map(|why| format!(": {why}")).unwrap_or_default();
        Self::new(Code::AgentUnavailable, format!("agent `{agent}` is not available{why}"))
    }

    pub(crate) fn internal() -> Self {
        Self::new(Code::Internal, "the bridge failed to handle this request; its log says more")
    }

    /// What a failed call to the agent means to the caller.
    pub(crate) fn from_client(error: ClientError) -> Self {
        let reached_agent = error.may_have_reached_agent();
        let code = match &error {
            ClientError::Unreachable(_) | ClientError::Token(_) => Code::AgentUnavailable,
            ClientError::Broken(_) => Code::OutcomeUnknown,
            ClientError::TooLarge { .. } => Code::TooLarge,
            ClientError::Refused { .. } | ClientError::NotA2a { .. } | ClientError::Compressed { .. } => {
                Code::AgentError
            }
        };
        let mut this = Self { reached_agent, ..Self::new(code, error_chain(&error)) };
        if let ClientError::Refused { http_status, code, data, .. } = error {
            this.info.retryable = matches!(http_status, Some(429 | 503));
            this.info.http_status = http_status;
            this.info.a2a_code = code;
            this.info.a2a_data = data;
        }
        this
    }

    /// The same error about a known task.
    pub(crate) fn about(mut self, task: TaskRef) -> Self {
        self.task = Some(task);
        self
    }

    /// The same error, of a message that went out after these retries.
    pub(crate) fn after(mut self, retries: &Retries) -> Self {
        self.info.retries = retries.list();
        self
    }

    /// The same error, of a call that the agent may have begun to work on.
    pub(crate) fn after_reaching_agent(mut self) -> Self {
        self.reached_agent = true;
        self
    }

    /// The bytes that it holds in memory.
    pub(crate) fn allocated(&self) -> usize {
        let data = self.info.a2a_data.as_ref().map_or(0, |data| data.get().len());
        let text = |text: &Option<String>| text.as_ref().map_or(0, String::capacity);
        let task = self.task.as_ref().map_or(0, |task| text(&task.id) + text(&task.context_id));
        size_of::<Self>() + size_of::<ErrorInfo>() + self.message.capacity() + data + task
    }

    /// The reply body of the contract.
    pub(crate) fn to_json(&self) -> Bytes {
        #[derive(Serialize)]
        struct Empty {}
        #[derive(Serialize)]
        struct Body<'a> {
            success: bool,
            status: &'static str,
            message: &'a str,
            files: [(); 0],
            data: Empty,
            artifacts: [(); 0],
            error_info: &'a ErrorInfo,
            #[serde(skip_serializing_if = "Option::is_none")]
            metadata: Option<Metadata<'a>>,
            task: Option<&'a TaskRef>,
        }
        let body = Body {
            success: false,
            status: "ERROR",
            message: &self.message,
            files: [],
            data: Empty {},
            artifacts: [],
            error_info: &self.info,
            metadata: (!self.info.retries.is_empty()).then_some(Metadata { retries: &self.info.retries }),
            task: self.task.as_ref(),
        };
        json::to_bytes(&body)
    }
}
