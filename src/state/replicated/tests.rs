//! Replicas over one faulty shared store.

use std::sync::atomic::Ordering::Relaxed;

use rstest::rstest;

use super::super::sessions::SessionId;
use super::super::tasks::{Observer, Takeover};
use super::super::tests::{Fault, FaultyStore, alone, quotas, submitted};
use super::*;
use crate::a2a::model::TaskState;
use crate::reply::error::Code;
use crate::state::State;

const KIND: RecordKind = RecordKind::FollowUp;
const HOUR: Lifetime = Lifetime { ttl: Duration::from_secs(3600), protected_for: Duration::ZERO };
const OPEN: Lifetime = Lifetime { ttl: Duration::from_secs(3600), protected_for: Duration::from_secs(3600) };

fn replica(shared: &Arc<FaultyStore>) -> Arc<ReplicatedStore> {
    replica_with(shared, &quotas(), false)
}

fn replica_with(shared: &Arc<FaultyStore>, quotas: &Arc<Quotas>, is_required: bool) -> Arc<ReplicatedStore> {
    let shared = Arc::clone(shared) as Arc<dyn StateStore>;
    Arc::new(ReplicatedStore::new(shared, quotas, is_required, Arc::new(Notify::new())))
}

fn key(id: &str) -> RecordKey {
    RecordKey::new(&"agent".into(), id)
}

/// A record as it is stored.
fn value(id: &str, content: &str) -> Bytes {
    serde_json::json!({"v": 1, "agent": "agent", "id": id, "record": content}).to_string().into()
}

async fn write(
    store: &ReplicatedStore,
    expected: Revision,
    content: &str,
    durability: Durability,
) -> Result<Revision, WriteError> {
    store.write(KIND, &key("k"), expected, value("k", content), OPEN, durability).await
}

async fn read(store: &dyn StateStore) -> Option<(String, Revision)> {
    let record = store.read(KIND, &key("k")).await.unwrap()?;
    let json: serde_json::Value = serde_json::from_slice(&record.value).unwrap();
    Some((json["record"].as_str().unwrap().to_owned(), record.revision))
}

async fn content(store: &dyn StateStore) -> String {
    read(store).await.expect("a record").0
}

fn set_down(shared: &FaultyStore, is_down: bool) {
    shared.is_down.store(is_down, Relaxed);
}

fn inject(shared: &FaultyStore, faults: &[Fault]) {
    shared.faults.lock().unwrap().extend(faults);
}

async fn flush(store: &ReplicatedStore) {
    store.flush(Duration::from_secs(5)).await;
    assert_eq!(store.deferred().len(), 0);
}

use Durability::{Behind, Confirmed, Deferrable};

#[tokio::test]
async fn the_shared_store_decides_and_a_stale_copy_is_dropped() {
    let shared = FaultyStore::shared();
    let (one, other) = (replica(&shared), replica(&shared));
    let first = write(&one, ABSENT, "a", Confirmed).await.unwrap();
    assert_eq!(read(&*other).await, Some(("a".into(), first)));
    let second = write(&other, first, "b", Confirmed).await.unwrap();
    assert_eq!(content(&*one).await, "a", "a copy");
    assert_eq!(write(&one, first, "c", Confirmed).await, Err(WriteError::Conflict));
    assert_eq!(read(&*one).await, Some(("b".into(), second)));
    write(&one, second, "c", Confirmed).await.unwrap();
    other.forget(KIND, &key("k"));
    assert_eq!(content(&*other).await, "c");
}

#[tokio::test]
async fn what_must_be_confirmed_fails_during_an_outage_and_changes_nothing() {
    let shared = FaultyStore::shared();
    let (one, other) = (replica(&shared), replica(&shared));
    let first = write(&one, ABSENT, "a", Confirmed).await.unwrap();
    set_down(&shared, true);
    assert_eq!(write(&one, first, "b", Confirmed).await, Err(WriteError::Unavailable));
    assert_eq!(read(&*one).await, Some(("a".into(), first)), "the copy remains");
    assert_eq!(other.read(KIND, &key("k")).await.unwrap_err(), StoreUnavailable);
    set_down(&shared, false);
    write(&one, first, "b", Confirmed).await.unwrap();
}

