//! Entry points for fuzzing: each decoder of input from outside, together with what the bridge does with the result.
//!
//! They are part of the library, so that a change that breaks one does not compile. `fuzz/` calls them with a limit on
//! time and allocated memory per byte of input.

use async_nats::{HeaderMap, Message};
use bytes::Bytes;

use crate::a2a::card::{Card, Interface};
use crate::a2a::dialect::{Dialect, RpcError};
use crate::a2a::model::{Event, SendResult};
use crate::a2a::sse::SseParser;
use crate::action::assemble::{self, ArtifactRules};
use crate::action::params::Template;
use crate::action::request::{FollowUpAnswer, Invocation, RequestBody, task_id};
use crate::action::task_builder::TaskBuilder;
use crate::bus::agent_protocol::envelope::PromptEnvelope;
use crate::bus::headers::{self, Headers};
use crate::bus::identity::{Entrance, Identity};
use crate::config;
use crate::events::artifact_data::ArtifactEncoder;
use crate::memory::MemoryBudget;

/// The default of `max_response_size`.
const MAX_RESPONSE: usize = 16 << 20;
const DIALECTS: [Dialect; 4] = [Dialect::V01, Dialect::V03, Dialect::V03Rest, Dialect::V1Rest];

/// Decodes the bytes; whether they are valid. Panics if a rule is broken.
pub type Target = fn(&[u8]) -> bool;

/// All entry points by name.
pub const TARGETS: [(&str, Target); 9] = [
    ("card", card),
    ("result", result),
    ("event", event),
    ("frames", frames),
    ("sse", sse),
    ("request", request),
    ("headers", message_headers),
    ("envelope", envelope),
    ("settings", settings),
];

/// An agent card: parsed, written in the form of v1.0, and its skills prepared for calls.
fn card(data: &[u8]) -> bool {
    let Ok(card) = Card::parse(data) else {
        return false;
    };
    let interface = Interface {
        url: url::Url::parse("http://127.0.0.1:1/").expect("it is a URL"),
        dialect: Dialect::V1,
        tenant: None,
        reason: String::new(),
        is_confirmed: true,
        failure: None,
    };
    let written = card.to_v1(&interface, &card.skills);
    let again = Card::from_value(written.clone()).expect("a card of the bridge is valid");
    assert_eq!(again.to_v1(&interface, &again.skills), written, "the written card has another content");
    for skill in &card.skills {
        Template::parse(&skill.description).schema();
    }
    card.security.to_string();
    true
}

/// The response to a request, in every dialect, assembled to the content of a reply.
fn result(data: &[u8]) -> bool {
    let mut is_valid = false;
    for dialect in DIALECTS {
        let sent = dialect.read_send_result(data);
        let task = dialect.read_task(data).is_ok();
        assert!(sent.is_ok() || !task, "read_task accepts bytes that read_send_result rejects");
        is_valid |= sent.is_ok();
        if let Ok(sent) = sent {
            let event = match sent {
                SendResult::Task(task) => Event::Task(task),
                SendResult::Message(message) => Event::Message(message),
            };
            assemble([event]);
        }
    }
    RpcError::in_body(data);
    is_valid
}

/// The data of one event, in every dialect.
fn event(data: &[u8]) -> bool {
    let mut is_valid = false;
    for dialect in DIALECTS {
        if let Ok(event) = dialect.read_event(data) {
            is_valid = true;
            assemble([event]);
        }
    }
    is_valid
}

/// The frames of an artifact, in messages whose size the length of the input determines.
fn frames(data: &[u8]) -> bool {
    let Ok(Event::Artifact(update)) = Dialect::V1.read_event(data) else {
        return false;
    };
    let room = 1024 + data.len() % 8192;
    let encoder = ArtifactEncoder::new(&update, room);
    let whole = Some(encoder.whole()).filter(|whole| whole.len() <= room);
    let pieces = encoder.groups().into_iter().map(|group| encoder.encode(group));
    for body in whole.into_iter().chain(pieces) {
        assert!(body.len() <= room, "a frame of {} bytes; the limit is {room}", body.len());
        serde_json::from_slice::<serde::de::IgnoredAny>(&body).expect("a frame is JSON");
    }
    true
}

/// A whole stream, in chunks whose size the first byte determines.
fn sse(data: &[u8]) -> bool {
    let Some((first, data)) = data.split_first() else {
        return false;
    };
    let mut parser = SseParser::new(MAX_RESPONSE);
    let mut events = Vec::new();
    let mut read = |data: Bytes| events.extend(Dialect::V1.read_event(&data));
    for chunk in data.chunks(usize::from(*first) * 16 + 1) {
        parser.feed(chunk);
        while let Ok(Some(data)) = parser.next_event() {
            read(data);
        }
    }
    while let Ok(Some(data)) = parser.finish() {
        read(data);
    }
    let is_valid = !events.is_empty();
    assemble(events);
    is_valid
}

/// Builds a task from these events, and the content of the reply.
fn assemble(events: impl IntoIterator<Item = Event>) {
    let patterns = |text: &str| vec![text.to_owned()];
    let rules = ArtifactRules { response: patterns("*"), notice: patterns("tool_*") };
    let memory = MemoryBudget::new(u64::MAX).account("fuzz");
    let mut builder = TaskBuilder::new(&rules, MAX_RESPONSE, true, &memory);
    for event in events {
        // An error is a task that is too large, which ends a call.
        if builder.apply(event).is_err() {
            return;
        }
    }
    if let Some(task) = builder.task() {
        // The error names a file that cannot be read.
        let _ = assemble::task_content(task, "", &rules);
    }
}

/// The body of a request, as a call, an answer and a lookup.
fn request(data: &[u8]) -> bool {
    let template = Template::parse("Write a report about {topic} for {audience}");
    let body = RequestBody::new(Bytes::copy_from_slice(data), None);
    let call = Invocation::parse(&body, &template).is_ok();
    Invocation::parse(&RequestBody::new(Bytes::copy_from_slice(data), Some("application/json")), &template)
        .is_ok()
        | FollowUpAnswer::parse(&body).is_ok()
        | task_id(&body).is_ok()
        | call
}

/// The headers of a request: one per line.
fn message_headers(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let mut headers = HeaderMap::new();
    for (name, value) in text.lines().filter_map(|line| line.split_once(':')) {
        // Invalid ones do not get through the client library either.
        let name = name.parse::<async_nats::HeaderName>();
        if let (Ok(name), Ok(value)) = (name, value.trim().parse::<async_nats::HeaderValue>()) {
            headers.append(name, value);
        }
    }
    let message = Message {
        subject: "a2a.action.a.b".into(),
        reply: Some("_R_.fuzz".into()),
        payload: Bytes::new(),
        headers: Some(headers),
        status: None,
        description: None,
        length: data.len(),
    };
    headers::wants_stream(&message);
    let identity = Identity::new(&config::IdentityConfig::default());
    let caller = [Entrance::Direct, Entrance::Gateway].map(|entrance| identity.caller(&message, entrance));
    let [Ok(caller), _] = caller else { return false };
    Headers::read(&message, caller, headers::trace(&message)).is_ok()
}

/// The body of a prompt of the agent protocol.
fn envelope(data: &[u8]) -> bool {
    PromptEnvelope::parse(data, 1 << 20).is_ok()
}

/// A configuration file.
fn settings(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else {
        return false;
    };
    match config::parse(text, "fuzz.yaml", &|_| None) {
        Ok(_) => true,
        Err(error) => {
            assert!(!error.to_string().is_empty(), "an error without a text");
            false
        }
    }
}
