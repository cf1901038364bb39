//! Where the bridge's own words go: to stderr, as text for people or as JSON for programs. The spans of
//! calls go elsewhere, see [`spans`].

pub(crate) mod spans;
pub(crate) mod trace_context;

mod one_line;
mod writer;

use std::backtrace::Backtrace;
use std::io::Write as _;

use clap::ValueEnum;
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use one_line::{OneLine, PANIC};

/// The form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    /// One JSON object a line.
    Json,
}

/// Begins to log. `filter` is in the form of `RUST_LOG`, such as `info` or `a2a_bridge=debug`.
///
/// # Errors
///
/// When `filter` is not understood.
pub(crate) fn start(filter: &str, format: LogFormat) -> Result<(), tracing_subscriber::filter::ParseError> {
    let filter = EnvFilter::builder().parse(filter)?;
    let ansi = std::io::IsTerminal::is_terminal(&std::io::stderr()) && std::env::var_os("NO_COLOR").is_none();
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| writer::Lines).with_ansi(ansi);
    match format {
        LogFormat::Text => {
            let format = OneLine(tracing_subscriber::fmt::format().with_target(false).with_ansi(ansi));
            builder.event_format(format).finish().with(filter_fn(is_for_logs)).init();
        }
        LogFormat::Json => builder.json().flatten_event(true).finish().with(filter_fn(is_for_logs)).init(),
    }
    // The usual way of a panic is a write to stderr, which may block whoever panicked.
    std::panic::set_hook(Box::new(|panic| {
        tracing::error!(target: PANIC, "{panic}\n{}", Backtrace::capture());
    }));
    Ok(())
}

/// Says something to people after everything that was logged.
pub(crate) fn say(text: &str) {
    // It never fails.
    let _ = writer::Lines.write_all(format!("{text}\n").as_bytes());
    flush();
}

/// Waits a moment for the last lines to be written; call it before the program ends.
pub(crate) fn flush() {
    writer::flush();
}

/// Libraries trace whole messages as they come and go, and messages hold what nobody else shall
/// read, such as a user's answer to an agent's question.
fn is_for_logs(metadata: &Metadata<'_>) -> bool {
    *metadata.level() < Level::TRACE || metadata.target().starts_with("a2a_bridge")
}
