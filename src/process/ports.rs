//! Finds the process that listens on a local port.
//!
//! Linux lists listening sockets in `/proc/net/tcp` and `tcp6` by inode, and the descriptors of a process by
//! inode too. On other systems the owner is always [`PortOwner::Unknown`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

use url::{Host, Url};

const RESOLVE_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PortOwner {
    Free,
    /// Only processes of the given tree.
    Own(Vec<i32>),
    Other {
        /// `None` if the process belongs to another user.
        process: Option<(i32, String)>,
    },
    /// Cannot be determined on this system.
    Unknown,
}

/// A local port that the URL of an agent refers to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalPort {
    pub number: u16,
    /// The addresses that the URL resolves to.
    hosts: Vec<IpAddr>,
}

impl LocalPort {
    /// `None` if the URL does not refer to this machine.
    pub async fn of(url: &Url) -> Option<Self> {
        let number = url.port_or_known_default()?;
        let mut hosts = match url.host()? {
            // Regardless of the resolver.
            Host::Domain(name) if name.trim_end_matches('.').eq_ignore_ascii_case("localhost") => {
                vec![IpAddr::V4(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()]
            }
            Host::Domain(name) => resolve(name, number).await,
            Host::Ipv4(ip) => vec![IpAddr::V4(ip)],
            Host::Ipv6(ip) => vec![IpAddr::V6(ip).to_canonical()],
        };
        hosts.retain(|ip| is_local(*ip));
        (!hosts.is_empty()).then_some(Self { number, hosts })
    }

    /// Whether a listener on this address receives connections to `hosts`.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "needs /proc"))]
    fn is_reachable_at(&self, listens: IpAddr) -> bool {
        let listens = listens.to_canonical();
        listens.is_unspecified()
            || self
                .hosts
                .iter()
                .any(|host| *host == listens || (host.is_unspecified() && listens.is_loopback()))
    }

    /// The owner of the port. `tree` is the root of the agent's own process tree.
    #[cfg(target_os = "linux")]
    pub fn owner(&self, tree: Option<i32>) -> PortOwner {
        use super::procfs::{self, Stat};

        let Some(inodes) = linux::listeners(self.number, |ip| self.is_reachable_at(ip)) else {
            return PortOwner::Unknown;
        };
        if inodes.is_empty() {
            return PortOwner::Free;
        }
        let ours: Vec<i32> = tree
            .into_iter()
            .flat_map(|tree| std::iter::once(tree).chain(procfs::descendants(tree)))
            .collect();
        let held = procfs::sockets(ours, &inodes);
        let foreign: std::collections::HashSet<u64> =
            inodes.iter().filter(|inode| !held.contains_key(inode)).copied().collect();
        if foreign.is_empty() {
            let mut owners: Vec<i32> = held.into_values().flatten().collect();
            owners.sort_unstable();
            owners.dedup();
            return PortOwner::Own(owners);
        }
        let process = procfs::sockets(procfs::all(), &foreign)
            .into_values()
            .flatten()
            .min()
            .and_then(Stat::read)
            .map(|stat| (stat.pid, stat.name));
        PortOwner::Other { process }
    }

    #[cfg(not(target_os = "linux"))]
    pub fn owner(&self, _: Option<i32>) -> PortOwner {
        PortOwner::Unknown
    }
}

/// The addresses of a host name. A name that does not resolve yet may resolve when the agent runs, as in a
/// container network; then it does not refer to this machine.
async fn resolve(name: &str, port: u16) -> Vec<IpAddr> {
    match tokio::time::timeout(RESOLVE_TIMEOUT, tokio::net::lookup_host((name, port))).await {
        Ok(Ok(found)) => found.map(|address| address.ip().to_canonical()).collect(),
        Ok(Err(_)) | Err(_) => {
            tracing::warn!(
                name,
                "the host in `url` does not resolve yet; not checking which process owns its port"
            );
            Vec::new()
        }
    }
}

/// Whether an address belongs to this machine: only then is a bind possible.
fn is_local(ip: IpAddr) -> bool {
    ip.is_loopback()
        || ip.is_unspecified()
        || (!allows_nonlocal_bind(ip) && TcpListener::bind((ip, 0)).is_ok())
}

/// Whether Linux allows a bind to addresses that the machine does not have.
fn allows_nonlocal_bind(ip: IpAddr) -> bool {
    let version = if ip.is_ipv4() { "ipv4" } else { "ipv6" };
    let setting = std::fs::read_to_string(format!("/proc/sys/net/{version}/ip_nonlocal_bind"));
    setting.is_ok_and(|setting| setting.trim() != "0")
}

/// The addresses on which a process and its descendants listen, sorted by port.
#[cfg(target_os = "linux")]
pub fn listening_addresses(tree: i32) -> Vec<SocketAddr> {
    use super::procfs;
    let all = linux::listening();
    let inodes = all.iter().map(|(_, _, inode)| *inode).collect();
    let held = procfs::sockets(std::iter::once(tree).chain(procfs::descendants(tree)), &inodes);
    let mut found: Vec<SocketAddr> = all
        .into_iter()
        .filter(|(_, _, inode)| held.contains_key(inode))
        .map(|(ip, port, _)| SocketAddr::new(ip.to_canonical(), port))
        .collect();
    found.sort_unstable_by_key(|address| (address.port(), address.ip()));
    found.dedup();
    found
}

#[cfg(not(target_os = "linux"))]
pub fn listening_addresses(_: i32) -> Vec<SocketAddr> {
    Vec::new()
}

/// An unused port.
pub fn free() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

#[cfg(target_os = "linux")]
mod linux {
    use std::collections::HashSet;
    use std::fs;
    use std::io::{self, BufRead as _, BufReader};
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    const LISTEN: &str = "0A";

