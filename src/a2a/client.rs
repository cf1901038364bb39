//! Requests to one agent in the dialect that was chosen for it: send, stream, get, cancel.
//!
//! A client has credentials only if the configuration trusts its address (see `a2a::address`), and sends them nowhere
//! else: it follows no redirects and uses no proxy. It repeats a message only if the agent's response proves that
//! nothing ran (see [`super::retry`]). If a request may have reached the agent, the error says so
//! ([`ClientError::may_have_reached_agent`]).

mod error;
mod response;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use reqwest::StatusCode;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use uuid::Uuid;

use super::auth::Credentials;
use super::card::Interface;
use super::choose::DialectFallback;
use super::dialect::{A2aMethod, Dialect, HttpCall, OutgoingMessage};
use super::http::{FileBody, HttpClient, HttpEndpoint, HttpResponse, RequestBody};
use super::model::{SendResult, Task};
use super::response_ids::{AgentIds, IdCheck, ResponseKind};
use super::retry::{Retries, Retry};
use super::stream::EventStream;
use crate::files::CallFiles;
use crate::memory::MemoryCharge;
use crate::offload;
use crate::telemetry::trace_context::TraceContext;
pub(crate) use error::{ClientError, ErrorOrigin, code};
use response::Convert;
#[cfg(test)]
pub(super) use response::read_recorded;
pub(super) use response::{ResponseBody, ResponseId, ResponseLimits};

/// Capacity for the headers that nearly all requests have, including those of the HTTP client.
const USUAL_HEADER_COUNT: usize = 8;

#[derive(Debug, Clone)]
pub struct Client {
    endpoint: HttpEndpoint,
    pub dialect: Dialect,
    tenant: Option<String>,
    credentials: Credentials,
    pub(super) limits: ResponseLimits,
    /// What is known of the agent's ids.
    ids: AgentIds,
    fallback: Option<DialectFallback>,
    /// Whether the agent has ever responded in this dialect.
    is_confirmed: Arc<AtomicBool>,
}

impl Client {
    /// `credentials` are sent to the URL of the interface and nowhere else.
    pub(super) fn new(
        http: &HttpClient,
        interface: &Interface,
        credentials: Credentials,
        limits: ResponseLimits,
        ids: AgentIds,
    ) -> Self {
        Self {
            endpoint: HttpEndpoint::new(interface.url.clone(), http),
            dialect: interface.dialect,
            tenant: interface.tenant.clone(),
            credentials,
            limits,
            ids,
            fallback: None,
            is_confirmed: Arc::new(AtomicBool::new(interface.is_confirmed)),
        }
    }

    /// Lets the client search for another dialect when the agent rejects this one.
    pub fn with_fallback(mut self, fallback: DialectFallback) -> Self {
        self.fallback = Some(fallback);
        self
    }

    /// Sends a message and waits until the agent responds.
    pub async fn send(
        &self,
        message: &OutgoingMessage<'_>,
        trace: &TraceContext,
    ) -> Result<SendResult, ClientError> {
        let error = match self.send_once(message, trace).await {
            Err(error) => error,
            sent => return sent,
        };
        let Some(proof) = Retry::in_another_dialect(&error, Some(self.dialect)) else {
            self.recheck_dialect(&error).await;
            return Err(error);
        };
        let Some(other) = Box::pin(self.find_other_dialect()).await else {
            return Err(error);
        };
        message.retries.record(proof);
        match Box::pin(other.send_once(message, trace)).await {
            // The other dialect is wrong too, so the first error is more informative.
            Err(later) if later.is_wrong_dialect() => Err(error),
            sent => sent,
        }
    }

    pub async fn get(&self, task_id: &str, trace: &TraceContext) -> Result<Task, ClientError> {
        self.call_task(A2aMethod::Get, task_id, trace).await
    }

    pub async fn cancel(&self, task_id: &str, trace: &TraceContext) -> Result<Task, ClientError> {
        self.call_task(A2aMethod::Cancel, task_id, trace).await
    }

    /// Sends a message and receives the events of its task as they occur.
    pub async fn stream(
        &self,
        message: &OutgoingMessage<'_>,
        trace: &TraceContext,
    ) -> Result<EventStream, ClientError> {
        let call = self.encode_message(A2aMethod::Stream, message).await;
        let opened = self.events(call, trace, Some(message.retries)).await;
        if let Err(error) = &opened {
            self.recheck_dialect(error).await;
        }
        opened
    }

    /// Receives the further events of a task.
    pub async fn subscribe(&self, task_id: &str, trace: &TraceContext) -> Result<EventStream, ClientError> {
        self.events(self.dialect.task_call(A2aMethod::Subscribe, task_id), trace, None).await
    }

