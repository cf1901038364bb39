//! The event log: what is stored of a call, and callers that attach to it.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::bridge::{Bridge, launched};
use crate::support::caller::Call;
use crate::support::event_log::{EventLog, RawFrames, attach};
use crate::support::eventually::eventually;
use crate::support::mesh::Mesh;
use crate::support::nats::NatsServer;
use crate::support::{DemoAgent, attached};

const FORMS: [&str; 3] = ["all", "text", "artifacts"];

async fn bridge(events: Value, switches: &[&str]) -> Bridge {
    let nats = NatsServer::with_jetstream().await;
    Bridge::with(launched("demo", switches)).set("events", events).start_on(nats).await
}

fn log(bridge: &Bridge) -> EventLog<'_> {
    EventLog { client: &bridge.client, prefix: &bridge.prefix }
}

fn in_session(bridge: &Bridge, action: &str, prompt: &str, session: &str) -> Call {
    bridge.call(action, json!({ "prompt": prompt, "meta": { "session_id": session } }))
}

fn attach_to(bridge: &Bridge, body: Value) -> Call {
    attach(&bridge.client, &bridge.prefix, "demo", body)
}

/// Waits until the bridge has folded what it has logged: after that, only calls use the log.
async fn settle(bridge: &Bridge) {
    let list = Call::new(&bridge.client, format!("{}.sessions.list", bridge.prefix), json!({})).await;
    assert!(list.body["sessions"].is_array(), "{list:?}");
}

/// Sends a call in mode `stream`, and returns its frames as they are.
async fn stream(call: Call, form: &str) -> RawFrames {
    RawFrames::collect(&mut call.mode("stream").header("A2A-Frames", form).begin().await).await
}

async fn attached_frames(call: Call, form: &str) -> RawFrames {
    RawFrames::collect(&mut call.header("A2A-Frames", form).begin().await).await
}

#[tokio::test]
async fn the_frames_of_a_logged_stream_can_be_replayed_byte_for_byte() {
    let bridge = bridge(json!({}), &["--token-delay", "10ms"]).await;
    let words: Vec<String> = (0..40).map(|number| format!("word{number}")).collect();
    for (action, prompt) in
        [("demo.stream", words.join(" ")), ("demo.file", "x".into()), ("demo.supervisor", "x".into())]
    {
        for form in FORMS {
            let frames = stream(in_session(&bridge, action, &prompt, "s"), form).await;
            frames.check_contiguous();
            let id = frames.result()["task"]["id"].clone();
            let whole = attached_frames(attach_to(&bridge, json!({ "task_id": id })), form).await;
            assert_eq!(whole, frames, "{action} {form}");
            for from in [1, 2, frames.0.len() as u64 / 2, frames.0.len() as u64 - 1] {
                let body = json!({ "task_id": id, "from": from });
                let rest = attached_frames(attach_to(&bridge, body), form).await;
                assert_eq!(rest, frames.from(from), "{action} {form} from {from}");
            }
            // The other forms are replayed, too.
            for other in FORMS {
                let replayed = attached_frames(attach_to(&bridge, json!({ "task_id": id })), other).await;
                replayed.check_contiguous();
                assert_eq!(replayed.result(), frames.result());
            }
        }
    }
}

#[tokio::test]
async fn a_session_is_logged_with_coalesced_tokens_that_expire() {
    let bridge = bridge(json!({}), &["--token-delay", "1ms"]).await;
    let words = vec!["word"; 300].join(" ");
    let frames = stream(in_session(&bridge, "demo.stream", &words, "s"), "text").await;
    assert_eq!(frames.response(), words);
    let log = log(&bridge);
    let types = log.types().await;
    let begin = ["session_created", "user_message", "agent_start", "agent_status"];
    assert_eq!(types[..4], begin, "{types:?}");
    assert_eq!(types.last().unwrap(), "agent_complete");
    let messages = log.messages().await;
    assert!(messages.len() < 60, "{} batches for 300 words", messages.len());
    let prefix = format!("{}.event.", bridge.prefix);
    for message in &messages {
        assert!(message.subject.starts_with(&prefix) && message.subject.ends_with(".s.s"), "{message:?}");
        let is_token = |event: &Value| event["type"] == "agent_token";
        assert_eq!(message.is_transient(), message.events().all(is_token), "{message:?}");
        assert_eq!(message.events().any(is_token), message.events().all(is_token), "{message:?}");
        assert!(message.headers.contains("Nats-Msg-Id: ") && message.headers.contains("A2A-Run: "));
    }
    let texts = messages.iter().flat_map(|message| message.events());
    let texts = texts.filter(|event| event["type"] == "agent_token");
    let texts: String = texts.map(|event| event["payload"]["text"].as_str().unwrap().to_owned()).collect();
    assert_eq!(texts, words);
    log.check_numbers().await;

    // The second call finds the session, and the agent learns about its run.
    let reply = in_session(&bridge, "demo.metadata", "x", "s").await.expect("COMPLETED");
    let metadata = &reply["data"]["metadata"];
    assert_eq!(metadata["session_id"], "s", "{reply:?}");
    let last = log.messages().await.pop().unwrap();
    assert_eq!(metadata["run_id"], last.batch["run"]);
    let types = log.types().await;
    assert_eq!(types.iter().filter(|kind| *kind == "session_created").count(), 1, "{types:?}");
}

