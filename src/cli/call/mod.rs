//! `call`: calls a skill, answers the agent's questions and prints the reply.
//!
//! ```text
//! request ──> caller ──> reply ──> printer
//!               ^          │ needs input
//!               └─ answer ─┘ (terminal)
//! ```

mod bridge_watch;
mod caller;
mod large_files;
mod printer;
mod reply;
mod request;
mod save;
mod stream_display;

use serde_json::{Value, json};

use super::discover::discover;
use super::nats_args::NatsArgs;
use super::output::{OutputArgs, eprintln_dim, one_line};
use super::terminal::{self, Interrupts};
use super::{CliError, CliResult, FAILED, INTERRUPTED};
use crate::bus::subject::Token;
use crate::config::values::parse_duration;

pub(super) use bridge_watch::BridgeWatch;
pub(super) use caller::{CallMode, CallResult, Caller};
pub(super) use printer::ReplyPrinter;
pub(super) use reply::CallReply;
pub(super) use save::SaveArgs;

const CALL_HEADING: &str = "Call";
const DETAILS: &str = "\
The reply goes to stdout, everything else to stderr. If the agent asks a question, `call` asks you on \
the terminal; without a terminal, or with `--no-input`, it prints how to answer later.

Examples:
  a2a-bridge call demo.echo 'hello'
  a2a-bridge call demo.report -p topic=tides -p audience=sailors --save out
  git diff | a2a-bridge call review.summarize - --stream
  a2a-bridge call demo.slow 3600 --submit";

#[derive(Debug, clap::Args)]
#[command(after_help = DETAILS)]
pub(super) struct CallArgs {
    /// Agent and skill, separated by a dot; the name of an agent is enough if it has one skill
    #[arg(value_name = "AGENT.SKILL")]
    target: String,
    #[command(flatten)]
    request: request::RequestArgs,
    /// Answer the question with this follow-up id; the target is then only the agent
    #[arg(long, value_name = "ID", help_heading = CALL_HEADING, conflicts_with_all = ["params", "data", "session", "references"])]
    answer: Option<String>,
    /// Print the reply while the agent writes it; Ctrl-C cancels the task
    #[arg(long, conflicts_with = "submit", help_heading = CALL_HEADING)]
    stream: bool,
    /// Do not wait: print the task id, for use with `task`
    #[arg(long, help_heading = CALL_HEADING)]
    submit: bool,
    /// Time limit such as `30s`; the bridge may have a lower one
    #[arg(long, value_name = "DURATION", value_parser = checked_duration, help_heading = CALL_HEADING)]
    timeout: Option<String>,
    /// Never ask on the terminal; a question of the agent ends the call with exit code 1
    #[arg(long, help_heading = CALL_HEADING)]
    no_input: bool,
    #[command(flatten)]
    save: SaveArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    nats: NatsArgs,
}

fn checked_duration(text: &str) -> Result<String, String> {
    parse_duration(text).map(|_| text.to_owned())
}

pub(super) async fn run(args: CallArgs) -> CliResult {
    let mut body = match &args.answer {
        None => args.request.body()?,
        Some(id) => args.request.answer_body(id)?,
    };
    let files = args.request.files()?;
    let mesh = args.nats.connect().await?;
    files.add_to(&mut body, &mesh).await?;
    let interrupts = Interrupts::new()?;
    let (agent, skill) = parse_target(&args.target, mesh.subjects.prefix());
    let printer = ReplyPrinter { agent, nats: &args.nats, save: &args.save, json: args.output.is_json() };
    let mut caller = Caller {
        mesh: &mesh,
        interrupts: &interrupts,
        printer: &printer,
        agent: Token::new(agent),
        mode: match (args.stream, args.submit) {
            (true, _) => CallMode::Stream,
            (_, true) => CallMode::Submit,
            _ => CallMode::Final,
        },
        timeout: args.timeout.clone(),
    };
    let mut result = send_request(&mut caller, agent, skill, args.answer.is_some(), &body).await?;
    if !args.no_input && !printer.json && terminal::is_interactive() {
        result = answer_questions(&caller, result).await?;
    }
    if !printer.json {
        result.reply.fetch(&mesh, &args.save).await?;
    }
    let printed = printer.print(&result);
    if let Some(session) = args.request.session().filter(|_| !printer.json) {
        eprintln_dim(format_args!("session {}", one_line(session)));
    }
    printed
}

/// Splits `AGENT.SKILL`, or a complete subject.
fn parse_target<'a>(target: &'a str, prefix: &str) -> (&'a str, &'a str) {
    let short = target.strip_prefix(prefix).and_then(|rest| rest.strip_prefix(".action.")).unwrap_or(target);
    short.split_once('.').unwrap_or((short, ""))
}

/// Sends the first request. If no bridge serves its subject, looks for the agent and the skill by other names.
async fn send_request(
    caller: &mut Caller<'_>,
    agent: &str,
    skill: &str,
    is_answer: bool,
    body: &Value,
) -> CliResult<CallResult> {
    if is_answer || !skill.is_empty() {
        let result = if is_answer {
            caller.answer(body).await
        } else {
            caller.send(caller.mesh.subjects.action(&caller.agent, &Token::action(skill)), body).await
        };
        if !result.as_ref().is_err_and(CliError::is_no_responders) {
            return result;
        }
    }
    let discovery = discover(caller.mesh).await?;
    caller.agent = Token::new(&discovery.instance(agent, caller.mesh)?.agent);
    if is_answer {
        return caller.answer(body).await;
    }
    let subject = discovery.skill(agent, skill, caller.mesh)?.subject.clone();
    caller.send(subject, body).await
}

/// Asks the user and sends the answers until the agent has no more questions.
pub(super) async fn answer_questions(caller: &Caller<'_>, mut result: CallResult) -> CliResult<CallResult> {
    while let Some((id, _)) = result.reply.follow_up() {
        let is_secret = result.reply.status() == "AUTH_REQUIRED";
        caller.printer.print_question(&result.reply);
        if is_secret {
            eprintln_dim("  your input is hidden");
        }
        let answer = terminal::read_answer(is_secret, caller.interrupts).await;
        let Some(line) = answer.map_err(|error| CliError::new(FAILED, error))? else {
            let hint = caller.printer.how_to_answer(&result.reply).unwrap_or_default();
            return Err(CliError::msg(INTERRUPTED, "interrupted; the agent is still waiting for an answer")
                .hint(hint));
        };
        let body = json!({"follow_up_id": id, "user_response": line});
        result = caller.answer(&body).await?;
    }
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_agent_and_skill_or_a_complete_subject() {
        assert_eq!(parse_target("demo.echo", "a2a"), ("demo", "echo"));
        assert_eq!(parse_target("demo.a.b", "a2a"), ("demo", "a.b"));
        assert_eq!(parse_target("demo", "a2a"), ("demo", ""));
        assert_eq!(parse_target("acme.a2a.action.demo.echo", "acme.a2a"), ("demo", "echo"));
    }
}
