//! The attacks, each with the number of the finding that it repeats.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::Request;
use serde_json::{Value, json};

use super::arena::{Arena, Load, Tally};
use super::floods::{
    crowd_of_slow_readers, hang_with, hanging, long_prompt, long_value, lookups, malformed, many_headers,
    many_keys, repeats_of_one_key, requests, slow_readers,
};
use super::hostile::{card_of_braces, card_of_skills};
use super::is_full;
use crate::support::peer::card;

type Running = Pin<Box<dyn Future<Output = Tally> + Send>>;

pub(super) struct Attack {
    pub(super) name: String,
    pub(super) run: Box<dyn Fn(Arc<Arena>) -> Running + Send + Sync>,
    /// Whether it leaves the quota of an agent full, so that further attacks by that agent would be weak.
    pub(super) fills_quota: bool,
}

fn attack<F>(name: &str, run: impl Fn(Arc<Arena>) -> F + Send + Sync + 'static) -> Attack
where
    F: Future<Output = Tally> + Send + 'static,
{
    Attack { name: name.to_owned(), run: Box::new(move |arena| Box::pin(run(arena))), fills_quota: false }
}

impl Attack {
    fn filling_quota(self) -> Self {
        Self { fills_quota: true, ..self }
    }
}

/// How long an attack lasts.
pub(super) fn time() -> Duration {
    if is_full() { Duration::from_secs(8) } else { Duration::from_millis(1_200) }
}

pub(super) fn times(short: usize, full: usize) -> usize {
    if is_full() { full } else { short }
}

pub(super) fn all() -> Vec<Attack> {
    let answers = [
        ("1 files with different names", "files"),
        ("1 the same file, repeated", "same files"),
        ("1 answer of 40,000 artifacts", "artifacts"),
        ("2 one text", "text"),
        ("2 millions of empty parts", "empty parts"),
        ("2 long file names", "file names"),
        ("2 empty URLs", "empty URLs"),
        ("2 ids of nested JSON", "ids"),
        ("2 data of empty objects", "data"),
        ("2 deeply nested data", "nested"),
        ("2 JSON-RPC error", "error"),
        ("2 JSON-RPC error with data", "error data"),
        ("2 questions of 15 MB", "large question"),
    ];
    let streams = [
        ("1 stream of 40,000 artifacts", "stream of artifacts"),
        ("1 stream of joined parts", "stream of many parts"),
        ("1 flood of comments", "flood of comments"),
        ("1 flood of pings", "flood of pings"),
        ("1 flood of other events", "flood of other events"),
        ("1 snapshots of the whole text", "stream of snapshots"),
        ("2 stream of file names, 90 MB", "stream of file names"),
        ("2 stream of empty URLs", "stream of empty URLs"),
    ];
    let answer =
        |(name, prompt): (&str, &'static str)| attack(name, move |arena| large(arena, "hostile", prompt));
    let stream =
        |(name, prompt): (&str, &'static str)| attack(name, move |arena| large(arena, "streamer", prompt));
    let mut attacks: Vec<_> =
        answers.into_iter().map(answer).chain(streams.into_iter().map(stream)).collect();
    attacks.extend([
        attack("1 card with 500,000 braces", |arena| {
            replace_card(arena, card_of_braces(times(150_000, 500_000)))
        }),
        attack("1 card with 10,000 skills", |arena| {
            replace_card(arena, card_of_skills(times(2_000, 10_000)))
        }),
        attack("4 1,024 hanging calls, 1,024 descriptors", hanging),
        attack("5 100,000 calls", |arena| many(arena, "small", false)).filling_quota(),
        attack("5 100,000 keyed calls", |arena| many(arena, "small", true)).filling_quota(),
        attack("5 100,000 questions", |arena| many(arena, "question", false)).filling_quota(),
        attack("6 6,000 requests for a large card", |arena| requests(arena, &["a2a.card.bigcard"], 400)),
        attack("6 6,000 discovery requests", |arena| requests(arena, &["$SRV.INFO", "$SRV.STATS"], 2_000)),
        attack("6 20 readers that do not read", slow_readers),
        attack("6 12 agents, and readers that do not read", crowd_of_slow_readers),
        attack("7 malformed NATS messages", malformed),
        attack("10 responses to earlier requests", repeated_responses),
        attack("13 1,100 repeats of one key", repeats_of_one_key),
        attack("14 agent that reopens its socket", |arena| large(arena, "reopening", "small")),
        attack("flood of output", flood_of_output),
        attack("error with cut secrets", |arena| large(arena, "redacted", "error with cut secrets")),
        attack("1,024 lookups of a large waiting task", |arena| lookups(arena, "large waiting task")),
        attack("1,024 lookups of a large running task", |arena| lookups(arena, "large running task")),
        attack("256 calls with 1,024 places for a value", |arena| hang_with(arena, "places", long_value)),
        attack("256 calls with prompts of 1 MB", |arena| hang_with(arena, "hanging1", long_prompt)),
        attack("256 calls with many keys, 1 MB", |arena| hang_with(arena, "hanging1", many_keys)),
        attack("1,000 requests with 1 MB of headers", many_headers),
    ]);
    attacks
}

/// Eight callers at once get large answers.
async fn large(arena: Arc<Arena>, agent: &'static str, prompt: &'static str) -> Tally {
    let load = Load { streams: agent == "streamer", ..Load::new(agent, prompt, time()) };
    if !prompt.starts_with("flood") {
        return arena.load(load).await;
    }
    // A flood ends with the attack, not with the call.
    let end = async {
        tokio::time::sleep(time()).await;
        arena.hostile.end_attack();
    };
    tokio::join!(arena.load(load), end).0
}

async fn many(arena: Arc<Arena>, prompt: &'static str, is_keyed: bool) -> Tally {
    let time = Duration::from_secs(if is_full() { 120 } else { 3 });
    let calls = times(3_000, 100_000);
    arena.load(Load { is_keyed, callers: 64, calls, ..Load::new("hostile", prompt, time) }).await
}

/// The agent serves this card until the bridge has read it a few times.
async fn replace_card(arena: Arc<Arena>, hostile_card: Value) -> Tally {
    arena.hostile.set_card(&hostile_card);
    let before = arena.hostile.card_reads();
    tokio::time::sleep(time()).await;
    arena.hostile.set_card(&card(&["ask"]));
    let mut tally = Tally::default();
    let reads = arena.hostile.card_reads() - before;
    tally.note("reads", usize::try_from(reads).unwrap());
    if reads == 0 {
        tally.wrong.push("the card was not read".into());
    }
    tally
}

/// Pairs of calls, one after the other, so that the second one is on the connection of the first.
async fn repeated_responses(arena: Arc<Arena>) -> Tally {
    let (mut tally, until) = (Tally::default(), Instant::now() + time());
    let mut swapped = 0;
    for index in 0..times(100, 600) {
        if Instant::now() > until {
            break;
        }
        let prompt = format!("own text {index}");
        let body = json!({ "prompt": prompt }).to_string();
        let request = Request::new().payload(body.into()).timeout(Some(Duration::from_secs(10)));
        let reply = arena.client.send_request("a2a.action.repeater.ask", request).await;
        let reply = reply.map_err(|error| error.to_string());
        let reply = reply.map(|reply| serde_json::from_slice::<Value>(&reply.payload).unwrap_or_default());
        swapped += usize::from(
            reply.as_ref().is_ok_and(|reply| reply["success"] == true && reply["message"] != prompt),
        );
        tally.count(&reply);
    }
    if swapped > 0 {
        tally.wrong.push(format!("{swapped} callers got the response to another call"));
    }
    tally
}

async fn flood_of_output(arena: Arc<Arena>) -> Tally {
    std::fs::write(&arena.flood, "").unwrap();
    let before = arena.site.show("loud").await.map_or(0, |report| report.counts.bytes);
    tokio::time::sleep(time()).await;
    let after = arena.site.show("loud").await.map_or(0, |report| report.counts.bytes);
    std::fs::remove_file(&arena.flood).unwrap();
    let mut tally = Tally::default();
    tally.note("MB of output", usize::try_from(after.saturating_sub(before) / 1_000_000).unwrap());
    tally
}
