//! What a service says about itself: PING, INFO and STATS of the NATS service protocol (ADR-32).
//!
//! Everything in an INFO response comes from a card or the configuration and has to fit into one
//! message, so [`fit`] shortens what people read before it leaves out what programs need. STATS of
//! very many endpoints may be too long as well; [`fit_stats`] leaves those out that were asked least.
//! How many are left out is said.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::Serialize;

use super::ServiceInfo;
use super::endpoint::Listed;
use super::inner::Inner;
use crate::bus::subject::DiscoveryVerb;
use crate::json::first_that_fit;

/// In the metadata of INFO and STATS: how many endpoints are not in it.
const LEFT_OUT: &str = "a2a.endpoints_left_out";

#[derive(Serialize)]
struct Identity<'a> {
    r#type: &'static str,
    name: &'a str,
    id: &'a str,
    version: &'a str,
    metadata: Cow<'a, BTreeMap<String, String>>,
}

#[derive(Serialize)]
struct InfoResponse<'a> {
    #[serde(flatten)]
    identity: Identity<'a>,
    description: String,
    endpoints: Vec<InfoEndpoint<'a>>,
}

#[derive(Serialize)]
struct InfoEndpoint<'a> {
    name: &'a str,
    subject: &'a str,
    queue_group: &'static str,
    metadata: BTreeMap<&'a str, String>,
}

#[derive(Serialize)]
struct StatsResponse<'a> {
    #[serde(flatten)]
    identity: Identity<'a>,
    started: &'a str,
    endpoints: Vec<StatsEndpoint<'a>>,
}

#[derive(Serialize)]
struct StatsEndpoint<'a> {
    name: &'a str,
    subject: &'a str,
    queue_group: &'static str,
    num_requests: u64,
    num_errors: u64,
    last_error: String,
    processing_time: u64,
    average_processing_time: u64,
}

/// The response to `verb`, at most `max_payload` bytes where that can be done.
pub(super) fn response(
    verb: DiscoveryVerb,
    service: &Inner,
    max_payload: usize,
) -> serde_json::Result<Vec<u8>> {
    let (description, listed) = (service.description(), service.listed());
    let identity = |r#type| Identity {
        r#type,
        name: service.name.as_str(),
        id: &service.id,
        version: &description.version,
        metadata: Cow::Borrowed(&description.metadata),
    };
    // A quarter is left for what other people's tools add on the way.
    let limit = max_payload / 4 * 3;
    match verb {
        DiscoveryVerb::Ping => serde_json::to_vec(&identity("io.nats.micro.v1.ping_response")),
        DiscoveryVerb::Stats => {
            let mut stats = StatsResponse {
                identity: identity("io.nats.micro.v1.stats_response"),
                started: &service.started,
                endpoints: listed.iter().map(|listed| endpoint_stats(listed, service.queue_group)).collect(),
            };
            let bytes = serde_json::to_vec(&stats)?;
            if bytes.len() <= limit {
                return Ok(bytes);
            }
            fit_stats(&mut stats, bytes.len(), limit)?;
            serde_json::to_vec(&stats)
        }
        DiscoveryVerb::Info => {
            let mut info =
                info(identity("io.nats.micro.v1.info_response"), &description, &listed, service.queue_group);
            let bytes = serde_json::to_vec(&info)?;
            if bytes.len() <= limit {
                return Ok(bytes);
            }
            fit(&mut info, bytes.len(), limit)?;
            serde_json::to_vec(&info)
        }
    }
}

fn info<'a>(
    identity: Identity<'a>,
    description: &ServiceInfo,
    listed: &'a [Listed],
    queue_group: &'static str,
) -> InfoResponse<'a> {
    let endpoints = listed
        .iter()
        .map(|Listed { endpoint, .. }| InfoEndpoint {
            name: &endpoint.name,
            subject: &endpoint.subject,
            queue_group,
            metadata: endpoint.metadata.iter().map(|(key, value)| (key.as_str(), value.clone())).collect(),
        })
        .collect();
    InfoResponse { identity, description: description.description.clone(), endpoints }
}

fn endpoint_stats<'a>(listed: &'a Listed, queue_group: &'static str) -> StatsEndpoint<'a> {
    let counts = listed.stats.counts();
    StatsEndpoint {
        name: &listed.endpoint.name,
        subject: &listed.endpoint.subject,
        queue_group,
        num_requests: counts.requests,
        num_errors: counts.errors,
        last_error: counts.last_error,
        processing_time: counts.processing_time,
        average_processing_time: counts.processing_time.checked_div(counts.requests).unwrap_or(0),
    }
}

