//! Valid files: the value of each key.

use rstest::rstest;
use secrecy::ExposeSecret;

use super::super::values::{parse_capped_duration, parse_duration, parse_size};
use super::*;

#[rstest]
#[case("30s", 30_000)]
#[case("500ms", 500)]
#[case("2m", 120_000)]
#[case("1h30m", 5_400_000)]
#[case("1.5", 1_500)]
#[case(" 30 ", 30_000)]
#[case("0.1s", 100)]
#[case("30d", 2_592_000_000)]
fn a_duration_is_a_number_with_units_or_seconds(#[case] text: &str, #[case] milliseconds: u64) {
    assert_eq!(parse_duration(text), Ok(Duration::from_millis(milliseconds)));
}

#[rstest]
fn other_durations_are_refused(
    #[values(
        "", "0", "0s", "-1s", "1w", "s", "1s 2", "1e3", "inf", "nan", "31d", "1..5", ".", "½s", "1s2",
        "9e99s"
    )]
    text: &str,
) {
    assert!(parse_duration(text).is_err(), "{text}");
    assert!(parse_duration(&"9".repeat(400)).is_err());
}

#[rstest]
#[case("1h30m", Some(Duration::from_secs(5400)))]
#[case("31d", Some(Duration::from_secs(31 * 86_400)))]
#[case("99999999999999999999s", Some(Duration::MAX))]
#[case(&"9".repeat(400), Some(Duration::MAX))]
#[case("0s", None)]
#[case("1e30s", None)]
#[case("-1s", None)]
fn a_limit_that_is_capped_may_have_any_length(#[case] text: &str, #[case] expected: Option<Duration>) {
    assert_eq!(parse_capped_duration(text).ok(), expected);
}

#[rstest]
#[case("0", Some(0))]
#[case("4MiB", Some(4 << 20))]
#[case("64KB", Some(64_000))]
#[case("1 gib", Some(1 << 30))]
#[case("1.5MiB", None)]
#[case("99999999999GiB", None)]
#[case("MiB", None)]
#[case("", None)]
fn a_size_is_a_whole_number_with_a_unit(#[case] text: &str, #[case] bytes: Option<u64>) {
    assert_eq!(parse_size(text).ok(), bytes);
}

#[test]
fn text_that_looks_like_a_number_stays_text() {
    let config = parsed("agents: [{ name: 007, url: 'http://h' }]\nnats: { user: 1e3, password: true }");
    assert_eq!(config.agents[0].name, "007");
    assert_eq!(config.nats.user.as_deref(), Some("1e3"));
    assert_eq!(config.nats.password.unwrap().expose_secret(), "true");
}

#[test]
fn a_variable_with_structure_in_it_stays_one_value() {
    let hostile = "x\nbearer_token: stolen # {}";
    let read = |name: &str| (name == "NAME").then(|| hostile.to_owned());
    let text = agent_file("command: [run, '${NAME}', '$${NAME}', cost $5]\nheaders: { X: '${OTHER:-a$$b}' }");
    let agent = parse(&text, "f", &read).unwrap().agents.remove(0);
    assert_eq!(agent.command.unwrap(), ["run", hostile, "${NAME}", "cost $5"]);
    assert_eq!(agent.headers["X"].expose_secret(), "a$b");
    assert!(agent.bearer_token.is_none());
}

#[test]
fn an_empty_variable_without_quotes_means_absent_and_in_quotes_an_empty_text() {
    let read = agent(concat!(
        "bearer_token: ${EMPTY}\ncommand: [run, '${EMPTY:-}']\nstartup_timeout: ${EMPTY:-}\n",
        "env:\n  A: ${EMPTY}\n  B: \"${EMPTY}\"\n",
    ));
    assert!(read.bearer_token.is_none());
    assert_eq!(read.startup_timeout, Duration::from_secs(30));
    assert_eq!(read.command.unwrap(), ["run", ""]);
    assert_eq!(read.env.keys().collect::<Vec<_>>(), ["B"]);
}

