//! Actions of a replica beside another one.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::TryStreamExt as _;
use futures_util::future::{BoxFuture, FutureExt as _, ready};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use uuid::Uuid;

use super::{actions_in, reply, task};
use crate::a2a::model::{Part, TaskState};
use crate::a2a::tests::fake::{FakeAgent, error, ok};
use crate::action::actions::{Actions, CallableSkill};
use crate::action::adoption::{AbandonedTask, AdoptedLog};
use crate::action::follow_up;
use crate::action::progress::NoProgress;
use crate::action::progress::{ForwardError, Progress, ProgressEvent};
use crate::action::request::{CallOptions, FollowUpAnswer, Invocation, Meta};
use crate::caller::Caller;
use crate::reply::Reply;
use crate::state::follow_ups::OpenQuestion;
use crate::state::peers::{ClaimStatus, Holder, InstanceId, Liveness, Peers};
use crate::state::quota::Quotas;
use crate::state::sessions::SessionId;
use crate::state::tasks::{Observer, Takeover};
use crate::state::tests::{FaultyStore, submitted};
use crate::state::{RecordKey, RecordKind, State, StateStore};

/// What one replica knows about the other.
#[derive(Debug, Clone, Copy)]
struct Known {
    liveness: Liveness,
    may_return: bool,
    holder: Holder,
}

#[derive(Debug)]
struct Pair {
    own: InstanceId,
    known: Mutex<Known>,
}

impl Pair {
    fn new() -> Arc<Self> {
        let known = Known { liveness: Liveness::Alive, may_return: true, holder: Holder::Nowhere };
        Arc::new(Self { own: Uuid::new_v4(), known: Mutex::new(known) })
    }

    fn set(&self, change: impl FnOnce(&mut Known)) {
        change(&mut self.known.lock().unwrap());
    }

    fn known(&self) -> Known {
        *self.known.lock().unwrap()
    }
}

impl Peers for Pair {
    fn instance(&self) -> InstanceId {
        self.own
    }

    fn is_alone(&self) -> bool {
        false
    }

    fn others(&self) -> usize {
        1
    }

    fn alone_for(&self) -> Option<Duration> {
        None
    }

    fn liveness(&self, _: InstanceId) -> BoxFuture<'_, Liveness> {
        ready(self.known().liveness).boxed()
    }

    fn may_return(&self, _: InstanceId) -> bool {
        self.known().may_return
    }

    fn claim_status(&self, _: InstanceId, _: Uuid) -> BoxFuture<'_, Option<ClaimStatus>> {
        ready(None).boxed()
    }

    fn find<'a>(&'a self, _: RecordKind, _: &'a RecordKey) -> BoxFuture<'a, Holder> {
        ready(self.known().holder).boxed()
    }

    fn record_changed(&self, _: InstanceId, _: RecordKind, _: &RecordKey) {}
}

/// A front door whose requests another replica does not run.
struct Front(ForwardError);

impl Progress for Front {
    fn report(&mut self, _: ProgressEvent) -> impl Future<Output = ()> + Send {
        ready(())
    }

    fn forward(&mut self, _: InstanceId) -> impl Future<Output = Result<Reply, ForwardError>> + Send {
        ready(Err(self.0))
    }
}

/// A replica with a launched agent, and the state of another one.
struct Replica {
    actions: Actions,
    peers: Arc<Pair>,
    other: State,
    agent: Arc<str>,
    store: Arc<FaultyStore>,
}

async fn replica(fake: &FakeAgent) -> Replica {
    let store = FaultyStore::shared();
    let (peers, quotas) = (Pair::new(), Quotas::new(64 << 20));
    let shared: Arc<dyn StateStore> = store.clone();
    let state = |peers: Arc<Pair>| State::new(&shared, &quotas, &(peers as Arc<dyn Peers>));
    let (own, other) = (Arc::new(state(Arc::clone(&peers))), state(Pair::new()));
    let card = json!({"name": "fake", "protocolVersion": "0.3"});
    let actions = actions_in(own, "command: [sleep]", fake, &card).await;
    Replica { actions, peers, other, agent: "fake".into(), store }
}

