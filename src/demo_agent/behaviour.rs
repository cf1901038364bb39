//! What each skill does with a turn of a task.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderMap;
use serde_json::{Map, json};
use tokio::time::sleep;

use super::orchestrator;
use super::protocol::{ArtifactChunk, DemoArtifact};
use super::server::DemoAgent;
use super::skills::DemoSkill;
use super::tasks::{DemoTurn, TaskEntry};
use crate::a2a::model::TaskState;

/// Interval of the status messages of `slow`.
const SLOW_STEP: Duration = Duration::from_millis(500);
/// How long a task of `state working` goes on after its callers have their answer.
const AFTER_RELEASE: Duration = Duration::from_millis(300);
const MAX_BIG: usize = 256 << 20;

/// A turn and everything that a skill may need for it.
pub(super) struct SkillTurn {
    pub(super) agent: Arc<DemoAgent>,
    pub(super) turn: DemoTurn,
    /// The text, without the word that chose the skill.
    pub(super) argument: String,
    /// The tasks that the message refers to and the agent still knows.
    pub(super) referenced: Vec<Arc<TaskEntry>>,
    pub(super) headers: HeaderMap,
    pub(super) accepted_output_modes: Vec<String>,
}

impl SkillTurn {
    /// Runs until the skill is done or the task is canceled.
    pub(super) async fn run(self) {
        self.turn.stop.clone().run_until_cancelled_owned(self.work()).await;
    }

    async fn work(self) {
        let Self { turn, argument, .. } = &self;
        let skill = turn.entry.skill;
        if turn.is_first && !matches!(skill, DemoSkill::Supervisor | DemoSkill::State) {
            turn.status(TaskState::Working, Vec::new());
        }
        match skill {
            DemoSkill::Echo => turn.complete("echo", turn.message.parts.clone()),
            DemoSkill::Report => self.report(),
            DemoSkill::Auth if turn.is_first => self.auth().await,
            DemoSkill::Auth => turn.complete_with_text("auth", "Signed in; the work is done."),
            DemoSkill::Stream => self.stream().await,
            DemoSkill::Supervisor => orchestrator::run(turn, argument).await,
            DemoSkill::File => self.file(),
            DemoSkill::Fail => turn.status_text(TaskState::Failed, &format!("planned failure: {argument}")),
            DemoSkill::Reject => turn.status_text(TaskState::Rejected, "planned rejection"),
            DemoSkill::Slow => self.slow().await,
            DemoSkill::State if turn.is_first => self.state().await,
            DemoSkill::State => turn.complete_with_text("state", "thank you"),
            DemoSkill::Big => {
                let length = number_in(argument).unwrap_or(1_000_000).min(MAX_BIG);
                turn.complete_with_text("big", &"x".repeat(length));
            }
            DemoSkill::Headers => self.headers(),
            DemoSkill::Metadata => self.metadata(),
            _ => unreachable!("{skill:?} opens no task"),
        }
    }

    /// Asks for the format until it is a known one. To refine an earlier report it asks nothing: the new
    /// artifact has the same name and format.
    fn report(&self) {
        const QUESTION: &str = "Which format would you like: PDF or Markdown?";
        const PDF: &str = "application/pdf";
        let Self { turn, argument, .. } = self;
        let mut earlier = self.referenced.iter().flat_map(|entry| entry.task().artifacts);
        let refined = earlier.rfind(|artifact| artifact.name == "report");
        let answer = argument.to_lowercase();
        let names = |word: &str| answer.split(|c: char| !c.is_alphanumeric()).any(|part| part == word);
        let is_pdf = match refined {
            Some(report) => report.parts.last().is_some_and(|file| file.get().contains(PDF)),
            None if !turn.is_first && names("pdf") => true,
            None if !turn.is_first && (names("markdown") || names("md")) => false,
            None => {
                let excuse = if turn.is_first { "" } else { "I cannot write that. " };
                let prompt = format!("{excuse}{QUESTION}");
                let form =
                    json!({"state": "input-required", "prompt": prompt, "options": ["PDF", "Markdown"]});
                let parts = vec![turn.version.text(&prompt), turn.version.data(&form)];
                return turn.status(TaskState::InputRequired, parts);
            }
        };
        let order = turn.entry.task().history.first().map(|message| message.text()).unwrap_or_default();
        let text = format!("Report: {order}");
        let file = if is_pdf {
            turn.version.file("report.pdf", PDF, format!("%PDF-1.4\n% {text}\n%%EOF\n").as_bytes())
        } else {
            turn.version.file("report.md", "text/markdown", format!("# {text}\n").as_bytes())
        };
        let report = DemoArtifact::new("report", vec![turn.version.text(&text), file]);
        turn.artifact(report, ArtifactChunk::Whole);
        turn.status_text(TaskState::Completed, "Here is your report.");
    }

