//! The text log format: one event is one line. An agent's error can contain line breaks, and the text after one
//! must not look like a log line of the bridge.

use std::fmt;

use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// The target of panics, whose backtraces keep their line breaks.
pub(super) const PANIC_TARGET: &str = "a2a_bridge::panic";
/// Every character that some viewer treats as the end of a line.
const LINE_BREAKS: [char; 7] = ['\n', '\r', '\u{b}', '\u{c}', '\u{85}', '\u{2028}', '\u{2029}'];

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
        for piece in text.trim_end_matches('\n').split_inclusive(LINE_BREAKS) {
            let content = piece.trim_end_matches(LINE_BREAKS);
            writer.write_str(content)?;
            match piece.strip_prefix(content).and_then(|end| end.chars().next()) {
                Some('\n') if is_panic => writer.write_str("\n  ")?,
                Some(end) => write!(writer, "{}", end.escape_debug())?,
                None => {}
            }
        }
        writer.write_char('\n')
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
        let builder = tracing_subscriber::fmt().event_format(format).with_writer(Mutex::new(writer));
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
        assert_eq!(text.split(LINE_BREAKS).count(), 3, "{text}");
        assert!(text.contains(r"no\nERROR forged\r\n\u{2028}\u{85}end"), "{text}");
        assert!(text.ends_with("\n INFO next\n"), "{text}");
    }

    #[test]
    fn the_lines_of_a_panic_are_indented() {
        let text = logged(|| tracing::error!(target: PANIC_TARGET, "panicked\nERROR forged\rERROR forged"));
        assert_eq!(text, "ERROR panicked\n  ERROR forged\\rERROR forged\n");
    }
}
