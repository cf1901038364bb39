//! The script of a supervisor agent that plans, calls another agent and passes its answer on
//! token by token: 600 events from the first to the last, the quirks of the real one included.

use super::model::{Artifact, Chunk, Part, State, new_id};
use super::store::Turn;

const PLAN_TOKENS: usize = 50;
/// With the task, the plan, the notices, the closing artifact and the final status: 600 events.
const RESULT_TOKENS: usize = 544;

pub(super) async fn run(turn: &Turn, query: &str) {
    let plan = plan(query);
    let about = "Execution plan streaming in progress";
    tokens(turn, "execution_plan_streaming", about, &plan).await;
    // Appended to an artifact that nobody has seen: the real one does that.
    let about = "Complete execution plan streamed to user";
    one(turn, "execution_plan_update", about, &plan.concat(), Chunk::Next);
    let started = "🔧 Supervisor: Calling Agent Argocd...\n";
    one(turn, "tool_notification_start", "Tool call started: argocd", started, Chunk::Whole);
    let result = result();
    let about = "Streaming result from Platform Engineer";
    tokens(turn, "streaming_result", about, &result).await;
    let completed = "✅ Supervisor: Agent Argocd completed\n";
    one(turn, "tool_notification_complete", "Tool call completed: argocd", completed, Chunk::Whole);
    let about = "Partial result from Platform Engineer (stream ended)";
    one(turn, "partial_result", about, &result.concat(), Chunk::Closing);
    turn.status(State::Completed, Vec::new());
}

fn plan(query: &str) -> Vec<String> {
    let head = ["⟦", "**", "🎯", " Execution Plan: ", query, "**", "\n"].map(String::from);
    let steps = (1..).flat_map(|n| [format!("- step {n}"), ": ".into(), "ask Argocd".into(), "\n".into()]);
    let body = head.into_iter().chain(steps).take(PLAN_TOKENS - 1);
    body.chain(["⟧".to_owned()]).collect()
}

fn result() -> Vec<String> {
    let head = ["Here", " is", " the", " ArgoCD", " version", " information:", "\n"].map(String::from);
    let rows = (1..).flat_map(|n| [format!("- app-{n:03}"), ": ".into(), "v3.1.8".into(), "\n".into()]);
    head.into_iter().chain(rows).take(RESULT_TOKENS).collect()
}

/// One artifact in many small pieces; the last is not marked, as with the real one.
async fn tokens(turn: &Turn, name: &str, about: &str, tokens: &[String]) {
    let id = new_id();
    for (n, token) in tokens.iter().enumerate() {
        let chunk = if n == 0 { Chunk::First } else { Chunk::Next };
        turn.artifact(artifact(&id, name, about, token), chunk);
        tokio::task::yield_now().await;
    }
}

fn one(turn: &Turn, name: &str, about: &str, text: &str, chunk: Chunk) {
    turn.artifact(artifact(&new_id(), name, about, text), chunk);
}

fn artifact(id: &str, name: &str, about: &str, text: &str) -> Artifact {
    Artifact {
        id: id.into(),
        name: name.into(),
        description: Some(about.into()),
        parts: vec![Part::text(text)],
    }
}
