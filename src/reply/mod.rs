//! What comes of a request: an [`Outcome`] or an [`ActionError`].
//!
//! Replies stay typed up to the edge. A front door turns them into bytes; nothing turns those bytes back.

pub(crate) mod error;
pub(crate) mod outcome;
pub(crate) mod stored;

use std::sync::Arc;

use error::ActionError;
use outcome::Outcome;

pub(crate) type Reply = Result<Arc<Outcome>, ActionError>;

/// How a request ended, in the one word that metrics and spans have for it: its status or its error code.
pub(crate) fn word(reply: &Reply) -> &'static str {
    match reply {
        Ok(outcome) => outcome.status.name(),
        Err(error) => error.info.code.name(),
    }
}