#[test]
fn a_variable_that_holds_the_word_null_is_that_word() {
    let text =
        "nats: { user: u, password: \"p\", subject_prefix: a }\nagents: [{ name: '${N}', url: 'http://h' }]";
    let config = parse(text, "f", &|_| Some("null".into())).unwrap();
    assert_eq!(config.agents[0].name, "null");
    let plain = parse("agents:\n- name: ${N}\n  url: http://h\n", "f", &|_| Some("null".into())).unwrap();
    assert_eq!(plain.agents[0].name, "null");
}

#[test]
fn a_boolean_may_come_from_a_variable() {
    let text = agent_file("restart_on_crash: ${RESTART}");
    let config = parse(&text, "f", &|_| Some("false".into())).unwrap();
    assert!(!config.agents[0].restart_on_crash);
}

#[test]
fn the_other_names_of_keys_mean_the_same() {
    let config = parsed(concat!(
        "agents:\n- agent_name: w\n  a2a_server_url: https://h/base\n  a2a_server_command: run 'a b' c\n",
        "  a2a_server_startup_timeout: 5\n  a2a_server_restart_on_crash: false\n  a2a_bearer_token: t\n",
    ));
    let agent = &config.agents[0];
    assert_eq!((agent.name.as_str(), agent.url.as_str()), ("w", "https://h/base"));
    assert_eq!(agent.command.as_deref().unwrap(), ["run", "a b", "c"]);
    assert_eq!((agent.startup_timeout.as_secs(), agent.restart_on_crash), (5, false));
    assert_eq!(agent.bearer_token.as_ref().unwrap().expose_secret(), "t");
}

#[test]
fn a_merge_key_supplies_missing_keys() {
    let config = parsed(concat!(
        "agents:\n- &first { name: a, url: 'http://h:1', request_timeout: 7s, max_in_flight: 3 }\n",
        "- { <<: *first, name: b, url: 'http://h:2', max_in_flight: 4 }\n",
        "- { <<: [{ name: c }, *first], url: 'http://h:3' }\n",
    ));
    let seen: Vec<_> = config.agents.iter().map(|a| (a.name.as_str(), a.max_in_flight)).collect();
    assert_eq!(seen, [("a", 3), ("b", 4), ("c", 3)]);
    assert!(config.agents.iter().all(|agent| agent.request_timeout.as_secs() == 7));
}

#[test]
fn a_card_keeps_its_types_and_its_order() {
    let card = agent(concat!(
        "card:\n  version: '1.0'\n  n: [1, -2, +3, 0x1F, 0o17, 1.5, 1e3, 18446744073709551615, .5]\n",
        "  t: [true, False, yes, null, ~, .inf, 0xzz, 1-2, 2026-01-01]\n  a: {}\n",
    ));
    let expected = serde_json::json!({
        "version": "1.0",
        "n": [1, -2, 3, 31, 15, 1.5, 1000.0, 18_446_744_073_709_551_615_u64, 0.5],
        "t": [true, false, "yes", null, null, ".inf", "0xzz", "1-2", "2026-01-01"],
        "a": {},
    });
    assert_eq!(card.card.unwrap().to_string(), expected.to_string());
}

#[rstest]
#[case("a, tls://b:1 ,nats://c", &["a", "tls://b:1", "nats://c"])]
#[case("[a:1, 'b:2,c:3']", &["a:1", "b:2", "c:3"])]
#[case("nats://u:p@h:4222", &["nats://u:p@h:4222"])]
#[case("'[::1]:4222'", &["[::1]:4222"])]
fn servers_are_one_or_many(#[case] url: &str, #[case] servers: &[&str]) {
    let read = parsed(&format!("agents: []\nnats:\n  url: {url}")).nats.url;
    assert_eq!(read.iter().map(AsRef::as_ref).collect::<Vec<_>>(), servers);
}

#[test]
fn paths_start_at_the_directory_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bridge.yaml");
    let nats = "nats: { credentials: a.creds, tls: { ca: /etc/ca.pem, cert: c, key: k } }\n";
    std::fs::write(&file, format!("{nats}{}", agent_file("command: run\nworking_dir: w"))).unwrap();
    let config = load(&file).unwrap();
    assert_eq!(config.nats.credentials.unwrap(), folder.path().join("a.creds"));
    let tls = config.nats.tls.unwrap();
    assert_eq!(tls.ca.unwrap(), Path::new("/etc/ca.pem"));
    assert_eq!(tls.key.unwrap(), folder.path().join("k"));
    assert_eq!(config.agents[0].working_dir.clone().unwrap(), folder.path().join("w"));
}