    async fn events(
        &self,
        call: HttpCall,
        trace: &TraceContext,
        retries: Option<&Retries>,
    ) -> Result<EventStream, ClientError> {
        let accept = "text/event-stream, application/json";
        let (response, ids) = self.exchange(call, accept, trace, retries, ResponseKind::Stream).await?;
        let events = if response.status.is_success() {
            EventStream::open(response, self.dialect, self.limits.clone(), ids).await
        } else {
            let body = ResponseBody::read(response, &self.limits).await?;
            Err(body.into_error(&self.limits.memory.agent, &ids).await)
        };
        self.confirm_dialect(events)
    }

    async fn send_once(
        &self,
        message: &OutgoingMessage<'_>,
        trace: &TraceContext,
    ) -> Result<SendResult, ClientError> {
        let call = self.encode_message(A2aMethod::Send, message).await;
        let (mut result, memory) =
            self.call(call, trace, Some(message.retries), SendResult::try_from).await?;
        match &mut result {
            SendResult::Task(task) => task.memory = memory.map(Arc::new),
            SendResult::Message(message) => message.memory = memory.map(Arc::new),
        }
        Ok(result)
    }

    async fn encode_message(&self, method: A2aMethod, message: &OutgoingMessage<'_>) -> HttpCall {
        self.encode(message.size(), || self.dialect.message_call(method, message)).await
    }

    /// Runs `work`, which encodes about this many bytes of a request.
    async fn encode<T>(&self, bytes: usize, work: impl FnOnce() -> T) -> T {
        if bytes <= offload::INLINE {
            return work();
        }
        // Boxed, so that the future of an ordinary call stays small.
        Box::pin(offload::run(&self.limits.memory.agent, bytes, work)).await
    }

    async fn call_task(
        &self,
        method: A2aMethod,
        task_id: &str,
        trace: &TraceContext,
    ) -> Result<Task, ClientError> {
        let call = |client: &Self| client.dialect.task_call(method, task_id);
        let (task, memory) = match self.call(call(self), trace, None, Task::try_from).await {
            Err(error) if error.is_wrong_dialect() => match self.with_changed_dialect() {
                Some(other) => Box::pin(other.call(call(&other), trace, None, Task::try_from)).await?,
                None => return Err(error),
            },
            result => result?,
        };
        Ok(Task { memory: memory.map(Arc::new), ..task })
    }

    /// Searches for another dialect after an error that suggests the wrong one without proof. The client does not
    /// repeat the message, but the next one may use another dialect.
    async fn recheck_dialect(&self, error: &ClientError) {
        if error.is_wrong_address() && !self.is_confirmed.load(Ordering::Relaxed) {
            let _ = Box::pin(self.find_other_dialect()).await;
        }
    }

    /// Searches for another dialect after the agent has rejected this one.
    async fn find_other_dialect(&self) -> Option<Self> {
        let DialectFallback { chooser, card, changed } = self.fallback.as_ref()?;
        let other = chooser.choose_other(card, self.dialect, &self.endpoint.url).await?;
        changed.notify_one();
        chooser.client(card, &other).ok()
    }

    /// A client for the dialect that was chosen since this client was made. An agent may lack the methods to get or
    /// cancel a task, so their failure alone is no reason to search for another dialect.
    fn with_changed_dialect(&self) -> Option<Self> {
        let DialectFallback { chooser, card, .. } = self.fallback.as_ref()?;
        let other = chooser.chosen_instead_of(card, self.dialect, &self.endpoint.url)?;
        chooser.client(card, &other).ok()
    }

    /// Remembers that the agent has responded in this dialect.
    fn confirm_dialect<T>(&self, result: Result<T, ClientError>) -> Result<T, ClientError> {
        let is_response = match &result {
            Ok(_) => true,
            Err(error) => error.rpc_code().is_some() && !error.is_wrong_dialect(),
        };
        if is_response && !self.is_confirmed.load(Ordering::Relaxed) {
            self.is_confirmed.store(true, Ordering::Relaxed);
            if let Some(DialectFallback { chooser, card, changed }) = &self.fallback
                && chooser.confirm(card, self.dialect, &self.endpoint.url)
            {
                changed.notify_one();
            }
        }
        result
    }

    /// Sends a request, and returns the response and the charge for its memory.
    pub(super) async fn call<T>(
        &self,
        call: HttpCall,
        trace: &TraceContext,
        retries: Option<&Retries>,
        convert: Convert<T>,
    ) -> Result<(T, Option<MemoryCharge>), ClientError> {
        let accept = if call.content_type == "application/json" {
            "application/json"
        } else {
            "application/a2a+json, application/json"
        };
        let (response, ids) = self.exchange(call, accept, trace, retries, ResponseKind::Document).await?;
        let body = ResponseBody::read(response, &self.limits).await?;
        self.confirm_dialect(body.decode(self.dialect, convert, &self.limits, &ids).await)
    }

