//! A request, checked: from here on everything is valid by type, whoever sent it.

use std::time::Duration;

use bytes::Bytes;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::params::Template;
use crate::a2a::model::{File, FileContent, Part, normalize_base64};
use crate::json;
use crate::json::RawObject;
use crate::reply::error::ActionError;
use crate::telemetry::trace_context::TraceContext;

/// Some editors and shells write it before the first character of a text.
const BYTE_ORDER_MARK: char = '\u{feff}';
/// Most files in one request.
const MAX_FILES: usize = 64;
/// Most entries of a list in `meta`.
const MAX_LIST: usize = 100;
/// Longest id, mode or key from a caller.
const MAX_ID: usize = 256;

/// A request body as it came.
#[derive(Debug, Clone)]
pub(crate) struct RequestBody {
    bytes: Bytes,
    declared_json: bool,
}

/// What a caller wants of a skill.
#[derive(Debug)]
pub(crate) struct Invocation {
    /// What is sent to the agent.
    pub parts: Vec<Part>,
    /// The caller's wishes beside it.
    pub meta: Meta,
}

/// The caller's wishes beside the content.
#[derive(Debug, Default)]
pub(crate) struct Meta {
    pub session_id: Option<String>,
    /// Tasks that the request refers to.
    pub reference_task_ids: Vec<String>,
    /// Media types that the caller takes.
    pub output_modes: Vec<String>,
}

/// An answer to an agent's question.
#[derive(Debug)]
pub(crate) struct FollowUpAnswer {
    pub follow_up_id: String,
    /// What is sent to the agent.
    pub parts: Vec<Part>,
}

/// How the caller wants the reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum ReplyMode {
    /// One reply when the task ends or needs input.
    #[default]
    Final,
    /// Everything as it comes, then the reply.
    Stream,
    /// One reply at once; the task goes on, and its changes are published.
    Submit,
}

/// What a caller can choose about a call, beside its content.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallOptions {
    pub mode: ReplyMode,
    pub timeout: Option<Duration>,
    /// TraceContext context to hand on to the agent.
    pub trace: TraceContext,
}

impl RequestBody {
    /// `content_type` is the value of the header of that name, whose parameters do not matter.
    pub(crate) fn new(bytes: Bytes, content_type: Option<&str>) -> Self {
        let media_type = content_type.and_then(|value| value.split(';').next()).unwrap_or_default();
        Self { bytes, declared_json: media_type.trim().eq_ignore_ascii_case("application/json") }
    }

    /// The text without its byte order mark.
    fn text(&self) -> Result<&str, ActionError> {
        let text = std::str::from_utf8(&self.bytes)
            .map_err(|_| ActionError::invalid("the body is neither JSON nor UTF-8 text"))?;
        Ok(text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text))
    }

    /// An object is the parameters, a string the prompt, an array refused, anything else text.
    fn read(&self) -> Result<Content, ActionError> {
        let text = self.text()?;
        let json = text.trim_matches(is_blank);
        let not_json = |error: serde_json::Error| {
            ActionError::invalid(format!(
                "the body is not valid JSON: {error}; send an object, a string or plain text"
            ))
        };
        match json.as_bytes().first() {
            Some(b'{') => match as_object(json)? {
                Ok(fields) => return Ok(Content::Fields(fields)),
                // A text in braces is far more often a mistake in JSON than a prompt.
                Err(error) if self.declared_json || json.ends_with('}') => return Err(not_json(error)),
                Err(_) => {}
            },
            Some(b'"') => match serde_json::from_str(json) {
                Ok(prompt) => return Ok(Content::Prompt(prompt)),
                Err(error) if self.declared_json => return Err(not_json(error)),
                Err(_) => {}
            },
            first => match serde_json::from_str::<IgnoredAny>(json) {
                Ok(_) if first == Some(&b'[') => {
                    let message = "the body is a JSON array; send an object, a string or plain text";
                    return Err(ActionError::invalid(message));
                }
                Err(error) if self.declared_json => return Err(not_json(error)),
                _ => {}
            },
        }
        Ok(Content::Prompt(text.to_owned()))
    }

    /// The parameters of an action that takes nothing but an object.
    fn fields(&self, what: &str) -> Result<Fields, ActionError> {
        as_object(self.text()?.trim_matches(is_blank))?
            .map_err(|_| ActionError::invalid(format!("the body must be a JSON object with {what}")))
    }
}

