//! Files by reference: out of a reply, into a request, and by the requests for files.

mod buckets;
mod faults;
mod limits;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE};
use nix::sys::signal::Signal;
use rstest::rstest;
use serde_json::{Value, json};

use crate::support::caller::Call;
use crate::support::commands::{command, command_on, run};
use crate::support::files::{LargeFileAgent, jetstream_server, jetstream_server_with, random_bytes, sha256};
use crate::support::peer::HttpRequest;
use crate::support::peer::{card, event};
use crate::support::processes::{memory, signal};
use crate::support::{Answer, Bridge, Peer, Reply, attached, eventually, wait_until};

/// A task with these parts in its artifact.
fn task_with(seen: &HttpRequest, parts: &Value) -> Answer {
    let task = json!({
        "id": "task-1", "contextId": "c", "status": {"state": "TASK_STATE_COMPLETED"},
        "artifacts": [{"artifactId": "a", "parts": parts}],
    });
    let is_send = seen.rpc_method().starts_with("Send");
    Answer::result(seen, &if is_send { json!({ "task": task }) } else { task })
}

/// An agent that returns these parts.
fn agent_returning(parts: Value) -> Peer {
    Peer::agent(move |seen| task_with(seen, &parts))
}

fn file_part(name: &str, bytes: &[u8]) -> Value {
    json!({"raw": STANDARD.encode(bytes), "filename": name, "mediaType": "image/png"})
}

async fn bridge_of(peer: &Peer) -> Bridge {
    Bridge::with(attached("peer", &peer.url())).start_on(jetstream_server().await).await
}

#[tokio::test]
async fn files_are_inline_while_the_reply_fits_and_the_largest_go_by_reference_otherwise() {
    let [small, medium, large] = [1000, 200_000, 900_000].map(random_bytes);
    let peer = agent_returning(json!([
        {"text": "done"}, file_part("small.png", &small), file_part("large.png", &large), file_part("medium.png", &medium)
    ]));
    let bridge = bridge_of(&peer).await;
    let reply = bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    assert_eq!(reply.message(), "done");
    assert_eq!(reply["files"][0]["bytes"], STANDARD.encode(&small));
    assert_eq!(reply["files"][2]["bytes"], STANDARD.encode(&medium));
    let by_reference = &reply["files"][1];
    assert_eq!(by_reference["name"], "large.png");
    assert_eq!(by_reference["mime_type"], "image/png");
    assert_eq!(by_reference["size"], large.len());
    assert_eq!(by_reference["sha256"], sha256(&large));
    assert!(by_reference.get("bytes").is_none());
    let url = by_reference["url"].as_str().unwrap();
    assert!(url.starts_with(&format!("obj://{}/", bridge.bucket())), "{url}");
    assert_eq!(bridge.download(url).await, large);
    // The same reply has the same file.
    let again = bridge.get_task("peer", "task-1").await.expect("COMPLETED");
    assert_eq!(again["files"][1]["url"], url);
    // And any client reads the object.
    assert_eq!(bridge.stored_chunks().await.len(), 1);
}

#[tokio::test]
async fn the_header_decides_how_files_come() {
    let [small, large] = [1000, 2_000_000].map(random_bytes);
    let peer = agent_returning(json!([file_part("small.png", &small), file_part("large.png", &large)]));
    let bridge = bridge_of(&peer).await;
    let reply = bridge.prompt("peer.ask", "x").header("A2A-Files", "reference").await.expect("COMPLETED");
    for (file, bytes) in reply["files"].as_array().unwrap().iter().zip([&small, &large]) {
        assert_eq!(bridge.download(file["url"].as_str().unwrap()).await, *bytes);
    }
    let reply = bridge.prompt("peer.ask", "x").header("A2A-Files", "inline").await.expect("COMPLETED");
    assert_eq!(reply["files"], json!([]));
    let whole = bridge.download(reply["full_reply"]["url"].as_str().unwrap()).await;
    let whole: Value = serde_json::from_slice(&whole).unwrap();
    assert_eq!(whole["files"][1]["bytes"], STANDARD.encode(&large));
    bridge.prompt("peer.ask", "x").header("A2A-Files", "maybe").await.expect_error("invalid_request");
}

