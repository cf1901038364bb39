//! `task`: shows, follows and cancels submitted tasks.

use std::process::ExitCode;
use std::time::Duration;

use futures_util::StreamExt as _;
use serde_json::json;

use super::call::{CallMode, CallReply, CallResult, Caller, ReplyPrinter, SaveArgs, answer_questions};
use super::client::{NatsArgs, NatsClient};
use super::discover::discover;
use super::output::{Colour, OutputArgs, StdStream, eprintln, eprintln_dim};
use super::terminal::{self, Interrupts};
use super::{CliError, CliResult, FAILED, INTERRUPTED};
use crate::bus::subject::Token;

/// Poll interval while following a task, in case an update is lost.
const POLL_INTERVAL: Duration = Duration::from_secs(15);

const DETAILS: &str = "\
`call --submit` starts a task and prints its id.

Examples:
  a2a-bridge task get demo 5f2c
  a2a-bridge task watch demo 5f2c --save out
  a2a-bridge task cancel demo 5f2c";

#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true, after_help = DETAILS)]
pub(super) struct TaskArgs {
    #[command(subcommand)]
    command: TaskCommand,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    nats: NatsArgs,
}

#[derive(Debug, clap::Subcommand)]
enum TaskCommand {
    /// Show the state of a task, and its result if it has ended
    Get(TaskId),
    /// Follow a task until it ends, and answer its questions
    Watch {
        #[command(flatten)]
        task: TaskId,
        /// Never ask on the terminal
        #[arg(long)]
        no_input: bool,
        #[command(flatten)]
        save: SaveArgs,
    },
    /// Cancel a task
    Cancel(TaskId),
}

#[derive(Debug, clap::Args)]
struct TaskId {
    /// Name of the agent
    agent: String,
    /// Id of the task
    task: String,
}

pub(super) async fn run(args: TaskArgs) -> CliResult {
    let TaskArgs { command, output, nats } = args;
    let mesh = nats.connect().await?;
    match command {
        TaskCommand::Get(task) => {
            let reply = get_task(&mesh, &task).await?;
            let is_known = reply.status() != "ERROR";
            if is_known && !output.is_json() {
                print_state(&reply);
            }
            if reply.status() == "WORKING" && !output.is_json() {
                eprintln_dim(StdStream::Stderr.sanitize(reply.message()));
                return Ok(ExitCode::SUCCESS);
            }
            print_reply(reply, &task, &output, &nats, is_known)
        }
        TaskCommand::Cancel(task) => {
            let subject = mesh.subjects.cancel_task(&Token::new(&task.agent));
            let reply = request(&mesh, subject, &task).await?;
            let is_canceled = reply.status() == "CANCELED";
            print_reply(reply, &task, &output, &nats, is_canceled)
        }
        TaskCommand::Watch { task, no_input, save } => {
            let json = output.is_json();
            let printer = ReplyPrinter { agent: &task.agent, nats: &nats, save: &save, json };
            let may_ask = !no_input && !json && terminal::is_interactive();
            watch(&mesh, &task, &printer, may_ask).await
        }
    }
}

/// Prints a reply. The exit code says whether the request succeeded, not whether the task did.
fn print_reply(
    reply: CallReply,
    task: &TaskId,
    output: &OutputArgs,
    nats: &NatsArgs,
    succeeded: bool,
) -> CliResult {
    let save = SaveArgs::default();
    let printer = ReplyPrinter { agent: &task.agent, nats, save: &save, json: output.is_json() };
    printer.print(&reply.into())?;
    Ok(ExitCode::from(if succeeded { 0 } else { FAILED }))
}

async fn get_task(mesh: &NatsClient, task: &TaskId) -> CliResult<CallReply> {
    request(mesh, mesh.subjects.get_task(&Token::new(&task.agent)), task).await
}

async fn request(mesh: &NatsClient, subject: String, task: &TaskId) -> CliResult<CallReply> {
    let body = json!({"task_id": task.task}).to_string();
    match mesh.request_one(subject, body.into()).await {
        Ok(message) => CallReply::parse(&message),
        Err(error) if error.is_no_responders() => {
            Err(discover(mesh).await?.unknown_agent_error(&task.agent, mesh))
        }
        Err(error) => Err(error),
    }
}

async fn watch(mesh: &NatsClient, task: &TaskId, printer: &ReplyPrinter<'_>, may_ask: bool) -> CliResult {
    let interrupts = Interrupts::new()?;
    let caller = Caller {
        mesh,
        interrupts: &interrupts,
        printer,
        agent: Token::new(&task.agent),
        mode: CallMode::Submit,
        timeout: None,
    };
    let mut updates = mesh.subscribe(mesh.subjects.task(&caller.agent, &Token::new(&task.task))).await?;
    let mut reply = get_task(mesh, task).await?;
    let mut last_status = String::new();
    loop {
        if (reply.status() == "WORKING" || reply.needs_input()) && reply.status() != last_status {
            if printer.json {
                reply.print_raw()?;
            } else {
                print_state(&reply);
            }
        }
        if may_ask && reply.follow_up().is_some() {
            reply = answer_questions(&caller, reply.into()).await?.reply;
            continue;
        }
        if !matches!(reply.status(), "WORKING" | "AUTH_REQUIRED") {
            let is_displayed = printer.json && reply.needs_input();
            return printer.print(&CallResult { reply, is_displayed });
        }
        last_status = reply.status().to_owned();
        reply = tokio::select! {
            () = interrupts.next() => {
                terminal::end_interrupted_line();
                return Err(CliError::msg(INTERRUPTED, "interrupted; the task is still running")
                    .hint(format!("`a2a-bridge task cancel {} {}` cancels it", task.agent, task.task)));
            }
            message = updates.next() => match message {
                Some(message) => CallReply::parse(&message)?,
                None => get_task(mesh, task).await?,
            },
            () = tokio::time::sleep(POLL_INTERVAL) => get_task(mesh, task).await?,
        };
    }
}

fn print_state(reply: &CallReply) {
    let colour = match reply.status() {
        "COMPLETED" => Colour::Green,
        "FAILED" | "REJECTED" => Colour::Red,
        _ => Colour::Yellow,
    };
    let state = reply.status().to_lowercase().replace('_', "-");
    eprintln(StdStream::Stderr.paint(colour, state));
}
