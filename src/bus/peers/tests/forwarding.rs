//! Requests that one replica forwards to another, through the real front door.

use std::sync::Arc;

use async_nats::{HeaderMap, Message};
use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::super::forward::{FORWARD, ForwardInfo, PEER};
use super::*;
use crate::action::actions::{Actions, CallShutdown};
use crate::agent::{Agent, AgentState, Predecessors};
use crate::bus::frames::SEQUENCE;
use crate::bus::outbox::Outbox;
use crate::bus::publication::Publication;
use crate::config;
use crate::demo_agent::tests::demo;
use crate::dispatch::{Dispatcher, forwarding};
use crate::memory::MemoryBudget;
use crate::process::child::ProcessHost;
use crate::state::State;

/// A replica with everything that serves one agent, as `Bridge` builds it.
struct Served {
    replica: Replica,
    agent: Agent,
    service: PeerService,
    dispatcher: Option<Arc<Dispatcher>>,
    publication: Option<Publication>,
}

/// Whether callers reach a replica.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Front {
    Published,
    /// Only other replicas do.
    Hidden,
}

impl Served {
    async fn start(server: &NatsServer, name: &str, url: &str, lines: &str, front: Front) -> Self {
        let replica = Replica::start(server).await;
        let text = format!("nats: {{}}\nagents: [{{ name: {name}, url: '{url}', {lines} }}]");
        let config = config::parse(&text, "test", &|_| None).unwrap().agents.remove(0);
        let http = crate::a2a::http_client().unwrap();
        let memory = MemoryBudget::new(256 << 20).account(name);
        let host = ProcessHost::default();
        let agent =
            Agent::start(config, &http, &host, CancellationToken::new(), Predecessors::default(), memory);
        let agent = agent.unwrap();
        let (updates, received) = mpsc::channel(16);
        let shutdown = CallShutdown::default();
        let actions = Actions::new(
            Arc::clone(&agent.memory),
            Arc::clone(&agent.config),
            agent.live.clone(),
            Arc::new(State::default()),
            updates,
            shutdown.clone(),
            agent.secrets.clone(),
        );
        let call_log = crate::dispatch::call_log::CallLogSetting::new(crate::config::CallLogging::Off);
        let dispatcher = Arc::new(Dispatcher::new(agent.clone(), actions, TaskTracker::new(), call_log));
        let guard = Arc::clone(&replica.peers.guard);
        let context = ServiceContext::new(replica.client.clone(), guard, replica.tasks.tracker.clone()).await;
        let outbox = Outbox::new(replica.client.clone(), &agent.memory, context.confirmations.clone());
        let subjects = &replica.peers.subjects;
        let calls = ForwardedCalls::new(&dispatcher, &outbox, subjects);
        let service = replica.peers.serve(&agent.name, Some(calls)).await.unwrap();
        let forwarder = Forwarder::new(&replica.peers, &outbox, &agent.memory, true, &shutdown);
        let mut publication = None;
        if front == Front::Published {
            let started = Publication::start(
                Arc::clone(&dispatcher),
                received,
                &context,
                &outbox,
                subjects,
                forwarder,
                &replica.tasks,
            );
            publication = Some(started.await.unwrap());
        }
        Self { replica, agent, service, dispatcher: Some(dispatcher), publication }
    }

    async fn until_ready(&self) {
        let mut status = self.agent.status.clone();
        let ready = status.wait_for(|status| status.state == AgentState::Ready);
        within_deadline(ready).await.unwrap();
        if let Some(publication) = &self.publication {
            // The first state may be an earlier one.
            publication.wait_until_first_published().await;
        }
    }
}

/// A replica that callers reach, and another one that runs everything.
struct Pair {
    name: String,
    asked: Served,
    runs: Served,
    client: Client,
    _server: NatsServer,
}

impl Pair {
    async fn start(arguments: &[&str], url: &str, lines: &str) -> Self {
        let server = NatsServer::start_with(arguments).await;
        let name = format!("agent-{}", fastrand::u64(..));
        let asked = Served::start(&server, &name, url, lines, Front::Published).await;
        let runs = Served::start(&server, &name, url, lines, Front::Hidden).await;
        forwarding::set(&name, runs.replica.id());
        for served in [&asked, &runs] {
            served.until_ready().await;
            served.replica.until_it_knows(1).await;
        }
        Self { name, asked, runs, client: server.connect().await, _server: server }
    }

