//! Verified callers: tenants of other accounts under `deploy/nats-accounts.conf`, and principals of gateways. What
//! belongs to one caller does not exist for another, and no forged identity is believed.

use async_nats::{Client, ConnectOptions, Event};
use rstest::rstest;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::support::caller::{Call, IntoBody};
use crate::support::commands::{command_on, repository_file, run};
use crate::support::{
    Answer, Bridge, NatsServer, Peer, Reply, attached, eventually, eventually_eq, launched, within_deadline,
};

const INFO: &str = "Nats-Request-Info";
const ALICE: &str = r#"{"acc":"TENANT_A","user":"alice"}"#;

/// A server with the shipped accounts, and with one more user in the account of the bridge, for the test itself.
async fn server() -> NatsServer {
    let mut conf = repository_file("deploy/nats-accounts.conf");
    for name in ["bridge", "operator", "gateway", "alice", "bob"] {
        conf = conf.replace(&format!("${}_PASSWORD", name.to_uppercase()), &password(name));
    }
    let conf = conf.replacen("users: [", "users: [\n      { user: test, password: password-of-test }", 1);
    // A second user in the account of a tenant.
    let conf = conf.replacen("user: alice", "user: carol, password: password-of-carol }, { user: alice", 1);
    // The users of one tenant receive the updates of all tasks.
    let conf = conf.replacen(
        "{ stream: \"a2a.registry.*\"",
        "{ stream: \"a2a.task.*.*\", accounts: [TENANT_A] }\n      { stream: \"a2a.registry.*\"",
        1,
    );
    let conf = conf.replacen(
        "{ stream: { account: BRIDGE",
        "{ stream: { account: BRIDGE, subject: \"a2a.task.*.*\" } }\n      { stream: { account: BRIDGE",
        1,
    );
    let conf = format!("{conf}\nno_auth_user: test\njetstream {{ store_dir: \"$STORE_DIR\" }}\n");
    NatsServer::start_configured(&conf).await
}

fn password(user: &str) -> String {
    format!("password-of-{user}")
}

/// A bridge with the demo agent, which says what metadata it receives.
async fn bridge_with(identity: Value) -> Bridge {
    Bridge::with(launched("demo", &[]).set("forward_caller", true))
        .nats("user", "bridge")
        .nats("password", password("bridge"))
        .nats("subject_prefix", "a2a")
        .nats("inbox_prefix", "_INBOX.bridge")
        .nats("identity", identity)
        .start_on(server().await)
        .await
}

async fn bridge() -> Bridge {
    bridge_with(json!({})).await
}

/// A client, and what the server refuses it.
struct User {
    client: Client,
    denials: mpsc::UnboundedReceiver<String>,
    /// The principal for whom a gateway calls.
    principal: Option<&'static str>,
}

impl User {
    async fn connect(bridge: &Bridge, name: &str) -> Self {
        let (denied, denials) = mpsc::unbounded_channel();
        let options = ConnectOptions::with_user_and_password(name.to_owned(), password(name))
            .custom_inbox_prefix(format!("_INBOX.{name}"))
            .event_callback(move |event| {
                if let Event::ServerError(error) = event {
                    let _ = denied.send(error.to_string());
                }
                std::future::ready(())
            });
        Self { client: bridge.nats.connect_with(options).await, denials, principal: None }
    }

    /// A gateway that calls for a principal.
    async fn gateway(bridge: &Bridge, principal: &'static str) -> Self {
        Self { principal: Some(principal), ..Self::connect(bridge, "gateway").await }
    }

    fn request(&self, subject: &str, body: impl IntoBody) -> Call {
        match self.principal {
            Some(principal) => {
                let subject = format!("a2a.gw.{subject}");
                Call::new(&self.client, subject, body).header("A2A-Caller", principal)
            }
            None => Call::new(&self.client, format!("a2a.{subject}"), body),
        }
    }

    fn call(&self, action: &str, body: impl IntoBody) -> Call {
        self.request(&format!("action.demo.{action}"), body)
    }

    fn prompt(&self, action: &str, prompt: &str) -> Call {
        self.call(action, json!({ "prompt": prompt }))
    }

    fn get_task(&self, task_id: &str) -> Call {
        self.call("get_task", json!({ "task_id": task_id }))
    }

    fn cancel_task(&self, task_id: &str) -> Call {
        self.call("cancel_task", json!({ "task_id": task_id }))
    }

