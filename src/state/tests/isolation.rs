//! What agents hold under load: their own quotas, and nothing of another agent's.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use uuid::Uuid;

use super::super::follow_ups::FollowUpState;
use super::super::idempotency::{FirstRequest, Reservation};
use super::super::memory::MemoryStore;
use super::super::quota::{CallKind, QuotaKind, Quotas};
use super::super::sessions::{SessionId, SessionPlace};
use super::super::tasks::{Observer, Takeover, TaskRecord};
use super::super::{State, StateStore};
use super::{HOUR, alone, claimed, free, outcome, question, submitted};
use crate::a2a::model::TaskState;
use crate::caller::Caller;
use crate::reply::Reply;
use crate::reply::error::Code;

/// The task of a call, without the content of a submitted one.
fn plain(state: TaskState, message: String) -> TaskRecord {
    let mut outcome = outcome(&state);
    outcome.content.message = message;
    TaskRecord { reply: Ok(Arc::new(outcome)), is_submitted: false, ..submitted(state) }
}

const CALL: Observer =
    Observer { began: SystemTime::UNIX_EPOCH, is_lookup: false, takeover: Takeover::New, run: 0 };

static CALLER: LazyLock<Caller> = LazyLock::new(Caller::default);

fn session(agent: &Arc<str>) -> SessionId<'_> {
    SessionId { agent, caller: &CALLER, id: "session", is_launched: false }
}

/// What a quiet agent has under way, of every kind.
struct Underway {
    agent: Arc<str>,
    question: Uuid,
    _running_key: FirstRequest,
}

impl Underway {
    async fn begin(state: &State, agent: &str) -> Self {
        let agent: Arc<str> = agent.into();
        let tasks = &state.tasks;
        tasks.record(&agent, "running", plain(TaskState::Working, "w".into()), CALL).await.unwrap();
        tasks.record(&agent, "submitted", submitted(TaskState::Working), CALL).await.unwrap();
        tasks.record(&agent, "ended", plain(TaskState::Completed, "done".into()), CALL).await.unwrap();
        state.sessions.set_context_id(session(&agent), "context").await.unwrap();
        keyed(state, &agent, "ended").await.unwrap().finish(&reply("kept")).await;
        let _running_key = keyed(state, &agent, "running").await.unwrap();
        let question = state.follow_ups.issue(&agent, question(), HOUR).await.unwrap().id;
        Self { agent, question, _running_key }
    }

    /// Checks that everything is as before; of what has ended and is evictable only if `all`.
    async fn check(&self, state: &State, all: bool) {
        let (agent, tasks) = (&self.agent, &state.tasks);
        for id in ["running", "submitted"] {
            assert_eq!(tasks.find(agent, id).await.unwrap().expect(id).state, TaskState::Working);
        }
        let open = state.follow_ups.find(agent, &self.question).await.unwrap().unwrap();
        assert_eq!(open.state, FollowUpState::Pending);
        for key in ["ended", "running"] {
            assert!(keyed(state, agent, key).await.is_none(), "it would run twice");
        }
        if all {
            assert!(tasks.find(agent, "ended").await.unwrap().is_some());
            let expected = SessionPlace::Here { context_id: "context".into() };
            assert_eq!(state.sessions.place(session(agent)).await.unwrap(), expected);
            let repeat =
                state.idempotency.reserve(agent, (&CALLER, "a", "ended"), b"body", HOUR).await.unwrap();
            let Reservation::Repeat(repeat) = repeat else { panic!("ran twice") };
            assert_eq!(repeat.reply(free).await.unwrap().content.message, "kept");
        }
    }
}

/// The first request with a key; `None` if it is a repeat.
async fn keyed(state: &State, agent: &Arc<str>, key: &str) -> Option<FirstRequest> {
    match state.idempotency.reserve(agent, (&CALLER, "a", key), b"body", HOUR).await {
        Ok(Reservation::First(first)) => Some(first),
        Ok(Reservation::Repeat(_)) => None,
        Err(error) => panic!("{error:?}"),
    }
}

fn reply(message: &str) -> Reply {
    let mut outcome = outcome(&TaskState::Completed);
    outcome.content.message = message.to_owned();
    Ok(Arc::new(outcome))
}

