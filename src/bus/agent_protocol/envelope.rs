//! The body of a prompt, or of the answer to a question.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use crate::a2a::model::{File, FileContent, Part};
use crate::files::{last_component, media_type};
use crate::json::null_is_default;
use crate::reply::error::ActionError;
use crate::text::{head, shorten};

const MAX_ATTACHMENTS: usize = 64;
/// Maximum bytes of a file name.
const MAX_NAME: usize = 255;
/// Maximum bytes of `skill` and `session`.
const MAX_ID: usize = 256;

/// A validated message of a caller.
#[derive(Debug)]
pub(crate) struct PromptEnvelope {
    /// The prompt, then the attachments.
    pub(super) parts: Vec<Part>,
    /// The skill to prompt, instead of the agent as a whole.
    pub(super) skill: Option<String>,
    /// A session other than the agent's shared one.
    pub(super) session: Option<String>,
}

/// Ignores unknown fields, as the protocol requires.
#[derive(Deserialize)]
#[serde(expecting = "an envelope")]
struct EnvelopeBody {
    prompt: String,
    #[serde(default, deserialize_with = "null_is_default")]
    attachments: Vec<EnvelopeAttachment>,
    #[serde(default)]
    skill: Option<String>,
    #[serde(default)]
    session: Option<String>,
}

#[derive(Deserialize)]
#[serde(expecting = "an attachment")]
struct EnvelopeAttachment {
    filename: String,
    content: String,
}

impl PromptEnvelope {
    /// Parses a body of at most `limit` bytes. A body that begins with `{` is an envelope; any other is the
    /// text of the prompt.
    pub(crate) fn parse(body: &[u8], limit: usize) -> Result<Self, ActionError> {
        if body.len() > limit {
            return invalid(format!("the prompt has {} bytes, but the limit is {limit}", body.len()));
        }
        let is_envelope = body.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
        let EnvelopeBody { prompt, attachments, skill, session } = if is_envelope {
            serde_json::from_slice(body).map_err(|error| {
                // The error can quote the body.
                let why = shorten(&error.to_string(), 300);
                ActionError::invalid(format!("malformed envelope: {why}"))
            })?
        } else {
            let text = std::str::from_utf8(body)
                .map_err(|_| ActionError::invalid("the prompt is neither an envelope nor UTF-8 text"))?;
            EnvelopeBody { prompt: text.to_owned(), attachments: Vec::new(), skill: None, session: None }
        };
        if prompt.trim().is_empty() {
            return invalid("the prompt is empty");
        }
        if attachments.len() > MAX_ATTACHMENTS {
            return invalid(format!("a prompt can have at most {MAX_ATTACHMENTS} attachments"));
        }
        for (name, value) in [("skill", &skill), ("session", &session)] {
            if value.as_ref().is_some_and(|text| text.is_empty() || text.len() > MAX_ID) {
                return invalid(format!("`{name}` must have 1 to {MAX_ID} bytes"));
            }
        }
        let mut parts = vec![Part::Text(prompt)];
        for (index, attachment) in attachments.into_iter().enumerate() {
            parts.push(attachment.into_part(index)?);
        }
        Ok(Self { parts, skill, session })
    }
}

impl EnvelopeAttachment {
    fn into_part(self, index: usize) -> Result<Part, ActionError> {
        if !is_safe(&self.filename) {
            let name = shorten(&self.filename, 60);
            return invalid(format!("attachments[{index}]: `{name}` is not a plain file name"));
        }
        // The protocol accepts only the standard alphabet with padding and without line breaks.
        if STANDARD.decode(&self.content).is_err() {
            return invalid(format!("attachments[{index}]: the content is not base64"));
        }
        // The protocol has no media types, but many agents depend on them.
        Ok(Part::File(File {
            media_type: media_type(&self.filename).map(str::to_owned),
            name: Some(self.filename),
            content: FileContent::Base64(self.content),
        }))
    }
}

fn invalid<T>(message: impl Into<String>) -> Result<T, ActionError> {
    Err(ActionError::invalid(message))
}

/// Whether a file saved under this name stays in its folder.
fn is_safe(name: &str) -> bool {
    let is_unsafe = |c: char| c.is_control() || matches!(c, '/' | '\\');
    !matches!(name, "" | "." | "..") && name.len() <= MAX_NAME && !name.chars().any(is_unsafe)
}

