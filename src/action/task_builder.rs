//! Builds a task from the events of an agent: snapshots, status updates and pieces of artifacts.
//!
//! It serves streams, polling and single responses. Each event yields the progress events that report its new content;
//! at the end the builder holds the complete task.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::sync::Arc;

use super::assemble::{ArtifactRules, is_same_text, text_of_parts, texts};
use super::progress::ProgressEvent;
use super::response_text::ResponseText;
use crate::a2a::model::{Artifact, ArtifactUpdate, Event, Message, Part, StatusUpdate, Task, TaskState};
use crate::memory::{MemoryAccount, MemoryCharge, SizeError};

/// The size of an artifact without its parts, and of what the builder remembers of it, in bytes.
const ARTIFACT_OVERHEAD: usize = 256;
/// Longer text grows by an eighth instead of doubling.
const LONG_TEXT: usize = 256 << 10;
/// Up to this many artifacts, comparing is faster than a map.
const MAX_UNINDEXED: usize = 16;

#[derive(Debug)]
pub(crate) struct TaskBuilder<'a> {
    rules: &'a ArtifactRules,
    task: Option<Task>,
    /// The message of an agent that responded without a task.
    pub(super) direct_message: Option<Message>,
    /// The text of all states before the last, in order.
    pub(super) status_texts: String,
    /// Reports the new content of the event that is being applied.
    progress: Vec<ProgressEvent>,
    streamed: ResponseText,
    is_task_reported: bool,
    /// Whether the state is one that an event log has, without the id of its message.
    is_state_restored: bool,
    before_answer: BeforeAnswer,
    index: ArtifactIndex,
    /// Whether each artifact belongs to the response. A name is matched once, because it may be long.
    are_responses: Vec<bool>,
    /// Whether the agent has sent any text or artifact, since the answer if there was one.
    has_content: bool,
    is_last: bool,
    /// A failure in the same conversation under another task id, as long as it is the last event.
    stray_failure: Option<StatusUpdate>,
    size: usize,
    /// The part of `size` that every snapshot replaces.
    history_size: usize,
    max_size: usize,
    /// The memory of the status message, which does not count for `max_size`, as its text may be in
    /// `status_texts` too.
    status_size: usize,
    memory: &'a Arc<MemoryAccount>,
    charge: Option<MemoryCharge>,
    reports_content: bool,
}

/// Whether the builder holds content from before the answer that the run has sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum BeforeAnswer {
    #[default]
    Nothing,
    /// The state is stale: the agent repeats the task before it continues.
    StaleState,
    /// The run read the task before it sent the answer. The first event shows whether the agent continues this task.
    WholeTask,
}

/// Finds an artifact among many.
#[derive(Debug, Default)]
struct ArtifactIndex {
    hasher: RandomState,
    /// The first position by the hash of the id, or of the name where there is no id. Empty up to [`MAX_UNINDEXED`]
    /// artifacts.
    positions: HashMap<u64, usize>,
}

impl ArtifactIndex {
    fn position(&self, artifacts: &[Artifact], wanted: &Artifact) -> Option<usize> {
        if self.positions.is_empty() {
            return artifacts.iter().position(|known| is_same(known, wanted));
        }
        let position = *self.positions.get(&self.hash(wanted))?;
        artifacts.get(position).filter(|known| is_same(known, wanted)).map(|_| position)
    }

    /// Adds the last of these artifacts.
    fn add_last(&mut self, artifacts: &[Artifact]) {
        if artifacts.len() <= MAX_UNINDEXED {
            return;
        }
        let indexed = if self.positions.is_empty() { 0 } else { artifacts.len() - 1 };
        for (position, artifact) in artifacts.iter().enumerate().skip(indexed) {
            let hash = self.hash(artifact);
            self.positions.entry(hash).or_insert(position);
        }
    }

    fn hash(&self, artifact: &Artifact) -> u64 {
        let name = artifact.name.as_ref().filter(|_| artifact.id.is_none());
        self.hasher.hash_one((&artifact.id, name))
    }
}

pub(super) type Applied = Result<Vec<ProgressEvent>, SizeError>;

