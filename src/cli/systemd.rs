//! Reports the state of the bridge to systemd, as a unit with `Type=notify` expects: sd_notify(3).
//!
//! Without `NOTIFY_SOCKET`, nothing is sent.

use std::ffi::OsStr;
use std::io;
#[cfg(target_os = "linux")]
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// How often the bridge asks for more time while it starts, and for how much.
const START_INTERVAL: Duration = Duration::from_secs(15);
const START_EXTENSION: Duration = Duration::from_secs(60);
/// How long a message may wait for systemd to read those before it.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Systemd {
    /// `None` without systemd.
    socket: Option<(UnixDatagram, SocketAddr)>,
    /// The interval at which to report that the bridge works; half of `WatchdogSec=`.
    watchdog: Option<Duration>,
    has_started: watch::Sender<bool>,
}

impl Systemd {
    /// Reads the variables that systemd sets for the main process of a unit.
    pub(super) fn from_environment() -> Self {
        let name = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty());
        let socket = name.and_then(|name| {
            let warn = |error: &io::Error| tracing::warn!(%error, "cannot send notifications to systemd (NOTIFY_SOCKET)");
            open(&name).inspect_err(warn).ok()
        });
        let number = |name| std::env::var(name).ok()?.parse::<u64>().ok();
        // The variables of another process may have been inherited.
        let is_for_other = number("WATCHDOG_PID").is_some_and(|pid| pid != u64::from(std::process::id()));
        let timeout = number("WATCHDOG_USEC").filter(|timeout| *timeout > 0 && !is_for_other);
        let watchdog = timeout.map(|timeout| Duration::from_micros(timeout) / 2);
        Self { socket, watchdog, has_started: watch::Sender::new(false) }
    }

    /// The bridge serves: after the start, and after a reload.
    pub(super) fn ready(&self, agents: usize) {
        self.has_started.send_replace(true);
        self.send(&format!("READY=1\nSTATUS=Serving; agents: {agents}"));
    }

    /// A reload begins; [`Systemd::ready`] ends it.
    pub(super) fn reloading(&self) {
        let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from);
        let now = now.unwrap_or_default().as_micros();
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={now}\nSTATUS=Reloading the configuration"));
    }

    pub(super) fn stopping(&self) {
        self.send("STOPPING=1\nSTATUS=Stopping");
    }

    /// Asks for more time until the bridge serves, because it waits for NATS as long as necessary. Then reports at each
    /// watchdog interval that the runtime makes progress.
    pub(super) async fn report(&self, stop: CancellationToken) {
        if self.socket.is_none() {
            return;
        }
        let extension = START_EXTENSION.as_micros();
        let report = async {
            let mut has_started = self.has_started.subscribe();
            loop {
                let started = has_started.wait_for(|has_started| *has_started);
                if tokio::time::timeout(START_INTERVAL, started).await.is_ok() {
                    break;
                }
                self.send(&format!("EXTEND_TIMEOUT_USEC={extension}"));
            }
            let Some(interval) = self.watchdog else { return };
            let mut ticks = tokio::time::interval(interval);
            loop {
                ticks.tick().await;
                self.send("WATCHDOG=1");
            }
        };
        stop.run_until_cancelled(report).await;
    }

    pub(super) fn waiting_for_nats(&self) {
        self.send("STATUS=Connecting to NATS");
    }

    fn send(&self, state: &str) {
        let Some((socket, address)) = &self.socket else { return };
        if let Err(error) = socket.send_to_addr(state.as_bytes(), address) {
            tracing::warn!(%error, "cannot send a notification to systemd");
        }
    }
}

fn open(name: &OsStr) -> io::Result<(UnixDatagram, SocketAddr)> {
    let address = match name.as_bytes() {
        #[cfg(target_os = "linux")]
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        [b'/', ..] => SocketAddr::from_pathname(name)?,
        _ => return Err(io::Error::other("not the address of a Unix socket")),
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_write_timeout(Some(SEND_TIMEOUT))?;
    Ok((socket, address))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(watchdog: Option<Duration>) -> (Systemd, UnixDatagram, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let received = UnixDatagram::bind(&path).unwrap();
        received.set_nonblocking(true).unwrap();
        let socket = Some(open(path.as_os_str()).unwrap());
        (Systemd { socket, watchdog, has_started: watch::Sender::new(false) }, received, folder)
    }

    fn received(socket: &UnixDatagram) -> Vec<String> {
        let mut buffer = [0; 4096];
        let next =
            || socket.recv(&mut buffer).ok().map(|n| String::from_utf8_lossy(&buffer[..n]).into_owned());
        std::iter::from_fn(next).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_start_extends_its_timeout_and_the_watchdog_begins_afterwards() {
        let (systemd, socket, _folder) = pair(Some(Duration::from_secs(5)));
        let report = systemd.report(CancellationToken::new());
        let work = async {
            // Systemd kills a unit after 90 s without an extension.
            tokio::time::sleep(Duration::from_secs(100)).await;
            assert_eq!(received(&socket), vec!["EXTEND_TIMEOUT_USEC=60000000"; 6]);
            systemd.ready(2);
            tokio::time::sleep(Duration::from_secs(17)).await;
            received(&socket)
        };
        let sent = tokio::select! {
            () = report => unreachable!("it was not stopped"),
            sent = work => sent,
        };
        assert_eq!(sent[0], "READY=1\nSTATUS=Serving; agents: 2");
        assert_eq!(sent[1..], vec!["WATCHDOG=1"; 4]);
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_watchdog_nothing_follows_the_start() {
        let (systemd, socket, _folder) = pair(None);
        systemd.ready(1);
        systemd.report(CancellationToken::new()).await;
        assert_eq!(received(&socket).len(), 1);
    }

    #[test]
    fn an_address_that_is_no_unix_socket_is_refused() {
        open(OsStr::new("vsock:2:1234")).unwrap_err();
    }
}
