//! Figures of the file store, for metrics.

use super::{ObjectStore, lock};

/// What is known without a request to JetStream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct FileFigures {
    /// Whether files can be stored.
    pub is_available: bool,
    /// The files in the bucket and the bytes that they take there, when this bridge has last stored or listed files.
    pub stored: usize,
    pub stored_bytes: u64,
    /// Files that this bridge is writing.
    pub writing: usize,
}

impl ObjectStore {
    pub(crate) fn figures(&self) -> FileFigures {
        let (stored, stored_bytes) = lock(&self.catalog).size();
        let writing = lock(&self.open).count();
        FileFigures { is_available: self.is_available(), stored, stored_bytes, writing }
    }
}
