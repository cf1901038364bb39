//! One OpenTelemetry span per call. Needs the cargo feature `otlp` and the standard `OTEL_*` variables that name a
//! collector; otherwise the functions here do nothing.
//!
//! ```text
//! request ──> CallSpan::start ──instrument──> work: propagate (to the agent), set_task, set_outcome, end
//!                                                                                                    └──> queue ──> collector
//! ```
//!
//! These are not the `tracing` spans of the log. Everything logged inside a `tracing` span could be exported with
//! it, user text included. The spans here contain only what this module writes: names from the configuration and
//! the card, ids, and the outcome of the call.

#[cfg(feature = "otlp")]
mod otlp;
#[cfg(feature = "otlp")]
pub(crate) use otlp::{CallSpan, end, propagate, set_outcome, set_task, start_export};

#[cfg(not(feature = "otlp"))]
mod disabled;
#[cfg(not(feature = "otlp"))]
pub(crate) use disabled::{CallSpan, end, propagate, set_outcome, set_task, start_export};

/// What is known about a call when its request arrives.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "otlp"), expect(dead_code, reason = "only exported spans use the fields"))]
pub(crate) struct CallInfo<'a> {
    pub(crate) agent: &'a str,
    /// The action's name in the subject.
    pub(crate) action: &'a str,
    pub(crate) subject: &'a str,
}

/// The environment variable that names the collector, and its value. The first one is a complete URL; the second
/// one is a base URL to which the exporter adds a path.
fn collector_variable() -> Option<(&'static str, String)> {
    first_variable(["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"])
}

fn first_variable(names: [&'static str; 2]) -> Option<(&'static str, String)> {
    names.into_iter().find_map(|name| Some((name, variable(name)?)))
}

/// A variable that is set. The OpenTelemetry specification treats an empty one as not set.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}
