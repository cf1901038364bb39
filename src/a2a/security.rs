//! What a card asks for: its security schemes and which of them are required, in every version's shape.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value};

pub(crate) use crate::config::KeyPlace as Place;

/// What a caller must show: one of the alternatives, and all that it lists. None at all means that
/// nothing is required.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Security {
    /// Name and kind of each scheme, by alternative.
    pub alternatives: Vec<Vec<(String, Kind)>>,
}

/// The kinds of security schemes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// `Authorization: Bearer`.
    Bearer,
    /// `Authorization: Basic`.
    Basic,
    /// A key under a name.
    ApiKey {
        /// The name of the header, parameter or cookie.
        name: String,
        place: Place,
    },
    /// A token from an OAuth2 or OpenID Connect server.
    OAuth2,
    MutualTls,
    /// Something that the bridge does not know.
    Other(String),
}

impl Security {
    /// Reads it from a card.
    pub(super) fn of_card(card: &Map<String, Value>) -> Self {
        let get = |key: &str, snake: &str| card.get(key).or_else(|| card.get(snake));
        let schemes: BTreeMap<&str, Kind> = get("securitySchemes", "security_schemes")
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
            .map(|(name, scheme)| (name.as_str(), Kind::of_scheme(scheme)))
            .collect();
        let requirements =
            get("securityRequirements", "security_requirements").or_else(|| card.get("security"));
        let mut alternatives = Vec::new();
        for requirement in requirements.and_then(Value::as_array).into_iter().flatten() {
            // v1.0 has the names one level deeper.
            let names = requirement.get("schemes").unwrap_or(requirement);
            let names = names.as_object().into_iter().flatten().map(|(name, _)| name.as_str());
            let alternative: Vec<_> = names
                .map(|name| {
                    let kind = schemes.get(name).cloned();
                    (name.to_owned(), kind.unwrap_or_else(|| Kind::Other(crate::text::shorten(name, 64))))
                })
                .collect();
            if alternative.is_empty() {
                // An empty one says that nothing is fine, too.
                return Self::default();
            }
            alternatives.push(alternative);
        }
        if requirements.is_none() {
            // v0.1: one of the schemes, by their HTTP names.
            let schemes = card.get("authentication").and_then(|auth| auth.get("schemes"));
            let names = schemes.and_then(Value::as_array).into_iter().flatten();
            for name in names.filter_map(Value::as_str) {
                if matches!(name.to_ascii_lowercase().as_str(), "public" | "none" | "") {
                    return Self::default();
                }
                alternatives.push(vec![(name.to_owned(), Kind::of_http(name))]);
            }
        }
        Self { alternatives }
    }
}

impl Kind {
    fn of_scheme(scheme: &Value) -> Self {
        // v1.0 names the kind by the key, before it was `type`.
        let wrapped = |camel: &str, snake: &str| scheme.get(camel).or_else(|| scheme.get(snake));
        if let Some(inner) = wrapped("httpAuthSecurityScheme", "http_auth_security_scheme") {
            return Self::of_http(text(inner, "scheme"));
        }
        if let Some(inner) = wrapped("apiKeySecurityScheme", "api_key_security_scheme") {
            return Self::of_api_key(inner);
        }
        for (camel, snake, kind) in [
            ("oauth2SecurityScheme", "oauth2_security_scheme", Self::OAuth2),
            ("openIdConnectSecurityScheme", "open_id_connect_security_scheme", Self::OAuth2),
            ("mtlsSecurityScheme", "mtls_security_scheme", Self::MutualTls),
        ] {
            if wrapped(camel, snake).is_some() {
                return kind;
            }
        }
        match text(scheme, "type") {
            "http" => Self::of_http(text(scheme, "scheme")),
            "apiKey" => Self::of_api_key(scheme),
            "oauth2" | "openIdConnect" => Self::OAuth2,
            "mutualTLS" => Self::MutualTls,
            other => Self::Other(crate::text::shorten(other, 64)),
        }
    }

    fn of_http(scheme: &str) -> Self {
        match scheme.to_ascii_lowercase().as_str() {
            "bearer" => Self::Bearer,
            "basic" => Self::Basic,
            "oauth2" => Self::OAuth2,
            _ => Self::Other(crate::text::shorten(scheme, 64)),
        }
    }

    fn of_api_key(scheme: &Value) -> Self {
        let place = Some(text(scheme, "location"))
            .filter(|text| !text.is_empty())
            .unwrap_or_else(|| text(scheme, "in"));
        Self::ApiKey {
            name: crate::text::shorten(text(scheme, "name"), 128),
            place: Place::parse(&place.to_ascii_lowercase()).unwrap_or_default(),
        }
    }
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value.get(key).and_then(Value::as_str).unwrap_or_default()
}

impl fmt::Display for Security {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, alternative) in self.alternatives.iter().take(8).enumerate() {
            f.write_str(if index == 0 { "" } else { ", or " })?;
            for (index, (name, kind)) in alternative.iter().take(8).enumerate() {
                let and = if index == 0 { "" } else { " and " };
                write!(f, "{and}`{}` ({kind})", crate::text::shorten(name, 64))?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bearer => f.write_str("a bearer token"),
            Self::Basic => f.write_str("user and password"),
            Self::ApiKey { name, place } => {
                let place = match place {
                    Place::Header => "header",
                    Place::Query => "query parameter",
                    Place::Cookie => "cookie",
                };
                write!(f, "an API key in {place} `{name}`")
            }
            Self::OAuth2 => f.write_str("OAuth2"),
            Self::MutualTls => f.write_str("a client certificate"),
            Self::Other(name) => write!(f, "unknown kind `{name}`"),
        }
    }
}
