//! `call --stream` and `call --submit` against a bridge that the test simulates frame by frame.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;
use std::time::Duration;

use async_nats::{Client, HeaderMap, Message};
use futures_util::StreamExt as _;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::support::commands::{ended, interrupt, on, run};
use crate::support::nats::NatsServer;

const PATIENCE: Duration = Duration::from_secs(10);

async fn next(requests: &mut async_nats::Subscriber) -> Message {
    timeout(PATIENCE, requests.next()).await.unwrap().unwrap()
}

fn header(message: &Message, name: &str) -> String {
    let headers = message.headers.as_ref().unwrap();
    headers.get(name).unwrap().to_string()
}

/// Sends the frames of a stream.
struct Stream<'a> {
    client: &'a Client,
    request: &'a Message,
    number: u64,
}

impl Stream<'_> {
    async fn frame(&mut self, kind: &str, data: Value) {
        let mut headers = HeaderMap::new();
        headers.insert("A2A-Seq", self.number.to_string());
        self.number += 1;
        let body = json!({"type": kind, "data": data}).to_string();
        let inbox = self.request.reply.clone().unwrap();
        self.client.publish_with_headers(inbox, headers, body.into()).await.unwrap();
    }

    async fn end(&self) {
        let inbox = self.request.reply.clone().unwrap();
        self.client.publish(inbox, "".into()).await.unwrap();
        self.client.flush().await.unwrap();
    }
}

fn completed(message: &str) -> Value {
    json!({"success": true, "status": "COMPLETED", "message": message, "files": [], "data": {},
           "task": {"id": "t-1", "context_id": "c", "agent": "demo", "skill": "talk"}})
}

async fn stage() -> (NatsServer, Client) {
    let server = NatsServer::start().await;
    let client = server.connect().await;
    (server, client)
}

