//! What an agent's parts amount to: one message, its files, its data.
//!
//! Agents say things twice: in a status and in an artifact, token by token and then as a whole.
//! `message` is assembled once, from the first source that has text:
//!
//! | | `COMPLETED` | every other status |
//! | --- | --- | --- |
//! | 1 | answer artifacts | final status message |
//! | 2 | final status message | answer artifacts |
//! | 3 | if there is no artifact at all: what was said in states before, in order | the same |
//! | 4 | the agent's messages in `history` since the user's last | the same |
//!
//! Files and data are for programs, so they come from everywhere, notices included.

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, HashSet};
use std::hash::BuildHasher as _;

use crate::a2a::model::{Artifact, File, FileContent, Message, Part, Task, TaskState, normalize_base64};
use crate::reply::outcome::{ArtifactRef, ReplyContent, ReplyFile};
use crate::text::shorten;

/// Which artifacts are the answer and which are notices, by name.
#[derive(Debug, Clone)]
pub(crate) struct ArtifactRules {
    /// Patterns of names that belong to the answer.
    pub answer: Vec<String>,
    /// Patterns of names that do not, whatever `answer` says.
    pub notice: Vec<String>,
}

impl ArtifactRules {
    /// Whether an artifact's text belongs to the answer.
    pub(crate) fn is_answer(&self, artifact: &Artifact) -> bool {
        let name = artifact.name.as_deref().unwrap_or_default();
        let any = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, name));
        !any(&self.notice) && any(&self.answer)
    }
}

/// Where the message of a reply came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// Artifacts, or a direct message: it was told as it came.
    Answer,
    /// What the agent said in its states.
    States,
    /// What it said before, or nothing.
    History,
}

/// The content of a task as it stands; `status_texts` is what was said in states before the last.
/// The error tells which file is not readable.
pub(crate) fn of_task(
    task: &Task,
    status_texts: &str,
    rules: &ArtifactRules,
) -> Result<(ReplyContent, Source), String> {
    let status = || task.status_message.as_ref().map(text_of).filter(|text| !text.is_empty());
    let status = || status().map(|text| (text, Source::States));
    let answer = || answer_text(&task.artifacts, rules).map(|text| (text, Source::Answer));
    let states = || {
        let counts = task.artifacts.is_empty() && !status_texts.is_empty();
        counts.then(|| (status_texts.to_owned(), Source::States))
    };
    let first =
        if task.state == TaskState::Completed { answer().or_else(status) } else { status().or_else(answer) };
    // What was said before the user's last message belongs to an earlier turn.
    let since = task.history.iter().rposition(|message| message.from_user).map_or(0, |index| index + 1);
    let said = task.history.get(since..).unwrap_or_default();
    let (message, source) =
        first.or_else(states).unwrap_or_else(|| (said.iter().map(text_of).collect(), Source::History));

    let mut collector = Collector::default();
    for (index, artifact) in task.artifacts.iter().enumerate() {
        collector.take(&artifact.parts, Some(index))?;
    }
    if let Some(status) = &task.status_message {
        collector.take(&status.parts, None)?;
    }
    if task.artifacts.is_empty() && task.status_message.is_none() {
        for message in said {
            collector.take(&message.parts, None)?;
        }
    }
    let artifacts =
        task.artifacts.iter().map(|a| ArtifactRef { id: a.id.clone(), name: a.name.clone() }).collect();
    Ok((ReplyContent { message, files: collector.files, data: collector.data, artifacts }, source))
}

/// The content of a direct message.
pub(crate) fn of_message(message: &Message) -> Result<ReplyContent, String> {
    let mut collector = Collector::default();
    collector.take(&message.parts, None)?;
    Ok(ReplyContent {
        message: text_of(message),
        files: collector.files,
        data: collector.data,
        artifacts: Vec::new(),
    })
}

fn text_of(message: &Message) -> String {
    text_of_parts(&message.parts)
}

/// The text of the answer artifacts, one line break between two; an artifact that repeats all
/// that came before it counts once.
fn answer_text(artifacts: &[Artifact], rules: &ArtifactRules) -> Option<String> {
    let mut all = AnswerText::default();
    for artifact in artifacts.iter().filter(|artifact| rules.is_answer(artifact)) {
        all.add(&text_of_parts(&artifact.parts));
    }
    (!all.joined.is_empty()).then_some(all.joined)
}

