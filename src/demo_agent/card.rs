//! The agent's card, correct or broken on purpose.

use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use clap::ValueEnum;
use serde_json::json;

use super::protocol::{ProtocolVersion, RawJson, object, some};
use super::server::DemoAgent;
use super::skills::DemoSkill;
use super::{DemoAgentArgs, rpc};
use crate::text::head;

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
            Ok(card) => rpc::json_response(card.replace("{url}", &agent.url)),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
        };
    }
    match agent.args.broken_card {
        Some(BrokenCard::InvalidJson) => rpc::json_response(head(card(agent).get(), 40)),
        Some(BrokenCard::Html) => web_page(),
        Some(BrokenCard::Empty) => rpc::json_response("{}"),
        Some(BrokenCard::Redirect) => {
            let moved = agent.url.replace("127.0.0.1", "localhost") + "moved/agent-card.json";
            (StatusCode::FOUND, [(header::LOCATION, moved)]).into_response()
        }
        Some(BrokenCard::NotFound) => (StatusCode::NOT_FOUND, "Not Found").into_response(),
        None | Some(BrokenCard::NoSkills | BrokenCard::Huge) => rpc::json_response(card(agent).get()),
    }
}

pub(super) fn card(agent: &DemoAgent) -> RawJson {
    let DemoAgentArgs { protocol, broken_card, .. } = &agent.args;
    let bearer = agent.args.bearer.as_ref();
    let skills = match agent.args.skills.as_slice() {
        _ if *broken_card == Some(BrokenCard::NoSkills) => &[],
        [] => DemoSkill::value_variants(),
        skills => skills,
    };
    let description = match broken_card {
        Some(BrokenCard::Huge) => "x".repeat(HUGE),
        _ => "The demo agent of a2a-bridge: a skill for every way a task can go.".to_owned(),
    };
    let scheme = match protocol {
        ProtocolVersion::V1 => json!({"httpAuthSecurityScheme": {"scheme": "Bearer"}}),
        ProtocolVersion::V03 => json!({"type": "http", "scheme": "bearer"}),
    };
    let interface = json!({"url": agent.url, "protocolBinding": "JSONRPC", "protocolVersion": "1.0"});
    object([
        ("name", some(&agent.args.name)),
        ("description", some(description)),
        ("version", some(env!("CARGO_PKG_VERSION"))),
        ("capabilities", some(json!({"streaming": true, "pushNotifications": false}))),
        ("defaultInputModes", some(["text/plain", "application/json"])),
        ("defaultOutputModes", some(["text/plain"])),
        ("skills", some(skills.iter().map(|skill| skill.card_entry()).collect::<Vec<_>>())),
        ("supportedInterfaces", protocol.only_1([interface])),
        ("url", protocol.only_03(&agent.url)),
        ("protocolVersion", protocol.only_03("0.3.0")),
        ("preferredTransport", protocol.only_03("JSONRPC")),
        ("securitySchemes", bearer.and_then(|_| some(json!({"bearer": scheme})))),
        (
            "securityRequirements",
            bearer.and_then(|_| protocol.only_1([json!({"schemes": {"bearer": {"list": []}}})])),
        ),
        ("security", bearer.and_then(|_| protocol.only_03([json!({"bearer": []})]))),
    ])
}

pub(super) fn web_page() -> Response {
    Html("<!DOCTYPE html><title>Welcome</title><h1>It works!</h1>").into_response()
}
