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
use super::node::{Entry, Node, Scalar, Value, settle};
use super::problem::Report;
use super::{Config, ConfigError, mask, read, schema};

const MOST_BYTES: usize = 1 << 20;
const MOST_NODES: usize = 100_000;
/// Text that aliases stand for, all together.
const MOST_TEXT: usize = 4 << 20;
const DEEPEST: usize = 64;

/// Reads and checks a settings file, with the variables of this process.
///
/// Relative paths in the file are relative to its folder; in the result they are absolute.
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
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = std::path::absolute(folder).map_err(unreadable)?;
    let parse = |text: &str| parse_in(Some(&folder), text, &name, &env);
    let mut config = match str::from_utf8(&bytes) {
        Ok(text) => parse(text)?,
        // A file cut at the limit may end inside a letter; it is too long either way.
        Err(_) if bytes.len() > MOST_BYTES => parse(&String::from_utf8_lossy(&bytes))?,
        Err(error) => return Err(not_text(&bytes, error.valid_up_to(), &name)),
    };
    config.resolve_paths(&folder);
    config.file = Some(path.to_owned());
    Ok(config)
}

fn not_text(bytes: &[u8], valid: usize, file: &str) -> ConfigError {
    let text = String::from_utf8_lossy(bytes.get(..valid).unwrap_or_default());
    let mut report = Report::new(&text);
    report.cover(vec![report.line_range(valid)]);
    report.add_with_hint(valid, "this is not UTF-8 text", "save the file in UTF-8");
    ConfigError::Problems(report.into_problems(file))
}

/// Checks the text of a settings file. `file` is its name in messages, `env` gives the variables.
///
/// # Errors
///
/// All problems of the text at once.
pub fn parse(text: &str, file: &str, env: Env<'_>) -> Result<Config, ConfigError> {
    parse_in(None, text, file, env)
}

/// As [`parse`]; files that the settings name are read if there is a folder where they start.
fn parse_in(folder: Option<&Path>, text: &str, file: &str, env: Env<'_>) -> Result<Config, ConfigError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut report = Report::new(text).in_folder(folder);
    let config = tree(text, &mut report).and_then(|mut root| {
        report.cover(mask::secrets(&root, text, schema::keys()));
        settle(&mut root, &mut report);
        expand(&mut root, env, &mut report);
        read::config(&root, &mut report)
    });
    match config {
        Some(config) if report.is_empty() => Ok(config),
        _ => Err(ConfigError::Problems(report.into_problems(file))),
    }
}

/// Nothing, if the text is no YAML at all; then that is the only problem.
fn tree(text: &str, report: &mut Report<'_>) -> Option<Node> {
    let mut tree = Tree::default();
    if text.len() > MOST_BYTES {
        tree.give_up(Stop::new(0, "the file is larger than 1 MiB"), report);
        return None;
    }
    let options: Options = options! { emit_unresolved_aliases: true, emit_comments: false };
    for event in Parser::new_from_str_with_options(text, options) {
        let step = match event {
            Ok((event, span)) => tree.add(event, &bytes(span), report),
            Err(error) => Err(Stop::syntax(&error, text)),
        };
        if let Err(stop) = step {
            tree.give_up(stop, report);
            return None;
        }
    }
    for (at, message) in tree.problems {
        report.add(at, message);
    }
    let nothing = Scalar { text: String::new(), plain: true, expanded: false };
    Some(tree.root.unwrap_or(Node { at: 0..0, value: Value::Scalar(nothing) }))
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
    value: Value,
}

impl Tree {
    fn add(&mut self, event: Event<'_>, at: &Range<usize>, report: &Report<'_>) -> Result<(), Stop> {
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
                let value = Value::Scalar(Scalar { text, plain, expanded: false });
                self.node(Node { at: at.clone(), value }, anchor, before)
            }
            Event::SequenceStart(_, anchor, _) => self.open(at.start, anchor, Value::List(Vec::new())),
            Event::MappingStart(_, anchor, _) => self.open(at.start, anchor, Value::Map(Vec::new())),
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(open) = self.open.pop() else {
                    return Ok(());
                };
                let end = trimmed_end(report.text(), open.start, at.end);
                let node = Node { at: open.start..end, value: open.value };
                self.node(node, open.anchor, open.before)
            }
            Event::Alias(anchor) => self.alias(anchor, at),
            Event::UnresolvedAlias(_) => {
                self.problems.push((at.start, "this alias (`*…`) has no anchor (`&…`) before it"));
                self.node(Node { at: at.clone(), value: Value::Reported }, 0, self.size)
            }
            _ => Ok(()),
        }
    }

    fn open(&mut self, start: usize, anchor: usize, value: Value) -> Result<(), Stop> {
        if self.open.len() >= DEEPEST {
            return Err(Stop::new(start, "lists and mappings are nested more than 64 deep"));
        }
        self.open.push(Open { start, anchor, before: self.size, key: None, value });
        Ok(())
    }

    fn alias(&mut self, anchor: usize, at: &Range<usize>) -> Result<(), Stop> {
        let Some((node, size)) = self.anchors.get(&anchor) else {
            self.problems.push((at.start, "this alias (`*…`) stands inside its own anchor (`&…`)"));
            return self.node(Node { at: at.clone(), value: Value::Reported }, 0, self.size);
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
            Some(Open { value: Value::List(items), .. }) => items.push(node),
            Some(Open { value: Value::Map(entries), key, .. }) => match key.take() {
                None => *key = Some(node),
                Some(key) => entries.push(Entry { key, value: node }),
            },
            Some(Open { value: Value::Scalar(_) | Value::Reported, .. }) => {}
        }
        Ok(())
    }

    /// Reports the reason; without a tree, what may be shown of the line is decided by its looks.
    fn give_up(&self, stop: Stop, report: &mut Report<'_>) {
        let line = report.line_range(stop.at);
        let shown = report.text().get(line.clone()).unwrap_or_default();
        let mask = mask::unparsed_line(shown, schema::keys(), &self.open_keys());
        report.cover(mask.into_iter().map(|mask| line.start + mask.start..line.start + mask.end).collect());
        match stop.hint {
            Some(hint) => report.add_with_hint(stop.at, stop.message, hint),
            None => report.add(stop.at, stop.message),
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
