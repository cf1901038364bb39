//! Responses that the memory budget refuses.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::{actions_with, invoke, invoke_in};
use crate::a2a::model::{Part, TaskState};
use crate::a2a::tests::fake::{FakeAgent, FakeResponse, NO_RESPONSE, ReceivedRequest, error, ok, v01};
use crate::action::actions::CallableSkill;
use crate::action::files::ResolvedParts;
use crate::action::params::Template;
use crate::action::progress::{NoProgress, Progress, ProgressEvent};
use crate::action::request::{
    CallOptions, Invocation, MessageContent, Meta, ReplyMemory, ReplyMode, RequestBody,
};
use crate::memory::{MemoryAccount, MemoryBudget};
use crate::reply::error::Code;
use crate::reply::outcome::{Outcome, ReplyContent, ReplyStatus, TaskRef};
use crate::state::tasks::{Observer, Takeover, TaskRecord};

const MIB: usize = 1 << 20;
const HOUR: Duration = Duration::from_secs(3600);
const CARD: &str = r#"{"name": "fake", "protocolVersion": "0.3", "capabilities": {"streaming": true}}"#;

/// An account that gets at most `bytes`.
fn account(bytes: usize) -> Arc<MemoryAccount> {
    // A half of the budget is for calls, and a half of that for one agent.
    MemoryBudget::new(4 * bytes as u64).account("fake")
}

fn result(request: &ReceivedRequest, result: &Value) -> Value {
    json!({"jsonrpc": "2.0", "id": request.json()["id"], "result": result})
}

/// Responds with an artifact of this many bytes.
fn respond(request: &ReceivedRequest, size: usize) -> FakeResponse {
    let artifact = json!({"artifactId": "a", "parts": [{"kind": "text", "text": "x".repeat(size)}]});
    match request.rpc_method().as_str() {
        "message/send" => ok(&result(
            request,
            &json!({"kind": "task", "id": "t", "status": {"state": "completed"}, "artifacts": [artifact]}),
        )),
        "message/stream" => {
            let state = |state: &str| {
                let is_last = state == "completed";
                let update = json!({"kind": "status-update", "taskId": "t", "status": {"state": state}, "final": is_last});
                format!("data: {}\n\n", result(request, &update))
            };
            let piece =
                json!({"artifactId": "a", "parts": [{"kind": "text", "text": "x".repeat(size / 16)}]});
            let piece = json!({"kind": "artifact-update", "taskId": "t", "append": true, "artifact": piece});
            let pieces = format!("data: {}\n\n", result(request, &piece)).repeat(16);
            (200, "text/event-stream", state("working") + &pieces + &state("completed"))
        }
        "tasks/cancel" => {
            ok(&result(request, &json!({"kind": "task", "id": "t", "status": {"state": "canceled"}})))
        }
        _ => error(-32001, "Task not found"),
    }
}

#[rstest::rstest]
#[case::response(ReplyMode::Final)]
#[case::stream(ReplyMode::Stream)]
#[tokio::test]
async fn a_response_that_does_not_fit_is_busy_and_its_memory_is_free_afterwards(#[case] mode: ReplyMode) {
    const SIZE: usize = MIB / 4 * 3;
    for (budget, is_busy) in [(MIB / 2, true), (16 * MIB, false)] {
        let mut fake = FakeAgent::start(|request| respond(request, SIZE)).await;
        fake.memory = account(budget);
        let actions = actions_with("", &fake, &serde_json::from_str(CARD).unwrap()).await;
        let options = CallOptions::default();
        let reply = invoke_in(mode, &actions, None, &options).await;
        if is_busy {
            assert_eq!(reply["error_info"]["code"], "busy", "{reply}");
            assert_eq!(reply["error_info"]["retryable"], false, "it would run the agent again");
            assert!(reply["message"].as_str().unwrap().contains("limits.memory"), "{reply}");
            assert!(fake.memory.refusals() > 0);
            let is_stream = mode == ReplyMode::Stream;
            assert_eq!(fake.count("tasks/cancel"), usize::from(is_stream), "a task with an id is canceled");
        } else {
            assert_eq!(reply["message"].as_str().map(str::len), Some(SIZE));
            // What remains is the reply, until the front door has encoded it.
            assert!((SIZE..MIB).contains(&fake.memory.used()), "{}", fake.memory.used());
        }
        drop(options);
        assert_eq!(fake.memory.used(), 0);
    }
}

