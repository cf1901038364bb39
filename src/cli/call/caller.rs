//! Sends a request and waits for its reply: one message, or the frames of a stream.

use std::time::Duration;

use async_nats::{HeaderMap, Message};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::reply::CallReply;
use super::stream_display::StreamDisplay;
use crate::bus::subject::Token;
use crate::cli::client::{JsonFields as _, NatsClient, NoReply, Replies, parse_json};
use crate::cli::output::{StdStream, eprintln_dim, print_json_text};
use crate::cli::terminal::{self, Interrupts};
use crate::cli::{CliError, CliResult, INTERRUPTED, UNAVAILABLE};
use crate::config::values::parse_duration;

/// Silence after which the command checks that the bridge still serves the agent.
const PROBE_INTERVAL: Duration = Duration::from_secs(15);
/// Extra time after the caller's limit, in which the bridge itself reports the timeout.
const TIMEOUT_GRACE: Duration = Duration::from_secs(10);
/// Silence after which the user learns that the call is still running.
const WAIT_NOTICE_DELAY: Duration = Duration::from_secs(3);
const CANCEL_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cli) enum CallMode {
    Final,
    Stream,
    Submit,
}

/// The options that all requests of one command share.
#[derive(Debug)]
pub(in crate::cli) struct Caller<'a> {
    pub(in crate::cli) mesh: &'a NatsClient,
    pub(in crate::cli) interrupts: &'a Interrupts,
    pub(in crate::cli) agent: Token,
    pub(in crate::cli) mode: CallMode,
    /// The user's time limit, as it goes into the header.
    pub(in crate::cli) timeout: Option<String>,
    /// Print frames to stdout as JSON lines.
    pub(in crate::cli) json: bool,
}