    fn answer(&self, follow_up_id: &str) -> Call {
        self.call("provide_required_input", json!({"follow_up_id": follow_up_id, "user_response": "PDF"}))
    }

    async fn ask_for_report(&self) -> Reply {
        self.call("report", json!({"topic": "tides", "audience": "sailors"})).await.expect("INPUT_REQUIRED")
    }

    async fn is_denied(&mut self, subject: &str) {
        let denial = within_deadline(self.denials.recv()).await.unwrap();
        assert!(denial.contains(subject), "{denial} does not name {subject}");
    }
}

/// The caller that the agent was told.
async fn seen_caller(call: Call) -> Value {
    call.await.expect("COMPLETED")["data"]["metadata"]["caller"].clone()
}

#[tokio::test]
async fn the_contract_holds_for_every_verified_caller() {
    let mut bridge = bridge().await;
    let users = [
        User::connect(&bridge, "alice").await,
        User::connect(&bridge, "bob").await,
        User::gateway(&bridge, "alice").await,
    ];
    let mut first_runs = Vec::new();
    for mut user in users {
        user.prompt("echo", "hello").only_reply().await.expect("COMPLETED").saying("hello");
        let stream = user.prompt("stream", "one two three").stream().await;
        assert_eq!(stream.response(), "one two three");
        stream.result.expect("COMPLETED");

        let asked = user.ask_for_report().await;
        user.answer(&asked.follow_up_id()).await.expect("COMPLETED");
        user.answer(&asked.follow_up_id()).await.expect_error("follow_up_used");
        let asked = user.ask_for_report().await;
        user.answer(&asked.follow_up_id()).stream().await.result.expect("COMPLETED");

        let submitted = user.prompt("slow", "1").mode("submit").await.expect("WORKING").task_id();
        eventually(|| async { user.get_task(&submitted).await.is("COMPLETED").then_some(()) }).await;
        let submitted = user.prompt("slow", "600").mode("submit").await.expect("WORKING").task_id();
        let canceled = user.cancel_task(&submitted).await;
        assert!(canceled.is("CANCELED") && canceled["success"] == true, "{canceled:?}");
        user.get_task("unknown").await.expect_error("not_found");

        // The key is the same for all callers, and so is the body.
        let run = || user.prompt("echo", "x").header("Nats-Msg-Id", "key");
        let first = run().await.expect("COMPLETED");
        assert_eq!(run().await.text, first.text);
        first_runs.push(first.task_id());

        assert_eq!(user.request("card.demo", "").await["name"], "demo");
        user.call("echo", json!({"unknown": 1})).await.expect_error("invalid_request");
        let info = Call::new(&user.client, "$SRV.INFO.demo".to_owned(), "").await;
        assert_eq!(info["metadata"]["a2a.state"], "ready");
        assert!(user.denials.try_recv().is_err(), "the server refused something");
    }
    first_runs.sort();
    first_runs.dedup();
    assert_eq!(first_runs.len(), 3, "a key belongs to its caller");

    let url = bridge.nats.url();
    let as_alice = |arguments: &[&str]| {
        let mut command = command_on(&url, arguments);
        command.env("NATS_USER", "alice").env("NATS_PASSWORD", password("alice"));
        run(command.env("NATS_INBOX_PREFIX", "_INBOX.alice"), "")
    };
    let called = as_alice(&["call", "demo.echo", "hello"]);
    assert_eq!((called.code, called.out.as_str()), (0, "hello\n"), "{called:?}");
    let agents = as_alice(&["agents"]);
    assert!(agents.code == 0 && agents.out.contains("ready"), "{agents:?}");
    assert_eq!(as_alice(&["skills", "demo"]).code, 0);
    bridge.stop().await;
    assert!(!bridge.log().contains("ermissions Violation"), "{}", bridge.log());
    assert!(!bridge.log().contains("NATS server error"), "{}", bridge.log());
}

