//! The agent over real HTTP, in this process.

mod http;
mod streams;
mod tasks;
mod v03;

use std::net::Ipv4Addr;

use clap::Parser as _;
use futures_util::{Stream, StreamExt as _, stream};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::{DemoAgentArgs, server};

#[derive(clap::Parser)]
struct Line {
    #[command(flatten)]
    args: DemoAgentArgs,
}

/// A running agent and a client of it.
pub(crate) struct Demo {
    pub(crate) url: String,
    http: reqwest::Client,
    stop: CancellationToken,
    serving: JoinHandle<std::io::Result<()>>,
}

impl Drop for Demo {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// An agent with these flags, as on the command line.
pub(crate) async fn demo(flags: &[&str]) -> Demo {
    let line = Line::parse_from(["demo-agent", "--port", "0"].iter().chain(flags));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let serving = TaskTracker::new().spawn(server::serve(listener, line.args, stop.clone()));
    let no_redirects = reqwest::redirect::Policy::none();
    let http = reqwest::Client::builder().no_proxy().redirect(no_redirects).build().unwrap();
    Demo { url, http, stop, serving }
}

impl Demo {
    fn post(&self, body: impl Into<String>) -> reqwest::RequestBuilder {
        self.http.post(&self.url).header("content-type", "application/json").body(body.into())
    }

    async fn call(&self, method: &str, params: Value) -> Value {
        let response = self.post(request(method, params)).send().await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "application/json");
        serde_json::from_str(&response.text().await.unwrap()).unwrap()
    }

    async fn stream(&self, method: &str, params: Value) -> impl Stream<Item = Value> + Unpin {
        let response = self.post(request(method, params)).send().await.unwrap();
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
        Box::pin(stream::unfold((response, String::new()), |(mut response, mut text)| async move {
            loop {
                if let Some((event, rest)) = text.split_once("\n\n") {
                    let event = event.strip_prefix("data: ").unwrap();
                    let event: Value = serde_json::from_str(event).unwrap();
                    assert_eq!(event["id"], "r-1");
                    return Some((event["result"].clone(), (response, rest.to_owned())));
                }
                let chunk = response.chunk().await.unwrap()?;
                text.push_str(std::str::from_utf8(&chunk).unwrap());
            }
        }))
    }

    /// Sends a text message over 1.0, waits, and gives the task.
    async fn send(&self, text: &str) -> Value {
        self.call("SendMessage", message(text)).await["result"]["task"].clone()
    }

    async fn get(&self, path: &str) -> reqwest::Response {
        self.http.get(format!("{}{path}", self.url)).send().await.unwrap()
    }

    async fn card(&self) -> Value {
        let card = self.get(".well-known/agent-card.json").await.text().await.unwrap();
        serde_json::from_str(&card).unwrap()
    }
}

fn request(method: &str, params: Value) -> String {
    let fields =
        [("jsonrpc", "2.0".into()), ("id", "r-1".into()), ("method", method.into()), ("params", params)];
    json!(std::collections::BTreeMap::from(fields)).to_string()
}

/// The parameters of a send over 1.0.
fn message(text: &str) -> Value {
    json!({"message": {"messageId": "m-1", "role": "ROLE_USER", "parts": [{"text": text}]}})
}

/// `params` with more fields in the message.
fn with(mut params: Value, fields: &Value) -> Value {
    let message = params["message"].as_object_mut().unwrap();
    message.extend(fields.as_object().unwrap().clone());
    params
}

/// An answer to what `task` asks.
fn reply(task: &Value, text: &str) -> Value {
    with(message(text), &json!({"taskId": task["id"], "contextId": task["contextId"]}))
}

async fn all<S: Stream<Item = Value>>(events: S) -> Vec<Value> {
    events.collect().await
}

/// The text of an artifact, its chunks put together.
fn text_of(artifact: &Value) -> String {
    artifact["parts"].as_array().unwrap().iter().filter_map(|part| part["text"].as_str()).collect()
}

fn state(task: &Value) -> &str {
    task["status"]["state"].as_str().unwrap()
}
