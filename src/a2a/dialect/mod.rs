//! The dialects of A2A: how a request is written for one version and binding, and how its response is read.
//!
//! Every dialect writes exactly its own form. Reading is lenient and common to all ([`super::decode`]), because agents
//! mix the spellings of several versions. A new dialect is a new variant of [`Dialect`], its parameters in [`send`],
//! and the rules in [`super::choose`] that choose it.

mod http_call;
mod rpc_error;
mod send;
mod v03_rest;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::model::{Event, Part, SendResult, Task};
use super::response_ids::{IdCheck, RpcId};
use super::retry::Retries;
pub(crate) use http_call::HttpCall;
pub(crate) use rpc_error::{DATA_LEFT_OUT, ReadError, RpcError};
pub(crate) use send::V1Part;

/// A version of A2A together with its binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// v0.1 over JSON-RPC.
    V01,
    /// v0.1 over JSON-RPC with a path for each method, as in python-a2a.
    V01Paths,
    /// v0.2 over JSON-RPC, which the bridge writes like v0.3.
    V02,
    /// v0.3 over JSON-RPC.
    V03,
    /// v0.3 over JSON-RPC where the client assigns every id, as in Bindu.
    V03Ids,
    /// v0.3 over REST.
    V03Rest,
    /// v1.0 over JSON-RPC.
    V1,
    /// v1.0 over REST.
    V1Rest,
}

/// A method of A2A, whatever the dialect calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum A2aMethod {
    Send,
    /// A send whose response is a stream of events.
    Stream,
    /// Requests the further events of a task.
    Subscribe,
    Get,
    Cancel,
}

/// A message to send, independent of the dialect.
#[derive(Debug, Clone, Copy)]
pub struct OutgoingMessage<'a> {
    /// Stays when the bridge sends the message again, so that an agent can recognise a repeat.
    pub message_id: Uuid,
    pub task_id: Option<&'a str>,
    /// The id for a new task, in dialects where the client assigns it.
    pub new_task_id: Option<&'a str>,
    pub context_id: Option<&'a str>,
    pub reference_task_ids: &'a [String],
    pub parts: &'a [Part],
    pub skill_id: Option<&'a str>,
    /// Who calls, if the agent is to know.
    pub caller: Option<&'a str>,
    /// Names the run in the event log, and its session, if the call is logged.
    pub run_id: Option<Uuid>,
    pub session_id: Option<&'a str>,
    /// The media types that the caller accepts.
    pub output_modes: &'a [String],
    /// Whether the agent responds only when the task has settled, not as soon as the task exists. Streams ignore it.
    pub blocking: bool,
    /// Records why the message was sent more than once.
    pub retries: &'a Retries,
}

impl OutgoingMessage<'_> {
    /// The approximate size of its content, in bytes.
    pub(super) fn size(&self) -> usize {
        self.parts.iter().map(Part::allocated).sum()
    }
}

