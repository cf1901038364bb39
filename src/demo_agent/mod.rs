//! The bundled A2A agent for demonstrations and tests.
//!
//! A real agent over HTTP that needs no language model: a message chooses a skill by `metadata.skill_id` or by
//! its first word. It speaks A2A 1.0 or 0.3, and its switches make it start late, exit, or serve a broken card.
//!
//! `rpc` turns a request into a turn of a task in `tasks`, `behaviour` says what each skill does with the turn,
//! and `protocol` has the JSON of both versions.
//!
//! ```sh
//! a2a-bridge demo-agent --port 4000 --skills echo,report
//! ```

mod behaviour;
mod card;
mod orchestrator;
mod protocol;
mod rpc;
mod server;
mod skills;
mod tasks;
#[cfg(test)]
pub(crate) mod tests;

use std::io::{self, Write as _};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use card::BrokenCard;
use protocol::ProtocolVersion;
use skills::DemoSkill;

use crate::config::values::parse_duration;

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct DemoAgentArgs {
    /// Port on 127.0.0.1; 0 picks a free one. The agent prints `listening on http://127.0.0.1:N`
    #[arg(long, env = "PORT", default_value_t = 0)]
    port: u16,
    /// Version of A2A to speak
    #[arg(long, value_enum, default_value = "1.0")]
    protocol: ProtocolVersion,
    /// Name on the card
    #[arg(long, default_value = "demo")]
    name: String,
    /// Publish only these skills on the card
    #[arg(long, value_enum, value_delimiter = ',')]
    skills: Vec<DemoSkill>,
    /// Pause between two words of the skill `stream`
    #[arg(long, value_name = "DURATION", value_parser = delay, default_value = "20ms")]
    token_delay: Duration,
    /// Complete a task of the skill `auth` after this time, even without an answer
    #[arg(long, value_name = "DURATION", value_parser = delay)]
    auth_after: Option<Duration>,
    /// Refuse calls without this bearer token
    #[arg(long, value_name = "TOKEN")]
    bearer: Option<String>,
    /// Require the bearer token for the card too
    #[arg(long, requires = "bearer")]
    card_auth: bool,
    /// Serve this file as the card, read again for every request; `{url}` in it becomes the agent's address
    #[arg(long, value_name = "PATH")]
    card_file: Option<PathBuf>,
    /// Serve a broken card of this kind
    #[arg(long, value_enum, value_name = "KIND")]
    broken_card: Option<BrokenCard>,
    /// Serve the card at `/.well-known/agent.json` only
    #[arg(long, conflicts_with = "only_new_card_path")]
    only_old_card_path: bool,
    /// Serve the card at `/.well-known/agent-card.json` only
    #[arg(long)]
    only_new_card_path: bool,
    /// Return every task immediately, even if the caller wants to wait
    #[arg(long)]
    ignore_blocking: bool,
    /// Wait this long before listening
    #[arg(long, value_name = "DURATION", value_parser = delay, default_value = "0s")]
    slow_start: Duration,
    /// Exit with this code instead of starting
    #[arg(long, value_name = "CODE")]
    exit_at_start: Option<i32>,
    /// Ignore SIGTERM
    #[arg(long)]
    ignore_sigterm: bool,
    /// Start a child that keeps running in the agent's process group
    #[arg(long)]
    leave_grandchild: bool,
    /// Start a child that keeps running in a session of its own
    #[arg(long)]
    leave_daemon: bool,
    /// Delay every response with the card except the first by this time
    #[arg(long, value_name = "DURATION", value_parser = delay, default_value = "0s")]
    slow_card: Duration,
    /// Write lines to stderr without pause
    #[arg(long)]
    flood: bool,
    /// Length of these lines, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 100)]
    flood_line: usize,
}

fn delay(text: &str) -> Result<Duration, String> {
    if text == "0s" { Ok(Duration::ZERO) } else { parse_duration(text) }
}

/// Runs the agent until SIGTERM or SIGINT.
pub(crate) async fn run(args: DemoAgentArgs) -> anyhow::Result<()> {
    if let Some(code) = args.exit_at_start {
        exit(code);
    }
    let stop = stop_on_signal(args.ignore_sigterm).context("listen for signals")?;
    // The children inherit the agent's output and so keep those pipes open.
    if args.leave_grandchild {
        start_child("grandchild", "sleep", &["1000"])?;
    }
    if args.leave_daemon {
        start_child("daemon", "setsid", &["sleep", "1000"])?;
    }
    if args.flood {
        flood(args.flood_line).context("start the flood")?;
    }
    if stop.run_until_cancelled(tokio::time::sleep(args.slow_start)).await.is_none() {
        return Ok(());
    }
    let address = (Ipv4Addr::LOCALHOST, args.port);
    let listener =
        TcpListener::bind(address).await.with_context(|| format!("listen on port {}", args.port))?;
    print_line(&format!("listening on http://{}", listener.local_addr()?))?;
    server::serve(listener, args, stop).await.context("serve HTTP")
}

/// A token that SIGINT cancels, and SIGTERM unless the agent ignores it.
fn stop_on_signal(ignore_sigterm: bool) -> io::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = CancellationToken::new();
    let done = stop.clone();
    TaskTracker::new().spawn(async move {
        tokio::select! {
            _ = terminate.recv(), if !ignore_sigterm => {}
            _ = interrupt.recv() => {}
        }
        done.cancel();
    });
    Ok(stop)
}

/// Flushes, as the parent process may wait for the line.
fn print_line(line: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("write to stdout")
}

/// Starts a child that outlives the agent, and prints its process id.
fn start_child(role: &str, program: &str, arguments: &[&str]) -> anyhow::Result<()> {
    let child = Command::new(program).args(arguments).stdin(Stdio::null()).spawn();
    let child = child.with_context(|| format!("start the {role}"))?;
    print_line(&format!("{role} {}", child.id().unwrap_or_default()))
}

/// Writes to stderr in a thread of its own: a full pipe blocks it, and the exit of the process must not wait
/// for it.
fn flood(line_length: usize) -> io::Result<()> {
    let write = move || {
        let line = format!("flood {}\n", "~".repeat(line_length.saturating_sub(7)));
        // Many short lines in one write of a pipe's size keep the pipe full.
        let text = line.repeat((65536 / line.len()).max(1));
        while io::stderr().write_all(text.as_bytes()).is_ok() {}
    };
    std::thread::Builder::new().name("flood".into()).spawn(write).map(drop)
}

/// Exits as a crash does, without any clean-up.
#[expect(clippy::disallowed_methods, reason = "a crash skips the stop order")]
fn exit(code: i32) -> ! {
    std::process::exit(code)
}
