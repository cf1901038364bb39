//! Which wire an agent is spoken to over: the settings, the card, and a probe where they may be wrong.
//!
//! The card is asked first, but its `protocolVersion` is often not true, so the wire it names is
//! tried with a call that has no side effects: a look at a task that nobody has made. The choice
//! is remembered until the card changes, or until the agent answers a call in a way that says it
//! does not speak this wire ([`Chooser::again`]).

mod candidates;
mod probe;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use url::Url;

use super::address::{AddressPolicy, other_slash};
use super::auth::{Credentials, Keyring};
use super::card::{Card, CardError, Interface};
use super::client::Client;
use super::dialect::Dialect;
use super::http::HttpClient;
use crate::config;
use candidates::Candidate;
use probe::Verdict;

/// How long choosing may take altogether; then the card is believed.
const LIMIT: Duration = Duration::from_secs(15);

/// How long the agent is left alone after choosing again found nothing.
const PAUSE: Duration = Duration::from_secs(10);

/// Chooses for one agent and remembers.
#[derive(Debug)]
pub struct Chooser {
    http: HttpClient,
    // Without the client certificate.
    plain_http: HttpClient,
    keyring: Keyring,
    addresses: AddressPolicy,
    protocol: Option<config::A2aVersion>,
    binding: Option<config::Binding>,
    max_response: u64,
    // Held while probing, so that many calls that fail at once probe once.
    flight: tokio::sync::Mutex<()>,
    memory: Mutex<Memory>,
}

#[derive(Debug, Default)]
struct Memory {
    /// The card's hash and what was chosen for it.
    choice: Option<(String, Interface)>,
    /// When choosing again last found nothing.
    in_vain: Option<Instant>,
}

impl Chooser {
    /// For the agent of these settings. `plain_http` is for addresses that shall not see the
    /// agent's client certificate.
    pub fn new(
        config: &config::AgentConfig,
        http: HttpClient,
        plain_http: HttpClient,
        keyring: Keyring,
    ) -> Self {
        Self {
            http,
            plain_http,
            keyring,
            addresses: AddressPolicy::new(config),
            protocol: config.protocol,
            binding: config.binding,
            max_response: config.max_response_size,
            flight: tokio::sync::Mutex::default(),
            memory: Mutex::default(),
        }
    }

    /// The HTTP client that reaches the agent.
    pub fn http(&self) -> &HttpClient {
        &self.http
    }

    /// The credentials for the card itself.
    pub fn card_credentials(&self) -> Credentials {
        self.keyring.for_card()
    }

    /// Where and how to call the agent that shows this card.
    pub async fn choose(&self, card: &Card) -> Result<Interface, CardError> {
        self.credentials(card)?;
        if let Some(interface) = self.remembered(card) {
            return Ok(interface);
        }
        let _flight = self.flight.lock().await;
        match self.remembered(card) {
            Some(interface) => Ok(interface),
            None => self.look(card).await,
        }
    }

    /// Chooses again after the agent refused `failed` as a wire; `None` if it speaks no other.
    pub async fn again(&self, card: &Card, failed: &Interface) -> Option<Interface> {
        let _flight = self.flight.lock().await;
        if let Some(interface) = self.changed_from(card, failed) {
            return Some(interface);
        }
        let is_too_soon = |last: &Instant| last.elapsed() < PAUSE;
        if self.lock().in_vain.as_ref().is_some_and(is_too_soon) {
            return None;
        }
        let plan = candidates::plan(card, &self.addresses, self.protocol, self.binding).ok()?;
        let probing = self.probe(card, &plan, Some(failed));
        let found = tokio::time::timeout(LIMIT, probing).await.ok().flatten();
        match found.filter(|found| is_other(found, failed)) {
            Some(interface) => Some(self.remember(card, interface)),
            None => {
                self.lock().in_vain = Some(Instant::now());
                None
            }
        }
    }

    /// The interface that was chosen since `old` was, if another one was.
    pub fn changed_from(&self, card: &Card, old: &Interface) -> Option<Interface> {
        self.remembered(card).filter(|interface| is_other(interface, old))
    }

    /// A client for an interface that was chosen.
    pub fn client(&self, card: &Card, interface: &Interface) -> Result<Client, CardError> {
        let (http, credentials) = if self.addresses.is_trusted(&interface.url) {
            (&self.http, self.credentials(card)?)
        } else {
            (&self.plain_http, Credentials::default())
        };
        Ok(Client::new(http, interface, credentials, self.max_response))
    }

    fn credentials(&self, card: &Card) -> Result<Credentials, CardError> {
        self.keyring.for_tasks(card.security()).map_err(CardError::Auth)
    }

    fn remembered(&self, card: &Card) -> Option<Interface> {
        let memory = self.lock();
        let (hash, interface) = memory.choice.as_ref()?;
        (hash == card.hash()).then(|| interface.clone())
    }