#[derive(Debug, Default)]
pub(crate) struct AnswerText {
    joined: String,
    // The same without line breaks between artifacts, which is how a closing artifact repeats
    // what was streamed in several.
    run_on: String,
    // The place of the artifact that text was added for last, and how much of its text was added.
    current: Option<(usize, usize)>,
    // Artifacts that were not streamed yet, by place: they have no text, or repeat all the text before them.
    withheld: HashMap<usize, Withheld>,
}

/// An artifact that was not streamed. Its text is the first `length` bytes of `joined`, of `run_on`, or of both.
#[derive(Debug, Clone, Copy)]
struct Withheld {
    length: usize,
    is_joined: bool,
    is_run_on: bool,
}

impl AnswerText {
    /// Adds an artifact's text; what is new in it, unless it repeats all that came before.
    fn add(&mut self, text: &str) -> Option<String> {
        if text.is_empty() || text == self.joined || text == self.run_on {
            return None;
        }
        Some(self.begin(text))
    }

    /// Adds text on a line of its own.
    fn begin(&mut self, text: &str) -> String {
        let separator = if self.joined.is_empty() { "" } else { "\n" };
        let added = format!("{separator}{text}");
        self.joined.push_str(&added);
        self.run_on.push_str(text);
        added
    }

    /// Adds text to the artifact at `place`.
    fn append(&mut self, place: usize, text: String) -> String {
        match &mut self.current {
            Some((current, length)) if *current == place => {
                *length += text.len();
                self.joined.push_str(&text);
                self.run_on.push_str(&text);
                text
            }
            _ => {
                self.current = Some((place, text.len()));
                self.begin(&text)
            }
        }
    }

    /// Whether a withheld artifact still repeats all the text before it after `more` was appended. Streamed text only
    /// grows, so it is enough to compare the end.
    fn still_withheld(&self, withheld: Withheld, more: &str) -> Option<Withheld> {
        let length = withheld.length + more.len();
        let is_all_of = |told: &str| told.len() == length && told.ends_with(more);
        let is_joined = withheld.is_joined && is_all_of(&self.joined);
        let is_run_on = withheld.is_run_on && is_all_of(&self.run_on);
        (is_joined || is_run_on).then_some(Withheld { length, is_joined, is_run_on })
    }

    pub(crate) fn held(&self) -> usize {
        self.joined.len() + self.run_on.len()
    }

    /// The part of `message` after the streamed text. Empty if `message` does not begin with the streamed text.
    pub(crate) fn untold<'m>(&self, message: &'m str) -> &'m str {
        message.strip_prefix(&*self.joined).unwrap_or_default()
    }

    /// Returns the text to stream after an update of the artifact at `place`. If `appended`, the update appended
    /// `piece` to `artifact`; otherwise `piece` replaced it.
    pub(crate) fn told(
        &mut self,
        place: usize,
        artifact: &Artifact,
        appended: bool,
        piece: &Artifact,
    ) -> Option<String> {
        let mut text = text_of_parts(&piece.parts);
        if appended {
            if text.is_empty() {
                return None;
            }
            let Some(withheld) = self.withheld.get(&place).copied() else {
                return Some(self.append(place, text));
            };
            if let Some(longer) = self.still_withheld(withheld, &text) {
                self.withheld.insert(place, longer);
                return None;
            }
            text = text_of_parts(&artifact.parts);
        }
        let is_current = |current: &(usize, usize)| current.0 == place;
        // Some agents send the whole text again with every token instead of appending.
        if let Some((_, length)) = self.current.as_mut().filter(|current| is_current(current)) {
            let before = self.run_on.get(self.run_on.len().saturating_sub(*length)..).unwrap_or_default();
            if let Some(more) = text.strip_prefix(before) {
                let more = more.to_owned();
                *length = text.len();
                self.joined.push_str(&more);
                self.run_on.push_str(&more);
                return (!more.is_empty()).then_some(more);
            }
        }
        let added = self.add(&text);
        if added.is_some() {
            self.withheld.remove(&place);
            self.current = Some((place, text.len()));
        } else {
            let withheld = Withheld {
                length: text.len(),
                is_joined: text.is_empty() || text == self.joined,
                is_run_on: text.is_empty() || text == self.run_on,
            };
            self.withheld.insert(place, withheld);
            self.current.take_if(|current| is_current(current));
        }
        added
    }
}

