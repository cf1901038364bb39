//! The log of one call: holds events back for a moment, appends them, and hands them on once they are stored.
//!
//! At most one append is on its way, except at the end, so that the order of events is that of the call. The first piece of
//! an answer is appended at once, and then one batch every [`INTERVAL`] at most.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::value::RawValue;
use tokio::sync::oneshot;
use tokio::time::Instant;
use uuid::Uuid;

use super::coalescer::{Coalescer, MAX_COALESCED};
use super::codec::{Encoder, NewEvent, decode, redacted};
use super::event::{Batch, Event, EventType, FrameHint, MAX_EVENTS};
use super::frame_counter::FrameCounter;
use super::log::AgentLog;
use super::mapping::ArtifactKind;
use super::records::RecordPart;
use super::run_record::{RunEnd, RunRecord, end_type, now};
use super::sessions::history;
use super::sessions::projector::{SessionRef, project_later};
use super::store::{AppendError, LogKey, LogUnavailable, NewBatch};
use crate::a2a::model::{Part, TaskState};
use crate::action::progress::{ProgressEvent, RunStart};
use crate::background::OnPanic;
use crate::caller::Caller;
use crate::json;
use crate::memory::MemoryCharge;
use crate::offload;
use crate::reply::{Reply, for_storage};
use crate::state::run_link::{LiveRunLink, RunLink};

/// Minimum time between two appends of pieces of an answer.
const INTERVAL: Duration = Duration::from_millis(50);
/// Pieces that are held back.
const MAX_PIECES: usize = 256;
/// How many bytes encoding takes for each byte that is held: events, batches, and what is decoded of them.
const ENCODED: usize = 4;
/// How long the end of a call may take to be stored.
const END_TIMEOUT: Duration = Duration::from_secs(2);

/// Progress that is encoded together.
#[derive(Debug)]
struct Piece {
    events: Vec<ProgressEvent>,
    /// For a state: whether it differs from the one before.
    is_change: bool,
}

/// The first append of a call.
#[derive(Debug, Clone, Copy)]
struct FirstAppend {
    is_first_of_session: bool,
}

/// A batch that is ready to be appended.
struct ReadyBatch {
    first_n: u64,
    body: Bytes,
    is_transient: bool,
}

#[derive(Debug)]
pub(crate) struct RunLog {
    pub(super) agent: AgentLog,
    caller: Caller,
    key: LogKey,
    link: Arc<LiveRunLink>,
    next_n: u64,
    frames: FrameCounter,
    /// The result of the first append, until it is known.
    first: Option<oneshot::Receiver<Result<FirstAppend, LogUnavailable>>>,
    /// Whether the call has begun its session.
    is_first_of_session: bool,
    coalescer: Coalescer,
    pieces: Vec<Piece>,
    held_bytes: usize,
    /// Whether something is held that does not wait for [`INTERVAL`].
    is_urgent: bool,
    last_delta: Option<Instant>,
    last_state: Option<TaskState>,
    has_failed: bool,
    /// For what is being encoded.
    charge: Option<MemoryCharge>,
}

/// How a run continues in the log.
#[derive(Debug)]
pub(super) struct RunPosition {
    pub next_n: u64,
    pub frames: FrameCounter,
    pub last_state: Option<TaskState>,
}

impl RunPosition {
    pub(super) fn new(next_n: u64) -> Self {
        Self { next_n, frames: FrameCounter::new(), last_state: None }
    }
}

/// What becomes of a call at its end.
#[derive(Debug)]
pub(crate) struct LoggedEnd {
    /// Progress that was still held.
    pub progress: Vec<ProgressEvent>,
    /// The reply as it is stored, if it is what the caller gets.
    pub result: Option<Bytes>,
    pub has_failed: bool,
}

impl RunLog {
    pub(super) fn new(agent: AgentLog, caller: &Caller, link: RunLink, position: RunPosition) -> Self {
        let key = match &link.session {
            Some(session) => LogKey::session(caller, session),
            None => LogKey::run(caller, link.run),
        };
        Self {
            agent,
            caller: caller.clone(),
            key,
            link: Arc::new(LiveRunLink::new(link)),
            next_n: position.next_n,
            frames: position.frames,
            first: None,
            is_first_of_session: false,
            coalescer: Coalescer::default(),
            pieces: Vec::new(),
            held_bytes: 0,
            is_urgent: false,
            last_delta: None,
            last_state: position.last_state,
            has_failed: false,
            charge: None,
        }
    }

    pub(crate) fn link(&self) -> &Arc<LiveRunLink> {
        &self.link
    }

