//! The rules for every request, without an agent that answers.

use std::sync::LazyLock;
use std::sync::atomic::Ordering::Relaxed;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::request::Input;
use super::*;
use crate::action::actions::{CallShutdown, CallableSkill};
use crate::action::progress::NoProgress;
use crate::action::request::{Meta, ReplyMode, RequestBody};
use crate::agent::Predecessors;
use crate::config::CallLogging;
use crate::memory::{MemoryAccount, MemoryBudget};
use crate::process::child::ProcessHost;
use crate::state::peers::Death;
use crate::state::quota::{CallKind, QuotaKind};
use crate::state::tasks::{Observer, Takeover, TaskRecord};
use crate::state::tests::{FaultyStore, alone, question, quotas, submitted};
use crate::state::{RecordKind, State, StateStore};

static SHARED: LazyLock<Caller> = LazyLock::new(Caller::default);

/// The dispatcher of an agent that does not exist, with these lines in its configuration.
fn dispatcher(lines: &str) -> Dispatcher {
    dispatcher_in(Arc::default(), lines)
}

fn dispatcher_in(state: Arc<State>, lines: &str) -> Dispatcher {
    let text = format!(
        "nats: {{ url: 'nats://127.0.0.1:4222' }}\nagents: [{{ name: a, url: 'http://127.0.0.1:9', {lines} }}]"
    );
    let config = crate::config::parse(&text, "test", &|_| None).unwrap().agents.remove(0);
    let (http, skip_grace) = (crate::a2a::http_client().unwrap(), CancellationToken::new());
    let agent = Agent::start(
        config,
        &http,
        &ProcessHost::default(),
        skip_grace,
        Predecessors::default(),
        MemoryAccount::unlimited("a"),
    )
    .unwrap();
    let actions = Actions::new(
        Arc::clone(&agent.memory),
        Arc::clone(&agent.config),
        agent.live.clone(),
        state,
        mpsc::channel(1).0,
        CallShutdown::default(),
        agent.secrets.clone(),
    );
    Dispatcher::new(agent, actions, TaskTracker::new(), CallLogSetting::new(CallLogging::Off))
}

fn arrive(dispatcher: &Dispatcher, bytes: usize, body: &mut Bytes) -> Option<Arrival> {
    dispatcher.arrive(&"skill".into(), bytes, body)
}

#[tokio::test]
async fn a_panic_is_an_internal_error_after_which_the_agent_may_have_been_reached() {
    let dispatcher = dispatcher("");
    let work = async {
        // Not at the first poll, as in a call that waits for its agent.
        tokio::task::yield_now().await;
        assert!(dispatcher.agent.name.is_empty(), "a bug");
        Ok(())
    };
    let error = dispatcher.guarded(work).await.unwrap_err();
    assert_eq!(error.info.code, Code::Internal);
    assert!(error.reached_agent, "a repeated request must not run twice");
}

#[tokio::test]
async fn errors_do_not_show_the_agents_credentials() {
    let dispatcher = dispatcher("bearer_token: canary-bearer-1f0c");
    let failed = async { Err::<(), _>(ActionError::new(Code::TaskFailed, "Bearer canary-bearer-1f0c")) };
    assert_eq!(dispatcher.guarded(failed).await.unwrap_err().message, "Bearer ***");
}

#[tokio::test]
async fn a_call_whose_task_could_not_be_recorded_is_busy_before_it_reaches_the_agent() {
    let dispatcher = dispatcher("");
    let answer = || {
        let answer = FollowUpAnswer { follow_up_id: "unknown".to_owned(), parts: Vec::new() };
        let (operation, options) = (Operation::Answer(Input::Parsed(answer)), CallOptions::default());
        Request { operation, options, idempotency_key: None, permit: None }
    };
    let mut arrival = arrive(&dispatcher, 0, &mut Bytes::new()).unwrap();
    let unavailable = dispatcher.call(answer(), &mut arrival, &mut NoProgress).await.unwrap_err();
    assert_eq!(unavailable.info.code, Code::AgentUnavailable);
    let calls = exhaust(|| dispatcher.actions.reserve(CallKind::Answer, &SHARED));
    let refused = dispatcher.call(answer(), &mut arrival, &mut NoProgress).await.unwrap_err();
    assert_eq!((refused.info.code, refused.reached_agent), (Code::Busy, false));
    assert!(refused.message.contains("limits.memory"), "{}", refused.message);
    drop(calls);
    assert_eq!(
        dispatcher.call(answer(), &mut arrival, &mut NoProgress).await.unwrap_err().info.code,
        Code::AgentUnavailable
    );
}