#[tokio::test]
async fn a_reply_that_does_not_fit_is_stored_whole() {
    let text = "long text \u{1}\" ".repeat(200_000);
    let peer = agent_returning(json!([{"text": text}, {"data": {"a": 1}}]));
    let bridge = bridge_of(&peer).await;
    let reply = bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    let cut = reply.message();
    assert!(text.starts_with(cut) && (30_000..=65_536).contains(&cut.len()), "{}", cut.len());
    assert_eq!((&reply["data"], &reply["artifacts"]), (&json!({}), &json!([])));
    let whole = bridge.download(reply["full_reply"]["url"].as_str().unwrap()).await;
    assert_eq!(reply["full_reply"]["size"], whole.len());
    assert_eq!(reply["full_reply"]["sha256"], sha256(&whole));
    let whole: Value = serde_json::from_slice(&whole).unwrap();
    assert_eq!((&whole["message"], &whole["data"]), (&json!(text), &json!({"a": 1})));
    assert_eq!(whole["task"], reply["task"]);
    // As a stream, the text comes in pieces, and the result in the same form.
    let stream = bridge.prompt("peer.ask", "x").stream().await;
    assert!(stream.result["full_reply"]["url"].is_string());
}

#[tokio::test]
async fn a_question_that_does_not_fit_keeps_its_follow_up_id_and_is_stored_whole() {
    let text = "why? ".repeat(300_000);
    let question = text.clone();
    let peer = Peer::agent(move |seen| Answer::task(seen, "TASK_STATE_INPUT_REQUIRED", &question));
    let bridge = bridge_of(&peer).await;
    let reply = bridge.prompt("peer.ask", "x").await.expect("INPUT_REQUIRED");
    assert!(reply["data"]["follow_up_id"].is_string());
    let whole = bridge.download(reply["full_reply"]["url"].as_str().unwrap()).await;
    let whole: Value = serde_json::from_slice(&whole).unwrap();
    assert_eq!((&whole["message"], &whole["data"]), (&json!(text), &reply["data"]));
}

#[tokio::test]
async fn frames_have_large_files_by_reference() {
    let [small, large] = [1000, 1_500_000].map(random_bytes);
    let artifact =
        json!({"artifactId": "a", "parts": [file_part("s.png", &small), file_part("l.png", &large)]});
    let events: Vec<u8> = [
        json!({"artifactUpdate": {"taskId": "t", "artifact": artifact, "lastChunk": true}}),
        json!({"statusUpdate": {"taskId": "t", "status": {"state": "TASK_STATE_COMPLETED"}}}),
    ]
    .iter()
    .flat_map(event)
    .collect();
    let peer = Peer::streaming_agent(move |seen| match seen.rpc_method().as_str() {
        "SendStreamingMessage" => Answer::Events(events.clone(), 10_000),
        _ => Answer::task_not_found(seen),
    });
    let bridge = bridge_of(&peer).await;
    let stream = bridge.prompt("peer.ask", "x").stream().await;
    let parts = &stream.all("artifact")[0]["parts"];
    assert_eq!(parts[0]["raw"], STANDARD.encode(&small));
    assert_eq!(parts[1]["filename"], "l.png");
    let url = parts[1]["url"].as_str().unwrap_or_else(|| panic!("{parts}"));
    assert_eq!(bridge.download(url).await, large);
    assert_eq!(stream.result["files"][1]["url"], url);
    assert_eq!(stream.result["files"][1]["sha256"], sha256(&large));
}

/// What an agent received as the file of a request, whatever its dialect.
fn received_file(request: &HttpRequest) -> (Vec<u8>, String, String) {
    fn find<'v>(value: &'v Value, keys: &[&str]) -> Option<&'v str> {
        match value {
            Value::Object(map) => {
                let own = keys.iter().find_map(|key| map.get(*key)?.as_str());
                own.or_else(|| map.values().find_map(|value| find(value, keys)))
            }
            Value::Array(list) => list.iter().find_map(|value| find(value, keys)),
            _ => None,
        }
    }
    let body = request.json();
    let text = |keys: &[&str]| find(&body, keys).unwrap_or_default().to_owned();
    let parts =
        find(&body, &["raw", "bytes", "fileWithBytes"]).unwrap_or_else(|| panic!("no file in {body}"));
    let params = body.get("params").unwrap_or(&body);
    assert!(params.is_object());
    (STANDARD.decode(parts).unwrap(), text(&["filename", "name"]), text(&["mediaType", "mimeType"]))
}

