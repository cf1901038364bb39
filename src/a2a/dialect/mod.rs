//! The wires: how a call is written for one version of A2A, and what comes back.
//!
//! Each dialect is a file with its own exact shapes. They share one lenient reading (see
//! [`super::model`]), because agents mix the versions' spellings. A new wire is a new variant of
//! [`Dialect`], a file that writes its calls, and the rules in [`super::choose`] that choose it.

mod call;
mod error;
mod v01;
mod v03;
mod v03_ids;
mod v03_rest;
mod v1;
mod v1_rest;

pub(crate) use v1::V1Part;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::model::{Answer, Event, Part, Task};
use super::retry::Retries;
pub(crate) use call::HttpCall;
pub(crate) use error::NotAResult;
pub use error::RpcError;

/// A version of A2A together with its binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// v0.1 over JSON-RPC.
    V01,
    /// v0.1 over JSON-RPC with an address for each method, as python-a2a has it.
    V01Paths,
    /// v0.2 over JSON-RPC; the same wire as v0.3.
    V02,
    /// v0.3 over JSON-RPC.
    V03,
    /// v0.3 over JSON-RPC where the client makes every id, as Bindu has it.
    V03Ids,
    /// v0.3 over REST.
    V03Rest,
    /// v1.0 over JSON-RPC.
    V1,
    /// v1.0 over REST.
    V1Rest,
}

/// A message to send, independent of the wire.
#[derive(Debug, Clone, Copy)]
pub struct OutgoingMessage<'a> {
    /// Names the message. It is the same each time the message goes out, so that an agent can recognise a
    /// repeat.
    pub message_id: Uuid,
    pub task_id: Option<&'a str>,
    /// The id for a new task, on wires where the client makes it.
    pub new_task_id: Option<&'a str>,
    pub context_id: Option<&'a str>,
    /// Tasks that the message refers to.
    pub reference_task_ids: &'a [String],
    pub parts: &'a [Part],
    /// The skill that the caller chose.
    pub skill_id: Option<&'a str>,
    /// Media types that the caller takes.
    pub output_modes: &'a [String],
    /// Whether the agent answers only when the task has settled, not as soon as the task exists. Streams ignore it.
    pub blocking: bool,
    /// Records why the message went out more than once.
    pub retries: &'a Retries,
}

