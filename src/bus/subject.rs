//! Builds every subject and token that the bridge uses. No other module formats subjects.
//!
//! Dots separate the tokens of a subject, and a card is untrusted text: an agent's skill ids must not be able
//! to add a token, a wildcard or a `$`. So ids become [`Token`]s first, and [`Subjects`] appends only tokens
//! to its prefix. In the other direction, the caller chooses the reply subject of a request, and
//! [`ReplyGuard`] decides whether the bridge may publish to it.

mod agent_protocol;
mod reply_guard;

use std::fmt;
use std::sync::Arc;

use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::config::values::subject_prefix;
use crate::text::{head, hex};

pub(crate) use self::agent_protocol::{
    AgentProtocolSubjects, KIND as AGENT_PROTOCOL_KIND, ROOT as AGENT_PROTOCOL_ROOT,
};
pub use self::reply_guard::ReplyGuard;

const TOKEN_MAX: usize = 64;
/// Marks a token that differs from its id.
const ESCAPED: &str = "_x";
/// Within an escaped token: a hash follows. No escape begins with this.
const HASHED: &str = "_z";
/// 128 bits in hexadecimal digits.
const HASH_LEN: usize = 32;
/// Maximum bytes of the beginning of an id that is kept before its hash.
const BEGINNING_MAX: usize = TOKEN_MAX - ESCAPED.len() - HASHED.len() - HASH_LEN;

const PROVIDE_REQUIRED_INPUT: &str = "provide_required_input";
const CANCEL_TASK: &str = "cancel_task";
const GET_TASK: &str = "get_task";
/// The verb with which a replica announces itself to the others.
pub(crate) const ANNOUNCE: &str = "announce";

/// A subject prefix or pattern that the configuration would refuse, too.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{subject}` is not valid: {reason}")]
pub struct SubjectError {
    subject: String,
    reason: String,
}

impl SubjectError {
    fn new(subject: &str, reason: String) -> Self {
        Self { subject: subject.to_owned(), reason }
    }
}

/// One token of a subject: `[A-Za-z0-9_-]{1,64}`.
///
/// Different ids have different tokens: an unchanged id never begins with `_x`; an escaped id can be decoded
/// unambiguously (`_` is always followed by `_` or two upper-case hexadecimal digits); a hashed id contains
/// `_z`, which no escape produces.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(Arc<str>);

impl Token {
    /// The token of an agent or a task, which have no reserved names.
    pub fn new(id: &str) -> Self {
        if is_plain(id) && id.len() <= TOKEN_MAX && !id.starts_with(ESCAPED) {
            Self(id.into())
        } else {
            Self::escaped(id)
        }
    }

    /// The token of a skill, which must differ from the names of built-in actions.
    pub fn action(id: &str) -> Self {
        match id {
            PROVIDE_REQUIRED_INPUT | CANCEL_TASK | GET_TASK => Self::escaped(id),
            _ => Self::new(id),
        }
    }

    /// A token of a received subject or message.
    pub(crate) fn parse(token: &str) -> Option<Self> {
        (is_plain(token) && token.len() <= TOKEN_MAX).then(|| Self(token.into()))
    }