impl Invocation {
    /// Reads a request body for a skill with these parameters.
    ///
    /// `prompt` may be empty only if there are files or data, and without placeholders it has to be
    /// given even then.
    pub(crate) fn parse(body: &RequestBody, template: &Template) -> Result<Self, ActionError> {
        let mut fields = match body.read()? {
            Content::Prompt(prompt) if prompt.chars().all(is_blank) => return Err(empty("prompt")),
            Content::Prompt(prompt) => {
                return Ok(Self { parts: vec![Part::Text(prompt)], meta: Meta::default() });
            }
            Content::Fields(fields) => fields,
        };
        let meta = fields.take("meta").map(|raw| Meta::parse(&raw)).transpose()?.unwrap_or_default();
        let files = fields.take("files").map(|raw| files(&raw)).transpose()?.unwrap_or_default();
        let data = fields.take("data").map(|raw| object("data", raw)).transpose()?;
        let prompt = fields.take("prompt").map(|raw| string("prompt", &raw)).transpose()?;

        let mut values = Vec::new();
        for name in template.names() {
            if let Some(raw) = fields.take(name) {
                values.push((name.as_str(), scalar(name, &raw)?));
            }
        }
        fields.finish(|| known_parameters(template))?;
        let text = match prompt {
            Some(_) if !values.is_empty() => {
                let names: Vec<_> = values.iter().map(|(name, _)| format!("`{name}`")).collect();
                let message = format!("give either `prompt` or {}, not both", names.join(", "));
                return Err(ActionError::invalid(message));
            }
            Some(prompt) => prompt,
            None if template.names().is_empty() => return Err(missing("prompt")),
            None => {
                if let Some(name) =
                    template.names().iter().find(|name| !values.iter().any(|(n, _)| n == name))
                {
                    return Err(missing(name));
                }
                template.fill(|name| values.iter().find(|(n, _)| *n == name).map_or("", |(_, value)| value))
            }
        };
        if text.chars().all(is_blank) && files.is_empty() && data.is_none() {
            return Err(empty(
                template.names().first().filter(|_| !values.is_empty()).map_or("prompt", String::as_str),
            ));
        }
        let mut parts = vec![Part::Text(text)];
        parts.extend(data.map(Part::Data));
        parts.extend(files.into_iter().map(Part::File));
        Ok(Self { parts, meta })
    }
}

impl FollowUpAnswer {
    /// Reads the body of `provide_required_input`.
    pub(crate) fn parse(body: &RequestBody) -> Result<Self, ActionError> {
        let mut fields = body.fields("`follow_up_id` and `user_response`")?;
        let follow_up_id = string("follow_up_id", &fields.require("follow_up_id")?)?;
        let response = string("user_response", &fields.require("user_response")?)?;
        let files = fields.take("files").map(|raw| files(&raw)).transpose()?.unwrap_or_default();
        fields.finish(|| "`follow_up_id`, `user_response`, `files`".to_owned())?;
        let mut parts = vec![Part::Text(response)];
        parts.extend(files.into_iter().map(Part::File));
        Ok(Self { follow_up_id, parts })
    }
}

/// Reads the body of `cancel_task` and `get_task`: the task's id.
pub(crate) fn task_id(body: &RequestBody) -> Result<String, ActionError> {
    let mut fields = body.fields("`task_id`")?;
    let id = string("task_id", &fields.require("task_id")?)?;
    fields.finish(|| "`task_id`".to_owned())?;
    Ok(id)
}

