//! A real nats-server, for one test.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use async_nats::{Client, ConnectOptions};
use serde_json::Value;
use tempfile::TempDir;

use super::eventually::eventually;

/// A nats-server on a free port. Dropping it ends it.
pub struct NatsServer {
    dir: TempDir,
    arguments: Vec<String>,
    child: Child,
    port: u16,
}

impl NatsServer {
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// A server with further arguments.
    pub async fn start_with(arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a folder for the ports file");
        let arguments: Vec<_> = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let (child, port) = spawn(dir.path(), &arguments, None).await;
        Self { dir, arguments, child, port }
    }

    /// A server with JetStream.
    pub async fn with_jetstream() -> Self {
        Self::with_jetstream_and(&[]).await
    }

    /// A server with JetStream and further arguments.
    pub async fn with_jetstream_and(arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a folder for the ports file");
        let store = dir.path().join("jetstream").display().to_string();
        let arguments = [&["-js", "-sd", &store], arguments].concat();
        let arguments: Vec<_> = arguments.into_iter().map(str::to_owned).collect();
        let (child, port) = spawn(dir.path(), &arguments, None).await;
        Self { dir, arguments, child, port }
    }

    /// A server with a configuration file of this content, in which `$DIR` and `$STORE_DIR` are folders of the server.
    pub async fn start_configured(configuration: &str) -> Self {
        let dir = tempfile::tempdir().expect("a folder for the ports file");
        let file = dir.path().join("nats.conf");
        let store = dir.path().join("store").display().to_string();
        let configuration = configuration.replace("$STORE_DIR", &store);
        let configuration = configuration.replace("$DIR", &dir.path().display().to_string());
        std::fs::write(&file, configuration).expect("the configuration is written");
        let arguments = vec!["-c".to_owned(), file.display().to_string()];
        let (child, port) = spawn(dir.path(), &arguments, None).await;
        Self { dir, arguments, child, port }
    }

    /// Replaces the configuration file of a server that was started with one, and reloads it.
    pub fn reconfigure(&self, configuration: &str) {
        std::fs::write(self.dir.path().join("nats.conf"), configuration)
            .expect("the configuration is written");
        let reloaded = Command::new(binary())
            .args(["--signal", &format!("reload={}", self.child.id())])
            .status()
            .expect("nats-server sends a signal");
        assert!(reloaded.success());
    }

    /// Kills the server and starts it again on the same port.
    pub async fn restart(&mut self) {
        self.end();
        let (child, port) = spawn(self.dir.path(), &self.arguments, Some(self.port)).await;
        (self.child, self.port) = (child, port);
    }

    /// Kills the server; [`restart`](Self::restart) starts it again.
    pub fn end(&mut self) {
        // It may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// A client that reconnects quickly.
    pub async fn connect(&self) -> Client {
        self.connect_with(ConnectOptions::new()).await
    }

    pub async fn connect_with(&self, options: ConnectOptions) -> Client {
        options
            .reconnect_delay_callback(|_| Duration::from_millis(20))
            .connect(self.url())
            .await
            .expect("the server accepts connections")
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        self.end();
    }
}

async fn spawn(dir: &Path, arguments: &[String], port: Option<u16>) -> (Child, u16) {
    let child = Command::new(binary())
        .args(["-a", "127.0.0.1", "-p"])
        .arg(port.map_or("-1".to_owned(), |port| port.to_string()))
        .arg("--ports_file_dir")
        .arg(dir)
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("nats-server starts; set NATS_SERVER_BIN to where it is");
    let file = dir.join(format!("nats-server_{}.ports", child.id()));
    let port = eventually(|| async {
        let ports: Value = serde_json::from_slice(&std::fs::read(&file).ok()?).ok()?;
        ports["nats"][0].as_str()?.rsplit(':').next()?.parse().ok()
    })
    .await;
    (child, port)
}

/// `NATS_SERVER_BIN`, or the one that `scripts/nats-server` downloaded, or the one on the path.
fn binary() -> PathBuf {
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join(".tools/bin/nats-server");
    match std::env::var_os("NATS_SERVER_BIN") {
        Some(binary) => binary.into(),
        None if fetched.exists() => fetched,
        None => "nats-server".into(),
    }
}
