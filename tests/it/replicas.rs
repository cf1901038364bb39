//! Replicas of the bridge share their state on JetStream: questions, tasks, sessions and idempotency keys.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::support::caller::Call;
use crate::support::eventually::eventually_within;
use crate::support::mesh::Mesh;
use crate::support::{DEADLINE, DemoAgent, Reply, attached, launched_at_any_port};

async fn question(mesh: &Mesh) -> Reply {
    let body = json!({"topic": "tides", "audience": "sailors"});
    mesh.call("demo.report", body).only_reply().await.expect("INPUT_REQUIRED")
}

async fn mesh(switches: &[&str], replicas: usize) -> (DemoAgent, Mesh) {
    let agent = DemoAgent::start(switches).await;
    let mesh = Mesh::start(vec![attached("demo", &agent.url())], replicas).await;
    (agent, mesh)
}

#[tokio::test]
async fn a_question_can_be_answered_at_any_replica_and_once() {
    let (_agent, mesh) = mesh(&[], 2).await;
    for _ in 0..12 {
        let asked = question(&mesh).await;
        let id = asked.follow_up_id();
        let (one, other) = tokio::join!(mesh.answer("demo", &id, "PDF"), mesh.answer("demo", &id, "PDF"));
        let statuses: Vec<_> = [one, other].iter().map(|reply| reply["status"].clone()).collect();
        assert_eq!(statuses.iter().filter(|status| **status == "COMPLETED").count(), 1, "{statuses:?}");
        mesh.answer("demo", &id, "PDF").await.expect_error("follow_up_used");
        mesh.get_task("demo", &asked.task_id()).await.expect("COMPLETED");
    }
}

#[tokio::test]
async fn a_question_survives_the_replica_that_asked() {
    let (_agent, mut mesh) = mesh(&[], 1).await;
    let asked = [question(&mesh).await, question(&mesh).await];
    mesh.add().await;
    mesh.kill(0);
    mesh.answer("demo", &asked[0].follow_up_id(), "PDF").await.expect("COMPLETED");
    // A restart without any other replica.
    mesh.stop(1).await;
    mesh.add().await;
    mesh.answer("demo", &asked[1].follow_up_id(), "PDF").await.expect("COMPLETED");
    mesh.answer("demo", &asked[0].follow_up_id(), "PDF").await.expect_error("follow_up_used");
}

#[tokio::test]
async fn a_submitted_task_of_a_killed_replica_is_followed_by_another_one() {
    let (_agent, mut mesh) = mesh(&[], 1).await;
    let mut updates = mesh.task_updates().await;
    let task = mesh.prompt("demo.slow", "20").mode("submit").await.expect("WORKING").task_id();
    updates.until("WORKING").await;
    mesh.add().await;
    mesh.kill(0);
    mesh.get_task("demo", &task).await.expect("WORKING");
    let completed = async {
        let mut revisions = vec![1];
        loop {
            let (revision, update) = updates.next_revision().await;
            revisions.push(revision);
            if update["status"] == "COMPLETED" {
                return revisions;
            }
        }
    };
    let revisions = tokio::time::timeout(4 * DEADLINE, completed).await.expect("the task is followed");
    assert!(revisions.is_sorted(), "{revisions:?}");
    assert_eq!(revisions.iter().collect::<BTreeSet<_>>().len(), 2, "{revisions:?}");
    mesh.get_task("demo", &task).await.expect("COMPLETED");
}

#[tokio::test]
async fn a_submitted_task_goes_on_after_an_orderly_stop() {
    let (_agent, mut mesh) = mesh(&[], 2).await;
    let mut updates = mesh.task_updates().await;
    let mut tasks = BTreeSet::new();
    for _ in 0..6 {
        tasks.insert(mesh.prompt("demo.slow", "5").mode("submit").await.expect("WORKING").task_id());
    }
    mesh.stop(0).await;
    while !tasks.is_empty() {
        let (_, update) = updates.next().await;
        assert!(matches!(update["status"].as_str(), Some("WORKING" | "COMPLETED")), "{update}");
        if update["status"] == "COMPLETED" {
            tasks.remove(update["task"]["id"].as_str().unwrap());
        }
    }
}

#[tokio::test]
async fn tasks_are_found_and_canceled_at_any_replica() {
    let (_agent, mesh) = mesh(&[], 2).await;
    for _ in 0..4 {
        // Only the replica that ran this call knows its task.
        let short = mesh.prompt("demo.echo", "x").await.expect("COMPLETED").task_id();
        let long = mesh.prompt("demo.slow", "60").mode("submit").await.expect("WORKING").task_id();
        for _ in 0..3 {
            mesh.get_task("demo", &short).await.expect("COMPLETED");
            mesh.get_task("demo", &long).await.expect("WORKING");
        }
        let canceled = mesh.cancel_task("demo", &long).await;
        assert!(canceled.is("CANCELED"), "{canceled:?}");
        mesh.get_task("demo", &long).await.expect("CANCELED");
    }
}

#[tokio::test]
async fn a_repeated_request_runs_once_at_all_replicas() {
    let (_agent, mesh) = mesh(&[], 2).await;
    for key in 0..6 {
        let call = || mesh.prompt("demo.echo", "x").header("Nats-Msg-Id", &format!("key-{key}"));
        let (one, two, three) = tokio::join!(call(), call(), call());
        let tasks: BTreeSet<_> =
            [one, two, three].into_iter().map(|reply| reply.expect("COMPLETED").task_id()).collect();
        assert_eq!(tasks.len(), 1);
        let other_body = mesh.prompt("demo.echo", "y").header("Nats-Msg-Id", &format!("key-{key}"));
        other_body.await.expect_error("invalid_request");
    }
}

