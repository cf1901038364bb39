//! `call --stream`, `call --submit` and `task`, against a bridge that the test simulates frame by frame.

use std::io::{BufRead as _, BufReader, Lines};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use async_nats::{Client, HeaderMap, Message, Subscriber};
use futures_util::StreamExt as _;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::commands::{CommandOutput, command_on, exit_status, run, send_signal};
use crate::support::{NatsServer, within_deadline};

async fn next(requests: &mut Subscriber) -> Message {
    within_deadline(requests.next()).await.unwrap()
}

fn header(message: &Message, name: &str) -> String {
    let headers = message.headers.as_ref().unwrap();
    headers.get(name).unwrap().to_string()
}

/// The bridge's side of a stream.
struct SimulatedStream<'a> {
    client: &'a Client,
    request: &'a Message,
    number: u64,
}

impl<'a> SimulatedStream<'a> {
    fn of(client: &'a Client, request: &'a Message) -> Self {
        Self { client, request, number: 0 }
    }

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

/// A NATS server on which the test receives the requests to these subjects.
async fn stage(subject: &'static str) -> (NatsServer, Client, Subscriber) {
    let server = NatsServer::start().await;
    let client = server.connect().await;
    let requests = client.subscribe(subject).await.unwrap();
    client.flush().await.unwrap();
    (server, client, requests)
}

/// Runs a command in the background.
fn start(mut command: Command) -> JoinHandle<CommandOutput> {
    tokio::task::spawn_blocking(move || run(&mut command, ""))
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_is_printed_as_it_arrives_and_its_answer_once() {
    let (server, client, mut requests) = stage("a2a.action.demo.talk").await;
    let call = start(command_on(&server.url(), &["call", "demo.talk", "--stream", "go"]));
    let request = next(&mut requests).await;
    assert_eq!(header(&request, "A2A-Reply"), "stream");
    let mut stream = SimulatedStream::of(&client, &request);
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
    let output = call.await.unwrap();
    assert_eq!((output.code, output.out.as_str()), (0, "one two three\n"), "{output:?}");
    assert_eq!(output.err, "· execution_plan_1: first look, then speak\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn json_frames_are_printed_as_lines_and_lost_frames_are_reported() {
    let (server, client, mut requests) = stage("a2a.action.demo.talk").await;
    for json in [true, false] {
        let mut command = command_on(&server.url(), &["call", "demo.talk", "--stream", "go"]);
        command.args(json.then_some("--json"));
        let call = start(command);
        let request = next(&mut requests).await;
        let mut stream = SimulatedStream::of(&client, &request);
        stream.frame("response", json!("one ")).await;
        stream.number += 5;
        stream.frame("response", json!("three")).await;
        stream.frame("result", completed("one two three")).await;
        stream.end().await;
        let output = call.await.unwrap();
        if json {
            let lines: Vec<Value> =
                output.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
            assert_eq!(lines.len(), 3);
            assert_eq!(lines[2]["data"]["message"], "one two three");
        } else {
            assert_eq!(output.out, "one three\none two three\n");
            assert!(output.err.contains("5 frames were lost"), "{output:?}");
        }
    }
}

/// `call --stream` after its first Ctrl-C.
struct InterruptedStream {
    call: Child,
    stderr: Lines<BufReader<ChildStderr>>,
    cancel: Message,
}

impl InterruptedStream {
    /// Interrupts the call before its task is known, and receives the request to cancel the task.
    async fn start(server: &NatsServer, client: &Client, requests: &mut Subscriber) -> (Self, Message) {
        let mut call = command_on(&server.url(), &["call", "demo.talk", "--stream", "go"])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let request = next(requests).await;
        let mut stream = SimulatedStream::of(client, &request);
        stream.frame("status", json!("ack")).await;
        client.flush().await.unwrap();
        send_signal(&call, Signal::SIGINT);
        let mut stderr = BufReader::new(call.stderr.take().unwrap()).lines();
        let noticed = tokio::task::block_in_place(|| stderr.any(|line| line.unwrap().contains("canceling")));
        assert!(noticed, "it exited without a message");
        stream.frame("task", json!({"id": "t-1", "context_id": "c"})).await;
        let cancel = next(requests).await;
        assert_eq!(cancel.subject.as_str(), "a2a.action.demo.cancel_task");
        assert_eq!(cancel.payload.as_ref(), br#"{"task_id":"t-1"}"#);
        (Self { call, stderr, cancel }, request)
    }

    /// Confirms the cancellation.
    async fn confirm(&self, client: &Client) {
        let canceled = json!({"success": true, "status": "CANCELED", "message": "", "task": {"id": "t-1"}});
        client.publish(self.cancel.reply.clone().unwrap(), canceled.to_string().into()).await.unwrap();
        client.flush().await.unwrap();
    }

    /// The exit code and the rest of stderr.
    async fn end(mut self) -> (Option<i32>, String) {
        let code = exit_status(&mut self.call).await.code();
        (code, self.stderr.map(Result::unwrap).collect::<Vec<_>>().join("\n"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_cancels_the_task_of_a_stream() {
    let (server, client, mut requests) = stage("a2a.action.demo.*").await;
    let (interrupted, request) = InterruptedStream::start(&server, &client, &mut requests).await;
    interrupted.confirm(&client).await;
    let mut stream = SimulatedStream::of(&client, &request);
    let canceled =
        json!({"success": false, "status": "CANCELED", "message": "stopped", "task": {"id": "t-1"}});
    stream.frame("result", canceled).await;
    stream.end().await;
    assert_eq!(interrupted.end().await, (Some(1), "canceled task t-1: stopped".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn confirmed_cancellation_ends_a_stream_that_does_not_end_itself() {
    let (server, client, mut requests) = stage("a2a.action.demo.*").await;
    let (interrupted, _) = InterruptedStream::start(&server, &client, &mut requests).await;
    let began = Instant::now();
    interrupted.confirm(&client).await;
    assert_eq!(interrupted.end().await, (Some(1), "canceled task t-1".to_owned()));
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn cancellation_without_a_reply_is_reported_with_the_task_id() {
    let (server, client, mut requests) = stage("a2a.action.demo.*").await;
    let (interrupted, _) = InterruptedStream::start(&server, &client, &mut requests).await;
    let began = Instant::now();
    let (code, text) = interrupted.end().await;
    assert_eq!(code, Some(130), "{text}");
    assert!(text.contains("no confirmation of the cancellation within 2s"), "{text}");
    assert!(text.contains("a2a-bridge task get demo t-1"), "{text}");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn second_ctrl_c_exits_at_once_with_the_task_id() {
    let (server, client, mut requests) = stage("a2a.action.demo.*").await;
    let (interrupted, _) = InterruptedStream::start(&server, &client, &mut requests).await;
    send_signal(&interrupted.call, Signal::SIGINT);
    let (code, text) = interrupted.end().await;
    assert_eq!(code, Some(130), "{text}");
    assert!(text.starts_with("interrupted; the task may still be running (task t-1)"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn submit_prints_the_task_id_and_watch_follows_the_task() {
    let (server, client, mut requests) = stage("a2a.action.demo.*").await;
    let working = json!({"success": true, "status": "WORKING", "message": "", "task": {"id": "t.1"}});
    let reply = async |request: Message, body: &Value| {
        client.publish(request.reply.unwrap(), body.to_string().into()).await.unwrap();
        client.flush().await.unwrap();
    };

    let call = start(command_on(&server.url(), &["call", "demo.talk", "--submit", "go"]));
    let request = next(&mut requests).await;
    assert_eq!(header(&request, "A2A-Reply"), "submit");
    reply(request, &working).await;
    let submitted = call.await.unwrap();
    assert_eq!((submitted.code, submitted.out.as_str()), (0, "t.1\n"));
    assert!(submitted.err.contains("a2a-bridge task watch demo t.1"), "{submitted:?}");

    let watch = start(command_on(&server.url(), &["task", "watch", "demo", "t.1"]));
    let get = next(&mut requests).await;
    assert_eq!(get.subject.as_str(), "a2a.action.demo.get_task");
    reply(get, &working).await;
    client.publish("a2a.task.demo._xt_2E1", completed("done").to_string().into()).await.unwrap();
    let watched = watch.await.unwrap();
    assert_eq!((watched.code, watched.out.as_str()), (0, "done\n"), "{watched:?}");

    let cancel = start(command_on(&server.url(), &["task", "cancel", "demo", "t.1"]));
    let request = next(&mut requests).await;
    assert_eq!(request.subject.as_str(), "a2a.action.demo.cancel_task");
    reply(request, &json!({"success": true, "status": "CANCELED", "message": "", "task": {"id": "t.1"}}))
        .await;
    assert_eq!(cancel.await.unwrap().code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn stream_handles_a_single_error_reply() {
    let (server, client, mut requests) = stage("a2a.action.demo.talk").await;
    let call = start(command_on(&server.url(), &["call", "demo.talk", "--stream", "go"]));
    let request = next(&mut requests).await;
    let error = json!({"success": false, "status": "ERROR", "message": "not served", "error_info": {"code": "invalid_request"}});
    client.publish(request.reply.unwrap(), error.to_string().into()).await.unwrap();
    let output = call.await.unwrap();
    assert_eq!(output.code, 1);
    assert!(output.err.contains("error: not served"), "{output:?}");
}
