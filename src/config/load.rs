//! File -> tree -> settings. The only file that names the YAML crate.
//!
//! The crate gives events with places; [`Tree`] makes them a [`Node`] under limits, so no file can
//! make the bridge hang or run out of memory: size, depth, and how far aliases multiply.

use std::collections::HashMap;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use serde_yaml::granit_parser::{Event, Options, Parser, ScalarStyle, ScanError, Span, options};

use super::expand::{Env, expand};
use super::node::{KeyValue, Node, NodeValue, Scalar, settle};
use super::problems::Problems;
use super::setting::{Scope, Setting as _};
use super::{Config, ConfigError, mask, settings};

const MOST_BYTES: usize = 1 << 20;
const MOST_NODES: usize = 100_000;
/// Text that aliases stand for, all together.
const MOST_TEXT: usize = 4 << 20;
const DEEPEST: usize = 64;

/// Reads and checks a settings file, with the variables of this process.
///
/// Relative paths in the file are relative to its directory; in the result they are absolute.
///
/// # Errors
///
/// The file cannot be read, or it has problems: all of them at once.
pub(crate) fn load(path: &Path) -> Result<Config, ConfigError> {
    let unreadable = |source| ConfigError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(unreadable)?;
    file.take(MOST_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    let name = path.display().to_string();
    let env = |name: &str| std::env::var(name).ok();
    let directory =
        path.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = std::path::absolute(directory).map_err(unreadable)?;
    let parse = |text: &str| parse_in(Some(&directory), text, &name, &env);
    let mut config = match str::from_utf8(&bytes) {
        Ok(text) => parse(text)?,
        // A file cut at the limit may end inside a letter; it is too long either way.
        Err(_) if bytes.len() > MOST_BYTES => parse(&String::from_utf8_lossy(&bytes))?,
        Err(error) => return Err(not_text(&bytes, error.valid_up_to(), &name)),
    };
    config.file = Some(path.to_owned());
    Ok(config)
}

fn not_text(bytes: &[u8], valid: usize, file: &str) -> ConfigError {
    let text = String::from_utf8_lossy(bytes.get(..valid).unwrap_or_default());
    let mut problems = Problems::new(&text, None);
    problems.cover(vec![problems.line_range(valid)]);
    problems.add_with_hint(valid, "this is not UTF-8 text", "save the file in UTF-8");
    ConfigError::Problems(problems.into_problems(file))
}

/// Checks the text of a settings file. `file` is its name in messages, `env` gives the variables.
///
/// # Errors
///
/// All problems of the text at once.
pub fn parse(text: &str, file: &str, env: Env<'_>) -> Result<Config, ConfigError> {
    parse_in(None, text, file, env)
}

/// As [`parse`]; files that the settings name are read if there is a directory where they start.
fn parse_in(directory: Option<&Path>, text: &str, file: &str, env: Env<'_>) -> Result<Config, ConfigError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut problems = Problems::new(text, directory);
    let config = tree(text, &mut problems).and_then(|mut root| {
        problems.cover(mask::secrets(&root, text, &settings::keys()));
        settle(&mut root, &mut problems);
        expand(&mut root, env, &mut problems);
        config(&root, &mut problems)
    });
    match config {
        Some(config) if problems.is_empty() => Ok(config),
        _ => Err(ConfigError::Problems(problems.into_problems(file))),
    }
}

fn config(root: &Node, problems: &mut Problems<'_>) -> Option<Config> {
    if root.is_null() {
        problems.add_with_hint(root.at.start, "the file is empty", "the minimum is `agents: []`");
        return None;
    }
    Config::read(root, &mut Scope::root(problems))
}

/// Nothing, if the text is no YAML at all; then that is the only problem.
fn tree(text: &str, problems: &mut Problems<'_>) -> Option<Node> {
    let mut tree = Tree::default();
    if text.len() > MOST_BYTES {
        tree.give_up(Stop::new(0, "the file is larger than 1 MiB"), problems);
        return None;
    }
    let options: Options = options! { emit_unresolved_aliases: true, emit_comments: false };
    for event in Parser::new_from_str_with_options(text, options) {
        let step = match event {
            Ok((event, span)) => tree.add(event, &bytes(span), problems),
            Err(error) => Err(Stop::syntax(&error, text)),
        };
        if let Err(stop) = step {
            tree.give_up(stop, problems);
            return None;
        }
    }
    for (at, message) in tree.problems {
        problems.add(at, message);
    }
    let nothing = Scalar { text: String::new(), plain: true, expanded: false };
    Some(tree.root.unwrap_or(Node { at: 0..0, value: NodeValue::Scalar(nothing) }))
}

fn bytes(span: Span) -> Range<usize> {
    span.byte_range().unwrap_or_default()
}

/// Why the file is given up.
struct Stop {
    at: usize,
    message: String,
    hint: Option<&'static str>,
}

impl Stop {
    fn new(at: usize, message: &str) -> Self {
        Self { at, message: message.into(), hint: None }
    }

    fn syntax(error: &ScanError, text: &str) -> Self {
        let at = error.marker().byte_offset().unwrap_or_default().min(text.len());
        let before = text.get(..at).unwrap_or_default().rsplit('\n').next().unwrap_or_default();
        let after = text.get(at..).unwrap_or_default().split('\n').next().unwrap_or_default();
        let line = format!("{before}{after}");
        let hint = if line.contains("${") {
            Some("put quotes around a value with `${…}` in it")
        } else if line.contains('\t') {
            Some("indent with spaces, not with tabs")
        } else {
            Some("check indentation and quotes here and in the line before")
        };
        // An unexpected character may belong to a secret; all other texts are fixed ones.
        let message = error.info();
        let message = message.split(": `").next().unwrap_or_default();
        Self { at, message: format!("this is not valid YAML: {message}"), hint }
    }
}

/// Events becoming a tree.
#[derive(Default)]
struct Tree {
    root: Option<Node>,
    open: Vec<Open>,
    anchors: HashMap<usize, (Node, Size)>,
    size: Size,
    documents: usize,
    problems: Vec<(usize, &'static str)>,
}

#[derive(Clone, Copy, Default)]
struct Size {
    nodes: usize,
    text: usize,
}

/// A list or mapping whose end was not seen yet.
struct Open {
    start: usize,
    anchor: usize,
    before: Size,
    key: Option<Node>,
    value: NodeValue,
}

impl Tree {
    fn add(&mut self, event: Event<'_>, at: &Range<usize>, problems: &Problems<'_>) -> Result<(), Stop> {
        if event.tag().is_some() {
            self.problems.push((at.start, "tags (`!…`) are not supported"));
        }
        match event {
            Event::DocumentStart(..) => {
                self.documents += 1;
                if self.documents > 1 {
                    return Err(Stop::new(at.start, "expected one document; a second one starts here"));
                }
                Ok(())
            }
            Event::Scalar(text, style, anchor, _) => {
                let plain = style == ScalarStyle::Plain;
                let before = self.size;
                self.size.text += text.len();
                let text = text.into_owned();
                let value = NodeValue::Scalar(Scalar { text, plain, expanded: false });
                self.node(Node { at: at.clone(), value }, anchor, before)
            }
            Event::SequenceStart(_, anchor, _) => self.open(at.start, anchor, NodeValue::List(Vec::new())),
            Event::MappingStart(_, anchor, _) => self.open(at.start, anchor, NodeValue::Map(Vec::new())),
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(open) = self.open.pop() else {
                    return Ok(());
                };
                let end = trimmed_end(problems.text, open.start, at.end);
                let node = Node { at: open.start..end, value: open.value };
                self.node(node, open.anchor, open.before)
            }
            Event::Alias(anchor) => self.alias(anchor, at),
            Event::UnresolvedAlias(_) => {
                self.problems.push((at.start, "this alias (`*…`) has no anchor (`&…`) before it"));
                self.node(Node { at: at.clone(), value: NodeValue::Reported }, 0, self.size)
            }
            _ => Ok(()),
        }
    }

    fn open(&mut self, start: usize, anchor: usize, value: NodeValue) -> Result<(), Stop> {
        if self.open.len() >= DEEPEST {
            return Err(Stop::new(start, "lists and mappings are nested more than 64 deep"));
        }
        self.open.push(Open { start, anchor, before: self.size, key: None, value });
        Ok(())
    }

    fn alias(&mut self, anchor: usize, at: &Range<usize>) -> Result<(), Stop> {
        let Some((node, size)) = self.anchors.get(&anchor) else {
            self.problems.push((at.start, "this alias (`*…`) stands inside its own anchor (`&…`)"));
            return self.node(Node { at: at.clone(), value: NodeValue::Reported }, 0, self.size);
        };
        let before = self.size;
        self.size.nodes += size.nodes;
        self.size.text += size.text;
        if self.size.nodes > MOST_NODES || self.size.text > MOST_TEXT {
            return Err(Stop::new(at.start, "aliases (`*…`) make this file too large"));
        }
        if self.open.len() + node.height() > DEEPEST {
            return Err(Stop::new(at.start, "lists and mappings are nested more than 64 deep"));
        }
        let node = node.clone();
        self.node(node, 0, before)
    }

    /// Puts a finished node where it belongs.
    fn node(&mut self, node: Node, anchor: usize, before: Size) -> Result<(), Stop> {
        self.size.nodes += 1;
        if self.size.nodes > MOST_NODES {
            return Err(Stop::new(node.at.start, "the file has more than 100000 values"));
        }
        if anchor > 0 {
            let size = Size { nodes: self.size.nodes - before.nodes, text: self.size.text - before.text };
            // An anchored node is kept twice, and so it counts twice.
            self.size.nodes += size.nodes;
            self.size.text += size.text;
            if self.size.nodes > MOST_NODES || self.size.text > MOST_TEXT {
                return Err(Stop::new(node.at.start, "anchors (`&…`) make this file too large"));
            }
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

    /// Reports the reason; without a tree, what may be shown of the line is decided by its looks.
    fn give_up(&self, stop: Stop, problems: &mut Problems<'_>) {
        let line = problems.line_range(stop.at);
        let shown = problems.text.get(line.clone()).unwrap_or_default();
        let mask = mask::unparsed_line(shown, &settings::keys(), &self.open_keys());
        problems.cover(mask.into_iter().map(|mask| line.start + mask.start..line.start + mask.end).collect());
        match stop.hint {
            Some(hint) => problems.add_with_hint(stop.at, stop.message, hint),
            None => problems.add(stop.at, stop.message),
        }
    }

    /// The keys whose values are being read, outermost first.
    fn open_keys(&self) -> Vec<String> {
        let keys = self.open.iter().filter_map(|open| open.key.as_ref());
        keys.filter_map(|key| key.text().map(str::to_owned)).collect()
    }
}

/// A block ends, to the parser, where the next thing starts; take off the space between.
fn trimmed_end(text: &str, start: usize, end: usize) -> usize {
    text.get(start..end).map_or(end, |block| start + block.trim_end().len())
}
