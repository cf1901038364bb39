//! A bridge in a systemd unit with `Type=notify`, with a socket of the test in place of systemd's.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::support::site::{Site, demo};
use crate::support::{Bridge, DEADLINE, launched};

/// The messages to a socket.
struct Messages(UnixDatagram);

impl Messages {
    fn new(address: &SocketAddr) -> Self {
        let socket = UnixDatagram::bind_addr(address).unwrap();
        socket.set_read_timeout(Some(DEADLINE)).unwrap();
        Self(socket)
    }

    fn next(&self) -> String {
        let mut buffer = [0; 4096];
        let count = self.0.recv(&mut buffer).expect("a message in time");
        String::from_utf8_lossy(&buffer[..count]).into_owned()
    }

    /// The next message that is not from the watchdog.
    fn next_state(&self) -> String {
        std::iter::repeat_with(|| self.next()).find(|message| message != "WATCHDOG=1").unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn start_reload_watchdog_and_stop_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let messages = Messages::new(&SocketAddr::from_pathname(&path).unwrap());
    let mut bridge = Bridge::with(launched("demo", &[]))
        .variable("NOTIFY_SOCKET", path.to_str().unwrap())
        .variable("WATCHDOG_USEC", "100000")
        .start()
        .await;
    assert_eq!(messages.next(), "STATUS=Connecting to NATS");
    assert_eq!(messages.next(), "READY=1\nSTATUS=Serving; agents: 1");
    assert_eq!([messages.next(), messages.next(), messages.next()], ["WATCHDOG=1"; 3]);

    bridge.signal(Signal::SIGHUP);
    let reloading = messages.next_state();
    let time = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").unwrap().lines().next().unwrap();
    // `CLOCK_MONOTONIC` counts from the boot, or a little later.
    let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
    let uptime: f64 = uptime.split_once(' ').unwrap().0.parse().unwrap();
    let time = Duration::from_micros(time.parse().unwrap()).as_secs_f64();
    assert!(time > 0.0 && time < uptime + 1.0, "{time} {uptime}");
    assert_eq!(messages.next_state(), "READY=1\nSTATUS=Serving; agents: 1");

    let agent = bridge.launched()[0];
    let environment = std::fs::read(format!("/proc/{agent}/environ")).unwrap();
    let environment = String::from_utf8_lossy(&environment);
    assert!(!environment.contains("NOTIFY_SOCKET") && !environment.contains("WATCHDOG"), "{environment}");
    assert!(bridge.stop().await.success());
    assert_eq!(messages.next_state(), "STOPPING=1\nSTATUS=Stopping");
}

#[tokio::test(flavor = "multi_thread")]
async fn bridge_is_not_ready_before_it_is_connected() {
    let name = format!("a2a-bridge-{}", uuid::Uuid::new_v4());
    let messages = Messages::new(&SocketAddr::from_abstract_name(&name).unwrap());
    let mut site = Site::new().await;
    site.server.end();
    site.settings(&[("a", &demo(""))]);
    site.start_through(&["env", &format!("NOTIFY_SOCKET=@{name}")]);
    site.until_logged("cannot connect to NATS").await;
    assert_eq!(messages.next(), "STATUS=Connecting to NATS");
    site.server.restart().await;
    assert_eq!(messages.next(), "READY=1\nSTATUS=Serving; agents: 1");
    assert_eq!(site.stop().await, Some(0));
    assert_eq!(messages.next(), "STOPPING=1\nSTATUS=Stopping", "there is no watchdog");
}