/// An agent that completes every task, in the context that it is asked for.
async fn obliging() -> FakeAgent {
    FakeAgent::start(|request| {
        let message = request.json()["params"]["message"].clone();
        match request.rpc_method().as_str() {
            "message/send" => ok(&task("completed", &message["contextId"], "done")),
            _ => error(-32001, "Task not found"),
        }
    })
    .await
}

fn of(caller: &Caller) -> CallOptions {
    CallOptions { caller: caller.clone(), ..CallOptions::default() }
}

async fn invoke(actions: &Actions, meta: Meta, options: &CallOptions, forward: ForwardError) -> Value {
    let request = Invocation { parts: vec![Part::Text("hi".to_owned())], meta };
    let skill = CallableSkill::whole_agent();
    reply(actions.invoke(&skill, request, options, &mut Front(forward)).await)
}

fn in_session(id: &str) -> Meta {
    Meta { session_id: Some(id.to_owned()), ..Meta::default() }
}

fn referring(task_id: &str) -> Meta {
    Meta { reference_task_ids: vec![task_id.to_owned()], ..Meta::default() }
}

fn code(reply: &Value) -> (&str, bool) {
    let info = &reply["error_info"];
    (info["code"].as_str().unwrap_or_default(), info["retryable"].as_bool().unwrap_or_default())
}

#[tokio::test]
async fn callers_share_no_conversation_where_requests_cannot_be_forwarded() {
    let fake = obliging().await;
    let Replica { actions, other, agent, .. } = replica(&fake).await;
    let callers = ["T/alice", "T/bob"].map(Caller::verified);
    for caller in &callers {
        other
            .sessions
            .place(SessionId { agent: &agent, caller, id: "s-1", is_launched: true })
            .await
            .unwrap();
    }
    let mut contexts = Vec::new();
    for caller in &callers {
        let done = invoke(&actions, in_session("s-1"), &of(caller), ForwardError::Unsupported).await;
        assert_eq!(done["status"], "COMPLETED", "{done}");
        contexts.push(done["task"]["context_id"].clone());
    }
    assert!(contexts[0] != contexts[1] && !contexts.contains(&json!("s-1")), "{contexts:?}");
}

#[tokio::test]
async fn a_request_that_arrived_before_the_other_replica_was_known_can_be_repeated() {
    let fake = obliging().await;
    let Replica { actions, other, agent, .. } = replica(&fake).await;
    let caller = Caller::verified("T/alice");
    let session = SessionId { agent: &agent, caller: &caller, id: "s-1", is_launched: true };
    other.sessions.place(session).await.unwrap();
    let refused = invoke(&actions, in_session("s-1"), &of(&caller), ForwardError::NotKept).await;
    assert_eq!(code(&refused), ("agent_unavailable", true), "{refused}");
    // The session has moved on while the request was forwarded.
    let options = CallOptions { is_forwarded: true, ..of(&caller) };
    let refused = invoke(&actions, in_session("s-1"), &options, ForwardError::NotKept).await;
    assert_eq!(code(&refused), ("agent_unavailable", true), "{refused}");
    assert_eq!(fake.count("message/send"), 0);
}

#[tokio::test]
async fn a_conversation_beside_that_of_its_owner_does_not_change_the_session() {
    let fake = FakeAgent::start(|_| ok(&task("completed", &json!("its-own"), "done"))).await;
    let Replica { actions, other, agent, .. } = replica(&fake).await;
    let caller = Caller::default();
    let session = SessionId { agent: &agent, caller: &caller, id: "s-1", is_launched: true };
    let before = other.sessions.place(session).await.unwrap();
    invoke(&actions, in_session("s-1"), &of(&caller), ForwardError::Unsupported).await;
    assert_eq!(other.sessions.place(session).await.unwrap(), before);
}

