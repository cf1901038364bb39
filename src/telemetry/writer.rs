//! The way of log lines to stderr, which may block: a pipe that nobody reads, a stopped terminal.
//!
//! Whoever logs puts a line into a queue and goes on; one thread writes. A line that does not fit is
//! dropped and counted, and the count is the next line that gets through.

use std::io::{self, Write};
use std::mem;
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

/// Most bytes that wait; as many again may be on their way.
const CAPACITY: usize = 1 << 20;
/// How long the end of the program waits for its last lines.
const LAST_LINES: Duration = Duration::from_secs(1);

static QUEUE: Mutex<Queue> = Mutex::new(Queue { lines: Vec::new(), dropped: 0, is_writing: false });
/// There are lines, or they are written.
static CHANGED: Condvar = Condvar::new();

struct Queue {
    lines: Vec<u8>,
    dropped: u64,
    is_writing: bool,
}

fn queue() -> MutexGuard<'static, Queue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes whole lines, and never blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lines;

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        static WRITER: Once = Once::new();
        WRITER.call_once(|| {
            let thread = std::thread::Builder::new().name("log".into()).spawn(write_lines);
            thread.expect("a process that gets no thread gets no runtime either");
        });
        let mut queue = queue();
        if queue.lines.len() + line.len() > CAPACITY {
            queue.dropped += 1;
        } else {
            queue.lines.extend_from_slice(line);
        }
        CHANGED.notify_all();
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits a moment until everything is written. Whoever does not read is not waited for any longer.
pub(super) fn flush() {
    let unwritten = |queue: &mut Queue| queue.is_writing || !queue.lines.is_empty();
    let _ = CHANGED.wait_timeout_while(queue(), LAST_LINES, unwritten);
}

fn write_lines() {
    let mut lines = Vec::new();
    loop {
        let is_empty = |queue: &mut Queue| queue.lines.is_empty() && queue.dropped == 0;
        let mut queue = CHANGED.wait_while(queue(), is_empty).unwrap_or_else(PoisonError::into_inner);
        mem::swap(&mut queue.lines, &mut lines);
        let dropped = mem::take(&mut queue.dropped);
        queue.is_writing = true;
        drop(queue);
        // First in the queue that begins now, which is where the gap is.
        if dropped > 0 {
            tracing::error!(lines = dropped, "log lines were dropped, as nobody took them from stderr");
        }
        // Where should it be said that it cannot be said?
        let _ = io::stderr().write_all(&lines);
        lines.clear();
        self::queue().is_writing = false;
        CHANGED.notify_all();
    }
}
