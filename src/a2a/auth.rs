//! Credentials for one configured origin.

use reqwest::header::{
    AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, InvalidHeaderName, InvalidHeaderValue,
};
use secrecy::{ExposeSecret as _, SecretString};

/// Why credentials cannot be sent. The settings are checked before, so this is a second line.
#[derive(Debug, thiserror::Error)]
pub enum AuthError {
    /// Not a header name.
    #[error("`{0}` is not a header name")]
    Name(String, #[source] InvalidHeaderName),
    /// A value that no header can have; it is not shown.
    #[error("the value of header `{0}` has characters that a header cannot have")]
    Value(String, #[source] InvalidHeaderValue),
}

/// The headers that go with every request to the agent. Values are marked sensitive, so that
/// nothing below prints them.
pub fn headers<'a>(
    bearer_token: Option<&SecretString>,
    extra: impl IntoIterator<Item = (&'a String, &'a SecretString)>,
) -> Result<HeaderMap, AuthError> {
    let mut headers = HeaderMap::new();
    let mut add = |name: &str, value: &str| {
        let header = HeaderName::try_from(name).map_err(|e| AuthError::Name(name.to_owned(), e))?;
        let mut value = HeaderValue::from_str(value).map_err(|e| AuthError::Value(name.to_owned(), e))?;
        value.set_sensitive(true);
        headers.insert(header, value);
        Ok(())
    };
    for (name, value) in extra {
        add(name, value.expose_secret())?;
    }
    if let Some(token) = bearer_token {
        add(
            AUTHORIZATION.as_str(),
            &format!("Bearer {}", token.expose_secret()),
        )?;
    }
    Ok(headers)
}
