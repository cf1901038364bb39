//! Replies and files of logged calls, as the log has them.

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt as _};

use crate::a2a::model::ArtifactUpdate;
use crate::bus::encoded_reply::EncodedReply;
use crate::bus::outbox::Outbox;
use crate::bus::reply_files;
use crate::events::log::ReplyEncoder;
use crate::reply::Reply;

/// Bytes of a message of the log in addition to the reply: headers, ids, and the object around it.
const OVERHEAD: usize = 8 << 10;

/// Encodes the replies of one agent.
#[derive(Debug)]
pub(crate) struct LogReplies(pub Outbox);

impl ReplyEncoder for LogReplies {
    fn encode<'a>(&'a self, reply: &'a Reply) -> BoxFuture<'a, Bytes> {
        async move { EncodedReply::prepare(reply, &self.0, OVERHEAD).await.body }.boxed()
    }

    fn reference_files<'a>(&'a self, update: &'a mut ArtifactUpdate) -> BoxFuture<'a, ()> {
        reply_files::reference_parts(update, &self.0, 0).boxed()
    }
}
