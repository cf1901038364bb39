//! What each skill does with a turn of a task.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderMap;
use serde_json::json;
use tokio::time::sleep;

use super::model::{Artifact, Chunk, Part, State, new_id};
use super::skills::Skill;
use super::store::{Entry, Turn};
use super::supervisor;

/// Between two status texts of `slow`.
const TICK: Duration = Duration::from_millis(500);
/// How long a task of `state working` goes on after its callers were let go.
const AFTERWARDS: Duration = Duration::from_millis(300);
const MAX_BIG: usize = 256 << 20;

/// A turn with all that may matter for it.
pub(super) struct Job {
    pub(super) turn: Turn,
    /// The text, without the word that chose the skill.
    pub(super) argument: String,
    /// The tasks that the message refers to, as far as they are known.
    pub(super) referenced: Vec<Arc<Entry>>,
    pub(super) headers: HeaderMap,
    pub(super) accepted_output_modes: Vec<String>,
    pub(super) delays: Delays,
}

/// The times that switches of the agent set.
#[derive(Debug, Clone, Copy)]
pub(super) struct Delays {
    pub(super) token: Duration,
    pub(super) auth_after: Option<Duration>,
}

/// Does the job, until it is done or the task is cancelled.
pub(super) async fn run(job: Job) {
    let stop = job.turn.stop.clone();
    stop.run_until_cancelled_owned(work(job)).await;
}

async fn work(job: Job) {
    let Job { turn, argument, .. } = &job;
    let skill = turn.entry.skill;
    let is_new = turn.number == 0;
    if is_new && !matches!(skill, Skill::Supervisor | Skill::State) {
        turn.status(State::Working, Vec::new());
    }
    match skill {
        Skill::Echo => turn.complete("echo", turn.message.parts.clone()),
        Skill::Report => report(&job),
        Skill::Auth if is_new => auth(&job).await,
        Skill::Auth => turn.complete("auth", vec![Part::text("Signed in; the work is done.")]),
        Skill::Stream => stream(&job).await,
        Skill::Supervisor => supervisor::run(turn, argument).await,
        Skill::File => turn.complete("bundle", file()),
        Skill::Fail => turn.status(State::Failed, vec![Part::text(format!("planned failure: {argument}"))]),
        Skill::Reject => turn.status(State::Rejected, vec![Part::text("planned rejection")]),
        Skill::Slow => slow(&job).await,
        Skill::State if is_new => state(&job).await,
        Skill::State => turn.complete("state", vec![Part::text("thank you")]),
        Skill::Cut => {
            sleep(AFTERWARDS).await;
            turn.complete("cut", vec![Part::text("the part that was cut off")]);
        }
        Skill::Big => {
            let length = number_in(argument).unwrap_or(1_000_000).min(MAX_BIG);
            turn.complete("big", vec![Part::text("x".repeat(length))]);
        }
        Skill::Headers => turn.complete("headers", vec![headers(&job)]),
        Skill::Metadata => turn.complete("metadata", vec![metadata(&job)]),
        Skill::Hang
        | Skill::Message
        | Skill::RpcError
        | Skill::Http
        | Skill::Html
        | Skill::Garbage
        | Skill::Crash => unreachable!("{skill:?} never opens a task"),
    }
}

/// The first word of `text` that is a number of the wanted kind.
pub(super) fn number_in<T: FromStr>(text: &str) -> Option<T> {
    text.split_whitespace().find_map(|word| word.parse().ok())
}

/// Asks for the format until it is a known one. A refinement of an earlier report asks nothing:
/// it is a new artifact under the same name and in the same format.
fn report(job: &Job) {
    const QUESTION: &str = "Which format would you like: PDF or Markdown?";
    let Job { turn, argument, .. } = job;
    let mut earlier = job.referenced.iter().flat_map(|entry| entry.task().artifacts);
    let refined = earlier.rfind(|artifact| artifact.name == "report");
    let answer = argument.to_lowercase();
    let known = |word: &str| answer.split(|c: char| !c.is_alphanumeric()).any(|part| part == word);
    let (file_name, media_type) = match refined.as_ref().map(is_pdf) {
        Some(true) => ("report.pdf", "application/pdf"),
        Some(false) => ("report.md", "text/markdown"),
        None if turn.number > 0 && known("pdf") => ("report.pdf", "application/pdf"),
        None if turn.number > 0 && (known("markdown") || known("md")) => ("report.md", "text/markdown"),
        None => {
            let prompt = match turn.number {
                0 => QUESTION.to_owned(),
                _ => format!("I cannot write that. {QUESTION}"),
            };
            let form = json!({"state": "input-required", "prompt": prompt, "options": ["PDF", "Markdown"]});
            turn.status(State::InputRequired, vec![Part::text(prompt), Part::data(&form)]);
            return;
        }
    };
    let order = turn.entry.task().history.first().map(|message| message.text()).unwrap_or_default();
    let text = format!("Report: {order}");
    let file = match media_type {
        "application/pdf" => {
            Part::file(file_name, media_type, format!("%PDF-1.4\n% {text}\n%%EOF\n").as_bytes())
        }
        _ => Part::file(file_name, media_type, format!("# {text}\n").as_bytes()),
    };
    let parts = vec![Part::text(text), file];
    turn.artifact(Artifact { id: new_id(), name: "report".into(), description: None, parts }, Chunk::Whole);
    turn.status(State::Completed, vec![Part::text("Here is your report.")]);
}

