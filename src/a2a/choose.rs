//! Chooses the dialect of an agent by the configuration, the card, and probes.
//!
//! The `protocolVersion` of cards is often wrong, so the bridge probes the dialect that the card declares with a request
//! without side effects: it asks for a task that does not exist. It remembers the choice until the card changes, or
//! until the agent's response to a call says that it does not speak this dialect ([`DialectChooser::choose_other`]).

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use url::Url;

use super::address::{AddressPolicy, toggle_trailing_slash};
use super::auth::{Credentials, Keyring};
use super::card::{Card, CardError, DeclaredInterface, Interface};
use super::client::{Client, ClientError, ResponseLimits, code};
use super::dialect::{A2aMethod, Dialect};
use super::http::HttpClient;
use super::model::{SendResult, Task};
use super::response_ids::AgentIds;
use super::retry::Retry;
use crate::config::{self, A2aVersion, Binding};
use crate::memory::MemoryAccount;
use crate::telemetry::trace_context::TraceContext;

/// How long choosing may take in all; after that the bridge uses what the card declares.
const CHOICE_TIMEOUT: Duration = Duration::from_secs(15);
/// How long one probe may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(4);
/// Pause between two searches for another dialect.
const SEARCH_INTERVAL: Duration = Duration::from_secs(10);
/// Pause between two probes of a choice that no probe has confirmed.
const RECHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Chooses the dialect of one agent and remembers it.
#[derive(Debug)]
pub struct DialectChooser {
    pub http: HttpClient,
    http_without_certificate: HttpClient,
    keyring: Keyring,
    addresses: AddressPolicy,
    protocol: Option<A2aVersion>,
    binding: Option<Binding>,
    /// For clients from now on; a reload may change it.
    max_response_size: AtomicU64,
    responses: Arc<MemoryAccount>,
    ids: AgentIds,
    /// Held while probing, so that many calls that fail at the same time probe once.
    probing: tokio::sync::Mutex<()>,
    memory: Mutex<Memory>,
}

#[derive(Debug, Default)]
struct Memory {
    /// The hash of a card, and the interface that was chosen for it.
    choice: Option<(String, Interface)>,
    last_failed_search: Option<Instant>,
    /// When the choice was last probed without success.
    last_failed_probe: Option<Instant>,
}

impl DialectChooser {
    /// `http_without_certificate` is for hosts that must not see the agent's client certificate. `memory` is charged
    /// for responses.
    pub(crate) fn new(
        config: &config::AgentConfig,
        http: HttpClient,
        http_without_certificate: HttpClient,
        keyring: Keyring,
        memory: Arc<MemoryAccount>,
    ) -> Self {
        Self {
            http,
            http_without_certificate,
            keyring,
            addresses: AddressPolicy::new(config),
            protocol: config.protocol,
            binding: config.binding,
            max_response_size: AtomicU64::new(config.max_response_size),
            responses: memory,
            ids: AgentIds::default(),
            probing: tokio::sync::Mutex::default(),
            memory: Mutex::default(),
        }
    }

    pub fn card_credentials(&self) -> Credentials {
        self.keyring.for_card()
    }

    /// Chooses an interface. If no probe proves that calls can work there, it has a [`ProbeFailure`], and later calls of
    /// this function probe it again.
    pub async fn choose(&self, card: &Card) -> Result<Interface, CardError> {
        self.credentials(card)?;
        if let Some(interface) = self.settled(card) {
            return Ok(interface);
        }
        let _probing = self.probing.lock().await;
        if let Some(interface) = self.settled(card) {
            return Ok(interface);
        }
        let candidates = Candidates::new(card, self);
        if let Some(interface) = self.remembered(card) {
            return Ok(self.probe_again(card, &candidates, interface).await);
        }
        let Some(declared) = candidates.declared.first() else {
            return Err(CardError::Unsupported(card.describe_interfaces()));
        };
        let unconfirmed = |failure: ProbeFailure| {
            let reason = candidates.unconfirmed(failure);
            Interface { reason, failure: Some(failure), ..declared.interface.clone() }
        };
        let interface = match tokio::time::timeout(CHOICE_TIMEOUT, self.probe(card, &candidates, None)).await
        {
            Ok(Ok(interface)) => interface,
            Ok(Err(failure)) => unconfirmed(failure),
            Err(_) => unconfirmed(ProbeFailure::NoResponse),
        };
        Ok(self.remember(card, interface))
    }

