//! Replies and files of logged calls, as the log has them.

use std::collections::BTreeMap;

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _};
use serde_json::value::RawValue;

use crate::a2a::model::ArtifactUpdate;
use crate::bus::encoded_reply::EncodedReply;
use crate::bus::outbox::Outbox;
use crate::bus::reply_files;
use crate::events::log::ReplyEncoder;
use crate::json;
use crate::reply::Reply;

/// Bytes of a message of the log in addition to the reply: headers, ids, and the object around it.
const OVERHEAD: usize = 8 << 10;

/// Encodes the replies of one agent.
#[derive(Debug)]
pub(crate) struct LogReplies(pub Outbox);

impl ReplyEncoder for LogReplies {
    fn encode<'a>(&'a self, reply: &'a Reply) -> BoxFuture<'a, Bytes> {
        async move { without_bytes(EncodedReply::prepare(reply, &self.0, OVERHEAD).await.body) }.boxed()
    }

    fn reference_files<'a>(&'a self, update: &'a mut ArtifactUpdate) -> BoxFuture<'a, ()> {
        reply_files::reference_parts(update, &self.0, 0).boxed()
    }
}

type Object = BTreeMap<String, Box<RawValue>>;

/// The reply without the bytes of files that could not be stored, because the file store is not available.
fn without_bytes(reply: Bytes) -> Bytes {
    if memchr::memmem::find(&reply, br#""bytes":"#).is_none() {
        return reply;
    }
    let Ok(mut object) = serde_json::from_slice::<Object>(&reply) else { return reply };
    let files = object.get("files").and_then(|files| serde_json::from_str::<Vec<Object>>(files.get()).ok());
    let mut files = files.unwrap_or_default();
    let removed = files.iter_mut().filter_map(|file| file.remove("bytes")).count();
    match serde_json::value::to_raw_value(&files) {
        Ok(files) if removed > 0 => {
            object.insert("files".to_owned(), files);
            json::to_bytes(&object)
        }
        _ => reply,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_files_are_removed_and_nothing_else() {
        let reply = r#"{"message":"x","data":{"bytes":1.50},"files":[{"name":"a","bytes":"QQ=="},{"name":"b","url":"u"}]}"#;
        let expected =
            r#"{"data":{"bytes":1.50},"files":[{"name":"a"},{"name":"b","url":"u"}],"message":"x"}"#;
        assert_eq!(without_bytes(reply.into()), expected);
        for unchanged in [r#"{"message":"x","files":[]}"#, r#"{"data":{"bytes":1},"files":[{"url":"u"}]}"#] {
            assert_eq!(without_bytes(unchanged.into()), unchanged);
        }
    }
}
