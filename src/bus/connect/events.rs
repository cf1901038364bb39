//! What the connection reports, for modules that wait for it: new connections, and subjects that the server denied.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_nats::Event;
use tokio::sync::Notify;

use crate::text::head;

/// Denials that are remembered.
const MAX_DENIALS: usize = 64;
/// How long a denial is remembered.
const DENIAL_TTL: Duration = Duration::from_secs(3);
/// Maximum bytes of a subject that is remembered.
const MAX_SUBJECT: usize = 256;

/// Events of one connection. The server denies a publication only by an error on the connection, so the request itself
/// would time out.
#[derive(Debug, Default)]
pub(crate) struct ConnectionEvents {
    denials: Mutex<VecDeque<(Instant, String)>>,
    denied: Notify,
    /// Holds at most one waiting event, for one listener.
    connected: Notify,
}

impl ConnectionEvents {
    pub(crate) fn observe(&self, event: &Event) {
        match event {
            Event::Connected => self.connected.notify_one(),
            Event::ServerError(error) => {
                if let Some(subject) = denied_subject(&error.to_string()) {
                    let mut denials = self.recent_denials();
                    if denials.len() == MAX_DENIALS {
                        denials.pop_front();
                    }
                    denials.push_back((Instant::now(), head(subject, MAX_SUBJECT).to_owned()));
                    drop(denials);
                    self.denied.notify_waiters();
                }
            }
            _ => {}
        }
    }

    /// Waits for the next connection after the one before. There may be one listener only.
    pub(crate) async fn connected(&self) {
        self.connected.notified().await;
    }

    /// Waits until the server denies the use of a subject, from `since` on.
    pub(crate) async fn denied(&self, subject: &str, since: Instant) {
        let subject = head(subject, MAX_SUBJECT);
        loop {
            // Registered first, so that no denial is missed in between.
            let mut notified = std::pin::pin!(self.denied.notified());
            notified.as_mut().enable();
            let is_denied =
                self.recent_denials().iter().any(|(at, denied)| *at >= since && denied == subject);
            if is_denied {
                return;
            }
            notified.await;
        }
    }

    fn recent_denials(&self) -> MutexGuard<'_, VecDeque<(Instant, String)>> {
        let mut denials = self.denials.lock().unwrap_or_else(PoisonError::into_inner);
        while denials.front().is_some_and(|(at, _)| at.elapsed() > DENIAL_TTL) {
            denials.pop_front();
        }
        denials
    }
}

/// The subject that an error of the server names, such as `Permissions Violation for Publish to "a.b"`.
fn denied_subject(error: &str) -> Option<&str> {
    let start = error.to_ascii_lowercase().find("permissions violation")?;
    error.get(start..)?.split('"').nth(1)
}

#[cfg(test)]
mod tests {
    use async_nats::ServerError;

    use super::*;

    fn denial(subject: &str) -> Event {
        Event::ServerError(ServerError::Other(format!("Permissions Violation for Publish to \"{subject}\"")))
    }

    #[tokio::test]
    async fn a_denial_reaches_the_request_that_it_belongs_to() {
        let (events, since) = (ConnectionEvents::default(), Instant::now());
        events.observe(&denial("$JS.API.INFO"));
        events.denied("$JS.API.INFO", since).await;
        let other = events.denied("$JS.API.OTHER", since);
        let later = async {
            tokio::task::yield_now().await;
            events.observe(&denial("$JS.API.INFO"));
            events.observe(&denial("$JS.API.OTHER"));
        };
        tokio::join!(other, later);
        let long = "a".repeat(1000);
        events.observe(&denial(&long));
        events.denied(&long, since).await;
        events.observe(&Event::ServerError(ServerError::Other("something else".into())));
        assert_eq!(events.recent_denials().len(), 4);
    }
}
