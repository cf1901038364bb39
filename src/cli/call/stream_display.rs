//! Shows a stream while it arrives: the response on stdout, notices on separate lines on stderr.
//!
//! The response arrives as `response` frames. `artifact` frames carry the same text and everything else; artifact text
//! that no `response` frame repeats (a plan, a tool's report) is shown as a notice.

use serde_json::Value;
use tokio::time::Instant;

use super::reply::CallReply;
use crate::cli::CliResult;
use crate::cli::client::JsonFields as _;
use crate::cli::output::{StdStream, eprintln_dim, one_line, print};
use crate::text::shorten;

const MAX_NOTICE: usize = 300;

#[derive(Debug, Default)]
pub(super) struct StreamDisplay {
    shown: String,
    /// The last artifact; a notice unless a response with the same text follows.
    pending: Option<PendingArtifact>,
    /// Ids of artifacts that are part of the response.
    response_ids: Vec<String>,
    task_id: Option<String>,
    next_sequence: Option<u64>,
    lost_frames: u64,
    /// The messages of all states so far.
    state_messages: String,
    /// The message of the state that ended the task.
    final_message: String,
    /// A response that may turn out to be the reason for a failure.
    held: Option<String>,
    /// What the agent does, as it last said.
    status: Option<String>,
    /// When the first text of the response arrived.
    first_text_at: Option<Instant>,
}

#[derive(Debug)]
struct PendingArtifact {
    id: String,
    name: String,
    text: String,
}

impl StreamDisplay {
    pub(super) fn task_id(&self) -> Option<&str> {
        self.task_id.as_deref()
    }

    /// What the agent does, in a few words.
    pub(super) fn status(&self) -> Option<&str> {
        self.status.as_deref()
    }

    pub(super) fn first_text_at(&self) -> Option<Instant> {
        self.first_text_at
    }

    /// Whether the terminal shows an unfinished line of the response.
    pub(super) fn is_mid_line(&self) -> bool {
        let is_open = !self.shown.is_empty() && !self.shown.ends_with('\n');
        is_open && StdStream::Stdout.is_terminal()
    }

    /// Counts the frames that are missing before this one.
    pub(super) fn count_frame(&mut self, sequence: Option<u64>) {
        if let Some(sequence) = sequence {
            self.lost_frames += sequence.saturating_sub(self.next_sequence.unwrap_or(sequence));
            self.next_sequence = Some(sequence + 1);
        }
    }