#[rstest]
#[case::v1("1.0", "jsonrpc")]
#[case::v1_rest("1.0", "rest")]
#[case::v03("0.3", "jsonrpc")]
#[case::v03_rest("0.3", "rest")]
#[case::v01("0.1", "jsonrpc")]
#[tokio::test]
async fn a_file_in_the_store_reaches_the_agent_as_bytes_in_every_dialect(
    #[case] protocol: &str,
    #[case] binding: &str,
) {
    let peer = Peer::agent_with_card(card(&["ask"]), |seen| {
        let body = seen.json();
        let is_message = body.get("message").or(body["params"].get("message")).is_some();
        let task = json!({"id": "t", "kind": "task", "status": {"state": "completed"}});
        match is_message {
            true if seen.rpc_method().is_empty() => Answer::json(&json!({ "task": task })),
            true if seen.rpc_method() == "SendMessage" => Answer::result(seen, &json!({ "task": task })),
            true => Answer::result(seen, &task),
            false => Answer::task_not_found(seen),
        }
    });
    let agent = attached("peer", &peer.url()).set("protocol", protocol).set("binding", binding);
    let bridge = Bridge::with(agent).start_on(jetstream_server().await).await;
    for size in [0, 1, 2, 128 << 10, 1_000_001] {
        let bytes = random_bytes(size);
        let url = bridge.upload("a \"b\".png", "image/png", &bytes).await;
        assert_eq!(bridge.download(&url).await, bytes);
        bridge.call("peer.ask", json!({"prompt": "look", "files": [url]})).await.expect("COMPLETED");
        let requests = peer.requests();
        let sent = requests.iter().rev().find(|request| request.json().to_string().contains("look")).unwrap();
        assert_eq!(received_file(sent), (bytes, "a \"b\".png".to_owned(), "image/png".to_owned()));
        let length: usize = sent.header("content-length").unwrap().parse().unwrap();
        assert_eq!(length, sent.body.len());
    }
}

#[tokio::test]
async fn a_request_may_have_several_files_and_so_may_an_answer() {
    let peer = Peer::agent(|seen| match seen.is_answer() {
        false => Answer::task(seen, "TASK_STATE_INPUT_REQUIRED", "which?"),
        true => Answer::task(seen, "TASK_STATE_COMPLETED", "done"),
    });
    let bridge = bridge_of(&peer).await;
    let [one, two] = [300_000, 400_000].map(random_bytes);
    let urls = [bridge.upload("1", "a/b", &one).await, bridge.upload("2", "c/d", &two).await];
    let body = json!({"prompt": "x", "files": [urls[0], {"name": "i", "bytes": "aGk="}, urls[1]]});
    let reply = bridge.call("peer.ask", body).await.expect("INPUT_REQUIRED");
    let parts = peer.calls("SendMessage")[0].json()["params"]["message"]["parts"].clone();
    assert_eq!(parts[1]["raw"], STANDARD.encode(&one));
    assert_eq!(parts[2]["raw"], "aGk=");
    assert_eq!(parts[3]["raw"], STANDARD.encode(&two));
    let id = reply["data"]["follow_up_id"].as_str().unwrap();
    let answer = |url: &str| {
        let body = json!({"follow_up_id": id, "user_response": "this", "files": [url]});
        bridge.call("peer.provide_required_input", body)
    };
    // The id stays valid when a file cannot be read.
    answer(&format!("obj://{}/missing", bridge.bucket())).await.expect_error("not_found");
    answer(&urls[1]).await.expect("COMPLETED");
    let answered = peer.calls("SendMessage")[1].json();
    assert_eq!(answered["params"]["message"]["parts"][1]["raw"], STANDARD.encode(&two));
}

#[tokio::test]
async fn a_reference_that_cannot_be_used_is_refused_before_the_agent_is_asked() {
    let peer = Peer::completing("never");
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .set("files", json!({"max_size": "100KiB", "max_request": "150KiB", "max_total": "1GiB"}))
        .start_on(jetstream_server().await)
        .await;
    let bucket = bridge.bucket();
    let ask = |files: Value| bridge.call("peer.ask", json!({"prompt": "x", "files": files}));
    let url = |name: &str| format!("obj://{bucket}/{name}");
    for text in [
        "obj://",
        "obj://x",
        &url(""),
        &url("../a"),
        &url("a/b"),
        &url("%2e"),
        &url("a?b"),
        &url(".."),
        "obj:///a",
        "obj://other_bucket/a",
        "file:///etc/passwd",
        "ftp://x/y",
    ] {
        ask(json!([text])).await.expect_error("invalid_request");
        if text.starts_with("obj:") {
            bridge.files("get", json!({"url": text})).await.expect_error("invalid_request");
        }
    }
    ask(json!([url("missing")])).await.expect_error("not_found");
    bridge.files("get", json!({"url": url("missing")})).await.expect_error("not_found");
    // Sizes.
    let [half, whole] = [80 << 10, 100 << 10].map(random_bytes);
    let half = bridge.upload("half", "a/b", &half).await;
    ask(json!([half, half])).await.expect_error("too_large").saying("files.max_request");
    bridge.upload("whole", "a/b", &whole).await;
    let put = bridge.files("put", json!({})).header("A2A-Size", &((100 << 10) + 1).to_string());
    put.await.expect_error("too_large").saying("files.max_size");
    // Deleted.
    bridge.files("delete", json!({"url": half})).await;
    ask(json!([half])).await.expect_error("not_found");
    bridge.files("get", json!({"url": half})).await.expect_error("not_found");
    assert_eq!(peer.calls("SendMessage").len(), 0);
}

