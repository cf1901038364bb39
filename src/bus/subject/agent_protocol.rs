//! The subjects of the Synadia Agent Protocol for NATS 0.3.

use super::Token;

/// First token of every subject of the protocol.
pub(crate) const ROOT: &str = "agents";
/// The kind of agent, third token of every subject.
pub(crate) const KIND: &str = "a2a";
/// Marks a session that differs from the agent's token. No unchanged token begins with this.
const ENCODED: &str = "_u";

/// The subjects of one agent for clients of the protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AgentProtocolSubjects {
    pub(crate) owner: String,
    /// The last token, which the protocol calls the session.
    pub(crate) session: String,
}

impl AgentProtocolSubjects {
    /// The configuration guarantees that the owner is a valid token.
    ///
    /// The protocol has lower-case tokens only, `[a-z0-9_-]+`. An agent's token that conforms stays unchanged.
    /// Any other gets the prefix `_u`, every capital letter becomes `_` and its small letter, and every `_`
    /// becomes `__`, so that it can be decoded and no two agents share a subject: `Weather-2` becomes
    /// `_u_weather-2`.
    pub(crate) fn new(owner: &str, agent: &Token) -> Self {
        Self { owner: owner.to_owned(), session: lower_case(agent.as_str()) }
    }

    /// The subject for `prompt`, `status` or `hb` (heartbeats).
    pub(crate) fn subject(&self, verb: &str) -> String {
        format!("{ROOT}.{verb}.{KIND}.{}.{}", self.owner, self.session)
    }
}

fn lower_case(token: &str) -> String {
    let fits = token.bytes().all(|byte| !byte.is_ascii_uppercase()) && !token.starts_with(ENCODED);
    if fits {
        return token.to_owned();
    }
    let mut encoded = String::from(ENCODED);
    for c in token.chars() {
        if c == '_' || c.is_ascii_uppercase() {
            encoded.push('_');
        }
        encoded.push(c.to_ascii_lowercase());
    }
    encoded
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[test]
    fn subjects_are_those_of_the_protocol() {
        let subjects = AgentProtocolSubjects::new("acme", &Token::new("weather"));
        assert_eq!(subjects.subject("prompt"), "agents.prompt.a2a.acme.weather");
        assert_eq!(subjects.subject("status"), "agents.status.a2a.acme.weather");
        assert_eq!(subjects.subject("hb"), "agents.hb.a2a.acme.weather");
    }

    #[rstest]
    #[case("weather", "weather")]
    #[case("a_b-9", "a_b-9")]
    #[case("Weather-2", "_u_weather-2")]
    #[case("_u", "_u__u")]
    #[case("two words", "_xtwo_20words")]
    #[case("é", "_u__x___c3___a9")]
    fn a_name_becomes_a_lower_case_token(#[case] name: &str, #[case] session: &str) {
        assert_eq!(AgentProtocolSubjects::new("o", &Token::new(name)).session, session);
    }

    fn read_back(session: &str) -> String {
        let Some(encoded) = session.strip_prefix(ENCODED) else {
            return session.to_owned();
        };
        let mut chars = encoded.chars();
        let mut token = String::new();
        while let Some(c) = chars.next() {
            token.push(match c {
                '_' => chars.next().unwrap().to_ascii_uppercase(),
                other => other,
            });
        }
        token
    }

    proptest! {
        #[test]
        fn every_name_makes_a_token_of_its_own(name in any::<String>()) {
            let token = Token::new(&name);
            let subjects = AgentProtocolSubjects::new("o", &token);
            let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b'-';
            prop_assert!(!subjects.session.is_empty() && subjects.session.bytes().all(plain));
            prop_assert_eq!(read_back(&subjects.session), token.as_str());
        }

        #[test]
        fn similar_tokens_stay_apart(token in "[aAuU_]{1,12}") {
            prop_assert_eq!(read_back(&lower_case(&token)), token);
        }
    }
}