    /// Takes in a frame, and shows it if `is_visible`.
    pub(super) fn show_frame(&mut self, kind: &str, data: &Value, is_visible: bool) -> CliResult<()> {
        if kind == "task" {
            self.task_id = data.text("/id").map(str::to_owned);
        }
        if kind == "response" {
            self.first_text_at.get_or_insert_with(Instant::now);
        }
        let message = data.text("/message").filter(|_| kind == "state").unwrap_or_default();
        let is_new_status = !message.trim().is_empty() && self.status.as_deref() != Some(message);
        if is_new_status {
            self.status = Some(message.to_owned());
        }
        if !is_visible {
            return Ok(());
        }
        match kind {
            "response" => {
                let text = data.as_str().unwrap_or_default();
                self.take_response_artifact(text);
                self.flush_notice()?;
                // The bridge can build a response from state messages. Only the result tells whether that is
                // the response or the reason for a failure.
                if self.shown.is_empty() && without_spaces(text) == without_spaces(&self.state_messages) {
                    self.held = Some(text.to_owned());
                } else {
                    self.show(text)?;
                }
            }
            "artifact" => {
                self.flush_notice()?;
                self.pending = self.new_artifact(data);
            }
            "state" => {
                self.flush_notice()?;
                self.state_messages.push_str(message);
                match data.text("/state") {
                    Some("working" | "submitted" | "unknown") if is_new_status => {
                        self.show_state_message(message)?;
                    }
                    Some("working" | "submitted" | "unknown") => {}
                    _ => self.final_message = message.to_owned(),
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn show(&mut self, text: &str) -> CliResult<()> {
        self.shown.push_str(text);
        print(&StdStream::Stdout.sanitize(text))
    }

    fn show_state_message(&mut self, text: &str) -> CliResult<()> {
        if !text.trim().is_empty() && StdStream::Stderr.is_terminal() {
            self.break_line()?;
            eprintln_dim(format_args!("· {}", shorten(&one_line(text), MAX_NOTICE)));
        }
        Ok(())
    }

    /// The pending artifact is part of the response if a `response` frame has the same text.
    fn take_response_artifact(&mut self, text: &str) {
        let artifact =
            self.pending.take_if(|pending| text.contains(&pending.text) || pending.text.contains(text));
        self.response_ids.extend(artifact.map(|artifact| artifact.id));
    }

    fn new_artifact(&self, data: &Value) -> Option<PendingArtifact> {
        let field = |pointer: &str| data.text(pointer).unwrap_or_default().to_owned();
        let (id, name) = (field("/artifact_id"), field("/name"));
        let text: String = data.list("/parts").iter().filter_map(|part| part.text("/text")).collect();
        // The last artifact often repeats everything that was streamed.
        let is_new =
            !self.response_ids.contains(&id) && !without_spaces(&self.shown).contains(&without_spaces(&text));
        is_new.then_some(PendingArtifact { id, name, text })
    }

    fn flush_notice(&mut self) -> CliResult<()> {
        if let Some(PendingArtifact { name, text, .. }) = self.pending.take() {
            self.break_line()?;
            let text = shorten(&one_line(&text), MAX_NOTICE);
            eprintln_dim(format_args!("· {}: {text}", one_line(&name)));
        }
        Ok(())
    }

    /// Ends an unfinished line of the response if stderr goes to the same screen.
    pub(super) fn break_line(&mut self) -> CliResult<()> {
        if self.is_mid_line() && StdStream::Stderr.is_terminal() {
            self.shown.push('\n');
            print("\n")?;
        }
        Ok(())
    }

    /// Compares the result with the shown text. Returns whether the result is on the screen already.
    pub(super) fn finish(&mut self, reply: &CallReply) -> CliResult<bool> {
        self.flush_notice()?;
        let is_completed = reply.status() == "COMPLETED";
        if let Some(held) = self.held.take() {
            if !is_completed {
                return Ok(StdStream::Stderr.is_terminal());
            }
            self.show(&held)?;
        }
        if !self.shown.is_empty() && !self.shown.ends_with('\n') {
            self.show("\n")?;
        }
        let message = without_spaces(reply.message());
        if is_completed && !message.contains(&without_spaces(&self.final_message)) {
            let text = std::mem::take(&mut self.final_message);
            self.show_state_message(&text)?;
        }
        if self.shown.is_empty() {
            return Ok(false);
        }
        // The result may join its parts with other white space.
        if without_spaces(&self.shown) == message {
            return Ok(true);
        }
        if self.lost_frames > 0 {
            eprintln_dim(format_args!("{} frames were lost", self.lost_frames));
        }
        if is_completed {
            eprintln_dim("the complete response:");
        }
        Ok(false)
    }
}

fn without_spaces(text: &str) -> String {
    text.chars().filter(|c| !c.is_whitespace()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn artifact(id: &str, text: &str) -> Value {
        json!({"artifact_id": id, "name": id, "parts": [{"text": text}]})
    }

    #[test]
    fn artifact_text_without_a_response_is_a_notice() {
        let mut display = StreamDisplay::default();
        display.show_frame("artifact", &artifact("plan", "first this"), true).unwrap();
        assert!(display.pending.is_some());
        display.show_frame("artifact", &artifact("a", "hel"), true).unwrap();
        display.show_frame("response", &json!("hel"), true).unwrap();
        assert!(display.pending.is_none());
        display.show_frame("artifact", &artifact("a", "lo"), true).unwrap();
        assert!(display.pending.is_none(), "a later part of the response is not a notice");
        display.show_frame("response", &json!("lo"), true).unwrap();
        assert!(
            display
                .finish(&CallReply::from_value(json!({"status": "COMPLETED", "message": "hel\nlo"})))
                .unwrap()
        );
        assert!(
            !display
                .finish(&CallReply::from_value(json!({"status": "COMPLETED", "message": "other"})))
                .unwrap()
        );
    }

    #[test]
    fn state_messages_are_the_response_only_if_the_task_completed() {
        for (status, shown) in [("COMPLETED", "one two\n"), ("FAILED", "")] {
            let mut display = StreamDisplay::default();
            display.show_frame("state", &json!({"state": "working", "message": "one "}), true).unwrap();
            display.show_frame("state", &json!({"state": "failed", "message": "two"}), true).unwrap();
            display.show_frame("response", &json!("one two"), true).unwrap();
            display.finish(&CallReply::from_value(json!({"status": status, "message": "one two"}))).unwrap();
            assert_eq!(display.shown, shown);
        }
    }

    #[test]
    fn missing_frames_are_counted() {
        let mut display = StreamDisplay::default();
        for number in [Some(0), Some(1), None, Some(5), Some(6)] {
            display.count_frame(number);
        }
        assert_eq!(display.lost_frames, 3);
    }
}
