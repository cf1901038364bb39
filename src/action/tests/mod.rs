//! Actions of agents with deviations: refused conversations, late responses, ids made by the client.

mod memory;
mod replicas;
mod retry;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::a2a::LiveAgent;
use crate::a2a::card::Card;
use crate::a2a::model::Part;
use crate::a2a::tests::fake::{FakeAgent, NO_RESPONSE, error, ok, v01};
use crate::action::actions::{Actions, CallShutdown, CallableSkill};
use crate::action::progress::NoProgress;
use crate::action::request::{CallOptions, FollowUpAnswer, Invocation, Meta, ReplyMode};
use crate::config::AgentConfig;
use crate::reply::Reply;
use crate::secrets::Secrets;
use crate::state::State;

/// The actions of a fake agent that shows this card.
pub(super) async fn actions(fake: &FakeAgent, card: &Value) -> Actions {
    actions_with("", fake, card).await
}

/// The same, with further lines in the agent's configuration.
pub(super) async fn actions_with(lines: &str, fake: &FakeAgent, card: &Value) -> Actions {
    actions_in(Arc::default(), lines, fake, card).await
}

/// The same, with the state of a replica.
async fn actions_in(state: Arc<State>, lines: &str, fake: &FakeAgent, card: &Value) -> Actions {
    let (client, interface) = fake.client(lines, card).await;
    let live_agent = LiveAgent {
        client,
        card: Arc::new(Card::from_value(card.clone()).unwrap()),
        interface,
        exited: CancellationToken::new(),
    };
    let (_, live) = watch::channel(Some(Arc::new(live_agent)));
    let config = AgentConfig {
        request_timeout: Duration::from_secs(10),
        stream_idle_timeout: Duration::from_secs(10),
        task_timeout: Duration::from_secs(10),
        task_ttl: Duration::from_secs(60),
        max_response_size: 1 << 20,
        prefer_stream: false,
        input_required_ttl: Duration::from_secs(60),
        answer_artifacts: vec!["*".to_owned()],
        notice_artifacts: Vec::new(),
        ..fake.config(lines)
    };
    let (updates, _) = mpsc::channel(1);
    Actions::new(
        Arc::clone(&fake.memory),
        Arc::new(config),
        live,
        state,
        updates,
        CallShutdown::default(),
        Secrets::default(),
    )
}

pub(super) async fn invoke(actions: &Actions, session_id: Option<&str>, options: &CallOptions) -> Value {
    let skill = CallableSkill::whole_agent();
    let request = Invocation {
        parts: vec![Part::Text("hi".to_owned())],
        meta: Meta { session_id: session_id.map(str::to_owned), ..Meta::default() },
    };
    reply(actions.invoke(&skill, request, options, &mut NoProgress).await)
}

pub(super) async fn invoke_in(
    mode: ReplyMode,
    actions: &Actions,
    session_id: Option<&str>,
    options: &CallOptions,
) -> Value {
    invoke(actions, session_id, &CallOptions { mode, ..options.clone() }).await
}

pub(super) fn reply(reply: Reply) -> Value {
    let body = reply.map_or_else(|error| error.to_json(), |outcome| outcome.to_json());
    serde_json::from_slice(&body).unwrap()
}

pub(super) fn task(state: &str, context: &Value, text: &str) -> Value {
    json!({"jsonrpc": "2.0", "result": {
        "kind": "task", "id": "t", "contextId": context,
        "status": {"state": state, "message": {"kind": "message", "role": "agent", "messageId": text,
                                               "parts": [{"kind": "text", "text": text}]}},
    }})
}

