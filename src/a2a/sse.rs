//! A parser for server-sent events: from chunks of bytes to the data of whole events, with limits.
//!
//! It accepts LF, CRLF and CR, comments, event names, and data of several lines. An event without its final blank line
//! at the end of the stream counts: some servers leave that line out.

use bytes::{Buf as _, Bytes, BytesMut};

use super::http::JoinedBytes;

/// An event is larger than the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooLarge;

#[derive(Debug, Default)]
pub(crate) struct SseParser {
    buffer: BytesMut,
    /// Bytes already searched for a line end.
    searched: usize,
    /// The data lines of the current event.
    data: JoinedBytes,
    /// Whether the start was checked for a byte order mark.
    bom_checked: bool,
    max_event: usize,
}

impl SseParser {
    /// No event and no line may be larger than `max_event` bytes.
    pub(crate) fn new(max_event: usize) -> Self {
        Self { max_event, ..Self::default() }
    }

    /// The memory that it holds, in bytes.
    pub(super) fn allocated(&self) -> usize {
        self.buffer.capacity() + self.data.allocated()
    }

    pub(crate) fn feed(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The data of the next complete event.
    pub(crate) fn next_event(&mut self) -> Result<Option<Bytes>, TooLarge> {
        while let Some(line) = self.line()? {
            if line.is_empty() {
                // An event without data does not count.
                let data = self.data.take();
                if !data.is_empty() {
                    return Ok(Some(data));
                }
            } else {
                self.field(&line)?;
            }
        }
        Ok(None)
    }

    /// The data of the remaining events after the end of the stream.
    pub(crate) fn finish(&mut self) -> Result<Option<Bytes>, TooLarge> {
        if let Some(event) = self.next_event()? {
            return Ok(Some(event));
        }
        let mut rest = self.buffer.split();
        self.searched = 0;
        if rest.last() == Some(&b'\r') {
            rest.truncate(rest.len() - 1);
        }
        if !rest.is_empty() {
            self.field(&rest.freeze())?;
        }
        Ok(Some(self.data.take()).filter(|data| !data.is_empty()))
    }

    fn line(&mut self) -> Result<Option<Bytes>, TooLarge> {
        if !self.bom_checked && !self.buffer.is_empty() {
            const BOM: &[u8] = b"\xEF\xBB\xBF";
            if self.buffer.len() < BOM.len() && BOM.starts_with(&self.buffer) {
                return Ok(None);
            }
            if self.buffer.starts_with(BOM) {
                self.buffer.advance(BOM.len());
            }
            self.bom_checked = true;
        }
        let unsearched = self.buffer.get(self.searched..).unwrap_or_default();
        let Some(found) = memchr::memchr2(b'\n', b'\r', unsearched) else {
            self.searched = self.buffer.len();
            return if self.searched > self.max_event { Err(TooLarge) } else { Ok(None) };
        };
        let end = self.searched + found;
        // Whether CR alone ends the line depends on the next byte.
        let ending = match (self.buffer.get(end), self.buffer.get(end + 1)) {
            (Some(b'\r'), Some(b'\n')) => 2,
            (Some(b'\r'), None) => {
                self.searched = end;
                return Ok(None);
            }
            _ => 1,
        };
        if end > self.max_event {
            return Err(TooLarge);
        }
        // Most lines without data are blank or comments, and need no reference to the buffer.
        let line = match self.buffer.first() {
            Some(b'd') => self.buffer.split_to(end).freeze(),
            _ if end == 0 => Bytes::new(),
            _ => {
                self.buffer.advance(end);
                Bytes::from_static(b":")
            }
        };
        self.buffer.advance(ending);
        self.searched = 0;
        Ok(Some(line))
    }

    fn field(&mut self, line: &Bytes) -> Result<(), TooLarge> {
        // Comments, ids, names and retry times are ignored: an `error` event has its error in its data.
        let Some(rest) = line.strip_prefix(b"data") else {
            return Ok(());
        };
        let skipped = match rest {
            [b':', b' ', ..] => 6,
            [b':', ..] => 5,
            [] => 4,
            _ => return Ok(()),
        };
        let value = line.slice(skipped..);
        self.data.push(b"\n", value);
        if self.data.len() > self.max_event { Err(TooLarge) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(text: &[u8], chunk: usize) -> Vec<String> {
        let mut parser = SseParser::new(1 << 20);
        let mut events = Vec::new();
        let mut push = |data: Bytes| events.push(String::from_utf8(data.to_vec()).unwrap());
        for bytes in text.chunks(chunk) {
            parser.feed(bytes);
            while let Some(data) = parser.next_event().unwrap() {
                push(data);
            }
        }
        while let Some(data) = parser.finish().unwrap() {
            push(data);
        }
        events
    }

    #[test]
    fn all_line_ends_comments_names_and_long_data_are_parsed_in_chunks_of_any_size() {
        let text = "\u{FEFF}: hello\n\ndata: one\n\n: ping\r\n\r\nevent: x\r\nid: 7\r\ndata:two\r\ndata:  three\r\n\r\n\
                    data: four\r\rretry: 5\ndata\ndata: \n\nevent: ping\ndata:\n\ndatum: no\n\ndata: {\ndata: }\n\ndata: last";
        let expected = ["one", "two\n three", "four", "\n", "{\n}", "last"];
        for chunk in [1, 2, 3, 7, 64 << 10] {
            assert_eq!(events(text.as_bytes(), chunk), expected, "in chunks of {chunk}");
        }
    }

    #[test]
    fn an_endless_line_and_an_endless_event_exceed_the_limit() {
        let mut parser = SseParser::new(1000);
        parser.feed(&[b'x'; 1001]);
        assert_eq!(parser.next_event(), Err(TooLarge));
        let mut parser = SseParser::new(1000);
        let mut refused = false;
        for _ in 0..200 {
            parser.feed(b"data: 0123456789\n");
            refused |= parser.next_event().is_err();
        }
        assert!(refused);
    }

    proptest::proptest! {
        #[test]
        fn the_size_of_chunks_makes_no_difference(text in "(data: ?[a-z]{0,5}|:[a-z]{0,3}|event: x|)(\n|\r\n|\r)".repeated(), chunk in 1_usize..9) {
            proptest::prop_assert_eq!(events(text.as_bytes(), chunk), events(text.as_bytes(), usize::MAX));
        }
    }

    trait Repeated {
        fn repeated(self) -> proptest::strategy::BoxedStrategy<String>;
    }

    impl Repeated for &'static str {
        fn repeated(self) -> proptest::strategy::BoxedStrategy<String> {
            use proptest::strategy::Strategy as _;
            let line = proptest::string::string_regex(self).unwrap();
            proptest::collection::vec(line, 0..12).prop_map(|lines| lines.concat()).boxed()
        }
    }
}
