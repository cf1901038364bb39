//! The bridge's credentials for NATS. Each connection asks for them, so that a reload can replace them, and a renewed
//! `.creds` file takes effect, without a restart of the bridge.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_nats::{Auth, AuthError, ConnectOptions};
use nkeys::KeyPair;
use secrecy::{ExposeSecret as _, SecretString};

use super::ConnectError;
use crate::config::{NatsConfig, NatsUrl};

const MAX_FILE: u64 = 64 << 10;

#[derive(Debug)]
pub(crate) struct NatsCredentials {
    current: Mutex<Configured>,
}

/// The credentials as they are configured.
#[derive(Debug, Clone)]
struct Configured {
    file: Option<CredentialsFile>,
    nkey: Option<SecretString>,
    token: Option<SecretString>,
    user: Option<(String, SecretString)>,
}

#[derive(Debug, Clone)]
struct CredentialsFile {
    path: PathBuf,
    /// The text when it was last read with success.
    text: SecretString,
}

impl NatsCredentials {
    pub(crate) fn new(settings: &NatsConfig) -> Result<Arc<Self>, ConnectError> {
        Ok(Arc::new(Self { current: Mutex::new(Configured::read(settings)?) }))
    }

    /// Replaces them; connections from now on use the new ones. Returns whether they differ.
    pub(crate) fn replace(&self, settings: &NatsConfig) -> Result<bool, ConnectError> {
        let new = Configured::read(settings)?;
        let mut current = self.lock();
        let differs = !current.is_same(&new);
        *current = new;
        Ok(differs)
    }

    /// Options for connections with these credentials.
    pub(super) fn options(self: &Arc<Self>) -> ConnectOptions {
        // Also if there are none yet: a reload may add some.
        let credentials = Arc::clone(self);
        ConnectOptions::with_auth_callback(move |nonce| {
            std::future::ready(credentials.auth(&nonce).map_err(AuthError::new))
        })
    }

    /// The credentials for a new connection. `nonce` is the server's challenge.
    fn auth(&self, nonce: &[u8]) -> Result<Auth, String> {
        let mut current = self.lock();
        let mut auth = Auth::new();
        if let Some(file) = &mut current.file {
            // While it is being replaced, the file may be missing or incomplete.
            match read_creds(&file.path) {
                Ok(text) => file.text = text.into(),
                Err(error) => {
                    tracing::warn!(file = %file.path.display(), %error, "cannot read the NATS credentials again; using the previous ones");
                }
            }
            let keys = KeyFile::parse(file.text.expose_secret()).map_err(|error| error.to_string())?;
            auth.jwt = Some(keys.jwt.to_owned());
            auth.signature = Some(sign(&keys.key, nonce)?);
        }
        if let Some(seed) = &current.nkey {
            let key = KeyPair::from_seed(seed.expose_secret())
                .map_err(|error| format!("`nats.nkey` is not a valid seed: {error}"))?;
            auth.nkey = Some(key.public_key());
            auth.signature = Some(sign(&key, nonce)?);
        }
        let expose = |secret: &SecretString| secret.expose_secret().to_owned();
        auth.token = current.token.as_ref().map(expose);
        if let Some((user, password)) = &current.user {
            (auth.username, auth.password) = (Some(user.clone()), Some(expose(password)));
        }
        Ok(auth)
    }

    fn lock(&self) -> MutexGuard<'_, Configured> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn sign(key: &KeyPair, nonce: &[u8]) -> Result<Vec<u8>, String> {
    key.sign(nonce).map_err(|error| format!("cannot sign the server's challenge: {error}"))
}

impl Configured {
    fn read(settings: &NatsConfig) -> Result<Self, ConnectError> {
        let file = settings.credentials.as_ref().map(|path| {
            let text = read_creds(path);
            let text = text
                .map_err(|source| ConnectError::Credentials { path: path.display().to_string(), source })?;
            Ok(CredentialsFile { path: path.clone(), text: text.into() })
        });
        let password = || settings.password.clone().unwrap_or_default();
        let mut configured = Self {
            file: file.transpose()?,
            nkey: settings.nkey.clone(),
            token: settings.token.clone(),
            user: settings.user.clone().map(|user| (user, password())),
        };
        if configured.is_empty() {
            // The NATS client ignores them.
            match settings.url.iter().find_map(NatsUrl::user_info) {
                Some((user, Some(password))) => configured.user = Some((user, password.into())),
                Some((token, None)) => configured.token = Some(token.into()),
                None => {}
            }
        }
        Ok(configured)
    }

    fn is_empty(&self) -> bool {
        self.file.is_none() && self.nkey.is_none() && self.token.is_none() && self.user.is_none()
    }

    fn is_same(&self, other: &Self) -> bool {
        fn text(secret: &Option<SecretString>) -> Option<&str> {
            secret.as_ref().map(|secret| secret.expose_secret())
        }
        fn user(one: &Configured) -> Option<(&str, &str)> {
            one.user.as_ref().map(|(user, password)| (user.as_str(), password.expose_secret()))
        }
        fn file(one: &Configured) -> Option<&str> {
            one.file.as_ref().map(|file| file.text.expose_secret())
        }
        text(&self.nkey) == text(&other.nkey)
            && text(&self.token) == text(&other.token)
            && user(self) == user(other)
            && file(self) == file(other)
    }
}