#[tokio::test]
async fn what_belongs_to_one_caller_does_not_exist_for_another() {
    let bridge = bridge().await;
    let alice = User::connect(&bridge, "alice").await;
    let others = [
        User::connect(&bridge, "bob").await,
        // Another user of the same account.
        User::connect(&bridge, "carol").await,
        // Callers of the bridge's own account, who share one identity.
        User::connect(&bridge, "test").await,
        User::gateway(&bridge, "alice").await,
        User::gateway(&bridge, "TENANT_A/alice").await,
    ];
    let asked = alice.ask_for_report().await;
    let submitted = alice.prompt("slow", "600").mode("submit").await.task_id();
    let ended = alice.prompt("echo", "x").await.task_id();
    for other in &others {
        other.answer(&asked.follow_up_id()).await.expect_error("not_found");
        for task in [&asked.task_id(), &submitted, &ended] {
            other.get_task(task).await.expect_error("not_found");
            other.cancel_task(task).await.expect_error("not_found");
        }
    }
    let refer = |user: &User, task: &str| {
        user.call("echo", json!({"prompt": "x", "meta": {"reference_task_ids": [task]}}))
    };
    for other in [&others[0], &others[3]] {
        refer(other, &ended).await.expect_error("not_found");
    }
    refer(&alice, &ended).await.expect("COMPLETED");
    alice.get_task(&ended).await.expect("COMPLETED");
    alice.get_task(&submitted).await.expect("WORKING");
    assert!(alice.cancel_task(&submitted).await.is("CANCELED"));
    alice.answer(&asked.follow_up_id()).await.expect("COMPLETED");

    // The same session id is another session for each caller.
    let mut contexts = Vec::new();
    for user in others.iter().chain([&alice]) {
        let call = || user.call("echo", json!({"prompt": "x", "meta": {"session_id": "s-1"}}));
        let context = call().await.expect("COMPLETED")["task"]["context_id"].clone();
        assert_eq!(call().await["task"]["context_id"], context);
        contexts.push(context.to_string());
    }
    contexts.sort();
    contexts.dedup();
    assert_eq!(contexts.len(), others.len() + 1, "{contexts:?}");
}