    fn escaped(id: &str) -> Self {
        let mut token = String::from(ESCAPED);
        // Where to cut an id that turns out to be too long: always between two escapes, because half an
        // escape could have another meaning.
        let mut cut = token.len();
        for byte in id.bytes() {
            match byte {
                b'_' => token.push_str("__"),
                b'-' | b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' => token.push(char::from(byte)),
                other => token.push_str(&format!("_{other:02X}")),
            }
            if token.len() <= ESCAPED.len() + BEGINNING_MAX {
                cut = token.len();
            } else if token.len() > TOKEN_MAX {
                token.truncate(cut);
                token.push_str(HASHED);
                token.push_str(head(&hex(&Sha256::digest(id)), HASH_LEN));
                break;
            }
        }
        Self(token.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn is_plain(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
}

/// The subjects of the bridge, all below one prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subjects {
    prefix: Arc<str>,
}

impl Subjects {
    /// Subjects below `prefix`: one or more plain tokens, `a2a` or `acme.a2a`.
    ///
    /// # Errors
    ///
    /// When the configuration would refuse the prefix.
    pub fn new(prefix: &str) -> Result<Self, SubjectError> {
        let checked = subject_prefix(prefix).map_err(|reason| SubjectError::new(prefix, reason))?;
        Ok(Self { prefix: checked.into() })
    }

    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    pub fn action(&self, agent: &Token, action: &Token) -> String {
        self.below("action", agent, action.as_str())
    }

    pub fn provide_required_input(&self, agent: &Token) -> String {
        self.below("action", agent, PROVIDE_REQUIRED_INPUT)
    }

    pub fn cancel_task(&self, agent: &Token) -> String {
        self.below("action", agent, CANCEL_TASK)
    }

    pub fn get_task(&self, agent: &Token) -> String {
        self.below("action", agent, GET_TASK)
    }

    /// The subject on which gateways call an endpoint: below `<prefix>.gw.` instead of `<prefix>.`; `None` for a subject
    /// that is not below the prefix.
    pub fn gateway(&self, subject: &str) -> Option<String> {
        let rest = subject.strip_prefix(&*self.prefix)?.strip_prefix('.')?;
        Some(format!("{}.gw.{rest}", self.prefix))
    }

    /// The subject of which [`Subjects::gateway`] makes this one.
    pub fn direct(&self, subject: &str) -> Option<String> {
        let rest = subject.strip_prefix(&*self.prefix)?.strip_prefix(".gw.")?;
        Some(format!("{}.{rest}", self.prefix))
    }

    /// Requests for the agent's card.
    pub fn card(&self, agent: &Token) -> String {
        format!("{}.card.{agent}", self.prefix)
    }

    /// Control requests; `*` in place of a verb subscribes to all verbs.
    pub fn control(&self, agent: &Token, verb: &str) -> String {
        self.below("control", agent, verb)
    }

    /// Announcements of the agent in the registry.
    pub fn registry(&self, agent: &Token) -> String {
        format!("{}.registry.{agent}", self.prefix)
    }

    /// Announcements of all agents.
    pub fn registries(&self) -> String {
        format!("{}.registry.*", self.prefix)
    }

    /// Updates of a submitted task.
    pub fn task(&self, agent: &Token, task: &Token) -> String {
        self.below("task", agent, task.as_str())
    }

    /// Requests about files: `get`, `put`, `list`, `delete`.
    pub fn files(&self, verb: &str) -> String {
        format!("{}.files.{verb}", self.prefix)
    }

    /// Chunks of an upload; `*` in place of its id subscribes to all uploads of the instance.
    pub fn upload(&self, instance: &str, id: &str) -> String {
        format!("{}.upload.{instance}.{id}", self.prefix)
    }

    /// Events of a log: `kind` is `s` for a session and `r` for a call without one, and `id` names it.
    pub(crate) fn event(&self, owner: &str, kind: &str, id: &Token) -> String {
        format!("{}.event.{owner}.{kind}.{id}", self.prefix)
    }

    /// The same events, as the server publishes them once they are stored.
    pub(crate) fn live_event(&self, owner: &str, kind: &str, id: &Token) -> String {
        format!("{}.live.{owner}.{kind}.{id}", self.prefix)
    }

    /// Events of all sessions of an owner.
    pub(crate) fn session_events(&self, owner: &str) -> String {
        format!("{}.event.{owner}.s.*", self.prefix)
    }

    /// Requests about sessions, such as `list`.
    pub(crate) fn sessions(&self, verb: &str) -> String {
        format!("{}.sessions.{verb}", self.prefix)
    }

    /// All subjects of [`Self::event`].
    pub(crate) fn all_events(&self) -> String {
        format!("{}.event.>", self.prefix)
    }

    /// All subjects of [`Self::live_event`].
    pub(crate) fn all_live_events(&self) -> String {
        format!("{}.live.>", self.prefix)
    }

    /// Requests to attach to a logged call of an agent.
    pub fn attach(&self, agent: &Token) -> String {
        format!("{}.attach.{agent}", self.prefix)
    }

    /// Announcements of bridges that write files, for other bridges.
    pub fn file_writers(&self) -> String {
        format!("{}.peer.files", self.prefix)
    }

    /// Questions of other bridges about the files that a bridge is writing.
    pub fn file_writer(&self, instance: &str) -> String {
        format!("{}.peer.files.{instance}", self.prefix)
    }

    /// Requests of other replicas to one replica: `ping`, `claim`, `changed`; `*` in place of a verb subscribes to all of
    /// them. `announce` is the other way round: a replica publishes to its own subject, and all others listen.
    pub fn peer(&self, instance: Uuid, verb: &str) -> String {
        format!("{}.peer.{}.{verb}", self.prefix, instance.simple())
    }

    /// The announcements of all replicas.
    pub fn peer_announcements(&self) -> String {
        format!("{}.peer.*.{ANNOUNCE}", self.prefix)
    }

    /// The replica that announces itself on this subject.
    pub fn announced_peer(&self, subject: &str) -> Option<Uuid> {
        let rest = subject.strip_prefix(&*self.prefix)?.strip_prefix(".peer.")?;
        Uuid::try_parse(rest.strip_suffix(ANNOUNCE)?.strip_suffix('.')?).ok()
    }

    /// A request that one replica forwards to another.
    pub fn peer_call(&self, instance: Uuid, agent: &Token, action: &str) -> String {
        format!("{}.peer.{}.call.{agent}.{action}", self.prefix, instance.simple())
    }

    /// All requests that others forward to one replica.
    pub fn peer_calls(&self, instance: Uuid) -> String {
        format!("{}.peer.{}.call.*.*", self.prefix, instance.simple())
    }

    /// Requests to all replicas that serve an agent.
    pub fn peers(&self, agent: &Token) -> String {
        format!("{}.peers.{agent}", self.prefix)
    }

    /// The discovery subjects of a service: for all services, for its name, and for its id.
    pub fn srv(verb: DiscoveryVerb, name: &Token, id: &str) -> [String; 3] {
        let verb = verb.as_str();
        [format!("$SRV.{verb}"), format!("$SRV.{verb}.{name}"), format!("$SRV.{verb}.{name}.{id}")]
    }

    fn below(&self, kind: &str, agent: &Token, last: &str) -> String {
        format!("{}.{kind}.{agent}.{last}", self.prefix)
    }
}

/// A discovery request of the NATS service protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiscoveryVerb {
    Ping,
    Info,
    Stats,
}

impl DiscoveryVerb {
    pub const ALL: [Self; 3] = [Self::Ping, Self::Info, Self::Stats];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ping => "PING",
            Self::Info => "INFO",
            Self::Stats => "STATS",
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("forecast", "forecast")]
    #[case("a_b-C9", "a_b-C9")]
    #[case("_private", "_private")]
    #[case("", "_x")]
    #[case("_x", "_x__x")]
    #[case("_xa", "_x__xa")]
    #[case("a.b", "_xa_2Eb")]
    #[case("two words_x", "_xtwo_20words__x")]
    #[case("é", "_x_C3_A9")]
    #[case("$JS.>", "_x_24JS_2E_3E")]
    fn an_id_becomes_a_readable_token(#[case] id: &str, #[case] token: &str) {
        assert_eq!(Token::new(id).as_str(), token);
    }

