//! The agent's card, correct or broken on purpose.

use axum::Json;
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use clap::ValueEnum;
use serde_json::{Value, json};

use super::protocol::ProtocolVersion;
use super::rpc;
use super::server::DemoAgent;
use super::skills::DemoSkill;

const HUGE: usize = 20_000_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum BrokenCard {
    /// The first 40 characters of a card
    InvalidJson,
    /// A web page with status 200
    Html,
    /// A card with an empty list of skills
    NoSkills,
    /// `{}`
    Empty,
    /// A card with 20 MB of description
    Huge,
    /// A redirect to a correct card on another host name
    Redirect,
    /// Status 404
    #[value(name = "404")]
    NotFound,
}

/// What the well-known paths answer.
pub(super) async fn answer(agent: &DemoAgent) -> Response {
    if let Some(path) = &agent.args.card_file {
        return match tokio::fs::read_to_string(path).await {
            Ok(card) => rpc::json(card.replace("{url}", &agent.url)),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
        };
    }
    let mut card = card(agent);
    match agent.args.broken_card {
        None => {}
        Some(BrokenCard::InvalidJson) => return rpc::json(card.to_string().chars().take(40).collect()),
        Some(BrokenCard::Html) => return web_page(),
        Some(BrokenCard::NoSkills) => card["skills"] = json!([]),
        Some(BrokenCard::Empty) => card = json!({}),
        Some(BrokenCard::Huge) => card["description"] = "x".repeat(HUGE).into(),
        Some(BrokenCard::Redirect) => {
            let moved = agent.url.replace("127.0.0.1", "localhost") + "moved/agent-card.json";
            return (StatusCode::FOUND, [(header::LOCATION, moved)]).into_response();
        }
        Some(BrokenCard::NotFound) => return (StatusCode::NOT_FOUND, "Not Found").into_response(),
    }
    Json(card).into_response()
}

pub(super) fn card(agent: &DemoAgent) -> Value {
    let args = &agent.args;
    let skills = if args.skills.is_empty() { DemoSkill::value_variants() } else { &args.skills };
    let mut card = json!({
        "name": args.name,
        "description": "The demo agent of a2a-bridge: a skill for every way a task can go.",
        "version": env!("CARGO_PKG_VERSION"),
        "capabilities": {"streaming": true, "pushNotifications": false},
        "defaultInputModes": ["text/plain", "application/json"],
        "defaultOutputModes": ["text/plain"],
        "skills": skills.iter().map(|skill| skill.card_entry()).collect::<Vec<_>>(),
    });
    match args.protocol {
        ProtocolVersion::V1 => {
            let interface = json!({"url": agent.url, "protocolBinding": "JSONRPC", "protocolVersion": "1.0"});
            card["supportedInterfaces"] = json!([interface]);
            if args.bearer.is_some() {
                card["securitySchemes"] = json!({"bearer": {"httpAuthSecurityScheme": {"scheme": "Bearer"}}});
                card["securityRequirements"] = json!([{"schemes": {"bearer": {"list": []}}}]);
            }
        }
        ProtocolVersion::V03 => {
            card["url"] = json!(agent.url);
            card["protocolVersion"] = json!("0.3.0");
            card["preferredTransport"] = json!("JSONRPC");
            if args.bearer.is_some() {
                card["securitySchemes"] = json!({"bearer": {"type": "http", "scheme": "bearer"}});
                card["security"] = json!([{"bearer": []}]);
            }
        }
    }
    card
}

pub(super) fn web_page() -> Response {
    Html("<!DOCTYPE html><title>Welcome</title><h1>It works!</h1>").into_response()
}