    async fn auth(&self) {
        let turn = &self.turn;
        let prompt = "Please sign in: send your API key for the archive.";
        let form = json!({
            "state": "auth-required",
            "prompt": prompt,
            "auth_type": "api_key",
            "service": "archive",
        });
        turn.status(TaskState::AuthRequired, vec![turn.version.text(prompt), turn.version.data(&form)]);
        if let Some(delay) = self.agent.args.auth_after {
            sleep(delay).await;
            turn.complete_with_text("auth", "Signed in elsewhere; the work is done.");
        }
    }

    async fn stream(&self) {
        let mut words: Vec<_> = self.argument.split_inclusive(char::is_whitespace).collect();
        if words.is_empty() {
            words.push("");
        }
        let (artifact, last) = (DemoArtifact::new("stream", Vec::new()), words.len() - 1);
        for (n, word) in words.into_iter().enumerate() {
            let chunk = match n {
                0 if last == 0 => ArtifactChunk::Only,
                0 => ArtifactChunk::First,
                _ if n == last => ArtifactChunk::Last,
                _ => ArtifactChunk::Next,
            };
            let parts = vec![self.turn.version.text(word)];
            self.turn.artifact(DemoArtifact { parts, ..artifact.clone() }, chunk);
            sleep(self.agent.args.token_delay).await;
        }
        self.turn.status(TaskState::Completed, Vec::new());
    }

    fn file(&self) {
        let version = self.turn.version;
        let picture = version.file("a.png", "image/png", b"\x89PNG\x00\x01");
        let data = version.data(&json!({"n": 1, "f": 1.5, "l": [1, null]}));
        self.turn.complete("bundle", vec![picture, data]);
    }

    async fn slow(&self) {
        let seconds: u32 = number_in(&self.argument).unwrap_or(1);
        let total = Duration::from_secs(seconds.into());
        let mut done = Duration::ZERO;
        while done < total {
            let text = format!("{:.1} s of {seconds} s", done.as_secs_f32());
            self.turn.status_text(TaskState::Working, &text);
            sleep(SLOW_STEP).await;
            done += SLOW_STEP;
        }
        self.turn.complete_with_text("slow", &format!("worked for {seconds} s"));
    }

    async fn state(&self) {
        let turn = &self.turn;
        let word = self.argument.split_whitespace().next_back().unwrap_or("completed");
        match TaskState::parse(word) {
            TaskState::Completed => return turn.complete_with_text("state", "completed as asked"),
            TaskState::Submitted => {}
            TaskState::Working => turn.status(TaskState::Working, Vec::new()),
            TaskState::Unknown(name) if name == "unknown" => {
                // A state that no version of the protocol has.
                return turn.status_text(TaskState::Unknown("pondering".into()), "unknown as asked");
            }
            TaskState::Unknown(name) => {
                return turn.status_text(TaskState::Failed, &format!("no such state: {name}"));
            }
            state => return turn.status_text(state, &format!("{word} as asked")),
        }
        turn.release_callers();
        sleep(AFTER_RELEASE).await;
        turn.complete_with_text("state", "completed in the end");
    }

    fn headers(&self) {
        let headers = self.headers.keys().map(|name| {
            let values = self.headers.get_all(name).iter();
            let values: Vec<_> = values.map(|value| String::from_utf8_lossy(value.as_bytes())).collect();
            (name.to_string(), values.join(", ").into())
        });
        let headers: Map<_, _> = headers.collect();
        self.turn.complete("headers", vec![self.turn.version.data(&headers.into())]);
    }

    fn metadata(&self) {
        let message = &self.turn.message;
        let seen = json!({
            "metadata": message.metadata,
            "contextId": message.context_id,
            "referenceTaskIds": message.reference_task_ids,
            "acceptedOutputModes": self.accepted_output_modes,
        });
        self.turn.complete("metadata", vec![self.turn.version.data(&seen)]);
    }
}

/// The first word of `text` that is a number of the wanted type.
pub(super) fn number_in<T: FromStr>(text: &str) -> Option<T> {
    text.split_whitespace().find_map(|word| word.parse().ok())
}
