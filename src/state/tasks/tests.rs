//! Records of tasks, at one replica and at several.

use futures_util::FutureExt as _;

use super::super::tests::{alone, free, memory_store, quotas};
use super::super::{SWEEP_INTERVAL, State};
use super::*;
use crate::offload;
use crate::reply::outcome::ReplyStatus;

const HOUR: Duration = Duration::from_secs(3600);

fn task(state: TaskState, message: &str) -> TaskRecord {
    let task = TaskRef { id: Some("t".into()), context_id: None, agent: "a".into(), skill: None };
    let content = ReplyContent { message: message.to_owned(), ..ReplyContent::default() };
    TaskRecord {
        reply: Ok(Arc::new(Outcome::new(ReplyStatus::from(&state), content, task))),
        state,
        follow_up: None,
        is_submitted: false,
        revision: 0,
        caller: Default::default(),
        owner: Default::default(),
        is_local: false,
        seen_at: SystemTime::now(),
        may_run_for: Duration::ZERO,
        ttl: HOUR,
        open_for: Duration::ZERO,
        run: None,
    }
}

fn submitted(state: TaskState, message: &str) -> TaskRecord {
    TaskRecord { is_submitted: true, ..task(state, message) }
}

fn replicas() -> (Tasks, Tasks, Arc<str>) {
    let store = memory_store();
    (Tasks::new(&store, &quotas(), &alone()), Tasks::new(&store, &quotas(), &alone()), "a".into())
}

async fn reply_of(tasks: &Tasks, agent: &Arc<str>) -> Reply {
    tasks.reply(agent, "t", free).await.unwrap().unwrap()
}

async fn message(tasks: &Tasks, agent: &Arc<str>) -> String {
    reply_of(tasks, agent).await.unwrap().content.message.clone()
}

#[tokio::test]
async fn the_task_of_a_plain_call_stays_in_its_process() {
    let (one, other, agent) = replicas();
    let began = Observer { began: SystemTime::now(), is_lookup: false, takeover: Takeover::New, run: 0 };
    one.record(&agent, "t", task(TaskState::Working, "w"), began).await.unwrap();
    assert_eq!(message(&one, &agent).await, "w");
    assert!(other.find(&agent, "t").await.unwrap().is_none());
    assert!(one.find(&"b".into(), "t").await.unwrap().is_none(), "another agent's task");
}

#[tokio::test]
async fn a_submitted_task_is_known_at_every_replica_until_its_end() {
    let (one, other, agent) = replicas();
    let began = Observer { began: SystemTime::now(), is_lookup: false, takeover: Takeover::New, run: 0 };
    one.record(&agent, "t", task(TaskState::Working, "named"), began).await.unwrap();
    let recorded = one.record(&agent, "t", submitted(TaskState::Working, "w"), began).await.unwrap();
    assert!(
        matches!(recorded, RecordResult::Written { previous: Some(previous), .. } if !previous.is_submitted)
    );
    assert!(other.find_seen_here(&agent, "t").await.unwrap().is_none(), "a new call does not read the store");
    let found = other.find(&agent, "t").await.unwrap().unwrap();
    assert_eq!((&*message(&other, &agent).await, found.is_submitted), ("w", true));
    other.record(&agent, "t", submitted(TaskState::Canceled, "c"), began).await.unwrap();
    let late = one.record(&agent, "t", submitted(TaskState::Canceled, "late"), began).await.unwrap();
    assert!(matches!(late, RecordResult::Kept));
    assert_eq!(message(&one, &agent).await, "c");
}

#[tokio::test]
async fn the_first_end_of_a_task_stays_but_its_id_can_be_reused() {
    let (one, _, agent) = replicas();
    let began = Observer { began: SystemTime::now(), is_lookup: false, takeover: Takeover::New, run: 0 };
    one.record(&agent, "t", task(TaskState::Completed, "first"), began).await.unwrap();
    let again = one.record(&agent, "t", task(TaskState::Working, "older lookup"), began).await.unwrap();
    assert!(matches!(again, RecordResult::Kept));
    let later = Observer {
        began: SystemTime::now() + Duration::from_millis(1),
        is_lookup: false,
        takeover: Takeover::New,
        run: 0,
    };
    let next = one.record(&agent, "t", task(TaskState::Working, "next call"), later).await.unwrap();
    assert!(matches!(next, RecordResult::Written { .. }));
}

