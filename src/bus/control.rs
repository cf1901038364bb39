//! Lets operators inspect and control one agent over NATS.
//!
//! Requests go to `<prefix>.control.<agent>.<command>`. The permissions of the NATS account protect them: every
//! client that may publish to `<prefix>.control.>` controls the agents. There is no queue group, so if several replicas
//! serve one agent, each answers for its own process, and a command reaches all of them. If the body has
//! `"instance"`, only that instance obeys and answers; the others ignore the request. Gateways send the same requests below
//! `<prefix>.gw.`, for a principal; `tasks` then lists the tasks of that principal only.
//!
//! | command | body | reply |
//! | --- | --- | --- |
//! | `show` | `instance` (optional) | an [`AgentReport`] |
//! | `start`, `stop`, `restart` | `instance` (optional) | an [`AgentReport`] when the command has succeeded or failed, after ten seconds at the latest (`stop`: ten seconds after the grace period); `restart` of an attached agent is an error |
//! | `tasks` | `instance`, `limit` (optional, 1 to 500) | a [`TasksReply`]: the tasks that this bridge has seen, the newest first; if there are more, open ones take precedence |
//! | `logs` | [`ControlRequest`]: `instance`, `lines`, `from`, `follow_s` | one [`LogsReply`]; with `follow_s` more of them as lines arrive, until `more` is false |

use std::sync::Arc;
use std::time::Duration;

use async_nats::{Message, Subject, Subscriber};
use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::encoded_reply::EncodedReply;
use super::identity::Entrance;
use super::outbox::Outbox;
use super::service::{MAX_VERSION, ServiceContext, ServiceError};
use super::stoppable_task::StoppableTask;
use super::subject::{Subjects, Token};
use crate::agent::{Agent, AgentCommand, AgentState};
use crate::background::{BackgroundTasks, OnPanic};
use crate::caller::Caller;
use crate::json::{first_that_fit, to_bytes};
use crate::process::output::{Counts, Line};
use crate::reply::error::{ActionError, Code};
use crate::state::State;
use crate::text::{Timestamp, error_chain, shorten};

/// Maximum number of concurrent requests, including those that follow logs.
const MAX_CONCURRENT: usize = 16;
/// How long the reply to a command waits for the result; for `stop` in addition to the grace period.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time that one request follows logs.
const MAX_FOLLOW: Duration = Duration::from_secs(60);
/// Maximum number of tasks in a list.
const MAX_TASKS: usize = 500;
/// Digits of a count.
const COUNT_DIGITS: usize = 20;
/// Number of output lines in a report.
const REPORT_LINES: usize = 10;

/// The state of one agent at one bridge.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(expecting = "an object")]
pub struct AgentReport {
    /// Its name in the configuration.
    pub agent: String,
    pub instance: String,
    pub state: String,
    pub since: Timestamp,
    /// The URL at which the bridge expects the agent.
    pub url: String,
    /// The program that the bridge launches, without its arguments, which may contain secrets.
    pub program: Option<String>,
    /// `None` while no process runs.
    pub pid: Option<i32>,
    pub started: Option<Timestamp>,
    pub restarts: u32,
    /// The restart policy.
    pub restart: Option<String>,
    /// When the bridge retries a backing-off agent.
    pub next_try: Option<Timestamp>,
    pub last_error: Option<String>,
    /// The same in a few words.
    pub reason: Option<String>,
    /// How to fix the last error.
    pub advice: Option<String>,
    pub last_exit: Option<LastExit>,
    pub card: Option<CardSummary>,
    pub in_flight: usize,
    /// Questions that wait for an answer.
    pub open_questions: Option<usize>,
    /// Tasks that the bridge follows although no call waits for them.
    pub followed_tasks: Option<usize>,
    /// Whether replicas share the state of the agent.
    pub shared_state: Option<bool>,
    pub last_call_error: Option<LastCallError>,
    /// The last lines of output.
    pub output: Vec<Line>,
    pub counts: Counts,
}

/// How the last process ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(expecting = "an object")]
pub struct LastExit {
    pub how: String,
    pub at: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(expecting = "an object")]
