//! Limits of files: memory, quotas, and the shares of callers and tenants.

use std::future::IntoFuture as _;

use futures_util::future::join_all;
use serde_json::json;

use crate::support::files::{jetstream_server, random_bytes};
#[cfg(target_os = "linux")]
use crate::support::processes::memory;
use crate::support::{Answer, Bridge, Peer, attached};

#[cfg(target_os = "linux")]
#[tokio::test]
async fn fetched_files_count_in_the_memory_limit() {
    let content = random_bytes(250_000);
    let host = Peer::start(move |_| Answer::Http(200, vec![], content.clone()));
    let peer = Peer::completing("done");
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .set("limits", json!({"memory": "64MiB"}))
        .set("files", json!({"fetch_hosts": [host.url().replace("http://", "")]}))
        .start_on(jetstream_server().await)
        .await;
    let before = memory(bridge.pid(), "VmHWM");
    let urls: Vec<_> = (0..64).map(|number| format!("{}/{number}", host.url())).collect();
    let body = json!({"prompt": "x", "files": urls});
    let calls = join_all((0..8).map(|_| bridge.call("peer.ask", body.clone()).into_future())).await;
    for reply in calls {
        reply.expect_error("busy").saying("limits.memory");
    }
    let grown = memory(bridge.pid(), "VmHWM").saturating_sub(before);
    assert!(grown < 64 << 20, "{} MiB more than {} MiB", grown >> 20, before >> 20);
    // What was fetched is given back.
    let body = json!({"prompt": "x", "files": urls[..4]});
    bridge.call("peer.ask", body).await.expect("COMPLETED");
}