    /// The inodes of sockets that listen on `port`; `None` without `/proc/net/tcp`.
    pub(super) fn listeners(port: u16, is_reachable_at: impl Fn(IpAddr) -> bool) -> Option<HashSet<u64>> {
        let sockets = read()?;
        let wanted = sockets.into_iter().filter(|(ip, number, _)| *number == port && is_reachable_at(*ip));
        Some(wanted.map(|(_, _, inode)| inode).collect())
    }

    pub(super) fn listening() -> Vec<(IpAddr, u16, u64)> {
        read().unwrap_or_default()
    }

    fn read() -> Option<Vec<(IpAddr, u16, u64)>> {
        let mut sockets = Vec::new();
        read_file("/proc/net/tcp", &mut sockets).ok()?;
        // Missing if IPv6 is disabled.
        let _ = read_file("/proc/net/tcp6", &mut sockets);
        Some(sockets)
    }

    /// The kernel lists listening sockets first and generates lines on demand, so reading stops after the last
    /// listening socket; there may be thousands of others.
    fn read_file(path: &str, sockets: &mut Vec<(IpAddr, u16, u64)>) -> io::Result<()> {
        for line in BufReader::new(fs::File::open(path)?).lines().skip(1) {
            match listener(&line?) {
                Some(socket) => sockets.push(socket),
                None => break,
            }
        }
        Ok(())
    }

    fn listener(line: &str) -> Option<(IpAddr, u16, u64)> {
        let mut fields = line.split_ascii_whitespace();
        let (address, number) = fields.nth(1)?.split_once(':')?;
        if fields.nth(1)? != LISTEN {
            return None;
        }
        let port = u16::from_str_radix(number, 16).ok()?;
        Some((ip(address)?, port, fields.nth(5)?.parse().ok()?))
    }

    /// 32-bit words in native byte order.
    fn ip(text: &str) -> Option<IpAddr> {
        let word = |index: usize| {
            let digits = text.get(index * 8..index * 8 + 8)?;
            Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
        };
        if text.len() == 8 {
            return Some(Ipv4Addr::from(word(0)?).into());
        }
        let bytes = [word(0)?, word(1)?, word(2)?, word(3)?].concat();
        Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).into())
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    async fn local(url: &str) -> Option<LocalPort> {
        LocalPort::of(&url.parse().ok()?).await
    }

    #[tokio::test]
    async fn only_addresses_of_this_machine_have_a_local_port() {
        for url in ["http://127.0.0.1:9", "http://localhost:9", "http://[::1]:9", "http://0.0.0.0:9"] {
            assert_eq!(local(url).await.unwrap().number, 9, "{url}");
        }
        // Reserved for documentation, so no machine has them.
        assert_eq!(local("http://203.0.113.9:9").await, None);
        assert_eq!(local("http://[2001:db8::9]:9").await, None);
        assert_eq!(local("https://agents.invalid").await, None);
    }

    #[tokio::test]
    async fn a_listener_is_ours_or_foreign_by_the_process_that_holds_it() {
        let own = i32::try_from(std::process::id()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = local(&format!("http://{}", listener.local_addr().unwrap())).await.unwrap();
        assert_eq!(port.owner(Some(own)), PortOwner::Own(vec![own]));
        let PortOwner::Other { process } = port.owner(None) else { panic!("a foreign listener") };
        assert_eq!(process.unwrap().0, own);
        drop(listener);
        assert_eq!(port.owner(Some(own)), PortOwner::Free);
    }

    #[tokio::test]
    async fn a_listener_on_every_address_and_on_ipv6_counts_too() {
        let own = i32::try_from(std::process::id()).unwrap();
        for address in ["0.0.0.0:0", "[::]:0"] {
            let Ok(listener) = TcpListener::bind(address) else {
                continue;
            };
            let port = listener.local_addr().unwrap().port();
            let port = local(&format!("http://127.0.0.1:{port}")).await.unwrap();
            assert_eq!(port.owner(Some(own)), PortOwner::Own(vec![own]), "{address}");
        }
    }
}
