//! Writes log lines to stderr, which can block: a pipe that no process reads, a stopped terminal.
//!
//! A thread that logs only adds its line to a bounded queue; one background thread writes to stderr. Lines that
//! do not fit into the queue, that are longer than the whole queue, or that cannot be written (a full disk) are
//! dropped and counted. The next line that gets through reports the count.

use std::io::{self, Write};
use std::mem;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Maximum number of queued bytes; the background thread may hold as many again.
const CAPACITY: usize = 1 << 20;
/// How long the program waits for its last lines before it exits.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
struct Queue {
    lines: Vec<u8>,
    /// Lines dropped because the queue was full.
    dropped: u64,
    /// Lines dropped because they are longer than the whole queue.
    too_long: u64,
    is_writing: bool,
}

impl Queue {
    fn push(&mut self, line: &[u8]) {
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

/// Accepts whole lines and never blocks. All clones share one queue and one background thread.
#[derive(Debug, Clone, Default)]
pub(crate) struct LogWriter {
    queue: Arc<Mutex<Queue>>,
    /// Signals new lines to the background thread, and written lines to [`LogWriter::drain`].
    changed: Arc<Condvar>,
}

impl LogWriter {
    /// Starts the background thread, which lives as long as the process.
    pub(crate) fn start() -> io::Result<Self> {
        let writer = Self::default();
        let background = writer.clone();
        std::thread::Builder::new().name("log".into()).spawn(move || background.write_to_stderr())?;
        Ok(writer)
    }

    pub(crate) fn write_line(&self, line: &str) {
        self.push(format!("{line}\n").as_bytes());
    }

    /// Waits until everything is written, but not for long: stderr may be blocked for good.
    pub(crate) fn drain(&self) {
        let is_pending = |queue: &mut Queue| queue.is_writing || !queue.lines.is_empty();
        let _ = self.changed.wait_timeout_while(self.lock(), EXIT_TIMEOUT, is_pending);
    }

    fn push(&self, line: &[u8]) {
        self.lock().push(line);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_to_stderr(&self) {
        let mut lines = Vec::new();
        let mut unwritten = Unwritten::default();
        loop {
            let is_empty = |queue: &mut Queue| queue.is_empty();
            let mut queue =
                self.changed.wait_while(self.lock(), is_empty).unwrap_or_else(PoisonError::into_inner);
            mem::swap(&mut queue.lines, &mut lines);
            let (dropped, too_long) = (mem::take(&mut queue.dropped), mem::take(&mut queue.too_long));
            queue.is_writing = true;
            drop(queue);
            // These go to the start of the now empty queue, which is where the gap is.
            if dropped > 0 {
                tracing::error!(lines = dropped, "log lines were dropped: stderr is read too slowly");
            }
            if too_long > 0 {
                tracing::error!(lines = too_long, "log lines were dropped: longer than {CAPACITY} bytes");
            }
            // Reported with the next write that succeeds.
            if let Some(lines) = unwritten.after_write(write_all(&mut io::stderr(), &lines)) {
                tracing::error!(lines, "log lines could not be written to stderr");
            }
            lines.clear();
            self.lock().is_writing = false;
            self.changed.notify_all();
        }
    }
}

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes everything, and returns the number of lines that could not be written. The parent process may have
/// made stderr non-blocking, so this waits for it explicitly.
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

/// Lines that could not be written and are not reported yet.
#[derive(Default)]
struct Unwritten {
    lines: u64,
    /// How many of them the queued report covers.
    reported: u64,
}

impl Unwritten {
    /// Counts the failed lines of a write. Returns the number to report once a write succeeds again.
    fn after_write(&mut self, failed: u64) -> Option<u64> {
        if failed > 0 {
            self.lines += failed;
            self.reported = 0;
            return None;
        }
        self.lines -= mem::replace(&mut self.reported, 0);
        self.reported = self.lines;
        (self.reported > 0).then_some(self.reported)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_line_longer_than_the_queue_is_counted_separately() {
        let mut queue = Queue::default();
        queue.push(&vec![b'x'; CAPACITY + 1]);
        assert_eq!((queue.lines.len(), queue.dropped, queue.too_long), (0, 0, 1));
        assert!(!queue.is_empty(), "the thread wakes up to report it");
        queue.push(&vec![b'x'; CAPACITY]);
        queue.push(b"one more");
        assert_eq!((queue.lines.len(), queue.dropped, queue.too_long), (CAPACITY, 1, 1));
    }

    #[test]
    fn unwritten_lines_are_reported_until_the_report_is_written() {
        let mut unwritten = Unwritten::default();
        assert_eq!(unwritten.after_write(0), None);
        assert_eq!(unwritten.after_write(3), None);
        assert_eq!(unwritten.after_write(0), Some(3));
        // The report was not written either.
        assert_eq!(unwritten.after_write(1), None);
        assert_eq!(unwritten.after_write(0), Some(4));
        assert_eq!(unwritten.after_write(0), None);
    }

    #[test]
    fn a_write_that_would_block_waits_and_lines_to_a_closed_stream_are_counted() {
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
