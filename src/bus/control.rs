//! Seeing and steering one agent over NATS, for operators.
//!
//! Requests to `<prefix>.control.<agent>.<verb>`, guarded by the permissions of the NATS account: who
//! may publish to `<prefix>.control.>` may do this, and nobody else should. There is no queue group:
//! with several bridges for one agent each answers for its own process, and an order reaches all of
//! them. A body with `"instance"` is for that one alone; the others are silent.
//!
//! | verb | body | reply |
//! | --- | --- | --- |
//! | `show` | – | a [`AgentReport`] |
//! | `start`, `stop`, `restart` | – | a [`AgentReport`], when it is done or has failed, after ten seconds at the latest (`stop`: after the grace) |
//! | `logs` | [`LogsRequest`] | [`LogsReply`], one; with `follow_s` more of them as lines come, until `more` is false |

use crate::text::error_chain;
use crate::text::unix_millis;
use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, Message, Subject, SubscribeError, Subscriber};
use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::encoded_reply::EncodedReply;
use super::service::ServiceContext;
use super::subject::{Subjects, Token};
use crate::agent::{Agent, AgentCommand, AgentState};
use crate::process::output::{Counts, Line};
use crate::reply::error::{ActionError, Code};
use crate::tasks::{OnFailure, Tasks};
use crate::text::shorten;

/// Requests at the same time, followers of logs included.
const MAX_AT_ONCE: usize = 16;
/// How long the reply to `start` and `restart` waits for the outcome.
const SETTLE: Duration = Duration::from_secs(10);
/// Longest time that logs are followed for one request.
const MAX_FOLLOW: Duration = Duration::from_secs(60);
/// How many of the last lines a report has.
const SHOWN_LINES: usize = 10;

/// Why an agent cannot be steered.
#[derive(Debug, thiserror::Error)]
#[error("cannot subscribe to {subject}")]
pub struct ControlError {
    subject: String,
    source: SubscribeError,
}

/// Everything about one agent at one bridge.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(expecting = "an object")]
pub struct AgentReport {
    /// Its name in the settings.
    pub agent: String,
    pub instance: String,
    pub state: String,
    /// Since when, in milliseconds since 1970.
    pub since_ms: u64,
    /// Where it is to listen.
    pub url: String,
    /// The program, when the bridge launches it. Its arguments may hold what is nobody's business.
    pub program: Option<String>,
    /// The process, while there is one.
    pub pid: Option<i32>,
    /// When that was started, in milliseconds since 1970.
    pub started_ms: Option<u64>,
    /// How often it was started again.
    pub restarts: u32,
    /// When it is started again.
    pub restart: Option<String>,
    /// When the next try is, in milliseconds since 1970.
    pub next_try_ms: Option<u64>,
    pub last_error: Option<String>,
    /// What to do about it.
    pub advice: Option<String>,
    /// How the last process ended.
    pub last_exit: Option<LastExit>,
    pub card: Option<CardSummary>,
    pub in_flight: usize,
    /// The last call that went wrong.
    pub last_call_error: Option<LastCallError>,
    /// The last lines of its output.
    pub output: Vec<Line>,
    /// How much output there was.
    pub counts: Counts,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(expecting = "an object")]
pub struct LastExit {
    pub how: String,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
}

/// A call that went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(expecting = "an object")]
pub struct LastCallError {
    pub code: String,
    pub message: String,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
}

/// What a card says, in short.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(expecting = "an object")]
pub struct CardSummary {
    /// The agent's name for itself.
    pub name: String,
    pub version: String,
    /// How many skills it has.
    pub skills: usize,
    /// Changes when the card does.
    pub hash: String,
    pub endpoint: String,
    /// The version of A2A.
    pub protocol_version: String,
    /// The binding of A2A.
    pub binding: String,
}

/// What is wanted of `logs`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, expecting = "an object")]
pub(crate) struct LogsRequest {
    pub instance: Option<String>,
    /// The last so many lines; all that are kept, if not said.
    pub lines: Option<usize>,
    pub from: u64,
    /// Send further lines as they come, for so many seconds, 60 at the most.
    pub follow_s: u64,
}

