//! Replicas on a real nats-server.

#[path = "../../../tests/it/support/eventually.rs"]
#[allow(dead_code, unreachable_pub, reason = "the integration tests use all of it")]
mod eventually;
#[path = "../../../tests/it/support/nats.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "the integration tests use all of it"
)]
mod nats;

mod forwarding;

use self::eventually::{DEADLINE, wait_until, within_deadline};
use self::nats::NatsServer;
use super::*;

/// Answers for one process of a test.
#[derive(Debug, Default)]
struct Records {
    held: Vec<(RecordKind, String)>,
    nonce: Uuid,
    changed: Mutex<Vec<(RecordKind, RecordKey)>>,
}

impl PeerQueries for Records {
    fn has(&self, kind: RecordKind, key: &RecordKey) -> bool {
        *key.agent == *"weather" && self.held.contains(&(kind, key.id.clone()))
    }

    fn claim_status(&self, nonce: Uuid) -> ClaimStatus {
        if self.nonce == nonce { ClaimStatus::Held } else { ClaimStatus::Ended }
    }

    fn record_changed(&self, kind: RecordKind, key: &RecordKey) {
        self.changed.lock().unwrap().push((kind, key.clone()));
    }
}

/// One replica on a connection of its own.
struct Replica {
    peers: Arc<NatsPeers>,
    tasks: BackgroundTasks,
    client: Client,
}

impl Replica {
    async fn start(server: &NatsServer) -> Self {
        Self::start_with(server.connect().await).await
    }

    async fn start_with(client: Client) -> Self {
        let tasks = BackgroundTasks::default();
        let guard = Arc::new(ReplyGuard::new(["_INBOX.>"], "a2a").unwrap());
        let context = ServiceContext::new(client.clone(), guard, tasks.tracker.clone()).await;
        let subjects = Subjects::new("a2a").unwrap();
        let peers = NatsPeers::start(&context, &subjects, &tasks).await.unwrap();
        Self { peers, tasks, client }
    }

    fn id(&self) -> InstanceId {
        self.peers.instance()
    }

    /// Closes the connection without a word, as a crash does.
    async fn crash(self) {
        self.tasks.stop.cancel();
        self.tasks.finished().await;
        self.client.drain().await.unwrap();
    }

    async fn until_it_knows(&self, count: usize) {
        wait_until(|| async { self.peers.known.load(Relaxed) == count }).await;
    }
}

