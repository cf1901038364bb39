//! Moves large files out of a response into the store while the response is received.
//!
//! A response is JSON, or events with a JSON document in each line. A file in it is a string under one of a few keys. This
//! filter follows the text just far enough to know where such a string begins and ends. If it is longer than a message may be, its
//! bytes go to the store, and a marker takes its place, which the decoder turns into a reference to the file.

use std::sync::{Arc, LazyLock};

use bytes::{Buf as _, Bytes, BytesMut};

use crate::a2a::client::ClientError;
use crate::files::base64_stream::{Base64Decoder, NotBase64};
use crate::files::{CallFiles, FileDescription, FileError, FileWriter, ObjectUrl, StoredFile};

/// The names for the bytes of a file in all versions.
const FILE_KEYS: [&[u8]; 4] = [b"bytes", b"raw", b"fileWithBytes", b"file_with_bytes"];
/// The keys under which an agent may send anything.
const DATA_KEYS: [&[u8]; 2] = [b"data", b"metadata"];
const MAX_KEY: usize = 16;
/// How many characters of a file are decoded before the store takes them.
const PIECE: usize = 128 << 10;

/// The beginning of a marker. No agent knows it, so no agent can refer to a file that it did not send.
static MARKER: LazyLock<String> = LazyLock::new(|| format!("stored-{}", uuid::Uuid::new_v4().simple()));

fn marker(file: &StoredFile) -> String {
    let StoredFile { url, size, sha256, content_id, .. } = file;
    format!("{}:{}:{}:{size}:{sha256}:{content_id}", *MARKER, url.bucket(), url.name())
}

/// The file that a marker in a response stands for.
pub(in crate::a2a) fn received_file(text: &str) -> Option<StoredFile> {
    let mut fields = text.strip_prefix(MARKER.as_str())?.strip_prefix(':')?.split(':');
    Some(StoredFile {
        url: ObjectUrl::new(fields.next()?, fields.next()?)?,
        description: FileDescription::default(),
        size: fields.next()?.parse().ok()?,
        sha256: fields.next()?.to_owned(),
        content_id: fields.next()?.to_owned(),
        temporary: None,
    })
}

#[derive(Debug)]
pub(super) struct FileFilter {
    files: Arc<CallFiles>,
    /// What has arrived and is not read yet.
    input: Bytes,
    place: Place,
    /// The last complete string, if it is short enough for a key.
    last: Option<Vec<u8>>,
    /// Whether a colon has followed it.
    is_value: bool,
    /// The open objects and lists.
    depth: usize,
    /// The depth of the data that the filter is in.
    data_depth: Option<usize>,
    /// Bytes of files so far.
    stored: u64,
    /// The store cannot take files.
    is_off: bool,
}

/// Where in the text the filter is.
#[derive(Debug)]
enum Place {
    Outside,
    String {
        is_escaped: bool,
        text: Option<Vec<u8>>,
    },
    /// In the string of a file, which may be long.
    File {
        held: BytesMut,
        is_escaped: bool,
    },
    /// In the string of a file whose bytes go to the store.
    Storing(Box<StoringFile>),
}

#[derive(Debug)]
struct StoringFile {
    writer: Box<dyn FileWriter>,
    decoder: Base64Decoder,
    /// Characters that were held back until it was clear that the file is large.
    held: Bytes,
    is_escaped: bool,
    is_complete: bool,
}

enum Decoding {
    NotBase64,
    File(FileError),
}

impl From<NotBase64> for Decoding {
    fn from(NotBase64: NotBase64) -> Self {
        Self::NotBase64
    }
}

impl From<Decoding> for ClientError {
    fn from(error: Decoding) -> Self {
        match error {
            Decoding::File(error) => Self::NotStored(error),
            Decoding::NotBase64 => {
                Self::NotA2a { reason: "a file is not base64".to_owned(), snippet: String::new() }
            }
        }
    }
}

impl FileFilter {
    pub(super) fn new(files: Arc<CallFiles>) -> Self {
        let (input, place) = (Bytes::new(), Place::Outside);
        Self {
            files,
            input,
            place,
            last: None,
            is_value: false,
            depth: 0,
            data_depth: None,
            stored: 0,
            is_off: false,
        }
    }

