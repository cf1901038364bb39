//! The files in the bucket and their owners, for quotas and lists. It is read from the stream when it is needed, and only
//! what is new since the last time.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::jetstream::BucketInfo;
use super::metadata::ObjectMetadata;
use super::quota::{OpenWriters, Owner, Quota, Usage};

/// Each file counts at least this much, so that many small files do not take the memory of the bridge.
const MIN_COST: u64 = 16 << 10;

#[derive(Debug, Default)]
pub(super) struct Catalog {
    /// By name.
    files: HashMap<String, CatalogEntry>,
    usage: Usage,
    /// The size of the bucket, and the bytes in it, as the server says.
    capacity: u64,
    used: u64,
    /// The first sequence that is not read yet.
    next: u64,
    /// When the stream was created that the catalog was read from.
    created: String,
    /// How long files live; `None` for ever. It is that of the stream: replicas may have different settings.
    max_age: Option<Duration>,
    last_expiry: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct CatalogEntry {
    owner: Owner,
    cost: u64,
    sequence: u64,
    /// Files that were there before the catalog was first read may expire earlier; the server decides.
    read_at: Instant,
}

impl Catalog {
    /// Compares the catalog with the stream. Returns the first sequence to read, if there is anything new.
    pub(super) fn begin(&mut self, info: &BucketInfo) -> Option<u64> {
        if self.created != info.created || self.next > info.last_sequence + 1 {
            // Another stream has taken the place of the one before.
            *self = Self { created: info.created.clone(), ..Self::default() };
        }
        self.max_age = info.max_age;
        (self.capacity, self.used) = (info.max_bytes.unwrap_or(u64::MAX), info.bytes);
        self.expire();
        let next = self.next.max(1);
        (next <= info.last_sequence).then_some(next)
    }

    /// Adds the metadata of a file. Everything before it has been read.
    pub(super) fn add(&mut self, json: &[u8], sequence: u64) {
        self.next = self.next.max(sequence + 1);
        let Ok(metadata) = serde_json::from_slice::<ObjectMetadata>(json) else { return };
        self.remove(&metadata.name);
        if !metadata.is_deleted() {
            let (owner, cost) = (metadata.owner(), metadata.size.max(MIN_COST));
            self.usage.add(owner, cost);
            let entry = CatalogEntry { owner, cost, sequence, read_at: Instant::now() };
            self.files.insert(metadata.name, entry);
        }
    }

    fn remove(&mut self, name: &str) {
        if let Some(CatalogEntry { owner, cost, .. }) = self.files.remove(name) {
            self.usage.subtract(owner, cost);
        }
    }

    fn expire(&mut self) {
        let (now, Some(max_age)) = (Instant::now(), self.max_age) else { return };
        if self.last_expiry.is_some_and(|last| now - last < Duration::from_secs(1)) {
            return;
        }
        self.last_expiry = Some(now);
        let is_expired = |entry: &CatalogEntry| now - entry.read_at >= max_age;
        let expired: Vec<String> =
            self.files.iter().filter(|(_, entry)| is_expired(entry)).map(|(name, _)| name.clone()).collect();
        expired.iter().for_each(|name| self.remove(name));
    }

    /// What limits the files of a caller, beside those that this bridge is writing.
    pub(super) fn quota<'a>(&'a self, open: &'a OpenWriters, max_per_caller: u64) -> Quota<'a> {
        let Self { usage, capacity, used, .. } = self;
        Quota { stored: usage, open, capacity: *capacity, used: *used, max_per_caller }
    }

    /// The names of an owner's files, the newest first.
    pub(super) fn names_of(&self, owner: Owner, max: usize) -> Vec<String> {
        let is_own = |entry: &CatalogEntry| entry.owner.caller == owner.caller;
        let mut files: Vec<_> = self.files.iter().filter(|(_, entry)| is_own(entry)).collect();
        files.sort_unstable_by_key(|(_, entry)| std::cmp::Reverse(entry.sequence));
        files.into_iter().take(max).map(|(name, _)| name.clone()).collect()
    }

    /// How many files there are, and the bytes in the bucket.
    pub(super) fn size(&self) -> (usize, u64) {
        (self.files.len(), self.used)
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.files.contains_key(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(created: &str, last_sequence: u64, max_age: u64) -> BucketInfo {
        let max_age = Some(Duration::from_secs(max_age));
        BucketInfo { created: created.to_owned(), last_sequence, max_age, ..BucketInfo::default() }
    }

    fn metadata(name: &str) -> String {
        format!(r#"{{"name":"{name}","bucket":"b","nuid":"n","size":100000,"mtime":""}}"#)
    }

    #[test]
    fn a_stream_that_was_created_again_is_read_from_its_beginning() {
        let mut catalog = Catalog::default();
        assert_eq!(catalog.begin(&info("1", 0, 60)), None);
        assert_eq!(catalog.begin(&info("1", 7, 60)), Some(1));
        catalog.add(metadata("a").as_bytes(), 7);
        assert!(catalog.contains("a"));
        assert_eq!(catalog.begin(&info("1", 7, 60)), None);
        assert_eq!(catalog.begin(&info("1", 9, 60)), Some(8));
        // A backup was restored.
        assert_eq!(catalog.begin(&info("1", 5, 60)), Some(1));
        assert!(!catalog.contains("a"));
        catalog.add(metadata("b").as_bytes(), 5);
        assert_eq!(catalog.begin(&info("2", 9, 60)), Some(1));
        assert!(!catalog.contains("b") && catalog.usage.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn files_expire_when_the_stream_says_so() {
        let mut catalog = Catalog::default();
        catalog.begin(&info("1", 1, 60));
        catalog.add(metadata("a").as_bytes(), 1);
        tokio::time::advance(Duration::from_secs(61)).await;
        catalog.begin(&info("1", 1, 3600));
        assert!(catalog.contains("a"), "another replica has made the time longer");
        catalog.begin(&info("1", 1, 60));
        tokio::time::advance(Duration::from_secs(2)).await;
        catalog.begin(&info("1", 1, 60));
        assert!(!catalog.contains("a"));
    }
}
