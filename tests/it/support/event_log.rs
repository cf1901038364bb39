//! The event log as it is stored, and the frames of attached callers.

use std::collections::BTreeSet;

use async_nats::Client;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::caller::{Call, Inbox, Reply};

/// A message of the stream.
#[derive(Debug, Clone)]
pub struct LogMessage {
    pub subject: String,
    pub headers: String,
    pub batch: Value,
    /// The batch as text.
    pub text: String,
}

impl LogMessage {
    pub fn events(&self) -> impl Iterator<Item = &Value> {
        self.batch["events"].as_array().into_iter().flatten()
    }

    pub fn is_transient(&self) -> bool {
        self.headers.contains("Nats-TTL: 3600s")
    }
}

/// The event log of a bridge with this subject prefix.
pub struct EventLog<'a> {
    pub client: &'a Client,
    pub prefix: &'a str,
}

impl EventLog<'_> {
    pub async fn api(&self, operation: &str, body: Value) -> Value {
        let subject = format!("$JS.API.{operation}.{}_events", self.prefix);
        let response = self.client.request(subject, body.to_string().into()).await.unwrap();
        serde_json::from_slice(&response.payload).unwrap()
    }

    /// All messages that are stored.
    pub async fn messages(&self) -> Vec<LogMessage> {
        let info = self.api("STREAM.INFO", json!({})).await;
        let last = info["state"]["last_seq"].as_u64().unwrap();
        let mut messages = Vec::new();
        for sequence in 1..=last {
            let found = self.api("STREAM.MSG.GET", json!({ "seq": sequence })).await;
            let Some(message) = found.get("message") else { continue };
            let decode = |key: &str| {
                let bytes = STANDARD.decode(message[key].as_str().unwrap_or_default()).unwrap();
                String::from_utf8(bytes).unwrap()
            };
            let text = decode("data");
            messages.push(LogMessage {
                subject: message["subject"].as_str().unwrap().to_owned(),
                headers: decode("hdrs"),
                batch: serde_json::from_str(&text).unwrap(),
                text,
            });
        }
        messages
    }

    /// The types of all events, in order, with repetitions of one type as one.
    pub async fn types(&self) -> Vec<String> {
        let messages = self.messages().await;
        let types = messages.iter().flat_map(LogMessage::events);
        let mut types: Vec<_> = types.map(|event| event["type"].as_str().unwrap().to_owned()).collect();
        types.dedup();
        types
    }

    /// Asserts that the numbers of the events of a run do not repeat.
    pub async fn check_numbers(&self) {
        let mut seen = BTreeSet::new();
        for message in self.messages().await {
            for event in message.events() {
                let number = (message.batch["run"].to_string(), event["n"].as_u64().unwrap());
                assert!(seen.insert(number), "{event} repeats a number");
            }
        }
    }
}

/// The frames of a stream as they are: number and body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawFrames(pub Vec<(u64, String)>);

impl RawFrames {
    /// All frames up to the end of the stream, without keep-alives.
    pub async fn collect(inbox: &mut Inbox) -> Self {
        Self::collect_with_last(inbox).await.0
    }

    /// The frames, and the last of them with its headers.
    pub async fn collect_with_last(inbox: &mut Inbox) -> (Self, Option<Reply>) {
        let (mut frames, mut last) = (Vec::new(), None);
        loop {
            let message = inbox.reply().await;
            assert!(!message.is_no_responders(), "nobody responds");
            if message.text.is_empty() {
                return (Self(frames), last);
            }
            if let Some(number) = message.header("A2A-Seq") {
                frames.push((number.parse().unwrap(), message.text.clone()));
                last = Some(message);
            }
        }
    }

    pub fn values(&self) -> impl Iterator<Item = Value> {
        self.0.iter().map(|(_, body)| serde_json::from_str(body).unwrap())
    }

    pub fn result(&self) -> Value {
        let last = self.values().last().unwrap();
        assert_eq!(last["type"], "result", "{last}");
        last["data"].clone()
    }

    /// The frames from a number on.
    pub fn from(&self, number: u64) -> Self {
        Self(self.0.iter().filter(|(own, _)| *own >= number).cloned().collect())
    }

    /// The text of all `response` frames.
    pub fn response(&self) -> String {
        let frames = self.values().filter(|frame| frame["type"] == "response");
        frames.map(|frame| frame["data"].as_str().unwrap().to_owned()).collect()
    }

    /// The text of an artifact, put together as a reader does.
    pub fn artifact_text(&self) -> String {
        let mut text = String::new();
        for frame in self.values().filter(|frame| frame["type"] == "artifact") {
            if frame["data"]["append"] == false {
                text.clear();
            }
            let parts = frame["data"]["parts"].as_array().unwrap();
            parts.iter().filter_map(|part| part["text"].as_str()).for_each(|part| text.push_str(part));
        }
        text
    }

    /// Asserts that the numbers have no gap.
    pub fn check_contiguous(&self) {
        for pair in self.0.windows(2) {
            assert_eq!(pair[0].0 + 1, pair[1].0, "a gap after {:?}", pair[0]);
        }
    }
}

/// A request to attach to a call.
pub fn attach(client: &Client, prefix: &str, agent: &str, body: Value) -> Call {
    Call::new(client, format!("{prefix}.attach.{agent}"), body)
}
