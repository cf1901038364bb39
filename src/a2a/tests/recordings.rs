//! Every recording in `tests/fixtures/wire` and its outcome. `outcomes.txt` there has the expected outcomes;
//! `UPDATE_EXPECTED=1` rewrites that file, for review before it is committed.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::a2a::card::Card;
use crate::a2a::client::{ClientError, read_recorded};
use crate::a2a::dialect::{Dialect, ReadError};
use crate::a2a::model::{Event, FileContent, Message, Part, SendResult};

#[derive(Deserialize)]
struct Exchange {
    request: RecordedRequest,
    status: String,
    headers: Vec<(String, String)>,
    body: Box<RawValue>,
}

#[derive(Deserialize)]
struct RecordedRequest {
    line: String,
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/wire")
}

fn dialect(agent: &str) -> Dialect {
    match agent {
        "a2a-sdk-0.2.16" => Dialect::V02,
        "a2a-sdk-0.3.26" | "a2a-js-0.3.14" => Dialect::V03,
        "bindu-2026.36.7" => Dialect::V03Ids,
        "a2a-sdk-0.3.26-rest" | "a2a-js-0.3.14-rest" => Dialect::V03Rest,
        "a2a-sdk-1.3.0" => Dialect::V1,
        "a2a-sdk-1.3.0-rest" => Dialect::V1Rest,
        "fasta2a-0.2.20" => Dialect::V01,
        "python-a2a-0.5.10" => Dialect::V01Paths,
        other => panic!("which dialect does {other} speak?"),
    }
}

#[test]
fn every_recording_decodes_to_the_expected_outcome() {
    let mut table = String::new();
    for agent in sorted(&folder()).iter().filter(|path| path.is_dir()) {
        let name = agent.file_name().unwrap().to_string_lossy().into_owned();
        for file in sorted(agent) {
            let step = file.file_name().unwrap().to_string_lossy().into_owned();
            let outcome = outcome(&file, dialect(&name));
            writeln!(table, "{name}/{step}: {outcome}").unwrap();
        }
    }
    let expected = folder().join("outcomes.txt");
    if std::env::var_os("UPDATE_EXPECTED").is_some() {
        std::fs::write(&expected, &table).unwrap();
    }
    let expected = std::fs::read_to_string(expected).unwrap();
    for (line, expected) in table.lines().zip(expected.lines()) {
        assert_eq!(line, expected);
    }
    assert_eq!(table.lines().count(), expected.lines().count());
    assert!(expected.lines().count() > 300, "recordings are missing");
}

fn sorted(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    paths.sort();
    paths
}

fn outcome(file: &Path, dialect: Dialect) -> String {
    let text = std::fs::read_to_string(file).unwrap();
    match file.extension().and_then(|extension| extension.to_str()) {
        Some("json") => exchange(&serde_json::from_str(&text).unwrap(), dialect),
        Some("sse") => stream(&text, dialect),
        Some("http") => {
            let text = text.replace("\r\n", "\n");
            let (head, body) = text.split_once("\n\n").unwrap();
            let status = head.split(' ').nth(1).unwrap().parse().unwrap();
            if head.contains("text/event-stream") {
                stream(body, dialect)
            } else {
                summary(dialect, status, Some("application/json"), body.trim().as_bytes())
            }
        }
        other => panic!("unknown extension {other:?}"),
    }
}

fn exchange(exchange: &Exchange, dialect: Dialect) -> String {
    let body = match serde_json::from_str::<String>(exchange.body.get()) {
        Ok(text) => text,
        Err(_) => exchange.body.get().to_owned(),
    };
    let Some(status) = exchange.status.split(' ').nth(1) else {
        return "no answer".to_owned();
    };
    let status: u16 = status.parse().unwrap();
    if exchange.request.line.starts_with("HEAD") {
        return format!("http {status}");
    }
    if body == "see .sse" {
        return "a stream".to_owned();
    }
    if exchange.request.line.contains("/.well-known/") && status == 200 {
        return card(&body);
    }
    let content_type = exchange.headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("content-type"));
    summary(dialect, status, content_type.map(|(_, value)| value.as_str()), body.as_bytes())
}

