//! One request and what comes back: one reply, or frames until the result.

use std::time::Duration;

use async_nats::{HeaderMap, Message};
use bytes::Bytes;
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use super::reply::Reply;
use super::view::View;
use crate::bus::subject::Token;
use crate::cli::client::{Fields as _, Mesh, Replies, Silence};
use crate::cli::output::{To, remark, write};
use crate::cli::terminal::{self, Interrupts};
use crate::cli::{Failure, INTERRUPTED, UNAVAILABLE};
use crate::config::values::parse_duration;

/// After this much silence it is asked whether the bridge is still there.
const LOOK: Duration = Duration::from_secs(15);
/// What the bridge gets on top of the caller's limit, to say itself that the time is over.
const GRACE: Duration = Duration::from_secs(10);
/// When somebody at a terminal is told that we are still waiting.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long a cancelled task may take to say so.
const CANCEL: Duration = Duration::from_secs(10);

/// How the reply is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cli) enum Mode {
    Final,
    Stream,
    Submit,
}

/// What all requests of one call share.
#[derive(Debug)]
pub(in crate::cli) struct Exchange<'a> {
    pub(in crate::cli) mesh: &'a Mesh,
    pub(in crate::cli) agent: Token,
    pub(in crate::cli) mode: Mode,
    /// The caller's limit, as it was written.
    pub(in crate::cli) timeout: Option<String>,
    /// Frames go to stdout as they come.
    pub(in crate::cli) json: bool,
}

