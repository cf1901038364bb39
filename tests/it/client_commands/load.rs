//! `task list` and `top`.

use serde_json::Value;

use super::Stage;
use crate::support::commands::{BundledBridge, CommandOutput, command_on, run};
use crate::support::eventually;

fn ids(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|task| task["id"].as_str().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_of_all_replicas_are_listed_and_bounded() {
    let stage = Stage::new().await;
    let _replica = BundledBridge::demo(&stage.server).await;
    let mut submitted = Vec::new();
    for _ in 0..6 {
        let output = stage.run(&["call", "demo.slow", "60", "--submit"]);
        submitted.push(output.out.trim().to_owned());
    }
    let ended =
        stage.run(&["call", "demo.echo", "x", "--json"]).json()["task"]["id"].as_str().unwrap().to_owned();
    let list = stage.run(&["task", "list", "--json"]).json();
    let listed = ids(&list);
    assert_eq!(listed.len(), 7, "{list}");
    assert!(submitted.iter().chain([&ended]).all(|id| listed.contains(&id.as_str())), "{list}");
    let echo = list.as_array().unwrap().iter().find(|task| task["id"] == *ended).unwrap();
    assert_eq!(
        (&echo["state"], &echo["skill"], &echo["open"]),
        (&"completed".into(), &"echo".into(), &false.into())
    );
    let open = stage.run(&["task", "list", "demo", "--open", "--json"]).json();
    assert_eq!(ids(&open).len(), 6, "{open}");
    assert!(open.as_array().unwrap().iter().all(|task| task["open"] == true && task["submitted"] == true));

    let table = stage.run(&["task", "list", "-n", "2"]);
    assert_eq!(table.out.lines().count(), 3, "{table:?}");
    assert!(table.out.starts_with("AGENT  TASK "), "{table:?}");
    assert!(table.err.contains("5 older tasks not shown"), "{table:?}");
    let unknown = stage.run(&["task", "list", "dmo"]);
    assert!(unknown.code == 69 && unknown.err.contains("did you mean `demo`?"), "{unknown:?}");
    for id in submitted {
        // Either replica may have it.
        let _ = stage.run(&["task", "cancel", "demo", &id]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn load_has_calls_errors_and_latencies() {
    let stage = Stage::new().await;
    let call = |arguments: &[&str]| stage.run(&[&["call"], arguments].concat());
    let top = |arguments: &[&str]| -> CommandOutput {
        let mut command = command_on(&stage.server.url(), &["top", "--interval", "500ms"]);
        run(command.args(arguments), "")
    };
    call(&["demo.echo", "x"]);
    call(&["demo.slow", "1"]);
    call(&["demo.report", "--param", "topic=x"]);
    // A look-up is not a call.
    stage.run(&["card", "demo"]);
    let load = top(&["--json"]).json();
    let row = &load[0];
    assert_eq!((&row["name"], &row["state"], &row["replicas"]), (&"demo".into(), &"ready".into(), &1.into()));
    assert_eq!((&row["calls"], &row["errors"]), (&3.into(), &1.into()), "{load}");
    let [p50, p99] = ["p50_ms", "p99_ms"].map(|key| row[key].as_f64().unwrap());
    assert!(p50 < 1000.0 && (1000.0..2000.0).contains(&p99), "{load}");

    let skills = top(&["demo", "--json", "--sort", "p99"]).json();
    assert_eq!((&skills[0]["name"], &skills[0]["calls"]), (&"demo.slow".into(), &1.into()), "{skills}");

    let running = call(&["demo.slow", "30", "--submit"]);
    eventually(|| async { (top(&["--json"]).json()[0]["calls"] == 4).then_some(()) }).await;
    let table = top(&[]);
    assert!(table.out.starts_with("AGENT  STATE  IN FLIGHT  CALLS/S  P50"), "{table:?}");
    assert!(table.out.contains("demo   ready  0 "), "{table:?}");
    assert!(table.err.contains("1 agent, "), "{table:?}");
    stage.run(&["task", "cancel", "demo", running.out.trim()]);
    let unknown = top(&["dmo"]);
    assert!(unknown.code == 69 && unknown.err.contains("did you mean `demo`?"), "{unknown:?}");
}
