//! The settings of authentication: the types, and how they are read.

use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use schemars::JsonSchema;
use secrecy::{ExposeSecret as _, SecretString};
use url::Url;
use url::form_urlencoded::byte_serialize;

use super::fields::{Fields, MAPPING, checked, each, unexpected};
use super::node::{Node, Value};
use super::problem::Report;
use super::{AgentConfig, check, schema, values};
use crate::secrets::Secrets;

/// One way to authenticate: exactly one of `bearer`, `api_key`, `basic` and `oauth2`.
#[derive(Debug, Clone, JsonSchema)]
#[schemars(deny_unknown_fields, extend("oneOf" = schema::one_of(&["bearer", "api_key", "basic", "oauth2"])))]
pub struct Auth {
    /// The card's name of the security scheme that this is for; without it, the kind decides.
    #[schemars(schema_with = "schema::optional_filled", extend("examples" = ["corporate"]))]
    pub scheme: Option<String>,
    /// Token sent as `Authorization: Bearer …`.
    #[schemars(schema_with = "schema::optional_token", extend("examples" = ["${TOKEN}"]))]
    pub bearer: Option<SecretString>,
    /// Key sent under a name.
    pub api_key: Option<ApiKey>,
    /// User and password.
    pub basic: Option<Basic>,
    /// OAuth2 client credentials.
    pub oauth2: Option<OAuth2>,
}

/// Key sent under a name.
#[derive(Debug, Clone, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct ApiKey {
    /// The name of the header, query parameter or cookie.
    #[schemars(schema_with = "schema::header_name", extend("examples" = ["X-API-Key"]))]
    pub name: String,
    /// Where it goes: `header`, `query` or `cookie`.
    #[schemars(rename = "in", schema_with = "schema::key_place", extend("default" = "header"))]
    pub place: KeyPlace,
    /// The key.
    #[schemars(schema_with = "schema::header_value", extend("examples" = ["${API_KEY}"]))]
    pub value: SecretString,
}

/// Where an API key goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KeyPlace {
    /// A header.
    #[default]
    Header,
    /// A parameter of the URL.
    Query,
    /// A cookie.
    Cookie,
}

impl KeyPlace {
    /// Reads the word for it.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "header" => Some(Self::Header),
            "query" => Some(Self::Query),
            "cookie" => Some(Self::Cookie),
            _ => None,
        }
    }
}

/// User and password.
#[derive(Debug, Clone, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct Basic {
    /// The user.
    #[schemars(schema_with = "schema::user")]
    pub user: String,
    /// The password.
    #[schemars(with = "String")]
    pub password: SecretString,
}

impl AgentConfig {
    /// The credentials in the settings of the agent: what its output and errors must not show.
    pub fn secrets(&self) -> Secrets {
        let is_secret = |name: &&String| {
            let name = name.to_ascii_lowercase();
            let is_key = |word: &str| word.ends_with("key") || word.ends_with("keys");
            ["token", "secret", "password", "credential"].iter().any(|word| name.contains(word))
                || name.split(|c: char| !c.is_alphanumeric()).any(is_key)
        };
        let is_harmless = |name: &str| {
            let name = name.to_ascii_lowercase();
            ["accept", "content-", "user-agent", "a2a-"].iter().any(|start| name.starts_with(start))
        };
        let headers = self.headers.iter().filter(|(name, _)| !is_harmless(name)).map(|(_, value)| value);
        // An agent may repeat a token without its scheme.
        let without_scheme = headers
            .clone()
            .filter_map(|value| value.expose_secret().split_once(' '))
            .map(|(_, value)| SecretString::from(value));
        let variables = self.env.iter().filter(|(name, _)| is_secret(name));
        let auth = self.auth.iter().chain(&self.card_auth).flatten();
        // On the wire, a password is part of a longer word.
        let pair =
            |user: &str, password: &str| SecretString::from(STANDARD.encode(format!("{user}:{password}")));
        let encoded = |text: &str| byte_serialize(text.as_bytes()).collect::<String>();
        let pairs = auth.clone().filter_map(|auth| match (&auth.basic, &auth.oauth2) {
            (Some(Basic { user, password }), _) => Some(pair(user, password.expose_secret())),
            (None, Some(OAuth2 { client_id, client_secret, .. })) => {
                Some(pair(&encoded(client_id), &encoded(client_secret.expose_secret())))
            }
            (None, None) => None,
        });
        let auth = auth.flat_map(|auth| {
            let key = auth.api_key.iter().map(|key| &key.value);
            let password = auth.basic.iter().map(|basic| &basic.password);
            let client = auth.oauth2.iter().map(|oauth| &oauth.client_secret);
            auth.bearer.iter().chain(key).chain(password).chain(client)
        });
        let values = headers.chain(variables.map(|(_, value)| value));
        let values = self.bearer_token.iter().chain(auth).chain(values).cloned();
        Secrets::new(values.chain(without_scheme).chain(pairs))
    }
}