/// A safe form of the file name that the agent uses; `fallback` if nothing is left of it.
pub(super) fn attachment_name(name: Option<&str>, fallback: &str) -> String {
    let last = last_component(name.unwrap_or_default());
    let kept: String = last.chars().filter(|c| !c.is_control()).collect();
    let kept = head(kept.trim(), MAX_NAME);
    if is_safe(kept) { kept } else { fallback }.to_owned()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;
    use crate::reply::error::Code;

    fn parsed(body: &str) -> PromptEnvelope {
        PromptEnvelope::parse(body.as_bytes(), 1000).unwrap()
    }

    fn text(envelope: &PromptEnvelope) -> &str {
        envelope.parts[0].as_text().unwrap()
    }

    #[rstest]
    #[case("hello", "hello")]
    #[case("  [1, 2]", "  [1, 2]")]
    #[case("\"quoted\"", "\"quoted\"")]
    #[case(" {\"prompt\": \"hi\"}", "hi")]
    #[case(r#"{"prompt": "hi", "attachments": null, "of_tomorrow": {"a": [1]}}"#, "hi")]
    fn a_prompt_is_text_or_an_envelope(#[case] body: &str, #[case] prompt: &str) {
        let envelope = parsed(body);
        assert_eq!(text(&envelope), prompt);
        assert_eq!(envelope.parts.len(), 1);
    }

    #[test]
    fn attachments_become_files_with_the_media_type_of_their_names() {
        let body = r#"{"prompt": "look", "attachments": [
            {"filename": "a.PNG", "content": "iVBORw==", "size": 4}, {"filename": "no ending", "content": ""}]}"#;
        let envelope = parsed(body);
        let [_, Part::File(png), Part::File(other)] = envelope.parts.as_slice() else {
            panic!("{:?}", envelope.parts)
        };
        assert_eq!(png.name.as_deref(), Some("a.PNG"));
        assert_eq!(png.media_type.as_deref(), Some("image/png"));
        assert!(matches!(&png.content, FileContent::Base64(bytes) if bytes == "iVBORw=="));
        assert_eq!(other.media_type, None);
    }

    #[test]
    fn a_skill_and_a_session_can_be_named() {
        let envelope = parsed(r#"{"prompt": "hi", "skill": "echo", "session": "s 1"}"#);
        assert_eq!(envelope.skill.as_deref(), Some("echo"));
        assert_eq!(envelope.session.as_deref(), Some("s 1"));
    }

    #[rstest]
    #[case("")]
    #[case(" \n")]
    #[case("{")]
    #[case("{}")]
    #[case(r#"{"prompt": ""}"#)]
    #[case(r#"{"prompt": 1}"#)]
    #[case(r#"{"prompt": "a"} {"prompt": "b"}"#)]
    #[case(r#"{"prompt": "a", "prompt": "b"}"#)]
    #[case(r#"{"prompt": "a", "attachments": {}}"#)]
    #[case(r#"{"prompt": "a", "attachments": [{"filename": "a"}]}"#)]
    #[case(r#"{"prompt": "a", "skill": ""}"#)]
    #[case(r#"{"prompt": "a", "session": 7}"#)]
    fn a_malformed_prompt_is_refused(#[case] body: &str) {
        let error = PromptEnvelope::parse(body.as_bytes(), 1000).expect_err("refused");
        assert_eq!(error.info.code, Code::InvalidRequest);
    }

    #[test]
    fn a_malformed_prompt_is_not_repeated_at_length() {
        let body = serde_json::json!({"prompt": "a", "attachments": "Z".repeat(5000)}).to_string();
        let error = PromptEnvelope::parse(body.as_bytes(), 10_000).expect_err("refused");
        assert!(error.message.len() < 400, "{}", error.message);
    }

    #[test]
    fn bytes_that_are_not_text_are_refused_and_so_is_a_long_body() {
        PromptEnvelope::parse(b"\xff\xfe", 1000).expect_err("not text");
        PromptEnvelope::parse(b"12345", 5).unwrap();
        PromptEnvelope::parse(b"123456", 5).expect_err("too long");
    }

    #[rstest]
    #[case("YQ")]
    #[case("YQ=")]
    #[case("Y Q=")]
    #[case("YQ==\\n")]
    #[case("-_-_")]
    #[case("YR==")]
    fn content_in_anything_but_strict_base64_is_refused(#[case] content: &str) {
        let body =
            format!(r#"{{"prompt": "a", "attachments": [{{"filename": "a", "content": "{content}"}}]}}"#);
        let error = PromptEnvelope::parse(body.as_bytes(), 1000).expect_err("refused");
        assert_eq!(error.message, "attachments[0]: the content is not base64");
    }

    #[rstest]
    #[case("")]
    #[case(".")]
    #[case("..")]
    #[case("../a")]
    #[case("a/b")]
    #[case("/etc/passwd")]
    #[case("a\\\\b")]
    #[case("a\\u0000b")]
    #[case("a\\nb")]
    fn a_file_name_that_is_not_plain_is_refused(#[case] name: &str) {
        let body = format!(r#"{{"prompt": "a", "attachments": [{{"filename": "{name}", "content": ""}}]}}"#);
        let error = PromptEnvelope::parse(body.as_bytes(), 1000).expect_err("refused");
        assert!(error.message.ends_with("is not a plain file name"), "{}", error.message);
    }

    #[rstest]
    #[case(Some("report.pdf"), "report.pdf")]
    #[case(Some("../../etc/passwd"), "passwd")]
    #[case(Some("C:\\temp\\a.txt"), "a.txt")]
    #[case(Some("a\u{0}\nb"), "ab")]
    #[case(Some(".."), "file-1")]
    #[case(Some("dir/"), "file-1")]
    #[case(None, "file-1")]
    fn a_file_of_the_agent_gets_a_plain_name(#[case] name: Option<&str>, #[case] safe: &str) {
        assert_eq!(attachment_name(name, "file-1"), safe);
    }
}
