//! The page at `/docs`: the routes for people, without scripts and without other hosts.

use std::fmt::Write as _;

use serde_json::Value;

use super::openapi;
use super::routes::{Access, Body, ROUTES, Route};

/// The page has one style sheet, within it.
pub(super) const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}\
h1,h2{line-height:1.2}code,pre{font:14px/1.45 ui-monospace,monospace}pre{background:#f4f4f4;padding:.75rem;overflow:auto}\
section{border-top:1px solid #ccc;padding:.5rem 0}h3{margin:.5rem 0}.method{display:inline-block;min-width:3.5rem;color:#0a58ca}\
table{border-collapse:collapse}td,th{text-align:left;padding:.15rem .75rem .15rem 0;vertical-align:top}\
@media(prefers-color-scheme:dark){body{color:#e6e6e6;background:#161616}pre{background:#242424}.method{color:#7ab7ff}section{border-color:#444}}";

pub(super) fn page() -> String {
    let mut page = String::from("<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">");
    let _ = write!(
        page,
        "<meta name=\"viewport\" content=\"width=device-width\"><title>a2a-bridge gateway</title><style>{STYLE}</style></head>\
         <body><h1>a2a-bridge gateway</h1><p>Agents on NATS over HTTP. <a href=\"/openapi.json\">openapi.json</a> describes the \
         same for programs.</p><p>Send a token as <code>Authorization: Bearer …</code>. Requests that change something \
         need <code>Content-Type: application/json</code>, except uploads of files. Every error is an error object of the \
         protocol, with its number as HTTP status.</p>"
    );
    for route in ROUTES {
        write_route(route, &mut page);
    }
    page.push_str("<h2>Schemas</h2>");
    if let Value::Object(schemas) = super::schemas::schemas() {
        for (name, schema) in schemas {
            let schema = serde_json::to_string_pretty(&schema).unwrap_or_default();
            let _ = write!(
                page,
                "<section id=\"{name}\"><h3>{name}</h3><pre>{}</pre></section>",
                escape(&schema)
            );
        }
    }
    page.push_str("</body></html>\n");
    page
}

fn write_route(route: &Route, page: &mut String) {
    let method = openapi::method(route).to_ascii_uppercase();
    let _ = write!(
        page,
        "<section id=\"{}\"><h3><code><span class=\"method\">{method}</span> {}</code></h3><p>{}.</p>",
        route.id,
        escape(route.path),
        escape(route.summary)
    );
    match route.access {
        Access::Everyone => page.push_str("<p>Needs no token.</p>"),
        Access::Caller => {}
        Access::Operator => page.push_str("<p>For operators.</p>"),
    }
    let mut parameters = route.parameters.iter().copied().flatten().peekable();
    if parameters.peek().is_some() {
        page.push_str("<table>");
        for parameter in parameters {
            let place = format!("{:?}", parameter.place).to_ascii_lowercase();
            let (name, description) = (parameter.name, escape(parameter.description));
            let _ =
                write!(page, "<tr><td><code>{name}</code></td><td>{place}</td><td>{description}</td></tr>");
        }
        page.push_str("</table>");
    }
    if let Body::Json(schema) = route.body {
        let _ = write!(page, "<p>Body: <a href=\"#{schema}\">{schema}</a></p>");
    }
    let errors: Vec<_> = openapi::errors(route).iter().map(u16::to_string).collect();
    let _ = write!(page, "<p>Statuses: {}, {}</p></section>", route.success.0, errors.join(", "));
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_every_route_and_no_other_host() {
        let page = page();
        assert!(ROUTES.iter().all(|route| page.contains(route.path)));
        assert!(!page.contains("http://") && !page.contains("https://") && !page.contains("<script"));
    }
}
