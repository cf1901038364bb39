//! What is sent: a request body from arguments, files read and encoded.

use std::io::Read as _;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use crate::cli::{Failure, USAGE};

/// Files that are sent as they are must fit into a message anyway.
const MAX_FILE: u64 = 64 << 20;
/// Names of parameters that have an option of their own.
const RESERVED: [(&str, &str); 4] = [
    ("prompt", "give the text as an argument"),
    ("files", "use `--file`"),
    ("data", "use `--data`"),
    ("meta", "use `--session` and `--reference`"),
];

/// What to send.
#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "What to send")]
pub(in crate::cli) struct Content {
    /// The text to send; `-` reads it from stdin
    #[arg(help_heading = None)]
    text: Option<String>,
    /// A parameter of the skill, as its description names it; may be repeated
    #[arg(long = "param", short, value_name = "NAME=VALUE")]
    params: Vec<String>,
    /// Structured data to send along: a JSON object, or `@FILE` with one
    #[arg(long, value_name = "JSON")]
    data: Option<String>,
    /// A file to send along, or the URL of one; may be repeated
    #[arg(long = "file", short, value_name = "FILE")]
    files: Vec<String>,
    /// Go on with this conversation
    #[arg(long, short, value_name = "ID")]
    session: Option<String>,
    /// An earlier task that the text refers to; may be repeated
    #[arg(long = "reference", value_name = "TASK")]
    references: Vec<String>,
}

impl Content {
    /// The body of a request to a skill.
    pub(super) fn body(&self) -> Result<Value, Failure> {
        let mut body = Map::new();
        if let Some(text) = self.text()? {
            body.insert("prompt".to_owned(), text.into());
        }
        for param in &self.params {
            let (name, value) = param
                .split_once('=')
                .filter(|(name, _)| !name.is_empty())
                .ok_or_else(|| usage(format!("`--param {param}` is not of the form NAME=VALUE")))?;
            if let Some((_, instead)) = RESERVED.iter().find(|(reserved, _)| *reserved == name) {
                return Err(usage(format!("`{name}` is not a parameter of the skill; {instead}")));
            }
            if body.insert(name.to_owned(), value.into()).is_some() {
                return Err(usage(format!("`--param {name}=…` is given twice")));
            }
        }
        if let Some(data) = &self.data {
            body.insert("data".to_owned(), object(data)?);
        }
        if !self.files.is_empty() {
            body.insert("files".to_owned(), self.files()?);
        }
        let mut meta = Map::new();
        if let Some(session) = &self.session {
            meta.insert("session_id".to_owned(), session.as_str().into());
        }
        if !self.references.is_empty() {
            meta.insert("reference_task_ids".to_owned(), json!(self.references));
        }
        if !meta.is_empty() {
            body.insert("meta".to_owned(), meta.into());
        }
        Ok(body.into())
    }

    /// The body of an answer to a question.
    pub(super) fn answer(&self, follow_up: &str) -> Result<Value, Failure> {
        if !self.params.is_empty()
            || self.data.is_some()
            || self.session.is_some()
            || !self.references.is_empty()
        {
            return Err(usage("an answer is text and files only".to_owned()));
        }
        let text =
            self.text()?.ok_or_else(|| usage("give the answer as text, or `-` for stdin".to_owned()))?;
        let mut body = json!({"follow_up_id": follow_up, "user_response": text});
        if let (Some(body), false) = (body.as_object_mut(), self.files.is_empty()) {
            body.insert("files".to_owned(), self.files()?);
        }
        Ok(body)
    }

    fn text(&self) -> Result<Option<String>, Failure> {
        if self.text.as_deref() != Some("-") {
            return Ok(self.text.clone());
        }
        let mut text = String::new();
        std::io::stdin()
            .lock()
            .read_to_string(&mut text)
            .map_err(|error| usage(format!("cannot read the text from stdin: {error}")))?;
        // The line break at the end is the shell's, not the user's.
        Ok(Some(text.strip_suffix('\n').unwrap_or(&text).to_owned()))
    }

    fn files(&self) -> Result<Value, Failure> {
        self.files.iter().map(|file| encoded(file)).collect()
    }
}

fn object(data: &str) -> Result<Value, Failure> {
    let text = match data.strip_prefix('@') {
        None => data.to_owned(),
        Some(path) => std::fs::read_to_string(path)
            .map_err(|error| usage(format!("`--data @{path}` cannot be read: {error}")))?,
    };
    match serde_json::from_str::<Value>(&text) {
        Ok(value) if value.is_object() => Ok(value),
        Ok(_) => Err(usage("`--data` is not a JSON object, like {\"days\": 3}".to_owned())),
        Err(error) => Err(usage(format!("`--data` is not JSON: {error}"))),
    }
}

