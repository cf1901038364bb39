//! Files that an agent sends: listed, or saved under names that cannot lead anywhere else.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::body::extension;
use crate::cli::client::Fields as _;
use crate::cli::output::{one_line, remark, size};
use crate::cli::{Failure, TROUBLE};
use crate::text::{head, shorten};

/// Longest file name that is made from an agent's.
const MAX_NAME: usize = 100;
/// How many other names are tried when one is taken.
const MAX_TRIES: usize = 1000;

/// What to do with files.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Output")]
pub(in crate::cli) struct Save {
    /// Save the files of the reply in this folder
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Overwrite files in the folder of `--save`, instead of choosing another name
    #[arg(long, requires = "save")]
    force: bool,
}

impl Save {
    /// Saves or lists the files of a reply.
    pub(super) fn take(&self, files: &[Value]) -> Result<(), Failure> {
        if let (Some(dir), false) = (&self.save, files.is_empty()) {
            std::fs::create_dir_all(dir).map_err(|error| failure(dir, error))?;
        }
        let mut unsaved = false;
        let mut written = Vec::new();
        for (number, file) in files.iter().enumerate() {
            let name = one_line(file.text("/name").unwrap_or("a file without a name"));
            let name = shorten(&name, MAX_NAME);
            if let Some(url) = file.text("/url") {
                remark(format_args!("file: {name} at {}", one_line(url)));
                continue;
            }
            let Ok(bytes) = STANDARD.decode(file.text("/bytes").unwrap_or_default()) else {
                remark(format_args!("file: {name}, which cannot be decoded"));
                continue;
            };
            let about = format!(
                "{}, {}",
                one_line(file.text("/mime_type").unwrap_or("unknown type")),
                size(bytes.len() as u64)
            );
            match &self.save {
                Some(dir) => {
                    let path = self.write(dir, &safe_name(file, number), &bytes, &written)?;
                    remark(format_args!("saved: {} ({about})", path.display()));
                    written.push(path);
                }
                None => {
                    unsaved = true;
                    remark(format_args!("file: {name} ({about})"));
                }
            }
        }
        if unsaved {
            remark("`--save DIR` saves them");
        }
        Ok(())
    }

    /// `written` are the files of this reply, which must not replace one another.
    fn write(&self, dir: &Path, name: &str, bytes: &[u8], written: &[PathBuf]) -> Result<PathBuf, Failure> {
        let (stem, extension) = match name.rsplit_once('.') {
            Some((stem, extension)) => (stem, format!(".{extension}")),
            None => (name, String::new()),
        };
        for number in 0..MAX_TRIES {
            let path = dir.join(match number {
                0 => name.to_owned(),
                _ => format!("{stem}-{number}{extension}"),
            });
            if self.force && !written.contains(&path) {
                // Not through a link that somebody put there.
                let _ = std::fs::remove_file(&path);
            }
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                Ok(mut file) => {
                    return file
                        .write_all(bytes)
                        .map(|()| path.clone())
                        .map_err(|error| failure(&path, error));
                }
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(failure(&path, error)),
            }
        }
        let error = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
        Err(failure(&dir.join(name), error))
    }
}

fn failure(path: &Path, error: std::io::Error) -> Failure {
    let error = anyhow::Error::new(error).context(format!("cannot save {}", path.display()));
    Failure::new(TROUBLE, error).hint("choose another folder with `--save`")
}

/// A plain name from what the agent says: the last part, of harmless characters, never hidden.
fn safe_name(file: &Value, number: usize) -> String {
    let name = file.text("/name").unwrap_or_default();
    let name = name.rsplit(['/', '\\']).next().unwrap_or_default();
    let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_' | ' ' | '+' | '@');
    let plain: String = name.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
    let plain = plain.trim_matches([' ', '.']).trim_start_matches('-');
    let (stem, extension_given) = plain.rsplit_once('.').unwrap_or((plain, ""));
    let extension = match extension_given {
        "" => file.text("/mime_type").and_then(extension).unwrap_or_default(),
        given => head(given, 16),
    };
    let stem = match head(stem, MAX_NAME).trim_matches([' ', '.']) {
        "" => format!("file-{}", number + 1),
        stem => stem.to_owned(),
    };
    match extension {
        "" => stem,
        extension => format!("{stem}.{extension}"),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    #[rstest]
    #[case("a.png", "a.png")]
    #[case("../../etc/passwd", "passwd")]
    #[case("/etc/x", "x")]
    #[case("C:\\windows\\x.dll", "x.dll")]
    #[case(".bashrc", "bashrc")]
    #[case("..", "file-1")]
    #[case("", "file-1")]
    #[case("-rf", "rf")]
    #[case("a\u{0}b\nc\u{202E}.txt", "a_b_c_.txt")]
    #[case("Übersicht 2.pdf", "Übersicht 2.pdf")]
    fn a_name_from_an_agent_is_never_a_path(#[case] name: &str, #[case] safe: &str) {
        assert_eq!(safe_name(&json!({"name": name}), 0), safe);
    }

    #[test]
    fn a_long_name_is_cut_and_a_missing_extension_comes_from_the_type() {
        let long = safe_name(&json!({"name": format!("{}.{}", "a".repeat(4096), "b".repeat(4096))}), 0);
        assert!(long.len() < 128, "{long}");
        assert_eq!(safe_name(&json!({"mime_type": "image/png"}), 2), "file-3.png");
        assert_eq!(safe_name(&json!({"name": "x", "mime_type": "text/plain"}), 0), "x.txt");
    }

    #[test]
    fn nothing_is_overwritten_unless_that_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let files = [json!({"name": "a.txt", "bytes": "bmV3"})];
        let twins =
            [json!({"name": "b.txt", "bytes": "bmV3"}), json!({"name": "b.txt", "bytes": "bmV4dA=="})];
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        std::fs::write(dir.path().join("a.txt"), "old").unwrap();
        let mut save = Save { save: Some(dir.path().to_owned()), force: false };
        save.take(&files).unwrap();
        assert_eq!((read("a.txt"), read("a-1.txt")), ("old".into(), "new".into()));
        save.force = true;
        save.take(&files).unwrap();
        assert_eq!(read("a.txt"), "new");
        save.take(&twins).unwrap();
        assert_eq!((read("b.txt"), read("b-1.txt")), ("new".into(), "next".into()));
    }
}
