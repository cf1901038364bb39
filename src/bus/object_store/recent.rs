//! Files that callers have stored lately, by their digests, so that the same reply does not store its files again.
//!
//! Other replicas delete files, too. So a file that is found here must be looked up before anything refers to it.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::quota::Owner;
use crate::files::{FileDescription, ObjectUrl, StoredFile};

/// Files of all callers.
const MAX_FILES: usize = 1024;
/// Files of one caller, so that one caller does not displace those of others.
const MAX_PER_CALLER: usize = 128;

#[derive(Debug, Default)]
pub(super) struct RecentFiles {
    /// The oldest first.
    files: Mutex<VecDeque<RecentFile>>,
}

#[derive(Debug)]
struct RecentFile {
    owner: Owner,
    file: StoredFile,
    stored_at: Instant,
}

impl RecentFiles {
    fn lock(&self) -> MutexGuard<'_, VecDeque<RecentFile>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, owner: Owner, file: &StoredFile) {
        let mut files = self.lock();
        // A file that gets a description is not younger for that.
        let known = files.iter().position(|known| known.file.url == file.url);
        let stored_at =
            known.and_then(|at| files.remove(at)).map_or_else(Instant::now, |known| known.stored_at);
        let is_own = |known: &RecentFile| known.owner == owner;
        let displaced = match files.iter().filter(|known| is_own(known)).count() < MAX_PER_CALLER {
            true if files.len() < MAX_FILES => None,
            true => Some(0),
            false => files.iter().position(is_own),
        };
        displaced.and_then(|at| files.remove(at));
        files.push_back(RecentFile { owner, file: file.clone(), stored_at });
    }

    pub(super) fn remove(&self, url: &ObjectUrl) {
        self.lock().retain(|known| known.file.url != *url);
    }

    /// The newest file of the owner with this content, and with this description if there is one, that is not older than
    /// `max_age`.
    pub(super) fn find(
        &self,
        owner: Owner,
        sha256: &str,
        description: Option<&FileDescription>,
        max_age: Duration,
    ) -> Option<StoredFile> {
        let is_same = |known: &&RecentFile| {
            known.owner == owner
                && known.file.sha256 == sha256
                && description.is_none_or(|description| known.file.description == *description)
                && known.stored_at.elapsed() < max_age
        };
        self.lock().iter().rev().find(is_same).map(|known| known.file.clone())
    }

    pub(super) fn description(&self, owner: Owner, url: &ObjectUrl) -> Option<FileDescription> {
        let files = self.lock();
        let known = files.iter().find(|known| known.owner == owner && known.file.url == *url)?;
        Some(known.file.description.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::caller::Caller;

    fn file(number: usize) -> StoredFile {
        StoredFile {
            url: ObjectUrl::new("bucket", &format!("file-{number}")).unwrap(),
            description: FileDescription::default(),
            size: 1,
            sha256: number.to_string(),
            content_id: String::new(),
            temporary: None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_caller_does_not_displace_the_files_of_others() {
        let [alice, bob] = ["T/alice", "T/bob"].map(|name| Owner::new(&Caller::verified(name)));
        let (files, day) = (RecentFiles::default(), Duration::from_secs(24 * 3600));
        let find = |owner, number: usize| files.find(owner, &number.to_string(), None, day);
        files.add(alice, &file(0));
        for number in 1..=2 * MAX_FILES {
            files.add(bob, &file(number));
        }
        assert_eq!(find(alice, 0), Some(file(0)));
        assert_eq!(find(bob, 2 * MAX_FILES), Some(file(2 * MAX_FILES)));
        assert_eq!((find(bob, 1), find(bob, 0)), (None, None));
        assert_eq!(files.lock().len(), 1 + MAX_PER_CALLER);
        for number in 1..=MAX_FILES {
            files.add(Owner { caller: number as u128, tenant: 1 }, &file(number));
        }
        assert_eq!(files.lock().len(), MAX_FILES);
        assert_eq!(find(alice, 0), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_description_replaces_the_file_and_does_not_make_it_younger() {
        let alice = Owner::new(&Caller::verified("T/alice"));
        let (files, max_age) = (RecentFiles::default(), Duration::from_secs(60));
        files.add(alice, &file(0));
        tokio::time::advance(Duration::from_secs(59)).await;
        let description = FileDescription { name: Some("a.png".to_owned()), media_type: None };
        let described = StoredFile { description: description.clone(), ..file(0) };
        files.add(alice, &described);
        assert_eq!(files.find(alice, "0", None, max_age), Some(described));
        assert_eq!(files.description(alice, &file(0).url), Some(description));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(files.find(alice, "0", None, max_age), None);
    }
}
