//! What the hostile agent answers: responses and streams that are large, or expensive to read, join or keep.

use std::fmt::Write as _;
use std::sync::LazyLock;

use bytes::Bytes;

use super::is_full;

/// The size of a large answer, below the default of `max_response_size`.
pub(super) fn large() -> usize {
    if is_full() { 15_000_000 } else { 1_500_000 }
}

/// An answer. The hostile agent adds the id of the request.
pub(super) enum Shape {
    /// The result of a JSON-RPC response.
    Result(Bytes),
    /// The error of a JSON-RPC response.
    Error(Bytes),
    /// The results of a stream, one event each.
    Stream(Box<dyn Fn() -> Box<dyn Iterator<Item = Bytes> + Send> + Send + Sync>),
    /// Raw bytes of an event stream without end, after the first event.
    Endless(Bytes),
    /// No answer before the end of the attack.
    Hang,
}

/// The agent never answers a request for this task.
pub(super) const UNANSWERED_TASK: &str = "22222222-0000-4000-8000-000000000002";

/// A secret of the agent `redacted`.
pub(super) static SECRET_LINES: LazyLock<Vec<String>> = LazyLock::new(|| {
    let line = |_| std::iter::repeat_with(fastrand::alphanumeric).take(64).collect();
    (0..50).map(line).collect()
});

const TASK: &str = r#""id":"11111111-0000-4000-8000-000000000001","contextId":"context""#;
const UPDATE: &str = r#""taskId":"11111111-0000-4000-8000-000000000001","contextId":"context""#;