/// Stores an object as another client would, with this metadata.
async fn store_object(
    bridge: &Bridge,
    bucket: &str,
    name: &str,
    content: &[u8],
    change: impl Fn(&mut Value),
) {
    let nuid = format!("N{}", fastrand::u64(..));
    for chunk in content.chunks(100_000) {
        bridge.store_message(format!("$O.{bucket}.C.{nuid}"), &[], chunk.to_vec()).await;
    }
    let digest = (0..32).map(|at| u8::from_str_radix(&sha256(content)[2 * at..2 * at + 2], 16).unwrap());
    let mut metadata = json!({
        "name": name, "bucket": bucket, "nuid": nuid, "size": content.len(), "chunks": 1,
        "mtime": "2026-01-01T00:00:00Z", "digest": format!("SHA-256={}", URL_SAFE.encode(digest.collect::<Vec<u8>>())),
    });
    change(&mut metadata);
    let subject = format!("$O.{bucket}.M.{}", URL_SAFE.encode(name));
    bridge.store_message(subject, &[("Nats-Rollup", "sub")], metadata.to_string().into_bytes()).await;
}

#[tokio::test]
async fn objects_of_other_clients_are_read_but_links_are_not_followed() {
    let peer = Peer::completing("done");
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .set("files", json!({"allowed_buckets": ["shared"]}))
        .start_on(jetstream_server().await)
        .await;
    let stream = json!({
        "name": "OBJ_shared", "subjects": ["$O.shared.C.>", "$O.shared.M.>"], "allow_rollup_hdrs": true,
        "allow_direct": true, "discard": "new",
    });
    bridge.jetstream("STREAM.CREATE.OBJ_shared", stream).await;
    let content = random_bytes(300_000);
    store_object(&bridge, "shared", "report.pdf", &content, |_| {}).await;
    assert_eq!(bridge.download("obj://shared/report.pdf").await, content);
    let ask = |url: &str| bridge.call("peer.ask", json!({"prompt": "x", "files": [url]}));
    ask("obj://shared/report.pdf").await.expect("COMPLETED");
    let part = peer.calls("SendMessage")[0].json()["params"]["message"]["parts"][1].clone();
    assert_eq!((&part["filename"], &part["mediaType"]), (&json!("report.pdf"), &json!("application/pdf")));
    assert_eq!(part["raw"], STANDARD.encode(&content));
    for (name, link) in
        [("link", json!({"bucket": "shared", "name": "report.pdf"})), ("all", json!({"bucket": "secret"}))]
    {
        store_object(&bridge, "shared", name, b"", |metadata| metadata["options"] = json!({"link": link}))
            .await;
        ask(&format!("obj://shared/{name}")).await.expect_error("not_found");
        bridge.files("get", json!({"url": format!("obj://shared/{name}")})).await.expect_error("not_found");
    }
    store_object(&bridge, "shared", "gone", b"x", |metadata| metadata["deleted"] = json!(true)).await;
    store_object(&bridge, "shared", "wild", b"x", |metadata| metadata["nuid"] = json!("*")).await;
    store_object(&bridge, "shared", "plain", b"x", |metadata| metadata["digest"] = json!("MD5=x")).await;
    store_object(&bridge, "shared", "not-json", b"x", |metadata| *metadata = json!([1])).await;
    for name in ["gone", "wild", "plain", "not-json"] {
        ask(&format!("obj://shared/{name}")).await.expect_error("not_found");
    }
    assert_eq!(peer.calls("SendMessage").len(), 1);
}

