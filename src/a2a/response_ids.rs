//! Whether an agent's responses have the ids of the requests.
//!
//! A response that an agent sends late or twice on a kept connection would go to the next caller. The pool does not
//! reuse a connection with unread bytes, and the id of a JSON-RPC response shows one that arrives after that check.
//! Some agents respond with ids of their own. The first response of each kind comes on a new connection, where it
//! cannot belong to another request; it shows which ids the agent uses. Connections are reused only for agents that
//! respond with the ids of the requests.
//!
//! REST has no ids. There the check for unread bytes is all that the bridge can do; a response that arrives in the
//! instant between the check and the request is indistinguishable from the response to that request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use serde::Deserialize;
use serde_json::value::RawValue;
use uuid::Uuid;

/// Responses and the events of streams are counted apart: some agents put only the former in an envelope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ResponseKind {
    Document,
    Stream,
}

/// What is known of one agent's ids. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct AgentIds(Arc<[AtomicU8; 2]>);

// 0 is unknown. Knowledge only grows.
const ECHOED: u8 = 1;
const OWN: u8 = 2;

impl AgentIds {
    fn state(&self, kind: ResponseKind) -> &AtomicU8 {
        let [document, stream] = &*self.0;
        match kind {
            ResponseKind::Document => document,
            ResponseKind::Stream => stream,
        }
    }

    /// Whether responses of this kind have the ids of their requests, as far as the bridge has seen.
    pub(super) fn are_echoed(&self, kind: ResponseKind) -> bool {
        self.state(kind).load(Relaxed) == ECHOED
    }

    /// Remembers what a result shows.
    pub(super) fn learn(&self, kind: ResponseKind, matches: bool) {
        let (state, seen) = (self.state(kind), if matches { ECHOED } else { OWN });
        // An agent that responds with ids of its own once may do so again. Nearly always there is nothing new.
        if state.load(Relaxed) < seen {
            state.fetch_max(seen, Relaxed);
        }
    }
}

/// The id of a JSON-RPC response, as the agent wrote it.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct RpcId<'a>(#[serde(borrow)] &'a RawValue);

impl RpcId<'_> {
    /// Whether it is the id of this request.
    fn is(self, request: &Uuid) -> bool {
        let text = self.0.get().trim_matches('"');
        Uuid::try_parse(text).is_ok_and(|id| id == *request)
    }
}

/// Compares the id of a response with that of its request.
#[derive(Debug, Clone, Copy)]
pub(super) struct IdCheck {
    /// `None` if the binding has no ids.
    request: Option<Uuid>,
    pub(super) found: FoundId,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FoundId {
    /// There is none, or it is `null`. Errors may have no id; a result should.
    None,
    Same,
    Other,
}

impl IdCheck {
    pub(super) fn new(request: Option<Uuid>) -> Self {
        Self { request, found: FoundId::None }
    }

    pub(super) fn is_rpc(&self) -> bool {
        self.request.is_some()
    }

    pub(super) fn compare(&mut self, id: Option<RpcId<'_>>) {
        self.found = match (&self.request, id) {
            (Some(request), Some(id)) if id.is(request) => FoundId::Same,
            (Some(_), Some(_)) => FoundId::Other,
            _ => FoundId::None,
        };
    }

    /// Compares the id of a body with an error status.
    pub(super) fn compare_in(&mut self, body: &[u8]) {
        #[derive(Deserialize)]
        struct Envelope<'a> {
            #[serde(borrow)]
            id: Option<RpcId<'a>>,
            #[serde(borrow)]
            jsonrpc: Option<&'a RawValue>,
        }
        if let Ok(Envelope { id, jsonrpc: Some(_) }) = serde_json::from_slice(body) {
            self.compare(id);
        }
    }
}
