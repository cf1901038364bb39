//! Tests of the configuration. `tests/fixtures/config` has files with problems and the expected messages;
//! `UPDATE_EXPECTED=1` writes the messages.

mod agreement;
mod documents;
mod hostile;
mod reading;

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::*;

const SECRETS: [&str; 4] = ["t0p", "s3cret", "t0ps3cret", "notaport@"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn env(name: &str) -> Option<String> {
    match name {
        "SET" => Some("t0ps3cret".into()),
        "EMPTY" => Some(String::new()),
        _ => None,
    }
}

fn parsed(text: &str) -> Config {
    parse(text, "bridge.yaml", &env).unwrap_or_else(|error| panic!("{error}"))
}

fn refused(text: &str) -> String {
    match parse(text, "bridge.yaml", &env) {
        Ok(config) => panic!("accepted: {config:?}"),
        Err(error) => error.to_string(),
    }
}

/// One agent with these lines below its name and URL.
fn agent(lines: &str) -> AgentConfig {
    parsed(&agent_file(lines)).agents.remove(0)
}

fn agent_file(lines: &str) -> String {
    let lines: String = lines.lines().map(|line| format!("    {line}\n")).collect();
    format!("agents:\n  - name: weather\n    url: http://127.0.0.1:9000\n{lines}")
}

/// Compares a file with the generated text, or writes it if the environment variable is set.
fn assert_file(path: &Path, generated: &str, variable: &str) {
    if std::env::var_os(variable).is_some() {
        std::fs::write(path, generated).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    let name = path.strip_prefix(root()).unwrap_or(path).display();
    assert!(
        committed == generated,
        "{name} is out of date; `{variable}=1 cargo test --lib config` updates it.\n\n{generated}"
    );
}

fn fixtures() -> Vec<PathBuf> {
    let folder = std::fs::read_dir(root().join("tests/fixtures/config")).unwrap();
    let mut files: Vec<_> = folder.map(|file| file.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "yaml"));
    files.sort();
    assert!(!files.is_empty());
    files
}

#[test]
fn every_invalid_file_gets_its_messages_and_none_shows_a_secret() {
    for file in fixtures() {
        let text = std::fs::read_to_string(&file).unwrap();
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let error = parse(&text, &name, &env).expect_err(&name);
        let shown = format!("{error}\n");
        for secret in SECRETS {
            assert!(!shown.contains(secret), "{name} shows a secret:\n{shown}");
            assert!(!format!("{error:?}").contains(secret), "{name} shows a secret in Debug");
        }
        assert_file(&file.with_extension("expected"), &shown, "UPDATE_EXPECTED");
    }
}

#[test]
fn the_example_files_load_and_editors_find_their_schema() {
    let mut names = Vec::new();
    for file in std::fs::read_dir(root().join("config")).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        // Variables without a default: only the token of one example.
        let env = |name: &str| (name == "ARCHIVE_TOKEN").then(|| "t0ps3cret".to_owned());
        let config = parse(&text, &name, &env).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(config.agents.len(), 1, "{name}");
        assert!(text.starts_with("# yaml-language-server: $schema=schema.json\n"), "{name}");
        names.push(name);
    }
    names.sort();
    assert_eq!(
        names,
        [
            "attached-with-token.yaml",
            "container.yaml",
            "demo.yaml",
            "full.yaml",
            "minimal.yaml",
            "node.yaml",
            "python-uv.yaml"
        ]
    );
}

#[test]
fn the_schema_allows_no_other_keys_and_knows_every_name_of_a_key() {
    let schema = schema();
    assert_eq!(schema["additionalProperties"], false);
    let either = serde_json::json!([{"required": ["agents"]}, {"required": ["gateway"]}]);
    assert_eq!(schema["anyOf"], either);
    let agent = &schema["properties"]["agents"]["items"];
    assert_eq!(agent["additionalProperties"], false);
    assert_eq!(agent["properties"]["startup_timeout"]["default"], "30s");
    assert_eq!(agent["properties"]["a2a_server_startup_timeout"]["default"], "30s");
    let either = agent["allOf"].as_array().unwrap().iter().filter(|rule| rule.get("oneOf").is_some()).count();
    assert_eq!(either, 2, "name and url, each by one of two names");
    assert!(!schema.to_string().contains("\"x-"), "no extension keywords");
}

#[test]
fn a_missing_file_is_named_with_the_ways_to_name_another() {
    let error = load(Path::new("no/such/file.yaml")).unwrap_err().to_string();
    for part in ["no/such/file.yaml", "--config", "A2A_BRIDGE_CONFIG", "config/minimal.yaml"] {
        assert!(error.contains(part), "{error}");
    }
}
