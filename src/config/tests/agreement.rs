//! The JSON schema and the reader accept and reject the same documents.

use std::sync::LazyLock;

use serde_json::{Map, Value, json};

use super::*;

static SCHEMA: LazyLock<jsonschema::Validator> =
    LazyLock::new(|| jsonschema::validator_for(&schema()).expect("the schema is one"));

/// Reader and schema get the same text, as JSON is YAML.
#[track_caller]
fn assert_verdict(document: &Value, accepted: bool) {
    let read = parse(&document.to_string(), "bridge.yaml", &env);
    let problems: Vec<_> = SCHEMA.iter_errors(document).map(|error| error.to_string()).collect();
    assert_eq!(read.is_ok(), accepted, "the reader on {document}: {:?}", read.err().map(|e| e.to_string()));
    assert_eq!(problems.is_empty(), accepted, "the schema on {document}: {problems:?}");
}

/// A document with `value` at a path such as `agent.startup.timeout`, and the settings that it needs.
fn document(path: &str, value: Value) -> Value {
    let mut agent = json!({"name": "weather", "url": "http://127.0.0.1:9000"});
    let mut root = json!({});
    let (place, keys) = match path.split_once('.') {
        Some(("agent", keys)) => (&mut agent, keys),
        _ => (&mut root, path),
    };
    if matches!(keys, "port" | "env" | "working_dir" | "env_file") {
        place["command"] = "run".into();
    }
    if keys == "port" && !value.is_null() {
        place["url"] = "http://127.0.0.1:{port}".into();
    }
    let mut place = place;
    for key in keys.split('.') {
        place = &mut place[key];
    }
    *place = value;
    if root["nats"].get("password").is_some() {
        root["nats"]["user"] = "u".into();
    }
    if root.get("agents").is_none() {
        root["agents"] = json!([agent]);
    }
    root
}

/// Keys that hold text, for which a number or a boolean is text, too.
const TEXTS: [&str; 12] = [
    "nats.user",
    "nats.password",
    "nats.token",
    "nats.nkey",
    "nats.credentials",
    "nats.subject_prefix",
    "nats.inbox_prefix",
    "nats.tls.ca",
    "agent.working_dir",
    "agent.env_file",
    "agent.bearer_token",
    "agent.command",
];
const DURATIONS: [&str; 17] = [
    "shutdown_grace",
    "agent.startup_timeout",
    "agent.startup.interval",
    "agent.startup.timeout",
    "agent.readiness.timeout",
    "agent.liveness.interval",
    "agent.liveness.timeout",
    "agent.restart_window",
    "agent.stable_after",
    "agent.stop_grace",
    "agent.card_refresh",
    "agent.request_timeout",
    "agent.stream_idle_timeout",
    "agent.task_timeout",
    "agent.task_ttl",
    "agent.stream_keepalive",
    "agent.input_required_ttl",
];
const COUNTS: [&str; 4] =
    ["agent.max_restarts", "agent.readiness.failures", "agent.liveness.failures", "agent.max_in_flight"];
const TRUTHS: [&str; 8] = [
    "nats.tls.required",
    "nats.identity.required",
    "agent.forward_caller",
    "agent.shell",
    "agent.verify_port",
    "agent.restart_on_crash",
    "agent.use_card_url",
    "agent.prefer_stream",
];
const LISTS: [&str; 5] = [
    "agent.allowed_hosts",
    "agent.skills.allow",
    "agent.skills.deny",
    "agent.answer_artifacts",
    "agent.notice_artifacts",
];
const MAPPINGS: [&str; 11] = [
    "nats",
    "nats.identity",
    "nats.tls",
    "agent.env",
    "agent.headers",
    "agent.startup",
    "agent.readiness",
    "agent.liveness",
    "agent.skills",
    "agent.skills.rename",
    "agent.tls",
];

fn accepted(paths: &[&str], values: &[Value]) {
    for path in paths {
        values.iter().for_each(|value| assert_verdict(&document(path, value.clone()), true));
    }
}

fn refused(paths: &[&str], values: &[Value]) {
    for path in paths {
        values.iter().for_each(|value| assert_verdict(&document(path, value.clone()), false));
    }
}