/// Runs a command in the background.
fn start(command: std::process::Command) -> tokio::task::JoinHandle<crate::support::commands::Said> {
    tokio::task::spawn_blocking(|| run(command, ""))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_printed_once_while_it_arrives() {
    let (server, client) = stage().await;
    let mut requests = client.subscribe("a2a.action.demo.talk").await.unwrap();
    client.flush().await.unwrap();
    let call = start(on(&server.url(), &["call", "demo.talk", "--stream", "go"]));
    let request = next(&mut requests).await;
    assert_eq!(header(&request, "A2A-Reply"), "stream");
    let mut stream = Stream { client: &client, request: &request, number: 0 };
    let artifact = |name: &str, text: &str| json!({"artifact_id": name, "name": name, "append": false, "last_chunk": false, "parts": [{"text": text}]});
    stream.frame("status", json!("ack")).await;
    stream.frame("task", json!({"id": "t-1", "context_id": "c"})).await;
    stream.frame("state", json!({"state": "working", "message": null})).await;
    stream.frame("artifact", artifact("execution_plan_1", "first look, then speak")).await;
    stream.frame("unheard_of", json!(1)).await;
    for word in ["one ", "two ", "three"] {
        stream.frame("artifact", artifact("answer", word)).await;
        stream.frame("response", json!(word)).await;
    }
    stream.frame("result", completed("one two three")).await;
    stream.end().await;
    let said = call.await.unwrap();
    assert_eq!((said.code, said.out.as_str()), (0, "one two three\n"), "{said:?}");
    assert_eq!(said.err, "· execution_plan_1: first look, then speak\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn json_frames_are_lines_and_the_result_replaces_lost_frames() {
    let (server, client) = stage().await;
    let mut requests = client.subscribe("a2a.action.demo.talk").await.unwrap();
    client.flush().await.unwrap();
    for json in [true, false] {
        let mut command = on(&server.url(), &["call", "demo.talk", "--stream", "go"]);
        command.args(json.then_some("--json"));
        let call = start(command);
        let request = next(&mut requests).await;
        let mut stream = Stream { client: &client, request: &request, number: 0 };
        stream.frame("response", json!("one ")).await;
        stream.number += 5;
        stream.frame("response", json!("three")).await;
        stream.frame("result", completed("one two three")).await;
        stream.end().await;
        let said = call.await.unwrap();
        if json {
            let lines: Vec<Value> =
                said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(lines.len(), 3);
            assert_eq!(lines[2]["data"]["message"], "one two three");
        } else {
            assert_eq!(said.out, "one three\none two three\n");
            assert!(said.err.contains("5 frames were lost"), "{said:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_cancels_the_task_of_a_stream() {
    let (server, client) = stage().await;
    let mut requests = client.subscribe("a2a.action.demo.*").await.unwrap();
    client.flush().await.unwrap();
    let mut call = on(&server.url(), &["call", "demo.talk", "--stream", "go"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let request = next(&mut requests).await;
    let mut stream = Stream { client: &client, request: &request, number: 0 };
    stream.frame("status", json!("ack")).await;
    client.flush().await.unwrap();
    // The task id is not known yet; the cancellation waits for it.
    interrupt(&call, Signal::SIGINT);
    let mut said = BufReader::new(call.stderr.take().unwrap()).lines();
    let noticed = tokio::task::block_in_place(|| said.any(|line| line.unwrap().contains("cancelling")));
    assert!(noticed, "it ended without a message");
    stream.frame("task", json!({"id": "t-1", "context_id": "c"})).await;
    let cancel = next(&mut requests).await;
    assert_eq!(cancel.subject.as_str(), "a2a.action.demo.cancel_task");
    assert_eq!(cancel.payload.as_ref(), br#"{"task_id":"t-1"}"#);
    let canceled = json!({"success": true, "status": "CANCELED", "message": "", "task": {"id": "t-1"}});
    client.publish(cancel.reply.unwrap(), canceled.to_string().into()).await.unwrap();
    stream
        .frame(
            "result",
            json!({"success": false, "status": "CANCELED", "message": "stopped", "task": {"id": "t-1"}}),
        )
        .await;
    stream.end().await;
    assert_eq!(ended(&mut call).await.code(), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_submitted_task_prints_its_id_and_can_be_watched_and_cancelled() {
    let (server, client) = stage().await;
    let mut requests = client.subscribe("a2a.action.demo.*").await.unwrap();
    client.flush().await.unwrap();
    let working = json!({"success": true, "status": "WORKING", "message": "", "task": {"id": "t.1"}});
    let reply = async |request: Message, body: &Value| {
        client.publish(request.reply.unwrap(), body.to_string().into()).await.unwrap();
        client.flush().await.unwrap();
    };

    let call = start(on(&server.url(), &["call", "demo.talk", "--submit", "go"]));
    let request = next(&mut requests).await;
    assert_eq!(header(&request, "A2A-Reply"), "submit");
    reply(request, &working).await;
    let said_first = call.await.unwrap();
    assert_eq!((said_first.code, said_first.out.as_str()), (0, "t.1\n"));
    assert!(said_first.err.contains("a2a-bridge task watch demo t.1"), "{said_first:?}");

    let watch = start(on(&server.url(), &["task", "watch", "demo", "t.1"]));
    let get_task = next(&mut requests).await;
    assert_eq!(get_task.subject.as_str(), "a2a.action.demo.get_task");
    reply(get_task, &working).await;
    client.publish("a2a.task.demo._xt_2E1", completed("done").to_string().into()).await.unwrap();
    let watched = watch.await.unwrap();
    assert_eq!((watched.code, watched.out.as_str()), (0, "done\n"), "{watched:?}");

    let cancel = start(on(&server.url(), &["task", "cancel", "demo", "t.1"]));
    let request = next(&mut requests).await;
    assert_eq!(request.subject.as_str(), "a2a.action.demo.cancel_task");
    reply(request, &json!({"success": true, "status": "CANCELED", "message": "", "task": {"id": "t.1"}}))
        .await;
    assert_eq!(cancel.await.unwrap().code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_without_frames_is_accepted() {
    let (server, client) = stage().await;
    let mut requests = client.subscribe("a2a.action.demo.talk").await.unwrap();
    client.flush().await.unwrap();
    let call = start(on(&server.url(), &["call", "demo.talk", "--stream", "go"]));
    let request = next(&mut requests).await;
    let error = json!({"success": false, "status": "ERROR", "message": "not served", "error_info": {"code": "invalid_request"}});
    client.publish(request.reply.unwrap(), error.to_string().into()).await.unwrap();
    let said = call.await.unwrap();
    assert_eq!(said.code, 1);
    assert!(said.err.contains("error: not served"), "{said:?}");
}