#[tokio::test]
async fn submitted_tasks_that_do_not_end_leave_room_for_other_calls() {
    let dispatcher = dispatcher("");
    let call = async |mode| {
        let input = Input::Parsed(Invocation { parts: Vec::new(), meta: Meta::default() });
        let skill = Arc::new(CallableSkill::whole_agent());
        let operation = Operation::Invoke { action: "skill".into(), skill, input };
        let options = CallOptions { mode, ..CallOptions::default() };
        let request = Request { operation, options, idempotency_key: None, permit: None };
        let mut arrival = arrive(&dispatcher, 0, &mut Bytes::new()).unwrap();
        dispatcher.call(request, &mut arrival, &mut NoProgress).await.unwrap_err().info.code
    };
    let mut submitted = exhaust(|| dispatcher.actions.reserve(CallKind::Submission, &SHARED));
    submitted.iter_mut().for_each(|room| room.mark_recorded(true));
    assert_eq!(call(ReplyMode::Submit).await, Code::Busy);
    // It is admitted, and there is no agent.
    assert_eq!(call(ReplyMode::Final).await, Code::AgentUnavailable);
    assert_eq!(call(ReplyMode::Stream).await, Code::AgentUnavailable);
}

#[tokio::test]
async fn a_call_whose_running_task_is_recorded_no_longer_reserves_room_for_it() {
    let dispatcher = dispatcher("");
    let reserve = || dispatcher.actions.reserve(CallKind::Answer, &SHARED);
    let mut tracked = TrackedCall {
        dispatcher: &dispatcher,
        progress: &mut NoProgress,
        action: "skill".into(),
        log_entry: None,
        first_token: None,
        began: Instant::now(),
        pending: None,
        room: Some(reserve().unwrap()),
        accepted: None,
    };
    // All of the room for running tasks, which is a quarter of the agent's share.
    let quota = dispatcher.actions.state.quotas.find("a").unwrap();
    quota.usage(QuotaKind::Task).protected_bytes.store((512 << 20) / 4 - 2000, Relaxed);
    reserve().unwrap_err();
    tracked.recorded(false);
    drop(reserve().unwrap());
    drop(tracked);
    drop(reserve().unwrap());
}

#[tokio::test]
async fn the_charge_for_a_body_ends_when_the_body_is_parsed() {
    let dispatcher = dispatcher("");
    let mut arrival = arrive(&dispatcher, 1 << 20, &mut Bytes::new()).unwrap();
    assert!(dispatcher.agent.memory.used() > 1 << 20);
    let input = Input::Body(RequestBody::new(Bytes::from_static(b"hello"), None));
    let skill = Arc::new(CallableSkill::whole_agent());
    let operation = Operation::Invoke { action: "skill".into(), skill, input };
    let (options, mut progress) = (CallOptions::default(), NoProgress);
    let performed = dispatcher.perform(operation, &mut arrival, &options, &mut progress);
    assert_eq!(performed.await.unwrap_err().info.code, Code::AgentUnavailable);
    assert!(dispatcher.agent.memory.used() < 1 << 16, "the call may go on for hours");
}

/// As many permits as there are.
fn exhaust<P>(take: impl Fn() -> Result<P, ActionError>) -> Vec<P> {
    std::iter::from_fn(|| take().ok()).take(100_000).collect()
}

#[tokio::test]
async fn calls_lookups_repeats_cancels_and_cards_have_limits_of_their_own() {
    let dispatcher = dispatcher("max_in_flight: 1");
    let permits = &dispatcher.permits;
    let call = dispatcher.permit(&SHARED).now_or_never().unwrap().unwrap();
    assert!(dispatcher.permit(&SHARED).now_or_never().is_none(), "that was the only permit");
    let (repeats, lookups) = (exhaust(|| permits.repeat(&SHARED)), exhaust(|| permits.lookup(&SHARED)));
    let refused = permits.lookup(&SHARED).unwrap_err();
    assert_eq!(refused.info.code, Code::Busy);
    assert!(refused.message.contains("lookups"), "{}", refused.message);
    drop(permits.cancel(&SHARED).expect("a task can be canceled while lookups hang"));
    let read_card = || {
        let mut arrival = arrive(&dispatcher, 0, &mut Bytes::new()).unwrap();
        dispatcher.read_card(&mut arrival, &SHARED, || Ok(())).map(|()| arrival)
    };
    read_card().expect("the card needs no agent");
    let cancels = exhaust(|| permits.cancel(&SHARED));
    read_card().unwrap();
    drop((call, repeats, lookups, cancels));
    let mut cards = exhaust(read_card);
    assert_eq!(read_card().unwrap_err().info.code, Code::Busy);
    assert_eq!(dispatcher.agent.calls.outcomes()["busy"], 2, "the refusals count");
    drop(permits.lookup(&SHARED).unwrap());
    cards.pop();
    let last = read_card().unwrap();
    permits.card(&SHARED).expect_err("a request holds its permit until its reply is sent");
    drop(last);
    permits.card(&SHARED).unwrap();
}

