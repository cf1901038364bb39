//! PING, INFO and STATS responses of the NATS service protocol (ADR-32).
//!
//! The texts in a response come from a card or the configuration, and the response has to fit into one
//! message. [`DiscoveryResponse::encode`] shortens texts for people before it leaves out what programs need, and the
//! metadata says how many endpoints it left out.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;

use bytes::Bytes;
use serde::Serialize;

use super::Service;
use super::request::StatsSnapshot;
use crate::bus::subject::DiscoveryVerb;
use crate::json::{first_that_fit, shorten_to_json, to_bytes};

/// Maximum bytes of a version. It is in every response, and an agent may choose any.
pub(crate) const MAX_VERSION: usize = 128;

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
struct DiscoveryResponse<'a> {
    #[serde(flatten)]
    identity: Identity<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    started: Option<&'a str>,
    endpoints: Vec<EndpointEntry<'a>>,
}

#[derive(Serialize)]
struct EndpointEntry<'a> {
    name: &'a str,
    subject: &'a str,
    /// Only in INFO.
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<BTreeMap<String, String>>,
    queue_group: &'static str,
    /// Only in STATS.
    #[serde(flatten)]
    stats: Option<StatsSnapshot>,
}

impl EndpointEntry<'_> {
    /// The texts that may be cut.
    fn texts(&mut self) -> impl Iterator<Item = &mut String> {
        let metadata = self.metadata.iter_mut().flat_map(BTreeMap::values_mut);
        metadata.chain(self.stats.iter_mut().map(|stats| &mut stats.last_error))
    }
}

/// The response to `verb`, in at most `max_payload` bytes where possible.
pub(super) fn response(verb: DiscoveryVerb, service: &Service, max_payload: usize) -> Bytes {
    let (info, listed) = (service.info.borrow(), service.listed.borrow());
    let identity = Identity {
        r#type: match verb {
            DiscoveryVerb::Ping => "io.nats.micro.v1.ping_response",
            DiscoveryVerb::Info => "io.nats.micro.v1.info_response",
            DiscoveryVerb::Stats => "io.nats.micro.v1.stats_response",
        },
        name: service.name.as_str(),
        id: &service.id,
        version: &info.version,
        metadata: Cow::Borrowed(&info.metadata),
    };
    if verb == DiscoveryVerb::Ping {
        return to_bytes(&identity);
    }
    let is_stats = verb == DiscoveryVerb::Stats;
    let endpoints = listed.iter().map(|listed| EndpointEntry {
        name: &listed.info.name,
        subject: &listed.info.subject,
        metadata: (!is_stats).then(|| listed.info.metadata.clone()),
        queue_group: service.queue_group,
        stats: is_stats.then(|| listed.stats.snapshot()),
    });
    let response = DiscoveryResponse {
        identity,
        description: (!is_stats).then(|| info.description.clone()),
        started: is_stats.then_some(service.started.as_str()),
        endpoints: endpoints.collect(),
    };
    // Leaves a quarter for what other tools add on the way.
    response.encode(max_payload / 4 * 3)
}

impl DiscoveryResponse<'_> {
    /// Writes the response in at most `limit` bytes. If it is too long, the longest texts are cut, all to the
    /// same length. If even empty texts are not enough, the endpoints lose their texts altogether. If that is not
    /// enough either, STATS leaves out the endpoints with the fewest requests, and INFO the last ones.
    fn encode(mut self, limit: usize) -> Bytes {
        let bytes = to_bytes(&self);
        if bytes.len() <= limit {
            return bytes;
        }
        let lengths: Vec<usize> = self.texts().map(|text| to_bytes(text).len() - "\"\"".len()).collect();
        let fixed = bytes.len().saturating_sub(lengths.iter().sum());
        if let Some(budget) = limit.checked_sub(fixed) {
            let length = common_length(lengths, budget);
            self.texts().for_each(|text| shorten(text, length));
            return to_bytes(&self);
        }
        self.description.iter_mut().for_each(String::clear);
        for endpoint in &mut self.endpoints {
            endpoint.metadata.iter_mut().for_each(BTreeMap::clear);
            endpoint.texts().for_each(String::clear);
        }
        let bytes = to_bytes(&self);
        if bytes.len() <= limit {
            return bytes;
        }
        let mut all = std::mem::take(&mut self.endpoints);
        all.sort_by_key(|endpoint| Reverse(endpoint.stats.as_ref().map(|stats| stats.num_requests)));
        let count = all.len();
        self.set_left_out(count);
        self.endpoints = first_that_fit(all, to_bytes(&self).len(), limit);
        self.set_left_out(count - self.endpoints.len());
        to_bytes(&self)
    }

    fn texts(&mut self) -> impl Iterator<Item = &mut String> {
        self.endpoints.iter_mut().flat_map(EndpointEntry::texts).chain(&mut self.description)
    }

    fn set_left_out(&mut self, count: usize) {
        self.identity.metadata.to_mut().insert(LEFT_OUT.to_owned(), count.to_string());
    }
}

