//! Which permissions the NATS user of a bridge lacks for shared state and files, for `check`.
//!
//! The probes have no effect: the server refuses their content, if it does not deny their subject. The server takes content
//! that is not JSON for a request to purge everything, so the probe of that request names a subject without messages.

use async_nats::HeaderMap;
use bytes::Bytes;
use futures_util::future::join_all;

use super::api::{Api, ApiError};
use super::bucket::Bucket;
use crate::bus::event_log;
use crate::bus::object_store::ObjectStore;
use crate::json;
use crate::state::RecordKind;

/// Not valid JSON, so that no request does anything.
const REFUSED: &str = "-";

/// What a bridge has to be allowed to publish to.
#[derive(Debug)]
pub(crate) struct Permissions {
    /// To store files.
    pub files: Vec<String>,
    /// To read files in `files.allowed_buckets`.
    pub other_buckets: Vec<String>,
    /// To share state.
    pub state: Vec<String>,
    /// To log events.
    pub events: Vec<String>,
}

/// What a bridge with this subject prefix has to be allowed to publish to.
pub(crate) fn permissions(subject_prefix: &str, allowed_buckets: &[String]) -> Permissions {
    let bucket = ObjectStore::bucket_name(subject_prefix);
    let files =
        ["STREAM.CREATE", "STREAM.UPDATE", "STREAM.INFO", "STREAM.PURGE", "STREAM.MSG.GET", "DIRECT.GET"];
    let files = files.map(|operation| format!("$JS.API.{operation}.OBJ_{bucket}"));
    let files = [format!("$O.{bucket}.>")].into_iter().chain(files).collect();
    let read = |bucket| {
        ["STREAM.MSG.GET", "DIRECT.GET"].map(|operation| format!("$JS.API.{operation}.OBJ_{bucket}"))
    };
    let other_buckets = allowed_buckets.iter().filter(|allowed| **allowed != bucket).flat_map(read).collect();
    let mut state = vec!["$JS.API.INFO".to_owned()];
    for kind in RecordKind::ALL {
        let bucket = Bucket::new(subject_prefix, kind);
        let (stream, name) = (bucket.stream(), &bucket.name);
        state.extend([
            format!("$JS.API.STREAM.INFO.{stream}"),
            format!("$JS.API.STREAM.CREATE.{stream}"),
            format!("$JS.API.STREAM.MSG.GET.{stream}"),
            format!("$JS.API.CONSUMER.CREATE.{stream}.>"),
            format!("$JS.FC.{stream}.>"),
            format!("$KV.{name}.>"),
        ]);
    }
    let log = event_log::stream_name(subject_prefix);
    let buckets = [event_log::runs_bucket(subject_prefix), event_log::sessions_bucket(subject_prefix)];
    let operations =
        ["STREAM.INFO", "STREAM.CREATE", "STREAM.MSG.GET", "STREAM.MSG.DELETE", "STREAM.PURGE", "DIRECT.GET"];
    let of_log = operations.map(|operation| format!("$JS.API.{operation}.{log}"));
    let mut events = vec![format!("{subject_prefix}.event.>")];
    events.extend(of_log);
    for bucket in buckets {
        let operations = ["STREAM.INFO", "STREAM.CREATE", "STREAM.MSG.GET", "STREAM.PURGE", "DIRECT.GET"];
        events.extend(operations.map(|operation| format!("$JS.API.{operation}.KV_{bucket}")));
        events.push(format!("$KV.{bucket}.>"));
    }
    Permissions { files, other_buckets, state, events }
}

/// Those of the [`permissions`] that the NATS user of the bridge lacks.
pub(crate) async fn missing_permissions(
    api: &Api,
    subject_prefix: &str,
    allowed_buckets: &[String],
) -> Permissions {
    let Permissions { files, other_buckets, state, events } = permissions(subject_prefix, allowed_buckets);
    let (files, other_buckets, state, events) = tokio::join!(
        missing(api, files),
        missing(api, other_buckets),
        missing(api, state),
        missing(api, events)
    );
    Permissions { files, other_buckets, state, events }
}

async fn missing(api: &Api, permissions: Vec<String>) -> Vec<String> {
    let probes = permissions.into_iter().map(|permission| async move {
        let subject = permission.replace(".>", ".check.check");
        // No stream has this name, so nothing is stored.
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Expected-Stream", "none");
        let result = api.probe(&subject, headers, probe_body(&permission)).await;
        matches!(result, Err(ApiError::Denied { .. })).then_some(permission)
    });
    join_all(probes).await.into_iter().flatten().collect()
}

fn probe_body(permission: &str) -> Bytes {
    let filter = match permission.strip_prefix("$JS.API.STREAM.PURGE.") {
        Some(stream) => match stream.strip_prefix("OBJ_") {
            Some(bucket) => format!("$O.{bucket}.C.check"),
            None => match stream.strip_prefix("KV_") {
                Some(bucket) => format!("$KV.{bucket}.check"),
                None => format!("{stream}.check"),
            },
        },
        None => return Bytes::from_static(REFUSED.as_bytes()),
    };
    json::to_bytes(&serde_json::json!({ "filter": filter }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_probe_of_a_purge_removes_nothing() {
        let Permissions { files, other_buckets, state, events } = permissions("a2a", &["shared".to_owned()]);
        let is_purge = |permission: &&String| permission.contains("PURGE");
        let purges = files.iter().chain(&other_buckets).chain(&state).chain(&events).filter(is_purge);
        let purges: Vec<_> = purges.collect();
        let streams = ["OBJ_a2a_files", "a2a_events", "KV_a2a_runs", "KV_a2a_sessions"];
        assert_eq!(purges, streams.map(|stream| format!("$JS.API.STREAM.PURGE.{stream}")).each_ref());
        assert_eq!(probe_body(purges[0]), r#"{"filter":"$O.a2a_files.C.check"}"#);
        assert_eq!(probe_body(purges[1]), r#"{"filter":"a2a_events.check"}"#);
        assert_eq!(probe_body(purges[3]), r#"{"filter":"$KV.a2a_sessions.check"}"#);
    }
}
