//! Sends a request and waits for its reply, which frames may precede.

use std::pin::pin;
use std::time::Duration;

use async_nats::{HeaderMap, Message};
use futures_util::future::OptionFuture;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};

use super::bridge_watch::BridgeWatch;
use super::printer::ReplyPrinter;
use super::reply::CallReply;
use super::stream_display::StreamDisplay;
use crate::bus::subject::Token;
use crate::cli::client::{JsonFields as _, NatsClient, NoReply, Replies, parse_json};
use crate::cli::output::{eprintln_dim, one_line, print_json_text};
use crate::cli::progress::Spinner;
use crate::cli::terminal::{self, Interrupts};
use crate::cli::{CliError, CliResult, INTERRUPTED, UNAVAILABLE};
use crate::config::values::parse_duration;

/// Extra time after the caller's limit, in which the bridge itself reports the timeout.
const TIMEOUT_GRACE: Duration = Duration::from_secs(10);
/// How long a stream may take to end after Ctrl-C.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cli) enum CallMode {
    Final,
    Stream,
    Submit,
    /// Frames of a call that runs without this caller.
    Attached,
}

/// The options that all requests of one command share.
#[derive(Debug)]
pub(in crate::cli) struct Caller<'a> {
    pub(in crate::cli) mesh: &'a NatsClient,
    pub(in crate::cli) interrupts: &'a Interrupts,
    pub(in crate::cli) printer: &'a ReplyPrinter<'a>,
    pub(in crate::cli) agent: Token,
    pub(in crate::cli) mode: CallMode,
    /// The user's time limit, as it goes into the header.
    pub(in crate::cli) timeout: Option<String>,
}