#[tokio::test]
async fn a_task_that_a_silent_replica_may_know_is_not_unknown() {
    let fake = obliging().await;
    let Replica { actions, peers, .. } = replica(&fake).await;
    let options = CallOptions::default();
    let look_up = async |forward| {
        let read = reply(actions.get_task("t-1", &options, &mut Front(forward)).await);
        let canceled = reply(actions.cancel_task("t-1", &options, &mut Front(forward)).await);
        (code(&read).0.to_owned(), code(&canceled).0.to_owned())
    };
    let both = |code: &str| (code.to_owned(), code.to_owned());
    assert_eq!(look_up(ForwardError::Silent).await, both("not_found"));
    peers.set(|known| known.holder = Holder::Unknown);
    assert_eq!(look_up(ForwardError::Silent).await, both("state_unavailable"));
    peers.set(|known| known.holder = Holder::At(Uuid::new_v4()));
    assert_eq!(look_up(ForwardError::Gone).await, both("state_unavailable"));
    let (read, canceled) = look_up(ForwardError::Silent).await;
    assert_eq!((&*read, &*canceled), ("state_unavailable", "outcome_unknown"), "the cancel may have run");
}

async fn answer(actions: &Actions, id: &str) -> Value {
    let parts = vec![Part::Text("blue".to_owned())];
    let answer = FollowUpAnswer { follow_up_id: id.to_owned(), parts };
    let mut front = Front(ForwardError::Gone);
    reply(follow_up::answer(actions, answer, &CallOptions::default(), &mut front).await)
}

#[tokio::test]
async fn a_question_that_a_silent_replica_may_know_is_not_unknown() {
    let fake = obliging().await;
    let Replica { actions, peers, .. } = replica(&fake).await;
    let id = Uuid::new_v4().to_string();
    assert_eq!(code(&answer(&actions, &id).await), ("not_found", false));
    peers.set(|known| known.holder = Holder::Unknown);
    assert_eq!(code(&answer(&actions, &id).await), ("state_unavailable", true));
}

#[tokio::test]
async fn a_question_of_a_launched_agent_is_lost_only_when_its_replica_no_longer_returns() {
    let fake = obliging().await;
    let Replica { actions, peers, other, agent, .. } = replica(&fake).await;
    let question = OpenQuestion {
        task_id: "t".into(),
        context_id: None,
        skill: None,
        output_modes: Arc::default(),
        fingerprint: "q".into(),
        caller: Caller::default(),
        is_local: true,
        run: None,
    };
    let id = other.follow_ups.issue(&agent, question, Duration::from_secs(60)).await.unwrap().id.to_string();
    peers.set(|known| known.liveness = Liveness::Dead);
    let refused = answer(&actions, &id).await;
    assert_eq!(code(&refused), ("agent_unavailable", true), "{refused}");
    peers.set(|known| known.may_return = false);
    let refused = answer(&actions, &id).await;
    assert_eq!(code(&refused), ("task_lost", false), "{refused}");
}

#[tokio::test]
async fn a_conversation_of_a_launched_agent_waits_for_a_replica_that_may_return() {
    let fake = obliging().await;
    let Replica { actions, peers, other, agent, .. } = replica(&fake).await;
    let caller = Caller::default();
    let session = SessionId { agent: &agent, caller: &caller, id: "s-1", is_launched: true };
    other.sessions.place(session).await.unwrap();
    peers.set(|known| known.liveness = Liveness::Dead);
    let refused = invoke(&actions, in_session("s-1"), &of(&caller), ForwardError::Gone).await;
    assert_eq!(code(&refused), ("agent_unavailable", true), "{refused}");
    peers.set(|known| known.may_return = false);
    let done = invoke(&actions, in_session("s-1"), &of(&caller), ForwardError::Gone).await;
    assert_eq!(done["status"], "COMPLETED", "{done}");
}

