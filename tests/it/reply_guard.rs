//! Where replies go, and where they never go.

use async_nats::HeaderMap;
use futures_util::StreamExt as _;
use rstest::rstest;
use serde_json::json;

use crate::support::{Answer, Bridge, NatsServer, Peer, attached};

async fn counting() -> (Bridge, Peer) {
    let peer = Peer::agent(|seen| Answer::task(seen, "TASK_STATE_COMPLETED", "done"));
    let bridge = Bridge::of(attached("peer", &peer.url())).start().await;
    (bridge, peer)
}

/// Has the bridge asked to reply to `subject`, from outside any inbox.
async fn ask_for_a_reply_to(bridge: &Bridge, subject: &str) {
    let action = bridge.subject("peer.ask");
    let body = json!({"prompt": "x"}).to_string();
    let headers = HeaderMap::new();
    bridge
        .client
        .publish_with_reply_and_headers(action, subject.to_owned(), headers, body.into())
        .await
        .unwrap();
    bridge.client.flush().await.unwrap();
}

#[rstest]
#[case("$JS.API.STREAM.DELETE.orders")]
#[case("$KV.bucket.key")]
#[case("$SRV.PING")]
#[case("elsewhere.entirely")]
#[case("_INBOXES.abc")]
#[case("_INBOX")]
#[tokio::test]
async fn a_reply_subject_that_is_no_inbox_is_refused_and_counted(#[case] subject: &str) {
    let (bridge, peer) = counting().await;
    let mut trap = bridge.client.subscribe(subject.to_owned()).await.unwrap();
    ask_for_a_reply_to(&bridge, subject).await;
    let stats = bridge.stats("peer", "ask", 1).await;
    assert_eq!(stats["num_errors"], 1);
    assert_eq!(stats["last_error"], "403:reply subject refused");
    // What the bridge answers to this request comes after anything it had to say to the other.
    bridge.get_task("peer", "never").await.expect_error("not_found");
    let trapped = tokio::time::timeout(std::time::Duration::from_millis(50), trap.next()).await;
    assert!(trapped.is_err(), "{trapped:?}");
    assert_eq!(peer.calls("SendMessage").len(), 0);
}

#[tokio::test]
async fn own_subjects_are_refused_even_when_every_pattern_is_allowed() {
    let peer = Peer::agent(|seen| Answer::task(seen, "TASK_STATE_COMPLETED", "done"));
    let builder = Bridge::of(attached("peer", &peer.url())).nats("reply_prefixes", json!([">"]));
    let bridge = builder.start().await;
    let own = [
        bridge.subject("peer.ask"),
        bridge.subject("peer.cancel_task"),
        format!("{}.registry.peer", bridge.prefix),
        format!("{}.card.peer", bridge.prefix),
        "$JS.API.STREAM.DELETE.orders".to_owned(),
    ];
    for subject in &own {
        ask_for_a_reply_to(&bridge, subject).await;
    }
    let stats = bridge.stats("peer", "ask", own.len() as u64).await;
    assert_eq!(stats["num_errors"], own.len());
    assert_eq!(peer.calls("SendMessage").len(), 0);
    // The wide pattern is in force all the same.
    let mut anywhere = bridge.client.subscribe("any.where").await.unwrap();
    ask_for_a_reply_to(&bridge, "any.where").await;
    let reply = tokio::time::timeout(crate::support::SOON, anywhere.next()).await;
    assert!(reply.unwrap().unwrap().payload.starts_with(b"{"));
}

#[tokio::test]
async fn a_request_without_a_reply_subject_is_not_run_and_counts_as_an_error() {
    let (bridge, peer) = counting().await;
    let body = json!({"prompt": "x"}).to_string();
    bridge.client.publish(bridge.subject("peer.ask"), body.into()).await.unwrap();
    let stats = bridge.stats("peer", "ask", 1).await;
    assert_eq!(stats["num_errors"], 1);
    assert_eq!(stats["last_error"], "400:no reply subject");
    // The next request is taken after it.
    bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    assert_eq!(peer.calls("SendMessage").len(), 1);
    assert_eq!(bridge.stats("peer", "ask", 2).await["num_errors"], 1);
}

#[tokio::test]
async fn only_the_configured_patterns_are_answered() {
    let peer = Peer::agent(|seen| Answer::task(seen, "TASK_STATE_COMPLETED", "done"));
    let bridge = Bridge::of(attached("peer", &peer.url()))
        .nats("reply_prefixes", json!(["_INBOX.>", "replies.*.x"]))
        .start_on(NatsServer::start().await)
        .await;
    let mut good = bridge.client.subscribe("replies.one.x").await.unwrap();
    ask_for_a_reply_to(&bridge, "replies.one.x").await;
    let reply = tokio::time::timeout(crate::support::SOON, good.next()).await;
    assert!(reply.is_ok());
    for bad in ["replies.one.y", "replies.one.two.x", "replies.one", "other.a.b"] {
        ask_for_a_reply_to(&bridge, bad).await;
    }
    let stats = bridge.stats("peer", "ask", 5).await;
    assert_eq!(stats["num_errors"], 4);
    assert_eq!(peer.calls("SendMessage").len(), 1);
}
