//! The bucket of the bridge, and the buckets of others that it reads.

use serde_json::json;

use super::as_principal;
use super::faults::server_denying;
use crate::support::commands::{command, run};
use crate::support::files::random_bytes;
use crate::support::{Bridge, Peer, attached};

#[tokio::test]
async fn another_bucket_that_fails_does_not_block_the_own_one_and_check_names_it() {
    let peer = Peer::completing("done");
    let denied = "$JS.API.STREAM.MSG.GET.OBJ_shared";
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .set("files", json!({"allowed_buckets": ["shared"]}))
        .nats("user", "bridge")
        .nats("password", "b")
        .nats("subject_prefix", "a2a")
        .start_on(server_denying(&json!([denied])).await)
        .await;
    bridge.until_logged("large files are stored").await;
    let url = bridge.upload("a", "b", &random_bytes(300_000)).await;
    for _ in 0..2 {
        let other = as_principal(&bridge, "mallory", "files.get", json!({"url": "obj://shared/x"})).await;
        other.expect_error("state_unavailable").saying(denied);
    }
    let own = bridge.files("list", json!({})).await;
    assert_eq!(own["files"][0]["url"], url, "{own:?}");
    let checked = run(command(&["check", "--config"]).arg(bridge.settings_file()), "");
    assert!(checked.out.contains(denied) && checked.out.contains("files.allowed_buckets"), "{checked:?}");
}