#[tokio::test]
async fn a_request_without_memory_is_busy_and_too_many_requests_get_no_reply() {
    let mut dispatcher = dispatcher("max_in_flight: 1");
    dispatcher.arrivals = Arrivals::new(MemoryBudget::new((4 << 20) + (64 << 10)).account("a"), 1);
    let first = arrive(&dispatcher, 1 << 20, &mut Bytes::new()).unwrap();
    first.check().unwrap();
    let second = arrive(&dispatcher, 1 << 20, &mut Bytes::new()).unwrap();
    assert_eq!(second.check().unwrap_err().info.code, Code::Busy);
    drop(first);
    assert!(
        arrive(&dispatcher, 1 << 20, &mut Bytes::new()).unwrap().check().is_ok(),
        "the first has released its memory"
    );
    let all: Vec<_> = std::iter::from_fn(|| arrive(&dispatcher, 0, &mut Bytes::new())).take(10_000).collect();
    assert!(all.len() < 10_000);
    drop((second, all));
    arrive(&dispatcher, 0, &mut Bytes::new()).unwrap();
}

/// A state in a store that replicas share.
fn shared(store: &Arc<FaultyStore>) -> Arc<State> {
    let store = Arc::clone(store) as Arc<dyn StateStore>;
    Arc::new(State::new(&store, &quotas(), &alone()))
}

#[tokio::test(start_paused = true)]
async fn all_tasks_are_read_at_the_start_and_after_a_death_and_rarely_otherwise() {
    let store = FaultyStore::shared();
    let dispatcher = Arc::new(dispatcher_in(shared(&store), ""));
    let (deaths, receiver) = tokio::sync::broadcast::channel(16);
    let work = TaskTracker::new().spawn(maintenance::run(Arc::downgrade(&dispatcher), receiver));
    // Two scans a search: tasks and follow-ups.
    let searches_within = async |seconds| {
        let before = store.scans.load(Relaxed);
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        (store.scans.load(Relaxed) - before).div_ceil(2)
    };
    assert_eq!(searches_within(5).await, 1, "at the start");
    let searches = searches_within(3600).await;
    assert!((5..=12).contains(&searches), "{searches}");
    deaths.send(Death { instance: uuid::Uuid::new_v4(), is_orderly: false }).unwrap();
    let searches = searches_within(60).await;
    assert!((2..=3).contains(&searches), "{searches}");
    let searches = searches_within(3600).await;
    assert!(searches <= 12, "{searches}");
    // The store was away.
    store.is_down.store(true, Relaxed);
    assert_eq!(searches_within(60).await, 0);
    store.is_down.store(false, Relaxed);
    assert!(searches_within(5).await > 0);
    work.abort();
}

#[tokio::test]
async fn a_question_that_takes_long_to_expire_does_not_delay_an_adoption() {
    let store = FaultyStore::shared();
    let (state, gone) = (shared(&store), shared(&store));
    let agent: Arc<str> = "a".into();
    state.follow_ups.issue(&agent, question(), Duration::ZERO).await.unwrap();
    let began =
        Observer { began: std::time::SystemTime::now(), is_lookup: false, takeover: Takeover::New, run: 0 };
    let task = submitted(crate::a2a::model::TaskState::Working);
    gone.tasks.record(&agent, "t", task, began).await.unwrap();
    *store.hangs.lock().unwrap() = Some(RecordKind::FollowUp);
    let dispatcher = Arc::new(dispatcher_in(Arc::clone(&state), ""));
    let (_deaths, receiver) = tokio::sync::broadcast::channel(16);
    let work = TaskTracker::new().spawn(maintenance::run(Arc::downgrade(&dispatcher), receiver));
    let adopted = async {
        while state.tasks.find_current(&agent, "t").await.unwrap().unwrap().owner != state.peers.instance() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), adopted).await.expect("the task is adopted");
    work.abort();
}

