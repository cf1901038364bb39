//! The port of a launched agent, and whether the agent itself listens on it.
//!
//! To find the owner of a port, the bridge reads the descriptors of processes. That takes long if an agent has many of
//! them, and an agent can cause it: it only has to listen on a new socket. So it happens off the workers of the runtime,
//! for one caller at a time, and at most once in [`READ_INTERVAL`].

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::ports::{LocalPort, PortOwner, accepting_socket};
use crate::offload;

/// How often the owner is read.
const READ_INTERVAL: Duration = Duration::from_millis(100);

/// The local port of one start of an agent.
#[derive(Debug)]
pub(crate) struct AgentPort {
    agent: Arc<str>,
    port: LocalPort,
    /// The root of the agent's process tree; 0 before the launch.
    tree: AtomicI32,
    /// The listening sockets of the agent, and when each was first seen.
    own_sockets: Mutex<HashMap<u64, Instant>>,
    /// The owner as last read, and when that began.
    last: tokio::sync::Mutex<Option<(Instant, PortOwner)>>,
    has_warned: AtomicBool,
}

/// The listener behind a connection that was just opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    /// The agent, or not known: the owner cannot be read.
    Agent,
    /// The agent listens, but on another socket than before. The connection may be to a process that had the port in
    /// between.
    Changed,
    Other,
}

impl AgentPort {
    pub(crate) fn new(agent: Arc<str>, port: LocalPort) -> Self {
        Self {
            agent,
            port,
            tree: AtomicI32::new(0),
            own_sockets: Mutex::default(),
            last: tokio::sync::Mutex::default(),
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

    /// The owner of the port now, or a moment ago. Logs once if it cannot be read.
    pub(crate) async fn owner(&self) -> PortOwner {
        let now = Instant::now();
        self.owner_since(now.checked_sub(READ_INTERVAL).unwrap_or(now)).await
    }

    /// The owner of the port at some time after `since`.
    async fn owner_since(&self, since: Instant) -> PortOwner {
        let mut last = self.last.lock().await;
        // That a port is free is found without the descriptors of processes, and a starting agent waits for the change.
        if let Some((began, owner)) = last.as_ref().filter(|(_, owner)| *owner != PortOwner::Free) {
            if *began >= since {
                return owner.clone();
            }
            tokio::time::sleep_until(*began + READ_INTERVAL).await;
        }
        let began = Instant::now();
        let owner = offload::block(|| self.port.owner(self.tree()));
        match &owner {
            PortOwner::Own { sockets, .. } => {
                let (mut known, now) = (self.own_sockets(), Instant::now());
                known.retain(|socket, _| sockets.contains(socket));
                for socket in sockets {
                    known.entry(*socket).or_insert(now);
                }
            }
            PortOwner::Unknown if !self.has_warned.swap(true, Relaxed) => tracing::warn!(
                agent = %self.agent,
                port = self.port.number,
                "cannot read which process listens on the port of the agent, so `verify_port` has no effect for now"
            ),
            PortOwner::Unknown | PortOwner::Free | PortOwner::Other { .. } => {}
        }
        *last = Some((began, owner.clone()));
        owner
    }

    /// Which process is behind a connection to `peer` that was just opened, not before `began`. A socket keeps its
    /// inode. If the same socket of the agent listened before and after the connection was opened, the connection is
    /// to the agent.
    pub(crate) async fn check_peer(&self, peer: SocketAddr, began: Instant) -> Peer {
        if peer.port() != self.port.number || !self.port.has_host(peer.ip()) {
            return Peer::Agent;
        }
        let listener = accepting_socket(peer).ok().flatten();
        match listener.and_then(|socket| self.first_seen(socket)) {
            Some(seen) if seen <= began => return Peer::Agent,
            Some(_) => return Peer::Changed,
            None => {}
        }
        match self.owner_since(Instant::now()).await {
            PortOwner::Own { sockets, .. } => {
                let is_same = listener.is_none_or(|socket| sockets.contains(&socket))
                    && sockets
                        .iter()
                        .all(|socket| self.first_seen(*socket).is_some_and(|seen| seen <= began));
                if is_same { Peer::Agent } else { Peer::Changed }
            }
            PortOwner::Unknown => Peer::Agent,
            PortOwner::Free | PortOwner::Other { .. } => Peer::Other,
        }
    }

    fn first_seen(&self, socket: u64) -> Option<Instant> {
        self.own_sockets().get(&socket).copied()
    }

    fn own_sockets(&self) -> MutexGuard<'_, HashMap<u64, Instant>> {
        self.own_sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    async fn port_of(address: SocketAddr) -> AgentPort {
        let url = format!("http://{address}").parse().expect("a URL");
        let port = AgentPort::new("a".into(), LocalPort::of(&url).await.expect("a local address"));
        port.launched(nix::unistd::getpid().as_raw());
        port
    }

    async fn check(port: &AgentPort, address: SocketAddr) -> Peer {
        let began = Instant::now();
        let _connection = TcpStream::connect(address).expect("somebody listens");
        port.check_peer(address, began).await
    }

    #[tokio::test]
    async fn a_connection_is_the_agents_only_if_the_same_socket_listened_before_it() {
        let first = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = first.local_addr().unwrap();
        let port = port_of(address).await;
        let early = Instant::now();
        assert_eq!(check(&port, address).await, Peer::Changed, "nothing is known yet");
        assert_eq!(check(&port, address).await, Peer::Agent);
        assert_eq!(port.check_peer(address, early).await, Peer::Changed, "the socket may be newer");
        drop(first);
        assert_eq!(port.check_peer(address, Instant::now()).await, Peer::Other, "nobody listens");
        let _second = TcpListener::bind(address).unwrap();
        assert_eq!(check(&port, address).await, Peer::Changed);
        assert_eq!(check(&port, address).await, Peer::Agent);
        // The process tree of another agent.
        port.launched(i32::MAX);
        port.own_sockets().clear();
        assert_eq!(check(&port, address).await, Peer::Other);
        let elsewhere = "127.0.0.1:1".parse().unwrap();
        assert_eq!(
            port.check_peer(elsewhere, Instant::now()).await,
            Peer::Agent,
            "not the port of the agent"
        );
    }

    #[tokio::test]
    async fn many_connections_share_one_reading_of_the_owner() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let port = port_of(address).await;
        let reading = || async { port.last.lock().await.as_ref().map(|(began, _)| *began) };
        // All wait until this one is done.
        let lock = port.last.lock().await;
        let began = Instant::now();
        let checks = (0..64).map(|_| port.check_peer(address, began));
        let (peers, ()) = tokio::join!(futures_util::future::join_all(checks), async { drop(lock) });
        assert_eq!(peers, vec![Peer::Changed; 64]);
        let first = reading().await;
        assert!(first > Some(began));
        port.own_sockets().clear();
        // What was read before a connection was opened does not count for it; the next reading waits.
        assert_eq!(check(&port, address).await, Peer::Changed);
        let second = reading().await;
        assert!(second.unwrap() - first.unwrap() >= READ_INTERVAL);
        port.owner().await;
        assert_eq!(reading().await, second, "a health check uses it");
    }
}
