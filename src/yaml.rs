//! Writes JSON values as YAML.

use std::fmt::Write as _;

use serde_json::Value;

/// A value in block style, with the short lists that hold no objects in flow style.
pub(crate) fn block(value: &Value) -> String {
    let mut text = String::new();
    write_block(value, 0, &mut text);
    text
}

fn write_block(value: &Value, depth: usize, text: &mut String) {
    let indent = "  ".repeat(depth);
    match value {
        value if !is_block(value) => {
            let _ = writeln!(text, "{indent}{}", flow(value));
        }
        Value::Object(object) => {
            for (key, value) in object {
                let _ = write!(text, "{indent}{}:", scalar(key));
                if is_block(value) {
                    text.push('\n');
                    write_block(value, depth + 1, text);
                } else {
                    let _ = writeln!(text, " {}", flow(value));
                }
            }
        }
        Value::Array(items) => {
            for item in items {
                let mut entry = String::new();
                write_block(item, depth + 1, &mut entry);
                let _ = writeln!(text, "{indent}- {}", entry.trim());
            }
        }
        _ => {}
    }
}

fn is_block(value: &Value) -> bool {
    match value {
        Value::Object(object) => !object.is_empty(),
        Value::Array(items) => items.iter().any(Value::is_object),
        _ => false,
    }
}

/// A value on one line.
pub(crate) fn flow(value: &Value) -> String {
    match value {
        Value::String(text) => scalar(text),
        Value::Array(items) => format!("[{}]", items.iter().map(flow).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

/// Quotes every string that YAML could read as something else.
fn scalar(text: &str) -> String {
    let is_plain = text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/'));
    let is_keyword = matches!(
        text.to_lowercase().as_str(),
        "true" | "false" | "yes" | "no" | "on" | "off" | "null" | "y" | "n"
    );
    if is_plain && !is_keyword { text.to_owned() } else { Value::from(text).to_string() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn yaml_reads_back_as_the_same_value() {
        let value = json!({"a": [], "b": {}, "on": "on", "c": [{"x": 1, "y": [1, "two: 2"]}, {"z": null}], "d": "line\nbreak"});
        let text = block(&value);
        insta::assert_snapshot!(text, @r#"
        a: []
        b: {}
        "on": "on"
        c:
          - x: 1
            "y": [1, "two: 2"]
          - z: null
        d: "line\nbreak"
        "#);
        assert_eq!(serde_yaml::from_str::<Value>(&text).unwrap(), value);
    }
}
