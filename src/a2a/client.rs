//! Calls to one agent over whichever dialect its card gave: send, get, cancel.
//!
//! A client has credentials only if its address is one that the settings trust (see `a2a::address`), and sends
//! them nowhere else: it follows no redirect and asks no proxy. It sends a message again only if the agent's answer
//! proves that nothing ran (see [`super::retry`]). Once a request may have reached the agent, an error says so ([`ClientError::is_delivered`]).

mod body;
mod error;

use crate::telemetry::trace_context::TraceContext;
use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use reqwest::StatusCode;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use url::Url;

use super::auth::Credentials;
use super::card::Interface;
use super::choose::DialectFallback;
use super::dialect::{Dialect, HttpCall, OutgoingMessage};
use super::http::{Endpoint, HttpClient, Response};
use super::model::{Answer, Task};
use super::retry::{Retries, Retry};
use super::stream::EventStream;
pub(super) use body::Body;
pub(crate) use error::{ClientError, Origin, code};

/// Room for the headers that nearly all requests have, those of the HTTP client included.
const HEADERS: usize = 8;

/// The way to one agent.
#[derive(Debug, Clone)]
pub struct Client {
    endpoint: Endpoint,
    dialect: Dialect,
    tenant: Option<String>,
    credentials: Credentials,
    max_response: u64,
    second_thoughts: Option<DialectFallback>,
    // Whether the agent has ever answered in this wire.
    is_confirmed: Arc<AtomicBool>,
}

impl Client {
    /// `credentials` go to the interface's address and nowhere else.
    pub fn new(
        http: &HttpClient,
        interface: &Interface,
        credentials: Credentials,
        max_response: u64,
    ) -> Self {
        Self {
            endpoint: Endpoint::new(interface.url.clone(), http),
            dialect: interface.dialect,
            tenant: interface.tenant.clone(),
            credentials,
            max_response,
            second_thoughts: None,
            is_confirmed: Arc::new(AtomicBool::new(interface.is_confirmed)),
        }
    }

    /// The same client, which looks for another wire when the agent refuses this one.
    pub fn with_fallback(mut self, second_thoughts: DialectFallback) -> Self {
        self.second_thoughts = Some(second_thoughts);
        self
    }

    /// The wire that is spoken.
    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    pub fn endpoint(&self) -> &Url {
        self.endpoint.url()
    }

    /// Sends a message and waits until the agent answers.
    pub async fn send(
        &self,
        message: &OutgoingMessage<'_>,
        trace: &TraceContext,
    ) -> Result<Answer, ClientError> {
        let error = match self.send_once(message, trace).await {
            Err(error) => error,
            sent => return sent,
        };
        let Some(proof) = Retry::on_another_wire(&error, Some(self.dialect)) else {
            self.reconsider(&error).await;
            return Err(error);
        };
        let Some(other) = Box::pin(self.on_another_wire()).await else {
            return Err(error);
        };
        message.retries.record(proof);
        match Box::pin(other.send_once(message, trace)).await {
            // That was not it either, so the first error is the one that says something.
            Err(later) if later.is_wrong_wire() => Err(error),
            sent => sent,
        }
    }

    /// Asks what became of a task.
    pub async fn get(&self, task_id: &str, trace: &TraceContext) -> Result<Task, ClientError> {
        match self.get_once(task_id, trace).await {
            Err(error) if error.is_wrong_wire() => match self.on_the_new_wire() {
                Some(other) => Box::pin(other.get_once(task_id, trace)).await,
                None => Err(error),
            },
            result => result,
        }
    }

    /// Asks to cancel a task.
    pub async fn cancel(&self, task_id: &str, trace: &TraceContext) -> Result<Task, ClientError> {
        match self.cancel_once(task_id, trace).await {
            Err(error) if error.is_wrong_wire() => match self.on_the_new_wire() {
                Some(other) => Box::pin(other.cancel_once(task_id, trace)).await,
                None => Err(error),
            },
            result => result,
        }
    }

