//! Fake agents: tiny HTTP servers on plain sockets, so that a test can get every byte wrong.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

#[derive(Debug, Clone)]
pub struct HttpRequest {
    pub method: String,
    pub path: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl HttpRequest {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(own, _)| own == name);
        found.map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// The method of a JSON-RPC request.
    pub fn rpc_method(&self) -> String {
        self.json()["method"].as_str().unwrap_or_default().to_owned()
    }

    /// Whether it sends a message to an existing task, as an answer to a follow-up does.
    pub fn is_answer(&self) -> bool {
        self.json()["params"]["message"]["taskId"].is_string()
    }

    /// Whether the bridge only probes the dialect: it asks for a task that does not exist.
    fn is_probe(&self) -> bool {
        let id = self.json()["params"]["id"].as_str().map(uuid::Uuid::parse_str);
        matches!(self.rpc_method().as_str(), "GetTask" | "tasks/get") && matches!(id, Some(Ok(_)))
    }
}

/// How a fake agent answers a request.
pub enum Answer {
    /// A whole response.
    Http(u16, Vec<(&'static str, String)>, Vec<u8>),
    /// These bytes, then the connection closes.
    Raw(Vec<u8>),
    /// Server-sent events, written in pieces of this size.
    Events(Vec<u8>, usize),
    /// The beginning of a stream of events, then these bytes repeatedly with a pause between them, until
    /// the reader disconnects.
    Endless(Vec<u8>, Vec<u8>, Duration),
    /// The connection closes without an answer.
    Close,
}

impl Answer {
    /// A JSON body with status 200.
    pub fn json(value: &Value) -> Self {
        Self::text(200, "application/json", &value.to_string())
    }

    pub fn text(status: u16, content_type: &str, text: &str) -> Self {
        Self::Http(status, vec![("Content-Type", content_type.to_owned())], text.into())
    }

    /// The result of a JSON-RPC call.
    pub fn result(seen: &HttpRequest, result: &Value) -> Self {
        Self::json(&json!({"jsonrpc": "2.0", "id": seen.json()["id"], "result": result}))
    }

    /// The error of a JSON-RPC call.
    pub fn error(seen: &HttpRequest, error: &Value) -> Self {
        Self::json(&json!({"jsonrpc": "2.0", "id": seen.json()["id"], "error": error}))
    }

    pub fn task_not_found(seen: &HttpRequest) -> Self {
        Self::error(seen, &json!({"code": -32001, "message": "Task not found"}))
    }

    /// A stream of these results, written at once.
    pub fn stream(results: &[Value]) -> Self {
        Self::Events(results.iter().flat_map(event).collect(), usize::MAX)
    }

    /// A task of A2A 1.0 as the result of any method.
    pub fn task(seen: &HttpRequest, state: &str, text: &str) -> Self {
        let message = json!({"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": text}]});
        let task =
            json!({"id": "task-1", "contextId": "context-1", "status": {"state": state, "message": message}});
        let is_send = seen.rpc_method().starts_with("Send");
        Self::result(seen, &if is_send { json!({ "task": task }) } else { task })
    }
}

/// The head of a stream of events.
const EVENTS: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n";

/// A server on a free port. Dropping it ends it.
pub struct Peer {
    port: u16,
    seen: Arc<Mutex<Vec<HttpRequest>>>,
    ended: Arc<AtomicBool>,
}

impl Peer {
    /// Serves every request by `answer`, except probes of the dialect, which succeed.
    pub fn start(answer: impl Fn(&HttpRequest) -> Answer + Send + Sync + 'static) -> Self {
        Self::start_with_probes(move |request| match request.is_probe() {
            true => Answer::task_not_found(request),
            false => answer(request),
        })
    }