#[tokio::test]
async fn a_small_call_is_not_charged() {
    let mut fake = FakeAgent::start(|request| respond(request, 1000)).await;
    fake.memory = account(0);
    let actions = actions_with("", &fake, &serde_json::from_str(CARD).unwrap()).await;
    for mode in [ReplyMode::Final, ReplyMode::Stream] {
        let reply = invoke_in(mode, &actions, None, &CallOptions::default()).await;
        assert_eq!(reply["status"], "COMPLETED", "{reply}");
    }
}

#[tokio::test]
async fn large_data_of_an_error_is_left_out() {
    let mut fake = FakeAgent::start(|request| match request.rpc_method().as_str() {
        "message/send" => {
            let error = json!({"code": -32603, "message": "no", "data": "x".repeat(MIB / 2)});
            ok(&json!({"jsonrpc": "2.0", "id": request.json()["id"], "error": error}))
        }
        _ => error(-32001, "Task not found"),
    })
    .await;
    fake.memory = account(16 * MIB);
    let actions = actions_with("", &fake, &serde_json::from_str(CARD).unwrap()).await;
    let options = CallOptions::default();
    let reply = invoke(&actions, None, &options).await;
    let info = &reply["error_info"];
    assert_eq!((&info["code"], &info["a2a_code"]), (&"agent_error".into(), &json!(-32603)));
    assert_eq!((&info["a2a_data"], fake.memory.used()), (&Value::Null, 0));
    let message = reply["message"].as_str().unwrap();
    assert!(message.ends_with(": no (the error data is left out because it is too large)"), "{message}");
}

#[test]
fn an_update_that_waits_to_be_published_keeps_the_charge_of_its_reply() {
    let (account, memory) = (account(16 * MIB), ReplyMemory::default());
    memory.cover(&account, MIB).unwrap();
    let first = memory.share();
    memory.cover(&account, 2 * MIB).unwrap();
    assert_eq!(account.used(), 3 * MIB, "both replies exist");
    assert!(memory.cover(&account, 32 * MIB).is_err());
    let second = memory.share();
    drop(memory);
    assert_eq!(account.used(), 3 * MIB, "the call has ended");
    drop(first);
    assert_eq!(account.used(), 2 * MIB);
    drop(second);
    assert_eq!(account.used(), 0);
}

#[tokio::test]
async fn a_lookup_charges_the_recorded_reply() {
    const SIZE: usize = MIB / 4 * 3;
    let mut fake = FakeAgent::start(|request| respond(request, SIZE)).await;
    fake.memory = account(16 * MIB);
    let actions = actions_with("", &fake, &serde_json::from_str(CARD).unwrap()).await;
    let options = CallOptions { mode: ReplyMode::Submit, ..CallOptions::default() };
    let reply = invoke_in(ReplyMode::Submit, &actions, None, &options).await;
    assert_eq!(reply["status"], "COMPLETED", "{reply}");
    drop(options);
    let lookup = CallOptions::default();
    let found = actions.get_task("t", &lookup, &mut NoProgress).await.unwrap();
    assert_eq!(found.content.message.len(), SIZE);
    assert!(fake.memory.used() >= SIZE, "{}", fake.memory.used());
    drop(lookup);
    let _rest = fake.memory.charge(16 * MIB).unwrap();
    let refused = actions.get_task("t", &CallOptions::default(), &mut NoProgress).await;
    assert_eq!(refused.map_err(|error| error.info.code).err(), Some(Code::Busy));
}

