//! The agent's card, good or broken on purpose.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use clap::ValueEnum as _;
use serde_json::{Map, Value, json};

use super::mischief::{self, BrokenCard};
use super::server::Agent;
use super::skills::Skill;
use super::wire::Protocol;

const HUGE: usize = 20_000_000;

/// What a well-known path answers.
pub(super) async fn serve(agent: &Agent) -> Response {
    let args = &agent.args;
    if let Some(path) = &args.card_file {
        return match tokio::fs::read_to_string(path).await {
            Ok(card) => json_text(card.replace("{url}", &agent.url)),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
        };
    }
    let mut card = card(agent);
    match args.broken_card {
        None => {}
        Some(BrokenCard::InvalidJson) => {
            return json_text(card.to_string().chars().take(40).collect());
        }
        Some(BrokenCard::Html) => return mischief::web_page(),
        Some(BrokenCard::Empty) => return json_text("{}".into()),
        Some(BrokenCard::NotFound) => return (StatusCode::NOT_FOUND, "Not Found").into_response(),
        Some(BrokenCard::Redirect) => {
            let elsewhere = agent.url.replace("127.0.0.1", "localhost") + "moved/agent-card.json";
            return (StatusCode::FOUND, [(header::LOCATION, elsewhere)]).into_response();
        }
        Some(BrokenCard::NoSkills) => set(&mut card, "skills", json!([])),
        Some(BrokenCard::Huge) => set(&mut card, "description", "x".repeat(HUGE).into()),
    }
    json_text(card.to_string())
}

/// The good card, for the place that a redirect leads to.
pub(super) fn good(agent: &Agent) -> Response {
    json_text(card(agent).to_string())
}

fn card(agent: &Agent) -> Value {
    let args = &agent.args;
    let published: &[Skill] = if args.skills.is_empty() { Skill::value_variants() } else { &args.skills };
    let mut card = json!({
        "name": args.name,
        "description": "The demo agent of a2a-bridge: a skill for every way a task can go.",
        "version": env!("CARGO_PKG_VERSION"),
        "capabilities": {"streaming": true, "pushNotifications": false},
        "defaultInputModes": ["text/plain", "application/json"],
        "defaultOutputModes": ["text/plain"],
        "skills": published.iter().map(|skill| skill_entry(*skill)).collect::<Vec<_>>(),
    });
    let own = match args.protocol {
        Protocol::V1 => json!({
            "supportedInterfaces":
                [{"url": agent.url, "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}],
        }),
        Protocol::V03 => json!({
            "url": agent.url,
            "protocolVersion": "0.3.0",
            "preferredTransport": "JSONRPC",
        }),
    };
    let security = match (args.bearer.is_some(), args.protocol) {
        (false, _) => json!({}),
        (true, Protocol::V1) => json!({
            "securitySchemes": {"bearer": {"httpAuthSecurityScheme": {"scheme": "Bearer"}}},
            "securityRequirements": [{"schemes": {"bearer": {"list": []}}}],
        }),
        (true, Protocol::V03) => json!({
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "security": [{"bearer": []}],
        }),
    };
    for (key, value) in [own, security].iter().filter_map(Value::as_object).flat_map(Map::clone) {
        set(&mut card, &key, value);
    }
    card
}

fn skill_entry(skill: Skill) -> Value {
    let about = skill.about();
    let mut entry = json!({
        "id": skill.id(),
        "name": about.name,
        "description": about.description,
        "tags": about.tags,
        "examples": about.examples,
    });
    if !about.output_modes.is_empty() {
        set(&mut entry, "outputModes", json!(about.output_modes));
    }
    entry
}

fn set(object: &mut Value, key: &str, value: Value) {
    if let Some(object) = object.as_object_mut() {
        object.insert(key.into(), value);
    }
}

fn json_text(text: String) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], text).into_response()
}