impl<'a> TaskBuilder<'a> {
    /// The task may have `max_size` bytes, which `memory` is charged for.
    pub(crate) fn new(
        rules: &'a ArtifactRules,
        max_size: usize,
        reports_content: bool,
        memory: &'a Arc<MemoryAccount>,
    ) -> Self {
        Self {
            rules,
            task: None,
            direct_message: None,
            status_texts: String::new(),
            progress: Vec::new(),
            streamed: ResponseText::default(),
            is_task_reported: false,
            is_state_restored: false,
            before_answer: BeforeAnswer::Nothing,
            index: ArtifactIndex::default(),
            are_responses: Vec::new(),
            has_content: false,
            is_last: false,
            stray_failure: None,
            size: 0,
            history_size: 0,
            max_size,
            status_size: 0,
            memory,
            charge: None,
            reports_content,
        }
    }

    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.rules, self.max_size, self.reports_content, self.memory);
    }

    pub(crate) fn task(&self) -> Option<&Task> {
        self.task.as_ref()
    }

    /// The task, once the agent has assigned its id.
    pub(crate) fn task_with_id(&self) -> Option<&Task> {
        self.task().filter(|task| !task.id.is_empty())
    }

    /// The memory that it holds, in bytes.
    pub(crate) fn allocated(&self) -> usize {
        // Text that grows has some room at its end.
        let stray = self.stray_failure.as_ref().and_then(|update| update.message.as_ref());
        self.size + self.size / 8 + self.status_size + stray.map_or(0, Message::allocated)
    }

    /// Whether the task is final or waits for the caller.
    pub(crate) fn is_settled(&self) -> bool {
        let is_settled = |task: &Task| task.state.is_settled();
        self.direct_message.is_some()
            || (self.before_answer == BeforeAnswer::Nothing && self.task.as_ref().is_some_and(is_settled))
    }

    /// Whether the agent has declared that no event follows, so that the run can close the stream.
    pub(crate) fn is_stream_finished(&self) -> bool {
        self.direct_message.is_some() || (self.is_last && self.is_settled())
    }

    /// Whether the task has no content, as at the end of some streams.
    pub(crate) fn is_empty(&self) -> bool {
        self.task.is_some() && !self.has_content
    }

    /// The end of `message`, the text of all response artifacts, that was not streamed.
    pub(crate) fn not_streamed<'m>(&self, message: &'m str) -> &'m str {
        if self.reports_content { self.streamed.rest_of(message) } else { "" }
    }

    /// Starts with a task as it was before its answer. Its content was reported before.
    pub(crate) fn start_from(&mut self, task: Task) {
        if self.apply(Event::Task(task)).is_err() {
            return self.reset();
        }
        self.before_answer = BeforeAnswer::WholeTask;
        (self.is_task_reported, self.has_content) = (false, false);
    }

    /// Restores what was reported of a task by a replica that is gone. If that does not fit, the content of the task is
    /// reported again.
    pub(crate) fn restore(&mut self, task_id: &str, reported: Vec<Event>) {
        if reported.is_empty() {
            return;
        }
        for event in reported {
            if self.apply(event).is_err() {
                return self.reset();
            }
        }
        task_mut(&mut self.task, task_id);
        (self.is_task_reported, self.is_state_restored) = (true, true);
    }

    /// Applies the first event after an answer. A snapshot that still waits is stale: it does not settle the task,
    /// and its content was reported before.
    pub(crate) fn apply_first_after_answer(&mut self, event: Event) -> Applied {
        let is_stale = matches!(&event, Event::Task(task) if task.state.awaits_caller())
            && !(self.before_answer == BeforeAnswer::WholeTask && self.is_of_another_task(&event));
        let mut progress = self.apply(event)?;
        if is_stale {
            self.before_answer = BeforeAnswer::StaleState;
            progress.retain(|event| matches!(event, ProgressEvent::Task { .. }));
        }
        Ok(progress)
    }

    pub(crate) fn apply(&mut self, event: Event) -> Applied {
        self.progress = Vec::with_capacity(2);
        self.stray_failure = None;
        if self.before_answer == BeforeAnswer::WholeTask {
            self.before_answer = BeforeAnswer::StaleState;
            // Some agents begin a new task with an answer.
            if self.is_of_another_task(&event) {
                self.reset();
            }
        }
        if self.is_of_another_task(&event) {
            self.apply_of_another_task(event)?;
            return Ok(std::mem::take(&mut self.progress));
        }
        if std::mem::take(&mut self.before_answer) == BeforeAnswer::StaleState
            && let Some(task) = &mut self.task
        {
            // The task continues, whether the agent says so or not.
            (task.state, task.status_message) = (TaskState::Working, None);
        }
        match event {
            Event::Message(message) => {
                self.resize(0, size(&message.parts))?;
                let text = text_of_parts(&message.parts);
                if !text.is_empty() {
                    self.progress.push(ProgressEvent::Response(text));
                }
                self.direct_message = Some(message);
            }
            Event::Task(task) => self.apply_snapshot(task)?,
            Event::Status(update) => self.apply_status(update)?,
            Event::Artifact(update) => self.apply_artifact(update)?,
        }
        Ok(std::mem::take(&mut self.progress))
    }

    /// Whether a state belongs to another task: an orchestrator may pass on the events of its helpers. Artifacts
    /// always count as content of this task, because the agent sent them in response to its message.
    fn is_of_another_task(&self, event: &Event) -> bool {
        let id = match event {
            Event::Task(task) => Some(&task.id),
            Event::Status(update) => update.task_id.as_ref(),
            Event::Message(_) | Event::Artifact(_) => None,
        };
        id.zip(self.task_with_id()).is_some_and(|(id, task)| *id != task.id)
    }

    /// Reports the progress of another task, but not its end, which a caller would take for the end of this task.
    fn apply_of_another_task(&mut self, event: Event) -> Result<(), SizeError> {
        match event {
            Event::Status(update) if !update.state.is_settled() => {
                self.progress.push(state_event(&update.state, update.message.as_ref()));
                self.collect_text(update.message.as_ref())?;
            }
            Event::Status(update) if update.state == TaskState::Failed && !self.is_settled() => {
                let context_id = self.task.as_ref().and_then(|task| task.context_id.as_ref());
                let is_same_context = context_id.is_some() && update.context_id.as_ref() == context_id;
                self.stray_failure = Some(update).filter(|_| is_same_context);
                self.resize(0, 0)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Applies the end of a stream. If the last event was a failure in the same session but under another task id, it
    /// counts as the failure of this task: when an agent crashes, a2a-js reports it under a new task id, and reports
    /// this task as working forever.
    pub(crate) fn end_stream(&mut self) -> Applied {
        match self.stray_failure.take() {
            Some(update) => self.apply(Event::Status(StatusUpdate { task_id: None, ..update })),
            None => Ok(Vec::new()),
        }
    }

    fn collect_text(&mut self, message: Option<&Message>) -> Result<(), SizeError> {
        let Some(message) = message else { return Ok(()) };
        self.has_content = true;
        let before = self.status_texts.len();
        texts(&message.parts).for_each(|text| push_text(&mut self.status_texts, text));
        self.resize(before, self.status_texts.len())
    }

    fn apply_snapshot(&mut self, mut snapshot: Task) -> Result<(), SizeError> {
        self.report_task(&snapshot.id, snapshot.context_id.as_deref());
        let is_restored = std::mem::take(&mut self.is_state_restored);
        let is_same_message = |one: &Option<Message>, other: &Option<Message>| match is_restored {
            true => message_text(one) == message_text(other),
            false => message_id(one) == message_id(other),
        };
        let is_new_state = self.task.as_ref().is_none_or(|task| {
            task.state != snapshot.state || !is_same_message(&task.status_message, &snapshot.status_message)
        });
        let artifacts = &task_mut(&mut self.task, &snapshot.id).artifacts;
        let mut changed = Vec::new();
        for (position, artifact) in std::mem::take(&mut snapshot.artifacts).into_iter().enumerate() {
            // Without ids, the position distinguishes the artifacts of a snapshot.
            let index = match &artifact.id {
                Some(_) => self.index.position(artifacts, &artifact),
                None => artifacts.get(position).filter(|known| is_same(known, &artifact)).map(|_| position),
            };
            let known = index.and_then(|index| artifacts.get(index));
            if known.is_none_or(|known| !same_parts(&known.parts, &artifact.parts)) {
                changed.push((index, artifact));
            }
        }
        for (index, artifact) in changed {
            let update =
                ArtifactUpdate { task_id: None, context_id: None, artifact, append: false, last_chunk: true };
            self.put_artifact(index, update)?;
        }
        // The artifacts first: a caller expects none after a final state.
        if is_new_state {
            self.progress.push(state_event(&snapshot.state, snapshot.status_message.as_ref()));
        }
        if !snapshot.history.is_empty() {
            let history = snapshot.history.iter().map(Message::allocated).sum();
            let before = std::mem::replace(&mut self.history_size, history);
            self.resize(before, history)?;
        }
        self.has_content |= snapshot.status_message.is_some();
        self.resize_status(snapshot.status_message.as_ref())?;
        let task = task_mut(&mut self.task, &snapshot.id);
        task.state = snapshot.state;
        task.context_id = snapshot.context_id.or(task.context_id.take());
        task.status_message = snapshot.status_message;
        if !snapshot.history.is_empty() {
            task.history = snapshot.history;
        }
        Ok(())
    }

    fn apply_status(&mut self, update: StatusUpdate) -> Result<(), SizeError> {
        let id = self.id_for(update.task_id.as_deref());
        self.report_task(&id, update.context_id.as_deref());
        self.progress.push(state_event(&update.state, update.message.as_ref()));
        if !update.state.is_settled() {
            self.collect_text(update.message.as_ref())?;
        }
        self.has_content |= update.message.is_some();
        self.is_last = update.is_last;
        self.resize_status(update.message.as_ref())?;
        let task = task_mut(&mut self.task, &id);
        task.context_id = update.context_id.or(task.context_id.take());
        task.state = update.state;
        task.status_message = update.message;
        Ok(())
    }

    fn apply_artifact(&mut self, update: ArtifactUpdate) -> Result<(), SizeError> {
        let id = self.id_for(update.task_id.as_deref());
        self.report_task(&id, update.context_id.as_deref());
        let task = task_mut(&mut self.task, &id);
        if task.context_id.is_none() {
            task.context_id.clone_from(&update.context_id);
        }
        let index = self.index.position(&task.artifacts, &update.artifact);
        self.put_artifact(index, update)
    }

    /// Updates the artifact at `index`, or adds a new one.
    fn put_artifact(&mut self, index: Option<usize>, mut update: ArtifactUpdate) -> Result<(), SizeError> {
        let Some(task) = &mut self.task else { return Ok(()) };
        self.has_content = true;
        let piece = &mut update.artifact;
        let position = index.unwrap_or(task.artifacts.len());
        let is_append = update.append && index.is_some();
        let (mut removed, mut added) = (0, 0);
        if index.is_none() {
            let (id, name) = (piece.id.clone(), piece.name.clone());
            added += ARTIFACT_OVERHEAD + length(&id) + length(&name);
            task.artifacts.push(Artifact { id, name, parts: Vec::new(), extras: None });
            self.index.add_last(&task.artifacts);
            self.are_responses.push(false);
        }
        let known = task.artifacts.get_mut(position).zip(self.are_responses.get_mut(position));
        let Some((known, is_response)) = known else { return Ok(()) };
        if !is_append {
            removed += length(&known.name) + size(&known.parts);
            known.id.clone_from(&piece.id);
            known.name = piece.name.clone().or(known.name.take());
            // Not `clear`: the memory of the old parts is no longer counted.
            known.parts = Vec::new();
            added += length(&known.name);
            // Matching a long name takes time, and an update without a name does not change it.
            if index.is_none() || piece.name.is_some() {
                *is_response = self.reports_content && self.rules.is_response(known);
            }
        }
        let parts = if self.reports_content { piece.parts.clone() } else { std::mem::take(&mut piece.parts) };
        added += extend(&mut known.parts, parts);
        if self.reports_content {
            let is_response = *is_response;
            let text = is_response
                .then(|| self.streamed.update(position, known, is_append, &update.artifact))
                .flatten();
            self.progress.push(ProgressEvent::Artifact { update, is_response });
            self.progress.extend(text.map(ProgressEvent::Response));
        }
        // Streamed text cannot be taken back, so an artifact that is replaced repeatedly adds up.
        if self.streamed.size() > self.max_size.saturating_mul(4) {
            return Err(SizeError::TooLarge);
        }
        self.resize(removed, added)
    }

    /// Reports the task's id once.
    fn report_task(&mut self, id: &str, context_id: Option<&str>) {
        if !self.is_task_reported && !id.is_empty() {
            self.is_task_reported = true;
            let context_id = context_id.map(str::to_owned);
            self.progress.push(ProgressEvent::Task { id: id.to_owned(), context_id });
        }
    }

    fn id_for(&self, reported: Option<&str>) -> String {
        // Once the task is known, artifacts belong to it, whatever task id they have.
        let known = self.task_with_id().map(|task| task.id.as_str());
        known.or(reported).unwrap_or_default().to_owned()
    }

    fn resize(&mut self, removed: usize, added: usize) -> Result<(), SizeError> {
        self.size = (self.size + added).saturating_sub(removed);
        if self.size > self.max_size {
            return Err(SizeError::TooLarge);
        }
        let allocated = self.allocated();
        Ok(self.memory.cover(&mut self.charge, allocated)?)
    }

    fn resize_status(&mut self, message: Option<&Message>) -> Result<(), SizeError> {
        self.status_size = message.map_or(0, Message::allocated);
        self.resize(0, 0)
    }
}

fn task_mut<'t>(task: &'t mut Option<Task>, id: &str) -> &'t mut Task {
    let task = task.get_or_insert_with(|| Task {
        id: String::new(),
        context_id: None,
        state: TaskState::Submitted,
        status_message: None,
        artifacts: Vec::new(),
        history: Vec::new(),
        memory: None,
    });
    // Some agents begin with events that have no task id.
    if task.id.is_empty() {
        id.clone_into(&mut task.id);
    }
    task
}

