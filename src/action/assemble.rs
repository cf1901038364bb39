//! Assembles the content of a reply from the parts that an agent has sent: one message, files and data.
//!
//! Agents often send the same text twice: in a status and in an artifact, token by token and then as a whole.
//! `message` is the text of the first of these sources that has any:
//!
//! | | `COMPLETED` | every other status |
//! | --- | --- | --- |
//! | 1 | response artifacts | final status message |
//! | 2 | final status message | response artifacts |
//! | 3 | if there is no artifact: the messages of earlier states, in order | as for `COMPLETED` |
//! | 4 | the agent's messages in `history` since the user's last | as for `COMPLETED` |
//!
//! Files and data are for programs, so they come from all sources, including notices.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::ops::Range;

use serde_json::value::RawValue;

use crate::a2a::model::{Artifact, File, FileContent, Message, Part, Task, TaskState, normalize_base64};
use crate::files::StoredFile;
use crate::reply::outcome::{ArtifactRef, ReplyContent, ReplyFile};
use crate::text::shorten;

/// Patterns for the names of artifacts.
#[derive(Debug, Clone)]
pub(crate) struct ArtifactRules {
    /// Artifacts that belong to the response (`answer_artifacts`).
    pub response: Vec<String>,
    /// Artifacts that do not, even if they match `response` (`notice_artifacts`).
    pub notice: Vec<String>,
}

impl ArtifactRules {
    pub(crate) fn is_response(&self, artifact: &Artifact) -> bool {
        let name = artifact.name.as_deref().unwrap_or_default();
        let any = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, name));
        !any(&self.notice) && any(&self.response)
    }
}

/// The source of a reply's message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessageSource {
    /// Response artifacts, whose text is streamed as it arrives.
    Artifacts,
    /// The messages of states.
    States,
    /// Messages in `history`, or nothing.
    History,
}

/// The content of a task; `status_texts` is the text of all states before the last. The error names the file that
/// cannot be read.
pub(crate) fn task_content(
    task: &Task,
    status_texts: &str,
    rules: &ArtifactRules,
) -> Result<(ReplyContent, MessageSource), String> {
    let status = || {
        let text = task.status_message.as_ref().map(text_of).filter(|text| !text.is_empty())?;
        Some((text, MessageSource::States))
    };
    let response = || response_text(&task.artifacts, rules).map(|text| (text, MessageSource::Artifacts));
    let states = || {
        let counts = task.artifacts.is_empty() && !status_texts.is_empty();
        counts.then(|| (status_texts.to_owned(), MessageSource::States))
    };
    let is_completed = task.state == TaskState::Completed;
    let first = if is_completed { response().or_else(status) } else { status().or_else(response) };
    // Messages before the user's last one belong to an earlier turn.
    let since = task.history.iter().rposition(|message| message.from_user).map_or(0, |index| index + 1);
    let recent = task.history.get(since..).unwrap_or_default();
    let (message, source) = first
        .or_else(states)
        .unwrap_or_else(|| (recent.iter().map(text_of).collect(), MessageSource::History));

    let mut collector = Collector::default();
    for (index, artifact) in task.artifacts.iter().enumerate() {
        collector.take(&artifact.parts, Some(index))?;
    }
    if let Some(status) = &task.status_message {
        collector.take(&status.parts, None)?;
    }
    if task.artifacts.is_empty() && task.status_message.is_none() {
        for message in recent {
            collector.take(&message.parts, None)?;
        }
    }
    let artifacts =
        task.artifacts.iter().map(|a| ArtifactRef { id: a.id.clone(), name: a.name.clone() }).collect();
    Ok((ReplyContent { message, files: collector.files, data: collector.data, artifacts }, source))
}

pub(crate) fn message_content(message: &Message) -> Result<ReplyContent, String> {
    let mut collector = Collector::default();
    collector.take(&message.parts, None)?;
    let Collector { files, data, .. } = collector;
    Ok(ReplyContent { message: text_of(message), files, data, artifacts: Vec::new() })
}

fn text_of(message: &Message) -> String {
    text_of_parts(&message.parts)
}

/// The text of the response artifacts, separated by line breaks. An artifact that repeats all the text before it counts
/// once.
fn response_text(artifacts: &[Artifact], rules: &ArtifactRules) -> Option<String> {
    let mut joined = String::new();
    // The pieces of `joined` without the line breaks between them, in which form an artifact may repeat it.
    let (mut pieces, mut run_on_length) = (Vec::new(), 0);
    for artifact in artifacts.iter().filter(|artifact| rules.is_response(artifact)) {
        let length: usize = texts(&artifact.parts).map(str::len).sum();
        let run_on = || pieces.iter().filter_map(|piece: &Range<usize>| joined.get(piece.clone()));
        let is_repetition = length == 0
            || (length == joined.len() && is_same_text(texts(&artifact.parts), [joined.as_str()]))
            || (length == run_on_length && is_same_text(texts(&artifact.parts), run_on()));
        if is_repetition {
            continue;
        }
        if !joined.is_empty() {
            joined.push('\n');
        }
        let start = joined.len();
        joined.extend(texts(&artifact.parts));
        pieces.push(start..joined.len());
        run_on_length += length;
    }
    (!joined.is_empty()).then_some(joined)
}

pub(super) fn text_of_parts(parts: &[Part]) -> String {
    texts(parts).collect()
}