    /// Probes an interface that no probe has confirmed, and only this one: the agent may log each probe as an error.
    async fn probe_again(&self, card: &Card, candidates: &Candidates, interface: Interface) -> Interface {
        let all = || candidates.declared.iter().chain(&candidates.others);
        let Some(candidate) =
            all().find(|candidate| candidate.interface.is_same(interface.dialect, &interface.url))
        else {
            return interface;
        };
        // Also if the caller does not wait for the response.
        self.lock().last_failed_probe = Some(Instant::now());
        let (probed, url) = self.probe_candidate(card, candidate).await;
        let is_declared = candidates.declared.iter().any(|declared| std::ptr::eq(declared, candidate));
        let again = match (probed.failure, probed.verdict) {
            (None, Verdict::Yes | Verdict::Maybe) => {
                candidates.found(candidate, probed.verdict, url, is_declared)
            }
            (Some(failure), _) => {
                Interface { reason: candidates.unconfirmed(failure), failure: Some(failure), ..interface }
            }
            (None, _) => interface,
        };
        self.remember(card, again)
    }

    /// A call has proven that the agent speaks this dialect at this URL. Returns whether that was in doubt.
    pub(super) fn confirm(&self, card: &Card, dialect: Dialect, url: &Url) -> bool {
        let mut memory = self.lock();
        let Some((hash, interface)) = &mut memory.choice else { return false };
        if *hash != card.hash || !interface.is_same(dialect, url) || interface.failure.is_none() {
            return false;
        }
        interface.failure = None;
        interface.is_confirmed = true;
        interface.reason = "confirmed by a call".to_owned();
        true
    }

    /// Chooses another interface after the agent rejected this dialect at this URL; `None` if it speaks no other.
    pub async fn choose_other(&self, card: &Card, rejected: Dialect, url: &Url) -> Option<Interface> {
        let _probing = self.probing.lock().await;
        if let Some(interface) = self.chosen_instead_of(card, rejected, url) {
            return Some(interface);
        }
        let last_search = self.lock().last_failed_search;
        if last_search.is_some_and(|last| last.elapsed() < SEARCH_INTERVAL) {
            return None;
        }
        let candidates = Candidates::new(card, self);
        let probing = self.probe(card, &candidates, Some((rejected, url)));
        let found = tokio::time::timeout(CHOICE_TIMEOUT, probing).await.ok().and_then(Result::ok);
        match found.filter(|found| !found.is_same(rejected, url)) {
            Some(interface) => Some(self.remember(card, interface)),
            None => {
                self.lock().last_failed_search = Some(Instant::now());
                None
            }
        }
    }

    /// The current choice, if it is not this dialect at this URL.
    pub fn chosen_instead_of(&self, card: &Card, dialect: Dialect, url: &Url) -> Option<Interface> {
        self.remembered(card).filter(|interface| !interface.is_same(dialect, url))
    }

    pub fn client(&self, card: &Card, interface: &Interface) -> Result<Client, CardError> {
        let (http, credentials) = if self.addresses.is_trusted(&interface.url) {
            (&self.http, self.credentials(card)?)
        } else {
            (&self.http_without_certificate, Credentials::default())
        };
        let max_size = self.max_response_size.load(Ordering::Relaxed);
        let limits = ResponseLimits { max_size, memory: Arc::clone(&self.responses) };
        Ok(Client::new(http, interface, credentials, limits, self.ids.clone()))
    }

    pub(crate) fn set_max_response_size(&self, size: u64) {
        self.max_response_size.store(size, Ordering::Relaxed);
    }

    fn credentials(&self, card: &Card) -> Result<Credentials, CardError> {
        self.keyring.for_tasks(&card.security).map_err(CardError::Auth)
    }

    fn remembered(&self, card: &Card) -> Option<Interface> {
        let memory = self.lock();
        let (hash, interface) = memory.choice.as_ref()?;
        (*hash == card.hash).then(|| interface.clone())
    }

