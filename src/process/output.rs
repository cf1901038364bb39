//! A child's output: always read, so that the child never blocks; shown, within reason.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt as _};

/// A longer line is cut here.
const MAX_LINE: usize = 64 << 10;
/// How much is read at once.
const CHUNK: usize = 16 << 10;
/// Most lines per second and stream that go to the log; the rest is counted.
const LINES_PER_SECOND: u32 = 100;
/// How many lines are kept to explain an end.
const KEPT: usize = 20;
/// How much of a kept line is kept.
const KEPT_LINE: usize = 400;

/// The last lines of a child, both streams together.
#[derive(Debug, Clone, Default)]
pub struct LastLines(Arc<Mutex<VecDeque<String>>>);

impl LastLines {
    /// The last `count` lines that are not empty.
    pub fn tail(&self, count: usize) -> Vec<String> {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines
            .iter()
            .skip(lines.len().saturating_sub(count))
            .cloned()
            .collect()
    }

    fn push(&self, line: &str) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == KEPT {
            lines.pop_front();
        }
        lines.push_back(crate::json::shorten(line, KEPT_LINE));
    }
}

/// Reads `pipe` to its end.
pub async fn pump(mut pipe: impl AsyncRead + Unpin, agent: Arc<str>, stream: &'static str, last: LastLines) {
    let mut line = Vec::new();
    let mut chunk = vec![0; CHUNK];
    let mut log = Throttle::new();
    let show = |line: &mut Vec<u8>, log: &mut Throttle| {
        let text = String::from_utf8_lossy(line);
        let text = text.trim_end();
        if !text.is_empty() {
            last.push(text);
            if log.admits() {
                tracing::info!(target: "a2a_bridge::agent_output", agent = %agent, stream, "{text}");
            }
        }
        line.clear();
    };
    while let Ok(count @ 1..) = pipe.read(&mut chunk).await {
        for piece in chunk
            .get(..count)
            .unwrap_or_default()
            .split_inclusive(|byte| *byte == b'\n')
        {
            let room = MAX_LINE.saturating_sub(line.len());
            line.extend_from_slice(piece.get(..room.min(piece.len())).unwrap_or_default());
            if piece.ends_with(b"\n") {
                show(&mut line, &mut log);
            }
        }
        if let Some(dropped) = log.dropped() {
            tracing::warn!(agent = %agent, stream, dropped, "the agent writes faster than the log takes");
        }
    }
    show(&mut line, &mut log);
}

/// Admits so many lines a second.
struct Throttle {
    since: Instant,
    admitted: u32,
    dropped: u64,
}

impl Throttle {
    fn new() -> Self {
        Self {
            since: Instant::now(),
            admitted: 0,
            dropped: 0,
        }
    }

    fn admits(&mut self) -> bool {
        if self.admitted < LINES_PER_SECOND {
            self.admitted += 1;
            return true;
        }
        if self.since.elapsed() < Duration::from_secs(1) {
            self.dropped += 1;
            return false;
        }
        self.since = Instant::now();
        self.admitted = 1;
        true
    }

    /// How many lines were dropped in a second that is over.
    fn dropped(&mut self) -> Option<u64> {
        let over = self.dropped > 0 && self.since.elapsed() >= Duration::from_secs(1);
        over.then(|| std::mem::take(&mut self.dropped))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn endless_lines_are_cut_and_the_last_ones_kept() {
        let last = LastLines::default();
        let mut text = vec![b'x'; 1 << 20];
        text.extend_from_slice(b"\nsecond\n\nthird without an end");
        pump(text.as_slice(), "a".into(), "stdout", last.clone()).await;
        let tail = last.tail(10);
        assert_eq!(tail.len(), 3);
        assert!(tail[0].len() <= KEPT_LINE);
        assert_eq!(last.tail(2), ["second", "third without an end"]);
    }
}