#[test]
fn every_key_that_is_not_required_may_be_left_without_a_value() {
    fn check(schema: &Value, path: &str) {
        let required = schema.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
        let required =
            [required, ["agents", "name", "agent_name", "url", "a2a_server_url"].map(Value::from).to_vec()]
                .concat();
        for (key, property) in schema["properties"].as_object().unwrap_or(&Map::new()) {
            if required.contains(&json!(key)) {
                continue;
            }
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            assert_verdict(&document(&path, Value::Null), true);
            if !["metrics", "nats.agent_protocol"].contains(&path.as_str()) {
                check(property, &path);
            }
        }
    }
    let schema = schema();
    check(&schema, "");
    check(&schema["properties"]["agents"]["items"], "agent");
    refused(
        &["agents", "metrics.listen", "nats.agent_protocol.owner", "agent.name", "agent.url"],
        &[Value::Null],
    );
}

#[test]
fn text_may_look_like_a_number_or_a_boolean() {
    accepted(&TEXTS, &[json!("text"), json!(42), json!(1.5), json!(true), json!("${SET}")]);
    refused(&TEXTS, &[json!({})]);
    refused(&TEXTS[..TEXTS.len() - 1], &[json!([]), json!(["text"])]);
    // A password may be empty, other strings may not.
    accepted(&["nats.password"], &[json!("")]);
    refused(
        &["nats.user", "nats.token", "nats.credentials", "agent.command", "agent.bearer_token"],
        &[json!("")],
    );
    refused(
        &["agent.url", "agent.card_path", "metrics.listen"],
        &[json!(42), json!(true), json!("text"), json!("")],
    );
    accepted(&["agent.card_path"], &[json!("/"), json!("/card.json")]);
    refused(&["agent.card_path"], &[json!("//host"), json!("/a b")]);
    accepted(&["metrics.listen"], &[json!("127.0.0.1:9464"), json!("[::1]:1")]);
    accepted(&["nats.agent_protocol.owner"], &[json!("acme"), json!(42), json!(true)]);
    refused(&["nats.agent_protocol.owner"], &[json!("Acme"), json!("a.b"), json!(""), json!([])]);
    accepted(&["agent.name"], &[json!("a b"), json!(7), json!(false)]);
    refused(&["agent.name"], &[json!(""), json!(" "), json!("x".repeat(257)), json!([])]);
    refused(
        &["nats.subject_prefix", "nats.inbox_prefix"],
        &[json!("a..b"), json!("a b"), json!("a.>"), json!("x".repeat(129)), json!("")],
    );
    refused(&["nats.subject_prefix"], &["_INBOX", "_INBOX.a", "_R_", "_R_.a", "gw", "a.gw"].map(Value::from));
    accepted(
        &["nats.subject_prefix", "nats.inbox_prefix"],
        &["_INBOXES", "a._INBOX", "gw.a", "a.xgw"].map(Value::from),
    );
    accepted(&["nats.inbox_prefix"], &["_INBOX", "_INBOX.a"].map(Value::from));
}

#[test]
fn words_of_a_fixed_set_are_checked() {
    accepted(
        &["agent.binding"],
        &["jsonrpc", "rest", "JSONRPC", "HTTP+JSON", "${RPC:-rest}"].map(Value::from),
    );
    refused(
        &["agent.binding"],
        &[json!("grpc"), json!(""), json!(1), json!(true), json!("rest "), json!([])],
    );
    accepted(&["agent.protocol"], &["0.1", "0.2", "0.3", "1.0", "1"].map(Value::from));
    accepted(
        &["agent.protocol"],
        &[json!(0.1), json!(0.2), json!(0.3), json!(1), json!(1.0), json!("${P:-0.3}")],
    );
    refused(&["agent.protocol"], &[json!("2"), json!(0.4), json!(3), json!(true), json!("v1"), json!("")]);
    accepted(&["agent.stop_signal"], &["SIGTERM", "sigint", "TERM", "usr1", "SIGPWR"].map(Value::from));
    refused(
        &["agent.stop_signal"],
        &[json!("SIGNAL"), json!("15"), json!(15), json!(true), json!(""), json!("SIG")],
    );
    accepted(&["agent.restart"], &["always", "on-failure", "never"].map(Value::from));
    refused(&["agent.restart"], &[json!("Always"), json!("sometimes"), json!(true), json!(1), json!("")]);
    accepted(&["nats.identity.bind"], &["user", "account", "off"].map(Value::from));
    refused(&["nats.identity.bind"], &[json!("User"), json!("on"), json!(true), json!("")]);
    accepted(&["nats.identity"], &[json!("off"), json!({"bind": "account", "required": true})]);
    refused(&["nats.identity"], &[json!("on"), json!("user"), json!(true), json!("")]);
    accepted(&["agent.port"], &[json!("auto"), json!(1), json!(65_535), json!("9000")]);
    refused(
        &["agent.port"],
        &[json!(0), json!(65_536), json!("65536"), json!("any"), json!(true), json!(1.5)],
    );
    let key = |place: Value| json!([{"api_key": {"name": "K", "value": "v", "in": place}}]);
    accepted(&["agent.auth"], &["header", "query", "cookie"].map(|place| key(place.into())));
    accepted(&["agent.auth"], &[key(Value::Null)]);
    refused(&["agent.auth"], &[key("body".into()), key(1.into()), key(true.into())]);
}

