//! Parses and checks requests: from here on the types guarantee that they are valid.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::files::ResolvedParts;
use super::params::Template;
use crate::a2a::dialect::OutgoingMessage;
use crate::a2a::model::{ALLOCATION_OVERHEAD, File, FileContent, Part, normalize_base64};
use crate::caller::Caller;
use crate::files::{FileMode, ObjectUrl};
use crate::json::{self, FirstItems, MAX_FIELDS, RawObject};
use crate::memory::{MemoryAccount, MemoryCharge, OutOfMemory};
use crate::offload;
use crate::reply::error::{ActionError, Code};
use crate::telemetry::trace_context::TraceContext;
use crate::text::shorten;

/// Some editors and shells write it before the first character of a file or an argument.
const BYTE_ORDER_MARK: char = '\u{feff}';
const MAX_FILES: usize = 64;
/// Maximum length of a list in `meta`.
const MAX_LIST: usize = 100;
/// Maximum bytes of a session id, and of an entry of a list in `meta`.
const MAX_META_STRING: usize = 256;
/// Content of this size and its copies need no charge (see [`MemoryAccount::cover`]), however many of its characters are
/// escaped.
const UNCHARGED: usize = 1 << 10;
/// The memory of a file that is read while the message is sent: a batch of chunks, and their base64.
const STREAMED_FILE: usize = 1 << 20;

#[derive(Debug, Clone)]
pub(crate) struct RequestBody {
    bytes: Bytes,
    declared_json: bool,
}

/// A request to a skill.
#[derive(Debug)]
pub(crate) struct Invocation {
    /// The content of the message to the agent.
    pub parts: Vec<Part>,
    pub meta: Meta,
}

/// The `meta` parameter.
#[derive(Debug, Default)]
pub(crate) struct Meta {
    pub session_id: Option<String>,
    pub reference_task_ids: Vec<String>,
    /// Media types that the caller accepts.
    pub output_modes: Vec<String>,
}

/// An answer to an agent's question.
#[derive(Debug)]
pub(crate) struct FollowUpAnswer {
    pub follow_up_id: String,
    /// The content of the message to the agent.
    pub parts: Vec<Part>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum ReplyMode {
    /// One reply when the task ends or waits for input.
    #[default]
    Final,
    /// Frames as the events arrive, then the reply.
    Stream,
    /// One reply immediately; the task goes on, and its changes are published.
    Submit,
}

/// The caller's options for a call.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallOptions {
    pub mode: ReplyMode,
    pub timeout: Option<Duration>,
    pub caller: Caller,
    /// Whether another replica has forwarded the request. It is not forwarded again.
    pub is_forwarded: bool,
    /// How files come with the reply.
    pub files: FileMode,
    /// Whether the caller asks to log the call.
    pub is_logged: bool,
    /// Whether the log of the session has the message already.
    pub has_logged_message: bool,
    /// The trace context for the agent.
    pub trace: TraceContext,
    /// Charges the memory of the reply. It outlives the run of the call: keep a clone until the reply is encoded.
    pub reply_memory: ReplyMemory,
}

/// The charge for the memory of a call's reply, without its encoded form. Clones share it, and the last one ends it.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReplyMemory(Arc<Mutex<Option<Arc<MemoryCharge>>>>);

impl ReplyMemory {
    /// Charges `bytes` in place of what was charged before.
    pub(super) fn cover(&self, account: &Arc<MemoryAccount>, bytes: usize) -> Result<(), OutOfMemory> {
        let mut current = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A charge that someone shares stays as it is, and a new one takes its place here.
        let (mut own, shared) = match current.take().map(Arc::try_unwrap) {
            Some(Ok(charge)) => (Some(charge), None),
            Some(Err(shared)) => (None, Some(shared)),
            None => (None, None),
        };
        let covered = account.cover(&mut own, bytes);
        *current = own.map(Arc::new).or(shared.filter(|_| covered.is_err()));
        covered
    }