impl Meta {
    fn parse(raw: &RawValue) -> Result<Self, ActionError> {
        let object: RawObject = serde_json::from_str(raw.get()).map_err(|_| wrong("meta", "an object"))?;
        let mut fields = Fields(object);
        let session_id = fields.take("session_id").map(|raw| string("meta.session_id", &raw)).transpose()?;
        if session_id.as_ref().is_some_and(|id| id.is_empty() || id.len() > MAX_ID) {
            return Err(wrong("meta.session_id", &format!("a text of 1 to {MAX_ID} bytes")));
        }
        let mut list = |key: &str| match fields.take(key) {
            Some(raw) => strings(&format!("meta.{key}"), &raw),
            None => Ok(Vec::new()),
        };
        let (reference_task_ids, output_modes) = (list("reference_task_ids")?, list("output_modes")?);
        match fields.0.0.first() {
            Some((key, _)) => {
                let message = format!("unknown key `meta.{}`", crate::text::shorten(key, 80));
                Err(ActionError::invalid(
                    message + "; known are `session_id`, `reference_task_ids`, `output_modes`",
                ))
            }
            None => Ok(Self { session_id, reference_task_ids, output_modes }),
        }
    }
}

enum Content {
    Prompt(String),
    Fields(Fields),
}

fn is_blank(c: char) -> bool {
    c.is_whitespace() || c == BYTE_ORDER_MARK
}

/// The outer error is about an object that is JSON and still refused, the inner one about text that is
/// no JSON object.
fn as_object(text: &str) -> Result<Result<Fields, serde_json::Error>, ActionError> {
    let object: RawObject = match serde_json::from_str(text) {
        Ok(object) => object,
        Err(error) => return Ok(Err(error)),
    };
    if !json::is_shallow(text.as_bytes()) {
        return Err(ActionError::invalid(format!("the body nests deeper than {}", json::MAX_DEPTH)));
    }
    let mut keys = std::collections::HashSet::new();
    match object.0.iter().find(|(key, _)| !keys.insert(key.as_str())) {
        Some((key, _)) => {
            Err(ActionError::invalid(format!("`{}` is given twice", crate::text::shorten(key, 80))))
        }
        None => Ok(Ok(Fields(object))),
    }
}

/// The fields of an object that nobody has taken yet. `null` is absent.
struct Fields(RawObject);

impl Fields {
    fn take(&mut self, key: &str) -> Option<Box<RawValue>> {
        let index = self.0.0.iter().position(|(name, _)| name == key)?;
        let (_, raw) = self.0.0.swap_remove(index);
        (raw.get() != "null").then_some(raw)
    }

    fn require(&mut self, key: &str) -> Result<Box<RawValue>, ActionError> {
        self.take(key).ok_or_else(|| missing(key))
    }

    fn finish(&self, known: impl Fn() -> String) -> Result<(), ActionError> {
        match self.0.0.first() {
            None => Ok(()),
            Some((key, _)) => {
                let message =
                    format!("unknown parameter `{}`; known are {}", crate::text::shorten(key, 80), known());
                Err(ActionError::invalid(message))
            }
        }
    }
}

fn known_parameters(template: &Template) -> String {
    let own = template.names().iter().map(String::as_str);
    let all: Vec<_> =
        own.chain(["prompt", "files", "data", "meta"]).map(|name| format!("`{name}`")).collect();
    all.join(", ")
}

fn missing(name: &str) -> ActionError {
    ActionError::invalid(format!("parameter `{name}` is missing"))
}

fn empty(name: &str) -> ActionError {
    ActionError::invalid(format!("parameter `{name}` is empty, and there are no files or data"))
}

fn wrong(name: &str, expected: &str) -> ActionError {
    ActionError::invalid(format!("parameter `{name}` must be {expected}"))
}