    /// Sends a request, once the action is published, and returns its reply or its frames.
    async fn call(&self, action: &str, headers: &[(&str, &str)], body: Value) -> Vec<Message> {
        loop {
            let mut messages = self.begin(action, headers, body.clone()).await;
            let is_stream = headers.contains(&("A2A-Reply", "stream"));
            let mut received = Vec::new();
            loop {
                let message = within_deadline(messages.next()).await.unwrap();
                if message.status.is_some() {
                    break;
                }
                let is_last = if is_stream { message.payload.is_empty() } else { is_reply(&message) };
                received.push(message);
                if is_last {
                    return received;
                }
            }
        }
    }

    async fn begin(&self, action: &str, headers: &[(&str, &str)], body: Value) -> async_nats::Subscriber {
        let inbox = self.client.new_inbox();
        let messages = self.client.subscribe(inbox.clone()).await.unwrap();
        let mut map = HeaderMap::new();
        headers.iter().for_each(|(name, value)| map.insert(*name, *value));
        let subject = format!("a2a.action.{}.{action}", self.name);
        let body = body.to_string().into();
        self.client.publish_with_reply_and_headers(subject, inbox, map, body).await.unwrap();
        messages
    }

    /// The body of the only reply.
    async fn reply(&self, action: &str, headers: &[(&str, &str)], body: Value) -> Value {
        let replies = self.call(action, headers, body).await;
        assert_eq!(replies.len(), 1);
        json_of(&replies[0])
    }

    /// All memory is released at both replicas.
    async fn until_released(&self) {
        for served in [&self.asked, &self.runs] {
            wait_until(|| async { served.agent.memory.used() == 0 }).await;
        }
    }
}

/// Whether a message is a reply and not a frame.
fn is_reply(message: &Message) -> bool {
    json_of(message)["success"].is_boolean()
}

fn json_of(message: &Message) -> Value {
    serde_json::from_slice(&message.payload).unwrap_or_default()
}

fn sequence(message: &Message) -> Option<u64> {
    message.headers.as_ref()?.get(SEQUENCE)?.as_str().parse().ok()
}

fn prompt(text: &str) -> Value {
    json!({ "prompt": text })
}