    /// The charge for the present reply, for someone who may hold that reply for longer than the call.
    pub(super) fn share(&self) -> Option<Arc<MemoryCharge>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The content of a message to the agent, until the agent has responded. A task may then go on for days.
#[derive(Debug, Default)]
pub(super) struct MessageContent {
    parts: Vec<Part>,
    reference_task_ids: Vec<String>,
    /// For the content, the copies of it that are sent, and the output modes.
    charge: Option<MemoryCharge>,
    /// The size of the caller's output modes, in bytes. A run needs them for a question.
    output_modes: usize,
}

impl MessageContent {
    /// Takes the task ids out of `meta`, and charges its output modes as well. Fails if there is no memory, before the
    /// agent is reached.
    pub(super) async fn new(
        account: &Arc<MemoryAccount>,
        ResolvedParts { parts, mut charge }: ResolvedParts,
        meta: &mut Meta,
    ) -> Result<Self, OutOfMemory> {
        let reference_task_ids = std::mem::take(&mut meta.reference_task_ids);
        let (ids, output_modes) = (list_size(&reference_task_ids), list_size(&meta.output_modes));
        let size = parts.iter().map(Part::allocated).sum::<usize>() + ids;
        let count = || parts.iter().map(escapes).sum::<usize>();
        // The content, and two copies of it: the parameters of the call, and the body.
        let streamed = if parts.iter().any(Part::is_streamed) { STREAMED_FILE } else { 0 };
        let without_escapes = 3 * size + output_modes + streamed;
        if size + output_modes + streamed > UNCHARGED {
            account.cover(&mut charge, without_escapes)?;
            let escapes = match size {
                ..=offload::INLINE => count(),
                // Boxed, so that the future of an ordinary call stays small.
                _ => Box::pin(offload::run(&account.agent, size, count)).await,
            };
            account.cover(&mut charge, without_escapes + 2 * escapes)?;
        }
        Ok(Self { parts, reference_task_ids, charge, output_modes })
    }

    /// The message with this content.
    pub(super) fn add_to<'m>(&'m self, message: &OutgoingMessage<'m>) -> OutgoingMessage<'m> {
        let Self { parts, reference_task_ids, .. } = self;
        OutgoingMessage { parts, reference_task_ids, ..*message }
    }

    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Puts another part before the others.
    pub(super) fn prepend(&mut self, account: &Arc<MemoryAccount>, part: Part) -> Result<(), OutOfMemory> {
        let size = 3 * part.allocated() + 2 * escapes(&part);
        match &mut self.charge {
            Some(charge) => charge.resize(charge.bytes() + size)?,
            None => account.cover(&mut self.charge, size)?,
        }
        self.parts.insert(0, part);
        Ok(())
    }

    /// The agent has responded, so the message is not sent again.
    pub(super) fn release(&mut self) {
        (self.parts, self.reference_task_ids) = (Vec::new(), Vec::new());
        if let Some(charge) = &mut self.charge {
            // A charge can always shrink.
            let _ = charge.resize(self.output_modes);
        }
    }
}

/// The memory of a list of strings, in bytes.
fn list_size(list: &[String]) -> usize {
    list.iter().map(|text| size_of::<String>() + ALLOCATION_OVERHEAD + text.capacity()).sum()
}

/// How many bytes JSON adds to the text of a part.
fn escapes(part: &Part) -> usize {
    let escape = |byte: u8| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' => 1,
        ..0x20 => 5,
        _ => 0,
    };
    part.as_text().map_or(0, |text| text.bytes().map(escape).sum())
}

enum BodyContent {
    Prompt(String),
    Fields(RequestFields),
}

impl RequestBody {
    /// `content_type` is the value of that header. Its parameters are ignored.
    pub(crate) fn new(bytes: Bytes, content_type: Option<&str>) -> Self {
        let media_type = content_type.and_then(|value| value.split(';').next()).unwrap_or_default();
        Self { bytes, declared_json: media_type.trim().eq_ignore_ascii_case("application/json") }
    }

    pub(crate) fn is_declared_json(&self) -> bool {
        self.declared_json
    }