    pub(super) fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Sends the first events of a call, and does not wait. If the session may be new, its first event goes along with
    /// them: the store decides whether it is.
    pub(super) fn send_first(&mut self, events: Vec<NewEvent>, start: &RunStart<'_>) {
        let record = (self.link.call == 0).then(|| RunRecord::started(&self.agent, &self.link, start));
        let may_be_new =
            self.link.call == 0 && self.link.session.is_some() && !self.agent.log.is_known(&self.key);
        let created = may_be_new.then(|| {
            let agent = &self.agent.agent;
            NewEvent::new(
                EventType::SessionCreated,
                &serde_json::json!({ "id": self.link.session, "agent": agent }),
            )
        });
        let (with_session, without) = {
            let first_n = self.next_n;
            let numbered = self.number(events, first_n + 1);
            self.next_n = first_n + 1 + numbered.len() as u64;
            let without = self.encode(&numbered);
            let with_session = created.map(|created| {
                let mut all = self.number(vec![created], first_n);
                all.extend(numbered);
                self.encode(&all)
            });
            (with_session.map(|body| (first_n, body)), (first_n + 1, without))
        };
        let (sender, receiver) = oneshot::channel();
        self.first = Some(receiver);
        let (log, key, link) = (Arc::clone(&self.agent.log), self.key.clone(), Arc::clone(&self.link));
        let session = self.session();
        self.agent.log.tasks.spawn("event log", OnPanic::Log, async move {
            let append = async |(n, body): (u64, Bytes), expects_first| {
                let run = link.run;
                let id = batch_id(run, n);
                let batch =
                    NewBatch { key: &key, id, run: Some(run), body, is_transient: false, expects_first };
                log.store.append(batch).await
            };
            let mut is_first_of_session = false;
            let appended = match with_session {
                Some(first) => match append(first, true).await {
                    Err(AppendError::Exists) => append(without, false).await,
                    appended => {
                        is_first_of_session = true;
                        appended
                    }
                },
                None => append(without, false).await,
            };
            let appended = appended.map_err(|_| LogUnavailable);
            if let Ok(sequence) = appended {
                link.stored(sequence);
                log.set_known(&key);
            }
            let is_stored = appended.is_ok();
            // The call may have ended.
            let _ = sender.send(appended.map(|_| FirstAppend { is_first_of_session }));
            let Some(record) = record.filter(|_| is_stored) else { return };
            let record = json::to_bytes(&record);
            match session {
                Some(session) => {
                    // Others find the run by its id. If the session was folded meanwhile, its record is there.
                    let of_run = session.record(RecordPart::Run(link.run));
                    let _ = log.store.write_record(&of_run, record, 0).await;
                    project_later(&log, session);
                }
                None => drop(log.store.put_run(&key, link.run, record).await),
            }
        });
    }

    /// Waits until the first events are stored.
    pub(super) async fn first_stored(&mut self) -> Result<(), LogUnavailable> {
        let Some(first) = self.first.take() else { return Ok(()) };
        match first.await {
            Ok(Ok(FirstAppend { is_first_of_session })) => {
                self.is_first_of_session = is_first_of_session;
                Ok(())
            }
            Ok(Err(_)) | Err(_) => {
                self.fail();
                Err(LogUnavailable)
            }
        }
    }

    pub(super) fn fail(&mut self) {
        if !std::mem::replace(&mut self.has_failed, true) {
            self.agent.log.count_failure(&self.agent.agent);
        }
    }

    /// Holds an event until it is [stored](Self::store).
    pub(super) async fn hold(&mut self, mut event: ProgressEvent) {
        if let ProgressEvent::Artifact { update, .. } = &mut event {
            if update.artifact.parts.iter().any(|part| matches!(part, Part::File(_))) {
                self.agent.replies.reference_files(update).await;
            }
            let kind = self.agent.rules.kind(update.artifact.name.as_deref());
            self.is_urgent |= kind == Some(ArtifactKind::Event(EventType::AgentToolResult));
        }
        match event {
            ProgressEvent::Task { .. } => {
                self.is_urgent = true;
                self.close_piece();
                self.push(vec![event], false);
            }
            ProgressEvent::State { ref state, .. } => {
                let is_change = self.last_state.as_ref() != Some(state);
                if is_change {
                    self.last_state = Some(state.clone());
                    self.is_urgent = true;
                }
                self.close_piece();
                self.push(vec![event], is_change);
            }
            ProgressEvent::Artifact { .. } | ProgressEvent::Response(_) => {
                let Some(event) = self.coalescer.add(event) else { return };
                self.close_piece();
                if let Some(event) = self.coalescer.add(event) {
                    self.push(vec![event], false);
                }
            }
        }
    }