    /// The choice, unless it is time to probe it again.
    fn settled(&self, card: &Card) -> Option<Interface> {
        let interface = self.remembered(card)?;
        let last_probe = self.lock().last_failed_probe;
        let is_settled = match interface.failure {
            // A probe without a response would use up the time that a health check has.
            None | Some(ProbeFailure::NoResponse) => true,
            // The agent is not ready, and becomes it as soon as a probe succeeds.
            Some(failure) if failure.prevents_calls() => false,
            Some(_) => last_probe.is_some_and(|last| last.elapsed() < RECHECK_INTERVAL),
        };
        is_settled.then_some(interface)
    }

    fn remember(&self, card: &Card, interface: Interface) -> Interface {
        let is_known = self.remembered(card).is_some_and(|known| known.url == interface.url);
        if !is_known && !self.addresses.is_trusted(&interface.url) && !self.keyring.is_empty() {
            tracing::warn!(
                endpoint = %interface.url,
                "calling the agent without its credentials: the host of its card is not in `allowed_hosts`"
            );
        }
        let mut memory = self.lock();
        memory.choice = Some((card.hash.clone(), interface.clone()));
        memory.last_failed_search = None;
        memory.last_failed_probe = interface.failure.map(|_| Instant::now());
        interface
    }

    fn lock(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Probes the declared candidates, then the others. Returns the first that the agent certainly speaks, otherwise
    /// the first that it may speak, otherwise what went wrong with the first of all.
    async fn probe(
        &self,
        card: &Card,
        candidates: &Candidates,
        rejected: Option<(Dialect, &Url)>,
    ) -> Result<Interface, ProbeFailure> {
        let mut maybe: Option<Interface> = None;
        let mut first_failure: Option<ProbeFailure> = None;
        let mut rejecting_urls: Vec<Url> = Vec::new();
        // Only agents that reject v0.2 or v0.3 for missing ids need a probe of the dialect with ids.
        let mut demands_ids = matches!(rejected, Some((Dialect::V02 | Dialect::V03, _)));
        for (list, is_declared) in [(&candidates.declared, true), (&candidates.others, false)] {
            for candidate in list {
                if rejected.is_some_and(|(dialect, url)| candidate.interface.is_same(dialect, url)) {
                    continue;
                }
                if candidate.interface.dialect == Dialect::V03Ids && !demands_ids {
                    continue;
                }
                // Credentials do not depend on the dialect.
                if rejecting_urls.contains(&candidate.interface.url) {
                    continue;
                }
                let (Probed { verdict, failure }, url) = self.probe_candidate(card, candidate).await;
                demands_ids |= verdict == Verdict::DemandsIds;
                if let Some(ProbeFailure::Rejected(_)) = failure {
                    rejecting_urls.push(candidate.interface.url.clone());
                }
                first_failure = first_failure.or(failure);
                let found = || candidates.found(candidate, verdict, url, is_declared);
                match verdict {
                    Verdict::Yes => return Ok(found()),
                    Verdict::Maybe | Verdict::DemandsIds => maybe = maybe.or_else(|| Some(found())),
                    Verdict::NoResponse => {
                        return maybe.ok_or(first_failure.unwrap_or(ProbeFailure::NoResponse));
                    }
                    Verdict::No | Verdict::Open | Verdict::WrongAddress => {}
                }
            }
        }
        maybe.ok_or(first_failure.unwrap_or(ProbeFailure::NotA2a))
    }

    /// Probes a candidate at its URL, and with or without the trailing slash if there is no agent at that URL.
    async fn probe_candidate(&self, card: &Card, candidate: &Candidate) -> (Probed, Url) {
        let url = candidate.interface.url.clone();
        let probed = self.probe_url(card, candidate, url.clone()).await;
        // REST appends its paths to the URL, so there the slash makes no difference.
        let toggled = toggle_trailing_slash(&url).filter(|_| !candidate.interface.dialect.is_rest());
        match (probed.verdict, toggled) {
            (Verdict::WrongAddress, Some(url)) => (self.probe_url(card, candidate, url.clone()).await, url),
            _ => (probed, url),
        }
    }

    async fn probe_url(&self, card: &Card, candidate: &Candidate, url: Url) -> Probed {
        let interface = Interface { url, ..candidate.interface.clone() };
        let Ok(client) = self.client(card, &interface) else {
            return Verdict::No.into();
        };
        let probed = get_unknown_task(&client).await;
        // Any JSON-RPC agent may respond to this request with some error.
        if interface.dialect == Dialect::V03Ids && probed.verdict != Verdict::Yes {
            return Verdict::No.into();
        }
        match probed.verdict {
            // The agent may refuse or fail to look up this task and still accept messages.
            Verdict::Open => match accepts_messages(&client).await {
                true => Verdict::Maybe.into(),
                false => probed,
            },
            verdict => Probed { verdict: self.distinguish_v01(candidate, &client, verdict).await, ..probed },
        }
    }

    /// Corrects the verdict of a probe that is the same from v0.1 to v0.3.
    async fn distinguish_v01(&self, candidate: &Candidate, client: &Client, verdict: Verdict) -> Verdict {
        let is_v01 = client.dialect == Dialect::V01;
        if !is_v01 && !matches!(client.dialect, Dialect::V02 | Dialect::V03) {
            return verdict;
        }
        match verdict {
            // `tasks/get` is the same from v0.1 to v0.3, and the card leaves the version open.
            Verdict::Yes | Verdict::Maybe if !candidate.is_exact => match knows_message_send(client).await {
                Some(knows) if knows == is_v01 => Verdict::No,
                _ => verdict,
            },
            // An agent may accept messages without having `tasks/get`.
            Verdict::No if !is_v01 && knows_message_send(client).await == Some(true) => Verdict::Maybe,
            _ => verdict,
        }
    }
}

/// What a client needs to choose another dialect when the agent rejects the current one.
#[derive(Debug, Clone)]
pub struct DialectFallback {
    pub chooser: Arc<DialectChooser>,
    /// The card for which the dialect was chosen.
    pub card: Arc<Card>,
    /// Notified when the choice has changed.
    pub changed: Arc<tokio::sync::Notify>,
}

/// The result of a probe: whether the agent speaks the dialect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Yes,
    Maybe,
    /// The agent responded, and requires all ids from the client.
    DemandsIds,
    No,
    /// The server rejected the request, or failed, before it looked at the dialect.
    Open,
    /// There is no agent at this URL.
    WrongAddress,
    NoResponse,
}

