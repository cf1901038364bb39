//! The one table of routes, from which the router, the OpenAPI document and the page at `/docs` are made. To add a route,
//! add it here.

use std::sync::Arc;

use axum::routing::{MethodRouter, get, post};

use super::Gateway;
use super::rest::{agents, calls, download, stats, system, tasks, upload};

/// Who may use a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Everyone,
    /// Any principal.
    Caller,
    Operator,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Get,
    Post,
}

/// What the body of a request has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Body {
    None,
    /// JSON, described by a schema of this name.
    Json(&'static str),
    /// The bytes of a file, or a form with one.
    File,
}

/// What the body of a successful response has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// JSON, described by a schema of this name.
    Json(&'static str),
    /// The same, or frames as server-sent events.
    JsonOrEvents(&'static str),
    Text,
    Html,
    File,
}

/// A parameter in the query or in a header.
#[derive(Debug)]
pub(super) struct Parameter {
    pub(super) place: Place,
    pub(super) name: &'static str,
    pub(super) description: &'static str,
    /// A JSON schema.
    pub(super) schema: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Query,
    Header,
}

pub(super) struct Route {
    pub(super) method: Method,
    pub(super) path: &'static str,
    pub(super) access: Access,
    /// The unique name of the operation in the OpenAPI document.
    pub(super) id: &'static str,
    pub(super) summary: &'static str,
    pub(super) parameters: &'static [&'static [Parameter]],
    pub(super) body: Body,
    pub(super) success: (u16, Content),
    /// Statuses in addition to those that every route may have.
    pub(super) errors: &'static [u16],
    pub(super) handler: fn() -> MethodRouter<Arc<Gateway>>,
}

impl Route {
    /// Whether a request changes something.
    pub(super) fn is_change(&self) -> bool {
        self.method == Method::Post
    }
}

const fn header(name: &'static str, description: &'static str, schema: &'static str) -> Parameter {
    Parameter { place: Place::Header, name, description, schema }
}

const fn query(name: &'static str, description: &'static str, schema: &'static str) -> Parameter {
    Parameter { place: Place::Query, name, description, schema }
}