    fn remember(&self, card: &Card, interface: Interface) -> Interface {
        if !self.addresses.is_trusted(&interface.url) && !self.keyring.is_empty() {
            tracing::warn!(
                endpoint = %interface.url,
                "the agent is called without its credentials: `allowed_hosts` does not have this host"
            );
        }
        let mut memory = self.lock();
        memory.choice = Some((card.hash().to_owned(), interface.clone()));
        memory.in_vain = None;
        interface
    }

    fn lock(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn look(&self, card: &Card) -> Result<Interface, CardError> {
        let plan = candidates::plan(card, &self.addresses, self.protocol, self.binding)?;
        let Some(claim) = plan.claimed.first().cloned() else {
            return Err(CardError::Unsupported(card.offered()));
        };
        let probing = self.probe(card, &plan, None);
        let interface = match tokio::time::timeout(LIMIT, probing).await {
            Ok(Some(interface)) => interface,
            Ok(None) => claim.interface(format!("{} so; no probe was answered", plan.who_says)),
            Err(_) => claim.interface(format!("{} so; probing took too long", plan.who_says)),
        };
        Ok(self.remember(card, interface))
    }

    /// Tries the claimed wires, then the others, and takes the first that is surely spoken, else
    /// the first that may be. `None` if nobody answers, so that nothing can be said.
    async fn probe(
        &self,
        card: &Card,
        plan: &candidates::Plan,
        failed: Option<&Interface>,
    ) -> Option<Interface> {
        let mut perhaps: Option<Interface> = None;
        // Most agents need not be asked whether they want all ids: it shows in what they refuse.
        let mut wants_ids =
            failed.is_some_and(|failed| matches!(failed.dialect, Dialect::V02 | Dialect::V03));
        for (list, is_claimed) in [(&plan.claimed, true), (&plan.others, false)] {
            for candidate in list {
                if failed
                    .is_some_and(|failed| candidate.dialect == failed.dialect && candidate.url == failed.url)
                {
                    continue;
                }
                if candidate.dialect == Dialect::V03Ids && !wants_ids {
                    continue;
                }
                let (verdict, url) = self.try_out(card, candidate).await;
                let why = if is_claimed {
                    format!("{} so, and a probe agrees", plan.who_says)
                } else {
                    format!("a probe found it; {} otherwise", plan.who_says)
                };
                wants_ids |= verdict == Verdict::WantsIds;
                let found = |why: String| Interface { url: url.clone(), ..candidate.interface(why) };
                match verdict {
                    Verdict::Yes => return Some(Interface { is_confirmed: true, ..found(why) }),
                    Verdict::Perhaps | Verdict::WantsIds if perhaps.is_none() => perhaps = Some(found(why)),
                    Verdict::NoAnswer => return perhaps,
                    Verdict::Perhaps | Verdict::WantsIds | Verdict::No | Verdict::WrongAddress => {}
                }
            }
        }
        perhaps
    }

    /// Probes a candidate where the card says, and with the other slash at the end if nobody is there.
    async fn try_out(&self, card: &Card, candidate: &Candidate) -> (Verdict, Url) {
        let first = self.verdict(card, candidate, candidate.url.clone()).await;
        // REST addresses are built below the interface's, where the slash makes no difference.
        let other = other_slash(&candidate.url).filter(|_| !candidate.dialect.is_rest());
        match (first, other) {
            (Verdict::WrongAddress, Some(other)) => {
                (self.verdict(card, candidate, other.clone()).await, other)
            }
            (verdict, _) => (verdict, candidate.url.clone()),
        }
    }

    async fn verdict(&self, card: &Card, candidate: &Candidate, url: Url) -> Verdict {
        let interface = Interface { url, ..candidate.interface(String::new()) };
        let Ok(client) = self.client(card, &interface) else {
            return Verdict::No;
        };
        let looked = probe::look_at_no_task(&client).await;
        // Any JSON-RPC agent may answer the call with an error of some kind.
        if candidate.dialect == Dialect::V03Ids && looked != Verdict::Yes {
            return Verdict::No;
        }
        let is_v01 = candidate.dialect == Dialect::V01;
        if !is_v01 && !matches!(candidate.dialect, Dialect::V02 | Dialect::V03) {
            return looked;
        }
        match looked {
            // A look at a task is the same in v0.1 to v0.3, and the card does not settle it.
            Verdict::Yes | Verdict::Perhaps if !candidate.is_certain => {
                match probe::knows_message_send(&client).await {
                    Some(knows) if knows == is_v01 => Verdict::No,
                    _ => looked,
                }
            }
            // An agent may leave looking out and still take messages.
            Verdict::No if !is_v01 && probe::knows_message_send(&client).await == Some(true) => {
                Verdict::Perhaps
            }
            _ => looked,
        }
    }
}

fn is_other(one: &Interface, other: &Interface) -> bool {
    (one.dialect, &one.url) != (other.dialect, &other.url)
}

/// How a client gets another wire when the agent refuses the one it has.
#[derive(Debug, Clone)]
pub struct DialectFallback {
    pub chooser: Arc<Chooser>,
    /// The card that the choice was made for.
    pub card: Arc<Card>,
    /// Told when the choice has changed.
    pub changed: Arc<tokio::sync::Notify>,
}