fn encoded(file: &str) -> Result<Value, Failure> {
    if ["https://", "http://", "obj://"].iter().any(|scheme| file.starts_with(scheme)) {
        return Ok(file.into());
    }
    let path = Path::new(file);
    let unreadable = |error: std::io::Error| usage(format!("`--file {file}` cannot be read: {error}"));
    let size = std::fs::metadata(path).map_err(unreadable)?.len();
    if size > MAX_FILE {
        return Err(usage(format!("`--file {file}` has {size} bytes; {MAX_FILE} is the most")));
    }
    let bytes = std::fs::read(path).map_err(unreadable)?;
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
    Ok(json!({
        "name": name,
        "mime_type": mime_type(path),
        "bytes": STANDARD.encode(bytes),
    }))
}

/// The media types of files that people send; everything else is just bytes.
const MIME_TYPES: [(&str, &str); 24] = [
    ("csv", "text/csv"),
    ("doc", "application/msword"),
    ("docx", "application/vnd.openxmlformats-officedocument.wordprocessingml.document"),
    ("gif", "image/gif"),
    ("htm", "text/html"),
    ("html", "text/html"),
    ("jpeg", "image/jpeg"),
    ("jpg", "image/jpeg"),
    ("json", "application/json"),
    ("md", "text/markdown"),
    ("mp3", "audio/mpeg"),
    ("mp4", "video/mp4"),
    ("pdf", "application/pdf"),
    ("png", "image/png"),
    ("svg", "image/svg+xml"),
    ("txt", "text/plain"),
    ("wav", "audio/wav"),
    ("webm", "video/webm"),
    ("webp", "image/webp"),
    ("xlsx", "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"),
    ("xml", "application/xml"),
    ("yaml", "application/yaml"),
    ("yml", "application/yaml"),
    ("zip", "application/zip"),
];

fn mime_type(path: &Path) -> &'static str {
    let extension = path.extension().map(|ext| ext.to_string_lossy().to_lowercase());
    MIME_TYPES
        .iter()
        .find(|(known, _)| Some(*known) == extension.as_deref())
        .map_or("application/octet-stream", |(_, mime)| mime)
}

/// The usual extension of a media type.
pub(super) fn extension(mime: &str) -> Option<&'static str> {
    let mut known = MIME_TYPES.iter().rev();
    known.find(|(_, known)| *known == mime).map(|(extension, _)| *extension)
}

fn usage(message: String) -> Failure {
    Failure::new(USAGE, anyhow::anyhow!(message)).hint("`a2a-bridge call --help` explains the options")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_holds_what_was_given_and_nothing_else() {
        let content = Content {
            params: vec!["topic=tides=high".into(), "audience=".into()],
            data: Some(r#"{"days": 3}"#.into()),
            files: vec!["https://example.org/a.png".into()],
            session: Some("s-1".into()),
            ..Content::default()
        };
        assert_eq!(
            content.body().unwrap(),
            json!({
                "topic": "tides=high", "audience": "", "data": {"days": 3}, "files": ["https://example.org/a.png"],
                "meta": {"session_id": "s-1"},
            })
        );
    }

    #[test]
    fn what_cannot_be_sent_is_said_before_it_is() {
        let wrong = |content: Content| content.body().unwrap_err().error.to_string();
        let params = |params: &[&str]| Content {
            params: params.iter().map(|&param| param.into()).collect(),
            ..Content::default()
        };
        assert!(wrong(params(&["topic"])).contains("NAME=VALUE"));
        assert!(wrong(params(&["a=1", "a=2"])).contains("twice"));
        assert!(wrong(params(&["prompt=x"])).contains("as an argument"));
        let data = Content { data: Some("[1]".into()), ..Content::default() };
        assert!(wrong(data).contains("not a JSON object"));
        let file = Content { files: vec!["/nowhere/x.png".into()], ..Content::default() };
        assert!(wrong(file).contains("/nowhere/x.png"));
    }

    #[test]
    fn media_types_go_by_extension_and_back() {
        assert_eq!(mime_type(Path::new("A.JPG")), "image/jpeg");
        assert_eq!(mime_type(Path::new("a")), "application/octet-stream");
        assert_eq!(extension("image/jpeg"), Some("jpg"));
        assert_eq!(extension("x/y"), None);
    }
}