/// The result of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Probed {
    verdict: Verdict,
    failure: Option<ProbeFailure>,
}

impl From<Verdict> for Probed {
    fn from(verdict: Verdict) -> Self {
        Self { verdict, failure: None }
    }
}

/// Why the probes do not show that calls can work. It has nothing of the agent's response but the status, so that it
/// stays equal from probe to probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeFailure {
    /// The server rejects the credentials: 401 or 403.
    Rejected(u16),
    /// There is no access token.
    NoToken,
    /// Any other HTTP status that says nothing about A2A.
    Status(u16),
    /// The responses are not those of an A2A agent.
    NotA2a,
    NoResponse,
}

impl ProbeFailure {
    /// Whether every call would fail too, so that the agent is not ready.
    pub fn prevents_calls(self) -> bool {
        matches!(self, Self::Rejected(_) | Self::NoToken)
    }

    fn of(error: &ClientError) -> Option<Self> {
        match error {
            ClientError::Token(_) => Some(Self::NoToken),
            ClientError::Unreachable(_) | ClientError::Broken(_) | ClientError::LargeHeaders => {
                Some(Self::NoResponse)
            }
            ClientError::NotA2a { .. } | ClientError::Compressed { .. } => Some(Self::NotA2a),
            ClientError::Refused { http_status: Some(status @ (401 | 403)), .. } => {
                Some(Self::Rejected(*status))
            }
            ClientError::Refused { http_status: Some(status), code: None, .. } => Some(Self::Status(*status)),
            ClientError::Refused { .. }
            | ClientError::TooLarge { .. }
            | ClientError::OutOfMemory
            | ClientError::NotSent(_)
            | ClientError::NotStored(_)
            | ClientError::WrongId => None,
        }
    }
}

