//! What one call may do with files.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::fetch::FetchRules;
use super::{FileDescription, FileError, FileStore, FileWriter, ObjectUrl, StoredFile};
use crate::caller::Caller;

/// How files come with a reply (`A2A-Files`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum FileMode {
    /// Inline as long as the reply fits into one message.
    #[default]
    Fitting,
    Inline,
    Reference,
}

/// The settings below `files`.
#[derive(Debug)]
pub(crate) struct FileRules {
    pub max_size: u64,
    pub max_request: u64,
    pub max_per_caller: u64,
    pub max_total: u64,
    pub ttl: Duration,
    /// Buckets that requests may refer to, including that of the bridge.
    pub allowed_buckets: BTreeSet<String>,
    pub fetch: FetchRules,
}

impl FileRules {
    pub(crate) fn check_bucket(&self, url: &ObjectUrl) -> Result<(), FileError> {
        if self.allowed_buckets.contains(url.bucket()) {
            return Ok(());
        }
        let message = format!("bucket `{}` is not in `files.allowed_buckets` of the bridge", url.bucket());
        Err(FileError::Invalid(message))
    }

    pub(crate) fn check_size(&self, size: u64) -> Result<(), FileError> {
        match size > self.max_size {
            true => Err(FileError::too_large("the file", self.max_size, "files.max_size")),
            false => Ok(()),
        }
    }
}

/// The file store of the bridge, for all calls.
#[derive(Debug, Clone)]
pub(crate) struct FileAccess {
    pub store: Arc<dyn FileStore>,
    pub rules: Arc<FileRules>,
}

impl FileAccess {
    pub(crate) fn for_call(&self, caller: &Caller, mode: FileMode) -> Arc<CallFiles> {
        let (store, rules) = (Arc::clone(&self.store), Arc::clone(&self.rules));
        let (caller, max_inline) = (caller.clone(), store.max_inline());
        Arc::new(CallFiles { store, rules, caller, mode, max_inline })
    }
}

/// The files of one call.
#[derive(Debug)]
pub(crate) struct CallFiles {
    pub store: Arc<dyn FileStore>,
    pub rules: Arc<FileRules>,
    pub caller: Caller,
    pub mode: FileMode,
    /// A file in a response that is longer than this, in base64, goes to the store while it is received.
    pub max_inline: usize,
}

tokio::task_local! {
    static CURRENT: RefCell<Option<Arc<CallFiles>>>;
}

impl CallFiles {
    /// Runs the work of a front door for one request. Once its caller is [known](Self::begin), all parts of the work can
    /// [find](Self::current) its files.
    ///
    /// Files concern the two ends of a call, the request and the body of an HTTP response. Passing them through all layers
    /// between would show them to code that has nothing to do with files.
    pub(crate) fn scope<T>(work: impl Future<Output = T>) -> impl Future<Output = T> {
        CURRENT.scope(RefCell::default(), work)
    }

    /// Like [`Self::scope`], for a call whose files are known.
    pub(crate) fn scope_of<T>(
        files: Option<Arc<Self>>,
        work: impl Future<Output = T>,
    ) -> impl Future<Output = T> {
        CURRENT.scope(RefCell::new(files), work)
    }

    /// Sets the files of the request that the current task runs, unless they are set already.
    pub(crate) fn begin(files: impl FnOnce() -> Arc<Self>) {
        let _ = CURRENT.try_with(|current| {
            current.borrow_mut().get_or_insert_with(files);
        });
    }

    /// The files of the call that the current task runs; `None` without a store.
    pub(crate) fn current() -> Option<Arc<Self>> {
        CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()
    }

    /// From now on all files of the call go by reference: what is logged never has their bytes.
    pub(crate) fn use_references() {
        let _ = CURRENT.try_with(|current| {
            if let Some(files) = &mut *current.borrow_mut() {
                let Self { store, rules, caller, max_inline, .. } = &**files;
                *files = Arc::new(Self {
                    store: Arc::clone(store),
                    rules: Arc::clone(rules),
                    caller: caller.clone(),
                    mode: FileMode::Reference,
                    max_inline: *max_inline,
                });
            }
        });
    }

    /// Whether large files in responses go to the store.
    pub(crate) fn stores_received(&self) -> bool {
        self.mode != FileMode::Inline && self.store.is_available()
    }

    /// Completes a file of the agent, unless the caller already has the same: an agent repeats its files whenever its task is
    /// read.
    pub(crate) async fn finish_received(
        &self,
        writer: &mut Box<dyn FileWriter>,
    ) -> Result<StoredFile, FileError> {
        match self.store.find_same(&self.caller, &writer.sha256(), None).await {
            Some(same) => Ok(same),
            None => writer.finish(&FileDescription::default()).await,
        }
    }
}
