//! A launched agent's port is its own, under whichever name of this machine it is called.

use std::net::{IpAddr, TcpListener, UdpSocket};

use a2a_bridge::internal::ports;
use tokio::net::TcpSocket;

use crate::support::site::{SOON, Site, program, shell};

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

#[tokio::test]
async fn an_agent_that_listens_on_another_port_is_told_of_while_it_still_starts() {
    let mut site = Site::new().await;
    // Bound, so that nobody else gets it, and not listened on.
    let unused = TcpSocket::new_v4().unwrap();
    unused.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let wanted = unused.local_addr().unwrap().port();
    let lines = format!("url: http://127.0.0.1:{wanted}\ncommand: {} demo-agent --port 0", program());
    site.settings(&[("a", &format!("{lines}\nstartup_timeout: 8s\nrestart: never"))]);
    site.start();
    let report = site.until("a", SOON, |report| report.last_error.is_some()).await;
    assert_eq!(report.state, "starting");
    let taken = ports::listening_addresses(report.pid.unwrap())[0].port();
    let problem = format!("the agent listens on port {taken} instead of {wanted}, the port in `url`");
    assert_eq!(report.last_error.unwrap(), format!("still starting: {problem}"));
    assert!(report.advice.unwrap().contains("`url` or `port`"));
    let report = site.until_state("a", "failed").await;
    let error = report.last_error.unwrap();
    assert!(error.starts_with(&format!("not ready within 8s (`startup_timeout`): {problem}")), "{error}");
    assert!(report.advice.unwrap().contains("`command` (`{port}`)"));
    assert_eq!(site.log().matches("still starting").count(), 1, "{}", site.log());
}

#[tokio::test]
async fn an_agent_that_listens_at_another_address_is_told_where() {
    let mut site = Site::new().await;
    let lines = "url: http://127.0.0.2:{port}\nport: auto";
    site.settings(&[("a", &format!("{lines}\ncommand: {} demo-agent --port {{port}}", program()))]);
    site.start();
    let report = site.until("a", SOON, |report| report.last_error.is_some()).await;
    let port = report.url.trim_end_matches('/').rsplit(':').next().unwrap();
    let problem = format!("the agent listens on 127.0.0.1:{port} instead of 127.0.0.2, the host in `url`");
    assert_eq!(report.last_error.unwrap(), format!("still starting: {problem}"));
}

#[tokio::test]
async fn what_was_told_of_another_port_is_taken_back_when_the_agent_is_ready() {
    let mut site = Site::new().await;
    let go = site.folder().join("go");
    let wait = format!("until test -e {}; do sleep 0.05; done", go.display());
    let line = format!("{} demo-agent --port 0 & {wait}; exec DEMO", program());
    site.settings(&[("a", &shell(&line))]);
    site.start();
    let report = site.until("a", SOON, |report| report.last_error.is_some()).await;
    assert_eq!(report.state, "starting");
    std::fs::write(go, "").unwrap();
    assert_eq!(site.until_state("a", "ready").await.last_error, None);
}
