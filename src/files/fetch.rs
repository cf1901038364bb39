//! Fetches files by HTTP from the hosts that the configuration allows (`files.fetch_hosts`).
//!
//! The caller chooses the URL, so the bridge must not become a way into networks that the caller cannot reach: it connects only
//! to addresses that it has checked, follows no redirects, and uses no proxy.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use reqwest::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE};
use url::{Host, Url};

use super::{CallFiles, FileDescription, FileError, FileRules, StoredFile, TemporaryFile};
use crate::memory::{MemoryAccount, MemoryCharge, OutOfMemory};
use crate::text::{error_chain, shorten};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit between two pieces of a response.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Files up to this size stay in memory; larger ones go to the store while they are received.
const MAX_IN_MEMORY: usize = 256 << 10;
/// A file that is received takes this many times its size: a buffer that grows, and its base64.
const RECEIVED_COPIES: usize = 4;

/// `files.fetch_hosts`.
#[derive(Debug, Clone, Default)]
pub(crate) struct FetchRules {
    /// `host` or `host:port`.
    hosts: Vec<String>,
}

/// A file that was fetched.
#[derive(Debug)]
pub(crate) enum Fetched {
    /// In base64.
    Small(String),
    Stored(StoredFile),
}

/// The memory of the files that one request fetches.
#[derive(Debug)]
pub(crate) struct FetchMemory {
    account: Arc<MemoryAccount>,
    charge: Option<MemoryCharge>,
    /// Bytes of the files that are complete.
    kept: usize,
}

impl FetchMemory {
    pub(crate) fn new(account: &Arc<MemoryAccount>) -> Self {
        Self { account: Arc::clone(account), charge: None, kept: 0 }
    }

    /// Covers the first `bytes` of a file, before they are kept.
    fn receive(&mut self, bytes: usize) -> Result<(), OutOfMemory> {
        self.account.cover(&mut self.charge, self.kept + RECEIVED_COPIES * bytes)
    }

    /// The file is complete, and takes this many bytes from now on.
    fn keep(&mut self, bytes: usize) -> Result<(), OutOfMemory> {
        self.kept += bytes;
        self.account.cover(&mut self.charge, self.kept)
    }

    /// The charge for all files that were fetched, if they need one.
    pub(crate) fn into_charge(self) -> Option<MemoryCharge> {
        self.charge
    }
}

impl FetchRules {
    pub(crate) fn new(hosts: Vec<String>) -> Self {
        Self { hosts }
    }

    /// Whether the bridge fetches this URL.
    pub(crate) fn includes(&self, url: &Url) -> bool {
        let Some(host) = url.host_str().filter(|_| matches!(url.scheme(), "http" | "https")) else {
            return false;
        };
        let with_port = format!("{host}:{}", url.port_or_known_default().unwrap_or_default());
        self.hosts.iter().any(|listed| listed == host || *listed == with_port)
    }

    /// Whether the bridge may connect to an address: it is public, or listed as an address.
    fn allows(&self, address: SocketAddr) -> bool {
        let ip = address.ip().to_canonical();
        let host = match ip {
            IpAddr::V4(ip) => ip.to_string(),
            IpAddr::V6(ip) => format!("[{ip}]"),
        };
        let with_port = format!("{host}:{}", address.port());
        is_public(ip) || self.hosts.iter().any(|listed| *listed == host || *listed == with_port)
    }

    /// The addresses of a host, all of which the bridge may connect to.
    async fn resolve(&self, url: &Url) -> Result<Vec<SocketAddr>, FileError> {
        let port = url.port_or_known_default().unwrap_or_default();
        let addresses: Vec<SocketAddr> = match url.host() {
            Some(Host::Ipv4(ip)) => vec![(ip, port).into()],
            Some(Host::Ipv6(ip)) => vec![(ip, port).into()],
            Some(Host::Domain(name)) => {
                let lookup =
                    tokio::time::timeout(CONNECT_TIMEOUT, tokio::net::lookup_host((name, port))).await;
                let found = lookup.map_err(|_| failed(url, "the name cannot be resolved in time"))?;
                found
                    .map_err(|error| failed(url, &format!("the name cannot be resolved: {error}")))?
                    .collect()
            }
            None => Vec::new(),
        };
        match addresses.iter().find(|address| !self.allows(**address)) {
            Some(address) => {
                let ip = address.ip();
                let reason =
                    format!("{ip} is not a public address; list it in `files.fetch_hosts` by its address");
                Err(failed(url, &reason))
            }
            None if addresses.is_empty() => Err(failed(url, "the name has no address")),
            None => Ok(addresses),
        }
    }

