//! Rolling restarts: two replicas of one endpoint stop and start in turn under load. No request is lost, and
//! none runs twice.
//!
//! `ROLLING_RESTARTS` sets the number of restarts per test. With `ROLLING_LEAVE=drain` the replicas stop with
//! the library's own `Subscriber::drain` instead, which shows that the test can fail.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use a2a_bridge::internal::service::{
    self, EndpointInfo, Handler, Service, ServiceContext, ServiceInfo, ServiceRequest, round_trip,
};
use a2a_bridge::internal::{ReplyGuard, Token};
use async_nats::Client;
use futures_util::StreamExt;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::support::NatsServer;
use crate::support::eventually::eventually_within;

const SUBJECT: &str = "a2a.action.weather.forecast";
const WORK: Duration = Duration::from_millis(20);

/// The number of runs of each request, by its body.
type Runs = Arc<Mutex<HashMap<String, usize>>>;

fn restarts() -> usize {
    std::env::var("ROLLING_RESTARTS").map_or(20, |count| count.parse().expect("ROLLING_RESTARTS is a number"))
}

fn by_drain() -> bool {
    std::env::var("ROLLING_LEAVE").is_ok_and(|how| how == "drain")
}

/// A replica that serves one endpoint on its own connection.
struct Replica {
    client: Client,
    tasks: TaskTracker,
    work: TaskTracker,
    leave: Leave,
}

enum Leave {
    Ours(Arc<Service>),
    Drain(CancellationToken),
}

impl Replica {
    async fn start(server: &NatsServer, runs: &Runs) -> Self {
        let client = server.connect().await;
        let (tasks, work) = (TaskTracker::new(), TaskTracker::new());
        let run = {
            let (client, work, runs) = (client.clone(), work.clone(), Arc::clone(runs));
            move |message: async_nats::Message| {
                let client = client.clone();
                *runs.lock().unwrap().entry(String::from_utf8_lossy(&message.payload).into()).or_default() +=
                    1;
                work.spawn(async move {
                    tokio::time::sleep(WORK).await;
                    client.publish(message.reply.unwrap(), "done".into()).await.unwrap();
                })
            }
        };
        let leave = if by_drain() {
            let mut subscriber = client.queue_subscribe(SUBJECT, "a2a".into()).await.unwrap();
            round_trip(&client).await.unwrap();
            let (leaving, left) = (CancellationToken::new(), CancellationToken::new());
            tasks.spawn({
                let leaving = leaving.clone();
                async move {
                    loop {
                        tokio::select! {
                            () = leaving.cancelled(), if !left.is_cancelled() => {
                                subscriber.drain().await.unwrap();
                                left.cancel();
                            }
                            message = subscriber.next() => match message {
                                Some(message) => drop(run(message)),
                                None => break,
                            }
                        }
                    }
                }
            });
            Leave::Drain(leaving)
        } else {
            let handler: Handler = Arc::new(move |ServiceRequest { message, accounting, .. }| {
                run(message);
                accounting.succeed();
            });
            let guard = Arc::new(ReplyGuard::new(["_INBOX.>"], "a2a").unwrap());
            let context = ServiceContext::new(client.clone(), guard, tasks.clone()).await;
            let service = Service::start(
                &context,
                Token::new("weather"),
                &service::new_id(),
                "a2a",
                ServiceInfo::default(),
                vec![],
            )
            .await
            .unwrap();
            let endpoint = EndpointInfo {
                name: "forecast".into(),
                subject: SUBJECT.into(),
                gateway_subject: None,
                metadata: BTreeMap::new(),
            };
            service.publish(vec![(endpoint, handler)]).await.unwrap();
            Leave::Ours(service)
        };
        Self { client, tasks, work, leave }
    }

    /// Stops the service, finishes the requests that it received, and closes the connection. Returns how long
    /// the service took to stop.
    async fn stop(self) -> Duration {
        let began = Instant::now();
        match &self.leave {
            Leave::Ours(service) => service.stop().await,
            Leave::Drain(leaving) => leaving.cancel(),
        }
        self.tasks.close();
        self.tasks.wait().await;
        let left = began.elapsed();
        self.work.close();
        self.work.wait().await;
        round_trip(&self.client).await.unwrap();
        left
    }
}

/// Requests at a steady rate until `end`.
struct Load {
    ended: CancellationToken,
    task: JoinSet<Tally>,
}

struct Tally {
    sent: Vec<String>,
    failed: Vec<String>,
}

impl Load {
    fn start(client: Client, per_second: u32, name: String) -> Self {
        let ended = CancellationToken::new();
        let mut task = JoinSet::new();
        task.spawn(ask_until(ended.clone(), client, per_second, name));
        Self { ended, task }
    }

