//! The front door for clients of the Synadia Agent Protocol for NATS 0.3.
//!
//! While an agent is ready, it has a second micro service named `agents`: the endpoint `prompt` accepts a
//! prompt and streams the response, `status` reports that the agent is up, and heartbeats announce it
//! periodically. Prompts go through the dispatcher and count towards the agent's `max_in_flight`, like actions.
//!
//! ```text
//! agents.prompt.a2a.<owner>.<agent> ──> PromptEnvelope ──> Dispatcher::call ──frames──> ChunkWriter ──> caller
//!                                                      ▲   └ question ──> query chunk ──────────────┐
//!                                                      └──────────────── answer <── reply_subject ──┘
//! ```
//!
//! # What the protocol leaves open
//!
//! - **Session.** The last token of the subject is the session, so all prompts to one agent share one A2A
//!   context, from any client. The additional field `session` in the envelope, with any text, selects
//!   another session.
//! - **Skill.** A prompt goes to the agent as a whole; the additional field `skill` selects one of the
//!   published actions, by token, by the skill's id or by its name.
//! - **Questions.** While a question is open, the call does not count as in flight. If no answer arrives within
//!   `input_required_ttl`, if the answer finds no free slot until then, if it is malformed, or if the bridge stops,
//!   the call ends with an error and the bridge cancels the task. Only the first message to the reply subject counts.
//! - **Sign-in elsewhere.** If a task leaves `AUTH_REQUIRED` without an answer, the bridge follows it to its end.
//! - **Data** of the agent becomes attachments `data.json`, `data-2.json` and so on.
//! - **Headers.** `traceparent` and `A2A-Timeout` have the same meaning as for actions; there are no reply modes
//!   and no idempotency keys.
//! - **Names.** See [`AgentProtocolSubjects::new`] for agents whose names are not lower case.

mod chunks;
pub(crate) mod envelope;
mod prompt;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::time::{Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use self::prompt::{MAX_QUESTIONS, PromptEndpoint};
use super::encoded_reply::EncodedReply;
use super::outbox::Outbox;
use super::per_card::PerCard;
use super::publication::{BRIDGE, MAX_DESCRIPTION, publish_if_connected};
use super::service::{
    EndpointInfo, Handler, Service, ServiceContext, ServiceError, ServiceInfo, ServiceRequest, new_id,
    semver_or_zero,
};
use super::stoppable_task::StoppableTask;
use super::subject::{AGENT_PROTOCOL_KIND, AgentProtocolSubjects, Subjects, Token};
use crate::action::actions::CallShutdown;
use crate::agent::{AgentState, AgentStatus};
use crate::background::BackgroundTasks;
use crate::dispatch::Dispatcher;
use crate::json::to_bytes;
use crate::text::{error_chain, rfc3339_to_second, shorten};

/// The name and the queue group of every service of the protocol.
const SERVICE: &str = "agents";
const PROTOCOL_VERSION: &str = "0.3";
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum number of status requests of one agent whose replies wait for the connection.
const MAX_STATUS_REQUESTS: usize = 64;

/// The agent protocol's service for one agent.
#[derive(Debug)]
pub(crate) struct AgentProtocol {
    registrar: StoppableTask,
    first_published: CancellationToken,
}

impl AgentProtocol {
    /// Registers the agent's service whenever the agent is ready.
    pub(crate) fn start(
        owner: &str,
        dispatcher: Arc<Dispatcher>,
        context: &ServiceContext,
        outbox: &Outbox,
        subjects: &Subjects,
        call_shutdown: &CallShutdown,
        tasks: &BackgroundTasks,
    ) -> Self {
        let prompts = PromptEndpoint {
            protocol_subjects: AgentProtocolSubjects::new(owner, &Token::new(&dispatcher.agent().name)),
            dispatcher,
            outbox: outbox.clone(),
            subjects: subjects.clone(),
            catalog: PerCard::default(),
            questions: Semaphore::new(MAX_QUESTIONS),
            call_shutdown: call_shutdown.clone(),
        };
        let first_published = CancellationToken::new();
        let mut ticks = tokio::time::interval(HEARTBEAT_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let registrar = Registrar {
            context: context.clone(),
            prompts: Arc::new(prompts),
            first_published: first_published.clone(),
            outbox: Outbox::one_at_a_time(context.client.clone(), context.confirmations.clone()),
            registered: None,
            ticks,
        };
        Self {
            registrar: StoppableTask::spawn(tasks, "agent protocol", |stop| registrar.run(stop)),
            first_published,
        }
    }

    /// Waits until the registration matches the agent's state for the first time.
    pub(crate) async fn wait_until_first_published(&self) {
        self.first_published.cancelled().await;
    }

    /// Removes the service without losing a prompt. Prompts that were received still run.
    pub(crate) async fn withdraw(&self) {
        self.registrar.stop().await;
    }
}

/// Registers and removes the service as the agent's state changes.
struct Registrar {
    context: ServiceContext,
    prompts: Arc<PromptEndpoint>,
    /// Cancelled when the registration matches the agent's state for the first time.
    first_published: CancellationToken,
    /// For heartbeats; not that of the agent, whose replies may wait for slow readers.
    outbox: Outbox,
    registered: Option<Registered>,
    ticks: Interval,
}

struct Registered {
    service: Arc<Service>,
    /// The limit that its metadata announces.
    max_payload: usize,
}

impl Registrar {
    async fn run(mut self, stop: CancellationToken) {
        let mut status = self.prompts.dispatcher.agent().status.clone();
        loop {
            let current = status.borrow_and_update().clone();
            self.update(&current, &stop).await;
            self.first_published.cancel();
            let changed = loop {
                tokio::select! {
                    biased;
                    () = stop.cancelled() => break false,
                    changed = status.changed() => break changed.is_ok(),
                    _ = self.ticks.tick() => self.tick(&current, &stop).await,
                }
            };
            // The owner stops this task, or the agent's supervisor has ended.
            if !changed {
                return self.unregister().await;
            }
        }
    }