    /// Sends a request. Repeats it only after a status which says that the request was not applied: those of
    /// [`Retry::after_status`], and 405 for GET on a subscription. `retries` records the repetition of a message.
    async fn exchange(
        &self,
        mut call: HttpCall,
        accept: &'static str,
        trace: &TraceContext,
        retries: Option<&Retries>,
        kind: ResponseKind,
    ) -> Result<(HttpResponse, ResponseId), ClientError> {
        if let Some(tenant) = &self.tenant {
            call = self.encode(call.size(), || call.for_tenant(tenant)).await;
        }
        self.credentials.ready().await.map_err(ClientError::Token)?;
        let mut sent = None;
        let (response, ids) = self.send_call(&call, accept, trace, &mut sent, kind).await?;
        let proof = Retry::after_status(response.status);
        let is_repeated = match proof {
            Some(Retry::TokenRenewed) => self.credentials.renew(sent.as_ref()).await,
            Some(Retry::MediaType) => call.use_plain_json(),
            _ => response.status == StatusCode::METHOD_NOT_ALLOWED && call.subscribe_with_post(),
        };
        if !is_repeated {
            return Ok((response, ids));
        }
        if let (Some(retries), Some(proof)) = (retries, proof) {
            retries.record(proof);
        }
        drop(response);
        Box::pin(self.send_call(&call, accept, trace, &mut sent, kind)).await
    }

    /// Sends a request with the current credentials, and stores its `Authorization` in `authorization`.
    async fn send_call(
        &self,
        call: &HttpCall,
        accept: &'static str,
        trace: &TraceContext,
        authorization: &mut Option<HeaderValue>,
        kind: ResponseKind,
    ) -> Result<(HttpResponse, ResponseId), ClientError> {
        let id = Uuid::new_v4();
        let body = self.encode(call.size(), || call.body(id)).await;
        let mut headers = HeaderMap::with_capacity(USUAL_HEADER_COUNT);
        let mut url = None;
        if !call.path.is_empty()
            && let Ok(mut segments) = url.insert(self.endpoint.url.clone()).path_segments_mut()
        {
            segments.pop_if_empty().extend(&call.path);
        }
        self.credentials.add_to_headers(&mut headers);
        if self.credentials.are_in_url() {
            self.credentials.add_to_url(url.get_or_insert_with(|| self.endpoint.url.clone()));
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
        let may_reuse = !call.is_rpc() || self.ids.are_echoed(kind);
        let body = body.map(|json| match CallFiles::current().filter(|_| !call.files().is_empty()) {
            Some(files) => RequestBody::WithFiles(Box::new(FileBody::new(json, call.files(), files))),
            None => RequestBody::new(json),
        });
        let mut sent = self.endpoint.send(call.method.clone(), url, headers, body, may_reuse).await?;
        if self.dialect.has_plain_files() && sent.status.is_success() {
            sent.store_files();
        }
        let check = IdCheck::new(call.is_rpc().then_some(id));
        Ok((sent, ResponseId { check, kind, agent: self.ids.clone() }))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::a2a::model::Part;
    use crate::a2a::tests::fake::{FakeAgent, ReceivedRequest, error, ok};

    #[tokio::test]
    async fn a_large_message_is_encoded_when_it_is_the_agents_turn() {
        const TURN_IS_TAKEN: Duration = Duration::from_millis(100);
        let is_send = |request: &ReceivedRequest| request.json()["params"]["message"].is_object();
        let fake = FakeAgent::start(move |request| match is_send(request) {
            true => {
                let task = json!({"kind": "task", "id": "t", "status": {"state": "completed"}});
                ok(&json!({"jsonrpc": "2.0", "id": request.json()["id"], "result": task}))
            }
            false => error(-32001, "Task not found"),
        })
        .await;
        let sent = || fake.received().iter().filter(|request| is_send(request)).count();
        let (client, _) = fake.client("protocol: 0.3", &json!({"name": "fake"})).await;
        let (trace, retries) = (TraceContext::default(), Retries::new(&"fake".into()));
        let [small, large] = [1, 1 << 20].map(|size| [Part::Text("x".repeat(size))]);
        let [small, large] = [&small, &large].map(|parts| OutgoingMessage {
            message_id: Uuid::new_v4(),
            task_id: None,
            new_task_id: None,
            context_id: None,
            reference_task_ids: &[],
            parts,
            skill_id: None,
            caller: None,
            run_id: None,
            session_id: None,
            output_modes: &[],
            blocking: true,
            retries: &retries,
        });
        let turn = offload::hold_turn(&client.limits.memory.agent);
        client.send(&small, &trace).await.unwrap();
        assert_eq!(sent(), 1);
        tokio::time::timeout(TURN_IS_TAKEN, client.send(&large, &trace)).await.unwrap_err();
        tokio::time::timeout(TURN_IS_TAKEN, client.stream(&large, &trace)).await.map(drop).unwrap_err();
        assert_eq!(sent(), 1);
        drop(turn);
        client.send(&large, &trace).await.unwrap();
    }
}