#[tokio::test]
async fn a_verified_caller_refers_only_to_its_own_tasks() {
    let fake = obliging().await;
    let Replica { actions, peers, .. } = replica(&fake).await;
    let [alice, bob] = ["T/alice", "T/bob"].map(Caller::verified);
    let call = async |meta, caller: &Caller| invoke(&actions, meta, &of(caller), ForwardError::Gone).await;
    let done = call(Meta::default(), &alice).await;
    let id = done["task"]["id"].as_str().unwrap();
    assert_eq!(call(referring(id), &alice).await["status"], "COMPLETED");
    let sent = fake.count("message/send");
    for (task, caller) in [(id, &bob), ("unknown", &bob), ("unknown", &alice)] {
        assert_eq!(code(&call(referring(task), caller).await), ("not_found", false));
    }
    peers.set(|known| known.holder = Holder::Unknown);
    assert_eq!(code(&call(referring("unknown"), &alice).await), ("state_unavailable", true));
    assert_eq!(fake.count("message/send"), sent, "the agent has not been asked");
    // Another replica has run it for this caller.
    peers.set(|known| known.holder = Holder::At(Uuid::new_v4()));
    assert_eq!(call(referring("elsewhere"), &alice).await["status"], "COMPLETED");
    assert_eq!(code(&call(referring(id), &bob).await), ("not_found", false));
    // Callers that share one identity may refer to tasks that nobody here knows.
    peers.set(|known| known.holder = Holder::Nowhere);
    assert_eq!(call(referring("unknown"), &Caller::default()).await["status"], "COMPLETED");
}

#[tokio::test]
async fn an_adopted_task_that_asks_keeps_its_follow_up_id_without_a_search_for_each_task() {
    let fake = FakeAgent::start(|_| ok(&task("input-required", &json!("c"), "which?"))).await;
    // How the bridge identifies the question.
    let first = replica(&fake).await;
    let asked = invoke(&first.actions, Meta::default(), &CallOptions::default(), ForwardError::Gone).await;
    let id = Uuid::try_parse(asked["data"]["follow_up_id"].as_str().unwrap()).unwrap();
    let question = first.actions.state.follow_ups.find(&first.agent, &id).await.unwrap().unwrap().question;
    // The other replica has stored the question, and died before it has recorded it with the task.
    let Replica { actions, peers, other, agent, store } = replica(&fake).await;
    let began =
        Observer { began: std::time::SystemTime::now(), is_lookup: false, takeover: Takeover::New, run: 0 };
    other.tasks.record(&agent, "t", submitted(TaskState::Working), began).await.unwrap();
    let issued = other.follow_ups.issue(&agent, question, Duration::from_secs(60)).await.unwrap();
    peers.set(|known| known.liveness = Liveness::Dead);
    let outline = actions.state.tasks.find_current(&agent, "t").await.unwrap().unwrap();
    let questions = actions.state.follow_ups.unsettled(&agent).try_collect().await.unwrap();
    let scans = store.scans.load(Relaxed);
    let admission = Arc::new(Semaphore::new(1)).acquire_owned().await.unwrap();
    let task = AbandonedTask { id: "t".to_owned(), outline, questions };
    let record = actions.adopt_task(&task, admission).await.unwrap();
    let log = AdoptedLog { progress: &mut NoProgress, link: None, reported: Vec::new() };
    actions.follow_adopted_task(task, record, log, || ()).await;
    let adopted = actions.state.tasks.find_current(&agent, "t").await.unwrap().unwrap();
    assert_eq!(adopted.state, TaskState::InputRequired);
    assert_eq!(adopted.follow_up.map(|follow_up| follow_up.id), Some(issued.id));
    assert_eq!(store.scans.load(Relaxed), scans, "the questions of all tasks are read once");
}