pub struct LastCallError {
    pub code: String,
    pub message: String,
    pub at: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(expecting = "an object")]
pub struct CardSummary {
    /// The agent's own name.
    pub name: String,
    pub version: String,
    /// Number of skills.
    pub skills: usize,
    /// Changes when the card changes.
    pub hash: String,
    pub endpoint: String,
    /// The version of A2A.
    pub protocol_version: String,
    pub binding: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, expecting = "an object")]
pub(crate) struct ControlRequest {
    /// Only this instance obeys and answers.
    pub instance: Option<String>,
    /// Number of most recent lines; all that are kept if absent.
    pub lines: Option<usize>,
    /// The first line to send.
    pub from: u64,
    /// Seconds, at most 60, for which to send further lines as they arrive.
    pub follow_s: u64,
    /// Maximum number of tasks to list.
    pub limit: Option<usize>,
}

/// The tasks of one agent at one bridge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(expecting = "an object")]
pub(crate) struct TasksReply {
    pub agent: String,
    pub instance: String,
    pub tasks: Vec<TaskSummary>,
    /// Number of further tasks, for which there was no room.
    pub left_out: usize,
}

/// A task without what was said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(expecting = "an object")]
pub(crate) struct TaskSummary {
    pub id: String,
    /// The last state that the bridge has seen; `unknown` if it no longer tracks the task.
    pub state: String,
    /// Whether the task runs or waits for an answer.
    pub open: bool,
    pub submitted: bool,
    pub skill: Option<String>,
    pub context_id: Option<String>,
    pub updated: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(expecting = "an object")]
pub(crate) struct LogsReply {
    pub agent: String,
    pub instance: String,
    pub lines: Vec<Line>,
    /// The number after the last line.
    pub next: u64,
    pub more: bool,
}

/// The control requests of an agent.
#[derive(Debug)]
pub(crate) struct ControlRequests {
    direct: Subscriber,
    gateway: Subscriber,
}

impl ControlRequests {
    /// The next request; `None` if the client is closed. Does not lose a request if the future is dropped.
    async fn next(&mut self) -> Option<(Message, Entrance)> {
        tokio::select! {
            message = self.direct.next() => Some((message?, Entrance::Direct)),
            message = self.gateway.next() => Some((message?, Entrance::Gateway)),
        }
    }
}

/// Subscribes to the control requests of an agent. Cancel-safe: dropping the future or the subscribers leaves nothing
/// behind.
pub(crate) async fn subscribe(
    agent: &Agent,
    context: &ServiceContext,
    subjects: &Subjects,
) -> Result<ControlRequests, ServiceError> {
    let subscribe = async |subject: String| {
        let subscriber = context.client.subscribe(subject.clone()).await;
        subscriber.map_err(|source| ServiceError::Subscribe { subject, source })
    };
    let subject = subjects.control(&Token::new(&agent.name), "*");
    let gateway = subjects.gateway(&subject).unwrap_or_else(|| subject.clone());
    Ok(ControlRequests { direct: subscribe(subject).await?, gateway: subscribe(gateway).await? })
}

/// Answers the control requests of one agent until the task is stopped.
pub(crate) fn start(
    requests: ControlRequests,
    agent: Agent,
    state: Arc<State>,
    instance: String,
    context: &ServiceContext,
    tasks: &BackgroundTasks,
) -> StoppableTask {
    StoppableTask::spawn(tasks, "control", |stop| {
        let outbox = Outbox::one_at_a_time(context.client.clone(), context.confirmations.clone());
        let controller = Controller { agent, state, instance, context: context.clone(), outbox, stop };
        Arc::new(controller).run(requests, tasks.clone())
    })
}

struct Controller {
    agent: Agent,
    state: Arc<State>,
    instance: String,
    context: ServiceContext,
    outbox: Outbox,
    stop: CancellationToken,
}

