//! Files over HTTP: uploads and downloads in pieces, and what belongs to whom.

use rstest::rstest;
use serde_json::json;

use crate::support::files::{jetstream_server, random_bytes, sha256};
use crate::support::gateway::{Fetch as _, Gateway, HttpReply, token};
use crate::support::{Bridge, launched, processes, within_deadline};

async fn gateway() -> (Bridge, Gateway) {
    let server = jetstream_server().await;
    let bridge = Bridge::with(launched("demo", &[])).start_on(server).await;
    let tokens = [token("alice", json!({})), token("bob", json!({}))];
    let gateway = Gateway::start(&bridge, json!({ "tokens": tokens })).await;
    (bridge, gateway)
}

fn path_of(stored: &HttpReply) -> String {
    stored.header("location").to_owned()
}

#[rstest]
#[case(0)]
#[case(5)]
#[case(512 << 10)]
#[case(3 << 20)]
#[tokio::test]
async fn a_file_is_the_same_after_upload_and_download(#[case] size: usize) {
    let (_bridge, gateway) = gateway().await;
    let bytes = random_bytes(size);
    let upload = gateway.upload("files?name=caf%C3%A9%20%22x%22.bin", "image/png", bytes.clone());
    let stored = upload.by("alice").reply().await.status(201);
    assert_eq!((&stored.json["size"], &stored.json["sha256"]), (&json!(size), &json!(sha256(&bytes))));
    let file = gateway.get(&path_of(&stored)).by("alice").reply().await.status(200);
    assert!(file.bytes == bytes);
    assert_eq!(file.header("content-type"), "image/png");
    assert_eq!(file.header("content-length"), size.to_string());
    assert_eq!(file.header("content-disposition"), "attachment; filename*=UTF-8''caf%C3%A9%20%22x%22.bin");
    assert!(file.header("content-security-policy").contains("sandbox"));
    let tag = file.header("etag").to_owned();
    let same = gateway.get(&path_of(&stored)).by("alice").header("if-none-match", &tag).reply().await;
    assert!(same.status(304).bytes.is_empty());
    // The agent gets the file by its URL.
    let call = json!({"prompt": "x", "files": [stored.json["url"]]});
    let echo = gateway.post("agents/demo/skills/echo", &call).by("alice").reply().await.status(200);
    assert_eq!(echo.json["files"].as_array().unwrap().len(), 1, "{}", echo.json);
}

#[tokio::test]
async fn a_part_of_a_file_can_be_downloaded() {
    let (_bridge, gateway) = gateway().await;
    let bytes = random_bytes(1_500_000);
    let stored = gateway.upload("files", "text/plain", bytes.clone()).by("alice").reply().await.status(201);
    let range = |range: &str| gateway.get(&path_of(&stored)).by("alice").header("range", range).reply();
    for (asked, from, to) in [
        ("bytes=0-9", 0, 10),
        ("bytes=600000-1200000", 600_000, 1_200_001),
        ("bytes=-7", 1_499_993, 1_500_000),
        ("bytes=1499999-", 1_499_999, 1_500_000),
    ] {
        let part = range(asked).await.status(206);
        assert!(part.bytes == bytes[from..to], "{asked}");
        assert_eq!(part.header("content-range"), format!("bytes {from}-{}/1500000", to - 1));
    }
    range("bytes=1500000-").await.error(416, "invalid_request");
    range("bytes=9999999-").await.error(416, "invalid_request");
    assert_eq!(range("bytes=5-2").await.status(200).bytes.len(), 1_500_000);
}

#[tokio::test]
async fn a_form_uploads_one_file() {
    let (_bridge, gateway) = gateway().await;
    let form = |parts: &str| format!("{parts}--b--\r\n").into_bytes();
    let text = "--b\r\nContent-Disposition: form-data; name=\"note\"\r\n\r\nhello\r\n";
    let file = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.txt\"\r\nContent-Type: text/plain\r\n\r\nabc\r\n";
    let send =
        |body: Vec<u8>| gateway.upload("files", "multipart/form-data; boundary=b", body).by("alice").reply();
    let stored = send(form(&format!("{text}{file}"))).await.status(201);
    let got = gateway.get(&path_of(&stored)).by("alice").reply().await.status(200);
    assert_eq!((got.text().as_str(), got.header("content-type")), ("abc", "text/plain"));
    assert!(got.header("content-disposition").ends_with("a.txt"));
    send(form(text)).await.error(400, "invalid_request");
    send(b"--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\nab".to_vec())
        .await
        .error(400, "invalid_request");
    let no_boundary = gateway.upload("files", "multipart/form-data", form(file)).by("alice").reply().await;
    no_boundary.error(400, "invalid_request");
}

