//! Finds the replica that follows a task, and lets it serve requests for that task.

use std::collections::BTreeSet;

use super::actions::Actions;
use super::progress::{ForwardError, Progress};
use super::request::CallOptions;
use crate::caller::Caller;
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::state::peers::{Holder, InstanceId, Liveness};
use crate::state::tasks::TaskOutline;
use crate::state::{RecordKey, RecordKind};

/// What a request does with a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TaskAccess {
    Read,
    Cancel,
}

/// Where a request for a task is served.
#[derive(Debug)]
pub(super) enum Located {
    Here(TaskOutline),
    /// The agent cannot be asked from here; the recorded state is the best that is known.
    LastKnown(TaskOutline),
    /// The replica that follows the task has served the request.
    Forwarded(Reply),
}

impl Actions {
    /// Finds a task. Its owner serves the request, if it is another replica that is alive.
    pub(super) async fn locate(
        &self,
        task_id: &str,
        options: &CallOptions,
        access: TaskAccess,
        progress: &mut impl Progress,
    ) -> Result<Located, ActionError> {
        let record = match self.record(task_id, &options.caller).await {
            Ok(record) => record,
            Err(error) => {
                return Box::pin(self.locate_elsewhere(task_id, options, access, error, progress)).await;
            }
        };
        let Some(owner) = self.state.tasks.other_owner(&record) else { return Ok(Located::Here(record)) };
        if record.state.is_final() {
            return Ok(Located::LastKnown(record));
        }
        // A request that was forwarded to the former owner is served here.
        if !options.is_forwarded && self.state.peers.liveness(owner).await == Liveness::Alive {
            match Box::pin(self.forward_task(owner, access, progress)).await? {
                Some(reply) => return Ok(Located::Forwarded(reply)),
                None => {
                    tracing::debug!(agent = %self.agent, task_id, %owner, "the owner of a task did not respond");
                }
            }
        }
        match (record.is_local, access) {
            (false, _) => Ok(Located::Here(record)),
            (true, TaskAccess::Read) => Ok(Located::LastKnown(record)),
            (true, TaskAccess::Cancel) => {
                let why = "the replica that runs the agent does not respond";
                Err(ActionError::unavailable(&self.agent, Some(why)))
            }
        }
    }

    /// Tasks to which a verified caller refers must be its own: the agent may use what it knows of them.
    pub(super) async fn check_references(
        &self,
        task_ids: &[String],
        caller: &Caller,
    ) -> Result<(), ActionError> {
        let refuse = || {
            let message = "`meta.reference_task_ids` has a task that is unknown or has been forgotten";
            ActionError::new(Code::NotFound, message)
        };
        let distinct: BTreeSet<&String> = task_ids.iter().collect();
        for task_id in distinct {
            let error = match self.state.tasks.find(&self.agent, task_id).await {
                Ok(Some(task)) if task.caller == *caller => continue,
                Ok(Some(_)) => return Err(refuse()),
                Ok(None) => refuse(),
                Err(error) => error,
            };
            let key = RecordKey::new(&self.agent, task_id.as_str()).of_caller(caller);
            match self.state.peers.find(RecordKind::Task, &key).await {
                Holder::At(_) => {}
                Holder::Nowhere => return Err(error),
                Holder::Unknown => return Err(Holder::no_answer()),
            }
        }
        Ok(())
    }

    /// A task that is not in the store may be one that only the replica of its call knows.
    async fn locate_elsewhere(
        &self,
        task_id: &str,
        options: &CallOptions,
        access: TaskAccess,
        error: ActionError,
        progress: &mut impl Progress,
    ) -> Result<Located, ActionError> {
        let may_be_elsewhere = matches!(error.info.code, Code::NotFound | Code::StateUnavailable);
        if options.is_forwarded || !may_be_elsewhere {
            return Err(error);
        }
        let key = RecordKey::new(&self.agent, task_id);
        let holder = match self.state.peers.find(RecordKind::Task, &key).await {
            Holder::At(holder) => holder,
            Holder::Nowhere => return Err(error),
            Holder::Unknown => return Err(Holder::no_answer()),
        };
        match self.forward_task(holder, access, progress).await? {
            Some(reply) => Ok(Located::Forwarded(reply)),
            None => Err(Holder::no_answer()),
        }
    }

    /// `None` if the request did not reach the other replica, or if it can be repeated.
    async fn forward_task(
        &self,
        to: InstanceId,
        access: TaskAccess,
        progress: &mut impl Progress,
    ) -> Result<Option<Reply>, ActionError> {
        match progress.forward(to).await {
            Ok(reply) => Ok(Some(reply)),
            Err(ForwardError::Silent) if access == TaskAccess::Cancel => {
                let message = "the replica that follows the task stopped responding; look the task up again";
                Err(ActionError::new(Code::OutcomeUnknown, message).after_reaching_agent())
            }
            Err(
                ForwardError::Silent | ForwardError::Gone | ForwardError::Unsupported | ForwardError::NotKept,
            ) => Ok(None),
        }
    }
}