impl Controller {
    async fn run(self: Arc<Self>, mut requests: ControlRequests, tasks: BackgroundTasks) {
        let permits = Arc::new(Semaphore::new(MAX_CONCURRENT));
        while let Some(Some((message, entrance))) = self.stop.run_until_cancelled(requests.next()).await {
            let Some(reply) = message.reply.clone().filter(|reply| self.context.guard.allows(reply)) else {
                continue;
            };
            match Arc::clone(&permits).try_acquire_owned() {
                Ok(permit) => {
                    let controller = Arc::clone(&self);
                    tasks.spawn("control request", OnPanic::Log, async move {
                        if let Err(error) = controller.answer(&message, entrance, reply.clone()).await {
                            controller.refuse(reply, error).await;
                        }
                        drop(permit);
                    });
                }
                Err(_) => {
                    let text = "too many concurrent control requests; try again";
                    let refused = self.refuse(reply, ActionError::new(Code::Busy, text));
                    let _ = self.stop.run_until_cancelled(refused).await;
                }
            }
        }
    }

    async fn answer(&self, message: &Message, entrance: Entrance, reply: Subject) -> Result<(), ActionError> {
        // A gateway decides which of its principals are operators. The others may list their own tasks.
        let principal = match entrance {
            Entrance::Direct => None,
            Entrance::Gateway => Some(self.context.identity().caller(message, entrance)?),
        };
        let request: ControlRequest = match message.payload.as_ref() {
            b"" => ControlRequest::default(),
            body => serde_json::from_slice(body).map_err(|error| {
                ActionError::invalid(format!("invalid body: {}", shorten(&error.to_string(), 300)))
            })?,
        };
        if request.instance.as_ref().is_some_and(|wanted| *wanted != self.instance) {
            return Ok(());
        }
        match message.subject.rsplit('.').next().unwrap_or_default() {
            "show" => self.send_report(reply).await,
            "start" => self.command(AgentCommand::Start, reply).await,
            "stop" => self.command(AgentCommand::Stop, reply).await,
            // To stop and start an attached agent only unpublishes and publishes it, which is no restart.
            "restart" if self.agent.config.command.is_none() => {
                let text =
                    "the bridge did not start this agent and cannot restart it; restart it where it runs";
                return Err(ActionError::invalid(text));
            }
            "restart" => self.command(AgentCommand::Restart, reply).await,
            "logs" => self.send_logs(&request, reply).await,
            "tasks" => self.send_tasks(&request, principal.as_ref(), reply).await,
            _ => {
                let text = "unknown command; use one of `show`, `start`, `stop`, `restart`, `tasks`, `logs`";
                return Err(ActionError::invalid(text));
            }
        }
        Ok(())
    }

    async fn command(&self, command: AgentCommand, reply: Subject) {
        tracing::info!(agent = %self.agent.name, ?command, "received a command over NATS");
        let number = self.agent.command(command);
        let mut status = self.agent.status.clone();
        let timeout = match command {
            AgentCommand::Stop => self.agent.config.stop_grace + COMMAND_TIMEOUT,
            AgentCommand::Start | AgentCommand::Restart => COMMAND_TIMEOUT,
        };
        let finished = status.wait_for(|status| {
            let is_done = match command {
                AgentCommand::Stop => status.state == AgentState::Stopped,
                AgentCommand::Start | AgentCommand::Restart => status.state != AgentState::Starting,
            };
            status.generation >= number && is_done
        });
        // The report shows the result, whatever it is.
        let _ = self.stop.run_until_cancelled(tokio::time::timeout(timeout, finished)).await;
        self.send_report(reply).await;
    }

    async fn send_report(&self, reply: Subject) {
        let report = report(&self.agent, &self.instance, &self.state).await;
        self.send(reply, &report).await;
    }

