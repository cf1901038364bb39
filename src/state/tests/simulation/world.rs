//! What the replicas of a schedule share, and what happened in it.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use fastrand::Rng;
use uuid::Uuid;

use super::super::super::clock::{Instant, set_wall_clock, wall_time};
use super::super::super::peers::{InstanceId, Liveness};
use super::super::super::{RecordKey, RecordKind, State};
use super::agent::AgentTask;
use super::executor::{Owner, Spawner, yield_now};
use super::replica::Replica;
use super::store::SharedRecords;

/// How likely the faults of a schedule are, and what runs in it.
#[derive(Debug, Clone)]
pub(super) struct Mix {
    pub replicas: usize,
    pub tasks: usize,
    pub max_questions: usize,
    pub keys: usize,
    pub sessions: usize,
    /// Crashes in a million polls, and at most how many.
    pub crash_ppm: u32,
    pub max_crashes: usize,
    /// Faults in a thousand.
    pub write_faults: u32,
    pub read_faults: u32,
    pub slow: u32,
    pub agent_faults: u32,
    pub abandoned: u32,
    /// How often a replica is cut off from NATS, stalls, or is wrongly suspected, and how often the store is away.
    pub cut_offs: usize,
    pub stalls: usize,
    pub suspicions: usize,
    pub outages: usize,
    pub short_questions: u32,
}

impl Mix {
    pub(super) fn of(rng: &mut Rng) -> Self {
        let is_quiet = rng.u32(..8) == 0;
        let mut level = |levels: [u32; 4]| if is_quiet { levels[0] } else { levels[rng.usize(..4)] };
        let [crash_ppm, write_faults, read_faults, slow] = [
            level([0, 300, 1500, 5000]),
            level([0, 20, 80, 250]),
            level([0, 10, 40, 120]),
            level([0, 5, 30, 100]),
        ];
        let [agent_faults, abandoned, short_questions] =
            [level([0, 30, 150, 300]), level([0, 0, 20, 80]), level([0, 0, 0, 400])];
        let [cut_offs, stalls, suspicions, outages] = [(); 4].map(|()| level([0, 0, 1, 2]) as usize);
        Self {
            replicas: rng.usize(2..5),
            tasks: rng.usize(1..5),
            max_questions: rng.usize(1..4),
            keys: rng.usize(..3),
            sessions: rng.usize(..2),
            crash_ppm,
            max_crashes: rng.usize(1..5),
            write_faults,
            read_faults,
            slow,
            agent_faults,
            abandoned,
            cut_offs,
            stalls,
            suspicions,
            outages,
            short_questions,
        }
    }
}

/// What went wrong in a schedule, and what was checked.
#[derive(Debug, Clone, Default)]
pub(super) struct Counts(pub BTreeMap<&'static str, u64>);

impl Counts {
    pub(super) fn add(&mut self, other: &Self) {
        for (name, count) in &other.0 {
            *self.0.entry(name).or_default() += count;
        }
    }
}

#[derive(Debug)]
pub(super) struct ReplicaStatus {
    pub instance: InstanceId,
    pub is_running: bool,
    pub started: Instant,
    skew_ms: i64,
    /// Cut off from NATS: neither the store nor other replicas can be reached.
    cut_off_until: Option<Instant>,
    /// Its process does not run.
    stalled_until: Option<Instant>,
    /// Other replicas cannot reach it, but it reaches the store.
    suspected_until: Option<Instant>,
    unreachable_since: Option<Instant>,
    /// How long other replicas take to consider it dead.
    detection: Duration,
}

impl ReplicaStatus {
    /// When the others consider it dead, if they do.
    pub(super) fn dead_since(&self) -> Option<Instant> {
        self.unreachable_since.map(|since| since + self.detection)
    }
}

/// A change of a task that was published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Published {
    pub task: usize,
    pub revision: u64,
    pub by: usize,
    /// What callers see of it.
    pub content: String,
    pub follow_up: Option<Uuid>,
}

/// An id for a question.
#[derive(Debug, Clone)]
pub(super) struct Issued {
    pub id: Uuid,
    /// The replica that made it.
    pub by: usize,
    pub task: usize,
    pub fingerprint: String,
    pub expires: SystemTime,
    /// Whether a caller knows the id.
    pub is_told: bool,
    pub winners: u32,
}

