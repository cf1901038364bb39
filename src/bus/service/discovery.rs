//! PING, INFO and STATS responses of the NATS service protocol (ADR-32).
//!
//! The texts in a response come from a card or the configuration, and the response has to fit into one
//! message. [`DiscoveryResponse::encode`] shortens texts for people before it leaves out what programs need, and the
//! metadata says how many endpoints it left out.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::Serialize;

use super::request::StatsSnapshot;
use super::{EndpointInfo, Service};
use crate::bus::subject::DiscoveryVerb;
use crate::json::{first_that_fit, shorten_to_json, to_bytes};

/// Key in the metadata of INFO and STATS: the number of endpoints that did not fit.
const LEFT_OUT: &str = "a2a.endpoints_left_out";

#[derive(Serialize)]
struct Identity<'a> {
    r#type: &'static str,
    name: &'a str,
    id: &'a str,
    version: &'a str,
    metadata: Cow<'a, BTreeMap<String, String>>,
}

/// An INFO or a STATS response.
#[derive(Serialize)]
struct DiscoveryResponse<'a, E> {
    #[serde(flatten)]
    identity: Identity<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    started: Option<&'a str>,
    endpoints: Vec<E>,
}

#[derive(Serialize)]
struct InfoEntry {
    #[serde(flatten)]
    info: EndpointInfo,
    queue_group: &'static str,
}

#[derive(Serialize)]
struct StatsEntry<'a> {
    name: &'a str,
    subject: &'a str,
    queue_group: &'static str,
    #[serde(flatten)]
    stats: StatsSnapshot,
}

/// The response to `verb`, in at most `max_payload` bytes where possible.
pub(super) fn response(
    verb: DiscoveryVerb,
    service: &Service,
    max_payload: usize,
) -> serde_json::Result<Vec<u8>> {
    let (info, listed, queue_group) = (service.info.borrow(), service.listed.borrow(), service.queue_group);
    let identity = |r#type| Identity {
        r#type,
        name: service.name.as_str(),
        id: &service.id,
        version: &info.version,
        metadata: Cow::Borrowed(&info.metadata),
    };
    // Leaves a quarter for what other tools add on the way.
    let limit = max_payload / 4 * 3;
    match verb {
        DiscoveryVerb::Ping => serde_json::to_vec(&identity("io.nats.micro.v1.ping_response")),
        DiscoveryVerb::Stats => {
            let endpoints = listed.iter().map(|listed| StatsEntry {
                name: &listed.info.name,
                subject: &listed.info.subject,
                queue_group,
                stats: listed.stats.snapshot(),
            });
            let response = DiscoveryResponse {
                identity: identity("io.nats.micro.v1.stats_response"),
                description: None,
                started: Some(&service.started),
                endpoints: endpoints.collect(),
            };
            response.encode(limit)
        }
        DiscoveryVerb::Info => {
            let endpoints =
                listed.iter().map(|listed| InfoEntry { info: (*listed.info).clone(), queue_group });
            let response = DiscoveryResponse {
                identity: identity("io.nats.micro.v1.info_response"),
                description: Some(info.description.clone()),
                started: None,
                endpoints: endpoints.collect(),
            };
            response.encode(limit)
        }
    }
}

/// An endpoint in a response that may have to shrink.
trait Shrink: Serialize {
    fn texts(&mut self) -> impl Iterator<Item = &mut String>;

    fn remove_texts(&mut self);

    /// Of endpoints that do not all fit, those with the highest rank stay.
    fn rank(&self) -> u64 {
        0
    }
}

impl Shrink for InfoEntry {
    fn texts(&mut self) -> impl Iterator<Item = &mut String> {
        self.info.metadata.values_mut()
    }

    fn remove_texts(&mut self) {
        self.info.metadata.clear();
    }
}

impl Shrink for StatsEntry<'_> {
    fn texts(&mut self) -> impl Iterator<Item = &mut String> {
        std::iter::once(&mut self.stats.last_error)
    }

    fn remove_texts(&mut self) {
        self.stats.last_error.clear();
    }

    fn rank(&self) -> u64 {
        self.stats.num_requests
    }
}

