//! Watching an agent that was seen: is it ready, is it alive, has it been stopped.
//!
//! Two questions that one look at the card answers. *Ready*: the card can be read and used; otherwise
//! the skills are withdrawn until it can. *Alive*: somebody answers at all; otherwise a launched agent
//! is started again. An agent that works may be slow on its card, so with calls in flight silence
//! means nothing. A stopped process is seen in `/proc`, and calls in flight are no excuse for it.

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::life::{Ended, LOOK, Life, Lost};
use super::probe;
use super::start::Start;
use super::status::{KnownCard, State};
use super::trouble::{LookError, Trouble};
use crate::a2a::client::chain;
use crate::process::child::Child;

/// How often an attached agent is checked for its presence; a launched one is a child.
const PRESENCE: Duration = Duration::from_secs(3);
/// How often, at least, is looked whether a launched agent was stopped. Two looks in a row have to see it.
const PULSE: Duration = Duration::from_secs(5);

/// Failed looks in a row.
#[derive(Default)]
struct Failures {
    ready: usize,
    alive: usize,
}

impl Life {
    /// From the first card to the end: of a launched agent that is ready, or of one that somebody
    /// else runs.
    pub(super) async fn watched(
        &self,
        start: &Start,
        launched: Option<(&Child, KnownCard)>,
        gone: CancellationToken,
    ) -> Ended {
        let (child, known) = match launched {
            Some((child, known)) => (Some(child), known),
            None => {
                let look = self.look(start, start.config.readiness.timeout);
                match self.unless_interrupted(start, look).await {
                    Err(ended) => return ended,
                    Ok(Ok(known)) => (None, known),
                    Ok(Err(error)) => return Lost::before_ready(Trouble::look(&error, &start.config)),
                }
            }
        };
        let since = Instant::now();
        self.show(start, known, &gone);
        let watch = Watch { life: self, start, child, gone, since };
        watch.run().await
    }

    async fn unless_interrupted<T>(&self, start: &Start, wait: impl Future<Output = T>) -> Result<T, Ended> {
        tokio::select! {
            biased;
            () = self.interrupted(start.order()) => Err(self.interruption()),
            result = wait => Ok(result),
        }
    }

    pub(super) fn interruption(&self) -> Ended {
        if self.stop.is_cancelled() { Ended::Stopped } else { Ended::Ordered }
    }
}

/// What a look found.
enum Seen {
    Well,
    Unwell,
    /// It was stopped while it was looked at.
    Stopped,
}

struct Watch<'a> {
    life: &'a Life,
    start: &'a Start,
    child: Option<&'a Child>,
    gone: CancellationToken,
    since: Instant,
}

