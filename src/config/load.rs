//! From the file to the configuration. No other file uses the YAML crate.
//!
//! The crate returns events with positions. [`Tree`] builds a [`Node`] from them under limits (size, depth,
//! and how far aliases multiply), so that no file can make the bridge hang or run out of memory.

use std::collections::HashMap;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use serde_yaml::granit_parser::{Event, Options, Parser, ScalarStyle, ScanError, options};

use super::declare::{Scope, Setting as _};
use super::expand::{Env, expand};
use super::node::{KeyValue, Node, NodeValue, Scalar, resolve_keys};
use super::problems::{Finding, Problems};
use super::{Config, ConfigError, Environment, NatsConfig, redact, settings};

const MAX_BYTES: usize = 1 << 20;
const MAX_NODES: usize = 100_000;
/// All text, with the text that aliases stand for.
const MAX_TEXT: usize = 4 << 20;
const MAX_DEPTH: usize = 64;

/// Reads and checks a configuration file.
///
/// Relative paths in the file are relative to its directory; in the result they are absolute.
///
/// # Errors
///
/// The file cannot be read, or it has problems; the error lists all of them.
pub(crate) fn load_with(path: &Path, environment: &Environment) -> Result<Config, ConfigError> {
    load_sections(path, environment, Sections::All)
}

/// As [`load_with`], with the variables of this process.
pub(crate) fn load(path: &Path) -> Result<Config, ConfigError> {
    load_with(path, &Environment::default())
}

/// Reads how to connect to NATS. Other problems of the file do not matter, such as a variable of an agent that is set
/// for the bridge only.
pub(crate) fn load_nats(path: &Path) -> Result<NatsConfig, ConfigError> {
    load_sections(path, &Environment::default(), Sections::Nats).map(|config| config.nats)
}

/// The part of a file to read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sections {
    All,
    Nats,
}

fn load_sections(path: &Path, environment: &Environment, sections: Sections) -> Result<Config, ConfigError> {
    let unreadable = |source| ConfigError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(unreadable)?;
    file.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    let name = path.display().to_string();
    let env = |name: &str| environment.get(name);
    let mut directory = std::path::absolute(path).map_err(unreadable)?;
    directory.pop();
    let parse = |text: &str| parse_in(Some(&directory), text, &name, &env, sections);
    let mut config = match str::from_utf8(&bytes) {
        Ok(text) => parse(text)?,
        // A file cut at the limit may end inside a character; it is too long in any case.
        Err(_) if bytes.len() > MAX_BYTES => parse(&String::from_utf8_lossy(&bytes))?,
        Err(error) => return Err(not_text(&bytes, error.valid_up_to(), &name)),
    };
    config.file = Some(path.to_owned());
    Ok(config)
}

fn not_text(bytes: &[u8], valid: usize, file: &str) -> ConfigError {
    let text = String::from_utf8_lossy(bytes.get(..valid).unwrap_or_default());
    let mut problems = Problems::new(&text, None);
    problems.redact(vec![problems.line_range(valid)]);
    problems.add_with_hint(valid, "this is not UTF-8 text", "save the file in UTF-8");
    problems.into_error(file)
}

/// Checks the text of a configuration file. `file` is its name in messages, `env` gives the variables.
///
/// # Errors
///
/// All problems of the file together.
pub fn parse(text: &str, file: &str, env: Env<'_>) -> Result<Config, ConfigError> {
    parse_in(None, text, file, env, Sections::All)
}

/// As [`parse`]. Relative paths start at `directory`; without one, files that the settings name are not read.
fn parse_in(
    directory: Option<&Path>,
    text: &str,
    file: &str,
    env: Env<'_>,
    sections: Sections,
) -> Result<Config, ConfigError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut problems = Problems::new(text, directory);
    let keys = settings::keys();
    let config = tree(text, &keys, &mut problems).and_then(|mut root| {
        problems.redact(redact::secrets(&root, text, &keys));
        resolve_keys(&mut root, &mut problems);
        if sections == Sections::Nats {
            keep_nats(&mut root);
        }
        add_no_agents(&mut root);
        expand(&mut root, env, &mut problems);
        if root.is_null() {
            problems.add_with_hint(root.at.start, "the file is empty", "the minimum is `agents: []`");
            return None;
        }
        Config::read(&root, &mut Scope::root(&mut problems))
    });
    match config {
        Some(config) if problems.is_empty() => Ok(config),
        _ => Err(problems.into_error(file)),
    }
}

