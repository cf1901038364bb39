//! Forks: a session that goes on from a message of another one, without a copy of what was said before.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::calls::AgentRequest;
use super::lineage::{Lineage, MAX_DEPTH};
use super::messages::{self, Content, Role};
use super::projector::{Projected, SessionRef};
use super::service::{SessionView, Sessions, check_revision, parse, unavailable};
use super::summary::{
    ChildLink, ForkPayload, ForkReason, ForkedPayload, MAX_FORK_TIMES, ParentLink, Position, Summary,
};
use crate::caller::Caller;
use crate::events::codec::NewEvent;
use crate::events::event::EventType;
use crate::events::records::RecordPart;
use crate::events::run_record::RunRecord;
use crate::events::store::LogKey;
use crate::json::to_bytes;
use crate::reply::error::{ActionError, Code};
use crate::text::Timestamp;

/// Forks of one session within [`WINDOW`].
const MAX_FORKS: usize = MAX_FORK_TIMES;
const WINDOW: Duration = Duration::from_secs(60);
/// Forks of one session at all.
const MAX_CHILDREN: usize = 1000;
/// Earlier forms of a message that are kept.
const MAX_EDITS: usize = 20;
/// Maximum bytes of an edited message.
const MAX_CONTENT: usize = 256 << 10;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object")]
struct ForkRequest {
    id: String,
    at: u64,
    reason: ForkReason,
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    on_running: OnRunning,
    #[serde(default)]
    run: bool,
    #[serde(default)]
    revision: Option<u64>,
}

/// What becomes of the runs of the parent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OnRunning {
    #[default]
    Cancel,
    Orphan,
}

/// One fork of a session at a time in this process, so that the limit holds.
#[derive(Debug, Default)]
pub(crate) struct ForkLocks(Mutex<HashMap<LogKey, Arc<tokio::sync::Mutex<()>>>>);

impl ForkLocks {
    fn of(&self, key: &LogKey) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        Arc::clone(locks.entry(key.clone()).or_default())
    }
}