impl Watch<'_> {
    async fn run(&self) -> Ended {
        let (life, config) = (self.life, &self.start.config);
        let usual = match self.child {
            Some(_) => config.card_refresh.min(config.liveness.interval),
            None => config.card_refresh,
        };
        let pulse = if self.child.is_some() { PULSE.min(config.liveness.interval) } else { PRESENCE };
        let mut failures = Failures::default();
        let mut stopped: Option<Instant> = None;
        let (mut next_look, mut next_pulse) = (Instant::now() + usual, Instant::now() + pulse);
        loop {
            let exit = async {
                match self.child {
                    Some(child) => child.wait().await,
                    None => std::future::pending().await,
                }
            };
            let only_pulse = tokio::select! {
                biased;
                () = life.interrupted(self.start.order()) => return life.interruption(),
                exit = exit => return self.lost(Trouble::exit(exit, self.since.elapsed()), Some(exit)),
                () = life.recheck.notified() => false,
                () = tokio::time::sleep_until(next_pulse) => true,
                () = tokio::time::sleep_until(next_look) => false,
            };
            next_pulse = Instant::now() + pulse;
            match (self.stopped_process(), stopped) {
                (Some(pid), Some(since)) if since.elapsed() >= pulse / 2 => {
                    return self.lost(Trouble::stopped(pid), None);
                }
                (Some(_), Some(_)) => {
                    next_look = next_look.max(next_pulse);
                    continue;
                }
                (Some(pid), None) => {
                    stopped = Some(Instant::now());
                    tracing::warn!(agent = %life.name, pid, "agent is stopped (SIGSTOP)");
                    life.withdraw(State::Unhealthy, Some(Trouble::stopped(pid)));
                    next_look = next_look.max(next_pulse);
                    continue;
                }
                // It goes on: see at once whether it is well.
                (None, Some(_)) => stopped = None,
                (None, None) if only_pulse && self.child.is_some() => continue,
                (None, None) if only_pulse && probe::accepts_connections(&config.url).await => continue,
                (None, None) => {}
            }
            match self.look(&mut failures, pulse).await {
                Err(ended) => return ended,
                Ok(Seen::Well) => next_look = Instant::now() + usual,
                Ok(Seen::Unwell) => next_look = Instant::now() + usual.min(LOOK.1),
                // The next pulse says the rest.
                Ok(Seen::Stopped) => next_pulse = Instant::now(),
            }
        }
    }

    async fn look(&self, failures: &mut Failures, pulse: Duration) -> Result<Seen, Ended> {
        let (life, config) = (self.life, &self.start.config);
        let limit = match self.child {
            Some(_) => config.liveness.timeout.max(config.readiness.timeout),
            None => config.readiness.timeout,
        };
        let exit = async {
            match self.child {
                Some(child) => child.wait().await,
                None => std::future::pending().await,
            }
        };
        let stopped = async {
            loop {
                tokio::time::sleep(pulse).await;
                if self.stopped_process().is_some() {
                    return;
                }
            }
        };
        // A look can take long; what happens in the meantime shall not wait for it.
        let look = async {
            tokio::select! {
                biased;
                exit = exit => Err(self.lost(Trouble::exit(exit, self.since.elapsed()), Some(exit))),
                seen = life.look(self.start, limit) => Ok(Some(seen)),
                () = stopped => Ok(None),
            }
        };
        let error = match life.unless_interrupted(self.start, look).await?? {
            None => return Ok(Seen::Stopped),
            Some(Ok(known)) => {
                *failures = Failures::default();
                life.show(self.start, known, &self.gone);
                return Ok(Seen::Well);
            }
            Some(Err(error)) => error,
        };
        // Somebody else's port is never ours again, and an attached agent that is gone is gone.
        let is_lost =
            matches!(error, LookError::Foreign { .. }) || (self.child.is_none() && error.is_nobody_there());
        if is_lost {
            return Err(self.lost(Trouble::look(&error, config), None));
        }
        if error.is_silence() && life.calls.in_flight() > 0 {
            tracing::debug!(agent = %life.name, "no answer to a look, but calls are in flight");
            return Ok(Seen::Unwell);
        }
        failures.ready += 1;
        failures.alive = if error.is_silence() || error.is_nobody_there() { failures.alive + 1 } else { 0 };
        let text = match &error {
            LookError::Card(error) => chain(error),
            other => Trouble::look(other, config).text,
        };
        // Once it is known to be unhealthy, each further look would say the same.
        if failures.ready <= config.readiness.failures {
            tracing::warn!(agent = %life.name, error = text, failures = failures.ready, "the agent does not show its card");
        }
        if self.child.is_some() && failures.alive >= config.liveness.failures {
            return Err(self.lost(Trouble::hung(&error, failures.alive, config), None));
        }
        if failures.ready >= config.readiness.failures {
            life.withdraw(State::Unhealthy, Some(Trouble::look(&error, config)));
        }
        Ok(Seen::Unwell)
    }

    fn lost(&self, trouble: Trouble, exit: Option<crate::process::child::Exit>) -> Ended {
        self.life.live.send_replace(None);
        Ended::Lost(Lost { trouble, exit, was_ready_for: self.since.elapsed() })
    }

    /// A process that was stopped and without which nothing goes on: the child itself, or all who
    /// listen for it.
    #[cfg(target_os = "linux")]
    fn stopped_process(&self) -> Option<i32> {
        use crate::process::ports::Holder;
        use crate::process::procfs::Stat;

        let is_stopped = |pid: &i32| Stat::read(*pid).is_some_and(|stat| stat.state == 'T');
        let child = self.child?.pid();
        if is_stopped(&child) {
            return Some(child);
        }
        let holders = match self.start.port.as_ref()?.holder(self.start.tree) {
            Holder::Ours(holders) => holders,
            Holder::Nobody | Holder::Foreign { .. } | Holder::Unknown => return None,
        };
        let all = !holders.is_empty() && holders.iter().all(is_stopped);
        holders.first().copied().filter(|_| all)
    }

    #[cfg(not(target_os = "linux"))]
    #[expect(clippy::unused_self, reason = "as on Linux")]
    fn stopped_process(&self) -> Option<i32> {
        None
    }
}