/// Lines of an agent's output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(expecting = "an object")]
pub(crate) struct LogsReply {
    pub agent: String,
    pub instance: String,
    pub lines: Vec<Line>,
    /// The number after the last of them.
    pub next: u64,
    pub more: bool,
}

/// Requests that wait for somebody to answer them. Dropped, it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct Requests(Subscriber);

/// The control of one agent, until stopped.
#[derive(Debug)]
pub(crate) struct Control {
    stop: CancellationToken,
    stopped: CancellationToken,
}

impl Control {
    /// Begins to listen. Cancel-safe.
    ///
    /// # Errors
    ///
    /// When there is no subscription to be had.
    pub(crate) async fn listen(
        agent: &Agent,
        context: &ServiceContext,
        subjects: &Subjects,
    ) -> Result<Requests, ControlError> {
        let subject = subjects.control(&Token::new(&agent.name), "*");
        let asked = context.client.subscribe(subject.clone()).await;
        asked.map(Requests).map_err(|source| ControlError { subject, source })
    }

    pub(crate) fn start(
        Requests(asked): Requests,
        agent: Agent,
        instance: String,
        context: &ServiceContext,
        tasks: &Tasks,
    ) -> Self {
        let (stop, stopped) = (CancellationToken::new(), CancellationToken::new());
        let controller = Controller { agent, instance, client: context.client.clone(), stop: stop.clone() };
        let guard = Arc::clone(&context.guard);
        let (done, background) = (stopped.clone().drop_guard(), tasks.clone());
        tasks.spawn("control", OnFailure::StopBridge, async move {
            let allowed = move |reply: &Subject| guard.allows(reply);
            Arc::new(controller).listen(asked, allowed, &background).await;
            drop(done);
        });
        Self { stop, stopped }
    }

    pub(crate) async fn stop(&self) {
        self.stop.cancel();
        self.stopped.cancelled().await;
    }
}

struct Controller {
    agent: Agent,
    instance: String,
    client: Client,
    stop: CancellationToken,
}

impl Controller {
    async fn listen(
        self: Arc<Self>,
        mut asked: Subscriber,
        allowed: impl Fn(&Subject) -> bool,
        tasks: &Tasks,
    ) {
        let at_once = Arc::new(Semaphore::new(MAX_AT_ONCE));
        while let Some(Some(message)) = self.stop.run_until_cancelled(asked.next()).await {
            let Some(reply) = message.reply.clone().filter(&allowed) else {
                continue;
            };
            let controller = Arc::clone(&self);
            match Arc::clone(&at_once).try_acquire_owned() {
                Ok(permit) => tasks.spawn("control request", OnFailure::Log, async move {
                    controller.answer(message, reply).await;
                    drop(permit);
                }),
                Err(_) => {
                    let text = "too many control requests at the same time; try again";
                    controller.refuse(reply, ActionError::new(Code::Busy, text)).await;
                }
            }
        }
    }

    async fn answer(&self, message: Message, reply: Subject) {
        let request = if message.payload.is_empty() {
            LogsRequest::default()
        } else {
            match serde_json::from_slice::<LogsRequest>(&message.payload) {
                Ok(request) => request,
                Err(error) => {
                    let why = shorten(&error.to_string(), 300);
                    let text = format!("the body is not understood: {why}");
                    return self.refuse(reply, ActionError::invalid(text)).await;
                }
            }
        };
        if request.instance.as_ref().is_some_and(|wanted| *wanted != self.instance) {
            return;
        }
        let verb = message.subject.rsplit('.').next().unwrap_or_default();
        match verb {
            "show" => self.report(reply).await,
            "start" => self.order(AgentCommand::Start, reply).await,
            "stop" => self.order(AgentCommand::Stop, reply).await,
            "restart" => self.order(AgentCommand::Restart, reply).await,
            "logs" => self.logs(&request, reply).await,
            _ => {
                let text = "the verbs are `show`, `start`, `stop`, `restart` and `logs`";
                self.refuse(reply, ActionError::invalid(text)).await;
            }
        }
    }