#[tokio::test]
async fn large_answers_and_many_calls_forget_nothing_that_is_under_way() {
    let state = State::default();
    let (quiet, own) = (Underway::begin(&state, "quiet").await, Underway::begin(&state, "busy").await);
    let busy: Arc<str> = "busy".into();
    // Not even if the other agent holds the most.
    for number in 0..3 {
        let large = plain(TaskState::Completed, "x".repeat(15_000_000));
        state.tasks.record(&quiet.agent, &format!("large {number}"), large, CALL).await.unwrap();
        let large = reply(&"x".repeat(8_000_000));
        keyed(&state, &quiet.agent, &number.to_string()).await.unwrap().finish(&large).await;
    }
    for number in 0..6 {
        let large = plain(TaskState::Completed, "x".repeat(15_000_000));
        state.tasks.record(&busy, &format!("large {number}"), large, CALL).await.unwrap();
    }
    for number in 0..2 {
        let (answer, submitted_id) = ("x".repeat(15_000_000), format!("submitted {number}"));
        let large = TaskRecord { is_submitted: true, ..plain(TaskState::Completed, answer) };
        state.tasks.record(&busy, &submitted_id, large, CALL).await.unwrap();
        let ended =
            state.tasks.find(&busy, &submitted_id).await.unwrap().expect("never lost without a trace");
        assert!(ended.state.is_final());
    }
    for number in 0..100_000 {
        let small = plain(TaskState::Completed, "hello".into());
        state.tasks.record(&busy, &number.to_string(), small, CALL).await.unwrap();
    }
    for number in 0..400 {
        let answer = reply(&"x".repeat(100_000));
        keyed(&state, &busy, &number.to_string()).await.unwrap().finish(&answer).await;
    }
    for number in 0..1000 {
        let id = number.to_string();
        state
            .sessions
            .set_context_id(SessionId { id: &id, ..session(&busy) }, &"c".repeat(20_000))
            .await
            .unwrap();
        let followed = state.follow_ups.issue(&busy, question(), HOUR).await.unwrap();
        claimed(&state.follow_ups, &busy, &followed.id.to_string()).await.mark_used().await;
    }
    quiet.check(&state, true).await;
    own.check(&state, false).await;
    let evictions = |agent: &str| {
        let quota = state.quotas.find(agent).unwrap();
        QuotaKind::ALL.map(|kind| quota.usage(kind).evictions.load(Relaxed))
    };
    assert_eq!(evictions("quiet"), [0; 6]);
    let [tasks, _, follow_ups, sessions, keys, replies] = evictions("busy");
    assert!(tasks > 0 && sessions > 0 && replies > 0, "evictions are counted");
    assert_eq!((follow_ups, keys), (0, 0));
}

#[tokio::test]
async fn without_room_for_what_is_under_way_requests_are_refused_and_say_why() {
    let quotas = Quotas::new(4 << 20);
    let store: Arc<dyn StateStore> = Arc::new(MemoryStore::new(&quotas));
    let state = State::new(&store, &quotas, &alone());
    let quiet = Underway::begin(&state, "quiet").await;
    let busy: Arc<str> = "busy".into();
    let quota = quotas.agent(&busy);
    let mut running = Vec::new();
    let refused = loop {
        let key = running.len().to_string();
        match state.idempotency.reserve(&busy, (&CALLER, "a", &key), b"body", HOUR).await {
            Ok(Reservation::First(first)) => running.push(first),
            Ok(Reservation::Repeat(_)) => panic!("a new key"),
            Err(error) => break error,
        }
    };
    assert_eq!((refused.info.code, refused.reached_agent), (Code::Busy, false));
    assert!(refused.message.contains("idempotency keys") && refused.message.contains("limits.memory"));
    // Every one of them can end.
    for first in running {
        first.finish(&reply("done")).await;
    }
    assert!(keyed(&state, &busy, "0").await.is_none(), "its two minutes are not over");
    let refused = loop {
        match quota.reserve(CallKind::Call, &Caller::default()) {
            Ok(room) => drop((state.follow_ups.issue(&busy, question(), HOUR).await.unwrap(), room)),
            Err(error) => break error,
        }
    };
    assert_eq!((refused.info.code, refused.reached_agent), (Code::Busy, false), "before the agent runs");
    assert!(refused.message.contains("open questions"), "{}", refused.message);
    quiet.check(&state, true).await;
    drop(quota.reserve(CallKind::Answer, &Caller::default()).expect("an answer ends a question"));
    drop(quotas.find("quiet").unwrap().reserve(CallKind::Submission, &Caller::default()).unwrap());
}