impl fmt::Display for ProbeFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rejected(status) => {
                write!(f, "the agent rejects the credentials of the bridge: HTTP {status}")
            }
            Self::NoToken => f.write_str("there is no access token for the agent"),
            Self::Status(status) => write!(f, "the agent responds to A2A requests with HTTP {status}"),
            Self::NotA2a => f.write_str("the agent's responses are not A2A"),
            Self::NoResponse => f.write_str("the agent did not respond to any probe"),
        }
    }
}

/// Requests a task that does not exist. Nearly all agents respond that they do not know it.
async fn get_unknown_task(client: &Client) -> Probed {
    let (dialect, trace) = (client.dialect, TraceContext::default());
    let call = dialect.task_call(A2aMethod::Get, &uuid::Uuid::new_v4().to_string());
    let got = client.call(call, &trace, None, Task::try_from);
    match tokio::time::timeout(PROBE_TIMEOUT, got).await {
        Err(_) => Probed { verdict: Verdict::NoResponse, failure: Some(ProbeFailure::NoResponse) },
        // One SDK returns a task for any id.
        Ok(Ok(_)) => Verdict::Yes.into(),
        Ok(Err(error)) => match verdict_of(&error, dialect) {
            verdict @ (Verdict::Yes | Verdict::DemandsIds | Verdict::Maybe) => verdict.into(),
            verdict => Probed { verdict, failure: ProbeFailure::of(&error) },
        },
    }
}

fn verdict_of(error: &ClientError, dialect: Dialect) -> Verdict {
    if error.is_task_not_found() {
        return Verdict::Yes;
    }
    if Retry::in_another_dialect(error, Some(dialect)) == Some(Retry::MissingIds) {
        return Verdict::DemandsIds;
    }
    match error {
        ClientError::Unreachable(_)
        | ClientError::Broken(_)
        | ClientError::LargeHeaders
        | ClientError::Token(_)
        | ClientError::NotSent(_)
        | ClientError::NotStored(_)
        | ClientError::OutOfMemory => Verdict::NoResponse,
        ClientError::WrongId => Verdict::Maybe,
        ClientError::NotA2a { .. } | ClientError::Compressed { .. } | ClientError::TooLarge { .. } => {
            Verdict::No
        }
        ClientError::Refused { http_status, code, .. } => match (http_status, code) {
            (Some(401 | 403), _) | (Some(429 | 500 | 502..=504), None) => Verdict::Open,
            (Some(429 | 503), _) => Verdict::Maybe,
            (_, Some(code::METHOD_NOT_FOUND | code::VERSION_NOT_SUPPORTED)) => Verdict::No,
            // a2a-sdk (Python) 0.2 uses these for methods that it does not know.
            (_, Some(code::INVALID_REQUEST | code::PARSE_ERROR)) => Verdict::No,
            (_, Some(_)) if !dialect.is_rest() => Verdict::Maybe,
            (Some(300..=399 | 404 | 405 | 501), _) => Verdict::WrongAddress,
            (Some(400..=499), _) if dialect.is_rest() => Verdict::Maybe,
            _ => Verdict::No,
        },
    }
}

/// Whether the agent accepts messages in the client's dialect although it did not look up a task. The probe has no
/// message, so the agent rejects its parameters.
async fn accepts_messages(client: &Client) -> bool {
    let method = match client.dialect {
        Dialect::V02 | Dialect::V03 => "message/send",
        Dialect::V1 => "SendMessage",
        // These would run a message without parts, or have paths of their own.
        _ => return false,
    };
    let trace = TraceContext::default();
    let sent = client.call(Dialect::empty_call(method), &trace, None, SendResult::try_from);
    match tokio::time::timeout(PROBE_TIMEOUT, sent).await {
        Ok(Ok(_)) => true,
        Ok(Err(ClientError::Refused { http_status, code: Some(code), .. })) => {
            !matches!(http_status, Some(401 | 403)) && code != code::METHOD_NOT_FOUND
        }
        Ok(Err(_)) | Err(_) => false,
    }
}

