//! A task put together from what the agent tells: snapshots, updates, pieces of artifacts.
//!
//! The fold is the same for a stream, for polling, and for a single answer. Each step says what
//! is new in it, so that a caller can be told; at the end the fold is the task.

mod answered;
#[cfg(test)]
mod tests;

use std::collections::HashMap;

use super::assemble::{AnswerText, ArtifactRules};
use super::progress::Frame;
use crate::a2a::model::{Artifact, ArtifactUpdate, Event, Message, Part, StatusUpdate, Task, TaskState};

/// A task in the making.
#[derive(Debug)]
pub(crate) struct TaskBuilder<'a> {
    rules: &'a ArtifactRules,
    task: Option<Task>,
    direct: Option<Message>,
    // Everything said in states before the last, in order.
    status_texts: String,
    answer: AnswerText,
    told_task: bool,
    past: Past,
    index: Index,
    // Whether anything was said, in states or results, since then.
    has_content: bool,
    is_last: bool,
    // A failure in our conversation under another task's id, while nothing came after it.
    stray_failure: Option<StatusUpdate>,
    // What is held, and how much of that is history, which every snapshot brings anew.
    size: usize,
    history_size: usize,
    max_size: usize,
    tells: bool,
}

/// How much of what is known of a task is from before the answer that it was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Past {
    #[default]
    None,
    /// Its state is old: the agent repeats the task before it continues.
    Old,
    /// The bridge read the task before it sent the answer. The first event shows whether the agent continues this task.
    LookedUp,
}

/// What an artifact costs beside its parts.
const ARTIFACT: usize = 256;
/// Up to this many artifacts it is faster to compare than to look up.
const FEW: usize = 16;

/// Finds an artifact among many.
#[derive(Debug, Default)]
struct Index {
    // Id, or name where there is no id. Empty while there are few.
    places: HashMap<(Option<String>, Option<String>), usize>,
}

impl Index {
    fn position(&self, artifacts: &[Artifact], wanted: &Artifact) -> Option<usize> {
        match self.places.is_empty() {
            true => artifacts.iter().position(|known| is_same(known, wanted)),
            false => self.places.get(&Self::key(wanted)).copied(),
        }
    }

    /// The last of these artifacts is new.
    fn added(&mut self, artifacts: &[Artifact]) {
        if artifacts.len() <= FEW {
            return;
        }
        let unknown = if self.places.is_empty() { 0 } else { artifacts.len() - 1 };
        for (place, artifact) in artifacts.iter().enumerate().skip(unknown) {
            self.places.entry(Self::key(artifact)).or_insert(place);
        }
    }

    fn key(artifact: &Artifact) -> (Option<String>, Option<String>) {
        let name = artifact.name.clone().filter(|_| artifact.id.is_none());
        (artifact.id.clone(), name)
    }
}

/// The agent told more than the bridge holds for one task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooMuch;

impl<'a> TaskBuilder<'a> {
    /// Begins with nothing. All that is held may have `max_size` bytes. Without anybody to tell, no
    /// frames are made.
    pub(crate) fn new(rules: &'a ArtifactRules, max_size: usize, tells: bool) -> Self {
        Self {
            rules,
            task: None,
            direct: None,
            status_texts: String::new(),
            answer: AnswerText::default(),
            told_task: false,
            past: Past::None,
            index: Index::default(),
            has_content: false,
            is_last: false,
            stray_failure: None,
            size: 0,
            history_size: 0,
            max_size,
            tells,
        }
    }

    /// The task, as far as it is known.
    pub(crate) fn task(&self) -> Option<&Task> {
        self.task.as_ref()
    }

    /// The direct message, when that was the answer.
    pub(crate) fn direct(&self) -> Option<&Message> {
        self.direct.as_ref()
    }

    /// Everything that was said in states before the last, in order.
    pub(crate) fn status_texts(&self) -> &str {
        &self.status_texts
    }

    /// Whether nothing will change without the caller.
    pub(crate) fn is_settled(&self) -> bool {
        let settled = |task: &Task| task.state.is_settled();
        self.direct.is_some() || (self.past == Past::None && self.task.as_ref().is_some_and(settled))
    }

