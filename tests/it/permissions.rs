//! The permissions in `deploy/nats-permissions.conf`: the whole path works, and no caller reads or forges the replies to
//! another.

use async_nats::{Client, ConnectOptions, Event};
use futures_util::StreamExt as _;
use serde_json::json;
use tokio::sync::mpsc;

use crate::support::caller::Call;
use crate::support::commands::{command_on, repository_file, run};
use crate::support::{Bridge, NatsServer, launched, within_deadline};

/// A server with the shipped file, and with one more user, who may do everything, for the test itself.
async fn server() -> NatsServer {
    let mut conf = repository_file("deploy/nats-permissions.conf");
    for name in ["bridge", "operator", "gateway", "alice", "bob"] {
        conf = conf.replace(&format!("${}_PASSWORD", name.to_uppercase()), &password(name));
    }
    let conf = conf.replace("users = [", "users = [\n    { user: test, password: test }");
    let jetstream = "jetstream { store_dir: \"$DIR/jetstream\" }";
    NatsServer::start_configured(&format!("{conf}\n{jetstream}\nno_auth_user: test\n")).await
}

fn password(user: &str) -> String {
    format!("password-of-{user}")
}

async fn bridge() -> Bridge {
    Bridge::with(launched("demo", &[]))
        .nats("user", "bridge")
        .nats("password", password("bridge"))
        .nats("subject_prefix", "a2a")
        .nats("inbox_prefix", "_INBOX.bridge")
        .start_on(server().await)
        .await
}

/// A client with the permissions of a user, and what the server refuses it.
struct User {
    client: Client,
    denials: mpsc::UnboundedReceiver<String>,
}

impl User {
    async fn connect(server: &NatsServer, name: &str) -> Self {
        let (denied, denials) = mpsc::unbounded_channel();
        let options = ConnectOptions::with_user_and_password(name.to_owned(), password(name))
            .custom_inbox_prefix(format!("_INBOX.{name}"))
            .event_callback(move |event| {
                if let Event::ServerError(error) = event {
                    let _ = denied.send(error.to_string());
                }
                std::future::ready(())
            });
        Self { client: server.connect_with(options).await, denials }
    }

    fn call(&self, action: &str, body: serde_json::Value) -> Call {
        Call::new(&self.client, format!("a2a.action.{action}"), body)
    }

    async fn is_denied(&mut self, subject: &str) {
        let denial = within_deadline(self.denials.recv()).await.unwrap();
        assert!(denial.contains(subject), "{denial} does not name {subject}");
    }
}

#[tokio::test]
async fn everything_works_with_the_shipped_permissions() {
    let mut bridge = bridge().await;
    for name in ["alice", "bob"] {
        let mut user = User::connect(&bridge.nats, name).await;
        let _registry = user.client.subscribe("a2a.registry.*").await.unwrap();
        user.call("demo.echo", json!({"prompt": "hello"})).await.expect("COMPLETED");
        let report = json!({"topic": "tides", "audience": "sailors"});
        let asked = user.call("demo.report", report).await.expect("INPUT_REQUIRED");
        let answer = json!({"follow_up_id": asked.follow_up_id(), "user_response": "PDF"});
        user.call("demo.provide_required_input", answer).await.expect("COMPLETED");
        let stream = user
            .call("demo.stream", json!({"prompt": "one two three"}))
            .header("A2A-On-Disconnect", "cancel")
            .stream()
            .await;
        stream.result.expect("COMPLETED");
        let task = user.call("demo.slow", json!({"prompt": "0"})).mode("submit").await.task_id();
        user.call("demo.get_task", json!({"task_id": task})).await;
        Call::new(&user.client, "a2a.card.demo".to_owned(), "").await;
        let info = Call::new(&user.client, "$SRV.INFO.demo".to_owned(), "").await;
        assert_eq!(info["metadata"]["a2a.state"], "ready");
        assert!(user.denials.try_recv().is_err(), "the server refused something to {name}");
    }
    let url = bridge.nats.url();
    let as_user = |name: &str, arguments: &[&str]| {
        let inbox = format!("_INBOX.{name}");
        let mut command = command_on(&url, arguments);
        command.env("NATS_USER", name).env("NATS_PASSWORD", password(name)).env("NATS_INBOX_PREFIX", inbox);
        run(&mut command, "")
    };
    let called = as_user("alice", &["call", "demo.echo", "hello"]);
    assert_eq!((called.code, called.out.as_str()), (0, "hello\n"), "{called:?}");
    assert_eq!(as_user("bob", &["skills", "demo"]).code, 0);
    let shown = as_user("operator", &["agents", "show", "demo"]);
    assert!(shown.code == 0 && shown.out.contains("ready"), "{shown:?}");
    assert_eq!(as_user("operator", &["agents", "restart", "demo"]).code, 0);
    let refused = as_user("alice", &["agents", "restart", "demo"]);
    assert!(refused.code != 0 && refused.err.contains("a2a.control"), "{refused:?}");
    let state = as_user("bridge", &["state", "--json"]).json();
    assert_eq!(state["buckets"][0]["bucket"], "a2a_follow_ups", "{state}");
    assert_eq!(state["owners"][0]["agent"], "demo", "{state}");
    assert_eq!(state["owners"][0]["follow_ups"], 2, "{state}");
    let refused = as_user("operator", &["state"]);
    assert!(refused.code == 69 && refused.err.contains("$JS.API.STREAM.INFO"), "{refused:?}");
    bridge.stop().await;
    assert!(bridge.log().contains("state is shared in JetStream"), "{}", bridge.log());
    assert!(!bridge.log().contains("ermissions Violation"), "{}", bridge.log());
    assert!(!bridge.log().contains("NATS server error"), "{}", bridge.log());
}