#[rstest]
#[case(Deferrable, true)]
#[case(Behind, true)]
#[case(Behind, false)]
#[tokio::test]
async fn a_deferred_write_reaches_the_other_replicas_later(
    #[case] durability: Durability,
    #[case] is_down: bool,
) {
    let shared = FaultyStore::shared();
    let (one, other) = (replica(&shared), replica(&shared));
    set_down(&shared, is_down);
    let first = write(&one, ABSENT, "a", durability).await.unwrap();
    assert_ne!(first & LOCAL, 0);
    assert_eq!(read(&*one).await, Some(("a".into(), first)));
    assert_eq!(write(&one, ABSENT, "x", durability).await, Err(WriteError::Conflict));
    let second = write(&one, first, "b", durability).await.unwrap();
    set_down(&shared, false);
    assert_eq!(read(&*other).await, None);
    flush(&one).await;
    let (found, revision) = read(&*other).await.unwrap();
    assert_eq!((found.as_str(), revision & LOCAL), ("b", 0));
    assert_eq!(read(&*one).await, Some(("b".into(), revision)));
    assert_eq!(write(&one, second, "c", Confirmed).await, Err(WriteError::Conflict), "read it again");
    write(&one, revision, "c", Confirmed).await.unwrap();
    assert_eq!(content(&*other).await, "c");
}

#[tokio::test]
async fn writes_behind_are_coalesced() {
    let shared = FaultyStore::shared();
    let one = replica(&shared);
    let mut revision = ABSENT;
    for number in 0..100 {
        revision = write(&one, revision, &number.to_string(), Behind).await.unwrap();
    }
    flush(&one).await;
    assert_eq!(shared.writes.load(Relaxed), 1);
    assert_eq!(content(&*shared).await, "99");
}

#[tokio::test]
async fn a_record_that_no_other_replica_can_know_is_decided_here_during_an_outage() {
    let shared = FaultyStore::shared();
    let (one, other) = (replica(&shared), replica(&shared));
    set_down(&shared, true);
    let asked = write(&one, ABSENT, "pending", Deferrable).await.unwrap();
    let answering = write(&one, asked, "answering", Confirmed).await.unwrap();
    assert_eq!(write(&one, asked, "answering again", Confirmed).await, Err(WriteError::Conflict));
    set_down(&shared, false);
    let used = write(&one, answering, "used", Confirmed).await.unwrap();
    assert_eq!(used & LOCAL, 0, "confirmed by the shared store");
    assert_eq!(content(&*other).await, "used");
    assert_eq!(one.deferred().len(), 0);
}

#[tokio::test]
async fn a_record_that_may_be_in_the_shared_store_is_not_decided_here() {
    let shared = FaultyStore::shared();
    let (one, other) = (replica(&shared), replica(&shared));
    inject(&shared, &[Fault::Ghost]);
    let asked = write(&one, ABSENT, "pending", Deferrable).await.unwrap();
    set_down(&shared, true);
    assert_eq!(write(&one, asked, "answering", Confirmed).await, Err(WriteError::Unavailable));
    assert_eq!(read(&*one).await, Some(("pending".into(), asked)));
    set_down(&shared, false);
    shared.land_ghost().await;
    let (_, revision) = read(&*other).await.unwrap();
    write(&other, revision, "answered elsewhere", Confirmed).await.unwrap();
    assert_eq!(write(&one, asked, "answering", Confirmed).await, Err(WriteError::Conflict));
    assert_eq!(content(&*one).await, "answered elsewhere");
}

#[rstest]
#[tokio::test]
async fn the_newest_record_wins_over_earlier_writes_that_take_effect_late(
    #[values(Fault::Ghost, Fault::Unconfirmed, Fault::Lost)] fault: Fault,
    #[values(Behind, Deferrable)] durability: Durability,
) {
    let shared = FaultyStore::shared();
    let one = replica(&shared);
    inject(&shared, &[fault, fault]);
    let first = write(&one, ABSENT, "a", Deferrable).await.unwrap();
    let second = write(&one, first, "b", durability).await.unwrap();
    one.flush_round().await;
    write(&one, second, "c", durability).await.unwrap();
    flush(&one).await;
    assert_eq!(content(&*shared).await, "c");
    assert_eq!(content(&*one).await, "c");
}

