//! Credentials for one agent. `a2a::address` decides which hosts may get them.
//!
//! [`Keyring::for_card`] and [`Keyring::for_tasks`] select from the configuration; the latter by the demands of the card
//! (see [`super::security`]). Before each request call [`Credentials::ready`], which gets an OAuth2 token if one is
//! needed and there is none, and then [`Credentials::add_to_headers`].

mod oauth;

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::header::{
    AUTHORIZATION, COOKIE, HeaderMap, HeaderName, HeaderValue, InvalidHeaderName, InvalidHeaderValue,
};
use secrecy::{ExposeSecret as _, SecretString};
use url::Url;

use super::security::{Security, SecurityScheme};
use crate::config::{self, KeyPlace};
use crate::secrets::Secrets;
use oauth::OAuth;
pub(crate) use oauth::TokenError;

/// Why the credentials of an agent cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    #[error("`{0}` is not a header name")]
    Name(String, #[source] InvalidHeaderName),
    /// The message does not show the value.
    #[error("the value of header `{0}` has characters that are not allowed in a header")]
    Value(String, #[source] InvalidHeaderValue),
    #[error("cannot use the certificate or key in `tls`: {path}")]
    Tls {
        path: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("cannot set up the HTTP client for this agent")]
    Http(#[from] reqwest::Error),
}

/// The credentials of one request. Header values are marked sensitive, so that HTTP libraries do not print them.
#[derive(Debug, Clone, Default)]
pub struct Credentials {
    headers: HeaderMap,
    query: Vec<(String, SecretString)>,
    oauth: Option<Arc<OAuth>>,
}

/// All credentials that the configuration has for one agent.
#[derive(Debug, Clone)]
pub(crate) struct Keyring {
    headers: HeaderMap,
    methods: Vec<AuthMethod>,
    card_methods: Option<Vec<AuthMethod>>,
    /// False for `auth: []`.
    obeys_card: bool,
    has_certificate: bool,
}

#[derive(Debug, Clone)]
struct AuthMethod {
    /// The name of the scheme in the card that it is for; by default any that it satisfies.
    scheme: Option<String>,
    secret: Secret,
}

#[derive(Debug, Clone)]
enum Secret {
    Bearer(HeaderValue),
    Basic(HeaderValue),
    ApiKey { name: String, place: KeyPlace, value: SecretString },
    OAuth(Arc<OAuth>),
}

impl Keyring {
    /// `http` is for token endpoints, which may be on any host. `secrets` learns the tokens.
    pub(crate) fn new(
        config: &config::AgentConfig,
        http: &reqwest::Client,
        secrets: &Secrets,
    ) -> Result<Self, AuthError> {
        let mut headers = HeaderMap::new();
        for (name, secret) in &config.headers {
            let header = HeaderName::try_from(name).map_err(|e| AuthError::Name(name.clone(), e))?;
            headers.insert(header, sensitive(name, secret.expose_secret())?);
        }
        let parse = |list: &[config::Auth]| -> Result<Vec<AuthMethod>, AuthError> {
            list.iter().filter_map(|auth| AuthMethod::new(auth, http, secrets).transpose()).collect()
        };
        let mut methods = parse(config.auth.as_deref().unwrap_or_default())?;
        if let Some(token) = &config.bearer_token {
            let secret = Secret::Bearer(bearer(token.expose_secret())?);
            methods.insert(0, AuthMethod { scheme: None, secret });
        }
        Ok(Self {
            headers,
            methods,
            card_methods: config.card_auth.as_deref().map(parse).transpose()?,
            obeys_card: config.auth.as_ref().is_none_or(|auth| !auth.is_empty()),
            has_certificate: config.tls.as_ref().is_some_and(|tls| tls.cert.is_some()),
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.headers.is_empty() && self.methods.is_empty()
    }

    /// All credentials for the card, because its demands are not known yet.
    pub(crate) fn for_card(&self) -> Credentials {
        self.credentials(self.card_methods.as_ref().unwrap_or(&self.methods))
    }

    /// The credentials for the first alternative in the card that the configuration can satisfy. The error is what the
    /// card demands.
    pub(crate) fn for_tasks(&self, security: &Security) -> Result<Credentials, String> {
        if security.alternatives.is_empty() || !self.obeys_card {
            return Ok(self.credentials(&self.methods));
        }
        let satisfy = |alternative: &Vec<(String, SecurityScheme)>| {
            alternative.iter().map(|(name, scheme)| self.satisfy(name, scheme)).collect::<Option<Vec<_>>>()
        };
        let methods = security.alternatives.iter().find_map(satisfy).ok_or_else(|| security.to_string())?;
        Ok(self.credentials(methods.into_iter().flatten()))
    }

    /// The method that satisfies a scheme of the card; `Some(None)` if a configured header or certificate does.
    fn satisfy(&self, name: &str, scheme: &SecurityScheme) -> Option<Option<&AuthMethod>> {
        use SecurityScheme::{ApiKey, Basic, Bearer, MutualTls, OAuth2, Unknown};
        let named = self.methods.iter().find(|method| method.scheme.as_deref() == Some(name));
        let is_unnamed = |method: &&AuthMethod| method.scheme.is_none() && method.secret.satisfies(scheme);
        if let Some(method) = named.or_else(|| self.methods.iter().find(is_unnamed)) {
            return Some(Some(method));
        }
        let is_configured = match scheme {
            Bearer | Basic | OAuth2 | Unknown(_) => self.headers.contains_key(AUTHORIZATION),
            ApiKey { name, place: KeyPlace::Header } => self.headers.contains_key(name.as_str()),
            ApiKey { place: KeyPlace::Cookie, .. } => self.headers.contains_key(COOKIE),
            ApiKey { place: KeyPlace::Query, .. } => false,
            MutualTls => self.has_certificate,
        };
        is_configured.then_some(None)
    }

    fn credentials<'a>(&self, methods: impl IntoIterator<Item = &'a AuthMethod>) -> Credentials {
        let mut credentials = Credentials { headers: self.headers.clone(), ..Credentials::default() };
        methods.into_iter().for_each(|method| credentials.add(&method.secret));
        credentials
    }
}

impl Secret {
    fn satisfies(&self, scheme: &SecurityScheme) -> bool {
        match (self, scheme) {
            (Self::Bearer(_) | Self::OAuth(_), SecurityScheme::Bearer | SecurityScheme::OAuth2)
            | (Self::Basic(_), SecurityScheme::Basic) => true,
            (
                Self::ApiKey { name, place, .. },
                SecurityScheme::ApiKey { name: demanded_name, place: demanded_place },
            ) => place == demanded_place && name.eq_ignore_ascii_case(demanded_name),
            _ => false,
        }
    }
}

impl Credentials {
    /// Adds a secret, unless there already is one in its place.
    fn add(&mut self, secret: &Secret) {
        let has_authorization = self.headers.contains_key(AUTHORIZATION) || self.oauth.is_some();
        match secret {
            Secret::Bearer(value) | Secret::Basic(value) if !has_authorization => {
                self.headers.insert(AUTHORIZATION, value.clone());
            }
            Secret::OAuth(oauth) if !has_authorization => self.oauth = Some(Arc::clone(oauth)),
            Secret::Bearer(_) | Secret::Basic(_) | Secret::OAuth(_) => {}
            Secret::ApiKey { name, place, value } => {
                let text = value.expose_secret();
                let (name, text) = match place {
                    KeyPlace::Query => {
                        self.query.push((name.clone(), value.clone()));
                        return;
                    }
                    KeyPlace::Header => (name.as_str(), text.to_owned()),
                    KeyPlace::Cookie => (COOKIE.as_str(), format!("{name}={text}")),
                };
                // The configuration has checked both.
                if let (Ok(header), Ok(value)) = (HeaderName::try_from(name), sensitive(name, &text)) {
                    self.headers.entry(header).or_insert(value);
                }
            }
        }
    }

    /// Gets an access token if one is needed.
    pub async fn ready(&self) -> Result<(), TokenError> {
        match &self.oauth {
            Some(oauth) => Box::pin(oauth.ready()).await,
            None => Ok(()),
        }
    }

    /// Gets a new access token after a 401, if tokens are in use. `sent` is the rejected authorization.
    pub async fn renew(&self, sent: Option<&HeaderValue>) -> bool {
        match &self.oauth {
            Some(oauth) => Box::pin(oauth.renew(sent)).await.is_ok(),
            None => false,
        }
    }

    pub fn are_in_url(&self) -> bool {
        !self.query.is_empty()
    }

    pub fn add_to_headers(&self, headers: &mut HeaderMap) {
        if !self.headers.is_empty() {
            headers.extend(self.headers.clone());
        }
        if let Some(token) = self.oauth.as_ref().and_then(|oauth| oauth.current()) {
            headers.insert(AUTHORIZATION, token);
        }
    }

    pub fn add_to_url(&self, url: &mut Url) {
        for (name, value) in &self.query {
            url.query_pairs_mut().append_pair(name, value.expose_secret());
        }
    }
}

impl AuthMethod {
    fn new(
        auth: &config::Auth,
        http: &reqwest::Client,
        secrets: &Secrets,
    ) -> Result<Option<Self>, AuthError> {
        let secret = if let Some(token) = &auth.bearer {
            Secret::Bearer(bearer(token.expose_secret())?)
        } else if let Some(basic) = &auth.basic {
            let pair = format!("{}:{}", basic.user, basic.password.expose_secret());
            Secret::Basic(sensitive("Authorization", &format!("Basic {}", STANDARD.encode(pair)))?)
        } else if let Some(key) = &auth.api_key {
            Secret::ApiKey { name: key.name.clone(), place: key.place, value: key.value.clone() }
        } else if let Some(oauth) = &auth.oauth2 {
            Secret::OAuth(Arc::new(OAuth::new(oauth.clone(), http.clone(), secrets.clone())))
        } else {
            return Ok(None);
        };
        Ok(Some(Self { scheme: auth.scheme.clone(), secret }))
    }
}

fn bearer(token: &str) -> Result<HeaderValue, AuthError> {
    sensitive("Authorization", &format!("Bearer {token}"))
}

fn sensitive(name: &str, text: &str) -> Result<HeaderValue, AuthError> {
    let mut value = HeaderValue::from_str(text).map_err(|e| AuthError::Value(name.to_owned(), e))?;
    value.set_sensitive(true);
    Ok(value)
}
