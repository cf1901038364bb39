//! A caller on NATS, with an inbox of its own for every request.

use std::future::{Future, IntoFuture};
use std::ops::Index;
use std::pin::Pin;
use std::time::Duration;

use async_nats::{Client, HeaderMap, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::eventually::within_deadline;

/// How long a test watches an inbox for a second reply.
const SECOND_REPLY: Duration = Duration::from_millis(200);

pub trait IntoBody {
    fn into_body(self) -> Bytes;
}

impl IntoBody for Value {
    fn into_body(self) -> Bytes {
        self.to_string().into()
    }
}

impl IntoBody for &'static str {
    fn into_body(self) -> Bytes {
        self.into()
    }
}

impl IntoBody for String {
    fn into_body(self) -> Bytes {
        self.into()
    }
}

impl IntoBody for Bytes {
    fn into_body(self) -> Bytes {
        self
    }
}

/// A request that is not sent yet: await it for its reply.
pub struct Call {
    client: Client,
    subject: String,
    headers: HeaderMap,
    body: Bytes,
}

impl Call {
    pub fn new(client: &Client, subject: String, body: impl IntoBody) -> Self {
        Self { client: client.clone(), subject, headers: HeaderMap::new(), body: body.into_body() }
    }

    /// Adds a header; one that is already set gets a second value.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.append(name, value);
        self
    }

    /// Sets the reply mode.
    pub fn mode(self, mode: &str) -> Self {
        self.header("A2A-Reply", mode)
    }

    /// Sends the request; replies arrive in the inbox.
    pub async fn begin(self) -> Inbox {
        let inbox = self.client.new_inbox();
        let subscriber = self.client.subscribe(inbox.clone()).await.unwrap();
        self.client
            .publish_with_reply_and_headers(self.subject, inbox, self.headers, self.body)
            .await
            .unwrap();
        self.client.flush().await.unwrap();
        Inbox { subscriber }
    }

    /// The reply; panics if there is a second one.
    pub async fn only_reply(self) -> Reply {
        self.begin().await.only_reply().await
    }
}

impl IntoFuture for Call {
    type Output = Reply;
    type IntoFuture = Pin<Box<dyn Future<Output = Reply> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async { self.begin().await.reply().await })
    }
}

/// The subscription on which replies arrive.
pub struct Inbox {
    subscriber: Subscriber,
}

impl Inbox {
    pub async fn reply(&mut self) -> Reply {
        Reply::of(within_deadline(self.subscriber.next()).await.expect("the connection is up"))
    }

    /// The next reply if it comes within `limit`.
    pub async fn reply_within(&mut self, limit: Duration) -> Option<Reply> {
        timeout(limit, self.subscriber.next()).await.ok().flatten().map(Reply::of)
    }

    /// The body of the next reply, which may be any bytes, if it comes within `limit`.
    pub async fn bytes_within(&mut self, limit: Duration) -> Option<Bytes> {
        timeout(limit, self.subscriber.next()).await.ok().flatten().map(|message| message.payload)
    }

    /// The reply; panics if there is a second one.
    pub async fn only_reply(mut self) -> Reply {
        let reply = self.reply().await;
        if let Some(second) = self.reply_within(SECOND_REPLY).await {
            panic!("a second reply: {second:?} after {reply:?}");
        }
        reply
    }
}

#[derive(Debug, Clone)]
pub struct Reply {
    pub nats_status: Option<u16>,
    pub headers: HeaderMap,
    pub text: String,
    pub body: Value,
}

impl Reply {
    fn of(message: async_nats::Message) -> Self {
        let text = String::from_utf8(message.payload.to_vec()).expect("a reply is UTF-8");
        Self {
            nats_status: message.status.map(|status| status.as_u16()),
            headers: message.headers.unwrap_or_default(),
            body: serde_json::from_str(&text).unwrap_or_default(),
            text,
        }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.as_str())
    }

    pub fn is_no_responders(&self) -> bool {
        self.nats_status == Some(503) && self.text.is_empty()
    }

    pub fn is(&self, status: &str) -> bool {
        self["status"] == status
    }

    pub fn message(&self) -> &str {
        self["message"].as_str().unwrap_or_default()
    }

    pub fn task_id(&self) -> String {
        let id = self["task"]["id"].as_str();
        id.unwrap_or_else(|| panic!("no task id in {self:?}")).to_owned()
    }

    pub fn follow_up_id(&self) -> String {
        let id = self["data"]["follow_up_id"].as_str();
        id.unwrap_or_else(|| panic!("no follow-up id in {self:?}")).to_owned()
    }

    /// The code of an error or of a failed task.
    pub fn code(&self) -> &str {
        self["error_info"]["code"].as_str().unwrap_or_default()
    }

    /// Asserts that this is a valid reply with this status.
    #[track_caller]
    pub fn expect(self, status: &str) -> Self {
        assert!(self.is(status), "not {status}: {self:?}");
        let success = matches!(status, "COMPLETED" | "WORKING");
        assert_eq!(self["success"], success, "{self:?}");
        assert_eq!(self.header("Nats-Service-Error-Code"), None, "{self:?}");
        for (key, is_right) in [
            ("files", self["files"].is_array()),
            ("data", self["data"].is_object()),
            ("artifacts", self["artifacts"].is_array()),
        ] {
            assert!(is_right, "no {key}: {self:?}");
        }
        self
    }

    /// Asserts that this is a valid error with this code and its number.
    #[track_caller]
    pub fn expect_error(self, code: &str) -> Self {
        let number = match code {
            "invalid_request" => "400",
            "forbidden" => "403",
            "not_found" => "404",
            "follow_up_used" | "not_cancelable" => "409",
            "follow_up_expired" => "410",
            "too_large" => "413",
            "busy" => "429",
            "agent_error" => "502",
            "agent_unavailable" | "task_lost" | "state_unavailable" => "503",
            "timeout" | "outcome_unknown" => "504",
            other => panic!("{other} is not an error code"),
        };
        assert_eq!(self.code(), code, "{self:?}");
        assert_eq!(self["status"], "ERROR", "{self:?}");
        assert_eq!(self["success"], false, "{self:?}");
        assert!(!self.message().is_empty(), "{self:?}");
        for key in ["retryable", "a2a_code", "a2a_data"] {
            assert!(self["error_info"].get(key).is_some(), "no {key}: {self:?}");
        }
        assert!(self.body.get("task").is_some(), "no task: {self:?}");
        for (key, empty) in [("files", json!([])), ("data", json!({})), ("artifacts", json!([]))] {
            assert_eq!(self[key], empty, "{key} of an error: {self:?}");
        }
        assert_eq!(self.header("Nats-Service-Error-Code"), Some(number), "{self:?}");
        let line = self.header("Nats-Service-Error").unwrap_or_default();
        assert!(!line.is_empty() && !line.contains(['\r', '\n']), "{self:?}");
        self
    }

    /// Asserts that the message contains this text.
    #[track_caller]
    pub fn saying(self, what: &str) -> Self {
        assert!(self.message().contains(what), "not {what:?}: {self:?}");
        self
    }
}

impl Index<&str> for Reply {
    type Output = Value;

    fn index(&self, key: &str) -> &Value {
        &self.body[key]
    }
}
