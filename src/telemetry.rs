//! Logs on stderr, as text for people or as JSON for programs. For the spans of calls, see [`spans`].

pub(crate) mod log_limit;
pub(crate) mod spans;
pub(crate) mod trace_context;

mod log_format;
mod log_writer;

use std::backtrace::Backtrace;
use std::io::IsTerminal as _;

use clap::ValueEnum;
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use log_format::{PANIC_TARGET, PrintableJson, SingleLine, fields};
pub(crate) use log_writer::LogWriter;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    // One object per line.
    Json,
}

/// Installs the process-wide logger. `filter` has the syntax of `RUST_LOG`, such as `info` or `a2a_bridge=debug`.
pub(crate) fn start_logging(
    filter: &str,
    format: LogFormat,
    writer: LogWriter,
) -> Result<(), tracing_subscriber::filter::ParseError> {
    let filter = EnvFilter::builder().parse(filter)?;
    let ansi = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(move || writer.clone()).with_ansi(ansi);
    match format {
        LogFormat::Text => {
            let format = SingleLine(tracing_subscriber::fmt::format().with_target(false).with_ansi(ansi));
            builder.fmt_fields(fields()).event_format(format).finish().with(filter_fn(may_be_logged)).init();
        }
        LogFormat::Json => {
            let builder = builder.json().flatten_event(true).map_event_format(PrintableJson);
            builder.finish().with(filter_fn(may_be_logged)).init();
        }
    }
    // The default hook writes to stderr itself, which can block the thread that panicked.
    std::panic::set_hook(Box::new(|panic| {
        tracing::error!(target: PANIC_TARGET, "{panic}\n{}", Backtrace::capture());
    }));
    Ok(())
}

/// Libraries log whole messages at trace level. Those can hold secrets, such as a user's answer to an
/// agent's question, so no filter enables them.
fn may_be_logged(metadata: &Metadata<'_>) -> bool {
    *metadata.level() < Level::TRACE || metadata.target().starts_with("a2a_bridge")
}
