//! One span per call for an OpenTelemetry collector: with the cargo feature `otlp`, and when the
//! standard variables name a collector. Else everything here is nothing at all.
//!
//! ```text
//! request ──> CallSpan::begin ──around──> work: hand_on (to the agent), task, outcome, ended
//!                                                                                        └──> queue ──> collector
//! ```
//!
//! These are not the spans of the log. Whatever is logged under a `tracing` span could leave with it,
//! words of a user among it; what leaves here is what this module writes: names from the settings and the
//! card, ids, and how the call ended.

#[cfg(feature = "otlp")]
mod otlp;
#[cfg(feature = "otlp")]
pub(crate) use otlp::{CallSpan, ended, hand_on, outcome, start, task};

#[cfg(not(feature = "otlp"))]
mod none;
#[cfg(not(feature = "otlp"))]
pub(crate) use none::{CallSpan, ended, hand_on, outcome, start, task};

/// What is known of a call when it arrives.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "otlp"), expect(dead_code, reason = "only exported spans have them"))]
pub(crate) struct Arrival<'a> {
    /// The agent's name in the settings.
    pub agent: &'a str,
    /// The skill or built-in action, as on the mesh.
    pub action: &'a str,
    /// The subject of the request.
    pub subject: &'a str,
}

/// The variable that names the collector, and its value. The first is the whole address; to the second
/// belongs a path.
fn collector() -> Option<(&'static str, String)> {
    let names = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
    names.into_iter().find_map(|name| Some((name, variable(name)?)))
}

/// A variable that is set; an empty one is not, says the specification.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}
