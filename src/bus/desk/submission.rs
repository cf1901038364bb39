//! A task that nobody waits for: its caller gets an id, and whoever follows it hears of its changes.

use async_nats::Subject;
use tokio::sync::OwnedSemaphorePermit;

use super::{Desk, finish};
use crate::action::once::{Reply, Running};
use crate::action::outcome::Outcome;
use crate::action::progress::{Frame, Progress};
use crate::bus::service::Call;

/// A submitted task: the caller is told its id, everyone else its changes.
pub(super) struct Submission<'a> {
    pub(super) desk: &'a Desk,
    pub(super) first: Option<First>,
    pub(super) task_id: Option<String>,
    pub(super) permits: Vec<OwnedSemaphorePermit>,
}

/// The reply that a submission owes its caller.
pub(super) struct First {
    pub(super) to: Subject,
    pub(super) call: Call,
    pub(super) running: Option<Running>,
    pub(super) permits: Vec<OwnedSemaphorePermit>,
}

impl Submission<'_> {
    async fn reply(&mut self, reply: Reply) {
        if let Some(First { to, call, running, permits }) = self.first.take() {
            finish(running, &reply);
            self.desk.respond(to, reply, call).await;
            // The agent's slot is free again; the place among the submitted tasks is not.
            self.permits = permits.into_iter().skip(1).collect();
        }
    }

    /// The end of the task: a reply if the caller has had none, and news for those who follow it.
    /// States are published where they are observed, so only errors are left.
    pub(super) async fn end(mut self, reply: Reply) {
        if self.first.is_some() {
            self.reply(reply.clone()).await;
        }
        if let (Err(error), Some(task_id)) = (reply, &self.task_id) {
            tracing::debug!(agent = %self.desk.agent.name, task_id, code = error.info.code.name(), "a submitted task was lost from sight");
            self.desk.actions.news(task_id, error.to_json()).await;
        }
    }
}

impl Progress for Submission<'_> {
    fn listens(&self) -> bool {
        false
    }

    /// The reply is due at once, and this is what there is to say.
    async fn waits(&mut self, outcome: &Outcome) {
        self.reply(Ok(outcome.to_json())).await;
    }

    async fn frame(&mut self, frame: Frame) {
        if let Frame::Task { id, .. } = frame {
            self.task_id = Some(id);
        }
        let (Some(id), Some(_)) = (&self.task_id, &self.first) else { return };
        // Remembered as under way, unless it has ended already: then the end is the reply. What is
        // remembered from before an answer is not news.
        let record = self.desk.actions.memory().ledger.task(self.desk.actions.agent(), id);
        let record = record.filter(|record| !record.state.is_settled());
        if let Some(Ok(reply)) = record.map(|record| record.reply.clone()) {
            self.reply(Ok(reply)).await;
        }
    }
}