fn state_event(state: &TaskState, message: Option<&Message>) -> ProgressEvent {
    let text = message.map(|message| text_of_parts(&message.parts));
    ProgressEvent::State { state: state.clone(), message: text.unwrap_or_default() }
}

fn message_text(message: &Option<Message>) -> String {
    message.as_ref().map(|message| text_of_parts(&message.parts)).unwrap_or_default()
}

fn message_id(message: &Option<Message>) -> Option<&str> {
    message.as_ref().and_then(|message| message.id.as_deref())
}

/// The id distinguishes artifacts, or the name if the agent gives no id.
fn is_same(one: &Artifact, other: &Artifact) -> bool {
    match (&one.id, &other.id) {
        (Some(one), Some(other)) => one == other,
        (None, None) => one.name == other.name,
        _ => false,
    }
}

/// Appends parts, and returns how many bytes they add. Text is appended to a text part, so that a million tokens
/// are one part.
fn extend(parts: &mut Vec<Part>, more: Vec<Part>) -> usize {
    let mut added = 0;
    for part in more {
        match (parts.last_mut(), part) {
            (Some(Part::Text(text)), Part::Text(more)) => {
                push_text(text, &more);
                added += more.len();
            }
            (_, part) => {
                added += part.allocated();
                parts.push(part);
            }
        }
    }
    added
}

fn push_text(text: &mut String, more: &str) {
    if text.len() > LONG_TEXT && text.capacity() - text.len() < more.len() {
        text.reserve_exact(text.len() / 8 + more.len());
    }
    text.push_str(more);
}

fn length(text: &Option<String>) -> usize {
    text.as_ref().map_or(0, String::len)
}

fn size(parts: &[Part]) -> usize {
    parts.iter().map(Part::allocated).sum()
}

/// Compares the parts of an artifact. Text may be divided into parts differently.
fn same_parts(one: &[Part], other: &[Part]) -> bool {
    fn others(parts: &[Part]) -> impl Iterator<Item = &Part> {
        parts.iter().filter(|part| part.as_text().is_none())
    }
    let is_same = |(one, other): (&Part, &Part)| match (one, other) {
        (Part::Data(one), Part::Data(other)) => one.get() == other.get(),
        (Part::File(one), Part::File(other)) => one == other,
        _ => false,
    };
    others(one).count() == others(other).count()
        && others(one).zip(others(other)).all(is_same)
        && is_same_text(texts(one), texts(other))
}
