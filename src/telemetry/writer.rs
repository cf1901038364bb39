//! The way of log lines to stderr, which may block: a pipe that nobody reads, a stopped terminal.
//!
//! Whoever logs puts a line into a queue and goes on; one thread writes. A line that does not fit is
//! dropped and counted, and the count is the next line that gets through. So are lines that no queue
//! would hold, and lines that could not be written, as on a full disk.

use std::io::{self, Write};
use std::mem;
use std::os::fd::AsFd;
use std::sync::{Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Most bytes that wait; as many again may be on their way.
const CAPACITY: usize = 1 << 20;
/// How long the end of the program waits for its last lines.
const LAST_LINES: Duration = Duration::from_secs(1);

static QUEUE: Mutex<Queue> = Mutex::new(Queue::new());
/// There are lines, or they are written.
static CHANGED: Condvar = Condvar::new();

struct Queue {
    lines: Vec<u8>,
    /// Those for which there was no room.
    dropped: u64,
    /// Those for which there never is.
    too_long: u64,
    is_writing: bool,
}

impl Queue {
    const fn new() -> Self {
        Self { lines: Vec::new(), dropped: 0, too_long: 0, is_writing: false }
    }

    fn put(&mut self, line: &[u8]) {
        if line.len() > CAPACITY {
            self.too_long += 1;
        } else if self.lines.len() + line.len() > CAPACITY {
            self.dropped += 1;
        } else {
            self.lines.extend_from_slice(line);
        }
    }

    fn is_empty(&self) -> bool {
        self.lines.is_empty() && self.dropped == 0 && self.too_long == 0
    }
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
        queue().put(line);
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
    let mut unwritten = Unwritten::default();
    loop {
        let is_empty = |queue: &mut Queue| queue.is_empty();
        let mut queue = CHANGED.wait_while(queue(), is_empty).unwrap_or_else(PoisonError::into_inner);
        mem::swap(&mut queue.lines, &mut lines);
        let (dropped, too_long) = (mem::take(&mut queue.dropped), mem::take(&mut queue.too_long));
        queue.is_writing = true;
        drop(queue);
        // First in the queue that begins now, which is where the gap is.
        if dropped > 0 {
            tracing::error!(lines = dropped, "log lines were dropped, as nobody took them from stderr");
        }
        if too_long > 0 {
            tracing::error!(
                lines = too_long,
                "log lines were dropped, as they have more than {CAPACITY} bytes"
            );
        }
        // Where should it be said that it cannot be said? Here, once it can be.
        if let Some(lines) = unwritten.after(write_all(&mut io::stderr(), &lines)) {
            tracing::error!(lines, "log lines could not be written to stderr");
        }
        lines.clear();
        self::queue().is_writing = false;
        CHANGED.notify_all();
    }
}

/// Writes everything, however long that takes; how many lines could not be written. Whoever gave us
/// stderr may have made it one that does not block: then it is waited for all the same.
fn write_all(out: &mut (impl Write + AsFd), mut text: &[u8]) -> u64 {
    while !text.is_empty() {
        match out.write(text) {
            Ok(count @ 1..) => text = text.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let _ = poll(&mut [PollFd::new(out.as_fd(), PollFlags::POLLOUT)], PollTimeout::NONE);
            }
            Ok(_) | Err(_) => break,
        }
    }
    text.iter().filter(|byte| **byte == b'\n').count() as u64
}

/// Lines that could not be written, until somebody has read of them.
#[derive(Default)]
struct Unwritten {
    lines: u64,
    /// So many of them are told of by a line that waits to be written.
    told: u64,
}

impl Unwritten {
    /// Counts how a write went; how many lines are to be told of, if one can write again.
    fn after(&mut self, failed: u64) -> Option<u64> {
        if failed > 0 {
            self.lines += failed;
            self.told = 0;
            return None;
        }
        self.lines -= mem::replace(&mut self.told, 0);
        self.told = self.lines;
        (self.told > 0).then_some(self.told)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_line_that_no_queue_would_hold_is_not_counted_as_one_that_nobody_took() {
        let mut queue = Queue::new();
        queue.put(&vec![b'x'; CAPACITY + 1]);
        assert_eq!((queue.lines.len(), queue.dropped, queue.too_long), (0, 0, 1));
        assert!(!queue.is_empty(), "it is told of");
        queue.put(&vec![b'x'; CAPACITY]);
        queue.put(b"one more");
        assert_eq!((queue.lines.len(), queue.dropped, queue.too_long), (CAPACITY, 1, 1));
    }

    #[test]
    fn lines_that_cannot_be_written_are_told_of_until_that_is_written() {
        let mut unwritten = Unwritten::default();
        assert_eq!(unwritten.after(0), None);
        assert_eq!(unwritten.after(3), None);
        assert_eq!(unwritten.after(0), Some(3));
        // The line about it was not written either.
        assert_eq!(unwritten.after(1), None);
        assert_eq!(unwritten.after(0), Some(4));
        assert_eq!(unwritten.after(0), None);
    }

    #[test]
    fn a_write_that_would_block_waits_and_one_to_nobody_is_counted() {
        let text = "line\n".repeat(1 << 18);
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let reader = std::thread::spawn(move || {
            let mut seen = vec![0; 5 << 18];
            io::Read::read_exact(&mut theirs, &mut seen).map(|()| seen)
        });
        assert_eq!(write_all(&mut ours, text.as_bytes()), 0);
        assert_eq!(reader.join().unwrap().unwrap(), text.as_bytes());
        assert_eq!(write_all(&mut ours, b"one\ntwo\n"), 2);
    }
}