/// An answer that left a replica.
#[derive(Debug, Clone)]
pub(super) struct Sent {
    pub id: Uuid,
    pub by: usize,
    /// Whether the replica has found out that the agent did not take it, and releases the id.
    pub is_released: bool,
}

pub(super) struct World {
    pub spawner: Spawner,
    pub mix: Mix,
    rng: Mutex<Rng>,
    began: Instant,
    is_over: AtomicBool,
    is_healed: AtomicBool,
    replicas: Mutex<Vec<ReplicaStatus>>,
    crashed: Mutex<Vec<usize>>,
    outage_until: Mutex<Option<Instant>>,
    pub records: Mutex<SharedRecords>,
    pub agent: Mutex<Vec<AgentTask>>,
    pub published: Mutex<Vec<Published>>,
    /// In the order in which they were made, which is the same in every run of a seed.
    pub issued: Mutex<Vec<Issued>>,
    pub sent: Mutex<Vec<Sent>>,
    /// How often the request of an idempotency key ran.
    pub runs: Mutex<BTreeMap<usize, u32>>,
    pub violations: Mutex<Vec<String>>,
    counts: Mutex<Counts>,
    trace: Option<Mutex<Vec<String>>>,
    /// Short names of random ids, in the order in which they were first traced.
    names: Mutex<BTreeMap<Uuid, usize>>,
    /// By index; `None` after a crash.
    pub directory: Mutex<Vec<Option<Replica>>>,
}

impl fmt::Debug for World {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("World").field("mix", &self.mix).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap()
}

impl World {
    pub(super) fn new(seed: u64, is_traced: bool) -> Arc<Self> {
        let mut rng = Rng::with_seed(seed);
        Arc::new(Self {
            spawner: Spawner::default(),
            mix: Mix::of(&mut rng),
            rng: Mutex::new(rng),
            began: Instant::now(),
            is_over: AtomicBool::new(false),
            is_healed: AtomicBool::new(false),
            replicas: Mutex::default(),
            crashed: Mutex::default(),
            outage_until: Mutex::default(),
            records: Mutex::default(),
            agent: Mutex::default(),
            published: Mutex::default(),
            issued: Mutex::default(),
            sent: Mutex::default(),
            runs: Mutex::default(),
            violations: Mutex::default(),
            counts: Mutex::default(),
            trace: is_traced.then(Mutex::default),
            names: Mutex::default(),
            directory: Mutex::default(),
        })
    }

    // Chance.

    pub(super) fn below(&self, limit: usize) -> usize {
        lock(&self.rng).usize(..limit.max(1))
    }

    pub(super) fn millis(&self, range: Range<u64>) -> Duration {
        Duration::from_millis(lock(&self.rng).u64(range))
    }

    pub(super) fn per_mille(&self, chance: u32) -> bool {
        chance > 0 && lock(&self.rng).u32(..1000) < chance
    }

    /// Whether a fault of this probability happens now.
    pub(super) fn fails(&self, chance: u32) -> bool {
        !self.is_healed() && self.per_mille(chance)
    }

    pub(super) fn shuffle<T>(&self, items: &mut [T]) {
        lock(&self.rng).shuffle(items);
    }

    /// The time that a message takes.
    pub(super) async fn latency(&self) {
        match self.below(100) {
            0..60 => {
                for _ in 0..self.below(3) {
                    yield_now().await;
                }
            }
            _ if self.fails(self.mix.slow) => {
                self.count("slow operations");
                tokio::time::sleep(self.millis(50..4000)).await;
            }
            _ => tokio::time::sleep(self.millis(1..20)).await,
        }
    }

