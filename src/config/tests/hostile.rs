//! Hostile files and variables: no panic, no hang, no leaked secret, no key that the file does not contain.

use std::time::Instant;

use proptest::prelude::*;
use secrecy::ExposeSecret;

use super::*;

const TEMPLATE: &str = "nats: { user: u, password: \"${V}\" }\nagents:\n- name: n${V:-x}\n  url: http://h\n  \
                        command: [run, ${V}]\n  env: { A: '${V}' }\n  card: { name: \"${V}\" }\n";

/// Valid files, into which a test puts typos.
const GOOD: [&str; 3] = [
    "agents:\n  - name: weather\n    url: http://127.0.0.1:9000\n    bearer_token: t0ps3cret\n    headers:\n      \
     X-Key: t0ps3cret\n      X-Other: \"t0ps3cret\"\n    env: { A: t0ps3cret }\n    command: run\n",
    "nats: { url: 'nats://t0p:s3cret@h:4222', user: u, password: 's3cret' }\nagents: [{ name: a, url: 'http://h', \
     command: [run], env: { A: s3cret, B: \"s3cret\" }, bearer_token: s3cret, request_timeout: 5s }]\n",
    "nats:\n  url:\n    - nats://u:s3cret@h\n    - h\n  token: |\n    s3cret\n  subject_prefix: a\nagents:\n- name: a\n  \
     url: http://h\n  headers:\n    X: >-\n      s3cret\n      s3cret\n    Y: 's3cret\n      s3cret'\n  card: { name: x }\n",
];

/// The optional keys that have a value.
fn keys(config: &Config) -> String {
    let agent = &config.agents[0];
    let card = agent.card.as_ref().unwrap().as_object().unwrap();
    format!(
        "{} {} {:?} {:?} {:?} {} {:?}",
        config.agents.len(),
        config.nats.token.is_some() || config.nats.tls.is_some() || config.nats.credentials.is_some(),
        agent.env.keys(),
        agent.headers.keys(),
        card.keys(),
        agent.bearer_token.is_some(),
        agent.skills,
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_variable_never_adds_keys(value in ".{0,40}|[\\n:{}\\[\\]#&*!|>'\" a$-]{0,40}") {
        let text = TEMPLATE.replace("[run, ${V}]", "[run, '${V}']");
        let plain = parse(&text, "f", &|_| Some("v".into())).unwrap();
        match parse(&text, "f", &|_| Some(value.clone())) {
            Ok(config) => {
                prop_assert_eq!(keys(&config), keys(&plain));
                prop_assert_eq!(config.nats.password.as_ref().unwrap().expose_secret(), value.as_str());
                prop_assert_eq!(config.agents[0].env["A"].expose_secret(), value.as_str());
                prop_assert_eq!(&config.agents[0].command.as_ref().unwrap()[1], &value);
            }
            // A name with a line break is rejected at its position.
            Err(ConfigError::Invalid(problems)) => prop_assert!(!problems.is_empty()),
            Err(error) => return Err(TestCaseError::fail(error.to_string())),
        }
    }

    #[test]
    fn an_expanded_value_is_in_no_message(value in "[A-Z][a-z0-9]{6,12}Q7") {
        let text = "nats: { url: '${V}://x', subject_prefix: '${V} ' }\nagents:\n- name: '${V}\n\n  '\n  url: ${V}\n  \
                    startup_timeout: ${V}\n  max_in_flight: ${V}\n  restart_on_crash: ${V}\n  command: '\"${V}'\n";
        let error = parse(text, "f", &|_| Some(value.clone())).unwrap_err();
        prop_assert!(!format!("{error} {error:?}").contains(&value), "{}", error);
    }

    #[test]
    fn no_text_makes_it_panic(text in "\\PC{0,200}|[ \\n\\t:{}\\[\\]#&*!|>'\"a$,?%@`~<-]{0,200}") {
        let _ = parse(&text, "f", &env).map_err(|error| error.to_string());
    }

    #[test]
    fn no_typo_makes_it_panic_or_leak(
        file in 0_usize..GOOD.len(),
        cut in 0_usize..320,
        mark in "[\\n\\t:{}\\[\\]#&*!|>'\"$, -]{0,3}",
    ) {
        let good = GOOD[file];
        let (before, after) = good.split_at(cut.min(good.len()));
        let text = format!("{before}{mark}{after}");
        if let Err(error) = parse(&text, "f", &env) {
            prop_assert!(!error.to_string().contains("s3cret"), "{}\n---\n{}", text, error);
        }
    }

    #[test]
    fn no_bytes_make_loading_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        let _ = load(file.path()).map_err(|error| error.to_string());
    }
}

#[test]
fn the_files_for_typos_are_valid() {
    GOOD.iter().for_each(|text| drop(parsed(text)));
}

#[test]
fn large_files_are_refused_at_once() {
    let start = Instant::now();
    for text in [
        format!("bearer_token: t0ps3cret\nagents: []\n#{}", "x".repeat(1 << 20)),
        format!("agents: [{}]", "a,".repeat(120_000)),
        format!("a: &a {}\nb: [{}]", "x".repeat(1000), "*a,".repeat(50_000)),
        format!("{}agents: []", "k: 1\n".repeat(60_000)),
        format!("agents:\n{}", "- &a [*a]\n".repeat(30_000)),
        format!("agents: {}", "[".repeat(100_000)),
        format!("agents: '{}", "\n ".repeat(300_000)),
        format!("agents: [\"{}\"", " ".repeat(900_000)),
    ] {
        let shown = refused(&text);
        assert!(shown.len() < 60_000, "{}", shown.len());
        assert!(!shown.contains("t0ps3cret"), "{shown}");
    }
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

#[test]
fn a_chain_of_aliases_cannot_get_deeper_than_brackets_can() {
    let mut text = "a0: &a0 [x]\n".to_owned();
    for depth in 1..200 {
        text += &format!("a{depth}: &a{depth} [*a{}]\n", depth - 1);
    }
    assert!(refused(&text).contains("nested more than 64 deep"));
}

#[test]
fn a_file_that_is_not_text_is_rejected_with_the_position() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), b"agents: []\nnats: \xff\xfe\n").unwrap();
    let error = load(file.path()).unwrap_err().to_string();
    assert!(error.contains(":2:7: this is not UTF-8 text"), "{error}");
}
