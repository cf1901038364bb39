//! Lists tasks, for operators and for the caller to whom they belong.

use std::sync::Arc;
use std::time::SystemTime;

use futures_util::future::ready;
use futures_util::stream::{self, StreamExt as _};

use super::{LocalTask, TaskOutline, Tasks};
use crate::caller::Caller;
use crate::state::clock::Instant;

/// Records that are read from the store at the same time.
const CONCURRENT_READS: usize = 8;

/// A task in a list.
#[derive(Debug)]
pub(crate) struct ListedTask {
    pub id: String,
    /// The last state that the bridge has seen; `unknown` if it no longer tracks the task.
    pub state: String,
    /// Whether the task runs or waits for an answer.
    pub is_open: bool,
    pub is_submitted: bool,
    pub skill: Option<Arc<str>>,
    pub context_id: Option<String>,
    pub seen_at: SystemTime,
}

impl ListedTask {
    fn new(id: String, outline: &TaskOutline) -> Self {
        let task = outline.task();
        let is_open = outline.is_open();
        Self {
            id,
            state: match is_open || outline.state.is_final() {
                true => outline.state.to_string(),
                false => "unknown".to_owned(),
            },
            is_open,
            is_submitted: outline.is_submitted,
            skill: task.and_then(|task| task.skill.clone()),
            context_id: task.and_then(|task| task.context_id.clone()),
            seen_at: outline.seen_at,
        }
    }
}

impl Tasks {
    /// Up to `limit` tasks of an agent that this process has seen, the newest first, and how many more there are. Open
    /// tasks take precedence over those that have ended. A task of which only the store knows is not listed: the replica
    /// that follows it lists it. If a caller is given, only its own tasks are listed.
    pub(crate) async fn list(
        &self,
        agent: &Arc<str>,
        caller: Option<&Caller>,
        limit: usize,
    ) -> (Vec<ListedTask>, usize) {
        let (known, left_out) = {
            let (local, now) = (self.local(), Instant::now());
            let (rows, left_out) = match caller {
                Some(caller) => local.recent_of(agent, caller, limit, now),
                None => local.recent(agent, limit, now),
            };
            let known: Vec<_> = rows.into_iter().map(|(id, task)| (id.to_owned(), task.clone())).collect();
            (known, left_out)
        };
        let listed = known.into_iter().map(async |(id, local)| {
            let outline = match local {
                // A store that is unavailable lists nothing.
                LocalTask::InStore(_) => self.find_in_store(agent, &id).await.ok().flatten(),
                local => local.outline(),
            };
            // The agent may have used the id again, for another caller.
            let is_visible = |outline: &TaskOutline| caller.is_none_or(|caller| outline.caller == *caller);
            outline.filter(is_visible).map(|outline| ListedTask::new(id, &outline))
        });
        let listed = stream::iter(listed).buffered(CONCURRENT_READS);
        let mut tasks: Vec<_> = listed.filter_map(ready).collect().await;
        tasks.sort_by_key(|task| std::cmp::Reverse(task.seen_at));
        (tasks, left_out)
    }
}
