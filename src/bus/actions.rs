//! The front door for NATS actions: turns a message into a request, and its reply into a message or frames.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{Message, Subject};
use bytes::Bytes;

use super::attach;
use super::catalog::{self, Action, BuiltInAction};
use super::encoded_reply::{EncodedReply, LoggedReply};
use super::frames::FrameWriter;
use super::headers::{self, Headers};
use super::outbox::Outbox;
use super::peers::{ForwardableRequest, Forwarder};
use super::per_card::PerCard;
use super::service::{Accounting, Handler, ServiceRequest};
use crate::action::progress::{ForwardError, Listener, Progress, ProgressEvent};
use crate::action::request::ReplyMode;
use crate::caller::Caller;
use crate::dispatch::Dispatcher;
use crate::dispatch::arrival::Arrival;
use crate::dispatch::request::{IdempotencyKey, Input, Operation, Request};
use crate::events::selection::FrameSelection;
use crate::reply::Reply;
use crate::reply::error::ActionError;
use crate::reply::outcome::Outcome;
use crate::state::peers::InstanceId;
use crate::telemetry::spans::CallInfo;
use crate::telemetry::trace_context::TraceContext;
use crate::text::error_chain;

/// The action behind an endpoint.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    Skill(Arc<Action>),
    BuiltIn(BuiltInAction),
}

/// The handler of one endpoint.
pub(crate) fn handler(
    dispatcher: &Arc<Dispatcher>,
    outbox: &Outbox,
    instance: &Arc<str>,
    forwarder: &Arc<Forwarder>,
    target: Target,
) -> Handler {
    let action = match &target {
        Target::Skill(action) => Arc::clone(&action.label),
        Target::BuiltIn(built_in) => built_in.name().into(),
    };
    let endpoint = Arc::new(ActionEndpoint {
        dispatcher: Arc::clone(dispatcher),
        action,
        outbox: outbox.clone(),
        instance: Arc::clone(instance),
        forwarder: Arc::clone(forwarder),
        target,
        encoded_card: PerCard::default(),
    });
    Arc::new(move |mut request| {
        let Message { payload, length, .. } = &mut request.message;
        let Some(arrival) = endpoint.dispatcher.arrive(&endpoint.action, *length, payload) else {
            return request.accounting.fail(429, "too many requests at the same time");
        };
        let agent = &endpoint.dispatcher.agent().name;
        let action = &endpoint.action;
        let subject = request.message.subject.clone();
        let call_info = CallInfo { agent, action, subject: &subject };
        let trace = headers::trace(&request.message);
        let serving = Box::pin(Arc::clone(&endpoint).serve(request, arrival, trace.clone()));
        endpoint.dispatcher.spawn(call_info, &trace, serving);
    })
}

#[derive(Debug)]
struct ActionEndpoint {
    dispatcher: Arc<Dispatcher>,
    outbox: Outbox,
    /// The id of the agent's service.
    instance: Arc<str>,
    forwarder: Arc<Forwarder>,
    target: Target,
    /// The name of the action in metrics, spans and the call log.
    action: Arc<str>,
    encoded_card: PerCard<Bytes>,
}

impl ActionEndpoint {
    async fn serve(self: Arc<Self>, request: ServiceRequest, mut arrival: Arrival, trace: TraceContext) {
        let ServiceRequest { message, caller, accounting } = request;
        let caller = caller.inspect(|caller| arrival.identify(caller));
        let headers = caller.and_then(|caller| Headers::read(&message, caller, trace));
        // The service passes on no request without a reply subject.
        let Some(to) = message.reply.clone() else { return };
        let frame_options = match &headers {
            Ok(headers) => (headers.frames, headers.cancel_on_disconnect),
            Err(_) => Default::default(),
        };
        let counting = arrival.sent_bytes().map(|sent| Box::new(self.outbox.counting(Some(sent))));
        let operation = operation(&self.target, &message);
        // A caller that expects frames gets its error as a frame even if the headers are invalid.
        let runs_the_agent = operation.as_ref().is_some_and(Operation::runs_the_agent);
        let wants_frames = runs_the_agent && headers::wants_stream(&message);
        let wants_ack = headers.as_ref().is_ok_and(|headers| {
            runs_the_agent && headers.wants_ack && headers.options.mode == ReplyMode::Final
        });
        let forwardable = match &headers {
            Ok(headers) => self.forwardable(&message, headers),
            Err(_) => None,
        };
        let mut responder = Responder {
            endpoint: &self,
            counting,
            pending: None,
            ack_frames: None,
            forwardable,
            logged: LoggedReply::default(),
        };
        if wants_ack {
            let frames = self.frame_writer(responder.outbox().clone(), to.clone(), Default::default());
            responder.ack_frames = Some(Box::new(frames));
        }
        responder.pending = Some((to, accounting));
        let request = match (headers, operation) {
            (Ok(headers), None) if matches!(self.target, Target::BuiltIn(BuiltInAction::Attach)) => {
                let caller = &headers.options.caller;
                return Box::pin(responder.attach(&message, &mut arrival, caller, headers.frames)).await;
            }
            (Ok(headers), None) => {
                drop(message);
                return responder.send_card(&mut arrival, &headers.options.caller).await;
            }
            (Ok(headers), Some(operation)) => Ok(dispatcher_request(headers, operation, &message)),
            (Err(error), _) => Err(error),
        };
        // From here on only the request holds the body, and nothing holds the headers.
        drop(message);
        if wants_frames {
            return Box::pin(responder.stream(request, &mut arrival, frame_options)).await;
        }
        let reply = match request {
            Ok(request) => self.dispatcher.call(request, &mut arrival, &mut responder).await,
            Err(error) => Box::pin(self.dispatcher.refuse(error, &mut arrival, &mut responder)).await,
        };
        responder.send(reply).await;
    }