/// OAuth2 client credentials.
#[derive(Debug, Clone, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct OAuth2 {
    /// Where tokens are had; it may be another host than the agent's.
    #[schemars(schema_with = "schema::http_url", extend("examples" = ["https://login.example.org/token"]))]
    pub token_url: Url,
    /// The client's id.
    #[schemars(schema_with = "schema::filled")]
    pub client_id: String,
    /// The client's secret.
    #[schemars(schema_with = "schema::filled", extend("examples" = ["${CLIENT_SECRET}"]))]
    pub client_secret: SecretString,
    /// Scopes to ask for.
    #[schemars(schema_with = "schema::filled_list", extend("default" = []))]
    pub scopes: Vec<String>,
    /// The audience to ask for, where the server wants one.
    #[schemars(schema_with = "schema::optional_filled")]
    pub audience: Option<String>,
}

/// TLS towards one agent.
#[derive(Debug, Clone, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct AgentTls {
    /// PEM file with the authorities to trust instead of the system's.
    #[schemars(schema_with = "schema::path", extend("examples" = ["tls/ca.pem"]))]
    pub ca: Option<PathBuf>,
    /// PEM file with the client certificate; goes with `key`.
    #[schemars(schema_with = "schema::path", extend("examples" = ["tls/client.pem"]))]
    pub cert: Option<PathBuf>,
    /// PEM file with the key of the client certificate.
    #[schemars(schema_with = "schema::path", extend("examples" = ["tls/client.key"]))]
    pub key: Option<PathBuf>,
}

/// A list of ways, or a single one.
pub(super) fn ways(node: &Node, report: &mut Report<'_>) -> Option<Vec<Auth>> {
    match &node.value {
        Value::Map(_) => Some(way(node, report).into_iter().collect()),
        Value::List(_) => each(node, report, way),
        _ => {
            unexpected(node, report, MAPPING);
            None
        }
    }
}

fn way(node: &Node, report: &mut Report<'_>) -> Option<Auth> {
    let mut f = Fields::open(node, report)?;
    let auth = Auth {
        scheme: f.parsed(&["scheme"], values::filled),
        bearer: f.secret(&["bearer"], values::bearer_token),
        api_key: f.get(&["api_key"], api_key),
        basic: f.get(&["basic"], basic),
        oauth2: f.get(&["oauth2"], oauth2),
    };
    check::auth(&mut f, node.at.start);
    f.close();
    Some(auth)
}

fn api_key(node: &Node, report: &mut Report<'_>) -> Option<ApiKey> {
    let mut f = Fields::open(node, report)?;
    let name = f.required(&["name"], |node, report| {
        checked(node, report, |text| match values::header_name(text) {
            Ok(()) => Ok(text.to_owned()),
            Err(reason) => Err(format!("this name {reason}")),
        })
    });
    let place = f.parsed(&["in"], |text| {
        KeyPlace::parse(text).ok_or_else(|| "expected `header`, `query` or `cookie`".into())
    });
    let value = f.required(&["value"], |node, report| checked(node, report, values::header_value));
    f.close();
    Some(ApiKey { name: name?, place: place.unwrap_or_default(), value: value?.into() })
}

fn basic(node: &Node, report: &mut Report<'_>) -> Option<Basic> {
    let mut f = Fields::open(node, report)?;
    let user = f.required(&["user"], |node, report| {
        checked(node, report, |text| {
            // RFC 7617, section 2: the colon ends the user.
            if text.contains(':') {
                return Err("a user has no colon here".into());
            }
            values::filled(text)
        })
    });
    let password =
        f.required(&["password"], |node, report| checked(node, report, |text| Ok(text.to_owned())));
    f.close();
    Some(Basic { user: user?, password: password?.into() })
}

fn oauth2(node: &Node, report: &mut Report<'_>) -> Option<OAuth2> {
    let mut f = Fields::open(node, report)?;
    let token_url = f.required(&["token_url"], |node, report| checked(node, report, values::token_url));
    let client_id = f.required(&["client_id"], |node, report| checked(node, report, values::filled));
    let client_secret = f.required(&["client_secret"], |node, report| checked(node, report, values::filled));
    let scopes = f.get(&["scopes"], super::read::filled_list).unwrap_or_default();
    let audience = f.parsed(&["audience"], values::filled);
    f.close();
    Some(OAuth2 {
        token_url: token_url?,
        client_id: client_id?,
        client_secret: client_secret?.into(),
        scopes,
        audience,
    })
}

pub(super) fn tls(node: &Node, report: &mut Report<'_>) -> Option<AgentTls> {
    let mut f = Fields::open(node, report)?;
    let tls = AgentTls {
        ca: f.parsed(&["ca"], values::path),
        cert: f.parsed(&["cert"], values::path),
        key: f.parsed(&["key"], values::path),
    };
    check::tls(&mut f);
    f.close();
    Some(tls)
}
