//! What a setting is: [`Setting`] reads a value from the file and describes it as JSON schema, and
//! [`settings!`] declares a mapping of settings.
//!
//! Reading continues after a problem, so that one pass finds them all. A reader that returns nothing
//! has reported why; the configuration is used only if nothing was reported.

use serde_json::{Map, Value, json};

use super::node::{KeyValue, Node, NodeValue};
use super::problems::Problems;

/// Maximum number of keys in a hint.
const MAX_LISTED_KEYS: usize = 12;

/// A type of value that a setting can have.
///
/// The implementing type is what [`settings!`] names after a key. It is the Rust type of the value
/// (`Duration`, a struct of settings) or a marker for one of several kinds of text.
pub(crate) trait Setting {
    type Value;
    /// What users call it, in messages and in the settings reference: `a duration`.
    const TYPE: &'static str;
    /// The settings within, if this is a mapping (or a list of mappings) of settings.
    const FIELDS: Option<fn() -> Vec<Field>> = None;

    /// Reads a value that is not null. `scope` is the mapping around it.
    fn read(node: &Node, scope: &mut Scope<'_, '_>) -> Option<Self::Value>;

    /// The value of a key that is absent and has no default; nothing if the key is required.
    fn absent() -> Option<Self::Value> {
        None
    }

    /// The JSON schema of the value.
    fn schema() -> Value;
}

impl<K: Setting> Setting for Option<K> {
    type Value = Option<K::Value>;
    const TYPE: &'static str = K::TYPE;
    const FIELDS: Option<fn() -> Vec<Field>> = K::FIELDS;

    fn read(node: &Node, scope: &mut Scope<'_, '_>) -> Option<Self::Value> {
        K::read(node, scope).map(Some)
    }

    fn absent() -> Option<Self::Value> {
        Some(None)
    }

    fn schema() -> Value {
        K::schema()
    }
}

/// The declaration of one key.
pub(crate) struct Field {
    /// The key, then its aliases.
    pub(super) names: &'static [&'static str],
    #[cfg(test)]
    pub(super) type_name: &'static str,
    pub(super) doc: String,
    pub(super) default: Option<Value>,
    pub(super) example: Option<Value>,
    /// Whether the key may be absent even if it has no default.
    pub(super) is_optional: bool,
    pub(super) schema: fn() -> Value,
    pub(super) fields: Option<fn() -> Vec<Self>>,
}

impl Field {
    pub(super) fn is_required(&self) -> bool {
        self.default.is_none() && !self.is_optional
    }

    /// The JSON schema of the key's value. A key that is not required may be null.
    pub(super) fn property(&self) -> Value {
        let mut schema = (self.schema)();
        if !self.is_required()
            && let Some(schema) = schema.as_object_mut()
        {
            let types = match schema.remove("type") {
                Some(Value::Array(types)) => types,
                one => one.into_iter().collect(),
            };
            schema.insert("type".into(), types.into_iter().chain(["null".into()]).collect());
            if let Some(Value::Array(branches)) = schema.get_mut("anyOf") {
                branches.push(json!({ "type": "null" }));
            }
        }
        let doc = Some(Value::from(self.doc.as_str())).filter(|_| !self.doc.is_empty());
        let examples = self.example.as_ref().map(|example| json!([example]));
        let more = [("description", doc), ("default", self.default.clone()), ("examples", examples)];
        more.into_iter().fold(schema, |schema, (keyword, value)| match value {
            Some(value) => merged(schema, json!({ keyword: value })),
            None => schema,
        })
    }
}

/// A JSON schema with more keywords.
pub(super) fn merged(mut schema: Value, more: Value) -> Value {
    if let (Some(schema), Value::Object(more)) = (schema.as_object_mut(), more) {
        schema.extend(more);
    }
    schema
}

/// The JSON schema of a mapping of settings.
pub(super) fn object_schema(doc: &str, fields: &[Field]) -> Value {
    let mut properties = Map::new();
    let mut aliases = Map::new();
    let mut required = Vec::new();
    let mut rules = Vec::new();
    for field in fields {
        let [key, others @ ..] = field.names else {
            continue;
        };
        let property = field.property();
        match (field.is_required(), others) {
            (true, []) => required.push(*key),
            (true, _) => {
                let given: Vec<_> = field.names.iter().map(|name| json!({ "required": [name] })).collect();
                rules.push(json!({ "oneOf": given }));
            }
            (false, []) => {}
            (false, _) => rules.push(json!({ "not": { "required": field.names } })),
        }
        for alias in others {
            let description = json!({ "description": format!("Alias of `{key}`.") });
            aliases.insert((*alias).to_owned(), merged(property.clone(), description));
        }
        properties.insert((*key).to_owned(), property);
    }
    properties.extend(aliases);
    let mut schema = json!({
        "description": doc, "type": "object", "properties": properties, "additionalProperties": false,
    });
    if !required.is_empty() {
        schema = merged(schema, json!({ "required": required }));
    }
    if !rules.is_empty() {
        schema = merged(schema, json!({ "allOf": rules }));
    }
    schema
}