#[tokio::test]
async fn a_caller_cannot_read_or_forge_the_replies_to_another() {
    let bridge = bridge().await;
    let bob = User::connect(&bridge.nats, "bob").await;
    let mut alice = User::connect(&bridge.nats, "alice").await;
    for subject in
        ["_INBOX.>", "_INBOX.bob.>", "_INBOX.bridge.>", "a2a.task.*.*", "a2a.action.*.*", "$SRV.>", ">"]
    {
        let mut spy = alice.client.subscribe(subject).await.unwrap();
        alice.is_denied(subject).await;
        bob.call("demo.echo", json!({"prompt": "hello"})).await.expect("COMPLETED");
        let seen = tokio::time::timeout(std::time::Duration::from_millis(20), spy.next()).await;
        assert!(!matches!(seen, Ok(Some(_))), "{seen:?} on {subject}");
    }
    // Even with the name of the inbox.
    let mut slow = bob.call("demo.slow", json!({"prompt": "1"})).begin().await;
    let forged =
        ["_INBOX.bob.guessed", "_INBOX.bridge.guessed", "a2a.registry.demo", "a2a.task.demo.1", "_R_.x"];
    for subject in forged {
        alice.client.publish(subject, "{\"success\":true,\"status\":\"COMPLETED\"}".into()).await.unwrap();
        alice.is_denied(subject).await;
    }
    slow.reply().await.expect("COMPLETED").saying("worked for 1 s");
    for subject in
        ["$KV.a2a_tasks.demo.1", "$JS.API.STREAM.MSG.GET.KV_a2a_tasks", "$JS.API.STREAM.DELETE.KV_a2a_tasks"]
    {
        alice.client.publish(subject, "{}".into()).await.unwrap();
        alice.is_denied(subject).await;
    }
    alice.client.publish("a2a.control.demo.stop", "".into()).await.unwrap();
    alice.is_denied("a2a.control.demo.stop").await;
}

#[tokio::test]
async fn replies_need_no_permission_to_publish_to_the_bridges_own_inbox() {
    const CALLS: usize = 16;
    let conf = r#"authorization { users: [
        {user: caller, password: c}
        {user: bridge, password: b, permissions: {publish: {allow: ">", deny: "_INBOX.bridge.>"}, subscribe: ">"}}
    ] }
    no_auth_user: caller"#;
    let bridge = Bridge::with(launched("demo", &[]))
        .nats("user", "bridge")
        .nats("password", "b")
        .nats("inbox_prefix", "_INBOX.bridge")
        .start_on(NatsServer::start_configured(conf).await)
        .await;
    // Several times the send window, so that replies would wait for confirmations.
    let text = "x".repeat(200_000);
    let calls = (0..CALLS).map(|_| bridge.prompt("demo.echo", &text));
    let replies = futures_util::future::join_all(calls.map(|call| call.into_future())).await;
    for reply in replies {
        assert_eq!(reply.expect("COMPLETED")["message"].as_str().map(str::len), Some(text.len()));
    }
    bridge.prompt("demo.stream", "one two three").stream().await.result.expect("COMPLETED");
    assert!(bridge.log().contains("_INBOX.bridge."), "the server refused nothing: {}", bridge.log());
}
