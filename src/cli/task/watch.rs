//! `task watch`: follows a task until it ends, and asks its questions.

use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt as _;

use super::{TaskId, get_task, print_state};
use crate::bus::subject::Token;
use crate::cli::call::{
    BridgeWatch, CallMode, CallReply, CallResult, Caller, ReplyPrinter, answer_questions,
};
use crate::cli::client::NatsClient;
use crate::cli::output::one_line;
use crate::cli::progress::Spinner;
use crate::cli::terminal::{self, Interrupts};
use crate::cli::{CliError, CliResult, INTERRUPTED, UNAVAILABLE};

/// Poll interval, in case an update is lost.
const POLL_INTERVAL: Duration = Duration::from_secs(15);
/// Polls in a row that may find no bridge.
const MAX_FAILED_POLLS: u32 = 1;

pub(super) async fn run(
    mesh: &NatsClient,
    task: &TaskId,
    printer: &ReplyPrinter<'_>,
    may_ask: bool,
) -> CliResult {
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
    // Another bridge may continue the task, so any bridge that serves the agent counts.
    let bridge = BridgeWatch::new(mesh, &caller.agent);
    let mut bridge_gone = pin!(bridge.gone());
    loop {
        if (reply.status() == "WORKING" || reply.needs_input()) && reply.status() != last_status {
            if printer.json {
                reply.print_raw()?;
            } else if !(may_ask && reply.follow_up().is_some()) {
                print_state(&reply);
            }
        }
        if may_ask && reply.follow_up().is_some() {
            reply = answer_questions(&caller, reply.into()).await?.reply;
            continue;
        }
        if !matches!(reply.status(), "WORKING" | "AUTH_REQUIRED") {
            let is_displayed = printer.json && reply.needs_input();
            if !printer.json {
                reply.fetch(mesh, printer.save).await?;
            }
            return printer.print(&CallResult { is_displayed, ..reply.into() });
        }
        last_status = reply.status().to_owned();
        let mut spinner = Spinner::new(match one_line(reply.message()) {
            message if message.is_empty() => "following the task (Ctrl-C stops)".to_owned(),
            message => message,
        });
        let mut next_poll = tokio::time::Instant::now() + POLL_INTERVAL;
        let mut failed_polls = 0;
        reply = loop {
            tokio::select! {
                () = interrupts.next() => {
                    spinner.clear();
                    terminal::end_interrupted_line();
                    let cancel = printer.task_command("cancel", &task.task);
                    return Err(CliError::msg(INTERRUPTED, "interrupted; the task is still running")
                        .hint(format!("`{cancel}` cancels it")));
                }
                message = updates.next() => match message {
                    Some(message) => {
                        let update = CallReply::parse(&message)?;
                        // The updates of a verified caller have no content.
                        break match update.message().is_empty() {
                            true => get_task(mesh, task).await.unwrap_or(update),
                            false => update,
                        };
                    }
                    None => return Err(CliError::msg(UNAVAILABLE, "the connection to NATS is closed")),
                },
                () = tokio::time::sleep_until(next_poll) => {
                    next_poll += POLL_INTERVAL;
                    match get_task(mesh, task).await {
                        // A bridge may be about to continue the task.
                        Ok(reply) if reply.error_code() == "state_unavailable" => {}
                        Ok(reply) => break reply,
                        // Without the permission for discovery, only this tells that the bridge is gone.
                        Err(error) if error.exit_code == UNAVAILABLE && failed_polls < MAX_FAILED_POLLS => {
                            failed_polls += 1;
                        }
                        Err(error) => return Err(error),
                    }
                }
                () = &mut bridge_gone => {
                    spinner.clear();
                    let what = format!(
                        "no bridge serves `{}` any more; the outcome of the task is unknown (task {})",
                        task.agent, one_line(&task.task),
                    );
                    let get = printer.task_command("get", &task.task);
                    return Err(CliError::msg(UNAVAILABLE, what)
                        .hint(format!("`{get}` shows the task when a bridge that knows it is back")));
                }
                () = spinner.tick() => spinner.draw(),
            }
        };
    }
}
