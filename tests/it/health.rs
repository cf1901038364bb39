//! The command `health`, as a container or a plugin host runs it.

use crate::support::processes::free_port;
use crate::support::site::{Site, demo};
use crate::support::wait_until;

#[tokio::test]
async fn health_follows_the_settings_and_the_state_of_the_bridge() {
    let mut site = Site::new().await;
    let port = free_port();
    // All addresses: the command uses the loopback address.
    let metrics = format!("metrics: {{ listen: '0.0.0.0:{port}' }}");
    site.settings_with(&metrics, &[("a", &demo("")), ("b", "url: http://127.0.0.1:9")]);
    let run = async |site: &Site, arguments: &[&str]| site.run(&[&["health"], arguments].concat()).await;

    let (code, _, error) = run(&site, &[]).await;
    assert_eq!(code, 69, "{error}");
    assert!(error.contains("no bridge answers at http://127.0.0.1:") && error.contains("hint:"), "{error}");

    site.start();
    site.until_state("a", "ready").await;
    wait_until(|| async { run(&site, &[]).await.0 == 0 }).await;
    assert_eq!(run(&site, &["--agents", "any"]).await.0, 0);
    let (code, out, _) = run(&site, &["--agents", "all"]).await;
    assert_eq!((code, out.as_str()), (1, "not every agent is ready\n"));

    site.server.end();
    wait_until(|| async { run(&site, &[]).await.1 == "no connection to NATS\n" }).await;
    assert_eq!(run(&site, &[]).await.0, 1);
    assert_eq!(run(&site, &["--live"]).await, (0, "ok\n".to_owned(), String::new()));
}

#[tokio::test]
async fn health_without_an_endpoint_is_a_configuration_error() {
    let site = Site::new().await;
    site.settings(&[("a", &demo(""))]);
    let (code, _, error) = site.run(&["health"]).await;
    assert_eq!(code, 78, "{error}");
    assert!(error.contains("`metrics.listen`"), "{error}");
}
