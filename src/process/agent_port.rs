//! The port of a launched agent, and whether the agent itself listens on it.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use super::ports::{LocalPort, PortOwner};

/// The local port of one start of an agent.
#[derive(Debug)]
pub(crate) struct AgentPort {
    agent: Arc<str>,
    port: LocalPort,
    /// The root of the agent's process tree; 0 before the launch.
    tree: AtomicI32,
    /// The listening sockets of the agent, as last seen.
    own_sockets: Mutex<HashSet<u64>>,
    has_warned: AtomicBool,
}

/// The listener behind a connection that was just opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    /// The agent, or not known: the owner cannot be read.
    Agent,
    /// The agent listens, but on another socket than before. The connection may be to a process that had the port in
    /// between.
    Unsure,
    Other,
}

impl AgentPort {
    pub(crate) fn new(agent: Arc<str>, port: LocalPort) -> Self {
        Self {
            agent,
            port,
            tree: AtomicI32::new(0),
            own_sockets: Mutex::default(),
            has_warned: AtomicBool::new(false),
        }
    }

    pub(crate) fn number(&self) -> u16 {
        self.port.number
    }

    /// Sets the root of the agent's process tree.
    pub(crate) fn launched(&self, tree: i32) {
        self.tree.store(tree, Relaxed);
    }

    pub(crate) fn tree(&self) -> Option<i32> {
        Some(self.tree.load(Relaxed)).filter(|tree| *tree > 0)
    }

    /// The owner of the port. Logs once if it cannot be read.
    pub(crate) fn owner(&self) -> PortOwner {
        let owner = self.port.owner(self.tree());
        match &owner {
            PortOwner::Own { sockets, .. } => self.own_sockets().clone_from(sockets),
            PortOwner::Unknown if !self.has_warned.swap(true, Relaxed) => tracing::warn!(
                agent = %self.agent,
                port = self.port.number,
                "cannot read which process listens on the port of the agent, so `verify_port` has no effect for now"
            ),
            PortOwner::Unknown | PortOwner::Free | PortOwner::Other { .. } => {}
        }
        owner
    }

    /// Which process is behind a connection to `peer` that was just opened. A socket keeps its inode. If the same
    /// socket of the agent listened before and after the connection was opened, the connection is to the agent.
    pub(crate) fn check_peer(&self, peer: SocketAddr) -> Peer {
        if peer.port() != self.port.number || !self.port.is_reachable_at(peer.ip()) {
            return Peer::Agent;
        }
        let known = self.own_sockets().clone();
        if listener(peer).is_some_and(|socket| known.contains(&socket)) {
            return Peer::Agent;
        }
        match self.owner() {
            PortOwner::Own { sockets, .. } if sockets == known => Peer::Agent,
            PortOwner::Own { .. } => Peer::Unsure,
            PortOwner::Unknown => Peer::Agent,
            PortOwner::Free | PortOwner::Other { .. } => Peer::Other,
        }
    }

    fn own_sockets(&self) -> std::sync::MutexGuard<'_, HashSet<u64>> {
        self.own_sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(target_os = "linux")]
fn listener(address: SocketAddr) -> Option<u64> {
    super::sock_diag::listener(address).ok().flatten()
}

#[cfg(not(target_os = "linux"))]
fn listener(_: SocketAddr) -> Option<u64> {
    None
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[tokio::test]
    async fn a_connection_is_the_agents_only_if_the_same_socket_listened_before_it() {
        let first = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = first.local_addr().unwrap();
        let url = format!("http://{address}").parse().unwrap();
        let port = AgentPort::new("a".into(), LocalPort::of(&url).await.unwrap());
        port.launched(i32::try_from(std::process::id()).unwrap());
        let peer = || TcpStream::connect(address).unwrap().peer_addr().unwrap();
        assert_eq!(port.check_peer(peer()), Peer::Unsure, "nothing is known yet");
        assert_eq!(port.check_peer(peer()), Peer::Agent);
        let to = peer();
        drop(first);
        assert_eq!(port.check_peer(to), Peer::Other, "nobody listens");
        let _second = TcpListener::bind(address).unwrap();
        assert_eq!(port.check_peer(peer()), Peer::Unsure);
        assert_eq!(port.check_peer(peer()), Peer::Agent);
        // The process tree of another agent.
        port.launched(i32::MAX);
        port.own_sockets().clear();
        assert_eq!(port.check_peer(peer()), Peer::Other);
        assert_eq!(port.check_peer("127.0.0.1:1".parse().unwrap()), Peer::Agent, "not the port of the agent");
    }
}
