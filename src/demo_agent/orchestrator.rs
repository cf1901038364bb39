//! The script of an orchestrator that plans, calls another agent and forwards its answer token by token:
//! 600 events, with the quirks of the real agent that it imitates.

use super::protocol::{ArtifactChunk, DemoArtifact};
use super::tasks::DemoTurn;
use crate::a2a::model::TaskState;

const PLAN_TOKENS: usize = 50;
/// With the task, the plan, the notifications, the last artifact and the final status: 600 events.
const RESULT_TOKENS: usize = 544;

pub(super) async fn run(turn: &DemoTurn, query: &str) {
    let plan = plan(query);
    let streaming = new_artifact("execution_plan_streaming", "Execution plan streaming in progress");
    send_tokens(turn, &streaming, &plan).await;
    let complete = new_artifact("execution_plan_update", "Complete execution plan streamed to user");
    // The real agent appends to an artifact that it has not sent before.
    send(turn, &complete, &plan.concat(), ArtifactChunk::Next);
    let started = new_artifact("tool_notification_start", "Tool call started: argocd");
    send(turn, &started, "🔧 Supervisor: Calling Agent Argocd...\n", ArtifactChunk::Whole);

    let result = result();
    let streaming = new_artifact("streaming_result", "Streaming result from Platform Engineer");
    send_tokens(turn, &streaming, &result).await;
    let completed = new_artifact("tool_notification_complete", "Tool call completed: argocd");
    send(turn, &completed, "✅ Supervisor: Agent Argocd completed\n", ArtifactChunk::Whole);
    let partial = new_artifact("partial_result", "Partial result from Platform Engineer (stream ended)");
    send(turn, &partial, &result.concat(), ArtifactChunk::Only);
    turn.status(TaskState::Completed, Vec::new());
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

fn new_artifact(name: &'static str, description: &'static str) -> DemoArtifact {
    DemoArtifact { description: Some(description), ..DemoArtifact::new(name, Vec::new()) }
}

/// Like the real agent, does not mark the last token.
async fn send_tokens(turn: &DemoTurn, artifact: &DemoArtifact, tokens: &[String]) {
    for (n, token) in tokens.iter().enumerate() {
        send(turn, artifact, token, if n == 0 { ArtifactChunk::First } else { ArtifactChunk::Next });
        tokio::task::yield_now().await;
    }
}

fn send(turn: &DemoTurn, artifact: &DemoArtifact, text: &str, chunk: ArtifactChunk) {
    let parts = vec![turn.version.text(text)];
    turn.artifact(DemoArtifact { parts, ..artifact.clone() }, chunk);
}
