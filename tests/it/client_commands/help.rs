//! The help texts.

use crate::support::commands::{program, run};

/// The help of a command, and the subcommands it lists.
fn help(words: &[String]) -> (String, Vec<String>) {
    let mut command = program();
    command.args(words).arg("--help").env("COLUMNS", "100");
    let said = run(command, "");
    let listed = said.out.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.is_empty()).filter_map(|line| line.split_whitespace().next());
    let listed = listed.filter(|name| *name != "help").map(str::to_owned).collect();
    (format!("exit code {}\n\n{}{}", said.code, said.out, said.err), listed)
}

#[test]
fn every_help_text_matches_its_snapshot() {
    let mut commands = vec![Vec::new(), vec!["nonsense".to_owned()]];
    let mut seen = Vec::new();
    while let Some(words) = commands.pop() {
        let name = if words.is_empty() { "help".to_owned() } else { format!("help_{}", words.join("_")) };
        let (text, subcommands) = help(&words);
        insta::assert_snapshot!(name.as_str(), text);
        commands.extend(subcommands.into_iter().map(|word| [words.clone(), vec![word]].concat()));
        seen.push(name);
    }
    for name in ["help_task_watch", "help_agents_restart", "help_demo-agent"] {
        assert!(seen.iter().any(|one| one == name), "no {name} in {seen:?}");
    }
}
