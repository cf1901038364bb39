//! The two wires the agent speaks: JSON-RPC of A2A 1.0 and of A2A 0.3.
//!
//! Most field names are the same in both, so the shapes are in [`shape`]; what differs (method names,
//! parts, spelling of states and roles, wrapping, errors) is in [`v1`] and [`v03`].

mod shape;
mod v03;
mod v1;

use std::collections::BTreeMap;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};

use super::model::{Artifact, Chunk, Event, Message, Part, Role, State, Status, Task};
use super::rpc::{Fault, Method};
use shape::{ArtifactOut, ConfigurationIn, Envelope, MessageOut, SendIn, StatusOut, TaskOut, UpdateOut};

type Raw = Box<RawValue>;

/// Which version of the protocol the agent speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Protocol {
    #[value(name = "1.0")]
    V1,
    #[value(name = "0.3")]
    V03,
}

/// The parameters of a send, checked.
pub(super) struct Send {
    pub(super) message: Message,
    pub(super) accepted_output_modes: Vec<String>,
    pub(super) blocking: bool,
    pub(super) history_length: Option<usize>,
}

/// The parameters of the other methods; each uses what it needs.
#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Query {
    pub(super) id: Option<String>,
    pub(super) context_id: Option<String>,
    pub(super) history_length: Option<usize>,
}

/// An error as JSON-RPC has it.
#[derive(Serialize)]
pub(super) struct ErrorObject {
    pub(super) code: i64,
    pub(super) message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) data: Option<Value>,
}

impl Protocol {
    pub(super) fn method(self, name: &str) -> Option<Method> {
        match self {
            Self::V1 => v1::method(name),
            Self::V03 => v03::method(name),
        }
    }

    pub(super) fn send(self, params: &str) -> Result<Send, Fault> {
        let SendIn { message, configuration } = read(params)?;
        let configuration = configuration.unwrap_or_default();
        let blocking = match self {
            Self::V1 => !configuration.return_immediately.unwrap_or(false),
            Self::V03 => configuration.blocking.unwrap_or(true),
        };
        if message.parts.is_empty() {
            return Err(Fault::BadParams("message.parts: at least one part is required".into()));
        }
        let role = [Role::User, Role::Agent].into_iter().find(|role| self.role(*role) == message.role);
        let role = role.ok_or_else(|| Fault::BadParams(format!("message.role: {:?}", message.role)))?;
        let parts = message.parts.iter().map(|part| match self {
            Self::V1 => v1::read_part(part.get()),
            Self::V03 => v03::read_part(part.get()),
        });
        let message = Message {
            id: message.message_id,
            role,
            parts: parts.collect::<Result<_, _>>()?,
            context_id: message.context_id.filter(|id| !id.is_empty()),
            task_id: message.task_id.filter(|id| !id.is_empty()),
            reference_task_ids: message.reference_task_ids,
            metadata: message.metadata,
        };
        let ConfigurationIn { accepted_output_modes, history_length, .. } = configuration;
        Ok(Send { message, accepted_output_modes, blocking, history_length })
    }

    /// A task where nothing else can be: the result of get and cancel.
    pub(super) fn task(self, task: &Task) -> Raw {
        raw(&self.task_out(task))
    }

    /// A page with all the tasks; only 1.0 has it.
    pub(super) fn list(self, tasks: &[Task]) -> Raw {
        let tasks: Vec<_> = tasks.iter().map(|task| self.task(task)).collect();
        let total = tasks.len();
        let page = [("pageSize", raw(&total)), ("totalSize", raw(&total)), ("nextPageToken", raw(&""))];
        raw(&std::iter::once(("tasks", raw(&tasks))).chain(page).collect::<BTreeMap<_, _>>())
    }

    /// A task as the answer to a send or as an event.
    pub(super) fn task_answer(self, task: &Task) -> Raw {
        self.wrap("task", self.task_out(task))
    }

    pub(super) fn message_answer(self, message: &Message) -> Raw {
        self.wrap("message", self.message_out(message))
    }

    pub(super) fn event(self, task_id: &str, context_id: &str, event: &Event) -> Raw {
        let empty = UpdateOut {
            task_id,
            context_id,
            status: None,
            artifact: None,
            append: None,
            last_chunk: None,
            is_final: None,
            kind: None,
        };
        match event {
            Event::Status(status) => {
                let is_final = self.v03(status.state.ends_turn());
                let status = Some(self.status_out(status));
                let kind = self.v03("status-update");
                self.wrap("statusUpdate", UpdateOut { status, is_final, kind, ..empty })
            }
            Event::Artifact(artifact, chunk) => {
                let (append, last_chunk) = self.flags(*chunk);
                let artifact = Some(self.artifact_out(artifact));
                let kind = self.v03("artifact-update");
                self.wrap("artifactUpdate", UpdateOut { artifact, append, last_chunk, kind, ..empty })
            }
        }
    }