    async fn order(&self, order: AgentCommand, reply: Subject) {
        tracing::info!(agent = %self.agent.name, ?order, "ordered over NATS");
        let number = self.agent.command(order);
        let mut status = self.agent.status.clone();
        let limit = match order {
            AgentCommand::Stop => self.agent.config.stop_grace + SETTLE,
            AgentCommand::Start | AgentCommand::Restart => SETTLE,
        };
        let settled = status.wait_for(|status| {
            let done = match order {
                AgentCommand::Stop => status.state == AgentState::Stopped,
                AgentCommand::Start | AgentCommand::Restart => status.state != AgentState::Starting,
            };
            status.generation >= number && done
        });
        // Whatever came of it, the report says so.
        let _ = self.stop.run_until_cancelled(tokio::time::timeout(limit, settled)).await;
        self.report(reply).await;
    }

    async fn report(&self, reply: Subject) {
        let report = report(&self.agent, &self.instance);
        self.send(reply, &report).await;
    }

    async fn logs(&self, request: &LogsRequest, reply: Subject) {
        let output = &self.agent.output;
        let until = Instant::now() + Duration::from_secs(request.follow_s).min(MAX_FOLLOW);
        let mut lines = output.tail(request.from, request.lines.unwrap_or(usize::MAX));
        // A line is 2 kB at the most, and a payload at least that of the smallest sensible server.
        let most = (self.client.max_payload() / 4096).max(1);
        loop {
            let next = lines.last().map_or_else(|| output.next(), |line| line.seq + 1);
            let rest = lines.split_off(lines.len().min(most));
            let more = !rest.is_empty() || Instant::now() < until;
            let logs = LogsReply {
                agent: self.agent.name.to_string(),
                instance: self.instance.clone(),
                next: lines.last().map_or(next, |line| line.seq + 1),
                lines,
                more,
            };
            if !self.send(reply.clone(), &logs).await || !more {
                return;
            }
            lines = rest;
            if lines.is_empty() {
                tokio::select! {
                    () = self.stop.cancelled() => return,
                    () = output.beyond(next) => {}
                    () = tokio::time::sleep_until(until) => {}
                }
                lines = output.tail(next, usize::MAX);
            }
        }
    }

    async fn send(&self, reply: Subject, body: &impl Serialize) -> bool {
        let body = serde_json::to_vec(body).expect("strings and numbers always serialize");
        let sent = self.client.publish(reply, body.into()).await;
        if let Err(error) = &sent {
            tracing::warn!(agent = %self.agent.name, error = error_chain(error), "cannot answer a control request");
        }
        sent.is_ok()
    }

    async fn refuse(&self, reply: Subject, error: ActionError) {
        let encoded = EncodedReply::new(&Err(error), self.client.max_payload(), 0);
        if let Err(error) = encoded.send(&self.client, reply).await {
            tracing::warn!(agent = %self.agent.name, error = error_chain(&error), "cannot answer a control request");
        }
    }
}

fn report(agent: &Agent, instance: &str) -> AgentReport {
    let status = agent.status.borrow().clone();
    let config = &agent.config;
    AgentReport {
        agent: agent.name.to_string(),
        instance: instance.to_owned(),
        state: status.state.to_string(),
        since_ms: unix_millis(status.since),
        url: if status.url.is_empty() { config.url.to_string() } else { status.url },
        program: config.command.as_ref().and_then(|command| command.first().cloned()),
        pid: status.pid,
        started_ms: status.started.map(unix_millis),
        restarts: status.restarts,
        restart: config.command.as_ref().map(|_| config.restart.to_string()),
        next_try_ms: status.next_try.map(unix_millis),
        last_error: status.last_error,
        advice: status.advice,
        last_exit: status.last_exit.map(|(how, at)| LastExit { how, at_ms: unix_millis(at) }),
        card: status.known.map(|known| CardSummary {
            name: known.card.name.clone(),
            version: known.card.version.clone(),
            skills: known.card.skills.len(),
            hash: known.card.hash().to_owned(),
            endpoint: known.interface.url.to_string(),
            protocol_version: known.interface.dialect.protocol_version().to_owned(),
            binding: known.interface.dialect.binding().to_owned(),
        }),
        in_flight: agent.calls.in_flight(),
        last_call_error: agent.calls.last_error().map(|error| LastCallError {
            code: error.code,
            message: error.message,
            at_ms: unix_millis(error.at),
        }),
        output: agent.output.tail(0, SHOWN_LINES),
        counts: agent.output.counts(),
    }
}