/// The lines of a doc comment as one line.
pub(super) fn joined(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}

/// The mapping that is being read.
pub(crate) struct Scope<'s, 't> {
    pub(super) start: usize,
    entries: &'s [KeyValue],
    /// The keys that may be here, each with its aliases.
    names: &'s [&'static [&'static str]],
    pub(super) problems: &'s mut Problems<'t>,
}

impl<'s, 't> Scope<'s, 't> {
    /// Outside of all mappings.
    pub(super) fn root(problems: &'s mut Problems<'t>) -> Self {
        Self { start: 0, entries: &[], names: &[], problems }
    }

    /// The mapping `node` inside this one; nothing, with a report, if it is not a mapping.
    pub(super) fn enter<'a>(
        &'a mut self,
        node: &'a Node,
        names: &'a [&'static [&'static str]],
    ) -> Option<Scope<'a, 't>> {
        let entries = self.entries_of(node)?;
        Some(Scope { start: node.at.start, entries, names, problems: self.problems })
    }

    pub(super) fn entries_of<'n>(&mut self, node: &'n Node) -> Option<&'n [KeyValue]> {
        match &node.value {
            NodeValue::Map(entries) => Some(entries),
            _ => self.unexpected(node, "a mapping (`key: value`)"),
        }
    }

    fn entries_named(&self, names: &[&str]) -> impl Iterator<Item = &'s KeyValue> {
        let is_one = move |entry: &&KeyValue| entry.key.text().is_some_and(|key| names.contains(&key));
        self.entries.iter().filter(is_one)
    }

    /// The entry with one of `names`, which all mean the same; reports a second one.
    fn entry(&mut self, names: &[&str]) -> Option<&'s KeyValue> {
        let mut entries: Vec<_> = self.entries_named(names).collect();
        let first = *entries.first()?;
        entries.sort_by_key(|entry| entry.key.at.start);
        if let [first, second, ..] = entries.as_slice() {
            let line = self.problems.line(first.key.at.start);
            let message = format!(
                "{} and {} (line {line}) are two names of one setting; remove one of them",
                self.problems.name(&second.key),
                self.problems.name(&first.key)
            );
            self.problems.add(second.key.at.start, message);
        }
        Some(first)
    }

    /// Reads the setting with these names, or its default.
    pub(super) fn setting<K: Setting>(
        &mut self,
        names: &[&str],
        default: impl FnOnce() -> Option<Value>,
    ) -> Option<K::Value> {
        let entry = self.entry(names);
        if let Some(entry) = entry.filter(|entry| !entry.value.is_null()) {
            return K::read(&entry.value, self);
        }
        if let Some(default) = default() {
            return K::read(&Node::from_json(default, self.start), self);
        }
        let absent = K::absent();
        if absent.is_none() {
            let (at, message) = match entry {
                Some(entry) => {
                    (entry.key.at.start, format!("{} has no value", self.problems.name(&entry.key)))
                }
                None => (self.start, format!("`{}` is missing", names.first().unwrap_or(&""))),
            };
            self.problems.add(at, message);
        }
        absent
    }

    /// The entry of a declared key, under any of its names, if it has a value.
    fn given(&self, key: &str) -> Option<&'s KeyValue> {
        let names = self.names.iter().find(|names| names.first() == Some(&key))?;
        self.entries_named(names).next().filter(|entry| !entry.value.is_null())
    }

    /// The position of a declared key, under any of its names, if it has a value.
    pub(super) fn position(&self, key: &str) -> Option<usize> {
        self.given(key).map(|entry| entry.key.at.start)
    }

    /// The value of a declared key, under any of its names, if there is one.
    pub(super) fn value(&self, key: &str) -> Option<&'s Node> {
        self.given(key).map(|entry| &entry.value)
    }

    pub(super) fn text(&self, key: &str) -> Option<&'s str> {
        self.value(key)?.text()
    }

    /// The entries of a declared key whose value is a mapping.
    pub(super) fn entries(&self, key: &str) -> &'s [KeyValue] {
        match self.value(key).map(|node| &node.value) {
            Some(NodeValue::Map(entries)) => entries,
            _ => &[],
        }
    }

    /// Reports a value that is not of the expected type, unless another problem explains it.
    pub(super) fn unexpected<T>(&mut self, node: &Node, expected: &str) -> Option<T> {
        if !matches!(node.value, NodeValue::Reported) {
            self.problems.add(node.at.start, format!("expected {expected}, found {}", node.type_name()));
        }
        None
    }

    /// Reports every key that is not declared.
    pub(super) fn report_unknown_keys(&mut self) {
        let names: Vec<_> = self.names.iter().copied().flatten().copied().collect();
        for entry in self.entries {
            let Some(key) = entry.key.text().filter(|key| !names.contains(key)) else {
                continue;
            };
            let message = match self.problems.name(&entry.key).as_str() {
                name if name.starts_with('`') => format!("unknown key {name}"),
                _ => "unknown key".to_owned(),
            };
            self.problems.add_with_hint(entry.key.at.start, message, hint(key, &names));
        }
    }
}

