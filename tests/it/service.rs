//! The NATS service of one agent.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use a2a_bridge::internal::service::{Handler, ServiceInfo, ServiceRequest, round_trip};
use async_nats::client::RequestErrorKind;
use async_nats::{ConnectOptions, Event, HeaderMap};
use futures_util::{FutureExt, StreamExt};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::support::weather::{Weather, answer, endpoint, start_service};
use crate::support::{NatsServer, eventually_eq, within_deadline};

const FORECAST: &str = "a2a.action.weather.forecast";
const STOP_LIMIT: Duration = Duration::from_secs(5);

#[tokio::test]
async fn service_replies_to_ping_info_and_stats() {
    let weather = Weather::start().await;
    weather.publish(&[(FORECAST, "tomorrow")]).await;
    let identity = json!({
        "type": "io.nats.micro.v1.ping_response", "name": "weather", "id": weather.service.id(),
        "version": "1.2.3", "metadata": {"a2a.state": "starting"},
    });
    for subject in ["$SRV.PING".to_owned(), format!("$SRV.PING.weather.{}", weather.service.id())] {
        assert_eq!(serde_json::from_str::<Value>(&weather.ask(&subject).await.unwrap()).unwrap(), identity);
    }
    let info = weather.question("INFO").await;
    assert_eq!(info["type"], "io.nats.micro.v1.info_response");
    assert_eq!(info["description"], "Forecasts");
    assert_eq!(
        info["endpoints"],
        json!([
            {"name": "card", "subject": "a2a.card.weather", "queue_group": "a2a", "metadata": {}},
            {"name": "forecast", "subject": FORECAST, "queue_group": "a2a", "metadata": {"description": "tomorrow"}},
        ])
    );
    let stats = weather.question("STATS").await;
    assert_eq!(stats["type"], "io.nats.micro.v1.stats_response");
    assert!(stats["started"].as_str().unwrap().ends_with('Z'));
    assert_eq!(weather.ask("$SRV.PING.elsewhere").await, Err(RequestErrorKind::NoResponders));
}

#[tokio::test]
async fn published_endpoints_change_while_permanent_ones_stay() {
    let weather = Weather::start().await;
    assert_eq!(weather.ask(FORECAST).await, Err(RequestErrorKind::NoResponders));
    weather.publish(&[(FORECAST, "one"), ("a2a.action.weather.alerts", "two")]).await;
    assert_eq!(weather.endpoint_names().await, ["card", "forecast", "alerts"]);
    assert_eq!(weather.ask(FORECAST).await.unwrap(), "one");
    assert_eq!(weather.ask("a2a.action.weather.alerts").await.unwrap(), "two");

    weather.publish(&[("a2a.action.weather.alerts", "three")]).await;
    assert_eq!(weather.endpoint_names().await, ["card", "alerts"]);
    assert_eq!(weather.ask(FORECAST).await, Err(RequestErrorKind::NoResponders));
    assert_eq!(weather.ask("a2a.action.weather.alerts").await.unwrap(), "three");
    eventually_eq(2, || async { weather.counts("alerts").await.0 }).await;

    weather.publish(&[]).await;
    weather.publish(&[("a2a.action.weather.alerts", "four")]).await;
    assert_eq!(weather.counts("alerts").await.0, 2, "an endpoint that is published again keeps its counts");
    assert_eq!(weather.ask("a2a.action.weather.alerts").await.unwrap(), "four");
    eventually_eq(3, || async { weather.counts("alerts").await.0 }).await;
    assert_eq!(weather.ask("a2a.card.weather").await.unwrap(), "a card");
}

#[tokio::test]
async fn duplicate_subject_is_served_once() {
    let weather = Weather::start().await;
    weather.publish(&[(FORECAST, "first"), (FORECAST, "second"), ("a2a.card.weather", "not a card")]).await;
    assert_eq!(weather.endpoint_names().await, ["card", "forecast"]);
    assert_eq!(weather.ask(FORECAST).await.unwrap(), "first");
    assert_eq!(weather.ask("a2a.card.weather").await.unwrap(), "a card");
}

#[tokio::test]
async fn new_description_shows_at_once() {
    let weather = Weather::start().await;
    let metadata = BTreeMap::from([("a2a.state".to_owned(), "ready".to_owned())]);
    weather.service.describe(ServiceInfo { version: "2.0.0".into(), description: "New".into(), metadata });
    let info = weather.question("INFO").await;
    assert_eq!(
        (&info["version"], &info["description"], &info["metadata"]["a2a.state"]),
        (&json!("2.0.0"), &json!("New"), &json!("ready"))
    );
}

