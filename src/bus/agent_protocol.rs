//! The same agents for clients of the Synadia Agent Protocol for NATS 0.3.
//!
//! For each agent, while it is ready, a second micro service named `agents`: the endpoint `prompt`
//! takes a prompt and streams the answer, `status` reports that the agent is up, and heartbeats
//! announce it periodically. It is a front door like any other: prompts go through the dispatcher, and count for the
//! agent's `max_in_flight` like actions do.
//!
//! ```text
//! agents.prompt.a2a.<owner>.<agent> ──> Envelope ──> Dispatcher::call ──frames──> ChunkWriter ──> caller
//!                                                      ▲   └ asks ──> query chunk ──────────┐
//!                                                      └────────────── answer <── reply_subject ┘
//! ```
//!
//! # What the protocol leaves open
//!
//! - **Session.** The last word of the subject is the session, so all prompts to one agent go on in one
//!   A2A context, whoever sends them. An extra field `session` in the envelope, any text, names a
//!   conversation of its own.
//! - **Skill.** A prompt goes to the agent as a whole; an extra field `skill` chooses one of the
//!   published actions, by token, by the skill's id or by its name.
//! - **Questions.** While one is open the call does not count as in flight. It ends with an error, and
//!   its task is cancelled, if no answer comes within `input_required_ttl`, if the answer is
//!   malformed, or if the bridge stops.
//! - **Sign-in elsewhere.** A task that moves on from `AUTH_REQUIRED` by itself is followed to its end.
//! - **Data** of the agent goes out as attachments `data.json`, `data-2.json` and so on.
//! - **Headers.** `traceparent` and `A2A-Timeout` mean what they mean to actions; there are no reply modes
//!   and no idempotency here.
//! - **Names.** See [`AgentProtocolSubjects::new`] for agents whose names are not lower case.

mod chunks;
mod envelope;
mod prompt;

use crate::text::error_chain;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_nats::connection::State as Connection;
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use self::prompt::Prompts;
use super::publication::BRIDGE;
use super::service::{
    EndpointInfo, Handler, Service, ServiceContext, ServiceError, ServiceInfo, ServiceRequest, semver_or_zero,
};
use super::subject::{AgentProtocolSubjects, Subjects, Token};
use crate::action::actions::Stop;
use crate::agent::{AgentState, AgentStatus};
use crate::dispatch::Dispatcher;
use crate::tasks::{OnFailure, Tasks};
use crate::text::shorten;

/// The name of every service of the protocol, and its queue group.
const AGENTS: &str = "agents";
const PROTOCOL_VERSION: &str = "0.3";
/// How often a heartbeat is published.
const INTERVAL: Duration = Duration::from_secs(30);
/// Longest description of a service.
const MAX_DESCRIPTION: usize = 2048;

/// An agent's presence among the agents of the protocol.
#[derive(Debug)]
pub(crate) struct AgentProtocol {
    withdraw: CancellationToken,
    withdrawn: CancellationToken,
    shown: CancellationToken,
}

impl AgentProtocol {
    /// Shows an agent whenever it is ready.
    pub(crate) fn start(
        owner: &str,
        dispatcher: Arc<Dispatcher>,
        context: &ServiceContext,
        subjects: &Subjects,
        stop: &Stop,
        tasks: &Tasks,
    ) -> Self {
        let own = AgentProtocolSubjects::new(owner, &Token::new(&dispatcher.agent().name));
        let prompts = Prompts::new(
            Arc::clone(&dispatcher),
            context.client.clone(),
            subjects.clone(),
            own.clone(),
            stop.clone(),
        );
        let first = CancellationToken::new();
        let shown = Shown {
            dispatcher,
            context: context.clone(),
            subjects: own,
            prompts: Arc::new(prompts),
            first: first.clone(),
        };
        let (withdraw, withdrawn) = (CancellationToken::new(), CancellationToken::new());
        let this = Self { withdraw: withdraw.clone(), withdrawn: withdrawn.clone(), shown: first };
        let withdrawn = withdrawn.drop_guard();
        tasks.spawn("agent protocol", OnFailure::StopBridge, async move {
            shown.follow(&withdraw).await;
            drop(withdrawn);
        });
        this
    }

