//! A service as an agent named `weather` would have it.

use std::collections::BTreeMap;
use std::sync::Arc;

use a2a_bridge::internal::service::{
    self, EndpointInfo, Handler, Service, ServiceContext, ServiceInfo, ServiceRequest,
};
use a2a_bridge::internal::{ReplyGuard, Token};
use async_nats::client::RequestErrorKind;
use async_nats::{Client, ConnectOptions};
use futures_util::future::join_all;
use serde_json::Value;
use tokio_util::task::TaskTracker;

use super::nats::NatsServer;

/// A service named `weather` with the permanent endpoint `card`, and someone who calls it.
pub struct Weather {
    pub server: NatsServer,
    pub caller: Client,
    pub context: ServiceContext,
    pub service: Arc<Service>,
}

impl Weather {
    pub async fn start() -> Self {
        Self::start_on(NatsServer::start().await, ConnectOptions::new()).await
    }

    pub async fn start_on(server: NatsServer, options: ConnectOptions) -> Self {
        let caller = server.connect().await;
        let client = server.connect_with(options).await;
        let guard = Arc::new(ReplyGuard::new(["_INBOX.>"], "a2a").unwrap());
        let context = ServiceContext::new(client, guard, TaskTracker::new()).await;
        let service = start_service(&context, "weather", "Forecasts").await;
        Self { server, caller, context, service }
    }

    /// Further services on the same connection, with long descriptions of this many bytes.
    pub async fn start_others(&self, names: &[String], description: usize) -> Vec<Arc<Service>> {
        let description = "d".repeat(description);
        join_all(names.iter().map(|name| start_service(&self.context, name, &description))).await
    }

    pub async fn publish(&self, endpoints: &[(&str, &str)]) {
        let endpoints = endpoints.iter().map(|(subject, text)| {
            let mut endpoint = endpoint(subject, subject.rsplit('.').next().unwrap());
            endpoint.metadata.insert("description".into(), (*text).into());
            (endpoint, answer(&self.context, text))
        });
        self.service.publish(endpoints.collect()).await.unwrap();
    }

    pub async fn ask(&self, subject: &str) -> Result<String, RequestErrorKind> {
        match self.caller.request(subject.to_owned(), "now".into()).await {
            Ok(message) => Ok(String::from_utf8(message.payload.to_vec()).unwrap()),
            Err(error) => Err(error.kind()),
        }
    }

    pub async fn question(&self, verb: &str) -> Value {
        serde_json::from_str(&self.ask(&format!("$SRV.{verb}.weather")).await.unwrap()).unwrap()
    }

    pub async fn endpoint_names(&self) -> Vec<String> {
        let info = self.question("INFO").await;
        let endpoints = info["endpoints"].as_array().unwrap();
        endpoints.iter().map(|endpoint| endpoint["name"].as_str().unwrap().to_owned()).collect()
    }

    /// `num_requests` and `num_errors`, and the last error.
    pub async fn counts(&self, endpoint: &str) -> (u64, u64, String) {
        let stats = self.question("STATS").await;
        let found =
            stats["endpoints"].as_array().unwrap().iter().find(|one| one["name"] == endpoint).unwrap();
        let count = |key: &str| found[key].as_u64().unwrap();
        (count("num_requests"), count("num_errors"), found["last_error"].as_str().unwrap().to_owned())
    }
}

/// A service with the permanent endpoint `card`.
pub async fn start_service(context: &ServiceContext, name: &str, description: &str) -> Arc<Service> {
    let info = ServiceInfo {
        version: "1.2.3".into(),
        description: description.into(),
        metadata: BTreeMap::from([("a2a.state".into(), "starting".into())]),
    };
    let card = (endpoint(&format!("a2a.card.{name}"), "card"), answer(context, "a card"));
    Service::start(context, Token::new(name), &service::new_id(), "a2a", info, vec![card]).await.unwrap()
}

pub fn endpoint(subject: &str, name: &str) -> EndpointInfo {
    EndpointInfo {
        name: name.into(),
        subject: subject.into(),
        gateway_subject: None,
        metadata: BTreeMap::new(),
    }
}

pub fn answer(context: &ServiceContext, text: &str) -> Handler {
    let (context, text) = (context.clone(), text.to_owned());
    Arc::new(move |ServiceRequest { message, accounting, .. }| {
        let (client, text) = (context.client.clone(), text.clone());
        context.tasks.spawn(async move {
            client.publish(message.reply.unwrap(), text.into()).await.unwrap();
            accounting.succeed();
        });
    })
}