#[test]
fn numbers_with_and_without_units_are_checked() {
    accepted(&DURATIONS, &[json!("30s"), json!("1h30m"), json!("1.5"), json!(30), json!(0.5), json!(" 30 ")]);
    refused(
        &DURATIONS,
        &[
            json!("soon"),
            json!("1w"),
            json!(""),
            json!(0),
            json!(-1),
            json!(true),
            json!([]),
            json!(2_592_001),
        ],
    );
    accepted(&COUNTS, &[json!(1), json!(100_000), json!("15")]);
    refused(&COUNTS, &[json!(0), json!(100_001), json!(1.5), json!("0"), json!("x"), json!(true), json!([])]);
    accepted(&["agent.max_response_size"], &[json!("4MiB"), json!("64 kb"), json!(1024), json!("2048")]);
    refused(&["agent.max_response_size"], &[json!("4XB"), json!(1023), json!(true), json!(""), json!(1.5)]);
    accepted(&TRUTHS[..1], &[json!(true), json!(false)]);
    accepted(&TRUTHS[1..], &[json!(false)]);
    refused(&TRUTHS, &[json!("true"), json!("yes"), json!(1), json!(0), json!([])]);
}

#[test]
fn lists_and_mappings_are_checked() {
    accepted(&LISTS, &[json!([]), json!(["a"]), json!([42])]);
    refused(&LISTS, &[json!("a"), json!([null]), json!([""]), json!([[]]), json!({}), json!(1)]);
    accepted(&MAPPINGS, &[json!({})]);
    refused(&MAPPINGS, &[json!("a"), json!([]), json!(1), json!(false)]);
    accepted(&["agent.env", "agent.headers", "agent.skills.rename"], &[json!({"A": "b", "C": 1, "D": true})]);
    accepted(&["agent.env", "agent.headers"], &[json!({"A": ""})]);
    refused(&["agent.env", "agent.headers", "agent.skills.rename"], &[json!({"A": null}), json!({"A": []})]);
    refused(&["agent.env"], &[json!({"A=B": "c"}), json!({"": "c"})]);
    refused(&["agent.headers"], &[json!({"A B": "c"}), json!({"A": "b\nc"}), json!({"A": "é"})]);
    accepted(&["nats.url"], &[json!("h"), json!("a,b"), json!(["a", "tls://b:1"]), json!(42)]);
    refused(&["nats.url"], &[json!([]), json!([null]), json!({}), json!("")]);
    accepted(&["nats.reply_prefixes"], &[json!(["_INBOX.>"]), json!(["a.*.b"]), json!([42])]);
    refused(
        &["nats.reply_prefixes"],
        &[json!([]), json!("_INBOX.>"), json!(["a..b"]), json!(["a.>.b"]), json!(["a*"])],
    );
    accepted(&["agent.command"], &[json!(["run", 1, true, ""])]);
    refused(&["agent.command"], &[json!([]), json!([""]), json!(["run", null]), json!(["run", []])]);
    accepted(&["agent.card"], &[json!({}), json!({"name": null, "skills": [1, {"a": null}]})]);
    refused(&["agent.card"], &[json!("a"), json!([]), json!(1)]);
    refused(&["agents"], &[json!({}), json!([null]), json!([1]), json!("a"), json!([{}])]);
    accepted(&["agents"], &[json!([])]);
}