#[test]
fn encoded_passwords_are_redacted() {
    let config = parsed(concat!(
        "agents: [{ name: w, url: 'http://h', auth: [{ basic: { user: me, password: p4ss } }, ",
        "{ oauth2: { token_url: 'http://h', client_id: 'm:e', client_secret: p/4 } }] }]",
    ));
    // me:p4ss, m%3Ae:p%2F4
    let mut sent = "bWU6cDRzcw== bSUzQWU6cCUyRjQ=".to_owned();
    config.agents[0].secrets().redact(&mut sent);
    assert_eq!(sent, "*** ***");
}

#[test]
fn debug_output_of_settings_shows_no_secret() {
    let config = parsed(concat!(
        "nats: { url: 'nats://t0p:s3cret@h:1,t0p:s3cret@h', user: u, password: t0ps3cret }\n",
        "agents: [{ name: w, url: 'http://h', command: run, env: { A: t0ps3cret }, ",
        "bearer_token: t0ps3cret, headers: { X: t0ps3cret } }]",
    ));
    let shown = format!("{config:?}");
    assert!(!SECRETS.iter().any(|secret| shown.contains(secret)), "{shown}");
    assert!(shown.contains("nats://***@h:1"), "{shown}");
}

#[test]
fn a_byte_order_mark_and_windows_line_ends_do_no_harm() {
    let text = format!("\u{feff}{}", agent_file("colour: x").replace('\n', "\r\n"));
    assert!(refused(&text).starts_with("bridge.yaml:4:5: unknown key `colour`\n  4 |     colour: ***\n"));
}

#[rstest]
#[case("{ owner: acme_2-x }", None)]
#[case("{ owner: Acme }", Some("expected 1 to 64 lower-case letters, digits, `_` and `-`"))]
#[case("{ owner: a.b }", Some("expected 1 to 64 lower-case letters"))]
#[case("{ owner: '' }", Some("expected 1 to 64 lower-case letters"))]
#[case("{}", Some("`owner`"))]
fn the_owner_for_the_agent_protocol_is_one_lower_case_word(
    #[case] value: &str,
    #[case] problem: Option<&str>,
) {
    let text = format!("nats:\n  agent_protocol: {value}\nagents: []\n");
    match problem {
        None => assert_eq!(parsed(&text).nats.agent_protocol.unwrap().owner, "acme_2-x"),
        Some(problem) => assert!(refused(&text).contains(problem), "{}", refused(&text)),
    }
}

#[test]
fn without_an_owner_there_is_no_agent_protocol() {
    assert!(parsed("agents: []").nats.agent_protocol.is_none());
}

#[rstest]
#[case("{}", JetStreamMode::Auto, StateReplicas::Auto)]
#[case("{ mode: off }", JetStreamMode::Off, StateReplicas::Auto)]
#[case("{ mode: required, replicas: 3 }", JetStreamMode::Required, StateReplicas::Three)]
#[case("{ mode: auto, replicas: '5' }", JetStreamMode::Auto, StateReplicas::Five)]
fn jetstream_is_used_if_it_is_there(
    #[case] text: &str,
    #[case] mode: JetStreamMode,
    #[case] replicas: StateReplicas,
) {
    let jetstream = parsed(&format!("nats: {{ jetstream: {text} }}\nagents: []")).nats.jetstream;
    assert_eq!((jetstream.mode, jetstream.replicas), (mode, replicas));
    refused("nats: { jetstream: { replicas: 2 } }\nagents: []");
}

#[test]
fn a_shell_gets_the_line_as_it_stands() {
    let agent = agent("shell: true\ncommand: a & b \"c\"");
    assert_eq!(agent.command.unwrap(), ["/bin/sh", "-c", "a & b \"c\""]);
    let error = refused(&agent_file("shell: true\ncommand: [a, b]"));
    assert!(error.contains("one string, not a list"), "{error}");
}

