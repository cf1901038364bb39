//! Asks Linux for one TCP socket, through the socket monitoring interface of netlink (`sock_diag(7)`).
//!
//! `/proc/net/tcp` has the same information, but the kernel walks its table of all sockets to write that file, which
//! takes about a millisecond. This takes a few microseconds, however many sockets there are.

use std::io::{self, Read as _};
use std::net::{IpAddr, SocketAddr};

use nix::libc;
use socket2::{Domain, Protocol, Socket, Type};

/// `SOCK_DIAG_BY_FAMILY`.
const BY_FAMILY: u16 = 20;
/// A netlink header, and an `inet_diag_req_v2`.
const REQUEST: usize = 16 + 56;
/// The inode in a response: after the header and the other fields of an `inet_diag_msg`.
const INODE: std::ops::Range<usize> = 84..88;

/// The inode of the socket that accepts connections to this address; `None` if there is none, or if the kernel does
/// not have this interface for TCP.
pub(super) fn listener(address: SocketAddr) -> io::Result<Option<u64>> {
    let socket = Socket::new(
        Domain::from(libc::AF_NETLINK),
        Type::DGRAM,
        Some(Protocol::from(libc::NETLINK_SOCK_DIAG)),
    )?;
    // The kernel has answered when `send` returns.
    socket.set_nonblocking(true)?;
    socket.send(&request(address))?;
    let mut response = [0; 1024];
    let count = (&socket).read(&mut response)?;
    Ok(inode(response.get(..count).unwrap_or_default()))
}

/// A request for the socket to which the kernel would pass a new connection: no other side is given.
fn request(address: SocketAddr) -> Vec<u8> {
    let (family, mut ip) = match address.ip().to_canonical() {
        IpAddr::V4(ip) => (libc::AF_INET, ip.octets().to_vec()),
        IpAddr::V6(ip) => (libc::AF_INET6, ip.octets().to_vec()),
    };
    ip.resize(16, 0);
    let mut request = Vec::with_capacity(REQUEST);
    request.extend((REQUEST as u32).to_ne_bytes());
    request.extend(BY_FAMILY.to_ne_bytes());
    request.extend((libc::NLM_F_REQUEST as u16).to_ne_bytes());
    // Sequence number and sender.
    request.extend([0; 8]);
    request.extend([family as u8, libc::IPPROTO_TCP as u8, 0, 0]);
    // Sockets in any state.
    request.extend(u32::MAX.to_ne_bytes());
    request.extend(address.port().to_be_bytes());
    request.extend([0; 2]);
    // The lookup compares the address of the other side only with connections.
    request.extend(&ip);
    request.extend([0; 16]);
    // Any interface, any cookie.
    request.extend([0; 4]);
    request.extend([0xff; 8]);
    request
}

fn inode(response: &[u8]) -> Option<u64> {
    let kind = response.get(4..6)?;
    if kind != BY_FAMILY.to_ne_bytes() {
        return None;
    }
    let inode = u32::from_ne_bytes(response.get(INODE)?.try_into().ok()?);
    (inode != 0).then_some(u64::from(inode))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn a_listener_is_found_by_the_address_of_a_connection() {
        for address in ["127.0.0.1:0", "0.0.0.0:0", "[::]:0", "[::1]:0"] {
            // No IPv6 on this machine.
            let Ok(server) = TcpListener::bind(address) else { continue };
            let port = server.local_addr().unwrap().port();
            let host = if address == "[::1]:0" { "::1" } else { "127.0.0.1" };
            let client = TcpStream::connect((host, port)).unwrap();
            let peer = client.peer_addr().unwrap();
            let link = std::fs::read_link(format!("/proc/self/fd/{}", server.as_raw_fd())).unwrap();
            let Ok(found) = listener(peer) else { return };
            assert_eq!(
                format!("socket:[{}]", found.unwrap_or_default()),
                link.to_str().unwrap(),
                "{address}"
            );
            drop(server);
            assert_eq!(listener(peer).unwrap(), None, "{address}");
        }
    }
}
