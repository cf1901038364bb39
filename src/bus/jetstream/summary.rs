//! What the buckets of a bridge hold, for `a2a-bridge state`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::api::{Api, ApiError, code};
use super::bucket::{Bucket, StreamInfo};
use super::scan::Scan;
use crate::bus::event_log;
use crate::state::RecordKind;

/// Maximum number of pairs of agent and owner that are told apart.
const MAX_OWNERS: usize = 10_000;

/// One bucket.
#[derive(Debug, Serialize)]
pub(crate) struct BucketSummary {
    pub bucket: String,
    pub records: u64,
    pub bytes: u64,
    pub max_bytes: i64,
    pub replicas: usize,
    /// Replicas that are offline or behind.
    pub lagging_replicas: usize,
    /// The server that leads the replicas; `None` without a cluster, or during an election.
    pub leader: Option<String>,
}

impl BucketSummary {
    fn new(bucket: String, StreamInfo { config, state, cluster }: StreamInfo) -> Self {
        let peers = cluster.as_ref().map_or(&[][..], |cluster| &cluster.replicas);
        Self {
            bucket,
            records: state.messages,
            bytes: state.bytes,
            max_bytes: config.max_bytes,
            replicas: config.num_replicas,
            lagging_replicas: peers.iter().filter(|peer| peer.offline || !peer.current).count(),
            leader: cluster.and_then(|cluster| cluster.leader),
        }
    }
}

/// How many records of each kind an agent has, by the bridge that owns them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Owner {
    pub agent: String,
    /// The instance of the bridge; `None` for records without an owner.
    pub owner: Option<String>,
}

/// Records by kind, in the order of [`RecordKind::ALL`].
pub(crate) type RecordCounts = [u64; RecordKind::ALL.len()];

/// All buckets of bridges with this subject prefix that exist, the stream of the event log, and the object store with this
/// name. The records of that are the chunks and the metadata of files.
pub(crate) async fn buckets(
    api: &Api,
    subject_prefix: &str,
    object_store: &str,
) -> Result<Vec<BucketSummary>, ApiError> {
    let state = RecordKind::ALL.map(|kind| Bucket::new(subject_prefix, kind));
    let mut streams: Vec<_> = state.map(|bucket| (bucket.stream(), bucket.name)).into();
    for bucket in [event_log::sessions_bucket(subject_prefix), event_log::runs_bucket(subject_prefix)] {
        streams.push((format!("KV_{bucket}"), bucket));
    }
    let log = event_log::stream_name(subject_prefix);
    streams.push((log.clone(), log));
    streams.push((format!("OBJ_{object_store}"), object_store.to_owned()));
    let mut found = Vec::new();
    for (stream, name) in streams {
        match api.call(&format!("STREAM.INFO.{stream}"), None::<&()>).await {
            Ok(info) => found.push(BucketSummary::new(name, info)),
            Err(error) if error.code() == Some(code::STREAM_NOT_FOUND) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Counts all records by agent and owner.
pub(crate) async fn owners(
    api: &Api,
    subject_prefix: &str,
) -> Result<BTreeMap<Owner, RecordCounts>, ApiError> {
    let mut owners = BTreeMap::new();
    for (index, kind) in RecordKind::ALL.into_iter().enumerate() {
        let bucket = Bucket::new(subject_prefix, kind);
        let mut scan = match Scan::begin(api, &bucket, None).await {
            Err(error) if error.code() == Some(code::STREAM_NOT_FOUND) => continue,
            scan => scan?,
        };
        while let Some(record) = scan.next().await? {
            let mut owner = read_owner(&record.value);
            if owners.len() >= MAX_OWNERS && !owners.contains_key(&owner) {
                owner = Owner { agent: "(others)".to_owned(), owner: None };
            }
            let counts: &mut RecordCounts = owners.entry(owner).or_default();
            if let Some(count) = counts.get_mut(index) {
                *count += 1;
            }
        }
    }
    Ok(owners)
}

/// Records of any version, as far as they say to whom they belong.
fn read_owner(value: &[u8]) -> Owner {
    #[derive(Deserialize)]
    struct Envelope {
        #[serde(default)]
        agent: Option<String>,
        #[serde(default)]
        record: Option<Owned>,
    }
    #[derive(Deserialize)]
    struct Owned {
        #[serde(default)]
        owner: Option<String>,
        #[serde(default)]
        task: Option<OwnedTask>,
    }
    #[derive(Deserialize)]
    struct OwnedTask {
        #[serde(default)]
        owner: Option<String>,
    }
    #[derive(Deserialize)]
    struct AgentOnly {
        agent: String,
    }
    let (agent, owner) = match serde_json::from_slice(value) {
        Ok(Envelope { agent, record }) => {
            let owner = record.and_then(|Owned { owner, task }| owner.or_else(|| task?.owner));
            (agent, owner)
        }
        // A record of another form.
        Err(_) => (serde_json::from_slice(value).ok().map(|AgentOnly { agent }| agent), None),
    };
    Owner { agent: agent.unwrap_or_else(|| "(unknown)".to_owned()), owner }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_read_leniently() {
        let read = |text: &str| {
            let Owner { agent, owner } = read_owner(text.as_bytes());
            format!("{agent} {}", owner.unwrap_or_default())
        };
        assert_eq!(read(r#"{"v":1,"agent":"a","id":"1","record":{"owner":"me"}}"#), "a me");
        assert_eq!(read(r#"{"v":1,"agent":"a","record":{"task":{"owner":"me"},"nonce":"x"}}"#), "a me");
        assert_eq!(read(r#"{"v":1,"agent":"a","record":{"state":"x"}}"#), "a ");
        assert_eq!(read(r#"{"v":9,"agent":"a","record":"x"}"#), "a ");
        assert_eq!(read("nonsense"), "(unknown) ");
    }
}
