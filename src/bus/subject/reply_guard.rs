//! Decides which reply subjects the bridge may publish to.

use super::SubjectError;
use crate::config::values::subject_pattern;

/// Decides which reply subjects the bridge may publish to.
///
/// The server checks the permissions of the *bridge*, not those of its caller. Without this check, a caller
/// who may only invoke actions could make the bridge publish anywhere: a reply to `$JS.API.STREAM.DELETE.x`
/// or `$KV.bucket.key` is a command, and a reply to the bridge's own subjects forges a registry entry or
/// invokes an action in the bridge's name. So the guard refuses both regardless of the configured
/// patterns, and even the pattern `>` is safe.
#[derive(Debug, Clone)]
pub struct ReplyGuard {
    patterns: Vec<Pattern>,
    own: Vec<Box<str>>,
}

/// Every request is checked, so the usual form of a pattern needs only one comparison.
#[derive(Debug, Clone)]
enum Pattern {
    /// Everything below these tokens, with the dot after the last one.
    Below(Box<str>),
    /// Any other pattern.
    Tokens(Box<str>),
}

impl Pattern {
    fn new(pattern: &str) -> Self {
        match pattern.strip_suffix('>') {
            Some(tokens) if !tokens.contains('*') => Self::Below(tokens.into()),
            _ => Self::Tokens(pattern.into()),
        }
    }

    fn matches(&self, subject: &str) -> bool {
        match self {
            Self::Below(tokens) => subject.strip_prefix(&**tokens).is_some_and(|rest| !rest.is_empty()),
            Self::Tokens(pattern) => matches(pattern, subject),
        }
    }
}

impl ReplyGuard {
    /// Allows subjects that match one of `patterns` and are not below `prefix`.
    ///
    /// # Errors
    ///
    /// When the configuration would refuse a pattern.
    pub fn new<P: AsRef<str>>(
        patterns: impl IntoIterator<Item = P>,
        prefix: &str,
    ) -> Result<Self, SubjectError> {
        let patterns = patterns
            .into_iter()
            .map(|pattern| {
                let pattern = pattern.as_ref();
                let checked =
                    subject_pattern(pattern).map_err(|reason| SubjectError::new(pattern, reason))?;
                Ok(Pattern::new(&checked))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { patterns, own: vec![prefix.into()] })
    }

    /// Allows subjects below `prefix` as well.
    pub(crate) fn and_below(mut self, prefix: &str) -> Self {
        self.patterns.push(Pattern::Below(format!("{prefix}.").into()));
        self
    }

    /// Refuses subjects below `prefix` as well.
    pub fn and_not_below(mut self, prefix: &str) -> Self {
        self.own.push(prefix.into());
        self
    }

    /// Whether a reply may be published to `subject`.
    pub fn allows(&self, subject: &str) -> bool {
        !subject.starts_with('$')
            && subject.split('.').all(is_literal)
            && !self.is_own(subject)
            && self.patterns.iter().any(|pattern| pattern.matches(subject))
    }

    fn is_own(&self, subject: &str) -> bool {
        let below = |rest: &str| rest.is_empty() || rest.starts_with('.');
        self.own.iter().any(|prefix| subject.strip_prefix(&**prefix).is_some_and(below))
    }
}

/// Whether a token has no wildcard. The server takes `*` and `>` inside a longer token literally, but no real
/// inbox contains them.
fn is_literal(token: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'*' | b'>');
    let is_refused = |c: char| matches!(c, '*' | '>') || c.is_whitespace() || c.is_control();
    // Nearly every token is ASCII.
    !token.is_empty() && (token.bytes().all(is_plain) || !token.chars().any(is_refused))
}

fn matches(pattern: &str, subject: &str) -> bool {
    let mut tokens = subject.split('.');
    for wanted in pattern.split('.') {
        match (wanted, tokens.next()) {
            (">", token) => return token.is_some(),
            ("*", Some(_)) => {}
            (wanted, Some(token)) if wanted == token => {}
            _ => return false,
        }
    }
    tokens.next().is_none()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("")]
    #[case(">.a")]
    #[case("a..b")]
    #[case("a.>.b")]
    #[case("a.b*")]
    #[case("a.>>")]
    fn a_pattern_that_is_not_made_of_whole_tokens_is_refused(#[case] pattern: &str) {
        assert!(ReplyGuard::new([pattern], "a2a").is_err());
    }

    #[rstest]
    #[case("_INBOX.a", true)]
    #[case("_INBOX.a.b.c", true)]
    #[case("_R_.JIfKLX.MchBFM", true)]
    #[case("one.x.two", true)]
    #[case("one.x.three", false)]
    #[case("one.x.two.three", false)]
    #[case("_INBOX", false)]
    #[case("_INBOXES.a", false)]
    #[case("elsewhere.a", false)]
    fn a_reply_subject_has_to_match_a_pattern(#[case] subject: &str, #[case] allowed: bool) {
        let guard = ReplyGuard::new(["_INBOX.>", "_R_.>", "one.*.two"], "a2a").unwrap();
        assert_eq!(guard.allows(subject), allowed);
    }

    #[rstest]
    #[case("")]
    #[case("a.")]
    #[case(".a")]
    #[case("a..b")]
    #[case("a.*")]
    #[case("a.>")]
    #[case("a.b c")]
    #[case("a.b\tc")]
    #[case("a.\u{7f}")]
    #[case("$JS.API.STREAM.DELETE.x")]
    #[case("$KV.bucket.key")]
    #[case("$SYS.REQ.SERVER.PING")]
    #[case("$SRV.PING")]
    #[case("org.a2a.action.weather.forecast")]
    #[case("org.a2a.registry.weather")]
    #[case("org.a2a")]
    fn some_reply_subjects_are_refused_whatever_the_patterns(#[case] subject: &str) {
        let guard = ReplyGuard::new([">"], "org.a2a").unwrap();
        assert!(!guard.allows(subject));
        assert!(guard.allows("org.a2abc"));
    }

    #[test]
    fn what_is_below_another_own_prefix_is_refused_as_well() {
        let guard = ReplyGuard::new([">"], "a2a").unwrap().and_not_below("agents");
        assert!(!guard.allows("agents.hb.a2a.acme.weather"));
        assert!(!guard.allows("a2a.registry.weather"));
        assert!(guard.allows("agentsx.hb"));
    }

    proptest! {
        #[test]
        fn an_inbox_below_an_allowed_prefix_is_allowed(token in "[A-Za-z0-9_-]{1,22}") {
            let guard = ReplyGuard::new(["_INBOX.>"], "a2a").unwrap();
            let inbox = format!("_INBOX.{token}");
            prop_assert!(guard.allows(&inbox));
            prop_assert!(!guard.allows(&token));
        }
    }
}
