//! What agents send is safe to show on a terminal, and exact in a pipe.

use std::io::Read as _;
use std::process::{Command, Stdio};

use nix::pty::openpty;
use serde_json::json;

use crate::support::commands::{command_on, run};
use crate::support::peer::card;
use crate::support::{Answer, Bridge, Peer, attached, launched};

/// Clears the screen, sets the title, moves the cursor, reorders text, and forges a line.
const HOSTILE: &str = "a\x1b[2J\x1b]0;title\x07\u{9b}31m\x1b[8m\u{202e}b\u{2066}\0\x08\x7f\r\nState: forged";
/// The colours of the bridge's own output.
const COLOURS: [&str; 6] = ["\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[33m"];

/// Runs a command on a terminal; everything that it writes there.
fn on_terminal(command: &mut Command) -> String {
    let pty = openpty(None, None).unwrap();
    let mut child = command
        .env("TERM", "xterm")
        .stdin(Stdio::null())
        .stdout(Stdio::from(pty.slave.try_clone().unwrap()))
        .stderr(Stdio::from(pty.slave))
        .spawn()
        .unwrap();
    // The command holds the terminal's other end, too.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut terminal = std::fs::File::from(pty.master);
    let mut output = Vec::new();
    // At the end, reading fails on Linux.
    let _ = terminal.read_to_end(&mut output);
    child.wait().unwrap();
    String::from_utf8(output).unwrap()
}

fn assert_safe(what: &str, output: &str) {
    let mut text = output.replace("\r\n", "\n");
    for colour in COLOURS {
        text = text.replace(colour, "");
    }
    let acts = |c: char| {
        (c.is_control() && !matches!(c, '\n' | '\t'))
            || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    assert!(!text.contains(acts), "{what}: {output:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_command_lets_an_agent_control_the_terminal() {
    let mut hostile = card(&["ask"]);
    for key in ["name", "description", "version"] {
        hostile[key] = HOSTILE.into();
    }
    hostile["skills"][0]["name"] = HOSTILE.into();
    hostile["skills"][0]["description"] = HOSTILE.into();
    let peer = Peer::agent_with_card(hostile, |seen| match seen.json().to_string() {
        text if text.contains("fail") => {
            Answer::error(seen, &json!({"code": -32603, "message": HOSTILE, "data": HOSTILE}))
        }
        text if text.contains("ask me") => Answer::task(seen, "TASK_STATE_INPUT_REQUIRED", HOSTILE),
        text if text.contains("work") => {
            let status = json!({"state": "TASK_STATE_WORKING"});
            Answer::result(seen, &json!({"task": {"id": HOSTILE, "contextId": "c", "status": status}}))
        }
        _ => Answer::task(seen, "TASK_STATE_COMPLETED", HOSTILE),
    });
    let not_a_card = Peer::start(|_| Answer::text(200, "text/html", HOSTILE));
    let line = r"printf 'a\033[2J\033]0;t\a\302\233b\r\n'; exec sleep 100";
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .and(attached("page", &not_a_card.url()))
        .and(launched("noisy", &[]).set("shell", true).set("command", line))
        .nats("subject_prefix", "a2a")
        .start_early()
        .await;
    bridge.until("peer", "ready").await;
    bridge.until_logged("agent=page").await;
    let url = bridge.nats.url();
    let settings = bridge.settings_file().display().to_string();
    for arguments in [
        &["call", "peer.ask", "hello"][..],
        &["call", "peer.ask", "hello", "--json"],
        &["call", "peer.ask", "hello", "--stream"],
        &["call", "peer.ask", "fail"],
        &["call", "peer.ask", "ask me", "--no-input"],
        &["call", "peer.ask", "work", "--submit"],
        &["call", "peer.nope", "x"],
        &["agents"],
        &["agents", "--json"],
        &["agents", "show", "peer"],
        &["agents", "show", "page"],
        &["skills", "peer"],
        &["card", "peer"],
        &["card", "peer", "--json"],
        &["card", "page"],
        &["logs", "noisy"],
        &["check", "--config", &settings],
    ] {
        let output = on_terminal(&mut command_on(&url, arguments));
        assert!(!output.is_empty(), "{arguments:?}");
        assert_safe(&arguments.join(" "), &output);
    }
    let show = run(&mut command_on(&url, &["agents", "show", "peer"]), "");
    assert!(!show.out.lines().any(|line| line.trim_start().starts_with("State: forged")), "{show:?}");
    let piped = run(&mut command_on(&url, &["call", "peer.ask", "hello"]), "");
    assert_eq!(piped.out.trim_end(), HOSTILE, "a pipe gets the exact text");
    let submitted = run(&mut command_on(&url, &["call", "peer.ask", "work", "--submit"]), "");
    assert!(submitted.err.contains("task watch peer '"), "the id is quoted for a shell: {submitted:?}");
}
