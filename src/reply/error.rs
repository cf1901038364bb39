//! The error of a request, and its codes.

use std::borrow::Cow;

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use super::outcome::{MergedObjects, ReplyBody, ReplyData, TaskRef};
use crate::a2a::client::ClientError;
use crate::a2a::dialect::DATA_LEFT_OUT;
use crate::a2a::model::ALLOCATION_OVERHEAD;
use crate::a2a::retry::{Retries, Retry};
use crate::json;
use crate::secrets::Secrets;
use crate::text::error_chain;

/// The error codes of the public protocol (see docs/src/protocol.md). Names and numbers are public interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Code {
    /// The body, a parameter, a header or the reply mode is invalid.
    InvalidRequest,
    /// The caller is not verified, and has to be.
    Forbidden,
    /// The task or follow-up is unknown, has been forgotten, or belongs to another caller.
    NotFound,
    FollowUpUsed,
    FollowUpExpired,
    /// The task is in a final state, or the agent refuses to cancel it.
    NotCancelable,
    /// A request, reply or file exceeds a limit.
    TooLarge,
    /// A limit is reached, most often the agent's `max_in_flight`.
    Busy,
    /// The agent's response is an error, or is not A2A.
    AgentError,
    AgentUnavailable,
    /// The agent exited while it ran the task, or no longer knows the task.
    TaskLost,
    Timeout,
    /// The connection broke, and the state of the task cannot be read.
    OutcomeUnknown,
    StateUnavailable,
    /// Not an error of the call: the agent's task failed. Actions reply with an outcome; only the agent
    /// protocol reports it as an error.
    TaskFailed,
    /// Not an error of the call: the agent rejected the task.
    TaskRejected,
    /// Not an error of the call: the task was canceled.
    TaskCanceled,
    /// A bug in the bridge, or a code that a newer release has stored.
    #[serde(other)]
    Internal,
}

