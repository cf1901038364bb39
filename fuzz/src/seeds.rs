//! The seeds: small files in `fuzz/corpus`, the recordings of real agents, and the configurations of the tests.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde_json::Value;

/// The seeds of a target, always in the same order.
pub fn of(target: &str) -> anyhow::Result<Vec<Vec<u8>>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut seeds = Vec::new();
    for file in files(&root.join("fuzz/corpus").join(target))? {
        seeds.push(std::fs::read(file)?);
    }
    for folder in files(&root.join("tests/fixtures/wire"))?.iter().filter(|path| path.is_dir()) {
        for file in files(folder)? {
            seeds.extend(recorded(target, &file)?);
        }
    }
    if target == "settings" {
        for file in files(&root.join("tests/fixtures/config"))? {
            if file.extension().is_some_and(|extension| extension == "yaml") {
                seeds.push(std::fs::read(file)?);
            }
        }
    }
    Ok(seeds)
}

fn files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<anyhow::Result<Vec<_>>>()?;
    files.sort();
    Ok(files)
}

/// What a recording has for this target: a body, a whole stream, or its events.
fn recorded(target: &str, file: &Path) -> anyhow::Result<Vec<Vec<u8>>> {
    let text = std::fs::read_to_string(file)?;
    let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    match (target, file.extension().and_then(|extension| extension.to_str())) {
        ("card" | "result", Some("json")) => {
            let mut recording: Value = serde_json::from_str(&text)?;
            let body = recording["body"].take();
            let is_card = stem.contains("card") && body["skills"].is_array();
            let wanted = body.is_object() && is_card == (target == "card");
            Ok(wanted.then(|| body.to_string().into_bytes()).into_iter().collect())
        }
        ("event" | "frames", Some("sse")) => {
            let events = text.replace("\r\n", "\n");
            let data = |event: &str| {
                let lines = event.lines().filter_map(|line| line.strip_prefix("data:"));
                lines.map(str::trim_start).collect::<Vec<_>>().join("\n").into_bytes()
            };
            Ok(events.split("\n\n").map(data).filter(|data| !data.is_empty()).collect())
        }
        // The first byte is the size of the chunks.
        ("sse", Some("sse")) => Ok(vec![[b"@", text.as_bytes()].concat()]),
        _ => Ok(Vec::new()),
    }
}