impl Exchange<'_> {
    /// Sends `body` and waits for the reply that ends the exchange.
    pub(in crate::cli) async fn run(
        &self,
        subject: String,
        body: &Value,
        interrupts: &mut Interrupts,
    ) -> Result<Result<Came, Silence>, Failure> {
        let mut headers = HeaderMap::new();
        match self.mode {
            Mode::Final => {}
            Mode::Stream => headers.insert("A2A-Reply", "stream"),
            Mode::Submit => headers.insert("A2A-Reply", "submit"),
        }
        let mut end = None;
        if let Some(timeout) = &self.timeout {
            headers.insert("A2A-Timeout", timeout.as_str());
            end = parse_duration(timeout).ok().and_then(|limit| Instant::now().checked_add(limit + GRACE));
        }
        let replies = self.mesh.request(subject, headers, body.to_string().into()).await?;
        match self.mode {
            Mode::Stream => self.frames(replies, end, interrupts).await,
            Mode::Final | Mode::Submit => self.one(replies, end, interrupts).await,
        }
    }

    async fn one(
        &self,
        mut replies: Replies,
        end: Option<Instant>,
        interrupts: &mut Interrupts,
    ) -> Result<Result<Came, Silence>, Failure> {
        let reply = self.next(&mut replies, end);
        tokio::pin!(reply);
        let mut told = !To::Stderr.is_terminal();
        loop {
            tokio::select! {
                reply = &mut reply => return match reply? {
                    Ok(message) => Came::plain(&message).map(Ok),
                    Err(silence) => Ok(Err(silence)),
                },
                () = interrupts.next() => {
                    terminal::after_interrupt();
                    let error = anyhow::anyhow!("left; the agent was not told and may go on");
                    return Err(Failure::new(INTERRUPTED, error).hint("with `--stream`, Ctrl-C cancels the task"));
                }
                () = tokio::time::sleep(PATIENCE), if !told => {
                    told = true;
                    remark("waiting for the agent … (Ctrl-C leaves)");
                }
            }
        }
    }

    /// The next message; looks after the bridge in long silence.
    async fn next(
        &self,
        replies: &mut Replies,
        end: Option<Instant>,
    ) -> Result<Result<Message, Silence>, Failure> {
        let mut missed = 0;
        loop {
            let far = Instant::now() + LOOK;
            let reply = timeout_at(end.unwrap_or(far), replies.next(LOOK)).await;
            match reply {
                Ok(Err(Silence::Timeout(_))) => {}
                Ok(reply) => return Ok(reply),
                Err(_) if end.is_some() => {
                    let error = anyhow::anyhow!("no reply within the limit, and not from the bridge either");
                    return Err(Failure::new(UNAVAILABLE, error)
                        .hint("is the bridge still running? `a2a-bridge agents` shows it"));
                }
                Err(_) => {}
            }
            missed = if self.mesh.is_served(&self.agent).await? { 0 } else { missed + 1 };
            if missed == 2 {
                let error = anyhow::anyhow!(
                    "the bridge went away before it replied; what became of the task is unknown"
                );
                return Err(Failure::new(UNAVAILABLE, error)
                    .hint("`a2a-bridge agents` shows when the agent is back; ask again if asking twice does no harm"));
            }
        }
    }

    async fn frames(
        &self,
        mut replies: Replies,
        end: Option<Instant>,
        interrupts: &mut Interrupts,
    ) -> Result<Result<Came, Silence>, Failure> {
        let mut view = View::new();
        let mut cancel = Cancel::No;
        let mut result = None;
        let mut end = end;
        loop {
            let message = tokio::select! {
                biased;
                () = interrupts.next() => {
                    view.break_line()?;
                    terminal::after_interrupt();
                    if cancel != Cancel::No {
                        let error = anyhow::anyhow!("left while the task was being cancelled");
                        return Err(Failure::new(INTERRUPTED, error)
                            .hint("`a2a-bridge task get` shows what became of it"));
                    }
                    remark("cancelling … (Ctrl-C again leaves at once)");
                    cancel = Cancel::Wanted;
                    end = Some(Instant::now() + CANCEL);
                    None
                }
                message = self.next(&mut replies, end) => match message? {
                    Ok(message) => Some(message),
                    Err(silence) => return Ok(Err(silence)),
                },
            };
            if let Some(message) = message {
                match self.frame(&message, &mut view)? {
                    Next::More => {}
                    Next::Result(reply) => result = Some(reply),
                    Next::Plain(came) => return Ok(Ok(came)),
                    Next::End => {
                        let missing = || {
                            let error = anyhow::anyhow!("the stream ended without a result");
                            Failure::new(UNAVAILABLE, error).hint("ask again, or look at the bridge's log")
                        };
                        let reply = result.ok_or_else(missing)?;
                        let shown = self.json || view.finish(&reply)?;
                        return Ok(Ok(Came { reply, shown }));
                    }
                }
            }
            if let (Cancel::Wanted, Some(task)) = (cancel, view.task()) {
                cancel = Cancel::Asked;
                self.cancel(task).await?;
            }
        }
    }

    fn frame(&self, message: &Message, view: &mut View) -> Result<Next, Failure> {
        if message.payload.is_empty() {
            return Ok(Next::End);
        }
        let mut frame = crate::cli::client::json(message)?;
        let Some(kind) = frame.text("/type").map(str::to_owned) else {
            // A bridge that does not know the mode answers in the plain way.
            return Ok(Next::Plain(Came::plain(message)?));
        };
        if self.json {
            write(&format!("{}\n", String::from_utf8_lossy(&message.payload)))?;
        }
        let data = frame.get_mut("data").map(Value::take).unwrap_or_default();
        let number = message.headers.as_ref().and_then(|headers| headers.get("A2A-Seq"));
        view.number(number.and_then(|number| number.as_str().parse().ok()));
        if kind == "result" {
            return Ok(Next::Result(Reply::from_value(data)));
        }
        view.take(&kind, &data, !self.json)?;
        Ok(Next::More)
    }

    /// Asks for a cancel; what comes of it shows in the stream.
    async fn cancel(&self, task: &str) -> Result<(), Failure> {
        let body = serde_json::json!({"task_id": task}).to_string();
        let subject = self.mesh.subjects.cancel_task(&self.agent);
        match self.mesh.ask(subject, Bytes::from(body)).await? {
            Ok(message) => {
                let reply = Reply::read(&message)?;
                if reply.status() == "ERROR" {
                    remark(format_args!("not cancelled: {}", To::Stderr.clean(reply.message())));
                }
            }
            Err(silence) => remark(format_args!("not cancelled: {silence}")),
        }
        Ok(())
    }
}

/// The reply that ended an exchange.
#[derive(Debug)]
pub(in crate::cli) struct Came {
    pub(in crate::cli) reply: Reply,
    /// Its text is on the screen already.
    pub(in crate::cli) shown: bool,
}

impl Came {
    fn plain(message: &Message) -> Result<Self, Failure> {
        let reply = Reply::read(message)?;
        Ok(Self { reply, shown: false })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cancel {
    No,
    /// As soon as the task's id is known.
    Wanted,
    Asked,
}

enum Next {
    More,
    Result(Reply),
    Plain(Came),
    End,
}