    /// Waits until the agent's first state is shown.
    pub(crate) async fn shown(&self) {
        self.shown.cancelled().await;
    }

    /// Takes the agent off without losing a prompt. What was received is still worked on.
    pub(crate) async fn withdraw(&self) {
        self.withdraw.cancel();
        self.withdrawn.cancelled().await;
    }
}

struct Shown {
    dispatcher: Arc<Dispatcher>,
    context: ServiceContext,
    subjects: AgentProtocolSubjects,
    prompts: Arc<Prompts>,
    /// Cancelled when the first state is shown.
    first: CancellationToken,
}

/// A registered service, and the limit that it has told.
struct Registered {
    service: Arc<Service>,
    max_payload: usize,
}

impl Shown {
    /// Follows the agent's status until told to withdraw.
    async fn follow(&self, withdraw: &CancellationToken) {
        let mut status = self.dispatcher.agent().status.clone();
        let mut registered = None;
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let now = status.borrow_and_update().clone();
            self.show(&now, &mut registered, &mut ticks).await;
            self.first.cancel();
            let changed = loop {
                tokio::select! {
                    biased;
                    () = withdraw.cancelled() => break false,
                    changed = status.changed() => break changed.is_ok(),
                    _ = ticks.tick() => self.tick(&now, &mut registered, &mut ticks).await,
                }
            };
            if !changed {
                // Told to leave, or the agent's loop has ended, and with it the agent.
                if let Some(Registered { service, .. }) = registered {
                    service.stop().await;
                }
                return;
            }
        }
    }

    /// Registers the agent if it is ready, takes it off if it is not.
    async fn show(
        &self,
        status: &AgentStatus,
        registered: &mut Option<Registered>,
        ticks: &mut tokio::time::Interval,
    ) {
        match registered {
            Some(Registered { service, .. }) if status.state == AgentState::Ready => {
                service.describe(self.description(status));
            }
            Some(Registered { service, .. }) => {
                service.stop().await;
                *registered = None;
            }
            None if status.state == AgentState::Ready => match self.register(status).await {
                Ok(fresh) => {
                    self.heartbeat(fresh.service.id()).await;
                    ticks.reset_at(Instant::now() + INTERVAL);
                    *registered = Some(fresh);
                }
                Err(error) => {
                    let agent = &self.dispatcher.agent().name;
                    tracing::error!(%agent, error = error_chain(&error), "cannot show the agent to the agent protocol");
                }
            },
            None => {}
        }
    }

    async fn tick(
        &self,
        status: &AgentStatus,
        registered: &mut Option<Registered>,
        ticks: &mut tokio::time::Interval,
    ) {
        match registered {
            // Another server of the cluster may have another limit.
            Some(known) if known.max_payload != self.context.client.max_payload() => {
                known.service.stop().await;
                *registered = None;
                self.show(status, registered, ticks).await;
            }
            Some(known) => self.heartbeat(known.service.id()).await,
            None => self.show(status, registered, ticks).await,
        }
    }

    async fn register(&self, status: &AgentStatus) -> Result<Registered, ServiceError> {
        let max_payload = self.context.client.max_payload();
        let prompt = EndpointInfo {
            name: "prompt".to_owned(),
            subject: self.subjects.prompt(),
            metadata: BTreeMap::from([
                ("max_payload".to_owned(), size(max_payload)),
                ("attachments_ok".to_owned(), "true".to_owned()),
            ]),
        };
        let prompts = Prompts::handler(&self.prompts);
        let service = Service::start(
            &self.context,
            Token::new(AGENTS),
            AGENTS,
            self.description(status),
            vec![(prompt, prompts)],
        )
        .await?;
        let status = EndpointInfo {
            name: "status".to_owned(),
            subject: self.subjects.status(),
            metadata: BTreeMap::new(),
        };
        let told = service.publish(vec![(status, self.status(service.id()))]).await;
        match told {
            Ok(()) => Ok(Registered { service, max_payload }),
            Err(error) => {
                service.stop().await;
                Err(error)
            }
        }
    }

    fn description(&self, status: &AgentStatus) -> ServiceInfo {
        let metadata = [
            ("agent", self.subjects.kind()),
            ("owner", self.subjects.owner()),
            ("session", self.subjects.session()),
            ("protocol_version", PROTOCOL_VERSION),
            ("bridge", BRIDGE),
            ("a2a.agent", &self.dispatcher.agent().name),
        ];
        let card = status.known.as_ref().map(|known| &known.card);
        ServiceInfo {
            version: card.map_or("0.0.0", |card| semver_or_zero(&card.version)).to_owned(),
            description: card.map(|card| shorten(&card.description, MAX_DESCRIPTION)).unwrap_or_default(),
            metadata: metadata.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        }
    }

    fn status(&self, instance_id: &str) -> Handler {
        let (client, tasks) = (self.context.client.clone(), self.context.tasks.clone());
        let (subjects, instance_id) = (self.subjects.clone(), instance_id.to_owned());
        Arc::new(move |ServiceRequest { message, accounting }| {
            let Some(to) = message.reply else { return };
            let (client, heartbeat) = (client.clone(), heartbeat(&subjects, &instance_id));
            tasks.spawn(async move {
                if let Err(error) = client.publish(to, heartbeat.into()).await {
                    tracing::warn!(error = error_chain(&error), "a status could not be sent");
                }
                accounting.succeed();
            });
        })
    }

    async fn heartbeat(&self, instance_id: &str) {
        let client = &self.context.client;
        // While the connection is down publishes pile up, and the news would be old by then.
        if client.connection_state() != Connection::Connected {
            return;
        }
        let heartbeat = heartbeat(&self.subjects, instance_id);
        if let Err(error) = client.publish(self.subjects.heartbeat(), heartbeat.into()).await {
            let agent = &self.dispatcher.agent().name;
            tracing::warn!(%agent, error = error_chain(&error), "a heartbeat could not be sent");
        }
    }
}

