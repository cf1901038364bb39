//! A store in memory, for unit tests.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use sha2::{Digest as _, Sha256};

use super::fetch::FetchRules;
use super::{
    CallFiles, FileAccess, FileDescription, FileError, FileMode, FileReader, FileRules, FileStore,
    FileWriter, ObjectUrl, StoredFile,
};
use crate::caller::Caller;
use crate::text::hex;

#[derive(Debug, Default, Clone)]
pub(crate) struct MemoryFiles {
    files: Arc<Mutex<HashMap<String, Vec<u8>>>>,
    max_inline: usize,
}

impl MemoryFiles {
    /// The files of a call, of which those longer than `max_inline` characters go to this store.
    pub(crate) fn for_call(&self, max_inline: usize) -> Arc<CallFiles> {
        let rules = FileRules {
            max_size: 1 << 20,
            max_request: 1 << 20,
            max_per_caller: 1 << 30,
            max_total: 1 << 30,
            ttl: Duration::from_secs(60),
            allowed_buckets: BTreeSet::new(),
            fetch: FetchRules::default(),
        };
        let store = Self { max_inline, ..self.clone() };
        let access = FileAccess { store: Arc::new(store), rules: Arc::new(rules) };
        access.for_call(&Caller::default(), FileMode::Fitting)
    }

    pub(crate) fn content(&self, file: &StoredFile) -> Vec<u8> {
        self.files.lock().unwrap()[file.url.name()].clone()
    }

    pub(crate) fn count(&self) -> usize {
        self.files.lock().unwrap().len()
    }
}

impl FileStore for MemoryFiles {
    fn is_available(&self) -> bool {
        true
    }

    fn max_inline(&self) -> usize {
        self.max_inline
    }

    fn find<'a>(
        &'a self,
        _url: &'a ObjectUrl,
        _caller: &'a Caller,
    ) -> BoxFuture<'a, Result<StoredFile, FileError>> {
        async { Err(FileError::NotFound) }.boxed()
    }

    fn read(&self, file: &StoredFile) -> Box<dyn FileReader> {
        Box::new(MemoryReader(Some(self.content(file).into())))
    }

    fn create<'a>(
        &'a self,
        _caller: &'a Caller,
        _size: Option<u64>,
    ) -> BoxFuture<'a, Result<Box<dyn FileWriter>, FileError>> {
        let writer: Box<dyn FileWriter> = Box::new(MemoryWriter { store: self.clone(), bytes: Vec::new() });
        async { Ok(writer) }.boxed()
    }

    fn find_same<'a>(
        &'a self,
        _: &'a Caller,
        sha256: &'a str,
        _: Option<&'a FileDescription>,
    ) -> BoxFuture<'a, Option<StoredFile>> {
        async move {
            let files = self.files.lock().unwrap();
            let (name, bytes) = files.iter().find(|(_, bytes)| hex(&Sha256::digest(bytes)) == sha256)?;
            Some(stored(name, bytes, &FileDescription::default()))
        }
        .boxed()
    }

    fn description(&self, _: &ObjectUrl, _: &Caller) -> Option<FileDescription> {
        None
    }

    fn forget(&self, _: &ObjectUrl) {}

    fn delete_later(&self, url: &ObjectUrl, _: &Caller) {
        self.files.lock().unwrap().remove(url.name());
    }

    fn describe<'a>(
        &'a self,
        _url: &'a ObjectUrl,
        _description: &'a FileDescription,
        _caller: &'a Caller,
    ) -> BoxFuture<'a, Result<StoredFile, FileError>> {
        async { Err(FileError::NotFound) }.boxed()
    }
}

fn stored(name: &str, bytes: &[u8], description: &FileDescription) -> StoredFile {
    StoredFile {
        url: ObjectUrl::new("bucket", name).unwrap(),
        description: description.clone(),
        size: bytes.len() as u64,
        sha256: hex(&Sha256::digest(bytes)),
        content_id: name.to_owned(),
        temporary: None,
    }
}

struct MemoryReader(Option<Bytes>);

impl FileReader for MemoryReader {
    fn next(&mut self) -> BoxFuture<'_, Result<Option<Bytes>, FileError>> {
        let bytes = self.0.take();
        async { Ok(bytes) }.boxed()
    }
}

#[derive(Debug)]
struct MemoryWriter {
    store: MemoryFiles,
    bytes: Vec<u8>,
}

impl FileWriter for MemoryWriter {
    fn push(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn sha256(&self) -> String {
        hex(&Sha256::digest(&self.bytes))
    }

    fn flush(&mut self) -> BoxFuture<'_, Result<(), FileError>> {
        // Waits once, as a real store does.
        async {
            tokio::task::yield_now().await;
            Ok(())
        }
        .boxed()
    }

    fn finish<'a>(
        &'a mut self,
        description: &'a FileDescription,
    ) -> BoxFuture<'a, Result<StoredFile, FileError>> {
        async {
            let mut files = self.store.files.lock().unwrap();
            let name = format!("file-{}", files.len());
            files.insert(name.clone(), self.bytes.clone());
            Ok(stored(&name, &self.bytes, description))
        }
        .boxed()
    }
}
