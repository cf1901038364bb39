//! A fake OpenTelemetry collector, which decodes the exported spans by hand after `opentelemetry/proto`.

use std::collections::BTreeMap;

use super::Bridge;
use super::eventually::eventually;
use super::peer::{Answer, HttpRequest, Peer};

/// An exported span; ids are hexadecimal.
#[derive(Debug, Clone, Default)]
pub struct Span {
    pub trace_id: String,
    pub id: String,
    pub parent_id: String,
    pub state: String,
    pub name: String,
    pub kind: u64,
    pub attributes: BTreeMap<String, String>,
    /// 2 means error.
    pub status: u64,
    pub status_text: String,
    pub events: usize,
    /// The attributes of its resource.
    pub resource: BTreeMap<String, String>,
}

pub struct Collector(Peer);

impl Collector {
    pub fn start() -> Self {
        Self::answering(200)
    }

    /// A collector that answers every request with this status.
    pub fn answering(status: u16) -> Self {
        Self(Peer::start(move |_| Answer::text(status, "application/x-protobuf", "")))
    }

    /// A collector that reads requests and never answers.
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

    pub fn requests(&self) -> Vec<HttpRequest> {
        self.0.requests()
    }

    pub fn spans(&self) -> Vec<Span> {
        self.requests().iter().flat_map(|seen| spans(&seen.body)).collect()
    }

    /// All spans, once there are this many.
    pub async fn until(&self, count: usize) -> Vec<Span> {
        eventually(|| async { Some(self.spans()).filter(|spans| spans.len() >= count) }).await
    }

    /// Stops the bridge, which exports the rest, and returns all spans.
    pub async fn spans_after_stop(&self, bridge: &mut Bridge) -> Vec<Span> {
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

/// The fields of a protobuf message with their numbers.
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
