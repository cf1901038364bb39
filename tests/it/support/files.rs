//! Files in the object store, as callers and other NATS clients see them.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_nats::HeaderMap;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::bridge::Bridge;
use super::caller::{Call, Reply};
use super::nats::NatsServer;

/// A server with JetStream.
pub async fn jetstream_server() -> NatsServer {
    jetstream_server_with("").await
}

/// A server with JetStream and further settings.
pub async fn jetstream_server_with(settings: &str) -> NatsServer {
    let dir = tempfile::tempdir().expect("a folder for JetStream").keep();
    NatsServer::start_configured(&format!("jetstream: {{store_dir: {dir:?}}}\n{settings}")).await
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes that do not repeat.
pub fn random_bytes(size: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(7);
    std::iter::repeat_with(|| random.u8(..)).take(size).collect()
}

impl Bridge {
    /// The name of the bucket for files.
    pub fn bucket(&self) -> String {
        format!("{}_files", self.prefix)
    }

    pub fn files(&self, verb: &str, body: Value) -> Call {
        Call::new(&self.client, format!("{}.files.{verb}", self.prefix), body)
    }

    /// Downloads a file as a caller without rights on the object store does.
    pub async fn download(&self, url: &str) -> Vec<u8> {
        let mut file = Vec::new();
        loop {
            let inbox = self.client.new_inbox();
            let mut replies = self.client.subscribe(inbox.clone()).await.unwrap();
            let body = json!({"url": url, "offset": file.len()}).to_string();
            let subject = format!("{}.files.get", self.prefix);
            self.client.publish_with_reply(subject, inbox, body.into()).await.unwrap();
            let reply =
                tokio::time::timeout(Duration::from_secs(10), futures_util::StreamExt::next(&mut replies));
            let reply = reply.await.unwrap().unwrap();
            let headers = reply.headers.unwrap();
            let header = |name: &str| headers.get(name).map(|value| value.as_str().to_owned());
            assert_eq!(header("Nats-Service-Error"), None);
            assert_eq!(header("A2A-Offset").unwrap(), file.len().to_string());
            file.extend_from_slice(&reply.payload);
            if file.len() as u64 >= header("A2A-Size").unwrap().parse::<u64>().unwrap() {
                assert_eq!(header("A2A-Sha256").unwrap(), sha256(&file));
                return file;
            }
        }
    }

    /// Begins an upload, and returns its subject and the size of its chunks.
    pub async fn begin_upload(&self, name: &str, media_type: &str, size: u64) -> (String, usize) {
        let put = self.files("put", json!({})).header("A2A-Name", name).header("A2A-Type", media_type);
        let begun = put.header("A2A-Size", &size.to_string()).await;
        let subject = begun["upload"].as_str().unwrap_or_else(|| panic!("{begun:?}")).to_owned();
        (subject, usize::try_from(begun["chunk"].as_u64().unwrap()).unwrap())
    }

    pub async fn upload_chunk(&self, subject: &str, offset: usize, chunk: &[u8], is_last: bool) -> Reply {
        let call = Call::new(&self.client, subject.to_owned(), Bytes::copy_from_slice(chunk));
        let call = call.header("A2A-Offset", &offset.to_string());
        if is_last { call.header("A2A-Last", "true").await } else { call.await }
    }

    /// Uploads a file, and returns its URL.
    pub async fn upload(&self, name: &str, media_type: &str, bytes: &[u8]) -> String {
        let (subject, size) = self.begin_upload(name, media_type, bytes.len() as u64).await;
        let mut chunks = bytes.chunks(size).peekable();
        let mut offset = 0;
        loop {
            let chunk = chunks.next().unwrap_or_default();
            let is_last = chunks.peek().is_none();
            let reply = self.upload_chunk(&subject, offset, chunk, is_last).await;
            offset += chunk.len();
            if is_last {
                assert_eq!(reply["size"], bytes.len(), "{reply:?}");
                assert_eq!(reply["sha256"], sha256(bytes));
                return reply["url"].as_str().unwrap().to_owned();
            }
            assert_eq!(reply["offset"], offset, "{reply:?}");
        }
    }

    /// A request to JetStream.
    pub async fn jetstream(&self, subject: &str, body: Value) -> Value {
        Call::new(&self.client, format!("$JS.API.{subject}"), body).await.body
    }

    /// The number of messages in the bucket, by subject.
    pub async fn stored_subjects(&self) -> Vec<String> {
        let stream = format!("STREAM.INFO.OBJ_{}", self.bucket());
        let info = self.jetstream(&stream, json!({"subjects_filter": ">"})).await;
        let subjects = info["state"]["subjects"].as_object().cloned().unwrap_or_default();
        subjects.into_iter().map(|(subject, _)| subject).collect()
    }

    /// The chunks in the bucket.
    pub async fn stored_chunks(&self) -> Vec<String> {
        let mut subjects = self.stored_subjects().await;
        subjects.retain(|subject| subject.contains(".C."));
        subjects
    }

    /// Stores a message in the bucket as another NATS client would.
    pub async fn store_message(&self, subject: String, headers: &[(&str, &str)], body: Vec<u8>) {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, *value);
        }
        let stored = self.client.request_with_headers(subject, map, body.into()).await.unwrap();
        let acknowledgement: Value = serde_json::from_slice(&stored.payload).unwrap();
        assert!(acknowledgement["seq"].is_u64(), "{acknowledgement}");
    }
}

