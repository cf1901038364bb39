//! The arguments that become the body of a request.

use std::fmt::Display;
use std::io::Read as _;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use crate::cli::{CliError, CliResult, USAGE};
use crate::files::media_type;

/// More than any NATS message can hold; avoids reading huge files.
const MAX_FILE: u64 = 64 << 20;
/// Fields of the body that are not parameters of the skill, and how to set them.
const RESERVED: [(&str, &str); 4] = [
    ("prompt", "give the text as an argument"),
    ("files", "use `--file`"),
    ("data", "use `--data`"),
    ("meta", "use `--session` and `--reference`"),
];

#[derive(Debug, Default, clap::Args)]
#[command(next_help_heading = "Request")]
pub(in crate::cli) struct RequestArgs {
    /// Text to send; `-` reads it from stdin
    #[arg(help_heading = None)]
    text: Option<String>,
    /// Parameter of the skill; `skills` lists the required ones (repeatable)
    #[arg(long = "param", short, value_name = "NAME=VALUE")]
    params: Vec<String>,
    /// JSON object to send as structured data, or `@FILE` to read it from a file
    #[arg(long, value_name = "JSON")]
    data: Option<String>,
    /// File to send, or the URL of a file (repeatable)
    #[arg(long = "file", short, value_name = "FILE")]
    files: Vec<String>,
    /// Continue the session with this id
    #[arg(long, short, value_name = "ID")]
    session: Option<String>,
    /// Id of an earlier task that the text refers to (repeatable)
    #[arg(long = "reference", value_name = "TASK")]
    references: Vec<String>,
}

impl RequestArgs {
    pub(super) fn body(&self) -> CliResult<Value> {
        let mut body = Map::new();
        if let Some(text) = self.text()? {
            body.insert("prompt".to_owned(), text.into());
        }
        for param in &self.params {
            let (name, value) = param
                .split_once('=')
                .filter(|(name, _)| !name.is_empty())
                .ok_or_else(|| usage(format!("`--param {param}` does not have the form NAME=VALUE")))?;
            if let Some((_, instead)) = RESERVED.iter().find(|(reserved, _)| *reserved == name) {
                return Err(usage(format!("`{name}` is not a parameter of the skill; {instead}")));
            }
            if body.insert(name.to_owned(), value.into()).is_some() {
                return Err(usage(format!("`--param {name}=…` is given twice")));
            }
        }
        if let Some(data) = &self.data {
            body.insert("data".to_owned(), parse_object(data)?);
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

    pub(super) fn answer_body(&self, follow_up: &str) -> CliResult<Value> {
        let text = self
            .text()?
            .ok_or_else(|| usage("the answer is missing: give it as text, or `-` to read it from stdin"))?;
        let mut body = json!({"follow_up_id": follow_up, "user_response": text});
        if let (Some(body), false) = (body.as_object_mut(), self.files.is_empty()) {
            body.insert("files".to_owned(), self.files()?);
        }
        Ok(body)
    }

    fn text(&self) -> CliResult<Option<String>> {
        if self.text.as_deref() != Some("-") {
            return Ok(self.text.clone());
        }
        let mut text = String::new();
        std::io::stdin()
            .lock()
            .read_to_string(&mut text)
            .map_err(|error| usage(format!("cannot read the text from stdin: {error}")))?;
        // The last line break comes from the shell, not from the user.
        Ok(Some(text.strip_suffix('\n').unwrap_or(&text).to_owned()))
    }

    fn files(&self) -> CliResult<Value> {
        self.files.iter().map(|file| encode_file(file)).collect()
    }
}

fn parse_object(data: &str) -> CliResult<Value> {
    let text = match data.strip_prefix('@') {
        None => data.to_owned(),
        Some(path) => std::fs::read_to_string(path)
            .map_err(|error| usage(format!("cannot read `--data @{path}`: {error}")))?,
    };
    match serde_json::from_str::<Value>(&text) {
        Ok(value) if value.is_object() => Ok(value),
        Ok(_) => Err(usage("`--data` is not a JSON object, like {\"days\": 3}")),
        Err(error) => Err(usage(format!("`--data` is not JSON: {error}"))),
    }
}

fn encode_file(file: &str) -> CliResult<Value> {
    if ["https://", "http://", "obj://"].iter().any(|scheme| file.starts_with(scheme)) {
        return Ok(file.into());
    }
    let path = Path::new(file);
    let read_error = |error: std::io::Error| usage(format!("cannot read `--file {file}`: {error}"));
    let size = std::fs::metadata(path).map_err(read_error)?.len();
    if size > MAX_FILE {
        return Err(usage(format!("`--file {file}` has {size} bytes; the limit is {MAX_FILE}")));
    }
    let bytes = std::fs::read(path).map_err(read_error)?;
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
    Ok(json!({
        "name": name,
        "mime_type": name.as_deref().and_then(media_type).unwrap_or("application/octet-stream"),
        "bytes": STANDARD.encode(bytes),
    }))
}

fn usage(message: impl Display) -> CliError {
    CliError::msg(USAGE, message).hint("`a2a-bridge call --help` explains the options")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_has_only_the_given_fields() {
        let args = RequestArgs {
            params: vec!["topic=tides=high".into(), "audience=".into()],
            data: Some(r#"{"days": 3}"#.into()),
            files: vec!["https://example.org/a.png".into()],
            session: Some("s-1".into()),
            ..RequestArgs::default()
        };
        assert_eq!(
            args.body().unwrap(),
            json!({
                "topic": "tides=high", "audience": "", "data": {"days": 3}, "files": ["https://example.org/a.png"],
                "meta": {"session_id": "s-1"},
            })
        );
    }

    #[test]
    fn invalid_arguments_are_rejected() {
        let wrong = |args: RequestArgs| args.body().unwrap_err().error.to_string();
        let params = |params: &[&str]| RequestArgs {
            params: params.iter().map(|&param| param.into()).collect(),
            ..RequestArgs::default()
        };
        assert!(wrong(params(&["topic"])).contains("NAME=VALUE"));
        assert!(wrong(params(&["a=1", "a=2"])).contains("twice"));
        assert!(wrong(params(&["prompt=x"])).contains("as an argument"));
        let data = RequestArgs { data: Some("[1]".into()), ..RequestArgs::default() };
        assert!(wrong(data).contains("not a JSON object"));
        let file = RequestArgs { files: vec!["/nowhere/x.png".into()], ..RequestArgs::default() };
        assert!(wrong(file).contains("/nowhere/x.png"));
    }
}
