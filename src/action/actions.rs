//! One agent's actions: invoke a skill, read and cancel a task. `follow_up` answers an agent's question.
//!
//! [`Actions`] holds no connection: it uses the current live agent (a watch channel written by the
//! agent's supervisor) and the shared [`State`]. The run of a call is in `run`.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::adoption::ADOPTED_READS;
use super::assemble::ArtifactRules;
use super::files::{ResolvedParts, resolve_files};
use super::location::{Located, TaskAccess};
use super::params::Template;
use super::progress::{ForwardError, NoProgress, Progress, RunStart};
use super::request::{CallOptions, Invocation, MessageContent, ReplyMemory, ReplyMode};
use super::run::{
    CallRun, DeliveryError, GET_TASK_TIMEOUT, Interruption, PollSchedule, Polled, Poller, Purpose, RunEnd,
    RunInput, agent_exited, known_task_error,
};
use crate::a2a::LiveAgent;
use crate::a2a::client::ClientError;
use crate::a2a::dialect::OutgoingMessage;
use crate::a2a::model::{Part, Task, TaskState};
use crate::a2a::retry::Retries;
use crate::caller::Caller;
use crate::config::AgentConfig;
use crate::files::CallFiles;
use crate::memory::{MemoryAccount, MemoryCharge, OutOfMemory};
use crate::offload;
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::reply::outcome::{Outcome, TaskRef};
use crate::secrets::Secrets;
use crate::state::State;
use crate::state::quota::{AgentQuota, CallKind, ReservedRoom};
use crate::state::run_link::RunLink;
use crate::state::sessions::{SessionId, SessionPlace};
use crate::state::tasks::TaskOutline;
use crate::telemetry::spans;

/// Timeout of a cancel that a caller requested.
const CALLER_CANCEL_TIMEOUT: Duration = Duration::from_secs(30);

/// Signals a shutdown of the bridge, or of one agent's publication, to the calls in flight.
#[derive(Debug, Clone, Default)]
pub(crate) struct CallShutdown {
    /// The shutdown has begun: calls stop following submitted tasks, which go on at the agent.
    pub begun: CancellationToken,
    /// The grace period is over: every other call ends now.
    pub grace_over: CancellationToken,
}

impl CallShutdown {
    /// For the calls of one agent, which may shut down before the others.
    #[must_use]
    pub(crate) fn child(&self) -> Self {
        Self { begun: self.begun.child_token(), grace_over: self.grace_over.child_token() }
    }
}

/// The live agent, if there is one.
type LiveAgentReceiver = watch::Receiver<Option<Arc<LiveAgent>>>;

/// A change of a submitted task, to be published.
#[derive(Debug)]
pub(crate) struct TaskUpdate {
    pub task_id: String,
    pub reply: Reply,
    /// Counts the changes of the task.
    pub revision: u64,
    /// The caller to whom the task belongs. Only that caller may see the content of the task.
    pub caller: Caller,
    /// The memory of the reply, until the update is published.
    pub charge: Option<Arc<MemoryCharge>>,
    /// The files of the call.
    pub files: Option<Arc<CallFiles>>,
}

#[derive(Debug)]
pub(crate) struct Actions {
    pub(super) agent: Arc<str>,
    pub(super) config: Arc<AgentConfig>,
    pub(super) artifacts: ArtifactRules,
    live: LiveAgentReceiver,
    pub(crate) state: Arc<State>,
    quota: Arc<AgentQuota>,
    updates: mpsc::Sender<TaskUpdate>,
    pub(super) call_shutdown: CallShutdown,
    pub(super) secrets: Secrets,
    pub(super) memory: Arc<MemoryAccount>,
    /// Admits reads of adopted tasks to the agent.
    pub(super) adopted_reads: Semaphore,
}

