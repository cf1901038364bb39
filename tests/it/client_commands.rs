//! The commands of callers and operators, against a real bridge with the demo agent.

mod connection;
mod help;
mod load;
mod lost_bridge;
mod sessions;
mod stream_and_submit;
mod terminal;

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;
use std::time::Instant;

use serde_json::json;

use crate::support::commands::{
    BundledBridge, CommandOutput, command, command_on, demo_settings, repository_file, run,
};
use crate::support::processes::free_port;
use crate::support::{DEADLINE, NatsServer};

/// A NATS server and a bridge with the demo agent.
struct Stage {
    // Dropped in this order: a bridge that lost its server takes longer to stop.
    _bridge: BundledBridge,
    server: NatsServer,
}

impl Stage {
    async fn new() -> Self {
        let server = NatsServer::start().await;
        let bridge = BundledBridge::demo(&server).await;
        Self { server, _bridge: bridge }
    }

    fn run(&self, arguments: &[&str]) -> CommandOutput {
        run(&mut command_on(&self.server.url(), arguments), "")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_skills_and_card_print_tables_or_json() {
    let stage = Stage::new().await;
    let agents = stage.run(&["agents"]);
    let lines: Vec<_> = agents.out.lines().collect();
    assert_eq!(lines[0], "NAME  STATE  SKILLS  RESTARTS  AGE  PROBLEM");
    assert!(lines[1].starts_with("demo  ready  8       0         "), "{agents:?}");
    assert!(!agents.out.contains('\x1b'), "no colour without a terminal");

    let agents = stage.run(&["agents", "list", "--output", "json"]).json();
    assert_eq!((&agents[0]["agent"], &agents[0]["restarts"]), (&json!("demo"), &json!(0)));

    let skills = stage.run(&["skills", "demo"]);
    assert!(skills.out.contains("demo.report      topic, audience  Report writer"), "{skills:?}");
    let skills = stage.run(&["skills", "--json"]).json();
    assert_eq!(skills[0]["subject"], "a2a.action.demo.echo");
    assert_eq!(skills[0]["params"]["required"], json!(["prompt"]));

    let card = stage.run(&["card", "demo", "--json"]).json();
    assert_eq!(card["supportedInterfaces"][0]["protocolVersion"], "1.0");
    let card = stage.run(&["card", "demo"]);
    assert!(card.out.starts_with("demo ") && card.out.contains("A2A 1.0 over JSONRPC at http://127.0.0.1:"));
}

#[tokio::test(flavor = "multi_thread")]
async fn call_prints_only_the_answer_to_stdout() {
    let stage = Stage::new().await;
    let output = stage.run(&["call", "demo.echo", "hello"]);
    assert_eq!((output.code, output.out.as_str(), output.err.as_str()), (0, "hello\n", ""));

    let mut call = command_on(&stage.server.url(), &["call", "a2a.action.demo.echo", "-"]);
    let output = run(&mut call, "two\nlines\n");
    assert_eq!((output.code, output.out.as_str()), (0, "two\nlines\n"));

    let output = stage.run(&["call", "demo.Echo", "by its name", "--json", "--session", "s-1"]);
    assert_eq!(output.code, 0, "{output:?}");
    assert_eq!(output.json()["message"], "by its name");
    assert_eq!(output.json()["task"]["context_id"], "s-1");

    for text in ["-5", "- milk", "--- a b"] {
        let output = stage.run(&["call", "demo.echo", text]);
        assert_eq!((output.code, output.out), (0, format!("{text}\n")), "{}", output.err);
    }
    let output = stage.run(&["call", "demo.echo", "--session", "s-1", "--", "--stream"]);
    assert_eq!((output.code, output.out.as_str()), (0, "--stream\n"), "{output:?}");
    let output = stage.run(&["call", "demo.echo", "--strem"]);
    assert!(output.code == 64 && output.err.contains("unknown option `--strem`"), "{output:?}");
    let output = stage.run(&["call", "demo.report"]);
    assert!(output.err.contains("parameters `topic`, `audience` are missing"), "{output:?}");

    let output = stage.run(&["call", "demo.echo", "x", "--data", r#"{"n": 1, "f": 1.50}"#]);
    assert_eq!(output.out, "x\n{\n  \"n\": 1,\n  \"f\": 1.5\n}\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn follow_up_can_be_answered_later_but_only_once() {
    let stage = Stage::new().await;
    let asked = stage.run(&["call", "demo.report", "-p", "topic=tides", "-p", "audience=sailors"]);
    assert_eq!((asked.code, asked.out.as_str()), (1, ""), "{asked:?}");
    assert!(asked.err.starts_with("the agent asks: Which format would you like"), "{asked:?}");
    let id = asked.err.split_once("--answer ").unwrap().1.split(' ').next().unwrap();

    let output = stage.run(&["call", "demo", "--answer", id, "Markdown"]);
    assert_eq!(output.out, "Report: Write a report about tides for sailors\n", "{output:?}");
    assert!(output.err.contains("file: report.md (text/markdown, "), "{output:?}");
    let again = stage.run(&["call", "demo", "--answer", id, "Markdown"]);
    assert_eq!(again.code, 1);
    assert!(again.err.contains("hint: the question was already answered"), "{again:?}");

    let asked = stage.run(&["call", "demo.report", "--json", "-p", "topic=a", "-p", "audience=b"]);
    assert_eq!(asked.code, 1);
    assert_eq!(asked.json()["status"], "INPUT_REQUIRED");
}

#[tokio::test(flavor = "multi_thread")]
async fn call_sends_and_saves_files() {
    let stage = Stage::new().await;
    let dir = tempfile::tempdir().unwrap();
    let (note, saved) = (dir.path().join("note.txt"), dir.path().join("saved"));
    std::fs::write(&note, "some words").unwrap();
    let (note, into) = (note.to_str().unwrap(), saved.to_str().unwrap());
    let output = stage.run(&["call", "demo.echo", "x", "--file", note, "--save", into]);
    assert_eq!(output.code, 0, "{output:?}");
    assert!(output.err.contains("note.txt (text/plain, 10 bytes)"), "{output:?}");
    assert_eq!(std::fs::read_to_string(saved.join("note.txt")).unwrap(), "some words");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_failure_has_an_exit_code_and_a_hint() {
    let stage = Stage::new().await;
    let nowhere = format!("nats://127.0.0.1:{}", free_port());
    let cases: [(&[&str], i32, &str, &str); 15] = [
        (
            &["call", "demo.fail", "no wind"],
            1,
            "failed: planned failure: no wind",
            "hint: the agent gave this reason",
        ),
        (
            &["call", "demo.report", "-p", "topic=x"],
            1,
            "parameter `audience` is missing",
            "hint: `a2a-bridge skills demo`",
        ),
        (
            &["call", "demo.report"],
            1,
            "parameters `topic`, `audience` are missing",
            "hint: `a2a-bridge skills demo`",
        ),
        (
            &["call", "demo.slow", "30", "--timeout", "300ms"],
            1,
            "error: ",
            "hint: raise `--timeout` if you set it",
        ),
        (&["call", "demo.ehco", "x"], 69, "agent `demo` has no skill `ehco`", "did you mean `echo`?"),
        (&["call", "dem.echo", "x"], 69, "there is no agent `dem`", "did you mean `demo`?"),
        (&["agents", "show", "dem"], 69, "there is no agent `dem`", "did you mean `demo`?"),
        (&["agents", "stop", "dem"], 69, "there is no agent `dem`", "did you mean `demo`?"),
        (&["logs", "dem"], 69, "there is no agent `dem`", "did you mean `demo`?"),
        (&["call", "demo", "x"], 64, "no skill given; use `demo.SKILL`", "its skills are: auth, echo,"),
        (&["call", "demo.echo", "-p", "topic"], 64, "NAME=VALUE", "hint: "),
        (&["call", "demo.echo", "x", "--timeout", "soon"], 64, "soon", "--help"),
        (
            &["agents", "--nats", &nowhere],
            69,
            "cannot connect to NATS at nats://127.0.0.1:",
            "hint: is a nats-server running there?",
        ),
        (&["agents", "--prefix", "other"], 69, "no agents on NATS", "try `--prefix a2a`"),
        (&["task", "get", "demo", "nope"], 1, "this task is unknown", "hint: the id may be mistyped"),
    ];
    for (arguments, code, what, hint) in cases {
        let output = stage.run(arguments);
        assert_eq!(output.code, code, "{arguments:?}: {output:?}");
        assert_eq!(output.out, "", "{arguments:?}");
        assert!(output.err.contains(what) && output.err.contains(hint), "{arguments:?}: {output:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn init_writes_settings_for_a_running_agent_and_never_overwrites() {
    let stage = Stage::new().await;
    let card = stage.run(&["card", "demo", "--json"]).json();
    let url = card["supportedInterfaces"][0]["url"].as_str().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let init = |arguments: &[&str]| run(command(&["init"]).args(arguments).current_dir(dir.path()), "");
    let output = init(&["--from", url]);
    assert_eq!((output.code, output.out.as_str()), (0, ""), "{output:?}");
    let file = dir.path().join("a2a-bridge.yaml");
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("- name: demo\n") && text.contains("#   report: Write a report"), "{text}");
    assert_eq!(init(&[]).code, 64);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), text, "unchanged");

    let output = run(command_on(&stage.server.url(), &["check"]).current_dir(dir.path()), "");
    assert_eq!(output.code, 0, "{output:?}");
    assert!(output.out.contains("✓ agent demo: ok, A2A 1.0"), "{output:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn documented_nats_permissions_suffice_to_serve_and_to_call() {
    let conf = repository_file("deploy/nats-permissions.conf");
    let conf = conf.replace("$BRIDGE_PASSWORD", "one").replace("$ALICE_PASSWORD", "two");
    let conf = conf
        .replace("$BOB_PASSWORD", "three")
        .replace("$OPERATOR_PASSWORD", "four")
        .replace("$GATEWAY_PASSWORD", "five");
    let server = NatsServer::start_configured(&conf).await;
    let nats = "nats:\n  user: bridge\n  password: one\n  inbox_prefix: _INBOX.bridge\n";
    let settings = demo_settings().replace("nats:\n", nats);
    let bridge = BundledBridge::start(&server, &settings).await;
    let caller = ["--user", "alice", "--password", "two", "--inbox-prefix", "_INBOX.alice"];
    bridge.until_ready(&server.url(), &caller).await;
    let run_as_caller = |arguments: &[&str]| run(command_on(&server.url(), arguments).args(caller), "");
    assert_eq!(run_as_caller(&["call", "demo.echo", "hello"]).out, "hello\n");
    assert!(run_as_caller(&["card", "demo"]).out.contains("A2A 1.0"));
    assert_eq!(run_as_caller(&["skills", "demo"]).code, 0);
    assert_eq!(run_as_caller(&["task", "get", "demo", "nope"]).code, 1);
    assert!(!bridge.log().contains("ermissions"), "{}", bridge.log());

    // A missing permission is reported at once, not after a timeout.
    let elsewhere = run_as_caller(&["call", "demo.echo", "x", "--prefix", "other"]);
    assert_eq!(elsewhere.code, 69);
    assert!(elsewhere.err.contains("permission denied by NATS"), "{elsewhere:?}");
    for order in ["show", "start", "stop", "restart"] {
        let began = Instant::now();
        let refused = run_as_caller(&["agents", order, "demo"]);
        assert_eq!(refused.code, 69, "{refused:?}");
        assert!(refused.err.contains("permission denied by NATS"), "{refused:?}");
        assert!(refused.err.contains("`a2a.control.>`"), "{refused:?}");
        assert!(began.elapsed() < DEADLINE, "{:?}", began.elapsed());
    }
    // The default inboxes are not permitted, and the message says what to do.
    let arguments = ["call", "demo.echo", "x", "--user", "alice", "--password", "two"];
    let shared = run(&mut command_on(&server.url(), &arguments), "");
    assert!(shared.code == 69 && shared.err.contains("--inbox-prefix"), "{shared:?}");
    let stranger = run(&mut command_on(&server.url(), &["agents", "--user", "x", "--password", "y"]), "");
    assert_eq!(stranger.code, 69);
    assert!(stranger.err.contains("the server rejects these credentials"), "{stranger:?}");
    assert!(stranger.err.starts_with("error: "), "no message of the NATS library: {stranger:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn run_with_wrong_nats_credentials_fails_with_a_hint() {
    let server = NatsServer::start_configured("authorization { user: u, password: p }").await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bridge.yaml");
    let settings = format!(
        "nats: {{ url: '{}', user: u, password: wrong }}\nagents: [{{ name: a, url: 'http://127.0.0.1:1' }}]",
        server.url()
    );
    std::fs::write(&file, settings).unwrap();
    let output = run(command(&["run", "--config"]).arg(&file), "");
    assert_eq!(output.code, 69, "{output:?}");
    assert!(output.err.starts_with("error: ") && output.err.contains("\nhint: "), "{output:?}");
}

#[test]
fn invalid_prefix_and_port_in_use_fail_with_a_hint() {
    let output = run(&mut command(&["agents", "--prefix", "a b"]), "");
    assert!(output.code == 64 && output.err.contains("\nhint: "), "{output:?}");
    assert!(output.err.contains("`nats.subject_prefix`"), "{output:?}");

    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = run(&mut command(&["demo-agent", "--port", &port]), "");
    assert!(output.code == 1 && output.err.contains("\nhint: "), "{output:?}");
    assert!(output.err.contains("`--port 0`"), "{output:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn control_command_without_a_reply_says_how_long_it_waits() {
    let server = NatsServer::start().await;
    let client = server.connect().await;
    let _mute = client.subscribe("a2a.control.demo.stop").await.unwrap();
    client.flush().await.unwrap();
    let mut command = command_on(&server.url(), &["agents", "stop", "demo"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(line.contains("no reply yet; waiting up to 90s"), "{line}");
}

#[test]
fn completions_and_the_plugin_manifest_are_printed() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run(&mut command(&["completions", shell]), "");
        assert!(output.code == 0 && output.out.contains("demo-agent"), "{shell}");
    }
    assert_eq!(run(&mut command(&["plugin"]), "").out, repository_file("plugin.yaml"));
}