fn key(id: &str) -> RecordKey {
    RecordKey::new(&"weather".into(), id)
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_know_each_other_and_notice_at_once_when_one_leaves() {
    let server = NatsServer::start().await;
    let (one, two) = (Replica::start(&server).await, Replica::start(&server).await);
    for replica in [&one, &two] {
        replica.until_it_knows(1).await;
    }
    assert_eq!(one.peers.liveness(one.id()).await, Liveness::Alive);
    assert_eq!(one.peers.liveness(two.id()).await, Liveness::Alive);
    assert_eq!(one.peers.liveness(Uuid::new_v4()).await, Liveness::Unreachable, "nobody knows it yet");
    let mut deaths = one.peers.deaths();
    two.peers.leave().await;
    let death = within_deadline(deaths.recv()).await.unwrap();
    assert_eq!(death, Death { instance: two.id(), is_orderly: true });
    assert_eq!(one.peers.liveness(two.id()).await, Liveness::Dead);
    assert!(one.peers.is_alone());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_crashes_is_dead_and_alive_when_it_is_back() {
    let server = NatsServer::start().await;
    let (one, two) = (Replica::start(&server).await, Replica::start(&server).await);
    let (third, unknown) = (Replica::start(&server).await, Uuid::new_v4());
    one.until_it_knows(2).await;
    let mut deaths = one.peers.deaths();
    // A record names an owner that nobody knows.
    assert_eq!(one.peers.liveness(unknown).await, Liveness::Unreachable);
    let crashed = two.id();
    two.crash().await;
    assert_eq!(one.peers.claim_status(crashed, Uuid::nil()).await, None);
    assert_eq!(one.peers.liveness(crashed).await, Liveness::Unreachable, "it may come back");
    let mut dead = Vec::new();
    while dead.len() < 2 {
        // It takes up to 15 seconds.
        let death = tokio::time::timeout(3 * DEADLINE, deaths.recv()).await.unwrap();
        let Death { instance, is_orderly } = death.unwrap();
        assert!(!is_orderly);
        dead.push(instance);
    }
    dead.sort();
    let mut expected = [unknown, crashed];
    expected.sort();
    assert_eq!(dead, expected);
    assert_eq!(one.peers.liveness(crashed).await, Liveness::Dead);
    assert_eq!(one.peers.liveness(third.id()).await, Liveness::Alive);
    // It was only cut off.
    let client = server.connect().await;
    let announcement = to_bytes(&Announcement { agents: None, is_leaving: false });
    client.publish(one.peers.subjects.peer(crashed, ANNOUNCE), announcement).await.unwrap();
    wait_until(|| async { one.peers.liveness(crashed).await == Liveness::Alive }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_dies_while_the_connection_is_down() {
    let mut server = NatsServer::start().await;
    let (one, two) = (Replica::start(&server).await, Replica::start(&server).await);
    one.until_it_knows(1).await;
    let mut deaths = one.peers.deaths();
    server.end();
    wait_until(|| async { !one.peers.is_connected() }).await;
    assert_eq!(one.peers.claim_status(two.id(), Uuid::nil()).await, None);
    let state = one.peers.liveness(two.id()).await;
    assert_ne!(state, Liveness::Dead);
    server.restart().await;
    wait_until(|| async { one.peers.liveness(two.id()).await == Liveness::Alive }).await;
    assert!(deaths.try_recv().is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_is_found_at_the_replica_that_holds_it() {
    let server = NatsServer::start().await;
    let (one, two, three) =
        (Replica::start(&server).await, Replica::start(&server).await, Replica::start(&server).await);
    let agent: Arc<str> = "weather".into();
    assert_eq!(one.peers.find(RecordKind::Task, &key("t")).await, Holder::Nowhere, "nobody serves the agent");
    let nonce = Uuid::new_v4();
    let held = vec![(RecordKind::Task, "t \u{1}\"é".to_owned())];
    let records = Arc::new(Records { held, nonce, ..Records::default() });
    two.peers.set_queries(Arc::clone(&records) as Arc<dyn PeerQueries>);
    let mut services = Vec::new();
    for replica in [&one, &two, &three] {
        services.push(replica.peers.serve(&agent, None).await.unwrap());
    }
    let token = Token::new("weather");
    for replica in [&one, &three] {
        wait_until(|| async { replica.peers.lock_table().serving(&token).certain.len() == 2 }).await;
        assert_eq!(replica.peers.find(RecordKind::Task, &key("t \u{1}\"é")).await, Holder::At(two.id()));
        assert_eq!(replica.peers.find(RecordKind::FollowUp, &key("t \u{1}\"é")).await, Holder::Nowhere);
        assert_eq!(replica.peers.find(RecordKind::Task, &key("u")).await, Holder::Nowhere);
        let long = "x".repeat(MAX_ID + 1);
        assert_eq!(replica.peers.find(RecordKind::Task, &key(&long)).await, Holder::Nowhere);
    }
    assert_eq!(one.peers.claim_status(two.id(), nonce).await, Some(ClaimStatus::Held));
    assert_eq!(one.peers.claim_status(two.id(), Uuid::nil()).await, Some(ClaimStatus::Ended));
    assert_eq!(two.peers.claim_status(two.id(), nonce).await, Some(ClaimStatus::Held));
    one.peers.record_changed(two.id(), RecordKind::Session, &key("s"));
    wait_until(|| async { *records.changed.lock().unwrap() == [(RecordKind::Session, key("s"))] }).await;
    // Two no longer serves the agent.
    drop(services.remove(1));
    let is_nowhere =
        || async { one.peers.find(RecordKind::Task, &key("t \u{1}\"é")).await == Holder::Nowhere };
    wait_until(is_nowhere).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_does_not_answer_in_time_may_hold_the_record() {
    let server = NatsServer::start().await;
    let one = Replica::start(&server).await;
    let (client, other) = (server.connect().await, Uuid::new_v4());
    let agents = Some(vec!["weather".to_owned()]);
    let announcement = to_bytes(&Announcement { agents, is_leaving: false });
    let mut queries = client.subscribe(one.peers.subjects.peers(&Token::new("weather"))).await.unwrap();
    client.publish(one.peers.subjects.peer(other, ANNOUNCE), announcement).await.unwrap();
    one.until_it_knows(1).await;
    let record = key("t");
    // It is slow.
    let (holder, ()) = tokio::join!(one.peers.find(RecordKind::Task, &record), async {
        let query = queries.next().await.unwrap();
        tokio::time::sleep(Duration::from_millis(400)).await;
        let answer = to_bytes(&FindAnswer { instance: other, has: true });
        client.publish(query.reply.unwrap(), answer).await.unwrap();
    });
    assert_eq!(holder, Holder::At(other));
    assert_eq!(one.peers.find(RecordKind::Task, &record).await, Holder::Unknown);
    // Someone else does not answer for it.
    let (holder, ()) = tokio::join!(one.peers.find(RecordKind::Task, &record), async {
        let query = queries.by_ref().skip(1).next().await.unwrap();
        let answer = to_bytes(&FindAnswer { instance: Uuid::new_v4(), has: false });
        client.publish(query.reply.unwrap(), answer).await.unwrap();
    });
    assert_eq!(holder, Holder::Unknown);
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_answer_to_their_own_inboxes_whatever_callers_may_use() {
    let server = NatsServer::start().await;
    let connect = || async {
        let options = async_nats::ConnectOptions::new().custom_inbox_prefix("private.bridge");
        Replica::start_with(server.connect_with(options).await).await
    };
    let (one, two) = (connect().await, connect().await);
    one.until_it_knows(1).await;
    assert_eq!(one.peers.liveness(two.id()).await, Liveness::Alive);
    assert_eq!(one.peers.claim_status(two.id(), Uuid::nil()).await, Some(ClaimStatus::Ended));
    let held = vec![(RecordKind::Task, "t".to_owned())];
    two.peers.set_queries(Arc::new(Records { held, ..Records::default() }));
    let _service = two.peers.serve(&"weather".into(), None).await.unwrap();
    let token = Token::new("weather");
    wait_until(|| async { one.peers.lock_table().serving(&token).certain.len() == 1 }).await;
    assert_eq!(one.peers.find(RecordKind::Task, &key("t")).await, Holder::At(two.id()));
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_messages_are_ignored() {
    let server = NatsServer::start().await;
    let one = Replica::start(&server).await;
    let _service = one.peers.serve(&"weather".into(), None).await.unwrap();
    let client = server.connect().await;
    let deep = "[".repeat(100_000);
    let own = |verb: &str| one.peers.subjects.peer(one.id(), verb);
    for subject in [own("claim"), own("changed"), own("nonsense"), "a2a.peers.weather".to_owned()] {
        for body in ["", "null", "{}", r#"{"nonce":1}"#, r#"{"kind":"x","agent":"a","id":"b"}"#, &deep] {
            client.publish_with_reply(subject.clone(), "_INBOX.x", body.to_owned().into()).await.unwrap();
        }
    }
    for subject in ["a2a.peer.x.announce".to_owned(), one.peers.subjects.peer(Uuid::new_v4(), ANNOUNCE)] {
        client.publish(subject, deep.clone().into()).await.unwrap();
    }
    // A reply subject that the bridge may not publish to.
    let forbidden = one.peers.subjects.peer(Uuid::nil(), "ping");
    client.publish_with_reply(own("ping"), forbidden, Bytes::new()).await.unwrap();
    let answer = within_deadline(client.request(own("ping"), Bytes::new())).await.unwrap();
    let answer: messages::Ping = serde_json::from_slice(&answer.payload).unwrap();
    assert_eq!((answer.instance, one.peers.is_alone()), (one.id(), true));
}
