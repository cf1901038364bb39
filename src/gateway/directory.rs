//! The agents on NATS, as their bridges announce them in the registry.
//!
//! The directory answers what agents there are without a request. At the start, and after a reconnection, it asks the
//! bridges (`$SRV.INFO`), because the next announcements may take 15 s.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::sync::watch;

use super::mesh::Mesh;
use crate::bus::subject::{DiscoveryVerb, Subjects, Token};
use crate::telemetry::log_limit::LogLimit;
use crate::text::error_chain;

/// Instances of agents that the directory holds, and the bytes of their announcements.
const MAX_INSTANCES: usize = 20_000;
const MAX_BYTES: usize = 64 << 20;
/// An instance is gone after this many intervals without an announcement.
const MISSED_INTERVALS: u32 = 3;
const MAX_INTERVAL: Duration = Duration::from_secs(300);
/// How long an agent is known after its last instance is gone.
const REMEMBERED: Duration = Duration::from_secs(600);
const PRUNE_INTERVAL: Duration = Duration::from_secs(5);
const DISCOVERY_FIRST: Duration = Duration::from_secs(2);
const DISCOVERY_PAUSE: Duration = Duration::from_millis(300);
const DISCOVERY_LIMIT: Duration = Duration::from_secs(5);
/// How long a request waits for the first discovery.
const WAIT_FOR_DISCOVERY: Duration = Duration::from_secs(3);

/// The states of an agent, the best one first. With several instances, the best state counts.
const STATES: [&str; 6] = ["ready", "unhealthy", "starting", "backing-off", "failed", "stopped"];
/// The state of an agent without an instance.
const ABSENT: &str = "absent";

/// One instance of an agent, as a bridge announces it.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct Announcement {
    #[serde(skip_serializing)]
    agent: String,
    state: String,
    since: Option<String>,
    pub(super) instance: String,
    bridge: Option<String>,
    #[serde(skip_serializing)]
    pub(super) actions: Vec<AnnouncedAction>,
    card_hash: Option<String>,
    restarts: u64,
    last_error: Option<String>,
    reason: Option<String>,
    protocol_version: Option<String>,
    binding: Option<String>,
    #[serde(skip_serializing)]
    interval_s: u64,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct AnnouncedAction {
    pub(super) action: String,
    skill: Option<String>,
    name: String,
    description: String,
    /// JSON schema of the parameters.
    params: Option<Box<RawValue>>,
}

#[derive(Debug)]
struct Instance {
    announcement: Announcement,
    bytes: usize,
    expires: Instant,
}

#[derive(Debug, Default)]
struct KnownAgent {
    instances: HashMap<String, Instance>,
    /// When the last instance left.
    absent_since: Option<Instant>,
}

#[derive(Debug, Default)]
struct Known {
    agents: BTreeMap<String, KnownAgent>,
    /// The names of agents by their tokens, for those whose token differs.
    by_token: HashMap<String, String>,
    instances: usize,
    bytes: usize,
}

/// An agent for the list of agents.
#[derive(Debug, Serialize)]
pub(super) struct AgentOverview {
    pub(super) agent: String,
    pub(super) state: String,
    since: Option<String>,
    pub(super) skills: Vec<String>,
    instances: usize,
    reason: Option<String>,
}

/// All that the directory knows about an agent.
#[derive(Debug, Serialize)]
pub(super) struct AgentDetails {
    pub(super) agent: String,
    pub(super) state: String,
    pub(super) skills: Vec<AnnouncedAction>,
    pub(super) instances: Vec<Announcement>,
}

#[derive(Debug)]
pub(super) struct Directory {
    known: Mutex<Known>,
    is_discovered: watch::Sender<bool>,
    full: LogLimit,
}

impl Default for Directory {
    fn default() -> Self {
        Self { known: Mutex::default(), is_discovered: watch::Sender::new(false), full: LogLimit::default() }
    }
}

impl Directory {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the registry until the connection is closed.
    pub(super) async fn run(&self, mesh: &Mesh) {
        let mut registry = match mesh.client.subscribe(mesh.subjects.registries()).await {
            Ok(registry) => registry,
            Err(error) => {
                return tracing::error!(error = error_chain(&error), "cannot follow the registry of agents");
            }
        };
        let mut prune = tokio::time::interval(PRUNE_INTERVAL);
        let mut discovery = Box::pin(self.discover(mesh));
        let mut is_discovering = true;
        loop {
            tokio::select! {
                announcement = registry.next() => match announcement {
                    Some(message) => {
                        if let Ok(announcement) = serde_json::from_slice(&message.payload) {
                            self.add(announcement, message.payload.len());
                        }
                    }
                    None => return,
                },
                () = &mut discovery, if is_discovering => is_discovering = false,
                () = mesh.reconnected() => {
                    discovery = Box::pin(self.discover(mesh));
                    is_discovering = true;
                }
                _ = prune.tick() => self.known().prune(Instant::now()),
            }
        }
    }