/// Removes everything but `nats`.
fn keep_nats(root: &mut Node) {
    if let NodeValue::Map(entries) = &mut root.value {
        entries.retain(|entry| entry.key.text() == Some("nats"));
        push_no_agents(root);
    }
}

/// A configuration for a gateway alone needs no `agents`.
fn add_no_agents(root: &mut Node) {
    if let NodeValue::Map(entries) = &root.value {
        let has = |key: &str| entries.iter().any(|entry| entry.key.text() == Some(key));
        if has("gateway") && !has("agents") {
            push_no_agents(root);
        }
    }
}

/// Adds `agents: []`.
fn push_no_agents(root: &mut Node) {
    if let NodeValue::Map(entries) = &mut root.value {
        let text = Scalar { text: "agents".to_owned(), plain: true, expanded: false };
        let key = Node { at: root.at.clone(), value: NodeValue::Scalar(text) };
        let value = Node { at: root.at.clone(), value: NodeValue::List(Vec::new()) };
        entries.push(KeyValue { key, value });
    }
}

/// Parses the text. Returns `None` if it is not valid YAML; no other problem is reported then.
fn tree(text: &str, keys: &[&str], problems: &mut Problems<'_>) -> Option<Node> {
    let mut tree = Tree::default();
    match tree.read(text) {
        Ok(()) => tree.problems.into_iter().for_each(|problem| problems.push(problem)),
        Err(problem) => {
            // Without a tree, only the text of the line can tell whether it holds a secret.
            let line = problems.line_range(problem.at);
            let shown = text.get(line.clone()).unwrap_or_default();
            let secret = redact::unparsed_line(shown, keys, &tree.open_keys());
            problems.redact(secret.iter().map(|at| line.start + at.start..line.start + at.end).collect());
            problems.push(problem);
            return None;
        }
    }
    let nothing = Scalar { text: String::new(), plain: true, expanded: false };
    Some(tree.root.unwrap_or(Node { at: 0..0, value: NodeValue::Scalar(nothing) }))
}

fn syntax_error(error: &ScanError, text: &str) -> Finding {
    let at = error.marker().byte_offset().unwrap_or_default().min(text.len());
    let before = text.get(..at).unwrap_or_default().rsplit('\n').next().unwrap_or_default();
    let after = text.get(at..).unwrap_or_default().split('\n').next().unwrap_or_default();
    let line = format!("{before}{after}");
    let hint = if line.contains("${") {
        "put quotes around a value with `${…}` in it"
    } else if line.contains('\t') {
        "indent with spaces, not with tabs"
    } else {
        "check indentation and quotes here and in the line before"
    };
    // An unexpected character may belong to a secret; all other messages are constant.
    let message = error.info();
    let message = message.split(": `").next().unwrap_or_default();
    Finding { at, message: format!("this is not valid YAML: {message}"), hint: Some(hint.into()) }
}

/// The tree of nodes, built from events.
#[derive(Default)]
struct Tree {
    root: Option<Node>,
    open: Vec<Open>,
    anchors: HashMap<usize, (Node, Size)>,
    size: Size,
    documents: usize,
    problems: Vec<Finding>,
}

#[derive(Clone, Copy, Default)]
struct Size {
    nodes: usize,
    text: usize,
}

/// A list or mapping whose end has not been read yet.
struct Open {
    start: usize,
    anchor: usize,
    before: Size,
    key: Option<Node>,
    value: NodeValue,
}

impl Tree {
    fn read(&mut self, text: &str) -> Result<(), Finding> {
        if text.len() > MAX_BYTES {
            return Err(Finding::new(0, "the file is larger than 1 MiB"));
        }
        let options: Options = options! { emit_unresolved_aliases: true, emit_comments: false };
        for event in Parser::new_from_str_with_options(text, options) {
            let (event, span) = event.map_err(|error| syntax_error(&error, text))?;
            self.add(event, span.byte_range().unwrap_or_default(), text)?;
        }
        Ok(())
    }

