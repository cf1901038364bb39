//! The kinds of values: how each is read, and its JSON schema.
//!
//! For rules about a single value, the schema and `check` agree: a string may look like a number or boolean,
//! and fixed words are checked. Only `check` applies rules that a pattern cannot express: whether a URL, host
//! or command line is well formed, whether a duration or size in text is in its range, and rules across keys.
//! A value with a variable passes, as its content is unknown.

use std::collections::{BTreeMap, HashMap};
use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::PossibleValue;
use nix::sys::signal::Signal;
use secrecy::SecretString;
use serde::Serialize;
use serde_json::{Value, json};
use url::Url;

use super::agent::Port;
use super::declare::{Field, Scope, Setting, merged};
use super::node::{KeyValue, Node, NodeValue, Scalar};
use super::settings::Auth;
use super::{agent, rules, values};

/// Declares kinds of settings. A line has the kind, its Rust type (the kind itself, if none is given), its
/// name for users, the function that reads the value (`parse` gets its text, `read` the node), and the JSON
/// schema.
macro_rules! kinds {
    (@marker $kind:ident) => {};
    (@marker $kind:ident $value:ty) => { pub(crate) enum $kind {} };
    (@value $kind:ident) => { $kind };
    (@value $kind:ident $value:ty) => { $value };
    (@read parse $parse:expr, $node:ident, $scope:ident) => { read_text($node, $scope, Self::TYPE, $parse) };
    (@read read $read:expr, $node:ident, $scope:ident) => { $read($node, $scope) };
    ($($kind:ident $(-> $value:ty)?: $type:literal, $how:ident $reader:expr, $schema:expr;)*) => {$(
        kinds!(@marker $kind $($value)?);

        impl Setting for $kind {
            type Value = kinds!(@value $kind $($value)?);
            const TYPE: &'static str = $type;

            fn read(node: &Node, scope: &mut Scope<'_, '_>) -> Option<Self::Value> {
                kinds!(@read $how $reader, node, scope)
            }

            fn schema() -> Value {
                $schema
            }
        }
    )*};
}

