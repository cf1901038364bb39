//! The call log (`logging.calls`): one line per call, through any front door, when its reply is sent.
//!
//! A line has names, ids, the outcome and sizes. It never has what was said: no prompt, no answer, no text of an error.
//! At a high rate, an agent's calls beyond [`LINES_PER_SECOND`] are only counted, so that they displace neither the calls
//! of other agents nor the rest of the log.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::caller::Caller;
use crate::config::CallLogging;
use crate::reply::outcome::ReplyStatus;
use crate::reply::{self, Reply};
use crate::text::{millis, shorten};

/// Lines of one agent within a second.
const LINES_PER_SECOND: u32 = 200;
/// Maximum bytes of a caller's name and of a task id, which others choose.
const MAX_NAME: usize = 128;

/// The setting, which a reload can change. All agents share it.
#[derive(Debug)]
pub(crate) struct CallLogSetting(AtomicU8);

impl CallLogSetting {
    pub(crate) fn new(calls: CallLogging) -> Arc<Self> {
        Arc::new(Self(AtomicU8::new(calls as u8)))
    }

    pub(crate) fn set(&self, calls: CallLogging) {
        self.0.store(calls as u8, Relaxed);
    }

    fn is(&self, calls: CallLogging) -> bool {
        self.0.load(Relaxed) == calls as u8
    }
}

/// The call log of one agent.
#[derive(Debug)]
pub(super) struct CallLog {
    agent: Arc<str>,
    setting: Arc<CallLogSetting>,
    rate: Mutex<Rate>,
}

impl CallLog {
    pub(super) fn new(agent: &Arc<str>, setting: Arc<CallLogSetting>) -> Arc<Self> {
        Arc::new(Self { agent: Arc::clone(agent), setting, rate: Mutex::default() })
    }

    /// Begins the entry of a call with a body of `bytes` bytes. `None` while the log is off.
    pub(super) fn begin(self: &Arc<Self>, bytes: usize) -> Option<CallEntry> {
        if self.setting.is(CallLogging::Off) {
            return None;
        }
        let (log, caller) = (Arc::clone(self), Caller::default());
        Some(CallEntry { log, caller, bytes, sent: Arc::default(), ended: None })
    }
}

/// A call in the log. The line is written when this is dropped: after the reply is sent.
#[derive(Debug)]
pub(super) struct CallEntry {
    log: Arc<CallLog>,
    /// See [`Arrival::identify`](super::Arrival::identify).
    pub(super) caller: Caller,
    /// The size of the request's body.
    bytes: usize,
    sent: Arc<AtomicU64>,
    /// `None` as long as the call has no reply.
    ended: Option<Box<EndedEntry>>,
}

#[derive(Debug)]
struct EndedEntry {
    action: Arc<str>,
    task: Option<String>,
    outcome: &'static str,
    took: Duration,
}

impl CallEntry {
    /// Front doors add the bytes that they send to the caller.
    pub(super) fn sent(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.sent)
    }

    /// The call has its reply.
    pub(super) fn end(&mut self, action: &Arc<str>, reply: &Reply, took: Duration) {
        let task = match reply {
            Ok(outcome) => Some(&outcome.task),
            Err(error) => error.task.as_ref(),
        };
        let task = task.and_then(|task| task.id.as_deref()).map(|id| shorten(id, MAX_NAME));
        self.ended(action, reply::label(reply), took, task, is_error(reply));
    }

    /// A request that needs no task, such as one for the card, has its reply.
    pub(super) fn end_without_task(&mut self, action: &Arc<str>, outcome: &'static str, took: Duration) {
        self.ended(action, outcome, took, None, false);
    }

    fn ended(
        &mut self,
        action: &Arc<str>,
        outcome: &'static str,
        took: Duration,
        task: Option<String>,
        is_error: bool,
    ) {
        if is_error || self.log.setting.is(CallLogging::All) {
            let action = Arc::clone(action);
            self.ended = Some(Box::new(EndedEntry { action, task, outcome, took }));
        }
    }

    /// The caller sends a further message of `bytes` bytes, which begins another call: writes the line of the first one.
    pub(super) fn next(&mut self, bytes: usize) {
        self.write();
        self.bytes = bytes;
    }

    fn write(&mut self) {
        let sent = self.sent.swap(0, Relaxed);
        let Some(ended) = self.ended.take() else { return };
        let mut rate = self.log.rate.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(omitted) = rate.admit(Instant::now()) else { return };
        drop(rate);
        let agent = &self.log.agent;
        if omitted > 0 {
            tracing::info!(target: "a2a_bridge::calls", %agent, calls = omitted, "calls not logged: more than {LINES_PER_SECOND} a second");
        }
        let EndedEntry { action, task, outcome, took } = *ended;
        tracing::info!(
            target: "a2a_bridge::calls",
            caller = %shorten(self.caller.name().unwrap_or("-"), MAX_NAME),
            %agent,
            skill = %action,
            task = task.as_deref().map(tracing::field::display),
            %outcome,
            took_ms = millis(took),
            bytes_in = self.bytes,
            bytes_out = sent,
            "call"
        );
    }
}