    fn add(&mut self, event: Event<'_>, at: Range<usize>, text: &str) -> Result<(), Finding> {
        if event.tag().is_some() {
            self.problems.push(Finding::new(at.start, "tags (`!…`) are not supported"));
        }
        match event {
            Event::DocumentStart(..) => {
                self.documents += 1;
                if self.documents > 1 {
                    return Err(Finding::new(at.start, "expected one document; a second one starts here"));
                }
                Ok(())
            }
            Event::Scalar(text, style, anchor, _) => {
                let before = self.size;
                self.size.text += text.len();
                let plain = style == ScalarStyle::Plain;
                let scalar = Scalar { text: text.into_owned(), plain, expanded: false };
                self.node(Node { at, value: NodeValue::Scalar(scalar) }, anchor, before)
            }
            Event::SequenceStart(_, anchor, _) => self.open(at.start, anchor, NodeValue::List(Vec::new())),
            Event::MappingStart(_, anchor, _) => self.open(at.start, anchor, NodeValue::Map(Vec::new())),
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(Open { start, anchor, before, value, .. }) = self.open.pop() else {
                    return Ok(());
                };
                // To the parser, a block ends where the next token starts.
                let end = text.get(start..at.end).map_or(at.end, |block| start + block.trim_end().len());
                self.node(Node { at: start..end, value }, anchor, before)
            }
            Event::Alias(anchor) => self.alias(anchor, at),
            Event::UnresolvedAlias(_) => {
                self.bad_alias(at, "this alias (`*…`) has no anchor (`&…`) before it")
            }
            _ => Ok(()),
        }
    }

    fn open(&mut self, start: usize, anchor: usize, value: NodeValue) -> Result<(), Finding> {
        check_depth(start, self.open.len() + 1)?;
        self.open.push(Open { start, anchor, before: self.size, key: None, value });
        Ok(())
    }

    fn alias(&mut self, anchor: usize, at: Range<usize>) -> Result<(), Finding> {
        let Some((node, size)) = self.anchors.get(&anchor) else {
            return self.bad_alias(at, "this alias (`*…`) is inside its own anchor (`&…`)");
        };
        let (node, size, before) = (node.clone(), *size, self.size);
        self.grow(size, at.start, "aliases (`*…`) make this file too large")?;
        check_depth(at.start, self.open.len() + node.height())?;
        self.node(node, 0, before)
    }

    fn bad_alias(&mut self, at: Range<usize>, message: &str) -> Result<(), Finding> {
        self.problems.push(Finding::new(at.start, message));
        self.node(Node { at, value: NodeValue::Reported }, 0, self.size)
    }

    fn grow(&mut self, more: Size, at: usize, message: &str) -> Result<(), Finding> {
        self.size.nodes += more.nodes;
        self.size.text += more.text;
        let is_too_large = self.size.nodes > MAX_NODES || self.size.text > MAX_TEXT;
        if is_too_large { Err(Finding::new(at, message)) } else { Ok(()) }
    }

    /// Adds a finished node to the list or mapping around it.
    fn node(&mut self, node: Node, anchor: usize, before: Size) -> Result<(), Finding> {
        let one = Size { nodes: 1, text: 0 };
        self.grow(one, node.at.start, "the file has more than 100000 values")?;
        if anchor > 0 {
            let size = Size { nodes: self.size.nodes - before.nodes, text: self.size.text - before.text };
            // An anchored node is kept twice, so it counts twice.
            self.grow(size, node.at.start, "anchors (`&…`) make this file too large")?;
            self.anchors.insert(anchor, (node.clone(), size));
        }
        match self.open.last_mut() {
            None => self.root = Some(node),
            Some(Open { value: NodeValue::List(items), .. }) => items.push(node),
            Some(Open { value: NodeValue::Map(entries), key, .. }) => match key.take() {
                None => *key = Some(node),
                Some(key) => entries.push(KeyValue { key, value: node }),
            },
            Some(Open { value: NodeValue::Scalar(_) | NodeValue::Reported, .. }) => {}
        }
        Ok(())
    }

    /// The keys whose values are being read, outermost first.
    fn open_keys(&self) -> Vec<&str> {
        self.open.iter().filter_map(|open| open.key.as_ref()?.text()).collect()
    }
}

fn check_depth(at: usize, depth: usize) -> Result<(), Finding> {
    let message = "lists and mappings are nested more than 64 deep";
    if depth > MAX_DEPTH { Err(Finding::new(at, message)) } else { Ok(()) }
}