fn string(name: &str, raw: &RawValue) -> Result<String, ActionError> {
    serde_json::from_str(raw.get()).map_err(|_| wrong(name, "a string"))
}

fn object(name: &str, raw: Box<RawValue>) -> Result<Box<RawValue>, ActionError> {
    if raw.get().starts_with('{') { Ok(raw) } else { Err(wrong(name, "an object")) }
}

/// A placeholder's value: strings as they are, numbers and booleans written out.
fn scalar(name: &str, raw: &RawValue) -> Result<String, ActionError> {
    match raw.get().as_bytes().first() {
        Some(b'"') => string(name, raw),
        Some(b'{' | b'[' | b'n') | None => Err(wrong(name, "a string, a number or a boolean")),
        Some(_) => Ok(raw.get().to_owned()),
    }
}

fn strings(name: &str, raw: &RawValue) -> Result<Vec<String>, ActionError> {
    let list: Vec<String> = serde_json::from_str(raw.get()).map_err(|_| wrong(name, "a list of strings"))?;
    if list.len() > MAX_LIST || list.iter().any(|text| text.is_empty() || text.len() > MAX_ID) {
        let limits = format!("a list of at most {MAX_LIST} strings of 1 to {MAX_ID} bytes");
        return Err(wrong(name, &limits));
    }
    Ok(list)
}

fn files(raw: &RawValue) -> Result<Vec<File>, ActionError> {
    let list: Vec<Box<RawValue>> = serde_json::from_str(raw.get()).map_err(|_| wrong("files", "a list"))?;
    if list.len() > MAX_FILES {
        return Err(wrong("files", &format!("a list of at most {MAX_FILES} files")));
    }
    list.iter().enumerate().map(|(index, raw)| file(&format!("files[{index}]"), raw)).collect()
}

fn file(name: &str, raw: &RawValue) -> Result<File, ActionError> {
    if raw.get().starts_with('"') {
        return file_by_reference(name, string(name, raw)?);
    }
    let object: RawObject =
        serde_json::from_str(raw.get()).map_err(|_| wrong(name, "a URL or an object with `bytes`"))?;
    let mut fields = Fields(object);
    let bytes = fields.take("bytes").ok_or_else(|| missing(&format!("{name}.bytes")))?;
    let bytes = string(&format!("{name}.bytes"), &bytes)?;
    let (bytes, _) = normalize_base64(&bytes).ok_or_else(|| wrong(&format!("{name}.bytes"), "base64"))?;
    let mut text = |key: &str| fields.take(key).map(|raw| string(&format!("{name}.{key}"), &raw)).transpose();
    let (file_name, media_type) = (text("name")?, text("mime_type")?);
    if let Some((key, _)) = fields.0.0.first() {
        let message = format!(
            "unknown key `{name}.{}`; known are `name`, `mime_type`, `bytes`",
            crate::text::shorten(key, 80)
        );
        return Err(ActionError::invalid(message));
    }
    Ok(File { name: file_name, media_type, content: FileContent::Base64(bytes) })
}

/// Web addresses are handed on for the agent to fetch; the bridge itself connects nowhere.
fn file_by_reference(name: &str, text: String) -> Result<File, ActionError> {
    let url = url::Url::parse(&text).map_err(|_| wrong(name, "a URL or an object with `bytes`"))?;
    match url.scheme() {
        "http" | "https" => {
            let file_name =
                url.path_segments().and_then(|mut path| path.next_back()).filter(|name| !name.is_empty());
            Ok(File { name: file_name.map(str::to_owned), media_type: None, content: FileContent::Uri(text) })
        }
        "obj" => {
            let message = format!("parameter `{name}`: this bridge does not read `obj://` yet; send `bytes`");
            Err(ActionError::invalid(message))
        }
        _ => Err(wrong(name, "an http or https URL, or an object with `bytes`")),
    }
}
