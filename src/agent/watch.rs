//! Watching an agent that was found: is it ready, is it alive, is it suspended.
//!
//! One probe of the card answers two questions. *Ready*: the card can be read and used; otherwise
//! the skills are withdrawn until it can. *Alive*: somebody answers at all; otherwise a launched agent
//! is restarted. An agent that works may be slow on its card, so with calls in flight silence
//! means nothing. A process stopped by SIGSTOP is seen in `/proc`, and calls in flight do not excuse it.

use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::calls::Calls;
use super::lifecycle::Event;
use super::probe;
use super::start::Start;
use crate::config;
use crate::process::child::Child;

/// How often an attached agent is checked for its presence; a launched one is a child.
const PRESENCE_INTERVAL: Duration = Duration::from_secs(3);
/// How often, at least, a launched agent is checked for SIGSTOP.
const SUSPENSION_INTERVAL: Duration = Duration::from_secs(5);
/// Longest time between two probes of an agent whose last probe has failed.
pub(super) const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// How often an agent is checked without reading its card.
pub(super) fn pulse(config: &config::AgentConfig) -> Duration {
    match config.command {
        Some(_) => SUSPENSION_INTERVAL.min(config.liveness.interval),
        None => PRESENCE_INTERVAL,
    }
}

/// When the agent is checked next.
pub(super) struct Watch {
    interval: Duration,
    pulse: Duration,
    timeout: Duration,
    next_probe: Instant,
    next_pulse: Instant,
}

impl Watch {
    pub(super) fn new(config: &config::AgentConfig) -> Self {
        let (interval, timeout) = match config.command {
            Some(_) => (
                config.card_refresh.min(config.liveness.interval),
                config.liveness.timeout.max(config.readiness.timeout),
            ),
            None => (config.card_refresh, config.readiness.timeout),
        };
        let (now, pulse) = (Instant::now(), pulse(config));
        Self { interval, pulse, timeout, next_probe: now + interval, next_pulse: now + pulse }
    }

    /// Checks the agent until there is something to report. `recheck` asks for a probe at once. Cancel-safe:
    /// a check that was interrupted is repeated.
    pub(super) async fn next(
        &mut self,
        start: &Start,
        child: Option<&Child>,
        is_suspended: bool,
        recheck: &Notify,
        calls: &Calls,
    ) -> Event {
        loop {
            let is_pulse = tokio::select! {
                biased;
                () = recheck.notified() => false,
                () = tokio::time::sleep_until(self.next_pulse) => true,
                () = tokio::time::sleep_until(self.next_probe) => false,
            };
            self.next_pulse = Instant::now() + self.pulse;
            match suspended_process(start, child) {
                Some(pid) => {
                    self.next_probe = self.next_probe.max(self.next_pulse);
                    return Event::Suspended(pid);
                }
                // It goes on: probe it at once.
                None if is_suspended => {
                    self.next_probe = Instant::now();
                    return Event::Resumed;
                }
                None if is_pulse && child.is_some() => continue,
                None if is_pulse && probe::accepts_connections(&start.config.url).await => continue,
                None => {}
            }
            let suspended = async {
                loop {
                    tokio::time::sleep(self.pulse).await;
                    if suspended_process(start, child).is_some() {
                        return;
                    }
                }
            };
            let probed = tokio::select! {
                biased;
                probed = start.probe(self.timeout) => probed,
                () = suspended => {
                    self.next_pulse = Instant::now();
                    continue;
                }
            };
            return match probed {
                Ok(known) => {
                    self.next_probe = Instant::now() + self.interval;
                    Event::Found(known)
                }
                Err(error) => {
                    self.next_probe = Instant::now() + self.interval.min(MAX_RETRY_INTERVAL);
                    Event::Unanswered { error, busy: calls.in_flight() > 0 }
                }
            };
        }
    }
}

/// A process that was stopped by SIGSTOP and without which nothing works: the child itself, or all that
/// listen for it.
#[cfg(target_os = "linux")]
fn suspended_process(start: &Start, child: Option<&Child>) -> Option<i32> {
    use crate::process::ports::Holder;
    use crate::process::procfs::Stat;

    let is_stopped = |pid: &i32| Stat::read(*pid).is_some_and(|stat| stat.state == 'T');
    let child = child?.pid();
    if is_stopped(&child) {
        return Some(child);
    }
    let holders = match start.port.as_ref()?.holder(start.tree) {
        Holder::Ours(holders) => holders,
        Holder::Nobody | Holder::Foreign { .. } | Holder::Unknown => return None,
    };
    let all = !holders.is_empty() && holders.iter().all(is_stopped);
    holders.first().copied().filter(|_| all)
}

#[cfg(not(target_os = "linux"))]
fn suspended_process(_: &Start, _: Option<&Child>) -> Option<i32> {
    None
}
