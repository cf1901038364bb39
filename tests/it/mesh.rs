//! Replicas that share their state, under faults, with measurements: `scripts/stress mesh`.
//!
//! `STRESS=full` runs the full number of repetitions, anything else a short form. `MESH` selects scenarios by parts of
//! their names, separated by `|`. The failpoints need the feature `failpoints`.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_nats::Subscriber;
use futures_util::future::LocalBoxFuture;
use futures_util::stream;
use futures_util::{FutureExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::task::TaskTracker;

use crate::stress::{Row, row, table, times};
use crate::support::bridge::AgentSettings;
use crate::support::caller::Call;
use crate::support::mesh::Mesh;
use crate::support::nats::NatsServer;
use crate::support::nats_cluster::NatsCluster;
use crate::support::processes::memory;
use crate::support::proxy::relay;
use crate::support::{DemoAgent, Reply, attached};

/// Requests at the same time.
const AT_A_TIME: usize = 8;
/// How long a caller repeats a request that gets `state_unavailable` or another retryable error.
const RETRY: Duration = Duration::from_secs(40);

type Scenario = fn() -> LocalBoxFuture<'static, Vec<Row>>;

/// All scenarios, by the names with which `MESH` selects them.
const ALL: [(&str, Scenario); 12] = [
    ("plain calls", || plain_calls().map(|row| vec![row]).boxed_local()),
    ("cost on one server", || cost_of_a_question(false).map(|row| vec![row]).boxed_local()),
    ("cost on a cluster", || cost_of_a_question(true).map(|row| vec![row]).boxed_local()),
    ("races", || races().map(|row| vec![row]).boxed_local()),
    ("cluster races, step-downs", || cluster_races(Fault::StepDown).map(|row| vec![row]).boxed_local()),
    ("cluster races, killed leaders", || cluster_races(Fault::KillLeader).map(|row| vec![row]).boxed_local()),
    ("killed after asking", || killed_after_asking().map(|row| vec![row]).boxed_local()),
    ("failpoints", || failpoints().boxed_local()),
    ("abandoned", || abandoned().boxed_local()),
    ("rolling restarts", || rolling_restarts().map(|row| vec![row]).boxed_local()),
    ("submitted tasks", || submitted_tasks().map(|row| vec![row]).boxed_local()),
    ("without JetStream", || without_jetstream().map(|row| vec![row]).boxed_local()),
];

#[tokio::test]
#[ignore = "takes minutes: scripts/stress mesh"]
async fn mesh() {
    let wanted = std::env::var("MESH").unwrap_or_default();
    let mut rows = Vec::new();
    for (name, run) in ALL {
        if wanted.split('|').any(|part| name.contains(part)) {
            let began = Instant::now();
            let measured = run().await;
            println!("{name}, {:.0} s", began.elapsed().as_secs_f64());
            println!("{}", table(&measured));
            rows.extend(measured);
        }
    }
    let table = table(&rows);
    println!("{table}");
    assert!(rows.iter().all(|row| row.held), "{table}");
}

/// The demo agent behind a relay that counts how often each answer is delivered.
struct Agent {
    _process: DemoAgent,
    url: String,
    deliveries: Arc<Mutex<HashMap<Vec<u8>, usize>>>,
}

/// Begins an answer, before the follow-up id.
const ANSWER: &str = "PDF for ";
const ID_LENGTH: usize = 36;

impl Agent {
    async fn start() -> Self {
        let process = DemoAgent::start(&[]).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let target = process.url().trim_start_matches("http://").trim_end_matches('/').to_owned();
        let deliveries = Arc::<Mutex<HashMap<Vec<u8>, usize>>>::default();
        let seen = Arc::clone(&deliveries);
        relay(listener, target, move |chunk| {
            let answers =
                chunk.windows(ANSWER.len()).enumerate().filter(|(_, text)| *text == ANSWER.as_bytes());
            for (at, _) in answers {
                let id = chunk[at + ANSWER.len()..].iter().take(ID_LENGTH).copied().collect();
                *seen.lock().unwrap().entry(id).or_default() += 1;
            }
            true
        });
        Self { _process: process, url, deliveries }
    }

    fn settings(&self) -> AgentSettings {
        attached("demo", &self.url)
    }

    /// The answers that were delivered, and those among them that were delivered again.
    fn deliveries(&self) -> (usize, usize) {
        let deliveries = self.deliveries.lock().unwrap();
        (deliveries.len(), deliveries.values().filter(|count| **count > 1).count())
    }
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

fn answer_of(mesh: &Mesh, id: &str) -> Call {
    mesh.answer("demo", id, &format!("{ANSWER}{id}"))
}

/// Answers until the reply is not an error that may pass.
async fn answer(mesh: &Mesh, id: &str) -> String {
    let began = Instant::now();
    loop {
        let reply = answer_of(mesh, id).await;
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

/// Three answers to each of many questions, at the same time. Returns whether each has one winner and was delivered once,
/// and what the others got.
async fn race(agent: &Agent, mesh: &Mesh, count: usize) -> (bool, String) {
    let races = stream::iter(0..count).map(|_| async {
        let id = question(mesh).await.follow_up_id();
        let answers = tokio::join!(answer(mesh, &id), answer(mesh, &id), answer(mesh, &id));
        [answers.0, answers.1, answers.2]
    });
    let races: Vec<_> = races.buffer_unordered(AT_A_TIME).collect().await;
    let winners = |race: &[String; 3]| race.iter().filter(|result| *result == "COMPLETED").count();
    let one_winner = races.iter().filter(|race| winners(race) == 1).count();
    let (delivered, again) = agent.deliveries();
    let seen = counts(races.into_iter().flatten()).1;
    let held = one_winner == count && delivered == count && again == 0;
    (held, format!("{one_winner} with one winner: {seen}; {delivered} delivered, {again} twice"))
}

async fn races() -> Row {
    let (agent, count) = (Agent::start().await, times(40, 10_000));
    let mesh = Mesh::start(vec![agent.settings()], 3).await;
    let (held, seen) = race(&agent, &mesh, count).await;
    row("three answers at three replicas", format!("one winner in {count} of {count}"), seen, held)
}

/// Plain calls send nothing to JetStream.
async fn plain_calls() -> Row {
    let (agent, count) = (Agent::start().await, times(200, 10_000));
    let mesh = Mesh::start(vec![agent.settings()], 2).await;
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

/// How long an operation takes, in seconds.
async fn time(operation: impl Future<Output = ()>) -> f64 {
    let began = Instant::now();
    operation.await;
    began.elapsed().as_secs_f64()
}

/// A new record of the size of a question, which JetStream confirms.
async fn write_to_bucket(mesh: &Mesh) {
    let mut headers = async_nats::HeaderMap::new();
    headers.insert("Nats-Expected-Last-Subject-Sequence", "0");
    headers.insert("Nats-TTL", "60");
    let subject = format!("$KV.{}_follow_ups.cost.{:x}", mesh.prefix, fastrand::u128(..));
    let request = async_nats::Request::new().headers(headers).payload(vec![b' '; 400].into());
    let confirmation = mesh.client.send_request(subject, request).await.unwrap();
    let confirmation: Value = serde_json::from_slice(&confirmation.payload).unwrap();
    assert!(confirmation["seq"].is_u64(), "{confirmation}");
}

/// What a question costs with shared state, compared with a bridge that keeps its state in memory.
async fn cost_of_a_question(is_cluster: bool) -> Row {
    let (agent, count, rounds) = (Agent::start().await, times(20, 200), times(2, 10));
    let mut servers = match is_cluster {
        true => NatsCluster::start().await.servers,
        false => vec![NatsServer::with_jetstream().await],
    };
    let server = &mut servers[0];
    let (client, url) = (server.connect().await, server.url());
    let mut echo = server.connect().await.subscribe("echo").await.unwrap();
    let responder = client.clone();
    TaskTracker::new().spawn(async move {
        while let Some(message) = echo.next().await {
            responder.publish(message.reply.unwrap(), message.payload).await.unwrap();
        }
    });
    let start = |mode| Mesh::start_in_mode(client.clone(), &url, mode, vec![agent.settings()], 1);
    let (shared, local) = (start("auto").await, start("off").await);
    let (mut costs, mut writes) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        // In turns, so that all four meet the same caches and the same load.
        let mut times: [Vec<f64>; 4] = Default::default();
        for _ in 0..count {
            let taken = [
                time(async { drop(client.request("echo", "x".into()).await.unwrap()) }).await,
                time(async { drop(question(&local).await) }).await,
                time(write_to_bucket(&shared)).await,
                time(async { drop(question(&shared).await) }).await,
            ];
            times.iter_mut().zip(taken).for_each(|(times, taken)| times.push(taken));
        }
        let [round_trip, without, write, with] = times.map(|mut times| {
            times.sort_unstable_by(f64::total_cmp);
            times[times.len() / 2]
        });
        costs.push((with - without) / round_trip);
        writes.push(write / round_trip);
    }
    writes.sort_unstable_by(f64::total_cmp);
    let write = writes[writes.len() / 2];
    costs.sort_unstable_by(f64::total_cmp);
    let (median, limit) = (costs[costs.len() / 2], if is_cluster { 4.0 } else { 1.5 });
    let place = if is_cluster { "a cluster of three" } else { "one server" };
    let (least, most) = (costs[0], costs[costs.len() - 1]);
    let measured = format!("{median:.2} ({least:.2}..{most:.2}); a write by another client takes {write:.2}");
    // The short form runs an unoptimised bridge beside other work, so its figure says nothing about the limit.
    let is_short = times(1, 0) == 1;
    let expected = match is_short {
        true => "round trips; the short form has no limit".to_owned(),
        false => format!("at most {limit} core round trips"),
    };
    row(format!("cost of a question, {place}"), expected, measured, is_short || median <= limit)
}

/// The records in a bucket, and their bytes.
async fn bucket(mesh: &Mesh, kind: &str) -> (u64, u64) {
    let subject = format!("$JS.API.STREAM.INFO.KV_{}_{kind}", mesh.prefix);
    let info = mesh.client.request(subject, "".into()).await.unwrap();
    let info: Value = serde_json::from_slice(&info.payload).unwrap();
    let state = |name: &str| info["state"][name].as_u64().unwrap_or(0);
    (state("messages"), state("bytes"))
}

async fn stored(mesh: &Mesh) -> (u64, u64) {
    let (mut records, mut bytes) = (0, 0);
    for kind in ["follow_ups", "tasks", "contexts"] {
        let (records_of, bytes_of) = bucket(mesh, kind).await;
        (records, bytes) = (records + records_of, bytes + bytes_of);
    }
    (records, bytes)
}

/// Questions that nobody answers, each in a session of its own.
async fn abandoned() -> Vec<Row> {
    const MIB: u64 = 1 << 20;
    if !cfg!(feature = "failpoints") {
        return Vec::new();
    }
    let (agent, count) = (Agent::start().await, times(200, 10_000));
    let open_for = times(10, 90);
    let settings = agent.settings().set("input_required_ttl", format!("{open_for}s")).set("task_ttl", "5s");
    let mut mesh = Mesh::start(vec![settings], 0).await;
    mesh.set_env("A2A_BRIDGE_RETENTION", "5");
    let replica = mesh.add().await;
    let began = Instant::now();
    let asked = stream::iter(0..count).map(|number| {
        let body =
            json!({"topic": "tides", "audience": "sailors", "meta": {"session_id": format!("s{number}")}});
        async { mesh.call("demo.report", body).await.is("INPUT_REQUIRED") }
    });
    let asked = asked.buffer_unordered(AT_A_TIME).filter(|asked| std::future::ready(*asked)).count().await;
    let asking = began.elapsed();
    let resident = memory(mesh.pid(replica), "VmRSS");
    let (records, bytes) = stored(&mesh).await;
    let limit = Duration::from_secs(open_for as u64) + Duration::from_secs(60);
    let mut left = stored(&mesh).await.0;
    while left > 0 && began.elapsed() < asking + limit {
        tokio::time::sleep(Duration::from_millis(500)).await;
        left = stored(&mesh).await.0;
    }
    let emptied = began.elapsed() - asking;
    let after = memory(mesh.pid(replica), "VmRSS");
    let measured = format!(
        "{asked} asked in {:.0} s, bridge {} MiB, {records} records with {:.1} MB, {left} left after {:.0} s, bridge {} MiB",
        asking.as_secs_f64(),
        resident / MIB,
        bytes as f64 / 1e6,
        emptied.as_secs_f64(),
        after / MIB,
    );
    let held = asked == count && resident <= 60 * MIB && bytes < 10_000_000 && left == 0;
    let expected = "60 MiB, 10 MB, none left after their time";
    vec![row(format!("{count} abandoned questions and sessions"), expected, measured, held)]
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
    KillLeader,
}

async fn cluster_races(fault: Fault) -> Row {
    let (agent, count) = (Agent::start().await, times(20, 10_000));
    let mut cluster = NatsCluster::start().await;
    let client = cluster.servers[0].connect().await;
    let url = cluster.servers[0].url();
    let mesh = Mesh::start_on(client.clone(), &url, vec![agent.settings()], 3).await;
    let bucket = format!("KV_{}_follow_ups", mesh.prefix);
    let mut faulted = 0;
    let faults = async {
        loop {
            match fault {
                Fault::StepDown => {
                    NatsCluster::step_down(&client, &bucket).await;
                    faulted += 1;
                    tokio::time::sleep(Duration::from_millis(400)).await;
                }
                Fault::KillLeader => {
                    tokio::time::sleep(Duration::from_secs(3)).await;
                    match NatsCluster::leader_of(&client, &bucket).await {
                        // Replicas and callers are connected to the first server, which lives on.
                        Some(0) | None => NatsCluster::step_down(&client, &bucket).await,
                        Some(leader) => {
                            cluster.servers[leader].restart().await;
                            faulted += 1;
                        }
                    }
                }
            }
        }
    };
    let (held, seen) = tokio::select! {
        result = race(&agent, &mesh, count) => result,
        () = faults => unreachable!("the faults never end"),
    };
    let name = match fault {
        Fault::StepDown => "the same on a cluster, the leader steps down every 400 ms",
        Fault::KillLeader => "the same on a cluster, the leader is killed every 3 s",
    };
    row(name, format!("one winner in {count} of {count}"), format!("{seen}; {faulted} faults"), held)
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
    let (agent, count) = (Agent::start().await, times(20, 1_000));
    let mut mesh = Mesh::start(vec![agent.settings()], 1).await;
    let ids = ask(&mesh, count).await;
    mesh.add().await;
    mesh.kill(0);
    let (results, seen) = answer_all(&mesh, &ids).await;
    let (_, again) = agent.deliveries();
    let held = results.get("COMPLETED") == Some(&count) && again == 0;
    let seen = format!("{seen}; {again} delivered twice");
    row("replica killed after asking", format!("{count} of {count} answered elsewhere"), seen, held)
}

/// A replica dies with many answers at the same point.
async fn failpoints() -> Vec<Row> {
    let count = times(5, 200);
    let mut rows = Vec::new();
    if !cfg!(feature = "failpoints") {
        return rows;
    }
    for point in ["answer-claimed", "answer-checked", "answer-before-sending", "answer-sending"] {
        let agent = Agent::start().await;
        let mut mesh = Mesh::start(vec![agent.settings()], 0).await;
        mesh.set_env("A2A_BRIDGE_FAILPOINT", format!("{point}:{count}"));
        let dying = mesh.add().await;
        let ids = ask(&mesh, count).await;
        let inboxes: Vec<_> = stream::iter(&ids).then(|id| answer_of(&mesh, id).begin()).collect().await;
        while !mesh.has_exited(dying) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        drop(inboxes);
        mesh.clear_env();
        mesh.add().await;
        let began = Instant::now();
        let (results, seen) = answer_all(&mesh, &ids).await;
        let (expected, codes) = match point {
            "answer-sending" => {
                ("outcome_unknown or used: the agent may have it", &["outcome_unknown", "follow_up_used"][..])
            }
            _ => ("valid again: nothing was sent", &["COMPLETED"][..]),
        };
        let (_, again) = agent.deliveries();
        let measured =
            format!("{seen}, after {:.0} s; {again} delivered twice", began.elapsed().as_secs_f64());
        let as_expected: usize = codes.iter().filter_map(|code| results.get(*code)).sum();
        let held = as_expected == count && again == 0;
        rows.push(row(format!("replica killed at {point}, {count} answers"), expected, measured, held));
    }
    rows
}

async fn rolling_restarts() -> Row {
    let (agent, count, restarts) = (Agent::start().await, times(20, 1_000), times(2, 200));
    let mut mesh = Mesh::start(vec![agent.settings()], 2).await;
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
    let (_, again) = agent.deliveries();
    let held = results.get("COMPLETED") == Some(&count)
        && repeated == format!("{count} follow_up_used")
        && again == 0;
    let fault = format!("{oldest} rolling restarts, {count} open questions");
    let seen = format!("{seen}; second answers: {repeated}; {again} delivered twice");
    row(fault, "0 lost, 0 twice", seen, held)
}

async fn submitted_tasks() -> Row {
    let (agent, count) = (Agent::start().await, times(5, 50));
    let mut mesh = Mesh::start(vec![agent.settings()], 1).await;
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
    let agent = Agent::start().await;
    let mut cluster = NatsCluster::start().await;
    let client = cluster.servers[0].connect().await;
    let mesh = Mesh::start_on(client, &cluster.servers[0].url(), vec![agent.settings()], 2).await;
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
    let ids = ask(&mesh, 4).await;
    cluster.servers[1].restart().await;
    cluster.servers[2].restart().await;
    // A question that was asked meanwhile can be answered at any replica. If JetStream may have stored it, only after it is
    // back.
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
