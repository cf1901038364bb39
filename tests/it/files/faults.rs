//! Files under load, and when the store fails, disappears or is shared with other replicas.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_nats::Client;
use futures_util::future::join_all;
use serde_json::{Value, json};

use super::{agent_returning, as_principal, bridge_of, file_part};
use crate::support::agent_protocol::Scene;
use crate::support::caller::Call;
use crate::support::commands::{command, run};
use crate::support::eventually::eventually_within;
use crate::support::files::{jetstream_server, random_bytes, sha256};
use crate::support::mesh::Mesh;
#[cfg(target_os = "linux")]
use crate::support::processes::memory;
use crate::support::{
    Answer, Bridge, DemoAgent, NatsServer, Peer, attached, eventually, launched_at_any_port, wait_until,
    within_deadline,
};

/// Uploads a small file as a caller of any bridge with this prefix, and returns its URL.
async fn put(client: &Client, prefix: &str, bytes: &[u8]) -> String {
    let begun = Call::new(client, format!("{prefix}.files.put"), "").header("A2A-Name", "f.bin").await;
    let upload = begun["upload"].as_str().unwrap_or_else(|| panic!("{begun:?}")).to_owned();
    let chunk = Call::new(client, upload, bytes::Bytes::copy_from_slice(bytes)).header("A2A-Offset", "0");
    let stored = chunk.header("A2A-Last", "true").await;
    stored["url"].as_str().unwrap_or_else(|| panic!("{stored:?}")).to_owned()
}

#[tokio::test]
async fn many_uploads_at_the_same_time_end_beside_idle_ones_and_large_replies() {
    let large = random_bytes(2_000_000);
    let peer = agent_returning(json!([file_part("large.png", &large)]));
    let bridge = bridge_of(&peer).await;
    // Uploads that have sent a chunk and wait.
    for _ in 0..16 {
        let (subject, size) = bridge.begin_upload("idle", "a/b", 4 << 20).await;
        let next = bridge.upload_chunk(&subject, 0, &random_bytes(size), false).await;
        assert_eq!(next["offset"], size, "{next:?}");
    }
    let bytes = random_bytes(1 << 20);
    let uploads = join_all((0..64).map(|_| bridge.upload("a", "a/b", &bytes)));
    let replies = join_all((0..4).map(|_| bridge.prompt("peer.ask", "x").into_future()));
    let (urls, replies) = tokio::join!(uploads, replies);
    assert_eq!(bridge.download(&urls[63]).await, bytes);
    for reply in replies {
        let reply = reply.expect("COMPLETED");
        assert_eq!(reply["files"][0]["sha256"], sha256(&large));
    }
}

/// A content that a bridge began to write before it was killed.
async fn store_incomplete(bridge: &Bridge) -> String {
    let content = format!("{:016x}_{:032x}", fastrand::u64(..), fastrand::u128(..));
    let subject = format!("$O.{}.C.{content}", bridge.bucket());
    bridge.store_message(subject.clone(), &[], vec![1; 1000]).await;
    subject
}

/// Has the bridge sweep soon.
async fn announce(bridge: &Bridge) {
    let announcement = format!("{}.peer.files", bridge.prefix);
    bridge.client.publish(announcement, "another bridge".into()).await.unwrap();
}

