//! Prints a reply: the content on stdout, everything else on stderr.

use std::process::ExitCode;
use std::time::Duration;

use super::caller::{CallResult, Timing};
use super::reply::CallReply;
use super::save::SaveArgs;
use crate::cli::nats_args::NatsArgs;
use crate::cli::output::{Colour, StdStream, eprintln, eprintln_dim, one_line, print, println};
use crate::cli::{CliResult, FAILED};
use crate::text::{Timestamp, seconds};

/// A shorter call does not say how long it took.
const MENTIONED_AFTER: Duration = Duration::from_secs(1);
/// A stream whose first text comes so shortly before its end is as good as a single reply.
const NOTABLE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(in crate::cli) struct ReplyPrinter<'a> {
    pub(in crate::cli) agent: &'a str,
    pub(in crate::cli) nats: &'a NatsArgs,
    pub(in crate::cli) save: &'a SaveArgs,
    pub(in crate::cli) json: bool,
}

impl ReplyPrinter<'_> {
    /// Prints a reply and returns the exit code for its status.
    pub(in crate::cli) fn print(&self, result: &CallResult) -> CliResult {
        let reply = &result.reply;
        if self.json {
            if !result.is_displayed {
                reply.print_raw()?;
            }
            let succeeded = matches!(reply.status(), "COMPLETED" | "WORKING");
            return Ok(ExitCode::from(if succeeded { 0 } else { FAILED }));
        }
        match reply.status() {
            "COMPLETED" => {
                let code = self.print_content(reply, result.is_displayed)?;
                print_timing(result.timing);
                return Ok(code);
            }
            "WORKING" => return self.print_task_id(reply),
            status => {
                let (label, colour) = match status {
                    "INPUT_REQUIRED" => ("the agent asks", Colour::Yellow),
                    "AUTH_REQUIRED" => ("the agent requires authentication", Colour::Yellow),
                    "FAILED" => ("failed", Colour::Red),
                    "REJECTED" => ("rejected by the agent", Colour::Red),
                    "CANCELED" => ("canceled", Colour::Yellow),
                    _ => ("error", Colour::Red),
                };
                let reason = match StdStream::Stderr.sanitize(reply.message().trim()) {
                    // The stream has already shown the last state of a canceled task.
                    _ if status == "CANCELED" && result.is_displayed => String::new(),
                    reason if !reason.is_empty() => format!(": {reason}"),
                    _ if colour == Colour::Red => ": no reason given".to_owned(),
                    _ => String::new(),
                };
                let task = reply.task_id().filter(|_| status == "CANCELED");
                let task = task.map(|task| format!(" task {}", one_line(task))).unwrap_or_default();
                eprintln(format_args!("{}{task}{reason}", StdStream::Stderr.paint(colour, label)));
                if let Some(hint) = self.hint(reply) {
                    eprintln(format_args!("hint: {hint}"));
                }
            }
        }
        self.save.save_or_list(reply.files())?;
        Ok(ExitCode::from(FAILED))
    }

    fn print_content(&self, reply: &CallReply, is_displayed: bool) -> CliResult {
        let message = reply.message();
        if !message.is_empty() && !is_displayed {
            let end = if message.ends_with('\n') { "" } else { "\n" };
            print(&format!("{}{end}", StdStream::Stdout.sanitize(message)))?;
        }
        if let Some(data) = reply.data_text() {
            println(&data)?;
        }
        self.save.save_or_list(reply.files())?;
        if message.is_empty() && reply.data().is_none() && reply.files().is_empty() {
            eprintln_dim("completed without content");
        }
        Ok(ExitCode::SUCCESS)
    }

    fn print_task_id(&self, reply: &CallReply) -> CliResult {
        if let Some(task) = reply.task_id() {
            println(&StdStream::Stdout.sanitize(task))?;
            let command = self.task_command("watch", task);
            eprintln_dim(format_args!("the task is running; follow it with:\n  {command}"));
        } else {
            eprintln_dim("the task is running, but the agent gave no task id");
        }
        Ok(ExitCode::SUCCESS)
    }

    pub(in crate::cli) fn print_question(&self, reply: &CallReply) {
        let message = match StdStream::Stderr.sanitize(reply.message().trim()) {
            message if message.is_empty() => "The agent is waiting for an answer.".to_owned(),
            message => message,
        };
        eprintln(StdStream::Stderr.paint(Colour::Bold, format_args!("? {message}")));
        let choices = reply.choices();
        if !choices.is_empty() {
            eprintln_dim(format_args!("  {}", choices.join(" / ")));
        }
    }

    /// The command with which the user can answer later.
    pub(in crate::cli) fn how_to_answer(&self, reply: &CallReply) -> Option<String> {
        let (id, expires) = reply.follow_up()?;
        // Other users can see arguments, so a secret is read from stdin.
        let (answer, source) = if reply.status() == "AUTH_REQUIRED" {
            ("-", " (reads from stdin)")
        } else {
            ("'your answer'", "")
        };
        let command = self.command(&format!("call {} --answer {} {answer}", self.agent, quoted(id)));
        let is_time = expires.parse::<Timestamp>().is_ok();
        let until = if is_time { format!(" until {expires}") } else { String::new() };
        Some(format!("answer{until} with{source}:\n  {command}"))
    }

    /// The command that shows (`get`), follows (`watch`) or cancels (`cancel`) a task.
    pub(in crate::cli) fn task_command(&self, verb: &str, task: &str) -> String {
        self.command(&format!("task {verb} {} {}", self.agent, quoted(task)))
    }

    fn command(&self, command: &str) -> String {
        format!("a2a-bridge {command}{}", self.nats.suggested_flags())
    }

    fn hint(&self, reply: &CallReply) -> Option<String> {
        let agent = self.agent;
        let task = reply.task_id();
        let get_task = |task: &str| self.task_command("get", task);
        let text = match (reply.status(), reply.error_code()) {
            ("FAILED" | "REJECTED", _) => {
                "the agent gave this reason; change the request, or see the agent's log"
            }
            ("INPUT_REQUIRED" | "AUTH_REQUIRED", _) => return self.how_to_answer(reply),
            ("CANCELED", _) => return None,
            (_, "invalid_request") => {
                let skills = self.command(&format!("skills {agent}"));
                return Some(format!("`{skills}` lists the skills and their parameters"));
            }
            (_, "not_found") => "the id may be mistyped, belong to another agent, or have expired",
            (_, "follow_up_used") => "the question was already answered; call the skill again for a new one",
            (_, "follow_up_expired") => {
                "call the skill again; `input_required_ttl` in the bridge's configuration sets the time limit"
            }
            (_, "not_cancelable") => match task {
                Some(task) => return Some(format!("`{}` shows how it ended", get_task(task))),
                None => "the task has ended, or the agent does not support cancellation",
            },
            (_, "too_large") => {
                "request less; the limits are `max_response_size` in the bridge's configuration and `max_payload` of nats-server"
            }
            (_, "busy") => "try again; the message names the limit",
            (_, "agent_error") => match reply.error_number("http_status") {
                Some(401 | 403) => {
                    "the agent requires credentials: set `bearer_token`, `headers` or `auth` in the bridge's configuration"
                }
                Some(429 | 503) => "the agent is overloaded; try again later",
                _ if reply.error_number("a2a_code").is_some() => {
                    let logs = format!("`a2a-bridge logs {agent}` may show more");
                    return Some(format!("if the bridge launched the agent, {logs}"));
                }
                _ => "see the agent's log",
            },
            (_, "agent_unavailable") => {
                return Some(format!("`{}` shows the state of the agent", self.command("agents")));
            }
            (_, "task_lost") => "the agent has restarted; call the skill again",
            (_, "timeout") => {
                "raise `--timeout` if you set it, otherwise `request_timeout` in the bridge's configuration; or use `--submit`"
            }
            (_, "outcome_unknown") => match task {
                Some(task) => return Some(format!("`{}` may show the outcome later", get_task(task))),
                None => "repeat the call only if that is safe",
            },
            _ => "see the bridge's log; if this looks like a bug, please report it",
        };
        Some(text.to_owned())
    }
}

/// Says on a terminal how long the reply took, unless nobody will wonder.
fn print_timing(timing: Option<Timing>) {
    let Some(Timing { first_text, total }) = timing.filter(|_| StdStream::Stderr.is_terminal()) else {
        return;
    };
    match first_text {
        Some(first) if first + NOTABLE < total => {
            eprintln_dim(format_args!("first text after {}, all after {}", seconds(first), seconds(total)));
        }
        _ if total >= MENTIONED_AFTER => eprintln_dim(format_args!("took {}", seconds(total))),
        _ => {}
    }
}

/// An id of the agent in a command that the user may copy into a shell.
fn quoted(id: &str) -> String {
    let id = one_line(id);
    shlex::try_quote(&id).map(Into::into).unwrap_or_default()
}
