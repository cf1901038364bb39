//! Requests about sessions.

use async_nats::Client;
use serde_json::{Value, json};

use super::caller::{Call, Reply};

/// The sessions of one caller.
#[derive(Clone, Copy)]
pub struct Sessions<'a> {
    pub client: &'a Client,
    pub prefix: &'a str,
    /// The principal of a gateway; `None` for a caller within the account.
    pub caller: Option<&'a str>,
}

impl Sessions<'_> {
    pub fn call(&self, subject: &str, body: Value) -> Call {
        match self.caller {
            Some(caller) => {
                let subject = format!("{}.gw.{subject}", self.prefix);
                Call::new(self.client, subject, body).header("A2A-Caller", caller)
            }
            None => Call::new(self.client, format!("{}.{subject}", self.prefix), body),
        }
    }

    pub fn request(&self, verb: &str, body: Value) -> Call {
        self.call(&format!("sessions.{verb}"), body)
    }

    /// A request that succeeds.
    #[track_caller]
    pub fn ok(&self, verb: &str, body: Value) -> impl Future<Output = Value> {
        let (call, verb) = (self.request(verb, body), verb.to_owned());
        async move {
            let reply: Reply = call.await;
            assert!(reply.body.is_object() && reply.body.get("error_info").is_none(), "{verb}: {reply:?}");
            reply.body
        }
    }

    pub async fn get(&self, id: &str) -> Value {
        self.ok("get", json!({ "id": id })).await
    }

    /// The messages as `role: content`.
    pub async fn messages(&self, id: &str) -> Vec<String> {
        let session = self.get(id).await;
        let messages = session["messages"].as_array().unwrap();
        for (index, message) in messages.iter().enumerate() {
            assert_eq!(message["index"], index, "{session}");
        }
        assert_eq!(session["message_count"], messages.len(), "{session}");
        messages
            .iter()
            .map(|message| format!("{}: {}", text(&message["role"]), text(&message["content"])))
            .collect()
    }

    /// All events, in pages.
    pub async fn events(&self, id: &str, limit: usize) -> Vec<Value> {
        let mut events: Vec<Value> = Vec::new();
        let mut after = 0;
        loop {
            let page = self.ok("events", json!({ "id": id, "after": after, "limit": limit })).await;
            events.extend(page["events"].as_array().unwrap().iter().cloned());
            match page["next"].as_u64() {
                Some(next) => after = next,
                None => break,
            }
        }
        let indexes: Vec<_> = events.iter().map(|event| event["index"].as_u64().unwrap()).collect();
        assert!(indexes.is_sorted_by(|a, b| a < b), "{indexes:?}");
        events
    }

    pub async fn runs(&self, id: &str) -> Vec<Value> {
        self.ok("runs", json!({ "id": id })).await["runs"].as_array().unwrap().clone()
    }

    /// Asks an agent in a session, and returns the text of its answer.
    pub async fn say(&self, action: &str, session: &str, prompt: &str) -> String {
        let body = json!({ "prompt": prompt, "meta": { "session_id": session } });
        self.call(&format!("action.{action}"), body).await.expect("COMPLETED").message().to_owned()
    }

    /// The ids in the list of sessions.
    pub async fn ids(&self) -> Vec<String> {
        let list = self.ok("list", json!({})).await;
        list["sessions"].as_array().unwrap().iter().map(|session| text(&session["id"]).to_owned()).collect()
    }
}

pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is not a string"))
}
