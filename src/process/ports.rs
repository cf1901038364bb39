//! Finds the process that listens on a local port.
//!
//! Linux lists listening sockets in `/proc/net/tcp` and `tcp6` by inode, and the descriptors of a process by
//! inode too. On other systems the owner is always [`PortOwner::Unknown`].

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

use url::{Host, Url};

use super::procfs::{self, Listener, SocketHolders, Stat};

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

    /// Whether connections to this address are connections to the URL.
    pub fn has_host(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        self.hosts.iter().any(|host| *host == ip || (host.is_unspecified() && ip.is_loopback()))
    }

    /// The owner of the port. `tree` is the root of the agent's own process tree.
    pub fn owner(&self, tree: Option<i32>) -> PortOwner {
        self.owner_of(tree, || self.accepting_sockets())
    }

    /// `sockets` reads the sockets that accept connections to the URL.
    fn owner_of(&self, tree: Option<i32>, sockets: impl Fn() -> Option<HashSet<u64>>) -> PortOwner {
        let read = || sockets().map_or(PortOwner::Unknown, |sockets| owner_of_sockets(tree, sockets));
        match read() {
            // The agent may have replaced a socket or passed it to another process during the reads.
            PortOwner::Other { .. } if tree.is_some() => read(),
            owner => owner,
        }
    }

    /// The inodes of the sockets that accept connections to the URL; `None` if they cannot be read. Other sockets on
    /// this port do not count, because any user may open them: one on all IPv6 addresses (`IPV6_V6ONLY`) beside one
    /// on 127.0.0.1, for example.
    fn accepting_sockets(&self) -> Option<HashSet<u64>> {
        let mut listeners = procfs::listeners()?;
        listeners.retain(|(_, port, _)| *port == self.number);
        let sockets = self.hosts.iter().flat_map(|host| self.sockets_for(*host, &listeners));
        Some(sockets.collect())
    }

    /// The sockets among `listeners` that accept connections to `host`: one socket, or several with `SO_REUSEPORT`.
    fn sockets_for(&self, host: IpAddr, listeners: &[Listener]) -> Vec<u64> {
        // Linux connects to the loopback interface instead.
        let host = match host {
            IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
            host => host,
        };
        let accepting = |ip: IpAddr| accepting_socket(SocketAddr::new(ip, self.number)).ok().flatten();
        let address = match accepting(host) {
            Some(socket) => match listeners.iter().find(|(_, _, inode)| *inode == socket) {
                Some((ip, _, _)) => Some(*ip),
                // It is newer than the list.
                None => return vec![socket],
            },
            // No socket accepts them, or the kernel cannot tell. It can if it finds another socket.
            None => matching_address(host, listeners).filter(|ip| accepting(*ip).is_none()),
        };
        let sockets = listeners.iter().filter(|(ip, _, _)| Some(*ip) == address);
        sockets.map(|(_, _, inode)| *inode).collect()
    }
}

/// The address of the listener that most likely accepts connections to `host`. The list does not show whether a socket
/// on all IPv6 addresses accepts IPv4 too; Linux lets both families use the port only if it does not.
fn matching_address(host: IpAddr, listeners: &[Listener]) -> Option<IpAddr> {
    let find =
        |is_match: &dyn Fn(IpAddr) -> bool| listeners.iter().map(|(ip, _, _)| *ip).find(|ip| is_match(*ip));
    let exact = find(&|ip| ip.to_canonical() == host);
    let any = || find(&|ip| ip.is_unspecified() && ip.is_ipv4() == host.is_ipv4());
    let has_ipv4 = || find(&|ip| ip.to_canonical().is_ipv4()).is_some();
    let any_family = || if has_ipv4() { None } else { find(&|ip| ip.is_unspecified()) };
    exact.or_else(any).or_else(|| if host.is_ipv4() { any_family() } else { None })
}

/// The socket to which Linux passes a new connection to this address.
#[cfg(target_os = "linux")]
pub(super) fn accepting_socket(address: SocketAddr) -> std::io::Result<Option<u64>> {
    super::sock_diag::listener(address)
}

#[cfg(not(target_os = "linux"))]
pub(super) fn accepting_socket(_: SocketAddr) -> std::io::Result<Option<u64>> {
    Err(std::io::ErrorKind::Unsupported.into())
}