/// A replica with tasks in a shared store, which is gone. Returns its id.
async fn gone_replica(store: &Arc<FaultyStore>, tasks: usize, is_local: bool) -> uuid::Uuid {
    let gone = shared(store);
    let agent: Arc<str> = "a".into();
    for number in 0..tasks {
        let began = Observer {
            began: std::time::SystemTime::now(),
            is_lookup: false,
            takeover: Takeover::New,
            run: 0,
        };
        let task = TaskRecord { is_local, ..submitted(crate::a2a::model::TaskState::Working) };
        gone.tasks.record(&agent, &format!("t{number}"), task, began).await.unwrap();
    }
    gone.peers.instance()
}

/// How many of the tasks `t0` to `t<tasks - 1>` this replica owns.
async fn owned(state: &State, tasks: usize) -> usize {
    let (agent, mut owned): (Arc<str>, usize) = ("a".into(), 0);
    for number in 0..tasks {
        let task = state.tasks.find_current(&agent, &format!("t{number}")).await.unwrap();
        owned += usize::from(task.is_some_and(|task| task.owner == state.peers.instance()));
    }
    owned
}

#[tokio::test(start_paused = true)]
async fn a_search_for_tasks_that_breaks_is_repeated_soon() {
    let store = FaultyStore::shared();
    let (state, gone) = (shared(&store), gone_replica(&store, 8, false).await);
    let dispatcher = Arc::new(dispatcher_in(Arc::clone(&state), ""));
    let (deaths, receiver) = tokio::sync::broadcast::channel(16);
    // The search at the start breaks, too.
    store.broken_scans.store(4, Relaxed);
    deaths.send(Death { instance: gone, is_orderly: false }).unwrap();
    let work = TaskTracker::new().spawn(maintenance::run(Arc::downgrade(&dispatcher), receiver));
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert_eq!((owned(&state, 8).await, store.broken_scans.load(Relaxed)), (8, 0));
    work.abort();
}

#[tokio::test(start_paused = true)]
async fn local_tasks_are_lost_a_minute_after_the_death_however_late_they_are_found() {
    let store = FaultyStore::shared();
    let (state, gone) = (shared(&store), gone_replica(&store, 8, true).await);
    let dispatcher = Arc::new(dispatcher_in(Arc::clone(&state), ""));
    let (deaths, receiver) = tokio::sync::broadcast::channel(16);
    store.broken_scans.store(usize::MAX, Relaxed);
    deaths.send(Death { instance: gone, is_orderly: false }).unwrap();
    let work = TaskTracker::new().spawn(maintenance::run(Arc::downgrade(&dispatcher), receiver));
    tokio::time::sleep(Duration::from_secs(50)).await;
    assert_eq!(owned(&state, 8).await, 0);
    store.broken_scans.store(0, Relaxed);
    tokio::time::sleep(Duration::from_secs(15)).await;
    assert_eq!(owned(&state, 8).await, 8);
    work.abort();
}

#[tokio::test(start_paused = true)]
async fn thousands_of_tasks_are_adopted_within_seconds_and_the_store_gets_few_writes_at_a_time() {
    const TASKS: usize = 3000;
    let store = FaultyStore::shared();
    let gone = gone_replica(&store, TASKS, false).await;
    *store.latency.lock().unwrap() = Duration::from_millis(10);
    let replicas = [shared(&store), shared(&store)];
    let work = replicas.each_ref().map(|state| {
        let dispatcher = Arc::new(dispatcher_in(Arc::clone(state), ""));
        let (deaths, receiver) = tokio::sync::broadcast::channel(16);
        deaths.send(Death { instance: gone, is_orderly: false }).unwrap();
        let work = TaskTracker::new().spawn(maintenance::run(Arc::downgrade(&dispatcher), receiver));
        (dispatcher, deaths, work)
    });
    tokio::time::sleep(Duration::from_secs(5)).await;
    let [one, other] = [owned(&replicas[0], TASKS).await, owned(&replicas[1], TASKS).await];
    assert_eq!(one + other, TASKS, "{one} and {other}");
    assert!(one.min(other) > TASKS / 4, "{one} and {other}");
    let busiest = store.most_under_way.load(Relaxed);
    assert!((4..=64).contains(&busiest), "{busiest} writes of two replicas at the same time");
    work.into_iter().for_each(|(.., work)| work.abort());
}
