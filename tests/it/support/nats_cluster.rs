//! A cluster of real nats-servers, for one test.

use std::time::Duration;

use async_nats::Client;
use serde_json::Value;

use super::nats::NatsServer;
use super::processes::free_port;

/// Three servers with JetStream in one cluster.
pub struct NatsCluster {
    pub servers: Vec<NatsServer>,
}

impl NatsCluster {
    pub async fn start() -> Self {
        let ports: [u16; 3] = std::array::from_fn(|_| free_port());
        let routes = ports.map(|port| format!("nats://127.0.0.1:{port}")).join(",");
        let starts = ports.iter().enumerate().map(|(number, port)| {
            let (name, cluster) = (format!("n{number}"), format!("nats://127.0.0.1:{port}"));
            let routes = &routes;
            async move {
                let arguments =
                    ["-n", &name, "--cluster_name", "it", "--cluster", &cluster, "--routes", routes];
                NatsServer::with_jetstream_and(&arguments).await
            }
        });
        Self { servers: futures_util::future::join_all(starts).await }
    }

    /// The server that leads a stream; `None` during an election.
    pub async fn leader_of(client: &Client, stream: &str) -> Option<usize> {
        let info = client.request(format!("$JS.API.STREAM.INFO.{stream}"), "".into());
        let info = tokio::time::timeout(Duration::from_secs(1), info).await.ok()?.ok()?;
        let info: Value = serde_json::from_slice(&info.payload).ok()?;
        info["cluster"]["leader"].as_str()?.strip_prefix('n')?.parse().ok()
    }

    pub async fn step_down(client: &Client, stream: &str) {
        let request = client.request(format!("$JS.API.STREAM.LEADER.STEPDOWN.{stream}"), "".into());
        let _ = tokio::time::timeout(Duration::from_secs(1), request).await;
    }
}