    async fn end(mut self) -> Tally {
        self.ended.cancel();
        self.task.join_next().await.unwrap().unwrap()
    }
}

async fn ask_until(ended: CancellationToken, client: Client, per_second: u32, name: String) -> Tally {
    let mut pace = interval(Duration::from_secs(1) / per_second);
    pace.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let (mut calls, mut sent, mut failed) = (JoinSet::new(), Vec::new(), Vec::new());
    while ended.run_until_cancelled(pace.tick()).await.is_some() {
        let id = format!("{name}-{}", sent.len());
        sent.push(id.clone());
        let client = client.clone();
        calls.spawn(async move {
            // Far longer than the work takes: a request without a reply by then is lost.
            match timeout(Duration::from_secs(5), client.request(SUBJECT, id.clone().into())).await {
                Ok(Ok(_)) => None,
                Ok(Err(error)) => Some(format!("{id}: {error}")),
                Err(_) => Some(format!("{id}: no reply")),
            }
        });
    }
    while let Some(call) = calls.join_next().await {
        failed.extend(call.unwrap());
    }
    Tally { sent, failed }
}

/// Stops and starts the replicas in turn.
async fn roll(
    server: &NatsServer,
    runs: &Runs,
    replicas: &mut [Option<Replica>; 2],
    times: usize,
) -> Duration {
    let mut longest = Duration::ZERO;
    for turn in 0..times {
        let replica = &mut replicas[turn % 2];
        longest = longest.max(replica.take().unwrap().stop().await);
        *replica = Some(Replica::start(server, runs).await);
    }
    longest
}

#[track_caller]
fn assert_each_ran_once(what: &str, tally: &Tally, runs: &Runs, longest: Duration) {
    let runs = runs.lock().unwrap();
    let lost = tally.sent.iter().filter(|id| !runs.contains_key(*id)).count();
    let twice = tally.sent.iter().filter(|id| runs.get(*id).is_some_and(|count| *count > 1)).count();
    println!(
        "{what}: {} restarts, {} requests, {} without a reply, {lost} never run, {twice} run twice, longest leave {longest:?}",
        restarts(),
        tally.sent.len(),
        tally.failed.len(),
    );
    assert!(!tally.sent.is_empty());
    assert_eq!((tally.failed.as_slice(), lost, twice), (&[] as &[String], 0, 0));
}

async fn rolling_restarts(what: &'static str, per_second: u32) {
    let server = NatsServer::start().await;
    let runs = Runs::default();
    let mut replicas =
        [Some(Replica::start(&server, &runs).await), Some(Replica::start(&server, &runs).await)];
    let load = Load::start(server.connect().await, per_second, what.to_owned());
    let longest = roll(&server, &runs, &mut replicas, restarts()).await;
    assert_each_ran_once(what, &load.end().await, &runs, longest);
}

#[tokio::test(flavor = "multi_thread")]
async fn rolling_restarts_under_load_lose_no_request_and_run_none_twice() {
    rolling_restarts("busy", 800).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rolling_restarts_at_near_idle_lose_no_request_and_run_none_twice() {
    rolling_restarts("near idle", 20).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reconnected_replicas_lose_no_request_when_they_leave() {
    let mut server = NatsServer::start().await;
    let runs = Runs::default();
    let (mut tally, mut longest) = (Tally { sent: vec![], failed: vec![] }, Duration::ZERO);
    let asking = server.connect().await;
    let mut replicas =
        [Some(Replica::start(&server, &runs).await), Some(Replica::start(&server, &runs).await)];
    for round in 0..restarts().div_ceil(2) {
        // Both replicas have received messages on a connection that is then lost.
        let ran = runs.lock().unwrap().len();
        let before = Load::start(asking.clone(), 800, format!("before-{round}"));
        eventually_within(Duration::from_secs(5), || async {
            (runs.lock().unwrap().len() > ran + 50).then_some(())
        })
        .await;
        tally.add(before.end().await);
        server.restart().await;
        for client in replicas.iter().flatten().map(|replica| &replica.client).chain([&asking]) {
            eventually_within(Duration::from_secs(5), || async { round_trip(client).await.ok() }).await;
        }
        let after = Load::start(asking.clone(), 800, format!("after-{round}"));
        longest = longest.max(roll(&server, &runs, &mut replicas, 2).await);
        tally.add(after.end().await);
    }
    assert_each_ran_once("reconnected", &tally, &runs, longest);
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.sent.extend(other.sent);
        self.failed.extend(other.failed);
    }
}
