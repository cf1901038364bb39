//! A task put together from what the agent tells: snapshots, updates, pieces of artifacts.
//!
//! The fold is the same for a stream, for polling, and for a single answer. Each step says what
//! is new in it, so that a caller can be told; at the end the fold is the task.

use super::assemble::{AnswerText, ArtifactRules};
use super::progress::Frame;
use crate::a2a::model::{Artifact, ArtifactUpdate, Event, Message, Part, StatusUpdate, Task, TaskState};

/// A task in the making.
#[derive(Debug)]
pub struct Fold<'a> {
    rules: &'a ArtifactRules,
    task: Option<Task>,
    direct: Option<Message>,
    // Everything said in states before the last, in order.
    status_texts: String,
    answer: AnswerText,
    told_task: bool,
    // An agent may repeat the old task before it continues with it.
    is_stale: bool,
    is_last: bool,
    // What is held, and how much of that is history, which every snapshot brings anew.
    size: usize,
    history_size: usize,
    max_size: usize,
    tells: bool,
}

/// What an artifact costs beside its parts.
const ARTIFACT: usize = 64;

/// The agent told more than the bridge holds for one task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooMuch;

impl<'a> Fold<'a> {
    /// Begins with nothing. All that is held may have `max_size` bytes. Without anybody to tell, no
    /// frames are made.
    pub fn new(rules: &'a ArtifactRules, max_size: usize, tells: bool) -> Self {
        Self {
            rules,
            task: None,
            direct: None,
            status_texts: String::new(),
            answer: AnswerText::default(),
            told_task: false,
            is_stale: false,
            is_last: false,
            size: 0,
            history_size: 0,
            max_size,
            tells,
        }
    }

    /// The task, as far as it is known.
    pub fn task(&self) -> Option<&Task> {
        self.task.as_ref()
    }

    /// The direct message, when that was the answer.
    pub fn direct(&self) -> Option<&Message> {
        self.direct.as_ref()
    }

    /// Everything that was said in states before the last, in order.
    pub fn status_texts(&self) -> &str {
        &self.status_texts
    }

    /// Whether nothing will change without the caller.
    pub fn is_settled(&self) -> bool {
        let settled = |task: &Task| task.state.is_final() || task.state.is_waiting();
        self.direct.is_some() || (!self.is_stale && self.task.as_ref().is_some_and(settled))
    }

    /// Whether the agent has said that nothing follows.
    pub fn is_last(&self) -> bool {
        self.direct.is_some() || (self.is_last && self.is_settled())
    }

    /// Whether the task has ended without saying anything, as some streams do.
    pub fn is_bare(&self) -> bool {
        let bare = |task: &Task| task.artifacts.is_empty() && task.status_message.is_none();
        self.status_texts.is_empty() && self.task.as_ref().is_some_and(bare)
    }

    /// Takes the first event of an answered question's stream: an old snapshot that still waits
    /// does not end it, and what it holds was told before.
    pub fn apply_first_after_answer(&mut self, event: Event) -> Result<Vec<Frame>, TooMuch> {
        let is_old = matches!(&event, Event::Task(task) if task.state.is_waiting());
        let mut frames = self.apply(event)?;
        if is_old {
            self.is_stale = true;
            frames.retain(|frame| matches!(frame, Frame::Task { .. }));
        }
        Ok(frames)
    }

