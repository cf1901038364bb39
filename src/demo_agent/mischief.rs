//! Answers that are wrong on the level of HTTP or JSON-RPC, and the ways to go down.

use std::future::pending;
use std::io::{self, Write as _};
use std::process::Stdio;
use std::time::Duration;

use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use clap::ValueEnum;
use futures_util::{StreamExt as _, stream};
use tokio::process::Command;
use tokio::time::sleep;

use super::behaviour::number_in;
use super::rpc::Fault;
use super::skills::Skill;

/// The exit code of `crash` and `--crash-after`.
pub(super) const CRASHED: i32 = 3;

/// How a card can be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum BrokenCard {
    /// A card cut off in the middle.
    InvalidJson,
    /// A web page with status 200.
    Html,
    /// A good card with an empty list of skills.
    NoSkills,
    /// `{}`.
    Empty,
    /// A good card with 20 MB of description.
    Huge,
    /// A redirect to a good card on another host name.
    Redirect,
    /// Status 404.
    #[value(name = "404")]
    NotFound,
}

/// The answer of the skills that are no A2A at all; `None` for the others.
pub(super) async fn answer(skill: Skill, argument: &str, streaming: bool) -> Result<Option<Response>, Fault> {
    Ok(Some(match skill {
        Skill::Hang => pending().await,
        Skill::Crash => exit(CRASHED),
        Skill::RpcError => return Err(Fault::Planned(number_in(argument).unwrap_or(-32603))),
        Skill::Http => {
            let status = number_in(argument).and_then(|code| StatusCode::from_u16(code).ok());
            (status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), "planned status").into_response()
        }
        Skill::Html => web_page(),
        Skill::Garbage => {
            ([(header::CONTENT_TYPE, "application/json")], r#"{"weather":"fine"}"#).into_response()
        }
        // A stream has to begin before it can be cut: that is done where it is written.
        Skill::Cut if !streaming => cut(),
        _ => return Ok(None),
    }))
}

pub(super) fn web_page() -> Response {
    Html("<!DOCTYPE html><title>Welcome</title><h1>It works!</h1>").into_response()
}

/// A kilobyte is promised, a few bytes come.
fn cut() -> Response {
    let begin = stream::iter([Ok(r#"{"jsonrpc":"2.0","result":"#)]);
    // The pause gets the beginning onto the wire; without it the connection closes unused.
    let end = stream::once(async {
        sleep(Duration::from_millis(50)).await;
        Err(io::Error::other("planned cut"))
    });
    let headers = [(header::CONTENT_TYPE, "application/json"), (header::CONTENT_LENGTH, "1000")];
    (headers, Body::from_stream(begin.chain(end))).into_response()
}

/// Ends the process as a crash would: no clean-up, no goodbye.
#[expect(clippy::disallowed_methods, reason = "to skip the stop order is the point")]
pub(super) fn exit(code: i32) -> ! {
    std::process::exit(code)
}

/// A child that outlives the agent unless its process group is ended. It inherits the agent's
/// output, so it also keeps the other end of those pipes open.
pub(super) fn leave_grandchild() -> io::Result<Option<u32>> {
    let child = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn()?;
    Ok(child.id())
}

/// A child that is in no group and no session of the agent.
pub(super) fn leave_daemon() -> io::Result<Option<u32>> {
    let child = Command::new("setsid").args(["sleep", "1000"]).stdin(Stdio::null()).spawn()?;
    Ok(child.id())
}

/// Writes to stderr for ever. A thread of its own, as a full pipe blocks it, and the end of the
/// process must not wait for it.
pub(super) fn flood(line: usize) -> io::Result<()> {
    let write = move || {
        // Short lines in one write of a pipe's size: the flood is to be as fast as the pipe.
        let one = format!("flood {}\n", "~".repeat(line.saturating_sub(7)));
        let text = one.repeat((65536 / one.len()).max(1));
        while io::stderr().write_all(text.as_bytes()).is_ok() {}
    };
    std::thread::Builder::new().name("flood".into()).spawn(write).map(drop)
}