fn heartbeat(subjects: &AgentProtocolSubjects, instance_id: &str) -> Vec<u8> {
    #[derive(Serialize)]
    struct Heartbeat<'a> {
        agent: &'a str,
        owner: &'a str,
        session: &'a str,
        instance_id: &'a str,
        ts: String,
        interval_s: u64,
    }
    let now = OffsetDateTime::now_utc();
    let now = now.replace_nanosecond(0).unwrap_or(now);
    let heartbeat = Heartbeat {
        agent: subjects.kind(),
        owner: subjects.owner(),
        session: subjects.session(),
        instance_id,
        ts: now.format(&Rfc3339).unwrap_or_default(),
        interval_s: INTERVAL.as_secs(),
    };
    serde_json::to_vec(&heartbeat).expect("strings and numbers always serialize")
}

/// A size as the protocol writes it: `1MB`, in steps of 1024, exact.
fn size(bytes: usize) -> String {
    let units = [("GB", 30), ("MB", 20), ("KB", 10)];
    let exact = |(_, shift): &(&str, u32)| bytes > 0 && bytes.trailing_zeros() >= *shift;
    match units.into_iter().find(exact) {
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
    fn a_limit_is_told_in_the_largest_unit_that_is_exact(#[case] bytes: usize, #[case] text: &str) {
        assert_eq!(size(bytes), text);
    }

    #[test]
    fn a_heartbeat_says_who_where_and_how_often() {
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