    /// Serves every request by `answer`.
    pub fn start_with_probes(answer: impl Fn(&HttpRequest) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let port = listener.local_addr().unwrap().port();
        let (seen, ended) = (Arc::<Mutex<Vec<HttpRequest>>>::default(), Arc::new(AtomicBool::new(false)));
        let (record, end, answer) = (Arc::clone(&seen), Arc::clone(&ended), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if end.load(Ordering::Relaxed) {
                    return;
                }
                let (record, answer) = (Arc::clone(&record), Arc::clone(&answer));
                std::thread::spawn(move || {
                    if let Some(request) = read(&stream) {
                        if !request.is_probe() {
                            record.lock().unwrap().push(request.clone());
                        }
                        write(stream, &answer(&request));
                    }
                });
            }
        });
        Self { port, seen, ended }
    }

    /// An agent of A2A 1.0 with one skill, `ask`, that does not stream.
    pub fn agent(answer: impl Fn(&HttpRequest) -> Answer + Send + Sync + 'static) -> Self {
        Self::agent_with_card(card(&["ask"]), answer)
    }

    /// An agent of A2A 1.0 with one skill, `ask`, that streams.
    pub fn streaming_agent(answer: impl Fn(&HttpRequest) -> Answer + Send + Sync + 'static) -> Self {
        Self::agent_with_card(streaming_card(&["ask"]), answer)
    }

    pub fn agent_with_card(
        card: Value,
        answer: impl Fn(&HttpRequest) -> Answer + Send + Sync + 'static,
    ) -> Self {
        Self::start(move |seen| match seen.method.as_str() {
            "GET" if seen.path.starts_with("/.well-known/") => Answer::json(&card),
            "GET" => Answer::text(404, "text/plain", "nothing here"),
            _ => answer(seen),
        })
    }

    /// An agent that completes every task with this text.
    pub fn completing(text: &'static str) -> Self {
        Self::agent(move |seen| Answer::task(seen, "TASK_STATE_COMPLETED", text))
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// All requests that arrived, without probes of the dialect.
    pub fn requests(&self) -> Vec<HttpRequest> {
        self.seen.lock().unwrap().clone()
    }

    /// The JSON-RPC calls that arrived, by their method.
    pub fn calls(&self, method: &str) -> Vec<HttpRequest> {
        let mut requests = self.requests();
        requests.retain(|request| request.rpc_method() == method);
        requests
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
    }
}

/// A card of A2A 1.0 with these skills, of an agent that streams.
pub fn streaming_card(skills: &[&str]) -> Value {
    let mut card = card(skills);
    card["capabilities"] = json!({"streaming": true});
    card
}

/// A card of A2A 1.0 with these skills.
pub fn card(skills: &[&str]) -> Value {
    let skill = |id: &&str| json!({"id": id, "name": id, "description": format!("Does {id}"), "tags": []});
    json!({
        "name": "Peer", "description": "A peer", "version": "1.2.3", "capabilities": {},
        "supportedInterfaces": [{"url": "/", "protocolBinding": "JSONRPC", "protocolVersion": "1.0"}],
        "defaultInputModes": ["text/plain"], "defaultOutputModes": ["text/plain"],
        "skills": skills.iter().map(skill).collect::<Vec<_>>(),
    })
}

/// A server-sent event with this result.
pub fn event(result: &Value) -> Vec<u8> {
    format!("data: {}\n\n", json!({"jsonrpc": "2.0", "id": 1, "result": result})).into_bytes()
}

fn read(stream: &TcpStream) -> Option<HttpRequest> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        match line.trim_end().split_once(':') {
            Some((name, value)) => headers.push((name.to_lowercase(), value.trim().to_owned())),
            None => break,
        }
    }
    let length = headers.iter().find(|(name, _)| name == "content-length");
    let mut body = vec![0; length.map_or(0, |(_, value)| value.parse().unwrap_or(0))];
    reader.read_exact(&mut body).ok()?;
    Some(HttpRequest { method, path, headers, body })
}

fn write(mut stream: TcpStream, answer: &Answer) {
    // The reader may have disconnected.
    let _ = match answer {
        Answer::Close => Ok(()),
        Answer::Raw(bytes) => stream.write_all(bytes),
        Answer::Endless(begin, more, pause) => {
            let _ = stream.set_nodelay(true);
            let begun = stream.write_all(EVENTS.as_bytes()).and_then(|()| stream.write_all(begin));
            begun.and_then(|()| {
                loop {
                    stream.write_all(more)?;
                    std::thread::park_timeout(*pause);
                }
            })
        }
        Answer::Events(body, piece) => {
            let _ = stream.set_nodelay(true);
            stream
                .write_all(EVENTS.as_bytes())
                .and_then(|()| body.chunks(*piece).try_for_each(|piece| stream.write_all(piece)))
        }
        Answer::Http(status, headers, body) => {
            let mut head = format!(
                "HTTP/1.1 {status} Status\r\nContent-Length: {}\r\nConnection: close\r\n",
                body.len()
            );
            for (name, value) in headers {
                head += &format!("{name}: {value}\r\n");
            }
            stream.write_all(format!("{head}\r\n").as_bytes()).and_then(|()| stream.write_all(body))
        }
    };
}