#[tokio::test]
async fn a_lookup_does_not_undo_a_newer_record() {
    let (one, _, agent) = replicas();
    let call = Observer { began: SystemTime::now(), is_lookup: false, takeover: Takeover::New, run: 0 };
    let lookup = Observer { began: SystemTime::now(), is_lookup: true, takeover: Takeover::None, run: 0 };
    one.record(&agent, "t", submitted(TaskState::InputRequired, "which?"), call).await.unwrap();
    let older = one.record(&agent, "t", task(TaskState::Working, "older"), lookup).await.unwrap();
    assert!(matches!(older, RecordResult::Kept));
    assert_eq!(message(&one, &agent).await, "which?");
    let end = one.record(&agent, "t", task(TaskState::Completed, "end"), lookup).await.unwrap();
    assert!(matches!(end, RecordResult::Written { .. }));
    assert!(one.find(&agent, "t").await.unwrap().unwrap().is_submitted, "once submitted, always submitted");
}

#[tokio::test]
async fn a_lookup_that_sees_the_end_of_a_task_notifies_the_call_that_follows_it() {
    let (one, _, agent) = replicas();
    let began = SystemTime::now();
    let (call, lookup) = (
        Observer { began, is_lookup: false, takeover: Takeover::New, run: 0 },
        Observer { began, is_lookup: true, takeover: Takeover::None, run: 0 },
    );
    let (here, stored, own) = (
        one.subscribe_to_end(&agent, "here"),
        one.subscribe_to_end(&agent, "stored"),
        one.subscribe_to_end(&agent, "own"),
    );
    one.record(&agent, "here", task(TaskState::Working, "w"), call).await.unwrap();
    one.record(&agent, "stored", submitted(TaskState::Working, "w"), call).await.unwrap();
    one.record(&agent, "own", task(TaskState::Completed, "seen by its call"), call).await.unwrap();
    let notified =
        || [&here, &stored, &own].map(|subscription| subscription.ended().now_or_never().is_some());
    assert_eq!(
        notified(),
        [false, false, false],
        "a call needs no notification of an end that it has seen itself"
    );
    one.record(&agent, "here", task(TaskState::Canceled, "c"), lookup).await.unwrap();
    assert_eq!(notified(), [true, false, false]);
    one.record(&agent, "stored", task(TaskState::Canceled, "c"), lookup).await.unwrap();
    assert_eq!(notified(), [true, true, false]);
}

#[tokio::test]
async fn an_untracked_task_says_why_unless_it_has_ended() {
    let (one, _, agent) = replicas();
    let began = Observer { began: SystemTime::now(), is_lookup: false, takeover: Takeover::New, run: 0 };
    let why = ActionError::new(Code::OutcomeUnknown, "cut off");
    one.record(&agent, "t", submitted(TaskState::Working, "w"), began).await.unwrap();
    one.mark_untracked(&agent, "t", &why, 0).await;
    assert_eq!(reply_of(&one, &agent).await.unwrap_err().message, "cut off");
    one.record(&agent, "t", submitted(TaskState::Completed, "done"), began).await.unwrap();
    one.mark_untracked(&agent, "t", &why, 0).await;
    assert_eq!(message(&one, &agent).await, "done");
}