impl Code {
    /// The stable name and the number for `Nats-Service-Error-Code`.
    const fn row(self) -> (&'static str, u16) {
        match self {
            Self::InvalidRequest => ("invalid_request", 400),
            Self::Forbidden => ("forbidden", 403),
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

/// The `error_info` of a reply.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ErrorInfo {
    pub code: Code,
    /// Whether the same request may succeed later.
    pub retryable: bool,
    pub a2a_code: Option<i64>,
    pub a2a_data: Option<Box<RawValue>>,
    /// The HTTP status of the agent's response, if it is an error status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http_status: Option<u16>,
    /// Whether the task was canceled at the agent after a timeout. `None`: no timeout, and the field is absent;
    /// `Some(None)`: the id of the task was not known, and the field is `null`.
    #[serde(default, deserialize_with = "null_is_some", skip_serializing_if = "Option::is_none")]
    pub cancelled: Option<Option<bool>>,
    /// Why the bridge sent the message again. A reply has it in `metadata` instead.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub retries: Vec<Retry>,
}

impl ErrorInfo {
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

fn null_is_some<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<bool>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// The error of a request.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ActionError {
    pub info: Box<ErrorInfo>,
    pub message: String,
    pub task: Option<TaskRef>,
    /// Whether the agent may have begun to work. Only such an error is kept for repeated requests.
    pub reached_agent: bool,
    /// Whether the message may quote a user's answer, which only the caller may see.
    pub is_private: bool,
}

impl ActionError {
    /// The error without the agent's data, which is too large for a message; `None` if there is no data.
    pub(crate) fn without_data(&self) -> Option<Self> {
        self.info.a2a_data.as_ref()?;
        let ErrorInfo { code, retryable, a2a_code, a2a_data: _, http_status, cancelled, retries } =
            &*self.info;
        let info = ErrorInfo {
            code: *code,
            retryable: *retryable,
            a2a_code: *a2a_code,
            a2a_data: None,
            http_status: *http_status,
            cancelled: *cancelled,
            retries: retries.clone(),
        };
        Some(Self {
            info: Box::new(info),
            message: self.message.clone() + DATA_LEFT_OUT,
            task: self.task.clone(),
            reached_agent: self.reached_agent,
            is_private: self.is_private,
        })
    }

    /// Redacts the agent's credentials, which some agents echo.
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
    pub(crate) fn message_for_logs(&self) -> &str {
        if self.is_private { "(hidden, because it may quote a user's answer)" } else { &self.message }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidRequest, message)
    }

    pub(crate) fn unavailable(agent: &str, why: Option<&str>) -> Self {
        let why = why.map(|why| format!(": {why}")).unwrap_or_default();
        Self::new(Code::AgentUnavailable, format!("agent `{agent}` is not available{why}"))
    }

    pub(crate) fn internal() -> Self {
        Self::new(Code::Internal, "the bridge failed to handle this request; see its log")
    }

    pub(crate) fn from_client(error: ClientError) -> Self {
        let reached_agent = error.may_have_reached_agent();
        let code = match &error {
            ClientError::Unreachable(_) | ClientError::Token(_) => Code::AgentUnavailable,
            ClientError::Broken(_) => Code::OutcomeUnknown,
            ClientError::TooLarge { .. } => Code::TooLarge,
            ClientError::OutOfMemory => Code::Busy,
            ClientError::NotSent(error) | ClientError::NotStored(error) => error.code(),
            ClientError::Refused { .. }
            | ClientError::NotA2a { .. }
            | ClientError::Compressed { .. }
            | ClientError::LargeHeaders
            | ClientError::WrongId => Code::AgentError,
        };
        let mut this = Self { reached_agent, ..Self::new(code, error_chain(&error)) };
        if matches!(error, ClientError::OutOfMemory | ClientError::NotStored(_)) {
            // Unlike a request that is refused as `busy`, this one would run the agent again.
            this.info.retryable = false;
        }
        if let ClientError::Refused { http_status, code, data, .. } = error {
            this.info.retryable = matches!(http_status, Some(429 | 503));
            this.info.http_status = http_status;
            this.info.a2a_code = code;
            this.info.a2a_data = data;
        }
        this
    }

    pub(crate) fn with_task(mut self, task: TaskRef) -> Self {
        self.task = Some(task);
        self
    }

    pub(crate) fn with_retries(mut self, retries: &Retries) -> Self {
        self.info.retries = retries.list();
        self
    }

    pub(crate) fn after_reaching_agent(mut self) -> Self {
        self.reached_agent = true;
        self
    }

    /// The size in memory, in bytes.
    pub(crate) fn allocated(&self) -> usize {
        let data = self.info.a2a_data.as_ref().map_or(0, |data| ALLOCATION_OVERHEAD + data.get().len());
        let text =
            |text: &Option<String>| text.as_ref().map_or(0, |text| ALLOCATION_OVERHEAD + text.capacity());
        let task = self.task.as_ref().map_or(0, |task| text(&task.id) + text(&task.context_id));
        let retries = self.info.retries.capacity() * size_of::<Retry>();
        // The information and the message are allocations, too.
        let own = size_of::<Self>() + size_of::<ErrorInfo>() + 2 * ALLOCATION_OVERHEAD;
        own + self.message.capacity() + data + task + retries
    }

    /// The reply body of the public protocol.
    pub(crate) fn to_json(&self) -> Bytes {
        let mut info = Cow::Borrowed(&*self.info);
        if !info.retries.is_empty() {
            info.to_mut().retries = Vec::new();
        }
        json::to_bytes(&ReplyBody {
            success: false,
            status: "ERROR",
            message: &self.message,
            files: &[],
            data: ReplyData::Object(MergedObjects::default()),
            data_parts: &[],
            artifacts: &[],
            error_info: Some(info),
            metadata: ReplyBody::metadata(&self.info.retries),
            task: self.task.as_ref(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_the_same_name_in_a_store_as_in_a_reply() {
        for code in [
            Code::InvalidRequest,
            Code::Forbidden,
            Code::NotFound,
            Code::FollowUpUsed,
            Code::FollowUpExpired,
            Code::NotCancelable,
            Code::TooLarge,
            Code::Busy,
            Code::AgentError,
            Code::AgentUnavailable,
            Code::TaskLost,
            Code::Timeout,
            Code::OutcomeUnknown,
            Code::StateUnavailable,
            Code::TaskFailed,
            Code::TaskRejected,
            Code::TaskCanceled,
            Code::Internal,
        ] {
            let stored = serde_json::to_value(code).unwrap();
            assert_eq!(stored, code.name());
            assert_eq!(serde_json::from_value::<Code>(stored).unwrap(), code);
        }
        assert_eq!(serde_json::from_str::<Code>(r#""nonsense""#).unwrap(), Code::Internal);
    }
}