/// Brings an INFO response of `size` bytes down to `limit`: the longest texts are cut first, all to
/// one length. When not even empty texts are enough, the endpoints lose their metadata altogether, and
/// then the last of them are left out.
fn fit(info: &mut InfoResponse<'_>, size: usize, limit: usize) -> serde_json::Result<()> {
    let texts =
        || info.endpoints.iter().flat_map(|endpoint| endpoint.metadata.values()).chain([&info.description]);
    let lengths: Vec<usize> = texts().map(|text| escaped_len(text)).collect();
    let fixed = size.saturating_sub(lengths.iter().sum());
    let Some(budget) = limit.checked_sub(fixed) else {
        info.description.clear();
        info.endpoints.iter_mut().for_each(|endpoint| endpoint.metadata.clear());
        if serde_json::to_vec(info)?.len() > limit {
            let all = std::mem::take(&mut info.endpoints);
            let count = all.len();
            info.identity.say_left_out(count);
            info.endpoints = first_that_fit(all, serde_json::to_vec(info)?.len(), limit)?;
            info.identity.say_left_out(count - info.endpoints.len());
        }
        return Ok(());
    };
    let length = common_length(&lengths, budget);
    for text in info.endpoints.iter_mut().flat_map(|endpoint| endpoint.metadata.values_mut()) {
        shorten(text, length);
    }
    shorten(&mut info.description, length);
    Ok(())
}

/// Brings a STATS response of `size` bytes down to `limit`: the texts of errors are cut first, then
/// the endpoints that were asked least are left out, and their number is said.
fn fit_stats(stats: &mut StatsResponse<'_>, size: usize, limit: usize) -> serde_json::Result<()> {
    let lengths: Vec<usize> =
        stats.endpoints.iter().map(|endpoint| escaped_len(&endpoint.last_error)).collect();
    let fixed = size.saturating_sub(lengths.iter().sum());
    let length = common_length(&lengths, limit.saturating_sub(fixed));
    stats.endpoints.iter_mut().for_each(|endpoint| shorten(&mut endpoint.last_error, length));
    if fixed <= limit {
        return Ok(());
    }
    let mut all = std::mem::take(&mut stats.endpoints);
    all.sort_by_key(|endpoint| Reverse(endpoint.num_requests));
    let count = all.len();
    stats.identity.say_left_out(count);
    stats.endpoints = first_that_fit(all, serde_json::to_vec(stats)?.len(), limit)?;
    stats.identity.say_left_out(count - stats.endpoints.len());
    Ok(())
}

impl Identity<'_> {
    fn say_left_out(&mut self, count: usize) {
        self.metadata.to_mut().insert(LEFT_OUT.to_owned(), count.to_string());
    }
}

/// The greatest length to which all can be cut so that together they are at most `budget`.
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

/// Cuts a text to at most `length` bytes of JSON. A list or a schema is left out instead: half of
/// one would only break its reader.
fn shorten(text: &mut String, length: usize) {
    const ELLIPSIS: char = '…';
    if escaped_len(text) <= length {
        return;
    }
    let Some(room) = length.checked_sub(ELLIPSIS.len_utf8()).filter(|_| !text.starts_with(['{', '['])) else {
        text.clear();
        return;
    };
    let mut used = 0;
    let end = text.char_indices().find_map(|(at, c)| {
        used += escaped_char_len(c);
        (used > room).then_some(at)
    });
    text.truncate(end.unwrap_or(text.len()));
    text.push(ELLIPSIS);
}

fn escaped_len(text: &str) -> usize {
    text.chars().map(escaped_char_len).sum()
}

/// How many bytes serde_json writes for a character of a string.
fn escaped_char_len(c: char) -> usize {
    match c {
        '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
        '\0'..='\x1f' => 6,
        other => other.len_utf8(),
    }
}

/// The version when it is a semantic version, which the service protocol asks for, else `0.0.0`.
pub fn semver_or_zero(version: &str) -> &str {
    if is_semver(version) { version } else { "0.0.0" }
}