/// The owner of these listening sockets.
fn owner_of_sockets(tree: Option<i32>, sockets: HashSet<u64>) -> PortOwner {
    if sockets.is_empty() {
        return PortOwner::Free;
    }
    let (ours, is_complete) = match tree {
        Some(tree) => own_sockets(tree, &sockets),
        None => (HashMap::new(), true),
    };
    let foreign: HashSet<u64> = sockets.iter().filter(|inode| !ours.contains_key(inode)).copied().collect();
    if foreign.is_empty() {
        let mut processes: Vec<i32> = ours.into_values().flatten().collect();
        processes.sort_unstable();
        processes.dedup();
        return PortOwner::Own { processes, sockets };
    }
    let others = procfs::sockets(procfs::all(), &foreign).held;
    let process = others.into_values().flatten().min().and_then(Stat::read);
    // A process of the tree that could not be read may hold the socket.
    let is_foreign =
        |stat: &Stat| tree.is_none_or(|tree| procfs::descends_from(stat.pid, tree) == Some(false));
    if !is_complete && !process.as_ref().is_some_and(is_foreign) {
        return PortOwner::Unknown;
    }
    PortOwner::Other { process: process.map(|stat| (stat.pid, stat.name)) }
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
    use std::cell::Cell;

    use socket2::{Domain, Socket, Type};

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

    /// A listener on all IPv6 addresses, but not on IPv4; `None` if this machine has no IPv6.
    fn ipv6_only(port: u16) -> Option<Socket> {
        let socket = Socket::new(Domain::IPV6, Type::STREAM, None).ok()?;
        socket.set_only_v6(true).expect("a new socket");
        socket.bind(&SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)).into()).ok()?;
        socket.listen(1).expect("a bound socket");
        Some(socket)
    }

    #[tokio::test]
    async fn a_listener_of_the_other_family_does_not_own_the_port() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let number = listener.local_addr().unwrap().port();
        let Some(ipv6) = ipv6_only(number) else { return println!("skipped: no IPv6") };
        let own = i32::try_from(std::process::id()).unwrap();
        let sockets = |port: &LocalPort| match port.owner(Some(own)) {
            PortOwner::Own { sockets, .. } => sockets,
            owner => panic!("{owner:?}"),
        };
        let on_ipv4 = local(&format!("http://127.0.0.1:{number}")).await.unwrap();
        let on_ipv6 = local(&format!("http://[::1]:{number}")).await.unwrap();
        let on_both = local(&format!("http://localhost:{number}")).await.unwrap();
        assert_eq!((sockets(&on_ipv4).len(), sockets(&on_ipv6).len()), (1, 1));
        assert!(sockets(&on_ipv4).is_disjoint(&sockets(&on_ipv6)));
        assert_eq!(sockets(&on_both).len(), 2);
        drop(ipv6);
        assert_eq!(on_ipv6.owner(None), PortOwner::Free);
        drop(listener);
        let _ipv6 = ipv6_only(number).unwrap();
        assert_eq!(on_ipv4.owner(None), PortOwner::Free);
        assert_ne!(on_ipv6.owner(None), PortOwner::Free);
    }

    #[tokio::test]
    async fn every_socket_that_shares_the_port_counts() {
        let own = i32::try_from(std::process::id()).unwrap();
        let shared = |number: u16| {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            socket.set_reuse_port(true).unwrap();
            socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, number)).into()).unwrap();
            socket.listen(1).unwrap();
            TcpListener::from(socket)
        };
        let first = shared(0);
        let number = first.local_addr().unwrap().port();
        let _second = shared(number);
        let port = local(&format!("http://127.0.0.1:{number}")).await.unwrap();
        assert!(matches!(port.owner(Some(own)), PortOwner::Own { sockets, .. } if sockets.len() == 2));
    }

    #[test]
    fn without_help_of_the_kernel_the_family_decides() {
        let matching = |host: &str, listeners: &[&str]| {
            let listeners: Vec<Listener> = listeners.iter().map(|ip| (ip.parse().unwrap(), 9, 1)).collect();
            matching_address(host.parse().unwrap(), &listeners).map(|ip| ip.to_string())
        };
        let found = |ip: &str| Some(ip.to_owned());
        assert_eq!(matching("127.0.0.1", &["::", "127.0.0.1"]), found("127.0.0.1"));
        assert_eq!(matching("127.0.0.1", &["::", "0.0.0.0"]), found("0.0.0.0"));
        assert_eq!(matching("127.0.0.1", &["::", "127.0.0.2"]), None);
        assert_eq!(matching("127.0.0.1", &["::"]), found("::"));
        assert_eq!(matching("127.0.0.1", &["::1"]), None);
        assert_eq!(matching("127.0.0.1", &["::ffff:127.0.0.1"]), found("::ffff:127.0.0.1"));
        assert_eq!(matching("::1", &["0.0.0.0"]), None);
        assert_eq!(matching("::1", &["0.0.0.0", "::"]), found("::"));
        assert_eq!(matching("::1", &["::", "::1"]), found("::1"));
    }

    #[tokio::test]
    async fn a_socket_that_was_replaced_during_the_read_is_not_foreign() {
        let own = i32::try_from(std::process::id()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = local(&format!("http://{}", listener.local_addr().unwrap())).await.unwrap();
        let reads = Cell::new(0);
        let replaced = || {
            reads.set(reads.get() + 1);
            // No socket has this inode.
            if reads.get() == 1 { Some(HashSet::from([u64::MAX])) } else { port.accepting_sockets() }
        };
        assert!(matches!(port.owner_of(Some(own), replaced), PortOwner::Own { .. }));
        assert_eq!(reads.get(), 2);
        let gone = || Some(HashSet::from([u64::MAX]));
        assert_eq!(port.owner_of(Some(own), gone), PortOwner::Other { process: None });
    }
}