#[tokio::test]
async fn an_agent_never_receives_a_complete_request_with_a_file_that_does_not_match_its_digest() {
    let peer = Peer::completing("never");
    let bridge = bridge_of(&peer).await;
    let bucket = bridge.bucket();
    let content = random_bytes(700_000);
    let mut other = content.clone();
    *other.last_mut().unwrap() ^= 1;
    let digest = |bytes: &[u8]| {
        let hex = sha256(bytes);
        let bytes = (0..32).map(|at| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).unwrap());
        format!("SHA-256={}", URL_SAFE.encode(bytes.collect::<Vec<u8>>()))
    };
    store_object(&bridge, &bucket, "digest", &content, |metadata| metadata["digest"] = json!(digest(&other)))
        .await;
    store_object(&bridge, &bucket, "longer", &content, |metadata| {
        metadata["size"] = json!(content.len() - 1);
    })
    .await;
    store_object(&bridge, &bucket, "empty", b"", |metadata| metadata["digest"] = json!(digest(b"x"))).await;
    for name in ["digest", "longer", "empty"] {
        let body = json!({"prompt": "x", "files": [format!("obj://{bucket}/{name}")]});
        bridge.call("peer.ask", body).await.expect_error("invalid_request").saying("digest");
    }
    // Chunks that are missing: the file has expired, or is being removed.
    store_object(&bridge, &bucket, "shorter", &content, |metadata| {
        metadata["size"] = json!(content.len() + 1);
    })
    .await;
    let body = json!({"prompt": "x", "files": [format!("obj://{bucket}/shorter")]});
    bridge.call("peer.ask", body).await.expect_error("not_found");
    assert_eq!(peer.calls("SendMessage").len(), 0, "a complete request");
}

#[tokio::test]
async fn an_upload_follows_its_rules() {
    let peer = Peer::completing("done");
    let bridge = bridge_of(&peer).await;
    let bytes = random_bytes(600_000);
    let (subject, size) = bridge.begin_upload("../../etc/passwd", "text/plain", bytes.len() as u64).await;
    assert_eq!(size, 512 << 10);
    let (first, rest) = bytes.split_at(size);
    bridge
        .upload_chunk(&subject, 1, first, false)
        .await
        .expect_error("invalid_request")
        .saying("begins at 0");
    assert_eq!(bridge.upload_chunk(&subject, 0, first, false).await["offset"], size);
    bridge.upload_chunk(&subject, 0, first, false).await.expect_error("invalid_request");
    let stored = bridge.upload_chunk(&subject, size, rest, true).await;
    assert_eq!((&stored["size"], &stored["sha256"]), (&json!(bytes.len()), &json!(sha256(&bytes))));
    let url = stored["url"].as_str().unwrap();
    // A range that is not at a boundary of chunks.
    let request = json!({"url": url, "offset": 599_990}).to_string();
    let part = bridge.client.request(format!("{}.files.get", bridge.prefix), request.into()).await.unwrap();
    assert_eq!(part.payload, bytes[599_990..]);
    let headers = part.headers.unwrap();
    assert_eq!(headers.get("A2A-Type").unwrap().as_str(), "text/plain");
    assert_eq!(headers.get("A2A-Name").unwrap().as_str(), "passwd");
    bridge.files("get", json!({"url": url, "offset": 600_001})).await.expect_error("invalid_request");
    bridge.files("get", json!({"url": url, "ofset": 1})).await.expect_error("invalid_request");
    bridge.files("get", json!({"url": 1})).await.expect_error("invalid_request");
    bridge.upload_chunk(&subject, 0, first, false).await.expect_error("not_found");
    // More than was declared, less than was declared, and chunks that are too large.
    let (subject, _) = bridge.begin_upload("a", "b", 10).await;
    bridge.upload_chunk(&subject, 0, &[0; 11], false).await.expect_error("too_large");
    bridge.upload_chunk(&subject, 0, &[0; 10], false).await.expect_error("not_found");
    let (subject, _) = bridge.begin_upload("a", "b", 10).await;
    bridge.upload_chunk(&subject, 0, &[0; 9], true).await.expect_error("invalid_request").saying("A2A-Size");
    let (subject, _) = bridge.begin_upload("a", "b", 1 << 20).await;
    bridge.upload_chunk(&subject, 0, &vec![0; size + 1], false).await.expect_error("too_large");
    // All that is left is the one file.
    wait_until(|| async { bridge.stored_chunks().await.len() == 1 }).await;
    let list = bridge.files("list", json!({})).await;
    assert_eq!(list["files"].as_array().unwrap().len(), 1, "{list:?}");
    assert_eq!((&list["files"][0]["url"], &list["files"][0]["name"]), (&json!(url), &json!("passwd")));
    let unknown = format!("{}.upload.x.y", bridge.prefix);
    assert!(bridge.upload_chunk(&unknown, 0, &[], true).await.is_no_responders());
}

