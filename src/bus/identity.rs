//! Who calls: the one place that turns a message into a [`Caller`], for every front door.
//!
//! The caller of a request is known in two cases:
//!
//! - The request comes from another account, through a service import. The NATS server then writes
//!   `Nats-Request-Info`, with the account and, if the importing account shares it, the user. Any client can write that
//!   header too, so it counts only if the reply subject begins with `_R_.`: the server makes these subjects for imports,
//!   and refuses them to clients. The server replaces a forged header of exactly this name, but passes on any other
//!   spelling of it. So if there is another spelling, or a second value, none of them counts.
//! - The request comes from a gateway, on a subject below `<prefix>.gw.`. The header `A2A-Caller` then names the principal
//!   for whom the gateway calls. Only gateways may have the permission to publish there. The header counts nowhere else.
//!
//! All callers within the account of the bridge share the default [`Caller`]. A request from another account that says
//! nothing reliable about itself does *not* become one of them: its caller is [`UNIDENTIFIED`], so that a tenant cannot
//! reach the tasks of that account with an ambiguous header.
//!
//! # Names
//!
//! | caller | name |
//! | --- | --- |
//! | account, user | `ACCOUNT/user` |
//! | account, without a user | `ACCOUNT` |
//! | principal of a gateway in the account of the bridge | `gateway:principal` |
//! | principal of a gateway in another account | `ACCOUNT/gateway:principal` |
//! | unidentified, from another account | `?` |
//!
//! Different callers have different names: [`escape`] leaves no `/`, `:`, `?` or `%` in accounts and users, and the
//! principal is the text after the first `:`.

use std::borrow::Cow;
use std::fmt::Write as _;

use async_nats::{HeaderMap, Message};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use crate::caller::Caller;
use crate::config::{CallerBinding, IdentityConfig};
use crate::reply::error::{ActionError, Code};
use crate::text::{hex, is_unprintable};

/// Begins the reply subjects that the server makes for requests through a service import.
const IMPORT_REPLY: &str = "_R_.";
const REQUEST_INFO: &str = "Nats-Request-Info";
const PRINCIPAL: &str = "A2A-Caller";
/// What the server writes in place of a user that authenticated with a token.
const REDACTED: &str = "[REDACTED]";
/// Maximum bytes of `Nats-Request-Info`, which may hold the JWT of the user.
const MAX_REQUEST_INFO: usize = 64 << 10;
/// Maximum bytes of a principal, and of an account or a user in a name. A longer account or user ends in a hash.
const MAX_NAME: usize = 256;
/// The caller of another account that cannot be identified.
const UNIDENTIFIED: &str = "?";

/// The way by which a request reached the bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entrance {
    /// The subject that discovery shows.
    Direct,
    /// The same subject below `<prefix>.gw.`.
    Gateway,
}

/// Decides who calls, and who may.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    bind: CallerBinding,
    is_required: bool,
}

impl Identity {
    pub(crate) fn new(config: &IdentityConfig) -> Self {
        Self { bind: config.bind, is_required: config.required }
    }

    /// The caller of a request; an error if the bridge does not serve it.
    pub(crate) fn caller(&self, message: &Message, entrance: Entrance) -> Result<Caller, ActionError> {
        let reply = message.reply.as_deref().unwrap_or_default();
        let headers = message.headers.as_ref();
        let origin = match self.bind {
            CallerBinding::Off => Origin::OwnAccount,
            CallerBinding::User | CallerBinding::Account if !reply.starts_with(IMPORT_REPLY) => {
                Origin::OwnAccount
            }
            CallerBinding::User | CallerBinding::Account => Origin::read(headers),
        };
        let name = match (entrance, origin) {
            (Entrance::Direct, Origin::OwnAccount) => None,
            (Entrance::Direct, Origin::Account(RequestInfo { account, user })) => {
                let user = user.filter(|_| self.bind == CallerBinding::User);
                let user = user.filter(|user| !user.is_empty() && user != REDACTED);
                let user = user.map(|user| format!("/{}", escape(&user))).unwrap_or_default();
                Some(escape(&account) + &user)
            }
            (Entrance::Direct, Origin::Unidentified) if self.is_required => None,
            (Entrance::Direct, Origin::Unidentified) => Some(UNIDENTIFIED.to_owned()),
            (Entrance::Gateway, Origin::OwnAccount) => Some(format!("gateway:{}", principal(headers)?)),
            (Entrance::Gateway, Origin::Account(RequestInfo { account, .. })) => {
                Some(format!("{}/gateway:{}", escape(&account), principal(headers)?))
            }
            (Entrance::Gateway, Origin::Unidentified) => {
                return Err(forbidden("the account of the gateway cannot be verified".into()));
            }
        };
        match name {
            Some(name) => Ok(Caller::verified(&name)),
            None if self.is_required => {
                let message = "this bridge serves only callers with a verified identity (`nats.identity.required`): call \
                               through a service import of your account, or through a gateway";
                Err(forbidden(message.into()))
            }
            None => Ok(Caller::default()),
        }
    }
}

