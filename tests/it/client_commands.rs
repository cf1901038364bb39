//! The commands as users and scripts run them: the real program, a real server, the demo agent.

mod help;
mod stream_and_submit;
mod terminal;

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::commands::{Bridge, Said, free_port, on, program, run};
use crate::support::nats::NatsServer;

/// A server, a bridge and the demo agent.
struct Stage {
    // Dropped in this order: a bridge that has lost its server takes longer to stop.
    _bridge: Bridge,
    server: NatsServer,
}

impl Stage {
    async fn new() -> Self {
        let server = NatsServer::start().await;
        let bridge = Bridge::demo(&server).await;
        Self { server, _bridge: bridge }
    }

    fn run(&self, arguments: &[&str]) -> Said {
        run(on(&self.server.url(), arguments), "")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_skills_and_cards_are_shown_as_tables_and_as_json() {
    let stage = Stage::new().await;
    let agents = stage.run(&["agents"]);
    let lines: Vec<_> = agents.out.lines().collect();
    assert_eq!(lines[0], "NAME  STATUS  SKILLS  RESTARTS  AGE  LAST-ERROR");
    assert!(lines[1].starts_with("demo  ready   8       0         "), "{agents:?}");
    assert!(!agents.out.contains('\x1b'), "no colours outside of a terminal");

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
async fn a_call_prints_the_answer_and_nothing_else_on_stdout() {
    let stage = Stage::new().await;
    let said = stage.run(&["call", "demo.echo", "hello"]);
    assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (0, "hello\n", ""));

    let said = run(on(&stage.server.url(), &["call", "a2a.action.demo.echo", "-"]), "two\nlines\n");
    assert_eq!((said.code, said.out.as_str()), (0, "two\nlines\n"));

    let said = stage.run(&["call", "demo.Echo", "by its name", "--json", "--session", "s-1"]);
    assert_eq!(said.code, 0, "{said:?}");
    assert_eq!(said.json()["message"], "by its name");
    assert_eq!(said.json()["task"]["context_id"], "s-1");

    let said = stage.run(&["call", "demo.echo", "x", "--data", r#"{"n": 1, "f": 1.50}"#]);
    assert_eq!(said.out, "x\n{\n  \"n\": 1,\n  \"f\": 1.5\n}\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_question_can_be_answered_later_but_only_once() {
    let stage = Stage::new().await;
    let asked = stage.run(&["call", "demo.report", "-p", "topic=tides", "-p", "audience=sailors"]);
    assert_eq!((asked.code, asked.out.as_str()), (1, ""), "{asked:?}");
    assert!(asked.err.starts_with("the agent asks: Which format would you like"), "{asked:?}");
    let id = asked.err.split_once("--answer ").unwrap().1.split(' ').next().unwrap();

    let said = stage.run(&["call", "demo", "--answer", id, "Markdown"]);
    assert_eq!(said.out, "Report: Write a report about tides for sailors\n", "{said:?}");
    assert!(said.err.contains("file: report.md (text/markdown, "), "{said:?}");
    let again = stage.run(&["call", "demo", "--answer", id, "Markdown"]);
    assert_eq!(again.code, 1);
    assert!(again.err.contains("hint: the question was already answered"), "{again:?}");

    let asked = stage.run(&["call", "demo.report", "--json", "-p", "topic=a", "-p", "audience=b"]);
    assert_eq!(asked.code, 1);
    assert_eq!(asked.json()["status"], "INPUT_REQUIRED");
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_sent_and_saved() {
    let stage = Stage::new().await;
    let dir = tempfile::tempdir().unwrap();
    let (note, saved) = (dir.path().join("note.txt"), dir.path().join("saved"));
    std::fs::write(&note, "some words").unwrap();
    let (note, into) = (note.to_str().unwrap(), saved.to_str().unwrap());
    let said = stage.run(&["call", "demo.echo", "x", "--file", note, "--save", into]);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.err.contains("note.txt (text/plain, 10 bytes)"), "{said:?}");
    assert_eq!(std::fs::read_to_string(saved.join("note.txt")).unwrap(), "some words");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_error_has_an_exit_code_and_a_hint() {
    let stage = Stage::new().await;
    let nowhere = format!("nats://127.0.0.1:{}", free_port());
    let cases: [(&[&str], i32, &str, &str); 14] = [
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
            &["call", "demo.slow", "30", "--timeout", "300ms"],
            1,
            "error: ",
            "hint: raise the limit with `--timeout`",
        ),
        (&["call", "demo.ehco", "x"], 69, "agent `demo` has no skill `ehco`", "did you mean `echo`?"),
        (&["call", "dem.echo", "x"], 69, "there is no agent `dem`", "did you mean `demo`?"),
        (&["agents", "show", "dem"], 69, "no bridge serves an agent `dem`", "`a2a-bridge agents`"),
        (&["agents", "stop", "dem"], 69, "no bridge serves an agent `dem`", "`a2a-bridge agents`"),
        (&["logs", "dem"], 69, "no bridge serves an agent `dem`", "`a2a-bridge agents`"),
        (&["call", "demo", "x"], 64, "which skill of agent `demo`?", "its skills are: auth, echo,"),
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
        let said = stage.run(arguments);
        assert_eq!(said.code, code, "{arguments:?}: {said:?}");
        assert_eq!(said.out, "", "{arguments:?}");
        assert!(said.err.contains(what) && said.err.contains(hint), "{arguments:?}: {said:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn init_writes_a_configuration_for_a_running_agent_and_never_overwrites() {
    let stage = Stage::new().await;
    let card = stage.run(&["card", "demo", "--json"]).json();
    let url = card["supportedInterfaces"][0]["url"].as_str().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let init = |arguments: &[&str]| {
        let mut command = program();
        command.arg("init").args(arguments).current_dir(dir.path());
        run(command, "")
    };
    let said = init(&["--from", url]);
    assert_eq!((said.code, said.out.as_str()), (0, ""), "{said:?}");
    let file = dir.path().join("a2a-bridge.yaml");
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("- name: demo\n") && text.contains("#   report: Write a report"), "{text}");
    assert_eq!(init(&[]).code, 64);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), text, "not overwritten");

    let mut check = on(&stage.server.url(), &["check"]);
    check.current_dir(dir.path());
    let said = run(check, "");
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.out.contains("agent `demo`: ok, A2A 1.0"), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn users_with_the_documented_permissions_can_serve_and_call() {
    let conf = crate::support::commands::root().join("deploy/nats-permissions.conf");
    let conf = std::fs::read_to_string(conf).unwrap();
    let conf = conf.replace("$BRIDGE_PASSWORD", "one").replace("$CALLER_PASSWORD", "two");
    let server = NatsServer::start_configured(&conf).await;
    let demo = std::fs::read_to_string(crate::support::commands::root().join("config/demo.yaml")).unwrap();
    let settings = demo
        .replace("${DEMO_PORT:-9000}", &free_port().to_string())
        .replace("nats:\n", "nats:\n  user: bridge\n  password: one\n");
    let bridge = Bridge::start(&server, &settings).await;
    let caller = ["--user", "caller", "--password", "two"];
    bridge.ready(&server.url(), &caller).await;
    let say = |arguments: &[&str]| {
        let mut command = on(&server.url(), arguments);
        command.args(caller);
        run(command, "")
    };
    assert_eq!(say(&["call", "demo.echo", "hello"]).out, "hello\n");
    assert!(say(&["card", "demo"]).out.contains("A2A 1.0"));
    assert_eq!(say(&["skills", "demo"]).code, 0);
    assert_eq!(say(&["task", "get", "demo", "nope"]).code, 1);
    assert!(!bridge.log().contains("ermissions"), "{}", bridge.log());

    // A denied permission is reported at once, not after a timeout.
    let elsewhere = say(&["call", "demo.echo", "x", "--prefix", "other"]);
    assert_eq!(elsewhere.code, 69);
    assert!(elsewhere.err.contains("permission denied by NATS"), "{elsewhere:?}");
    for order in ["show", "start", "stop", "restart"] {
        let began = Instant::now();
        let refused = say(&["agents", order, "demo"]);
        assert_eq!(refused.code, 69, "{refused:?}");
        assert!(refused.err.contains("permission denied by NATS"), "{refused:?}");
        assert!(refused.err.contains("`a2a.control.>`"), "{refused:?}");
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    }
    let stranger = run(on(&server.url(), &["agents", "--user", "x", "--password", "y"]), "");
    assert_eq!(stranger.code, 69);
    assert!(stranger.err.contains("the server rejects these credentials"), "{stranger:?}");
    assert!(stranger.err.starts_with("error: "), "no log lines of the NATS library: {stranger:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_credentials_are_one_error_with_a_hint() {
    let server = NatsServer::start_configured("authorization { user: u, password: p }").await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bridge.yaml");
    let settings = format!(
        "nats: {{ url: '{}', user: u, password: wrong }}\nagents: [{{ name: a, url: 'http://127.0.0.1:1' }}]",
        server.url()
    );
    std::fs::write(&file, settings).unwrap();
    let mut command = program();
    command.args(["run", "--config"]).arg(&file);
    let said = run(command, "");
    assert_eq!(said.code, 69, "{said:?}");
    assert!(said.err.starts_with("error: ") && said.err.contains("\nhint: "), "{said:?}");
}

#[test]
fn an_invalid_prefix_and_a_used_port_have_a_hint() {
    let mut command = program();
    command.args(["agents", "--prefix", "a b"]);
    let said = run(command, "");
    assert!(said.code == 64 && said.err.contains("\nhint: "), "{said:?}");
    assert!(said.err.contains("`nats.subject_prefix`"), "{said:?}");

    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = program();
    command.args(["demo-agent", "--port", &taken.local_addr().unwrap().port().to_string()]);
    let said = run(command, "");
    assert!(said.code == 1 && said.err.contains("\nhint: "), "{said:?}");
    assert!(said.err.contains("`--port 0`"), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_control_request_without_a_reply_says_how_long_it_waits() {
    let server = NatsServer::start().await;
    let client = server.connect().await;
    let _mute = client.subscribe("a2a.control.demo.stop").await.unwrap();
    client.flush().await.unwrap();
    let mut command = on(&server.url(), &["agents", "stop", "demo"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(line.contains("no reply yet; waiting up to 90s"), "{line}");
}

#[test]
fn completions_and_the_manifest_are_printed() {
    for shell in ["bash", "zsh", "fish"] {
        let mut command = program();
        command.args(["completions", shell]);
        let said = run(command, "");
        assert!(said.code == 0 && said.out.contains("demo-agent"), "{shell}");
    }
    let mut command = program();
    command.arg("plugin");
    let file = std::fs::read_to_string(crate::support::commands::root().join("plugin.yaml")).unwrap();
    assert_eq!(run(command, "").out, file);
}