/// A completed task with these artifacts.
fn completed(artifacts: &str) -> Bytes {
    format!(r#"{{"task":{{{TASK},"status":{{"state":"TASK_STATE_COMPLETED"}},"artifacts":[{artifacts}]}}}}"#)
        .into()
}

/// A completed task with one artifact of these parts.
fn parts(parts: &str) -> Shape {
    Shape::Result(completed(&format!(r#"{{"artifactId":"a","parts":[{parts}]}}"#)))
}

/// `size` bytes of list items.
fn list(size: usize, mut item: impl FnMut(usize, &mut String)) -> String {
    let mut text = String::with_capacity(size + 1024);
    for index in 0.. {
        if index > 0 {
            text.push(',');
        }
        item(index, &mut text);
        if text.len() >= size {
            break;
        }
    }
    text
}

fn repeated(item: &'static str, size: usize) -> String {
    list(size, |_, text| text.push_str(item))
}

/// A stream: a working task, these updates of artifacts, the end.
fn artifacts(updates: impl Iterator<Item = String> + Clone + Send + Sync + 'static) -> Shape {
    let event =
        |fields: String| Bytes::from(format!(r#"{{"artifactUpdate":{{{UPDATE},"artifact":{fields}}}}}"#));
    stream(updates.map(event))
}

/// A stream: a working task, these results, the end.
fn stream(results: impl Iterator<Item = Bytes> + Clone + Send + Sync + 'static) -> Shape {
    let working = format!(r#"{{"task":{{{TASK},"status":{{"state":"TASK_STATE_WORKING"}}}}}}"#);
    let done = format!(r#"{{"statusUpdate":{{{UPDATE},"status":{{"state":"TASK_STATE_COMPLETED"}}}}}}"#);
    let (working, done) = (Bytes::from(working), Bytes::from(done));
    Shape::Stream(Box::new(move || {
        let (first, last) = (std::iter::once(working.clone()), std::iter::once(done.clone()));
        Box::new(first.chain(results.clone()).chain(last))
    }))
}

/// The answer with this name.
pub(super) fn shape(name: &str) -> Shape {
    let size = large();
    match name {
        "small" => Shape::Result(completed(r#"{"artifactId":"a","parts":[{"text":"yes"}]}"#)),
        "question" => Shape::Result(
            format!(r#"{{"task":{{{TASK},"status":{{"state":"TASK_STATE_INPUT_REQUIRED","message":{{"messageId":"m","role":"ROLE_AGENT","parts":[{{"text":"Which?"}}]}}}}}}}}"#)
                .into(),
        ),
        "large question" => Shape::Result(
            format!(r#"{{"task":{{{TASK},"status":{{"state":"TASK_STATE_INPUT_REQUIRED","message":{{"messageId":"m","role":"ROLE_AGENT","parts":[{{"text":"{}"}}]}}}}}}}}"#, "x".repeat(size))
                .into(),
        ),
        "large waiting task" | "large running task" => {
            let state = if name.contains("waiting") { "INPUT_REQUIRED" } else { "WORKING" };
            Shape::Result(
                format!(r#"{{"task":{{"id":"{UNANSWERED_TASK}","contextId":"context","status":{{"state":"TASK_STATE_{state}"}},"artifacts":[{{"artifactId":"a","parts":[{{"text":"{}"}}]}}]}}}}"#, "x".repeat(size))
                    .into(),
            )
        }
        "hang" => Shape::Hang,
        "text" => parts(&format!(r#"{{"text":"{}"}}"#, "x".repeat(size))),
        "empty parts" => parts(&repeated("{}", size)),
        "files" => parts(&list(size, |index, text| {
            let _ = write!(text, r#"{{"filename":"f{index}","mediaType":"a/b","raw":"eA=="}}"#);
        })),
        "same files" => parts(&repeated(r#"{"filename":"f","mediaType":"a/b","raw":"eA=="}"#, size)),
        "file names" => parts(&list(size, |_, text| {
            let _ = write!(text, r#"{{"filename":"{}","raw":""}}"#, "n".repeat(100_000));
        })),
        "empty URLs" => parts(&repeated(r#"{"url":""}"#, size)),
        "data" => parts(&format!(r#"{{"data":[{}]}}"#, repeated("{}", size))),
        "nested" => parts(&format!(r#"{{"data":{}{}}}"#, "[".repeat(size / 2), "]".repeat(size / 2))),
        "artifacts" => Shape::Result(completed(&list(size, |index, text| {
            let _ = write!(text, r#"{{"artifactId":"a{index}","parts":[{{"text":"{}"}}]}}"#, "x".repeat(330));
        }))),
        "ids" => Shape::Result(
            format!(r#"{{"task":{{"id":[{}],"status":{{"state":"TASK_STATE_COMPLETED"}}}}}}"#, repeated("{}", size)).into(),
        ),
        "error" => {
            Shape::Error(format!(r#"{{"code":-32000,"message":"{}"}}"#, "x".repeat(size)).into())
        }
        "error data" => Shape::Error(
            format!(r#"{{"code":-32000,"message":"no","data":[{}]}}"#, repeated("{}", size)).into(),
        ),
        "error with cut secrets" => {
            let data = list(size, |index, text| {
                let line = &SECRET_LINES[index % SECRET_LINES.len()];
                let _ = write!(text, r#""{}…\u2026{}""#, &line[..3 + index % 60], &line[..20]);
            });
            Shape::Error(format!(r#"{{"code":-32000,"message":"no …","data":[{data}]}}"#).into())
        }
        "stream of artifacts" => {
            let count = if is_full() { 40_000 } else { 8_000 };
            artifacts((0..count).map(|index| {
                format!(r#"{{"artifactId":"a{index}","parts":[{{"text":"{}"}}]}}"#, "x".repeat(300))
            }))
        }
        "stream of many parts" => {
            let part = r#"{"text":"x"}"#;
            let event = format!(r#"{{"artifactId":"a","parts":[{}]}}"#, repeated(part, size / 8));
            artifacts(std::iter::repeat_n(event, 7))
        }
        "stream of file names" => {
            let part = format!(r#"{{"filename":"{}","url":""}}"#, "n".repeat(100_000));
            let event = format!(r#"{{"artifactId":"a","parts":[{part}]}}"#);
            artifacts(std::iter::repeat_n(event, 6 * size / 100_000))
        }
        "stream of empty URLs" => {
            let event = format!(r#"{{"artifactId":"a","parts":[{}]}}"#, repeated(r#"{"url":""}"#, 100_000));
            artifacts(std::iter::repeat_n(event, size / 100_000))
        }
        "stream of snapshots" => {
            let text = "x".repeat(size / 15);
            let task = format!(r#"{{"task":{{{TASK},"status":{{"state":"TASK_STATE_WORKING"}},"artifacts":[{{"artifactId":"a","parts":[{{"text":"{text}"}}]}}]}}}}"#);
            stream(std::iter::repeat_n(Bytes::from(task), 60))
        }
        "stream of text" => {
            let text = "x".repeat(8_000);
            let event = format!(r#"{{"artifactId":"a","parts":[{{"text":"{text}"}}]}}"#);
            // One update each; `append` belongs to the update.
            let update = Bytes::from(format!(
                r#"{{"artifactUpdate":{{{UPDATE},"append":true,"artifact":{event}}}}}"#
            ));
            stream(std::iter::repeat_n(update, size / 8_000))
        }
        "stream of many sizes" => {
            let update = |size: usize| {
                let text = "x".repeat(size);
                let artifact = format!(r#"{{"artifactId":"a","parts":[{{"text":"{text}"}}]}}"#);
                Bytes::from(format!(r#"{{"artifactUpdate":{{{UPDATE},"append":true,"artifact":{artifact}}}}}"#))
            };
            stream([100, 4_000, 65_000].map(update).into_iter().cycle().take(90))
        }
        "flood of comments" => Shape::Endless(": ping\n\n".repeat(8_000).into()),
        "flood of pings" => Shape::Endless("event: ping\ndata: {}\n\n".repeat(3_000).into()),
        "flood of other events" => {
            let event = r#"data: {"jsonrpc":"2.0","id":1,"result":{"kind":"weather","sun":true}}"#;
            Shape::Endless(format!("{event}\n\n").repeat(800).into())
        }
        other => match other.strip_prefix("text of ").and_then(|size| size.parse().ok()) {
            Some(size) => parts(&format!(r#"{{"text":"{}"}}"#, "x".repeat(size))),
            None => panic!("no shape is called {other}"),
        },
    }
}