/// An agent of A2A 1.0 that sends and receives a large file without holding it in memory.
///
/// The file is a block that repeats. The prompt `send` gets the file, and any other message gets the digest of the file in it.
pub struct LargeFileAgent {
    port: u16,
    sha256: Arc<Mutex<String>>,
}

/// Divisible by three, so that the base64 of blocks can be joined.
const BLOCK: usize = 3 << 16;

impl LargeFileAgent {
    pub fn start(size: usize) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let port = listener.local_addr().unwrap().port();
        let sha256 = Arc::<Mutex<String>>::default();
        let shared = Arc::clone(&sha256);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || serve_large_file(&stream, size, port, &shared));
            }
        });
        Self { port, sha256 }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The digest of the file that it has sent.
    pub fn sha256(&self) -> String {
        self.sha256.lock().unwrap().clone()
    }
}

fn serve_large_file(stream: &TcpStream, size: usize, port: u16, sha256: &Mutex<String>) -> Option<()> {
    let mut reader = BufReader::with_capacity(1 << 20, stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let is_card = line.starts_with("GET");
    let mut length = 0_u64;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        if line.trim().is_empty() {
            break;
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
    }
    if is_card {
        let mut card = super::peer::card(&["ask"]);
        card["supportedInterfaces"][0]["url"] = json!(format!("http://127.0.0.1:{port}/"));
        return respond(stream, &card);
    }
    let mut body = reader.take(length);
    // The beginning of the body has everything but the file.
    let mut head = Vec::new();
    let mut key = "no file".as_bytes();
    loop {
        let mut byte = [0];
        if body.read(&mut byte).ok()? == 0 {
            break;
        }
        head.push(byte[0]);
        if head.ends_with(br#""raw":""#) {
            key = b"raw";
            break;
        }
    }
    let is_send = key == b"raw"
        || head.windows(8).any(|window| window == br#""send"}]"#.as_slice())
        || String::from_utf8_lossy(&head).contains("SendMessage");
    if !is_send {
        let id: Value = serde_json::from_slice(&head).ok()?;
        return respond(
            stream,
            &json!({"jsonrpc": "2.0", "id": id["id"], "error": {"code": -32001, "message": "Task not found"}}),
        );
    }
    if key == b"raw" {
        let (mut hash, mut text, mut rest) = (Sha256::new(), vec![0; 1 << 20], Vec::new());
        let mut is_file = true;
        loop {
            let read = body.read(&mut text).ok()?;
            if read == 0 {
                break;
            }
            let piece = &text[..read];
            let end = piece.iter().position(|byte| *byte == b'"').filter(|_| is_file);
            if is_file {
                rest.extend_from_slice(&piece[..end.unwrap_or(read)]);
                let whole = rest.len() / 4 * 4;
                hash.update(STANDARD.decode(&rest[..whole]).ok()?);
                rest.drain(..whole);
            }
            is_file &= end.is_none();
        }
        let digest: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        let id: Value = serde_json::from_str(&json_id(&head)?).ok()?;
        let message = json!({"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": digest}]});
        return respond(stream, &json!({"jsonrpc": "2.0", "id": id, "result": {"message": message}}));
    }
    let id = json_id(&head)?;
    let begin = format!(
        r#"{{"jsonrpc":"2.0","id":{id},"result":{{"message":{{"messageId":"m","role":"ROLE_AGENT","parts":[{{"raw":""#
    );
    let end = r#"","filename":"large.bin","mediaType":"application/octet-stream"}]}}}"#;
    let length = begin.len() + size.div_ceil(3) * 4 + end.len();
    let mut stream = stream;
    let header = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    );
    stream.write_all((header + &begin).as_bytes()).ok()?;
    let block = random_bytes(BLOCK);
    let text = STANDARD.encode(&block);
    let (mut hash, mut left) = (Sha256::new(), size);
    while left >= BLOCK {
        hash.update(&block);
        stream.write_all(text.as_bytes()).ok()?;
        left -= BLOCK;
    }
    hash.update(&block[..left]);
    stream.write_all(STANDARD.encode(&block[..left]).as_bytes()).ok()?;
    *sha256.lock().unwrap() = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    stream.write_all(end.as_bytes()).ok()
}

/// The id of a JSON-RPC request, which is a string.
fn json_id(head: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(head);
    let (_, rest) = text.split_once(r#""id":""#)?;
    Some(format!("\"{}\"", rest.split_once('"')?.0)).filter(|id| id.len() > 2)
}

fn respond(mut stream: &TcpStream, body: &Value) -> Option<()> {
    let body = body.to_string();
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).ok()
}