#[test]
fn the_port_placeholder_is_replaced_in_command_env_and_url() {
    let file = "agents:\n  - name: w\n    url: http://127.0.0.1:{port}/x\n    port: auto\n    command: run {port}\n    env: { PORT: '{port}' }";
    let agent = parsed(file).agents.remove(0).at_port(4711);
    assert_eq!(agent.url.as_str(), "http://127.0.0.1:4711/x");
    assert_eq!(agent.command.unwrap(), ["run", "4711"]);
    let port = secrecy::ExposeSecret::expose_secret(&agent.env["PORT"]);
    assert_eq!(port, "4711");
    let error = refused("agents: [{ name: w, url: 'http://127.0.0.1:{port}' }]");
    assert!(error.contains("needs the setting `port`"), "{error}");
}

#[test]
fn restart_on_crash_false_means_never_and_conflicts_with_restart() {
    assert_eq!(agent("command: a\nrestart_on_crash: false").restart, Restart::Never);
    assert_eq!(agent("command: a").restart, Restart::OnFailure);
    let error = refused(&agent_file("command: a\nrestart: always\nrestart_on_crash: false"));
    assert!(error.contains("contradict"), "{error}");
}

#[test]
fn an_environment_file_is_read_with_the_settings_and_changes_the_digest() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bridge.yaml");
    std::fs::write(&file, agent_file("command: a\nenv_file: a.env\nenv: { ONE: mine }")).unwrap();
    let error = load(&file).unwrap_err().to_string();
    assert!(error.contains("a.env: cannot read this file"), "{error}");
    let load_with = |text: &str| {
        std::fs::write(folder.path().join("a.env"), text).unwrap();
        load(&file).map(|mut config| config.agents.remove(0))
    };
    let agent = load_with("# comment\nONE=file\nexport TWO='2 = two'\n\n").unwrap();
    let shown = |name: &str| secrecy::ExposeSecret::expose_secret(&agent.env[name]).to_owned();
    assert_eq!((shown("ONE"), shown("TWO")), ("mine".into(), "2 = two".into()));
    assert_ne!(agent.digest, load_with("TWO=3").unwrap().digest);
    let error = load_with("ONE=1\nnonsense").unwrap_err().to_string();
    assert!(error.contains("line 2 is not `NAME=value`") && !error.contains("nonsense"), "{error}");
}

#[test]
fn auth_methods_are_a_list_or_a_single_one() {
    use secrecy::ExposeSecret as _;
    let several = agent(
        "auth:\n  - api_key: { name: key, in: query, value: '${SET}' }\n  - scheme: s\n    oauth2:\n      \
         token_url: https://login.example/token\n      client_id: me\n      client_secret: x\n      scopes: [a, b]\n\
         card_auth: { basic: { user: u, password: '' } }\ntls: { ca: ca.pem }",
    );
    let [key, oauth] = &several.auth.unwrap()[..] else { panic!("two ways") };
    let key = key.api_key.as_ref().unwrap();
    assert_eq!((key.name.as_str(), key.place), ("key", KeyPlace::Query));
    assert_eq!(key.value.expose_secret(), "t0ps3cret");
    assert_eq!(oauth.scheme.as_deref(), Some("s"));
    assert_eq!(oauth.oauth2.as_ref().unwrap().scopes, ["a", "b"]);
    assert!(several.card_auth.unwrap()[0].basic.is_some());
    assert!(several.tls.unwrap().ca.is_some());
    assert!(agent("").auth.is_none());
    assert!(agent("auth: []").auth.unwrap().is_empty());
}

#[test]
fn versions_bindings_and_hosts_are_read() {
    let pinned =
        agent("protocol: 1.0\nbinding: rest\nallowed_hosts: ['Agents.Example', '[::1]:9000', 10.0.0.7]");
    assert_eq!((pinned.protocol, pinned.binding), (Some(A2aVersion::V1), Some(Binding::Rest)));
    assert_eq!(pinned.allowed_hosts, ["agents.example", "[::1]:9000", "10.0.0.7"]);
    assert!(!pinned.use_card_url);
    assert_eq!(agent("protocol: '0.2'").protocol, Some(A2aVersion::V02));
}