#[tokio::test]
async fn a_deferred_record_that_another_replica_has_written_is_dropped() {
    let shared = FaultyStore::shared();
    let (one, other) = (replica(&shared), replica(&shared));
    let first = write(&one, ABSENT, "a", Confirmed).await.unwrap();
    set_down(&shared, true);
    write(&one, first, "b", Deferrable).await.unwrap();
    set_down(&shared, false);
    write(&other, first, "taken over", Confirmed).await.unwrap();
    flush(&one).await;
    assert_eq!(content(&*one).await, "taken over");
}

#[tokio::test]
async fn a_write_waits_for_the_one_in_the_background() {
    let shared = FaultyStore::shared();
    let one = replica(&shared);
    let first = write(&one, ABSENT, "a", Behind).await.unwrap();
    let (_, confirmed) = tokio::join!(one.flush_round(), write(&one, first, "b", Confirmed));
    assert_eq!(confirmed, Err(WriteError::Conflict), "it has a revision of the shared store now");
    let (_, revision) = read(&*one).await.unwrap();
    write(&one, revision, "b", Confirmed).await.unwrap();
    assert_eq!(content(&*shared).await, "b");
}

#[tokio::test]
async fn records_move_to_a_shared_store_that_appears_later() {
    let shared = FaultyStore::new(&[]);
    let one = replica(&shared);
    assert!(!one.is_shared() && one.is_available());
    let first = write(&one, ABSENT, "a", Confirmed).await.unwrap();
    assert_eq!(write(&one, ABSENT, "x", Confirmed).await, Err(WriteError::Conflict));
    write(&one, first, "b", Confirmed).await.unwrap();
    assert_eq!(shared.writes.load(Relaxed), 0);
    shared.is_shared.store(true, Relaxed);
    assert_eq!(content(&*one).await, "b");
    flush(&one).await;
    assert_eq!(content(&*shared).await, "b");
    assert_eq!(content(&*replica(&shared)).await, "b");
}

#[tokio::test]
async fn with_required_state_nothing_is_deferred_that_a_caller_waits_for() {
    let shared = FaultyStore::shared();
    let one = replica_with(&shared, &quotas(), true);
    set_down(&shared, true);
    assert_eq!(write(&one, ABSENT, "a", Deferrable).await, Err(WriteError::Unavailable));
    assert_eq!(one.read(KIND, &key("k")).await.unwrap_err(), StoreUnavailable);
    write(&one, ABSENT, "a", Behind).await.unwrap();
}

#[tokio::test]
async fn quotas_hold_for_new_records_and_never_block_those_of_other_replicas() {
    let shared = FaultyStore::shared();
    let (one, other) = (replica_with(&shared, &Quotas::new(0), false), replica(&shared));
    let large = |id: &str| value(id, &"x".repeat(90 << 10));
    let create = async |store: &ReplicatedStore, id: &str| {
        store.write(KIND, &key(id), ABSENT, large(id), OPEN, Confirmed).await
    };
    let foreign = create(&other, "foreign").await.unwrap();
    let mut created = 0;
    while create(&one, &created.to_string()).await.is_ok() {
        created += 1;
    }
    assert!((1..10).contains(&created), "{created}");
    assert!(shared.read(KIND, &key(&created.to_string())).await.unwrap().is_none(), "refused before");
    one.write(KIND, &key("foreign"), foreign, large("foreign"), OPEN, Confirmed).await.unwrap();
}

#[tokio::test]
async fn an_abandoned_write_leaves_no_reservation() {
    let shared = FaultyStore::shared();
    let one = replica(&shared);
    let first = write(&one, ABSENT, "a", Confirmed).await.unwrap();
    for _ in 0..3 {
        let abandoned = write(&one, first, "b", Confirmed);
        assert!(futures_util::poll!(std::pin::pin!(abandoned)).is_pending());
        assert!(one.row(KIND, &key("k")).is_none());
    }
    set_down(&shared, true);
    write(&one, first, "b", Deferrable).await.unwrap();
    set_down(&shared, false);
    {
        let mut flush = std::pin::pin!(one.flush_round());
        assert!(futures_util::poll!(&mut flush).is_pending());
    }
    flush(&one).await;
    assert_eq!(content(&*shared).await, "b");
}

