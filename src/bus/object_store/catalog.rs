//! The files in the bucket and their owners, for quotas and lists. It is read from the stream when it is needed, and only
//! what is new since the last time.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::jetstream::JetStream;
use super::metadata::{self, ObjectMetadata};
use crate::caller::Caller;
use crate::files::FileError;

const BATCH: usize = 256;
const BATCH_BYTES: usize = 1 << 20;
/// Each file counts at least this much, so that many small files do not take the memory of the bridge.
const MIN_COST: u64 = 16 << 10;

#[derive(Debug, Default)]
pub(super) struct Catalog {
    /// By name.
    files: HashMap<String, CatalogEntry>,
    /// The bytes of each owner.
    usage: HashMap<u128, u64>,
    /// The first sequence that is not read yet.
    next: u64,
    last_expiry: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct CatalogEntry {
    owner: u128,
    cost: u64,
    sequence: u64,
    /// Files that were there before the catalog was first read may expire earlier; the server decides.
    expires_at: Instant,
}

pub(super) fn owner_id(caller: &Caller) -> u128 {
    u128::from_str_radix(&metadata::owner(caller), 16).unwrap_or_default()
}

impl Catalog {
    /// Reads what is new.
    pub(super) async fn refresh(
        &mut self,
        jetstream: &JetStream,
        bucket: &str,
        ttl: Duration,
    ) -> Result<(), FileError> {
        let filter = format!("$O.{bucket}.M.>");
        loop {
            let from = self.next.max(1);
            let mut batch = jetstream.batch(bucket, &filter, from, BATCH, BATCH_BYTES).await?;
            let mut pending = 0;
            while let Some(message) = batch.next().await? {
                self.next = message.sequence + 1;
                pending = message.pending;
                self.add(&message.payload, message.sequence, ttl);
            }
            if pending == 0 {
                break;
            }
        }
        self.expire();
        Ok(())
    }

    fn add(&mut self, json: &[u8], sequence: u64, ttl: Duration) {
        let Ok(metadata) = serde_json::from_slice::<ObjectMetadata>(json) else { return };
        self.remove(&metadata.name);
        if !metadata.is_deleted() {
            let (owner, cost) = (metadata.owner_id(), metadata.size.max(MIN_COST));
            *self.usage.entry(owner).or_default() += cost;
            let entry = CatalogEntry { owner, cost, sequence, expires_at: Instant::now() + ttl };
            self.files.insert(metadata.name, entry);
        }
    }

    fn remove(&mut self, name: &str) {
        if let Some(CatalogEntry { owner, cost, .. }) = self.files.remove(name)
            && let Some(used) = self.usage.get_mut(&owner)
        {
            *used = used.saturating_sub(cost);
            if *used == 0 {
                self.usage.remove(&owner);
            }
        }
    }

    fn expire(&mut self) {
        let now = Instant::now();
        if self.last_expiry.is_some_and(|last| now - last < Duration::from_secs(1)) {
            return;
        }
        self.last_expiry = Some(now);
        let expired: Vec<String> = self
            .files
            .iter()
            .filter(|(_, entry)| entry.expires_at <= now)
            .map(|(name, _)| name.clone())
            .collect();
        expired.iter().for_each(|name| self.remove(name));
    }

    /// The bytes of an owner's files.
    pub(super) fn bytes_of(&self, owner: u128) -> u64 {
        self.usage.get(&owner).copied().unwrap_or(0)
    }

    /// The names of an owner's files, the newest first.
    pub(super) fn names_of(&self, owner: u128, max: usize) -> Vec<String> {
        let mut files: Vec<_> = self.files.iter().filter(|(_, entry)| entry.owner == owner).collect();
        files.sort_unstable_by_key(|(_, entry)| std::cmp::Reverse(entry.sequence));
        files.into_iter().take(max).map(|(name, _)| name.clone()).collect()
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.files.contains_key(name)
    }
}
