//! Credentials for one agent: what is sent with every request. Where it may be sent is up to `a2a::address`.
//!
//! [`Keyring::for_card`] and [`Keyring::for_tasks`] pick from the settings; the latter by
//! what the card asks for (see [`super::security`]). Whoever sends a request calls
//! [`Credentials::ready`] first, which gets an OAuth2 token if one is needed and none is at hand,
//! then [`Credentials::put_into`].

mod oauth;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::{
    AUTHORIZATION, COOKIE, HeaderMap, HeaderName, HeaderValue, InvalidHeaderName, InvalidHeaderValue,
};
use secrecy::{ExposeSecret as _, SecretString};
use std::sync::Arc;
use url::Url;

use super::security::{Kind, Place, Security};
use crate::config;
use crate::secrets::Secrets;
use oauth::OAuth;
pub(crate) use oauth::TokenError;

/// Why credentials cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    #[error("`{0}` is not a header name")]
    Name(String, #[source] InvalidHeaderName),
    /// A value that no header can have; it is not shown.
    #[error("the value of header `{0}` has characters that a header cannot have")]
    Value(String, #[source] InvalidHeaderValue),
    /// A certificate or key that cannot be used.
    #[error("cannot use `tls`: {path}")]
    Tls {
        path: String,
        /// What is wrong with it.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The HTTP client could not be made.
    #[error("cannot set up HTTP for this agent")]
    Http(#[from] reqwest::Error),
}

/// What goes with a request. Values are marked sensitive, so that nothing below prints them.
#[derive(Debug, Clone, Default)]
pub struct Credentials {
    headers: HeaderMap,
    query: Vec<(String, SecretString)>,
    oauth: Option<Arc<OAuth>>,
}

/// Everything that the settings have for one agent.
#[derive(Debug, Clone)]
pub struct Keyring {
    headers: HeaderMap,
    ways: Vec<Way>,
    card_ways: Option<Vec<Way>>,
    /// Whether the card's demands are looked at: `auth: []` says that they are not.
    is_checked: bool,
    has_certificate: bool,
}

#[derive(Debug, Clone)]
struct Way {
    scheme: Option<String>,
    secret: Secret,
}

#[derive(Debug, Clone)]
enum Secret {
    Bearer(HeaderValue),
    Basic(HeaderValue),
    ApiKey { name: String, place: Place, value: SecretString },
    OAuth(Arc<OAuth>),
}

impl Keyring {
    /// Reads the settings. `http` is for token endpoints, which may be anywhere; `secrets` learns their tokens.
    pub fn new(
        config: &config::AgentConfig,
        http: &reqwest::Client,
        secrets: &Secrets,
    ) -> Result<Self, AuthError> {
        let mut headers = HeaderMap::new();
        for (name, secret) in &config.headers {
            let header = HeaderName::try_from(name).map_err(|e| AuthError::Name(name.clone(), e))?;
            headers.insert(header, value(name, secret.expose_secret())?);
        }
        let ways = |list: &[config::Auth]| -> Result<Vec<Way>, AuthError> {
            list.iter().filter_map(|auth| way(auth, http, secrets).transpose()).collect()
        };
        let mut tasks = ways(config.auth.as_deref().unwrap_or_default())?;
        if let Some(token) = &config.bearer_token {
            let secret = Secret::Bearer(bearer(token.expose_secret())?);
            tasks.insert(0, Way { scheme: None, secret });
        }
        Ok(Self {
            headers,
            ways: tasks,
            card_ways: config.card_auth.as_deref().map(ways).transpose()?,
            is_checked: config.auth.as_ref().is_none_or(|auth| !auth.is_empty()),
            has_certificate: config.tls.as_ref().is_some_and(|tls| tls.cert.is_some()),
        })
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.headers.is_empty() && self.ways.is_empty()
    }

    /// What goes with the request for the card, which cannot be asked yet what it wants.
    pub fn for_card(&self) -> Credentials {
        let mut credentials = self.bare();
        for way in self.card_ways.as_ref().unwrap_or(&self.ways) {
            credentials.add(&way.secret);
        }
        credentials
    }

    /// What goes with calls: the first of the card's alternatives that the settings can meet.
    pub fn for_tasks(&self, security: &Security) -> Result<Credentials, String> {
        let mut credentials = self.bare();
        if security.alternatives.is_empty() || !self.is_checked {
            for way in &self.ways {
                credentials.add(&way.secret);
            }
            return Ok(credentials);
        }
        for alternative in &security.alternatives {
            let met: Option<Vec<_>> = alternative.iter().map(|(name, kind)| self.meet(name, kind)).collect();
            if let Some(secrets) = met {
                secrets.into_iter().flatten().for_each(|secret| credentials.add(secret));
                return Ok(credentials);
            }
        }
        Err(security.to_string())
    }

    /// What answers to one scheme of the card; `Some(None)` if the connection itself or an extra
    /// header does.
    fn meet(&self, name: &str, kind: &Kind) -> Option<Option<&Secret>> {
        let named = self.ways.iter().find(|way| way.scheme.as_deref() == Some(name));
        let unnamed = || self.ways.iter().find(|way| way.scheme.is_none() && way.secret.answers(kind));
        if let Some(way) = named.or_else(unnamed) {
            return Some(Some(&way.secret));
        }
        let by_header = match kind {
            Kind::Bearer | Kind::Basic | Kind::OAuth2 | Kind::Other(_) => {
                self.headers.contains_key(AUTHORIZATION)
            }
            Kind::ApiKey { name, place: Place::Header } => self.headers.contains_key(name.as_str()),
            Kind::ApiKey { place: Place::Cookie, .. } => self.headers.contains_key(COOKIE),
            Kind::ApiKey { .. } => false,
            Kind::MutualTls => self.has_certificate,
        };
        by_header.then_some(None)
    }

    fn bare(&self) -> Credentials {
        Credentials { headers: self.headers.clone(), ..Credentials::default() }
    }
}

impl Secret {
    fn answers(&self, kind: &Kind) -> bool {
        match (self, kind) {
            (Self::Bearer(_) | Self::OAuth(_), Kind::Bearer | Kind::OAuth2)
            | (Self::Basic(_), Kind::Basic) => true,
            (Self::ApiKey { name, place, .. }, Kind::ApiKey { name: wanted, place: there }) => {
                place == there && name.eq_ignore_ascii_case(wanted)
            }
            _ => false,
        }
    }
}

impl Credentials {
    /// Adds a secret, unless its place is taken: what is given first counts.
    fn add(&mut self, secret: &Secret) {
        let is_taken = self.headers.contains_key(AUTHORIZATION) || self.oauth.is_some();
        match secret {
            Secret::Bearer(value) | Secret::Basic(value) if !is_taken => {
                self.headers.insert(AUTHORIZATION, value.clone());
            }
            Secret::OAuth(oauth) if !is_taken => self.oauth = Some(Arc::clone(oauth)),
            Secret::Bearer(_) | Secret::Basic(_) | Secret::OAuth(_) => {}
            Secret::ApiKey { name, place, value } => {
                let text = value.expose_secret();
                let (name, text) = match place {
                    Place::Query => {
                        self.query.push((name.clone(), value.clone()));
                        return;
                    }
                    Place::Header => (name.as_str(), text.to_owned()),
                    Place::Cookie => (COOKIE.as_str(), format!("{name}={text}")),
                };
                // Both were checked with the settings.
                if let (Ok(name), Ok(mut value)) = (HeaderName::try_from(name), HeaderValue::from_str(&text))
                {
                    value.set_sensitive(true);
                    self.headers.entry(name).or_insert(value);
                }
            }
        }
    }

    /// Makes sure that everything is at hand.
    pub async fn ready(&self) -> Result<(), TokenError> {
        match &self.oauth {
            Some(oauth) => Box::pin(oauth.ready()).await,
            None => Ok(()),
        }
    }

    /// After a 401: gets a new token if there is one to get. `sent` is the authorization that was refused.
    pub async fn renew(&self, sent: Option<&HeaderValue>) -> bool {
        match &self.oauth {
            Some(oauth) => Box::pin(oauth.renew(sent)).await.is_ok(),
            None => false,
        }
    }

    /// Whether some of them belong into the address.
    pub fn are_in_url(&self) -> bool {
        !self.query.is_empty()
    }

    /// Puts those that are headers into a request.
    pub fn put_into(&self, headers: &mut HeaderMap) {
        if !self.headers.is_empty() {
            headers.extend(self.headers.clone());
        }
        if let Some(token) = self.oauth.as_ref().and_then(|oauth| oauth.current()) {
            headers.insert(AUTHORIZATION, token);
        }
    }

    /// Puts those that belong into the address there.
    pub fn put_into_url(&self, url: &mut Url) {
        for (name, value) in &self.query {
            url.query_pairs_mut().append_pair(name, value.expose_secret());
        }
    }
}

fn way(auth: &config::Auth, http: &reqwest::Client, secrets: &Secrets) -> Result<Option<Way>, AuthError> {
    let secret = if let Some(token) = &auth.bearer {
        Secret::Bearer(bearer(token.expose_secret())?)
    } else if let Some(basic) = &auth.basic {
        let pair = format!("{}:{}", basic.user, basic.password.expose_secret());
        Secret::Basic(value("Authorization", &format!("Basic {}", STANDARD.encode(pair)))?)
    } else if let Some(key) = &auth.api_key {
        Secret::ApiKey { name: key.name.clone(), place: key.place, value: key.value.clone() }
    } else if let Some(oauth) = &auth.oauth2 {
        Secret::OAuth(Arc::new(OAuth::new(oauth.clone(), http.clone(), secrets.clone())))
    } else {
        return Ok(None);
    };
    let scheme = auth.scheme.clone();
    Ok(Some(Way { scheme, secret }))
}

fn bearer(token: &str) -> Result<HeaderValue, AuthError> {
    value("Authorization", &format!("Bearer {token}"))
}

fn value(name: &str, text: &str) -> Result<HeaderValue, AuthError> {
    let mut value = HeaderValue::from_str(text).map_err(|e| AuthError::Value(name.to_owned(), e))?;
    value.set_sensitive(true);
    Ok(value)
}