#[tokio::test]
async fn the_copies_of_a_request_are_charged_before_the_agent_is_reached() {
    for (budget, is_busy) in [(2 * MIB, true), (4 * MIB, false)] {
        let mut fake = FakeAgent::start(|request| match request.rpc_method().as_str() {
            "message/send" => NO_RESPONSE,
            _ => error(-32001, "Task not found"),
        })
        .await;
        fake.memory = account(budget);
        let actions = actions_with("", &fake, &serde_json::from_str(CARD).unwrap()).await;
        let (skill, options) = (CallableSkill::whole_agent(), CallOptions::default());
        let request = Invocation { parts: vec![Part::Text("x".repeat(MIB))], meta: Meta::default() };
        let mut progress = NoProgress;
        let mut call = Box::pin(actions.invoke(&skill, request, &options, &mut progress));
        if is_busy {
            let error = call.await.unwrap_err();
            let reply: Value = serde_json::from_slice(&error.to_json()).unwrap();
            assert_eq!(reply["error_info"]["code"], "busy", "{reply}");
            assert_eq!(reply["error_info"]["retryable"], true, "the agent was not reached");
            assert_eq!((error.reached_agent, fake.count("message/send")), (false, 0));
        } else {
            while fake.count("message/send") == 0 {
                let waited = tokio::time::timeout(std::time::Duration::from_millis(10), &mut call).await;
                assert!(waited.is_err(), "the agent does not respond");
            }
            assert!(fake.memory.used() >= 3 * MIB, "{}", fake.memory.used());
            drop(call);
        }
        assert_eq!(fake.memory.used(), 0);
    }
}

#[rstest::rstest]
#[tokio::test]
async fn a_call_does_not_hold_its_message_after_the_agent_has_responded(
    #[values(ReplyMode::Final, ReplyMode::Submit)] mode: ReplyMode,
) {
    let mut fake = FakeAgent::start(|request| match request.rpc_method().as_str() {
        "tasks/get" if request.json()["params"]["id"] != "t" => error(-32001, "Task not found"),
        _ => ok(&result(request, &json!({"kind": "task", "id": "t", "status": {"state": "working"}}))),
    })
    .await;
    fake.memory = account(8 * MIB);
    let actions = actions_with("", &fake, &json!({"name": "fake", "protocolVersion": "0.3"})).await;
    let (skill, options) = (CallableSkill::whole_agent(), CallOptions { mode, ..CallOptions::default() });
    let reference_task_ids = vec!["x".repeat(256); 100];
    let request = Invocation {
        parts: vec![Part::Text("x".repeat(MIB))],
        meta: Meta { reference_task_ids, ..Meta::default() },
    };
    let mut progress = NoProgress;
    let mut call = Box::pin(actions.invoke(&skill, request, &options, &mut progress));
    let polls = || fake.received().iter().filter(|request| request.json()["params"]["id"] == "t").count();
    while polls() == 0 {
        let waited = tokio::time::timeout(std::time::Duration::from_millis(10), &mut call).await;
        assert!(waited.is_err(), "the task does not end: {waited:?}");
    }
    assert_eq!(fake.memory.used(), 0);
}

#[tokio::test]
async fn the_lists_of_a_request_are_charged() {
    let fake = FakeAgent::start(|_| NO_RESPONSE).await;
    let list = || vec!["x".repeat(256); 100];
    let mut meta = Meta { reference_task_ids: list(), output_modes: list(), ..Meta::default() };
    let mut content = MessageContent::new(&fake.memory, ResolvedParts::default(), &mut meta).await.unwrap();
    assert!(fake.memory.used() > 4 * 25_600, "{}", fake.memory.used());
    content.release();
    assert!((25_600..50_000).contains(&fake.memory.used()), "a question needs the output modes");
}

#[tokio::test]
async fn a_task_with_an_id_of_the_client_is_canceled_when_the_response_does_not_fit() {
    let mut fake = FakeAgent::start(|request| match request.rpc_method().as_str() {
        "tasks/send" => {
            let artifact = json!({"parts": [{"type": "text", "text": "x".repeat(MIB / 4 * 3)}]});
            let id = &request.json()["params"]["id"];
            let task = json!({"id": id, "status": {"state": "working"}, "artifacts": [artifact]});
            ok(&result(request, &task))
        }
        "tasks/cancel" => {
            let id = &request.json()["params"]["id"];
            ok(&result(request, &json!({"id": id, "status": {"state": "canceled"}})))
        }
        _ => v01(request),
    })
    .await;
    fake.memory = account(MIB / 2);
    let card = json!({"name": "fake", "authentication": {"schemes": []}});
    let actions = actions_with("", &fake, &card).await;
    let reply = invoke(&actions, None, &CallOptions::default()).await;
    assert_eq!(reply["error_info"]["code"], "busy", "{reply}");
    assert_eq!(fake.count("tasks/cancel"), 1);
    let canceled = fake.received().into_iter().find(|seen| seen.rpc_method() == "tasks/cancel").unwrap();
    assert_eq!(canceled.json()["params"]["id"], reply["task"]["id"]);
}