/// The text of a valid `.creds` file.
fn read_creds(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_FILE).read_to_string(&mut text)?;
    KeyFile::parse(&text)?;
    Ok(text)
}

/// A `.creds` file: a JWT and an nkey seed, each between two lines of dashes with a title.
struct KeyFile<'a> {
    jwt: &'a str,
    key: KeyPair,
}

impl<'a> KeyFile<'a> {
    fn parse(text: &'a str) -> io::Result<Self> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let is_title = |line: &&str| line.starts_with("---") && line.ends_with("---");
        let mut lines = text.lines().map(str::trim);
        let mut next = || {
            lines.by_ref().find(|line| is_title(line) && line.contains("BEGIN"))?;
            lines.next().filter(|line| !line.is_empty() && !is_title(line))
        };
        let jwt = next().ok_or_else(|| invalid("it has no user JWT"))?;
        let seed = next().ok_or_else(|| invalid("it has no nkey seed"))?;
        let key = KeyPair::from_seed(seed).map_err(|_| invalid("its nkey seed is invalid"))?;
        Ok(Self { jwt, key })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONCE: &[u8] = b"nonce";

    fn settings(lines: &str) -> NatsConfig {
        let text = format!("agents: []\nnats: {{ {lines} }}");
        crate::config::parse(&text, "test.yaml", &|_| None).unwrap_or_else(|error| panic!("{error}")).nats
    }

    fn creds(jwt: &str, key: &KeyPair) -> String {
        let seed = key.seed().unwrap();
        format!(
            "-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n***** IMPORTANT *****\n\
             -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
        )
    }

    #[test]
    fn the_next_connection_uses_replaced_credentials() {
        let credentials = NatsCredentials::new(&settings("user: u, password: one")).unwrap();
        assert_eq!(credentials.auth(NONCE).unwrap().password.as_deref(), Some("one"));
        assert!(!credentials.replace(&settings("user: u, password: 'one'")).unwrap());
        assert!(credentials.replace(&settings("user: u, password: two")).unwrap());
        assert_eq!(credentials.auth(NONCE).unwrap().password.as_deref(), Some("two"));
        assert!(credentials.replace(&settings("token: t")).unwrap());
        let auth = credentials.auth(NONCE).unwrap();
        assert_eq!((auth.token.as_deref(), auth.username), (Some("t"), None));
    }

    #[test]
    fn credentials_in_a_url_count_unless_there_are_others() {
        let url = |more: &str| {
            let urls = "url: 'nats://h:1, nats://u:p%40ss@h:2, u:p%40ss@h:3'";
            NatsCredentials::new(&settings(&format!("{urls}{more}"))).unwrap()
        };
        let auth = url("").auth(NONCE).unwrap();
        assert_eq!((auth.username.as_deref(), auth.password.as_deref()), (Some("u"), Some("p@ss")));
        let auth = url(", token: t").auth(NONCE).unwrap();
        assert_eq!((auth.token.as_deref(), auth.username), (Some("t"), None));
        let token = NatsCredentials::new(&settings("url: 'nats://t%3@h'")).unwrap().auth(NONCE).unwrap();
        assert_eq!((token.token.as_deref(), token.username), (Some("t%3"), None));
    }

    #[test]
    fn a_seed_signs_the_challenge() {
        let key = KeyPair::new_user();
        let credentials = NatsCredentials::new(&settings(&format!("nkey: {}", key.seed().unwrap()))).unwrap();
        let auth = credentials.auth(NONCE).unwrap();
        assert_eq!(auth.nkey, Some(key.public_key()));
        key.verify(NONCE, &auth.signature.unwrap()).unwrap();
    }

    #[test]
    fn a_renewed_file_is_read_for_the_next_connection_and_a_broken_one_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bridge.creds");
        let (one, two) = (KeyPair::new_user(), KeyPair::new_user());
        std::fs::write(&path, creds("jwt.one", &one)).unwrap();
        let mut settings = settings("");
        settings.credentials = Some(path.clone());
        let credentials = NatsCredentials::new(&settings).unwrap();
        let check = |jwt: &str, key: &KeyPair| {
            let auth = credentials.auth(NONCE).unwrap();
            assert_eq!(auth.jwt.as_deref(), Some(jwt));
            key.verify(NONCE, &auth.signature.unwrap()).unwrap();
        };
        check("jwt.one", &one);
        std::fs::write(&path, creds("jwt.two", &two)).unwrap();
        check("jwt.two", &two);
        std::fs::write(&path, "-----BEGIN NATS USER JWT-----\njwt.three\n").unwrap();
        check("jwt.two", &two);
        let error = credentials.replace(&settings).unwrap_err();
        assert!(error.to_string().contains("bridge.creds"), "{error}");
        check("jwt.two", &two);
    }
}