#[tokio::test]
async fn only_calls_of_sessions_are_logged_unless_their_caller_asks_for_it() {
    let bridge = bridge(json!({}), &[]).await;
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
    assert!(log(&bridge).messages().await.is_empty());
    let reply = bridge.prompt("demo.echo", "x").header("A2A-Log", "on").await.expect("COMPLETED");
    assert_eq!(reply.header("A2A-Log"), None);
    let messages = log(&bridge).messages().await;
    let run = messages[0].batch["run"].as_str().unwrap().to_owned();
    assert!(messages.iter().all(|message| message.subject.ends_with(&format!(".r.{run}"))), "{messages:?}");
    // Such a call can be attached to by its run.
    let frames = attached_frames(attach_to(&bridge, json!({ "run": run })), "all").await;
    assert_eq!(frames.result(), reply.body);
    bridge.prompt("demo.echo", "x").header("A2A-Log", "maybe").await.expect_error("invalid_request");

    let all = self::bridge(json!({ "record": "all" }), &[]).await;
    all.prompt("demo.echo", "x").await.expect("COMPLETED");
    assert_eq!(log(&all).types().await.last().unwrap(), "agent_complete");
}

#[tokio::test]
async fn a_run_in_a_session_is_found_by_its_id_and_only_by_its_caller() {
    let bridge = bridge(json!({}), &[]).await;
    let through = |caller: &str, subject: &str, body: Value| {
        let subject = format!("{}.gw.{subject}", bridge.prefix);
        Call::new(&bridge.client, subject, body).header("A2A-Caller", caller)
    };
    let body = |prompt: &str| json!({ "prompt": prompt, "meta": { "session_id": "same" } });
    // The subjects of gateways may come a moment later.
    eventually(|| async {
        let card = through("alice", "action.demo.echo", body("first")).await;
        (!card.is_no_responders()).then_some(())
    })
    .await;
    let alice = through("alice", "action.demo.echo", body("from alice")).await.expect("COMPLETED");
    let bob = through("bob", "action.demo.echo", body("from bob")).await.expect("COMPLETED");
    let messages = log(&bridge).messages().await;
    let of = |text: &str| messages.iter().find(|message| message.text.contains(text)).unwrap().clone();
    let (of_alice, of_bob) = (of("from alice"), of("from bob"));
    assert_ne!(of_alice.subject, of_bob.subject);
    for message in messages.iter().filter(|message| message.subject == of_alice.subject) {
        assert!(!message.text.contains("bob"), "{message:?}");
    }
    for (caller, own, other, other_run) in
        [("alice", &alice, &bob, &of_bob), ("bob", &bob, &alice, &of_alice)]
    {
        let attach = |body: Value| through(caller, "attach.demo", body);
        let frames = attached_frames(attach(json!({ "task_id": own.task_id() })), "all").await;
        assert_eq!(frames.result(), own.body);
        for body in [json!({ "task_id": other.task_id() }), json!({ "run": other_run.batch["run"] })] {
            let refused = attached_frames(attach(body), "all").await;
            assert_eq!(refused.result()["error_info"]["code"], "not_found");
        }
    }
    let run = of_alice.batch["run"].clone();
    eventually(|| async {
        let attach = through("alice", "attach.demo", json!({ "run": run }));
        let frames = attached_frames(attach, "all").await;
        (frames.result() == alice.body).then_some(())
    })
    .await;
    for body in [json!({}), json!({ "run": run, "task_id": "t" }), json!({ "run": 1 }), json!([])] {
        let refused = attached_frames(through("alice", "attach.demo", body), "all").await;
        assert_eq!(refused.result()["error_info"]["code"], "invalid_request");
    }
}

