//! Rules across keys: what goes together, what excludes what, what must be unique.

use std::collections::BTreeMap;

use secrecy::SecretString;
use url::{Host, Url};

use super::Restart;
use super::fields::Fields;
use super::problem::Report;

pub(super) fn nats(f: &mut Fields<'_, '_, '_>) {
    let mut ways: Vec<_> = ["credentials", "nkey", "token", "user"]
        .into_iter()
        .filter_map(|key| f.place(key).map(|at| (at, key)))
        .collect();
    ways.sort_unstable();
    if let [(_, first), others @ ..] = ways.as_slice() {
        for (at, key) in others {
            f.report.add(*at, format!("`{key}` and `{first}` exclude each other; give one way to log in"));
        }
    }
    if let (Some(at), None) = (f.place("password"), f.place("user")) {
        f.report.add(at, "`password` needs `user`");
    }
}

pub(super) fn tls(f: &mut Fields<'_, '_, '_>) {
    match (f.place("cert"), f.place("key")) {
        (Some(at), None) => f.report.add(at, "`cert` needs `key`"),
        (None, Some(at)) => f.report.add(at, "`key` needs `cert`"),
        _ => {}
    }
}

pub(super) fn auth(f: &mut Fields<'_, '_, '_>, start: usize) {
    let given = ["bearer", "api_key", "basic", "oauth2"];
    let given: Vec<_> = given.into_iter().filter_map(|key| f.place(key)).collect();
    match given.as_slice() {
        [] => f.report.add(start, "expected one of `bearer`, `api_key`, `basic` and `oauth2`"),
        [_] => {}
        [_, second, ..] => f.report.add_with_hint(
            *second,
            "one entry is one way to authenticate",
            "begin a new entry of the list with `-`",
        ),
    }
}

pub(super) fn agent(
    f: &mut Fields<'_, '_, '_>,
    headers: &BTreeMap<String, SecretString>,
    env: &BTreeMap<String, SecretString>,
) {
    let launched = f.place("command").or_else(|| f.place("a2a_server_command")).is_some();
    if !launched {
        let env = f.place("env").filter(|_| !env.is_empty());
        let alone = ["working_dir", "env_file", "port"].map(|key| (f.place(key), key));
        for (at, key) in alone.into_iter().chain([(env, "env")]) {
            if let Some(at) = at {
                f.report.add(at, format!("`{key}` goes only with `command`"));
            }
        }
    }
    let token = f.place("bearer_token").or_else(|| f.place("a2a_bearer_token"));
    if let (Some(at), true) = (token, headers.keys().any(|name| name.eq_ignore_ascii_case("authorization"))) {
        f.report.add(at, "`bearer_token` and the header `Authorization` exclude each other");
    }
}

pub(super) fn restart(f: &mut Fields<'_, '_, '_>, restart: Option<Restart>, on_crash: Option<bool>) {
    let contradiction =
        matches!(restart, Some(Restart::Always | Restart::OnFailure)) && on_crash == Some(false);
    if let (Some(at), true) = (f.place("restart"), contradiction) {
        f.report
            .add(at, "`restart` and `restart_on_crash: false` contradict each other; give `restart` alone");
    }
}

/// What only one agent can have, and where it was given first.
#[derive(Default)]
pub(super) struct Taken {
    names: BTreeMap<String, usize>,
    addresses: BTreeMap<(String, u16), usize>,
}

impl Taken {
    pub(super) fn name(&mut self, name: &str, at: usize, report: &mut Report<'_>) {
        let what = ("two agents have the same name", "give each agent a name of its own");
        once(&mut self.names, name.to_owned(), at, what, report);
    }

    /// The port of a launched agent, unless it is a free one at every start.
    pub(super) fn port(&mut self, url: &Url, at: usize, report: &mut Report<'_>) {
        let host = match url.host() {
            Some(Host::Domain("localhost")) => "127.0.0.1".to_owned(),
            Some(Host::Ipv6(address)) if address.is_loopback() => "127.0.0.1".to_owned(),
            host => host.map(|host| host.to_string()).unwrap_or_default(),
        };
        if let Some(port) = url.port_or_known_default().filter(|port| *port > 0) {
            let what =
                ("two launched agents have the same port", "give each a port of its own, or `port: auto`");
            once(&mut self.addresses, (host, port), at, what, report);
        }
    }
}

/// Two skills of one agent cannot be one action.
pub(super) fn rename(name: &str, at: usize, names: &mut BTreeMap<String, usize>, report: &mut Report<'_>) {
    let what = ("two skills get the same name", "only one of them would be published");
    once(names, name.to_owned(), at, what, report);
}

/// Reports what is given a second time, with a hint.
fn once<K: Ord>(
    seen: &mut BTreeMap<K, usize>,
    key: K,
    at: usize,
    (what, hint): (&str, &str),
    report: &mut Report<'_>,
) {
    if let Some(first) = seen.get(&key) {
        let (first, second) = (report.line(*first), report.line(at));
        report.add_with_hint(at, format!("{what}, on lines {first} and {second}"), hint);
    } else {
        seen.insert(key, at);
    }
}
