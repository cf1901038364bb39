//! Errors in an agent's body: JSON-RPC's object, and the shapes that REST bindings use.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

/// What an agent's body says when it is not a result.
#[derive(Debug)]
pub enum NotAResult {
    Error(RpcError),
    /// Not A2A at all; the reason.
    NotA2a(String),
}

/// An error as the agent sent it.
#[derive(Debug, Clone, Default)]
pub struct RpcError {
    /// The agent's JSON-RPC code, or the one that its reason stands for.
    pub code: Option<i64>,
    pub message: String,
    /// Whatever else the agent wants to tell.
    pub data: Option<Box<RawValue>>,
    /// Whether the web framework wrote it (`{"detail": …}`), not the agent.
    pub is_of_framework: bool,
}

#[derive(Deserialize)]
struct Wire {
    code: Option<Value>,
    message: Option<Value>,
    // FastAPI's own errors.
    detail: Option<Value>,
    data: Option<Box<RawValue>>,
    details: Option<Box<RawValue>>,
}

impl RpcError {
    /// Reads the value of an `error` key: an object, or only words.
    pub(super) fn read(json: &str) -> Option<Self> {
        if let Ok(message) = serde_json::from_str::<String>(json) {
            return Some(Self { message, ..Self::default() });
        }
        let wire: Wire = serde_json::from_str(json).ok()?;
        let data = wire.data.or(wire.details);
        // REST has the HTTP status here, and the A2A error among the details.
        let code = match wire.code.as_ref().and_then(integer) {
            Some(code) if code < 0 => Some(code),
            own => reason(data.as_deref()).or(own.filter(|code| !(100..600).contains(code))),
        };
        Some(Self {
            code,
            message: words(wire.message).or_else(|| words(wire.detail)).unwrap_or_default(),
            data,
            is_of_framework: false,
        })
    }

    /// Reads an error without anything around it, as some send in an `error` event: a code and words.
    pub(super) fn bare(body: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Bare {
            #[serde(rename = "code")]
            _code: serde_json::Number,
            #[serde(rename = "message")]
            _message: String,
        }
        serde_json::from_slice::<Bare>(body).ok()?;
        Self::read(std::str::from_utf8(body).ok()?)
    }

    /// Reads the body of a response with an error status: the error may be under `error` or bare.
    pub fn in_body(body: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Body<'a> {
            #[serde(borrow)]
            error: Option<&'a RawValue>,
            message: Option<Value>,
            detail: Option<Value>,
        }
        let text = std::str::from_utf8(body).ok()?;
        let wrapped: Body<'_> = serde_json::from_str(text).ok()?;
        match wrapped.error {
            Some(error) => Self::read(error.get()),
            None if wrapped.message.is_some_and(|message| message.is_string()) => Self::read(text),
            None => {
                // What FastAPI's router says when it finds no handler; any other words are a handler's.
                let detail = wrapped.detail?;
                let is_router = ["Not Found", "Method Not Allowed"].iter().any(|words| detail == *words);
                Self::read(text)
                    .map(|error| Self { is_of_framework: error.code.is_none() && is_router, ..error })
            }
        }
    }
}

fn integer(value: &Value) -> Option<i64> {
    match value {
        Value::Number(number) => number.as_i64(),
        Value::String(text) => text.parse().ok(),
        _ => None,
    }
}

fn words(value: Option<Value>) -> Option<String> {
    match value? {
        Value::Null => None,
        Value::String(text) => Some(text),
        other => Some(other.to_string()),
    }
}

/// The JSON-RPC code of the `reason` in a `google.rpc.ErrorInfo` (v1.0, section on error mapping).
fn reason(details: Option<&RawValue>) -> Option<i64> {
    let details: Vec<Value> = serde_json::from_str(details?.get()).ok()?;
    let reason = details.iter().find_map(|detail| detail.get("reason")?.as_str())?;
    Some(match reason {
        "TASK_NOT_FOUND" => -32001,
        "TASK_NOT_CANCELABLE" => -32002,
        "PUSH_NOTIFICATION_NOT_SUPPORTED" => -32003,
        "UNSUPPORTED_OPERATION" => -32004,
        "CONTENT_TYPE_NOT_SUPPORTED" => -32005,
        "INVALID_AGENT_RESPONSE" => -32006,
        "EXTENDED_AGENT_CARD_NOT_CONFIGURED" => -32007,
        "EXTENSION_SUPPORT_REQUIRED" => -32008,
        "VERSION_NOT_SUPPORTED" => -32009,
        "METHOD_NOT_FOUND" => -32601,
        "INVALID_PARAMS" => -32602,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_of_an_error_is_read() {
        for (body, code, message) in [
            (r#"{"message": "Task not found"}"#, None, "Task not found"),
            (r#"{"code": -32002, "message": "no"}"#, Some(-32002), "no"),
            (r#"{"detail": "Not Found"}"#, None, "Not Found"),
            (r#"{"detail": [{"loc": ["x"]}]}"#, None, r#"[{"loc":["x"]}]"#),
            (r#"{"error": "Task not found: t1"}"#, None, "Task not found: t1"),
            (r#"{"error": {"code": "-32601"}}"#, Some(-32601), ""),
            (r#"{"error": {"code": 404, "status": "NOT_FOUND", "message": "gone"}}"#, None, "gone"),
            (
                r#"{"error": {"code": 404, "message": "gone", "details": [{"reason": "TASK_NOT_FOUND"}]}}"#,
                Some(-32001),
                "gone",
            ),
        ] {
            let error = RpcError::in_body(body.as_bytes()).expect(body);
            assert_eq!((error.code, error.message.as_str()), (code, message), "{body}");
        }
        for other in ["", "[]", "7", "<html>", r#"{"message": {"role": "agent"}}"#, r#"{"error": null}"#] {
            assert!(RpcError::in_body(other.as_bytes()).is_none(), "{other}");
        }
    }
}