fn text_of_parts(parts: &[Part]) -> String {
    parts.iter().filter_map(Part::as_text).collect()
}

/// Files and data in order; what a message repeats, to the letter, counts once. Files of two artifacts
/// are two, whatever is in them: a refined result may come out the same.
#[derive(Default)]
struct Collector {
    files: Vec<ReplyFile>,
    data: Vec<Box<serde_json::value::RawValue>>,
    seen: HashSet<String>,
    // Hashes of the files, so that many of them are not compared one by one: in all places, and in the
    // artifact at hand.
    file_hashes: RandomState,
    files_anywhere: HashMap<u64, Vec<usize>>,
    files_of_artifact: HashMap<(usize, u64), Vec<usize>>,
}

impl Collector {
    /// `artifact` is the index of the artifact that the parts are of, `None` for those of a message.
    fn take(&mut self, parts: &[Part], artifact: Option<usize>) -> Result<(), String> {
        // Within one message or artifact two equal parts are two.
        let mut fresh = Vec::new();
        for part in parts {
            match part {
                Part::Text(_) => {}
                Part::Data(data) => {
                    if !self.seen.contains(data.get()) {
                        fresh.push(data.get().to_owned());
                        self.data.push(data.clone());
                    }
                }
                Part::File(file) => self.take_file(reply_file(file)?, artifact),
            }
        }
        self.seen.extend(fresh);
        Ok(())
    }

    fn take_file(&mut self, file: ReplyFile, artifact: Option<usize>) {
        let hash = self.file_hashes.hash_one((&file.name, &file.mime_type, &file.url, &file.bytes));
        let alike = match artifact {
            Some(index) => self.files_of_artifact.get(&(index, hash)),
            None => self.files_anywhere.get(&hash),
        };
        let is_repeated = alike.into_iter().flatten().any(|&at| self.files.get(at) == Some(&file));
        if is_repeated {
            return;
        }
        let at = self.files.len();
        self.files_anywhere.entry(hash).or_default().push(at);
        if let Some(index) = artifact {
            self.files_of_artifact.entry((index, hash)).or_default().push(at);
        }
        self.files.push(file);
    }
}

fn reply_file(file: &File) -> Result<ReplyFile, String> {
    let mut reply = ReplyFile {
        name: file.name.clone(),
        mime_type: file.media_type.clone(),
        size: None,
        url: None,
        bytes: None,
    };
    match &file.content {
        FileContent::Uri(uri) => reply.url = Some(uri.clone()),
        FileContent::Base64(text) => {
            let (bytes, size) = normalize_base64(text).ok_or_else(|| {
                let name = file.name.as_deref().unwrap_or("without a name");
                format!("its file `{}` is not base64", shorten(name, 80))
            })?;
            reply.size = Some(size);
            reply.bytes = Some(bytes);
        }
    }
    Ok(reply)
}