    /// Sends a message and takes the events of its answer as they come.
    pub async fn stream(
        &self,
        message: &OutgoingMessage<'_>,
        trace: &TraceContext,
    ) -> Result<EventStream, ClientError> {
        let opened = self.events(self.dialect.stream(message), trace, Some(message.retries)).await;
        if let Err(error) = &opened {
            self.reconsider(error).await;
        }
        opened
    }

    /// Looks for another wire after an error that may mean that this is the wrong one, but proves nothing: the
    /// message is not sent again, and the next one may go elsewhere.
    async fn reconsider(&self, error: &ClientError) {
        if error.is_wrong_address() && !self.is_confirmed.load(Ordering::Relaxed) {
            let _ = Box::pin(self.on_another_wire()).await;
        }
    }

    /// Takes the events of a task that is under way.
    pub async fn subscribe(&self, task_id: &str, trace: &TraceContext) -> Result<EventStream, ClientError> {
        self.events(self.dialect.subscribe(task_id), trace, None).await
    }

    async fn events(
        &self,
        call: HttpCall,
        trace: &TraceContext,
        retries: Option<&Retries>,
    ) -> Result<EventStream, ClientError> {
        let response = self.exchange(call, "text/event-stream, application/json", trace, retries).await?;
        if response.status().is_success() {
            let events = EventStream::open(response, self.dialect, self.max_response).await;
            return self.noted(events);
        }
        let body = Body::read(response, self.max_response).await?;
        self.noted(Err(body
            .check()
            .err()
            .unwrap_or_else(|| unreachable!("an error status is never let pass"))))
    }

    /// Remembers whether the agent has answered in this wire.
    fn noted<T>(&self, result: Result<T, ClientError>) -> Result<T, ClientError> {
        let is_answer = match &result {
            Ok(_) => true,
            Err(error) => error.rpc_code().is_some() && !error.is_wrong_wire(),
        };
        if is_answer && !self.is_confirmed.load(Ordering::Relaxed) {
            self.is_confirmed.store(true, Ordering::Relaxed);
        }
        result
    }

    async fn cancel_once(&self, task_id: &str, trace: &TraceContext) -> Result<Task, ClientError> {
        let body = self.call(self.dialect.cancel(task_id), trace, None).await?;
        self.noted(self.dialect.read_task(&body.bytes).map_err(|problem| body.explain(problem)))
    }

    async fn send_once(
        &self,
        message: &OutgoingMessage<'_>,
        trace: &TraceContext,
    ) -> Result<Answer, ClientError> {
        let body = self.call(self.dialect.send(message), trace, Some(message.retries)).await?;
        self.noted(self.dialect.read_answer(&body.bytes).map_err(|problem| body.explain(problem)))
    }

    pub(super) async fn get_once(&self, task_id: &str, trace: &TraceContext) -> Result<Task, ClientError> {
        let body = self.call(self.dialect.get(task_id), trace, None).await?;
        self.noted(self.dialect.read_task(&body.bytes).map_err(|problem| body.explain(problem)))
    }

    /// Makes a call for the sake of the error that it gives.
    pub(super) async fn call_once(&self, call: HttpCall, trace: &TraceContext) -> Result<(), ClientError> {
        let body = self.call(call, trace, None).await?;
        match self.dialect.read_answer(&body.bytes) {
            Ok(_) => Ok(()),
            Err(problem) => Err(body.explain(problem)),
        }
    }

    /// A client for another wire that the agent speaks, after it has refused this one.
    pub(super) async fn on_another_wire(&self) -> Option<Self> {
        let thoughts = self.second_thoughts.as_ref()?;
        let other = thoughts.chooser.again(&thoughts.card, &self.interface()).await?;
        thoughts.changed.notify_one();
        thoughts.chooser.client(&thoughts.card, &other).ok()
    }

    /// A client for the wire that was found since this one was made. An agent may lack a method to
    /// look or to cancel, so that alone is no reason to search for a wire.
    fn on_the_new_wire(&self) -> Option<Self> {
        let DialectFallback { chooser, card, .. } = self.second_thoughts.as_ref()?;
        let other = chooser.changed_from(card, &self.interface())?;
        chooser.client(card, &other).ok()
    }

