//! State that replicas share in JetStream: on one server, on a cluster, without permissions, and without JetStream.

use std::collections::HashSet;
use std::time::Duration;

use a2a_bridge::internal::{JetStreamAbsence, SharedStore, WriteError, parse_config};
use async_nats::{Client, HeaderMap};
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::support::commands::{command, command_on, run};
use crate::support::nats_cluster::NatsCluster;
use crate::support::{Bridge, NatsServer, eventually, eventually_eq, launched, wait_until};

const HOUR: Duration = Duration::from_secs(3600);
/// The bucket and the stream of sessions, with the prefix of these tests.
const BUCKET: &str = "it_contexts";
const STREAM: &str = "KV_it_contexts";

/// The store of a replica, with a connection of its own.
async fn open(url: &str) -> Result<SharedStore, JetStreamAbsence> {
    let config = format!("nats: {{ url: '{url}', subject_prefix: it }}\nagents: []\n");
    SharedStore::open(&parse_config(&config, "bridge.yaml", &|_| None).unwrap()).await
}

async fn replica(server: &NatsServer) -> SharedStore {
    open(&server.url()).await.expect("JetStream is there")
}

async fn api(client: &Client, operation: &str, body: Value) -> Value {
    let reply = client.request(format!("$JS.API.{operation}"), body.to_string().into()).await;
    reply.map_or(Value::Null, |reply| serde_json::from_slice(&reply.payload).unwrap())
}

/// Claims a record until the outcome is certain. Returns whether this claim has won.
async fn claim(store: &SharedStore, id: &str, name: &str) -> bool {
    eventually(|| async {
        match store.read("agent", id).await {
            Ok(Some((value, _))) if value == name => return Some(true),
            Ok(Some((value, revision))) if value == "open" => {
                let claimed = store.write("agent", id, revision, name.to_owned(), HOUR).await;
                return claimed.is_ok().then_some(true);
            }
            Ok(Some(_)) => return Some(false),
            // Unavailable.
            Err(_) => {}
            Ok(None) => panic!("{id} is lost"),
        }
        None
    })
    .await
}

/// Lets all replicas claim each of many records at the same time.
async fn race(replicas: &[SharedStore], races: usize) {
    for race in 0..races {
        let id = race.to_string();
        // A write that is not confirmed is repeated, and may conflict with itself.
        eventually(|| async {
            match replicas[0].write("agent", &id, 0, "open", HOUR).await {
                Ok(_) | Err(WriteError::Conflict) => Some(()),
                Err(_) => None,
            }
        })
        .await;
        let names: Vec<_> = (0..replicas.len()).map(|number| format!("{id} by {number}")).collect();
        let claims = replicas.iter().zip(&names).map(|(store, name)| claim(store, &id, name));
        let won: Vec<_> = join_all(claims).await;
        let winners: Vec<_> = names.iter().zip(won).filter_map(|(name, won)| won.then_some(name)).collect();
        assert_eq!(winners.len(), 1, "race {race}: {winners:?}");
        let stored = eventually(|| async { replicas[0].read("agent", &id).await.ok() }).await;
        assert_eq!(stored.unwrap().0, *winners[0]);
    }
}

#[tokio::test]
async fn of_three_replicas_one_wins_each_race() {
    let server = NatsServer::with_jetstream().await;
    let replicas = join_all((0..3).map(|_| replica(&server))).await;
    race(&replicas, 300).await;
}

#[tokio::test]
async fn on_a_cluster_one_replica_wins_each_race_while_leaders_step_down() {
    let cluster = NatsCluster::start().await;
    let replicas = join_all(cluster.servers.iter().map(replica)).await;
    let client = cluster.servers[0].connect().await;
    let info = api(&client, &format!("STREAM.INFO.{STREAM}"), json!({})).await;
    assert_eq!(info["config"]["num_replicas"], 3, "{info}");
    let step_downs = async {
        loop {
            tokio::time::sleep(Duration::from_millis(400)).await;
            api(&client, &format!("STREAM.LEADER.STEPDOWN.{STREAM}"), json!({})).await;
        }
    };
    tokio::select! {
        () = race(&replicas, 150) => {}
        () = step_downs => unreachable!("it never ends"),
    }
}

