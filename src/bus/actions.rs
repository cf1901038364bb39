//! The front door for NATS actions: turns a message into a request, and its reply into a message or frames.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{Message, Subject};
use bytes::Bytes;

use super::catalog::{self, Action, BuiltInAction};
use super::encoded_reply::EncodedReply;
use super::frames::{FrameSelection, FrameWriter};
use super::headers::{self, Headers};
use super::outbox::Outbox;
use super::per_card::PerCard;
use super::service::{Accounting, Handler, ServiceRequest};
use crate::action::progress::{Listener, Progress, ProgressEvent};
use crate::action::request::ReplyMode;
use crate::dispatch::Dispatcher;
use crate::dispatch::arrival::Arrival;
use crate::dispatch::request::{IdempotencyKey, Input, Operation, Request};
use crate::reply::Reply;
use crate::reply::error::ActionError;
use crate::reply::outcome::Outcome;
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
    target: Target,
) -> Handler {
    let endpoint = Arc::new(ActionEndpoint {
        dispatcher: Arc::clone(dispatcher),
        outbox: outbox.clone(),
        instance: Arc::clone(instance),
        target,
        encoded_card: PerCard::default(),
    });
    Arc::new(move |mut request| {
        let Message { payload, length, .. } = &mut request.message;
        let Some(arrival) = endpoint.dispatcher.arrive(*length, payload) else {
            return request.accounting.fail(429, "too many requests at the same time");
        };
        let agent = &endpoint.dispatcher.agent().name;
        let action = match &endpoint.target {
            Target::Skill(action) => &action.label,
            Target::BuiltIn(built_in) => built_in.name(),
        };
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
    target: Target,
    encoded_card: PerCard<Bytes>,
}

impl ActionEndpoint {
    async fn serve(self: Arc<Self>, request: ServiceRequest, mut arrival: Arrival, trace: TraceContext) {
        let ServiceRequest { message, accounting } = request;
        // The service passes on no request without a reply subject.
        let Some(to) = message.reply.clone() else { return };
        let headers = Headers::read(&message, trace);
        let frame_options = match &headers {
            Ok(headers) => (headers.frames, headers.cancel_on_disconnect),
            Err(_) => Default::default(),
        };
        let operation = self.operation(&message);
        // A caller that expects frames gets its error as a frame even if the headers are invalid.
        let runs_the_agent = operation.as_ref().is_some_and(Operation::runs_the_agent);
        let wants_frames = runs_the_agent && headers::wants_stream(&message);
        let wants_ack = headers.as_ref().is_ok_and(|headers| {
            runs_the_agent && headers.wants_ack && headers.options.mode == ReplyMode::Final
        });
        let ack_frames = wants_ack.then(|| Box::new(self.frame_writer(to.clone(), Default::default())));
        let mut responder = Responder { endpoint: &self, pending: Some((to, accounting)), ack_frames };
        let request = match (headers, operation) {
            (Ok(_), None) => {
                drop(message);
                return responder.send_card(&mut arrival).await;
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
            Err(error) => Box::pin(self.dispatcher.refuse(error, &mut responder)).await,
        };
        responder.send(reply).await;
    }

    fn frame_writer(
        &self,
        to: Subject,
        (selection, cancel_on_disconnect): (FrameSelection, bool),
    ) -> FrameWriter {
        let keep_alive = self.dispatcher.agent().config.stream_keepalive;
        let instance = Arc::clone(&self.instance);
        FrameWriter::new(self.outbox.clone(), to, keep_alive, instance, selection, cancel_on_disconnect)
    }

    /// `None` for the card, which is not an operation on tasks.
    fn operation(&self, message: &Message) -> Option<Operation> {
        let body = headers::body(message);
        Some(match &self.target {
            Target::Skill(action) => Operation::Invoke {
                action: Arc::clone(&action.label),
                skill: Arc::clone(&action.skill),
                input: Input::Body(body),
            },
            Target::BuiltIn(BuiltInAction::ProvideRequiredInput) => Operation::Answer(Input::Body(body)),
            Target::BuiltIn(BuiltInAction::CancelTask) => Operation::CancelTask(Input::Body(body)),
            Target::BuiltIn(BuiltInAction::GetTask) => Operation::GetTask(Input::Body(body)),
            Target::BuiltIn(BuiltInAction::Card) => return None,
        })
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

fn dispatcher_request(headers: Headers, operation: Operation, message: &Message) -> Request {
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
    /// `None` once the reply is sent.
    pending: Option<(Subject, Accounting)>,
    /// For the frames that precede the reply if the caller asks for them (`A2A-Ack`).
    ack_frames: Option<Box<FrameWriter>>,
}

impl Responder<'_> {
    async fn send(&mut self, reply: Reply) {
        if self.pending.is_some() {
            self.publish(EncodedReply::prepare(&reply, &self.endpoint.outbox, 0).await).await;
        }
    }

    async fn send_card(&mut self, arrival: &mut Arrival) {
        let max_payload = self.endpoint.outbox.max_payload();
        let encoded = match self.endpoint.dispatcher.read_card(arrival, || self.endpoint.card()) {
            Ok(card) => EncodedReply::from_document(card, max_payload),
            Err(error) => EncodedReply::new(&Err(error), max_payload, 0),
        };
        self.publish(encoded).await;
    }

    async fn publish(&mut self, encoded: EncodedReply) {
        let Some((to, accounting)) = self.pending.take() else { return };
        let error = encoded.error;
        if let Err(error) = encoded.send(&self.endpoint.outbox, to).await {
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
        let mut frames = self.endpoint.frame_writer(to, frame_options);
        let reply = match request {
            Ok(request) => dispatcher.call(request, arrival, &mut frames).await,
            Err(error) => dispatcher.refuse(error, &mut frames).await,
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
        if let (Some(frames), ProgressEvent::Task { .. }) = (&mut self.ack_frames, &event) {
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

    async fn accepted(&mut self, outcome: &Arc<Outcome>) {
        self.send(Ok(Arc::clone(outcome))).await;
    }
}
