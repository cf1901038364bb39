//! The arguments that become the body of a request.

use std::fmt::Display;
use std::io::Read as _;

use serde_json::{Map, Value, json};

use super::large_files::RequestFiles;
use crate::cli::{CliError, CliResult, USAGE};

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
    /// Text to send; `-` reads it from stdin. Put `--` before a text that looks like an option
    #[arg(help_heading = None, allow_hyphen_values = true)]
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
    /// The session that the call continues.
    pub(super) fn session(&self) -> Option<&str> {
        self.session.as_deref()
    }

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
        Ok(json!({"follow_up_id": follow_up, "user_response": text}))
    }

    fn text(&self) -> CliResult<Option<String>> {
        self.text.as_deref().map_or(Ok(()), check_not_an_option)?;
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

    /// The files, which belong into the body.
    pub(super) fn files(&self) -> CliResult<RequestFiles> {
        RequestFiles::new(&self.files)
    }
}

/// Clap takes every argument with a dash for the text, also a misspelled option, unless it knows the option.
fn check_not_an_option(text: &str) -> CliResult<()> {
    let is_word = |text: &str| {
        text.starts_with(|c: char| c.is_alphabetic()) && !text.contains(|c: char| c.is_whitespace())
    };
    let name = text.strip_prefix("--").or_else(|| text.strip_prefix('-'));
    let is_after_dashes = || std::env::args_os().any(|argument| argument == "--");
    if name.is_some_and(is_word) && !is_after_dashes() {
        let quoted = shlex::try_quote(text).unwrap_or_default();
        return Err(usage(format!("unknown option `{text}`")).hint(format!(
            "`a2a-bridge call --help` lists the options; to send it as text, write `-- {quoted}`"
        )));
    }
    Ok(())
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

pub(super) fn usage(message: impl Display) -> CliError {
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
            session: Some("s-1".into()),
            ..RequestArgs::default()
        };
        assert_eq!(
            args.body().unwrap(),
            json!({
                "topic": "tides=high", "audience": "", "data": {"days": 3},
                "meta": {"session_id": "s-1"},
            })
        );
    }

    #[test]
    fn text_may_begin_with_a_dash_unless_it_looks_like_an_option() {
        for text in ["-5", "-0.5", "-", "- milk\n- eggs", "--- a", "-1 or -2?", "->", "--verbose or not?"] {
            assert!(check_not_an_option(text).is_ok(), "{text}");
        }
        for option in ["--strem", "-x", "--strem=1"] {
            assert!(check_not_an_option(option).is_err(), "{option}");
        }
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
        let error = file.files().unwrap_err().error.to_string();
        assert!(error.contains("/nowhere/x.png"), "{error}");
    }
}