    /// Takes what the agent told next.
    pub fn apply(&mut self, event: Event) -> Result<Vec<Frame>, TooMuch> {
        let mut frames = Vec::with_capacity(2);
        self.is_stale = false;
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
                Some(_) => artifacts.iter().position(|known| known.id == artifact.id),
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
        let is_open = !(update.state.is_final() || update.state.is_waiting());
        if is_open && let Some(message) = &update.message {
            let before = self.status_texts.len();
            self.status_texts.extend(message.parts.iter().filter_map(Part::as_text));
            self.resize(before, self.status_texts.len())?;
        }
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
        task.context_id = update.context_id.clone().or(task.context_id.take());
        let index = task.artifacts.iter().position(|known| is_same(known, &update.artifact));
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
        let added = size(&update.artifact.parts);
        let piece = &update.artifact;
        let (mut replaced, mut named) = (0, 0);
        let known = match index.and_then(|index| task.artifacts.get_mut(index)) {
            Some(known) if update.append => {
                extend(&mut known.parts, &piece.parts);
                known
            }
            Some(known) => {
                replaced = size(&known.parts);
                let name = piece.name.clone().or(known.name.take());
                *known = Artifact { id: piece.id.clone(), name, parts: piece.parts.clone() };
                known
            }
            None => {
                named = ARTIFACT
                    + piece.id.as_ref().map_or(0, String::len)
                    + piece.name.as_ref().map_or(0, String::len);
                let mut fresh =
                    Artifact { id: piece.id.clone(), name: piece.name.clone(), parts: Vec::new() };
                extend(&mut fresh.parts, &piece.parts);
                task.artifacts.push(fresh);
                let Some(fresh) = task.artifacts.last_mut() else {
                    return Ok(());
                };
                fresh
            }
        };
        if self.tells {
            let is_answer = self.rules.is_answer(known);
            let delta =
                if is_answer { self.answer.told(known, update.append, &update.artifact) } else { None };
            frames.push(Frame::Artifact(update));
            frames.extend(delta.map(Frame::Response));
        }
        // What was told cannot be taken back, so an artifact that is replaced again and again adds up.
        if self.answer.held() > self.max_size.saturating_mul(4) {
            return Err(TooMuch);
        }
        self.resize(replaced, added + named)
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
        // Once a task is known, news is about it, whatever it calls the task.
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
    Frame::State { state: state.to_string(), message: text.unwrap_or_default() }
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

/// Adds parts; text that continues text joins it, so that a million tokens are one part.
fn extend(parts: &mut Vec<Part>, more: &[Part]) {
    for part in more {
        match (parts.last_mut(), part) {
            (Some(Part::Text(text)), Part::Text(more)) => text.push_str(more),
            (_, part) => parts.push(part.clone()),
        }
    }
}

fn size(parts: &[Part]) -> usize {
    use crate::a2a::model::FileContent;
    let one = |part: &Part| match part {
        Part::Text(text) => text.len(),
        Part::Data(data) => data.get().len(),
        Part::File(file) => match &file.content {
            FileContent::Base64(bytes) => bytes.len(),
            FileContent::Uri(uri) => uri.len(),
        },
    };
    parts.iter().map(one).sum()
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

#[cfg(test)]
mod tests {
    use super::*;

    struct Told {
        artifacts: usize,
        response: String,
        states: Vec<String>,
    }

    fn rules() -> ArtifactRules {
        ArtifactRules { answer: vec!["*".into()], notice: vec!["plan_*".into()] }
    }

    fn told(fold: &mut Fold<'_>, events: &[&str]) -> Told {
        let mut told = Told { artifacts: 0, response: String::new(), states: Vec::new() };
        for event in events {
            for frame in fold.apply(Event::decode(event).unwrap()).unwrap() {
                match frame {
                    Frame::Artifact(_) => told.artifacts += 1,
                    Frame::Response(text) => told.response.push_str(&text),
                    Frame::State { state, .. } => told.states.push(state),
                    Frame::Task { .. } => {}
                }
            }
        }
        told
    }

    fn artifact(id: &str, name: &str, text: &str, append: bool) -> String {
        format!(
            r#"{{"artifactUpdate":{{"taskId":"t","append":{append},"artifact":{{"artifactId":"{id}","name":"{name}","parts":[{{"text":"{text}"}}]}}}}}}"#
        )
    }

    fn events(list: &[String]) -> Vec<&str> {
        list.iter().map(String::as_str).collect()
    }

    #[test]
    fn pieces_are_told_as_they_come_and_parallel_artifacts_are_kept_apart() {
        let (rules, list) = (
            rules(),
            [
                artifact("a", "x", "Hel", false),
                artifact("p", "plan_1", "first", false),
                artifact("a", "x", "lo", true),
                artifact("b", "y", "second", false),
                artifact("a", "x", "!", true),
            ],
        );
        let mut fold = Fold::new(&rules, 1000, true);
        let told = told(&mut fold, &events(&list));
        assert_eq!((told.artifacts, told.response.as_str()), (5, "Hello\nsecond\n!"));
        let texts: Vec<_> =
            fold.task().unwrap().artifacts.iter().map(|a| a.parts[0].as_text().unwrap()).collect();
        assert_eq!(texts, ["Hello!", "first", "second"]);
    }

    #[test]
    fn a_closing_artifact_and_text_that_is_sent_again_with_every_token_are_told_once() {
        let (rules, list) = (
            rules(),
            [
                artifact("s", "streaming_result", "one ", false),
                artifact("s", "streaming_result", "two", true),
                artifact("f", "final_result", "one two", false),
            ],
        );
        assert_eq!(told(&mut Fold::new(&rules, 1000, true), &events(&list)).response, "one two");
        let whole = [artifact("s", "x", "one", false), artifact("s", "x", "one two", false)];
        assert_eq!(told(&mut Fold::new(&rules, 1000, true), &events(&whole)).response, "one two");
    }

    #[test]
    fn a_snapshot_after_a_gap_tells_only_what_is_new_and_results_before_states() {
        let rules = rules();
        let mut fold = Fold::new(&rules, 1000, true);
        told(&mut fold, &events(&[artifact("a", "x", "one", false)]));
        let snapshot = r#"{"task":{"id":"t","status":{"state":"TASK_STATE_COMPLETED"},"artifacts":[
            {"artifactId":"a","name":"x","parts":[{"text":"one two"}]},{"artifactId":"b","name":"y","parts":[{"text":"three"}]}]}}"#;
        let news = told(&mut fold, &[snapshot, snapshot]);
        assert_eq!((news.artifacts, news.response.as_str()), (2, " two\nthree"));
        assert_eq!(news.states, ["completed"]);
        assert!(fold.is_settled());
    }

