//! How a call ended, for people: the answer on stdout, everything else on stderr, an exit code.

use std::process::ExitCode;

use super::exchange::Came;
use super::files::Save;
use super::reply::Reply;
use crate::cli::client::Connection;
use crate::cli::output::{Colour, To, age, remark, say, write};
use crate::cli::{Failure, TROUBLE};

/// What a reply is shown with.
#[derive(Debug)]
pub(in crate::cli) struct Show<'a> {
    pub(in crate::cli) agent: &'a str,
    pub(in crate::cli) connection: &'a Connection,
    pub(in crate::cli) save: &'a Save,
}

impl Show<'_> {
    /// Shows a reply and says how it went.
    pub(in crate::cli) fn reply(&self, came: &Came) -> Result<ExitCode, Failure> {
        let reply = &came.reply;
        match reply.status() {
            "COMPLETED" => {
                self.content(reply, came.shown)?;
                return Ok(ExitCode::SUCCESS);
            }
            "WORKING" => {
                self.working(reply)?;
                return Ok(ExitCode::SUCCESS);
            }
            "INPUT_REQUIRED" | "AUTH_REQUIRED" => self.open_question(reply),
            status => {
                let word = match status {
                    "FAILED" => "failed",
                    "REJECTED" => "rejected by the agent",
                    "CANCELED" => "canceled",
                    _ => "error",
                };
                let colour = if status == "CANCELED" { Colour::Yellow } else { Colour::Red };
                let reason = match To::Stderr.clean(reply.message().trim()) {
                    reason if reason.is_empty() && status != "CANCELED" => ": no reason given".to_owned(),
                    // Who watched the task knows where it was.
                    reason if reason.is_empty() || status == "CANCELED" && came.shown => String::new(),
                    reason => format!(": {reason}"),
                };
                say(format_args!("{}{reason}", To::Stderr.paint(colour, word)));
                if let Some(hint) = self.hint(reply) {
                    say(format_args!("hint: {hint}"));
                }
            }
        }
        self.save.take(reply.files())?;
        Ok(ExitCode::from(TROUBLE))
    }

    fn content(&self, reply: &Reply, shown: bool) -> Result<(), Failure> {
        let message = reply.message();
        if !message.is_empty() && !shown {
            let end = if message.ends_with('\n') { "" } else { "\n" };
            write(&format!("{}{end}", To::Stdout.clean(message)))?;
        }
        if let Some(data) = reply.data_text() {
            write(&format!("{data}\n"))?;
        }
        self.save.take(reply.files())?;
        if message.is_empty() && reply.data().is_none() && reply.files().is_empty() {
            remark("completed, without any content");
        }
        Ok(())
    }

    fn working(&self, reply: &Reply) -> Result<(), Failure> {
        let Some(task) = reply.task_id() else {
            remark("the task goes on, and the agent has not told its id");
            return Ok(());
        };
        write(&format!("{}\n", To::Stdout.clean(task)))?;
        remark(format_args!(
            "the task goes on; follow it with:\n  {}",
            self.command(&format!("task watch {} {task}", self.agent))
        ));
        Ok(())
    }

    /// The question itself.
    pub(in crate::cli) fn question(&self, reply: &Reply) {
        let message = match To::Stderr.clean(reply.message().trim()) {
            message if message.is_empty() => "The agent needs an answer.".to_owned(),
            message => message,
        };
        say(To::Stderr.paint(Colour::Bold, format_args!("? {message}")));
        let choices = reply.choices();
        if !choices.is_empty() {
            remark(format_args!("  {}", choices.join(" / ")));
        }
    }

    /// A question that nobody here answers.
    fn open_question(&self, reply: &Reply) {
        let what = if reply.status() == "AUTH_REQUIRED" {
            "the agent wants you to sign in"
        } else {
            "the agent asks"
        };
        let message = To::Stderr.clean(reply.message().trim());
        say(format_args!("{}: {message}", To::Stderr.paint(Colour::Yellow, what)));
        if let Some(hint) = self.how_to_answer(reply) {
            say(format_args!("hint: {hint}"));
        }
    }

    /// The command that answers later.
    pub(in crate::cli) fn how_to_answer(&self, reply: &Reply) -> Option<String> {
        let (id, expires) = reply.follow_up()?;
        // A secret does not belong into arguments.
        let (answer, from) = if reply.status() == "AUTH_REQUIRED" {
            ("-", ", which reads from stdin")
        } else {
            ("'your answer'", "")
        };
        let command = self.command(&format!("call {} --answer {id} {answer}", self.agent));
        let until = if age(expires).is_empty() { String::new() } else { format!(" until {expires}") };
        Some(format!("answer{until} with{from}:\n  {command}"))
    }

    fn command(&self, command: &str) -> String {
        format!("a2a-bridge {command}{}", self.connection.flags())
    }

    /// What to try next.
    fn hint(&self, reply: &Reply) -> Option<String> {
        let agent = self.agent;
        let task = reply.task_id();
        let look = |task: &str| self.command(&format!("task get {agent} {task}"));
        let text = match reply.status() {
            "FAILED" | "REJECTED" => "the reason is the agent's own; ask differently, or look into its log".to_owned(),
            "CANCELED" => return None,
            _ => match reply.error_code() {
                "invalid_request" => format!("`{}` shows what its skills take", self.command(&format!("skills {agent}"))),
                "not_found" => "the id may be mistyped, of another agent, or forgotten by now".to_owned(),
                "follow_up_used" => "the question was answered already; call the skill again for a new one".to_owned(),
                "follow_up_expired" => "call the skill again; `input_required_ttl` in the bridge's settings gives more time".to_owned(),
                "not_cancelable" => match task {
                    Some(task) => format!("`{}` shows how it ended", look(task)),
                    None => "it has ended, or the agent does not cancel".to_owned(),
                },
                "too_large" => "ask for less; the limits are `max_response_size` in the bridge's settings and `max_payload` of nats-server".to_owned(),
                "busy" => "try again; `max_in_flight` in the bridge's settings is the limit".to_owned(),
                "agent_error" => agent_error(reply, agent),
                "agent_unavailable" => format!("`{}` shows how it is", self.command("agents")),
                "task_lost" => "the agent was started anew; call the skill again".to_owned(),
                "timeout" if reply.message().contains("stopping") => "call again when the bridge is back".to_owned(),
                "timeout" => "give it more time with `--timeout`, or let it go on by itself with `--submit`".to_owned(),
                "outcome_unknown" => match task {
                    Some(task) => format!("`{}` may tell later", look(task)),
                    None => "ask again only if asking twice does no harm".to_owned(),
                },
                _ => "the bridge's log says more; if this looks like a defect, please report it".to_owned(),
            },
        };
        Some(text)
    }
}

fn agent_error(reply: &Reply, agent: &str) -> String {
    match reply.error_number("http_status") {
        Some(401 | 403) => {
            "the agent wants credentials: `bearer_token`, `headers` or `auth` in the bridge's settings"
                .to_owned()
        }
        Some(429 | 503) => "the agent is overloaded; try again later".to_owned(),
        _ => match reply.error_number("a2a_code") {
            Some(_) => format!("if it was launched by the bridge, `a2a-bridge logs {agent}` may say more"),
            None => "the agent's log may say more".to_owned(),
        },
    }
}