    /// Asks all bridges for their agents.
    async fn discover(&self, mesh: &Mesh) {
        let ask = async {
            let Ok(mut replies) = mesh.discover(DiscoveryVerb::Info, None).await else { return };
            let mut reply = replies.first(DISCOVERY_FIRST).await.ok();
            while let Some(message) = reply {
                if let Ok(info) = serde_json::from_slice(&message.payload)
                    && let Some(announcement) = from_info(&info, &mesh.subjects)
                {
                    self.add(announcement, message.payload.len());
                }
                reply = tokio::time::timeout(DISCOVERY_PAUSE, replies.next()).await.ok().flatten();
            }
        };
        let _ = tokio::time::timeout(DISCOVERY_LIMIT, ask).await;
        self.is_discovered.send_replace(true);
    }

    pub(super) fn is_discovered(&self) -> bool {
        *self.is_discovered.borrow()
    }

    async fn wait_until_discovered(&self) {
        let mut is_discovered = self.is_discovered.subscribe();
        let _ = tokio::time::timeout(WAIT_FOR_DISCOVERY, is_discovered.wait_for(|is| *is)).await;
    }

    fn add(&self, announcement: Announcement, bytes: usize) {
        let is_added = self.known().add(announcement, bytes, Instant::now());
        if !is_added && self.full.add(Instant::now()).is_some() {
            tracing::warn!("there are too many agents on NATS; the gateway does not list all of them");
        }
    }

    pub(super) async fn list(&self, may_use: impl Fn(&str) -> bool) -> Vec<AgentOverview> {
        self.wait_until_discovered().await;
        let known = self.known();
        let agents = known.agents.iter().filter(|(name, agent)| !agent.instances.is_empty() && may_use(name));
        agents.map(|(name, agent)| agent.overview(name)).collect()
    }

    pub(super) async fn details(&self, agent: &str) -> Option<AgentDetails> {
        self.wait_until_discovered().await;
        self.known().agents.get(agent).map(|known| known.details(agent))
    }

    /// The name of an agent, given its name or its token.
    pub(super) fn name(&self, name_or_token: &str) -> String {
        let known = self.known();
        if known.agents.contains_key(name_or_token) {
            return name_or_token.to_owned();
        }
        known.by_token.get(name_or_token).map_or(name_or_token, String::as_str).to_owned()
    }

    /// The action of a skill, given its name or its token.
    pub(super) fn action(&self, agent: &str, skill: &str) -> Token {
        let plain = Token::action(skill);
        if plain.as_str() == skill {
            return plain;
        }
        let known = self.known();
        let instances = known.agents.get(agent).into_iter().flat_map(|agent| agent.instances.values());
        let mut actions = instances.flat_map(|instance| &instance.announcement.actions);
        let is_token = actions.any(|action| action.action == skill);
        Token::parse(skill).filter(|_| is_token).unwrap_or(plain)
    }

    /// The number of instances of an agent.
    pub(super) fn instances(&self, agent: &str) -> usize {
        self.known().agents.get(agent).map_or(0, |agent| agent.instances.len())
    }
}

impl Known {
    /// Whether there was room.
    fn add(&mut self, announcement: Announcement, bytes: usize, now: Instant) -> bool {
        let name = announcement.agent.clone();
        let before = self.agents.get(&name).and_then(|agent| agent.instances.get(&announcement.instance));
        let (instances, freed) = before.map_or((1, 0), |before| (0, before.bytes));
        let total = (self.bytes + bytes).saturating_sub(freed);
        if name.is_empty() || self.instances + instances > MAX_INSTANCES || total > MAX_BYTES {
            return name.is_empty();
        }
        self.instances += instances;
        self.bytes = total;
        let interval = Duration::from_secs(announcement.interval_s.max(1)).min(MAX_INTERVAL);
        let expires = now + interval * MISSED_INTERVALS;
        let token = Token::new(&name);
        if token.as_str() != name {
            self.by_token.insert(token.as_str().to_owned(), name.clone());
        }
        let agent = self.agents.entry(name).or_default();
        agent.absent_since = None;
        agent.instances.insert(announcement.instance.clone(), Instance { announcement, bytes, expires });
        true
    }

    fn prune(&mut self, now: Instant) {
        let (mut removed, mut freed) = (0, 0);
        for agent in self.agents.values_mut() {
            agent.instances.retain(|_, instance| {
                let is_kept = instance.expires > now;
                removed += usize::from(!is_kept);
                freed += if is_kept { 0 } else { instance.bytes };
                is_kept
            });
            if agent.instances.is_empty() {
                agent.absent_since.get_or_insert(now);
            }
        }
        self.instances -= removed;
        self.bytes -= freed;
        let is_remembered = |agent: &KnownAgent| {
            agent.absent_since.is_none_or(|since| now.duration_since(since) < REMEMBERED)
        };
        self.agents.retain(|_, agent| is_remembered(agent));
        let Self { agents, by_token, .. } = self;
        by_token.retain(|_, name| agents.contains_key(name));
    }
}

impl KnownAgent {
    /// The instance whose state counts.
    fn best(&self) -> Option<&Announcement> {
        let announcements = self.instances.values().map(|instance| &instance.announcement);
        announcements.min_by_key(|announcement| {
            let rank = STATES.iter().position(|state| *state == announcement.state);
            (rank.unwrap_or(STATES.len()), &announcement.instance)
        })
    }