impl Dialect {
    /// The protocol version as registry and metadata show it.
    pub fn protocol_version(self) -> &'static str {
        match self {
            Self::V01 | Self::V01Paths => "0.1",
            Self::V02 => "0.2",
            Self::V03 | Self::V03Ids | Self::V03Rest => "0.3",
            Self::V1 | Self::V1Rest => "1.0",
        }
    }

    /// The binding as registry and metadata show it.
    pub fn binding(self) -> &'static str {
        if self.is_rest() { "HTTP+JSON" } else { "JSONRPC" }
    }

    /// Whether calls have addresses of their own rather than a JSON-RPC envelope.
    pub fn is_rest(self) -> bool {
        matches!(self, Self::V03Rest | Self::V1Rest)
    }

    /// Whether the client makes the ids of tasks, so that an id is known before the agent answers.
    pub fn client_assigns_task_ids(self) -> bool {
        matches!(self, Self::V01 | Self::V01Paths | Self::V03Ids)
    }

    /// The value of `A2A-Version`. Older agents refuse a version that they do not know.
    pub fn version_header(self) -> Option<&'static str> {
        matches!(self, Self::V1 | Self::V1Rest).then_some("1.0")
    }

    pub fn send(self, message: &OutgoingMessage<'_>) -> HttpCall {
        match self {
            Self::V01 => HttpCall::rpc("tasks/send", &v01::send_params(message)),
            Self::V01Paths => {
                HttpCall::rpc("tasks/send", &v01::send_params(message)).below(&["tasks", "send"])
            }
            Self::V02 | Self::V03 => HttpCall::rpc("message/send", &v03::send_params(message)),
            Self::V03Ids => HttpCall::rpc("message/send", &v03_ids::send_params(message)),
            Self::V03Rest => v03_rest::message("send", message),
            Self::V1 => HttpCall::rpc("SendMessage", &v1::send_params(message)),
            Self::V1Rest => v1_rest::message("send", message),
        }
    }

    /// A send whose answer comes as a stream of events.
    pub fn stream(self, message: &OutgoingMessage<'_>) -> HttpCall {
        match self {
            Self::V01 => HttpCall::rpc("tasks/sendSubscribe", &v01::send_params(message)),
            Self::V01Paths => {
                HttpCall::rpc("tasks/sendSubscribe", &v01::send_params(message)).below(&["tasks", "stream"])
            }
            Self::V02 | Self::V03 => HttpCall::rpc("message/stream", &v03::send_params(message)),
            Self::V03Ids => HttpCall::rpc("message/stream", &v03_ids::send_params(message)),
            Self::V03Rest => v03_rest::message("stream", message),
            Self::V1 => HttpCall::rpc("SendStreamingMessage", &v1::send_params(message)),
            Self::V1Rest => v1_rest::message("stream", message),
        }
    }

    /// Asks for the events of a task that is under way.
    pub fn subscribe(self, task_id: &str) -> HttpCall {
        let params = TaskParams { id: task_id };
        match self {
            Self::V01 | Self::V02 | Self::V03 => HttpCall::rpc("tasks/resubscribe", &params),
            Self::V03Ids => HttpCall::rpc("tasks/resubscribe", &v03_ids::TaskParams { task_id }),
            Self::V01Paths => HttpCall::rpc("tasks/resubscribe", &params).below(&["tasks", "stream"]),
            Self::V03Rest => v03_rest::task(task_id, Some("subscribe")),
            Self::V1 => HttpCall::rpc("SubscribeToTask", &params),
            Self::V1Rest => v1_rest::task(task_id, Some("subscribe")),
        }
    }

    pub fn get(self, task_id: &str) -> HttpCall {
        let params = TaskParams { id: task_id };
        match self {
            Self::V01 | Self::V02 | Self::V03 => HttpCall::rpc("tasks/get", &params),
            Self::V03Ids => HttpCall::rpc("tasks/get", &v03_ids::TaskParams { task_id }),
            Self::V01Paths => HttpCall::rpc("tasks/get", &params).below(&["tasks", "get"]),
            Self::V03Rest => v03_rest::task(task_id, None),
            Self::V1 => HttpCall::rpc("GetTask", &params),
            Self::V1Rest => v1_rest::task(task_id, None),
        }
    }

    /// Asks to cancel a task.
    pub fn cancel(self, task_id: &str) -> HttpCall {
        let params = TaskParams { id: task_id };
        match self {
            Self::V01 | Self::V02 | Self::V03 => HttpCall::rpc("tasks/cancel", &params),
            Self::V03Ids => HttpCall::rpc("tasks/cancel", &v03_ids::TaskParams { task_id }),
            Self::V01Paths => HttpCall::rpc("tasks/cancel", &params).below(&["tasks", "cancel"]),
            Self::V03Rest => v03_rest::task(task_id, Some("cancel")),
            Self::V1 => HttpCall::rpc("CancelTask", &params),
            Self::V1Rest => v1_rest::task(task_id, Some("cancel")),
        }
    }

    /// A call that tells v0.1 from v0.2 and does nothing: a send without a message.
    pub(super) fn empty_send() -> HttpCall {
        HttpCall::rpc("message/send", &serde_json::Map::new())
    }

    /// Reads the answer to [`Dialect::send`].
    pub fn read_answer(self, body: &[u8]) -> Result<Answer, NotAResult> {
        let mut answer = self.read(body, Answer::try_from)?;
        if self == Self::V03Rest {
            v03_rest::unwrap_answer(&mut answer);
        }
        Ok(answer)
    }

    /// Reads one event of [`Dialect::stream`] and [`Dialect::subscribe`]: the data of one SSE event.
    pub fn read_event(self, data: &[u8]) -> Result<Event, NotAResult> {
        let mut event = self.read(data, Ok)?;
        if self == Self::V03Rest {
            v03_rest::unwrap_event(&mut event);
        }
        Ok(event)
    }

    /// Reads the answer to [`Dialect::get`] and [`Dialect::cancel`].
    pub fn read_task(self, body: &[u8]) -> Result<Task, NotAResult> {
        let mut task = self.read(body, Task::try_from)?;
        if self == Self::V03Rest {
            v03_rest::unwrap_task(&mut task);
        }
        Ok(task)
    }

    /// Reads a body. What is not a JSON-RPC response with a result is looked at once more: it may be
    /// an error, or a result without the envelope, or there is a reason why it is neither.
    fn read<T>(self, body: &[u8], take: fn(Event) -> Result<T, serde_json::Error>) -> Result<T, NotAResult> {
        let in_envelope = if self.is_rest() { None } else { Event::decode_response(body) };
        let event = match in_envelope {
            Some(event) => Ok(event),
            None => Event::decode(result(body)?),
        };
        event.and_then(take).map_err(|error| match RpcError::bare(body) {
            Some(error) => NotAResult::Error(error),
            None => NotAResult::NotA2a(error.to_string()),
        })
    }
}

#[derive(Serialize)]
struct TaskParams<'a> {
    id: &'a str,
}

/// The `result` of a JSON-RPC response, whatever its id says: some agents answer with one of their
/// own. A body without the envelope is the result itself: so it is in REST, and some agents that
/// should send the envelope leave it out.
fn result(body: &[u8]) -> Result<&str, NotAResult> {
    #[derive(Deserialize)]
    #[serde(expecting = "an object")]
    struct Response<'a> {
        #[serde(borrow)]
        result: Option<&'a RawValue>,
        #[serde(borrow)]
        error: Option<&'a RawValue>,
    }
    let text = std::str::from_utf8(body).map_err(|e| NotAResult::NotA2a(e.to_string()))?;
    if text.trim().is_empty() {
        return Err(NotAResult::NotA2a("the body is empty".to_owned()));
    }
    let response: Response<'_> =
        serde_json::from_str(text).map_err(|e| NotAResult::NotA2a(format!("not a JSON object: {e}")))?;
    match (response.error, response.result) {
        (Some(error), _) => Err(match RpcError::read(error.get()) {
            Some(error) => NotAResult::Error(error),
            None => NotAResult::NotA2a("an error that is neither an object nor text".to_owned()),
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
    fn a_message_has_the_same_id_each_time_it_goes_out_in_any_dialect() {
        let message = OutgoingMessage {
            message_id: Uuid::new_v4(),
            task_id: None,
            new_task_id: None,
            context_id: None,
            reference_task_ids: &[],
            parts: &[],
            skill_id: None,
            output_modes: &[],
            blocking: true,
            retries: &Retries::new(&"agent".into()),
        };
        // Up to v0.1 messages have no ids.
        for dialect in
            [Dialect::V02, Dialect::V03, Dialect::V03Ids, Dialect::V03Rest, Dialect::V1, Dialect::V1Rest]
        {
            for call in [dialect.send(&message), dialect.stream(&message)] {
                let body: Value = serde_json::from_slice(&call.body().unwrap()).unwrap();
                let params = body.get("params").unwrap_or(&body);
                assert_eq!(params["message"]["messageId"], message.message_id.to_string(), "{dialect:?}");
            }
        }
    }
}