    /// The whole response. Without a request id, 1.0 says `null` and 0.3 nothing.
    pub(super) fn response(self, id: Option<&Value>, outcome: Result<Raw, &Fault>) -> String {
        let (result, error) = match outcome {
            Ok(result) => (Some(result), None),
            Err(fault) => (None, Some(self.error(fault))),
        };
        let id = id.or(match self {
            Self::V1 => Some(&Value::Null),
            Self::V03 => None,
        });
        raw(&Envelope { result, error, id, jsonrpc: "2.0" }).get().to_owned()
    }

    fn error(self, fault: &Fault) -> ErrorObject {
        match self {
            Self::V1 => v1::error(fault),
            Self::V03 => v03::error(fault),
        }
    }

    fn wrap(self, name: &'static str, value: impl Serialize) -> Raw {
        match self {
            Self::V1 => raw(&BTreeMap::from([(name, value)])),
            Self::V03 => raw(&value),
        }
    }

    /// A value that only 0.3 writes.
    fn v03<T>(self, value: T) -> Option<T> {
        (self == Self::V03).then_some(value)
    }

    /// `append` and `lastChunk`: 1.0 leaves out what is false, 0.3 writes both for a stream.
    fn flags(self, chunk: Chunk) -> (Option<bool>, Option<bool>) {
        let (append, last) = match chunk {
            Chunk::Whole => return (None, None),
            Chunk::First => (false, false),
            Chunk::Next => (true, false),
            Chunk::Last => (true, true),
            Chunk::Closing => (false, true),
        };
        let written = |flag: bool| (flag || self == Self::V03).then_some(flag);
        (written(append), written(last))
    }

    pub(super) fn state(self, state: State) -> &'static str {
        match self {
            Self::V1 => v1::state(state),
            Self::V03 => v03::state(state),
        }
    }

    fn role(self, role: Role) -> &'static str {
        match (self, role) {
            (Self::V1, Role::User) => "ROLE_USER",
            (Self::V1, Role::Agent) => "ROLE_AGENT",
            (Self::V03, Role::User) => "user",
            (Self::V03, Role::Agent) => "agent",
        }
    }

    fn parts(self, parts: &[Part]) -> Vec<Raw> {
        let write = match self {
            Self::V1 => v1::write_part,
            Self::V03 => v03::write_part,
        };
        parts.iter().map(write).collect()
    }

    fn task_out(self, task: &Task) -> TaskOut<'_> {
        TaskOut {
            id: &task.id,
            context_id: &task.context_id,
            status: self.status_out(&task.status),
            artifacts: task.artifacts.iter().map(|artifact| self.artifact_out(artifact)).collect(),
            history: task.history.iter().map(|message| self.message_out(message)).collect(),
            kind: self.v03("task"),
        }
    }

    fn status_out(self, status: &Status) -> StatusOut<'_> {
        let timestamp = status.timestamp.as_ref().map(|at| match self {
            Self::V1 => at.clone(),
            Self::V03 => at.replace('Z', "+00:00"),
        });
        let message = status.message.as_ref().map(|message| self.message_out(message));
        StatusOut { state: self.state(status.state), message, timestamp }
    }

    fn message_out(self, message: &Message) -> MessageOut<'_> {
        MessageOut {
            message_id: &message.id,
            context_id: message.context_id.as_deref(),
            task_id: message.task_id.as_deref(),
            role: self.role(message.role),
            parts: self.parts(&message.parts),
            metadata: message.metadata.as_ref(),
            reference_task_ids: &message.reference_task_ids,
            kind: self.v03("message"),
        }
    }

    fn artifact_out(self, artifact: &Artifact) -> ArtifactOut<'_> {
        ArtifactOut {
            artifact_id: &artifact.id,
            name: &artifact.name,
            description: artifact.description.as_deref(),
            parts: self.parts(&artifact.parts),
        }
    }
}

/// Reads parameters of any method.
pub(super) fn read<'de, T: Deserialize<'de>>(params: &'de str) -> Result<T, Fault> {
    serde_json::from_str(params).map_err(|error| Fault::BadParams(error.to_string()))
}

fn raw(value: &impl Serialize) -> Raw {
    to_raw_value(value).expect("every shape here has string keys")
}
