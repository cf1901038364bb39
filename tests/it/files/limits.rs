//! Limits of files: memory, time, quotas, and the shares of callers and tenants.

use std::future::IntoFuture as _;
use std::time::Duration;

use futures_util::future::{join_all, select_all};
use serde_json::json;

use super::{as_principal, store_object, task_with};
use crate::support::caller::Call;
use crate::support::files::{jetstream_server, random_bytes};
#[cfg(target_os = "linux")]
use crate::support::processes::memory;
use crate::support::{Answer, Bridge, Peer, attached};

#[cfg(target_os = "linux")]
#[tokio::test]
async fn fetched_files_count_in_the_memory_limit() {
    let content = random_bytes(250_000);
    let host = Peer::start(move |_| Answer::Http(200, vec![], content.clone()));
    let peer = Peer::completing("done");
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .set("limits", json!({"memory": "64MiB"}))
        .set("files", json!({"fetch_hosts": [host.url().replace("http://", "")]}))
        .start_on(jetstream_server().await)
        .await;
    let before = memory(bridge.pid(), "VmHWM");
    let urls: Vec<_> = (0..64).map(|number| format!("{}/{number}", host.url())).collect();
    let body = json!({"prompt": "x", "files": urls});
    let calls = join_all((0..8).map(|_| bridge.call("peer.ask", body.clone()).into_future())).await;
    for reply in calls {
        reply.expect_error("busy").saying("limits.memory");
    }
    let grown = memory(bridge.pid(), "VmHWM").saturating_sub(before);
    assert!(grown < 64 << 20, "{} MiB more than {} MiB", grown >> 20, before >> 20);
    // What was fetched is given back.
    let body = json!({"prompt": "x", "files": urls[..4]});
    bridge.call("peer.ask", body).await.expect("COMPLETED");
}

#[tokio::test]
async fn the_callers_of_one_gateway_do_not_fill_the_bucket_for_others() {
    let peer = Peer::completing("done");
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .set("files", json!({"max_per_caller": "1MiB", "max_total": "4MiB"}))
        .start_on(jetstream_server().await)
        .await;
    let bytes = random_bytes(450_000);
    let mut stored = 0;
    for number in 0..20 {
        let who = format!("user-{}", number / 2);
        let begun = as_principal(&bridge, &who, "files.put", json!({})).header("A2A-Size", "450000").await;
        let Some(upload) = begun["upload"].as_str().map(str::to_owned) else {
            begun.expect_error("busy").saying("files.max_total");
            continue;
        };
        let chunk = Call::new(&bridge.client, upload, bytes::Bytes::copy_from_slice(&bytes));
        let chunk = chunk.header("A2A-Offset", "0").header("A2A-Last", "true").header("A2A-Caller", &who);
        assert_eq!(chunk.await["size"], bytes.len());
        stored += 1;
    }
    assert_eq!(stored, 4, "about half of the bucket");
    bridge.upload("a", "b", &bytes).await;
}

