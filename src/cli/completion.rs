//! Shell completion: a script from the definitions of the commands, and the names of agents, skills and contexts, for
//! which the script runs `a2a-bridge __complete`.

use std::process::ExitCode;
use std::time::Duration;

use clap::{ArgAction, Command, FromArgMatches as _};
use clap_complete::Shell;

use super::discover::{Discovery, discover};
use super::nats_args::NatsArgs;
use super::output::{one_line, print, println};
use super::{CliResult, nats_context};
use crate::text::shorten;

/// The user waits after a key press, so a slow or unreachable server must not matter.
const TIMEOUT: Duration = Duration::from_millis(1200);
/// Maximum number of candidates.
const MAX_CANDIDATES: usize = 1000;
const MAX_DESCRIPTION: usize = 60;

/// Tries the names first, then everything that the static script knows.
const BASH: &str = r#"
_a2a_bridge_names() {
    local value text candidates=()
    while IFS=$'\t' read -r value text; do
        candidates+=("$value")
    done < <("${COMP_WORDS[0]}" __complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    if [ "${#candidates[@]}" -gt 0 ]; then
        COMPREPLY=($(compgen -W "${candidates[*]}" -- "${COMP_WORDS[COMP_CWORD]}"))
    else
        _a2a__bridge "$@"
    fi
}
complete -F _a2a_bridge_names -o bashdefault -o default a2a-bridge"#;
const ZSH: &str = r#"_a2a-bridge() {
    local -a candidates
    local value text
    while IFS=$'\t' read -r value text; do
        candidates+=("$value:$text")
    done < <($words[1] __complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)
    if (( $#candidates )); then
        _describe name candidates
    else
        _a2a-bridge_static "$@"
    fi
}

_a2a-bridge_static() {"#;
const FISH: &str = "complete -c a2a-bridge -f -n '__fish_seen_subcommand_from agents call card logs skills task top' -a '(a2a-bridge __complete -- (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'";

/// Prints the script for a shell.
pub(super) fn print_script(shell: Shell, mut command: Command) -> CliResult {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "a2a-bridge", &mut script);
    let script = String::from_utf8_lossy(&script);
    let script = script.trim_end();
    match shell {
        Shell::Bash => println(&format!("{script}\n{BASH}")),
        // The file has the name of its function, which zsh loads when it needs it.
        Shell::Zsh => println(&script.replacen("\n_a2a-bridge() {", &format!("\n{ZSH}"), 1)),
        Shell::Fish => println(&format!("{script}\n{FISH}")),
        _ => println(script),
    }
}

/// The words to complete, if a script asks for it: those after the name of the program, of which the last one is
/// incomplete. Not a command, because the scripts would list it.
pub(super) fn requested_words() -> Option<Vec<String>> {
    let mut arguments = std::env::args_os().skip(1);
    let is_request = arguments.next()? == "__complete" && arguments.next()? == "--";
    is_request.then(|| arguments.map(|word| word.to_string_lossy().into_owned()).collect())
}

/// Prints the candidates for the last word, one per line with a description. Without any, the shell completes the word
/// itself. No problem is reported: the user has asked for nothing.
pub(super) async fn run(words: Vec<String>, command: Command) -> CliResult {
    // Building passes settings on to subcommands; `nats_args` sets another one first.
    let mut built = command.clone();
    built.build();
    let words = joined(words);
    let candidates = async {
        let (last, before) = words.split_last()?;
        let wanted = wanted(&built, before).filter(|_| !last.starts_with('-'))?;
        if wanted == Names::Contexts {
            return Some(nats_context::names().into_iter().map(|name| (name, String::new())).collect());
        }
        let mesh = nats_args(command, before)?.connect().await.ok()?;
        Some(names(wanted, &discover(&mesh).await.ok()?))
    };
    let candidates: Vec<_> =
        tokio::time::timeout(TIMEOUT, candidates).await.ok().flatten().unwrap_or_default();
    let prefix = words.last().map(String::as_str).unwrap_or_default();
    let matching = candidates.iter().filter(|(name, _)| name.starts_with(prefix) && is_plain(name));
    for (name, description) in matching.take(MAX_CANDIDATES) {
        print(&format!("{name}\t{}\n", shorten(&one_line(description), MAX_DESCRIPTION)))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The kinds of names that a word can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Names {
    Agents,
    Skills,
    Contexts,
}

/// What the word after these words is.
fn wanted(root: &Command, words: &[String]) -> Option<Names> {
    let (mut command, mut path, mut positionals) = (root, Vec::new(), 0);
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if word.starts_with('-') {
            if takes_value(command, word) && words.next().is_none() {
                return (word == "--context").then_some(Names::Contexts);
            }
        } else if let Some(subcommand) = command.find_subcommand(word).filter(|_| positionals == 0) {
            command = subcommand;
            path.push(subcommand.get_name());
        } else {
            positionals += 1;
        }
    }
    match (path.as_slice(), positionals) {
        (["call"], 0) => Some(Names::Skills),
        (["logs"] | ["agents", "show" | "start" | "stop" | "restart"], _) => Some(Names::Agents),
        (["skills" | "card" | "top"], 0) => Some(Names::Agents),
        (["task", "list" | "get" | "watch" | "cancel"], 0) => Some(Names::Agents),
        _ => None,
    }
}

/// Whether the next word is the value of this option.
fn takes_value(command: &Command, option: &str) -> bool {
    let argument = command.get_arguments().find(|argument| match option.strip_prefix("--") {
        Some(long) => argument.get_long() == Some(long),
        None => argument
            .get_short()
            .is_some_and(|short| option.strip_prefix('-') == Some(short.to_string().as_str())),
    });
    argument.is_some_and(|argument| matches!(argument.get_action(), ArgAction::Set | ArgAction::Append))
}

/// The options for NATS among these words.
fn nats_args(command: Command, words: &[String]) -> Option<NatsArgs> {
    let words = std::iter::once("a2a-bridge").chain(words.iter().map(String::as_str));
    let mut matches = command.ignore_errors(true).try_get_matches_from(words).ok()?;
    while let Some((_, subcommand)) = matches.remove_subcommand() {
        matches = subcommand;
    }
    NatsArgs::from_arg_matches(&matches).ok()
}

fn names(wanted: Names, discovery: &Discovery) -> Vec<(String, String)> {
    // Replicas are next to each other.
    let mut names: Vec<_> = match wanted {
        Names::Skills => {
            let skills = discovery
                .agents
                .iter()
                .flat_map(|agent| agent.skills.iter().map(move |skill| (agent, skill)));
            skills
                .map(|(agent, skill)| (format!("{}.{}", agent.token, skill.action), skill.name.clone()))
                .collect()
        }
        Names::Agents | Names::Contexts => {
            discovery.agents.iter().map(|agent| (agent.agent.clone(), agent.state.clone())).collect()
        }
    };
    names.sort();
    names.dedup_by(|one, two| one.0 == two.0);
    names
}

/// Whether a shell takes the name as it is.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
}

/// Joins what bash has split at colons and equal signs, such as a URL.
fn joined(words: Vec<String>) -> Vec<String> {
    let mut joined: Vec<String> = Vec::new();
    let mut continues = false;
    for word in words {
        let is_break = matches!(word.as_str(), ":" | "=");
        match joined.last_mut() {
            Some(last) if is_break || continues => last.push_str(&word),
            _ => joined.push(word),
        }
        continues = is_break;
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn the_words_before_say_what_a_word_is() {
        let mut command = super::super::command();
        command.build();
        for (line, names) in [
            ("call", Some(Names::Skills)),
            ("call --stream -p a=b", Some(Names::Skills)),
            ("call --nats nats://h --session s", Some(Names::Skills)),
            ("call demo.echo", None),
            ("call --session", None),
            ("agents show", Some(Names::Agents)),
            ("agents restart one", Some(Names::Agents)),
            ("agents", None),
            ("logs one", Some(Names::Agents)),
            ("logs --lines 5", Some(Names::Agents)),
            ("task watch", Some(Names::Agents)),
            ("task watch demo", None),
            ("top", Some(Names::Agents)),
            ("agents --context", Some(Names::Contexts)),
            ("run", None),
            ("", None),
        ] {
            assert_eq!(wanted(&command, &words(line)), names, "{line}");
        }
    }

    #[test]
    fn a_url_that_bash_has_split_is_joined() {
        let split = words("call --nats nats : //h : 4222 --prefix = x demo");
        assert_eq!(joined(split), ["call", "--nats", "nats://h:4222", "--prefix=x", "demo"]);
    }
}
