//! A cluster of real nats-servers, for one test.

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
}