#[tokio::test]
async fn an_answer_continues_the_run_of_its_question_and_is_not_stored() {
    const SECRET: &str = "hunter2-correct-horse";
    let bridge = bridge(json!({}), &[]).await;
    let ask = json!({"topic": "tides", "audience": "sailors", "meta": {"session_id": "s"}});
    let asked = bridge.call("demo.report", ask).await.expect("INPUT_REQUIRED");
    let answer = bridge.answer("demo", &asked.follow_up_id(), &format!("PDF {SECRET}"));
    let frames = stream(answer, "all").await;
    assert_eq!(frames.result()["status"], "COMPLETED");
    let log = log(&bridge);
    log.check_numbers().await;
    let messages = log.messages().await;
    assert!(messages.iter().all(|message| !message.text.contains(SECRET)));
    assert!(messages.iter().all(|message| message.batch["run"] == messages[0].batch["run"]));
    let calls: Vec<_> = messages.iter().map(|message| message.batch["call"].as_u64().unwrap()).collect();
    assert!(calls.is_sorted() && calls.last() == Some(&1), "{calls:?}");
    let types = log.types().await;
    assert!(types.contains(&"agent_input_required".to_owned()), "{types:?}");
    let redacted = json!({ "redacted": true });
    assert!(messages.iter().flat_map(|message| message.events()).any(|event| event["payload"] == redacted));
    // The file goes by reference, in the log and in the reply.
    assert!(messages.iter().all(|message| !message.text.contains("JVBERi0")), "the bytes of a PDF");
    let files = frames.result()["files"].clone();
    assert!(files[0]["url"].as_str().unwrap().starts_with("obj://"), "{files}");
    let replayed = attached_frames(attach_to(&bridge, json!({ "task_id": asked.task_id() })), "all").await;
    assert_eq!(replayed, frames, "the last call of the run");
}

#[tokio::test]
async fn credentials_are_never_in_the_log() {
    const TOKEN: &str = "a-very-secret-token";
    let nats = NatsServer::with_jetstream().await;
    let agent = launched("demo", &["--bearer", TOKEN]).set("bearer_token", TOKEN);
    let bridge = Bridge::with(agent).set("events", json!({})).start_on(nats).await;
    let prompt = format!("my token is {TOKEN}");
    stream(in_session(&bridge, "demo.stream", &prompt, "s"), "all").await;
    stream(in_session(&bridge, "demo.headers", "x", "s"), "all").await;
    let messages = log(&bridge).messages().await;
    assert!(messages.len() > 4);
    assert!(messages.iter().all(|message| !message.text.contains(TOKEN)));
}

#[tokio::test]
async fn a_prompt_that_is_too_large_for_the_log_is_cut_and_its_call_is_logged() {
    let bridge = bridge(json!({}), &[]).await;
    let prompt = "\u{1}x".repeat(120_000);
    let reply = in_session(&bridge, "demo.message", &prompt, "s").await.expect("COMPLETED");
    assert_eq!(reply.header("A2A-Log"), None);
    let messages = log(&bridge).messages().await;
    let message = messages[0].events().find(|event| event["type"] == "user_message").unwrap();
    assert_eq!(message["payload"]["truncated"], true);
    let kept = message["payload"]["content"].as_str().unwrap();
    assert!(kept.len() > 50_000 && prompt.starts_with(kept), "{}", kept.len());
    assert_eq!(log(&bridge).types().await.last().unwrap(), "agent_complete");
}

#[tokio::test]
async fn a_log_that_fails_does_not_fail_a_call_unless_it_is_required() {
    let bridge = bridge(json!({}), &[]).await;
    in_session(&bridge, "demo.echo", "x", "s").await.expect("COMPLETED");
    settle(&bridge).await;
    log(&bridge).api("STREAM.DELETE", json!({})).await;
    let reply = in_session(&bridge, "demo.echo", "x", "s").await.expect("COMPLETED");
    assert_eq!(reply.header("A2A-Log"), Some("failed"));
    // The bridge creates the stream again as soon as it notices.
    eventually(|| async {
        let reply = in_session(&bridge, "demo.echo", "x", "again").await.expect("COMPLETED");
        reply.header("A2A-Log").is_none().then_some(())
    })
    .await;
    settle(&bridge).await;
    log(&bridge).api("STREAM.DELETE", json!({})).await;
    let call = in_session(&bridge, "demo.stream", "a b c", "s").mode("stream");
    let (frames, last) = RawFrames::collect_with_last(&mut call.begin().await).await;
    assert_eq!((frames.result()["status"].clone(), frames.response()), ("COMPLETED".into(), "a b c".into()));
    assert_eq!(last.unwrap().header("A2A-Log"), Some("failed"));

    let required = self::bridge(json!({ "required": true }), &[]).await;
    in_session(&required, "demo.echo", "x", "s").await.expect("COMPLETED");
    settle(&required).await;
    log(&required).api("STREAM.DELETE", json!({})).await;
    in_session(&required, "demo.echo", "x", "s").await.expect_error("state_unavailable");
    required.prompt("demo.echo", "x").await.expect("COMPLETED");
}

