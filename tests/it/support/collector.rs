//! A collector of OpenTelemetry: takes what is exported and reads it as `opentelemetry/proto` has it.

use std::collections::BTreeMap;

use super::eventually::eventually;
use super::peer::{Answer, Peer, Seen};
use super::{Bridge, LATER};

/// A span as it arrived, ids in hex.
#[derive(Debug, Clone, Default)]
pub struct Span {
    pub trace_id: String,
    pub id: String,
    pub parent_id: String,
    pub state: String,
    pub name: String,
    pub kind: u64,
    pub attributes: BTreeMap<String, String>,
    /// 2 is an error.
    pub status: u64,
    pub status_text: String,
    pub events: usize,
    /// The attributes of whoever sent it.
    pub resource: BTreeMap<String, String>,
}

/// A receiver on a free port.
pub struct Collector(Peer);

impl Collector {
    pub fn start() -> Self {
        Self::answering(200)
    }

    /// One that answers everything with this status.
    pub fn answering(status: u16) -> Self {
        Self(Peer::start(move |_| Answer::text(status, "application/x-protobuf", "")))
    }

    /// One that takes everything and never answers.
    pub fn hanging() -> Self {
        Self(Peer::start(|_| {
            loop {
                std::thread::park();
            }
        }))
    }

    pub fn url(&self) -> String {
        self.0.url()
    }

    /// The requests that arrived.
    pub fn seen(&self) -> Vec<Seen> {
        self.0.seen()
    }

    /// All spans that arrived.
    pub fn spans(&self) -> Vec<Span> {
        self.seen().iter().flat_map(|seen| spans(&seen.body)).collect()
    }

    /// All spans, once there are this many.
    pub async fn until(&self, count: usize) -> Vec<Span> {
        eventually(LATER, || async { Some(self.spans()).filter(|spans| spans.len() >= count) }).await
    }

    /// All spans there ever will be: those of a bridge that has ended.
    pub async fn after(&self, bridge: &mut Bridge) -> Vec<Span> {
        assert!(bridge.stop().await.success());
        self.spans()
    }
}

enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl Field<'_> {
    fn number(&self) -> u64 {
        match self {
            Self::Number(number) => *number,
            Self::Bytes(_) => panic!("not a number"),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Number(_) => panic!("not bytes"),
        }
    }

    fn text(&self) -> String {
        String::from_utf8(self.bytes().to_vec()).unwrap()
    }

    fn hex(&self) -> String {
        self.bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// A message of protobuf, taken apart by field number.
fn fields(mut message: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut fields = Vec::new();
    while !message.is_empty() {
        let key = varint(&mut message);
        let field = match key & 7 {
            0 => Field::Number(varint(&mut message)),
            1 => Field::Number(u64::from_le_bytes(take(&mut message, 8).try_into().unwrap())),
            2 => {
                let length = varint(&mut message);
                Field::Bytes(take(&mut message, length.try_into().unwrap()))
            }
            5 => Field::Number(u32::from_le_bytes(take(&mut message, 4).try_into().unwrap()).into()),
            wire => panic!("wire type {wire} is not in use"),
        };
        fields.push((key >> 3, field));
    }
    fields
}

fn take<'a>(message: &mut &'a [u8], length: usize) -> &'a [u8] {
    let (taken, rest) = message.split_at(length);
    *message = rest;
    taken
}

fn varint(message: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = take(message, 1)[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return value;
        }
    }
    panic!("a number without an end");
}

/// The fields with this number.
fn all<'a>(message: &'a [u8], number: u64) -> impl Iterator<Item = Field<'a>> {
    fields(message).into_iter().filter(move |(own, _)| *own == number).map(|(_, field)| field)
}

/// `ExportTraceServiceRequest`.
fn spans(request: &[u8]) -> Vec<Span> {
    let mut spans = Vec::new();
    for of_resource in all(request, 1) {
        let resource =
            all(of_resource.bytes(), 1).flat_map(|resource| attributes(resource.bytes(), 1)).collect();
        for of_scope in all(of_resource.bytes(), 2) {
            for one in all(of_scope.bytes(), 2) {
                spans.push(Span { resource: BTreeMap::clone(&resource), ..span(one.bytes()) });
            }
        }
    }
    spans
}

fn span(message: &[u8]) -> Span {
    let mut span = Span::default();
    for (number, field) in fields(message) {
        match number {
            1 => span.trace_id = field.hex(),
            2 => span.id = field.hex(),
            3 => span.state = field.text(),
            4 => span.parent_id = field.hex(),
            5 => span.name = field.text(),
            6 => span.kind = field.number(),
            11 => span.events += 1,
            15 => {
                span.status_text = all(field.bytes(), 2).map(|text| text.text()).collect();
                span.status = all(field.bytes(), 3).map(|code| code.number()).sum();
            }
            _ => {}
        }
    }
    let attributes = attributes(message, 9);
    span.attributes = attributes.iter().cloned().collect();
    assert_eq!(span.attributes.len(), attributes.len(), "an attribute is there twice: {attributes:?}");
    span
}

/// The attributes in this field; all of ours are strings.
fn attributes(message: &[u8], number: u64) -> Vec<(String, String)> {
    let pair = |pair: Field<'_>| {
        let key = all(pair.bytes(), 1).map(|key| key.text()).collect();
        let value = all(pair.bytes(), 2)
            .flat_map(|value| all(value.bytes(), 1).map(|text| text.text()).collect::<Vec<_>>());
        (key, value.collect())
    };
    all(message, number).map(pair).collect()
}
