//! `task`: submitted tasks, looked up, followed and cancelled.

use crate::text::error_chain;
use std::process::ExitCode;
use std::time::Duration;

use futures_util::StreamExt as _;

use super::call::{Came, Exchange, Mode, Reply, Save, Show, ask_about, converse};
use super::client::{Connection, Mesh};
use super::output::{Colour, Output, To, remark, say};
use super::terminal::{self, Interrupts};
use super::{Failure, INTERRUPTED, TROUBLE, UNAVAILABLE};
use crate::bus::subject::Token;

/// How often a followed task is looked up, in case its news got lost.
const LOOK: Duration = Duration::from_secs(15);

/// Options of `task`.
#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Show where a task stands
    Get(Task),
    /// Follow a task to its end, and answer its questions
    Watch {
        #[command(flatten)]
        task: Task,
        /// Never ask on the terminal
        #[arg(long)]
        no_input: bool,
        #[command(flatten)]
        save: Save,
    },
    /// Cancel a task
    Cancel(Task),
}

#[derive(Debug, clap::Args)]
struct Task {
    /// The agent
    agent: String,
    /// The task's id
    task: String,
}

pub(super) async fn run(args: Args) -> Result<ExitCode, Failure> {
    let Args { command, output, connection } = args;
    let mesh = connection.connect().await?;
    match command {
        Command::Get(task) => get(&mesh, &task, &output, &connection).await,
        Command::Cancel(task) => cancel(&mesh, &task, &output, &connection).await,
        Command::Watch { task, no_input, save } => {
            let show = Show { agent: &task.agent, connection: &connection, save: &save };
            let may_ask = !no_input && !output.is_json() && terminal::has_somebody();
            watch(&mesh, &task, &output, &show, may_ask).await
        }
    }
}

async fn get(
    mesh: &Mesh,
    task: &Task,
    output: &Output,
    connection: &Connection,
) -> Result<ExitCode, Failure> {
    let subject = mesh.subjects.get_task(&Token::new(&task.agent));
    let reply = ask_about(mesh, subject, &task.agent, &task.task).await?;
    let known = reply.status() != "ERROR";
    let code = ExitCode::from(if known { 0 } else { TROUBLE });
    if output.is_json() {
        reply.print_raw()?;
        return Ok(code);
    }
    let save = Save::default();
    let show = Show { agent: &task.agent, connection, save: &save };
    if known {
        state(&reply);
    }
    if reply.status() == "WORKING" {
        remark(To::Stderr.clean(reply.message()));
        return Ok(code);
    }
    // The look-up went well, however the task did.
    show.reply(&Came { reply, shown: false })?;
    Ok(code)
}

async fn cancel(
    mesh: &Mesh,
    task: &Task,
    output: &Output,
    connection: &Connection,
) -> Result<ExitCode, Failure> {
    let subject = mesh.subjects.cancel_task(&Token::new(&task.agent));
    let reply = ask_about(mesh, subject, &task.agent, &task.task).await?;
    let code = ExitCode::from(if reply.status() == "CANCELED" { 0 } else { TROUBLE });
    if output.is_json() {
        reply.print_raw()?;
    } else {
        let save = Save::default();
        let show = Show { agent: &task.agent, connection, save: &save };
        show.reply(&Came { reply, shown: false })?;
    }
    Ok(code)
}

async fn watch(
    mesh: &Mesh,
    task: &Task,
    output: &Output,
    show: &Show<'_>,
    may_ask: bool,
) -> Result<ExitCode, Failure> {
    let agent = Token::new(&task.agent);
    let news = mesh.subjects.task(&agent, &Token::new(&task.task));
    let mut interrupts = Interrupts::new()?;
    let mut news =
        mesh.client.subscribe(news).await.map_err(|error| {
            Failure::new(UNAVAILABLE, anyhow::anyhow!(error_chain(&error))).hint("try again")
        })?;
    let look = || ask_about(mesh, mesh.subjects.get_task(&agent), &task.agent, &task.task);
    let mut reply = look().await?;
    let mut last = String::new();
    loop {
        if reply.status() == "WORKING" || reply.needs_input() {
            if output.is_json() && reply.status() != last {
                reply.print_raw()?;
            } else if reply.status() != last {
                state(&reply);
            }
        }
        if may_ask && reply.follow_up().is_some() {
            let exchange =
                Exchange { mesh, agent: agent.clone(), mode: Mode::Submit, timeout: None, json: false };
            reply =
                converse(&exchange, Came { reply, shown: false }, show, true, &mut interrupts).await?.reply;
            continue;
        }
        if !matches!(reply.status(), "WORKING" | "AUTH_REQUIRED") {
            if !output.is_json() {
                return show.reply(&Came { reply, shown: false });
            }
            if !reply.needs_input() {
                reply.print_raw()?;
            }
            let well = reply.status() == "COMPLETED";
            return Ok(ExitCode::from(if well { 0 } else { TROUBLE }));
        }
        last = reply.status().to_owned();
        reply = tokio::select! {
            () = interrupts.next() => {
                terminal::after_interrupt();
                let error = anyhow::anyhow!("left; the task goes on");
                return Err(Failure::new(INTERRUPTED, error)
                    .hint(format!("`a2a-bridge task cancel {} {}` cancels it", task.agent, task.task)));
            }
            message = news.next() => match message {
                Some(message) => Reply::read(&message)?,
                None => look().await?,
            },
            () = tokio::time::sleep(LOOK) => look().await?,
        };
    }
}

fn state(reply: &Reply) {
    let colour = match reply.status() {
        "COMPLETED" => Colour::Green,
        "FAILED" | "REJECTED" => Colour::Red,
        _ => Colour::Yellow,
    };
    let word = reply.status().to_lowercase().replace('_', "-");
    say(To::Stderr.paint(colour, word));
}
