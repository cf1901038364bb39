//! A launched agent's port is its own, under whichever name of this machine it is called.

use std::net::{IpAddr, TcpListener, UdpSocket};

use crate::support::supervise::{Site, program};

/// An address of this machine that others can reach; none where there is only loopback.
fn outward() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    // Nothing is sent.
    socket.connect("203.0.113.9:9").ok()?;
    Some(socket.local_addr().unwrap().ip())
}

/// A foreign process at the agent's address is named, and is not even connected to.
async fn is_told_apart(host: &str, listens: IpAddr) {
    let foreign = TcpListener::bind((listens, 0)).unwrap();
    let port = foreign.local_addr().unwrap().port();
    let mut site = Site::new().await;
    let lines = format!(
        "url: http://{host}:{port}\ncommand: {} demo-agent --port {port}\nbearer_token: s3cret-token",
        program()
    );
    site.settings(&[("a", &lines)]);
    site.start();
    let error = site.until_state("a", "backing-off").await.last_error.unwrap();
    let own = std::process::id();
    assert!(error.starts_with(&format!("port {port} in use by pid {own} (")), "{error}");
    foreign.set_nonblocking(true).unwrap();
    assert!(foreign.accept().is_err(), "somebody has connected");
}

#[tokio::test]
async fn a_foreign_process_at_the_machines_own_address_is_sent_nothing() {
    let Some(ip) = outward() else {
        return println!("skipped: this machine has no address but loopback");
    };
    is_told_apart(&ip.to_string(), ip).await;
}

#[tokio::test]
async fn a_foreign_process_at_a_name_of_the_machine_is_sent_nothing() {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let name = name.trim();
    let found = tokio::net::lookup_host((name, 0)).await.ok().and_then(|mut found| found.next());
    let Some(ip) = found.map(|address| address.ip()).filter(|ip| TcpListener::bind((*ip, 0)).is_ok()) else {
        return println!("skipped: {name} is no name for this machine");
    };
    is_told_apart(name, ip).await;
    is_told_apart("localhost", "127.0.0.1".parse().unwrap()).await;
}
