//! The help texts.

use crate::support::commands::{command, run};

/// The help of a command, and the subcommands it lists.
fn help(words: &[String]) -> (String, Vec<String>) {
    let output = run(command(&[]).args(words).arg("--help").env("COLUMNS", "100"), "");
    let listed = output.out.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.is_empty()).filter_map(|line| line.split_whitespace().next());
    let listed = listed.filter(|name| *name != "help").map(str::to_owned).collect();
    (format!("exit code {}\n\n{}{}", output.code, output.out, output.err), listed)
}

#[test]
fn help_texts_match_their_snapshots() {
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
