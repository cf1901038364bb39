//! The help texts, as users see them.

use crate::support::cli::{program, run};

#[test]
fn every_help_text_is_as_it_was_meant() {
    let commands: [&[&str]; 18] = [
        &[],
        &["run"],
        &["check"],
        &["init"],
        &["agents"],
        &["skills"],
        &["call"],
        &["task"],
        &["task", "get"],
        &["task", "watch"],
        &["task", "cancel"],
        &["card"],
        &["logs"],
        &["schema"],
        &["plugin"],
        &["completions"],
        &["demo-agent"],
        &["nonsense"],
    ];
    for words in commands {
        let mut command = program();
        command.args(words).arg("--help").env("COLUMNS", "100");
        let said = run(command, "");
        let name = if words.is_empty() { "help".to_owned() } else { format!("help_{}", words.join("_")) };
        insta::assert_snapshot!(name, format!("exit code {}\n\n{}{}", said.code, said.out, said.err));
    }
}
