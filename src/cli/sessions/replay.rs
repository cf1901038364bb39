//! The events of a session: as JSON lines, or as the conversation that they were.

use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use async_nats::HeaderMap;
use serde_json::{Value, json};

use super::show::read;
use super::{checked, no_sessions, request};
use crate::cli::client::{JsonFields as _, NatsClient};
use crate::cli::output::{Colour, StdStream, eprintln_dim, one_line, print, print_json_text, println};
use crate::cli::terminal::Interrupts;
use crate::cli::{CliError, CliResult, INTERRUPTED, USAGE};
use crate::text::Timestamp;

/// Longest pause of a replay, before `--speed` applies.
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// A bridge sends something to followers in this time.
const MAX_SILENCE: Duration = Duration::from_secs(60);

#[derive(Debug, clap::Args)]
pub(super) struct ReplayArgs {
    /// Id of the session
    #[arg(value_name = "SESSION")]
    id: String,
    /// How many times faster than it was; 0 shows everything at once
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    speed: f64,
}

/// Calls a function with each event.
async fn each_event(
    mesh: &NatsClient,
    id: &str,
    mut after: u64,
    mut show: impl AsyncFnMut(&Value) -> CliResult<()>,
) -> CliResult<()> {
    loop {
        let page = request(mesh, "events", &json!({ "id": id, "after": after })).await?;
        for event in page.list("/events") {
            show(event).await?;
        }
        match page.pointer("/next").and_then(Value::as_u64) {
            Some(next) => after = next,
            None => return Ok(()),
        }
    }
}

pub(super) async fn events(mesh: &NatsClient, id: &str, after: u64, follow: bool) -> CliResult {
    if !follow {
        each_event(mesh, id, after, async |event| print_json_text(&event.to_string())).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let interrupts = Interrupts::new()?;
    let body = json!({ "id": id, "after": after, "follow": true });
    let mut replies =
        mesh.request(mesh.subjects.sessions("events"), HeaderMap::new(), body.to_string().into()).await?;
    loop {
        let reply = tokio::select! {
            reply = replies.next_within(MAX_SILENCE) => reply.map_err(no_sessions)?,
            () = interrupts.next() => return Ok(ExitCode::from(INTERRUPTED)),
        };
        for event in checked(&reply)?.list("/events") {
            print_json_text(&event.to_string())?;
        }
    }
}

pub(super) async fn export(mesh: &NatsClient, id: &str) -> CliResult {
    let mut session = read(mesh, id).await?;
    if let Some(session) = session.as_object_mut() {
        session.remove("messages");
    }
    println(&json!({ "session": session }).to_string())?;
    each_event(mesh, id, 0, async |event| println(&event.to_string()).map(drop)).await?;
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn replay(mesh: &NatsClient, args: &ReplayArgs) -> CliResult {
    if !args.speed.is_finite() || args.speed < 0.0 {
        return Err(CliError::msg(USAGE, "`--speed` must be a positive number, or 0"));
    }
    let interrupts = Interrupts::new()?;
    let mut last: Option<SystemTime> = None;
    let mut has_streamed = false;
    let speed = args.speed;
    let showing = each_event(mesh, &args.id, 0, async |event| {
        let at = event.text("/at").and_then(|at| at.parse::<Timestamp>().ok()).map(|Timestamp(at)| at);
        if let (Some(last), Some(at)) = (last, at)
            && speed > 0.0
        {
            let pause = at.duration_since(last).unwrap_or_default().min(MAX_PAUSE);
            tokio::time::sleep(pause.div_f64(speed.max(0.001))).await;
        }
        last = at.or(last);
        show_event(event, &mut has_streamed)
    });
    tokio::select! {
        shown = showing => shown?,
        () = interrupts.next() => return Ok(ExitCode::from(INTERRUPTED)),
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints what an event adds to the conversation.
fn show_event(event: &Value, has_streamed: &mut bool) -> CliResult<()> {
    let stdout = StdStream::Stdout;
    let text = |pointer| stdout.sanitize(event.text(pointer).unwrap_or_default());
    match event.text("/type").unwrap_or_default() {
        "user_message" => {
            let content = match event.pointer("/payload/redacted") {
                Some(_) => "(redacted)".to_owned(),
                None => text("/payload/content"),
            };
            print(&format!("{}\n{content}\n\n", stdout.paint(Colour::Bold, "user")))?;
        }
        "agent_start" => {
            *has_streamed = false;
            print(&format!("{}\n", stdout.paint(Colour::Bold, one_line(&text("/payload/agent")))))?;
        }
        "agent_token" => {
            *has_streamed = true;
            print(&text("/payload/text"))?;
        }
        "agent_tool_call" | "agent_tool_result" => {
            let name = one_line(event.text("/payload/name").unwrap_or("tool"));
            eprintln_dim(format_args!("[{} {name}]", one_line(event.text("/type").unwrap_or_default())));
        }
        "agent_complete" | "agent_input_required" => {
            // The pieces of the answer have shown it already, unless they have expired.
            let answer = if *has_streamed { String::new() } else { text("/payload/message") };
            print(&format!("{answer}\n\n"))?;
        }
        "agent_failed" => {
            let message = text("/payload/message");
            print(&format!("{}: {message}\n\n", stdout.paint(Colour::Red, "failed")))?;
        }
        "agent_cancelled" => print(&format!("{}\n\n", stdout.paint(Colour::Yellow, "canceled")))?,
        "fork" => eprintln_dim("[fork]"),
        "title" => eprintln_dim(format_args!("[title: {}]", one_line(&text("/payload/title")))),
        _ => {}
    }
    Ok(())
}