#[tokio::test]
async fn one_caller_cannot_fill_the_bucket() {
    let peer = Peer::completing("done");
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .set("files", json!({"max_per_caller": "1MiB"}))
        .start_on(jetstream_server().await)
        .await;
    let file = bridge.upload("a", "b", &random_bytes(700_000)).await;
    let put = || bridge.files("put", json!({})).header("A2A-Size", "700000");
    put().await.expect_error("busy").saying("files.max_per_caller");
    bridge.files("delete", json!({"url": file})).await;
    let (first, second) = (put().await, put().await);
    assert!(first["upload"].is_string(), "{first:?}");
    second.expect_error("busy");
}

#[tokio::test]
async fn the_chunks_of_a_bridge_that_is_killed_are_removed() {
    let peer = Peer::completing("done");
    let bridge = bridge_of(&peer).await;
    let (subject, size) = bridge.begin_upload("a", "b", 2 << 20).await;
    bridge.upload_chunk(&subject, 0, &random_bytes(size), false).await;
    wait_until(|| async { bridge.stored_chunks().await.len() == 1 }).await;
    let mut survivor = command(&["run", "--config"]).arg(bridge.settings_file()).spawn().unwrap();
    let replicas = || async { bridge.ask_all("PING", "peer").await };
    wait_until(|| async { replicas().await == 2 }).await;
    // The upload goes on: it is not mistaken for an abandoned one.
    let next = bridge.upload_chunk(&subject, size, &random_bytes(size), false).await;
    assert_eq!(next["offset"], 2 * size, "{next:?}");
    bridge.signal(Signal::SIGKILL);
    wait_until(|| async { replicas().await == 1 }).await;
    eventually(|| async { bridge.stored_chunks().await.is_empty().then_some(()) }).await;
    signal(i32::try_from(survivor.id()).unwrap(), Signal::SIGTERM);
    survivor.wait().unwrap();
    bridge.forget();
}

#[tokio::test]
async fn without_jetstream_files_must_fit_into_a_message() {
    let peer = agent_returning(json!([{"text": "done"}, file_part("f.png", &random_bytes(900_000))]));
    let bridge = Bridge::with_peer(&peer).await;
    bridge.prompt("peer.ask", "x").await.expect_error("too_large").saying("JetStream is not enabled");
    let get = bridge.files("get", json!({"url": format!("obj://{}/x", bridge.bucket())})).await;
    assert_eq!(get.code(), "state_unavailable", "{get:?}");
    let put = bridge.files("put", json!({})).await;
    assert_eq!(put.code(), "state_unavailable", "{put:?}");
}

#[tokio::test]
async fn files_work_with_a_small_payload_limit() {
    let bytes = random_bytes(100_000);
    let peer = agent_returning(json!([{"text": "done"}, file_part("f.png", &bytes)]));
    let server = jetstream_server_with("max_payload: 16KB").await;
    let bridge = Bridge::with(attached("peer", &peer.url())).start_on(server).await;
    let reply = bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    assert_eq!(bridge.download(reply["files"][0]["url"].as_str().unwrap()).await, bytes);
    let url = bridge.upload("a.png", "image/png", &bytes).await;
    bridge.call("peer.ask", json!({"prompt": "x", "files": [url]})).await.expect("COMPLETED");
}

/// A request of a principal, through a gateway.
fn as_principal(bridge: &Bridge, principal: &str, subject: &str, body: Value) -> Call {
    Call::new(&bridge.client, format!("{}.gw.{subject}", bridge.prefix), body).header("A2A-Caller", principal)
}

#[tokio::test]
async fn a_file_belongs_to_its_caller() {
    let large = random_bytes(2_000_000);
    let peer = agent_returning(json!([file_part("large.png", &large)]));
    let bridge = bridge_of(&peer).await;
    let call = |who: &str, subject: &str, body: Value| as_principal(&bridge, who, subject, body);
    // An upload, which only the caller that began it can continue.
    let begun = call("alice", "files.put", json!({})).header("A2A-Name", "a").await;
    let upload = begun["upload"].as_str().unwrap_or_else(|| panic!("{begun:?}")).to_owned();
    assert!(upload.starts_with(&format!("{}.gw.upload.", bridge.prefix)), "{upload}");
    let chunk = |who: &str| {
        let chunk = Call::new(&bridge.client, upload.clone(), "content").header("A2A-Offset", "0");
        chunk.header("A2A-Last", "true").header("A2A-Caller", who)
    };
    chunk("bob").await.expect_error("not_found");
    let uploaded = chunk("alice").await["url"].as_str().unwrap().to_owned();
    // A file of a reply.
    let reply = call("alice", "action.peer.ask", json!({"prompt": "x"})).await.expect("COMPLETED");
    let replied = reply["files"][0]["url"].as_str().unwrap().to_owned();
    for url in [&uploaded, &replied] {
        let body = json!({"url": url});
        for other in ["bob", "alice2"] {
            call(other, "files.get", body.clone()).await.expect_error("not_found");
            call(other, "files.delete", body.clone()).await.expect_error("not_found");
            let ask = json!({"prompt": "x", "files": [url]});
            call(other, "action.peer.ask", ask).await.expect_error("not_found");
        }
        bridge.files("get", body.clone()).await.expect_error("not_found");
        bridge.files("get", body).header("A2A-Caller", "alice").await.expect_error("not_found");
        call("alice", "action.peer.ask", json!({"prompt": "x", "files": [url]})).await.expect("COMPLETED");
    }
    let count = |list: &Reply| list["files"].as_array().unwrap().len();
    // Two more calls had the same file in their replies.
    assert_eq!(count(&call("alice", "files.list", json!({})).await), 2);
    assert_eq!(count(&call("bob", "files.list", json!({})).await), 0);
    assert_eq!(count(&bridge.files("list", json!({})).await), 0);
    // One caller's files do not count towards the quota of another.
    Call::new(&bridge.client, format!("{}.gw.files.list", bridge.prefix), "").await.expect_error("forbidden");
}