/// Why callers of other accounts can forge their identity at a NATS server of this version; `None` if they cannot, or if it
/// does not matter.
pub(crate) fn server_warning(version: &str, config: &IdentityConfig) -> Option<&'static str> {
    let version = semver::Version::parse(version).ok()?;
    let (major, minor, patch) = (version.major, version.minor, version.patch);
    let is_fixed = (major, minor, patch) >= (2, 12, 6) || ((major, minor) == (2, 11) && patch >= 15);
    (!is_fixed && config.bind != CallerBinding::Off).then_some(
        "before 2.11.15 and 2.12.6, callers of other accounts can forge their identity: upgrade it, or set `nats.identity: off`",
    )
}

fn forbidden(message: String) -> ActionError {
    ActionError::new(Code::Forbidden, message)
}

/// Where a request comes from.
enum Origin<'a> {
    OwnAccount,
    Account(RequestInfo<'a>),
    /// Another account. It is not known which one.
    Unidentified,
}

/// The fields of `Nats-Request-Info` that identify a caller. The others, such as `jwt`, are never kept or logged.
#[derive(Deserialize)]
struct RequestInfo<'a> {
    #[serde(rename = "acc", borrow)]
    account: Cow<'a, str>,
    #[serde(default, borrow)]
    user: Option<Cow<'a, str>>,
}

impl<'a> Origin<'a> {
    fn read(headers: Option<&'a HeaderMap>) -> Self {
        let value = headers.and_then(|headers| only_value(headers, REQUEST_INFO).ok().flatten());
        let value = value.filter(|value| value.len() <= MAX_REQUEST_INFO);
        let info = value.and_then(|value| serde_json::from_str::<RequestInfo<'_>>(value).ok());
        info.filter(|info| !info.account.is_empty()).map_or(Self::Unidentified, Self::Account)
    }
}

/// The principal for whom a gateway calls.
fn principal(headers: Option<&HeaderMap>) -> Result<&str, ActionError> {
    let value = headers.map_or(Ok(None), |headers| only_value(headers, PRINCIPAL));
    let problem = match value {
        Ok(Some("")) => "is empty",
        Ok(Some(value)) if value.len() > MAX_NAME => "is longer than 256 bytes",
        Ok(Some(value)) if value.contains(is_unprintable) => "has unprintable characters",
        Ok(Some(value)) => return Ok(value),
        Ok(None) => "is missing",
        Err(Ambiguous) => "occurs more than once, or with a different spelling",
    };
    Err(forbidden(format!("the header `{PRINCIPAL}`, which a gateway has to set, {problem}")))
}

/// There are several headers of one name, or a header whose name has another spelling.
struct Ambiguous;

/// The value of a header that must be there at most once, under exactly this name.
fn only_value<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, Ambiguous> {
    let mut found = None;
    for (spelling, values) in headers.iter() {
        let spelling: &str = spelling.as_ref();
        if !spelling.trim().eq_ignore_ascii_case(name) {
            continue;
        }
        match values.as_slice() {
            [value] if spelling == name && found.is_none() => found = Some(value.as_str()),
            _ => return Err(Ambiguous),
        }
    }
    Ok(found)
}

/// The name of an account or a user, in printable ASCII without the characters that separate names. Different texts
/// give different results.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'!'..=b'~' if !b"%/:?".contains(&byte) => escaped.push(char::from(byte)),
            _ => {
                let _ = write!(escaped, "%{byte:02X}");
            }
        }
    }
    if escaped.len() > MAX_NAME {
        // `%x` is not the escape of a byte.
        escaped.truncate(MAX_NAME / 2);
        let _ = write!(escaped, "%x{}", hex(&Sha256::digest(text)));
    }
    escaped
}

