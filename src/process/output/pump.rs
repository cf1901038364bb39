//! Splits a pipe into lines and limits their length and rate.

use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt as _};

use super::{Level, Output, Stream};

/// Longer lines are truncated.
pub(super) const MAX_LINE: usize = 64 << 10;
/// Size of one read.
const CHUNK: usize = 64 << 10;
/// Lines per second and stream that are logged and kept.
const LINES_PER_SECOND: u32 = 100;
/// Lines kept from the end of a flood.
const LAST_OF_FLOOD: usize = 20;

pub(super) struct Pump {
    output: Output,
    stream: Stream,
    line: Vec<u8>,
    /// Truncated bytes of the current line.
    cut: u64,
    /// The last chunk of a flood.
    flood: Vec<u8>,
    since: Instant,
    admitted: u32,
    dropped: u64,
}

impl Pump {
    pub(super) fn new(output: Output, stream: Stream) -> Self {
        Self {
            output,
            stream,
            line: Vec::new(),
            cut: 0,
            flood: Vec::new(),
            since: Instant::now(),
            admitted: 0,
            dropped: 0,
        }
    }

    pub(super) async fn run(mut self, mut pipe: impl AsyncRead + Unpin) {
        let mut chunk = vec![0; CHUNK];
        while let Ok(count @ 1..) = pipe.read(&mut chunk).await {
            let text = chunk.get(..count).unwrap_or_default();
            self.output.ring().counts.bytes += count as u64;
            self.take(text);
        }
        self.end_of_flood();
        self.show();
    }

    fn take(&mut self, text: &[u8]) {
        let mut rest = text;
        while !rest.is_empty() {
            if !self.admits() {
                return self.drop_all(rest);
            }
            self.end_of_flood();
            let end = rest.iter().position(|byte| *byte == b'\n');
            let (piece, after) = rest.split_at(end.map_or(rest.len(), |end| end + 1));
            rest = after;
            let room = MAX_LINE.saturating_sub(self.line.len()).min(piece.len());
            self.line.extend_from_slice(piece.get(..room).unwrap_or_default());
            self.cut += (piece.len() - room) as u64;
            if end.is_some() {
                self.show();
            }
        }
    }

    /// Counts lines that exceed the rate, and keeps the last chunk in case the output ends with it.
    fn drop_all(&mut self, text: &[u8]) {
        let lines = text.iter().filter(|byte| **byte == b'\n').count() as u64;
        let counts = &mut self.output.ring().counts;
        counts.lines += lines;
        counts.dropped_lines += lines;
        counts.dropped_bytes += (text.len() + self.line.len()) as u64 + self.cut;
        self.dropped += lines;
        self.cut = 0;
        self.line.clear();
        // Collect small chunks of one flood up to a limit.
        if text.len() >= CHUNK / 2 || self.flood.len() + text.len() > 2 * CHUNK {
            self.flood.clear();
        }
        self.flood.extend_from_slice(text);
    }

    fn end_of_flood(&mut self) {
        if self.dropped > 0 {
            let dropped = std::mem::take(&mut self.dropped);
            tracing::warn!(agent = %self.output.0.agent, stream = %self.stream, dropped, "the agent exceeds the log rate; lines dropped");
        }
        if self.flood.is_empty() {
            return;
        }
        let flood = std::mem::take(&mut self.flood);
        let last: Vec<&[u8]> = flood.rsplit(|byte| *byte == b'\n').take(LAST_OF_FLOOD).collect();
        for line in last.into_iter().rev() {
            let text = self.output.redacted_text(line.get(..MAX_LINE.min(line.len())).unwrap_or_default());
            if !text.is_empty() {
                self.output.push_line(self.stream, level_of(&text), &text);
            }
        }
    }

    fn show(&mut self) {
        let text = self.output.redacted_text(&self.line);
        self.output.ring().counts.dropped_bytes += self.cut;
        self.line.clear();
        self.cut = 0;
        if text.is_empty() {
            return;
        }
        self.admitted += 1;
        self.output.ring().counts.lines += 1;
        self.output.push_line(self.stream, level_of(&text), &text);
        let (agent, stream) = (&self.output.0.agent, self.stream);
        // Not at the guessed level: a warning or an error in the log is one of the bridge.
        tracing::info!(target: "a2a_bridge::agent_output", %agent, %stream, "{text}");
    }

    fn admits(&mut self) -> bool {
        if self.admitted < LINES_PER_SECOND {
            return true;
        }
        if self.since.elapsed() < Duration::from_secs(1) {
            return false;
        }
        self.since = Instant::now();
        self.admitted = 0;
        true
    }
}

/// The severity of a line, from a keyword near its start: `ERROR`, `warning:`, `level=debug`,
/// `"level":"error"`. Lowercase words within a sentence do not count.
fn level_of(line: &str) -> Level {
    let head: String = line.chars().take(160).collect();
    if head.starts_with("Traceback ") || head.starts_with("panic") || head.contains(" panicked at ") {
        return Level::Error;
    }
    let mut before = "";
    let mut rest = head.as_str();
    while let Some(start) = rest.find(|c: char| c.is_ascii_alphabetic()) {
        let (gap, tail) = rest.split_at(start);
        let (word, after) =
            tail.split_at(tail.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(tail.len()));
        let is_key = before.eq_ignore_ascii_case("level") || before.eq_ignore_ascii_case("severity");
        let is_named = is_key && gap.contains(['=', ':']);
        if is_named || after.starts_with(':') || word.bytes().all(|byte| byte.is_ascii_uppercase()) {
            match word.to_ascii_uppercase().as_str() {
                "ERROR" | "ERR" | "FATAL" | "CRITICAL" | "PANIC" => return Level::Error,
                "WARN" | "WARNING" => return Level::Warn,
                "INFO" | "NOTICE" => return Level::Info,
                "DEBUG" | "TRACE" => return Level::Debug,
                _ => {}
            }
        }
        (before, rest) = (word, after);
    }
    Level::Info
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_is_guessed_from_keywords() {
        for (line, level) in [
            ("2026-01-01 ERROR it broke", Level::Error),
            ("error: no such file", Level::Error),
            ("Traceback (most recent call last):", Level::Error),
            (r#"{"level":"warning","msg":"x"}"#, Level::Warn),
            ("time=1 level=debug msg=x", Level::Debug),
            ("INFO:     Uvicorn running on http://127.0.0.1:9000", Level::Info),
            ("there was no error in this warning", Level::Info),
            ("", Level::Info),
        ] {
            assert_eq!(level_of(line), level, "{line}");
        }
    }
}