/// The part of a skill that a call needs.
#[derive(Debug)]
pub(crate) struct CallableSkill {
    /// The id in the card; `None` for the agent as a whole.
    pub id: Option<Arc<str>>,
    /// Media types that the skill produces.
    pub output_modes: Vec<String>,
    pub template: Template,
}

impl CallableSkill {
    pub(crate) fn whole_agent() -> Self {
        Self { id: None, output_modes: Vec::new(), template: Template::parse("") }
    }
}

impl Actions {
    /// Calls are charged to `memory`, the account of the agent.
    pub(crate) fn new(
        memory: Arc<MemoryAccount>,
        config: Arc<AgentConfig>,
        live: LiveAgentReceiver,
        state: Arc<State>,
        updates: mpsc::Sender<TaskUpdate>,
        call_shutdown: CallShutdown,
        secrets: Secrets,
    ) -> Self {
        let artifacts = ArtifactRules {
            response: config.answer_artifacts.clone(),
            notice: config.notice_artifacts.clone(),
        };
        let agent = Arc::clone(&memory.agent);
        let quota = state.quotas.agent(&agent);
        let adopted_reads = Semaphore::new(ADOPTED_READS);
        Self {
            agent,
            config,
            artifacts,
            live,
            state,
            quota,
            updates,
            call_shutdown,
            secrets,
            memory,
            adopted_reads,
        }
    }

    /// Reserves room for what a call may have to record.
    pub(crate) fn reserve(&self, call: CallKind, caller: &Caller) -> Result<ReservedRoom, ActionError> {
        self.state.reserve(&self.quota, call, caller)
    }

