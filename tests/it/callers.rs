//! The commands as people and scripts use them: the real program, a real server, the demo agent.

mod help;
mod modes;
mod terminal;

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::cli::{Bridge, Said, free_port, on, program, run};
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

    fn say(&self, arguments: &[&str]) -> Said {
        run(on(&self.server.url(), arguments), "")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_and_skills_are_listed_for_people_and_for_programs() {
    let stage = Stage::new().await;
    let agents = stage.say(&["agents"]);
    let lines: Vec<_> = agents.out.lines().collect();
    assert_eq!(lines[0], "NAME  STATUS  SKILLS  RESTARTS  AGE  LAST-ERROR");
    assert!(lines[1].starts_with("demo  ready   8       0         "), "{agents:?}");
    assert!(!agents.out.contains('\x1b'), "no colour where no terminal is");

    let agents = stage.say(&["agents", "list", "--output", "json"]).json();
    assert_eq!((&agents[0]["agent"], &agents[0]["restarts"]), (&json!("demo"), &json!(0)));

    let skills = stage.say(&["skills", "demo"]);
    assert!(skills.out.contains("demo.report      topic, audience  Report writer"), "{skills:?}");
    let skills = stage.say(&["skills", "--json"]).json();
    assert_eq!(skills[0]["subject"], "a2a.action.demo.echo");
    assert_eq!(skills[0]["params"]["required"], json!(["prompt"]));

    let card = stage.say(&["card", "demo", "--json"]).json();
    assert_eq!(card["supportedInterfaces"][0]["protocolVersion"], "1.0");
    let card = stage.say(&["card", "demo"]);
    assert!(card.out.starts_with("demo ") && card.out.contains("A2A 1.0 over JSONRPC at http://127.0.0.1:"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_gives_the_answer_on_stdout_and_nothing_else() {
    let stage = Stage::new().await;
    let said = stage.say(&["call", "demo.echo", "hello"]);
    assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (0, "hello\n", ""));

    let said = run(on(&stage.server.url(), &["call", "a2a.action.demo.echo", "-"]), "two\nlines\n");
    assert_eq!((said.code, said.out.as_str()), (0, "two\nlines\n"));

    let said = stage.say(&["call", "demo.Echo", "by its name", "--json", "--session", "s-1"]);
    assert_eq!(said.code, 0, "{said:?}");
    assert_eq!(said.json()["message"], "by its name");
    assert_eq!(said.json()["task"]["context_id"], "s-1");

    let said = stage.say(&["call", "demo.echo", "x", "--data", r#"{"n": 1, "f": 1.50}"#]);
    assert_eq!(said.out, "x\n{\n  \"n\": 1,\n  \"f\": 1.5\n}\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_question_that_nobody_answers_can_be_answered_later_and_once() {
    let stage = Stage::new().await;
    let asked = stage.say(&["call", "demo.report", "-p", "topic=tides", "-p", "audience=sailors"]);
    assert_eq!((asked.code, asked.out.as_str()), (1, ""), "{asked:?}");
    assert!(asked.err.starts_with("the agent asks: Which format would you like"), "{asked:?}");
    let id = asked.err.split_once("--answer ").unwrap().1.split(' ').next().unwrap();

    let said = stage.say(&["call", "demo", "--answer", id, "Markdown"]);
    assert_eq!(said.out, "Report: Write a report about tides for sailors\n", "{said:?}");
    assert!(said.err.contains("file: report.md (text/markdown, "), "{said:?}");
    let again = stage.say(&["call", "demo", "--answer", id, "Markdown"]);
    assert_eq!(again.code, 1);
    assert!(again.err.contains("hint: the question was answered already"), "{again:?}");

    let asked = stage.say(&["call", "demo.report", "--json", "-p", "topic=a", "-p", "audience=b"]);
    assert_eq!(asked.code, 1);
    assert_eq!(asked.json()["status"], "INPUT_REQUIRED");
}

#[tokio::test(flavor = "multi_thread")]
async fn files_go_there_and_come_back() {
    let stage = Stage::new().await;
    let dir = tempfile::tempdir().unwrap();
    let (note, saved) = (dir.path().join("note.txt"), dir.path().join("saved"));
    std::fs::write(&note, "some words").unwrap();
    let (note, into) = (note.to_str().unwrap(), saved.to_str().unwrap());
    let said = stage.say(&["call", "demo.echo", "x", "--file", note, "--save", into]);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.err.contains("note.txt (text/plain, 10 bytes)"), "{said:?}");
    assert_eq!(std::fs::read_to_string(saved.join("note.txt")).unwrap(), "some words");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_failure_has_its_exit_code_and_says_what_to_try() {
    let stage = Stage::new().await;
    let nowhere = format!("nats://127.0.0.1:{}", free_port());
    let cases: [(&[&str], i32, &str, &str); 14] = [
        (
            &["call", "demo.fail", "no wind"],
            1,
            "failed: planned failure: no wind",
            "hint: the reason is the agent's own",
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
            "hint: give it more time with `--timeout`",
        ),
        (&["call", "demo.ehco", "x"], 69, "agent `demo` has no skill `ehco`", "did you mean `echo`?"),
        (&["call", "dem.echo", "x"], 69, "there is no agent `dem`", "did you mean `demo`?"),
        (&["agents", "show", "dem"], 69, "no bridge serves an agent `dem`", "`a2a-bridge agents`"),
        (&["agents", "stop", "dem"], 69, "no bridge serves an agent `dem`", "`a2a-bridge agents`"),
        (&["logs", "dem"], 69, "no bridge serves an agent `dem`", "`a2a-bridge agents`"),
        (&["call", "demo", "x"], 64, "which skill of agent `demo`?", "it has: auth, echo,"),
        (&["call", "demo.echo", "-p", "topic"], 64, "NAME=VALUE", "hint: "),
        (&["call", "demo.echo", "x", "--timeout", "soon"], 64, "soon", "--help"),
        (
            &["agents", "--nats", &nowhere],
            69,
            "cannot connect to NATS at nats://127.0.0.1:",
            "hint: is a nats-server running there?",
        ),
        (&["agents", "--prefix", "other"], 69, "no agents on NATS", "try `--prefix a2a`"),
        (&["task", "get", "demo", "nope"], 1, "never seen", "hint: the id may be mistyped"),
    ];
    for (arguments, code, what, hint) in cases {
        let said = stage.say(arguments);
        assert_eq!(said.code, code, "{arguments:?}: {said:?}");
        assert_eq!(said.out, "", "{arguments:?}");
        assert!(said.err.contains(what) && said.err.contains(hint), "{arguments:?}: {said:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn init_writes_settings_for_an_agent_that_answers_and_never_overwrites() {
    let stage = Stage::new().await;
    let card = stage.say(&["card", "demo", "--json"]).json();
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
    assert_eq!(std::fs::read_to_string(&file).unwrap(), text, "left as it was");

    let mut check = on(&stage.server.url(), &["check"]);
    check.current_dir(dir.path());
    let said = run(check, "");
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.out.contains("agent `demo`: ok, A2A 1.0"), "{said:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn users_with_the_documented_permissions_can_serve_and_call() {
    let conf = crate::support::cli::root().join("deploy/nats-permissions.conf");
    let conf = std::fs::read_to_string(conf).unwrap();
    let conf = conf.replace("$BRIDGE_PASSWORD", "one").replace("$CALLER_PASSWORD", "two");
    let server = NatsServer::start_configured(&conf).await;
    let demo = std::fs::read_to_string(crate::support::cli::root().join("config/demo.yaml")).unwrap();
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

    // What the caller may not do is said at once, and not by a long silence.
    let elsewhere = say(&["call", "demo.echo", "x", "--prefix", "other"]);
    assert_eq!(elsewhere.code, 69);
    assert!(elsewhere.err.contains("NATS does not permit it"), "{elsewhere:?}");
    for order in ["show", "start", "stop", "restart"] {
        let began = Instant::now();
        let refused = say(&["agents", order, "demo"]);
        assert_eq!(refused.code, 69, "{refused:?}");
        assert!(refused.err.contains("NATS does not permit it"), "{refused:?}");
        assert!(refused.err.contains("`a2a.control.>`"), "{refused:?}");
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    }
    let stranger = run(on(&server.url(), &["agents", "--user", "x", "--password", "y"]), "");
    assert_eq!(stranger.code, 69);
    assert!(stranger.err.contains("the server wants other credentials"), "{stranger:?}");
    assert!(stranger.err.starts_with("error: "), "nothing of the library's own: {stranger:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_with_wrong_credentials_says_so_once_and_what_to_do() {
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
fn a_wrong_prefix_and_a_taken_port_come_with_a_hint() {
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
async fn an_order_that_nobody_answers_says_what_it_waits_for() {
    let server = NatsServer::start().await;
    let client = server.connect().await;
    let _mute = client.subscribe("a2a.control.demo.stop").await.unwrap();
    client.flush().await.unwrap();
    let mut command = on(&server.url(), &["agents", "stop", "demo"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut told = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut told).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(told.contains("no answer yet; waiting 90s at the most"), "{told}");
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
    let file = std::fs::read_to_string(crate::support::cli::root().join("plugin.yaml")).unwrap();
    assert_eq!(run(command, "").out, file);
}
