//! `sessions`: what the event log has of conversations, by requests to a bridge.

mod replay;
mod show;

use std::process::ExitCode;
use std::time::Duration;

use async_nats::HeaderMap;
use serde_json::{Value, json};

use self::replay::ReplayArgs;
use super::client::{JsonFields as _, NatsClient, parse_json};
use super::nats_args::NatsArgs;
use super::output::{OutputArgs, eprintln_dim, one_line, print_json, println};
use super::{CliError, CliResult, FAILED};

/// How long a bridge may take to read a long session.
const TIMEOUT: Duration = Duration::from_secs(60);

const DETAILS: &str = "\
A bridge with the setting `events` logs the calls that have a session. You see only your own sessions.

Examples:
  a2a-bridge call demo.echo 'hello' --session trip
  a2a-bridge sessions ls
  a2a-bridge sessions show trip
  a2a-bridge sessions fork trip --at 2 --content 'hello again' --run
  a2a-bridge sessions replay trip --speed 10
  a2a-bridge sessions export trip > trip.jsonl";

#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true, after_help = DETAILS)]
pub(super) struct SessionsArgs {
    #[command(subcommand)]
    command: SessionsCommand,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    nats: NatsArgs,
}

#[derive(Debug, clap::Subcommand)]
enum SessionsCommand {
    /// List your sessions, the last changed one last
    Ls {
        /// Show only what has changed since this revision, and what was deleted
        #[arg(long, value_name = "REVISION")]
        since: Option<u64>,
    },
    /// Show the messages of a session
    Show {
        /// Id of the session
        #[arg(value_name = "SESSION")]
        id: String,
        /// Show the runs, too
        #[arg(long)]
        runs: bool,
    },
    /// Show the events of a session, one JSON object a line
    Events {
        /// Id of the session
        #[arg(value_name = "SESSION")]
        id: String,
        /// Only events after this index
        #[arg(long, value_name = "INDEX", default_value_t = 0)]
        after: u64,
        /// Go on with new events until Ctrl-C
        #[arg(long)]
        follow: bool,
    },
    /// Show a conversation again, at the pace at which it took place
    Replay(ReplayArgs),
    /// Continue a session from one of its messages, in a session of its own
    Fork {
        /// Id of the session
        #[arg(value_name = "SESSION")]
        id: String,
        /// Number of the first message that differs; by default, all messages stay
        #[arg(long, value_name = "NUMBER")]
        at: Option<u64>,
        /// Text in place of the message at `--at`
        #[arg(long, value_name = "TEXT")]
        content: Option<String>,
        /// Why, for the log: by default `user_edit` with `--content`, else `branch`
        #[arg(long, value_parser = ["user_edit", "branch", "retry"])]
        reason: Option<String>,
        /// What becomes of a call that runs in the session
        #[arg(long, value_parser = ["cancel", "orphan"], default_value = "cancel")]
        on_running: String,
        /// Ask the agent with the last message
        #[arg(long)]
        run: bool,
    },
    /// Give a session another title
    Rename {
        /// Id of the session
        #[arg(value_name = "SESSION")]
        id: String,
        /// New title
        title: String,
    },
    /// Delete sessions; their forks stay whole
    Rm {
        /// Ids of the sessions
        #[arg(required = true, value_name = "SESSION")]
        ids: Vec<String>,
    },
    /// Write a session and all its events as JSON lines
    Export {
        /// Id of the session
        #[arg(value_name = "SESSION")]
        id: String,
    },
    /// Make what is stored of your sessions again from the log
    Rebuild {
        /// Id of a session; without it, all of yours
        #[arg(value_name = "SESSION")]
        id: Option<String>,
    },
    /// Count sessions and messages
    Stats,
}

