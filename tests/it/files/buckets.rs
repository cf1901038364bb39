//! The bucket of the bridge, and the buckets of others that it reads.

use serde_json::json;

use super::as_principal;
use super::faults::server_denying;
use crate::support::commands::{command, run};
use crate::support::files::random_bytes;
use crate::support::{Bridge, NatsServer, Peer, attached};

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

/// Creates the bucket of a bridge with the subject prefix `a2a`, smaller than the configuration says.
async fn create_small_bucket(nats: &NatsServer) {
    let client = nats.connect().await;
    let stream = json!({
        "name": "OBJ_a2a_files", "subjects": ["$O.a2a_files.C.>", "$O.a2a_files.M.>"], "allow_rollup_hdrs": true,
        "allow_direct": true, "allow_msg_ttl": true, "discard": "new", "retention": "limits", "storage": "file",
        "max_bytes": 4 << 20, "num_replicas": 1, "metadata": {"team": "a"},
    });
    let create =
        client.request("$JS.API.STREAM.CREATE.OBJ_a2a_files", stream.to_string().into()).await.unwrap();
    assert!(!String::from_utf8_lossy(&create.payload).contains("error"), "{create:?}");
}

#[tokio::test]
async fn new_limits_of_the_bucket_take_effect_and_other_settings_of_it_stay() {
    let nats = NatsServer::with_jetstream().await;
    create_small_bucket(&nats).await;
    let peer = Peer::completing("done");
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .set("files", json!({"max_total": "8MiB", "ttl": "60s"}))
        .nats("subject_prefix", "a2a")
        .start_on(nats)
        .await;
    bridge.until_logged("large files are stored").await;
    bridge.until_logged("changed the limits of the bucket").await;
    let info = bridge.jetstream("STREAM.INFO.OBJ_a2a_files", json!({})).await;
    let config = &info["config"];
    assert_eq!((&config["max_bytes"], &config["max_age"]), (&json!(8 << 20), &json!(60_000_000_000_u64)));
    assert_eq!(config["metadata"]["team"], "a", "{config}");
}

#[tokio::test]
async fn an_existing_bucket_needs_no_permission_to_create_or_change_it() {
    let denied = json!(["$JS.API.STREAM.CREATE.OBJ_a2a_files", "$JS.API.STREAM.UPDATE.OBJ_a2a_files"]);
    let nats = server_denying(&denied).await;
    create_small_bucket(&nats).await;
    let peer = Peer::completing("done");
    let bridge = Bridge::with(attached("peer", &peer.url()))
        .nats("user", "bridge")
        .nats("password", "b")
        .nats("subject_prefix", "a2a")
        .start_on(nats)
        .await;
    bridge.until_logged("large files are stored").await;
    bridge.until_logged("cannot change the limits of the bucket").await;
    let bytes = random_bytes(300_000);
    let url = bridge.upload("a", "b", &bytes).await;
    assert_eq!(bridge.download(&url).await, bytes);
}

#[tokio::test]
async fn buckets_are_as_small_as_the_account_demands() {
    let nats = NatsServer::start_configured(
        "jetstream: {store_dir: \"$STORE_DIR\"}
        accounts: {A: {jetstream: {disk_max_stream_bytes: 64MB}, users: [{user: a, password: a}]}}
        no_auth_user: a",
    );
    let peer = Peer::completing("done");
    let bridge = Bridge::with(attached("peer", &peer.url())).start_on(nats.await).await;
    bridge.until_logged("state is shared in JetStream").await;
    bridge.until_logged("large files are stored").await;
    let bytes = random_bytes(300_000);
    let url = bridge.upload("a", "b", &bytes).await;
    assert_eq!(bridge.download(&url).await, bytes);
}