impl Drop for CallEntry {
    fn drop(&mut self) {
        self.write();
    }
}

/// Whether the log has the call with `logging.calls: errors`.
fn is_error(reply: &Reply) -> bool {
    match reply {
        Ok(outcome) => matches!(outcome.status, ReplyStatus::Failed | ReplyStatus::Rejected),
        Err(_) => true,
    }
}

/// The lines of the current second.
#[derive(Debug, Default)]
struct Rate {
    since: Option<Instant>,
    lines: u32,
    omitted: u64,
}

impl Rate {
    /// Whether another line may be written, and how many were not since the last one.
    fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.duration_since(since) >= Duration::from_secs(1)) {
            self.since = Some(now);
            self.lines = 0;
        }
        if self.lines == LINES_PER_SECOND {
            self.omitted += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.omitted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reply::error::{ActionError, Code};

    /// The log of these calls.
    fn logged(calls: CallLogging, work: impl FnOnce(&Arc<CallLog>, &CallLogSetting)) -> String {
        let (read, writer) = std::io::pipe().unwrap();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).without_time().with_writer(Mutex::new(writer));
        let setting = CallLogSetting::new(calls);
        tracing::subscriber::with_default(subscriber.finish(), || {
            work(&CallLog::new(&"weather".into(), Arc::clone(&setting)), &setting);
        });
        std::io::read_to_string(read).unwrap()
    }

    fn failed() -> Reply {
        Err(ActionError::new(Code::AgentError, "secret words of the agent"))
    }

    #[test]
    fn a_line_is_written_when_the_reply_is_sent_and_holds_no_text_of_the_agent() {
        let text = logged(CallLogging::Errors, |log, _| {
            let mut entry = log.begin(17).unwrap();
            entry.caller = Caller::verified("TENANT/alice");
            entry.end(&"forecast".into(), &failed(), Duration::from_millis(1234));
            entry.sent().fetch_add(99, Relaxed);
        });
        let line = " INFO a2a_bridge::calls: call caller=TENANT/alice agent=weather skill=forecast outcome=agent_error took_ms=1234 bytes_in=17 bytes_out=99\n";
        assert_eq!(text, line);
    }

    #[test]
    fn a_prompt_with_an_answer_is_two_calls() {
        let text = logged(CallLogging::All, |log, _| {
            let mut entry = log.begin(5).unwrap();
            let sent = entry.sent();
            sent.fetch_add(7, Relaxed);
            entry.end_without_task(&"prompt".into(), "INPUT_REQUIRED", Duration::ZERO);
            entry.next(3);
            sent.fetch_add(2, Relaxed);
            entry.end_without_task(&"provide_required_input".into(), "COMPLETED", Duration::ZERO);
        });
        let sizes: Vec<_> = text.lines().map(|line| line.split_once("bytes_in").unwrap().1).collect();
        assert_eq!(sizes, ["=5 bytes_out=7", "=3 bytes_out=2"], "{text}");
    }

    #[test]
    fn the_setting_selects_calls_and_can_change() {
        let text = logged(CallLogging::Off, |log, setting| {
            assert!(log.begin(0).is_none());
            setting.set(CallLogging::Errors);
            log.begin(0).unwrap().end_without_task(&"card".into(), "ok", Duration::ZERO);
            log.begin(0).unwrap().end(&"echo".into(), &failed(), Duration::ZERO);
            setting.set(CallLogging::All);
            log.begin(0).unwrap().end_without_task(&"card".into(), "ok", Duration::ZERO);
            drop(log.begin(0));
        });
        let skills: Vec<_> =
            text.split_ascii_whitespace().filter_map(|field| field.strip_prefix("skill=")).collect();
        assert_eq!(skills, ["echo", "card"], "{text}");
    }

    #[test]
    fn calls_beyond_the_rate_are_counted() {
        let (mut rate, begin) = (Rate::default(), Instant::now());
        let admitted = (0..1000).filter_map(|_| rate.admit(begin)).count();
        assert_eq!(admitted, 200);
        assert_eq!(rate.admit(begin + Duration::from_secs(1)), Some(800));
        assert_eq!(rate.admit(begin + Duration::from_secs(1)), Some(0));
    }
}