/// Whether the agent knows `message/send`, which v0.1 does not have. The probe has no message, so agents of other
/// versions reject its parameters. `None` if the response leaves it open.
async fn knows_message_send(client: &Client) -> Option<bool> {
    let trace = TraceContext::default();
    let sent = client.call(Dialect::empty_call("message/send"), &trace, None, SendResult::try_from);
    match tokio::time::timeout(PROBE_TIMEOUT, sent).await.ok()? {
        Ok(_) => Some(true),
        Err(ClientError::Refused { http_status, code, .. }) => match (http_status, code) {
            (_, Some(code::METHOD_NOT_FOUND)) => Some(false),
            (_, Some(_)) => Some(true),
            // Some frameworks fail on an unknown method instead of reporting it.
            (Some(400 | 404 | 405 | 422 | 500 | 501), None) => Some(false),
            _ => None,
        },
        Err(_) => None,
    }
}

/// The dialects worth probing for a card, in order.
#[derive(Debug)]
struct Candidates {
    /// What the configuration and the card declare, the preferred one first.
    declared: Vec<Candidate>,
    /// What else an agent may speak at the same URLs.
    others: Vec<Candidate>,
    /// Who declares it, for messages.
    source: &'static str,
}

/// One dialect at one URL.
#[derive(Debug, Clone)]
struct Candidate {
    interface: Interface,
    /// Whether the configuration or the card declares exactly this version, so that v0.1 need not be distinguished
    /// from v0.2.
    is_exact: bool,
}

impl Candidates {
    fn new(card: &Card, chooser: &DialectChooser) -> Self {
        let DialectChooser { addresses, protocol, binding, .. } = chooser;
        let (protocol, binding) = (*protocol, *binding);
        let is_allowed = |dialect: Dialect| {
            protocol.is_none_or(|protocol| is_version(dialect, protocol))
                && binding.is_none_or(|binding| (binding == Binding::Rest) == dialect.is_rest())
        };
        // Without those whose binding the bridge does not have.
        let with_binding =
            |interface: DeclaredInterface| Some((parse_binding(&interface.binding)?, interface));
        let interfaces: Vec<_> = card.declared_interfaces().into_iter().filter_map(with_binding).collect();
        let mut declared: Vec<Candidate> = Vec::new();
        let mut others: Vec<Candidate> = Vec::new();
        for (declared_binding, interface) in &interfaces {
            for (dialect, is_exact) in declared_dialects(interface, *declared_binding) {
                if is_allowed(dialect) {
                    let is_exact = is_exact || protocol.is_some();
                    add(&mut declared, Candidate::new(interface, addresses, dialect, is_exact));
                }
            }
        }
        for (declared_binding, interface) in &interfaces {
            use Dialect::{V01, V1, V01Paths, V1Rest, V03, V03Ids, V03Rest};
            for dialect in [V1, V03, V03Ids, V01, V01Paths, V1Rest, V03Rest] {
                // A URL for JSON-RPC says nothing about the URL for REST, and vice versa, unless the configuration
                // asks for the other binding.
                let is_same_binding = (*declared_binding == Binding::Rest) == dialect.is_rest();
                if is_allowed(dialect) && (is_same_binding || binding.is_some()) {
                    let candidate = Candidate::new(interface, addresses, dialect, protocol.is_some());
                    if !contains(&declared, &candidate) {
                        add(&mut others, candidate);
                    }
                }
            }
        }
        // The path of the card may be wrong where the configured URL is right. But where `use_card_url` allows another
        // host, the agent is there, even if it demands credentials that it does not get.
        for candidate in &declared {
            let url = &candidate.interface.url;
            if *url != addresses.base && !addresses.is_other_host_from_card(url) {
                let interface = Interface { url: addresses.base.clone(), ..candidate.interface.clone() };
                add(&mut others, Candidate { interface, is_exact: candidate.is_exact });
            }
        }
        let is_configured = protocol.is_some() || binding.is_some();
        if declared.is_empty() && is_configured {
            declared = std::mem::take(&mut others);
        }
        let source = if is_configured { "the configuration" } else { "the card" };
        Self { declared, others, source }
    }