fn hint(key: &str, names: &[&str]) -> String {
    let short: String = key.chars().take(64).collect();
    // The similarity of short words drops sharply when two letters swap places.
    let similarity = |name: &&str| {
        let is_typo = strsim::osa_distance(name, &short) == 1;
        strsim::jaro_winkler(name, &short).max(if is_typo { 0.9 } else { 0.0 })
    };
    let closest = names.iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b)));
    match closest.filter(|name| similarity(name) > 0.84) {
        Some(name) => format!("did you mean `{name}`?"),
        None if names.len() > MAX_LISTED_KEYS => {
            "`a2a-bridge schema` and `config/full.yaml` list the keys".into()
        }
        None => format!("the keys here are `{}`", names.join("`, `")),
    }
}

/// Declares mappings of settings: the struct, its reader and its JSON schema.
///
/// ```text
/// /// Text for users about the mapping, unless the key that holds it has its own text.
/// pub(crate) struct Name, check rules, then complete {
///     /// Text for users about the setting.
///     key | alias: Kind, default "as in the file", example "of a value";
///     field = "key": Kind;
///     + not_a_setting: Type;
/// }
/// ```
///
/// `Kind` implements [`Setting`]. A key is required unless it has a default or its kind is an `Option`.
/// `check` names a function that reports violations of rules across keys, `then` one that completes the
/// struct. `field = "key"` is for a key that is not a Rust name.
macro_rules! settings {
    (@names $field:ident $($alias:ident)*) => { &[stringify!($field) $(, stringify!($alias))*] };
    (@names $field:ident = $key:literal) => { &[$key] };
    (@json) => { None };
    (@json $json:tt) => { Some(serde_json::json!($json)) };
    ($(
        $(#[doc = $doc:literal])*
        $vis:vis struct $name:ident $(, check $check:path)? $(, then $then:path)? {
            $(
                $(#[doc = $field_doc:literal])*
                $field:ident $(= $key:literal)? $(| $alias:ident)*: $kind:ty
                    $(, default $default:tt)? $(, example $example:tt)?;
            )*
            $(+ $extra:ident: $extra_type:ty;)*
        }
    )*) => {$(
        $(#[doc = $doc])*
        #[derive(Debug, Clone)]
        $vis struct $name {
            $($(#[doc = $field_doc])* pub(crate) $field: <$kind as Setting>::Value,)*
            $(pub(crate) $extra: $extra_type,)*
        }

        impl $name {
            /// The keys, each with its aliases.
            pub(super) const NAMES: &[&[&str]] = &[$(settings!(@names $field $(= $key)? $($alias)*)),*];
        }

        impl Setting for $name {
            type Value = Self;
            const TYPE: &'static str = "a mapping";
            const FIELDS: Option<fn() -> Vec<Field>> = Some(|| vec![$(
                Field {
                    names: settings!(@names $field $(= $key)? $($alias)*),
                    #[cfg(test)]
                    type_name: <$kind as Setting>::TYPE,
                    doc: joined(&[$($field_doc),*]),
                    default: settings!(@json $($default)?),
                    example: settings!(@json $($example)?),
                    is_optional: <$kind as Setting>::absent().is_some(),
                    schema: <$kind as Setting>::schema,
                    fields: <$kind as Setting>::FIELDS,
                }
            ),*]);

            fn read(node: &Node, scope: &mut Scope<'_, '_>) -> Option<Self> {
                let mut scope = scope.enter(node, Self::NAMES)?;
                $(let $field = scope.setting::<$kind>(
                    settings!(@names $field $(= $key)? $($alias)*), || settings!(@json $($default)?)
                );)*
                $($check(&mut scope);)?
                scope.report_unknown_keys();
                let value = Self { $($field: $field?,)* $($extra: Default::default(),)* };
                $(let value = $then(value, node);)?
                Some(value)
            }

            fn schema() -> serde_json::Value {
                let fields = Self::FIELDS.map(|fields| fields()).unwrap_or_default();
                object_schema(&joined(&[$($doc),*]), &fields)
            }
        }
    )*};
}
pub(super) use settings;