#[tokio::test]
async fn no_forged_identity_is_believed() {
    let bridge = bridge().await;
    let mut bob = User::connect(&bridge, "bob").await;
    let inside = User::connect(&bridge, "test").await;
    let gateway = User::connect(&bridge, "gateway").await;
    let ask = |user: &User| user.prompt("metadata", "x");
    assert_eq!(seen_caller(ask(&bob)).await, "TENANT_B/bob");
    assert_eq!(seen_caller(ask(&inside)).await, Value::Null);

    // Within the account of the bridge, anyone can write the header.
    for name in [INFO, "nats-request-info"] {
        assert_eq!(seen_caller(ask(&inside).header(name, ALICE)).await, Value::Null);
    }
    assert_eq!(seen_caller(ask(&inside).header("A2A-Caller", "alice")).await, Value::Null);
    // The server replaces the header of an importer, but not another spelling of it.
    let forged = |name| ask(&bob).header(name, ALICE);
    for call in [forged(INFO), forged(INFO).header(INFO, ALICE), ask(&bob).header("A2A-Caller", "alice")] {
        assert_eq!(seen_caller(call).await, "TENANT_B/bob");
    }
    for name in ["nats-request-info", "NATS-REQUEST-INFO", "Nats-request-Info"] {
        assert_eq!(seen_caller(forged(name)).await, "?");
        assert_eq!(seen_caller(forged(INFO).header(name, ALICE)).await, "?");
    }
    // Nobody can pretend to be an importer, and tenants are no gateways.
    for reply in ["_R_.x", "_R_.x.y"] {
        let mut stranger = User::connect(&bridge, "test").await;
        let mut headers = async_nats::HeaderMap::new();
        headers.insert(INFO, ALICE);
        let (client, subject) = (&stranger.client, "a2a.action.demo.metadata");
        client.publish_with_reply_and_headers(subject, reply, headers, "x".into()).await.unwrap();
        stranger.is_denied(reply).await;
    }
    let through = |user: &User| Call::new(&user.client, "a2a.gw.action.demo.metadata".to_owned(), "x");
    through(&bob).header("A2A-Caller", "alice").begin().await;
    bob.is_denied("a2a.gw.action.demo.metadata").await;

    let gateway_call = || through(&gateway);
    assert_eq!(seen_caller(gateway_call().header("A2A-Caller", "alice")).await, "gateway:alice");
    let both = gateway_call().header("A2A-Caller", "alice").header(INFO, r#"{"acc":"TENANT_B"}"#);
    assert_eq!(seen_caller(both).await, "gateway:alice");
    let long = "x".repeat(257);
    for call in [
        gateway_call(),
        gateway_call().header("a2a-caller", "alice"),
        gateway_call().header("A2A-Caller", ""),
        gateway_call().header("A2A-Caller", &long),
        gateway_call().header("A2A-Caller", "alice").header("A2A-Caller", "alice"),
        gateway_call().header("A2A-Caller", "alice").header("a2a-caller", "bob"),
    ] {
        call.await.expect_error("forbidden").saying("A2A-Caller");
    }
}

/// Header blocks that the library does not send. The server passes some of them on.
#[rstest]
#[case("Nats-Request-Info : {}")]
#[case("Nats-Request-Info:{}\r\nNats-Request-Info: {}")]
#[case("Nats-Request-Info: {}\r\n Nats-Request-Info: {}")]
#[case(" Nats-Request-Info: {}")]
#[case("X: y\rNats-Request-Info: {}")]
#[case("X: y\nNats-Request-Info: {}")]
#[case("Nats-Request-Info\t: {}")]
#[tokio::test]
async fn no_malformed_header_is_believed(#[case] header: &str) {
    let peer = Peer::agent(|seen| Answer::task(seen, "TASK_STATE_COMPLETED", "done"));
    let bridge = Bridge::with(attached("demo", &peer.url()).set("forward_caller", true))
        .nats("user", "bridge")
        .nats("password", password("bridge"))
        .nats("subject_prefix", "a2a")
        .nats("inbox_prefix", "_INBOX.bridge")
        .start_on(server().await)
        .await;
    for (user, own) in [("bob", Some("TENANT_B/bob")), ("test", None)] {
        publish_raw(bridge.nats.port(), user, &header.replace("{}", ALICE)).await;
        // On the same subject, so the bridge has received the first one, too.
        User::connect(&bridge, user).await.prompt("ask", "x").await.expect("COMPLETED");
        eventually(|| async {
            let seen = peer.calls("SendMessage");
            let callers: Vec<_> = seen
                .iter()
                .map(|call| {
                    call.json()["params"]["message"]["metadata"]["caller"].as_str().map(str::to_owned)
                })
                .collect();
            for caller in callers.iter().map(Option::as_deref) {
                assert!(
                    matches!(caller, None | Some("?" | "TENANT_B/bob")),
                    "{header:?} of {user}: {caller:?}"
                );
            }
            callers.iter().any(|caller| caller.as_deref() == own).then_some(())
        })
        .await;
    }
}

/// Publishes a request with exactly these header lines, and waits until the server has processed it.
async fn publish_raw(port: u16, user: &str, headers: &str) {
    let headers = format!("NATS/1.0\r\n{headers}\r\n\r\n");
    let body = "x";
    let sizes = format!("{} {}", headers.len(), headers.len() + body.len());
    let text = format!(
        "CONNECT {{\"verbose\":false,\"headers\":true,\"user\":\"{user}\",\"pass\":\"{}\"}}\r\n\
         HPUB a2a.action.demo.ask _INBOX.{user}.raw {sizes}\r\n{headers}{body}\r\nPING\r\n",
        password(user)
    );
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut received = Vec::new();
    let answered = async {
        while !received.windows(4).any(|bytes| bytes == b"PONG") {
            let mut buffer = [0; 4096];
            let read = stream.read(&mut buffer).await.unwrap();
            assert!(read > 0, "{}", String::from_utf8_lossy(&received));
            received.extend_from_slice(&buffer[..read]);
        }
    };
    within_deadline(answered).await;
}

#[tokio::test]
async fn a_required_identity_is_required_at_every_front_door() {
    let bridge = Bridge::with(launched("demo", &[]))
        .nats("user", "bridge")
        .nats("password", password("bridge"))
        .nats("subject_prefix", "a2a")
        .nats("inbox_prefix", "_INBOX.bridge")
        .nats("identity", json!({"required": true}))
        .nats("agent_protocol", json!({"owner": "acme"}))
        .start_on(server().await)
        .await;
    let inside = User::connect(&bridge, "test").await;
    for action in ["echo", "get_task", "cancel_task", "provide_required_input"] {
        inside
            .prompt(action, "x")
            .only_reply()
            .await
            .expect_error("forbidden")
            .saying("nats.identity.required");
        inside.prompt(action, "x").header(INFO, ALICE).await.expect_error("forbidden");
    }
    inside.prompt("echo", "x").mode("submit").await.expect_error("forbidden");
    inside.request("card.demo", "").await.expect_error("forbidden");
    let stream = inside.prompt("echo", "x").stream().await;
    assert_eq!(stream.outline(), "status result");
    stream.result.expect_error("forbidden");
    for endpoint in ["prompt", "status"] {
        let subject = format!("agents.{endpoint}.a2a.acme.demo");
        eventually(|| async {
            let mut replies = Call::new(&inside.client, subject.clone(), "x").begin().await;
            let mut reply = replies.reply().await;
            // The agent protocol acknowledges a prompt first.
            while reply.nats_status.is_none() && reply.header("Nats-Service-Error-Code").is_none() {
                reply = replies.reply().await;
            }
            (reply.header("Nats-Service-Error-Code") == Some("403")).then_some(())
        })
        .await;
    }
    bridge.stats("demo", "echo", 4).await;

    let bob = User::connect(&bridge, "bob").await;
    bob.prompt("echo", "x").header("nats-request-info", ALICE).await.expect_error("forbidden");
    for user in [bob, User::gateway(&bridge, "alice").await] {
        user.prompt("echo", "x").await.expect("COMPLETED");
        assert_eq!(user.request("card.demo", "").await["name"], "demo");
    }
}

#[tokio::test]
async fn gateway_subjects_come_and_go_with_their_endpoint() {
    let bridge = bridge().await;
    let gateway = User::gateway(&bridge, "alice").await;
    gateway.prompt("echo", "x").await.expect("COMPLETED");
    bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
    let without_principal = Call::new(&gateway.client, "a2a.gw.action.demo.echo".to_owned(), "x");
    without_principal.await.expect_error("forbidden");
    let stats = bridge.stats("demo", "echo", 3).await;
    assert_eq!((&stats["num_errors"], &stats["last_error"]), (&json!(1), &json!("403:forbidden")));
    let info = bridge.info("demo").await;
    assert!(!info["endpoints"].to_string().contains("a2a.gw."), "{info}");

    assert!(gateway.prompt("unknown", "x").await.is_no_responders());
    let control = Call::new(&bridge.client, "a2a.control.demo.stop".to_owned(), "");
    control.await;
    eventually(|| async { gateway.prompt("echo", "x").await.is_no_responders().then_some(()) }).await;
    gateway.get_task("unknown").await.expect_error("not_found");
    Call::new(&bridge.client, "a2a.control.demo.start".to_owned(), "").await;
    eventually(|| async { gateway.prompt("echo", "x").await.is("COMPLETED").then_some(()) }).await;
}

#[tokio::test]
async fn updates_of_verified_callers_have_no_content() {
    let bridge = bridge().await;
    let mut updates = bridge.task_updates().await;
    let report = json!({"topic": "tides", "audience": "sailors", "meta": {"session_id": "secret-session"}});
    for user in [User::connect(&bridge, "alice").await, User::gateway(&bridge, "alice").await] {
        let task = user.call("report", report.clone()).mode("submit").await.expect("WORKING").task_id();
        let (_, question) = updates.until("INPUT_REQUIRED").await;
        let bare = json!({"id": task, "context_id": null, "agent": "demo", "skill": null});
        let expected = |status: &str, success: bool| json!({"success": success, "status": status, "message": "", "files": [], "data": {}, "artifacts": [], "task": bare});
        assert_eq!(question, expected("INPUT_REQUIRED", false));
        let asked = user.get_task(&task).await.expect("INPUT_REQUIRED");
        assert!(!asked.message().is_empty());
        user.answer(&asked.follow_up_id()).mode("submit").await;
        assert_eq!(updates.until("COMPLETED").await.1, expected("COMPLETED", true));
        user.get_task(&task).await.expect("COMPLETED").saying("tides");
    }
    // The commands get the content by request.
    let carol = User::connect(&bridge, "carol").await;
    let task = carol.prompt("slow", "1").mode("submit").await.expect("WORKING").task_id();
    let url = bridge.nats.url();
    let watched = tokio::task::spawn_blocking(move || {
        let mut command = command_on(&url, &["task", "watch", "demo", &task]);
        run(command.env("NATS_USER", "carol").env("NATS_PASSWORD", password("carol")), "")
    });
    let watched = watched.await.unwrap();
    assert!(watched.code == 0 && watched.out.contains("worked for 1 s"), "{watched:?}");
    // Callers of the bridge's own account see everything, as they share one identity.
    let task = bridge.call("demo.report", report).mode("submit").await.task_id();
    let (_, question) = updates.until("INPUT_REQUIRED").await;
    assert_eq!(question["task"]["id"], task);
    assert!(!question["message"].as_str().unwrap().is_empty(), "{question}");
    assert!(question["data"]["follow_up_id"].is_string(), "{question}");
}

#[tokio::test]
async fn one_tenant_does_not_take_all_calls_in_flight() {
    let bridge = Bridge::with(launched("demo", &[]).set("max_in_flight", 6))
        .nats("user", "bridge")
        .nats("password", password("bridge"))
        .nats("subject_prefix", "a2a")
        .nats("inbox_prefix", "_INBOX.bridge")
        .start_on(server().await)
        .await;
    let (alice, bob) = (User::connect(&bridge, "alice").await, User::connect(&bridge, "bob").await);
    // A user of the same account.
    let carol = User::connect(&bridge, "carol").await;
    let mut running = Vec::new();
    for (count, user) in [&alice, &alice, &alice, &carol].into_iter().enumerate() {
        running.push(user.prompt("slow", "600").begin().await);
        eventually_eq(count + 1, || async { bridge.tasks("demo").await.len() }).await;
        if count >= 2 {
            alice.prompt("slow", "600").await.expect_error("busy").saying("share");
        }
    }
    carol.prompt("slow", "600").await.expect_error("busy").saying("its account");
    bob.prompt("echo", "x").await.expect("COMPLETED");
}

#[rstest]
#[case(json!("off"), [Value::Null, Value::Null])]
#[case(json!({"bind": "account"}), [json!("TENANT_A"), json!("TENANT_A")])]
#[case(json!({"bind": "user"}), [json!("TENANT_A/alice"), json!("TENANT_A/carol")])]
#[tokio::test]
async fn the_setting_says_what_identifies_a_caller(#[case] identity: Value, #[case] expected: [Value; 2]) {
    let bridge = bridge_with(identity).await;
    let (alice, carol) = (User::connect(&bridge, "alice").await, User::connect(&bridge, "carol").await);
    let seen =
        [seen_caller(alice.prompt("metadata", "x")).await, seen_caller(carol.prompt("metadata", "x")).await];
    assert_eq!(seen, expected);
    let task = alice.prompt("echo", "x").await.task_id();
    let read = carol.get_task(&task).await;
    match expected[0] == expected[1] {
        true => read.expect("COMPLETED"),
        false => read.expect_error("not_found"),
    };
    let gateway = User::gateway(&bridge, "dora").await;
    assert_eq!(seen_caller(gateway.prompt("metadata", "x")).await, "gateway:dora");
}

#[tokio::test]
async fn the_call_log_names_verified_callers_also_of_refused_requests() {
    let bridge = bridge().await;
    bridge.reload(|settings| settings["logging"] = json!({"calls": "all"}));
    bridge.until_logged("configuration reloaded").await;
    let (alice, principal) = (User::connect(&bridge, "alice").await, User::gateway(&bridge, "p-1").await);
    alice.prompt("echo", "x").await.expect("COMPLETED");
    alice.prompt("echo", "x").mode("nonsense").await.expect_error("invalid_request");
    alice.request("card.demo", "").await;
    principal.prompt("stream", "x").await.expect("COMPLETED");
    let callers = eventually(|| async {
        let log = bridge.log();
        // The bridge may be writing the last line.
        let log = log.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let calls =
            log.lines().filter_map(|line| line.split_once("call caller=")?.1.split_once(" agent=demo "));
        let calls: Vec<_> = calls.map(|(caller, rest)| format!("{caller} {}", outcome(rest))).collect();
        (calls.len() == 4).then_some(calls)
    })
    .await;
    let gateway = callers[3].strip_suffix(" stream COMPLETED").unwrap();
    assert!(gateway.ends_with("p-1"), "{callers:?}");
    let alice =
        ["echo COMPLETED", "echo invalid_request", "card ok"].map(|call| format!("TENANT_A/alice {call}"));
    assert_eq!(callers[..3], alice);
}

/// Skill and outcome in a line of the call log.
fn outcome(line: &str) -> String {
    let field = |name: &str| line.split_ascii_whitespace().find_map(|field| field.strip_prefix(name));
    format!("{} {}", field("skill=").unwrap_or_default(), field("outcome=").unwrap_or_default())
}