#[cfg(test)]
mod tests {
    use async_nats::HeaderName;
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const INFO: &str = r#"{"acc":"T1","rtt":635618,"user":"alice","jwt":"secret","tags":["x"],"nonce":null}"#;

    fn message(reply: &str, headers: &[(&'static str, &str)]) -> Message {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(HeaderName::from_static(name), *value);
        }
        Message {
            subject: "a2a.action.a.b".into(),
            reply: Some(reply.into()),
            payload: bytes::Bytes::new(),
            headers: Some(map),
            status: None,
            description: None,
            length: 0,
        }
    }

    fn identity(bind: CallerBinding, is_required: bool) -> Identity {
        Identity { bind, is_required }
    }

    fn name(bind: CallerBinding, reply: &str, headers: &[(&'static str, &str)]) -> Option<String> {
        let caller = identity(bind, false).caller(&message(reply, headers), Entrance::Direct).unwrap();
        caller.name().map(str::to_owned)
    }

    #[rstest]
    #[case(CallerBinding::User, INFO, Some("T1/alice"))]
    #[case(CallerBinding::Account, INFO, Some("T1"))]
    #[case(CallerBinding::Off, INFO, None)]
    #[case(CallerBinding::User, r#"{"acc":"T1","rtt":1}"#, Some("T1"))]
    #[case(CallerBinding::User, r#"{"acc":"T1","user":"[REDACTED]"}"#, Some("T1"))]
    #[case(CallerBinding::User, r#"{"acc":"T1","user":""}"#, Some("T1"))]
    #[case(CallerBinding::User, r#"{"acc":"T1","user":null}"#, Some("T1"))]
    #[case(CallerBinding::User, r#"{"acc":"a/b","user":"c:d ?%"}"#, Some("a%2Fb/c%3Ad%20%3F%25"))]
    #[case(CallerBinding::User, r#"{"acc":"T\u00e9"}"#, Some("T%C3%A9"))]
    #[case(CallerBinding::User, r#"{"acc":"?"}"#, Some("%3F"))]
    // Whatever is not clear is nobody in particular, but not a caller of the bridge's own account.
    #[case(CallerBinding::User, r#"{"acc":""}"#, Some("?"))]
    #[case(CallerBinding::User, r#"{"acc":"T1","acc":"T2"}"#, Some("?"))]
    #[case(CallerBinding::User, r#"{"acc":1}"#, Some("?"))]
    #[case(CallerBinding::User, "T1", Some("?"))]
    fn an_account_has_a_name(
        #[case] bind: CallerBinding,
        #[case] info: &str,
        #[case] expected: Option<&str>,
    ) {
        assert_eq!(name(bind, "_R_.x", &[("Nats-Request-Info", info)]).as_deref(), expected);
    }

    #[test]
    fn only_the_header_of_the_server_counts() {
        let bind = CallerBinding::User;
        for reply in ["_INBOX.x", "_R_x.y", "_r_.x", "a._R_.x"] {
            assert_eq!(name(bind, reply, &[(REQUEST_INFO, INFO)]), None, "{reply}");
        }
        let other = r#"{"acc":"T2"}"#;
        let ambiguous: [&[_]; 7] = [
            &[],
            &[("nats-request-info", other)],
            &[(REQUEST_INFO, INFO), ("nats-request-info", other)],
            &[(REQUEST_INFO, INFO), ("NATS-REQUEST-INFO", other)],
            &[(REQUEST_INFO, INFO), ("Nats-Request-Info ", other)],
            &[(REQUEST_INFO, INFO), (REQUEST_INFO, other)],
            &[(REQUEST_INFO, INFO), (REQUEST_INFO, INFO)],
        ];
        for headers in ambiguous {
            assert_eq!(name(bind, "_R_.x", headers).as_deref(), Some("?"), "{headers:?}");
        }
        let long = format!(r#"{{"acc":"T1","jwt":"{}"}}"#, "x".repeat(MAX_REQUEST_INFO));
        assert_eq!(name(bind, "_R_.x", &[(REQUEST_INFO, &long)]).as_deref(), Some("?"));
        // This header is for gateways.
        let caller = [(REQUEST_INFO, INFO), ("A2A-Caller", "root")];
        assert_eq!(name(bind, "_R_.x", &caller).as_deref(), Some("T1/alice"));
        assert_eq!(name(bind, "_INBOX.x", &caller), None);
    }

    fn through_gateway(reply: &str, headers: &[(&'static str, &str)]) -> Result<String, ActionError> {
        let caller =
            identity(CallerBinding::User, true).caller(&message(reply, headers), Entrance::Gateway)?;
        Ok(caller.name().unwrap().to_owned())
    }

    #[test]
    fn a_gateway_names_its_principal() {
        let alice = (PRINCIPAL, "alice");
        assert_eq!(through_gateway("_INBOX.x", &[alice]).unwrap(), "gateway:alice");
        assert_eq!(through_gateway("_INBOX.x", &[alice, (REQUEST_INFO, INFO)]).unwrap(), "gateway:alice");
        assert_eq!(through_gateway("_R_.x", &[alice, (REQUEST_INFO, INFO)]).unwrap(), "T1/gateway:alice");
        let long = "x".repeat(MAX_NAME);
        assert_eq!(through_gateway("_INBOX.x", &[(PRINCIPAL, &long)]).unwrap(), format!("gateway:{long}"));
        let longer = "x".repeat(MAX_NAME + 1);
        let refused: [(&str, &[_]); 9] = [
            ("_INBOX.x", &[]),
            ("_INBOX.x", &[(PRINCIPAL, "")]),
            ("_INBOX.x", &[(PRINCIPAL, &longer)]),
            ("_INBOX.x", &[(PRINCIPAL, "a\u{1b}[2J")]),
            ("_INBOX.x", &[(PRINCIPAL, "a\u{202e}b")]),
            ("_INBOX.x", &[("a2a-caller", "alice")]),
            ("_INBOX.x", &[alice, ("a2a-caller", "bob")]),
            ("_INBOX.x", &[alice, alice]),
            ("_R_.x", &[alice]),
        ];
        for (reply, headers) in refused {
            let error = through_gateway(reply, headers).unwrap_err();
            assert_eq!((error.info.code, error.info.retryable), (Code::Forbidden, false), "{headers:?}");
            assert!(!error.message.contains(is_unprintable), "{error:?}");
        }
    }

    #[test]
    fn a_required_identity_refuses_everyone_else() {
        let required = |reply, headers: &[_]| {
            identity(CallerBinding::User, true).caller(&message(reply, headers), Entrance::Direct)
        };
        assert_eq!(required("_R_.x", &[(REQUEST_INFO, INFO)]).unwrap().name(), Some("T1/alice"));
        for (reply, headers) in [("_INBOX.x", &[(REQUEST_INFO, INFO)][..]), ("_R_.x", &[])] {
            assert_eq!(required(reply, headers).unwrap_err().info.code, Code::Forbidden);
        }
    }

    #[rstest]
    #[case("2.10.25", true)]
    #[case("2.11.14", true)]
    #[case("2.11.15", false)]
    #[case("2.12.0", true)]
    #[case("2.12.5", true)]
    #[case("2.12.6", false)]
    #[case("2.14.0-dev", false)]
    #[case("3.0.0", false)]
    #[case("unknown", false)]
    fn old_servers_are_known(#[case] version: &str, #[case] is_old: bool) {
        let off = IdentityConfig { bind: CallerBinding::Off, required: false };
        assert_eq!(server_warning(version, &IdentityConfig::default()).is_some(), is_old);
        assert_eq!(server_warning(version, &off), None);
    }

    proptest! {
        #[test]
        fn different_callers_have_different_names(
            one in ("[a/:?%é]{1,4}", proptest::option::of("[a/:?%é]{1,4}")),
            other in ("[a/:?%é]{1,4}", proptest::option::of("[a/:?%é]{1,4}")),
        ) {
            let name_of = |(account, user): &(String, Option<String>)| {
                let info = serde_json::json!({"acc": account, "user": user}).to_string();
                name(CallerBinding::User, "_R_.x", &[(REQUEST_INFO, &info)]).unwrap()
            };
            let (first, second) = (name_of(&one), name_of(&other));
            prop_assert_eq!(one == other, first == second);
            prop_assert!(first != UNIDENTIFIED && !first.contains(':'), "{}", first);
        }
    }

    #[test]
    fn a_long_name_is_cut_and_stays_unique() {
        let [one, other] = ["a", "b"].map(|last| escape(&("x".repeat(10_000) + last)));
        assert!(one != other && one.len() < MAX_NAME, "{one} {other}");
        assert!(escape(&"é".repeat(1000)).len() < MAX_NAME);
        assert_eq!(escape(&"x".repeat(MAX_NAME)), "x".repeat(MAX_NAME));
    }
}
