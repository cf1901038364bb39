//! The progress of a call that is logged: what the front door gets was stored before.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::json;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::codec::{NewEvent, redacted};
use super::event::EventType;
use super::log::AgentLog;
use super::run_log::{LoggedEnd, RunLog, RunPosition};
use crate::a2a::model::{File, FileContent, Part};
use crate::action::progress::{BegunRun, ForwardError, Listener, Progress, ProgressEvent, RunStart};
use crate::action::request::{CallOptions, ReplyMode};
use crate::files::CallFiles;
use crate::json::json_prefix;
use crate::reply::Reply;
use crate::reply::error::ActionError;
use crate::reply::outcome::Outcome;
use crate::state::peers::InstanceId;
use crate::state::run_link::RunLink;
use crate::text::millis;

/// Passes progress on, and logs it first if the call is logged.
#[derive(Debug)]
pub(crate) struct Logged<'a, P> {
    inner: &'a mut P,
    agent: Option<&'a AgentLog>,
    options: &'a CallOptions,
    /// `None` if the call is not logged. Boxed, because most calls are not.
    run: Option<Box<RunLog>>,
}

impl<'a, P: Progress> Logged<'a, P> {
    pub(crate) fn new(inner: &'a mut P, agent: Option<&'a AgentLog>, options: &'a CallOptions) -> Self {
        Self { inner, agent, options, run: None }
    }

    /// Continues the log of a call that another replica began.
    pub(crate) fn resumed(
        inner: &'a mut P,
        agent: &'a AgentLog,
        options: &'a CallOptions,
        run: Box<RunLog>,
    ) -> Self {
        Self { inner, agent: Some(agent), options, run: Some(run) }
    }

    /// Whether the call is logged.
    pub(crate) fn is_active(&self) -> bool {
        self.run.is_some()
    }

    /// Logs the end of the call.
    pub(crate) async fn end(mut self, reply: &Reply) {
        let Some(mut run) = self.run.take() else { return };
        let had_failed = run.has_failed();
        let LoggedEnd { progress, result, has_failed } = run.end(reply).await;
        for event in progress {
            self.inner.report(event).await;
        }
        if let Some(result) = result {
            self.inner.logged_result(result);
        }
        if has_failed && !had_failed {
            self.inner.log_failed();
        }
    }

    /// Stores what is held, and passes it on.
    async fn store(&mut self) {
        let Some(run) = &mut self.run else { return };
        let had_failed = run.has_failed();
        let progress = run.store().await;
        if run.has_failed() && !had_failed {
            self.inner.log_failed();
        }
        for event in progress {
            self.inner.report(event).await;
        }
    }

    /// The log of the run, or the reason why there is none.
    async fn begin(&mut self, start: RunStart<'_>) -> Result<Option<Box<RunLog>>, ActionError> {
        let Some(agent) = self.agent else { return Ok(None) };
        let log = &agent.log;
        let is_logged =
            start.continues.is_some() || log.wants(start.session_id.is_some(), self.options.is_logged);
        if !is_logged {
            return Ok(None);
        }
        let caller = &self.options.caller;
        let mut run = match start.continues {
            Some(link) => match super::resume::next_call(agent, caller, link).await {
                Ok(run) => run,
                Err(error) if log.is_required => return Err(error.into()),
                Err(_) => {
                    log.count_failure(&agent.agent);
                    self.inner.log_failed();
                    return Ok(None);
                }
            },
            None => {
                let session = start.session_id.map(Arc::from);
                let link = RunLink { session, run: new_run_id(), call: 0, start: 0, last: 0 };
                Box::new(RunLog::new(agent.clone(), caller, link, RunPosition::new(0)))
            }
        };
        run.send_first(first_events(agent, &start, self.options), &start);
        if log.is_required {
            run.first_stored().await?;
        }
        CallFiles::use_references();
        self.inner.logged();
        Ok(Some(run))
    }
}

/// A UUID whose order is that of time (version 7), so that lists of runs are in order.
fn new_run_id() -> Uuid {
    Uuid::now_v7()
}

/// The settings of a call, for the record of its run.
fn settings(options: &CallOptions) -> serde_json::Value {
    let reply = match options.mode {
        ReplyMode::Final => "final",
        ReplyMode::Stream => "stream",
        ReplyMode::Submit => "submit",
    };
    match options.timeout {
        Some(timeout) => json!({ "reply": reply, "timeout_ms": millis(timeout) }),
        None => json!({ "reply": reply }),
    }
}

/// What the log has of a message, and who gets it.
fn first_events(agent: &AgentLog, start: &RunStart<'_>, options: &CallOptions) -> Vec<NewEvent> {
    let message = match start.message {
        // A user's answer may be a password.
        None => NewEvent::new(EventType::UserMessage, &json!({ "redacted": true })),
        Some(parts) => user_message(parts, agent.log.store.max_batch() / 2),
    };
    let begin = NewEvent::new(
        EventType::AgentStart,
        &json!({
            "agent": agent.agent, "skill": start.skill, "card_hash": start.card_hash,
            "context_id": start.context_id, "instance": agent.log.instance.simple().to_string(),
            "settings": settings(options),
        }),
    );
    let mut events = vec![message, begin];
    if options.has_logged_message && start.message.is_some() {
        events.remove(0);
    }
    for event in &mut events {
        event.payload = redacted(&event.payload, &agent.secrets);
    }
    events
}