    /// The candidate, after a probe with this verdict at this URL.
    fn found(&self, candidate: &Candidate, verdict: Verdict, url: Url, is_declared: bool) -> Interface {
        let source = self.source;
        let is_confirmed = verdict == Verdict::Yes;
        let reason = match (is_declared, is_confirmed) {
            (true, true) => format!("declared by {source} and confirmed by a probe"),
            (true, false) => format!("declared by {source}; no probe contradicts it"),
            (false, _) => format!("found by a probe; {source} declares another"),
        };
        Interface { url, reason, is_confirmed, failure: None, ..candidate.interface.clone() }
    }

    /// The reason for a choice that no probe has confirmed.
    fn unconfirmed(&self, failure: ProbeFailure) -> String {
        format!("declared by {}; {failure}", self.source)
    }
}

impl Candidate {
    fn new(
        interface: &DeclaredInterface,
        addresses: &AddressPolicy,
        dialect: Dialect,
        is_exact: bool,
    ) -> Self {
        let mut url = addresses.resolve(&interface.url);
        // The paths of v0.3 begin with `/v1`, which some cards already have in the URL.
        if dialect == Dialect::V03Rest
            && let Some(path) = url.path().trim_end_matches('/').strip_suffix("/v1")
        {
            let path = path.to_owned();
            url.set_path(&path);
        }
        let has_tenants = matches!(dialect, Dialect::V1 | Dialect::V1Rest);
        let tenant = interface.tenant.clone().filter(|_| has_tenants);
        let interface =
            Interface { url, dialect, tenant, reason: String::new(), is_confirmed: false, failure: None };
        Self { interface, is_exact }
    }
}

fn contains(list: &[Candidate], candidate: &Candidate) -> bool {
    let Interface { dialect, url, .. } = &candidate.interface;
    list.iter().any(|other| other.interface.is_same(*dialect, url))
}

fn add(list: &mut Vec<Candidate>, candidate: Candidate) {
    if !contains(list, &candidate) {
        list.push(candidate);
    }
}

fn is_version(dialect: Dialect, protocol: A2aVersion) -> bool {
    match protocol {
        A2aVersion::V01 => matches!(dialect, Dialect::V01 | Dialect::V01Paths),
        // Both have the same form, and cards of v0.2 often have no version.
        A2aVersion::V02 => matches!(dialect, Dialect::V02 | Dialect::V03 | Dialect::V03Ids),
        A2aVersion::V03 => matches!(dialect, Dialect::V03 | Dialect::V03Ids | Dialect::V03Rest),
        A2aVersion::V1 => matches!(dialect, Dialect::V1 | Dialect::V1Rest),
    }
}

/// Reads the binding in a card; `None` for one that the bridge does not have.
fn parse_binding(text: &str) -> Option<Binding> {
    let letters: String = text.chars().filter(char::is_ascii_alphanumeric).collect();
    match letters.to_ascii_uppercase().as_str() {
        "JSONRPC" | "JSONRPC20" | "JSONRPC2" | "" => Some(Binding::JsonRpc),
        "HTTPJSON" | "REST" | "HTTP" | "HTTPREST" => Some(Binding::Rest),
        _ => None,
    }
}

/// The dialects that an interface of a card may mean, and whether the card names exactly that version.
fn declared_dialects(interface: &DeclaredInterface, binding: Binding) -> Vec<(Dialect, bool)> {
    use Dialect::{V01, V1, V1Rest, V02, V03, V03Rest};
    let is_rest = binding == Binding::Rest;
    let version = interface.version.trim_start_matches(['v', 'V']);
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(0), Some(1)) => vec![(V01, true)],
        (Some(0), Some(2)) if !is_rest => vec![(V02, true)],
        (Some(0), _) => vec![(if is_rest { V03Rest } else { V03 }, true)],
        (Some(1), _) => vec![(if is_rest { V1Rest } else { V1 }, true)],
        _ if interface.is_v1_form => vec![(if is_rest { V1Rest } else { V1 }, true)],
        _ if is_rest => vec![(V03Rest, true)],
        // Before v0.2.5 cards had no version. A field that only v0.1 has makes v0.1 likelier.
        _ if interface.has_v01_field => vec![(V01, false), (V03, false)],
        _ => vec![(V03, false), (V01, false)],
    }
}