kinds! {
    AnyText -> String: "text", parse |text| Ok(text.to_owned()), json!({ "type": TEXT });
    Text -> String: "text", parse values::non_empty, text_schema(r"\S");
    AuthToken -> String: "a token", parse values::bearer_token, text_schema("^[!-~]+$");
    AgentName -> String: "a name", parse values::agent_name,
        json!({ "type": TEXT, "pattern": r"\S", "maxLength": 256 });
    UserName -> String: "text", parse values::user_name, text_schema(r"^[^:]*[^:\s][^:]*$");
    HeaderName -> String: "a header name", parse values::api_key_name, text_schema(HEADER_NAME);
    HeaderValue -> String: "text", parse values::header_value, text_schema(r"^[ -~\t]*$");
    HeaderLines -> BTreeMap<String, SecretString>: "a mapping of names to text", read read_headers, json!({
        "type": "object",
        "propertyNames": { "pattern": HEADER_NAME },
        "additionalProperties": HeaderValue::schema(),
    });
    EnvVars -> BTreeMap<String, SecretString>: "a mapping of names to text", read read_env, json!({
        "type": "object", "propertyNames": { "pattern": "^[^=]+$" }, "additionalProperties": { "type": TEXT },
    });
    EnvFile -> Vec<(String, SecretString)>: "a path", read agent::read_env_file, PathBuf::schema();
    Renames -> BTreeMap<String, String>: "a mapping of names to names", read read_renames,
        json!({ "type": "object", "additionalProperties": Text::schema() });
    JsonObject -> Value: "a mapping", read read_object, json!({ "type": "object" });
    SubjectPrefix -> String: "a subject", parse values::subject_prefix,
        text_schema(r"^(?!(_INBOX|_R_)(\.|$))(?!(.*\.)?gw$)(?=.{1,128}$)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$");
    InboxPrefix -> String: "a subject", parse values::inbox_prefix,
        text_schema(r"^(?=.{1,128}$)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$");
    SubjectPattern -> String: "a subject", parse values::subject_pattern,
        text_schema(r"^((\*|[^\s.*>]+)\.)*((\*|[^\s.*>]+)|>)$");
    SubjectPatterns -> Vec<String>: "a list", read read_filled_list::<SubjectPattern>,
        json!({ "type": "array", "minItems": 1, "items": SubjectPattern::schema() });
    OwnerName -> String: "a name", parse values::owner,
        strict_schema(&["string", "integer", "boolean"], "^[a-z0-9_-]{1,64}$");
    HostPort -> String: "a host", parse values::host, text_schema(r"\S");
    UrlPath -> String: "a URL path", parse values::card_path, strict_schema(&["string"], r"^/(?![/\\])\S*$");
    TokenUrl -> Url: "a URL", parse values::token_url, strict_schema(&["string"], HTTP_URL);
    AgentUrl -> Url: "a URL", read agent::read_url, strict_schema(&["string"], HTTP_URL);
    NatsUrls -> Vec<String>: "text", parse values::nats_urls, text_schema(r"\S");
    Servers -> Vec<NatsUrl>: "a URL or a list of URLs", read read_servers, json!({
        "type": ["string", "array", "number", "boolean"],
        "minItems": 1, "pattern": r"\S", "items": NatsUrls::schema(),
    });
    SocketAddr: "an address with a port", parse values::socket_address, strict_schema(&["string"], r":\d+$");
    CommandLine -> Vec<String>: "text or a list of text", read agent::read_command, json!({
        "type": ["string", "array", "number", "boolean"], "pattern": r"\S",
        "minItems": 1, "prefixItems": [Text::schema()], "items": AnyText::schema(),
    });
    PathBuf: "a path", read read_path, json!({ "type": TEXT, "minLength": 1 });
    bool: "`true` or `false`", read read_bool, json!({ "type": ["boolean", "string"], "pattern": VARIABLE });
    Count -> usize: "a whole number", parse values::count,
        number_schema(json!({ "minimum": 1, "maximum": 100_000 }), r"^\+?0*([1-9]\d{0,4}|100000)$");
    Size -> u64: "a size", parse values::response_size, number_schema(
        json!({ "minimum": 1024, "maximum": 1 << 30 }),
        &format!(r"^\s*\d+\s*{}?\s*$", any_case(&["b", "kb", "kib", "mb", "mib", "gb", "gib"])),
    );
    MemorySize -> u64: "a size", parse values::memory_size, number_schema(
        json!({ "minimum": 64 << 20, "maximum": 1_u64 << 40 }),
        &format!(r"^\s*\d+\s*{}?\s*$", any_case(&["b", "kb", "kib", "mb", "mib", "gb", "gib"])),
    );
    FileSize -> u64: "a size", parse values::file_size, number_schema(
        json!({ "minimum": 1024, "maximum": 1_u64 << 40 }),
        &format!(r"^\s*\d+\s*{}?\s*$", any_case(&["b", "kb", "kib", "mb", "mib", "gb", "gib"])),
    );
    BucketName -> String: "the name of a bucket", parse values::bucket_name, text_schema("^[A-Za-z0-9_-]{1,128}$");
    PrincipalName -> String: "a name", parse values::principal,
        json!({ "type": TEXT, "pattern": r"\S", "maxLength": 256 });
    Sha256Digest -> [u8; 32]: "a SHA-256 digest", parse values::sha256_digest,
        strict_schema(&["string"], "^[0-9a-fA-F]{64}$");
    WebOrigin -> String: "an origin", parse values::web_origin, strict_schema(&["string"], HTTP_URL);
    GatewayRole: "a word", parse parse_word, enum_schema::<Self>();
    ProcessorCount -> f64: "a number", parse values::processor_count, merged(
        strict_schema(&["string", "number"], r"^(\d+\.?\d*|\.\d+)$"),
        json!({ "minimum": 0.01, "maximum": 1024 }),
    );
    Duration: "a duration", parse values::parse_duration, merged(
        strict_schema(&["string", "number"], r"^\s*(N|(N(ms|s|m|h|d))+)\s*$".replace('N', r"(\d+\.?\d*|\.\d+)")),
        json!({ "exclusiveMinimum": 0, "maximum": values::MAX_DURATION.as_secs() }),
    );
    Port: "a port", parse agent::port, number_schema(
        json!({ "minimum": 1, "maximum": 65535 }),
        r"^(auto|\+?0*([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5]))$",
    );
    Signal: "a signal", parse agent::signal, words_schema(
        &agent::STOP_SIGNALS.map(|name| format!("SIG{name}")),
        &format!("^{}?{}$", any_case(&["sig"]), any_case(&agent::STOP_SIGNALS)),
    );
    Restart: "a word", parse parse_word, enum_schema::<Self>();
    CallLogging: "a word", parse parse_word, json!({
        "type": ["string", "boolean"],
        "anyOf": [{ "enum": ["off", "errors", "all", false] }, { "type": "string", "pattern": VARIABLE }],
    });
    KeyPlace: "a word", parse parse_word, enum_schema::<Self>();
    CallerBinding: "a word", parse parse_word, enum_schema::<Self>();
    JetStreamMode: "a word", parse parse_word, enum_schema::<Self>();
    EventRecord: "a word", parse parse_word, enum_schema::<Self>();
    HistoryMode: "a word", parse parse_word, enum_schema::<Self>();
    EventTypes -> BTreeMap<String, ArtifactEvent>: "a mapping of names to event types", read read_event_types,
        json!({ "type": "object", "additionalProperties": ArtifactEvent::schema() });
    ArtifactEvent: "an event type", parse parse_word, enum_schema::<Self>();
    StateReplicas: "1, 3, 5 or `auto`", parse parse_word, json!({
        "type": ["string", "integer"],
        "anyOf": [{ "enum": ["auto", 1, 3, 5, "1", "3", "5"] }, { "type": "string", "pattern": VARIABLE }],
    });
    Binding: "a word", parse |text| parse_word(&text.to_ascii_lowercase()),
        words_schema(&["jsonrpc", "rest"], &format!("^{}$", any_case(&["jsonrpc", "rest", "http+json"])));
    A2aVersion: "a version", parse parse_word, json!({
        "type": ["string", "number"],
        "anyOf": [
            { "enum": ["0.1", "0.2", "0.3", "1.0", "1", 0.1, 0.2, 0.3, 1] },
            { "type": "string", "pattern": VARIABLE },
        ],
    });
}

