//! A reply as a store keeps it.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::Reply;
use super::error::{ActionError, Code, ErrorInfo};
use super::outcome::{FollowUp, Outcome, ReplyContent, ReplyStatus, TaskRef};
use crate::a2a::retry::Retry;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum StoredReply {
    Outcome(Box<StoredOutcome>),
    Error(Box<StoredError>),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct StoredOutcome {
    status: ReplyStatus,
    success: bool,
    content: ReplyContent,
    follow_up: Option<FollowUp>,
    retries: Vec<Retry>,
    task: TaskRef,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct StoredError {
    code: String,
    message: String,
    retryable: bool,
    a2a_code: Option<i64>,
    a2a_data: Option<Box<RawValue>>,
    http_status: Option<u16>,
    cancelled: Option<Cancelled>,
    retries: Vec<Retry>,
    task: Option<TaskRef>,
    reached_agent: bool,
    is_private: bool,
}

/// What an error says about the cancelling of its task.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Cancelled {
    Yes,
    No,
    Unknown,
}

impl StoredReply {
    pub(crate) fn new(reply: &Reply) -> Self {
        match reply {
            Ok(outcome) => Self::Outcome(Box::new(StoredOutcome {
                status: outcome.status,
                success: outcome.success,
                content: outcome.content.clone(),
                follow_up: outcome.follow_up.clone(),
                retries: outcome.retries.clone(),
                task: outcome.task.clone(),
            })),
            Err(error) => Self::Error(Box::new(StoredError::new(error))),
        }
    }

    pub(crate) fn into_reply(self) -> Reply {
        match self {
            Self::Outcome(stored) => {
                let StoredOutcome { status, success, content, follow_up, retries, task } = *stored;
                Ok(Arc::new(Outcome { status, success, content, follow_up, retries, task }))
            }
            Self::Error(stored) => Err(stored.into_error()),
        }
    }
}

impl StoredError {
    fn new(error: &ActionError) -> Self {
        let info = &error.info;
        Self {
            code: info.code.name().to_owned(),
            // What a user answered is never stored.
            message: error.for_logs().to_owned(),
            retryable: info.retryable,
            a2a_code: info.a2a_code,
            a2a_data: info.a2a_data.clone().filter(|_| !error.is_private),
            http_status: info.http_status,
            cancelled: info.cancelled.map(|cancelled| match cancelled {
                Some(true) => Cancelled::Yes,
                Some(false) => Cancelled::No,
                None => Cancelled::Unknown,
            }),
            retries: info.retries.clone(),
            task: error.task.clone(),
            reached_agent: error.reached_agent,
            is_private: error.is_private,
        }
    }

    fn into_error(self) -> ActionError {
        let info = ErrorInfo {
            code: Code::parse(&self.code).unwrap_or(Code::Internal),
            retryable: self.retryable,
            a2a_code: self.a2a_code,
            a2a_data: self.a2a_data,
            http_status: self.http_status,
            cancelled: self.cancelled.map(|cancelled| match cancelled {
                Cancelled::Yes => Some(true),
                Cancelled::No => Some(false),
                Cancelled::Unknown => None,
            }),
            retries: self.retries,
        };
        ActionError {
            info: Box::new(info),
            message: self.message,
            task: self.task,
            reached_agent: self.reached_agent,
            is_private: self.is_private,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn through_the_store(reply: &Reply) -> Reply {
        let json = serde_json::to_vec(&StoredReply::new(reply)).unwrap();
        serde_json::from_slice::<StoredReply>(&json).unwrap().into_reply()
    }

    fn body(reply: &Reply) -> bytes::Bytes {
        reply.as_ref().map_or_else(ActionError::to_json, |outcome| outcome.to_json())
    }

    fn task() -> TaskRef {
        TaskRef { id: Some("t".into()), context_id: None, agent: "a".into(), skill: Some("s".into()) }
    }

    #[test]
    fn an_outcome_comes_back_as_it_was() {
        let data = ["1.10", r#"{"a": 1}"#].map(|data| RawValue::from_string(data.to_owned()).unwrap());
        let content = ReplyContent { message: "text".into(), data: data.into(), ..ReplyContent::default() };
        let mut outcome = Outcome::new(ReplyStatus::InputRequired, content, task());
        outcome.follow_up = Some(FollowUp { id: uuid::Uuid::nil(), expires_at: "soon".into() });
        let reply = Ok(Arc::new(outcome));
        assert_eq!(body(&through_the_store(&reply)), body(&reply));
    }

    #[test]
    fn an_error_comes_back_as_it_was_without_what_a_user_answered() {
        for cancelled in [None, Some(None), Some(Some(true)), Some(Some(false))] {
            let mut error = ActionError::new(Code::Timeout, "late").about(task()).after_reaching_agent();
            error.info.cancelled = cancelled;
            error.info.a2a_data = RawValue::from_string("[1]".to_owned()).ok();
            let reply = Err(error.clone());
            assert_eq!(body(&through_the_store(&reply)), body(&reply));
            let private = through_the_store(&Err(ActionError { is_private: true, ..error })).unwrap_err();
            assert!(!private.message.contains("late") && private.info.a2a_data.is_none());
        }
    }

    #[test]
    fn every_code_is_found_by_its_name() {
        assert_eq!(Code::parse("task_rejected"), Some(Code::TaskRejected));
        assert_eq!(Code::parse("state_unavailable"), Some(Code::StateUnavailable));
        assert_eq!(Code::parse("nonsense"), None);
    }
}
