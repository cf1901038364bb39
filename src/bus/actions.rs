//! The front door for NATS actions: a message in, a reply message out, or frames.

use crate::text::error_chain;
use std::sync::Arc;

use async_nats::{Client, Message, Subject};

use super::catalog::{self, Action, BuiltInAction};
use super::encoded_reply::EncodedReply;
use super::frames::FrameWriter;
use super::headers::{self, Headers};
use super::service::{self, Accounting, Handler};
use crate::action::progress::{Frame, Progress};
use crate::action::request::ReplyMode;
use crate::dispatch::Dispatcher;
use crate::dispatch::request::{Admission, IdempotencyKey, Input, Operation, Request};
use crate::reply::Reply;
use crate::reply::error::ActionError;
use crate::reply::outcome::Outcome;
use crate::telemetry::spans::Arrival;
use crate::telemetry::trace_context::TraceContext;

/// What an endpoint stands for.
#[derive(Debug, Clone)]
pub(crate) enum Target {
    Skill(Arc<Action>),
    BuiltIn(BuiltInAction),
}

/// The handler of one endpoint.
pub(crate) fn handler(dispatcher: &Arc<Dispatcher>, client: &Client, target: Target) -> Handler {
    let door = Arc::new(Door { dispatcher: Arc::clone(dispatcher), client: client.clone(), target });
    Arc::new(move |request| {
        let message = &request.message;
        let agent = &door.dispatcher.agent().name;
        let subject = message.subject.clone();
        let arrival = Arrival { agent, action: door.target.name(), subject: &subject };
        let trace = headers::trace(message);
        let serving = Arc::clone(&door).serve(request, trace.clone());
        door.dispatcher.spawn(arrival, &trace, serving);
    })
}

#[derive(Debug)]
struct Door {
    dispatcher: Arc<Dispatcher>,
    client: Client,
    target: Target,
}

impl Door {
    async fn serve(self: Arc<Self>, request: service::ServiceRequest, trace: TraceContext) {
        let service::ServiceRequest { message, accounting } = request;
        // The service hands on no request without a reply subject.
        let Some(to) = message.reply.clone() else { return };
        let mut responder = Responder { door: &self, pending: Some((to, accounting)) };
        let mut read = Headers::read(&message, trace);
        if !self.target.runs_the_agent() {
            // Look-ups have one reply, whatever the caller prefers.
            read = read.map(Headers::with_one_reply);
        }
        let reply = match (read, self.operation(&message)) {
            (Ok(_), None) => return responder.send_card().await,
            (Ok(headers), Some(operation)) if headers.options.mode == ReplyMode::Stream => {
                return Box::pin(responder.stream(headers, operation, &message)).await;
            }
            (Ok(headers), Some(operation)) => {
                let request = complete(headers, operation, &message);
                self.dispatcher.call(request, &mut responder).await
            }
            (Err(error), Some(_)) if self.target.runs_the_agent() && headers::wants_stream(&message) => {
                return Box::pin(responder.refuse_stream(error)).await;
            }
            (Err(error), _) => Box::pin(self.dispatcher.refuse(error, &mut responder)).await,
        };
        responder.send(reply).await;
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
    fn card(&self) -> Result<String, ActionError> {
        let agent = self.dispatcher.agent();
        let status = agent.status.borrow();
        match &status.known {
            Some(known) => Ok(catalog::card(&known.card, &known.interface, &agent.config.skills).to_string()),
            None => Err(ActionError::unavailable(&agent.name, status.last_error.as_deref())),
        }
    }
}

fn complete(headers: Headers, operation: Operation, message: &Message) -> Request {
    let key = headers.idempotency_key;
    let idempotency_key = key.map(|key| IdempotencyKey { key, body: message.payload.clone() });
    Request { operation, options: headers.options, idempotency_key, admission: Admission::Try }
}

impl Target {
    /// The name of the action, as on the context.
    fn name(&self) -> &str {
        match self {
            Self::Skill(action) => &action.label,
            Self::BuiltIn(built_in) => built_in.name(),
        }
    }

    fn runs_the_agent(&self) -> bool {
        match self {
            Self::Skill(_) | Self::BuiltIn(BuiltInAction::ProvideRequiredInput) => true,
            Self::BuiltIn(BuiltInAction::CancelTask | BuiltInAction::GetTask | BuiltInAction::Card) => false,
        }
    }
}

/// Sends the one reply of a request, when the call ends or, for a submitted task, when it is accepted.
struct Responder<'a> {
    door: &'a Door,
    pending: Option<(Subject, Accounting)>,
}

impl Responder<'_> {
    async fn send(&mut self, reply: Reply) {
        // A submitted task has its reply when it is accepted.
        if self.pending.is_none() {
            return;
        }
        let encoded = EncodedReply::new(&reply, self.door.client.max_payload(), 0);
        self.publish(encoded).await;
    }

    async fn send_card(&mut self) {
        let max_payload = self.door.client.max_payload();
        let encoded = match self.door.dispatcher.look_up(|| self.door.card()) {
            Ok(card) => EncodedReply::of_document(card.into(), max_payload),
            Err(error) => EncodedReply::new(&Err(error), max_payload, 0),
        };
        self.publish(encoded).await;
    }

    async fn publish(&mut self, encoded: EncodedReply) {
        let Some((to, accounting)) = self.pending.take() else { return };
        let error = encoded.error;
        if let Err(error) = encoded.send(&self.door.client, to).await {
            let agent = &self.door.dispatcher.agent().name;
            tracing::warn!(%agent, error = error_chain(&error), "cannot send a reply");
        }
        accounting.end(error);
    }

    async fn stream(mut self, headers: Headers, operation: Operation, message: &Message) {
        let Some((to, accounting)) = self.pending.take() else { return };
        let mut frames = self.frames(to, Some(&headers));
        let request = complete(headers, operation, message);
        let reply = self.door.dispatcher.call(request, &mut frames).await;
        accounting.end(frames.finish(&reply).await);
    }

    async fn refuse_stream(mut self, error: ActionError) {
        let Some((to, accounting)) = self.pending.take() else { return };
        let mut frames = self.frames(to, None);
        let reply = self.door.dispatcher.refuse(error, &mut frames).await;
        accounting.end(frames.finish(&reply).await);
    }

    fn frames(&self, to: Subject, headers: Option<&Headers>) -> FrameWriter {
        let keepalive = self.door.dispatcher.agent().config.stream_keepalive;
        let form = headers.map(|headers| headers.frames).unwrap_or_default();
        let cancel_on_disconnect = headers.is_some_and(|headers| headers.cancel_on_disconnect);
        FrameWriter::new(self.door.client.clone(), to, keepalive, form, cancel_on_disconnect)
    }
}

impl Progress for Responder<'_> {
    fn listens(&self) -> bool {
        false
    }

    async fn frame(&mut self, _: Frame) {}

    async fn accepted(&mut self, outcome: &Arc<Outcome>) {
        self.send(Ok(Arc::clone(outcome))).await;
    }
}
