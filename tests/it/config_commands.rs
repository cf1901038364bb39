//! `run`, `check` and `schema`: errors in the settings, and exit codes.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rstest::rstest;
use tempfile::TempDir;

use crate::support::commands::{CommandOutput, command, run};
use crate::support::{DemoAgent, NatsServer};

fn program(arguments: &[&str]) -> CommandOutput {
    run(&mut command(arguments), "")
}

/// A configuration file in a temporary directory.
struct ConfigFile {
    _dir: TempDir,
    path: PathBuf,
}

impl ConfigFile {
    fn new(yaml: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bridge.yaml");
        std::fs::write(&path, yaml).unwrap();
        Self { _dir: dir, path }
    }

    fn path(&self) -> &str {
        self.path.to_str().unwrap()
    }
}

const GOOD: &str = "agents: [{ name: demo, url: 'http://127.0.0.1:9' }]";

#[rstest]
#[case("run")]
#[case("check")]
fn every_configuration_error_is_reported_with_its_position(#[case] command: &str) {
    let config = ConfigFile::new(
        "nats:\n  url: nats://127.0.0.1:4222\n  subjectprefix: a2a\nagents:\n  - name: demo\n    url: ftp://example.org\n    startup_timeout: soon\n  - name: demo\n    url: http://127.0.0.1:9\n",
    );
    let output = program(&[command, "--config", config.path()]);
    assert_eq!(output.code, 78);
    let errors = output.err;
    for position in ["bridge.yaml:3:3: ", "bridge.yaml:6:", "bridge.yaml:7:", "bridge.yaml:8:"] {
        assert!(errors.contains(position), "no {position} in:\n{errors}");
    }
    assert!(errors.contains("subjectprefix") && errors.contains("subject_prefix"), "{errors}");
    assert_eq!(output.out, "");
}

#[rstest]
#[case("subject_prefix: _INBOX")]
#[case("subject_prefix: _R_.a2a")]
#[case("reply_prefixes: ['a.>.b']")]
fn run_and_check_refuse_the_same_subjects(#[case] setting: &str) {
    let config = ConfigFile::new(&format!("nats:\n  {setting}\n{GOOD}\n"));
    for arguments in [&["run"] as &[_], &["check"], &["check", "--offline"]] {
        let output = run(command(arguments).args(["--config", config.path()]), "");
        assert_eq!(output.code, 78, "{arguments:?}: {output:?}");
        assert!(output.err.contains("bridge.yaml:2:"), "{arguments:?}: {output:?}");
    }
}

#[test]
fn missing_configuration_file_is_named() {
    for command in ["run", "check"] {
        let output = program(&[command, "--config", "/nowhere/bridge.yaml"]);
        assert_eq!(output.code, 78);
        assert!(output.err.contains("/nowhere/bridge.yaml"));
    }
}

#[test]
fn unset_variable_is_reported_with_its_position() {
    let config = ConfigFile::new("agents:\n  - name: demo\n    url: ${NO_SUCH_VARIABLE_HERE}\n");
    let output = program(&["check", "--offline", "--config", config.path()]);
    assert_eq!(output.code, 78);
    let errors = output.err;
    assert!(errors.contains("bridge.yaml:3:10"), "{errors}");
    assert!(errors.contains("NO_SUCH_VARIABLE_HERE"), "{errors}");
}

#[test]
fn check_offline_needs_neither_nats_nor_agents() {
    let config = ConfigFile::new(GOOD);
    let output = program(&["check", "--offline", "--config", config.path()]);
    assert_eq!(output.code, 0, "{}", output.err);
    assert!(output.out.contains("valid"));
}

#[test]
fn check_warns_about_a_skill_renamed_to_a_built_in_action() {
    let config = ConfigFile::new(
        "agents: [{ name: a, url: 'http://127.0.0.1:9', skills: { rename: { x: get_task, y: fine } } }]",
    );
    let output = program(&["check", "--offline", "--config", config.path()]);
    let report = output.out;
    assert_eq!(output.code, 0, "{report}");
    assert!(report.contains("warning: skill `x` cannot be renamed to `get_task`"), "{report}");
    assert_eq!(report.matches("warning").count(), 1, "{report}");
}

#[test]
fn variable_can_name_the_configuration_file() {
    let config = ConfigFile::new(GOOD);
    let output = run(command(&["check", "--offline"]).env("A2A_BRIDGE_CONFIG", config.path()), "");
    assert_eq!(output.code, 0, "{}", output.err);
}

