//! The log formats: one event is one line. Names and errors of agents and callers can contain line breaks, and the
//! text after one must not look like a log line of the bridge; or control characters, on which a terminal would act.

use std::fmt::{self, Write as _};
use std::time::Duration;

use tracing::field::Field;
use tracing::{Event, Subscriber};
use tracing_subscriber::field::MakeExt as _;
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::text::{duration, escape_json, is_unprintable};

/// The target of panics, whose backtraces keep their line breaks.
pub(super) const PANIC_TARGET: &str = "a2a_bridge::panic";
/// Formats the message and the fields like the default, and escapes unprintable characters in them. Line breaks are
/// left to [`SingleLine`], which knows whether the event is a panic. A number of milliseconds, such as `took_ms`, becomes
/// a duration for people: `took=2m5s`.
pub(super) fn fields() -> impl for<'writer> FormatFields<'writer> + 'static {
    let format = |writer: &mut Writer<'_>, field: &Field, value: &dyn fmt::Debug| {
        let millis = match field.name().ends_with("_ms") {
            true => format!("{value:?}").parse().ok().map(Duration::from_millis),
            false => None,
        };
        let name = match millis {
            Some(_) => field.name().trim_end_matches("_ms"),
            None => field.name(),
        };
        match name {
            "message" => {}
            name if writer.has_ansi_escapes() => write!(writer, "\x1b[3m{name}\x1b[0m\x1b[2m=\x1b[0m")?,
            name => write!(writer, "{name}=")?,
        }
        match millis {
            Some(millis) => writer.write_str(&duration(millis)),
            None => write!(Escaping(writer), "{value:?}"),
        }
    };
    debug_fn(format).delimited(" ")
}

struct Escaping<'a, 'writer>(&'a mut Writer<'writer>);

impl fmt::Write for Escaping<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for piece in text.split_inclusive(|c| is_unprintable(c) && c != '\n') {
            match piece.chars().next_back().filter(|c| is_unprintable(*c) && *c != '\n') {
                None => self.0.write_str(piece)?,
                Some(last) => {
                    self.0.write_str(piece.strip_suffix(last).unwrap_or_default())?;
                    write!(self.0, "{}", last.escape_default())?;
                }
            }
        }
        Ok(())
    }
}

/// Wraps a format and escapes line breaks; the lines of a panic are indented instead.
pub(super) struct SingleLine<F>(pub(super) F);

impl<S, N, F> FormatEvent<S, N> for SingleLine<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut text = String::new();
        self.0.format_event(context, Writer::new(&mut text), event)?;
        let is_panic = event.metadata().target() == PANIC_TARGET;
        let line_break = if is_panic { "\n  " } else { "\\n" };
        writeln!(writer, "{}", text.trim_end_matches('\n').replace('\n', line_break))
    }
}

/// Wraps a JSON format, which escapes only the characters that JSON requires to be escaped.
pub(super) struct PrintableJson<F>(pub(super) F);

impl<S, N, F> FormatEvent<S, N> for PrintableJson<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut text = String::new();
        self.0.format_event(context, Writer::new(&mut text), event)?;
        if text.trim_end_matches('\n').contains(is_unprintable) {
            text = escape_json(&text);
        }
        writer.write_str(&text)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tracing_subscriber::fmt::format;

    use super::*;

    fn logged(events: impl FnOnce()) -> String {
        let (log, writer) = std::io::pipe().unwrap();
        let format = SingleLine(format().without_time().with_target(false).with_ansi(false));
        let builder = tracing_subscriber::fmt()
            .with_ansi(false)
            .fmt_fields(fields())
            .event_format(format)
            .with_writer(Mutex::new(writer));
        tracing::subscriber::with_default(builder.finish(), events);
        std::io::read_to_string(log).unwrap()
    }

    #[test]
    fn an_event_is_one_line_whatever_its_text_contains() {
        let text = logged(|| {
            let words = "no\nERROR forged\r\n\u{2028}\u{85}end\n";
            tracing::info_span!("call", task = %"a\nb")
                .in_scope(|| tracing::info!(error = %words, "{words}"));
            tracing::info!("next");
        });
        assert_eq!(text.lines().count(), 2, "{text}");
        assert_eq!(text.matches(is_unprintable).count(), 2, "{text}");
        assert!(text.contains(r"no\nERROR forged\r\n\u{2028}\u{85}end"), "{text}");
        assert!(text.ends_with("\n INFO next\n"), "{text}");
    }

    #[test]
    fn milliseconds_are_a_duration_in_text_and_a_number_in_json() {
        let text = logged(|| tracing::info!(took_ms = 125_900_u64, lines_ms = "x", "ended"));
        assert_eq!(text, " INFO ended took=2m5s lines_ms=\"x\"\n");
        let (log, writer) = std::io::pipe().unwrap();
        let builder = tracing_subscriber::fmt().json().flatten_event(true).with_writer(Mutex::new(writer));
        tracing::subscriber::with_default(builder.finish(), || tracing::info!(took_ms = 3_u64, "ended"));
        let text = std::io::read_to_string(log).unwrap();
        assert!(text.contains(r#""took_ms":3"#), "{text}");
    }

    /// What an agent can put into a skill id, an error or a line of output.
    #[test]
    fn terminals_do_not_act_upon_values() {
        let hostile = "a\x1b[2J\x1b]0;title\x07\u{9b}31m\u{202e}b\u{2066}\0\x08\x7f\u{200b}";
        let text = logged(|| {
            tracing::info_span!("call", skill = hostile, task = %hostile).in_scope(|| {
                tracing::warn!(skill = hostile, id = %hostile, list = ?[hostile], "said {hostile}");
            });
        });
        assert_eq!(text.matches(is_unprintable).collect::<String>(), "\n", "{text}");
    }

    #[test]
    fn terminals_do_not_act_upon_json() {
        let hostile = "a\x1b[2J\u{9b}31m\u{202e}b\u{2066}\0\x7f\u{200b}\u{e0041}\"";
        let (log, writer) = std::io::pipe().unwrap();
        let builder = tracing_subscriber::fmt()
            .json()
            .flatten_event(true)
            .map_event_format(PrintableJson)
            .with_writer(Mutex::new(writer));
        tracing::subscriber::with_default(builder.finish(), || {
            tracing::info_span!("call", skill = hostile).in_scope(|| {
                tracing::warn!(id = %hostile, "said {hostile}");
            });
        });
        let text = std::io::read_to_string(log).unwrap();
        assert_eq!(text.matches(is_unprintable).collect::<String>(), "\n", "{text}");
        let event: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&event["id"], &event["span"]["skill"]), (&hostile.into(), &hostile.into()));
    }

    #[test]
    fn the_lines_of_a_panic_are_indented() {
        let text = logged(|| tracing::error!(target: PANIC_TARGET, "panicked\nERROR forged\rERROR forged"));
        assert_eq!(text, "ERROR panicked\n  ERROR forged\\rERROR forged\n");
    }
}
