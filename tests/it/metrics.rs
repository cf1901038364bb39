//! Metrics and health checks, as Prometheus and an orchestrator see them.

use std::collections::BTreeSet;

use serde_json::json;

use crate::support::commands::repository_file;
use crate::support::processes::free_port;
use crate::support::site::{Site, demo};
use crate::support::{Bridge, launched, wait_until};

async fn get(port: u16, path: &str) -> (u16, String) {
    let response = reqwest::get(format!("http://127.0.0.1:{port}{path}")).await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

/// The value of a series.
fn value(text: &str, series: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
}

#[tokio::test]
async fn calls_are_counted_by_skill_and_streams_by_their_first_token() {
    let port = free_port();
    let bridge = Bridge::with(launched("demo", &[]))
        .set("metrics", json!({"listen": format!("127.0.0.1:{port}")}))
        .start()
        .await;
    bridge.prompt("demo.echo", "hello").await.expect("COMPLETED");
    bridge.prompt("demo.stream", "one two three").stream().await.result.expect("COMPLETED");
    let (_, text) = get(port, "/metrics").await;
    let count = |series: &str| value(&text, series);
    assert_eq!(count(r#"a2a_bridge_calls_total{agent="demo",skill="echo",outcome="COMPLETED"}"#), Some(1.0));
    assert_eq!(
        count(r#"a2a_bridge_calls_total{agent="demo",skill="stream",outcome="COMPLETED"}"#),
        Some(1.0)
    );
    let first_token = |part: &str, skill: &str| {
        format!(r#"a2a_bridge_time_to_first_token_seconds_{part}{{agent="demo",skill="{skill}"}}"#)
    };
    assert_eq!(count(&first_token("count", "stream")), Some(1.0), "{text}");
    assert_eq!(count(&first_token("count", "echo")), None, "a call in mode final has no first token: {text}");
    let duration = r#"a2a_bridge_call_duration_seconds_sum{agent="demo",skill="stream"}"#;
    assert!(count(&first_token("sum", "stream")) < count(duration), "{text}");
    let longest = r#"a2a_bridge_call_duration_seconds_bucket{le="86400.0",agent="demo",skill="echo"}"#;
    assert_eq!(count(longest), Some(1.0), "{text}");
    let version = format!(r#"a2a_bridge_build_info{{version="{}","#, env!("CARGO_PKG_VERSION"));
    assert!(text.contains(&version), "{text}");
    assert!(count("process_resident_memory_bytes") > Some(1e6), "{text}");
    assert!(count("process_cpu_seconds_total") > Some(0.0), "{text}");
    assert!(count("process_open_fds") > Some(5.0) && count("process_max_fds") > Some(100.0), "{text}");
}

#[tokio::test]
async fn reconnects_are_counted() {
    let port = free_port();
    let mut bridge = Bridge::with(launched("demo", &[]))
        .set("metrics", json!({"listen": format!("127.0.0.1:{port}")}))
        .start()
        .await;
    let reconnects = || async { value(&get(port, "/metrics").await.1, "a2a_bridge_nats_reconnects_total") };
    assert_eq!(reconnects().await, Some(0.0));
    bridge.nats.restart().await;
    wait_until(|| async { reconnects().await == Some(1.0) }).await;
}

#[tokio::test]
async fn readiness_may_depend_on_agents() {
    let mut site = Site::new().await;
    let (port, demo) = (free_port(), demo(""));
    site.settings_with(
        &format!("metrics: {{ listen: '127.0.0.1:{port}' }}"),
        &[("a", &demo), ("b", "url: http://127.0.0.1:9")],
    );
    site.start();
    site.until_state("a", "ready").await;
    let ok = (200, "ok\n".to_owned());
    assert_eq!(get(port, "/readyz").await, ok);
    assert_eq!(get(port, "/readyz?agents=any").await, ok);
    assert_eq!(get(port, "/readyz?agents=all").await, (503, "not every agent is ready\n".to_owned()));
    site.settings_with(&format!("metrics: {{ listen: '127.0.0.1:{port}' }}"), &[("a", &demo)]);
    site.signal(nix::sys::signal::Signal::SIGHUP);
    wait_until(|| async { get(port, "/readyz?agents=all").await.0 == 200 }).await;
    site.stop_agent("a").await;
    assert_eq!(get(port, "/readyz?agents=any").await, (503, "no agent is ready\n".to_owned()));
    assert_eq!(get(port, "/readyz").await, ok);
    let (status, text) = get(port, "/readyz?agents=<b>some</b>").await;
    assert_eq!((status, text.contains("some")), (400, false), "{text}");
}

/// The names of metrics in a text.
fn named(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let metrics = words.filter(|word| word.starts_with("a2a_bridge_") || word.starts_with("process_"));
    metrics.map(str::to_owned).collect()
}

/// The names that Prometheus stores for the families in a response.
fn exported(text: &str) -> BTreeSet<String> {
    let families = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let names = families.flat_map(|(name, kind)| {
        let suffixes: &[&str] = match kind {
            "counter" => &["_total"],
            "histogram" => &["_bucket", "_sum", "_count"],
            _ => &[""],
        };
        suffixes.iter().map(move |suffix| format!("{name}{suffix}"))
    });
    names.collect()
}

#[tokio::test]
async fn dashboard_rules_and_manual_name_the_metrics_that_exist() {
    let port = free_port();
    let bridge = Bridge::with(launched("demo", &[]))
        .set("metrics", json!({"listen": format!("127.0.0.1:{port}")}))
        .set("events", json!({}))
        .start()
        .await;
    let exported = exported(&get(port, "/metrics").await.1);
    drop(bridge);
    for file in
        ["deploy/grafana-dashboard.json", "deploy/prometheus-rules.yml", "deploy/prometheus-rules-test.yml"]
    {
        let named = named(&repository_file(file));
        assert!(named.len() > 5, "{file}: {named:?}");
        let unknown: Vec<_> = named.difference(&exported).collect();
        assert!(unknown.is_empty(), "{file} names metrics that do not exist: {unknown:?}");
    }
    let manual = repository_file("docs/src/protocol.md");
    let manual = manual.split_once("\n## Metrics\n").unwrap().1.split_once("\n## ").unwrap().0;
    let named = named(manual);
    let family = |name: &str| {
        let suffixes = ["_bucket", "_sum", "_count"];
        suffixes.iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name).to_owned()
    };
    let families: BTreeSet<String> = exported.iter().map(|name| family(name)).collect();
    assert_eq!(named, families, "the manual lists each metric once");
}
