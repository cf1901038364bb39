//! Which permissions the NATS user of a bridge lacks for shared state, for `check`.
//!
//! The probes have no effect: the server refuses their content, if it does not deny their subject.

use async_nats::HeaderMap;
use bytes::Bytes;
use futures_util::future::join_all;

use super::api::{Api, ApiError};
use super::bucket::Bucket;
use crate::state::RecordKind;

/// Not valid JSON, so that no request does anything.
const REFUSED: &str = "-";

/// What a bridge has to be allowed to publish to, to share state.
pub(crate) fn permissions(subject_prefix: &str) -> Vec<String> {
    let mut permissions = vec!["$JS.API.INFO".to_owned()];
    for kind in RecordKind::ALL {
        let bucket = Bucket::new(subject_prefix, kind);
        let (stream, name) = (bucket.stream(), &bucket.name);
        permissions.extend([
            format!("$JS.API.STREAM.INFO.{stream}"),
            format!("$JS.API.STREAM.CREATE.{stream}"),
            format!("$JS.API.STREAM.MSG.GET.{stream}"),
            format!("$JS.API.CONSUMER.CREATE.{stream}.>"),
            format!("$JS.FC.{stream}.>"),
            format!("$KV.{name}.>"),
        ]);
    }
    permissions
}

/// Those of the [`permissions`] that the NATS user of the bridge lacks.
pub(crate) async fn missing_permissions(api: &Api, subject_prefix: &str) -> Vec<String> {
    let probes = permissions(subject_prefix).into_iter().map(|permission| async move {
        let subject = permission.replace(".>", ".check.check");
        // No stream has this name, so nothing is stored.
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Expected-Stream", "none");
        let result = api.probe(&subject, headers, Bytes::from_static(REFUSED.as_bytes())).await;
        matches!(result, Err(ApiError::Denied { .. })).then_some(permission)
    });
    join_all(probes).await.into_iter().flatten().collect()
}