    /// Whether the agent has said that nothing follows.
    pub(crate) fn is_last(&self) -> bool {
        self.direct.is_some() || (self.is_last && self.is_settled())
    }

    /// Whether the task has ended without saying anything, as some streams do.
    pub(crate) fn is_bare(&self) -> bool {
        self.task.is_some() && !self.has_content
    }

    /// The end of `message`, the text of all results, that was not passed on as they came.
    pub(crate) fn untold<'m>(&self, message: &'m str) -> &'m str {
        if self.tells { self.answer.untold(message) } else { "" }
    }

    /// Takes what the agent told next.
    pub(crate) fn apply(&mut self, event: Event) -> Result<Vec<Frame>, TooMuch> {
        let mut frames = Vec::with_capacity(2);
        self.stray_failure = None;
        if self.past == Past::LookedUp {
            self.past = Past::Old;
            // Some agents take an answer for the beginning of a new task.
            if self.is_of_another_task(&event) {
                self.forget();
            }
        }
        if self.is_of_another_task(&event) {
            self.another_task(event, &mut frames)?;
            return Ok(frames);
        }
        if std::mem::take(&mut self.past) == Past::Old
            && let Some(task) = &mut self.task
        {
            // It goes on, whether it says so or not.
            (task.state, task.status_message) = (TaskState::Working, None);
        }
        match event {
            Event::Message(message) => {
                let text: String = message.parts.iter().filter_map(Part::as_text).collect();
                self.resize(0, text.len())?;
                if !text.is_empty() {
                    frames.push(Frame::Response(text));
                }
                self.direct = Some(message);
            }
            Event::Task(task) => self.snapshot(task, &mut frames)?,
            Event::Status(update) => self.status(update, &mut frames)?,
            Event::Artifact(update) => self.artifact(update, &mut frames)?,
        }
        Ok(frames)
    }

    /// Whether a state is that of another task than ours. An orchestrator may pass on what its helpers
    /// say. Results count as ours whoever made them: they came in answer to our message.
    fn is_of_another_task(&self, event: &Event) -> bool {
        let named = match event {
            Event::Task(task) => Some(&task.id),
            Event::Status(update) => update.task_id.as_ref(),
            Event::Message(_) | Event::Artifact(_) => None,
        };
        let ours = self.task.as_ref().map(|task| &task.id).filter(|id| !id.is_empty());
        named.zip(ours).is_some_and(|(named, ours)| named != ours)
    }

    /// Tells what another task says on its way. Its end is not told: a caller would take it for ours.
    fn another_task(&mut self, event: Event, frames: &mut Vec<Frame>) -> Result<(), TooMuch> {
        match event {
            Event::Status(update) if !update.state.is_settled() => {
                frames.push(state_frame(&update.state, update.message.as_ref()));
                self.collect(update.message.as_ref())?;
            }
            Event::Status(update) if update.state == TaskState::Failed && !self.is_settled() => {
                let ours = self.task.as_ref().and_then(|task| task.context_id.as_ref());
                let is_near = ours.is_some() && update.context_id.as_ref() == ours;
                self.stray_failure = Some(update).filter(|_| is_near);
            }
            _ => {}
        }
        Ok(())
    }

    /// Takes the end of a stream. A failure in our conversation that was its last word is ours: when
    /// an agent crashes, a2a-js tells so under a new task id, and says for ever that ours is working.
    pub(crate) fn end_of_stream(&mut self) -> Result<Vec<Frame>, TooMuch> {
        match self.stray_failure.take() {
            Some(update) => self.apply(Event::Status(StatusUpdate { task_id: None, ..update })),
            None => Ok(Vec::new()),
        }
    }

    /// Keeps what is said in a state.
    fn collect(&mut self, message: Option<&Message>) -> Result<(), TooMuch> {
        let Some(message) = message else { return Ok(()) };
        self.has_content = true;
        let before = self.status_texts.len();
        self.status_texts.extend(message.parts.iter().filter_map(Part::as_text));
        self.resize(before, self.status_texts.len())
    }

    fn snapshot(&mut self, mut snapshot: Task, frames: &mut Vec<Frame>) -> Result<(), TooMuch> {
        self.name(&snapshot.id, snapshot.context_id.as_deref(), frames);
        let news = self.task.as_ref().is_none_or(|task| {
            task.state != snapshot.state
                || message_id(&task.status_message) != message_id(&snapshot.status_message)
        });
        let artifacts = &task_mut(&mut self.task, &snapshot.id).artifacts;
        let mut news_of = Vec::new();
        for (position, artifact) in std::mem::take(&mut snapshot.artifacts).into_iter().enumerate() {
            // Without ids, artifacts of a snapshot are told apart by their place.
            let index = match &artifact.id {
                Some(_) => self.index.position(artifacts, &artifact),
                None => artifacts.get(position).filter(|known| is_same(known, &artifact)).map(|_| position),
            };
            let known = index.and_then(|index| artifacts.get(index));
            if known.is_none_or(|known| !same_parts(&known.parts, &artifact.parts)) {
                news_of.push((index, artifact));
            }
        }
        for (index, artifact) in news_of {
            let update =
                ArtifactUpdate { task_id: None, context_id: None, artifact, append: false, last_chunk: true };
            self.put(index, update, frames)?;
        }
        // The results first: a final state is the last word on them.
        if news {
            frames.push(state_frame(&snapshot.state, snapshot.status_message.as_ref()));
        }
        if !snapshot.history.is_empty() {
            let history = snapshot.history.iter().map(|message| size(&message.parts)).sum();
            let before = std::mem::replace(&mut self.history_size, history);
            self.resize(before, history)?;
        }
        self.has_content |= snapshot.status_message.is_some();
        let task = task_mut(&mut self.task, &snapshot.id);
        task.state = snapshot.state;
        task.context_id = snapshot.context_id.or(task.context_id.take());
        task.status_message = snapshot.status_message;
        if !snapshot.history.is_empty() {
            task.history = snapshot.history;
        }
        Ok(())
    }

    fn status(&mut self, update: StatusUpdate, frames: &mut Vec<Frame>) -> Result<(), TooMuch> {
        let id = self.id_for(update.task_id.as_deref());
        self.name(&id, update.context_id.as_deref(), frames);
        frames.push(state_frame(&update.state, update.message.as_ref()));
        if !update.state.is_settled() {
            self.collect(update.message.as_ref())?;
        }
        self.has_content |= update.message.is_some();
        self.is_last = update.is_last;
        let task = task_mut(&mut self.task, &id);
        task.context_id = update.context_id.or(task.context_id.take());
        task.state = update.state;
        task.status_message = update.message;
        Ok(())
    }

    fn artifact(&mut self, update: ArtifactUpdate, frames: &mut Vec<Frame>) -> Result<(), TooMuch> {
        let id = self.id_for(update.task_id.as_deref());
        self.name(&id, update.context_id.as_deref(), frames);
        let task = task_mut(&mut self.task, &id);
        if task.context_id.is_none() {
            task.context_id.clone_from(&update.context_id);
        }
        let index = self.index.position(&task.artifacts, &update.artifact);
        self.put(index, update, frames)
    }

    /// Adds a piece to the artifact at `index`, or a new artifact.
    fn put(
        &mut self,
        index: Option<usize>,
        update: ArtifactUpdate,
        frames: &mut Vec<Frame>,
    ) -> Result<(), TooMuch> {
        let Some(task) = &mut self.task else { return Ok(()) };
        self.has_content = true;
        let piece = &update.artifact;
        let place = index.unwrap_or(task.artifacts.len());
        let appended = update.append && index.is_some();
        let mut replaced = 0;
        let added;
        let known = match index.and_then(|index| task.artifacts.get_mut(index)) {
            Some(known) if update.append => {
                added = extend(&mut known.parts, &piece.parts);
                known
            }
            Some(known) => {
                replaced = length(&known.name) + size(&known.parts);
                let name = piece.name.clone().or(known.name.take());
                added = length(&name) + size(&piece.parts);
                *known = Artifact { id: piece.id.clone(), name, parts: piece.parts.clone(), extras: None };
                known
            }
            None => {
                let mut fresh = Artifact {
                    id: piece.id.clone(),
                    name: piece.name.clone(),
                    parts: Vec::new(),
                    extras: None,
                };
                added = ARTIFACT
                    + length(&piece.id)
                    + length(&piece.name)
                    + extend(&mut fresh.parts, &piece.parts);
                task.artifacts.push(fresh);
                self.index.added(&task.artifacts);
                let Some(fresh) = task.artifacts.last_mut() else {
                    return Ok(());
                };
                fresh
            }
        };
        if self.tells {
            let is_answer = self.rules.is_answer(known);
            let delta =
                if is_answer { self.answer.told(place, known, appended, &update.artifact) } else { None };
            frames.push(Frame::Artifact { update, is_answer });
            frames.extend(delta.map(Frame::Response));
        }
        // What was told cannot be taken back, so an artifact that is replaced again and again adds up.
        if self.answer.held() > self.max_size.saturating_mul(4) {
            return Err(TooMuch);
        }
        self.resize(replaced, added)
    }

    /// Tells the task's id once.
    fn name(&mut self, id: &str, context_id: Option<&str>, frames: &mut Vec<Frame>) {
        if !self.told_task && !id.is_empty() {
            self.told_task = true;
            frames.push(Frame::Task { id: id.to_owned(), context_id: context_id.map(str::to_owned) });
        }
    }

    fn id_for(&self, told: Option<&str>) -> String {
        let known = self.task.as_ref().map(|task| task.id.as_str()).filter(|id| !id.is_empty());
        // Once a task is known, results belong to it, whatever they call the task.
        known.or(told).unwrap_or_default().to_owned()
    }

    fn resize(&mut self, removed: usize, added: usize) -> Result<(), TooMuch> {
        self.size = (self.size + added).saturating_sub(removed);
        if self.size > self.max_size { Err(TooMuch) } else { Ok(()) }
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
    });
    // Some agents begin with news that does not say of which task.
    if task.id.is_empty() {
        id.clone_into(&mut task.id);
    }
    task
}

