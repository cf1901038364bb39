//! A launched agent must own its port, for every address and name of this machine.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::time::Duration;

use a2a_bridge::internal::ports;
use socket2::{Domain, Socket, Type};
use tokio::net::TcpSocket;

use crate::support::processes::{free_port, program};
use crate::support::site::{Site, demo_at, shell};

/// An address of this machine other than loopback, if there is one.
fn outward_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    // This sends nothing.
    socket.connect("203.0.113.9:9").ok()?;
    Some(socket.local_addr().unwrap().ip())
}

/// Checks that a foreign process on the agent's port is named and gets no connection.
async fn assert_foreign_process_is_named(host: &str, address: IpAddr) {
    let foreign = TcpListener::bind((address, 0)).unwrap();
    let port = foreign.local_addr().unwrap().port();
    let site = Site::running(&[("a", &demo_at(host, port, ""))]).await;
    let error = site.until_state("a", "backing-off").await.last_error.unwrap();
    let own = std::process::id();
    assert!(error.starts_with(&format!("port {port} in use by pid {own} (")), "{error}");
    foreign.set_nonblocking(true).unwrap();
    assert!(foreign.accept().is_err(), "it got a connection");
}

#[tokio::test]
async fn foreign_process_on_the_machines_own_address_gets_no_connection() {
    let Some(ip) = outward_address() else {
        return println!("skipped: this machine has no address but loopback");
    };
    assert_foreign_process_is_named(&ip.to_string(), ip).await;
}

#[tokio::test]
async fn foreign_process_on_the_machines_host_name_gets_no_connection() {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let name = name.trim();
    let found = tokio::net::lookup_host((name, 0)).await.ok().and_then(|mut found| found.next());
    let Some(ip) = found.map(|address| address.ip()).filter(|ip| TcpListener::bind((*ip, 0)).is_ok()) else {
        return println!("skipped: {name} is not a name of this machine");
    };
    assert_foreign_process_is_named(name, ip).await;
    assert_foreign_process_is_named("localhost", "127.0.0.1".parse().unwrap()).await;
}

#[tokio::test]
async fn foreign_process_that_gets_no_connection_of_the_agent_does_not_end_it() {
    let port = free_port();
    let foreign = Socket::new(Domain::IPV6, Type::STREAM, None).unwrap();
    foreign.set_only_v6(true).unwrap();
    let address = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    if foreign.bind(&address.into()).is_err() {
        return println!("skipped: this machine has no IPv6");
    }
    foreign.listen(1).unwrap();
    let lines = format!("{}\nliveness: {{ interval: 100ms }}", demo_at("127.0.0.1", port, ""));
    let site = Site::running(&[("a", &lines)]).await;
    let pid = site.until_state("a", "ready").await.pid;
    // Several checks.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let report = site.until_state("a", "ready").await;
    assert_eq!((report.pid, report.restarts), (pid, 0), "{}", site.log());
}

#[tokio::test]
async fn agent_on_another_port_is_reported_while_it_starts() {
    let mut site = Site::new().await;
    // Bound, so that no other process gets it, and not listened on.
    let unused = TcpSocket::new_v4().unwrap();
    unused.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let wanted = unused.local_addr().unwrap().port();
    let lines = format!("url: http://127.0.0.1:{wanted}\ncommand: {} demo-agent --port 0", program());
    site.settings(&[("a", &format!("{lines}\nstartup_timeout: 8s\nrestart: never"))]);
    site.start();
    let report = site.until("a", |report| report.last_error.is_some()).await;
    assert_eq!(report.state, "starting");
    let taken = ports::listening_addresses(report.pid.unwrap())[0].port();
    let problem = format!("the agent listens on port {taken} instead of {wanted}, the port in `url`");
    assert_eq!(report.last_error.unwrap(), format!("still starting: {problem}"));
    assert!(report.advice.unwrap().contains("`url` or `port`"));
    let report = site.until_state("a", "failed").await;
    let error = report.last_error.unwrap();
    assert!(error.starts_with(&format!("not ready within 8s (`startup_timeout`): {problem}")), "{error}");
    assert!(report.advice.unwrap().contains("`{port}` in `command`"));
    assert_eq!(site.log().matches("still starting").count(), 1, "{}", site.log());
}

#[tokio::test]
async fn agent_on_another_address_is_reported() {
    let lines = "url: http://127.0.0.2:{port}\nport: auto";
    let site =
        Site::running(&[("a", &format!("{lines}\ncommand: {} demo-agent --port {{port}}", program()))]).await;
    let report = site.until("a", |report| report.last_error.is_some()).await;
    let port = report.url.trim_end_matches('/').rsplit(':').next().unwrap();
    let problem = format!("the agent listens on 127.0.0.1:{port} instead of 127.0.0.2, the host in `url`");
    assert_eq!(report.last_error.unwrap(), format!("still starting: {problem}"));
}

#[tokio::test]
async fn report_of_another_port_is_cleared_when_the_agent_is_ready() {
    let mut site = Site::new().await;
    let go = site.folder().join("go");
    let wait = format!("until test -e {}; do sleep 0.05; done", go.display());
    let line = format!("{} demo-agent --port 0 & {wait}; exec DEMO", program());
    site.settings(&[("a", &shell(&line))]);
    site.start();
    let report = site.until("a", |report| report.last_error.is_some()).await;
    assert_eq!(report.state, "starting");
    std::fs::write(go, "").unwrap();
    assert_eq!(site.until_state("a", "ready").await.last_error, None);
}
