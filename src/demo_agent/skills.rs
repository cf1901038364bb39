//! The catalogue: every skill, its entry on the card, and how a message chooses one.

use clap::ValueEnum;

use super::protocol::{DemoMessage, RawJson, object, some};

/// The ids on the card are these names in kebab case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum DemoSkill {
    Echo,
    Report,
    Auth,
    Stream,
    Supervisor,
    File,
    Fail,
    Reject,
    Slow,
    Hang,
    Message,
    State,
    RpcError,
    Http,
    Html,
    Garbage,
    Big,
    Crash,
    Headers,
    Metadata,
}

impl DemoSkill {
    /// The skill that `message` asks for, and its argument: the `skill_id` of its metadata with
    /// the whole text, else the first word with the rest, else `None` with the whole text.
    pub(super) fn chosen_by(message: &DemoMessage) -> (Option<Self>, String) {
        let text = message.text();
        let named = message.metadata.as_ref().and_then(|metadata| metadata.get("skill_id")?.as_str());
        if let Some(skill) = named.and_then(|id| Self::from_str(id, true).ok()) {
            return (Some(skill), text);
        }
        let (first, rest) = text.trim_start().split_once(char::is_whitespace).unwrap_or((text.trim(), ""));
        match Self::from_str(first, true) {
            Ok(Self::Echo) => (Some(Self::Echo), text),
            Ok(skill) => (Some(skill), rest.trim_start().to_owned()),
            Err(_) => (None, text),
        }
    }

    /// The skill as the card lists it.
    #[rustfmt::skip]
    pub(super) fn card_entry(self) -> RawJson {
        let (name, description, tags, examples): (_, _, &[&str], &[&str]) = match self {
            Self::Echo => ("Echo", "Repeats the message, files and data included.", &["text", "demo"], &["echo hello world"]),
            Self::Report => ("Report writer", "Write a report about {topic} for {audience}", &["writing", "questions"], &["report about tides for sailors"]),
            Self::Auth => ("Sign-in", "Does its work only after you have signed in.", &["auth", "questions"], &["auth to the archive"]),
            Self::Stream => ("Word streamer", "Streams the words of the prompt back, one by one.", &["text", "streaming"], &["stream one two three"]),
            Self::Supervisor => ("Supervisor", "Plans, calls another agent and forwards its answer, in 600 events.", &["streaming", "agents"], &["supervisor show argocd version"]),
            Self::File => ("File", "Answers with a small picture and some data.", &["files", "data"], &["file please"]),
            Self::Fail => ("Failure", "Fails and gives the prompt as the reason.", &["trouble"], &["fail for lack of wind"]),
            Self::Reject => ("Rejection", "Rejects the task.", &["trouble"], &["reject this"]),
            Self::Slow => ("Slow work", "Works for the number of seconds in the prompt; can be canceled.", &["time", "cancel"], &["slow 3"]),
            Self::Hang => ("Hang", "Never answers the request.", &["trouble"], &["hang"]),
            Self::Message => ("Direct message", "Answers with a message and no task.", &["text"], &["message hello"]),
            Self::State => ("State", "Ends in the state that the prompt names.", &["trouble", "states"], &["state rejected", "state working"]),
            Self::RpcError => ("JSON-RPC error", "Answers with the JSON-RPC error code in the prompt.", &["trouble"], &["rpc-error -32005"]),
            Self::Http => ("HTTP status", "Answers with the HTTP status in the prompt.", &["trouble"], &["http 503"]),
            Self::Html => ("Web page", "Answers with a web page instead of JSON.", &["trouble"], &["html"]),
            Self::Garbage => ("Garbage", "Answers with JSON that is not A2A.", &["trouble"], &["garbage"]),
            Self::Big => ("Big answer", "Answers with the number of bytes in the prompt, as text.", &["text", "size"], &["big 2000000"]),
            Self::Crash => ("Crash", "Exits immediately, without an answer.", &["trouble"], &["crash"]),
            Self::Headers => ("Headers", "Answers with the HTTP headers of the request.", &["data", "http"], &["headers"]),
            Self::Metadata => ("Metadata", "Answers with the metadata and ids of the message.", &["data"], &["metadata"]),
        };
        let output_modes: &[&str] = match self {
            Self::Report => &["text/plain", "text/markdown", "application/pdf"],
            Self::File => &["image/png", "application/json"],
            Self::Headers | Self::Metadata => &["application/json"],
            _ => &[],
        };
        object([
            ("id", self.to_possible_value().and_then(|value| some(value.get_name()))),
            ("name", some(name)),
            ("description", some(description)),
            ("tags", some(tags)),
            ("examples", some(examples)),
            ("outputModes", some(output_modes).filter(|_| !output_modes.is_empty())),
        ])
    }
}
