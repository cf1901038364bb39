//! Rules across keys: what goes together, what excludes what, what must be unique.

use std::collections::BTreeMap;

use secrecy::SecretString;

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

pub(super) fn unique_name(
    name: &str,
    at: usize,
    names: &mut BTreeMap<String, usize>,
    report: &mut Report<'_>,
) {
    if let Some(first) = names.get(name) {
        let (first, second) = (report.line(*first), report.line(at));
        let message = format!("two agents have the same name, on lines {first} and {second}");
        report.add_with_hint(at, message, "give each agent a name of its own");
    } else {
        names.insert(name.to_owned(), at);
    }
}