/// A message of a caller in at most about `room` bytes. A longer one is cut: it must not prevent the log of its call.
fn user_message(parts: &[Part], room: usize) -> NewEvent {
    let mut text: String = parts.iter().filter_map(Part::as_text).collect();
    let kept = json_prefix(&text, room).len();
    let mut is_truncated = kept < text.len();
    text.truncate(kept);
    let mut room = room - kept.min(room);
    let data: Vec<_> = parts
        .iter()
        .filter_map(|part| match part {
            Part::Data(data) => Some(&**data),
            _ => None,
        })
        .filter(|data| {
            let fits = data.get().len() <= room;
            room -= data.get().len().min(room);
            is_truncated |= !fits;
            fits
        })
        .collect();
    let files: Vec<_> = parts
        .iter()
        .filter_map(|part| match part {
            Part::File(file) => Some(logged_file(file)),
            _ => None,
        })
        .collect();
    #[derive(serde::Serialize)]
    struct UserMessage<'a> {
        content: String,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        files: Vec<serde_json::Value>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        data: Vec<&'a RawValue>,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        truncated: bool,
    }
    let message = UserMessage { content: text, files, data, truncated: is_truncated };
    NewEvent::new(EventType::UserMessage, &message)
}

/// A file without its bytes.
fn logged_file(file: &File) -> serde_json::Value {
    let File { name, media_type, content } = file;
    let mut logged = json!({ "name": name, "mime_type": media_type });
    let details = match content {
        FileContent::Base64(base64) => json!({ "size": base64.len() / 4 * 3 }),
        FileContent::Uri(url) => json!({ "url": url }),
        FileContent::Reference(url) => json!({ "url": url.to_string() }),
        FileContent::FromStore(stored) | FileContent::InStore(stored) => {
            let file = &stored.file;
            json!({ "url": file.url.to_string(), "size": file.size, "sha256": file.sha256 })
        }
    };
    if let (Some(logged), serde_json::Value::Object(details)) = (logged.as_object_mut(), details) {
        logged.extend(details);
    }
    logged
}

impl<P: Progress> Progress for Logged<'_, P> {
    async fn started(&mut self) {
        self.inner.started().await;
    }

    async fn begin_run(&mut self, start: RunStart<'_>) -> Result<Option<BegunRun>, ActionError> {
        self.run = Box::pin(self.begin(start)).await?;
        let Some(run) = &mut self.run else { return Ok(None) };
        let had_failed = run.has_failed();
        let history = Box::pin(run.history(self.options.has_logged_message)).await;
        if run.has_failed() && !had_failed {
            self.inner.log_failed();
        }
        Ok(Some(BegunRun { link: Arc::clone(run.link()), history }))
    }

    async fn report(&mut self, event: ProgressEvent) {
        let run = match &mut self.run {
            Some(run) if !run.has_failed() => run,
            _ => return self.inner.report(event).await,
        };
        // A caller must not wait for the news that the task has settled.
        let is_end = matches!(&event, ProgressEvent::State { state, .. } if state.is_settled());
        // The text of an answer follows its artifact, and belongs into the same event.
        let is_followed = matches!(&event, ProgressEvent::Artifact { is_response: true, .. });
        Box::pin(run.hold(event)).await;
        if is_end || (run.until_due() == Some(Duration::ZERO) && !is_followed) {
            Box::pin(self.store()).await;
        }
    }

    fn recorded(&mut self, is_submitted: bool) {
        self.inner.recorded(is_submitted);
    }

    async fn accepted(&mut self, outcome: &Arc<Outcome>) {
        self.inner.accepted(outcome).await;
    }

    fn runs_here(&mut self) {
        self.inner.runs_here();
    }

    async fn forward(&mut self, to: InstanceId) -> Result<Reply, ForwardError> {
        self.inner.forward(to).await
    }

    async fn flush(&mut self) {
        let is_due = |run: &RunLog| run.is_urgent() || run.until_due() == Some(Duration::ZERO);
        if self.run.as_deref().is_some_and(is_due) {
            Box::pin(self.store()).await;
        }
        self.inner.flush().await;
    }

    fn wants_content(&self) -> bool {
        self.run.is_some() || self.inner.wants_content()
    }

    fn keep_alive_interval(&self) -> Option<Duration> {
        let own = self.run.as_ref().and_then(|run| run.until_due());
        let inner = self.inner.keep_alive_interval();
        match (own, inner) {
            (Some(own), Some(inner)) => Some(own.min(inner)),
            (own, inner) => own.or(inner),
        }
    }

    async fn keep_alive(&mut self) -> Listener {
        if self.run.as_ref().is_some_and(|run| run.until_due() == Some(Duration::ZERO)) {
            Box::pin(self.store()).await;
            return Listener::Connected;
        }
        if self.inner.keep_alive_interval().is_some_and(|interval| interval.is_zero()) {
            return self.inner.keep_alive().await;
        }
        Listener::Connected
    }

    fn logged(&mut self) {
        self.inner.logged();
    }

    fn log_failed(&mut self) {
        self.inner.log_failed();
    }

    fn logged_result(&mut self, body: Bytes) {
        self.inner.logged_result(body);
    }
}
