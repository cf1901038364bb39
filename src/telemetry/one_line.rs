//! Log lines for people: one event is one line, whoever wrote the words in it. An agent's error may have line breaks,
//! and what follows one must not look like a line of the bridge.

use std::fmt;

use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// The target of panics, whose backtraces are for people and need their lines.
pub(super) const PANIC: &str = "a2a_bridge::panic";
/// What ends a line somewhere.
const BREAKS: [char; 7] = ['\n', '\r', '\u{b}', '\u{c}', '\u{85}', '\u{2028}', '\u{2029}'];

/// Writes what another format writes, with line breaks escaped; those of a panic are indented.
pub(super) struct OneLine<F>(pub(super) F);

impl<S, N, F> FormatEvent<S, N> for OneLine<F>
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
        let is_panic = event.metadata().target() == PANIC;
        for piece in text.trim_end_matches('\n').split_inclusive(BREAKS) {
            let words = piece.trim_end_matches(BREAKS);
            writer.write_str(words)?;
            match piece.strip_prefix(words).and_then(|end| end.chars().next()) {
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

    /// What is logged of these events.
    fn logged(events: impl FnOnce()) -> String {
        let (log, writer) = std::io::pipe().unwrap();
        let format = OneLine(format().without_time().with_target(false).with_ansi(false));
        let builder = tracing_subscriber::fmt().event_format(format).with_writer(Mutex::new(writer));
        tracing::subscriber::with_default(builder.finish(), events);
        std::io::read_to_string(log).unwrap()
    }

    #[test]
    fn an_event_is_one_line_whatever_is_in_it() {
        let text = logged(|| {
            let words = "no\nERROR forged\r\n\u{2028}\u{85}end\n";
            tracing::info_span!("call", task = %"a\nb")
                .in_scope(|| tracing::info!(error = %words, "{words}"));
            tracing::info!("next");
        });
        assert_eq!(text.lines().count(), 2, "{text}");
        assert_eq!(text.split(BREAKS).count(), 3, "{text}");
        assert!(text.contains(r"no\nERROR forged\r\n\u{2028}\u{85}end"), "{text}");
        assert!(text.ends_with("\n INFO next\n"), "{text}");
    }

    #[test]
    fn a_panic_keeps_its_lines_but_they_do_not_look_like_others() {
        let text = logged(|| tracing::error!(target: PANIC, "panicked\nERROR forged\rERROR forged"));
        assert_eq!(text, "ERROR panicked\n  ERROR forged\\rERROR forged\n");
    }
}