    /// Adds what has arrived.
    pub(super) fn push(&mut self, chunk: Bytes) {
        debug_assert!(self.input.is_empty());
        self.input = chunk;
    }

    /// What is to be decoded of the bytes so far; `None` if the filter needs more bytes. Cancel-safe.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        loop {
            if self.is_off {
                return Ok(self.take_rest());
            }
            if let Place::Storing(_) = &self.place {
                match Box::pin(self.store()).await? {
                    Some(marker) => return Ok(Some(marker)),
                    None => return Ok(None),
                }
            }
            if let Place::File { held, .. } = &self.place
                && held.len() > self.files.max_inline
            {
                Box::pin(self.begin_storing()).await;
                continue;
            }
            if self.input.is_empty() {
                return Ok(None);
            }
            if let Some(output) = self.scan() {
                return Ok(Some(output));
            }
        }
    }

    /// The end of the response.
    pub(super) fn end(&mut self) -> Option<Bytes> {
        self.take_rest()
    }

    fn take_rest(&mut self) -> Option<Bytes> {
        let rest = match std::mem::replace(&mut self.place, Place::Outside) {
            Place::File { held, .. } if !held.is_empty() => held.freeze(),
            _ => std::mem::take(&mut self.input),
        };
        (!rest.is_empty()).then_some(rest)
    }

    /// Reads on until there is something to pass on, or the input ends.
    fn scan(&mut self) -> Option<Bytes> {
        if let Place::File { held, is_escaped } = &mut self.place {
            // Not further than to the length at which the file goes to the store.
            let room = (self.files.max_inline + 1).saturating_sub(held.len()).max(1);
            let window = self.input.len().min(PIECE).min(room);
            // The quote that ends the string.
            let end = self.input.iter().take(window).position(|byte| match byte {
                _ if std::mem::take(is_escaped) => false,
                b'\\' => {
                    *is_escaped = true;
                    false
                }
                byte => matches!(byte, b'"' | b'\n'),
            });
            held.extend_from_slice(&self.input.split_to(end.unwrap_or(window)));
            end?;
            let held = std::mem::take(held).freeze();
            self.place = Place::String { is_escaped: false, text: None };
            return (!held.is_empty()).then_some(held);
        }
        let mut at = 0;
        while let Some(&byte) = self.input.get(at) {
            match &mut self.place {
                Place::Outside => {
                    at += 1;
                    match byte {
                        b'"' if self.data_depth.is_none() && self.is_value_of(&FILE_KEYS) => {
                            self.place = Place::File { held: BytesMut::new(), is_escaped: false };
                            (self.last, self.is_value) = (None, false);
                            return Some(self.input.split_to(at));
                        }
                        b'"' => self.place = Place::String { is_escaped: false, text: Some(Vec::new()) },
                        b':' => self.is_value = true,
                        b' ' | b'\t' | b'\r' => {}
                        b'{' | b'[' => {
                            self.depth += 1;
                            if self.data_depth.is_none() && self.is_value_of(&DATA_KEYS) {
                                self.data_depth = Some(self.depth);
                            }
                            (self.last, self.is_value) = (None, false);
                        }
                        b'}' | b']' => {
                            self.data_depth = self.data_depth.filter(|depth| *depth != self.depth);
                            self.depth = self.depth.saturating_sub(1);
                            (self.last, self.is_value) = (None, false);
                        }
                        _ => (self.last, self.is_value) = (None, false),
                    }
                }
                Place::String { is_escaped: true, text } => {
                    (*text, at) = (None, at + 1);
                    self.place = Place::String { is_escaped: false, text: None };
                }
                Place::String { is_escaped, text } => {
                    let rest = self.input.get(at..).unwrap_or_default();
                    let length = memchr::memchr3(b'"', b'\\', b'\n', rest).unwrap_or(rest.len());
                    if let Some(read) = text {
                        match read.len() + length <= MAX_KEY {
                            true => read.extend_from_slice(rest.get(..length).unwrap_or_default()),
                            false => *text = None,
                        }
                    }
                    match rest.get(length) {
                        None => at += length,
                        Some(b'\\') => (*is_escaped, at) = (true, at + length + 1),
                        // Strings have no line breaks: whatever this was, the next line is another text.
                        Some(_) => {
                            let is_end = rest.get(length) == Some(&b'"');
                            self.last = text.take().filter(|_| is_end);
                            (self.place, self.is_value) = (Place::Outside, false);
                            at += length + 1;
                        }
                    }
                }
                Place::File { .. } | Place::Storing(_) => break,
            }
        }
        Some(self.input.split_to(at)).filter(|output| !output.is_empty())
    }

    /// Whether a value of one of these keys begins.
    fn is_value_of(&self, keys: &[&[u8]]) -> bool {
        self.is_value && self.last.as_ref().is_some_and(|last| keys.contains(&last.as_slice()))
    }

    /// Begins a file in the store. Without a store, the file stays in the response, whose limits apply.
    async fn begin_storing(&mut self) {
        match self.files.store.create(&self.files.caller, None).await {
            Ok(writer) => {
                let Place::File { held, .. } = &mut self.place else { return };
                let held = std::mem::take(held).freeze();
                let decoder = Base64Decoder::default();
                self.place = Place::Storing(Box::new(StoringFile {
                    writer,
                    decoder,
                    held,
                    is_escaped: false,
                    is_complete: false,
                }));
            }
            Err(error) => {
                tracing::debug!(%error, "cannot store a file of an agent; it stays in the response");
                let Place::File { held, .. } = &mut self.place else { return };
                held.extend_from_slice(&self.input);
                self.input = std::mem::take(held).freeze();
                (self.place, self.is_off) = (Place::Outside, true);
            }
        }
    }

    /// Moves bytes to the store. Returns the marker when the file is complete.
    async fn store(&mut self) -> Result<Option<Bytes>, ClientError> {
        let Place::Storing(file) = &mut self.place else { return Ok(None) };
        loop {
            file.writer.flush().await.map_err(ClientError::NotStored)?;
            if file.is_complete {
                let stored =
                    self.files.finish_received(&mut file.writer).await.map_err(ClientError::NotStored)?;
                self.place = Place::String { is_escaped: false, text: None };
                return Ok(Some(marker(&stored).into()));
            }
            let source = if file.held.is_empty() { &mut self.input } else { &mut file.held };
            if source.is_empty() {
                return Ok(None);
            }
            let mut piece = source.split_to(source.len().min(PIECE));
            let (decoder, writer, stored) = (&mut file.decoder, &mut file.writer, &mut self.stored);
            let max = self.files.rules.max_request;
            let mut take = |bytes: &[u8]| {
                *stored += bytes.len() as u64;
                if *stored > max {
                    return Err(Decoding::File(FileError::too_many("the files of the response", max)));
                }
                writer.push(bytes).map_err(Decoding::File)
            };
            while !piece.is_empty() {
                if std::mem::take(&mut file.is_escaped) {
                    if piece.first() != Some(&b'/') {
                        return Err(Decoding::NotBase64.into());
                    }
                    decoder.decode(b"/", &mut take)?;
                    piece.advance(1);
                    continue;
                }
                let length = memchr::memchr3(b'"', b'\\', b'\n', &piece).unwrap_or(piece.len());
                decoder.decode(&piece.split_to(length), &mut take)?;
                match piece.first() {
                    None => {}
                    Some(b'\\') => {
                        file.is_escaped = true;
                        piece.advance(1);
                    }
                    Some(b'"') => {
                        decoder.finish(&mut take)?;
                        file.is_complete = true;
                        // Held characters have no quote, so this is the input.
                        self.input = join(piece, std::mem::take(&mut self.input));
                        break;
                    }
                    Some(_) => return Err(Decoding::NotBase64.into()),
                }
            }
        }
    }
}