#[test]
fn bundled_configuration_files_are_valid() {
    for file in ["config/minimal.yaml", "config/full.yaml"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let output = program(&["check", "--offline", "--config", path.to_str().unwrap()]);
        assert_eq!(output.code, 0, "{file}: {}", output.err);
    }
}

#[tokio::test]
async fn check_connects_to_nats_and_to_the_agents() {
    let (nats, agent) = (NatsServer::start().await, DemoAgent::start(&[]).await);
    let yaml = |second: &str| {
        format!(
            "nats: {{ url: '{}' }}\nagents:\n  - {{ name: demo, url: '{}' }}\n  - {second}\n",
            nats.url(),
            agent.url()
        )
    };
    let fine = ConfigFile::new(&yaml("{ name: own, url: 'http://127.0.0.1:9', command: sh }"));
    let output = program(&["check", "--config", fine.path()]);
    let report = output.out;
    assert_eq!(output.code, 0, "{report}");
    assert!(report.contains("NATS: ok") && report.contains("✓ agent demo: ok, A2A 1.0"), "{report}");
    for problem in [
        "{ name: missing, url: 'http://127.0.0.1:9' }",
        "{ name: missing, url: 'http://127.0.0.1:9', command: no-such-program }",
        "{ name: missing, url: 'http://127.0.0.1:9', command: sh, tls: { ca: /nowhere/ca.pem } }",
    ] {
        let output = program(&["check", "--config", ConfigFile::new(&yaml(problem)).path()]);
        let report = output.out;
        assert_eq!(output.code, 1, "{report}");
        assert!(report.contains("✗ agent missing: "), "{report}");
    }
}

#[rstest]
#[case(&["run", "--fail-fast"])]
#[case(&["check"])]
fn unreachable_nats_has_its_own_exit_code(#[case] arguments: &[&str]) {
    let config = ConfigFile::new("nats: { url: 'nats://127.0.0.1:9' }\nagents: []\n");
    let began = Instant::now();
    let output = run(command(arguments).args(["--config", config.path()]), "");
    assert_eq!(output.code, 69);
    let all = output.err + &output.out;
    assert!(all.contains("nats://127.0.0.1:9"), "{all}");
    assert!(began.elapsed() < Duration::from_secs(20));
}

#[test]
fn schema_is_json_with_every_setting() {
    let output = program(&["schema"]);
    assert_eq!(output.code, 0);
    let written = output.json().to_string();
    for key in ["subject_prefix", "reply_prefixes", "max_in_flight", "input_required_ttl", "shutdown_grace"] {
        assert!(written.contains(key), "no {key}");
    }
}

#[rstest]
#[case(&["--no-such-flag"], 64)]
#[case(&["run", "--no-such-flag"], 64)]
#[case(&["no-such-command"], 64)]
#[case(&["--log", "=[", "schema"], 64)]
#[case(&["--help"], 0)]
#[case(&["--version"], 0)]
fn unknown_arguments_are_usage_errors(#[case] arguments: &[&str], #[case] code: i32) {
    let output = program(arguments);
    assert_eq!(output.code, code, "{}", output.err);
    let (used, unused) = if code == 0 { (output.out, output.err) } else { (output.err, output.out) };
    assert!(!used.is_empty());
    assert_eq!(unused, "");
}

#[rstest]
#[case::missing(None, "tls: { ca: ca.pem }", "No such file")]
#[case::empty(Some(""), "tls: { ca: ca.pem }", "no certificate")]
#[case::no_key(Some("nonsense"), "tls: { cert: ca.pem, key: ca.pem }", "ca.pem")]
#[case::no_credentials(Some("nonsense"), "credentials: ca.pem", "it has no user JWT")]
fn files_for_nats_that_cannot_be_used_are_an_error_at_the_start(
    #[case] text: Option<&str>,
    #[case] setting: &str,
    #[case] expected: &str,
) {
    let config = ConfigFile::new(&format!("nats:\n  url: 'nats://127.0.0.1:1'\n  {setting}\n{GOOD}\n"));
    let folder = Path::new(config.path()).parent().unwrap();
    if let Some(text) = text {
        std::fs::write(folder.join("ca.pem"), text).unwrap();
    }
    let output = program(&["run", "--config", config.path()]);
    assert_eq!(output.code, 78, "{output:?}");
    assert!(output.err.contains("ca.pem") && output.err.contains(expected), "{output:?}");
    let output = program(&["check", "--config", config.path()]);
    assert_ne!(output.code, 0, "{output:?}");
    assert!(output.out.contains(expected), "{output:?}");
}