fn card(body: &str) -> String {
    let card = Card::parse(body.as_bytes()).unwrap();
    let skills: Vec<_> = card.skills.iter().map(|skill| skill.name.as_str()).collect();
    format!("card {:?}, skills {skills:?}, offers {:?}", card.name, card.describe_interfaces())
}

fn summary(dialect: Dialect, status: u16, content_type: Option<&str>, body: &[u8]) -> String {
    match read_recorded(dialect, status, content_type, body) {
        Ok(SendResult::Task(task)) => {
            let parts = task.artifacts.iter().map(|artifact| parts(&artifact.parts));
            let said = task.status_message.as_ref().map(|message| format!(" says {}", message_text(message)));
            let agents = task.history.iter().filter(|message| !message.from_user).count();
            assert!(!task.id.is_empty());
            format!(
                "task {}{} artifacts [{}] history {}/{agents}",
                task.state,
                said.unwrap_or_default(),
                parts.collect::<Vec<_>>().join(" | "),
                task.history.len(),
            )
        }
        Ok(SendResult::Message(message)) => format!("message {}", message_text(&message)),
        Err(error) => {
            let kind = if error.is_task_not_found() {
                " (no such task)"
            } else if error.is_wrong_dialect() {
                " (wrong dialect)"
            } else {
                ""
            };
            match error {
                ClientError::Refused { http_status, code, message, .. } => {
                    let message = crate::text::shorten(message.lines().next().unwrap_or_default(), 40);
                    let number =
                        |number: Option<i64>| number.map_or_else(|| "-".to_owned(), |n| n.to_string());
                    format!(
                        "error {} http {}{kind} {message:?}",
                        number(code),
                        number(http_status.map(i64::from))
                    )
                }
                ClientError::NotA2a { reason, .. } => format!("not A2A: {reason}"),
                other => panic!("{other}"),
            }
        }
    }
}

fn message_text(message: &Message) -> String {
    parts(&message.parts)
}

fn parts(parts: &[Part]) -> String {
    let part = |part: &Part| match part {
        Part::Text(text) => format!("{text:?}"),
        Part::Data(data) => format!("data {}", data.get().split_whitespace().collect::<String>()),
        Part::File(file) => {
            let content = match &file.content {
                FileContent::Base64(bytes) => bytes,
                FileContent::Uri(uri) => uri,
                other => panic!("{other:?}"),
            };
            let name = file.name.as_deref().unwrap_or("-");
            format!("file {name} {} {content}", file.media_type.as_deref().unwrap_or("-"))
        }
    };
    parts.iter().map(part).collect::<Vec<_>>().join(" + ")
}

/// The data of each event; the SSE parser has its own tests.
fn stream(text: &str, dialect: Dialect) -> String {
    let text = text.replace("\r\n", "\n");
    let data = text.split("\n\n").map(|event| {
        let lines = event.lines().filter_map(|line| line.strip_prefix("data:"));
        lines.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect::<Vec<_>>().join("\n")
    });
    let events = data.filter(|data| !data.is_empty()).map(|data| event(&data, dialect));
    events.collect::<Vec<_>>().join("; ")
}

fn event(data: &str, dialect: Dialect) -> String {
    match dialect.read_event(data.as_bytes()) {
        Ok(Event::Task(task)) => format!("task {}", task.state),
        Ok(Event::Message(message)) => format!("message {}", message_text(&message)),
        Ok(Event::Status(update)) => {
            let said = update.message.map(|message| format!(" {}", message_text(&message)));
            format!("{}{}", update.state, said.unwrap_or_default())
        }
        Ok(Event::Artifact(update)) => {
            let marks = [(update.append, " append"), (update.last_chunk, " last")];
            let marks: String = marks.iter().filter(|(is_set, _)| *is_set).map(|(_, mark)| *mark).collect();
            format!("artifact {}{marks}", parts(&update.artifact.parts))
        }
        Err(ReadError::Agent(error)) => format!("error {:?} {:?}", error.code, error.message),
        Err(ReadError::NotA2a(reason)) => format!("not A2A: {reason}"),
    }
}
