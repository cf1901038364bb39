//! The reply of a bridge, parsed leniently.

use async_nats::Message;
use bytes::Bytes;
use serde_json::Value;

use crate::cli::CliResult;
use crate::cli::client::{JsonFields as _, parse_json};
use crate::cli::output::{StdStream, one_line, print_json_text};
use crate::text::shorten;

#[derive(Debug, Clone)]
pub(in crate::cli) struct CallReply {
    raw: Bytes,
    value: Value,
}

impl CallReply {
    pub(in crate::cli) fn parse(message: &Message) -> CliResult<Self> {
        Ok(Self { value: parse_json(message)?, raw: message.payload.clone() })
    }

    /// The data of a `result` frame.
    pub(in crate::cli) fn from_value(value: Value) -> Self {
        Self { raw: value.to_string().into(), value }
    }

    pub(super) fn value(&self) -> &Value {
        &self.value
    }

    pub(super) fn files_mut(&mut self) -> &mut [Value] {
        self.value.pointer_mut("/files").and_then(Value::as_array_mut).map_or(&mut [], Vec::as_mut_slice)
    }

    pub(in crate::cli) fn status(&self) -> &str {
        self.value.text("/status").unwrap_or_default()
    }

    pub(in crate::cli) fn message(&self) -> &str {
        self.value.text("/message").unwrap_or_default()
    }

    pub(in crate::cli) fn task_id(&self) -> Option<&str> {
        self.value.text("/task/id")
    }

    pub(in crate::cli) fn error_code(&self) -> &str {
        self.value.text("/error_info/code").unwrap_or_default()
    }

    pub(in crate::cli) fn error_number(&self, key: &str) -> Option<i64> {
        self.value.get("error_info")?.get(key)?.as_i64()
    }

    pub(in crate::cli) fn files(&self) -> &[Value] {
        self.value.list("/files")
    }

    /// The agent's structured data: its parts, or the object they were merged into.
    pub(in crate::cli) fn data(&self) -> Option<&Value> {
        let is_filled = |data: &&Value| data.as_object().is_some_and(|object| !object.is_empty());
        let data = self.value.get("data_parts").or_else(|| self.value.get("data").filter(is_filled));
        data.filter(|_| !self.needs_input())
    }

    pub(in crate::cli) fn needs_input(&self) -> bool {
        matches!(self.status(), "INPUT_REQUIRED" | "AUTH_REQUIRED")
    }

    /// The follow-up id for an answer, and when it expires.
    pub(in crate::cli) fn follow_up(&self) -> Option<(&str, &str)> {
        let data = self.value.get("data")?;
        let id = data.text("/follow_up_id").filter(|_| self.needs_input())?;
        Some((id, data.text("/expires_at").unwrap_or_default()))
    }

    /// The answers that the agent suggests.
    pub(in crate::cli) fn choices(&self) -> Vec<String> {
        let parts = self.value.list("/data_parts").iter();
        let options = parts.flat_map(|part| part.list("/options"));
        options.filter_map(Value::as_str).map(|option| shorten(&one_line(option), 60)).take(20).collect()
    }

    /// Prints the reply unchanged.
    pub(in crate::cli) fn print_raw(&self) -> CliResult<()> {
        print_json_text(&String::from_utf8_lossy(&self.raw))
    }

    pub(super) fn data_text(&self) -> Option<String> {
        let text = serde_json::to_string_pretty(self.data()?).ok()?;
        Some(StdStream::Stdout.sanitize(&text))
    }
}