#[tokio::test]
async fn commands_transfer_files() {
    let large = random_bytes(3_000_000);
    let reply = large.clone();
    let peer = Peer::agent(move |seen| match seen.json().to_string().contains("long") {
        false => task_with(seen, &json!([{"text": "done"}, file_part("../large.png", &reply)])),
        true => task_with(seen, &json!([{"text": "long text ".repeat(200_000)}])),
    });
    let bridge = bridge_of(&peer).await;
    let dir = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let mut command = command_on(&bridge.nats.url(), arguments);
        run(command.env("A2A_BRIDGE_PREFIX", &bridge.prefix).current_dir(dir.path()), "")
    };
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("report.pdf"), &large).unwrap();
    let put = run(&["files", "put", "report.pdf"]);
    let url = put.out.trim();
    assert!(put.code == 0 && url.starts_with("obj://"), "{put:?}");
    let list = run(&["files", "ls"]);
    assert!(list.out.contains("report.pdf") && list.out.contains("application/pdf"), "{list:?}");
    assert_eq!(run(&["files", "ls", "--json"]).json()[0]["url"], url);
    let get = run(&["files", "get", url]);
    assert!(get.code == 1 && get.err.contains("--force"), "{get:?}");
    for arguments in [&["files", "get", url, "--to", "copy"][..], &["files", "get", url, "--force"]] {
        let get = run(arguments);
        assert_eq!(get.code, 0, "{get:?}");
    }
    assert_eq!(std::fs::read(path("copy")).unwrap(), large);
    assert_eq!(std::fs::read(path("report.pdf")).unwrap(), large);
    // A call uploads a file that does not fit, and saves the one that it gets.
    let call = run(&["call", "peer.ask", "look", "--file", "report.pdf", "--save", "out"]);
    assert!(call.code == 0 && call.err.contains("saved: out/large.png"), "{call:?}");
    assert_eq!(std::fs::read(path("out/large.png")).unwrap(), large);
    let sent = peer.calls("SendMessage")[0].json()["params"]["message"]["parts"][1].clone();
    assert_eq!((&sent["filename"], &sent["raw"]), (&json!("report.pdf"), &json!(STANDARD.encode(&large))));
    let call = run(&["call", "peer.ask", "look"]);
    assert!(call.err.contains("obj://") && call.err.contains("--save"), "{call:?}");
    // A reply that was stored whole is shown whole.
    let call = run(&["call", "peer.ask", "long"]);
    assert_eq!(call.out.trim_end().len(), "long text ".len() * 200_000 - 1, "{}", call.err);
    let removed = run(&["files", "rm", url]);
    assert_eq!(removed.code, 0, "{removed:?}");
    let missing = run(&["files", "get", url, "--to", "missing"]);
    assert!(missing.code == 1 && missing.err.contains("unknown or has expired"), "{missing:?}");
    assert!(!path("missing").exists());
}