#[tokio::test]
async fn records_expire_and_leave_no_trace() {
    let server = NatsServer::with_jetstream().await;
    let store = replica(&server).await;
    let revision = store.write("agent", "a", 0, "x", HOUR).await.unwrap();
    store.write("agent", "a", revision, "y", Duration::from_millis(10)).await.unwrap();
    eventually_eq(None, || async { store.read("agent", "a").await.unwrap() }).await;
    store.write("agent", "a", 0, "new", HOUR).await.unwrap();
}

#[tokio::test]
async fn a_key_that_an_operator_has_deleted_can_be_created_again() {
    let server = NatsServer::with_jetstream().await;
    let (store, client) = (replica(&server).await, server.connect().await);
    store.write("agent", "a", 0, "x", HOUR).await.unwrap();
    let mut headers = HeaderMap::new();
    headers.insert("KV-Operation", "DEL");
    client.request_with_headers(format!("$KV.{BUCKET}.agent.a"), headers, "".into()).await.unwrap();
    assert_eq!(store.read("agent", "a").await.unwrap(), None);
    assert!(store.scan(None).await.unwrap().is_empty());
    store.write("agent", "a", 0, "y", HOUR).await.unwrap();
    assert_eq!(store.write("agent", "a", 0, "z", HOUR).await, Err(WriteError::Conflict));
    assert_eq!(store.read("agent", "a").await.unwrap().unwrap().0, "y");
}

#[tokio::test]
async fn a_scan_reads_all_records_or_those_of_one_agent() {
    let server = NatsServer::with_jetstream().await;
    let store = &replica(&server).await;
    assert!(store.scan(None).await.unwrap().is_empty());
    let large = "x".repeat(4096);
    let writes = (0..3000).map(|number| {
        let (agent, value) = (if number % 3 == 0 { "one" } else { "an.other" }, format!("{number} {large}"));
        async move { store.write(agent, &format!("id {number}"), 0, value, HOUR).await.unwrap() }
    });
    join_all(writes).await;
    let distinct = |values: Vec<bytes::Bytes>| values.into_iter().collect::<HashSet<_>>().len();
    assert_eq!(distinct(store.scan(None).await.unwrap()), 3000);
    assert_eq!(distinct(store.scan(Some("one")).await.unwrap()), 1000);
    assert_eq!(distinct(store.scan(Some("an.other")).await.unwrap()), 2000);
    assert_eq!(distinct(store.scan(Some("nobody")).await.unwrap()), 0);
}

#[tokio::test]
async fn the_sizes_of_records_are_known_without_their_values() {
    let server = NatsServer::with_jetstream().await;
    let (one, other) = (replica(&server).await, replica(&server).await);
    for (id, bytes) in [("small", 10), ("large", 50_000)] {
        one.write("agent", id, 0, "x".repeat(bytes), HOUR).await.unwrap();
    }
    let mut sizes = other.sizes().await.unwrap();
    sizes.sort();
    let [(small, _), (large, expires_in)] = sizes[..] else { panic!("{sizes:?}") };
    assert!(small < 500 && (50_000..50_500).contains(&large), "{sizes:?}");
    assert!(expires_in <= HOUR && expires_in > HOUR / 2, "{sizes:?}");
}

#[tokio::test]
async fn state_survives_a_restart_of_the_server() {
    let mut server = NatsServer::with_jetstream().await;
    let store = replica(&server).await;
    let first = store.write("agent", "a", 0, "x", HOUR).await.unwrap();
    server.end();
    eventually(|| async { store.read("agent", "a").await.is_err().then_some(()) }).await;
    let refused = store.write("agent", "a", first, "y", HOUR).await.unwrap_err();
    assert_eq!(refused, WriteError::Unavailable);
    server.restart().await;
    let found = tokio::select! {
        () = store.watch() => unreachable!("it never ends"),
        found = eventually(|| async { store.read("agent", "a").await.ok() }) => found,
    };
    assert_eq!(found, Some(("x".into(), first)));
    store.write("agent", "a", first, "y", HOUR).await.unwrap();
}