/// RFC 9110 section 5.6.2, as in `values::header_name`.
const HEADER_NAME: &str = r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$";
const HTTP_URL: &str = r"^\s*[hH][tT][tT][pP][sS]?:";
const VARIABLE: &str = r"\$\{";

/// YAML needs no quotes around most strings, so a string may look like a number or a boolean.
const TEXT: [&str; 3] = ["string", "number", "boolean"];

/// Text that matches `pattern` or holds a variable.
fn text_schema(pattern: &str) -> Value {
    strict_schema(&TEXT, pattern)
}

/// As [`text_schema`], of these JSON types.
fn strict_schema(types: &[&str], pattern: impl Display) -> Value {
    json!({ "type": types, "pattern": format!("{pattern}|{VARIABLE}") })
}

/// A whole number in a range, or text.
fn number_schema(range: Value, pattern: &str) -> Value {
    merged(strict_schema(&["integer", "string"], pattern), range)
}

/// One of these words, which editors offer, or a string that matches the pattern.
fn words_schema(words: &[impl Serialize], pattern: &str) -> Value {
    json!({ "type": "string", "anyOf": [{ "enum": words }, strict_schema(&["string"], pattern)] })
}

fn enum_schema<T: ValueEnum>() -> Value {
    let words = words::<T>();
    words_schema(&words, &format!("^({})$", words.join("|")))
}

/// A pattern for one of the words in upper or lower case, as patterns in JSON schemas have no flags.
fn any_case(words: &[&str]) -> String {
    let letter = |c: char| match (c.to_ascii_lowercase(), c.to_ascii_uppercase()) {
        (lower, upper) if lower != upper => format!("[{lower}{upper}]"),
        (other, _) if other.is_ascii_alphanumeric() || other == '|' => other.to_string(),
        (other, _) => format!("[{other}]"),
    };
    format!("({})", words.join("|").chars().map(letter).collect::<String>())
}