    #[test]
    fn artifacts_without_ids_are_told_apart_by_their_place_in_a_task() {
        let rules = rules();
        let mut fold = Fold::new(&rules, 1000, true);
        let snapshot = r#"{"task":{"id":"t","status":{"state":"working"},"artifacts":[{"parts":[{"text":"a"}]},{"parts":[{"text":"b"}]}]}}"#;
        assert_eq!(told(&mut fold, &[snapshot, snapshot]).response, "a\nb");
        let task = fold.task().unwrap();
        assert_eq!((task.id.as_str(), task.artifacts.len()), ("t", 2));
    }

    #[test]
    fn an_artifact_that_comes_first_names_task_and_conversation() {
        let rules = rules();
        let mut fold = Fold::new(&rules, 1000, true);
        let update = |context: &str| {
            let artifact = r#""artifact":{"artifactId":"a","parts":[{"text":"x"}]}"#;
            format!(r#"{{"artifactUpdate":{{"taskId":"t",{context}{artifact}}}}}"#)
        };
        told(&mut fold, &events(&[update(r#""contextId":"c","#), update("")]));
        let task = fold.task().unwrap();
        assert_eq!((task.id.as_str(), task.context_id.as_deref()), ("t", Some("c")));
    }

    #[test]
    fn an_old_question_at_the_start_of_an_answers_stream_does_not_end_it() {
        let rules = rules();
        let mut fold = Fold::new(&rules, 1000, true);
        let old = r#"{"task":{"id":"t","status":{"state":"TASK_STATE_INPUT_REQUIRED"}}}"#;
        fold.apply_first_after_answer(Event::decode(old).unwrap()).unwrap();
        assert!(!fold.is_settled());
        told(
            &mut fold,
            &[r#"{"kind":"status-update","taskId":"t","status":{"state":"input-required"},"final":true}"#],
        );
        assert!(fold.is_settled() && fold.is_last());
    }

    #[test]
    fn what_is_held_is_bounded_and_what_is_replaced_does_not_count() {
        let rules = rules();
        let mut fold = Fold::new(&rules, 200, false);
        let snapshot = r#"{"task":{"id":"t","status":{"state":"working"},"history":[{"role":"user","parts":[{"text":"0123456789012345678901234567890123456789"}]}],
            "artifacts":[{"artifactId":"a","parts":[{"text":"0123456789012345678901234567890123456789"}]}]}}"#;
        for _ in 0..100 {
            fold.apply(Event::decode(snapshot).unwrap()).unwrap();
        }
        let more = artifact("b", "x", "0123456789012345678901234567890123456789", true);
        assert_eq!(fold.apply(Event::decode(&more).unwrap()).unwrap_err(), TooMuch);
    }

    #[test]
    fn a_million_tokens_are_one_part() {
        let rules = rules();
        let mut fold = Fold::new(&rules, 1 << 20, false);
        let token = artifact("a", "x", "t", true);
        for _ in 0..10_000 {
            fold.apply(Event::decode(&token).unwrap()).unwrap();
        }
        assert_eq!(fold.task().unwrap().artifacts[0].parts.len(), 1);
    }
}
