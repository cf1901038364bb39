//! The URL at which an agent is called, and whether it may get the agent's credentials.
//!
//! Cards often name a host that only the agent itself can reach (`0.0.0.0`, a container's port), and a card must not
//! decide where credentials go. So the bridge combines the configured scheme, host and port with the path of the card,
//! unless the configuration allows other hosts.

use url::{Host, Url};

use crate::config;

#[derive(Debug, Clone)]
pub(super) struct AddressPolicy {
    pub(super) base: Url,
    use_card_url: bool,
    allowed_hosts: Vec<String>,
}

impl AddressPolicy {
    pub(super) fn new(config: &config::AgentConfig) -> Self {
        Self {
            base: config.url.clone(),
            use_card_url: config.use_card_url,
            allowed_hosts: config.allowed_hosts.clone(),
        }
    }

    /// The URL for an interface that the card declares at `card_url`.
    pub(super) fn resolve(&self, card_url: &str) -> Url {
        match parse(card_url) {
            Some(mut card) if self.use_card_url || self.is_listed(&card) => {
                // An address to listen at, which cannot be called.
                if is_unspecified(&card) {
                    let _ = card.set_host(self.base.host_str());
                }
                let _ = card.set_username("");
                let _ = card.set_password(None);
                card.set_fragment(None);
                card
            }
            card => {
                let mut url = self.base.clone();
                if let Some(card) = card {
                    url.set_path(card.path());
                    url.set_query(card.query());
                } else if card_url.starts_with('/') {
                    url.set_path(card_url);
                }
                url
            }
        }
    }

    /// Whether `url` is on another host, which the card declares and `use_card_url` allows.
    pub(super) fn is_other_host_from_card(&self, url: &Url) -> bool {
        self.use_card_url && url.origin() != self.base.origin()
    }

    /// Whether the agent's credentials may go to `url`.
    pub(super) fn is_trusted(&self, url: &Url) -> bool {
        url.origin() == self.base.origin() || self.is_listed(url)
    }

    fn is_listed(&self, url: &Url) -> bool {
        let Some(host) = url.host_str() else {
            return false;
        };
        // An agent that is configured with TLS never gets its credentials without TLS.
        if self.base.scheme() == "https" && url.scheme() != "https" {
            return false;
        }
        let port = url.port_or_known_default().unwrap_or_default();
        let with_port = format!("{host}:{port}");
        self.allowed_hosts.iter().any(|allowed| *allowed == host || *allowed == with_port)
    }
}

/// Parses a URL of a card; some cards omit the scheme.
fn parse(text: &str) -> Option<Url> {
    let text = text.trim();
    let is_http = |url: &Url| matches!(url.scheme(), "http" | "https") && url.has_host();
    if let Some(url) = Url::parse(text).ok().filter(is_http) {
        return Some(url);
    }
    if text.is_empty() || text.starts_with('/') || text.contains("://") {
        return None;
    }
    Url::parse(&format!("http://{text}")).ok().filter(is_http)
}

fn is_unspecified(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(ip)) => ip.is_unspecified(),
        Some(Host::Ipv6(ip)) => ip.is_unspecified(),
        _ => false,
    }
}

/// Removes or adds the trailing slash; `None` for the root, which always has one.
pub(super) fn toggle_trailing_slash(url: &Url) -> Option<Url> {
    let path = url.path();
    let other = match path.strip_suffix('/') {
        Some("") => return None,
        Some(without) => without.to_owned(),
        None => format!("{path}/"),
    };
    let mut url = url.clone();
    url.set_path(&other);
    Some(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(base: &str, use_card_url: bool, allowed: &[&str]) -> AddressPolicy {
        AddressPolicy {
            base: Url::parse(base).unwrap(),
            use_card_url,
            allowed_hosts: allowed.iter().map(|host| (*host).to_owned()).collect(),
        }
    }

    #[test]
    fn the_configured_host_wins_and_the_cards_path_is_kept() {
        let addresses = addresses("http://127.0.0.1:9000/", false, &[]);
        for (card, expected) in [
            ("http://0.0.0.0:8080/", "http://127.0.0.1:9000/"),
            ("http://[::]:9000/rpc", "http://127.0.0.1:9000/rpc"),
            ("http://evil.example/a2a/", "http://127.0.0.1:9000/a2a/"),
            ("https://127.0.0.1:1/x?y=1", "http://127.0.0.1:9000/x?y=1"),
            ("localhost:10000/a", "http://127.0.0.1:9000/a"),
            ("/rpc", "http://127.0.0.1:9000/rpc"),
            ("//evil.example/x", "http://127.0.0.1:9000//evil.example/x"),
            ("", "http://127.0.0.1:9000/"),
            ("file:///etc/passwd", "http://127.0.0.1:9000/"),
            ("grpc://x:1", "http://127.0.0.1:9000/"),
        ] {
            assert_eq!(addresses.resolve(card).as_str(), expected, "{card}");
        }
    }

    #[test]
    fn other_hosts_are_used_if_allowed_and_trusted_only_if_listed() {
        let listed = addresses("http://127.0.0.1:9000", false, &["agents.example", "10.0.0.7:81"]);
        for (card, expected, trusted) in [
            ("http://agents.example:5/a", "http://agents.example:5/a", true),
            ("http://10.0.0.7:81/", "http://10.0.0.7:81/", true),
            ("http://10.0.0.7:82/b", "http://127.0.0.1:9000/b", true),
        ] {
            let url = listed.resolve(card);
            assert_eq!((url.as_str(), listed.is_trusted(&url)), (expected, trusted));
        }
        let open = addresses("http://127.0.0.1:9000", true, &[]);
        let url = open.resolve("http://u:p@elsewhere.example:5/a");
        assert_eq!((url.as_str(), open.is_trusted(&url)), ("http://elsewhere.example:5/a", false));
        let url = open.resolve("http://0.0.0.0:9001/");
        assert_eq!((url.as_str(), open.is_trusted(&url)), ("http://127.0.0.1:9001/", false));
        let secure = addresses("https://a.example", false, &["a.example"]);
        assert_eq!(secure.resolve("http://a.example/x").as_str(), "https://a.example/x");
    }

    #[test]
    fn the_trailing_slash_is_toggled() {
        let toggled = |url: &str| toggle_trailing_slash(&Url::parse(url).unwrap()).map(String::from);
        assert_eq!(toggled("http://h/a").as_deref(), Some("http://h/a/"));
        assert_eq!(toggled("http://h/a/").as_deref(), Some("http://h/a"));
        assert_eq!(toggled("http://h/"), None);
    }
}
