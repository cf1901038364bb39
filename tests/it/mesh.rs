//! Replicas that share their state, under faults, with measurements: `scripts/stress mesh`.
//!
//! `STRESS=full` runs the full number of repetitions, anything else a short form. The failpoints need the feature
//! `failpoints`.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use async_nats::Subscriber;
use futures_util::stream;
use futures_util::{FutureExt as _, StreamExt as _};
use serde_json::json;

use crate::stress::{Row, row, table, times};
use crate::support::mesh::Mesh;
use crate::support::nats_cluster::NatsCluster;
use crate::support::{DemoAgent, Reply, attached};

/// Requests at the same time.
const AT_A_TIME: usize = 8;
/// How long a caller repeats a request that gets `state_unavailable` or another retryable error.
const RETRY: Duration = Duration::from_secs(40);

#[tokio::test]
#[ignore = "takes minutes: scripts/stress mesh"]
async fn mesh() {
    let mut rows = vec![
        plain_calls().await,
        races().await,
        cluster_races(Fault::StepDown).await,
        cluster_races(Fault::Kill).await,
    ];
    rows.push(killed_after_asking().await);
    if cfg!(feature = "failpoints") {
        rows.extend(failpoints().await);
    }
    rows.push(rolling_restarts().await);
    rows.push(submitted_tasks().await);
    rows.push(without_jetstream().await);
    let table = table(&rows);
    println!("{table}");
    assert!(rows.iter().all(|row| row.held), "{table}");
}

async fn agent() -> DemoAgent {
    DemoAgent::start(&[]).await
}

