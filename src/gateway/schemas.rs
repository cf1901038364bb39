//! The JSON schemas of the OpenAPI document.

use serde_json::{Value, json};

/// The schemas by name. Objects may have more fields than those that are listed, except in requests.
pub(super) fn schemas() -> Value {
    let text = json!({ "type": "string" });
    let nullable = json!({ "type": ["string", "null"] });
    let count = json!({ "type": "integer", "minimum": 0 });
    let file = json!({
        "anyOf": [
            { "type": "string", "description": "URL, `http(s)://` or `obj://`" },
            {
                "type": "object", "required": ["bytes"], "additionalProperties": false,
                "properties": {
                    "name": text, "mime_type": text, "bytes": { "type": "string", "contentEncoding": "base64" },
                },
            },
        ],
    });
    let error_info = json!({
        "type": "object", "required": ["code", "retryable"],
        "properties": {
            "code": text, "retryable": { "type": "boolean" }, "a2a_code": { "type": ["integer", "null"] }, "a2a_data": {},
        },
    });
    let task = json!({
        "type": ["object", "null"],
        "properties": { "id": nullable, "context_id": nullable, "agent": nullable, "skill": nullable },
    });
    json!({
        "Reply": {
            "type": "object",
            "description": "The reply object of the protocol",
            "required": ["success", "status", "message", "files", "data", "artifacts", "task"],
            "properties": {
                "success": { "type": "boolean" },
                "status": { "enum": [
                    "COMPLETED", "FAILED", "REJECTED", "CANCELED", "INPUT_REQUIRED", "AUTH_REQUIRED", "WORKING",
                ] },
                "message": text,
                "files": { "type": "array", "items": { "type": "object" } },
                "data": { "type": "object" },
                "data_parts": { "type": "array" },
                "artifacts": { "type": "array", "items": { "type": "object" } },
                "error_info": error_info,
                "task": task,
            },
        },
        "Error": {
            "type": "object",
            "description": "The error object of the protocol",
            "required": ["success", "status", "message", "files", "data", "artifacts", "error_info"],
            "properties": {
                "success": { "const": false },
                "status": { "const": "ERROR" },
                "message": text,
                "error_info": error_info,
                "task": task,
            },
        },
        "CallBody": {
            "description": "The prompt, or the parameters of the skill",
            "anyOf": [
                { "type": "string", "pattern": "\\S" },
                {
                    "type": "object",
                    "properties": {
                        "prompt": text,
                        "files": { "type": "array", "items": file },
                        "data": { "type": "object" },
                        "meta": {
                            "type": "object", "additionalProperties": false,
                            "properties": {
                                "session_id": { "type": "string", "minLength": 1 },
                                "reference_task_ids": { "type": "array", "items": text },
                                "output_modes": { "type": "array", "items": text },
                            },
                        },
                    },
                    "additionalProperties": { "type": ["string", "number", "boolean"] },
                },
            ],
        },
        "AnswerBody": {
            "type": "object", "required": ["response"], "additionalProperties": false,
            "properties": { "response": text, "files": { "type": "array", "items": file } },
        },
        "LoginBody": {
            "type": "object", "required": ["token"], "additionalProperties": false, "properties": { "token": text },
        },
        "Login": {
            "type": "object", "required": ["principal", "role"],
            "properties": { "principal": text, "role": { "enum": ["caller", "operator"] } },
        },
        "AgentList": {
            "type": "object", "required": ["agents"],
            "properties": { "agents": { "type": "array", "items": {
                "type": "object", "required": ["agent", "state", "skills", "instances"],
                "properties": {
                    "agent": text, "state": text, "since": nullable, "reason": nullable,
                    "skills": { "type": "array", "items": text }, "instances": count,
                },
            } } },
        },
        "Agent": {
            "type": "object", "required": ["agent", "state", "skills", "instances", "card"],
            "properties": {
                "agent": text,
                "state": text,
                "skills": { "type": "array", "items": {
                    "type": "object", "required": ["action", "name", "description"],
                    "properties": {
                        "action": text, "skill": nullable, "name": text, "description": text,
                        "params": { "type": ["object", "null"], "description": "JSON schema of the parameters" },
                    },
                } },
                "instances": { "type": "array", "items": { "type": "object" } },
                "card": { "type": ["object", "null"], "description": "The card in the form of A2A 1.0" },
                "reports": { "type": "array", "items": { "type": "object" } },
            },
        },
        "AgentLogs": {
            "type": "object", "required": ["agent", "instances"],
            "properties": { "agent": text, "instances": { "type": "array", "items": {
                "type": "object", "required": ["instance", "lines", "next"],
                "properties": { "instance": text, "lines": { "type": "array" }, "next": count },
            } } },
        },
        "AgentReports": {
            "type": "object", "required": ["agent", "reports"],
            "properties": { "agent": text, "reports": { "type": "array", "items": { "type": "object" } } },
        },
        "TaskList": {
            "type": "object", "required": ["agent", "tasks", "left_out"],
            "properties": { "agent": text, "left_out": count, "tasks": { "type": "array", "items": {
                "type": "object", "required": ["id", "state", "open", "submitted", "updated"],
                "properties": {
                    "id": text, "state": text, "open": { "type": "boolean" }, "submitted": { "type": "boolean" },
                    "skill": nullable, "context_id": nullable, "updated": text,
                },
            } } },
        },
        "Stats": {
            "type": "object", "required": ["services"],
            "properties": { "services": { "type": "array", "items": { "type": "object" } } },
        },
        "StoredFile": {
            "type": "object", "required": ["url", "size", "sha256"],
            "properties": { "url": text, "name": nullable, "mime_type": nullable, "size": count, "sha256": text },
        },
        "Document": { "type": "object" },
    })
}