fn state_frame(state: &TaskState, message: Option<&Message>) -> Frame {
    let text = message.map(|message| message.parts.iter().filter_map(Part::as_text).collect());
    Frame::State { state: state.clone(), message: text.unwrap_or_default() }
}

fn message_id(message: &Option<Message>) -> Option<&str> {
    message.as_ref().and_then(|message| message.id.as_deref())
}

/// Artifacts are told apart by id; where an agent gives none, by name.
fn is_same(one: &Artifact, other: &Artifact) -> bool {
    match (&one.id, &other.id) {
        (Some(one), Some(other)) => one == other,
        (None, None) => one.name == other.name,
        _ => false,
    }
}

/// Adds parts, and returns how many bytes they add. Text that continues text joins it, so that a million tokens
/// are one part.
fn extend(parts: &mut Vec<Part>, more: &[Part]) -> usize {
    let mut added = 0;
    for part in more {
        match (parts.last_mut(), part) {
            (Some(Part::Text(text)), Part::Text(more)) => {
                text.push_str(more);
                added += more.len();
            }
            (_, part) => {
                added += part.allocated();
                parts.push(part.clone());
            }
        }
    }
    added
}

fn length(text: &Option<String>) -> usize {
    text.as_ref().map_or(0, String::len)
}

fn size(parts: &[Part]) -> usize {
    parts.iter().map(Part::allocated).sum()
}

/// Whether a snapshot brings nothing new about an artifact. Text may be cut into parts differently.
fn same_parts(one: &[Part], other: &[Part]) -> bool {
    let text = |parts: &[Part]| parts.iter().filter_map(Part::as_text).collect::<String>();
    let others =
        |parts: &[Part]| parts.iter().filter(|part| part.as_text().is_none()).cloned().collect::<Vec<_>>();
    let same = |(one, other): (&Part, &Part)| match (one, other) {
        (Part::Data(one), Part::Data(other)) => one.get() == other.get(),
        (Part::File(one), Part::File(other)) => one == other,
        _ => false,
    };
    let (mine, its) = (others(one), others(other));
    mine.len() == its.len() && mine.iter().zip(&its).all(same) && text(one) == text(other)
}
