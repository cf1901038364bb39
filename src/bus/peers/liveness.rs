//! Pings and announcements: how a replica learns of the others, and that they are gone.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use async_nats::Message;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::MissedTickBehavior;

use super::messages::{Announcement, Ping};
use super::table::Verdict;
use super::{AskError, NatsPeers};
use crate::bus::subject::Token;
use crate::state::peers::{Death, InstanceId, Liveness};
use crate::telemetry::log_limit::LogLimit;

/// The period of pings to each replica.
const PING_PERIOD: Duration = Duration::from_secs(5);
/// A replica announces itself at least this often.
const ANNOUNCE_PERIOD: Duration = Duration::from_secs(15);
/// Between two announcements of one replica, however many others appear.
const ANNOUNCE_PAUSE: Duration = Duration::from_millis(100);
/// How soon a replica announces itself after a reconnect.
const RECONNECT_POLL: Duration = Duration::from_secs(1);
/// How often, and how many times, a replica that leaves is pinged before the next period.
const LEAVE_POLL: (Duration, usize) = (Duration::from_millis(50), 100);

/// Concurrent requests that need the liveness of one replica share a ping.
#[derive(Debug, Default)]
pub(super) struct SharedPings(Mutex<HashMap<InstanceId, Weak<tokio::sync::Mutex<()>>>>);

impl SharedPings {
    fn turn(&self, instance: InstanceId) -> Arc<tokio::sync::Mutex<()>> {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(turn) = turns.get(&instance).and_then(Weak::upgrade) {
            return turn;
        }
        let turn = Arc::default();
        turns.retain(|_, turn| turn.strong_count() > 0);
        turns.insert(instance, Arc::downgrade(&turn));
        turn
    }
}

impl NatsPeers {
    pub(super) async fn ping(&self, instance: InstanceId) -> Result<(), AskError> {
        self.ask::<Ping>(instance, "ping", &Ping { instance: self.instance }).await.map(drop)
    }

    /// Whether a replica is alive, after a ping if none of the concurrent requests has sent one meanwhile.
    pub(super) async fn ask_for_life(&self, instance: InstanceId) -> Liveness {
        let turn = self.pings.turn(instance);
        let _turn = turn.lock().await;
        if let Verdict::Known(liveness) = self.lock_table().verdict(instance, Instant::now()) {
            return liveness;
        }
        if !self.is_connected() {
            return self.lock_table().without_asking(instance);
        }
        match self.ping(instance).await {
            Ok(()) => {
                self.saw(instance);
                Liveness::Alive
            }
            Err(error) => {
                if error == AskError::NoResponders && self.no_responders(instance) {
                    return Liveness::Dead;
                }
                self.lock_table().unreachable(instance, Instant::now());
                Liveness::Unreachable
            }
        }
    }

    /// A sign of life of another replica. Announces this one to it, if it is new.
    pub(super) fn saw(&self, instance: InstanceId) {
        if instance == self.instance {
            return;
        }
        let mut table = self.lock_table();
        if table.seen(instance, Instant::now()) {
            self.update_known(&table);
            drop(table);
            tracing::info!(%instance, "found another replica");
            self.announce.notify_one();
        }
    }

    pub(super) fn read_announcement(&self, message: &Message) {
        let sender = self.subjects.announced_peer(&message.subject).filter(|id| *id != self.instance);
        let Some(instance) = sender else { return };
        let Ok(Announcement { agents, is_leaving }) = serde_json::from_slice(&message.payload) else {
            return;
        };
        if is_leaving {
            return self.leaves(instance);
        }
        self.saw(instance);
        let agents = agents.map(|agents| agents.iter().filter_map(|agent| Token::parse(agent)).collect());
        self.lock_table().serves(instance, agents);
    }

    /// Another replica stops. It has unsubscribed, but NATS servers may need a moment to tell each other.
    fn leaves(&self, instance: InstanceId) {
        let mut table = self.lock_table();
        // From a replica that stops before this one has seen it, others may hold records.
        table.seen(instance, Instant::now());
        if !table.leaves(instance) {
            return;
        }
        drop(table);
        let Some(this) = self.this.upgrade() else { return };
        self.spawn("leave of a replica", async move {
            let (pause, attempts) = LEAVE_POLL;
            for _ in 0..attempts {
                if this.ping(instance).await == Err(AskError::NoResponders) {
                    this.no_responders(instance);
                    return;
                }
                tokio::time::sleep(pause).await;
            }
        });
    }

    /// Returns whether the replica is dead.
    fn no_responders(&self, instance: InstanceId) -> bool {
        let death = self.lock_table().has_left(instance, Instant::now());
        self.publish_death(death);
        death.is_some()
    }

    fn publish_death(&self, death: Option<Death>) {
        let Some(death) = death else { return };
        self.update_known(&self.lock_table());
        let Death { instance, is_orderly } = death;
        match is_orderly {
            true => tracing::info!(%instance, "another replica has stopped"),
            false => tracing::warn!(%instance, "another replica no longer responds and counts as dead"),
        }
        // Without a subscriber, nobody depends on it.
        let _ = self.deaths.send(death);
    }

    pub(super) async fn ping_periodically(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(PING_PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut connects, unreachable) = (self.connects(), LogLimit::default());
        loop {
            ticks.tick().await;
            if !self.is_connected() || self.leaving.is_cancelled() {
                continue;
            }
            if self.connects() != connects {
                connects = self.connects();
                self.lock_table().forgive();
            }
            let others = self.lock_table().instances();
            if others.is_empty() {
                continue;
            }
            let can_judge = self.ping(self.instance).await.is_ok();
            if !can_judge && self.is_connected() && unreachable.add(Instant::now()).is_some() {
                let subject = self.subjects.peer(self.instance, "ping");
                tracing::warn!(
                    subject,
                    "cannot reach the bridge's own subject for replicas; check the permissions of the bridge's NATS user \
                     (logged once a minute)"
                );
            }
            let this = &self;
            let mut pings: FuturesUnordered<_> = others
                .into_iter()
                .map(|instance| async move { (instance, this.ping(instance).await) })
                .collect();
            while let Some((instance, response)) = pings.next().await {
                // After a reconnect, the failure may be that of the connection.
                let counts = can_judge && self.is_connected() && self.connects() == connects;
                match response {
                    Ok(()) => self.saw(instance),
                    Err(AskError::NoResponders) if self.no_responders(instance) => {}
                    Err(_) if counts => {
                        let death = self.lock_table().ping_failed(instance, Instant::now());
                        self.publish_death(death);
                    }
                    Err(_) => {}
                }
            }
        }
    }

    pub(super) async fn announce_periodically(self: Arc<Self>) {
        let (mut connects, mut last) = (0, None::<Instant>);
        loop {
            let is_due = last.is_none_or(|last| last.elapsed() >= ANNOUNCE_PERIOD);
            if self.is_connected() && (is_due || connects != self.connects()) {
                connects = self.connects();
                last = Some(Instant::now());
                self.publish_announcement(false).await;
                tokio::time::sleep(ANNOUNCE_PAUSE).await;
            }
            tokio::select! {
                () = self.leaving.cancelled() => return,
                () = self.announce.notified() => last = None,
                () = tokio::time::sleep(RECONNECT_POLL) => {}
            }
        }
    }
}