/// Counts the reports that the running task is recorded.
#[derive(Default)]
struct Recorded(usize);

impl Progress for Recorded {
    fn recorded(&mut self, is_submitted: bool) {
        assert!(!is_submitted);
        self.0 += 1;
    }

    async fn report(&mut self, _: ProgressEvent) {}
}

#[tokio::test]
async fn a_call_reports_that_its_task_is_recorded_unless_it_ends_at_once() {
    let fake = FakeAgent::start(|request| respond(request, 1)).await;
    let actions = actions_with("", &fake, &serde_json::from_str(CARD).unwrap()).await;
    for (mode, recorded) in [(ReplyMode::Final, 0), (ReplyMode::Stream, 1)] {
        let request = Invocation { parts: vec![Part::Text("hi".to_owned())], meta: Meta::default() };
        let (options, mut progress) = (CallOptions { mode, ..CallOptions::default() }, Recorded::default());
        actions.invoke(&CallableSkill::whole_agent(), request, &options, &mut progress).await.unwrap();
        assert_eq!(progress.0, recorded, "{mode:?}");
    }
}

#[tokio::test]
async fn a_task_for_whose_record_there_is_no_room_is_canceled() {
    let fake = FakeAgent::start(|request| respond(request, 1)).await;
    let actions = actions_with("", &fake, &serde_json::from_str(CARD).unwrap()).await;
    let state = &actions.state;
    // So that the agent has the smallest share.
    let _others: Vec<_> = (0..256).map(|name| state.quotas.agent(&name.to_string().into())).collect();
    let record = async |id: &str| {
        let task = TaskRef {
            id: Some(id.to_owned()),
            context_id: None,
            agent: Arc::clone(&actions.agent),
            skill: None,
        };
        let record = TaskRecord {
            state: TaskState::Working,
            reply: Ok(Arc::new(Outcome::new(ReplyStatus::Working, ReplyContent::default(), task))),
            follow_up: None,
            is_submitted: false,
            revision: 0,
            caller: Default::default(),
            owner: Default::default(),
            is_local: false,
            seen_at: SystemTime::now(),
            may_run_for: HOUR,
            ttl: HOUR,
            open_for: HOUR,
            run: None,
        };
        let observer =
            Observer { began: SystemTime::UNIX_EPOCH, is_lookup: false, takeover: Takeover::New, run: 0 };
        state.tasks.record(&actions.agent, id, record, observer).await
    };
    let mut running = 0;
    while record(&format!("{running:04}")).await.is_ok() {
        running += 1;
        assert!(running < 10_000, "never refused");
    }
    record("u").await.unwrap_err();
    let reply = invoke_in(ReplyMode::Stream, &actions, None, &CallOptions::default()).await;
    assert_eq!(reply["error_info"]["code"], "busy", "{reply}");
    assert!(reply["message"].as_str().unwrap().contains("running tasks"), "{reply}");
    assert_eq!(fake.count("tasks/cancel"), 1, "no request could find it");
}

#[test]
fn a_request_with_very_many_fields_or_files_is_refused() {
    let fields: Vec<_> = (0..100_000).map(|number| format!("\"{number}\":0")).collect();
    let (fields, files) = (fields.join(","), vec!["0"; 100_000].join(","));
    for (body, expected) in [
        (format!("{{{fields}}}"), "the body has more than 1024 fields"),
        (format!(r#"{{"prompt":"x","meta":{{{fields}}}}}"#), "`meta` has more than 1024 fields"),
        (format!(r#"{{"prompt":"x","files":[{files}]}}"#), "at most 64 files"),
        (format!(r#"{{"prompt":"x","meta":{{"output_modes":[{files}]}}}}"#), "a list of strings"),
    ] {
        let body = RequestBody::new(body.into(), None);
        let error = Invocation::parse(&body, &Template::parse("")).unwrap_err();
        assert!(error.message.contains(expected), "{}", error.message);
    }
}
