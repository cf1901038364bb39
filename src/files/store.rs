//! Where files are kept, independent of how.

use std::fmt::Debug;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};

use super::{FileError, ObjectUrl};
use crate::caller::Caller;

/// A file in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoredFile {
    pub url: ObjectUrl,
    pub description: FileDescription,
    /// In bytes.
    pub size: u64,
    /// In hexadecimal digits.
    pub sha256: String,
    /// The name of the content in the store, which the store chooses.
    pub content_id: String,
    /// For a file that exists only as long as something refers to it.
    pub temporary: Option<Arc<TemporaryFile>>,
}

/// Deletes a file when it is dropped.
#[derive(Debug)]
pub(crate) struct TemporaryFile {
    store: Arc<dyn FileStore>,
    url: ObjectUrl,
    caller: Caller,
}

impl TemporaryFile {
    /// Makes a new file temporary. Other calls must not refer to it.
    pub(crate) fn make(file: &mut StoredFile, store: &Arc<dyn FileStore>, caller: &Caller) {
        store.forget(&file.url);
        let (store, url, caller) = (Arc::clone(store), file.url.clone(), caller.clone());
        file.temporary = Some(Arc::new(Self { store, url, caller }));
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        self.store.delete_later(&self.url, &self.caller);
    }
}

impl PartialEq for TemporaryFile {
    fn eq(&self, other: &Self) -> bool {
        self.url == other.url
    }
}

impl Eq for TemporaryFile {}

/// What people and agents see of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct FileDescription {
    pub name: Option<String>,
    pub media_type: Option<String>,
}

/// Keeps files for a limited time.
pub(crate) trait FileStore: Debug + Send + Sync {
    /// Whether files can be stored, as far as the bridge knows without asking.
    fn is_available(&self) -> bool;

    /// The size of the largest message: a longer file does not fit into any.
    fn max_inline(&self) -> usize;

    /// Looks up a file that the caller may read.
    fn find<'a>(
        &'a self,
        url: &'a ObjectUrl,
        caller: &'a Caller,
    ) -> BoxFuture<'a, Result<StoredFile, FileError>>;

    fn read(&self, file: &StoredFile) -> Box<dyn FileReader>;

    /// Begins a new file of this caller. `size` is the expected size in bytes, if it is known.
    fn create<'a>(
        &'a self,
        caller: &'a Caller,
        size: Option<u64>,
    ) -> BoxFuture<'a, Result<Box<dyn FileWriter>, FileError>>;

    /// The file that the caller stored earlier with the same content, if it still exists and lives long enough: the newest,
    /// or one with this description.
    fn find_same<'a>(
        &'a self,
        caller: &'a Caller,
        sha256: &'a str,
        description: Option<&'a FileDescription>,
    ) -> BoxFuture<'a, Option<StoredFile>>;

    /// The description of a file that the caller stored lately, as far as the bridge knows without asking.
    fn description(&self, url: &ObjectUrl, caller: &Caller) -> Option<FileDescription>;

    /// Has [`FileStore::find_same`] not find a file any more.
    fn forget(&self, url: &ObjectUrl);

    /// Deletes a file of the caller, without waiting for it.
    fn delete_later(&self, url: &ObjectUrl, caller: &Caller);

    /// Gives a file a name and a media type.
    fn describe<'a>(
        &'a self,
        url: &'a ObjectUrl,
        description: &'a FileDescription,
        caller: &'a Caller,
    ) -> BoxFuture<'a, Result<StoredFile, FileError>>;
}

/// Reads the content of a file in order.
pub(crate) trait FileReader: Send {
    /// The next bytes; `None` at the end. The last bytes are returned only if the digest of the whole content is right.
    fn next(&mut self) -> BoxFuture<'_, Result<Option<Bytes>, FileError>>;
}

/// Writes a new file. If it is dropped before it is finished, the store removes what was written.
pub(crate) trait FileWriter: Debug + Send + Sync {
    /// Adds bytes. Call [`FileWriter::flush`] afterwards, which bounds the memory.
    fn push(&mut self, bytes: &[u8]) -> Result<(), FileError>;

    /// The digest of the bytes so far, in hexadecimal digits.
    fn sha256(&self) -> String;

    /// Stores the bytes that fill a chunk. Cancel-safe.
    fn flush(&mut self) -> BoxFuture<'_, Result<(), FileError>>;

    /// Stores the rest. Cancel-safe: it can be called again.
    fn finish<'a>(
        &'a mut self,
        description: &'a FileDescription,
    ) -> BoxFuture<'a, Result<StoredFile, FileError>>;
}