    /// Registers the agent if it is ready, and removes it if it is not.
    async fn update(&mut self, status: &AgentStatus, stop: &CancellationToken) {
        if status.state != AgentState::Ready {
            return self.unregister().await;
        }
        if let Some(Registered { service, .. }) = &self.registered {
            return service.describe(self.service_info(status));
        }
        match self.register(status).await {
            Ok(registered) => {
                self.publish_heartbeat(registered.service.id(), stop).await;
                self.ticks.reset();
                self.registered = Some(registered);
            }
            Err(error) => {
                let agent = &self.prompts.dispatcher.agent().name;
                tracing::error!(%agent, error = error_chain(&error), "cannot register the agent for the agent protocol");
            }
        }
    }

    async fn unregister(&mut self) {
        if let Some(Registered { service, .. }) = self.registered.take() {
            service.stop().await;
        }
    }

    async fn tick(&mut self, status: &AgentStatus, stop: &CancellationToken) {
        match &self.registered {
            Some(registered) if registered.max_payload == self.context.client.max_payload() => {
                self.publish_heartbeat(registered.service.id(), stop).await;
            }
            // The first registration failed, or the client has moved to a server with another limit.
            _ => {
                self.unregister().await;
                self.update(status, stop).await;
            }
        }
    }

    async fn register(&self, status: &AgentStatus) -> Result<Registered, ServiceError> {
        let max_payload = self.context.client.max_payload();
        let prompt = EndpointInfo {
            name: "prompt".to_owned(),
            subject: self.prompts.protocol_subjects.subject("prompt"),
            gateway_subject: None,
            metadata: BTreeMap::from([
                ("max_payload".to_owned(), size_limit(max_payload)),
                ("attachments_ok".to_owned(), "true".to_owned()),
            ]),
        };
        let prompts = PromptEndpoint::handler(&self.prompts);
        let info = self.service_info(status);
        let service = Service::start(
            &self.context,
            Token::new(SERVICE),
            &new_id(),
            SERVICE,
            info,
            vec![(prompt, prompts)],
        )
        .await?;
        let status = EndpointInfo {
            name: "status".to_owned(),
            subject: self.prompts.protocol_subjects.subject("status"),
            gateway_subject: None,
            metadata: BTreeMap::new(),
        };
        // The handler needs the id of the service, so this endpoint is published after the start.
        match service.publish(vec![(status, self.status_handler(service.id()))]).await {
            Ok(()) => Ok(Registered { service, max_payload }),
            Err(error) => {
                service.stop().await;
                Err(error)
            }
        }
    }