impl Caller<'_> {
    pub(in crate::cli) async fn send(&self, subject: String, body: &Value) -> CliResult<CallResult> {
        let mut headers = HeaderMap::new();
        match self.mode {
            CallMode::Final => {}
            CallMode::Stream => headers.insert("A2A-Reply", "stream"),
            CallMode::Submit => headers.insert("A2A-Reply", "submit"),
        }
        let mut deadline = None;
        if let Some(timeout) = &self.timeout {
            headers.insert("A2A-Timeout", timeout.as_str());
            let limit = parse_duration(timeout).ok();
            deadline = limit.and_then(|limit| Instant::now().checked_add(limit + TIMEOUT_GRACE));
        }
        let replies = self.mesh.request(subject, headers, body.to_string().into()).await?;
        match self.mode {
            CallMode::Stream => self.receive_stream(replies, deadline).await,
            CallMode::Final | CallMode::Submit => self.receive_one(replies, deadline).await,
        }
    }

    /// Answers a question of the agent.
    pub(in crate::cli) async fn answer(&self, body: &Value) -> CliResult<CallResult> {
        self.send(self.mesh.subjects.provide_required_input(&self.agent), body).await
    }

    async fn receive_one(&self, mut replies: Replies, deadline: Option<Instant>) -> CliResult<CallResult> {
        let reply = self.next_message(&mut replies, deadline);
        tokio::pin!(reply);
        let mut is_notified = !StdStream::Stderr.is_terminal();
        loop {
            tokio::select! {
                reply = &mut reply => return Ok(CallReply::parse(&reply?)?.into()),
                () = self.interrupts.next() => {
                    terminal::end_interrupted_line();
                    let error = CliError::msg(INTERRUPTED, "interrupted; the task may still be running");
                    return Err(error.hint("with `--stream`, Ctrl-C cancels the task"));
                }
                () = tokio::time::sleep(WAIT_NOTICE_DELAY), if !is_notified => {
                    is_notified = true;
                    eprintln_dim("waiting for the agent … (Ctrl-C stops waiting)");
                }
            }
        }
    }

    async fn next_message(&self, replies: &mut Replies, deadline: Option<Instant>) -> CliResult<Message> {
        let mut missed_probes = 0;
        loop {
            let left = deadline.map_or(PROBE_INTERVAL, |end| end.saturating_duration_since(Instant::now()));
            match replies.next(left.min(PROBE_INTERVAL)).await {
                Err(NoReply::Timeout(_)) => {}
                reply => return Ok(reply?),
            }
            if deadline.is_some_and(|end| end <= Instant::now()) {
                let error = "no reply from the bridge, although the time limit has passed; the task may still be running";
                return Err(CliError::msg(UNAVAILABLE, error)
                    .hint("is the bridge still running? `a2a-bridge agents` shows it"));
            }
            missed_probes = if self.mesh.is_served(&self.agent).await? { 0 } else { missed_probes + 1 };
            if missed_probes == 2 {
                let error = "the bridge disappeared before it replied; the outcome of the task is unknown";
                return Err(CliError::msg(UNAVAILABLE, error).hint(
                    "`a2a-bridge agents` shows when the agent is back; repeat the call only if that is safe",
                ));
            }
        }
    }

    async fn receive_stream(
        &self,
        mut replies: Replies,
        mut deadline: Option<Instant>,
    ) -> CliResult<CallResult> {
        let mut display = StreamDisplay::default();
        let mut is_interrupted = false;
        let mut is_cancel_sent = false;
        let mut result = None;
        loop {
            if is_interrupted
                && !is_cancel_sent
                && let Some(task) = display.task_id()
            {
                is_cancel_sent = true;
                self.cancel(task).await?;
            }
            let message = tokio::select! {
                biased;
                () = self.interrupts.next() => {
                    display.break_line()?;
                    terminal::end_interrupted_line();
                    if is_interrupted {
                        return Err(CliError::msg(INTERRUPTED, "interrupted while canceling the task")
                            .hint("`a2a-bridge task get` shows the state of the task"));
                    }
                    eprintln_dim("canceling … (press Ctrl-C again to exit immediately)");
                    is_interrupted = true;
                    deadline = Some(Instant::now() + CANCEL_TIMEOUT);
                    continue;
                }
                message = self.next_message(&mut replies, deadline) => message?,
            };
            if message.payload.is_empty() {
                let reply = result.ok_or_else(|| {
                    CliError::msg(UNAVAILABLE, "the stream ended without a result")
                        .hint("try again, or see the log of the bridge")
                })?;
                let is_displayed = self.json || display.finish(&reply)?;
                return Ok(CallResult { reply, is_displayed });
            }
            let mut frame = parse_json(&message)?;
            let Some(kind) = frame.text("/type").map(str::to_owned) else {
                // A bridge that does not support streams sends a single reply.
                return Ok(CallReply::parse(&message)?.into());
            };
            if self.json {
                print_json_text(&String::from_utf8_lossy(&message.payload))?;
            }
            let sequence = message.headers.as_ref().and_then(|headers| headers.get("A2A-Seq"));
            display.count_frame(sequence.and_then(|sequence| sequence.as_str().parse().ok()));
            let data = frame.get_mut("data").map(Value::take).unwrap_or_default();
            if kind == "result" {
                result = Some(CallReply::from_value(data));
            } else {
                display.show_frame(&kind, &data, !self.json)?;
            }
        }
    }

    /// Requests the cancellation; its effect arrives in the stream.
    async fn cancel(&self, task_id: &str) -> CliResult<()> {
        let body = json!({"task_id": task_id}).to_string();
        let subject = self.mesh.subjects.cancel_task(&self.agent);
        match self.mesh.request_one(subject, body.into()).await {
            Ok(message) => {
                let reply = CallReply::parse(&message)?;
                if reply.status() == "ERROR" {
                    let reason = StdStream::Stderr.sanitize(reply.message());
                    eprintln_dim(format_args!("not canceled: {reason}"));
                }
            }
            Err(error) => match error.no_reply() {
                Some(reason) => eprintln_dim(format_args!("not canceled: {reason}")),
                None => return Err(error),
            },
        }
        Ok(())
    }
}

/// The final reply to a request.
#[derive(Debug)]
pub(in crate::cli) struct CallResult {
    pub(in crate::cli) reply: CallReply,
    /// The text of the reply is on the screen already.
    pub(in crate::cli) is_displayed: bool,
}

impl From<CallReply> for CallResult {
    fn from(reply: CallReply) -> Self {
        Self { reply, is_displayed: false }
    }
}