impl Caller<'_> {
    pub(in crate::cli) async fn send(&self, subject: String, body: &Value) -> CliResult<CallResult> {
        let mut headers = HeaderMap::new();
        match self.mode {
            CallMode::Final => headers.insert("A2A-Ack", "yes"),
            CallMode::Stream => headers.insert("A2A-Reply", "stream"),
            CallMode::Submit => headers.insert("A2A-Reply", "submit"),
            CallMode::Attached => {}
        }
        let mut deadline = None;
        if let Some(timeout) = &self.timeout {
            headers.insert("A2A-Timeout", timeout.as_str());
            let limit = parse_duration(timeout).ok();
            deadline = limit.and_then(|limit| Instant::now().checked_add(limit + TIMEOUT_GRACE));
        }
        let replies = self.mesh.request(subject, headers, body.to_string().into()).await?;
        self.receive(replies, deadline).await
    }

    /// Answers a question of the agent.
    pub(in crate::cli) async fn answer(&self, body: &Value) -> CliResult<CallResult> {
        self.send(self.mesh.subjects.provide_required_input(&self.agent), body).await
    }

    async fn receive(&self, mut replies: Replies, deadline: Option<Instant>) -> CliResult<CallResult> {
        let is_stream = self.mode == CallMode::Stream;
        let began = Instant::now();
        let bridge = BridgeWatch::new(self.mesh, &self.agent);
        let mut bridge_gone = pin!(bridge.gone());
        let shows_frames = is_stream || self.mode == CallMode::Attached;
        let mut incoming = IncomingReply::new(shows_frames, self.printer.json);
        let mut cancellation: Option<Cancellation> = None;
        let mut spinner = Spinner::new(match self.mode {
            CallMode::Stream => "waiting for the agent (Ctrl-C cancels the task)",
            CallMode::Attached => "waiting for the agent (Ctrl-C detaches)",
            CallMode::Final | CallMode::Submit => "waiting for the agent (Ctrl-C stops waiting)",
        });
        loop {
            if let (Some(cancellation), Some(task)) = (&mut cancellation, incoming.task_id()) {
                cancellation.request(self, task).await?;
            }
            let cancel_deadline = cancellation.as_ref().map(|cancellation| cancellation.deadline);
            let cancel_replies = cancellation.as_mut().and_then(|cancellation| cancellation.replies.as_mut());
            tokio::select! {
                biased;
                () = self.interrupts.next() => {
                    spinner.clear();
                    incoming.display.break_line()?;
                    terminal::end_interrupted_line();
                    if !is_stream || cancellation.is_some() {
                        return Err(self.interrupted_error("interrupted", incoming.task_id()));
                    }
                    eprintln_dim("canceling … (press Ctrl-C again to exit immediately)");
                    spinner.set_status("canceling");
                    cancellation = Some(Cancellation::new());
                }
                Some(reply) = OptionFuture::from(cancel_replies.map(Replies::next)) => {
                    cancellation.iter_mut().try_for_each(|cancellation| cancellation.take_reply(&reply))?;
                }
                Some(()) = OptionFuture::from(cancel_deadline.map(sleep_until)) => {
                    spinner.clear();
                    let outcome = cancellation.and_then(|cancellation| cancellation.outcome);
                    let what = match outcome {
                        Some(Ok(reply)) => return Ok(CallResult { is_displayed: self.printer.json, ..reply.into() }),
                        Some(Err(reason)) => format!("interrupted; not canceled: {reason}"),
                        None => {
                            let seconds = CANCEL_TIMEOUT.as_secs();
                            format!("interrupted; no confirmation of the cancellation within {seconds}s")
                        }
                    };
                    return Err(self.interrupted_error(&what, incoming.task_id()));
                }
                message = replies.next() => {
                    let message = message?;
                    bridge.saw(&message);
                    spinner.clear();
                    if let Some(result) = incoming.take(&message)? {
                        let first_text = incoming.display.first_text_at().map(|at| at - began);
                        return Ok(CallResult { timing: Some(Timing { first_text, total: began.elapsed() }), ..result });
                    }
                    // A stream shows what the agent says on lines of their own.
                    if let (false, Some(status)) = (shows_frames, incoming.display.status()) {
                        spinner.set_status(status);
                    }
                }
                () = &mut bridge_gone => {
                    spinner.clear();
                    incoming.display.break_line()?;
                    let what = "the bridge disappeared before it replied; the outcome of the task is unknown";
                    return Err(self.no_reply_error(what, incoming.task_id()));
                }
                Some(()) = OptionFuture::from(deadline.map(sleep_until)) => {
                    spinner.clear();
                    incoming.display.break_line()?;
                    let what = "no reply from the bridge, although the time limit has passed; the task may still be running";
                    return Err(self.no_reply_error(what, incoming.task_id()));
                }
                () = spinner.tick(), if !incoming.display.is_mid_line() => spinner.draw(),
            }
        }
    }

    /// The user gave up. The error names the task, if its id is known, and the commands for it.
    fn interrupted_error(&self, what: &str, task: Option<&str>) -> CliError {
        let what = format!("{what}; the task may still be running{}", id_suffix(task));
        let hint = match task {
            Some(task) => {
                let [get, cancel] = ["get", "cancel"].map(|verb| self.printer.task_command(verb, task));
                format!("`{get}` shows its state, and `{cancel}` cancels it")
            }
            None if matches!(self.mode, CallMode::Stream | CallMode::Attached) => {
                "the agent has not named its task yet".to_owned()
            }
            None => "with `--stream`, Ctrl-C cancels the task".to_owned(),
        };
        CliError::msg(INTERRUPTED, what).hint(hint)
    }

    /// The bridge gave no reply. The error names the task, if its id is known, and how to look it up.
    fn no_reply_error(&self, what: &str, task: Option<&str>) -> CliError {
        let what = format!("{what}{}", id_suffix(task));
        let look_up = match task {
            Some(task) => {
                let get = self.printer.task_command("get", task);
                format!("`{get}` shows the task if a bridge still knows it")
            }
            None => "`a2a-bridge agents` shows whether a bridge serves the agent".to_owned(),
        };
        CliError::msg(UNAVAILABLE, what).hint(format!("{look_up}; repeat the call only if that is safe"))
    }
}

fn id_suffix(task: Option<&str>) -> String {
    task.map(|task| format!(" (task {})", one_line(task))).unwrap_or_default()
}