    fn service_info(&self, status: &AgentStatus) -> ServiceInfo {
        let PromptEndpoint { protocol_subjects: subjects, dispatcher, .. } = &*self.prompts;
        let metadata = [
            ("agent", AGENT_PROTOCOL_KIND),
            ("owner", &subjects.owner),
            ("session", &subjects.session),
            ("protocol_version", PROTOCOL_VERSION),
            ("bridge", BRIDGE),
            ("a2a.agent", &dispatcher.agent().name),
        ];
        let card = status.known.as_ref().map(|known| &known.card);
        ServiceInfo {
            version: card.map_or("0.0.0", |card| semver_or_zero(&card.version)).to_owned(),
            description: card.map(|card| shorten(&card.description, MAX_DESCRIPTION)).unwrap_or_default(),
            metadata: metadata.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        }
    }

    fn status_handler(&self, instance_id: &str) -> Handler {
        let (client, tasks) = (self.context.client.clone(), self.context.tasks.clone());
        let agent = Arc::clone(&self.prompts.dispatcher.agent().name);
        let (subjects, instance_id) = (self.prompts.protocol_subjects.clone(), instance_id.to_owned());
        let permits = Arc::new(Semaphore::new(MAX_STATUS_REQUESTS));
        Arc::new(move |ServiceRequest { message, caller, accounting }| {
            let Some(to) = message.reply else { return };
            let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else {
                return accounting.fail(429, "too many requests at the same time");
            };
            let (client, agent) = (client.clone(), Arc::clone(&agent));
            let reply = match caller {
                Ok(_) => EncodedReply::from_body(heartbeat(&subjects, &instance_id)),
                Err(error) => EncodedReply::new(&Err(error), client.max_payload(), 0),
            };
            tasks.spawn(async move {
                let published = match reply.headers {
                    Some(headers) => client.publish_with_headers(to, headers, reply.body).await,
                    None => client.publish(to, reply.body).await,
                };
                if let Err(error) = published {
                    tracing::warn!(%agent, error = error_chain(&error), "cannot reply to a status request");
                }
                accounting.end(reply.error);
                drop(permit);
            });
        })
    }

    /// A stop does not wait for it.
    async fn publish_heartbeat(&self, instance_id: &str, stop: &CancellationToken) {
        let PromptEndpoint { protocol_subjects: subjects, dispatcher, .. } = &*self.prompts;
        let (agent, heartbeat) = (&dispatcher.agent().name, heartbeat(subjects, instance_id));
        let published = publish_if_connected(&self.outbox, agent, subjects.subject("hb"), heartbeat);
        let _ = stop.run_until_cancelled(published).await;
    }
}

fn heartbeat(subjects: &AgentProtocolSubjects, instance_id: &str) -> Bytes {
    to_bytes(&json!({
        "agent": AGENT_PROTOCOL_KIND,
        "owner": subjects.owner,
        "session": subjects.session,
        "instance_id": instance_id,
        "ts": rfc3339_to_second(SystemTime::now()),
        "interval_s": HEARTBEAT_INTERVAL.as_secs(),
    }))
}

/// A size as the protocol writes limits: in the largest unit that is exact, such as `1MB` for 1024 × 1024 bytes.
fn size_limit(bytes: usize) -> String {
    let units = [("GB", 30), ("MB", 20), ("KB", 10)];
    let is_exact = |(_, shift): &(&str, u32)| bytes > 0 && bytes.trailing_zeros() >= *shift;
    match units.into_iter().find(is_exact) {
        Some((unit, shift)) => format!("{}{unit}", bytes >> shift),
        None => format!("{bytes}B"),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(1 << 20, "1MB")]
    #[case(8 << 20, "8MB")]
    #[case(1536 << 10, "1536KB")]
    #[case(3 << 30, "3GB")]
    #[case(1_000_000, "1000000B")]
    #[case(1000, "1000B")]
    fn a_limit_has_the_largest_unit_that_is_exact(#[case] bytes: usize, #[case] text: &str) {
        assert_eq!(size_limit(bytes), text);
    }

    #[test]
    fn a_heartbeat_identifies_the_agent_and_states_its_interval() {
        let subjects = AgentProtocolSubjects::new("acme", &Token::new("weather"));
        let mut beat: serde_json::Value = serde_json::from_slice(&heartbeat(&subjects, "i1")).unwrap();
        let ts = beat["ts"].take();
        assert!(ts.as_str().unwrap().len() == 20 && ts.as_str().unwrap().ends_with('Z'), "{ts}");
        let expected = serde_json::json!({
            "agent": "a2a", "owner": "acme", "session": "weather",
            "instance_id": "i1", "ts": null, "interval_s": 30,
        });
        assert_eq!(beat, expected);
    }
}