/// The bytes that follow each other in the input.
fn join(first: Bytes, second: Bytes) -> Bytes {
    match (first.is_empty(), second.is_empty()) {
        (_, true) => first,
        (true, _) => second,
        _ => [first, second].concat().into(),
    }
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
    use serde_json::{Value, json};

    use super::*;
    use crate::files::memory_store::MemoryFiles;

    const MAX_INLINE: usize = 100;

    /// What the filter makes of a text that arrives in pieces of this size.
    async fn filter(store: &MemoryFiles, text: &str, piece: usize) -> Result<String, ClientError> {
        let mut filter = FileFilter::new(store.for_call(MAX_INLINE));
        let mut output = Vec::new();
        for piece in text.as_bytes().chunks(piece) {
            filter.push(Bytes::copy_from_slice(piece));
            while let Some(piece) = filter.next().await? {
                output.extend_from_slice(&piece);
            }
        }
        output.extend_from_slice(&filter.end().unwrap_or_default());
        Ok(String::from_utf8(output).unwrap())
    }

    fn file(size: usize) -> Vec<u8> {
        (0..size).map(|n| (n * 7 % 256) as u8).collect()
    }

    #[tokio::test]
    async fn only_large_files_go_to_the_store_whatever_pieces_they_arrive_in() {
        let (small, large) = (file(30), file(1000));
        let text = "a \"bytes\": \\ \u{e9} ".repeat(20);
        let document = json!({"result": {"message": {"parts": [
            {"text": text}, {"raw": STANDARD.encode(&small)}, {"raw": "\"a\\", "bytes": "\""}, {"raw": STANDARD.encode(&large), "filename": "f"},
            {"file": {"name": "bytes", "bytes": URL_SAFE_NO_PAD.encode(&large)}},
            {"data": {"raw": "x".repeat(500), "deep": [{"bytes": STANDARD.encode(&large)}]}},
            {"text": "t", "metadata": {"bytes": "y".repeat(500)}},
        ]}}});
        for (text, piece) in [document.to_string(), format!("{document:#}")]
            .iter()
            .flat_map(|text| [1, 2, 3, 7, 64, 1000, usize::MAX].map(|piece| (text, piece)))
        {
            let store = MemoryFiles::default();
            let output: Value = serde_json::from_str(&filter(&store, text, piece).await.unwrap()).unwrap();
            let parts = &output["result"]["message"]["parts"];
            let mut expected = document.clone();
            for place in ["/result/message/parts/3/raw", "/result/message/parts/4/file/bytes"] {
                let received = received_file(output.pointer(place).unwrap().as_str().unwrap()).unwrap();
                assert_eq!(store.content(&received), large);
                *expected.pointer_mut(place).unwrap() = output.pointer(place).unwrap().clone();
            }
            assert_eq!(output, expected);
            assert_eq!(parts[1]["raw"], STANDARD.encode(&small));
            assert_eq!(store.count(), 1, "the same file twice");
        }
    }

    #[tokio::test]
    async fn events_are_separate_texts() {
        let large = file(1000);
        let event = json!({"artifact": {"parts": [{"raw": STANDARD.encode(&large)}]}});
        let text = format!(": it's a \"comment\ndata: {event}\n\nevent: \"bytes\ndata: {event}\n\n");
        for piece in [1, 5, 4096] {
            let store = MemoryFiles::default();
            let output = filter(&store, &text, piece).await.unwrap();
            assert_eq!(output.matches(MARKER.as_str()).count(), 2, "{output}");
            assert!(output.len() < 800 && output.starts_with(": it's a \"comment\ndata: {"), "{output}");
        }
    }

    #[tokio::test]
    async fn escaped_slashes_are_base64_and_other_text_is_an_error() {
        let large = vec![255; 1000];
        let text = json!({"bytes": STANDARD.encode(&large)}).to_string().replace('/', "\\/");
        assert!(text.contains("\\/"));
        for piece in [1, 3, 4096] {
            let store = MemoryFiles::default();
            let output: Value = serde_json::from_str(&filter(&store, &text, piece).await.unwrap()).unwrap();
            let received = received_file(output["bytes"].as_str().unwrap()).unwrap();
            assert_eq!(store.content(&received), large);
        }
        for bad in ["!".repeat(500), "A".repeat(501), format!("{}\\u0041", "A".repeat(500))] {
            let text = format!("{{\"bytes\":\"{bad}\"}}");
            let error = filter(&MemoryFiles::default(), &text, 50).await.unwrap_err();
            assert!(matches!(error, ClientError::NotA2a { .. }), "{error}");
        }
        let huge = json!({"bytes": STANDARD.encode(file(2 << 20))}).to_string();
        let error = filter(&MemoryFiles::default(), &huge, 4096).await.unwrap_err();
        assert!(matches!(error, ClientError::NotStored(FileError::TooLarge(_))), "{error}");
    }

    #[test]
    fn an_agent_cannot_make_a_marker() {
        for text in ["", "stored-", "stored-x:b:n:1:2:3", "obj://b/n"] {
            assert_eq!(received_file(text), None);
        }
    }
}