pub(super) fn texts(parts: &[Part]) -> impl Iterator<Item = &str> {
    parts.iter().filter_map(Part::as_text)
}

/// Whether two texts are equal, whatever pieces they are in.
pub(super) fn is_same_text<'t>(
    one: impl IntoIterator<Item = &'t str>,
    other: impl IntoIterator<Item = &'t str>,
) -> bool {
    let is_filled = |text: &&str| !text.is_empty();
    let (mut ones, mut others) = (one.into_iter().filter(is_filled), other.into_iter().filter(is_filled));
    let (mut one, mut other): (&[u8], &[u8]) = Default::default();
    loop {
        if one.is_empty() {
            one = ones.next().unwrap_or_default().as_bytes();
        }
        if other.is_empty() {
            other = others.next().unwrap_or_default().as_bytes();
        }
        let both = one.len().min(other.len());
        if both == 0 {
            return one.is_empty() && other.is_empty();
        }
        let ((head, rest), (other_head, other_rest)) = (one.split_at(both), other.split_at(both));
        if head != other_head {
            return false;
        }
        (one, other) = (rest, other_rest);
    }
}

/// Collects files and data in order and drops repetitions.
///
/// Data: dropped if an earlier message or artifact contained it. Files: a message's file is dropped if already
/// collected; an artifact's file only if that same artifact already has it, because a refined result may turn out the
/// same.
#[derive(Default)]
struct Collector {
    files: Vec<ReplyFile>,
    data: Vec<Box<RawValue>>,
    hasher: RandomState,
    /// The position of the first data with a hash, so that each is compared with one other at most.
    data_by_hash: HashMap<u64, usize>,
    /// The position of the first file by artifact and hash. Key `None` indexes all files.
    files_by_hash: HashMap<(Option<usize>, u64), usize>,
}

impl Collector {
    /// `artifact` is the index of the artifact, or `None` for the parts of a message.
    fn take(&mut self, parts: &[Part], artifact: Option<usize>) -> Result<(), String> {
        // Equal data parts within one message or artifact are kept.
        let earlier = self.data.len();
        for part in parts {
            match part {
                Part::Text(_) => {}
                Part::Data(data) => {
                    let first =
                        *self.data_by_hash.entry(self.hasher.hash_one(data.get())).or_insert(self.data.len());
                    let known = self.data.get(first).filter(|_| first < earlier);
                    if known.is_none_or(|known| known.get() != data.get()) {
                        self.data.push(data.clone());
                    }
                }
                Part::File(file) => self.take_file(reply_file(file)?, artifact),
            }
        }
        Ok(())
    }

    fn take_file(&mut self, file: ReplyFile, artifact: Option<usize>) {
        let hash = self.hasher.hash_one((&file.name, &file.mime_type, &file.url, &file.bytes));
        let known = self.files_by_hash.get(&(artifact, hash)).and_then(|at| self.files.get(*at));
        if known == Some(&file) {
            return;
        }
        let at = self.files.len();
        self.files_by_hash.entry((None, hash)).or_insert(at);
        if artifact.is_some() {
            self.files_by_hash.entry((artifact, hash)).or_insert(at);
        }
        self.files.push(file);
    }
}

fn reply_file(file: &File) -> Result<ReplyFile, String> {
    let (url, bytes, size) = match &file.content {
        FileContent::Uri(uri) => (Some(uri.clone()), None, None),
        FileContent::InStore(content) => {
            let StoredFile { url, size, sha256, .. } = &content.file;
            return Ok(ReplyFile {
                name: file.name.clone(),
                mime_type: file.media_type.clone(),
                size: usize::try_from(*size).ok(),
                sha256: Some(sha256.clone()),
                url: Some(url.to_string()),
                bytes: None,
            });
        }
        // Only requests have these.
        FileContent::Reference(_) | FileContent::FromStore(_) => (None, None, None),
        FileContent::Base64(text) => {
            let (bytes, size) = normalize_base64(text).ok_or_else(|| {
                let name = file.name.as_deref().unwrap_or("without a name");
                format!("the file `{}` is not base64", shorten(name, 80))
            })?;
            (None, Some(bytes), Some(size))
        }
    };
    let (name, mime_type) = (file.name.clone(), file.media_type.clone());
    Ok(ReplyFile { name, mime_type, size, sha256: None, url, bytes })
}

/// Matches a pattern in which `*` stands for any text.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
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
            response: own(&["*"]),
            notice: own(&["execution_plan_*", "tool_notification_*", "tool_result"]),
        }
    }

    fn content(task: &str) -> ReplyContent {
        task_content(&Task::decode(task).unwrap(), "", &rules()).unwrap().0
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
    fn the_response_precedes_the_final_status_message_of_a_completed_task() {
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
    fn without_other_text_the_message_is_the_history_of_the_last_turn() {
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
        assert!(task_content(&Task::decode(task).unwrap(), "", &rules()).is_err());
    }

    #[test]
    fn patterns_match_with_any_number_of_stars() {
        for (pattern, name, is_match) in [
            ("*", "", true),
            ("a*c", "abc", true),
            ("a*c", "abd", false),
            ("*é*", "caféx", true),
            ("a", "b", false),
            ("a*a", "a", false),
        ] {
            assert_eq!(matches(pattern, name), is_match, "{pattern} {name}");
        }
    }
}