    async fn send_logs(&self, request: &ControlRequest, reply: Subject) {
        let output = &self.agent.output;
        let until = Instant::now() + Duration::from_secs(request.follow_s).min(MAX_FOLLOW);
        let mut lines = output.tail(request.from, request.lines.unwrap_or(usize::MAX));
        // A line has at most 2 kB, so this leaves room for the fields around it.
        let max_lines = (self.outbox.max_payload() / 4096).max(1);
        loop {
            let next = lines.last().map_or_else(|| output.next(), |line| line.seq + 1);
            let rest = lines.split_off(lines.len().min(max_lines));
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
                    () = output.wait_for_line(next) => {}
                    () = tokio::time::sleep_until(until) => {}
                }
                lines = output.tail(next, usize::MAX);
            }
        }
    }

    async fn send_tasks(&self, request: &ControlRequest, caller: Option<&Caller>, reply: Subject) {
        let limit = request.limit.unwrap_or(MAX_TASKS).min(MAX_TASKS);
        let (tasks, left_out) = self.state.tasks.list(&self.agent.name, caller, limit).await;
        let tasks = tasks.into_iter().map(|task| TaskSummary {
            id: task.id,
            state: task.state,
            open: task.is_open,
            submitted: task.is_submitted,
            skill: task.skill.as_deref().map(str::to_owned),
            context_id: task.context_id,
            updated: Timestamp(task.seen_at),
        });
        let tasks: Vec<_> = tasks.collect();
        let mut list = TasksReply {
            agent: self.agent.name.to_string(),
            instance: self.instance.clone(),
            tasks: Vec::new(),
            left_out,
        };
        // Ids are chosen by agents and callers, and may be long. The count of what is left out needs a few bytes more.
        let used = to_bytes(&list).len() + COUNT_DIGITS;
        let count = tasks.len();
        list.tasks = first_that_fit(tasks, used, self.outbox.max_payload());
        list.left_out += count - list.tasks.len();
        self.send(reply, &list).await;
    }

    async fn send(&self, reply: Subject, body: &impl Serialize) -> bool {
        self.publish(reply, EncodedReply::from_body(to_bytes(body))).await
    }

    async fn refuse(&self, reply: Subject, error: ActionError) {
        self.publish(reply, EncodedReply::new(&Err(error), self.outbox.max_payload(), 0)).await;
    }

    /// Whether the reply was sent.
    async fn publish(&self, reply: Subject, encoded: EncodedReply) -> bool {
        let sent = encoded.send(&self.outbox, reply).await;
        if let Err(error) = &sent {
            let agent = &self.agent.name;
            tracing::warn!(%agent, error = error_chain(error), "cannot answer a control request");
        }
        sent.is_ok()
    }
}

async fn report(agent: &Agent, instance: &str, state: &State) -> AgentReport {
    let open_questions = state.follow_ups.pending(Some(&agent.name)).await.ok();
    let status = agent.status.borrow().clone();
    let config = &agent.config;
    AgentReport {
        agent: agent.name.to_string(),
        instance: instance.to_owned(),
        state: status.state.to_string(),
        since: Timestamp(status.since),
        url: if status.url.is_empty() { config.url.to_string() } else { status.url },
        program: config.command.as_ref().and_then(|command| command.first().cloned()),
        pid: status.pid,
        started: status.started.map(Timestamp),
        restarts: status.restarts,
        restart: config.command.as_ref().map(|_| config.restart.to_string()),
        next_try: status.next_try.map(Timestamp),
        last_error: status.last_error,
        reason: status.reason,
        advice: status.advice,
        last_exit: status.last_exit.map(|(how, at)| LastExit { how, at: Timestamp(at) }),
        card: status.known.map(|known| CardSummary {
            name: known.card.name.clone(),
            version: shorten(&known.card.version, MAX_VERSION),
            skills: known.card.skills.len(),
            hash: known.card.hash.clone(),
            endpoint: known.interface.url.to_string(),
            protocol_version: known.interface.dialect.protocol_version().to_owned(),
            binding: known.interface.dialect.binding().to_owned(),
        }),
        in_flight: agent.calls.in_flight(),
        open_questions,
        followed_tasks: Some(agent.calls.followed()),
        shared_state: Some(state.is_shared()),
        last_call_error: agent.calls.last_error().map(|error| LastCallError {
            code: error.code,
            message: error.message,
            at: Timestamp(error.at),
        }),
        output: agent.output.tail(0, REPORT_LINES),
        counts: agent.output.counts(),
    }
}