impl<E: Shrink> DiscoveryResponse<'_, E> {
    /// Writes the response in at most `limit` bytes. If it is too long, the longest texts are cut, all to the
    /// same length. If even empty texts are not enough, the endpoints lose their texts altogether, and then
    /// those of the lowest rank are left out.
    fn encode(mut self, limit: usize) -> serde_json::Result<Vec<u8>> {
        let bytes = serde_json::to_vec(&self)?;
        if bytes.len() <= limit {
            return Ok(bytes);
        }
        let lengths: Vec<usize> = self.texts().map(|text| written_len(text)).collect();
        let fixed = bytes.len().saturating_sub(lengths.iter().sum());
        if let Some(budget) = limit.checked_sub(fixed) {
            let length = common_length(&lengths, budget);
            self.texts().for_each(|text| shorten(text, length));
            return serde_json::to_vec(&self);
        }
        self.description.iter_mut().for_each(String::clear);
        self.endpoints.iter_mut().for_each(Shrink::remove_texts);
        let bytes = serde_json::to_vec(&self)?;
        if bytes.len() <= limit {
            return Ok(bytes);
        }
        let mut all = std::mem::take(&mut self.endpoints);
        all.sort_by_key(|endpoint| Reverse(endpoint.rank()));
        let count = all.len();
        self.set_left_out(count);
        self.endpoints = first_that_fit(all, serde_json::to_vec(&self)?.len(), limit)?;
        self.set_left_out(count - self.endpoints.len());
        serde_json::to_vec(&self)
    }

    fn texts(&mut self) -> impl Iterator<Item = &mut String> {
        self.endpoints.iter_mut().flat_map(Shrink::texts).chain(&mut self.description)
    }

    fn set_left_out(&mut self, count: usize) {
        self.identity.metadata.to_mut().insert(LEFT_OUT.to_owned(), count.to_string());
    }
}

/// The greatest length to which all can be cut so that their sum is at most `budget`.
fn common_length(lengths: &[usize], budget: usize) -> usize {
    let fits = |length: usize| lengths.iter().map(|one| one.min(&length)).sum::<usize>() <= budget;
    let (mut low, mut high) = (0, lengths.iter().copied().max().unwrap_or(0));
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        if fits(middle) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low
}

/// Cuts a text to at most `length` bytes of JSON. A list or a schema becomes empty instead: a reader could
/// not parse half of it.
fn shorten(text: &mut String, length: usize) {
    if let Some(short) = shorten_to_json(text, length) {
        let can_be_cut = !text.starts_with(['{', '[']) && length >= '…'.len_utf8();
        *text = if can_be_cut { short } else { String::new() };
    }
}

/// The length of a text in JSON, without quotes.
fn written_len(text: &str) -> usize {
    to_bytes(&text).len() - 2
}

