//! `agents show` explains a problem and what to do; `logs` explains missing output.

use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::support::processes::program;
use crate::support::site::{Site, demo, shell};
use crate::support::{Answer, Peer, eventually, peer};

/// The text without what differs from run to run: paths, ports, process ids, times.
fn normalized(text: &str, site: &Site, changing: &[(String, &str)]) -> String {
    let mut text = text.replace(program(), "PROGRAM");
    text = text.replace(&site.folder().display().to_string(), "FOLDER");
    for (value, name) in changing {
        text = text.replace(value, name);
    }
    let lines = text.lines().map(|line| {
        let indent: String = line.chars().take_while(|c| *c == ' ').collect();
        // A duration in a sentence has a space before its unit.
        let line = line.replace(" ms", "ms").replace(" s,", "s,");
        let mut words: Vec<String> = line.split_whitespace().map(normalized_word).collect();
        if words.first().is_some_and(|word| word == "Instance:") {
            words.truncate(1);
            words.push("ID".into());
        }
        format!("{indent}{}\n", words.join(" "))
    });
    lines.collect()
}

/// A time of day becomes `CLOCK`, a duration `TIME`, a long number `N`.
fn normalized_word(word: &str) -> String {
    let bare = word.trim_end_matches([',', ';', ':']);
    let end = word.get(bare.len()..).unwrap_or_default();
    let is_clock = bare.len() == 12 && bare.bytes().filter(|b| *b == b':').count() == 2;
    let number = bare.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let is_time = number.len() < bare.len()
        && !number.is_empty()
        && number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    if is_clock {
        return "CLOCK".into();
    }
    if is_time {
        return format!("TIME{end}");
    }
    if bare.len() > 3 && bare.bytes().all(|b| b.is_ascii_digit()) {
        return format!("N{end}");
    }
    word.to_owned()
}

#[tokio::test]
async fn agents_show_explains_eight_problems_and_what_to_do() {
    let mut site = Site::new().await;
    let foreign = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = foreign.local_addr().unwrap().port();
    let brief = |switches: &str| format!("{}\nstartup_timeout: 2s", demo(switches));
    let agents = [
        ("command-not-found", "url: http://127.0.0.1:1\ncommand: no-such-program --port 1".to_owned()),
        ("exit-at-once", shell("echo \"Error: cannot open the database\" >&2; exit 3")),
        (
            "port-taken",
            format!("url: http://127.0.0.1:{port}\ncommand: {} demo-agent --port {port}", program()),
        ),
        ("card-missing", brief("--broken-card 404")),
        ("card-invalid", brief("--broken-card html")),
        ("slow-start", brief("--slow-start 1m")),
        ("wrong-token", format!("{}\nbearer_token: not-the-right-one", brief("--bearer right --card-auth"))),
        ("crash-loop", format!("{}\nmax_restarts: 1", shell("echo panic: out of luck; exit 101"))),
    ];
    let agents: Vec<(&str, &str)> = agents.iter().map(|(name, lines)| (*name, lines.as_str())).collect();
    site.settings(&agents);
    site.start();
    let mut all = String::new();
    for (name, _) in agents {
        let state = if name == "crash-loop" { "failed" } else { "backing-off" };
        let report = site.until(name, |report| report.state == state).await;
        let port = report.url.rsplit(':').next().unwrap_or_default().trim_end_matches('/').to_owned();
        // The bridge may retry at any time; the snapshot shows the back-off in between.
        let word = format!("State: {state}");
        let out = eventually(|| async {
            let (code, out, error) = site.run(&["agents", "show", name]).await;
            assert_eq!((code, error.as_str()), (0, ""));
            let line = out.split_whitespace().collect::<Vec<_>>().join(" ");
            line.contains(&word).then_some(out)
        })
        .await;
        assert!(!out.contains("not-the-right-one"));
        let out: String = out
            .lines()
            .filter(|line| !line.contains("Restarts:") && !line.contains("Next retry:"))
            .map(|line| format!("{line}\n"))
            .collect();
        let own = std::process::id().to_string();
        let changing = [
            (format!("127.0.0.1:{port}"), "127.0.0.1:PORT"),
            (format!("port {port}"), "port PORT"),
            (own, "PID"),
        ];
        // The output of a retry repeats the same lines.
        let shown = normalized(&out, &site, &changing);
        let mut lines: Vec<&str> = shown.lines().collect();
        lines.dedup();
        all.push_str(&lines.join("\n"));
        all.push_str("\n\n");
    }
    let me = std::fs::read_to_string("/proc/self/comm").unwrap();
    let all = all.replace(&format!("({})", me.trim()), "(NAME)");
    insta::assert_snapshot!(all);
}

#[tokio::test]
async fn attached_agent_can_be_unpublished_and_published_but_not_restarted() {
    let peer = Peer::completing("done");
    let site = Site::running(&[("a", &format!("url: {}", peer.url()))]).await;
    site.until_state("a", "ready").await;
    for arguments in [&["agents", "restart", "a"][..], &["agents", "restart", "a", "--json"]] {
        let (code, out, error) = site.run(arguments).await;
        assert_eq!((code, out.as_str()), (1, ""), "{error}");
        assert!(error.contains("the bridge did not start this agent and cannot restart it"), "{error}");
    }
    let (code, out, error) = site.run(&["agents", "stop", "a"]).await;
    assert!(code == 0 && out.starts_with("a: stopped\n"), "{out}{error}");
    assert!(out.contains("the agent may still be running"), "{out}");
    let (code, out, error) = site.run(&["agents", "start", "a"]).await;
    assert_eq!((code, out.as_str()), (0, "a: ready\n"), "{error}");
}

#[tokio::test]
async fn json_has_the_texts_of_the_card_and_times_of_one_form() {
    let mut card = peer::card(&["ask"]);
    card["version"] = json!("1");
    let peer = Peer::agent_with_card(card, |seen| Answer::task(seen, "TASK_STATE_COMPLETED", "done"));
    let site = Site::running(&[("a", &format!("url: {}", peer.url()))]).await;
    site.until_state("a", "ready").await;
    let json = async |arguments: &[&str]| -> Value {
        let (code, out, error) = site.run(arguments).await;
        assert_eq!(code, 0, "{error}");
        serde_json::from_str::<Value>(&out).unwrap()[0].take()
    };
    let (listed, shown) = (json(&["agents", "--json"]).await, json(&["agents", "show", "a", "--json"]).await);
    assert_eq!((&listed["description"], &listed["version"]), (&json!("A peer"), &json!("1")));
    assert_eq!(listed["since"], shown["since"]);
    let since = shown["since"].as_str().unwrap();
    let digits = since.replace(|c: char| c.is_ascii_digit(), "0");
    assert_eq!(digits, "0000-00-00T00:00:00.000Z", "{since}");
}

#[tokio::test]
async fn logs_of_an_attached_agent_say_why_there_are_none() {
    let site = Site::running(&[("a", "url: http://127.0.0.1:1")]).await;
    site.until_state("a", "backing-off").await;
    for arguments in [&["logs", "a"][..], &["logs", "--follow"]] {
        let (code, out, error) = site.run(arguments).await;
        assert_eq!((code, out.as_str()), (0, ""), "{error}");
        assert_eq!(error, "a: the bridge did not launch this agent, so it has no output\n");
    }
}