#[tokio::test]
async fn one_principal_of_a_gateway_does_not_take_all_requests_for_files() {
    let peer = Peer::completing("done");
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .set("files", json!({"allowed_buckets": ["shared"]}))
        .start_on(jetstream_server().await)
        .await;
    // A bucket whose chunks cannot be read: the stream does not answer such requests, and who does answer is silent.
    let stream = json!({
        "name": "OBJ_shared", "subjects": ["$O.shared.C.>", "$O.shared.M.>"], "allow_rollup_hdrs": true,
        "allow_direct": false, "discard": "new",
    });
    bridge.jetstream("STREAM.CREATE.OBJ_shared", stream).await;
    store_object(&bridge, "shared", "x", b"x", |_| {}).await;
    let _silent = bridge.client.subscribe("$JS.API.DIRECT.GET.OBJ_shared").await.unwrap();
    let get = json!({"url": "obj://shared/x"});
    let mut requests = Vec::new();
    for _ in 0..64 {
        requests.push(as_principal(&bridge, "mallory", "files.get", get.clone()).begin().await);
    }
    // All others wait.
    let (first, ..) = select_all(requests.iter_mut().map(|request| Box::pin(request.reply()))).await;
    first.expect_error("busy");
    let list = as_principal(&bridge, "bob", "files.list", json!({})).await;
    assert_eq!(list.body, json!({"files": []}));
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn uploads_count_in_the_memory_limit() {
    let peer = Peer::completing("done");
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .set("limits", json!({"memory": "64MiB"}))
        .start_on(jetstream_server().await)
        .await;
    let piece = random_bytes((128 << 10) - 2);
    let before = memory(bridge.pid(), "VmRSS");
    let mut busy = Vec::new();
    for number in 0..600 {
        let who = format!("user-{}", number / 100);
        let begun = as_principal(&bridge, &who, "files.put", json!({})).await;
        let upload = begun["upload"].as_str().unwrap_or_else(|| panic!("{begun:?}")).to_owned();
        for (offset, bytes) in [(0, &piece[..]), (piece.len(), &piece[..1])] {
            let chunk = Call::new(&bridge.client, upload.clone(), bytes::Bytes::copy_from_slice(bytes));
            let chunk = chunk.header("A2A-Offset", &offset.to_string()).header("A2A-Caller", &who);
            match chunk.await {
                reply if reply["offset"].is_u64() => {}
                reply => {
                    reply.expect_error("busy").saying("limits.memory");
                    busy.push((who.clone(), upload.clone()));
                    break;
                }
            }
        }
    }
    let grown = memory(bridge.pid(), "VmRSS").saturating_sub(before);
    assert!(grown < 64 << 20, "{} MiB more than {} MiB", grown >> 20, before >> 20);
    // A chunk that was refused can be sent again, once there is memory; small ones need none.
    let (who, upload) = busy.first().expect("an upload that is refused");
    let chunk = Call::new(&bridge.client, upload.clone(), "abc").header("A2A-Caller", who);
    let stored = chunk.header("A2A-Offset", "0").header("A2A-Last", "true").await;
    assert_eq!(stored["size"], 3, "{stored:?}");
}

#[tokio::test]
async fn a_small_file_of_unknown_size_fits_into_the_rest_of_the_quota() {
    let peer = Peer::completing("done");
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .set("files", json!({"max_per_caller": "3MiB"}))
        .start_on(jetstream_server().await)
        .await;
    let begun = bridge.files("put", json!({})).await;
    let upload = begun["upload"].as_str().unwrap_or_else(|| panic!("{begun:?}")).to_owned();
    let stored = bridge.upload_chunk(&upload, 0, b"abc", true).await;
    assert_eq!(stored["size"], 3, "{stored:?}");
}

#[tokio::test]
async fn a_host_that_sends_slowly_does_not_hold_a_stream_or_a_submitted_task() {
    let pause = Duration::from_millis(100);
    let host = Peer::start(move |_| Answer::Endless(Vec::new(), b"x".to_vec(), pause));
    let peer = Peer::completing("done");
    let bridge = Bridge::with(attached("peer", &peer.url()).set("request_timeout", "1s"))
        .set("files", json!({"fetch_hosts": [host.url().replace("http://", "")]}))
        .start_on(jetstream_server().await)
        .await;
    let body = json!({"prompt": "x", "files": [format!("{}/slow", host.url())]});
    let reply = bridge.call("peer.ask", body.clone()).mode("submit").await;
    reply.expect_error("timeout").saying("files");
    let stream = bridge.call("peer.ask", body).stream().await;
    stream.result.expect_error("timeout").saying("files");
    assert_eq!(peer.calls("SendMessage").len(), 0);
}

#[tokio::test]
async fn files_and_the_agent_share_the_timeout_of_a_call() {
    let slow = |answer: Answer| {
        std::thread::park_timeout(Duration::from_secs(2));
        answer
    };
    let host = Peer::start(move |_| slow(Answer::Http(200, vec![], vec![1])));
    let peer = Peer::agent(move |seen| slow(task_with(seen, &json!([{"text": "done"}]))));
    let bridge = Bridge::with(attached("peer", &peer.url()).set("request_timeout", "3s"))
        .set("files", json!({"fetch_hosts": [host.url().replace("http://", "")]}))
        .start_on(jetstream_server().await)
        .await;
    bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    let body = json!({"prompt": "x", "files": [format!("{}/slow", host.url())]});
    bridge.call("peer.ask", body).await.expect_error("timeout");
}
