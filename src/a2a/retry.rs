//! Why a message went to an agent more than once.
//!
//! An agent must not run a message twice, so a message goes out again only after an answer which
//! proves that nothing ran. Each [`Retry`] names one such proof. What proves nothing: free text in an
//! internal error, a bare 5xx, a connection that broke after the request was written.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

/// What an agent's answer proved. Names are public interface: replies show them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Retry {
    /// The parameters are invalid because of the conversation id; sent again without it.
    ContextRefused,
    /// The agent does not stream (`UnsupportedOperationError`); sent again without streaming.
    StreamingUnsupported,
    /// The agent has no such method; sent again with another one.
    MethodNotFound,
    /// The agent does not speak this version of A2A; sent again in another one.
    VersionNotSupported,
    /// The HTTP server seems to have nothing at this address. No proof: a message is not sent again, but the
    /// next one may go elsewhere.
    WrongAddress,
    /// The access token was no longer valid (401); sent again with a new one.
    TokenRenewed,
    /// The media type is not accepted (415); sent again as `application/json`.
    MediaType,
    /// The agent wants the client to make all ids; sent again with them.
    MissingIds,
}

impl Retry {
    /// The stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ContextRefused => "context_refused",
            Self::StreamingUnsupported => "streaming_unsupported",
            Self::MethodNotFound => "method_not_found",
            Self::VersionNotSupported => "version_not_supported",
            Self::WrongAddress => "wrong_address",
            Self::TokenRenewed => "token_renewed",
            Self::MediaType => "media_type",
            Self::MissingIds => "missing_ids",
        }
    }
}

/// The retries of one message to an agent, in order. Allocates nothing until there is one.
#[derive(Debug)]
pub struct Retries {
    agent: Arc<str>,
    list: Mutex<Vec<Retry>>,
}

impl Retries {
    pub fn new(agent: &Arc<str>) -> Self {
        Self { agent: Arc::clone(agent), list: Mutex::default() }
    }

    /// Records that the message is about to go out again.
    pub fn record(&self, retry: Retry) {
        let (agent, reason) = (&self.agent, retry.name());
        tracing::info!(%agent, reason, "sending the message again: the agent did not run it");
        let mut list = self.lock();
        if list.last() != Some(&retry) {
            list.push(retry);
        }
    }

    /// All so far; the same reason twice in a row counts once.
    pub fn list(&self) -> Vec<Retry> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Retry>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