#[tokio::test]
async fn a_refused_context_id_is_omitted_once_and_the_session_uses_the_agents_own() {
    let fake = FakeAgent::start(|request| {
        let message = request.json()["params"]["message"].clone();
        match (request.rpc_method().as_str(), message["contextId"].as_str()) {
            ("message/send", None) => ok(&task("completed", &json!("its-own"), "done")),
            ("message/send", Some("its-own")) => ok(&task("completed", &json!("its-own"), "again")),
            ("message/send", Some(_)) => error(-32602, "unknown contextId"),
            _ => error(-32001, "Task not found"),
        }
    })
    .await;
    let actions = actions(&fake, &json!({"name": "fake", "protocolVersion": "0.3"})).await;
    let options = CallOptions::default();
    assert_eq!(invoke(&actions, Some("s-1"), &options).await["message"], "done");
    assert_eq!(fake.count("message/send"), 2);
    assert_eq!(invoke(&actions, Some("s-1"), &options).await["message"], "again");
    assert_eq!(fake.count("message/send"), 3, "the session is mapped now");
}

#[tokio::test]
async fn an_error_after_which_the_message_may_have_run_does_not_refuse_the_context_id() {
    let fake = FakeAgent::start(|request| match request.rpc_method().as_str() {
        "message/send" => error(-32603, "the session of the database broke"),
        _ => error(-32001, "Task not found"),
    })
    .await;
    let actions = actions(&fake, &json!({"name": "fake", "protocolVersion": "0.3"})).await;
    let reply = invoke(&actions, Some("s-1"), &CallOptions::default()).await;
    assert_eq!(reply["error_info"]["a2a_code"], -32603);
    assert_eq!(fake.count("message/send"), 1);
}

#[tokio::test]
async fn a_stale_question_after_an_answer_is_not_a_new_one() {
    // fasta2a takes the answer and returns the task as it was.
    let polls = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&polls);
    let fake = FakeAgent::start(move |request| match request.rpc_method().as_str() {
        "message/send" => ok(&task("input-required", &json!("c"), "which colour?")),
        "tasks/get" if request.json()["params"]["id"] != "t" => error(-32001, "Task not found"),
        "tasks/get" if count.fetch_add(1, Ordering::Relaxed) < 2 => {
            ok(&task("input-required", &json!("c"), "which colour?"))
        }
        _ => ok(&task("completed", &json!("c"), "blue it is")),
    })
    .await;
    let actions = actions(&fake, &json!({"name": "fake", "protocolVersion": "0.3"})).await;
    let asked = invoke(&actions, None, &CallOptions::default()).await;
    assert_eq!(asked["status"], "INPUT_REQUIRED");
    let answer = FollowUpAnswer {
        follow_up_id: asked["data"]["follow_up_id"].as_str().unwrap().to_owned(),
        parts: vec![Part::Text("blue".to_owned())],
    };
    let done = reply(
        crate::action::follow_up::answer(&actions, answer, &CallOptions::default(), &mut NoProgress).await,
    );
    assert_eq!((&done["status"], &done["message"]), (&json!("COMPLETED"), &json!("blue it is")));
    assert_eq!(fake.count("message/send"), 2);
}

#[tokio::test]
async fn a_task_with_an_id_of_the_client_is_canceled_when_the_agent_does_not_respond() {
    let canceled: Arc<Mutex<Vec<Value>>> = Arc::default();
    let log = Arc::clone(&canceled);
    let fake = FakeAgent::start(move |request| match request.rpc_method().as_str() {
        "tasks/send" => NO_RESPONSE,
        "tasks/cancel" => {
            let id = request.json()["params"]["id"].clone();
            log.lock().unwrap().push(id.clone());
            ok(&json!({"result": {"id": id, "status": {"state": "canceled"}}}))
        }
        _ => v01(request),
    })
    .await;
    let actions = actions(&fake, &json!({"name": "fake", "authentication": {"schemes": []}})).await;
    let options = CallOptions { timeout: Some(Duration::from_millis(300)), ..CallOptions::default() };
    let reply = invoke(&actions, None, &options).await;
    assert_eq!(reply["error_info"]["code"], "timeout");
    assert_eq!(reply["error_info"]["cancelled"], true);
    assert_eq!(*canceled.lock().unwrap(), [reply["task"]["id"].clone()]);
    let sent = fake.received().into_iter().find(|seen| seen.rpc_method() == "tasks/send").unwrap();
    assert_eq!(sent.json()["params"]["id"], reply["task"]["id"]);
}