#[tokio::test(flavor = "multi_thread")]
async fn another_replica_runs_a_request_and_the_caller_gets_one_reply() {
    let agent = demo(&["--ignore-blocking"]).await;
    let pair = Pair::start(&[], &agent.url, "").await;
    let done = pair.reply("echo", &[], prompt("hello \u{1}é")).await;
    assert_eq!((&done["status"], &done["message"]), (&json!("COMPLETED"), &json!("hello \u{1}é")));
    assert_eq!(pair.runs.agent.calls.in_flight(), 0);
    // The question is known to the replica that asked it.
    let topic = json!({"topic": "tides", "audience": "sailors"});
    let asked = pair.reply("report", &[], topic).await;
    assert_eq!(asked["status"], "INPUT_REQUIRED");
    let answer = json!({"follow_up_id": asked["data"]["follow_up_id"], "user_response": "PDF"});
    assert_eq!(pair.reply("provide_required_input", &[], answer.clone()).await["status"], "COMPLETED");
    assert_eq!(
        pair.reply("provide_required_input", &[], answer).await["error_info"]["code"],
        "follow_up_used"
    );
    // The same with frames before the reply.
    let acked = pair.call("echo", &[("A2A-Ack", "yes")], prompt("hello")).await;
    let frames: Vec<_> = acked.iter().map(|message| json_of(message)["type"].clone()).collect();
    assert_eq!(frames, [json!("status"), json!("task"), Value::Null]);
    assert_eq!(acked.iter().map(sequence).collect::<Vec<_>>(), [Some(0), Some(1), None]);
    // A submitted task goes on there.
    let submitted = pair.reply("slow", &[("A2A-Reply", "submit")], prompt("1")).await;
    assert_eq!(submitted["status"], "WORKING");
    let task = json!({"task_id": submitted["task"]["id"]});
    wait_until(|| async { pair.reply("get_task", &[], task.clone()).await["status"] == "COMPLETED" }).await;
    let running = pair.reply("slow", &[("A2A-Reply", "submit")], prompt("60")).await;
    let canceled = pair.reply("cancel_task", &[], json!({"task_id": running["task"]["id"]})).await;
    assert_eq!(canceled["status"], "CANCELED");
    // Errors pass unchanged, too.
    let refused = pair.reply("rpc-error", &[], prompt("-32005")).await;
    assert_eq!((&refused["status"], &refused["error_info"]["a2a_code"]), (&json!("ERROR"), &json!(-32005)));
    let invalid = pair.reply("echo", &[("A2A-Timeout", "1s")], json!({"nonsense": 1})).await;
    assert_eq!(invalid["error_info"]["code"], "invalid_request");
    pair.until_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_caller_of_a_stream_gets_contiguous_frames() {
    let agent = demo(&["--token-delay", "0s"]).await;
    let pair = Pair::start(&[], &agent.url, "").await;
    let words = (0..500).map(|n| n.to_string()).collect::<Vec<_>>().join(" ");
    for selection in ["all", "text", "artifacts"] {
        let headers = [("A2A-Reply", "stream"), ("A2A-Frames", selection)];
        let frames = pair.call("stream", &headers, prompt(&words)).await;
        let (end, frames) = frames.split_last().unwrap();
        assert!(end.payload.is_empty() && end.headers.is_none());
        let numbers: Vec<_> = frames.iter().filter_map(sequence).collect();
        assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<_>>());
        let of_type =
            |name: &'static str| frames.iter().map(json_of).filter(move |frame| frame["type"] == name);
        assert_eq!(
            of_type("status").filter(|frame| frame["data"] == "ack").count(),
            1,
            "one acknowledgement"
        );
        assert_eq!(of_type("task").count(), 1);
        let text: String =
            of_type("response").filter_map(|frame| frame["data"].as_str().map(str::to_owned)).collect();
        assert_eq!(text, if selection == "artifacts" { "" } else { &words });
        let result = json_of(frames.last().unwrap());
        assert_eq!((&result["type"], &result["data"]["status"]), (&json!("result"), &json!("COMPLETED")));
        assert_eq!(result["data"]["message"], words.as_str());
    }
    pair.until_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_of_many_messages_arrives_whole() {
    let agent = demo(&[]).await;
    // The server takes at most 16 kB in a message.
    let dir = tempfile::tempdir().unwrap();
    let conf = dir.path().join("nats.conf");
    std::fs::write(&conf, "max_payload: 16384").unwrap();
    let pair = Pair::start(&["-c", conf.to_str().unwrap()], &agent.url, "").await;
    let size = 3_000_000;
    let refused = pair.reply("big", &[], prompt(&size.to_string())).await;
    assert_eq!(refused["error_info"]["code"], "too_large");
    let message = refused["message"].as_str().unwrap();
    let bytes = message.split(' ').find_map(|word| word.parse::<usize>().ok()).unwrap();
    assert!(bytes >= size, "{message}");
    let frames = pair.call("big", &[("A2A-Reply", "stream")], prompt(&size.to_string())).await;
    let text: usize = frames
        .iter()
        .map(json_of)
        .filter(|frame| frame["type"] == "response")
        .filter_map(|frame| frame["data"].as_str().map(str::len))
        .sum();
    assert_eq!(text, size);
    pair.until_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_task_of_a_caller_that_disconnects_is_canceled_where_it_runs() {
    let agent = demo(&[]).await;
    let pair = Pair::start(&[], &agent.url, "stream_keepalive: 100ms").await;
    pair.reply("echo", &[], prompt("published")).await;
    let headers = [("A2A-Reply", "stream"), ("A2A-On-Disconnect", "cancel")];
    let frames = pair.begin("slow", &headers, prompt("600")).await;
    wait_until(|| async { pair.runs.agent.calls.in_flight() == 1 }).await;
    drop(frames);
    for served in [&pair.asked, &pair.runs] {
        wait_until(|| async { served.agent.calls.in_flight() == 0 }).await;
    }
    pair.until_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_is_gone_or_does_not_serve_the_agent_runs_nothing() {
    let agent = demo(&[]).await;
    let mut pair = Pair::start(&[], &agent.url, "").await;
    let gone = |reply: Value| assert_eq!(reply["message"], "the replica is not connected", "{reply}");
    forwarding::set(&pair.name, Uuid::new_v4());
    gone(pair.reply("echo", &[], prompt("x")).await);
    forwarding::set(&pair.name, pair.runs.replica.id());
    pair.reply("echo", &[], prompt("x")).await["success"].as_bool().filter(|success| *success).unwrap();
    // Withdrawn, but not stopped: tasks can still be read.
    pair.runs.service.withdraw();
    gone(pair.reply("echo", &[], prompt("x")).await);
    let unknown = pair.reply("get_task", &[], json!({"task_id": "x"})).await;
    assert_eq!(unknown["error_info"]["code"], "not_found");
    pair.runs.dispatcher = None;
    gone(pair.reply("get_task", &[], json!({"task_id": "x"})).await);
    // Not from a bridge.
    let subject = pair.asked.replica.peers.subjects.peer_call(
        pair.runs.replica.id(),
        &Token::new(&pair.name),
        "get_task",
    );
    let answer = pair.client.request(subject, Bytes::new()).await.unwrap();
    assert_eq!(answer.headers.unwrap().get(PEER).unwrap().as_str(), "gone");
    pair.until_released().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_is_not_ready_there_is_unavailable() {
    let server = NatsServer::start().await;
    let (name, agent) = (format!("agent-{}", fastrand::u64(..)), demo(&[]).await);
    let asked = Served::start(&server, &name, &agent.url, "", Front::Published).await;
    let runs = Served::start(&server, &name, "http://127.0.0.1:9", "", Front::Hidden).await;
    asked.until_ready().await;
    asked.replica.until_it_knows(1).await;
    forwarding::set(&name, runs.replica.id());
    let client = server.connect().await;
    let pair = Pair { name, asked, runs, client, _server: server };
    let refused = pair.reply("echo", &[], prompt("x")).await;
    assert_eq!(refused["error_info"]["code"], "agent_unavailable");
    pair.until_released().await;
}

/// A replica that answers forwarded requests with these messages.
async fn hostile_replica(
    pair: &Pair,
    messages: Vec<(&'static str, String, Bytes)>,
) -> mpsc::Receiver<Message> {
    let instance = Uuid::new_v4();
    let subjects = pair.asked.replica.peers.subjects.clone();
    let mut requests = pair.client.subscribe(subjects.peer_calls(instance)).await.unwrap();
    pair.client.flush().await.unwrap();
    let (client, (sender, received)) = (pair.client.clone(), mpsc::channel(1));
    pair.asked.replica.tasks.spawn("hostile replica", OnPanic::Log, async move {
        while let Some(request) = requests.next().await {
            for (name, value, body) in &messages {
                let mut headers = HeaderMap::new();
                headers.insert(*name, value.as_str());
                let to = request.reply.clone().unwrap();
                client.publish_with_headers(to, headers, body.clone()).await.unwrap();
            }
            let _ = sender.send(request).await;
        }
    });
    forwarding::set(&pair.name, instance);
    received
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_sends_nonsense_costs_an_error_and_no_memory() {
    let agent = demo(&[]).await;
    let pair = Pair::start(&[], &agent.url, "").await;
    let peer = |value: &str, body: &str| ("A2A-Peer", value.to_owned(), Bytes::from(body.to_owned()));
    let silent = "the replica stopped responding";
    let cases = [
        // A lost frame, a lost part, a reply that cannot be read, more bytes than announced.
        (vec![("A2A-Seq", "1".to_owned(), Bytes::new())], silent),
        (vec![peer("reply 9", "123"), peer("reply 9", "")], silent),
        (vec![peer("reply 3", "xyz")], silent),
        (vec![peer("reply 5", "123"), peer("reply 5", "456")], silent),
        (vec![peer("reply 99999999999999", "123")], "no memory left"),
        (vec![peer("reply 18446744073709551615", "123")], "no memory left"),
        (vec![peer("gone", "")], "the replica is not connected"),
    ];
    for (messages, expected) in cases {
        let mut requests = hostile_replica(&pair, messages).await;
        let reply = pair
            .reply(
                "echo",
                &[("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")],
                prompt("x"),
            )
            .await;
        assert!(reply["message"].as_str().unwrap().contains(expected), "{reply}");
        let request = requests.recv().await.unwrap();
        let headers = request.headers.unwrap();
        let info: ForwardInfo = serde_json::from_str(headers.get(FORWARD).unwrap().as_str()).unwrap();
        assert_eq!((info.from, info.caller.is_shared()), (pair.asked.replica.id(), true));
        assert!(
            headers.get("traceparent").is_some() && headers.get("A2A-Reply").unwrap().as_str() == "final"
        );
        assert_eq!(serde_json::from_slice::<Value>(&request.payload).unwrap(), prompt("x"));
        pair.until_released().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_leaves_while_it_runs_a_request_is_noticed() {
    let agent = demo(&[]).await;
    let pair = Pair::start(&[], &agent.url, "").await;
    pair.reply("echo", &[], prompt("published")).await;
    let mut reply = pair.begin("slow", &[], prompt("600")).await;
    wait_until(|| async { pair.runs.agent.calls.in_flight() == 1 }).await;
    pair.runs.replica.peers.leave().await;
    let reply = json_of(&within_deadline(reply.next()).await.unwrap());
    assert_eq!(reply["message"], "the replica stopped responding");
}
