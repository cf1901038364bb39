//! Bodies of requests that the gateway holds in memory. All of them together are limited, and those of each principal.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt as _;

use super::error::{HttpError, HttpResult};

/// Maximum bytes of a JSON body.
pub(super) const MAX_BODY: usize = 10 << 20;
/// Maximum bytes of all bodies, and of those of one principal.
const MAX_TOTAL: usize = 256 << 20;
const MAX_PER_PRINCIPAL: usize = 96 << 20;

static TOTAL: AtomicUsize = AtomicUsize::new(0);

/// The bytes of the bodies of one principal.
#[derive(Debug, Default, Clone)]
pub(super) struct BodyUsage(Arc<AtomicUsize>);

/// Bytes that are counted as long as it exists.
#[derive(Debug)]
pub(super) struct Charge {
    usage: BodyUsage,
    bytes: usize,
}

impl Charge {
    pub(super) fn new(usage: &BodyUsage) -> Self {
        Self { usage: usage.clone(), bytes: 0 }
    }

    /// Counts more bytes, if there is room.
    pub(super) fn add(&mut self, bytes: usize) -> HttpResult<()> {
        self.bytes += bytes;
        let own = self.usage.0.fetch_add(bytes, Relaxed) + bytes;
        let total = TOTAL.fetch_add(bytes, Relaxed) + bytes;
        if own > MAX_PER_PRINCIPAL || total > MAX_TOTAL {
            let message = "too many large requests at the same time; try again, or upload files first";
            return Err(HttpError::too_many_requests(message, 1));
        }
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.usage.0.fetch_sub(self.bytes, Relaxed);
        TOTAL.fetch_sub(self.bytes, Relaxed);
    }
}

/// Reads a body of at most `max` bytes.
pub(super) async fn read(
    headers: &HeaderMap,
    body: Body,
    max: usize,
    timeout: Duration,
    charge: &mut Charge,
) -> HttpResult<Bytes> {
    let length =
        headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    if length.is_some_and(|length| length > max as u64) {
        return Err(too_large(max));
    }
    let late = |_| {
        let message = format!("the body did not arrive within {} s", timeout.as_secs());
        HttpError::invalid(message).with_status(StatusCode::REQUEST_TIMEOUT)
    };
    tokio::time::timeout(timeout, collect(body, max, charge)).await.map_err(late)?
}

fn too_large(max: usize) -> HttpError {
    HttpError::too_large(format!("the body has more than {max} bytes; upload files first"))
}

async fn collect(mut body: Body, max: usize, charge: &mut Charge) -> HttpResult<Bytes> {
    let (mut first, mut all) = (Bytes::new(), BytesMut::new());
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| HttpError::invalid("the body is incomplete"))?;
        let Ok(data) = frame.into_data() else { continue };
        charge.add(data.len())?;
        if first.len() + all.len() + data.len() > max {
            return Err(too_large(max));
        }
        // Most bodies arrive at once, and are not copied.
        if first.is_empty() && all.is_empty() {
            first = data;
        } else {
            if all.is_empty() {
                all.extend_from_slice(&std::mem::take(&mut first));
            }
            all.extend_from_slice(&data);
        }
    }
    Ok(if all.is_empty() { first } else { all.freeze() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_body_is_read_up_to_its_limit_and_counted() {
        let usage = BodyUsage::default();
        let pieces = |count: usize| {
            let pieces = (0..count).map(|_| Ok::<_, std::io::Error>(Bytes::from_static(b"abc")));
            Body::from_stream(futures_util::stream::iter(pieces))
        };
        let read = async |body, charge: &mut Charge| {
            super::read(&HeaderMap::new(), body, 9, Duration::from_secs(5), charge).await
        };
        let mut charge = Charge::new(&usage);
        assert_eq!(read(pieces(0), &mut charge).await.unwrap(), "");
        assert_eq!(read(pieces(1), &mut charge).await.unwrap(), "abc");
        assert_eq!(read(pieces(3), &mut charge).await.unwrap(), "abcabcabc");
        assert_eq!(usage.0.load(Relaxed), 12);
        assert!(read(pieces(4), &mut charge).await.is_err());
        assert!(charge.add(MAX_PER_PRINCIPAL).is_err());
        drop(charge);
        assert_eq!(usage.0.load(Relaxed), 0);
    }
}
