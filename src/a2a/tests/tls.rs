//! Agents with a private certificate authority, which may require a client certificate.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};
use tokio_util::task::TaskTracker;

use crate::a2a::card::Card;
use crate::a2a::choose::DialectChooser;
use crate::a2a::client::ClientError;
use crate::config;
use crate::memory::MemoryAccount;
use crate::telemetry::trace_context::TraceContext;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tls").join(name)
}

/// Answers every request with "task not found" if the client has a certificate of the test's CA. Also counts the
/// connections, which it keeps open.
async fn start() -> (String, Arc<AtomicUsize>) {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(fixture("ca.pem")).unwrap()).unwrap();
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier.build().unwrap())
        .with_single_cert(
            vec![CertificateDer::from_pem_file(fixture("server.pem")).unwrap()],
            PrivateKeyDer::from_pem_file(fixture("server.key")).unwrap(),
        )
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    let connections = Arc::new(AtomicUsize::new(0));
    let (count, tasks) = (Arc::clone(&connections), TaskTracker::new());
    TaskTracker::new().spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let Ok(mut stream) = acceptor.accept(socket).await else {
                continue;
            };
            count.fetch_add(1, Relaxed);
            tasks.spawn(async move {
                let (mut buffer, mut request) = ([0; 4096], Vec::new());
                while let Ok(read @ 1..) = stream.read(&mut buffer).await {
                    request.extend_from_slice(&buffer[..read]);
                    let is_complete = request.ends_with(b"}") || request.starts_with(b"GET");
                    if is_complete {
                        request.clear();
                        let body = r#"{"error": {"code": -32001, "message": "Task not found"}}"#;
                        let length = body.len();
                        let response = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}");
                        let _ = stream.write_all(response.as_bytes()).await;
                    }
                }
            });
        }
    });
    (url, connections)
}

async fn get_task(url: &str, tls: &str) -> Result<(), ClientError> {
    let (chooser, card) = chooser(url, tls);
    let interface = chooser.choose(&card).await.unwrap();
    let client = chooser.client(&card, &interface).unwrap();
    client.get("t", &TraceContext::default()).await.map(|_| ())
}

fn chooser(url: &str, tls: &str) -> (DialectChooser, Card) {
    let text = format!("agents: [{{ name: a, url: '{url}', protocol: 0.3, tls: {{ {tls} }} }}]");
    let config = config::parse(&text, "test.yaml", &|_| None).unwrap().agents.remove(0);
    let chooser = crate::a2a::chooser(
        &config,
        &crate::a2a::http_client().unwrap(),
        &config.secrets(),
        MemoryAccount::unlimited("fake"),
    )
    .unwrap();
    let security = json!([{"m": []}]);
    let schemes = json!({"m": {"type": "mutualTLS"}});
    let card = match tls.contains("cert") {
        true => json!({"name": "a", "security": security, "securitySchemes": schemes}),
        false => json!({"name": "a"}),
    };
    (chooser, Card::from_value(card).unwrap())
}

#[tokio::test]
async fn a_response_whose_id_proves_nothing_comes_on_a_connection_of_its_own() {
    let (url, connections) = start().await;
    let path = |name: &str| fixture(name).display().to_string();
    let (ca, cert, key) = (path("ca.pem"), path("client.pem"), path("client.key"));
    let (chooser, card) = chooser(&url, &format!("ca: '{ca}', cert: '{cert}', key: '{key}'"));
    let interface = chooser.choose(&card).await.unwrap();
    let client = chooser.client(&card, &interface).unwrap();
    // The card, for example, leaves a connection behind.
    chooser.http.reqwest.get(&url).send().await.unwrap().bytes().await.unwrap();
    let before = connections.load(Relaxed);
    for call in 1..=3 {
        client.get("t", &TraceContext::default()).await.unwrap_err();
        assert_eq!(connections.load(Relaxed) - before, call);
    }
}

#[tokio::test]
async fn the_configured_authority_and_certificate_are_used() {
    let (url, _) = start().await;
    let path = |name: &str| fixture(name).display().to_string();
    let (ca, cert, key) = (path("ca.pem"), path("client.pem"), path("client.key"));
    let all = get_task(&url, &format!("ca: '{ca}', cert: '{cert}', key: '{key}'")).await;
    assert!(all.as_ref().is_err_and(ClientError::is_task_not_found), "{all:?}");
    let no_certificate = get_task(&url, &format!("ca: '{ca}'")).await.unwrap_err();
    assert!(!no_certificate.is_task_not_found(), "{no_certificate:?}");
    let no_authority = get_task(&url, &format!("cert: '{cert}', key: '{key}'")).await.unwrap_err();
    assert!(matches!(no_authority, ClientError::Unreachable(_)), "{no_authority:?}");
}

#[test]
fn the_error_names_a_file_without_a_certificate() {
    let text = format!(
        "agents: [{{ name: a, url: 'https://127.0.0.1:1', tls: {{ ca: '{}' }} }}]",
        fixture("client.key").display()
    );
    let config = config::parse(&text, "test.yaml", &|_| None).unwrap().agents.remove(0);
    let error = crate::a2a::chooser(
        &config,
        &crate::a2a::http_client().unwrap(),
        &config.secrets(),
        MemoryAccount::unlimited("fake"),
    )
    .unwrap_err();
    assert!(error.to_string().ends_with("client.key"), "{error}");
}