    // Time.

    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Relaxed)
    }

    pub(super) fn end(&self) {
        self.is_over.store(true, Relaxed);
    }

    pub(super) fn is_healed(&self) -> bool {
        self.is_healed.load(Relaxed)
    }

    /// No more faults from now on.
    pub(super) fn heal(&self) {
        self.is_healed.store(true, Relaxed);
        *lock(&self.outage_until) = None;
        let count = lock(&self.replicas).len();
        for index in 0..count {
            if let Some(status) = lock(&self.replicas).get_mut(index) {
                (status.cut_off_until, status.stalled_until, status.suspected_until) = (None, None, None);
            }
            self.update_reachability(index);
        }
        self.log(|| "healed".to_owned());
    }

    pub(super) fn set_clock_of(&self, owner: Owner) {
        let skew_ms = match owner {
            Owner::World => 0,
            Owner::Replica(replica) => lock(&self.replicas).get(replica).map_or(0, |status| status.skew_ms),
        };
        let base = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let skew = Duration::from_millis(skew_ms.unsigned_abs());
        let time = if skew_ms < 0 { base - skew } else { base + skew };
        set_wall_clock(Some((self.began, time)));
    }

    // Replicas.

    pub(super) fn add_replica(&self) -> (usize, InstanceId) {
        let (skew_ms, detection) = {
            let mut rng = lock(&self.rng);
            (rng.i64(-2000..=2000), Duration::from_millis(rng.u64(9_000..16_000)))
        };
        let mut replicas = lock(&self.replicas);
        let index = replicas.len();
        let instance = Uuid::from_u128(index as u128 + 1);
        replicas.push(ReplicaStatus {
            instance,
            is_running: true,
            started: Instant::now(),
            skew_ms,
            cut_off_until: None,
            stalled_until: None,
            suspected_until: None,
            unreachable_since: None,
            detection,
        });
        drop(replicas);
        self.log(|| format!("replica {index} starts, its clock is off by {skew_ms} ms"));
        (index, instance)
    }

    pub(super) fn replicas(&self) -> MutexGuard<'_, Vec<ReplicaStatus>> {
        lock(&self.replicas)
    }

    pub(super) fn running(&self) -> Vec<usize> {
        let replicas = lock(&self.replicas);
        replicas.iter().enumerate().filter(|(_, status)| status.is_running).map(|(index, _)| index).collect()
    }

    pub(super) fn any_running(&self) -> Option<usize> {
        let running = self.running();
        let index = self.below(running.len());
        running.get(index).copied()
    }

    pub(super) fn is_running(&self, replica: usize) -> bool {
        lock(&self.replicas).get(replica).is_some_and(|status| status.is_running)
    }

    pub(super) fn state(&self, replica: usize) -> Option<Arc<State>> {
        self.replica(replica).map(|replica| replica.state)
    }

    pub(super) fn replica(&self, index: usize) -> Option<Replica> {
        lock(&self.directory).get(index).cloned().flatten()
    }

    pub(super) fn index_of(&self, instance: InstanceId) -> Option<usize> {
        lock(&self.replicas).iter().position(|status| status.instance == instance)
    }

    pub(super) fn crashes_now(&self, replica: usize) -> bool {
        if self.is_healed()
            || self.mix.crash_ppm == 0
            || lock(&self.rng).u32(..1_000_000) >= self.mix.crash_ppm
        {
            return false;
        }
        let crashes = lock(&self.counts).0.get("crashes").copied().unwrap_or(0);
        if crashes >= self.mix.max_crashes as u64 {
            return false;
        }
        self.crash(replica);
        true
    }

    fn crash(&self, replica: usize) {
        let mut was_considered_dead = false;
        if let Some(status) = lock(&self.replicas).get_mut(replica) {
            status.is_running = false;
            was_considered_dead = status.dead_since().is_some_and(|since| since <= Instant::now());
        }
        if was_considered_dead {
            self.count("false deaths");
        }
        let crashed = lock(&self.directory).get_mut(replica).and_then(Option::take);
        if crashed.is_some_and(|crashed| crashed.store.waiting() + crashed.state.tasks.waiting() > 0) {
            self.count("crashes with changes that were not written");
        }
        lock(&self.crashed).push(replica);
        self.update_reachability(replica);
        self.count("crashes");
        self.log(|| format!("replica {replica} crashes"));
    }

    pub(super) fn take_crashed(&self) -> Vec<usize> {
        std::mem::take(&mut *lock(&self.crashed))
    }

    pub(super) fn stalled_until(&self, replica: usize) -> Option<Instant> {
        lock(&self.replicas).get(replica).and_then(|status| status.stalled_until)
    }

    /// A replica is cut off, stalls, or is wrongly suspected for a while.
    pub(super) async fn disturb(&self, kind: &'static str, duration: Duration) {
        let Some(replica) = self.any_running() else { return };
        self.count(kind);
        self.log(|| format!("replica {replica}: {kind} for {duration:?}"));
        let until = Instant::now() + duration;
        self.set_disturbance(replica, kind, Some(until));
        tokio::time::sleep(duration).await;
        self.set_disturbance(replica, kind, None);
        self.log(|| format!("replica {replica}: end of {kind}"));
    }

    fn set_disturbance(&self, replica: usize, kind: &str, until: Option<Instant>) {
        if let Some(status) = lock(&self.replicas).get_mut(replica)
            && !(until.is_some() && self.is_healed())
        {
            match kind {
                "cut-offs" => status.cut_off_until = until,
                "stalls" => status.stalled_until = until,
                _ => status.suspected_until = until,
            }
        }
        self.update_reachability(replica);
    }

    pub(super) async fn outage(&self, duration: Duration) {
        self.count("outages of the store");
        self.log(|| format!("the store is away for {duration:?}"));
        *lock(&self.outage_until) = Some(Instant::now() + duration);
        tokio::time::sleep(duration).await;
        *lock(&self.outage_until) = None;
    }

    fn update_reachability(&self, replica: usize) {
        let mut replicas = lock(&self.replicas);
        let Some(status) = replicas.get_mut(replica) else { return };
        let is_disturbed = [status.cut_off_until, status.stalled_until, status.suspected_until];
        let is_reachable = status.is_running && is_disturbed.iter().all(Option::is_none);
        if is_reachable {
            if let Some(since) = status.unreachable_since.take()
                && since.elapsed() >= status.detection
            {
                drop(replicas);
                self.count("false deaths");
            }
        } else {
            status.unreachable_since.get_or_insert_with(Instant::now);
        }
    }

    pub(super) fn is_cut_off(&self, replica: usize) -> bool {
        lock(&self.replicas).get(replica).is_some_and(|status| status.cut_off_until.is_some())
    }

    /// Whether requests of a replica can reach the store.
    pub(super) fn has_store(&self, replica: usize) -> bool {
        lock(&self.outage_until).is_none() && !self.is_cut_off(replica)
    }

    /// What one replica knows about another.
    pub(super) fn liveness(&self, observer: usize, instance: InstanceId) -> Liveness {
        let replicas = lock(&self.replicas);
        let Some((index, status)) =
            replicas.iter().enumerate().find(|(_, status)| status.instance == instance)
        else {
            return Liveness::Dead;
        };
        let is_observer_cut_off = replicas.get(observer).is_some_and(|status| status.cut_off_until.is_some());
        match status.unreachable_since {
            _ if index == observer => Liveness::Alive,
            None if !is_observer_cut_off => Liveness::Alive,
            Some(since) if !is_observer_cut_off && since.elapsed() >= status.detection => Liveness::Dead,
            _ => Liveness::Unreachable,
        }
    }

    /// Whether a replica can be reached by others, and runs.
    pub(super) fn is_reachable(&self, replica: usize) -> bool {
        lock(&self.replicas).get(replica).is_some_and(|status| status.unreachable_since.is_none())
    }

    /// Whether a replica has crashed, or others may have taken over from one that still ran.
    pub(super) fn had_deaths(&self) -> bool {
        let counts = lock(&self.counts);
        // A request that is dropped is like a crash of its own.
        ["crashes", "false deaths", "abandoned answers"]
            .iter()
            .any(|name| counts.0.get(name).copied().unwrap_or(0) > 0)
    }

    /// Whether a replica has crashed, and changes that it had written were perhaps not published.
    pub(super) fn had_crashes(&self) -> bool {
        lock(&self.counts).0.contains_key("crashes")
    }

    /// Whether two replicas may have had different opinions about a task: one was considered dead while it ran, or had
    /// changes that only it knew when it crashed.
    pub(super) fn had_false_deaths(&self) -> bool {
        let counts = lock(&self.counts);
        let names = ["false deaths", "crashes with changes that were not written"];
        names.iter().any(|name| counts.0.contains_key(name))
    }

    /// Sends a request to a replica. `None` if there is no reply.
    pub(super) async fn call<T: Send + 'static>(
        &self,
        replica: usize,
        request: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        self.latency().await;
        if !self.is_running(replica) || self.is_cut_off(replica) {
            return None;
        }
        let (reply, received) = tokio::sync::oneshot::channel();
        self.spawner.spawn(Owner::Replica(replica), async move {
            let _ = reply.send(request.await);
        });
        let received = tokio::time::timeout(Duration::from_secs(90), received).await.ok()?.ok();
        // The connection sends the reply when it is back.
        while self.is_cut_off(replica) && self.is_running(replica) {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        if !self.is_running(replica) {
            return None;
        }
        self.latency().await;
        received
    }

    // What happened.

    pub(super) fn count(&self, name: &'static str) {
        *lock(&self.counts).0.entry(name).or_default() += 1;
    }

    pub(super) fn counts(&self) -> Counts {
        lock(&self.counts).clone()
    }

    pub(super) fn log(&self, text: impl FnOnce() -> String) {
        if let Some(trace) = &self.trace {
            let line = format!("{:>8.3} {}", self.began.elapsed().as_secs_f64(), text());
            lock(trace).push(line);
        }
    }

    /// A short name of an id, the same in every run of a seed.
    pub(super) fn name(&self, id: Uuid) -> String {
        let mut names = lock(&self.names);
        let next = names.len();
        format!("#{}", names.entry(id).or_insert(next))
    }

    /// The id of a record, or its short name.
    pub(super) fn key_name(&self, key: &RecordKey) -> String {
        Uuid::try_parse(&key.id).map_or_else(|_| key.id.clone(), |id| self.name(id))
    }

    /// What matters of a record, with short names of ids.
    pub(super) fn describe(&self, record: &[u8]) -> String {
        let record: serde_json::Value = serde_json::from_slice(record).unwrap_or_default();
        let mut words = Vec::new();
        self.describe_value(&record["record"], &mut words);
        words.join(" ")
    }

    fn describe_value(&self, value: &serde_json::Value, words: &mut Vec<String>) {
        const SHOWN: [&str; 14] = [
            "state",
            "is",
            "by",
            "nonce",
            "owner",
            "revision",
            "task",
            "follow_up",
            "id",
            "question",
            "task_id",
            "reply",
            "error",
            "context_id",
        ];
        match value {
            serde_json::Value::Object(fields) => {
                for (name, value) in fields.iter().filter(|(name, _)| SHOWN.contains(&name.as_str())) {
                    words.push(format!("{name}:"));
                    self.describe_value(value, words);
                }
            }
            serde_json::Value::String(text) => words.push(match Uuid::try_parse(text) {
                Ok(id) => self.name(id),
                Err(_) => text.clone(),
            }),
            other => words.push(other.to_string()),
        }
    }

    pub(super) fn trace(&self) -> Vec<String> {
        self.trace.as_ref().map(|trace| lock(trace).clone()).unwrap_or_default()
    }

    pub(super) fn violation(&self, text: String) {
        self.log(|| format!("VIOLATION: {text}"));
        lock(&self.violations).push(text);
    }

    /// Whether an answer under this id was sent, as far as replicas can know: one that has crashed may not have written
    /// that it has released the id.
    pub(super) fn was_sent(&self, id: Uuid) -> bool {
        let sent = lock(&self.sent).clone();
        sent.iter().any(|sent| sent.id == id && !(sent.is_released && self.is_running(sent.by)))
    }

    /// A caller knows an id from now on.
    pub(super) fn tell(&self, id: Uuid) {
        if let Some(issued) = lock(&self.issued).iter_mut().find(|issued| issued.id == id) {
            issued.is_told = true;
        }
    }

    /// Whether the replica that made an id has crashed before the store had the record.
    pub(super) fn is_lost(&self, id: Uuid) -> bool {
        let key = RecordKey::new(&"agent".into(), id.simple().to_string());
        let is_stored = lock(&self.records).read(RecordKind::FollowUp, &key).is_some();
        let by = lock(&self.issued).iter().find(|issued| issued.id == id).map(|issued| issued.by);
        !is_stored && by.is_some_and(|by| !self.is_running(by))
    }

    /// Whether only a replica that cannot be reached now has the record of an id.
    pub(super) fn is_out_of_reach(&self, id: Uuid) -> bool {
        let by = lock(&self.issued).iter().find(|issued| issued.id == id).map(|issued| issued.by);
        by.is_some_and(|by| !self.is_reachable(by))
    }

    pub(super) fn is_expired(&self, id: Uuid) -> bool {
        let now = wall_time();
        // Clocks differ by up to two seconds.
        lock(&self.issued)
            .iter()
            .any(|issued| issued.id == id && issued.expires <= now + Duration::from_secs(4))
    }
}