#[tokio::test]
async fn a_task_expires() {
    let (one, _, agent) = replicas();
    let began = Observer { began: SystemTime::now(), is_lookup: false, takeover: Takeover::New, run: 0 };
    let short =
        |may_run_for| TaskRecord { may_run_for, ttl: Duration::ZERO, ..task(TaskState::Working, "w") };
    one.record(&agent, "t", short(HOUR), began).await.unwrap();
    assert!(one.find(&agent, "t").await.unwrap().is_some());
    one.record(&agent, "t", short(Duration::ZERO), began).await.unwrap();
    assert!(one.find(&agent, "t").await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn expired_tasks_are_freed_even_without_writes() {
    let (state, agent) = (State::default(), "a".into());
    let began = Observer { began: SystemTime::now(), is_lookup: false, takeover: Takeover::New, run: 0 };
    let short = TaskRecord { ttl: Duration::from_nanos(1), ..task(TaskState::Completed, "done") };
    state.tasks.record(&agent, "t", short, began).await.unwrap();
    assert_eq!(state.tasks.local().rows(), 1);
    let _ = tokio::time::timeout(2 * SWEEP_INTERVAL, state.sweep_periodically()).await;
    assert_eq!(state.tasks.local().rows(), 0);
}

#[test]
fn a_record_is_protected_while_a_call_follows_the_task_or_a_caller_can_answer() {
    let (call, lookup) = (
        Observer { began: SystemTime::now(), is_lookup: false, takeover: Takeover::New, run: 0 },
        Observer { began: SystemTime::now(), is_lookup: true, takeover: Takeover::None, run: 0 },
    );
    let open = |state| TaskRecord { open_for: HOUR, ..task(state, "text") };
    let working = open(TaskState::Working);
    let protected = |record: &TaskRecord, previous: Option<&TaskRecord>, observer| {
        !record.lifetime(previous.map(TaskRecord::outline).as_ref(), observer).protected_for.is_zero()
    };
    assert!(protected(&working, None, call));
    assert!(protected(&working, Some(&working), lookup), "the call still follows it");
    let error = ActionError::new(Code::OutcomeUnknown, "cut off");
    let untracked = TaskRecord { reply: Err(error), ..working.clone() };
    assert!(!protected(&untracked, Some(&working), call));
    assert!(!protected(&working, Some(&untracked), lookup), "a lookup does not follow it");
    let follow_up = FollowUp { id: Uuid::nil(), expires_at: "soon".into() };
    let question = TaskRecord { follow_up: Some(follow_up), ..open(TaskState::InputRequired) };
    assert!(protected(&question, Some(&untracked), lookup));
    assert!(!protected(&open(TaskState::Completed), Some(&question), call));
}

#[tokio::test]
async fn large_records_are_read_and_written_as_offloaded_work() {
    let (one, other, _) = replicas();
    let agent: Arc<str> = "offloaded".into();
    let began = Observer { began: SystemTime::now(), is_lookup: false, takeover: Takeover::New, run: 0 };
    let (large, text) = ("large", "x".repeat(1 << 20));
    one.record(&agent, large, submitted(TaskState::Working, &text), began).await.unwrap();
    one.record(&agent, "small", submitted(TaskState::Working, "w"), began).await.unwrap();
    let turn = offload::hold_turn(&agent);
    assert!(other.find(&agent, "small").now_or_never().is_some());
    assert!(other.reply(&agent, "small", free).now_or_never().is_some());
    assert!(other.find(&agent, large).now_or_never().is_none());
    assert!(other.reply(&agent, large, free).now_or_never().is_none());
    let write = one.record(&agent, "new", submitted(TaskState::Working, &text), began);
    assert!(write.now_or_never().is_none());
    drop(turn);
    assert_eq!(other.find(&agent, large).await.unwrap().unwrap().state, TaskState::Working);
}

#[tokio::test]
async fn the_reply_of_a_task_is_charged_before_it_is_decoded_and_its_outline_is_not() {
    let (one, other, agent) = replicas();
    let began = Observer { began: SystemTime::now(), is_lookup: false, takeover: Takeover::New, run: 0 };
    let text = "x".repeat(1 << 20);
    one.record(&agent, "t", submitted(TaskState::Working, &text), began).await.unwrap();
    one.record(&agent, "local", task(TaskState::Completed, &text), began).await.unwrap();
    let turn = offload::hold_turn(&agent);
    let refuse = |bytes| if bytes < 1 << 20 { Ok(()) } else { Err(OutOfMemory) };
    let refused = other.reply(&agent, "t", refuse).now_or_never().expect("nothing is decoded").unwrap_err();
    assert_eq!(refused.info.code, Code::Busy);
    assert_eq!(one.reply(&agent, "local", refuse).await.unwrap_err().info.code, Code::Busy);
    drop(turn);
    let outline = other.find(&agent, "t").await.unwrap().unwrap();
    assert_eq!(outline.task().unwrap().id.as_deref(), Some("t"));
    let charged = std::cell::Cell::new(0);
    let charge = |bytes| {
        charged.set(bytes);
        Ok(())
    };
    let reply = other.reply(&agent, "t", charge).await.unwrap().unwrap();
    assert_eq!(charged.get(), reply::allocated(&reply), "exactly, in the end");
}
