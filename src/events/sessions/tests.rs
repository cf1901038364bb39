//! Sessions on a log in memory.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use serde_json::{Value, json};
use uuid::Uuid;

use super::lineage::Lineage;
use super::messages::Role;
use super::projector::{SessionRef, project, rebuild};
use super::summary::CHUNK;
use crate::caller::Caller;
use crate::events::codec::raw;
use crate::events::event::{Batch, Event, EventType, FrameHint, KeptBatch, event_index};
use crate::events::memory_store::MemoryEventStore;
use crate::events::records::RecordPart;
use crate::events::run_record::{RunRecord, RunStatus};
use crate::events::store::{EventStore, LogUnavailable, NewBatch};

fn event(n: u64, kind: EventType, payload: &Value) -> Event {
    let at = format!("2026-01-01T00:00:00.{n:03}Z");
    Event { n, kind, at, payload: raw(payload), frame: FrameHint::default() }
}

async fn append(store: &MemoryEventStore, session: &SessionRef, batch: Batch) -> u64 {
    let (id, body) = (Uuid::new_v4().to_string(), batch.encode());
    let batch =
        NewBatch { key: &session.key, id, run: batch.run, body, is_transient: false, expects_first: false };
    store.append(batch).await.unwrap()
}

fn batch(session: &SessionRef, run: Option<Uuid>, events: Vec<Event>) -> Batch {
    Batch::new(Some(Arc::clone(&session.id)), run, 0, [0; 3], events)
}

/// A question and its answer.
async fn exchange(store: &MemoryEventStore, session: &SessionRef, text: &str) -> Uuid {
    let run = Uuid::now_v7();
    let events = vec![
        event(0, EventType::UserMessage, &json!({ "content": text })),
        event(1, EventType::AgentStart, &json!({ "agent": "demo", "skill": "echo", "instance": "i" })),
    ];
    append(store, session, batch(session, Some(run), events)).await;
    let token = event(2, EventType::AgentToken, &json!({ "text": text }));
    append(store, session, batch(session, Some(run), vec![token])).await;
    let end = event(3, EventType::AgentComplete, &json!({ "message": text, "task": { "id": "t" } }));
    append(store, session, batch(session, Some(run), vec![end])).await;
    run
}

async fn run_record(store: &MemoryEventStore, session: &SessionRef, run: Uuid) -> RunRecord {
    let record = store.read_record(&session.record(RecordPart::Run(run))).await.unwrap().unwrap();
    serde_json::from_slice(&record.value).unwrap()
}

#[tokio::test]
async fn a_projection_is_the_same_however_often_and_by_whom_it_is_made() {
    let store = MemoryEventStore::default();
    let session = SessionRef::new(&Caller::default(), "s");
    assert!(project(&store, &session).await.unwrap().is_none());
    let mut runs = Vec::new();
    for number in 0..100 {
        runs.push(exchange(&store, &session, &format!("message {number}")).await);
        if number % 7 == 0 {
            // Two replicas at once.
            let (one, two) = tokio::join!(project(&store, &session), project(&store, &session));
            assert_eq!(one.unwrap().unwrap().summary, two.unwrap().unwrap().summary);
        }
    }
    let found = project(&store, &session).await.unwrap().unwrap();
    assert_eq!((found.summary.message_count, found.summary.agents.len()), (200, 1));
    let again = project(&store, &session).await.unwrap().unwrap();
    assert_eq!(
        (again.revision, &again.summary),
        (found.revision, &found.summary),
        "nothing is written twice"
    );
    let record = run_record(&store, &session, runs[3]).await;
    assert_eq!((record.status, record.events, record.first_token_ms), (RunStatus::Completed, 4, Some(1)));
    assert_eq!(record.task_id.as_deref(), Some("t"));
    let lineage = Lineage::of(&store, &session, found.summary.clone()).await.unwrap();
    for message in [0, 1, CHUNK - 1, CHUNK, 199] {
        let position = lineage.position(&store, message).await.unwrap().unwrap();
        assert_eq!(position.role, if message % 2 == 0 { Role::User } else { Role::Assistant });
    }
    assert!(lineage.position(&store, 200).await.unwrap().is_none());

    let rebuilt = rebuild(&store, &session).await.unwrap().unwrap();
    assert_eq!(rebuilt.summary, found.summary);
    let same = run_record(&store, &session, runs[3]).await;
    assert_eq!(serde_json::to_value(same).unwrap(), serde_json::to_value(record).unwrap());
    store.is_down.store(true, Relaxed);
    assert_eq!(project(&store, &session).await.unwrap_err(), LogUnavailable);
}

#[tokio::test]
async fn the_chain_depends_on_every_message_and_its_order() {
    let chain = async |texts: &[&str]| {
        let store = MemoryEventStore::default();
        let session = SessionRef::new(&Caller::default(), "s");
        for text in texts {
            exchange(&store, &session, text).await;
        }
        project(&store, &session).await.unwrap().unwrap().summary.chain
    };
    let one = chain(&["a", "b"]).await;
    assert_eq!(one, chain(&["a", "b"]).await);
    for other in [&["b", "a"][..], &["a"], &["a", "b", "b"], &["ab"]] {
        assert_ne!(one, chain(other).await);
    }
}

#[tokio::test]
async fn a_batch_that_was_replaced_is_read_in_its_old_place() {
    let store = MemoryEventStore::default();
    let session = SessionRef::new(&Caller::default(), "s");
    exchange(&store, &session, "first").await;
    exchange(&store, &session, "second").await;
    let before = project(&store, &session).await.unwrap().unwrap().summary;
    let lineage = Lineage::of(&store, &session, before.clone()).await.unwrap();
    let chain = lineage.position(&store, 0).await.unwrap().unwrap().chain;
    let stored = store.get(1).await.unwrap().unwrap();
    let mut kept = stored.decode().unwrap();
    kept.events[0].payload = raw(&json!({ "redacted": true, "chain": chain }));
    let marker = event(0, EventType::Redacted, &json!({ "index": event_index(1, 0) }));
    let mut replacing = batch(&session, None, vec![marker]);
    replacing.kept = Some(Box::new(KeptBatch { sequence: 1, batch: kept }));
    append(&store, &session, replacing).await;
    for is_erased in [false, true] {
        if is_erased {
            store.erase(1).await.unwrap();
        }
        for found in [project(&store, &session).await, rebuild(&store, &session).await] {
            let found = found.unwrap().unwrap().summary;
            assert_eq!((&found.chain, found.message_count), (&before.chain, 4));
            let lineage = Lineage::of(&store, &session, found).await.unwrap();
            let mut messages = Vec::new();
            lineage
                .messages(&store, 0, |message| messages.push((message.event, message.content.text)))
                .await
                .unwrap();
            let texts: Vec<_> = messages.iter().map(|(_, text)| text.as_str()).collect();
            assert_eq!(texts, ["", "first", "second", "second"]);
            assert_eq!(messages[0].0, event_index(1, 0));
        }
    }
}

#[tokio::test]
async fn a_record_of_a_newer_release_is_not_misread() {
    let store = MemoryEventStore::default();
    let session = SessionRef::new(&Caller::default(), "s");
    exchange(&store, &session, "x").await;
    let found = project(&store, &session).await.unwrap().unwrap();
    let mut newer = serde_json::to_value(&found.summary).unwrap();
    newer["v"] = json!(2);
    let key = session.record(RecordPart::Summary);
    store.write_record(&key, newer.to_string().into(), found.revision).await.unwrap();
    assert_eq!(project(&store, &session).await.unwrap_err(), LogUnavailable);
}