    /// The caller as the agent gets it, if the configuration says so.
    pub(super) fn forwarded_caller<'o>(&self, options: &'o CallOptions) -> Option<&'o str> {
        options.caller.name().filter(|_| self.config.forward_caller)
    }

    /// The caller's timeout, but at most that of the configuration.
    pub(crate) fn timeout(&self, options: &CallOptions) -> Duration {
        let max = match options.mode {
            ReplyMode::Final => self.config.request_timeout,
            ReplyMode::Stream | ReplyMode::Submit => self.config.task_timeout,
        };
        options.timeout.map_or(max, |timeout| timeout.min(max))
    }

    /// Prepares the files of a call to be sent. They get a part of its time, and never more than `request_timeout`: a host that
    /// sends slowly must not hold a stream or a submitted task for as long as these may take.
    pub(super) async fn resolve_files(
        &self,
        parts: Vec<Part>,
        deadline: Instant,
    ) -> Result<ResolvedParts, ActionError> {
        let until = deadline.min(Instant::now() + self.config.request_timeout);
        resolve_files(parts, until, &self.memory).await
    }

    pub(crate) async fn invoke(
        &self,
        skill: &CallableSkill,
        request: Invocation,
        options: &CallOptions,
        progress: &mut impl Progress,
    ) -> Reply {
        let deadline = Instant::now() + self.timeout(options);
        let live_agent = self.live_agent()?;
        let Invocation { parts, mut meta } = request;
        if options.caller.is_verified() && !meta.reference_task_ids.is_empty() {
            Box::pin(self.check_references(&meta.reference_task_ids, &options.caller)).await?;
        }
        let parts = self.resolve_files(parts, deadline).await?;
        let mut content = MessageContent::new(&self.memory, parts, &mut meta).await?;
        let output_modes: Arc<[String]> = if meta.output_modes.is_empty() {
            [&skill.output_modes, &live_agent.card.output_modes]
                .into_iter()
                .find(|modes| !modes.is_empty())
                .map_or_else(Arc::default, |modes| modes.as_slice().into())
        } else {
            meta.output_modes.into()
        };
        let context_id = match &meta.session_id {
            Some(session_id) => match Box::pin(self.place_session(session_id, options, progress)).await? {
                PlacedSession::Here { context_id } => Some(context_id),
                PlacedSession::Forwarded(reply) => return reply,
            },
            None => None,
        };
        let start = RunStart {
            session_id: meta.session_id.as_deref(),
            message: Some(content.parts()),
            skill: skill.id.as_deref(),
            context_id: context_id.as_deref(),
            card_hash: &live_agent.card.hash,
            continues: None,
        };
        let (link, history) = match progress.begin_run(start).await? {
            Some(begun) => (Some(begun.link), begun.history),
            None => (None, None),
        };
        if let Some(history) = history {
            content.prepend(&self.memory, history)?;
        }
        let logged_session = link.as_ref().and_then(|link| link.session.clone());
        let retries = Retries::new(&self.agent);
        let input = RunInput {
            purpose: Purpose::NewTask { session_id: meta.session_id },
            mode: options.mode,
            skill: skill.id.clone(),
            output_modes: Arc::clone(&output_modes),
            caller: &options.caller,
            trace: &options.trace,
            deadline,
            retries: Some(&retries),
            content,
            claim: None,
            reply_memory: &options.reply_memory,
            link: link.clone(),
        };
        // For dialects in which the client makes the ids.
        let new_task_id = Uuid::new_v4().to_string();
        let message = OutgoingMessage {
            message_id: Uuid::new_v4(),
            task_id: None,
            new_task_id: Some(&new_task_id),
            context_id: context_id.as_deref(),
            reference_task_ids: &[],
            parts: &[],
            skill_id: skill.id.as_deref(),
            caller: self.forwarded_caller(options),
            run_id: link.as_ref().map(|link| link.run),
            session_id: logged_session.as_deref(),
            output_modes: &output_modes,
            blocking: true,
            retries: &retries,
        };
        let mut run = CallRun::new(self, live_agent, input, progress);
        match run.deliver(&message).await {
            Ok(outcome) => Ok(outcome),
            // Only the answer to a question belongs to a task that may have ended.
            Err(DeliveryError::TaskEnded) => Err(ActionError::internal()),
            Err(DeliveryError::NotSent(error)) => Err(error.with_retries(&retries)),
            Err(DeliveryError::Client(error)) => Err(ActionError::from_client(error).with_retries(&retries)),
            Err(DeliveryError::Action(error)) => {
                let (error, end) = (error.with_retries(&retries), run.recorder.end());
                Err(Box::pin(self.record_untracked(error, options, end)).await)
            }
        }
    }

    /// Finds out where a session continues, and lets the replica that has the conversation run the call.
    async fn place_session(
        &self,
        session_id: &str,
        options: &CallOptions,
        progress: &mut impl Progress,
    ) -> Result<PlacedSession, ActionError> {
        let session = self.session(&options.caller, session_id);
        let elsewhere = || {
            let why = "another replica has this conversation; try again";
            Err(ActionError::unavailable(&self.agent, Some(why)))
        };
        let to = match self.state.sessions.place(session).await? {
            SessionPlace::Here { context_id } => return Ok(PlacedSession::Here { context_id }),
            // The session has moved on while the request was on its way.
            SessionPlace::Elsewhere(_) if options.is_forwarded => return elsewhere(),
            SessionPlace::Elsewhere(to) => to,
        };
        match progress.forward(to).await {
            Ok(reply) => Ok(PlacedSession::Forwarded(reply)),
            // With clients of such a front door, each replica has a conversation of its own.
            Err(ForwardError::Unsupported) => {
                Ok(PlacedSession::Here { context_id: session.first_context_id().into_owned() })
            }
            Err(ForwardError::NotKept) => elsewhere(),
            Err(ForwardError::Gone) => {
                let why = "the replica that has this conversation does not respond";
                Err(ActionError::unavailable(&self.agent, Some(why)))
            }
            Err(ForwardError::Silent) => {
                let message = "the replica that has this conversation stopped responding during the call";
                Err(ActionError::new(Code::OutcomeUnknown, message).after_reaching_agent())
            }
        }
    }

    /// Whether this replica launches the agent, so that no other replica's agent knows its tasks.
    pub(super) fn is_launched(&self) -> bool {
        self.config.command.is_some()
    }

    pub(super) fn session<'a>(&'a self, caller: &'a Caller, id: &'a str) -> SessionId<'a> {
        SessionId { agent: &self.agent, caller, id, is_launched: self.is_launched() }
    }

    pub(crate) async fn cancel_task(
        &self,
        task_id: &str,
        options: &CallOptions,
        progress: &mut impl Progress,
    ) -> Reply {
        let record = match self.locate(task_id, options, TaskAccess::Cancel, progress).await? {
            Located::Here(record) | Located::LastKnown(record) => record,
            Located::Forwarded(reply) => return reply,
        };
        let task_ref = || self.task_ref(&record, task_id);
        let refuse = |why: &str| Err(ActionError::new(Code::NotCancelable, why).with_task(task_ref()));
        if record.state.is_final() {
            return refuse("the task is in a final state");
        }
        let timeout = CALLER_CANCEL_TIMEOUT.min(self.timeout(options));
        let mut progress = NoProgress;
        let mut run = self.run_for_known_task(self.live_agent()?, &record, options, timeout, &mut progress);
        let agent = Arc::clone(&run.waiter.live_agent);
        let task = match run.waiter.within(Box::pin(agent.client.cancel(task_id, &options.trace))).await {
            Ok(Ok(task)) => task,
            Ok(Err(error)) if error.is_not_cancelable() => {
                return refuse(&format!("the agent refuses to cancel the task: {error}"));
            }
            Ok(Err(error)) => return Err(known_task_error(error, task_ref())),
            Err(Interruption::AgentExited) => return Err(agent_exited(Some(task_ref()))),
            Err(_) => {
                let message = "the agent did not respond to the cancel request in time";
                let mut error = ActionError::new(Code::Timeout, message);
                error.info.cancelled = Some(Some(false));
                return Err(error.after_reaching_agent().with_task(task_ref()));
            }
        };
        let task = poll_until_canceled(&mut run, task).await;
        let (outcome, _) = run.recorder.observe(&task, "", record.follow_up.clone()).await?;
        match task.state {
            TaskState::Canceled => Ok(Arc::new(Outcome { success: true, ..Outcome::clone(&outcome) })),
            ref state if state.is_final() => {
                refuse(&format!("the task ended as {state} before the agent canceled it"))
            }
            _ => Ok(outcome),
        }
    }

    pub(crate) async fn get_task(
        &self,
        task_id: &str,
        options: &CallOptions,
        progress: &mut impl Progress,
    ) -> Reply {
        let (record, is_followed_here) =
            match self.locate(task_id, options, TaskAccess::Read, progress).await? {
                Located::Here(record) => (record, true),
                Located::LastKnown(record) => (record, false),
                Located::Forwarded(reply) => return reply,
            };
        if is_followed_here
            && !record.state.is_final()
            && let Some(outcome) = self.get_from_agent(&record, task_id, options).await?
            // Another call may have seen the end meanwhile.
            && !self.record(task_id, &options.caller).await?.state.is_final()
        {
            return Ok(outcome);
        }
        // While the agent is unavailable, the reply is the last known state.
        let charge = self.charge_reply(options);
        self.state.tasks.reply(&self.agent, task_id, charge).await?.ok_or_else(unknown_task)?
    }

    /// Charges the memory of the reply to a request, in place of what was charged for it before.
    pub(crate) fn charge_reply(&self, options: &CallOptions) -> impl Fn(usize) -> Result<(), OutOfMemory> {
        |bytes| options.reply_memory.cover(&self.memory, bytes)
    }

    /// Reads a task from the agent. Returns `None` while the agent is unavailable.
    async fn get_from_agent(
        &self,
        record: &TaskOutline,
        task_id: &str,
        options: &CallOptions,
    ) -> Result<Option<Arc<Outcome>>, ActionError> {
        let Ok(live_agent) = self.live_agent() else {
            return Ok(None);
        };
        let mut progress = NoProgress;
        let timeout = GET_TASK_TIMEOUT.min(self.timeout(options));
        let mut run = self.run_for_known_task(live_agent, record, options, timeout, &mut progress);
        match run.waiter.get_task(task_id, GET_TASK_TIMEOUT).await {
            Ok(Polled::Task(task)) => {
                let (outcome, _) = run.recorder.observe(&task, "", record.follow_up.clone()).await?;
                Ok(Some(outcome))
            }
            // Without memory for the task, its recorded state is the best reply.
            Ok(
                Polled::Failed(
                    ClientError::Unreachable(_) | ClientError::Broken(_) | ClientError::OutOfMemory,
                )
                | Polled::TimedOut,
            )
            | Err(_) => Ok(None),
            Ok(Polled::Failed(error)) => Err(known_task_error(error, self.task_ref(record, task_id))),
        }
    }

    /// Polls a task of an earlier call until its outcome is the awaited one.
    pub(crate) async fn watch_task(
        &self,
        task_id: &str,
        options: &CallOptions,
        timeout: Duration,
        is_awaited: impl Fn(&Outcome) -> bool,
    ) -> Reply {
        let record = self.record(task_id, &options.caller).await?;
        let mut progress = NoProgress;
        let mut run = self.run_for_known_task(self.live_agent()?, &record, options, timeout, &mut progress);
        let mut poller = Poller::new(task_id.to_owned(), PollSchedule::WATCH);
        loop {
            match poller.next(&mut run.waiter).await {
                Ok(Some(Polled::Task(task))) => {
                    let (outcome, _) = run.recorder.observe(&task, "", record.follow_up.clone()).await?;
                    if is_awaited(&outcome) {
                        return Ok(outcome);
                    }
                }
                Ok(Some(Polled::Failed(error))) if error.is_task_not_found() => {
                    return Err(known_task_error(error, self.task_ref(&record, task_id)));
                }
                Ok(_) => {}
                Err(interruption) => {
                    let task = self.task_ref(&record, task_id);
                    return Err(run.interrupted_for(interruption, Some(task)).await);
                }
            }
        }
    }

    /// Records why the bridge no longer tracks the task of a call, for later requests, and publishes it if the task was
    /// submitted.
    pub(super) async fn record_untracked(
        &self,
        error: ActionError,
        options: &CallOptions,
        end: RunEnd,
    ) -> ActionError {
        let error = offload::run(&self.agent, error.allocated(), || error.redacted(&self.secrets)).await;
        let Some(id) = error.task.as_ref().and_then(|task| task.id.as_ref()) else { return error };
        if options.mode == ReplyMode::Submit && self.hands_tasks_over() {
            return error;
        }
        let _turn = self.state.tasks.turn(&self.agent, id).await;
        let marked = self.state.tasks.mark_untracked(&self.agent, id, &error, end.run).await;
        let landed = self.state.tasks.take_landed(&self.agent, id);
        let marked = marked.or(end.unpublished).map(|revision| (revision, Err(error.clone())));
        for (revision, reply) in landed.into_iter().chain(marked) {
            let (caller, memory) = (options.caller.clone(), &options.reply_memory);
            self.publish(id, reply, revision, caller, memory).await;
        }
        error
    }

    /// Writes the changes of tasks that the store has not confirmed, and publishes them.
    pub(crate) async fn write_late(&self) {
        let (tasks, memory) = (&self.state.tasks, ReplyMemory::default());
        for id in tasks.unconfirmed(&self.agent) {
            let _turn = tasks.turn(&self.agent, &id).await;
            let Some(late) = tasks.write_late(&self.agent, &id).await else { continue };
            for (revision, reply) in late.updates {
                self.publish(&id, reply, revision, late.caller.clone(), &memory).await;
            }
            if let Some(obsolete) = late.obsolete {
                self.state.expire_unless_named(&self.agent, &id, &obsolete).await;
            }
        }
    }

    /// Whether this replica stops, and others adopt the submitted tasks. They stay as they are.
    pub(crate) fn hands_tasks_over(&self) -> bool {
        self.state.is_shared() && self.call_shutdown.begun.is_cancelled()
    }

    /// Publishes a change of a submitted task. `memory` charges the reply.
    pub(crate) async fn publish(
        &self,
        task_id: &str,
        reply: Reply,
        revision: u64,
        caller: Caller,
        memory: &ReplyMemory,
    ) {
        let (charge, files) = (memory.share(), CallFiles::current());
        let update = TaskUpdate { task_id: task_id.to_owned(), reply, revision, caller, charge, files };
        // During a shutdown the receiver may have ended.
        let _ = self.updates.send(update).await;
    }

    pub(super) fn live_agent(&self) -> Result<Arc<LiveAgent>, ActionError> {
        self.live.borrow().clone().ok_or_else(|| ActionError::unavailable(&self.agent, None))
    }

    /// Where the call of a task is logged, if it is.
    pub(crate) async fn logged_task(
        &self,
        task_id: &str,
        caller: &Caller,
    ) -> Result<Option<RunLink>, ActionError> {
        let found = self.state.tasks.find(&self.agent, task_id).await?;
        let record = found.filter(|record| record.caller == *caller).ok_or_else(unknown_task)?;
        Ok(record.run)
    }

    /// A run for a task of an earlier call.
    fn run_for_known_task<'a>(
        &'a self,
        live_agent: Arc<LiveAgent>,
        record: &TaskOutline,
        options: &'a CallOptions,
        timeout: Duration,
        progress: &'a mut NoProgress,
    ) -> CallRun<'a, NoProgress> {
        let input = RunInput {
            purpose: Purpose::ReadOrCancel,
            mode: ReplyMode::Final,
            skill: record.task().and_then(|task| task.skill.clone()),
            output_modes: Arc::default(),
            caller: &options.caller,
            trace: &options.trace,
            deadline: Instant::now() + timeout,
            retries: None,
            content: MessageContent::default(),
            claim: None,
            reply_memory: &options.reply_memory,
            link: None,
        };
        CallRun::new(self, live_agent, input, progress)
    }

    fn task_ref(&self, record: &TaskOutline, task_id: &str) -> TaskRef {
        record.task().cloned().unwrap_or_else(|| self.known_task_ref(task_id, None))
    }

    /// A task of which only the id is known.
    pub(super) fn known_task_ref(&self, task_id: &str, skill: Option<Arc<str>>) -> TaskRef {
        TaskRef { id: Some(task_id.to_owned()), context_id: None, agent: Arc::clone(&self.agent), skill }
    }

    /// The task as it was last seen. Not with its reply: requests hold the record while they wait for the agent.
    pub(super) async fn record(&self, task_id: &str, caller: &Caller) -> Result<TaskOutline, ActionError> {
        let found = self.state.tasks.find(&self.agent, task_id).await?;
        let record = found.filter(|record| record.caller == *caller).ok_or_else(unknown_task)?;
        spans::set_task(task_id, record.task().and_then(|task| task.context_id.as_deref()));
        Ok(record)
    }
}

/// Where a call of a session runs.
enum PlacedSession {
    Here { context_id: String },
    Forwarded(Reply),
}

fn unknown_task() -> ActionError {
    ActionError::new(Code::NotFound, "this task is unknown or has been forgotten")
}

/// Some agents accept a cancel request and cancel the task later.
async fn poll_until_canceled(run: &mut CallRun<'_, NoProgress>, mut task: Task) -> Task {
    let mut poller = Poller::new(task.id.clone(), PollSchedule::CONFIRM);
    while !task.state.is_final() {
        match poller.next(&mut run.waiter).await {
            Ok(Some(Polled::Task(polled))) => task = polled,
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => break,
        }
    }
    task
}
