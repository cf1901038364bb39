//! Requests that do not fit into a message of NATS: the gateway stores their largest files first, and refers to them.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt as _};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::upload::{Source, store_file};
use crate::gateway::body::Charge;
use crate::gateway::context::Context;
use crate::gateway::error::{HttpError, HttpResult};
use crate::json::{FirstItems, MAX_FIELDS, RawObject, to_bytes};

/// Room in a message for headers and framing.
const OVERHEAD: usize = 8 << 10;
/// Maximum number of files in a request.
const MAX_FILES: usize = 64;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct InlineFile<'a> {
    name: Option<String>,
    mime_type: Option<String>,
    #[serde(borrow)]
    bytes: &'a str,
}

/// A field of the request.
#[derive(Serialize)]
#[serde(transparent)]
struct Fields(#[serde(serialize_with = "as_object")] Vec<(String, Box<RawValue>)>);

fn as_object<S: serde::Serializer>(
    fields: &[(String, Box<RawValue>)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(fields.iter().map(|(key, value)| (key, value)))
}

/// The body as it is, or with references in place of its largest files if it does not fit into a message. Anything that
/// cannot be made smaller is left to the caller, who gets `too_large`.
pub(super) async fn fitting(context: &Context, body: Bytes, charge: &mut Charge) -> HttpResult<Bytes> {
    let room = context.gateway.mesh.client.max_payload().saturating_sub(OVERHEAD);
    if body.len() <= room {
        return Ok(body);
    }
    let Ok(RawObject(mut fields)) = serde_json::from_slice::<RawObject>(&body) else { return Ok(body) };
    let is_cut = fields.len() > MAX_FIELDS;
    let Some(files) = fields.iter_mut().find(|(key, _)| key == "files").map(|(_, value)| value) else {
        return Ok(body);
    };
    let Ok(FirstItems(mut items)) = serde_json::from_str::<FirstItems<Box<RawValue>, MAX_FILES>>(files.get())
    else {
        return Ok(body);
    };
    if items.len() > MAX_FILES || is_cut {
        return Ok(body);
    }
    // Copies of the fields and of the files.
    charge.add(2 * body.len())?;
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|index| std::cmp::Reverse(items.get(*index).map(|item| item.get().len())));
    let mut excess = body.len() - room;
    for index in order {
        let Some(item) = items.get_mut(index) else { continue };
        let size = item.get().len();
        let Some(reference) = stored(context, item.get()).await? else { continue };
        excess = excess.saturating_sub(size.saturating_sub(reference.get().len()));
        *item = reference;
        if excess == 0 {
            break;
        }
    }
    *files = raw(&items)?;
    Ok(to_bytes(&Fields(fields)))
}

/// Stores a file of a request, and returns the reference to it. Returns `None` for a file that is a reference already, or
/// that the bridge would refuse.
async fn stored(context: &Context, file: &str) -> HttpResult<Option<Box<RawValue>>> {
    let Ok(InlineFile { name, mime_type, bytes }) = serde_json::from_str(file) else { return Ok(None) };
    let Ok(bytes) = STANDARD.decode(bytes) else { return Ok(None) };
    let source = Source {
        name,
        media_type: mime_type,
        size: Some(bytes.len() as u64),
        bytes: stream::once(async { Ok(Bytes::from(bytes)) }).boxed(),
    };
    match store_file(context, source).await? {
        Ok(stored) => {
            #[derive(Deserialize)]
            struct Stored {
                url: String,
            }
            let unexpected = |_| HttpError::unavailable("the reply of the bridge is not the expected one");
            let Stored { url } = serde_json::from_slice(&stored).map_err(unexpected)?;
            raw(&url).map(Some)
        }
        Err(_) => Err(HttpError::too_large(
            "the request does not fit into a message of NATS, and the bridge cannot store its files",
        )),
    }
}

fn raw(value: &impl Serialize) -> HttpResult<Box<RawValue>> {
    serde_json::value::to_raw_value(value).map_err(|_| HttpError::invalid("the request cannot be encoded"))
}