    fn frame_writer(
        &self,
        outbox: Outbox,
        to: Subject,
        (selection, cancel_on_disconnect): (FrameSelection, bool),
    ) -> FrameWriter {
        let keep_alive = self.dispatcher.agent().config.stream_keepalive;
        let instance = Arc::clone(&self.instance);
        FrameWriter::new(outbox, to, keep_alive, instance, selection, cancel_on_disconnect)
    }

    /// Keeps the request if another replica may have to run it.
    fn forwardable(&self, message: &Message, headers: &Headers) -> Option<Box<ForwardableRequest>> {
        let action: Arc<str> = match &self.target {
            Target::BuiltIn(BuiltInAction::Card | BuiltInAction::Attach) => return None,
            target if !self.forwarder.may_forward(matches!(target, Target::Skill(_))) => return None,
            Target::Skill(action) => Arc::clone(&action.label),
            Target::BuiltIn(built_in) => built_in.name().into(),
        };
        Some(self.forwarder.keep(action, message, headers))
    }

    /// The agent's card as the bridge uses it, in v1.0 form.
    fn card(&self) -> Result<Bytes, ActionError> {
        let agent = self.dispatcher.agent();
        let status = agent.status.borrow();
        let Some(known) = &status.known else {
            return Err(ActionError::unavailable(&agent.name, status.last_error.as_deref()));
        };
        Ok(self.encoded_card.get_or_make(known, || {
            catalog::card(&known.card, &known.interface, &agent.config.skills).to_string().into()
        }))
    }
}

/// What a message asks for. `None` for the card and for attaching, which are not operations on tasks.
pub(super) fn operation(target: &Target, message: &Message) -> Option<Operation> {
    let body = headers::body(message);
    Some(match target {
        Target::Skill(action) => Operation::Invoke {
            action: Arc::clone(&action.label),
            skill: Arc::clone(&action.skill),
            input: Input::Body(body),
        },
        Target::BuiltIn(BuiltInAction::ProvideRequiredInput) => Operation::Answer(Input::Body(body)),
        Target::BuiltIn(BuiltInAction::CancelTask) => Operation::CancelTask(Input::Body(body)),
        Target::BuiltIn(BuiltInAction::GetTask) => Operation::GetTask(Input::Body(body)),
        Target::BuiltIn(BuiltInAction::Card | BuiltInAction::Attach) => return None,
    })
}

pub(super) fn dispatcher_request(headers: Headers, operation: Operation, message: &Message) -> Request {
    let Headers { mut options, idempotency_key, .. } = headers;
    if !operation.runs_the_agent() {
        // Look-ups have one reply, whatever mode the caller asks for.
        options.mode = ReplyMode::Final;
    }
    let idempotency_key = idempotency_key.map(|key| IdempotencyKey { key, body: message.payload.clone() });
    Request { operation, options, idempotency_key, permit: None }
}

/// Sends the reply of a request: when the call ends or, for a submitted task, when the agent accepts it.
struct Responder<'a> {
    endpoint: &'a ActionEndpoint,
    /// The outbox that counts what it sends, if the call log needs it.
    counting: Option<Box<Outbox>>,
    /// `None` once the reply is sent.
    pending: Option<(Subject, Accounting)>,
    /// For the frames that precede the reply if the caller asks for them (`A2A-Ack`).
    ack_frames: Option<Box<FrameWriter>>,
    /// The request, while another replica may run it.
    forwardable: Option<Box<ForwardableRequest>>,
    logged: LoggedReply,
}