    /// Begins another piece.
    fn close_piece(&mut self) {
        let size = self.coalescer.size();
        let events: Vec<_> = self.coalescer.take().collect();
        if !events.is_empty() {
            self.held_bytes += size;
            self.pieces.push(Piece { events, is_change: false });
        }
    }

    fn push(&mut self, events: Vec<ProgressEvent>, is_change: bool) {
        self.held_bytes += events.iter().map(size).sum::<usize>();
        self.pieces.push(Piece { events, is_change });
    }

    fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.coalescer.is_empty()
    }

    /// How long what is held may wait; `None` if nothing is held.
    pub(super) fn until_due(&self) -> Option<Duration> {
        (!self.is_empty()).then(|| match self.last_delta {
            _ if self.held_bytes + self.coalescer.size() >= MAX_COALESCED => Duration::ZERO,
            _ if self.pieces.len() >= MAX_PIECES => Duration::ZERO,
            Some(last) => INTERVAL.saturating_sub(last.elapsed()),
            None => Duration::ZERO,
        })
    }

    /// Whether what is held goes out before the call waits for the agent.
    pub(super) fn is_urgent(&self) -> bool {
        self.is_urgent
    }

    /// Appends what is held, and returns it as it was stored. If the log fails, it is returned all the same.
    pub(super) async fn store(&mut self) -> Vec<ProgressEvent> {
        let (batches, progress) = self.encode_held().await;
        if self.has_failed || self.first_stored().await.is_err() {
            return progress;
        }
        for batch in batches {
            if self.append(batch).await.is_err() {
                self.fail();
                break;
            }
        }
        progress
    }

    /// Encodes what is held, which may take long. The charge for it lasts until the next time.
    async fn encode_held(&mut self) -> (Vec<ReadyBatch>, Vec<ProgressEvent>) {
        self.close_piece();
        let (agent, size) = (Arc::clone(&self.agent.agent), self.held_bytes);
        if self.agent.memory.cover(&mut self.charge, ENCODED * size).is_err() {
            // What cannot be encoded reaches the caller all the same.
            self.fail();
            let pieces = std::mem::take(&mut self.pieces);
            (self.held_bytes, self.is_urgent) = (0, false);
            return (Vec::new(), pieces.into_iter().flat_map(|piece| piece.events).collect());
        }
        offload::run(&agent, size, || self.take_batches()).await
    }

    fn take_batches(&mut self) -> (Vec<ReadyBatch>, Vec<ProgressEvent>) {
        self.close_piece();
        let pieces = std::mem::take(&mut self.pieces);
        (self.held_bytes, self.is_urgent) = (0, false);
        let room = self.room();
        let encoder = Encoder { rules: &self.agent.rules, secrets: &self.agent.secrets, room };
        let mut events: Vec<NewEvent> = Vec::new();
        for Piece { events: piece, is_change } in pieces {
            events.extend(encoder.encode(piece, is_change));
        }
        if events.iter().any(|event| event.is_transient) {
            self.last_delta = Some(Instant::now());
        }
        let (mut batches, mut progress) = (Vec::new(), Vec::new());
        let mut events = events.into_iter().peekable();
        while let Some(first) = events.next() {
            let (is_transient, mut size) = (first.is_transient, first.size());
            let mut batch = vec![first];
            while let Some(next) = events.next_if(|next| {
                next.is_transient == is_transient && size + next.size() <= room && batch.len() < MAX_EVENTS
            }) {
                size += next.size();
                batch.push(next);
            }
            let (batch, decoded) = self.make_batch(batch, is_transient);
            batches.push(batch);
            progress.extend(decoded);
        }
        (batches, progress)
    }

    /// Numbers and encodes events, and counts their frames.
    fn make_batch(&mut self, events: Vec<NewEvent>, is_transient: bool) -> (ReadyBatch, Vec<ProgressEvent>) {
        let first_n = self.next_n;
        let events = self.number(events, first_n);
        self.next_n += events.len() as u64;
        let body = self.encode(&events);
        let mut progress = Vec::new();
        for event in &events {
            let decoded = decode(event);
            self.frames.add(&decoded);
            progress.extend(decoded);
        }
        (ReadyBatch { first_n, body, is_transient }, progress)
    }

    fn number(&self, events: Vec<NewEvent>, first_n: u64) -> Vec<Event> {
        let at = now();
        let event = |(n, event): (u64, NewEvent)| {
            let NewEvent { kind, payload, frame, .. } = event;
            Event { n, kind, at: at.clone(), payload, frame }
        };
        (first_n..).zip(events).map(event).collect()
    }

    fn encode(&self, events: &[Event]) -> Bytes {
        let LiveRunLink { session, run, call, .. } = &*self.link;
        Batch::encode_parts(session.as_ref(), Some(*run), *call, self.frames.counts, events)
    }

    /// Maximum bytes of an event.
    fn room(&self) -> usize {
        self.agent.log.store.max_batch() / 4 * 3
    }

    async fn append(&self, batch: ReadyBatch) -> Result<(), LogUnavailable> {
        let ReadyBatch { first_n, body, is_transient } = batch;
        let run = self.link.run;
        let id = batch_id(run, first_n);
        let batch = NewBatch { key: &self.key, id, run: Some(run), body, is_transient, expects_first: false };
        let appended = self.agent.log.store.append(batch).await;
        let sequence = appended.map_err(|_| LogUnavailable)?;
        self.link.stored(sequence);
        Ok(())
    }

    /// Stores the end of the call, with everything that is still held.
    pub(crate) async fn end(&mut self, reply: &Reply) -> LoggedEnd {
        let (mut batches, progress) = self.encode_held().await;
        if self.has_failed || self.first_stored().await.is_err() {
            return LoggedEnd { progress, result: None, has_failed: true };
        }
        let is_private = matches!(reply, Err(error) if error.is_private);
        let stored = if is_private { &for_storage(reply.clone()) } else { reply };
        let body = self.agent.replies.encode(stored).await;
        let body = String::from_utf8(body.into()).ok().and_then(|body| RawValue::from_string(body).ok());
        let Some(body) = body else {
            self.fail();
            return LoggedEnd { progress, result: None, has_failed: true };
        };
        let (agent, size) = (&self.agent, body.get().len());
        let payload = offload::run(&agent.agent, size, || redacted(&body, &agent.secrets)).await;
        let result: Bytes = payload.get().to_owned().into();
        let end =
            NewEvent { kind: end_type(reply), payload, frame: FrameHint::default(), is_transient: false };
        batches.push(self.make_batch(vec![end], false).0);
        // The first poll of each sends it, so they arrive in order.
        let appends = futures_util::future::try_join_all(batches.into_iter().map(|batch| self.append(batch)));
        if !matches!(tokio::time::timeout(END_TIMEOUT, appends).await, Ok(Ok(_))) {
            self.fail();
        }
        self.record_end(reply);
        LoggedEnd { progress, result: Some(result).filter(|_| !is_private), has_failed: self.has_failed }
    }

    /// The session of the call, if it has one.
    fn session(&self) -> Option<SessionRef> {
        self.link.session.as_ref().map(|id| SessionRef::new(&self.caller, id))
    }

    /// What was said in the session before, if the agent does not know it. `has_logged_message` says that the log has the
    /// message of this call already.
    pub(super) async fn history(&mut self, has_logged_message: bool) -> Option<Part> {
        let session = self.session().filter(|_| self.link.call == 0)?;
        let (log, agent) = (Arc::clone(&self.agent.log), Arc::clone(&self.agent.agent));
        if log.is_known_agent(&self.key, &agent) || self.first_stored().await.is_err() {
            return None;
        }
        let history = match self.is_first_of_session {
            true => Ok(None),
            false => history::read(&log, &session, (&agent, self.link.run), has_logged_message).await,
        };
        match history {
            Ok(history) => {
                log.set_known_agent(&self.key, &agent);
                history
            }
            Err(LogUnavailable) => {
                tracing::warn!(%agent, "cannot read the session; the agent does not get what was said before");
                None
            }
        }
    }

    /// Writes the end of the run behind the call.
    fn record_end(&self, reply: &Reply) {
        if let Some(session) = self.session() {
            return project_later(&self.agent.log, session);
        }
        let (end, events) = (RunEnd::new(reply), self.next_n);
        let (log, key, run) = (Arc::clone(&self.agent.log), self.key.clone(), self.link.run);
        self.agent.log.tasks.spawn("event log", OnPanic::Log, async move {
            let Ok(Some(record)) = log.store.find_run(&key.owner, run).await else { return };
            let Ok(record) = serde_json::from_slice::<RunRecord>(&record) else { return };
            let record = record.ended(end, events);
            let _ = log.store.put_run(&key, run, json::to_bytes(&record)).await;
        });
    }
}

/// The id under which the store recognises a repeated batch: the run, and the number of its first event.
fn batch_id(run: Uuid, first_n: u64) -> String {
    format!("{run}:{first_n}")
}

/// Approximate bytes of progress.
fn size(event: &ProgressEvent) -> usize {
    match event {
        ProgressEvent::Task { id, context_id } => id.len() + context_id.as_ref().map_or(0, String::len),
        ProgressEvent::State { message, .. } => message.len() + 64,
        ProgressEvent::Artifact { update, .. } => update.artifact.allocated(),
        ProgressEvent::Response(text) => text.len(),
    }
}
