//! Where the commands find NATS: contexts of the `nats` tool, configurations of a bridge, URLs with credentials.

use std::path::Path;
use std::process::Command;

use serde_json::json;
use tempfile::TempDir;

use crate::support::NatsServer;
use crate::support::commands::{BundledBridge, CommandOutput, command, demo_settings, run};

/// A home directory with contexts.
struct Home(TempDir);

impl Home {
    fn new() -> Self {
        let home = Self(tempfile::tempdir().unwrap());
        std::fs::create_dir_all(home.contexts()).unwrap();
        home
    }

    fn contexts(&self) -> std::path::PathBuf {
        self.0.path().join(".config/nats/context")
    }

    fn context(&self, name: &str, content: &serde_json::Value) {
        std::fs::write(self.contexts().join(format!("{name}.json")), content.to_string()).unwrap();
    }

    fn select(&self, name: &str) {
        std::fs::write(self.0.path().join(".config/nats/context.txt"), name).unwrap();
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = command(arguments);
        command.env("HOME", self.path()).env_remove("XDG_CONFIG_HOME");
        command
    }

    fn run(&self, arguments: &[&str]) -> CommandOutput {
        run(&mut self.command(arguments), "")
    }
}

/// A server with a password, and a bridge with another prefix.
async fn stage() -> (NatsServer, BundledBridge, String) {
    let users = "users: [{ user: alice, password: 's@cret' }]";
    let server = NatsServer::start_configured(&format!("authorization: {{ {users} }}")).await;
    let nats = format!(
        "nats:\n  url: {}\n  user: alice\n  password: s@cret\n  subject_prefix: acme\n",
        server.url()
    );
    let demo = demo_settings();
    let (_, agents) = demo.split_once("agents:").unwrap();
    let settings = format!("{nats}agents:{agents}");
    let bridge = BundledBridge::start(&server, &settings).await;
    bridge.until_ready(&server.url(), &["--user", "alice", "--password", "s@cret", "--prefix", "acme"]).await;
    (server, bridge, settings)
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_find_nats_in_contexts_configurations_and_urls() {
    let (server, _bridge, settings) = stage().await;
    let home = Home::new();
    let url = server.url();
    home.context("mesh", &json!({"url": url, "user": "alice", "password": "s@cret", "description": "x"}));
    home.context("other", &json!({"url": "nats://127.0.0.1:1"}));
    let is_found = |output: &CommandOutput| {
        assert_eq!(output.code, 0, "{output:?}");
        assert!(output.out.contains("demo"), "{output:?}");
    };
    is_found(&home.run(&["agents", "--context", "mesh", "--prefix", "acme"]));
    home.select("mesh\n");
    is_found(&home.run(&["agents", "--prefix", "acme"]));
    // An argument wins over the selected context and over variables.
    let output = home.run(&["agents", "--context", "other"]);
    assert_eq!(output.code, 69, "{output:?}");
    assert!(output.err.contains("nats://127.0.0.1:1 (NATS context `other`)"), "{output:?}");
    let mut variable = home.command(&["agents", "--context", "mesh", "--prefix", "acme"]);
    is_found(&run(variable.env("NATS_URL", "nats://127.0.0.1:1"), ""));

    // The configuration names the prefix as well. An unset variable of an agent does not matter.
    let file = home.path().join("bridge.yaml");
    std::fs::write(&file, format!("{settings}\n    bearer_token: ${{NOT_SET_HERE}}\n")).unwrap();
    let file = file.to_str().unwrap();
    is_found(&home.run(&["agents", "--config", file]));
    let mut variable = home.command(&["agents"]);
    is_found(&run(variable.env("A2A_BRIDGE_CONFIG", file), ""));
    let skills = home.run(&["skills", "-c", file]);
    assert!(skills.err.contains(&format!("call demo.echo 'some text' --config {file}")), "{skills:?}");

    // The configuration in the current directory is the default, as for `run`; a URL replaces it.
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(file, folder.path().join("a2a-bridge.yaml")).unwrap();
    home.select("other");
    is_found(&run(home.command(&["agents"]).current_dir(&folder), ""));
    let output = run(home.command(&["agents", "--nats", "nats://127.0.0.1:1"]).current_dir(&folder), "");
    assert_eq!(output.code, 69, "{output:?}");
    std::fs::write(folder.path().join("a2a-bridge.yaml"), "nats: [").unwrap();
    let output = run(home.command(&["agents"]).current_dir(&folder), "");
    assert!(output.err.contains("(selected NATS context `other`)"), "{output:?}");

    // Credentials in a URL, which messages do not show.
    let with_password = url.replace("nats://", "nats://alice:s%40cret@");
    is_found(&home.run(&["agents", "--nats", &with_password, "--prefix", "acme"]));
    let output = home.run(&["agents", "--nats", &with_password, "--prefix", "none"]);
    assert!(!output.err.contains("cret") && output.err.contains("***@"), "{output:?}");
}

#[test]
fn contexts_that_cannot_be_used_are_explained() {
    let home = Home::new();
    let failed = |arguments: &[&str], code: i32, text: &str| {
        let output = home.run(arguments);
        assert_eq!(output.code, code, "{output:?}");
        assert!(output.err.contains(text), "{output:?}");
    };
    failed(&["agents", "--context", "mesh"], 64, "hint: `nats context add` creates one");
    home.context("production", &json!({"url": "nats://127.0.0.1:1", "nsc": "nsc://a/b/c"}));
    failed(&["agents", "--context", "prodution"], 64, "did you mean `production`?");
    failed(&["agents", "--context", "../production"], 64, "there is no NATS context");
    failed(&["agents", "--context", "production"], 64, "a2a-bridge does not support `nsc`");
    home.context("bad", &json!({"url": 7}));
    failed(&["agents", "--context", "bad"], 64, "cannot use the NATS context `bad`");
    home.context("creds", &json!({"url": "nats://127.0.0.1:1", "creds": "~/nowhere.creds"}));
    failed(&["agents", "--context", "creds"], 64, &home.path().join("nowhere.creds").display().to_string());
    home.select("gone");
    failed(&["agents"], 64, "there is no NATS context `gone`");
    // A URL needs no context.
    failed(&["agents", "--nats", "nats://127.0.0.1:1"], 69, "cannot connect to NATS at nats://127.0.0.1:1");
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_completed_and_nothing_is_printed_without_nats() {
    let (server, _bridge, _) = stage().await;
    let home = Home::new();
    home.context("mesh", &json!({"url": server.url(), "user": "alice", "password": "s@cret"}));
    let complete = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let output = home.run(&[&["__complete", "--"], words.as_slice()].concat());
        assert_eq!((output.code, output.err.as_str()), (0, ""), "{output:?}");
        output.out
    };
    let nats = "--context mesh --prefix acme";
    assert_eq!(complete(&format!("call {nats} demo.e")), "demo.echo\tEcho\n");
    assert_eq!(complete(&format!("agents {nats} show ")), "demo\tready\n");
    assert_eq!(complete(&format!("card {nats} demo ")), "");
    assert_eq!(complete("call --context m"), "mesh\t\n");
    assert_eq!(complete("call --nats nats://127.0.0.1:1 "), "");
    assert_eq!(complete("logs --nats nats://127.0.0.1:1 "), "");

    // As bash runs it.
    let script = home.run(&["completions", "bash"]).out;
    let file = home.path().join("completion.bash");
    std::fs::write(&file, script).unwrap();
    let program = crate::support::processes::program();
    let line = format!(
        "source '{}'; COMP_WORDS=('{}' call --context mesh --prefix acme demo.ec); COMP_CWORD=6; _a2a_bridge_names; echo \"${{COMPREPLY[@]}}\"; \
         COMP_WORDS=(a2a-bridge ag); COMP_CWORD=1; _a2a_bridge_names a2a-bridge ag a2a-bridge; echo \"${{COMPREPLY[@]}}\"",
        file.display(),
        program,
    );
    let mut bash = Command::new("bash");
    let output = run(bash.args(["-c", &line]).env("HOME", home.path()).env_remove("XDG_CONFIG_HOME"), "");
    assert_eq!(output.out, "demo.echo\nagents\n", "{output:?}");
}
