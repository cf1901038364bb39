//! Health checks of an agent: readiness, liveness and suspension.
//!
//! One probe of the card checks two things. *Readiness*: the card is usable; otherwise the skills are
//! withdrawn. *Liveness*: the agent responds at all; otherwise a launched agent is restarted. A busy agent
//! may be slow to serve its card, so a timeout is ignored while calls are in flight. A process that SIGSTOP
//! has suspended shows in `/proc`; it is restarted even with calls in flight.

use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::call_stats::CallStats;
use super::lifecycle::AgentEvent;
use super::probe;
use super::start::Start;
use crate::config;
use crate::process::child::Child;
use crate::process::ports::PortOwner;
use crate::process::procfs::Stat;

/// Interval of connection checks of an attached agent.
const CONNECTION_CHECK_INTERVAL: Duration = Duration::from_secs(3);
/// Maximum interval of checks for SIGSTOP.
const SUSPENSION_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum interval between probes after a failed probe.
pub(super) const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Interval of the checks that do not read the card.
pub(super) fn check_interval(config: &config::AgentConfig) -> Duration {
    match config.command {
        Some(_) => SUSPENSION_CHECK_INTERVAL.min(config.liveness.interval),
        None => CONNECTION_CHECK_INTERVAL,
    }
}

pub(super) struct HealthCheck {
    interval: Duration,
    check_interval: Duration,
    timeout: Duration,
    next_probe: Instant,
    next_check: Instant,
}

impl HealthCheck {
    pub(super) fn new(config: &config::AgentConfig) -> Self {
        let (interval, timeout) = match config.command {
            Some(_) => (
                config.card_refresh.min(config.liveness.interval),
                config.liveness.timeout.max(config.readiness.timeout),
            ),
            None => (config.card_refresh, config.readiness.timeout),
        };
        let (now, check_interval) = (Instant::now(), check_interval(config));
        Self {
            interval,
            check_interval,
            timeout,
            next_probe: now + interval,
            next_check: now + check_interval,
        }
    }

    /// Checks the agent until there is an event. `recheck` triggers a probe now. Cancel-safe: an interrupted
    /// check is repeated.
    pub(super) async fn next(
        &mut self,
        start: &Start,
        name: &str,
        child: Option<&Child>,
        is_suspended: bool,
        recheck: &Notify,
        calls: &CallStats,
    ) -> AgentEvent {
        loop {
            let is_check = tokio::select! {
                biased;
                () = recheck.notified() => false,
                () = tokio::time::sleep_until(self.next_check) => true,
                () = tokio::time::sleep_until(self.next_probe) => false,
            };
            self.next_check = Instant::now() + self.check_interval;
            match suspended_process(start, child).await {
                Some(pid) => {
                    self.next_probe = self.next_probe.max(self.next_check);
                    return AgentEvent::Suspended(pid);
                }
                // The process runs again: probe it now.
                None if is_suspended => {
                    self.next_probe = Instant::now();
                    return AgentEvent::Resumed;
                }
                None if is_check && child.is_some() => continue,
                None if is_check && probe::accepts_connections(&start.config.url).await => continue,
                None => {}
            }
            let suspended = async {
                loop {
                    tokio::time::sleep(self.check_interval).await;
                    if suspended_process(start, child).await.is_some() {
                        return;
                    }
                }
            };
            let probed = tokio::select! {
                biased;
                probed = probe::read_card(start, self.timeout) => probed,
                () = suspended => {
                    self.next_check = Instant::now();
                    continue;
                }
            };
            return match probed {
                Err(error) if error.lacks_descriptors() => {
                    self.next_probe = Instant::now() + self.interval.min(MAX_RETRY_INTERVAL);
                    tracing::warn!(agent = %name, "cannot check the agent: too many open files; raise LimitNOFILE or `ulimit -n`");
                    continue;
                }
                Ok(known) => {
                    self.next_probe = Instant::now() + self.interval;
                    AgentEvent::CardRead(known)
                }
                Err(error) => {
                    self.next_probe = Instant::now() + self.interval.min(MAX_RETRY_INTERVAL);
                    AgentEvent::ProbeFailed { error, busy: calls.in_flight() > 0 }
                }
            };
        }
    }
}

/// The suspended process, if it is the child itself or if all listeners of the port are suspended.
async fn suspended_process(start: &Start, child: Option<&Child>) -> Option<i32> {
    let is_suspended_process = |pid: &i32| Stat::read(*pid).is_some_and(|stat| stat.state == 'T');
    let child = child?.pid;
    if is_suspended_process(&child) {
        return Some(child);
    }
    let owners = match start.port.as_ref()?.owner().await {
        PortOwner::Own { processes, .. } => processes,
        PortOwner::Free | PortOwner::Other { .. } | PortOwner::Unknown => return None,
    };
    let all = !owners.is_empty() && owners.iter().all(is_suspended_process);
    owners.first().copied().filter(|_| all)
}
