//! A stream on the screen: the answer as it comes, notices on lines of their own.
//!
//! The answer arrives as `response` frames and goes to stdout. `artifact` frames carry the same text
//! and everything else; text that does not come as a response too is a notice (a plan, a tool's report)
//! and goes to stderr.

use serde_json::Value;

use super::reply::Reply;
use crate::cli::Failure;
use crate::cli::client::Fields as _;
use crate::cli::output::{To, one_line, remark, write};
use crate::text::shorten;

/// Longest notice on the screen.
const MAX_NOTICE: usize = 300;

/// What was shown so far.
#[derive(Debug, Default)]
pub(super) struct View {
    shown: String,
    /// An artifact's id, its name and text; a notice unless a response follows with the same text.
    pending: Option<(String, String, String)>,
    /// Artifacts that belong to the answer.
    answers: Vec<String>,
    task: Option<String>,
    expected: Option<u64>,
    lost: u64,
    /// Everything that the states said.
    states: String,
    /// What the last state said, if it ended the task.
    last_words: String,
    /// A response that may be the reason of a failure.
    held: Option<String>,
}

impl View {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// The task's id, once it is known.
    pub(super) fn task(&self) -> Option<&str> {
        self.task.as_deref()
    }

    /// Notes the number of a frame.
    pub(super) fn number(&mut self, number: Option<u64>) {
        if let Some(number) = number {
            self.lost += number.saturating_sub(self.expected.unwrap_or(number));
            self.expected = Some(number + 1);
        }
    }

    /// Takes a frame; `visible` ones go to the screen.
    pub(super) fn take(&mut self, kind: &str, data: &Value, visible: bool) -> Result<(), Failure> {
        if kind == "task" {
            self.task = data.text("/id").map(str::to_owned);
        }
        if !visible {
            return Ok(());
        }
        match kind {
            "response" => {
                let text = data.as_str().unwrap_or_default();
                self.is_answer(text);
                self.flush_notice()?;
                // Made of what the states said: whether it is the answer or the reason of a failure, the
                // result will tell.
                if self.shown.is_empty() && squeezed(text) == squeezed(&self.states) {
                    self.held = Some(text.to_owned());
                    return Ok(());
                }
                self.show(text)
            }
            "artifact" => {
                self.flush_notice()?;
                self.pending = self.notice(data);
                Ok(())
            }
            "state" => {
                self.flush_notice()?;
                let text = data.text("/message").unwrap_or_default();
                self.states.push_str(text);
                let is_open = matches!(data.text("/state"), Some("working" | "submitted" | "unknown"));
                if is_open {
                    self.remark_on(text)
                } else {
                    self.last_words = text.to_owned();
                    Ok(())
                }
            }
            _ => Ok(()),
        }
    }

    fn show(&mut self, text: &str) -> Result<(), Failure> {
        self.shown.push_str(text);
        write(&To::Stdout.clean(text))
    }

    /// What the agent says about its state, for somebody who watches.
    fn remark_on(&mut self, text: &str) -> Result<(), Failure> {
        if !text.trim().is_empty() && To::Stderr.is_terminal() {
            self.break_line()?;
            remark(format_args!("· {}", shorten(&one_line(text), MAX_NOTICE)));
        }
        Ok(())
    }

    /// A response came: an artifact with that text was part of the answer.
    fn is_answer(&mut self, text: &str) {
        let pending =
            self.pending.take_if(|(_, _, pending)| text.contains(&**pending) || pending.contains(text));
        if let Some((id, ..)) = pending {
            self.answers.push(id);
        }
    }

    fn notice(&self, artifact: &Value) -> Option<(String, String, String)> {
        let text = |key: &str| artifact.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let id = text("artifact_id");
        let parts = artifact.list("/parts").iter();
        let said: String = parts.filter_map(|part| part.text("/text")).collect();
        // A closing artifact often repeats all that was streamed.
        let is_new = !self.answers.contains(&id) && !squeezed(&self.shown).contains(&squeezed(&said));
        is_new.then(|| (id, text("name"), said))
    }

    fn flush_notice(&mut self) -> Result<(), Failure> {
        if let Some((_, name, text)) = self.pending.take() {
            self.break_line()?;
            let text = shorten(&one_line(&text), MAX_NOTICE);
            remark(format_args!("· {}: {text}", one_line(&name)));
        }
        Ok(())
    }

    /// Begins a new line, if the last one is open and both streams end on the same screen.
    pub(super) fn break_line(&mut self) -> Result<(), Failure> {
        let open = !self.shown.is_empty() && !self.shown.ends_with('\n');
        if open && To::Stdout.is_terminal() && To::Stderr.is_terminal() {
            self.shown.push('\n');
            write("\n")?;
        }
        Ok(())
    }

    /// The result has the last word. Whether it is on the screen already.
    pub(super) fn finish(&mut self, reply: &Reply) -> Result<bool, Failure> {
        self.flush_notice()?;
        if let Some(held) = self.held.take() {
            if reply.status() != "COMPLETED" {
                return Ok(To::Stderr.is_terminal());
            }
            self.show(&held)?;
        }
        if !self.shown.is_empty() && !self.shown.ends_with('\n') {
            self.show("\n")?;
        }
        if reply.status() == "COMPLETED" && !squeezed(reply.message()).contains(&squeezed(&self.last_words)) {
            let words = std::mem::take(&mut self.last_words);
            self.remark_on(&words)?;
        }
        if self.shown.is_empty() {
            return Ok(false);
        }
        // How parts are joined may differ; what they say may not.
        if squeezed(&self.shown) == squeezed(reply.message()) {
            return Ok(true);
        }
        if self.lost > 0 {
            remark(format_args!("{} frames were lost on the way", self.lost));
        }
        if reply.status() == "COMPLETED" {
            remark("the whole answer:");
        }
        Ok(false)
    }
}

fn squeezed(text: &str) -> String {
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
    fn text_that_is_no_response_is_a_notice() {
        let mut view = View::new();
        view.take("artifact", &artifact("plan", "first this"), true).unwrap();
        assert!(view.pending.is_some());
        view.take("artifact", &artifact("a", "hel"), true).unwrap();
        view.take("response", &json!("hel"), true).unwrap();
        assert!(view.pending.is_none());
        view.take("artifact", &artifact("a", "lo"), true).unwrap();
        assert!(view.pending.is_none(), "a later piece of the answer is no notice");
        view.take("response", &json!("lo"), true).unwrap();
        assert!(
            view.finish(&Reply::from_value(json!({"status": "COMPLETED", "message": "hel\nlo"}))).unwrap()
        );
        assert!(
            !view.finish(&Reply::from_value(json!({"status": "COMPLETED", "message": "other"}))).unwrap()
        );
    }

    #[test]
    fn what_states_said_is_an_answer_only_if_the_task_is_done() {
        for (status, shown) in [("COMPLETED", "one two\n"), ("FAILED", "")] {
            let mut view = View::new();
            view.take("state", &json!({"state": "working", "message": "one "}), true).unwrap();
            view.take("state", &json!({"state": "failed", "message": "two"}), true).unwrap();
            view.take("response", &json!("one two"), true).unwrap();
            view.finish(&Reply::from_value(json!({"status": status, "message": "one two"}))).unwrap();
            assert_eq!(view.shown, shown);
        }
    }

    #[test]
    fn gaps_in_the_numbers_are_counted() {
        let mut view = View::new();
        for number in [Some(0), Some(1), None, Some(5), Some(6)] {
            view.number(number);
        }
        assert_eq!(view.lost, 3);
    }
}