/// What has arrived of a reply: frames, or nothing.
#[derive(Debug)]
struct IncomingReply {
    /// Show the frames of a stream. In the other modes they only name the task.
    is_visible: bool,
    /// Print the frames to stdout as JSON lines instead.
    prints_frames: bool,
    display: StreamDisplay,
    result: Option<CallReply>,
}

impl IncomingReply {
    fn new(is_stream: bool, json: bool) -> Self {
        Self {
            is_visible: is_stream && !json,
            prints_frames: is_stream && json,
            display: StreamDisplay::default(),
            result: None,
        }
    }

    fn task_id(&self) -> Option<&str> {
        self.display.task_id()
    }

    /// Takes in a message, and returns the reply once it is complete.
    fn take(&mut self, message: &Message) -> CliResult<Option<CallResult>> {
        if message.payload.is_empty() {
            let reply = self.result.take().ok_or_else(|| {
                CliError::msg(UNAVAILABLE, "the stream ended without a result")
                    .hint("try again, or see the log of the bridge")
            })?;
            let is_displayed = self.prints_frames || self.display.finish(&reply)?;
            return Ok(Some(CallResult { is_displayed, ..reply.into() }));
        }
        let mut frame = parse_json(message)?;
        let Some(kind) = frame.text("/type").map(str::to_owned) else {
            // Not a frame: the only reply.
            return Ok(Some(CallReply::parse(message)?.into()));
        };
        if self.prints_frames {
            print_json_text(&String::from_utf8_lossy(&message.payload))?;
        }
        let sequence = message.headers.as_ref().and_then(|headers| headers.get("A2A-Seq"));
        self.display.count_frame(sequence.and_then(|sequence| sequence.as_str().parse().ok()));
        let data = frame.get_mut("data").map(Value::take).unwrap_or_default();
        if kind == "result" {
            self.result = Some(CallReply::from_value(data));
        } else {
            self.display.show_frame(&kind, &data, self.is_visible)?;
        }
        Ok(None)
    }
}

/// The cancellation of a stream's task after Ctrl-C.
#[derive(Debug)]
struct Cancellation {
    deadline: Instant,
    is_requested: bool,
    /// `None` before the request and after the reply.
    replies: Option<Replies>,
    /// The reply of the bridge, or why the task is not canceled.
    outcome: Option<Result<CallReply, String>>,
}

impl Cancellation {
    fn new() -> Self {
        let deadline = Instant::now() + CANCEL_TIMEOUT;
        Self { deadline, is_requested: false, replies: None, outcome: None }
    }

    /// Sends the request, once.
    async fn request(&mut self, caller: &Caller<'_>, task: &str) -> CliResult<()> {
        if !self.is_requested {
            self.is_requested = true;
            let subject = caller.mesh.subjects.cancel_task(&caller.agent);
            let body = json!({"task_id": task}).to_string();
            self.replies = Some(caller.mesh.request(subject, HeaderMap::new(), body.into()).await?);
        }
        Ok(())
    }

    /// The stream still decides how the call ends, unless it does not end in time.
    fn take_reply(&mut self, reply: &Result<Message, NoReply>) -> CliResult<()> {
        self.replies = None;
        self.outcome = Some(match reply {
            Err(reason) => Err(reason.to_string()),
            Ok(message) => {
                let reply = CallReply::parse(message)?;
                if reply.status() == "CANCELED" { Ok(reply) } else { Err(one_line(reply.message())) }
            }
        });
        Ok(())
    }
}

/// The final reply to a request.
#[derive(Debug)]
pub(in crate::cli) struct CallResult {
    pub(in crate::cli) reply: CallReply,
    /// The text of the reply is on the screen already.
    pub(in crate::cli) is_displayed: bool,
    pub(in crate::cli) timing: Option<Timing>,
}

/// How long a request took.
#[derive(Debug, Clone, Copy)]
pub(in crate::cli) struct Timing {
    /// Until the first text of the response, in a stream.
    pub(super) first_text: Option<Duration>,
    pub(super) total: Duration,
}

impl From<CallReply> for CallResult {
    fn from(reply: CallReply) -> Self {
        Self { reply, is_displayed: false, timing: None }
    }
}
