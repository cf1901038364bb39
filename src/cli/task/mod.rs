//! `task`: lists, shows, follows and cancels tasks.

mod list;
mod watch;

use std::process::ExitCode;

use serde_json::json;

use super::call::{CallReply, ReplyPrinter, SaveArgs};
use super::client::NatsClient;
use super::discover::discover;
use super::nats_args::NatsArgs;
use super::output::{Colour, OutputArgs, StdStream, eprintln, eprintln_dim};
use super::terminal;
use super::{CliResult, FAILED};
use crate::bus::subject::Token;

const DETAILS: &str = "\
`call --submit` starts a task and prints its id.

Examples:
  a2a-bridge task list --open            # what runs or waits, at all agents
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
    /// List the tasks that the bridges have seen, the newest first
    List(list::ListArgs),
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
    #[arg(allow_hyphen_values = true)]
    task: String,
}

pub(super) async fn run(args: TaskArgs) -> CliResult {
    let TaskArgs { command, output, nats } = args;
    let mesh = nats.connect().await?;
    match command {
        TaskCommand::List(args) => list::run(&mesh, &args, &output, &nats).await,
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
            watch::run(&mesh, &task, &printer, may_ask).await
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

fn print_state(reply: &CallReply) {
    let colour = match reply.status() {
        "COMPLETED" => Colour::Green,
        "FAILED" | "REJECTED" => Colour::Red,
        _ => Colour::Yellow,
    };
    let state = reply.status().to_lowercase().replace('_', "-");
    eprintln(StdStream::Stderr.paint(colour, state));
}