/// Has the bridge sweep, and waits until it has.
async fn sweep(bridge: &Bridge) {
    let incomplete = store_incomplete(bridge).await;
    announce(bridge).await;
    eventually_within(Duration::from_secs(40), || async {
        (!bridge.stored_chunks().await.contains(&incomplete)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_replica_with_a_shorter_ttl_removes_no_complete_file() {
    let peer = Peer::completing("done");
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .set("files", json!({"ttl": "3s"}))
        .start_on(jetstream_server().await)
        .await;
    // Another replica, with a longer `files.ttl`, has started later.
    let stream = format!("OBJ_{}", bridge.bucket());
    let info = bridge.jetstream(&format!("STREAM.INFO.{stream}"), json!({})).await;
    let mut config = info["config"].clone();
    config["max_age"] = json!(3_600_000_000_000_u64);
    let updated = bridge.jetstream(&format!("STREAM.UPDATE.{stream}"), config).await;
    assert!(updated["config"].is_object(), "{updated}");
    let bytes = random_bytes(300_000);
    let url = bridge.upload("a", "b", &bytes).await;
    let list = bridge.files("list", json!({})).await;
    assert_eq!(list["files"].as_array().map(Vec::len), Some(1), "{list:?}");
    tokio::time::sleep(Duration::from_secs(4)).await;
    sweep(&bridge).await;
    assert_eq!(bridge.download(&url).await, bytes);
}

#[tokio::test]
async fn a_lost_bucket_is_created_again_and_its_new_files_are_kept() {
    let large = random_bytes(900_000);
    let peer = agent_returning(json!([file_part("large.png", &large)]));
    let bridge = bridge_of(&peer).await;
    let old = bridge.upload("a", "b", &random_bytes(8 << 20)).await;
    bridge.files("list", json!({})).await;
    let stream = format!("STREAM.DELETE.OBJ_{}", bridge.bucket());
    for round in 0..2 {
        let deleted = bridge.jetstream(&stream, json!({})).await;
        assert_eq!(deleted["success"], true, "{deleted}");
        match round {
            0 => {
                bridge.files("get", json!({ "url": old })).await.expect_error("not_found");
                let reply = bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
                let url = reply["files"][0]["url"].as_str().unwrap();
                assert_eq!(bridge.download(url).await, large);
            }
            _ => {
                let list = bridge.files("list", json!({})).await;
                assert_eq!(list["files"], json!([]), "{list:?}");
            }
        }
    }
    // The sequences of the new stream are below those that the bridge has read before.
    let bytes = random_bytes(300_000);
    let url = bridge.upload("a", "b", &bytes).await;
    sweep(&bridge).await;
    assert_eq!(bridge.download(&url).await, bytes);
    let list = bridge.files("list", json!({})).await;
    assert_eq!(list["files"].as_array().map(Vec::len), Some(1), "{list:?}");
}

#[tokio::test]
async fn a_forwarded_call_has_files_in_both_directions() {
    let mesh = Mesh::start(vec![launched_at_any_port("demo", &[])], 2).await;
    let bytes = random_bytes(300_000);
    let url = put(&mesh.client, &mesh.prefix, &bytes).await;
    for number in 0..12 {
        let body = json!({"prompt": format!("look {number}"), "files": [url], "meta": {"session_id": "s"}});
        mesh.call("demo.echo", body).await.expect("COMPLETED");
    }
    for _ in 0..8 {
        let body = json!({"prompt": "x", "meta": {"session_id": "s"}});
        let stream = mesh.call("demo.file", body).header("A2A-Files", "reference").stream().await;
        let parts = &stream.all("artifact")[0]["parts"];
        for file in [&parts[0], &stream.result["files"][0]] {
            assert!(file["url"].as_str().is_some_and(|url| url.starts_with("obj://")), "{file}");
        }
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn an_idle_upload_takes_little_memory() {
    let peer = Peer::completing("done");
    let bridge = bridge_of(&peer).await;
    let piece = random_bytes(400_000);
    let begin = || async {
        let (subject, _) = bridge.begin_upload("a", "b", 4 << 20).await;
        let next = bridge.upload_chunk(&subject, 0, &piece, false).await;
        assert_eq!(next["offset"], piece.len(), "{next:?}");
    };
    begin().await;
    let before = memory(bridge.pid(), "VmRSS");
    for _ in 0..100 {
        begin().await;
    }
    let grown = memory(bridge.pid(), "VmRSS").saturating_sub(before);
    assert!(grown < 24 << 20, "{} KiB", grown >> 10);
}

#[tokio::test]
async fn an_adopted_task_keeps_its_large_files() {
    let is_done = Arc::new(AtomicBool::new(false));
    let (done, large) = (Arc::clone(&is_done), random_bytes(3 << 20));
    let digest = sha256(&large);
    let peer = Peer::agent(move |seen| {
        let state = match done.load(Ordering::Relaxed) {
            false => "TASK_STATE_WORKING",
            true => "TASK_STATE_COMPLETED",
        };
        let mut task = json!({"id": "task-1", "contextId": "c", "status": {"state": state}});
        if state == "TASK_STATE_COMPLETED" {
            task["artifacts"] = json!([{"artifactId": "a", "parts": [file_part("large.png", &large)]}]);
        }
        let is_send = seen.rpc_method().starts_with("Send");
        Answer::result(seen, &if is_send { json!({ "task": task }) } else { task })
    });
    let agent = attached("peer", &peer.url()).set("max_response_size", "1MiB");
    let mut mesh = Mesh::start(vec![agent], 1).await;
    let mut updates = mesh.task_updates().await;
    mesh.prompt("peer.ask", "x").mode("submit").await.expect("WORKING");
    mesh.add().await;
    mesh.kill(0);
    is_done.store(true, Ordering::Relaxed);
    let completed = tokio::time::timeout(Duration::from_secs(60), async {
        loop {
            let (_, update) = updates.next_revision().await;
            if update["status"] != "WORKING" {
                return update;
            }
        }
    });
    let update = completed.await.expect("the task is followed");
    assert_eq!(update["status"], "COMPLETED", "{update}");
    let file = &update["files"][0];
    assert_eq!((&file["name"], &file["sha256"]), (&json!("large.png"), &json!(digest)), "{update}");
    assert!(file["url"].as_str().is_some_and(|url| url.starts_with("obj://")), "{update}");
}

#[tokio::test]
async fn the_agent_protocol_has_large_files_by_reference() {
    let large = random_bytes(3 << 20);
    let peer = agent_returning(json!([{"text": "done"}, file_part("large.png", &large)]));
    let agent = DemoAgent::start(&[]).await;
    let settings = "max_response_size: 1MiB";
    let scene = Scene::with(jetstream_server().await, agent, "demo", Some(&peer.url()), settings).await;
    let answer = eventually(|| async {
        let answer = scene.answer("look").await;
        // The bridge looks for JetStream while it starts.
        answer.error.is_none().then_some(answer)
    })
    .await;
    let (_, url) = answer.text.split_once("large.png: ").unwrap_or_else(|| panic!("{answer:?}"));
    let body = json!({"url": url.trim(), "offset": 3 << 20}).to_string();
    let end = scene.caller.request("a2a.files.get", body.into()).await.unwrap();
    let headers = end.headers.unwrap();
    assert_eq!(headers.get("A2A-Sha256").unwrap().as_str(), sha256(&large));
    assert_eq!(headers.get("A2A-Name").unwrap().as_str(), "large.png");
    scene.stop().await;
}

/// A server on which the bridge may do everything except publish to these subjects.
pub(super) async fn server_denying(subjects: &Value) -> NatsServer {
    NatsServer::start_configured(&format!(
        "jetstream: {{store_dir: \"$STORE_DIR\"}}\nno_auth_user: test\nauthorization {{ users: [
            {{user: test, password: t}}
            {{user: bridge, password: b, permissions: {{publish: {{allow: \">\", deny: {subjects}}}, subscribe: \">\"}}}}
        ] }}"
    ))
    .await
}

#[tokio::test]
async fn a_store_that_denies_requests_delays_no_reply_and_is_named() {
    let large = random_bytes(900_000);
    let peer = agent_returning(json!([file_part("large.png", &large)]));
    let denied = "$JS.API.DIRECT.GET.OBJ_a2a_files";
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .nats("user", "bridge")
        .nats("password", "b")
        .nats("subject_prefix", "a2a")
        .start_on(server_denying(&json!([denied, format!("{denied}.>")])).await)
        .await;
    // Something to read in the bucket.
    bridge.until_logged("large files are stored").await;
    bridge.store_message("$O.a2a_files.M.eA==".to_owned(), &[], b"{}".to_vec()).await;
    for _ in 0..2 {
        let began = Instant::now();
        let calls = join_all((0..8).map(|_| bridge.prompt("peer.ask", "x").into_future()));
        for reply in calls.await {
            reply.expect_error("too_large").saying(denied);
        }
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    }
    bridge.files("put", json!({})).await.expect_error("state_unavailable").saying(denied);
    // And `check` names it, without changing anything.
    let checked = run(command(&["check", "--config"]).arg(bridge.settings_file()), "");
    assert!(checked.out.contains(denied) && checked.out.contains("files"), "{checked:?}");
}

#[tokio::test]
async fn check_leaves_the_files_as_they_are() {
    let peer = Peer::completing("done");
    let bridge = bridge_of(&peer).await;
    let bytes = random_bytes(300_000);
    let url = bridge.upload("a", "b", &bytes).await;
    let checked = run(command(&["check", "--config"]).arg(bridge.settings_file()), "");
    assert!(checked.code == 0 && checked.out.contains("state is shared"), "{checked:?}");
    assert_eq!(bridge.download(&url).await, bytes);
}

#[tokio::test]
async fn a_fetched_file_is_removed_after_it_was_sent() {
    let large = random_bytes(700_000);
    let host = Peer::start(move |_| Answer::Http(200, vec![], large.clone()));
    let peer = Peer::completing("done");
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .set("files", json!({"fetch_hosts": [host.url().replace("http://", "")]}))
        .start_on(jetstream_server().await)
        .await;
    for mode in ["final", "stream", "submit"] {
        let body = json!({"prompt": "x", "files": [format!("{}/large", host.url())]});
        let call = bridge.call("peer.ask", body);
        match mode {
            "stream" => drop(call.stream().await),
            mode => drop(call.mode(mode).await),
        }
        wait_until(|| async { bridge.stored_chunks().await.is_empty() }).await;
    }
    assert_eq!(peer.calls("SendMessage").len(), 3);
    let list = bridge.files("list", json!({})).await;
    assert_eq!(list["files"], json!([]), "{list:?}");
}

#[tokio::test]
async fn the_same_large_file_of_an_agent_is_stored_once() {
    let large = random_bytes(3_000_000);
    let peer = agent_returning(json!([file_part("large.png", &large)]));
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .set("files", json!({"max_per_caller": "8MiB"}))
        .start_on(jetstream_server().await)
        .await;
    let first = bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    let url = first["files"][0]["url"].as_str().unwrap();
    for _ in 0..5 {
        let again = bridge.get_task("peer", "task-1").await.expect("COMPLETED");
        assert_eq!(again["files"][0]["url"], url);
        let another = bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
        assert_eq!(another["files"][0]["url"], url);
    }
    wait_until(|| async { bridge.stored_chunks().await.len() == 1 }).await;
    assert_eq!(bridge.download(url).await, large);
    // After the caller has deleted it, it is stored again.
    bridge.files("delete", json!({ "url": url })).await;
    let again = bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    assert_ne!(again["files"][0]["url"], url);
    assert_eq!(bridge.download(again["files"][0]["url"].as_str().unwrap()).await, large);
}

#[tokio::test]
async fn uploads_of_one_gateway_principal_leave_places_for_others() {
    let peer = Peer::completing("done");
    let bridge = bridge_of(&peer).await;
    let begin = |principal: &str| as_principal(&bridge, principal, "files.put", json!({}));
    let mut begun = 0;
    for batch in 0..40 {
        let names: Vec<_> = (0..32).map(|user| format!("tenant-{}", (batch * 32 + user) / 100)).collect();
        let batch = join_all(names.iter().map(|name| begin(name).into_future())).await;
        begun += batch.iter().filter(|reply| reply["upload"].is_string()).count();
    }
    assert!((600..1024).contains(&begun), "{begun}");
    // All principals of a gateway in the account of the bridge are one tenant; the callers of the account are another.
    let (upload, _) = bridge.begin_upload("a", "b", 3).await;
    let stored = bridge.upload_chunk(&upload, 0, b"abc", true).await;
    assert_eq!(stored["size"], 3, "{stored:?}");
}

#[tokio::test]
async fn a_list_of_many_files_is_quick() {
    let peer = Peer::completing("done");
    let bridge = bridge_of(&peer).await;
    for _ in 0..12 {
        join_all((0..25).map(|_| put(&bridge.client, &bridge.prefix, b"x"))).await;
    }
    let stream = format!("$JS.API.STREAM.MSG.GET.OBJ_{}", bridge.bucket());
    let mut reads = bridge.client.subscribe(stream).await.unwrap();
    bridge.client.flush().await.unwrap();
    let list = bridge.files("list", json!({})).await;
    assert_eq!(list["files"].as_array().map(Vec::len), Some(300), "{list:?}");
    let mut count = 0;
    while tokio::time::timeout(Duration::from_millis(100), futures_util::StreamExt::next(&mut reads))
        .await
        .is_ok()
    {
        count += 1;
    }
    assert!(count < 10, "{count} requests to the leader");
}

#[tokio::test]
async fn a_stop_loses_no_request_for_files() {
    let peer = Peer::completing("done");
    let mut mesh = Mesh::start(vec![attached("peer", &peer.url())], 2).await;
    let url = put(&mesh.client, &mesh.prefix, &random_bytes(200_000)).await;
    let (client, subject) = (mesh.client.clone(), format!("{}.files.get", mesh.prefix));
    let is_over = AtomicBool::new(false);
    let load = async {
        let mut calls = Vec::new();
        while !is_over.load(Ordering::Relaxed) {
            let call = Call::new(&client, subject.clone(), json!({ "url": url, "offset": 199_000 }));
            calls.push(call.begin().await);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let mut failed = Vec::new();
        for mut call in calls {
            match call.bytes_within(Duration::from_secs(5)).await {
                Some(bytes) if bytes.len() == 1000 => {}
                other => failed.push(other),
            }
        }
        failed
    };
    let restarts = async {
        for stopped in 0..4 {
            tokio::time::sleep(Duration::from_millis(300)).await;
            mesh.stop(stopped).await;
            mesh.add().await;
        }
        is_over.store(true, Ordering::Relaxed);
    };
    let (failed, ()) = tokio::join!(load, restarts);
    assert!(failed.is_empty(), "{} of the requests failed: {:?}", failed.len(), failed.first());
}

#[tokio::test]
async fn a_bridge_that_sweeps_answers_the_sweepers_of_others() {
    let peer = Peer::completing("done");
    let bridge = bridge_of(&peer).await;
    let (upload, _) = bridge.begin_upload("a", "b", 3).await;
    let own = upload.split('.').nth(2).unwrap().to_owned();
    let writer = |instance: &str| format!("{}.peer.files.{instance}", bridge.prefix);
    // Another instance that does not answer: the bridge waits for it, for one content after the other.
    let silent = format!("{:016x}", fastrand::u64(..));
    let mut asked = bridge.client.subscribe(writer(&silent)).await.unwrap();
    for _ in 0..4 {
        let subject = format!("$O.{}.C.{silent}_{:032x}", bridge.bucket(), fastrand::u128(..));
        bridge.store_message(subject, &[], vec![1]).await;
    }
    let announcement = format!("{}.peer.files", bridge.prefix);
    bridge.client.publish(announcement, silent.into()).await.unwrap();
    assert!(within_deadline(futures_util::StreamExt::next(&mut asked)).await.is_some());
    let began = Instant::now();
    let answer = bridge.client.request(writer(&own), format!("{own}_x").into()).await.unwrap();
    assert_eq!(&answer.payload[..], b"unknown");
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    assert_eq!(bridge.stored_chunks().await.len(), 4, "in doubt, chunks stay");
}

#[tokio::test]
async fn a_reply_never_refers_to_a_file_that_was_deleted_at_another_replica() {
    let large = random_bytes(900_000);
    let peer = agent_returning(json!([file_part("large.png", &large)]));
    let mesh = Mesh::start(vec![attached("peer", &peer.url())], 2).await;
    let ask = || async {
        let reply = mesh.call("peer.ask", json!({"prompt": "x"})).await.expect("COMPLETED");
        reply["files"][0]["url"].as_str().unwrap_or_else(|| panic!("{reply:?}")).to_owned()
    };
    let mut urls = std::collections::BTreeSet::new();
    for _ in 0..12 {
        urls.insert(ask().await);
    }
    for url in &urls {
        let deleted = Call::new(&mesh.client, format!("{}.files.delete", mesh.prefix), json!({ "url": url }));
        assert_eq!(deleted.await["deleted"], *url);
    }
    for _ in 0..12 {
        let url = ask().await;
        assert!(!urls.contains(&url), "{url} was deleted");
    }
}

#[tokio::test]
async fn incomplete_files_are_found_behind_very_many_contents() {
    let peer = Peer::completing("done");
    let bridge = bridge_of(&peer).await;
    // More contents than the server lists in one response, all before those of bridges.
    let bucket = bridge.bucket();
    for number in 0..100_000 {
        bridge.client.publish(format!("$O.{bucket}.C.--{number}"), "x".into()).await.unwrap();
    }
    let incomplete = store_incomplete(&bridge).await;
    announce(&bridge).await;
    eventually_within(Duration::from_secs(40), || async {
        let get = json!({ "last_by_subj": incomplete });
        let found = bridge.jetstream(&format!("STREAM.MSG.GET.OBJ_{bucket}"), get).await;
        (found["error"]["err_code"] == 10037).then_some(())
    })
    .await;
}