/// The version if it is a semantic version, as the service protocol requires, else `0.0.0`.
pub(crate) fn semver_or_zero(version: &str) -> &str {
    if semver::Version::parse(version).is_ok() { version } else { "0.0.0" }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    #[rstest]
    #[case("1.2.3", true)]
    #[case("0.0.0", true)]
    #[case("1.2.3-rc.1+build.007", true)]
    #[case("1.0.0-0a", true)]
    #[case("1.0.0+-", true)]
    #[case("1.2", false)]
    #[case("v1.2.3", false)]
    #[case("1.2.3.4", false)]
    #[case("01.2.3", false)]
    #[case("1.2.3-01", false)]
    #[case("1.2.3-", false)]
    #[case("1.2.3+", false)]
    #[case("", false)]
    #[case("latest", false)]
    fn a_version_that_is_not_semantic_becomes_zero(#[case] version: &str, #[case] valid: bool) {
        assert_eq!(semver_or_zero(version), if valid { version } else { "0.0.0" });
    }

    fn identity() -> Identity<'static> {
        let metadata = Cow::Owned(BTreeMap::new());
        Identity { r#type: "t", name: "weather", id: "i", version: "0.0.0", metadata }
    }

    fn info(texts: &[String]) -> DiscoveryResponse<'static, InfoEntry> {
        let entry = |text: &String| InfoEntry {
            info: EndpointInfo {
                name: "forecast".to_owned(),
                subject: "a2a.action.weather.forecast".to_owned(),
                metadata: BTreeMap::from([
                    ("a2a.skill".to_owned(), "forecast".to_owned()),
                    ("description".to_owned(), text.clone()),
                    ("params".to_owned(), format!("{{\"description\":{text:?}}}")),
                ]),
            },
            queue_group: "a2a",
        };
        DiscoveryResponse {
            identity: identity(),
            description: Some("Forecasts".to_owned()),
            started: None,
            endpoints: texts.iter().map(entry).collect(),
        }
    }

    /// The encoded response, which must fit, and the number of endpoints that were left out.
    fn encoded<E: Shrink>(response: DiscoveryResponse<'_, E>, limit: usize) -> (Value, Option<usize>) {
        let bytes = response.encode(limit).unwrap();
        assert!(bytes.len() <= limit, "{}", bytes.len());
        let value: Value = serde_json::from_slice(&bytes).unwrap();
        let left_out = value["metadata"][LEFT_OUT].as_str().map(|text| text.parse().unwrap());
        (value, left_out)
    }

    #[test]
    fn the_longest_texts_are_cut_first_and_a_schema_is_left_out_whole() {
        let (info, _) = encoded(info(&["x".repeat(5000), "short".to_owned()]), 3000);
        let metadata = |index: usize| info["endpoints"][index]["metadata"].clone();
        let cut = metadata(0)["description"].as_str().unwrap().to_owned();
        assert!(cut.ends_with('…') && cut.len() > 1000, "{}", cut.len());
        assert_eq!(metadata(0)["params"], "");
        assert_eq!(metadata(1)["description"], "short");
        assert_eq!(metadata(1)["params"], "{\"description\":\"short\"}");
        assert_eq!(info["description"], "Forecasts");
    }

    #[test]
    fn metadata_is_removed_when_shortening_is_not_enough_and_then_the_last_endpoints() {
        for (limit, some_left_out) in [(6000, false), (3000, true)] {
            let (info, left_out) = encoded(info(&vec!["text".to_owned(); 50]), limit);
            let endpoints = info["endpoints"].as_array().unwrap();
            assert!(endpoints.iter().all(|endpoint| endpoint["metadata"] == json!({})));
            assert_eq!(left_out.is_some(), some_left_out);
            assert_eq!(endpoints.len() + left_out.unwrap_or_default(), 50);
        }
    }

    #[test]
    fn stats_that_are_too_long_leave_out_the_endpoints_with_the_fewest_requests() {
        let entry = |num_requests| StatsEntry {
            name: "forecast",
            subject: "a2a.action.weather.forecast",
            queue_group: "a2a",
            stats: StatsSnapshot {
                num_requests,
                last_error: "502:".to_owned() + &"x".repeat(200),
                ..StatsSnapshot::default()
            },
        };
        let stats = |limit| {
            let endpoints = (0..100).map(entry).collect();
            let response = DiscoveryResponse {
                identity: identity(),
                description: None,
                started: Some("now"),
                endpoints,
            };
            let (stats, left_out) = encoded(response, limit);
            let requests = |endpoint: &Value| endpoint["num_requests"].as_u64().unwrap();
            (stats["endpoints"].as_array().unwrap().iter().map(requests).collect::<Vec<_>>(), left_out)
        };
        assert_eq!(stats(20_000), ((0..100).collect(), None));
        let (kept, left_out) = stats(10_000);
        let left_out = left_out.unwrap() as u64;
        assert!(left_out > 0 && left_out < 100, "{left_out}");
        assert_eq!(kept, (left_out..100).rev().collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn an_encoded_response_is_within_its_limit(
            texts in prop::collection::vec(any::<String>(), 1..20),
            limit in 0usize..8000,
        ) {
            let size = info(&texts).encode(limit).unwrap().len();
            let mut least = info(&[]);
            least.description = Some(String::new());
            least.set_left_out(texts.len());
            prop_assert!(size <= limit.max(serde_json::to_vec(&least).unwrap().len()));
        }
    }
}