    /// The size in bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The text without a byte order mark.
    fn text(&self) -> Result<&str, ActionError> {
        let text = std::str::from_utf8(&self.bytes)
            .map_err(|_| ActionError::invalid("the body is neither JSON nor UTF-8 text"))?;
        Ok(text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text))
    }

    /// An object holds the parameters, a string is the prompt, and an array is refused. Anything else is text.
    fn content(&self) -> Result<BodyContent, ActionError> {
        let text = self.text()?;
        let json = text.trim_matches(is_blank);
        let not_json = |error: serde_json::Error| {
            ActionError::invalid(format!(
                "the body is not valid JSON: {error}; send an object, a string or plain text"
            ))
        };
        match json.as_bytes().first() {
            Some(b'{') => match serde_json::from_str(json) {
                Ok(object) => return Ok(BodyContent::Fields(RequestFields::of_body(json, object)?)),
                // A body in braces is far more often a mistake in JSON than a prompt.
                Err(error) if self.declared_json || json.ends_with('}') => return Err(not_json(error)),
                Err(_) => {}
            },
            Some(b'"') => match serde_json::from_str(json) {
                Ok(prompt) => return Ok(BodyContent::Prompt(prompt)),
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
        Ok(BodyContent::Prompt(text.to_owned()))
    }

    /// The parameters of an action that accepts only an object.
    fn fields(&self, expected: &str) -> Result<RequestFields, ActionError> {
        let json = self.text()?.trim_matches(is_blank);
        let object = serde_json::from_str(json)
            .map_err(|_| ActionError::invalid(format!("the body must be a JSON object with {expected}")))?;
        RequestFields::of_body(json, object)
    }
}

impl Invocation {
    /// Parses a request to a skill with these parameters.
    ///
    /// `prompt` may be empty only if there are files or data. For a skill without parameters it is required even then.
    pub(crate) fn parse(body: &RequestBody, template: &Template) -> Result<Self, ActionError> {
        let mut fields = match body.content()? {
            BodyContent::Prompt(prompt) if prompt.chars().all(is_blank) => return Err(empty("prompt")),
            BodyContent::Prompt(prompt) => {
                return Ok(Self { parts: vec![Part::Text(prompt)], meta: Meta::default() });
            }
            BodyContent::Fields(fields) => fields,
        };
        let meta = fields.take("meta").map(|raw| Meta::parse(&raw)).transpose()?.unwrap_or_default();
        let files = fields.take_files()?;
        let data = fields.take("data");
        if data.as_ref().is_some_and(|raw| !raw.get().starts_with('{')) {
            return Err(wrong("data", "an object"));
        }
        let prompt = fields.take_string("prompt")?;

        let mut values = Vec::new();
        for name in &template.names {
            if let Some(raw) = fields.take(name) {
                values.push((name.as_str(), scalar(name, &raw)?));
            }
        }
        let names = template.names.iter().map(String::as_str);
        fields.finish(names.chain(["prompt", "files", "data", "meta"]))?;
        let text = match prompt {
            Some(_) if !values.is_empty() => {
                let names = quoted(values.iter().map(|(name, _)| *name));
                let message = format!("give either `prompt` or {names}, not both");
                return Err(ActionError::invalid(message));
            }
            Some(prompt) => prompt,
            None if template.names.is_empty() => return Err(missing(["prompt"])),
            None => {
                let is_missing = |name: &&str| !values.iter().any(|(given, _)| given == name);
                let absent: Vec<_> = template.names.iter().map(String::as_str).filter(is_missing).collect();
                if !absent.is_empty() {
                    return Err(missing(absent));
                }
                let value = |name: &str| values.iter().find(|(n, _)| *n == name).map_or("", |(_, v)| v);
                template.fill(value).map_err(|error| ActionError::new(Code::TooLarge, error.to_string()))?
            }
        };
        if text.chars().all(is_blank) && files.is_empty() && data.is_none() {
            return Err(empty(values.first().map_or("prompt", |(name, _)| name)));
        }
        let mut parts = vec![Part::Text(text)];
        parts.extend(data.map(Part::Data));
        parts.extend(files.into_iter().map(Part::File));
        Ok(Self { parts, meta })
    }
}

impl FollowUpAnswer {
    /// Parses the body of `provide_required_input`.
    pub(crate) fn parse(body: &RequestBody) -> Result<Self, ActionError> {
        let mut fields = body.fields("`follow_up_id` and `user_response`")?;
        let (id, response) = (fields.take_string("follow_up_id")?, fields.take_string("user_response")?);
        let (follow_up_id, response) = match (id, response) {
            (Some(id), Some(response)) => (id, response),
            (None, Some(_)) => return Err(missing(["follow_up_id"])),
            (Some(_), None) => return Err(missing(["user_response"])),
            (None, None) => return Err(missing(["follow_up_id", "user_response"])),
        };
        let mut parts = vec![Part::Text(response)];
        parts.extend(fields.take_files()?.into_iter().map(Part::File));
        fields.finish(["follow_up_id", "user_response", "files"])?;
        Ok(Self { follow_up_id, parts })
    }
}

/// Parses the body of `cancel_task` and `get_task`: the task's id.
pub(crate) fn task_id(body: &RequestBody) -> Result<String, ActionError> {
    let mut fields = body.fields("`task_id`")?;
    let id = fields.require_string("task_id")?;
    fields.finish(["task_id"])?;
    Ok(id)
}

impl Meta {
    fn parse(raw: &RawValue) -> Result<Self, ActionError> {
        let mut fields = RequestFields::parse("meta", raw, "an object")?;
        let session_id = fields.take_string("session_id")?;
        if session_id.as_ref().is_some_and(|id| id.is_empty() || id.len() > MAX_META_STRING) {
            return Err(wrong("meta.session_id", &format!("a string of 1 to {MAX_META_STRING} bytes")));
        }
        let (reference_task_ids, output_modes) =
            (fields.take_list("reference_task_ids")?, fields.take_list("output_modes")?);
        fields.finish(["session_id", "reference_task_ids", "output_modes"])?;
        Ok(Self { session_id, reference_task_ids, output_modes })
    }
}

fn is_blank(c: char) -> bool {
    c.is_whitespace() || c == BYTE_ORDER_MARK
}

/// The fields of an object that were not taken yet. `null` counts as absent.
struct RequestFields {
    /// The prefix of the keys in errors, such as `meta.`.
    path: String,
    fields: Vec<(String, Box<RawValue>)>,
}

impl RequestFields {
    fn of_body(json: &str, RawObject(fields): RawObject) -> Result<Self, ActionError> {
        if !json::is_shallow(json.as_bytes()) {
            return Err(ActionError::invalid(format!("the body nests deeper than {}", json::MAX_DEPTH)));
        }
        check_count("the body", &fields)?;
        let mut keys = HashSet::new();
        match fields.iter().find(|(key, _)| !keys.insert(key.as_str())) {
            Some((key, _)) => Err(ActionError::invalid(format!("`{}` is given twice", shorten(key, 80)))),
            None => Ok(Self { path: String::new(), fields }),
        }
    }

    fn parse(name: &str, raw: &RawValue, expected: &str) -> Result<Self, ActionError> {
        let RawObject(fields) = serde_json::from_str(raw.get()).map_err(|_| wrong(name, expected))?;
        check_count(&format!("`{name}`"), &fields)?;
        Ok(Self { path: format!("{name}."), fields })
    }

    fn take(&mut self, key: &str) -> Option<Box<RawValue>> {
        let index = self.fields.iter().position(|(name, _)| name == key)?;
        let (_, raw) = self.fields.swap_remove(index);
        (raw.get() != "null").then_some(raw)
    }

    fn take_string(&mut self, key: &str) -> Result<Option<String>, ActionError> {
        let Some(raw) = self.take(key) else { return Ok(None) };
        serde_json::from_str(raw.get()).map_err(|_| wrong(&self.name(key), "a string"))
    }

    fn require_string(&mut self, key: &str) -> Result<String, ActionError> {
        self.take_string(key)?.ok_or_else(|| missing([self.name(key).as_str()]))
    }

    fn take_list(&mut self, key: &str) -> Result<Vec<String>, ActionError> {
        let Some(raw) = self.take(key) else { return Ok(Vec::new()) };
        let FirstItems::<String, MAX_LIST>(list) =
            serde_json::from_str(raw.get()).map_err(|_| wrong(&self.name(key), "a list of strings"))?;
        if list.len() > MAX_LIST || list.iter().any(|text| text.is_empty() || text.len() > MAX_META_STRING) {
            let limits = format!("a list of at most {MAX_LIST} strings of 1 to {MAX_META_STRING} bytes");
            return Err(wrong(&self.name(key), &limits));
        }
        Ok(list)
    }

    fn take_files(&mut self) -> Result<Vec<File>, ActionError> {
        let Some(raw) = self.take("files") else { return Ok(Vec::new()) };
        let FirstItems::<&RawValue, MAX_FILES>(list) =
            serde_json::from_str(raw.get()).map_err(|_| wrong("files", "a list"))?;
        if list.len() > MAX_FILES {
            return Err(wrong("files", &format!("a list of at most {MAX_FILES} files")));
        }
        list.iter().enumerate().map(|(index, raw)| file(&format!("files[{index}]"), raw)).collect()
    }

    /// Refuses fields that were not taken.
    fn finish<'k>(&self, known: impl IntoIterator<Item = &'k str>) -> Result<(), ActionError> {
        let Some((key, _)) = self.fields.first() else { return Ok(()) };
        let name = self.name(&shorten(key, 80));
        Err(ActionError::invalid(format!("unknown parameter `{name}`; expected one of {}", quoted(known))))
    }

    fn name(&self, key: &str) -> String {
        format!("{}{key}", self.path)
    }
}