async fn mesh(agent: &DemoAgent, replicas: usize) -> Mesh {
    Mesh::start_with(vec![attached("demo", &agent.url())], replicas, json!({ "events": {} })).await
}

fn mesh_attach(mesh: &Mesh, body: Value) -> Call {
    attach(&mesh.client, &mesh.prefix, "demo", body)
}

/// Begins a streamed call, and waits until its answer has begun. Returns the task id.
async fn begin_stream(
    mesh: &Mesh,
    prompt: &str,
) -> (crate::support::caller::Inbox, String, Vec<(u64, String)>) {
    let body = json!({ "prompt": prompt, "meta": { "session_id": "s" } });
    let mut inbox = mesh.call("demo.stream", body).mode("stream").begin().await;
    let (mut id, mut seen) = (None, Vec::new());
    loop {
        let frame = inbox.reply().await;
        if let Some(number) = frame.header("A2A-Seq") {
            seen.push((number.parse().unwrap(), frame.text.clone()));
        }
        if frame["type"] == "task" {
            id = frame["data"]["id"].as_str().map(str::to_owned);
        }
        if frame["type"] == "response"
            && let Some(id) = id
        {
            return (inbox, id, seen);
        }
    }
}

#[tokio::test]
async fn a_caller_attaches_at_any_replica_while_the_call_runs() {
    let agent = DemoAgent::start(&["--token-delay", "100ms"]).await;
    let mesh = mesh(&agent, 2).await;
    let words = vec!["word"; 20].join(" ");
    let (mut inbox, id, seen) = begin_stream(&mesh, &words).await;
    let attached: Vec<_> = (0..6).map(|_| mesh_attach(&mesh, json!({ "task_id": id })).begin()).collect();
    let mut inboxes = Vec::new();
    for call in attached {
        inboxes.push(call.await);
    }
    let rest = RawFrames::collect(&mut inbox).await;
    let frames = RawFrames([seen, rest.0].concat());
    frames.check_contiguous();
    assert_eq!(frames.response(), words);
    for mut inbox in inboxes {
        assert_eq!(RawFrames::collect(&mut inbox).await, frames);
    }
}

#[tokio::test]
async fn another_replica_continues_the_log_of_a_call_whose_replica_was_killed() {
    let agent = DemoAgent::start(&["--token-delay", "300ms"]).await;
    let mut mesh = mesh(&agent, 1).await;
    let words: Vec<String> = (0..60).map(|number| format!("word{number}")).collect();
    let words = words.join(" ");
    let (_inbox, id, seen) = begin_stream(&mesh, &words).await;
    let from = seen.last().unwrap().0 + 1;
    mesh.add().await;
    mesh.kill(0);
    let attached = mesh_attach(&mesh, json!({ "task_id": id, "from": from }));
    let mut inbox = attached.begin().await;
    let rest = tokio::time::timeout(Duration::from_secs(60), RawFrames::collect(&mut inbox)).await.unwrap();
    let frames = RawFrames([seen, rest.0].concat());
    frames.check_contiguous();
    assert_eq!(frames.result()["message"], words.as_str());
    assert_eq!(frames.artifact_text(), words);
    assert_eq!(frames.response(), words);
    assert_eq!(frames.values().filter(|frame| frame["type"] == "result").count(), 1);
    let log = EventLog { client: &mesh.client, prefix: &mesh.prefix };
    log.check_numbers().await;
    let types = log.types().await;
    assert_eq!(types.iter().filter(|kind| *kind == "agent_complete").count(), 1, "{types:?}");
    let whole = RawFrames::collect(&mut mesh_attach(&mesh, json!({ "task_id": id })).begin().await).await;
    assert_eq!(whole, frames);
}