#[rstest]
#[case("..")]
#[case("../../etc/passwd")]
#[case("%2e%2e")]
#[case("%2e%2e%2fx")]
#[case("..%2F..%2Fetc%2Fpasswd")]
#[case("a%2Fb")]
#[case("a%00b")]
#[case("a%0D%0Ab")]
#[case("%2A")]
#[case("%3E")]
#[case("a%20b")]
#[case("%C3%A9")]
#[tokio::test]
async fn a_name_does_not_leave_the_store(#[case] name: &str) {
    let bridge = Bridge::with_demo(&[]).await;
    let gateway = Gateway::start(&bridge, json!({})).await;
    let request =
        format!("GET /api/v1/files/{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    let response = gateway.raw(request.as_bytes()).await;
    assert!(response.starts_with("HTTP/1.1 404 "), "{name}: {response}");
}

#[tokio::test]
async fn a_file_belongs_to_its_principal() {
    let (_bridge, gateway) = gateway().await;
    let stored =
        gateway.upload("files", "text/plain", b"secret".to_vec()).by("alice").reply().await.status(201);
    gateway.get(&path_of(&stored)).by("bob").reply().await.error(404, "not_found");
    let call = json!({"prompt": "x", "files": [stored.json["url"]]});
    gateway.post("agents/demo/skills/echo", &call).by("bob").reply().await.error(404, "not_found");
    gateway.get("files/0123456789abcdef").by("alice").reply().await.error(404, "not_found");
    for name in ["a%0D%0AA2A-Caller:%20bob", "a%00", "%E2%80%AEgnp.exe", &"x".repeat(300)] {
        let upload = gateway.upload(&format!("files?name={name}"), "text/plain", b"x".to_vec());
        upload.by("alice").reply().await.error(400, "invalid_request");
    }
}

#[tokio::test]
async fn files_pass_through_the_gateway_without_filling_its_memory() {
    let (_bridge, gateway) = gateway().await;
    let bytes = random_bytes(64 << 20);
    // The first request fills caches and buffers.
    gateway.upload("files", "x/y", random_bytes(1 << 20)).by("alice").reply().await.status(201);
    let before = processes::memory(gateway.pid(), "VmRSS");
    let stored = gateway.upload("files", "x/y", bytes.clone()).by("alice").reply().await.status(201);
    let got = within_deadline(gateway.get(&path_of(&stored)).by("alice").reply()).await.status(200);
    assert!(got.bytes == bytes);
    let grown = processes::memory(gateway.pid(), "VmRSS").saturating_sub(before);
    assert!(grown < 24 << 20, "the gateway has grown by {grown} bytes");
}

#[tokio::test]
async fn a_reply_that_is_too_large_for_a_message_is_whole() {
    let (_bridge, gateway) = gateway().await;
    let reply = gateway.call("demo/big", "3000000").by("alice").reply().await.status(200);
    assert_eq!(reply.json["message"].as_str().unwrap().len(), 3_000_000);
    assert!(reply.json.get("full_reply").is_none());
}

#[tokio::test]
async fn files_in_a_large_request_are_stored_first() {
    let (_bridge, gateway) = gateway().await;
    use base64::Engine as _;
    let encoded = |size| base64::engine::general_purpose::STANDARD.encode(random_bytes(size));
    let file = |name: &str, size| json!({"name": name, "mime_type": "image/png", "bytes": encoded(size)});
    let body = json!({"prompt": "x", "files": [file("a.png", 2_000_000), file("b.png", 10), file("c.png", 2_500_000)]});
    let reply = gateway.post("agents/demo/skills/echo", &body).by("alice").reply().await.status(200);
    let names: Vec<_> = reply.json["files"].as_array().unwrap().iter().map(|file| &file["name"]).collect();
    assert_eq!(names, ["a.png", "b.png", "c.png"]);
    // Text is not a file.
    let text = json!({"prompt": "x".repeat(2_000_000)});
    gateway.post("agents/demo/skills/echo", &text).by("alice").reply().await.error(413, "too_large");
}