#[tokio::test]
async fn too_many_deferred_records_are_counted_and_still_written_while_this_process_holds_them() {
    const RECORDS: usize = 12_000;
    let shared = FaultyStore::shared();
    let one = replica(&shared);
    set_down(&shared, true);
    for number in 0..RECORDS {
        let id = number.to_string();
        one.write(KIND, &key(&id), ABSENT, value(&id, ""), OPEN, Behind).await.unwrap();
    }
    let stats = one.stats().unwrap();
    assert_eq!((stats.deferred.load(Relaxed), stats.dropped.load(Relaxed)), (10_000, 2_000));
    set_down(&shared, false);
    flush(&one).await;
    assert_eq!(shared.scan(KIND, None).count().await, RECORDS);
}

#[tokio::test]
async fn a_scan_sees_each_record_once_in_its_newest_form() {
    let shared = FaultyStore::shared();
    let (one, other) = (replica(&shared), replica(&shared));
    let first = write(&one, ABSENT, "a", Confirmed).await.unwrap();
    other.write(KIND, &key("other"), ABSENT, value("other", "o"), HOUR, Confirmed).await.unwrap();
    write(&one, first, "b", Behind).await.unwrap();
    let scan = async |local: bool| {
        let agent: Arc<str> = "agent".into();
        let records = if local { one.scan_local(KIND, None) } else { one.scan(KIND, Some(&agent)) };
        let mut found: Vec<_> = records.map(|record| record.unwrap().value).collect().await;
        found.sort();
        found
    };
    assert_eq!(scan(false).await, [value("k", "b"), value("other", "o")]);
    assert_eq!(scan(true).await, [value("k", "b")]);
    set_down(&shared, true);
    assert_eq!(scan(true).await, [value("k", "b")]);
    assert!(one.scan(KIND, None).any(|record| std::future::ready(record.is_err())).await);
}

/// Claims the record, as [`TypedRecords`](super::super::records::TypedRecords) does.
async fn claim(store: &ReplicatedStore, name: &str) -> bool {
    for _ in 0..8 {
        let Ok(record) = store.read(KIND, &key("k")).await else { return false };
        let Some(record) = record else { return false };
        if record.value == value("k", name) {
            return true;
        }
        if record.value != value("k", "pending") {
            return false;
        }
        let claimed = store.write(KIND, &key("k"), record.revision, value("k", name), OPEN, Confirmed).await;
        match claimed {
            Ok(_) => return true,
            Err(WriteError::Conflict | WriteError::Unknown) => {}
            Err(_) => return false,
        }
    }
    false
}

#[tokio::test]
async fn in_random_schedules_with_faults_at_most_one_claim_wins() {
    let faults = [
        Fault::Nothing,
        Fault::Nothing,
        Fault::Unavailable,
        Fault::Conflict,
        Fault::Lost,
        Fault::Unconfirmed,
        Fault::Ghost,
    ];
    for seed in 0..2_000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let shared = FaultyStore::shared();
        let (one, other) = (replica(&shared), replica(&shared));
        inject(&shared, &std::array::from_fn::<_, 12, _>(|_| random.choice(faults).unwrap()));
        let durability = random.choice([Confirmed, Deferrable, Behind]).unwrap();
        let _ = write(&one, ABSENT, "pending", durability).await;
        let mut winners = Vec::new();
        for step in 0..12 {
            set_down(&shared, random.u8(..4) == 0);
            let (store, replica) = if random.bool() { (&one, "one") } else { (&other, "other") };
            let name = format!("{replica} {step}");
            match random.u8(..4) {
                0 => store.flush_round().await,
                1 => {
                    let (won, _) = tokio::join!(claim(store, &name), one.flush_round());
                    winners.extend(won.then_some(name));
                }
                2 => {
                    let rival = format!("rival {step}");
                    let (won, rival_won) = tokio::join!(claim(&one, &name), claim(&other, &rival));
                    winners.extend(won.then_some(name));
                    winners.extend(rival_won.then_some(rival));
                }
                _ => winners.extend(claim(store, &name).await.then_some(name)),
            }
        }
        assert!(winners.len() <= 1, "seed {seed}: {winners:?}");
        set_down(&shared, false);
        shared.faults.lock().unwrap().clear();
        flush(&one).await;
        flush(&other).await;
        if let [winner] = &*winners {
            assert_eq!(content(&*shared).await, *winner, "seed {seed}");
        }
    }
}