impl Dialect {
    /// The protocol version as the registry and metadata show it.
    pub fn protocol_version(self) -> &'static str {
        match self {
            Self::V01 | Self::V01Paths => "0.1",
            Self::V02 => "0.2",
            Self::V03 | Self::V03Ids | Self::V03Rest => "0.3",
            Self::V1 | Self::V1Rest => "1.0",
        }
    }

    /// The binding as the registry and metadata show it.
    pub fn binding(self) -> &'static str {
        if self.is_rest() { "HTTP+JSON" } else { "JSONRPC" }
    }

    pub fn is_rest(self) -> bool {
        matches!(self, Self::V03Rest | Self::V1Rest)
    }

    /// Whether the id of a new task is known before the agent responds.
    pub fn client_assigns_task_ids(self) -> bool {
        matches!(self, Self::V01 | Self::V01Paths | Self::V03Ids)
    }

    /// The value of `A2A-Version`. Agents of older versions reject a version that they do not know.
    pub fn version_header(self) -> Option<&'static str> {
        matches!(self, Self::V1 | Self::V1Rest).then_some("1.0")
    }

    /// A JSON-RPC call without parameters. If it is a send, it has no message, and no agent runs it.
    pub(super) fn empty_call(method: &'static str) -> HttpCall {
        HttpCall::rpc(method, &serde_json::Map::new())
    }

    /// A request to send a message, with or without a stream.
    pub(crate) fn message_call(self, method: A2aMethod, message: &OutgoingMessage<'_>) -> HttpCall {
        let call = match self {
            Self::V01 | Self::V01Paths => self.rpc_call(method, &send::v01(message)),
            Self::V02 | Self::V03 => self.rpc_call(method, &send::v03(message)),
            Self::V03Ids => self.rpc_call(method, &send::v03_ids(message)),
            Self::V1 => self.rpc_call(method, &send::v1(message)),
            Self::V03Rest | Self::V1Rest => {
                let path = self.rest_path([format!("message:{}", method.rest_verb())]);
                match self {
                    Self::V03Rest => HttpCall::post(path, self.media_type(), &send::v03_rest(message)),
                    _ => HttpCall::post(path, self.media_type(), &send::v1(message)),
                }
            }
        };
        call.with_files(message.parts)
    }

    /// Whether the bytes of a file are in responses as they are. Some agents of v0.3 over REST encode them twice.
    pub(super) fn has_plain_files(self) -> bool {
        self != Self::V03Rest
    }

    /// A request about one task: subscribe, get or cancel.
    pub(crate) fn task_call(self, method: A2aMethod, task_id: &str) -> HttpCall {
        if !self.is_rest() {
            let key = if self == Self::V03Ids { "taskId" } else { "id" };
            return self.rpc_call(method, &BTreeMap::from([(key, task_id)]));
        }
        let task = match method {
            A2aMethod::Get => task_id.to_owned(),
            _ => format!("{task_id}:{}", method.rest_verb()),
        };
        let path = self.rest_path(["tasks".to_owned(), task]);
        match method {
            A2aMethod::Cancel => HttpCall::post(path, self.media_type(), &serde_json::Map::new()),
            // The specification has GET in one place and POST in another for `:subscribe`; agents accept GET.
            _ => HttpCall::get(path, self.media_type()),
        }
    }

    fn rpc_call(self, method: A2aMethod, params: &impl Serialize) -> HttpCall {
        let mut call = HttpCall::rpc(method.rpc_method(self), params);
        if self == Self::V01Paths {
            let last = if method == A2aMethod::Subscribe { "stream" } else { method.rest_verb() };
            call.path = vec!["tasks".to_owned(), last.to_owned()];
        }
        call
    }

    fn rest_path(self, segments: impl IntoIterator<Item = String>) -> Vec<String> {
        let version = (self == Self::V03Rest).then(|| "v1".to_owned());
        version.into_iter().chain(segments).collect()
    }

    fn media_type(self) -> &'static str {
        if self == Self::V1Rest { "application/a2a+json" } else { http_call::JSON }
    }

    /// Reads the response to a send.
    pub fn read_send_result(self, body: &[u8]) -> Result<SendResult, ReadError> {
        self.read(body, &mut IdCheck::new(None), SendResult::try_from)
    }

    /// Reads the data of one SSE event in the response to a stream or a subscription.
    pub fn read_event(self, data: &[u8]) -> Result<Event, ReadError> {
        self.read(data, &mut IdCheck::new(None), Ok)
    }

    /// Reads the response to a get or a cancel.
    pub fn read_task(self, body: &[u8]) -> Result<Task, ReadError> {
        self.read(body, &mut IdCheck::new(None), Task::try_from)
    }

    /// Reads a response or an event, and compares its id.
    ///
    /// Tries the usual case first, a JSON-RPC response with a result. A second pass finds the error, the result
    /// without its envelope, or the reason why the body is neither.
    pub(super) fn read<T>(
        self,
        body: &[u8],
        ids: &mut IdCheck,
        convert: fn(Event) -> Result<T, serde_json::Error>,
    ) -> Result<T, ReadError> {
        let in_envelope = if self.is_rest() { None } else { Event::decode_response(body) };
        let event = match in_envelope {
            Some((event, id)) => {
                ids.compare(id);
                Ok(event)
            }
            None => Event::decode(result(body, ids)?),
        };
        let converted = event.and_then(|mut event| {
            if self == Self::V03Rest {
                v03_rest::unwrap_parts(&mut event);
            }
            convert(event)
        });
        converted.map_err(|error| match RpcError::bare(body) {
            Some(error) => ReadError::Agent(error),
            None => ReadError::NotA2a(error.to_string()),
        })
    }
}

