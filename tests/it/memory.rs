//! The memory of the bridge: what callers and slow connections can make it hold.

use async_nats::StatusCode;
use futures_util::StreamExt as _;
use serde_json::{Value, json};

use crate::support::processes::{memory, until_idle};
use crate::support::proxy::PausableProxy;
use crate::support::{Answer, Bridge, NatsServer, Peer, attached, peer};

const MIB: u64 = 1 << 20;

#[tokio::test]
async fn card_requests_over_a_slow_connection_are_limited_and_each_gets_a_reply() {
    const REQUESTS: usize = 1500;
    let nats = NatsServer::start().await;
    let proxy = PausableProxy::start(nats.port());
    let mut card = peer::card(&["ask"]);
    card["description"] = "d".repeat(900_000).into();
    let peer = Peer::agent_with_card(card, |seen| Answer::task(seen, "TASK_STATE_COMPLETED", "done"));
    let bridge = Bridge::with(attached("peer", &peer.url())).nats("url", proxy.url()).start_on(nats).await;
    let before = memory(bridge.pid(), "VmRSS");
    let inbox = bridge.client.new_inbox();
    let replies = bridge.client.subscribe(format!("{inbox}.*")).await.unwrap();
    proxy.pauser()();
    for number in 0..REQUESTS {
        let (subject, reply) = (format!("{}.card.peer", bridge.prefix), format!("{inbox}.{number}"));
        bridge.client.publish_with_reply(subject, reply, "".into()).await.unwrap();
    }
    bridge.client.flush().await.unwrap();
    until_idle(bridge.pid()).await;
    let grown = memory(bridge.pid(), "VmHWM").saturating_sub(before);
    assert!(grown < 64 * MIB, "the bridge has grown by {} MiB", grown / MIB);

    proxy.resume();
    let (mut cards, mut busy) = (0, 0);
    let mut replies = replies.take(REQUESTS);
    while let Some(reply) = replies.next().await {
        assert_ne!(reply.status, Some(StatusCode::NO_RESPONDERS));
        let body: Value = serde_json::from_slice(&reply.payload).unwrap();
        match body["error_info"]["code"].as_str() {
            None => cards += usize::from(body["name"].is_string()),
            Some("busy") => busy += 1,
            Some(other) => panic!("{other}: {body}"),
        }
    }
    assert_eq!(cards + busy, REQUESTS);
    assert!(cards > 20, "{cards} cards, {busy} refused");
}

#[tokio::test]
async fn a_reply_that_waits_for_the_connection_keeps_the_place_of_its_call() {
    const LIMIT: usize = 32;
    let nats = NatsServer::start().await;
    let proxy = PausableProxy::start(nats.port());
    let pause = proxy.pauser();
    let text = "x".repeat(900_000);
    let peer = Peer::agent(move |seen| {
        pause();
        Answer::task(seen, "TASK_STATE_COMPLETED", &text)
    });
    let settings = attached("peer", &peer.url()).set("max_in_flight", LIMIT);
    let bridge = Bridge::with(settings).nats("url", proxy.url()).start_on(nats).await;
    let inbox = bridge.client.new_inbox();
    let replies = bridge.client.subscribe(format!("{inbox}.*")).await.unwrap();
    for number in 0..10 * LIMIT {
        let reply = format!("{inbox}.{number}");
        let body = json!({"prompt": "x"}).to_string();
        bridge.client.publish_with_reply(bridge.subject("peer.ask"), reply, body.into()).await.unwrap();
        // One after the other, so that earlier replies wait when later requests arrive.
        if number % LIMIT == LIMIT - 1 {
            bridge.client.flush().await.unwrap();
            until_idle(bridge.pid()).await;
        }
    }
    let called = peer.calls("SendMessage").len();
    assert!(called <= 2 * LIMIT, "the agent was called {called} times while its replies waited");
    proxy.resume();
    let codes = replies.take(10 * LIMIT).map(|reply| {
        let body: Value = serde_json::from_slice(&reply.payload).unwrap();
        body["error_info"]["code"].as_str().unwrap_or("completed").to_owned()
    });
    let codes: Vec<_> = codes.collect().await;
    assert_eq!(codes.iter().filter(|code| *code == "completed").count(), called);
    assert_eq!(codes.iter().filter(|code| *code == "busy").count(), 10 * LIMIT - called);
}