    fn interface(&self) -> Interface {
        Interface {
            url: self.endpoint().clone(),
            dialect: self.dialect,
            tenant: self.tenant.clone(),
            reason: String::new(),
            is_confirmed: self.is_confirmed.load(Ordering::Relaxed),
        }
    }

    /// Sends a call with the credentials that are at hand, which `authorization` remembers.
    async fn send_call(
        &self,
        call: &HttpCall,
        accept: &'static str,
        trace: &TraceContext,
        authorization: &mut Option<HeaderValue>,
    ) -> Result<Response, ClientError> {
        let call = match &self.tenant {
            Some(tenant) => Cow::Owned(call.clone().for_tenant(tenant)),
            None => Cow::Borrowed(call),
        };
        let mut headers = HeaderMap::with_capacity(HEADERS);
        let mut url = None;
        if !call.path.is_empty()
            && let Ok(mut segments) = url.insert(self.endpoint().clone()).path_segments_mut()
        {
            segments.pop_if_empty().extend(&call.path);
        }
        self.credentials.put_into(&mut headers);
        if self.credentials.are_in_url() {
            self.credentials.put_into_url(url.get_or_insert_with(|| self.endpoint().clone()));
        }
        headers.insert(ACCEPT, HeaderValue::from_static(accept));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(call.content_type));
        if let Some(version) = self.dialect.version_header() {
            headers.insert(HeaderName::from_static("a2a-version"), HeaderValue::from_static(version));
        }
        if let Some(parent) = &trace.parent {
            headers.insert(HeaderName::from_static("traceparent"), parent.clone());
            if let Some(state) = &trace.state {
                headers.insert(HeaderName::from_static("tracestate"), state.clone());
            }
        }
        *authorization = headers.get(AUTHORIZATION).cloned();
        self.endpoint.send(call.method.clone(), url, headers, call.body()).await
    }

    /// Sends a call. It goes out a second time only after a status which says that the request was not applied:
    /// those of [`Retry::after_status`], and 405 for GET on a subscription. `retries` records it for a message.
    pub(super) async fn exchange(
        &self,
        mut call: HttpCall,
        accept: &'static str,
        trace: &TraceContext,
        retries: Option<&Retries>,
    ) -> Result<Response, ClientError> {
        self.credentials.ready().await.map_err(ClientError::Token)?;
        let mut sent = None;
        let response = self.send_call(&call, accept, trace, &mut sent).await?;
        let proof = Retry::after_status(response.status());
        let is_again = match proof {
            Some(Retry::TokenRenewed) => self.credentials.renew(sent.as_ref()).await,
            Some(Retry::MediaType) => call.in_plain_json(),
            _ => response.status() == StatusCode::METHOD_NOT_ALLOWED && call.subscribe_with_post(),
        };
        if !is_again {
            return Ok(response);
        }
        if let (Some(retries), Some(proof)) = (retries, proof) {
            retries.record(proof);
        }
        drop(response);
        Box::pin(self.send_call(&call, accept, trace, &mut sent)).await
    }

    async fn call(
        &self,
        call: HttpCall,
        trace: &TraceContext,
        retries: Option<&Retries>,
    ) -> Result<Body, ClientError> {
        let accept = if call.content_type == "application/json" {
            "application/json"
        } else {
            "application/a2a+json, application/json"
        };
        let response = self.exchange(call, accept, trace, retries).await?;
        let body = Body::read(response, self.max_response).await?;
        body.check()
    }
}

/// Reads an answer as [`Client::send`] would, from a recording.
#[cfg(test)]
pub(super) fn read_recorded(
    dialect: Dialect,
    status: u16,
    content_type: Option<&str>,
    bytes: &[u8],
) -> Result<Answer, ClientError> {
    let body = Body::recorded(status, content_type, bytes);
    let body = body.check()?;
    dialect.read_answer(&body.bytes).map_err(|problem| body.explain(problem))
}