/// Writes records of 500 bytes that this process may evict at once, until one is refused.
async fn fill(store: &ReplicatedStore, agent: &str, caller: &Caller) -> (usize, Option<WriteError>) {
    for number in 0..1000 {
        let key = RecordKey::new(&agent.into(), format!("{caller}-{number}")).of_caller(caller);
        let value = value(&key.id, &"x".repeat(500));
        let written = store.write(KIND, &key, ABSENT, value, HOUR, Durability::Deferrable).await;
        store.drop_row(KIND, &key);
        if let Err(error) = written {
            return (number, Some(error));
        }
    }
    (1000, None)
}

#[tokio::test]
async fn a_caller_takes_only_its_share_of_a_bucket_whatever_is_evicted_from_memory() {
    let shared = FaultyStore::shared();
    shared.capacity.store(256 << 10, Relaxed);
    let store = replica(&shared);
    let [alice, bob] = ["T/alice", "U/bob"].map(Caller::verified);
    let (of_alice, refused) = fill(&store, "agent", &alice).await;
    assert_eq!(refused, Some(WriteError::ShareUsed));
    assert!((80..100).contains(&of_alice), "{of_alice}");
    assert_eq!(fill(&store, "other", &alice).await.0, 0, "at other agents, too");
    // The next call is refused before the agent runs.
    assert_eq!(store.used_up("agent", &alice), Some(KIND));
    assert_eq!((store.used_up("agent", &bob), store.used_up("agent", &Caller::default())), (None, None));
    assert!(fill(&store, "agent", &Caller::verified("T/carol")).await.0 > 20, "of the same tenant");
    assert!(fill(&store, "agent", &bob).await.0 > 30);
    assert!(fill(&store, "agent", &Caller::default()).await.0 > 20);
    assert!(fill(&store, "other", &Caller::default()).await.0 > 10, "agents do not block each other");
    // A record that exists is still written, and found.
    let first = RecordKey::new(&"agent".into(), "T/alice-0").of_caller(&alice);
    let again = value("T/alice-0", "again");
    let conflict = store.write(KIND, &first, ABSENT, again.clone(), HOUR, Durability::Confirmed).await;
    assert_eq!(conflict, Err(WriteError::Conflict));
    let revision = store.read(KIND, &first).await.unwrap().unwrap().revision;
    store.write(KIND, &first, revision, again, HOUR, Durability::Confirmed).await.unwrap();
}

#[tokio::test]
async fn a_refusal_says_what_is_full() {
    let shared = FaultyStore::shared();
    let store = replica(&shared);
    let state = State::new(&(store as Arc<dyn StateStore>), &quotas(), &alone());
    let agent: Arc<str> = "agent".into();
    let caller = Caller::verified("T/alice");
    let place = async |id: &str| {
        let session = SessionId { agent: &agent, caller: &caller, id, is_launched: true };
        state.sessions.place(session).await
    };
    place("first").await.unwrap();
    for (is_full, capacity, text) in [
        (true, 0, "bucket for sessions is full"),
        (false, 100, "its share of the JetStream bucket for sessions"),
    ] {
        shared.is_full.store(is_full, Relaxed);
        shared.capacity.store(capacity, Relaxed);
        let refused = place("second").await.unwrap_err();
        assert_eq!((refused.info.code, refused.info.retryable), (Code::Busy, true));
        assert!(refused.message.contains(text) && !refused.message.contains("limits.memory"), "{refused:?}");
        place("first").await.unwrap();
    }
    // A submitted task is followed in memory.
    shared.is_full.store(true, Relaxed);
    let began = Observer { began: wall_time(), is_lookup: false, takeover: Takeover::New, run: 0 };
    state.tasks.record(&agent, "t", submitted(TaskState::Working), began).await.unwrap();
    assert!(state.tasks.find(&agent, "t").await.unwrap().is_some());
}