fn is_semver(version: &str) -> bool {
    let numeric = |part: &str| {
        part.bytes().all(|b| b.is_ascii_digit())
            && !part.is_empty()
            && (part == "0" || !part.starts_with('0'))
    };
    let word = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    let (version, build) = version.split_once('+').map_or((version, None), |(v, b)| (v, Some(b)));
    let (core, pre) = version.split_once('-').map_or((version, None), |(c, p)| (c, Some(p)));
    core.split('.').count() == 3
        && core.split('.').all(numeric)
        && pre.is_none_or(|pre| {
            pre.split('.')
                .all(|part| word(part) && (numeric(part) || part.bytes().any(|b| !b.is_ascii_digit())))
        })
        && build.is_none_or(|build| build.split('.').all(word))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

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

    fn sample<'a>(metadata: &'a BTreeMap<String, String>, texts: &[String]) -> InfoResponse<'a> {
        let endpoint = |text: &String| InfoEndpoint {
            name: "forecast",
            subject: "a2a.action.weather.forecast",
            queue_group: "a2a",
            metadata: BTreeMap::from([
                ("a2a.skill", "forecast".to_owned()),
                ("description", text.clone()),
                ("params", format!("{{\"description\":{text:?}}}")),
            ]),
        };
        InfoResponse {
            identity: Identity {
                r#type: "t",
                name: "weather",
                id: "i",
                version: "0.0.0",
                metadata: Cow::Borrowed(metadata),
            },
            description: "Forecasts".to_owned(),
            endpoints: texts.iter().map(endpoint).collect(),
        }
    }

    fn size(info: &InfoResponse<'_>) -> usize {
        serde_json::to_vec(info).unwrap().len()
    }

    #[test]
    fn the_longest_texts_are_cut_first_and_a_schema_is_left_out_whole() {
        let metadata = BTreeMap::new();
        let mut info = sample(&metadata, &["x".repeat(5000), "short".to_owned()]);
        let before = size(&info);
        fit(&mut info, before, 3000).unwrap();
        assert!(size(&info) <= 3000);
        assert!(info.endpoints[0].metadata["description"].ends_with('…'));
        assert!(info.endpoints[0].metadata["description"].len() > 1000);
        assert_eq!(info.endpoints[0].metadata["params"], "");
        assert_eq!(info.endpoints[1].metadata["description"], "short");
        assert_eq!(info.endpoints[1].metadata["params"], "{\"description\":\"short\"}");
        assert_eq!(info.description, "Forecasts");
    }

    #[test]
    fn metadata_goes_altogether_when_shortening_is_not_enough_and_then_the_last_endpoints() {
        let metadata = BTreeMap::new();
        for (limit, some_left_out) in [(6000, false), (3000, true)] {
            let mut info = sample(&metadata, &vec!["text".to_owned(); 50]);
            let before = size(&info);
            fit(&mut info, before, limit).unwrap();
            assert!(size(&info) <= limit);
            assert!(info.endpoints.iter().all(|endpoint| endpoint.metadata.is_empty()));
            let left_out = info.identity.metadata.get(LEFT_OUT).map(|text| text.parse::<usize>().unwrap());
            assert_eq!(left_out.is_some(), some_left_out);
            assert_eq!(info.endpoints.len() + left_out.unwrap_or_default(), 50);
        }
    }

    #[test]
    fn stats_that_are_too_long_leave_out_the_endpoints_that_were_asked_least() {
        let metadata = BTreeMap::new();
        let endpoint = |num_requests| StatsEndpoint {
            name: "forecast",
            subject: "a2a.action.weather.forecast",
            queue_group: "a2a",
            num_requests,
            num_errors: 0,
            last_error: "502:".to_owned() + &"x".repeat(200),
            processing_time: 0,
            average_processing_time: 0,
        };
        let stats = |limit| {
            let identity = Identity {
                r#type: "t",
                name: "weather",
                id: "i",
                version: "0.0.0",
                metadata: Cow::Borrowed(&metadata),
            };
            let endpoints = (0..100).map(endpoint).collect();
            let mut stats = StatsResponse { identity, started: "now", endpoints };
            let size = serde_json::to_vec(&stats).unwrap().len();
            fit_stats(&mut stats, size, limit).unwrap();
            assert!(serde_json::to_vec(&stats).unwrap().len() <= limit);
            let left_out = stats.identity.metadata.get(LEFT_OUT).map(|text| text.parse::<u64>().unwrap());
            (stats.endpoints.iter().map(|endpoint| endpoint.num_requests).collect::<Vec<_>>(), left_out)
        };
        assert_eq!(stats(20_000), ((0..100).collect(), None));
        let (kept, left_out) = stats(10_000);
        let left_out = left_out.unwrap();
        assert!(left_out > 0 && left_out < 100, "{left_out}");
        assert_eq!(kept, (left_out..100).rev().collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn a_fitted_response_is_within_its_limit(
            texts in prop::collection::vec(any::<String>(), 1..20),
            limit in 0usize..8000,
        ) {
            let metadata = BTreeMap::new();
            let mut info = sample(&metadata, &texts);
            let before = size(&info);
            fit(&mut info, before, limit).unwrap();
            let mut least = sample(&metadata, &[]);
            least.description.clear();
            least.identity.say_left_out(texts.len());
            prop_assert!(size(&info) <= limit.max(size(&least)));
        }
    }
}
