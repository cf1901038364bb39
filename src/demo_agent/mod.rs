//! The bundled A2A agent for demonstrations and tests.
//!
//! A real agent over HTTP that needs no language model: what it does depends on the skill that a
//! message asks for, by `metadata.skill_id` or by its first word. It speaks A2A 1.0 or 0.3, and
//! its switches make it start late, crash, hang, or serve a broken card.
//!
//! A message becomes a turn of a task in `store`, `behaviour` says what each skill does with
//! it, `wire` writes the outcome in the version's spelling. Skills that answer with something
//! that is no A2A are in `mischief`, the card's words on all of them in `skills`.
//!
//! ```sh
//! a2a-bridge demo-agent --port 4000 --skills echo,report
//! ```

mod behaviour;
mod card;
mod mischief;
mod model;
mod rpc;
mod server;
mod skills;
mod store;
mod supervisor;
#[cfg(test)]
mod tests;
mod wire;

use std::io::{self, Write as _};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use behaviour::Delays;
use mischief::BrokenCard;
use skills::Skill;
use wire::Protocol;

/// How the demo agent is to behave.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Port on 127.0.0.1; 0 takes a free one. Printed as `listening on http://127.0.0.1:N`
    #[arg(long, env = "PORT", default_value_t = 0)]
    port: u16,
    /// Version of A2A to speak
    #[arg(long, value_enum, default_value = "1.0")]
    protocol: Protocol,
    /// Name on the card
    #[arg(long, default_value = "demo")]
    name: String,
    /// Publish only these skills on the card
    #[arg(long, value_enum, value_delimiter = ',')]
    skills: Vec<Skill>,
    /// Pause between two words of the skill `stream`
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "20ms")]
    token_delay: Duration,
    /// Let a task of the skill `auth` complete by itself after this time
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    auth_after: Option<Duration>,
    /// Refuse calls without this bearer token
    #[arg(long, value_name = "TOKEN")]
    bearer: Option<String>,
    /// Want the bearer token for the card too
    #[arg(long, requires = "bearer")]
    card_auth: bool,
    /// Serve this file as the card, read again for every request; `{url}` in it is the address
    #[arg(long, value_name = "PATH")]
    card_file: Option<PathBuf>,
    /// Serve a card that is wrong in this way
    #[arg(long, value_enum, value_name = "KIND")]
    broken_card: Option<BrokenCard>,
    /// Serve the card at `/.well-known/agent.json` only
    #[arg(long, conflicts_with = "only_new_card_path")]
    only_old_card_path: bool,
    /// Serve the card at `/.well-known/agent-card.json` only
    #[arg(long)]
    only_new_card_path: bool,
    /// Return every task at once, also when asked to wait
    #[arg(long)]
    ignore_blocking: bool,
    /// Listen only after this time
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "0s")]
    slow_start: Duration,
    /// Leave with this exit code instead of starting
    #[arg(long, value_name = "CODE")]
    exit_at_start: Option<i32>,
    /// Leave with exit code 3 shortly after the answer to the Nth message
    #[arg(long, value_name = "N")]
    crash_after: Option<u64>,
    /// Accept connections and never answer
    #[arg(long)]
    hang: bool,
    /// Go on after SIGTERM
    #[arg(long)]
    ignore_sigterm: bool,
    /// Start a child that sleeps on in the agent's process group
    #[arg(long)]
    leave_grandchild: bool,
    /// Start a child that sleeps on in a session of its own
    #[arg(long)]
    leave_daemon: bool,
    /// Answer every request for the card but the first only after this time
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "0s")]
    slow_card: Duration,
    /// Write lines to stderr as fast as they go
    #[arg(long)]
    flood: bool,
    /// How long those lines are, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 100)]
    flood_line: usize,
}

impl Args {
    fn delays(&self) -> Delays {
        Delays { token: self.token_delay, auth_after: self.auth_after }
    }
}

/// Runs the agent until SIGTERM or SIGINT.
pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    if let Some(code) = args.exit_at_start {
        mischief::exit(code);
    }
    let stop = stop_on_signal(args.ignore_sigterm).context("listen for signals")?;
    if args.leave_grandchild {
        let pid = mischief::leave_grandchild().context("start the grandchild")?.unwrap_or_default();
        say(&format!("grandchild {pid}"))?;
    }
    if args.leave_daemon {
        let pid = mischief::leave_daemon().context("start the daemon")?.unwrap_or_default();
        say(&format!("daemon {pid}"))?;
    }
    if args.flood {
        mischief::flood(args.flood_line).context("start the flood")?;
    }
    if stop.run_until_cancelled(tokio::time::sleep(args.slow_start)).await.is_none() {
        return Ok(());
    }
    let address = (Ipv4Addr::LOCALHOST, args.port);
    let listener =
        TcpListener::bind(address).await.with_context(|| format!("listen on port {}", args.port))?;
    say(&format!("listening on http://{}", listener.local_addr()?))?;
    server::serve(listener, args, stop).await.context("serve HTTP")
}

/// A token that SIGINT cancels, and SIGTERM unless it is to be ignored.
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

/// One line on stdout, at once: whoever started the agent may be waiting for it.
fn say(line: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("write to stdout")
}

/// `20ms`, `3s`, `1.5s` or `2m`.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no duration; write 20ms, 3s or 2m");
    let unit = text.find(char::is_alphabetic).ok_or_else(wrong)?;
    let (number, unit) = text.split_at(unit);
    let seconds = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        _ => return Err(wrong()),
    };
    let number: f64 = number.parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(number * seconds).map_err(|_| wrong())
}