#[tokio::test]
async fn a_call_that_was_admitted_can_always_record_its_task() {
    let quotas = Quotas::new(0);
    let store: Arc<dyn StateStore> = Arc::new(MemoryStore::new(&quotas));
    let (state, agent): (_, Arc<str>) = (State::new(&store, &quotas, &alone()), "a".into());
    let quota = quotas.agent(&agent);
    let calls: Vec<_> =
        std::iter::from_fn(|| quota.reserve(CallKind::Answer, &Caller::default()).ok()).collect();
    assert!(calls.len() >= 256, "{}", calls.len());
    let id = |number: usize| format!("{number:036}");
    for state_now in [TaskState::Working, TaskState::Completed] {
        for number in 0..calls.len() {
            let large = plain(state_now.clone(), "x".repeat(100_000));
            let large = TaskRecord { is_submitted: number % 2 == 0, ..large };
            state.tasks.record(&agent, &id(number), large, CALL).await.unwrap();
        }
        let mut without_content = 0;
        for number in 0..calls.len() {
            // What has ended may be evicted later.
            let Some(found) = state.tasks.find(&agent, &id(number)).await.unwrap() else {
                assert!(state_now.is_final(), "a running task is never lost");
                continue;
            };
            assert_eq!(found.state, state_now);
            match &state.tasks.reply(&agent, &id(number), free).await.unwrap().unwrap() {
                Ok(outcome) => without_content += usize::from(outcome.content.message.is_empty()),
                Err(error) => assert_eq!((error.info.code, state_now.is_final()), (Code::TooLarge, true)),
            }
        }
        assert_eq!(without_content > 0, !state_now.is_final());
    }
    drop(calls);
}

#[tokio::test]
async fn a_running_call_counts_once_so_that_as_many_run_as_documented() {
    let quotas = Quotas::new(0);
    let store: Arc<dyn StateStore> = Arc::new(MemoryStore::new(&quotas));
    let (state, agent): (_, Arc<str>) = (State::new(&store, &quotas, &alone()), "a".into());
    let quota = quotas.agent(&agent);
    let mut calls = Vec::new();
    while let Ok(mut room) = state.reserve(&quota, CallKind::Call, &Caller::default()) {
        let (id, running) = (Uuid::new_v4().to_string(), plain(TaskState::Working, "working".into()));
        state.tasks.record(&agent, &id, running, CALL).await.unwrap();
        room.mark_recorded(false);
        calls.push((id, room));
    }
    assert_eq!(calls.len(), 224, "docs/src/protocol.md, section Limits");
    for (id, room) in calls {
        let asks = TaskRecord { is_submitted: true, ..plain(TaskState::InputRequired, "which?".into()) };
        state.tasks.record(&agent, &id, asks, CALL).await.expect("each of them may ask a question");
        state.follow_ups.issue(&agent, question(), HOUR).await.unwrap();
        drop(room);
    }
}

#[tokio::test]
async fn what_is_no_longer_protected_does_not_refuse_calls() {
    let quotas = Quotas::new(0);
    let store: Arc<dyn StateStore> = Arc::new(MemoryStore::new(&quotas));
    let (state, agent): (_, Arc<str>) = (State::new(&store, &quotas, &alone()), "a".into());
    let quota = quotas.agent(&agent);
    while quota.reserve(CallKind::Call, &Caller::default()).is_ok() {
        state.follow_ups.issue(&agent, question(), Duration::from_secs(2)).await.unwrap();
    }
    // Without a write and without a sweep.
    let reserved = async {
        while state.reserve(&quota, CallKind::Call, &Caller::default()).is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), reserved).await.expect("their time is over");
}