pub(super) async fn run(args: SessionsArgs) -> CliResult {
    let SessionsArgs { command, output, nats } = args;
    let mesh = nats.connect().await?;
    let json = output.is_json();
    match command {
        SessionsCommand::Ls { since } => show::list(&mesh, since, json).await,
        SessionsCommand::Show { id, runs } => show::show(&mesh, &id, runs, json).await,
        SessionsCommand::Events { id, after, follow } => replay::events(&mesh, &id, after, follow).await,
        SessionsCommand::Replay(args) => replay::replay(&mesh, &args).await,
        SessionsCommand::Fork { id, at, content, reason, on_running, run } => {
            let at = match at {
                Some(at) => at,
                None => count(&request(&mesh, "get", &json!({ "id": id, "before": 0 })).await?),
            };
            let default = if content.is_some() { "user_edit" } else { "branch" };
            let reason = reason.unwrap_or_else(|| default.to_owned());
            let body = json!({
                "id": id, "at": at, "reason": reason, "on_running": on_running, "run": run, "content": content,
            });
            let fork = request(&mesh, "fork", &body).await?;
            if json {
                return print_json(&fork);
            }
            println(&one_line(fork.text("/id").unwrap_or_default()))?;
            if let Some(message) = fork.text("/run_error/message") {
                let message = format!("the agent was not asked: {}", one_line(message));
                return Err(
                    CliError::msg(FAILED, message).hint("the fork exists; call the agent with `--session`")
                );
            }
            Ok(ExitCode::SUCCESS)
        }
        SessionsCommand::Rename { id, title } => {
            let session = request(&mesh, "rename", &json!({ "id": id, "title": title })).await?;
            if json {
                return print_json(&session);
            }
            Ok(ExitCode::SUCCESS)
        }
        SessionsCommand::Rm { ids } => {
            for id in ids {
                request(&mesh, "delete", &json!({ "id": id })).await?;
                eprintln_dim(format_args!("deleted {}", one_line(&id)));
            }
            Ok(ExitCode::SUCCESS)
        }
        SessionsCommand::Export { id } => replay::export(&mesh, &id).await,
        SessionsCommand::Rebuild { id } => {
            let body = id.map_or_else(|| json!({}), |id| json!({ "id": id }));
            let rebuilt = request(&mesh, "rebuild", &body).await?;
            if json {
                return print_json(&rebuilt);
            }
            let count = rebuilt.pointer("/sessions").and_then(Value::as_u64).unwrap_or(1);
            eprintln_dim(format_args!("made {count} sessions again"));
            Ok(ExitCode::SUCCESS)
        }
        SessionsCommand::Stats => show::stats(&mesh, json).await,
    }
}

/// The number of messages of a session.
fn count(session: &Value) -> u64 {
    session.pointer("/message_count").and_then(Value::as_u64).unwrap_or_default()
}

/// A request about sessions with a JSON body and reply.
async fn request(mesh: &NatsClient, verb: &str, body: &Value) -> CliResult<Value> {
    let subject = mesh.subjects.sessions(verb);
    let mut replies = mesh.request(subject, HeaderMap::new(), body.to_string().into()).await?;
    let reply = replies.next_within(TIMEOUT).await.map_err(no_sessions)?;
    checked(&reply)
}

/// A reply that is not an error.
fn checked(reply: &async_nats::Message) -> CliResult<Value> {
    let is_error =
        reply.headers.as_ref().is_some_and(|headers| headers.get("Nats-Service-Error-Code").is_some());
    let body = parse_json(reply)?;
    if !is_error {
        return Ok(body);
    }
    let message = one_line(body.text("/message").unwrap_or("the bridge refuses the request"));
    let hint = match body.text("/error_info/code") {
        Some("not_found") => {
            "sessions expire, and you see only your own; `a2a-bridge sessions ls` lists them"
        }
        Some("state_unavailable") => "sessions need JetStream on the NATS server; try again",
        Some("busy") => "try again later",
        _ => "`a2a-bridge sessions --help` explains the commands",
    };
    Err(CliError::msg(FAILED, message).hint(hint))
}

fn no_sessions(reason: super::client::NoReply) -> CliError {
    let error = CliError::from(reason);
    match error.is_no_responders() {
        true => error.hint("no bridge has an event log: add `events: {}` to its configuration"),
        false => error,
    }
}