#[tokio::test]
async fn a_session_of_a_launched_agent_stays_at_its_replica() {
    let agent = launched_at_any_port("demo", &[]);
    let mesh = Mesh::start(vec![agent], 2).await;
    for session in 0..4 {
        let mut contexts = BTreeSet::new();
        for number in 0..4 {
            let body = json!({"prompt": format!("remember {number}"),
                "meta": {"session_id": format!("s-{session}")}});
            let reply = mesh.call("demo.echo", body).await.expect("COMPLETED");
            let task: Value = reply["task"].clone();
            contexts.insert(task["context_id"].to_string());
            mesh.get_task("demo", &reply.task_id()).await.expect("COMPLETED");
        }
        assert_eq!(contexts.len(), 1, "{contexts:?}");
    }
    // Questions of a launched agent are answered at the replica whose process asked.
    for _ in 0..6 {
        let asked = question(&mesh).await;
        mesh.answer("demo", &asked.follow_up_id(), "PDF").await.expect("COMPLETED");
    }
}

#[tokio::test]
async fn the_task_of_an_expired_question_is_canceled_at_the_agent() {
    let agent = DemoAgent::start(&[]).await;
    let settings = attached("demo", &agent.url()).set("input_required_ttl", "1s");
    let mesh = Mesh::start(vec![settings], 2).await;
    let asked = question(&mesh).await;
    eventually_within(2 * DEADLINE, || async {
        mesh.get_task("demo", &asked.task_id()).await.is("CANCELED").then_some(())
    })
    .await;
    mesh.answer("demo", &asked.follow_up_id(), "PDF").await.expect_error("follow_up_expired");
}

/// Reduces the size of a bucket. Replicas that start later notice it.
async fn shrink(mesh: &Mesh, kind: &str, max_bytes: u64) {
    let api = async |operation: String, body: Value| -> Value {
        let reply =
            mesh.client.request(format!("$JS.API.{operation}"), body.to_string().into()).await.unwrap();
        serde_json::from_slice(&reply.payload).unwrap()
    };
    let names = api("STREAM.NAMES".to_owned(), json!({})).await;
    let names = names["streams"].as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned());
    let name = names.into_iter().find(|name| name.ends_with(kind)).unwrap();
    let mut config = api(format!("STREAM.INFO.{name}"), json!({})).await["config"].take();
    config["max_bytes"] = json!(max_bytes);
    let updated = api(format!("STREAM.UPDATE.{name}"), config).await;
    assert!(updated["error"].is_null(), "{updated}");
}

#[tokio::test]
async fn a_tenant_that_takes_its_share_of_a_bucket_blocks_no_other_one_also_after_a_restart() {
    let (_agent, mut mesh) = mesh(&[], 1).await;
    shrink(&mesh, "_follow_ups", 64 << 10).await;
    mesh.stop(0).await;
    mesh.add().await;
    let ask = async |mesh: &Mesh, caller: &str| {
        let body = json!({"topic": "tides", "audience": "sailors"});
        let subject = format!("{}.gw.action.demo.report", mesh.prefix);
        Call::new(&mesh.client, subject, body).header("A2A-Caller", caller).await
    };
    let mut asked = 0;
    let mut ask_until_refused = async |mesh: &Mesh| {
        loop {
            let reply = ask(mesh, "alice").await;
            if !reply.is("INPUT_REQUIRED") {
                return (asked, reply);
            }
            asked += 1;
            assert!(asked < 500, "one tenant fills the bucket");
        }
    };
    let (asked, refused) = ask_until_refused(&mesh).await;
    let refused = refused.expect_error("busy");
    assert!(refused["message"].to_string().contains("JetStream bucket for open questions"), "{refused:?}");
    assert!(asked > 10, "{asked}");
    ask(&mesh, "bob").await.expect("INPUT_REQUIRED");
    mesh.kill(1);
    mesh.add().await;
    // The bridge counts what is in the bucket now. It is less than before, because it is packed.
    ask_until_refused(&mesh).await.1.expect_error("busy");
    ask(&mesh, "bob").await.expect("INPUT_REQUIRED");
}

#[tokio::test]
async fn a_full_bucket_is_named_in_the_log_and_in_the_reply() {
    let (_agent, mut mesh) = mesh(&[], 1).await;
    // Another program fills the bucket.
    shrink(&mesh, "_tasks", 4 << 10).await;
    let subject = format!("$KV.{}_tasks.other.x", mesh.prefix);
    let filler = mesh.client.request(subject, "x".repeat(3900).into()).await.unwrap();
    assert!(!String::from_utf8_lossy(&filler.payload).contains("error"), "{filler:?}");
    mesh.stop(0).await;
    let number = mesh.add().await;
    let task = mesh.prompt("demo.slow", "20").mode("submit").await.expect("WORKING").task_id();
    mesh.get_task("demo", &task).await.expect("WORKING");
    let is_logged = || async {
        let log = mesh.log(number);
        (log.contains("_tasks")
            && log.contains("is full and takes no new records")
            && log.contains("only in the memory of this bridge"))
        .then_some(())
    };
    eventually_within(DEADLINE, is_logged).await;
}