#[tokio::test]
async fn a_running_task_for_which_there_is_no_room_is_refused_and_a_recorded_one_can_end() {
    let quotas = Quotas::new(0);
    let store: Arc<dyn StateStore> = Arc::new(MemoryStore::new(&quotas));
    let (state, agent): (_, Arc<str>) = (State::new(&store, &quotas, &alone()), "a".into());
    let id = |number: usize| format!("{number:01000}");
    let record = async |number, state_now, submitted| {
        let mut outcome = outcome(&state_now);
        outcome.task.id = Some(id(number));
        let reply = Ok(Arc::new(outcome));
        let record = TaskRecord { reply, is_submitted: submitted, ..plain(state_now, String::new()) };
        state.tasks.record(&agent, &id(number), record, CALL).await
    };
    for submitted in [false, true] {
        let (mut recorded, from) = (0, if submitted { 10_000 } else { 0 });
        let refused = loop {
            match record(from + recorded, TaskState::Working, submitted).await {
                Ok(_) => recorded += 1,
                Err(error) => break error,
            }
            assert!(recorded < 10_000, "never refused");
        };
        assert_eq!((refused.info.code, recorded > 50), (Code::Busy, true), "{recorded}");
        assert!(state.tasks.find(&agent, &id(from + recorded)).await.unwrap().is_none());
        for number in from..from + recorded {
            let found = state.tasks.find(&agent, &id(number)).await.unwrap().expect("it runs");
            assert_eq!(found.state, TaskState::Working);
        }
        // Its caller has the reply.
        if !submitted {
            record(recorded, TaskState::Completed, false).await.unwrap();
        }
        for number in from..from + recorded {
            record(number, TaskState::Completed, submitted).await.unwrap();
            let found = state.tasks.find(&agent, &id(number)).await.unwrap().unwrap();
            assert_eq!(found.state, TaskState::Completed);
        }
    }
}

/// Run with `--ignored --nocapture`. Prints what 100,000 calls, keys and follow-ups at one agent take.
#[tokio::test]
#[ignore = "a measurement"]
async fn memory_before_at_the_peak_and_after_many_calls_keys_and_follow_ups() {
    const TTL: Duration = Duration::from_secs(20);
    let state = State::default();
    let quiet = Underway::begin(&state, "quiet").await;
    let busy: Arc<str> = "busy".into();
    let quota = state.quotas.agent(&busy);
    let counted = || QuotaKind::ALL.map(|kind| quota.usage(kind).bytes.load(Relaxed)).iter().sum::<usize>();
    let print =
        |what: &str| eprintln!("{what}: {} KiB counted, {} KiB resident", counted() >> 10, resident());
    let (before, mut refused) = (resident(), 0);
    print("before");
    for number in 0..100_000 {
        let ended = plain(TaskState::Completed, "hello".into());
        let ended = TaskRecord { may_run_for: Duration::ZERO, ttl: TTL, ..ended };
        state.tasks.record(&busy, &number.to_string(), ended, CALL).await.unwrap();
    }
    print("100,000 calls");
    for number in 0..100_000 {
        match state
            .idempotency
            .reserve(&busy, (&CALLER, "a", &number.to_string()), b"body", Duration::ZERO)
            .await
        {
            Ok(Reservation::First(first)) => first.finish(&reply("hello")).await,
            Ok(Reservation::Repeat(_)) => panic!("a new key"),
            Err(_) => refused += 1,
        }
    }
    print("100,000 keys");
    for _ in 0..100_000 {
        refused += usize::from(state.follow_ups.issue(&busy, question(), HOUR).await.is_err());
    }
    print("100,000 follow-ups");
    let (counted_at_peak, peak) = (counted(), resident());
    eprintln!("refused: {refused}");
    quiet.check(&state, true).await;
    tokio::time::sleep(TTL).await;
    state.store.sweep().await;
    state.tasks.sweep().await;
    print("after the sweep (follow-ups and keys remain)");
    assert!((peak - before) << 10 <= counted_at_peak * 5 / 4, "entries are counted as allocated");
    assert_eq!(quota.usage(QuotaKind::Task).entries.load(Relaxed), 0);
}

/// The resident memory of this process, in KiB.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