#[tokio::test]
async fn a_full_bucket_refuses_new_records_and_takes_smaller_ones_in_place_of_others() {
    let server = NatsServer::with_jetstream().await;
    let client = server.connect().await;
    let config = json!({
        "name": STREAM, "subjects": [format!("$KV.{BUCKET}.>")], "storage": "file", "discard": "new",
        "max_msgs_per_subject": 1, "max_bytes": 64 << 10, "num_replicas": 1, "allow_direct": true,
        "allow_msg_ttl": true, "allow_rollup_hdrs": true, "deny_delete": true,
    });
    let created = api(&client, &format!("STREAM.CREATE.{STREAM}"), config).await;
    assert!(created["error"].is_null(), "{created}");
    let store = replica(&server).await;
    // Longer than what is compressed.
    let value = "x".repeat(9 << 10);
    let first = store.write("agent", "first", 0, value.clone(), HOUR).await.unwrap();
    let mut refused = None;
    for number in 0..16 {
        refused = store.write("agent", &number.to_string(), 0, value.clone(), HOUR).await.err();
        if refused.is_some() {
            break;
        }
    }
    assert_eq!(refused, Some(WriteError::StoreFull));
    store.write("agent", "first", first, "smaller", HOUR).await.unwrap();
    let too_large = "x".repeat(300 << 10);
    assert_eq!(store.write("agent", "large", 0, too_large, HOUR).await, Err(WriteError::Full));
}

#[tokio::test]
async fn without_jetstream_the_reason_is_known() {
    let server = NatsServer::start().await;
    assert_eq!(open(&server.url()).await.unwrap_err(), JetStreamAbsence::Disabled);
    // As nats-server 2.10 replies.
    let client = server.connect().await;
    let mut requests = client.subscribe("$JS.API.INFO").await.unwrap();
    client.flush().await.unwrap();
    let reply = async {
        let request = requests.next().await.unwrap();
        let old = json!({"type": "account_info", "streams": 0, "api": {"total": 1, "errors": 0}}).to_string();
        client.publish(request.reply.unwrap(), old.into()).await.unwrap();
    };
    let url = server.url();
    let (opened, ()) = tokio::join!(open(&url), reply);
    assert_eq!(opened.unwrap_err(), JetStreamAbsence::ServerTooOld);
}

#[tokio::test]
async fn a_bucket_without_a_time_to_live_is_not_used() {
    let server = NatsServer::with_jetstream().await;
    let client = server.connect().await;
    let config = json!({"name": STREAM, "subjects": [format!("$KV.{BUCKET}.>")], "max_bytes": 1 << 20});
    api(&client, &format!("STREAM.CREATE.{STREAM}"), config).await;
    let absence = open(&server.url()).await.unwrap_err();
    assert_eq!(absence, JetStreamAbsence::BucketWithoutTtl(BUCKET.to_owned()));
}

#[tokio::test]
async fn a_bridge_without_jetstream_runs_unless_it_is_required() {
    let bridge = Bridge::with_demo(&[]).await;
    assert!(bridge.log().contains("state is kept in memory"), "{}", bridge.log());
    let asked = bridge.call("demo.report", json!({"topic": "tides", "audience": "sailors"})).await;
    bridge.answer("demo", &asked.follow_up_id(), "PDF").await.expect("COMPLETED");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bridge.yaml");
    let nothing = run(&mut command_on(&bridge.nats.url(), &["state"]), "");
    assert!(nothing.code == 69 && nothing.err.contains("no JetStream"), "{nothing:?}");
    let settings =
        json!({"nats": {"url": bridge.nats.url(), "jetstream": {"mode": "required"}}, "agents": []});
    std::fs::write(&file, settings.to_string()).unwrap();
    let ended = run(&mut command(&["run", "--config", &file.display().to_string()]), "");
    assert_eq!(ended.code, 69, "{ended:?}");
    assert!(ended.err.contains("JetStream is not enabled") && ended.err.contains("hint: "), "{ended:?}");
    let checked = run(&mut command(&["check", "--config", &file.display().to_string()]), "");
    assert!(checked.code == 69 && checked.out.contains("JetStream is not enabled"), "{checked:?}");
}

