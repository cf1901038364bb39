//! The result of a request: an [`Outcome`] or an [`ActionError`].
//!
//! Replies stay typed up to the front door, which turns them into bytes; nothing turns those bytes back. A store keeps
//! a reply in its serde form, which is not the reply body of the public protocol.

pub(crate) mod error;
pub(crate) mod outcome;

use std::sync::Arc;

use crate::a2a::model::ALLOCATION_OVERHEAD;
use error::ActionError;
use outcome::{Outcome, ReplyContent, TaskRef};

pub(crate) type Reply = Result<Arc<Outcome>, ActionError>;

/// The label for a reply in metrics and spans: its status or its error code.
pub(crate) fn label(reply: &Reply) -> &'static str {
    match reply {
        Ok(outcome) => outcome.status.name(),
        Err(error) => error.info.code.name(),
    }
}

/// The reply as a store may keep it: without text that may quote a user's answer.
pub(crate) fn for_storage(mut reply: Reply) -> Reply {
    if let Err(error) = &mut reply
        && error.is_private
    {
        error.message = error.message_for_logs().to_owned();
        error.info.a2a_data = None;
    }
    reply
}

/// The reply as anyone may see it: its state, the code of its error, and the id of its task.
pub(crate) fn without_content(reply: &Reply) -> Reply {
    // The context id may be a session id that the caller chose.
    let bare = |task: &TaskRef| TaskRef {
        id: task.id.clone(),
        context_id: None,
        agent: Arc::clone(&task.agent),
        skill: None,
    };
    match reply {
        Ok(outcome) => {
            let bare = Outcome::new(outcome.status, ReplyContent::default(), bare(&outcome.task));
            Ok(Arc::new(Outcome { success: outcome.success, ..bare }))
        }
        Err(error) => {
            let mut bare_error = ActionError::new(error.info.code, "");
            bare_error.info.retryable = error.info.retryable;
            Err(ActionError { task: error.task.as_ref().map(bare), ..bare_error })
        }
    }
}

/// The size of a reply in memory, in bytes. It takes time in proportion to the number of parts.
pub(crate) fn allocated(reply: &Reply) -> usize {
    reply.as_ref().map_or_else(ActionError::allocated, |outcome| ALLOCATION_OVERHEAD + outcome.allocated())
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::error::Code;
    use super::outcome::{ArtifactRef, FollowUp, ReplyFile, ReplyStatus};
    use super::*;
    use crate::a2a::retry::Retries;

    fn through_the_store(reply: &Reply) -> Reply {
        let json = serde_json::to_vec(&for_storage(reply.clone())).unwrap();
        serde_json::from_slice(&json).unwrap()
    }

    fn body(reply: &Reply) -> bytes::Bytes {
        reply.as_ref().map_or_else(ActionError::to_json, |outcome| outcome.to_json())
    }

    fn task() -> TaskRef {
        TaskRef { id: Some("t".into()), context_id: None, agent: "a".into(), skill: Some("s".into()) }
    }

    #[test]
    fn a_reply_without_content_has_nothing_that_belongs_to_the_caller() {
        let secret = || Some("secret".to_owned());
        let data = RawValue::from_string(r#"{"secret": 1}"#.to_owned()).unwrap();
        let file = ReplyFile {
            name: secret(),
            mime_type: secret(),
            size: None,
            sha256: secret(),
            url: secret(),
            bytes: None,
        };
        let content = ReplyContent {
            message: "secret".into(),
            files: vec![file],
            data: vec![data.clone()],
            artifacts: vec![ArtifactRef { id: secret(), name: secret() }],
        };
        let task = TaskRef { context_id: secret(), skill: Some("secret".into()), ..task() };
        let mut outcome = Outcome::new(ReplyStatus::InputRequired, content, task.clone());
        outcome.follow_up = Some(FollowUp { id: uuid::Uuid::nil(), expires_at: "secret".into() });
        let mut error = ActionError::new(Code::AgentError, "secret").with_task(task);
        error.info.a2a_data = Some(data);
        let task = r#""task":{"id":"t","context_id":null,"agent":"a","skill":null}}"#;
        let expected = format!(
            r#"{{"success":false,"status":"INPUT_REQUIRED","message":"","files":[],"data":{{}},"artifacts":[],{task}"#
        );
        assert_eq!(body(&without_content(&Ok(Arc::new(outcome)))), expected);
        let info = r#""error_info":{"code":"agent_error","retryable":false,"a2a_code":null,"a2a_data":null}"#;
        let expected = format!(
            r#"{{"success":false,"status":"ERROR","message":"","files":[],"data":{{}},"artifacts":[],{info},{task}"#
        );
        assert_eq!(body(&without_content(&Err(error))), expected);
    }

    #[test]
    fn a_store_returns_an_outcome_unchanged() {
        let data = ["1.10", r#"{"a": 1}"#].map(|data| RawValue::from_string(data.to_owned()).unwrap());
        let content = ReplyContent { message: "text".into(), data: data.into(), ..ReplyContent::default() };
        let mut outcome = Outcome::new(ReplyStatus::InputRequired, content, task());
        outcome.follow_up = Some(FollowUp { id: uuid::Uuid::nil(), expires_at: "soon".into() });
        let reply = Ok(Arc::new(outcome));
        assert_eq!(body(&through_the_store(&reply)), body(&reply));
    }

    #[test]
    fn a_store_returns_an_error_unchanged_but_without_a_users_answer() {
        let retries = Retries::new(&"a".into());
        retries.record(crate::a2a::retry::Retry::MediaType);
        for cancelled in [None, Some(None), Some(Some(true)), Some(Some(false))] {
            let error = ActionError::new(Code::Timeout, "late").with_task(task()).after_reaching_agent();
            let mut error = error.with_retries(&retries);
            error.info.cancelled = cancelled;
            error.info.a2a_data = RawValue::from_string("[1]".to_owned()).ok();
            let reply = Err(error.clone());
            assert_eq!(body(&through_the_store(&reply)), body(&reply));
            let private = through_the_store(&Err(ActionError { is_private: true, ..error })).unwrap_err();
            assert!(!private.message.contains("late") && private.info.a2a_data.is_none());
            assert!(private.reached_agent);
        }
    }
}
