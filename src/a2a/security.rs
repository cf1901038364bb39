//! Parses the security schemes and requirements of a card, in the format of any version.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::{Map, Value};

use super::card::field;
use crate::config::{KeyPlace, parse_word};
use crate::text::shorten;

/// What the card requires of callers: all schemes of one alternative. Without alternatives it requires nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Security {
    pub alternatives: Vec<Vec<(String, SecurityScheme)>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SecurityScheme {
    Bearer,
    Basic,
    ApiKey {
        /// The name of the header, parameter or cookie.
        name: String,
        place: KeyPlace,
    },
    /// A token from an OAuth2 or OpenID Connect server.
    OAuth2,
    MutualTls,
    Unknown(String),
}

impl Security {
    pub(super) fn of_card(card: &Map<String, Value>) -> Self {
        let schemes: BTreeMap<&str, SecurityScheme> = field(card, "securitySchemes")
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
            .map(|(name, scheme)| (name.as_str(), SecurityScheme::of_scheme(scheme)))
            .collect();
        let requirements = field(card, "securityRequirements").or_else(|| card.get("security"));
        let mut alternatives = Vec::new();
        for requirement in requirements.and_then(Value::as_array).into_iter().flatten() {
            // v1.0 has the names one level deeper.
            let names = requirement.get("schemes").unwrap_or(requirement);
            let names = names.as_object().into_iter().flatten().map(|(name, _)| name.as_str());
            let alternative: Vec<_> = names
                .map(|name| {
                    let scheme = schemes.get(name).cloned();
                    (name.to_owned(), scheme.unwrap_or_else(|| SecurityScheme::Unknown(shorten(name, 64))))
                })
                .collect();
            if alternative.is_empty() {
                // An empty alternative makes authentication optional.
                return Self::default();
            }
            alternatives.push(alternative);
        }
        if requirements.is_none() {
            // v0.1 lists the HTTP names of alternative schemes.
            let schemes = card.get("authentication").and_then(|auth| auth.get("schemes"));
            let names = schemes.and_then(Value::as_array).into_iter().flatten();
            for name in names.filter_map(Value::as_str) {
                if matches!(name.to_ascii_lowercase().as_str(), "public" | "none" | "") {
                    return Self::default();
                }
                alternatives.push(vec![(name.to_owned(), SecurityScheme::of_http(name))]);
            }
        }
        Self { alternatives }
    }
}

impl SecurityScheme {
    fn of_scheme(scheme: &Value) -> Self {
        // v1.0 has the kind as a key, older versions as the value of `type`.
        let keys = [
            ("httpAuthSecurityScheme", "http"),
            ("apiKeySecurityScheme", "apiKey"),
            ("oauth2SecurityScheme", "oauth2"),
            ("openIdConnectSecurityScheme", "openIdConnect"),
            ("mtlsSecurityScheme", "mutualTLS"),
        ];
        let find = |fields| keys.iter().find_map(|(key, kind)| Some((*kind, field(fields, key)?)));
        let wrapped = scheme.as_object().and_then(find);
        let (kind, scheme) = wrapped.unwrap_or_else(|| (text(scheme, "type"), scheme));
        match kind {
            "http" => Self::of_http(text(scheme, "scheme")),
            "apiKey" => {
                let place = match text(scheme, "location") {
                    "" => text(scheme, "in"),
                    place => place,
                };
                Self::ApiKey {
                    name: shorten(text(scheme, "name"), 128),
                    place: parse_word(&place.to_ascii_lowercase()).unwrap_or_default(),
                }
            }
            "oauth2" | "openIdConnect" => Self::OAuth2,
            "mutualTLS" => Self::MutualTls,
            other => Self::Unknown(shorten(other, 64)),
        }
    }

    fn of_http(scheme: &str) -> Self {
        match scheme.to_ascii_lowercase().as_str() {
            "bearer" => Self::Bearer,
            "basic" => Self::Basic,
            "oauth2" => Self::OAuth2,
            _ => Self::Unknown(shorten(scheme, 64)),
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
            for (index, (name, scheme)) in alternative.iter().take(8).enumerate() {
                let and = if index == 0 { "" } else { " and " };
                write!(f, "{and}`{}` ({scheme})", shorten(name, 64))?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for SecurityScheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bearer => f.write_str("a bearer token"),
            Self::Basic => f.write_str("a user and a password"),
            Self::ApiKey { name, place } => {
                let place = match place {
                    KeyPlace::Header => "header",
                    KeyPlace::Query => "query parameter",
                    KeyPlace::Cookie => "cookie",
                };
                write!(f, "an API key in {place} `{name}`")
            }
            Self::OAuth2 => f.write_str("OAuth2"),
            Self::MutualTls => f.write_str("a client certificate"),
            Self::Unknown(name) => write!(f, "unknown scheme `{name}`"),
        }
    }
}