/// The greatest length to which all can be cut so that their sum is at most `budget`.
fn common_length(mut lengths: Vec<usize>, mut budget: usize) -> usize {
    lengths.sort_unstable();
    for (shorter, length) in lengths.iter().enumerate() {
        let share = budget / (lengths.len() - shorter);
        if *length > share {
            return share;
        }
        budget -= length;
    }
    usize::MAX
}

/// Cuts a text to at most `length` bytes of JSON. A list or a schema becomes empty instead: a reader could
/// not parse half of it.
fn shorten(text: &mut String, length: usize) {
    if let Some(short) = shorten_to_json(text, length) {
        let can_be_cut = !text.starts_with(['{', '[']) && length >= '…'.len_utf8();
        *text = if can_be_cut { short } else { String::new() };
    }
}

/// The version if it is a semantic version of a reasonable length, as the service protocol requires, else `0.0.0`.
pub(crate) fn semver_or_zero(version: &str) -> &str {
    let is_valid = version.len() <= MAX_VERSION && semver::Version::parse(version).is_ok();
    if is_valid { version } else { "0.0.0" }
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
    #[case(&format!("1.0.0-{}", "a".repeat(MAX_VERSION)), false)]
    #[case("latest", false)]
    fn a_version_that_is_not_semantic_becomes_zero(#[case] version: &str, #[case] valid: bool) {
        assert_eq!(semver_or_zero(version), if valid { version } else { "0.0.0" });
    }

    fn identity() -> Identity<'static> {
        let metadata = Cow::Owned(BTreeMap::new());
        Identity { r#type: "t", name: "weather", id: "i", version: "0.0.0", metadata }
    }

    fn info(texts: &[String]) -> DiscoveryResponse<'static> {
        let entry = |text: &String| EndpointEntry {
            name: "forecast",
            subject: "a2a.action.weather.forecast",
            metadata: Some(BTreeMap::from([
                ("a2a.skill".to_owned(), "forecast".to_owned()),
                ("description".to_owned(), text.clone()),
                ("params".to_owned(), format!("{{\"description\":{text:?}}}")),
            ])),
            queue_group: "a2a",
            stats: None,
        };
        DiscoveryResponse {
            identity: identity(),
            description: Some("Forecasts".to_owned()),
            started: None,
            endpoints: texts.iter().map(entry).collect(),
        }
    }

    /// The encoded response, which must fit, and the number of endpoints that were left out.
    fn encoded(response: DiscoveryResponse<'_>, limit: usize) -> (Value, Option<usize>) {
        let bytes = response.encode(limit);
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
        let entry = |num_requests| EndpointEntry {
            name: "forecast",
            subject: "a2a.action.weather.forecast",
            metadata: None,
            queue_group: "a2a",
            stats: Some(StatsSnapshot {
                num_requests,
                last_error: "502:".to_owned() + &"x".repeat(200),
                ..StatsSnapshot::default()
            }),
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
            let size = info(&texts).encode(limit).len();
            let mut least = info(&[]);
            least.description = Some(String::new());
            least.set_left_out(texts.len());
            prop_assert!(size <= limit.max(serde_json::to_vec(&least).unwrap().len()));
        }
    }
}