#[tokio::test]
async fn files_at_urls_are_fetched_only_from_hosts_that_the_configuration_lists() {
    let [small, large] = [10_000, 700_000].map(random_bytes);
    let (content, huge) = (large.clone(), random_bytes(900_000));
    let host = Peer::start(move |seen| match seen.path.as_str() {
        "/small.png" => Answer::Http(200, vec![("Content-Type", "image/png".into())], small.clone()),
        "/large" => Answer::Http(200, vec![("Content-Type", "a/b; x=y".into())], content.clone()),
        "/huge" => Answer::Http(200, vec![], huge.clone()),
        "/unknown-length" => {
            Answer::Raw([b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n".as_slice(), &huge].concat())
        }
        "/redirect" => Answer::Http(302, vec![("Location", "/small.png".into())], vec![]),
        "/compressed" => Answer::Http(200, vec![("Content-Encoding", "gzip".into())], vec![1]),
        _ => Answer::text(404, "text/plain", "nothing"),
    });
    let peer = Peer::completing("done");
    let url = peer.url();
    let start = |hosts: Value| {
        let bridge = Bridge::with(attached("peer", &url))
            .set("files", json!({"max_size": "800KB", "fetch_hosts": hosts}));
        async { bridge.start_on(jetstream_server().await).await }
    };
    let address = host.url().replace("http://", "");
    let bridge = start(json!([address])).await;
    let ask = |url: String| bridge.call("peer.ask", json!({"prompt": "x", "files": [url]}));
    let last_part =
        || peer.calls("SendMessage").last().unwrap().json()["params"]["message"]["parts"][1].clone();
    for (path, name, media_type) in [("/small.png", "small.png", "image/png"), ("/large", "large", "a/b")] {
        ask(host.url() + path).await.expect("COMPLETED");
        let part = last_part();
        assert_eq!((&part["filename"], &part["mediaType"]), (&json!(name), &json!(media_type)));
        assert!(part["raw"].is_string(), "{part}");
    }
    assert_eq!(last_part()["raw"], STANDARD.encode(&large));
    for path in ["/redirect", "/missing", "/compressed"] {
        ask(host.url() + path).await.expect_error("invalid_request").saying("cannot fetch");
    }
    for path in ["/huge", "/unknown-length"] {
        ask(host.url() + path).await.expect_error("too_large").saying("files.max_size");
    }
    // Hosts that are not listed are left to the agent.
    ask("https://files.example.org/a.png".into()).await.expect("COMPLETED");
    assert_eq!(last_part()["url"], "https://files.example.org/a.png");
    // A name that leads to a private address is refused, unless the address is listed.
    let port = address.rsplit(':').next().unwrap();
    let bridge = start(json!(["localhost"])).await;
    let ask = |url: String| bridge.call("peer.ask", json!({"prompt": "x", "files": [url]}));
    ask(format!("http://localhost:{port}/small.png"))
        .await
        .expect_error("invalid_request")
        .saying("not a public address");
}

/// The size of the files with which the memory is measured. `FILES_SIZE` sets another one.
fn large_size() -> usize {
    std::env::var("FILES_SIZE").ok().and_then(|size| size.parse().ok()).unwrap_or(48 << 20)
}

/// How much the memory of the bridge may grow for a file of any size.
const MAX_GROWTH: u64 = 24 << 20;

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_large_file_takes_little_memory_in_both_directions() {
    let size = large_size();
    let agent = LargeFileAgent::start(size);
    let agent_settings = attached("large", &agent.url()).set("request_timeout", "600s");
    let bridge = Bridge::with(agent_settings)
        .set("files", json!({"max_size": "1GiB", "max_request": "1GiB", "max_per_caller": "3GiB"}))
        .log("info")
        .start_on(jetstream_server().await)
        .await;
    let before = memory(bridge.pid(), "VmHWM");
    let grown = || (memory(bridge.pid(), "VmHWM") - before) >> 10;
    // Out: the agent sends a file in its response.
    let call = bridge.prompt("large.ask", "send").header("A2A-Timeout", "600s").begin().await;
    let reply = reply_of(call).await.expect("COMPLETED");
    let file = &reply["files"][0];
    println!("out: the bridge has grown by {} KiB", grown());
    assert_eq!((&file["size"], &file["name"]), (&json!(size), &json!("large.bin")));
    assert_eq!(file["sha256"], agent.sha256());
    // In: the same file goes back to the agent.
    let body = json!({"prompt": "receive", "files": [file["url"]]});
    let call = bridge.call("large.ask", body).header("A2A-Timeout", "600s").begin().await;
    let reply = reply_of(call).await.expect("COMPLETED");
    println!("in: the bridge has grown by {} KiB", grown());
    assert_eq!(reply.message(), agent.sha256());
    assert!(memory(bridge.pid(), "VmHWM") - before < MAX_GROWTH, "{} KiB", grown());
}

async fn reply_of(mut call: crate::support::caller::Inbox) -> crate::support::Reply {
    call.reply_within(std::time::Duration::from_secs(600)).await.expect("a reply")
}