#[tokio::test]
async fn stats_count_requests_errors_and_time() {
    let weather = Weather::start().await;
    let client = weather.context.client.clone();
    let tasks = weather.context.tasks.clone();
    let handler: Handler = Arc::new(move |ServiceRequest { message, accounting, .. }| {
        let client = client.clone();
        tasks.spawn(async move {
            tokio::time::sleep(Duration::from_millis(2)).await;
            client.publish(message.reply.unwrap(), "".into()).await.unwrap();
            match &message.payload[..] {
                b"busy" => accounting.fail(429, "busy"),
                b"forgotten" => drop(accounting),
                _ => accounting.succeed(),
            }
        });
    });
    weather.service.publish(vec![(endpoint(FORECAST, "forecast"), handler)]).await.unwrap();
    for (body, counts) in [
        ("fine", (1, 0, "")),
        ("busy", (2, 1, "429:busy")),
        ("fine", (3, 1, "429:busy")),
        ("forgotten", (4, 2, "500:internal")),
    ] {
        weather.caller.request(FORECAST, body.into()).await.unwrap();
        let counts = (counts.0, counts.1, counts.2.to_owned());
        eventually_eq(counts, || weather.counts("forecast")).await;
    }
    let stats = weather.question("STATS").await;
    let forecast = &stats["endpoints"][1];
    let spent = forecast["processing_time"].as_u64().unwrap();
    assert!(spent >= 8_000_000, "four times two milliseconds, and not {spent} ns");
    assert_eq!(forecast["average_processing_time"].as_u64().unwrap(), spent / 4);
}

#[tokio::test]
async fn panicking_handler_does_not_stop_its_endpoint() {
    let weather = Weather::start().await;
    let fine = answer(&weather.context, "fine");
    let handler: Handler = Arc::new(move |request| {
        assert_ne!(&request.message.payload[..], b"boom", "the panic of this test");
        fine(request);
    });
    weather.service.publish(vec![(endpoint(FORECAST, "forecast"), handler)]).await.unwrap();
    weather.caller.publish_with_reply(FORECAST, weather.caller.new_inbox(), "boom".into()).await.unwrap();
    eventually_eq((1, 1, "500:internal".to_owned()), || weather.counts("forecast")).await;
    assert_eq!(weather.ask(FORECAST).await.unwrap(), "fine");
}

#[tokio::test]
async fn message_without_a_reply_subject_is_not_run_and_counts_as_error() {
    let weather = Weather::start().await;
    weather.publish(&[(FORECAST, "tomorrow")]).await;
    weather.caller.publish(FORECAST, "no reply subject".into()).await.unwrap();
    assert_eq!(weather.ask(FORECAST).await.unwrap(), "tomorrow");
    eventually_eq((2, 1, "400:no reply subject".to_owned()), || weather.counts("forecast")).await;
}