    /// Fetches a file, at most `max` bytes of it.
    pub(crate) async fn fetch(
        &self,
        url: &Url,
        rules: &FileRules,
        max: u64,
        files: Option<&CallFiles>,
        memory: &mut FetchMemory,
        description: &mut FileDescription,
    ) -> Result<Fetched, FileError> {
        let addresses = self.resolve(url).await?;
        // A client of its own, because the addresses are for this request only.
        let mut builder = reqwest::Client::builder()
            .user_agent(concat!("a2a-bridge/", env!("CARGO_PKG_VERSION")))
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .connect_timeout(CONNECT_TIMEOUT)
            .read_timeout(READ_TIMEOUT)
            .pool_max_idle_per_host(0);
        if let Some(host) = url.domain() {
            builder = builder.resolve_to_addrs(host, &addresses);
        }
        let network_error = |error: reqwest::Error| failed(url, &error_chain(&error.without_url()));
        let client = builder.build().map_err(network_error)?;
        let request = client.get(url.clone()).header(ACCEPT_ENCODING, "identity");
        let mut response = request.send().await.map_err(network_error)?;
        if !response.status().is_success() {
            return Err(failed(
                url,
                &format!("the server responded with HTTP status {}", response.status().as_u16()),
            ));
        }
        let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
        if header(CONTENT_ENCODING).is_some_and(|encoding| !encoding.eq_ignore_ascii_case("identity")) {
            return Err(failed(url, "the response is compressed"));
        }
        if description.media_type.is_none() {
            let media_type = header(CONTENT_TYPE).and_then(|value| value.split(';').next()).map(str::trim);
            description.media_type = media_type.filter(|value| !value.is_empty()).map(str::to_owned);
        }
        let limit = max.min(rules.max_size);
        let too_large = || match limit < rules.max_size {
            true => FileError::too_many("the files of the request", rules.max_request),
            false => FileError::too_large("the file", rules.max_size, "files.max_size"),
        };
        if response.content_length().is_some_and(|length| length > limit) {
            return Err(too_large());
        }
        let (mut bytes, mut writer, mut size) = (Vec::new(), None, 0_u64);
        while let Some(chunk) = next_chunk(&mut response).await.map_err(network_error)? {
            size += chunk.len() as u64;
            if size > limit {
                return Err(too_large());
            }
            if writer.is_none() && bytes.len() + chunk.len() > MAX_IN_MEMORY {
                let Some(files) = files else {
                    let message = format!(
                        "the file at {} is larger than {MAX_IN_MEMORY} bytes, and the bridge has no file store (JetStream)",
                        without_query(url)
                    );
                    return Err(FileError::TooLarge(message));
                };
                let mut new = files.store.create(&files.caller, None).await?;
                new.push(&bytes)?;
                bytes = Vec::new();
                writer = Some(new);
            }
            match &mut writer {
                Some(writer) => {
                    writer.push(&chunk)?;
                    writer.flush().await?;
                }
                None => {
                    memory.receive(bytes.len() + chunk.len())?;
                    bytes.extend_from_slice(&chunk);
                }
            }
        }
        match writer {
            Some(mut writer) => {
                let mut file = writer.finish(description).await?;
                memory.keep(0)?;
                if let Some(files) = files {
                    TemporaryFile::make(&mut file, &files.store, &files.caller);
                }
                Ok(Fetched::Stored(file))
            }
            None => {
                let base64 = STANDARD.encode(bytes);
                memory.keep(base64.capacity())?;
                Ok(Fetched::Small(base64))
            }
        }
    }
}