impl Sessions {
    pub(crate) async fn fork(&self, caller: &Caller, body: &[u8]) -> Result<Bytes, ActionError> {
        let request: ForkRequest = parse(body)?;
        let parent = Self::session(caller, &request.id)?;
        if request.content.as_ref().is_some_and(|content| content.len() > MAX_CONTENT) {
            return Err(ActionError::new(Code::TooLarge, "`content` must have at most 256 KiB"));
        }
        let lock = self.forks.of(&parent.key);
        let _forking = lock.lock().await;
        let found = self.find(&parent).await?;
        check_revision(&found, request.revision)?;
        let point = self.fork_point(&parent, &found, &request).await?;
        self.check_limits(caller, &found).await?;
        let orphaned = self.end_runs(&parent, &found, request.on_running).await?;

        let child = SessionRef::new(caller, &Uuid::new_v4().to_string());
        // The parent learns of its fork first: it keeps what the fork needs.
        let forked = ForkedPayload {
            child: ChildLink { child: Arc::clone(&child.id), index: point.link.parent_index },
            message_index: request.at,
            reason: request.reason,
            orphaned,
        };
        let forked = NewEvent::new(EventType::Forked, &forked);
        self.append(&parent, vec![forked], false).await.map_err(unavailable)?;
        let events = first_events(&found, &point, request.content.as_deref());
        self.append(&child, events, true).await.map_err(unavailable)?;
        // Behind the reply: the next reader would do it, too.
        super::projector::project_later(&self.log, parent.clone());
        let forked = self.find(&child).await?;
        let asked = match request.run {
            true => self.ask(&child, &found, point.question).await,
            false => Ok(()),
        };
        #[derive(Serialize)]
        struct Body<'a> {
            #[serde(flatten)]
            session: SessionView<'a>,
            /// The fork exists even if its agent cannot be asked.
            #[serde(skip_serializing_if = "Option::is_none")]
            run_error: Option<Value>,
        }
        let run_error =
            asked.err().map(|error| json!({ "code": error.info.code, "message": error.message_for_logs() }));
        Ok(to_bytes(&Body { session: SessionView::new(&forked), run_error }))
    }

    /// Where the fork begins, or why there can be none.
    async fn fork_point(
        &self,
        parent: &SessionRef,
        found: &Projected,
        request: &ForkRequest,
    ) -> Result<ForkPoint, ActionError> {
        let summary = &found.summary;
        let (at, count) = (request.at, summary.message_count);
        if at > count {
            let message = format!("`at` is {at}, and the session has {count} messages");
            return Err(ActionError::invalid(message));
        }
        if summary.depth() >= MAX_DEPTH {
            return Err(ActionError::invalid(format!("a session has at most {MAX_DEPTH} ancestors")));
        }
        let lineage = Lineage::of(self.store(), parent, summary.clone()).await?;
        let expired = || ActionError::invalid("the messages at `at` are no longer kept");
        let replaced = match at < count {
            true => Some(lineage.position(self.store(), at).await?.ok_or_else(expired)?),
            false => None,
        };
        let last = match at.checked_sub(1) {
            Some(last) => Some(lineage.position(self.store(), last).await?.ok_or_else(expired)?),
            None => None,
        };
        let question = match (&request.content, request.run, &last) {
            (_, false, _) => None,
            (Some(content), true, _) => Some(Question { content: content.clone(), ..Question::default() }),
            (None, true, Some(last)) if last.role == Role::User => {
                let question = read_question(self, &lineage, last).await?;
                Some(question.ok_or_else(expired)?)
            }
            (None, true, _) => {
                return Err(ActionError::invalid("`run` needs a last message of the user, or `content`"));
            }
        };
        if request.run && summary.agent.is_none() {
            return Err(ActionError::invalid(
                "`run` needs a session with an agent; no agent was asked so far",
            ));
        }
        let link = ParentLink {
            parent: Arc::clone(&parent.id),
            parent_index: replaced
                .as_ref()
                .map_or(summary.last_index, |position| position.event.saturating_sub(1)),
            parent_start: summary.start,
            message_index: at,
            reason: request.reason,
            depth: summary.depth() + 1,
            chain: last.map(|last| last.chain).unwrap_or_default(),
        };
        Ok(ForkPoint { link, replaced, question })
    }

    async fn check_limits(&self, caller: &Caller, found: &Projected) -> Result<(), ActionError> {
        self.check_room(caller).await?;
        if found.summary.children.len() >= MAX_CHILDREN {
            return Err(ActionError::invalid(format!("a session has at most {MAX_CHILDREN} forks")));
        }
        let now = SystemTime::now();
        let is_recent = |at: &&String| {
            let at = at.parse::<Timestamp>().map(|Timestamp(at)| at);
            at.is_ok_and(|at| now.duration_since(at).unwrap_or_default() < WINDOW)
        };
        if found.summary.forked_at.iter().filter(is_recent).count() >= MAX_FORKS {
            let message = format!("at most {MAX_FORKS} forks of a session in a minute; try again later");
            return Err(ActionError::new(Code::Busy, message));
        }
        Ok(())
    }

    /// Cancels the runs that are under way, if that is wanted. Returns those that go on.
    async fn end_runs(
        &self,
        parent: &SessionRef,
        found: &Projected,
        how: OnRunning,
    ) -> Result<Vec<Uuid>, ActionError> {
        let mut orphaned = Vec::new();
        for run in self.running(parent, found).await? {
            if how == OnRunning::Orphan || !self.calls.cancel(&parent.caller, &run).await {
                orphaned.push(run.run);
            }
        }
        Ok(orphaned)
    }

    /// The runs that are under way.
    pub(super) async fn running(
        &self,
        session: &SessionRef,
        found: &Projected,
    ) -> Result<Vec<RunRecord>, ActionError> {
        let mut running = Vec::new();
        for run in &found.summary.running {
            let record = self.store().read_record(&session.record(RecordPart::Run(*run))).await?;
            running.extend(record.and_then(|record| serde_json::from_slice::<RunRecord>(&record.value).ok()));
        }
        Ok(running)
    }

    /// Asks the agent of the parent with the last message.
    async fn ask(
        &self,
        child: &SessionRef,
        parent: &Projected,
        question: Option<Question>,
    ) -> Result<(), ActionError> {
        let (Some(agent), Some(question)) = (&parent.summary.agent, question) else { return Ok(()) };
        let Question { content, files, data } = question;
        let urls: Vec<&Value> = files.iter().filter_map(|file| file.get("url")).collect();
        let body = json!({
            "prompt": content, "files": urls, "data": data, "meta": { "session_id": child.id },
        });
        let request = AgentRequest {
            caller: &child.caller,
            agent,
            instance: parent.summary.instance.as_deref(),
            skill: parent.summary.skill.as_deref(),
            body: to_bytes(&body),
        };
        self.calls.ask(request).await
    }
}

#[derive(Debug)]
struct ForkPoint {
    link: ParentLink,
    /// The message in whose place the fork goes on.
    replaced: Option<Position>,
    /// What the agent is asked.
    question: Option<Question>,
}

#[derive(Debug, Default)]
struct Question {
    content: String,
    files: Vec<Value>,
    data: Option<Value>,
}

/// The events with which the log of a fork begins.
fn first_events(parent: &Projected, point: &ForkPoint, content: Option<&str>) -> Vec<NewEvent> {
    let Summary { title, agent, skill, config, .. } = &parent.summary;
    let fork = ForkPayload {
        link: point.link.clone(),
        title: title.clone(),
        agent: agent.clone(),
        skill: skill.clone(),
        config: config.clone(),
    };
    let mut events = vec![NewEvent::new(EventType::Fork, &fork)];
    let Some(content) = content else { return events };
    if let Some(replaced) = point.replaced.as_ref().filter(|replaced| replaced.role == Role::User) {
        // References: a copy would outlive a redaction.
        let mut previous = replaced.previous.clone();
        previous.push(replaced.event);
        let previous = previous.split_off(previous.len().saturating_sub(MAX_EDITS));
        let edit = json!({ "message_index": point.link.message_index, "previous": previous });
        events.push(NewEvent::new(EventType::Edit, &edit));
    }
    events.push(NewEvent::new(EventType::UserMessage, &json!({ "content": content })));
    events
}

async fn read_question(
    sessions: &Sessions,
    lineage: &Lineage,
    position: &Position,
) -> Result<Option<Question>, ActionError> {
    let mut events = lineage.events(sessions.store(), position.event.saturating_sub(1));
    while let Some(batch) = events.next().await? {
        let Some((index, event)) = batch.events().next() else { continue };
        let content =
            messages::content(event).filter(|content| index == position.event && !content.is_redacted);
        return Ok(content.map(|Content { text, files, data, .. }| Question { content: text, files, data }));
    }
    Ok(None)
}