#[tokio::test]
async fn refused_reply_subject_is_counted_and_never_published_to() {
    let weather = Weather::start().await;
    weather.publish(&[(FORECAST, "tomorrow")]).await;
    let mallory = weather.server.connect_with(ConnectOptions::new().skip_subject_validation(true)).await;
    let mut overheard = weather.server.connect().await.subscribe(">").await.unwrap();
    let refused = [
        "$JS.API.STREAM.DELETE.orders",
        "$KV.bucket.key",
        "$SYS.REQ.SERVER.PING",
        "$SRV.PING",
        "a2a.action.weather.forecast",
        "a2a.registry.weather",
        "elsewhere.inbox",
        "_INBOX.*",
        "_INBOX.>",
        "_INBOX..x",
    ];
    for reply in refused {
        for subject in [FORECAST, "$SRV.PING", "$SRV.INFO.weather", "$SRV.STATS.weather"] {
            mallory.publish_with_reply(subject, reply, "asked".into()).await.unwrap();
        }
    }
    let refusals = refused.len() as u64;
    let counts = (refusals, refusals, "403:reply subject refused".to_owned());
    eventually_eq(counts, || weather.counts("forecast")).await;
    round_trip(&weather.context.client).await.unwrap();
    weather.caller.publish("the.end", "".into()).await.unwrap();
    while let Some(message) = overheard.next().await {
        let subject = message.subject.as_str();
        let by_a_caller = matches!(&message.payload[..], b"asked" | b"now");
        if subject == "the.end" {
            break;
        }
        assert!(by_a_caller || !refused.contains(&subject), "the service published to {subject}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_are_replaced_under_load_without_a_gap() {
    let weather = Arc::new(Weather::start().await);
    weather.publish(&[(FORECAST, "0")]).await;
    let (ended, answered) = (CancellationToken::new(), Arc::new(AtomicUsize::new(0)));
    let load = TaskTracker::new();
    let calls: Vec<_> = (0..8)
        .map(|_| {
            let (weather, ended, answered) = (Arc::clone(&weather), ended.clone(), Arc::clone(&answered));
            load.spawn(async move {
                while !ended.is_cancelled() {
                    weather.ask(FORECAST).await.expect("always served");
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    for round in 1..=50 {
        let before = answered.load(Ordering::Relaxed);
        let other = format!("a2a.action.weather.other-{round}");
        weather.publish(&[(FORECAST, &round.to_string()), (&other, "other")]).await;
        eventually_eq(true, || async { answered.load(Ordering::Relaxed) > before + 10 }).await;
    }
    assert_eq!(weather.ask(FORECAST).await.unwrap(), "50", "the new handler serves when publish returns");
    ended.cancel();
    for call in calls {
        call.await.unwrap();
    }
    let total = answered.load(Ordering::Relaxed) as u64 + 1;
    eventually_eq((total, 0, String::new()), || weather.counts("forecast")).await;
}

#[tokio::test]
async fn stopped_service_leaves_no_subscription_and_no_task() {
    let weather = Weather::start().await;
    weather.publish(&[(FORECAST, "tomorrow")]).await;
    weather.service.stop().await;
    round_trip(&weather.context.client).await.unwrap();
    for subject in [FORECAST, "a2a.card.weather", "$SRV.PING", "$SRV.INFO.weather"] {
        assert_eq!(weather.ask(subject).await, Err(RequestErrorKind::NoResponders), "{subject}");
    }
    weather.context.tasks.close();
    within_deadline(weather.context.tasks.wait()).await;
    assert!(weather.service.publish(vec![]).await.is_err());
    weather.service.stop().await;
}

#[tokio::test]
async fn service_stopped_during_a_nats_outage_stays_stopped() {
    let mut weather = Weather::start().await;
    weather.publish(&[(FORECAST, "tomorrow")]).await;
    weather.server.end();
    let began = Instant::now();
    weather.service.stop().await;
    assert!(began.elapsed() < STOP_LIMIT, "{:?}", began.elapsed());
    weather.server.restart().await;
    eventually_eq(Ok(()), || round_trip(&weather.context.client)).await;
    eventually_eq(Ok(()), || round_trip(&weather.caller)).await;
    assert_eq!(weather.ask(FORECAST).await, Err(RequestErrorKind::NoResponders));
}

#[tokio::test]
async fn service_is_restored_after_a_nats_restart() {
    let mut weather = Weather::start().await;
    weather.publish(&[(FORECAST, "tomorrow")]).await;
    weather.server.restart().await;
    eventually_eq(Ok("tomorrow".to_owned()), || weather.ask(FORECAST)).await;
    assert_eq!(weather.endpoint_names().await, ["card", "forecast"]);
}

#[tokio::test]
async fn service_without_permission_to_publish_to_itself_starts_and_stops() {
    let server = NatsServer::start_configured(
        r#"authorization { users: [
            {user: caller, password: c}
            {user: bridge, password: b, permissions: {publish: ["a2a.>"], subscribe: [">"], allow_responses: true}}
        ] }
        no_auth_user: caller"#,
    )
    .await;
    let options = ConnectOptions::with_user_and_password("bridge".into(), "b".into());
    let weather = Weather::start_on(server, options).await;
    weather.publish(&[(FORECAST, "tomorrow")]).await;
    assert_eq!(weather.ask(FORECAST).await.unwrap(), "tomorrow");
    let began = Instant::now();
    weather.service.stop().await;
    assert!(began.elapsed() < STOP_LIMIT, "{:?}", began.elapsed());
    assert_eq!(weather.ask(FORECAST).await, Err(RequestErrorKind::NoResponders));
}

#[tokio::test]
async fn info_response_stays_below_max_payload() {
    let server = NatsServer::start_configured("max_payload: 16384").await;
    let weather = Weather::start_on(server, ConnectOptions::new()).await;
    let text = "long ".repeat(2000);
    weather.publish(&[(FORECAST, &text), ("a2a.action.weather.alerts", &text)]).await;
    let info = weather.ask("$SRV.INFO.weather").await.unwrap();
    assert!((10_000..=12_288).contains(&info.len()), "{} bytes", info.len());
    assert_eq!(weather.endpoint_names().await, ["card", "forecast", "alerts"]);
}

#[tokio::test]
async fn stats_response_of_many_endpoints_stays_below_max_payload() {
    let server = NatsServer::start_configured("max_payload: 16384").await;
    let weather = Weather::start_on(server, ConnectOptions::new()).await;
    let subjects: Vec<_> = (0..200).map(|n| format!("a2a.action.weather.s{n}")).collect();
    weather.publish(&subjects.iter().map(|subject| (subject.as_str(), "x")).collect::<Vec<_>>()).await;
    assert_eq!(weather.ask("a2a.action.weather.s199").await.unwrap(), "x");
    eventually_eq(1, || async { weather.counts("s199").await.0 }).await;
    let stats = weather.question("STATS").await;
    let left_out: usize = stats["metadata"]["a2a.endpoints_left_out"].as_str().unwrap().parse().unwrap();
    assert_eq!(stats["endpoints"].as_array().unwrap().len() + left_out, 201);
}

#[tokio::test]
async fn request_reaches_its_handler_unchanged() {
    let weather = Weather::start().await;
    let client = weather.context.client.clone();
    let tasks = weather.context.tasks.clone();
    let echo: Handler = Arc::new(move |ServiceRequest { message, accounting, .. }| {
        let client = client.clone();
        tasks.spawn(async move {
            let (reply, headers) = (message.reply.unwrap(), message.headers.unwrap_or_default());
            client.publish_with_headers(reply, headers, message.payload).await.unwrap();
            accounting.succeed();
        });
    });
    weather.service.publish(vec![(endpoint(FORECAST, "forecast"), echo)]).await.unwrap();
    let mut headers = HeaderMap::new();
    headers.insert("A2A-Reply", "final");
    let reply = weather.caller.request_with_headers(FORECAST, headers.clone(), "Paris".into()).await.unwrap();
    assert_eq!((&reply.payload[..], reply.headers), (&b"Paris"[..], Some(headers)));
}

/// The names of `count` services.
fn names(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("other-{number}")).collect()
}

#[tokio::test]
async fn discovery_request_reaches_the_connection_once_and_each_service_replies_once() {
    let weather = Weather::start().await;
    let mut expected: HashSet<String> = HashSet::from([weather.service.id().to_owned()]);
    let others = weather.start_others(&names(49), 10).await;
    expected.extend(others.iter().map(|service| service.id().to_owned()));
    // Services of the agent protocol share a name.
    let named = weather.start_others(&vec!["agents".to_owned(); 10], 10).await;
    let named: HashSet<String> = named.iter().map(|service| service.id().to_owned()).collect();
    expected.extend(named.clone());

    // Bytes, because confirmations are messages, too.
    const BODY: usize = 100_000;
    let received = || weather.context.client.statistics().in_bytes.load(Ordering::Relaxed);
    for verb in ["PING", "INFO", "STATS"] {
        for (subject, expected) in
            [(format!("$SRV.{verb}"), &expected), (format!("$SRV.{verb}.agents"), &named)]
        {
            let inbox = weather.caller.new_inbox();
            let mut replies = weather.caller.subscribe(inbox.clone()).await.unwrap();
            round_trip(&weather.caller).await.unwrap();
            let before = received();
            let body = vec![b'x'; BODY].into();
            weather.caller.publish_with_reply(subject.clone(), inbox, body).await.unwrap();
            let mut ids = Vec::new();
            while ids.len() < expected.len() {
                let reply = within_deadline(replies.next()).await.unwrap();
                let reply: Value = serde_json::from_slice(&reply.payload).unwrap();
                ids.push(reply["id"].as_str().unwrap().to_owned());
            }
            assert_eq!(&ids.into_iter().collect::<HashSet<_>>(), expected, "{subject}");
            let bytes = received() - before;
            assert!((1..2).contains(&(bytes / BODY as u64)), "{bytes} bytes for {subject}");
            round_trip(&weather.context.client).await.unwrap();
            round_trip(&weather.caller).await.unwrap();
            assert!(replies.next().now_or_never().is_none(), "{subject}: further replies");
        }
    }
}

#[tokio::test]
async fn stopped_service_leaves_discovery_and_the_others_stay() {
    let weather = Weather::start().await;
    let others =
        weather.start_others(&["other".to_owned(), "agents".to_owned(), "agents".to_owned()], 10).await;
    let agents = [&others[1], &others[2]].map(|service| format!("agents.{}", service.id()));
    others[0].stop().await;
    others[1].stop().await;
    round_trip(&weather.context.client).await.unwrap();
    for name in ["other", &agents[0]] {
        let subject = format!("$SRV.PING.{name}");
        assert_eq!(weather.ask(&subject).await, Err(RequestErrorKind::NoResponders), "{subject}");
    }
    for subject in ["$SRV.PING", "$SRV.PING.weather", "$SRV.PING.agents", &format!("$SRV.PING.{}", agents[1])]
    {
        assert!(weather.ask(subject).await.is_ok(), "{subject}");
    }
    others[2].stop().await;
    weather.service.stop().await;
    round_trip(&weather.context.client).await.unwrap();
    for subject in ["$SRV.PING", "$SRV.INFO", "$SRV.STATS", "$SRV.PING.agents", "$SRV.PING.weather"] {
        assert_eq!(weather.ask(subject).await, Err(RequestErrorKind::NoResponders), "{subject}");
    }
    let again = start_service(&weather.context, "weather", "again").await;
    assert!(weather.ask("$SRV.PING").await.is_ok());
    again.stop().await;
    weather.context.tasks.close();
    within_deadline(weather.context.tasks.wait()).await;
}

#[tokio::test]
async fn interrupted_start_leaves_no_subscription_and_no_task() {
    let weather = Weather::start().await;
    let starting = start_service(&weather.context, "other", "interrupted");
    assert!(starting.now_or_never().is_none(), "the start waits for the server");
    weather.service.stop().await;
    round_trip(&weather.context.client).await.unwrap();
    for subject in ["$SRV.PING", "$SRV.PING.other", "a2a.card.other"] {
        assert_eq!(weather.ask(subject).await, Err(RequestErrorKind::NoResponders), "{subject}");
    }
    weather.context.tasks.close();
    within_deadline(weather.context.tasks.wait()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn flood_of_large_discovery_requests_does_not_disconnect_the_bridge() {
    let disconnected = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&disconnected);
    let options = ConnectOptions::new().event_callback(move |event| {
        count.fetch_add(usize::from(event == Event::Disconnected), Ordering::Relaxed);
        std::future::ready(())
    });
    let server = NatsServer::start().await;
    let weather = Weather::start_on(server, options).await;
    weather.publish(&[(FORECAST, "tomorrow")]).await;
    weather.start_others(&names(49), 10).await;
    let body = "x".repeat(1_000_000);
    for _ in 0..20 {
        let inbox = weather.caller.new_inbox();
        weather.caller.publish_with_reply("$SRV.INFO", inbox, body.clone().into()).await.unwrap();
    }
    assert_eq!(weather.ask(FORECAST).await.unwrap(), "tomorrow");
    assert!(weather.ask("$SRV.INFO.weather").await.is_ok());
    round_trip(&weather.context.client).await.unwrap();
    assert_eq!(disconnected.load(Ordering::Relaxed), 0, "the server has ended the connection");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_for_one_name_and_calls_do_not_wait_for_a_flood_of_discovery_requests() {
    const REQUESTS: usize = 5000;
    let weather = Weather::start().await;
    weather.publish(&[(FORECAST, "tomorrow")]).await;
    let others = weather.start_others(&names(20), 700_000).await;
    // No one reads the replies, but the bridge writes them: 70 GB, unless it drops requests.
    for _ in 0..REQUESTS {
        let inbox = weather.caller.new_inbox();
        weather.caller.publish_with_reply("$SRV.INFO", inbox, "".into()).await.unwrap();
    }
    round_trip(&weather.caller).await.unwrap();
    let began = Instant::now();
    for _ in 0..10 {
        assert_eq!(weather.ask(FORECAST).await.unwrap(), "tomorrow");
        assert_eq!(weather.endpoint_names().await, ["card", "forecast"]);
        assert!(weather.ask("$SRV.INFO.other-7").await.is_ok());
    }
    assert!(began.elapsed() < STOP_LIMIT, "{:?}", began.elapsed());
    // What waits is dropped with the services.
    for service in others.iter().chain([&weather.service]) {
        service.stop().await;
    }
    weather.context.tasks.close();
    within_deadline(weather.context.tasks.wait()).await;
}
