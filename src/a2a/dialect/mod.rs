//! The wires: how a call is written for one version of A2A, and what comes back.
//!
//! Each dialect is a file with its own exact shapes. They share one lenient reading (see
//! [`super::model`]), because agents mix the versions' spellings. A new wire is a new variant of
//! [`Dialect`], a file that writes its calls, and the rules in [`super::card`] that choose it.

mod v03;
mod v1;

pub use v1::{WirePart as V1Part, part as v1_part};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::model::{Answer, Event, Part, Task};

/// A version of A2A together with its binding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// v0.2 and v0.3 over JSON-RPC.
    V03,
    /// v1.0 over JSON-RPC.
    V1,
}

/// When an agent shall answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// When the task has ended, or needs the caller.
    UntilSettled,
    /// As soon as the task has an id.
    No,
}

/// A message to send, independent of the wire.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing<'a> {
    /// Continues this task.
    pub task_id: Option<&'a str>,
    /// Continues this conversation.
    pub context_id: Option<&'a str>,
    /// Tasks that the message refers to.
    pub reference_task_ids: &'a [String],
    /// The content.
    pub parts: &'a [Part],
    /// The skill that the caller chose.
    pub skill_id: Option<&'a str>,
    /// Media types that the caller takes.
    pub output_modes: &'a [String],
    /// When the agent shall answer; a stream answers at once anyway.
    pub wait: Wait,
}

/// One HTTP request in the making.
#[derive(Debug)]
pub struct Call {
    /// The JSON body.
    pub body: Vec<u8>,
}

/// What an agent's body says when it is not a result.
#[derive(Debug)]
pub enum NotAResult {
    /// A JSON-RPC error object.
    Error(RpcError),
    /// Not A2A at all; the reason.
    NotA2a(String),
}

/// A JSON-RPC error as the agent sent it.
#[derive(Debug, Clone, Deserialize)]
pub struct RpcError {
    /// The agent's code; some leave it out.
    #[serde(default)]
    pub code: i64,
    /// The agent's words.
    #[serde(default, deserialize_with = "crate::json::null_is_default")]
    pub message: String,
    /// Whatever else the agent wants to tell.
    pub data: Option<Box<RawValue>>,
}

impl Dialect {
    /// The protocol version as registry and metadata show it.
    pub fn protocol_version(self) -> &'static str {
        match self {
            Self::V03 => "0.3",
            Self::V1 => "1.0",
        }
    }

    /// The binding as registry and metadata show it.
    pub fn binding(self) -> &'static str {
        match self {
            Self::V03 | Self::V1 => "JSONRPC",
        }
    }

    /// The value of `A2A-Version`. Older agents refuse a version that they do not know.
    pub fn version_header(self) -> Option<&'static str> {
        match self {
            Self::V03 => None,
            Self::V1 => Some("1.0"),
        }
    }

    /// A send.
    pub fn send(self, message: &Outgoing<'_>) -> Call {
        match self {
            Self::V03 => rpc("message/send", &v03::send_params(message)),
            Self::V1 => rpc("SendMessage", &v1::send_params(message)),
        }
    }

    /// A send whose answer comes as a stream of events.
    pub fn stream(self, message: &Outgoing<'_>) -> Call {
        match self {
            Self::V03 => rpc("message/stream", &v03::send_params(message)),
            Self::V1 => rpc("SendStreamingMessage", &v1::send_params(message)),
        }
    }

    /// Asks for the events of a task that is under way.
    pub fn subscribe(self, task_id: &str) -> Call {
        let method = match self {
            Self::V03 => "tasks/resubscribe",
            Self::V1 => "SubscribeToTask",
        };
        rpc(method, &TaskParams { id: task_id })
    }

    /// Asks for a task.
    pub fn get(self, task_id: &str) -> Call {
        let method = match self {
            Self::V03 => "tasks/get",
            Self::V1 => "GetTask",
        };
        rpc(method, &TaskParams { id: task_id })
    }

    /// Asks to cancel a task.
    pub fn cancel(self, task_id: &str) -> Call {
        let method = match self {
            Self::V03 => "tasks/cancel",
            Self::V1 => "CancelTask",
        };
        rpc(method, &TaskParams { id: task_id })
    }

    /// Reads the answer to [`Dialect::send`].
    pub fn read_answer(self, body: &[u8]) -> Result<Answer, NotAResult> {
        Answer::decode(rpc_result(body)?).map_err(|e| NotAResult::NotA2a(e.to_string()))
    }

    /// Reads one event of [`Dialect::stream`] and [`Dialect::subscribe`]: the data of one SSE event.
    pub fn read_event(self, data: &[u8]) -> Result<Event, NotAResult> {
        Event::decode(rpc_result(data)?).map_err(|e| NotAResult::NotA2a(e.to_string()))
    }

    /// Reads the answer to [`Dialect::get`] and [`Dialect::cancel`].
    pub fn read_task(self, body: &[u8]) -> Result<Task, NotAResult> {
        Task::decode(rpc_result(body)?).map_err(|e| NotAResult::NotA2a(e.to_string()))
    }
}

#[derive(Serialize)]
struct TaskParams<'a> {
    id: &'a str,
}

fn rpc(method: &str, params: &impl Serialize) -> Call {
    #[derive(Serialize)]
    struct Request<'a, P> {
        jsonrpc: &'static str,
        // Some agents want UUIDs here.
        id: uuid::Uuid,
        method: &'a str,
        params: &'a P,
    }
    let request = Request {
        jsonrpc: "2.0",
        id: uuid::Uuid::new_v4(),
        method,
        params,
    };
    let body = serde_json::to_vec(&request).expect("strings, lists and raw JSON always serialize");
    Call { body }
}

/// The `result` of a JSON-RPC response, whatever its id says: some agents answer with one of their own.
fn rpc_result(body: &[u8]) -> Result<&str, NotAResult> {
    #[derive(Deserialize)]
    struct Response<'a> {
        #[serde(borrow)]
        result: Option<&'a RawValue>,
        error: Option<RpcError>,
    }
    let response: Response<'_> = serde_json::from_slice(body)
        .map_err(|e| NotAResult::NotA2a(format!("not a JSON-RPC response: {e}")))?;
    match (response.error, response.result) {
        (Some(error), _) => Err(NotAResult::Error(error)),
        (None, Some(result)) => Ok(result.get()),
        // Some agents leave the envelope out.
        (None, None) => std::str::from_utf8(body).map_err(|e| NotAResult::NotA2a(e.to_string())),
    }
}