/// When the supervisor restarts an agent that exited on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Restart {
    Always,
    OnFailure,
    Never,
}

impl Display for Restart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.to_possible_value().as_ref().map_or("", PossibleValue::get_name))
    }
}

/// The calls that the call log has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[repr(u8)]
pub(crate) enum CallLogging {
    // In YAML 1.1, `off` is a boolean, and some tools write it as one.
    #[value(alias = "false")]
    Off,
    Errors,
    All,
}

/// Which calls are logged without being asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EventRecord {
    Sessions,
    All,
}

/// How an agent gets what was said in a session before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum HistoryMode {
    Text,
    Data,
    None,
}

/// The event that an artifact becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ArtifactEvent {
    #[value(name = "agent_token_start")]
    TokenStart,
    #[value(name = "agent_token")]
    Token,
    #[value(name = "agent_token_end")]
    TokenEnd,
    #[value(name = "agent_tool_call")]
    ToolCall,
    #[value(name = "agent_tool_result")]
    ToolResult,
    #[value(name = "agent_artifact")]
    Artifact,
    /// No event of its own: it is a part of the answer.
    #[value(name = "agent_complete")]
    Complete,
}

/// Where an API key goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum KeyPlace {
    #[default]
    Header,
    Query,
    Cookie,
}

/// What the holder of a token may do at the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum GatewayRole {
    Caller,
    /// May also control agents.
    Operator,
}

/// Whether the bridge keeps state in JetStream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum JetStreamMode {
    /// If it is there.
    Auto,
    Off,
    /// The bridge does not start without it.
    Required,
}

/// On how many servers a cluster stores the shared state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum StateReplicas {
    /// On three, or on one if there are fewer servers.
    Auto,
    #[value(name = "1")]
    One,
    #[value(name = "3")]
    Three,
    #[value(name = "5")]
    Five,
}

impl StateReplicas {
    pub(crate) fn first_choice(self) -> usize {
        match self {
            Self::One => 1,
            Self::Auto | Self::Three => 3,
            Self::Five => 5,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum A2aVersion {
    #[value(name = "0.1")]
    V01,
    #[value(name = "0.2")]
    V02,
    #[value(name = "0.3")]
    V03,
    #[value(name = "1.0", alias = "1")]
    V1,
}

/// How A2A is carried over HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Binding {
    #[value(name = "jsonrpc")]
    JsonRpc,
    // REST, which A2A calls HTTP+JSON.
    #[value(alias = "http+json")]
    Rest,
}

/// What identifies a caller of another NATS account.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CallerBinding {
    User,
    Account,
    Off,
}

/// The words that stand for the variants of an enum.
fn words<T: ValueEnum>() -> Vec<String> {
    let names = T::value_variants().iter().filter_map(T::to_possible_value);
    names.map(|name| name.get_name().to_owned()).collect()
}

pub(crate) fn parse_word<T: ValueEnum>(text: &str) -> Result<T, String> {
    T::from_str(text, false).map_err(|_| format!("expected one of `{}`", words::<T>().join("`, `")))
}

fn scalar<'n>(node: &'n Node, scope: &mut Scope<'_, '_>, expected: &str) -> Option<&'n Scalar> {
    match &node.value {
        NodeValue::Scalar(scalar) if !scalar.is_null() => Some(scalar),
        _ => scope.unexpected(node, expected),
    }
}

