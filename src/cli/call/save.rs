//! Files in a reply: listed, or saved under names that cannot leave the target directory.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use crate::cli::client::JsonFields as _;
use crate::cli::output::{eprintln_dim, format_size, one_line};
use crate::cli::progress::ProgressBar;
use crate::cli::{CliError, CliResult, FAILED};
use crate::files::{extension, last_component};
use crate::text::{head, shorten};

/// Bytes that are written to a file at once.
const WRITE_CHUNK: usize = 256 << 10;
/// Maximum bytes of a file name, without its extension.
const MAX_NAME: usize = 100;
/// How many numbered names to try if a file exists.
const MAX_ATTEMPTS: usize = 1000;

#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Output")]
pub(in crate::cli) struct SaveArgs {
    /// Save the files of the reply in this directory
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Overwrite existing files in that directory instead of choosing new names
    #[arg(long, requires = "save")]
    force: bool,
}

impl SaveArgs {
    pub(super) fn save_or_list(&self, files: &[Value]) -> CliResult<()> {
        if let (Some(dir), false) = (&self.save, files.is_empty()) {
            std::fs::create_dir_all(dir).map_err(|error| save_error(dir, error))?;
        }
        let mut unsaved = false;
        let saved = |file: &Value| file.text("/saved").map(PathBuf::from);
        let mut written: Vec<_> = files.iter().filter_map(saved).collect();
        for (number, file) in files.iter().enumerate() {
            let name = one_line(file.text("/name").unwrap_or("unnamed file"));
            let name = shorten(&name, MAX_NAME);
            if let Some(path) = file.text("/saved") {
                let size = file.get("size").and_then(Value::as_u64).map(format_size).unwrap_or_default();
                eprintln_dim(format_args!("saved: {path} ({size})"));
                continue;
            }
            if let Some(url) = file.text("/url") {
                unsaved |= self.save.is_none() && url.starts_with("obj://");
                eprintln_dim(format_args!("file: {name} at {}", one_line(url)));
                continue;
            }
            let Ok(bytes) = STANDARD.decode(file.text("/bytes").unwrap_or_default()) else {
                eprintln_dim(format_args!("file: {name} (not valid base64)"));
                continue;
            };
            let media_type = one_line(file.text("/mime_type").unwrap_or("unknown type"));
            let about = format!("{media_type}, {}", format_size(bytes.len() as u64));
            match &self.save {
                Some(dir) => {
                    let path = self.write(dir, &local_name(file, number), &bytes, &written)?;
                    eprintln_dim(format_args!("saved: {} ({about})", path.display()));
                    written.push(path);
                }
                None => {
                    unsaved = true;
                    eprintln_dim(format_args!("file: {name} ({about})"));
                }
            }
        }
        if unsaved {
            eprintln_dim("use `--save DIR` to save the files");
        }
        Ok(())
    }

    pub(super) fn dir(&self) -> Option<&Path> {
        self.save.as_deref()
    }

    /// Creates the directory, and in it an empty file for a file of the reply.
    pub(super) fn create(
        &self,
        dir: &Path,
        file: &Value,
        number: usize,
        written: &[PathBuf],
    ) -> CliResult<(File, PathBuf)> {
        std::fs::create_dir_all(dir).map_err(|error| save_error(dir, error))?;
        self.create_new(dir, &local_name(file, number), written)
    }

    fn write(&self, dir: &Path, name: &str, bytes: &[u8], written: &[PathBuf]) -> CliResult<PathBuf> {
        let (mut file, path) = self.create_new(dir, name, written)?;
        let (mut bar, mut done) = (ProgressBar::new(name, bytes.len() as u64), 0);
        for chunk in bytes.chunks(WRITE_CHUNK) {
            file.write_all(chunk).map_err(|error| save_error(&path, error))?;
            done += chunk.len() as u64;
            bar.set(done);
        }
        Ok(path)
    }

    /// `written` are the earlier files of this reply, which must not be overwritten even with `--force`.
    fn create_new(&self, dir: &Path, name: &str, written: &[PathBuf]) -> CliResult<(File, PathBuf)> {
        let (stem, extension) = match name.rsplit_once('.') {
            Some((stem, extension)) => (stem, format!(".{extension}")),
            None => (name, String::new()),
        };
        for number in 0..MAX_ATTEMPTS {
            let path = dir.join(match number {
                0 => name.to_owned(),
                _ => format!("{stem}-{number}{extension}"),
            });
            if self.force && !written.contains(&path) {
                // Removed, not truncated: the file could be a symbolic link to another directory.
                let _ = std::fs::remove_file(&path);
            }
            match File::create_new(&path) {
                Ok(file) => return Ok((file, path)),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(save_error(&path, error)),
            }
        }
        let error = std::io::Error::from(std::io::ErrorKind::AlreadyExists);
        Err(save_error(&dir.join(name), error))
    }
}

fn save_error(path: &Path, error: std::io::Error) -> CliError {
    CliError::new(FAILED, error)
        .context(format!("cannot save {}", path.display()))
        .hint("choose another directory with `--save`")
}

/// A file name from the agent's: its last path component, with safe characters only, never a hidden file.
fn local_name(file: &Value, number: usize) -> String {
    let name = last_component(file.text("/name").unwrap_or_default());
    let is_safe = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_' | ' ' | '+' | '@');
    let safe: String = name.chars().map(|c| if is_safe(c) { c } else { '_' }).collect();
    let safe = safe.trim_matches([' ', '.']).trim_start_matches('-');
    let (stem, extension_given) = safe.rsplit_once('.').unwrap_or((safe, ""));
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
        assert_eq!(local_name(&json!({"name": name}), 0), safe);
    }

    #[test]
    fn a_long_name_is_shortened_and_a_missing_extension_comes_from_the_type() {
        let long = local_name(&json!({"name": format!("{}.{}", "a".repeat(4096), "b".repeat(4096))}), 0);
        assert!(long.len() < 128, "{long}");
        assert_eq!(local_name(&json!({"mime_type": "image/png"}), 2), "file-3.png");
        assert_eq!(local_name(&json!({"name": "x", "mime_type": "text/plain"}), 0), "x.txt");
    }

    #[test]
    fn files_are_overwritten_only_with_force() {
        let dir = tempfile::tempdir().unwrap();
        let files = [json!({"name": "a.txt", "bytes": "bmV3"})];
        let twins =
            [json!({"name": "b.txt", "bytes": "bmV3"}), json!({"name": "b.txt", "bytes": "bmV4dA=="})];
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        std::fs::write(dir.path().join("a.txt"), "old").unwrap();
        let mut save = SaveArgs { save: Some(dir.path().to_owned()), force: false };
        save.save_or_list(&files).unwrap();
        assert_eq!((read("a.txt"), read("a-1.txt")), ("old".into(), "new".into()));
        save.force = true;
        save.save_or_list(&files).unwrap();
        assert_eq!(read("a.txt"), "new");
        save.save_or_list(&twins).unwrap();
        assert_eq!((read("b.txt"), read("b-1.txt")), ("new".into(), "next".into()));
    }
}