fn check_count(what: &str, fields: &[(String, Box<RawValue>)]) -> Result<(), ActionError> {
    if fields.len() > MAX_FIELDS {
        return Err(ActionError::invalid(format!("{what} has more than {MAX_FIELDS} fields")));
    }
    Ok(())
}

fn quoted<'n>(names: impl IntoIterator<Item = &'n str>) -> String {
    let names: Vec<_> = names.into_iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}

/// Names all missing parameters, so that the caller can add them at once.
fn missing<'n>(names: impl IntoIterator<Item = &'n str, IntoIter: ExactSizeIterator>) -> ActionError {
    let names = names.into_iter();
    let (noun, verb) = if names.len() == 1 { ("parameter", "is") } else { ("parameters", "are") };
    ActionError::invalid(format!("{noun} {} {verb} missing", quoted(names)))
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

/// The value of a placeholder: a string, or the JSON text of a number or boolean.
fn scalar(name: &str, raw: &RawValue) -> Result<String, ActionError> {
    match raw.get().as_bytes().first() {
        Some(b'"') => string(name, raw),
        Some(b'{' | b'[' | b'n') | None => Err(wrong(name, "a string, a number or a boolean")),
        Some(_) => Ok(raw.get().to_owned()),
    }
}

fn file(name: &str, raw: &RawValue) -> Result<File, ActionError> {
    if raw.get().starts_with('"') {
        return file_by_url(name, string(name, raw)?);
    }
    let mut fields = RequestFields::parse(name, raw, "a URL or an object with `bytes`")?;
    let bytes = fields.require_string("bytes")?;
    let (bytes, _) = normalize_base64(&bytes).ok_or_else(|| wrong(&fields.name("bytes"), "base64"))?;
    let (name, media_type) = (fields.take_string("name")?, fields.take_string("mime_type")?);
    fields.finish(["name", "mime_type", "bytes"])?;
    Ok(File { name, media_type, content: FileContent::Base64(bytes) })
}

/// A file in the store, or one at a URL. The agent fetches the latter, unless the configuration says otherwise.
fn file_by_url(name: &str, text: String) -> Result<File, ActionError> {
    if let Some(url) = ObjectUrl::parse(&text) {
        let url = url.map_err(|error| ActionError::invalid(format!("parameter `{name}`: {error}")))?;
        return Ok(File { name: None, media_type: None, content: FileContent::Reference(url) });
    }
    let url = url::Url::parse(&text).map_err(|_| wrong(name, "a URL or an object with `bytes`"))?;
    match url.scheme() {
        "http" | "https" => {
            let file_name =
                url.path_segments().and_then(|mut path| path.next_back()).filter(|name| !name.is_empty());
            Ok(File { name: file_name.map(str::to_owned), media_type: None, content: FileContent::Uri(text) })
        }
        _ => Err(wrong(name, "an http, https or obj URL, or an object with `bytes`")),
    }
}