#[test]
fn auth_methods_are_a_list_or_one_with_exactly_one_kind() {
    let basic = json!({"basic": {"user": "u", "password": 42}});
    let oauth2 = json!({"oauth2": {"token_url": "https://l/t", "client_id": 1, "client_secret": true, "scopes": null}});
    for path in ["agent.auth", "agent.card_auth"] {
        accepted(
            &[path],
            &[json!([]), basic.clone(), json!([basic, oauth2]), json!({"bearer": 42, "basic": null})],
        );
        refused(
            &[path],
            &[json!("a"), json!(1), json!([null]), json!([{}]), json!({}), json!({"bearer": null})],
        );
        refused(&[path], &[json!({"bearer": "t", "basic": {"user": "u", "password": "p"}})]);
        refused(&[path], &[json!({"bearer": "t", "colour": "red"}), json!({"basic": {"user": "u"}})]);
        refused(&[path], &[json!({"basic": {"user": "a:b", "password": ""}}), json!({"oauth2": {}})]);
        refused(&[path], &[json!({"api_key": {"name": "a b", "value": "v"}})]);
    }
}

#[test]
fn a_key_is_given_once_by_one_of_its_names() {
    let agent = |more: Value| {
        let mut agent = json!({"a2a_server_url": "http://h:1", "agent_name": "w"});
        agent.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"agents": [agent]})
    };
    assert_verdict(&agent(json!({"a2a_server_startup_timeout": "1s"})), true);
    assert_verdict(&agent(json!({"a2a_server_startup_timeout": "1s", "startup_timeout": "1s"})), false);
    assert_verdict(&agent(json!({"name": "w"})), false);
    assert_verdict(&agent(json!({"colour": "red"})), false);
}

#[test]
fn the_schema_accepts_every_example_file() {
    for file in std::fs::read_dir(root().join("config")).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "yaml") {
            let text = std::fs::read_to_string(&path).unwrap();
            let document: Value = serde_yaml::from_str(&text).unwrap();
            let problems: Vec<_> = SCHEMA.iter_errors(&document).map(|error| error.to_string()).collect();
            assert!(problems.is_empty(), "{}: {problems:?}", path.display());
        }
    }
}

#[test]
fn the_settings_of_a_gateway_need_no_agents() {
    let gateway = |settings: Value| json!({ "gateway": settings });
    let token = |digest: &str| json!({"name": "alice", "sha256": digest});
    let (one, other) = ("0a".repeat(32), "0B".repeat(32));
    assert_verdict(&gateway(json!({})), true);
    assert_verdict(&gateway(Value::Null), true);
    assert_verdict(&json!({}), false);
    assert_verdict(&json!({"nats": {}}), false);
    assert_verdict(&gateway(json!({"listen": "127.0.0.1:8080", "limits": {"streams": 300}})), true);
    assert_verdict(&gateway(json!({"tokens": [token(&one), token(&other)]})), true);
    assert_verdict(
        &gateway(
            json!({"tokens": [{"name": "a", "sha256": one, "role": "operator", "rate": 5, "agents": ["b"]}]}),
        ),
        true,
    );
    for wrong in [json!("0a"), json!("0g".repeat(32)), json!("0a".repeat(33)), Value::Null] {
        assert_verdict(&gateway(json!({"tokens": [{"name": "alice", "sha256": wrong}]})), false);
    }
    assert_verdict(&gateway(json!({"tokens": [{"name": "a", "sha256": one, "role": "root"}]})), false);
    assert_verdict(&gateway(json!({"tls": {"cert": "a.pem"}})), false);
    assert_verdict(&gateway(json!({"allowed_origins": ["https://app.example.org"]})), true);
    for text in [
        json!({"gateway": {"listen": "0.0.0.0:80"}}),
        json!({"gateway": {"tokens": [token(&one), token(&one.to_uppercase())]}}),
        json!({"gateway": {"allowed_origins": ["https://app.example.org/path"]}}),
    ] {
        assert!(parse(&text.to_string(), "bridge.yaml", &env).is_err(), "{text}");
    }
    let listen = json!({"gateway": {"listen": "0.0.0.0:80", "tokens": [token(&one)]}});
    assert!(parse(&listen.to_string(), "bridge.yaml", &env).is_ok());
}
