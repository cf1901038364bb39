//! Finds the process that listens on a local port.
//!
//! Linux lists listening sockets in `/proc/net/tcp` and `tcp6` by inode, and the descriptors of a process by
//! inode too. On other systems the owner is always [`PortOwner::Unknown`].

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

use url::{Host, Url};

use super::procfs::{self, SocketHolders, Stat};

const RESOLVE_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PortOwner {
    Free,
    /// Only processes of the given tree.
    Own {
        processes: Vec<i32>,
        /// The inodes of their listening sockets.
        sockets: HashSet<u64>,
    },
    Other {
        /// `None` if the process cannot be identified, most often because it belongs to another user.
        process: Option<(i32, String)>,
    },
    /// Cannot be read: not on this system, not as this user, or not without a free descriptor. This says nothing
    /// about the owner.
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
    pub fn is_reachable_at(&self, listens: IpAddr) -> bool {
        let listens = listens.to_canonical();
        listens.is_unspecified()
            || self
                .hosts
                .iter()
                .any(|host| *host == listens || (host.is_unspecified() && listens.is_loopback()))
    }

    /// The owner of the port. `tree` is the root of the agent's own process tree.
    pub fn owner(&self, tree: Option<i32>) -> PortOwner {
        let Some(sockets) = procfs::listeners() else { return PortOwner::Unknown };
        let inodes: HashSet<u64> = sockets
            .into_iter()
            .filter(|(ip, port, _)| *port == self.number && self.is_reachable_at(*ip))
            .map(|(_, _, inode)| inode)
            .collect();
        if inodes.is_empty() {
            return PortOwner::Free;
        }
        let (ours, is_complete) = match tree {
            Some(tree) => own_sockets(tree, &inodes),
            None => (HashMap::new(), true),
        };
        let foreign: HashSet<u64> =
            inodes.iter().filter(|inode| !ours.contains_key(inode)).copied().collect();
        if foreign.is_empty() {
            let mut processes: Vec<i32> = ours.into_values().flatten().collect();
            processes.sort_unstable();
            processes.dedup();
            return PortOwner::Own { processes, sockets: inodes };
        }
        let others = procfs::sockets(procfs::all(), &foreign).held;
        let process = others.into_values().flatten().min().and_then(Stat::read);
        // A process of the tree that could not be read may hold the socket.
        let is_foreign = |stat: &Stat| tree.is_none_or(|tree| !procfs::ancestors(stat.pid).contains(&tree));
        if !is_complete && !process.as_ref().is_some_and(is_foreign) {
            return PortOwner::Unknown;
        }
        PortOwner::Other { process: process.map(|stat| (stat.pid, stat.name)) }
    }
}

/// The processes of a tree that hold these sockets, and whether all processes could be read.
fn own_sockets(tree: i32, inodes: &HashSet<u64>) -> (HashMap<u64, Vec<i32>>, bool) {
    let (descendants, is_complete) = procfs::read_descendants(tree);
    let processes = std::iter::once(tree).chain(descendants);
    let SocketHolders { held, is_incomplete } = procfs::sockets(processes, inodes);
    (held, is_complete && !is_incomplete)
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
pub fn listening_addresses(tree: i32) -> Vec<SocketAddr> {
    let all = procfs::listeners().unwrap_or_default();
    let inodes = all.iter().map(|(_, _, inode)| *inode).collect();
    let (held, _) = own_sockets(tree, &inodes);
    let mut found: Vec<SocketAddr> = all
        .into_iter()
        .filter(|(_, _, inode)| held.contains_key(inode))
        .map(|(ip, port, _)| SocketAddr::new(ip.to_canonical(), port))
        .collect();
    found.sort_unstable_by_key(|address| (address.port(), address.ip()));
    found.dedup();
    found
}

/// An unused port.
pub fn free() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    async fn local(url: &str) -> Option<LocalPort> {
        LocalPort::of(&url.parse().ok()?).await
    }

    fn is_own(port: &LocalPort, pid: i32) -> bool {
        matches!(port.owner(Some(pid)), PortOwner::Own { processes, .. } if processes == [pid])
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
        assert!(is_own(&port, own));
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
            assert!(is_own(&port, own), "{address}");
        }
    }
}