fn is_pdf(artifact: &Artifact) -> bool {
    artifact.parts.iter().any(|part| part.media_type.as_deref() == Some("application/pdf"))
}

async fn auth(job: &Job) {
    let prompt = "Please sign in: send your API key for the archive.";
    let form = json!({
        "state": "auth-required",
        "prompt": prompt,
        "auth_type": "api_key",
        "service": "archive",
    });
    job.turn.status(State::AuthRequired, vec![Part::text(prompt), Part::data(&form)]);
    if let Some(delay) = job.delays.auth_after {
        sleep(delay).await;
        job.turn.complete("auth", vec![Part::text("Signed in elsewhere; the work is done.")]);
    }
}

async fn stream(job: &Job) {
    let words: Vec<_> = job.argument.split_inclusive(char::is_whitespace).collect();
    let words = if words.is_empty() { vec![""] } else { words };
    let (id, last) = (new_id(), words.len() - 1);
    for (n, word) in words.into_iter().enumerate() {
        let chunk = match n {
            0 if last == 0 => Chunk::Closing,
            0 => Chunk::First,
            _ if n == last => Chunk::Last,
            _ => Chunk::Next,
        };
        let parts = vec![Part::text(word)];
        job.turn
            .artifact(Artifact { id: id.clone(), name: "stream".into(), description: None, parts }, chunk);
        sleep(job.delays.token).await;
    }
    job.turn.status(State::Completed, Vec::new());
}

fn file() -> Vec<Part> {
    let data = json!({"n": 1, "f": 1.5, "l": [1, null]});
    vec![Part::file("a.png", "image/png", b"\x89PNG\x00\x01"), Part::data(&data)]
}

async fn slow(job: &Job) {
    let seconds: u32 = number_in(&job.argument).unwrap_or(1);
    let total = Duration::from_secs(seconds.into());
    let mut done = Duration::ZERO;
    while done < total {
        let text = format!("{:.1} s of {seconds} s", done.as_secs_f32());
        job.turn.status(State::Working, vec![Part::text(text)]);
        sleep(TICK).await;
        done += TICK;
    }
    job.turn.complete("slow", vec![Part::text(format!("worked for {seconds} s"))]);
}

async fn state(job: &Job) {
    let turn = &job.turn;
    let word = job.argument.split_whitespace().next_back().unwrap_or("completed");
    let state = match word {
        "completed" => return turn.complete("state", vec![Part::text("completed as asked")]),
        "submitted" => State::Submitted,
        "working" => State::Working,
        "failed" => State::Failed,
        "canceled" => State::Canceled,
        "rejected" => State::Rejected,
        "input-required" => State::InputRequired,
        "auth-required" => State::AuthRequired,
        "unknown" => State::Unheard,
        other => return turn.status(State::Failed, vec![Part::text(format!("no such state: {other}"))]),
    };
    if state.ends_turn() {
        return turn.status(state, vec![Part::text(format!("{word} as asked"))]);
    }
    if state == State::Working {
        turn.status(state, Vec::new());
    }
    turn.let_callers_go();
    sleep(AFTERWARDS).await;
    turn.complete("state", vec![Part::text("completed in the end")]);
}

fn headers(job: &Job) -> Part {
    let mut seen = BTreeMap::<&str, String>::new();
    for (name, value) in &job.headers {
        let value = String::from_utf8_lossy(value.as_bytes());
        let all = seen.entry(name.as_str()).or_default();
        let comma = if all.is_empty() { "" } else { ", " };
        all.push_str(&format!("{comma}{value}"));
    }
    Part::data(&seen)
}

fn metadata(job: &Job) -> Part {
    let message = &job.turn.message;
    Part::data(&json!({
        "metadata": message.metadata,
        "contextId": message.context_id,
        "referenceTaskIds": message.reference_task_ids,
        "acceptedOutputModes": job.accepted_output_modes,
    }))
}
