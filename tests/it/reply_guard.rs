//! The bridge replies to inboxes and to configured patterns, and to no other subject.

use futures_util::StreamExt as _;
use rstest::rstest;
use serde_json::json;

use crate::support::{Bridge, Peer, attached, within_deadline};

async fn bridge_and_peer() -> (Bridge, Peer) {
    let peer = Peer::completing("done");
    let bridge = Bridge::with_peer(&peer).await;
    (bridge, peer)
}

/// Sends a request with this reply subject.
async fn request_reply_to(bridge: &Bridge, subject: &str) {
    let action = bridge.subject("peer.ask");
    let body = json!({"prompt": "x"}).to_string();
    bridge.client.publish_with_reply(action, subject.to_owned(), body.into()).await.unwrap();
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
async fn reply_subject_that_is_not_an_inbox_is_refused_and_counted(#[case] subject: &str) {
    let (bridge, peer) = bridge_and_peer().await;
    let mut trap = bridge.client.subscribe(subject.to_owned()).await.unwrap();
    request_reply_to(&bridge, subject).await;
    let stats = bridge.stats("peer", "ask", 1).await;
    assert_eq!(stats["num_errors"], 1);
    assert_eq!(stats["last_error"], "403:reply subject refused");
    // The reply to this request comes after any reply to the other one.
    bridge.get_task("peer", "never").await.expect_error("not_found");
    let trapped = tokio::time::timeout(std::time::Duration::from_millis(50), trap.next()).await;
    assert!(trapped.is_err(), "{trapped:?}");
    assert_eq!(peer.calls("SendMessage").len(), 0);
}

#[tokio::test]
async fn own_and_system_subjects_are_refused_even_if_every_pattern_is_allowed() {
    let peer = Peer::completing("done");
    let builder = Bridge::with(attached("peer", &peer.url())).nats("reply_prefixes", json!([">"]));
    let bridge = builder.start().await;
    let own = [
        bridge.subject("peer.ask"),
        bridge.subject("peer.cancel_task"),
        format!("{}.registry.peer", bridge.prefix),
        format!("{}.card.peer", bridge.prefix),
        "$JS.API.STREAM.DELETE.orders".to_owned(),
    ];
    for subject in &own {
        request_reply_to(&bridge, subject).await;
    }
    let stats = bridge.stats("peer", "ask", own.len() as u64).await;
    assert_eq!(stats["num_errors"], own.len());
    assert_eq!(peer.calls("SendMessage").len(), 0);
    // The pattern still allows other subjects.
    let mut anywhere = bridge.client.subscribe("any.where").await.unwrap();
    request_reply_to(&bridge, "any.where").await;
    assert!(within_deadline(anywhere.next()).await.unwrap().payload.starts_with(b"{"));
}

#[tokio::test]
async fn request_without_a_reply_subject_is_not_run_and_counts_as_error() {
    let (bridge, peer) = bridge_and_peer().await;
    let body = json!({"prompt": "x"}).to_string();
    bridge.client.publish(bridge.subject("peer.ask"), body.into()).await.unwrap();
    let stats = bridge.stats("peer", "ask", 1).await;
    assert_eq!(stats["num_errors"], 1);
    assert_eq!(stats["last_error"], "400:no reply subject");
    // The next request arrives after it.
    bridge.prompt("peer.ask", "x").await.expect("COMPLETED");
    assert_eq!(peer.calls("SendMessage").len(), 1);
    assert_eq!(bridge.stats("peer", "ask", 2).await["num_errors"], 1);
}

#[tokio::test]
async fn only_configured_reply_patterns_are_allowed() {
    let peer = Peer::completing("done");
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .nats("reply_prefixes", json!(["_INBOX.>", "replies.*.x"]))
        .start()
        .await;
    let mut good = bridge.client.subscribe("replies.one.x").await.unwrap();
    request_reply_to(&bridge, "replies.one.x").await;
    within_deadline(good.next()).await.unwrap();
    for bad in ["replies.one.y", "replies.one.two.x", "replies.one", "other.a.b"] {
        request_reply_to(&bridge, bad).await;
    }
    let stats = bridge.stats("peer", "ask", 5).await;
    assert_eq!(stats["num_errors"], 4);
    assert_eq!(peer.calls("SendMessage").len(), 1);
}