pub(super) fn read_text<T>(
    node: &Node,
    scope: &mut Scope<'_, '_>,
    expected: &str,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Option<T> {
    let text = &scalar(node, scope, expected)?.text;
    parse(text).map_err(|message| scope.problems.add(node.at.start, message)).ok()
}

/// `true` and `false` in quotes are text, unless they came from the environment.
fn read_bool(node: &Node, scope: &mut Scope<'_, '_>) -> Option<bool> {
    let scalar = scalar(node, scope, bool::TYPE)?;
    let value = scalar.text.parse().ok().filter(|_| scalar.plain || scalar.expanded);
    if value.is_none() {
        scope.problems.add(node.at.start, "expected `true` or `false`, without quotes");
    }
    value
}

/// A relative path starts at the directory of the file.
fn read_path(node: &Node, scope: &mut Scope<'_, '_>) -> Option<PathBuf> {
    let path = read_text(node, scope, PathBuf::TYPE, values::path)?;
    Some(scope.problems.directory.map(|directory| directory.join(&path)).unwrap_or(path))
}

/// Text that does not show in messages and in `Debug` output.
pub(crate) struct Secret<K>(K);

impl<K: Setting<Value = String>> Setting for Secret<K> {
    type Value = SecretString;
    const TYPE: &'static str = K::TYPE;

    fn read(node: &Node, scope: &mut Scope<'_, '_>) -> Option<SecretString> {
        K::read(node, scope).map(SecretString::from)
    }

    fn schema() -> Value {
        K::schema()
    }
}

/// Absent items (an empty variable) are left out.
impl<K: Setting> Setting for Vec<K> {
    type Value = Vec<K::Value>;
    const TYPE: &'static str = "a list";
    const FIELDS: Option<fn() -> Vec<Field>> = K::FIELDS;

    fn read(node: &Node, scope: &mut Scope<'_, '_>) -> Option<Self::Value> {
        let NodeValue::List(items) = &node.value else {
            return scope.unexpected(node, Self::TYPE);
        };
        let given = items.iter().filter(|item| !item.is_absent());
        Some(given.filter_map(|item| K::read(item, scope)).collect())
    }

    fn schema() -> Value {
        json!({ "type": "array", "items": K::schema() })
    }
}

/// Reads a list that must not be empty.
fn read_filled_list<K: Setting>(node: &Node, scope: &mut Scope<'_, '_>) -> Option<Vec<K::Value>> {
    if matches!(&node.value, NodeValue::List(items) if items.iter().all(Node::is_absent)) {
        scope.problems.add(node.at.start, "this list is empty; give at least one item");
    }
    Vec::<K>::read(node, scope)
}

/// Reads a mapping whose keys the user chooses; absent values are left out with their keys.
fn read_names<T>(
    node: &Node,
    scope: &mut Scope<'_, '_>,
    mut read: impl FnMut(&Node, &Node, &mut Scope<'_, '_>) -> Option<T>,
) -> Option<BTreeMap<String, T>> {
    let mut names = BTreeMap::new();
    for KeyValue { key, value } in scope.entries_of(node)?.iter().filter(|entry| !entry.value.is_absent()) {
        if value.is_null() {
            let message = format!("{} has no value", scope.problems.name(key));
            scope.problems.add_with_hint(key.at.start, message, "write `\"\"` for an empty text");
        } else if let (Some(value), Some(key)) = (read(key, value, scope), key.text()) {
            names.insert(key.to_owned(), value);
        }
    }
    Some(names)
}

fn read_env(node: &Node, scope: &mut Scope<'_, '_>) -> Option<BTreeMap<String, SecretString>> {
    read_names(node, scope, |key, value, scope| {
        if !key.text().is_some_and(values::is_env_name) {
            scope.problems.add(key.at.start, "expected the name of a variable, without `=`");
        }
        read_text(value, scope, "text", values::env_value).map(SecretString::from)
    })
}

fn read_headers(node: &Node, scope: &mut Scope<'_, '_>) -> Option<BTreeMap<String, SecretString>> {
    let mut seen = HashMap::new();
    read_names(node, scope, |key, value, scope| {
        let name = key.text().unwrap_or_default();
        if let Err(reason) = values::header_name(name) {
            let message = format!("{} {reason}", scope.problems.name(key));
            scope.problems.add(key.at.start, message);
        } else {
            scope.problems.check_unique(&mut seen, &name.to_ascii_lowercase(), key);
        }
        Secret::<HeaderValue>::read(value, scope)
    })
}

/// Two skills of one agent cannot be one action.
fn read_renames(node: &Node, scope: &mut Scope<'_, '_>) -> Option<BTreeMap<String, String>> {
    let mut seen = BTreeMap::new();
    read_names(node, scope, |_, value, scope| {
        let name = Text::read(value, scope)?;
        let what = ("two skills get the same name", "the bridge can publish only one of them");
        rules::report_duplicate(&mut seen, name.clone(), value.at.start, what, scope.problems);
        Some(name)
    })
}

fn read_event_types(node: &Node, scope: &mut Scope<'_, '_>) -> Option<BTreeMap<String, ArtifactEvent>> {
    read_names(node, scope, |_, value, scope| ArtifactEvent::read(value, scope))
}

fn read_object(node: &Node, scope: &mut Scope<'_, '_>) -> Option<Value> {
    scope.entries_of(node)?;
    node.to_json()
}

/// NATS servers: one text with commas between them, or a list.
fn read_servers(node: &Node, scope: &mut Scope<'_, '_>) -> Option<Vec<NatsUrl>> {
    let urls = match &node.value {
        NodeValue::List(_) => read_filled_list::<NatsUrls>(node, scope)?.concat(),
        _ => NatsUrls::read(node, scope)?,
    };
    let urls: Vec<_> = urls.into_iter().map(NatsUrl).collect();
    let mut users = urls.iter().filter_map(NatsUrl::user_info);
    if let Some(first) = users.next()
        && users.any(|other| other != first)
    {
        let text =
            "the URLs have different users or passwords; set `user` and `password` under `nats` instead";
        scope.problems.add(node.at.start, text);
        return None;
    }
    drop(users);
    Some(urls)
}

/// A NATS URL; it may hold a password, which `Debug` does not show.
#[derive(Clone)]
pub(crate) struct NatsUrl(pub(crate) String);

impl NatsUrl {
    /// The user and the password in the URL. A user without a password is a token.
    pub(crate) fn user_info(&self) -> Option<(String, Option<String>)> {
        let (before, _) = self.0.rsplit_once('@')?;
        let info = before.split_once("://").map_or(before, |(_, info)| info);
        let (user, password) = match info.split_once(':') {
            Some((user, password)) => (user, Some(decode_percent(password))),
            None => (info, None),
        };
        (!info.is_empty()).then(|| (decode_percent(user), password))
    }
}

/// Decodes `%40` and the like. What is not such a sequence stays as it is.
fn decode_percent(text: &str) -> String {
    let mut pieces = text.split('%');
    let mut bytes = pieces.next().unwrap_or_default().as_bytes().to_vec();
    for piece in pieces {
        let digits = piece.get(..2).filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                bytes.extend_from_slice(piece.get(2..).unwrap_or_default().as_bytes());
            }
            None => {
                bytes.push(b'%');
                bytes.extend_from_slice(piece.as_bytes());
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

impl AsRef<str> for NatsUrl {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for NatsUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&without_user_info(self))
    }
}

/// A NATS URL to show: user and password are `***`.
pub(crate) fn without_user_info(url: impl AsRef<str>) -> String {
    let url = url.as_ref();
    match url.rsplit_once('@') {
        None => url.to_owned(),
        Some((before, host)) => match before.split_once("://") {
            Some((scheme, _)) => format!("{scheme}://***@{host}"),
            None => format!("***@{host}"),
        },
    }
}

/// A list of authentication methods, or a single one.
pub(crate) enum AuthMethods {}

impl Setting for AuthMethods {
    type Value = Vec<Auth>;
    const TYPE: &'static str = "a list of mappings, or one mapping";
    const FIELDS: Option<fn() -> Vec<Field>> = Auth::FIELDS;

    fn read(node: &Node, scope: &mut Scope<'_, '_>) -> Option<Vec<Auth>> {
        match &node.value {
            NodeValue::List(_) => Vec::<Auth>::read(node, scope),
            _ => Auth::read(node, scope).map(|auth| vec![auth]),
        }
    }

    fn schema() -> Value {
        let is_given =
            |key: &str| json!({ "required": [key], "properties": { key: { "not": { "type": "null" } } } });
        let auth = merged(Auth::schema(), json!({ "oneOf": rules::AUTH_METHODS.map(is_given) }));
        json!({ "type": ["array", "object"], "anyOf": [{ "type": "array", "items": auth }, auth] })
    }
}
