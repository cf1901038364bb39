//! Lists sessions, and shows their messages and runs.

use std::process::ExitCode;

use serde_json::{Value, json};

use super::{count, request};
use crate::cli::CliResult;
use crate::cli::client::{JsonFields as _, NatsClient};
use crate::cli::output::{
    Colour, StdStream, age, counted, eprintln_dim, one_line, print, print_json, print_table, println,
    truncate,
};

/// Sessions of one request.
const PAGE: usize = 1000;
/// Pages that are read at most.
const MAX_PAGES: usize = 1000;

/// All sessions, and those that were deleted.
async fn read_list(mesh: &NatsClient, since: Option<u64>) -> CliResult<Value> {
    let (mut sessions, mut deleted) = (Vec::new(), Vec::new());
    let (mut cursor, mut revision) = (None, None);
    for _ in 0..MAX_PAGES {
        let page = request(mesh, "list", &json!({ "limit": PAGE, "since": since, "cursor": cursor })).await?;
        sessions.extend_from_slice(page.list("/sessions"));
        deleted.extend_from_slice(page.list("/deleted"));
        revision = page.pointer("/revision").cloned();
        cursor = page.text("/cursor").map(str::to_owned);
        if cursor.is_none() {
            break;
        }
    }
    Ok(json!({ "sessions": sessions, "deleted": deleted, "revision": revision }))
}

pub(super) async fn list(mesh: &NatsClient, since: Option<u64>, json: bool) -> CliResult {
    let list = read_list(mesh, since).await?;
    if json {
        return print_json(&list);
    }
    let sessions = list.list("/sessions");
    if sessions.is_empty() {
        eprintln_dim("no sessions");
    } else {
        let rows = sessions.iter().map(|session| {
            let text = |pointer| one_line(session.text(pointer).unwrap_or("-"));
            let parent = match (session.text("/parent"), session.pointer("/fork_point")) {
                (Some(parent), Some(point)) => format!("{} at {point}", one_line(parent)),
                _ => "-".to_owned(),
            };
            let updated = session.text("/updated_at").and_then(|at| at.parse().ok());
            vec![
                (Colour::Bold, text("/id")),
                (Colour::Plain, truncate(&text("/title"), 40)),
                (Colour::Plain, text("/agent")),
                (Colour::Plain, count(session).to_string()),
                (Colour::Plain, updated.map_or_else(|| "-".to_owned(), age)),
                (Colour::Dim, parent),
            ]
        });
        print_table(&["SESSION", "TITLE", "AGENT", "MESSAGES", "CHANGED", "FORK OF"], rows)?;
    }
    for id in list.list("/deleted") {
        eprintln_dim(format_args!("deleted: {}", one_line(id.as_str().unwrap_or_default())));
    }
    Ok(ExitCode::SUCCESS)
}

/// A session with all its messages.
pub(super) async fn read(mesh: &NatsClient, id: &str) -> CliResult<Value> {
    let mut session = request(mesh, "get", &json!({ "id": id })).await?;
    let mut messages = session.list("/messages").to_vec();
    let number = |part: &Value| part.pointer("/earlier").and_then(Value::as_u64);
    let mut earlier = number(&session);
    while let Some(before) = earlier {
        let part = request(mesh, "get", &json!({ "id": id, "before": before })).await?;
        if part.list("/messages").is_empty() {
            break;
        }
        messages.splice(0..0, part.list("/messages").iter().cloned());
        earlier = number(&part);
    }
    if let Some(session) = session.as_object_mut() {
        session.remove("earlier");
        session.insert("messages".to_owned(), messages.into());
    }
    Ok(session)
}

pub(super) async fn show(mesh: &NatsClient, id: &str, runs: bool, json: bool) -> CliResult {
    let mut session = read(mesh, id).await?;
    let runs = match runs {
        true => Some(request(mesh, "runs", &json!({ "id": id })).await?),
        false => None,
    };
    if json {
        if let (Some(session), Some(runs)) = (session.as_object_mut(), runs) {
            session.insert("runs".to_owned(), runs.list("/runs").into());
        }
        return print_json(&session);
    }
    if let Some(title) = session.text("/title") {
        println(&StdStream::Stdout.paint(Colour::Bold, one_line(title)))?;
    }
    for message in session.list("/messages") {
        print_message(message)?;
    }
    if let Some(runs) = runs {
        print_runs(runs.list("/runs"))?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn print_message(message: &Value) -> CliResult<()> {
    let role = one_line(message.text("/role").unwrap_or("-"));
    let number = message.pointer("/index").and_then(Value::as_u64).unwrap_or_default();
    let mut notes = Vec::new();
    if message.pointer("/edited").is_some() {
        notes.push(format!("edited, {}", counted(message.list("/history").len(), "earlier form")));
    }
    if message.pointer("/redacted").is_some() {
        notes.push("redacted".to_owned());
    }
    let files = message.list("/files").len();
    if files > 0 {
        notes.push(counted(files, "file"));
    }
    let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) };
    let content = StdStream::Stdout.sanitize(message.text("/content").unwrap_or_default());
    let head = StdStream::Stdout.paint(Colour::Bold, format_args!("{number} {role}"));
    print(&format!("{head}{}\n{content}\n\n", StdStream::Stdout.paint(Colour::Dim, notes)))
}

fn print_runs(runs: &[Value]) -> CliResult {
    let rows = runs.iter().map(|run| {
        let text = |pointer| one_line(run.text(pointer).unwrap_or("-"));
        let first = run.pointer("/first_token_ms").and_then(Value::as_u64);
        let started = run.text("/started_at").and_then(|at| at.parse().ok());
        vec![
            (Colour::Bold, text("/run")),
            (Colour::Plain, text("/agent")),
            (Colour::Plain, text("/skill")),
            (Colour::Plain, text("/status")),
            (Colour::Plain, started.map_or_else(|| "-".to_owned(), age)),
            (Colour::Plain, first.map_or_else(|| "-".to_owned(), |first| format!("{first} ms"))),
        ]
    });
    print_table(&["RUN", "AGENT", "SKILL", "STATUS", "STARTED", "FIRST TEXT"], rows)
}

pub(super) async fn stats(mesh: &NatsClient, json: bool) -> CliResult {
    let list = read_list(mesh, None).await?;
    let sessions = list.list("/sessions");
    let messages: u64 = sessions.iter().map(count).sum();
    let forks = sessions.iter().filter(|session| session.text("/parent").is_some()).count();
    let longest = sessions.iter().map(count).max().unwrap_or_default();
    let mut agents: Vec<_> = sessions.iter().filter_map(|session| session.text("/agent")).collect();
    agents.sort_unstable();
    agents.dedup();
    if json {
        return print_json(&json!({
            "sessions": sessions.len(), "forks": forks, "messages": messages, "longest": longest,
            "agents": agents, "revision": list.pointer("/revision"),
        }));
    }
    let rows = [
        ("sessions", sessions.len().to_string()),
        ("forks", forks.to_string()),
        ("messages", messages.to_string()),
        ("longest session", counted(usize::try_from(longest).unwrap_or(usize::MAX), "message")),
        ("agents", agents.iter().map(|agent| one_line(agent)).collect::<Vec<_>>().join(", ")),
    ];
    let rows =
        rows.into_iter().map(|(name, value)| vec![(Colour::Bold, name.to_owned()), (Colour::Plain, value)]);
    print_table(&["", ""], rows)
}