/// Whether `name` fits `pattern`, in which `*` stands for anything.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((head, tail)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut rest) = name.strip_prefix(head) else {
        return false;
    };
    let mut pieces = tail.split('*');
    let last = pieces.next_back().unwrap_or_default();
    for piece in pieces {
        match rest.split_once(piece) {
            Some((_, after)) => rest = after,
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> ArtifactRules {
        let own = |list: &[&str]| list.iter().map(|&s| s.to_owned()).collect();
        ArtifactRules {
            answer: own(&["*"]),
            notice: own(&["execution_plan_*", "tool_notification_*", "tool_result"]),
        }
    }

    fn content(task: &str) -> ReplyContent {
        of_task(&Task::decode(task).unwrap(), "", &rules()).unwrap().0
    }

    fn artifact(name: &str, text: &str) -> String {
        format!(r#"{{"artifactId":"{name}","name":"{name}","parts":[{{"text":"{text}"}}]}}"#)
    }

    fn completed(artifacts: &[String]) -> String {
        let artifacts = artifacts.join(",");
        format!(
            r#"{{"id":"t","status":{{"state":"completed","message":{{"role":"agent","parts":[{{"text":"done"}}]}}}},"artifacts":[{artifacts}]}}"#
        )
    }

    #[test]
    fn the_answer_comes_before_the_closing_words_of_a_completed_task() {
        assert_eq!(content(&completed(&[artifact("a", "one"), artifact("b", "two")])).message, "one\ntwo");
        assert_eq!(content(&completed(&[])).message, "done");
    }

    #[test]
    fn notices_stay_out_of_the_message_but_are_listed() {
        let content = content(&completed(&[
            artifact("execution_plan_update", "plan"),
            artifact("tool_notification_start", "calling"),
            artifact("tool_result", "raw"),
            artifact("final", "answer"),
        ]));
        assert_eq!(content.message, "answer");
        assert_eq!(content.artifacts.len(), 4);
    }

    #[test]
    fn a_closing_artifact_that_repeats_everything_counts_once() {
        let parts = [artifact("s1", "Hello "), artifact("s2", "world"), artifact("final", "Hello world")];
        assert_eq!(content(&completed(&parts)).message, "Hello \nworld");
        assert_eq!(content(&completed(&[artifact("s", "same"), artifact("f", "same")])).message, "same");
    }

    #[test]
    fn a_question_is_the_message_even_when_there_are_artifacts() {
        let task = r#"{"id":"t","status":{"state":"input-required","message":{"role":"agent","parts":[{"kind":"text","text":"which?"}]}},
            "artifacts":[{"parts":[{"text":"draft"}]}]}"#;
        assert_eq!(content(task).message, "which?");
    }

    #[test]
    fn what_was_only_said_in_history_is_the_message_from_the_last_turn_on() {
        let task = r#"{"id":"t","status":{"state":"completed"},"history":[
            {"role":"user","parts":[{"text":"a"}]},{"role":"agent","parts":[{"text":"which?"}]},
            {"role":"user","parts":[{"text":"b"}]},{"role":"user","parts":[{"text":"b"}]},
            {"role":"agent","parts":[{"text":"Hel"}]},{"role":"ROLE_AGENT","parts":[{"text":"lo"}, {"data":{"n":1}}]}]}"#;
        let content = content(task);
        assert_eq!(content.message, "Hello");
        assert_eq!(content.data.len(), 1);
    }

    #[test]
    fn data_and_files_that_are_sent_again_count_once() {
        let task = r#"{"id":"t","status":{"state":"completed","message":{"role":"agent","parts":[{"data":{"n": 1}},{"raw":"QQ","filename":"a"}]}},
            "artifacts":[{"parts":[{"data":{"n": 1}},{"file":{"bytes":"QQ==","name":"a"}}]}]}"#;
        let content = content(task);
        assert_eq!((content.data.len(), content.files.len()), (1, 1));
        assert_eq!((content.files[0].size, content.files[0].bytes.as_deref()), (Some(1), Some("QQ==")));
    }

    #[test]
    fn files_of_different_artifacts_or_names_are_never_merged() {
        let file = |name: &str| format!(r#"{{"raw":"QQ==","filename":"{name}"}}"#);
        let artifact = |files: &[String]| format!(r#"{{"artifactId":"a","parts":[{}]}}"#, files.join(","));
        let task = completed(&[artifact(&[file("a"), file("b")]), artifact(&[file("a")])]);
        let names: Vec<_> = content(&task).files.into_iter().filter_map(|file| file.name).collect();
        assert_eq!(names, ["a", "b", "a"]);
    }

    #[test]
    fn a_file_that_is_not_base64_is_an_error() {
        let task = r#"{"id":"t","status":{"state":"completed"},"artifacts":[{"parts":[{"raw":"%%%"}]}]}"#;
        assert!(of_task(&Task::decode(task).unwrap(), "", &rules()).is_err());
    }

    #[test]
    fn patterns_match_with_any_number_of_stars() {
        for (pattern, name, fits) in [
            ("*", "", true),
            ("a*c", "abc", true),
            ("a*c", "abd", false),
            ("*é*", "caféx", true),
            ("a", "b", false),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }
}
