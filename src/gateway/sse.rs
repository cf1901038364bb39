//! Frames of a streamed reply as server-sent events.
//!
//! A task per stream reads frames from NATS at once, so that a slow client does not hold messages in the NATS client, which
//! limits those of all requests together. What waits for one client is limited. A client that is too slow gets an event
//! `error`, and the stream ends.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use async_nats::Message;
use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::stream;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::Gateway;
use super::error::HttpError;
use super::mesh::{NoReply, Replies, SILENCE};
use crate::background::OnPanic;
use crate::bus::subject::Token;
use crate::reply::error::Code;

/// Events that may wait for a client.
const MAX_EVENTS: usize = 1024;
/// Bytes that may wait for one client, and for all clients; a single event may exceed it.
const MAX_BYTES: usize = 1 << 20;
const MAX_TOTAL: usize = 128 << 20;
/// Milliseconds after which a client may connect again when the gateway stops.
const RETRY: &str = "retry: 1000\n\n";
const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

/// Bytes that wait for all clients.
static TOTAL: AtomicUsize = AtomicUsize::new(0);

/// What waits for one client.
#[derive(Debug, Default)]
struct Waiting {
    bytes: AtomicUsize,
    /// Sent after everything else.
    last: Mutex<Option<Bytes>>,
}

impl Waiting {
    fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes, Relaxed);
        TOTAL.fetch_add(bytes, Relaxed);
    }

    fn remove(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Relaxed);
        TOTAL.fetch_sub(bytes, Relaxed);
    }

    fn take_last(&self) -> Option<Bytes> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        TOTAL.fetch_sub(self.bytes.load(Relaxed), Relaxed);
    }
}

/// The side of a stream that sends events.
struct Events {
    sender: mpsc::Sender<Bytes>,
    waiting: Arc<Waiting>,
}

impl Events {
    /// Whether there was room for the event.
    fn send(&self, event: Bytes) -> bool {
        let is_full = self.waiting.bytes.load(Relaxed) >= MAX_BYTES || TOTAL.load(Relaxed) >= MAX_TOTAL;
        let size = event.len();
        self.waiting.add(size);
        let is_sent = !is_full && self.sender.try_send(event).is_ok();
        if !is_sent {
            self.waiting.remove(size);
        }
        is_sent
    }

    /// Sends a last event, however much waits.
    fn end(self, event: Bytes) {
        *self.waiting.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(event);
    }
}

/// A channel for events, and the body of a response that sends them.
fn channel() -> (Events, Body) {
    let (sender, mut receiver) = mpsc::channel(MAX_EVENTS);
    let waiting = Arc::new(Waiting::default());
    let events = Events { sender, waiting: Arc::clone(&waiting) };
    let body = stream::poll_fn(move |context| {
        receiver.poll_recv(context).map(|event| match event {
            Some(event) => {
                waiting.remove(event.len());
                Some(Ok::<_, Infallible>(event))
            }
            None => waiting.take_last().map(Ok),
        })
    });
    (events, Body::from_stream(body))
}

/// A response with events. Proxies must neither buffer nor change it.
fn response(body: Body) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, no-transform"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// A stream of frames, whose first frame has arrived.
pub(super) struct FrameStream {
    pub(super) gateway: Arc<Gateway>,
    pub(super) replies: Replies,
    pub(super) agent: Token,
    /// Held until the stream ends.
    pub(super) _place: OwnedSemaphorePermit,
}

impl FrameStream {
    /// Sends the first frame, and then all that follow.
    pub(super) fn respond(self, first: Message) -> Response {
        let (events, body) = channel();
        let open = self.gateway.metrics.open_stream();
        let tasks = self.gateway.tasks.clone();
        tasks.spawn("event stream", OnPanic::Log, async move {
            self.run(first, events).await;
            drop(open);
        });
        response(body)
    }