impl A2aMethod {
    fn rpc_method(self, dialect: Dialect) -> &'static str {
        use Dialect::{V01, V1, V01Paths};
        match (self, dialect) {
            (Self::Send, V1) => "SendMessage",
            (Self::Stream, V1) => "SendStreamingMessage",
            (Self::Subscribe, V1) => "SubscribeToTask",
            (Self::Get, V1) => "GetTask",
            (Self::Cancel, V1) => "CancelTask",
            (Self::Send, V01 | V01Paths) => "tasks/send",
            (Self::Stream, V01 | V01Paths) => "tasks/sendSubscribe",
            (Self::Send, _) => "message/send",
            (Self::Stream, _) => "message/stream",
            (Self::Subscribe, _) => "tasks/resubscribe",
            (Self::Get, _) => "tasks/get",
            (Self::Cancel, _) => "tasks/cancel",
        }
    }

    fn rest_verb(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Stream => "stream",
            Self::Subscribe => "subscribe",
            Self::Get => "get",
            Self::Cancel => "cancel",
        }
    }
}

/// The `result` of a JSON-RPC response. A body without the envelope is the result itself: that is how REST works, and
/// some JSON-RPC agents leave the envelope out.
fn result<'a>(body: &'a [u8], ids: &mut IdCheck) -> Result<&'a str, ReadError> {
    #[derive(Deserialize)]
    #[serde(expecting = "an object")]
    struct RpcResponse<'a> {
        #[serde(borrow)]
        id: Option<RpcId<'a>>,
        #[serde(borrow)]
        result: Option<&'a RawValue>,
        #[serde(borrow)]
        error: Option<&'a RawValue>,
    }
    let text = std::str::from_utf8(body).map_err(|e| ReadError::NotA2a(e.to_string()))?;
    if text.trim().is_empty() {
        return Err(ReadError::NotA2a("the body is empty".to_owned()));
    }
    let response: RpcResponse<'_> =
        serde_json::from_str(text).map_err(|e| ReadError::NotA2a(format!("not a JSON object: {e}")))?;
    if response.error.is_some() || response.result.is_some() {
        ids.compare(response.id);
    }
    match (response.error, response.result) {
        (Some(error), _) => Err(match RpcError::read(error.get()) {
            Some(error) => ReadError::Agent(error),
            None => ReadError::NotA2a("`error` is neither an object nor a string".to_owned()),
        }),
        (None, Some(result)) => Ok(result.get()),
        (None, None) => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn a_message_keeps_its_id_each_time_it_is_sent_in_every_dialect() {
        let message = OutgoingMessage {
            message_id: Uuid::new_v4(),
            task_id: None,
            new_task_id: None,
            context_id: None,
            reference_task_ids: &[],
            parts: &[],
            skill_id: None,
            caller: None,
            run_id: None,
            session_id: None,
            output_modes: &[],
            blocking: true,
            retries: &Retries::new(&"agent".into()),
        };
        // v0.1 has no message ids.
        for dialect in
            [Dialect::V02, Dialect::V03, Dialect::V03Ids, Dialect::V03Rest, Dialect::V1, Dialect::V1Rest]
        {
            for call in
                [A2aMethod::Send, A2aMethod::Stream].map(|method| dialect.message_call(method, &message))
            {
                let body: Value = serde_json::from_slice(&call.body(Uuid::nil()).unwrap()).unwrap();
                let params = body.get("params").unwrap_or(&body);
                assert_eq!(params["message"]["messageId"], message.message_id.to_string(), "{dialect:?}");
            }
        }
    }
}
