//! Rate limits by the generic cell rate algorithm (GCRA): each key needs one number, the time at which its bucket is empty.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Clients that are remembered. Beyond it, those that may send again are forgotten first.
const MAX_CLIENTS: usize = 8192;

/// A number of requests a second, with bursts of as many at once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rate {
    interval: Duration,
    burst: Duration,
}

impl Rate {
    pub(super) fn per_second(requests: usize) -> Self {
        let interval = Duration::from_secs(1) / u32::try_from(requests.max(1)).unwrap_or(u32::MAX);
        Self { interval, burst: Duration::from_secs(1) }
    }

    /// Admits a request at `now`, given when the bucket is empty. Returns how long to wait if it is refused.
    fn admit(self, empty_at: &mut Option<Instant>, now: Instant) -> Result<(), Duration> {
        let from = empty_at.filter(|at| *at > now).unwrap_or(now);
        let next = from + self.interval;
        let waiting = next.saturating_duration_since(now);
        if waiting > self.burst {
            return Err(waiting - self.burst);
        }
        *empty_at = Some(next);
        Ok(())
    }
}

/// The limit of one principal.
#[derive(Debug)]
pub(super) struct RateLimit {
    rate: Rate,
    empty_at: Mutex<Option<Instant>>,
}

impl RateLimit {
    pub(super) fn new(requests: usize) -> Self {
        Self { rate: Rate::per_second(requests), empty_at: Mutex::default() }
    }

    pub(super) fn admit(&self, now: Instant) -> Result<(), Duration> {
        self.rate.admit(&mut self.empty_at.lock().unwrap_or_else(PoisonError::into_inner), now)
    }
}

/// The limit of failed attempts to authenticate, by the address of the client.
#[derive(Debug)]
pub(super) struct FailureLimit {
    rate: Rate,
    clients: Mutex<HashMap<IpAddr, Instant>>,
}

impl FailureLimit {
    pub(super) fn new(failures: usize) -> Self {
        Self { rate: Rate::per_second(failures), clients: Mutex::default() }
    }

    /// Counts a failure. Returns how long the client has to wait if it had too many.
    pub(super) fn add(&self, client: IpAddr, now: Instant) -> Result<(), Duration> {
        let client = network(client);
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if clients.len() >= MAX_CLIENTS && !clients.contains_key(&client) {
            clients.retain(|_, empty_at| *empty_at > now);
            if clients.len() >= MAX_CLIENTS {
                clients.clear();
            }
        }
        let mut empty_at = clients.get(&client).copied();
        let admitted = self.rate.admit(&mut empty_at, now);
        if let Some(empty_at) = empty_at {
            clients.insert(client, empty_at);
        }
        admitted
    }
}

/// A client with IPv6 usually has a network of 64 bits.
fn network(client: IpAddr) -> IpAddr {
    match client {
        IpAddr::V6(address) => match address.to_ipv4_mapped() {
            Some(address) => address.into(),
            None => Ipv6Addr::from_bits(address.to_bits() & !(u128::from(u64::MAX))).into(),
        },
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_admitted_and_then_the_rate() {
        let (limit, begin) = (RateLimit::new(10), Instant::now());
        assert!((0..10).all(|_| limit.admit(begin).is_ok()));
        let wait = limit.admit(begin).unwrap_err();
        assert!(wait <= Duration::from_millis(100), "{wait:?}");
        assert!(limit.admit(begin + wait).is_ok());
        assert!(limit.admit(begin + wait).is_err());
        let later = begin + Duration::from_secs(60);
        assert_eq!(
            (0..100).filter(|_| limit.admit(later).is_ok()).count(),
            10,
            "unused time does not add up"
        );
    }

    #[test]
    fn the_table_of_clients_is_bounded() {
        let (limit, now) = (FailureLimit::new(2), Instant::now());
        let client = |n: u32| IpAddr::from(n.to_be_bytes());
        for n in 0..3 * u32::try_from(MAX_CLIENTS).unwrap() {
            assert!(limit.add(client(n), now).is_ok());
        }
        assert!(limit.clients.lock().unwrap().len() <= MAX_CLIENTS);
        let one = "2001:db8::1".parse().unwrap();
        let same_network = "2001:db8::2".parse().unwrap();
        assert!(limit.add(one, now).is_ok() && limit.add(same_network, now).is_ok());
        assert!(limit.add(one, now).is_err());
        assert!(limit.add("2001:db8:1::".parse().unwrap(), now).is_ok());
    }
}