    async fn run(mut self, first: Message, events: Events) {
        let instance = first.headers.as_ref().and_then(|headers| headers.get("A2A-Instance"));
        let instance = instance.map(|instance| instance.as_str().to_owned());
        let stop = self.gateway.stop_streams.clone();
        let mut message = first;
        loop {
            let Some(event) = encode(&message) else { return };
            if !events.send(event) {
                let error = HttpError::new(Code::Busy, "the client reads too slowly; the task may still run");
                return events.end(named("error", &error.to_json()));
            }
            message = loop {
                let silence = tokio::time::sleep(SILENCE);
                tokio::select! {
                    biased;
                    next = self.replies.next() => match next {
                        Some(next) => break next,
                        None => return events.end(lost(&NoReply::Disconnected)),
                    },
                    // The client has left. Dropping the subscription tells the bridge.
                    () = events.sender.closed() => return,
                    () = stop.cancelled() => return events.end(Bytes::from_static(RETRY.as_bytes())),
                    () = silence => {
                        let is_served = tokio::select! {
                            next = self.replies.next() => match next {
                                Some(next) => break next,
                                None => false,
                            },
                            is_served = self.gateway.mesh.is_served(&self.agent, instance.as_deref()) => is_served,
                        };
                        if !is_served {
                            return events.end(lost(&NoReply::Gone));
                        }
                    }
                }
            };
        }
    }
}

/// The end of a stream without a result.
fn lost(reason: &NoReply) -> Bytes {
    let body = HttpError::no_reply(reason).to_json();
    named("result", &[br#"{"type":"result","data":"#.as_slice(), &body, b"}"].concat())
}

fn named(event: &str, data: &[u8]) -> Bytes {
    let mut buffer = BytesMut::with_capacity(data.len() + event.len() + 32);
    write_event(&mut buffer, None, event, data);
    buffer.freeze()
}

/// A frame as an event; `None` for the message that ends the stream.
fn encode(message: &Message) -> Option<Bytes> {
    if message.payload.is_empty() {
        return None;
    }
    let sequence = message.headers.as_ref().and_then(|headers| headers.get("A2A-Seq"));
    let Some(sequence) = sequence.map(|value| value.as_str()) else {
        return Some(Bytes::from_static(KEEP_ALIVE));
    };
    let mut buffer = BytesMut::with_capacity(message.payload.len() + 64);
    write_event(&mut buffer, Some(sequence), frame_type(&message.payload), &message.payload);
    Some(buffer.freeze())
}

/// The type of a frame, which begins with it.
pub(super) fn frame_type(frame: &[u8]) -> &str {
    let end = |rest: &[u8]| rest.iter().position(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_');
    let name = frame.strip_prefix(br#"{"type":""#).and_then(|rest| rest.get(..end(rest)?));
    name.and_then(|name| str::from_utf8(name).ok()).filter(|name| !name.is_empty()).unwrap_or("frame")
}

fn write_event(buffer: &mut BytesMut, id: Option<&str>, event: &str, data: &[u8]) {
    if let Some(id) = id.filter(|id| !id.contains(['\r', '\n', '\0'])) {
        buffer.put_slice(b"id: ");
        buffer.put_slice(id.as_bytes());
        buffer.put_u8(b'\n');
    }
    buffer.put_slice(b"event: ");
    buffer.put_slice(event.as_bytes());
    // JSON has no line breaks within strings. Those between values may be left out.
    buffer.put_slice(b"\ndata: ");
    if memchr::memchr2(b'\n', b'\r', data).is_none() {
        buffer.put_slice(data);
    } else {
        buffer.extend(data.iter().filter(|byte| !matches!(byte, b'\n' | b'\r')));
    }
    buffer.put_slice(b"\n\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_becomes_an_event_on_one_line() {
        let mut buffer = BytesMut::new();
        let frame = b"{\"type\":\"response\",\"data\":\n\"a\"}";
        write_event(&mut buffer, Some("3"), frame_type(frame), frame);
        assert_eq!(buffer, "id: 3\nevent: response\ndata: {\"type\":\"response\",\"data\":\"a\"}\n\n");
        for (frame, name) in [
            (b"{}".as_slice(), "frame"),
            (br#"{"type":"a\nb"}"#, "a"),
            (b"{\"type\":\"a\nid: 1", "a"),
            (br#"{"type":"#, "frame"),
        ] {
            assert_eq!(frame_type(frame), name);
        }
    }
}
