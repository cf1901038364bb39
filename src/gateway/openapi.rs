//! The OpenAPI 3.1 document, made from the table of routes.

use serde_json::{Map, Value, json};

use super::routes::{Access, Body, Content, Method, Parameter, Place, ROUTES, Route};
use super::schemas::schemas;

const DESCRIPTION: &str = "Agents on NATS over HTTP. Every error is an error object of the protocol, with its number as \
                           HTTP status. A reply of a call that reached its agent has the status 200, whatever became of \
                           the task: see `status` in the reply.";

pub(super) fn document() -> Value {
    let mut paths = Map::<String, Value>::new();
    for route in ROUTES {
        let item = paths.entry(route.path).or_insert_with(|| json!({}));
        if let Some(item) = item.as_object_mut() {
            item.insert(method(route).to_owned(), operation(route));
        }
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "a2a-bridge gateway",
            "version": env!("CARGO_PKG_VERSION"),
            "description": DESCRIPTION,
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
        },
        "servers": [{ "url": "/" }],
        "security": [{ "token": [] }, { "cookie": [] }],
        "paths": paths,
        "components": {
            "schemas": schemas(),
            "securitySchemes": {
                "token": { "type": "http", "scheme": "bearer" },
                "cookie": { "type": "apiKey", "in": "cookie", "name": "a2a_token" },
            },
        },
    })
}

pub(super) fn method(route: &Route) -> &'static str {
    match route.method {
        Method::Get => "get",
        Method::Post => "post",
    }
}

/// The statuses of a route, without the successful one.
pub(super) fn errors(route: &Route) -> Vec<u16> {
    let mut statuses = vec![400, 403];
    if route.access != Access::Everyone || route.id == "login" {
        statuses.extend([401, 429]);
    }
    if matches!(route.body, Body::Json(_)) {
        statuses.push(408);
    }
    if route.is_change() {
        statuses.extend([413, 415]);
    }
    statuses.extend(route.errors);
    statuses.sort_unstable();
    statuses.dedup();
    statuses
}

fn operation(route: &Route) -> Value {
    let mut operation = Map::new();
    let mut insert = |key: &str, value: Value| _ = operation.insert(key.to_owned(), value);
    insert("operationId", route.id.into());
    insert("summary", route.summary.into());
    if route.access == Access::Operator {
        insert("description", "For operators only.".into());
    }
    let names = route.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let path = names.map(|name| {
        let schema = json!({ "type": "string", "minLength": 1 });
        json!({ "name": name, "in": "path", "required": true, "schema": schema })
    });
    let others = route.parameters.iter().copied().flatten().map(parameter);
    insert("parameters", path.chain(others).collect());
    match route.body {
        Body::None => {}
        Body::Json(schema) => {
            let content = json!({ "application/json": { "schema": reference(schema) } });
            insert("requestBody", json!({ "required": true, "content": content }));
        }
        Body::File => {
            let file = json!({ "type": "string", "contentMediaType": "application/octet-stream" });
            let form = json!({ "type": "object", "required": ["file"], "properties": { "file": file } });
            let content = json!({
                "application/octet-stream": { "schema": {} }, "multipart/form-data": { "schema": form },
            });
            insert("requestBody", json!({ "required": true, "content": content }));
        }
    }
    let (status, content) = route.success;
    let mut responses = Map::new();
    responses.insert(status.to_string(), success(content));
    for status in errors(route) {
        responses.insert(status.to_string(), error(status, content));
    }
    insert("responses", responses.into());
    if route.access == Access::Everyone {
        insert("security", json!([]));
    }
    operation.into()
}

fn parameter(parameter: &Parameter) -> Value {
    let Parameter { place, name, description, schema } = parameter;
    let place = match place {
        Place::Query => "query",
        Place::Header => "header",
    };
    let schema: Value = serde_json::from_str(schema).unwrap_or_default();
    json!({ "name": name, "in": place, "required": false, "description": description, "schema": schema })
}

fn reference(schema: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{schema}") })
}

fn success(content: Content) -> Value {
    let content = match content {
        Content::Json(schema) => json!({ "application/json": { "schema": reference(schema) } }),
        Content::JsonOrEvents(schema) => json!({
            "application/json": { "schema": reference(schema) },
            "text/event-stream": {},
        }),
        Content::Text => json!({ "text/plain": {}, "application/openmetrics-text": {} }),
        Content::Html => json!({ "text/html": {} }),
        Content::File => json!({ "*/*": {} }),
    };
    json!({ "description": "Success", "content": content })
}

fn error(status: u16, content: Content) -> Value {
    let description = match status {
        206 => "A part of the file",
        304 => "The client has the same already",
        400 => "The request is invalid",
        401 => "The token is missing or not valid",
        403 => "The principal may not do this",
        404 => "It does not exist, or belongs to another principal",
        408 => "The body arrives too slowly",
        409 => "It was answered already, or cannot be canceled",
        410 => "The question has expired",
        413 => "The request is too large",
        415 => "The content type is not `application/json`",
        416 => "The range is outside of the file",
        429 => "Too many requests; see `Retry-After`",
        502 => "The agent's response is an error",
        503 => "The agent is not available; see `Retry-After`",
        _ => "No result in time",
    };
    match (status, content) {
        (206, _) => json!({ "description": description, "content": { "*/*": {} } }),
        (304, _) => json!({ "description": description }),
        // For programs that check the health.
        (503, Content::Text) => json!({ "description": description, "content": { "text/plain": {} } }),
        _ => json!({
            "description": description,
            "content": { "application/json": { "schema": reference("Error") } },
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_has_its_own_id_and_every_reference_a_schema() {
        let document = document();
        let mut ids: Vec<_> = ROUTES.iter().map(|route| route.id).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), ROUTES.len());
        let text = document.to_string();
        for reference in text.split("#/components/schemas/").skip(1) {
            let name = reference.split('"').next().unwrap();
            assert!(document["components"]["schemas"].get(name).is_some(), "{name}");
        }
        for parameter in ROUTES.iter().flat_map(|route| route.parameters.iter().copied().flatten()) {
            assert!(serde_json::from_str::<Value>(parameter.schema).is_ok(), "{parameter:?}");
        }
    }

    #[test]
    fn only_login_and_health_checks_need_no_token() {
        let open: Vec<_> =
            ROUTES.iter().filter(|route| route.access == Access::Everyone).map(|route| route.path).collect();
        assert_eq!(open, ["/api/v1/login", "/healthz", "/readyz"]);
    }
}