async fn question(mesh: &Mesh) -> Reply {
    loop {
        let asked = mesh.call("demo.report", json!({"topic": "tides", "audience": "sailors"})).await;
        if asked.is("INPUT_REQUIRED") {
            return asked;
        }
        // While no replica is ready.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Answers until the reply is not an error that may pass.
async fn answer(mesh: &Mesh, id: &str) -> String {
    let began = Instant::now();
    loop {
        let reply = mesh.answer("demo", id, "PDF").await;
        let may_pass = reply.is_no_responders()
            || matches!(reply.code(), "state_unavailable" | "agent_unavailable" | "busy");
        if !may_pass || began.elapsed() > RETRY {
            return if reply.is("COMPLETED") { "COMPLETED".to_owned() } else { reply.code().to_owned() };
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// How often each result was seen, as text.
fn counts(results: impl IntoIterator<Item = String>) -> (BTreeMap<String, usize>, String) {
    let mut counts = BTreeMap::new();
    for result in results {
        *counts.entry(result).or_insert(0) += 1;
    }
    let text: Vec<_> = counts.iter().map(|(result, count)| format!("{count} {result}")).collect();
    (counts.clone(), text.join(", "))
}

/// Three answers to each of many questions, at the same time. Returns the number of questions with one winner, and
/// what the others got.
async fn race(mesh: &Mesh, count: usize) -> (usize, String) {
    let races = stream::iter(0..count).map(|_| async {
        let id = question(mesh).await.follow_up_id();
        let answers = tokio::join!(answer(mesh, &id), answer(mesh, &id), answer(mesh, &id));
        [answers.0, answers.1, answers.2]
    });
    let races: Vec<_> = races.buffer_unordered(AT_A_TIME).collect().await;
    let winners = |race: &[String; 3]| race.iter().filter(|result| *result == "COMPLETED").count();
    let one_winner = races.iter().filter(|race| winners(race) == 1).count();
    (one_winner, counts(races.into_iter().flatten()).1)
}

async fn races() -> Row {
    let (agent, count) = (agent().await, times(40, 10_000));
    let mesh = Mesh::start(vec![attached("demo", &agent.url())], 3).await;
    let (one_winner, seen) = race(&mesh, count).await;
    let expected = format!("one winner in {count} of {count}");
    row("three answers at three replicas", expected, format!("{one_winner}: {seen}"), one_winner == count)
}

/// Plain calls send nothing to JetStream.
async fn plain_calls() -> Row {
    let (agent, count) = (agent().await, times(200, 10_000));
    let mesh = Mesh::start(vec![attached("demo", &agent.url())], 2).await;
    let mut seen = Vec::new();
    for subject in ["$JS.API.>", "$KV.>", "$O.>"] {
        seen.push(mesh.client.subscribe(subject).await.unwrap());
    }
    // What the replicas do at their start is over.
    tokio::time::sleep(Duration::from_secs(2)).await;
    count_messages(&mut seen);
    let calls = stream::iter(0..count).map(|_| async { mesh.prompt("demo.echo", "x").await.is("COMPLETED") });
    let completed: Vec<_> = calls.buffer_unordered(AT_A_TIME).collect().await;
    let completed = completed.into_iter().filter(|completed| *completed).count();
    mesh.client.flush().await.unwrap();
    let messages = count_messages(&mut seen);
    let measured = format!("{completed} completed, {messages} messages to JetStream");
    row(
        format!("{count} plain calls"),
        "0 messages to JetStream",
        measured,
        completed == count && messages == 0,
    )
}

/// The messages that have arrived.
fn count_messages(subscriptions: &mut [Subscriber]) -> usize {
    let arrived = |subscription: &mut Subscriber| {
        std::iter::from_fn(|| subscription.next().now_or_never().flatten()).count()
    };
    subscriptions.iter_mut().map(arrived).sum()
}

enum Fault {
    StepDown,
    Kill,
}

async fn cluster_races(fault: Fault) -> Row {
    let (agent, count) = (agent().await, times(20, 10_000));
    let mut cluster = NatsCluster::start().await;
    // The servers that are killed are not the one to which replicas and callers connect.
    let client = cluster.servers[0].connect().await;
    let url = cluster.servers[0].url();
    let mesh = Mesh::start_on(client.clone(), &url, vec![attached("demo", &agent.url())], 3).await;
    let bucket = format!("KV_{}_follow_ups", mesh.prefix);
    let faults = async {
        let mut victim = 1;
        loop {
            match fault {
                Fault::StepDown => {
                    let subject = format!("$JS.API.STREAM.LEADER.STEPDOWN.{bucket}");
                    let _ = client.request(subject, "".into()).await;
                    tokio::time::sleep(Duration::from_millis(400)).await;
                }
                Fault::Kill => {
                    tokio::time::sleep(Duration::from_secs(3)).await;
                    cluster.servers[victim].restart().await;
                    victim = 3 - victim;
                }
            }
        }
    };
    let (one_winner, seen) = tokio::select! {
        result = race(&mesh, count) => result,
        () = faults => unreachable!("the faults never end"),
    };
    let name = match fault {
        Fault::StepDown => "the same on a cluster, step-down every 400 ms",
        Fault::Kill => "the same, a server of the cluster killed every 3 s",
    };
    let expected = format!("one winner in {count} of {count}");
    row(name, expected, format!("{one_winner}: {seen}"), one_winner == count)
}

async fn ask(mesh: &Mesh, count: usize) -> Vec<String> {
    let asked = stream::iter(0..count).map(|_| async { question(mesh).await.follow_up_id() });
    asked.buffer_unordered(AT_A_TIME).collect().await
}

async fn answer_all(mesh: &Mesh, ids: &[String]) -> (BTreeMap<String, usize>, String) {
    let answered = stream::iter(ids).map(|id| answer(mesh, id));
    counts(answered.buffer_unordered(AT_A_TIME).collect::<Vec<_>>().await)
}

async fn killed_after_asking() -> Row {
    let (agent, count) = (agent().await, times(20, 1_000));
    let mut mesh = Mesh::start(vec![attached("demo", &agent.url())], 1).await;
    let ids = ask(&mesh, count).await;
    mesh.add().await;
    mesh.kill(0);
    let (results, seen) = answer_all(&mesh, &ids).await;
    let held = results.get("COMPLETED") == Some(&count);
    row("replica killed after asking", format!("{count} of {count} answered elsewhere"), seen, held)
}

/// A replica dies with many answers at the same point.
async fn failpoints() -> Vec<Row> {
    let count = times(5, 50);
    let mut rows = Vec::new();
    for point in ["answer-claimed", "answer-checked", "answer-before-sending", "answer-sending"] {
        let agent = agent().await;
        let mut mesh = Mesh::start(vec![attached("demo", &agent.url())], 0).await;
        mesh.set_failpoint(Some(&format!("{point}:{count}")));
        let dying = mesh.add().await;
        let ids = ask(&mesh, count).await;
        let inboxes: Vec<_> = stream::iter(&ids)
            .then(|id| async { mesh.answer("demo", id, "PDF").begin().await })
            .collect()
            .await;
        while !mesh.has_exited(dying) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        drop(inboxes);
        mesh.set_failpoint(None);
        mesh.add().await;
        let began = Instant::now();
        let (results, seen) = answer_all(&mesh, &ids).await;
        let (expected, code) = match point {
            "answer-sending" => ("outcome_unknown: the agent may have it", "outcome_unknown"),
            _ => ("valid again: nothing was sent", "COMPLETED"),
        };
        let measured = format!("{seen}, after {:.0} s", began.elapsed().as_secs_f64());
        let held = results.get(code) == Some(&count);
        rows.push(row(format!("replica killed at {point}, {count} answers"), expected, measured, held));
    }
    rows
}

async fn rolling_restarts() -> Row {
    let (agent, count, restarts) = (agent().await, times(20, 1_000), times(2, 200));
    let mut mesh = Mesh::start(vec![attached("demo", &agent.url())], 2).await;
    let ids = ask(&mesh, count).await;
    let mut oldest = 0;
    let mut results = Vec::new();
    let per_restart = count.div_ceil(restarts);
    for answered in ids.chunks(per_restart) {
        mesh.stop(oldest).await;
        results.extend(stream::iter(answered).then(|id| answer(&mesh, id)).collect::<Vec<_>>().await);
        mesh.add().await;
        oldest += 1;
    }
    let (_, repeated) = answer_all(&mesh, &ids).await;
    let (results, seen) = counts(results);
    let held = results.get("COMPLETED") == Some(&count) && repeated == format!("{count} follow_up_used");
    let fault = format!("{oldest} rolling restarts, {count} open questions");
    row(fault, "0 lost, 0 twice", format!("{seen}; again: {repeated}"), held)
}

async fn submitted_tasks() -> Row {
    let (agent, count) = (agent().await, times(5, 50));
    let mut mesh = Mesh::start(vec![attached("demo", &agent.url())], 1).await;
    let mut updates = mesh.task_updates().await;
    for _ in 0..count {
        mesh.prompt("demo.slow", "45").mode("submit").await.expect("WORKING");
    }
    mesh.add().await;
    mesh.kill(0);
    let killed = Instant::now();
    let mut revisions: HashMap<String, Vec<u64>> = HashMap::new();
    let (mut adopted, mut completed) = (Duration::ZERO, 0);
    while completed < count {
        let Ok((revision, update)) = tokio::time::timeout(2 * RETRY, updates.next_revision()).await else {
            break;
        };
        let of_task = revisions.entry(update["task"]["id"].as_str().unwrap().to_owned()).or_default();
        of_task.push(revision);
        // The replica that adopts a task publishes its last change again.
        if *of_task == [1, 1] {
            adopted = killed.elapsed();
        }
        completed += usize::from(update["status"] == "COMPLETED");
    }
    let in_order = revisions.values().filter(|revisions| **revisions == [1, 1, 2]).count();
    let measured = format!(
        "{completed} completed, {in_order} in order, the last adopted after {:.0} s",
        adopted.as_secs_f64()
    );
    let held = completed == count && in_order == count && adopted < Duration::from_secs(25);
    row("replica with submitted tasks killed", "all followed within 25 s, revisions in order", measured, held)
}

/// Without a majority of its servers, a cluster has no JetStream, but still passes messages.
async fn without_jetstream() -> Row {
    let agent = agent().await;
    let mut cluster = NatsCluster::start().await;
    let client = cluster.servers[0].connect().await;
    let mesh =
        Mesh::start_on(client, &cluster.servers[0].url(), vec![attached("demo", &agent.url())], 2).await;
    cluster.servers[1].end();
    cluster.servers[2].end();
    let began = Instant::now();
    let (mut calls, mut errors, mut slowest) = (0, 0, Duration::ZERO);
    while began.elapsed() < Duration::from_secs(10) {
        let call = Instant::now();
        errors += usize::from(!mesh.prompt("demo.echo", "x").await.is("COMPLETED"));
        slowest = slowest.max(call.elapsed());
        calls += 1;
    }
    // A question that is asked meanwhile can be answered at any replica.
    let ids = ask(&mesh, 4).await;
    let (results, seen) = answer_all(&mesh, &ids).await;
    let measured =
        format!("{errors} of {calls} failed, slowest {slowest:.0?}; questions asked meanwhile: {seen}");
    row(
        "JetStream away for 10 s",
        "plain calls: 0 errors",
        measured,
        errors == 0 && results.get("COMPLETED") == Some(&4),
    )
}