    #[test]
    fn an_id_that_is_too_long_keeps_its_beginning_and_gets_a_hash() {
        assert_eq!(Token::new(&"a".repeat(64)).as_str(), "a".repeat(64));
        let long = Token::new(&"a".repeat(65));
        assert_eq!(long.as_str().len(), 64);
        assert!(long.as_str().starts_with(&format!("_x{}_z", "a".repeat(28))), "{long}");
        assert_ne!(long, Token::new(&"a".repeat(66)));
        // The beginning is cut between two escapes: 27 bytes, then one that would need three.
        let cut = Token::new(&format!("{} {}", "a".repeat(27), "b".repeat(64)));
        assert!(cut.as_str().starts_with(&format!("_x{}_z", "a".repeat(27))), "{cut}");
    }

    #[rstest]
    #[case("provide_required_input", "_xprovide__required__input")]
    #[case("cancel_task", "_xcancel__task")]
    #[case("get_task", "_xget__task")]
    #[case("prompt", "prompt")]
    fn a_skill_cannot_take_the_name_of_a_built_in_action(#[case] id: &str, #[case] token: &str) {
        assert_eq!(Token::action(id).as_str(), token);
    }

    #[test]
    fn subjects_are_those_of_the_contract() {
        let subjects = Subjects::new("a2a").unwrap();
        let agent = Token::new("weather");
        assert_eq!(subjects.provide_required_input(&agent), "a2a.action.weather.provide_required_input");
        assert_eq!(subjects.cancel_task(&agent), "a2a.action.weather.cancel_task");
        assert_eq!(subjects.get_task(&agent), "a2a.action.weather.get_task");
        assert_eq!(subjects.card(&agent), "a2a.card.weather");
        assert_eq!(subjects.registry(&agent), "a2a.registry.weather");
        assert_eq!(subjects.task(&agent, &Token::new("t.1")), "a2a.task.weather._xt_2E1");
        assert_eq!(subjects.files("get"), "a2a.files.get");
        assert_eq!(subjects.upload("i1", "u1"), "a2a.upload.i1.u1");
        assert_eq!(
            Subjects::srv(DiscoveryVerb::Info, &agent, "i1"),
            ["$SRV.INFO", "$SRV.INFO.weather", "$SRV.INFO.weather.i1"]
        );
    }