#[test]
fn credentials_are_secrets_and_what_only_looks_like_one_is_not() {
    let file = "agents:
  - name: a
    url: http://127.0.0.1:9
    command: [a]
    headers: { Authorization: 'Bearer in-a-header', Accept: application/json }
    env: { API_KEY: an-api-key, KEYCLOAK_URL: https://sso.example.org }
    auth: [{ basic: { user: me, password: a-password } }]
";
    let secrets = parsed(file).agents.remove(0).secrets();
    let mut text =
        "in-a-header an-api-key a-password bWU6YS1wYXNzd29yZA== application/json https://sso.example.org"
            .to_owned();
    secrets.redact(&mut text);
    assert_eq!(text, "*** *** *** *** application/json https://sso.example.org");
}

#[test]
fn an_absent_authorization_header_does_not_conflict_with_a_token() {
    let file = "agents:
  - name: a
    url: http://127.0.0.1:9
    bearer_token: t
    headers:
      Authorization: ${EMPTY}
";
    assert!(parsed(file).agents[0].headers.is_empty());
}

#[test]
fn the_digest_ignores_the_order_of_keys_and_quotes_but_not_their_meaning() {
    let digest = |lines: &str| agent(lines).digest;
    let first = digest("command: run --fast\nenv: { A: '1', B: x }\nport: 9000");
    assert_eq!(first, digest("port: '9000'\nenv:\n  B: \"x\"\n  A: 1\ncommand: 'run --fast'"));
    assert_ne!(first, digest("command: run --fast\nenv: { A: '2', B: x }\nport: 9000"));
    assert_ne!(digest("command: a"), digest("command: a\nworking_dir: /tmp"));
    assert_ne!(digest("bearer_token: one"), digest("bearer_token: two"));
    assert_ne!(digest("skills: { allow: [a, b] }"), digest("skills: { allow: [b, a] }"));
    // In a card, a number and a text differ, and so do null and a text anywhere.
    assert_ne!(digest("card: { name: a, x: 1 }"), digest("card: { name: a, x: '1' }"));
    assert_ne!(digest("command: a\nworking_dir: null"), digest("command: a\nworking_dir: 'null'"));
}

#[test]
fn limits_change_without_a_restart_of_the_process() {
    let digest = |lines: &str| agent(lines).digest;
    let before = digest("command: a\nrequest_timeout: 30s");
    for lines in
        ["command: a", "command: a\nmax_in_flight: 3\nskills: { deny: [x] }", "command: a\nrestart: never"]
    {
        let after = digest(lines);
        assert!(before != after && before.is_same_process(&after), "{lines}");
    }
    for lines in [
        "command: b\nrequest_timeout: 30s",
        "command: a\nbearer_token: t",
        "command: a\nlimits: { files: 9 }",
    ] {
        assert!(!before.is_same_process(&digest(lines)), "{lines}");
    }
    let keys = crate::config::settings::keys();
    for key in crate::config::agent::APPLIED_WITHOUT_RESTART {
        assert!(keys.contains(&key), "{key}");
    }
}

#[test]
fn urls_with_different_credentials_are_refused() {
    let shown = refused("nats: { url: ['nats://a:t0ps3cret@h', 'b:t0ps3cret@h'] }\nagents: []\n");
    assert!(shown.contains("the URLs have different users or passwords") && !shown.contains("t0ps3cret"));
    parsed("nats: { url: 'nats://a:b@h,nats://h:1,nats://a:b@h:2' }\nagents: []\n");
}

#[test]
fn nats_can_be_read_from_a_file_whose_agents_cannot() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bridge.yaml");
    let text = "nats: { url: 'nats://h:7', subject_prefix: acme }\nagents:\n  - name: a\n    url: ${UNSET_HERE}\n    x: 1\n";
    std::fs::write(&file, text).unwrap();
    assert!(load(&file).is_err());
    let nats = load_nats(&file).unwrap();
    assert_eq!((nats.url[0].as_ref(), nats.subject_prefix.as_str()), ("nats://h:7", "acme"));
    std::fs::write(&file, "agents: []\n").unwrap();
    assert_eq!(load_nats(&file).unwrap().subject_prefix, "a2a");
    std::fs::write(&file, "nats: { url: 7, prefix: x }\nagents: []\n").unwrap();
    assert!(load_nats(&file).unwrap_err().to_string().contains("prefix"));
}