async fn next_chunk(response: &mut reqwest::Response) -> Result<Option<Bytes>, reqwest::Error> {
    response.chunk().await
}

/// A fetch that is refused or fails. The query may have credentials.
fn failed(url: &Url, reason: &str) -> FileError {
    FileError::Invalid(format!("cannot fetch {}: {}", without_query(url), shorten(reason, 200)))
}

fn without_query(url: &Url) -> String {
    let mut url = url.clone();
    url.set_query(None);
    url.set_fragment(None);
    let _ = url.set_username("");
    let _ = url.set_password(None);
    shorten(url.as_str(), 200)
}

/// Whether everyone on the internet may reach an address.
fn is_public(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => is_public_v4(ip),
        IpAddr::V6(ip) => {
            let [first, second, ..] = ip.segments();
            // Global unicast, without documentation (2001:db8::/32, 3fff::/20), protocol assignments (2001::/23, which includes
            // Teredo) and 6to4 (2002::/16), which contain an IPv4 address.
            matches!(first, 0x2000..=0x3fff)
                && !(first == 0x2001 && (second < 0x200 || second == 0xdb8))
                && first != 0x2002
                && !(first == 0x3fff && second < 0x1000)
        }
    }
}

fn is_public_v4(ip: Ipv4Addr) -> bool {
    let [a, b, c, _] = ip.octets();
    let is_special = ip.is_private()
        || ip.is_loopback()
        || ip.is_link_local()
        || ip.is_broadcast()
        || ip.is_documentation()
        || ip.is_multicast()
        || a == 0
        || a >= 240
        // Shared address space, protocol assignments, 6to4 relays, benchmarks.
        || (a == 100 && (64..128).contains(&b))
        || (a == 192 && b == 0 && c == 0)
        || (a == 192 && b == 88 && c == 99)
        || (a == 198 && (18..20).contains(&b));
    !is_special
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("127.0.0.1")]
    #[case("10.1.2.3")]
    #[case("172.16.0.1")]
    #[case("192.168.1.1")]
    #[case("169.254.169.254")]
    #[case("100.64.0.1")]
    #[case("0.0.0.0")]
    #[case("255.255.255.255")]
    #[case("224.0.0.1")]
    #[case("198.18.0.1")]
    #[case("::1")]
    #[case("::")]
    #[case("::ffff:10.0.0.1")]
    #[case("64:ff9b::a00:1")]
    #[case("2002:a00:1::")]
    #[case("2001::1")]
    #[case("fe80::1")]
    #[case("fc00::1")]
    #[case("ff02::1")]
    fn an_address_that_is_not_public_is_refused_unless_it_is_listed(#[case] ip: &str) {
        let address = SocketAddr::new(ip.parse().unwrap(), 80);
        assert!(!FetchRules::new(vec!["files.example.org".to_owned()]).allows(address));
        let ip = address.ip().to_canonical();
        let listed = if ip.is_ipv6() { format!("[{ip}]") } else { ip.to_string() };
        assert!(FetchRules::new(vec![listed.clone()]).allows(address));
        assert!(FetchRules::new(vec![format!("{listed}:80")]).allows(address));
        assert!(!FetchRules::new(vec![format!("{listed}:81")]).allows(address));
    }

    #[test]
    fn public_addresses_are_allowed() {
        for ip in ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946"] {
            assert!(FetchRules::default().allows(SocketAddr::new(ip.parse().unwrap(), 443)), "{ip}");
        }
    }

    #[test]
    fn only_listed_hosts_are_fetched() {
        let rules = FetchRules::new(vec!["files.example.org".to_owned(), "10.0.0.7:9000".to_owned()]);
        let includes = |url: &str| rules.includes(&Url::parse(url).unwrap());
        assert!(includes("https://FILES.example.org/a") && includes("http://10.0.0.7:9000/a"));
        assert!(includes("http://0xa.0.0.7:9000/a"), "the same address");
        for url in [
            "https://example.org/a",
            "https://files.example.org.evil.org/a",
            "https://files.example.org@evil.org/",
            "http://10.0.0.7/a",
            "ftp://files.example.org/a",
        ] {
            assert!(!includes(url), "{url}");
        }
    }
}