    #[test]
    fn the_subjects_of_replicas_are_below_their_own_tokens() {
        let (subjects, agent) = (Subjects::new("acme.a2a").unwrap(), Token::new("weather"));
        let id = Uuid::nil();
        let own = format!("acme.a2a.peer.{}", "0".repeat(32));
        assert_eq!(subjects.peer(id, "ping"), format!("{own}.ping"));
        assert_eq!(subjects.peer_calls(id), format!("{own}.call.*.*"));
        assert_eq!(subjects.peer_call(id, &agent, "get_task"), format!("{own}.call.weather.get_task"));
        assert_eq!(subjects.peers(&agent), "acme.a2a.peers.weather");
        assert_eq!(subjects.peer_announcements(), "acme.a2a.peer.*.announce");
        assert_eq!(subjects.announced_peer(&subjects.peer(id, ANNOUNCE)), Some(id));
        for other in ["acme.a2a.peer.x.announce", "acme.a2a.peer.announce", "a2a.peer.x", "", "acme.a2a"] {
            assert_eq!(subjects.announced_peer(other), None, "{other}");
        }
    }

    #[rstest]
    #[case("")]
    #[case("a2a.")]
    #[case("a..b")]
    #[case("a.*")]
    #[case("$SRV")]
    #[case("a b")]
    #[case("_INBOX.x")]
    fn a_prefix_that_is_not_made_of_plain_tokens_is_refused(#[case] prefix: &str) {
        assert!(Subjects::new(prefix).is_err());
    }

    /// Reads an escaped token back; `None` for one with a hash.
    fn id_of(token: &str) -> Option<String> {
        let Some(mut rest) = token.strip_prefix(ESCAPED) else {
            return Some(token.to_owned());
        };
        let mut id = Vec::new();
        while let Some((first, tail)) = rest.as_bytes().split_first() {
            rest = if *first != b'_' {
                id.push(*first);
                &rest[1..]
            } else if tail[0] == b'_' {
                id.push(b'_');
                &rest[2..]
            } else if tail[0] == b'z' {
                return None;
            } else {
                id.push(u8::from_str_radix(&rest[1..3], 16).unwrap());
                &rest[3..]
            };
        }
        Some(String::from_utf8(id).unwrap())
    }

    proptest! {
        #[test]
        fn every_id_makes_a_valid_token(id in any::<String>()) {
            for token in [Token::new(&id), Token::action(&id)] {
                prop_assert!(is_plain(token.as_str()) && token.as_str().len() <= 64, "{token}");
            }
        }

        #[test]
        fn a_token_can_be_read_back_so_that_no_two_ids_share_one(id in "[a-c_xz.*>$ é0-9A-F]{0,40}") {
            for token in [Token::new(&id), Token::action(&id)] {
                if let Some(read) = id_of(token.as_str()) {
                    prop_assert_eq!(&read, &id);
                }
            }
        }

        #[test]
        fn similar_ids_make_different_tokens(one in "[a_xz2E. ]{0,70}", two in "[a_xz2E. ]{0,70}") {
            prop_assert_eq!(one == two, Token::new(&one) == Token::new(&two));
        }
    }
}
