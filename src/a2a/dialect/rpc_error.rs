//! Errors in the body of a response: the error object of JSON-RPC, and the forms that REST bindings use.

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::text::shorten;

/// Why a body is not a result.
#[derive(Debug)]
pub enum ReadError {
    /// The agent reports an error.
    Agent(RpcError),
    /// The body is not A2A, for this reason.
    NotA2a(String),
}

#[derive(Debug, Clone, Default)]
pub struct RpcError {
    /// The JSON-RPC code, or the one that corresponds to the `reason` of a REST error.
    pub code: Option<i64>,
    pub message: String,
    pub data: Option<Box<RawValue>>,
    /// Whether the web framework wrote it, not the agent (`{"detail": …}`).
    pub is_from_framework: bool,
}

/// The keys of an error object, and of a body that contains one.
#[derive(Deserialize)]
struct ErrorObject<'a> {
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    #[serde(borrow)]
    code: Option<&'a RawValue>,
    #[serde(borrow)]
    message: Option<&'a RawValue>,
    // FastAPI's errors.
    #[serde(borrow)]
    detail: Option<&'a RawValue>,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    #[serde(borrow)]
    details: Option<&'a RawValue>,
}

/// Maximum size of a value that is read as more than text. Values take many times the memory of their text.
const MAX_VALUE: usize = 64 << 10;
/// Maximum bytes of the data of an error. An error may be kept for as long as the bridge tries other ways to reach the
/// agent, so it must be small.
const MAX_DATA: usize = 64 << 10;
/// Maximum bytes of the message of an error.
const MAX_MESSAGE: usize = 4 << 10;
/// Added to the message of an error whose data is too large.
pub(crate) const DATA_LEFT_OUT: &str = " (the error data is left out because it is too large)";

impl RpcError {
    /// Reads the value of an `error` key: an object or a string.
    pub(super) fn read(json: &str) -> Option<Self> {
        if let Ok(message) = serde_json::from_str::<String>(json) {
            return Some(Self { message: shorten(&message, MAX_MESSAGE), ..Self::default() });
        }
        serde_json::from_str::<ErrorObject<'_>>(json).ok().map(Self::from)
    }

    /// Reads an error object without an envelope, which some agents send in an `error` event.
    pub(super) fn bare(body: &[u8]) -> Option<Self> {
        let object: ErrorObject<'_> = serde_json::from_slice(body).ok()?;
        let is_number = |raw: &RawValue| raw.get().starts_with(|c: char| c == '-' || c.is_ascii_digit());
        let is_error = object.code.is_some_and(is_number) && object.message.is_some_and(is_string);
        is_error.then(|| object.into())
    }

    /// Reads the body of a response with an error status: the error is under `error`, or is the body itself.
    pub fn in_body(body: &[u8]) -> Option<Self> {
        let object: ErrorObject<'_> = serde_json::from_slice(body).ok()?;
        if let Some(error) = object.error {
            return Self::read(error.get());
        }
        if object.message.is_some_and(is_string) {
            return Some(object.into());
        }
        // FastAPI's router writes these two when it finds no handler; any other text is from a handler.
        let detail = object.detail?;
        let is_router = ["\"Not Found\"", "\"Method Not Allowed\""].contains(&detail.get());
        let error = Self::from(object);
        Some(Self { is_from_framework: error.code.is_none() && is_router, ..error })
    }
}

impl From<ErrorObject<'_>> for RpcError {
    fn from(object: ErrorObject<'_>) -> Self {
        let data = object.data.or(object.details);
        // In REST `code` is the HTTP status, and the A2A error is among the details.
        let code = match object.code.and_then(integer) {
            Some(code) if code < 0 => Some(code),
            own => code_of_reason(data).or(own.filter(|code| !(100..600).contains(code))),
        };
        let message = object.message.and_then(as_text).or_else(|| object.detail.and_then(as_text));
        let mut message = message.map(|message| shorten(&message, MAX_MESSAGE)).unwrap_or_default();
        let is_too_large = data.is_some_and(|data| data.get().len() > MAX_DATA);
        if is_too_large {
            message.push_str(DATA_LEFT_OUT);
        }
        let data = data.filter(|_| !is_too_large).map(ToOwned::to_owned);
        Self { code, message, data, is_from_framework: false }
    }
}

fn is_string(raw: &RawValue) -> bool {
    raw.get().starts_with('"')
}

fn integer(raw: &RawValue) -> Option<i64> {
    raw.get().trim_matches('"').parse().ok()
}

fn as_text(raw: &RawValue) -> Option<String> {
    let text = raw.get();
    match text.as_bytes().first() {
        _ if text == "null" => None,
        Some(b'"') => serde_json::from_str(text).ok(),
        // Without line breaks, unless it is long.
        _ if text.len() <= MAX_VALUE => serde_json::from_str(text).ok().map(|value: Value| value.to_string()),
        _ => Some(shorten(text, MAX_VALUE)),
    }
}

/// The JSON-RPC code of the `reason` in a `google.rpc.ErrorInfo` (v1.0, section on error mapping).
fn code_of_reason(details: Option<&RawValue>) -> Option<i64> {
    let details = details.filter(|details| details.get().len() <= MAX_VALUE)?;
    let details: Vec<Value> = serde_json::from_str(details.get()).ok()?;
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
    fn every_form_of_an_error_is_read() {
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
        for (size, is_kept) in [(MAX_DATA, true), (MAX_DATA + 1, false)] {
            let data = format!("\"{}\"", "x".repeat(size - 2));
            let body = format!(r#"{{"error": {{"code": -1, "message": "no", "data": {data}}}}}"#);
            let error = RpcError::in_body(body.as_bytes()).unwrap();
            assert_eq!((error.data.is_some(), error.message.ends_with(DATA_LEFT_OUT)), (is_kept, !is_kept));
        }
        for other in ["", "[]", "7", "<html>", r#"{"message": {"role": "agent"}}"#, r#"{"error": null}"#] {
            assert!(RpcError::in_body(other.as_bytes()).is_none(), "{other}");
        }
    }
}