#[tokio::test]
async fn a_missing_permission_is_named_in_the_log() {
    let conf = r#"jetstream { store_dir: "$DIR/jetstream" }
        authorization { users: [
            {user: test, password: test}
            {user: bridge, password: b, permissions: {publish: {
                allow: ">", deny: ["$JS.API.STREAM.CREATE.*", "$KV.it_tasks.>"]}}}
        ] }
        no_auth_user: test"#;
    let server = NatsServer::start_configured(conf).await;
    let bridge = Bridge::with(launched("demo", &[]))
        .nats("user", "bridge")
        .nats("password", "b")
        .nats("subject_prefix", "it")
        .start_on(server)
        .await;
    let log = bridge.log();
    let line = log.lines().find(|line| line.contains("state is kept in memory")).expect("it is logged");
    assert!(line.contains("may not publish to $JS.API.STREAM.CREATE.KV_it_"), "{line}");
    bridge.prompt("demo.echo", "hello").await.expect("COMPLETED");

    // `check` names all of them, and changes nothing.
    let file = bridge.settings_file().display().to_string();
    let checked = run(&mut command(&["check", "--json", "--config", &file]), "").json();
    assert_eq!(checked["jetstream"]["ok"], true, "{checked}");
    let problem = checked["jetstream"]["problem"].as_str().unwrap();
    let kinds = ["follow_ups", "tasks", "contexts", "once", "replies"];
    let created = kinds.map(|kind| format!("$JS.API.STREAM.CREATE.KV_it_{kind}"));
    let others = ["$KV.it_tasks.>", "$JS.API.STREAM.CREATE.OBJ_it_files"];
    for subject in created.iter().map(String::as_str).chain(others) {
        assert!(problem.contains(subject), "{subject} is not in {problem}");
    }
    assert_eq!(problem.matches('$').count(), 7, "{problem}");
    let streams = api(&bridge.client, "STREAM.NAMES", json!({})).await;
    assert_eq!(streams["total"], 0, "{streams}");
}

#[tokio::test]
async fn plain_calls_send_nothing_to_jetstream() {
    let server = NatsServer::with_jetstream().await;
    let spy = server.connect().await;
    let bridge = Bridge::with(launched("demo", &[])).start_on(server).await;
    assert!(bridge.log().contains("state is shared in JetStream"), "{}", bridge.log());
    bridge.prompt("demo.echo", "first").await.expect("COMPLETED");
    let mut subscriptions = Vec::new();
    for subject in ["$JS.API.>", "$KV.>", "$O.>"] {
        subscriptions.push(spy.subscribe(subject).await.unwrap());
    }
    spy.flush().await.unwrap();
    for _ in 0..50 {
        bridge.prompt("demo.echo", "hello").await.expect("COMPLETED");
    }
    // The question is the first message that the spy sees.
    bridge.call("demo.report", json!({"topic": "tides", "audience": "sailors"})).await;
    let mut messages = futures_util::stream::select_all(subscriptions);
    let first = messages.next().await.unwrap();
    assert!(["follow_ups", "tasks"].iter().any(|kind| first.subject.contains(kind)), "{first:?}");
}

#[tokio::test]
async fn questions_and_answers_go_through_the_shared_store() {
    let bridge = Bridge::with(launched("demo", &[])).start_on(NatsServer::with_jetstream().await).await;
    let asked = bridge.call("demo.report", json!({"topic": "tides", "audience": "sailors"})).await;
    bridge.answer("demo", &asked.expect("INPUT_REQUIRED").follow_up_id(), "PDF").await.expect("COMPLETED");
    let arguments = ["state", "--prefix", &bridge.prefix];
    let shown = run(&mut command_on(&bridge.nats.url(), &arguments), "");
    assert!(shown.code == 0 && shown.out.contains("_follow_ups") && shown.out.contains("demo"), "{shown:?}");
    let stream = format!("KV_{}_follow_ups", bridge.prefix);
    wait_until(|| async {
        let info = api(&bridge.client, &format!("STREAM.INFO.{stream}"), json!({})).await;
        info["state"]["messages"] == 1
    })
    .await;
}