    fn overview(&self, name: &str) -> AgentOverview {
        let best = self.best();
        let skills = best.map(|best| best.actions.iter().map(|action| action.action.clone()).collect());
        AgentOverview {
            agent: name.to_owned(),
            state: best.map_or(ABSENT, |best| &best.state).to_owned(),
            since: best.and_then(|best| best.since.clone()),
            skills: skills.unwrap_or_default(),
            instances: self.instances.len(),
            reason: best.and_then(|best| best.reason.clone()),
        }
    }

    fn details(&self, name: &str) -> AgentDetails {
        let best = self.best();
        let mut instances: Vec<_> = self.instances.values().map(|one| one.announcement.clone()).collect();
        instances.sort_by(|a, b| a.instance.cmp(&b.instance));
        AgentDetails {
            agent: name.to_owned(),
            state: best.map_or(ABSENT, |best| &best.state).to_owned(),
            skills: best.map(|best| best.actions.clone()).unwrap_or_default(),
            instances,
        }
    }
}

/// The announcement of an agent, from its INFO. Services of other programs, and of bridges with another prefix, are none.
fn from_info(info: &Value, subjects: &Subjects) -> Option<Announcement> {
    let text = |value: &Value, pointer: &str| value.pointer(pointer)?.as_str().map(str::to_owned);
    let metadata = |key: &str| info.get("metadata")?.get(key)?.as_str().map(str::to_owned);
    let (agent, state) = (metadata("a2a.agent")?, metadata("a2a.state")?);
    let (token, endpoints) = (Token::new(&agent), info.get("endpoints")?.as_array()?);
    let has = |subject: &str| {
        endpoints.iter().any(|endpoint| endpoint.get("subject").is_some_and(|one| one == subject))
    };
    if !has(&subjects.card(&token)) {
        return None;
    }
    let action_root = subjects.action(&token, &Token::new("x"));
    let action_root = action_root.strip_suffix('x')?;
    let built_in =
        [subjects.provide_required_input(&token), subjects.cancel_task(&token), subjects.get_task(&token)];
    let actions = endpoints.iter().filter_map(|endpoint| {
        let subject = text(endpoint, "/subject")?;
        if !subject.starts_with(action_root) || built_in.contains(&subject) {
            return None;
        }
        Some(AnnouncedAction {
            action: text(endpoint, "/name")?,
            skill: text(endpoint, "/metadata/a2a.skill"),
            name: text(endpoint, "/metadata/name").unwrap_or_default(),
            description: text(endpoint, "/metadata/description").unwrap_or_default(),
            params: text(endpoint, "/metadata/params").and_then(|params| RawValue::from_string(params).ok()),
        })
    });
    Some(Announcement {
        state,
        since: metadata("a2a.since"),
        instance: text(info, "/id")?,
        bridge: metadata("bridge"),
        actions: actions.collect(),
        card_hash: metadata("a2a.card_hash"),
        restarts: metadata("a2a.restarts").and_then(|text| text.parse().ok()).unwrap_or_default(),
        last_error: metadata("a2a.last_error"),
        reason: metadata("a2a.reason"),
        protocol_version: metadata("a2a.protocol_version"),
        binding: metadata("a2a.binding"),
        interval_s: 15,
        agent,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announcement(agent: &str, instance: &str, state: &str) -> Announcement {
        let [agent, instance, state] = [agent, instance, state].map(str::to_owned);
        Announcement { agent, instance, state, interval_s: 15, ..Announcement::default() }
    }

    #[test]
    fn the_best_state_of_all_instances_counts_and_silent_instances_leave() {
        let (mut known, begin) = (Known::default(), Instant::now());
        let after = |seconds| begin + Duration::from_secs(seconds);
        assert!(known.add(announcement("a b", "1", "ready"), 100, begin));
        assert!(known.add(announcement("a b", "2", "failed"), 100, after(20)));
        assert_eq!(known.by_token["_xa_20b"], "a b");
        assert_eq!(known.agents["a b"].overview("a b").state, "ready");
        known.prune(after(46));
        assert_eq!(known.agents["a b"].overview("a b").state, "failed");
        known.prune(after(70));
        assert_eq!(known.agents["a b"].details("a b").state, ABSENT);
        assert_eq!((known.instances, known.bytes), (0, 0));
        known.prune(after(700));
        assert!(known.agents.is_empty() && known.by_token.is_empty());
    }

    #[test]
    fn the_directory_is_bounded() {
        let (mut known, now) = (Known::default(), Instant::now());
        assert!(known.add(announcement("a", "1", "ready"), MAX_BYTES, now));
        assert!(!known.add(announcement("b", "1", "ready"), 1, now));
        assert!(
            known.add(announcement("a", "1", "ready"), 10, now),
            "an update takes the place of the former one"
        );
        assert!(known.add(announcement("b", "1", "ready"), 1, now));
        assert_eq!(known.bytes, 11);
    }
}