impl Responder<'_> {
    fn outbox(&self) -> &Outbox {
        self.counting.as_deref().unwrap_or(&self.endpoint.outbox)
    }

    async fn send(&mut self, reply: Reply) {
        if self.pending.is_some() {
            let mut logged = std::mem::take(&mut self.logged);
            self.publish(logged.encode(&reply, self.outbox(), 0).await).await;
        }
    }

    async fn send_card(&mut self, arrival: &mut Arrival, caller: &Caller) {
        let max_payload = self.outbox().max_payload();
        let encoded = match self.endpoint.dispatcher.read_card(arrival, caller, || self.endpoint.card()) {
            Ok(card) => EncodedReply::from_document(card, max_payload),
            Err(error) => EncodedReply::new(&Err(error), max_payload, 0),
        };
        self.publish(encoded).await;
    }

    /// Sends the frames of a logged call.
    async fn attach(
        mut self,
        message: &Message,
        arrival: &mut Arrival,
        caller: &Caller,
        selection: FrameSelection,
    ) {
        let Some((to, accounting)) = self.pending.take() else { return };
        // A caller that is gone is noticed, because the call does not need it.
        let frames = self.endpoint.frame_writer(self.outbox().clone(), to, (selection, true));
        let dispatcher = &self.endpoint.dispatcher;
        let error = match dispatcher.admit_attached(arrival, caller) {
            Ok(()) => attach::attach(dispatcher, message, caller, frames).await,
            Err(error) => frames.finish(&Err(error)).await,
        };
        accounting.end(error);
    }

    async fn publish(&mut self, encoded: EncodedReply) {
        let Some((to, accounting)) = self.pending.take() else { return };
        let error = encoded.error;
        if let Err(error) = encoded.send(self.outbox(), to).await {
            let agent = &self.endpoint.dispatcher.agent().name;
            tracing::warn!(%agent, error = error_chain(&error), "cannot send a reply");
        }
        accounting.end(error);
    }

    async fn stream(
        mut self,
        request: Result<Request, ActionError>,
        arrival: &mut Arrival,
        frame_options: (FrameSelection, bool),
    ) {
        let Some((to, accounting)) = self.pending.take() else { return };
        let dispatcher = &self.endpoint.dispatcher;
        let mut frames = self.endpoint.frame_writer(self.outbox().clone(), to, frame_options);
        frames.set_forwardable(self.forwardable.take());
        let reply = match request {
            Ok(request) => dispatcher.call(request, arrival, &mut frames).await,
            Err(error) => dispatcher.refuse(error, arrival, &mut frames).await,
        };
        accounting.end(frames.finish(&reply).await);
    }
}

/// The frames are boxed futures, so that the future of an ordinary call stays small.
impl Progress for Responder<'_> {
    async fn started(&mut self) {
        if let Some(frames) = &mut self.ack_frames {
            Box::pin(frames.started()).await;
        }
    }

    fn wants_content(&self) -> bool {
        false
    }

    async fn report(&mut self, event: ProgressEvent) {
        if let (Some(frames), ProgressEvent::Task { .. } | ProgressEvent::State { .. }) =
            (&mut self.ack_frames, &event)
        {
            Box::pin(frames.report(event)).await;
        }
    }

    fn keep_alive_interval(&self) -> Option<Duration> {
        self.ack_frames.as_ref().and_then(|frames| frames.keep_alive_interval())
    }

    async fn keep_alive(&mut self) -> Listener {
        match &mut self.ack_frames {
            Some(frames) => Box::pin(frames.keep_alive()).await,
            None => Listener::Connected,
        }
    }

    fn logged(&mut self) {
        self.logged.is_logged = true;
    }

    fn log_failed(&mut self) {
        self.logged.has_failed = true;
    }

    fn logged_result(&mut self, body: Bytes) {
        self.logged.result = Some(body);
    }

    fn runs_here(&mut self) {
        self.forwardable = None;
    }

    async fn forward(&mut self, to: InstanceId) -> Result<Reply, ForwardError> {
        match &mut self.forwardable {
            Some(request) => Box::pin(request.run(to, self.ack_frames.as_deref_mut())).await,
            None => Err(ForwardError::NotKept),
        }
    }

    async fn accepted(&mut self, outcome: &Arc<Outcome>) {
        self.send(Ok(Arc::clone(outcome))).await;
    }
}
