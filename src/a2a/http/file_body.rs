//! The body of a request with files: JSON in which the bytes of the files are read from the store while it is sent.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body::{Body, Frame, SizeHint};

use crate::files::{CallFiles, FileError, FileReader, StoredFile};

/// The body of a request.
#[derive(Debug)]
pub(in crate::a2a) enum RequestBody {
    Whole(Option<Bytes>),
    WithFiles(Box<FileBody>),
}

impl RequestBody {
    pub(in crate::a2a) fn new(bytes: Bytes) -> Self {
        Self::Whole(Some(bytes))
    }

    /// Why a file could not be read.
    pub(in crate::a2a) fn failure(&self) -> FileFailure {
        match self {
            Self::Whole(_) => FileFailure::default(),
            Self::WithFiles(body) => body.failure.clone(),
        }
    }
}

/// Says after a request has failed whether a file was the reason.
#[derive(Debug, Clone, Default)]
pub(in crate::a2a) struct FileFailure(Arc<Mutex<Option<FileError>>>);

impl FileFailure {
    fn set(&self, error: FileError) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    pub(in crate::a2a) fn take(&self) -> Option<FileError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

pub(in crate::a2a) struct FileBody {
    rest: VecDeque<Piece>,
    files: Arc<CallFiles>,
    current: Option<ReadingFile>,
    /// Bytes that are not sent yet.
    remaining: u64,
    failure: FileFailure,
}

#[derive(Debug)]
enum Piece {
    Text(Bytes),
    File(StoredFile),
}

type Read = (Box<dyn FileReader>, Result<Option<Bytes>, FileError>);

struct ReadingFile {
    /// Only polled through `&mut`; the mutex makes it `Sync`, which the client with TLS requires.
    read: Mutex<BoxFuture<'static, Read>>,
    /// Bytes that do not fill a group of base64.
    incomplete: Vec<u8>,
    /// A temporary file exists as long as this.
    _file: StoredFile,
}

impl std::fmt::Debug for FileBody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileBody")
            .field("rest", &self.rest)
            .field("remaining", &self.remaining)
            .finish_non_exhaustive()
    }
}

impl FileBody {
    /// `json` has the placeholders of the files, in this order.
    pub(in crate::a2a) fn new(
        json: Bytes,
        placeholders: &[(String, StoredFile)],
        files: Arc<CallFiles>,
    ) -> Self {
        let (mut rest, mut text) = (VecDeque::new(), json);
        for (placeholder, file) in placeholders {
            let Some(at) = memchr::memmem::find(&text, placeholder.as_bytes()) else { continue };
            rest.push_back(Piece::Text(text.split_to(at)));
            let _ = text.split_to(placeholder.len());
            rest.push_back(Piece::File(file.clone()));
        }
        rest.push_back(Piece::Text(text));
        let length = |piece: &Piece| match piece {
            Piece::Text(text) => text.len() as u64,
            Piece::File(file) => file.size.div_ceil(3) * 4,
        };
        let remaining = rest.iter().map(length).sum();
        Self { rest, files, current: None, remaining, failure: FileFailure::default() }
    }

    fn open(&self, file: StoredFile) -> ReadingFile {
        let read = Mutex::new(read(self.files.store.read(&file)));
        ReadingFile { read, incomplete: Vec::new(), _file: file }
    }
}

fn read(mut reader: Box<dyn FileReader>) -> BoxFuture<'static, Read> {
    Box::pin(async move {
        let bytes = reader.next().await;
        (reader, bytes)
    })
}

impl ReadingFile {
    /// The next bytes in base64; `None` at the end of the file.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, FileError>> {
        loop {
            let future = self.read.get_mut().unwrap_or_else(PoisonError::into_inner);
            let (reader, bytes) = std::task::ready!(future.as_mut().poll(context));
            match bytes? {
                Some(bytes) => {
                    *future = read(reader);
                    let text = self.encode(&bytes);
                    if !text.is_empty() {
                        return Poll::Ready(Ok(Some(text.into())));
                    }
                }
                None => {
                    *future = Box::pin(std::future::ready((reader, Ok(None))));
                    let last = std::mem::take(&mut self.incomplete);
                    return Poll::Ready(Ok((!last.is_empty()).then(|| STANDARD.encode(last).into())));
                }
            }
        }
    }

    fn encode(&mut self, mut bytes: &[u8]) -> String {
        let mut text = String::with_capacity((bytes.len() / 3 + 2) * 4);
        if !self.incomplete.is_empty() {
            let (missing, rest) = bytes.split_at(bytes.len().min(3 - self.incomplete.len()));
            self.incomplete.extend_from_slice(missing);
            bytes = rest;
            if self.incomplete.len() == 3 {
                STANDARD.encode_string(&self.incomplete, &mut text);
                self.incomplete.clear();
            }
        }
        let (groups, rest) = bytes.split_at(bytes.len() / 3 * 3);
        STANDARD.encode_string(groups, &mut text);
        self.incomplete.extend_from_slice(rest);
        text
    }
}

impl Body for FileBody {
    type Data = Bytes;
    type Error = FileError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, FileError>>> {
        let this = &mut *self;
        loop {
            if let Some(current) = &mut this.current {
                match std::task::ready!(current.poll(context)) {
                    Ok(Some(text)) => {
                        this.remaining = this.remaining.saturating_sub(text.len() as u64);
                        return Poll::Ready(Some(Ok(Frame::data(text))));
                    }
                    Ok(None) => this.current = None,
                    Err(error) => {
                        this.failure.set(error.clone());
                        return Poll::Ready(Some(Err(error)));
                    }
                }
            }
            match this.rest.pop_front() {
                None => return Poll::Ready(None),
                Some(Piece::Text(text)) if text.is_empty() => {}
                Some(Piece::Text(text)) => {
                    this.remaining = this.remaining.saturating_sub(text.len() as u64);
                    return Poll::Ready(Some(Ok(Frame::data(text))));
                }
                Some(Piece::File(file)) => this.current = Some(this.open(file)),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.current.is_none() && self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.remaining)
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = FileError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, FileError>>> {
        match &mut *self {
            Self::Whole(bytes) => {
                Poll::Ready(bytes.take().filter(|b| !b.is_empty()).map(|b| Ok(Frame::data(b))))
            }
            Self::WithFiles(body) => Pin::new(&mut **body).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.as_ref().is_none_or(Bytes::is_empty),
            Self::WithFiles(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::WithFiles(body) => body.size_hint(),
        }
    }
}