/// The headers of a call.
const CALL: &[Parameter] = &[
    header("A2A-Reply", "`final` (default), `stream` or `submit`", r#"{"enum":["final","stream","submit"]}"#),
    header("A2A-Timeout", "The caller's limit, such as `30s`", r#"{"type":"string","maxLength":40}"#),
    header("A2A-Frames", "The frames of a stream", r#"{"enum":["all","text","artifacts"]}"#),
    header("A2A-Files", "How files of the reply are sent", r#"{"enum":["inline","reference"]}"#),
    header(
        "A2A-On-Disconnect",
        "Whether to cancel the task if the client of a stream leaves",
        r#"{"enum":["continue","cancel"]}"#,
    ),
    header(
        "Idempotency-Key",
        "Within 2 minutes, the same key with the same body runs the agent once",
        r#"{"type":"string","maxLength":256,"pattern":"^[!-~]+$"}"#,
    ),
    header("traceparent", "W3C trace context", r#"{"type":"string","maxLength":256,"pattern":"^[!-~]*$"}"#),
];
const LIMIT: &[Parameter] =
    &[query("limit", "Maximum number of tasks", r#"{"type":"integer","minimum":1,"maximum":500}"#)];
const LINES: &[Parameter] = &[query(
    "lines",
    "Number of most recent lines of each instance",
    r#"{"type":"integer","minimum":1,"maximum":1000}"#,
)];
const FILE_NAME: &[Parameter] =
    &[query("name", "Name of the file", r#"{"type":"string","minLength":1,"maxLength":255}"#)];
const RANGE: &[Parameter] = &[
    header("Range", "One range of bytes", r#"{"type":"string","pattern":"^bytes=[0-9]*-[0-9]*$"}"#),
    header("If-None-Match", "`ETag` of what the client has", r#"{"type":"string","pattern":"^[!-~]*$"}"#),
];
const CONDITIONAL: &[Parameter] =
    &[header("If-None-Match", "`ETag` of what the client has", r#"{"type":"string","pattern":"^[!-~]*$"}"#)];

/// Errors of an agent and of its bridge.
const CALL_ERRORS: &[u16] = &[404, 409, 410, 502, 503, 504];

pub(super) const ROUTES: &[Route] = &[
    Route {
        method: Method::Get,
        path: "/api/v1/agents",
        access: Access::Caller,
        id: "listAgents",
        summary: "List the agents",
        parameters: &[CONDITIONAL],
        body: Body::None,
        success: (200, Content::Json("AgentList")),
        errors: &[304],
        handler: || get(agents::list),
    },
    Route {
        method: Method::Get,
        path: "/api/v1/agents/{agent}",
        access: Access::Caller,
        id: "getAgent",
        summary: "Show an agent: its state, its skills with their parameters, and its card; for operators, also a report of each bridge that serves it",
        parameters: &[CONDITIONAL],
        body: Body::None,
        success: (200, Content::Json("Agent")),
        errors: &[304, 404, 503],
        handler: || get(agents::show),
    },
    Route {
        method: Method::Get,
        path: "/api/v1/agents/{agent}/logs",
        access: Access::Operator,
        id: "getAgentLogs",
        summary: "Show the output of an agent that bridges launched",
        parameters: &[LINES],
        body: Body::None,
        success: (200, Content::Json("AgentLogs")),
        errors: &[404, 503, 504],
        handler: || get(agents::logs),
    },
    Route {
        method: Method::Post,
        path: "/api/v1/agents/{agent}/start",
        access: Access::Operator,
        id: "startAgent",
        summary: "Start an agent, at every bridge that serves it",
        parameters: &[],
        body: Body::None,
        success: (200, Content::Json("AgentReports")),
        errors: &[404, 503, 504],
        handler: || post(agents::start),
    },
    Route {
        method: Method::Post,
        path: "/api/v1/agents/{agent}/stop",
        access: Access::Operator,
        id: "stopAgent",
        summary: "Stop an agent, at every bridge that serves it",
        parameters: &[],
        body: Body::None,
        success: (200, Content::Json("AgentReports")),
        errors: &[404, 503, 504],
        handler: || post(agents::stop),
    },
    Route {
        method: Method::Post,
        path: "/api/v1/agents/{agent}/restart",
        access: Access::Operator,
        id: "restartAgent",
        summary: "Restart a launched agent, at every bridge that serves it",
        parameters: &[],
        body: Body::None,
        success: (200, Content::Json("AgentReports")),
        errors: &[404, 503, 504],
        handler: || post(agents::restart),
    },
    Route {
        method: Method::Post,
        path: "/api/v1/agents/{agent}/skills/{skill}",
        access: Access::Caller,
        id: "callSkill",
        summary: "Call a skill. The body is an object with parameters, or a string with the prompt. With `Accept: text/event-stream`, the reply is a stream of frames",
        parameters: &[CALL],
        body: Body::Json("CallBody"),
        success: (200, Content::JsonOrEvents("Reply")),
        errors: CALL_ERRORS,
        handler: || post(calls::call),
    },
    Route {
        method: Method::Get,
        path: "/api/v1/agents/{agent}/tasks",
        access: Access::Caller,
        id: "listTasks",
        summary: "List the tasks of the principal at an agent, the newest first",
        parameters: &[LIMIT],
        body: Body::None,
        success: (200, Content::Json("TaskList")),
        errors: &[404, 503, 504],
        handler: || get(tasks::list),
    },
    Route {
        method: Method::Get,
        path: "/api/v1/agents/{agent}/tasks/{id}",
        access: Access::Caller,
        id: "getTask",
        summary: "Show a task",
        parameters: &[],
        body: Body::None,
        success: (200, Content::Json("Reply")),
        errors: CALL_ERRORS,
        handler: || get(tasks::show),
    },
    Route {
        method: Method::Post,
        path: "/api/v1/agents/{agent}/tasks/{id}/cancel",
        access: Access::Caller,
        id: "cancelTask",
        summary: "Cancel a task",
        parameters: &[],
        body: Body::None,
        success: (200, Content::Json("Reply")),
        errors: CALL_ERRORS,
        handler: || post(tasks::cancel),
    },
    Route {
        method: Method::Post,
        path: "/api/v1/agents/{agent}/follow-ups/{id}",
        access: Access::Caller,
        id: "answerFollowUp",
        summary: "Answer a question of an agent, by the follow-up id of the reply that asked it",
        parameters: &[CALL],
        body: Body::Json("AnswerBody"),
        success: (200, Content::JsonOrEvents("Reply")),
        errors: CALL_ERRORS,
        handler: || post(calls::answer),
    },
    Route {
        method: Method::Get,
        path: "/api/v1/stats",
        access: Access::Caller,
        id: "getStats",
        summary: "Show requests, errors and latency of the agents",
        parameters: &[],
        body: Body::None,
        success: (200, Content::Json("Stats")),
        errors: &[503, 504],
        handler: || get(stats::stats),
    },
    Route {
        method: Method::Post,
        path: "/api/v1/files",
        access: Access::Caller,
        id: "uploadFile",
        summary: "Upload a file, as a raw body or as a form with one file. Calls refer to it by the `url` of the response",
        parameters: &[FILE_NAME],
        body: Body::File,
        success: (201, Content::Json("StoredFile")),
        errors: &[404, 408, 503, 504],
        handler: || post(upload::upload),
    },
    Route {
        method: Method::Get,
        path: "/api/v1/files/{name}",
        access: Access::Caller,
        id: "downloadFile",
        summary: "Download a file of the principal; `{name}` is the last part of its `obj://` URL",
        parameters: &[RANGE],
        body: Body::None,
        success: (200, Content::File),
        errors: &[206, 304, 404, 416, 503, 504],
        handler: || get(download::file),
    },
    Route {
        method: Method::Post,
        path: "/api/v1/login",
        access: Access::Everyone,
        id: "login",
        summary: "Exchange a token for a cookie, for browsers",
        parameters: &[],
        body: Body::Json("LoginBody"),
        success: (200, Content::Json("Login")),
        errors: &[],
        handler: || post(system::login),
    },
    Route {
        method: Method::Get,
        path: "/openapi.json",
        access: Access::Caller,
        id: "getOpenApi",
        summary: "This API as an OpenAPI document",
        parameters: &[CONDITIONAL],
        body: Body::None,
        success: (200, Content::Json("Document")),
        errors: &[304],
        handler: || get(system::openapi),
    },
    Route {
        method: Method::Get,
        path: "/docs",
        access: Access::Caller,
        id: "getDocs",
        summary: "This API as a page for people",
        parameters: &[CONDITIONAL],
        body: Body::None,
        success: (200, Content::Html),
        errors: &[304],
        handler: || get(system::docs),
    },
    Route {
        method: Method::Get,
        path: "/healthz",
        access: Access::Everyone,
        id: "getHealth",
        summary: "Whether the gateway runs",
        parameters: &[],
        body: Body::None,
        success: (200, Content::Text),
        errors: &[],
        handler: || get(system::health),
    },
    Route {
        method: Method::Get,
        path: "/readyz",
        access: Access::Everyone,
        id: "getReadiness",
        summary: "Whether the gateway is connected to NATS",
        parameters: &[],
        body: Body::None,
        success: (200, Content::Text),
        errors: &[503],
        handler: || get(system::ready),
    },
    Route {
        method: Method::Get,
        path: "/metrics",
        access: Access::Operator,
        id: "getMetrics",
        summary: "Metrics of the gateway for Prometheus",
        parameters: &[],
        body: Body::None,
        success: (200, Content::Text),
        errors: &[503],
        handler: || get(system::metrics),
    },
];
