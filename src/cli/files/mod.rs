//! `files`: uploads, downloads, lists and deletes files in the object store, by requests to a bridge.

mod transfer;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde_json::{Value, json};

use super::client::{JsonFields as _, NatsClient};
use super::nats_args::NatsArgs;
use super::output::{
    Colour, OutputArgs, eprintln_dim, format_size, one_line, print_json, print_table, println,
};
use super::{CliError, CliResult, FAILED, USAGE};
use crate::files::{last_component, media_type};

pub(super) use transfer::{download, request, upload};

const DETAILS: &str = "\
A bridge stores the files, and deletes them after some time (`files.ttl`). You see only your own files.

Examples:
  a2a-bridge files put report.pdf
  a2a-bridge call demo.summarize 'summarize this' --file obj://a2a_files/9f…
  a2a-bridge files get obj://a2a_files/9f… --to report.pdf";

#[derive(Debug, clap::Args)]
#[command(arg_required_else_help = true, after_help = DETAILS)]
pub(super) struct FilesArgs {
    #[command(subcommand)]
    command: FilesCommand,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    nats: NatsArgs,
}

#[derive(Debug, clap::Subcommand)]
enum FilesCommand {
    /// Upload a file and print its URL
    Put {
        /// File to upload
        file: PathBuf,
        /// Name that agents see; by default that of the file
        #[arg(long)]
        name: Option<String>,
        /// Media type that agents see; by default by the extension of the name
        #[arg(long = "type", value_name = "TYPE")]
        media_type: Option<String>,
    },
    /// Download a file
    Get {
        /// URL of the file, such as `obj://a2a_files/9f…`
        url: String,
        /// File to write; `-` for stdout. By default, the name that the file was stored with, in the current directory
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
        /// Overwrite an existing file
        #[arg(long)]
        force: bool,
    },
    /// List your files, the newest first
    Ls,
    /// Delete files
    Rm {
        /// URLs of the files
        #[arg(required = true, value_name = "URL")]
        urls: Vec<String>,
    },
}

pub(super) async fn run(args: FilesArgs) -> CliResult {
    let FilesArgs { command, output, nats } = args;
    let mesh = nats.connect().await?;
    match command {
        FilesCommand::Put { file, name, media_type } => {
            put(&mesh, &file, name, media_type, output.is_json()).await
        }
        FilesCommand::Get { url, to, force } => get(&mesh, &url, to.as_deref(), force).await,
        FilesCommand::Ls => list(&mesh, output.is_json()).await,
        FilesCommand::Rm { urls } => {
            for url in urls {
                request(&mesh, "delete", &json!({ "url": url })).await?;
                eprintln_dim(format_args!("deleted {}", one_line(&url)));
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// A file on disk that is to be uploaded.
#[derive(Debug)]
pub(super) struct LocalFile {
    path: PathBuf,
    pub(super) name: String,
    pub(super) media_type: String,
    pub(super) size: u64,
}

impl LocalFile {
    pub(super) fn open(path: &Path) -> std::io::Result<Self> {
        let metadata = std::fs::metadata(path)?;
        if metadata.is_dir() {
            return Err(std::io::ErrorKind::IsADirectory.into());
        }
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let media_type = media_type(&name).unwrap_or("application/octet-stream").to_owned();
        Ok(Self { path: path.to_owned(), name, media_type, size: metadata.len() })
    }

    pub(super) fn read(&self) -> std::io::Result<Vec<u8>> {
        std::fs::read(&self.path)
    }
}

async fn put(
    mesh: &NatsClient,
    path: &Path,
    name: Option<String>,
    type_given: Option<String>,
    json: bool,
) -> CliResult {
    let mut file = LocalFile::open(path).map_err(|error| {
        CliError::new(USAGE, error).context(format!("cannot read {}", path.display())).hint("check the path")
    })?;
    if let Some(name) = name {
        file.media_type = media_type(&name).unwrap_or(&file.media_type).to_owned();
        file.name = name;
    }
    file.media_type = type_given.unwrap_or(file.media_type);
    let stored = upload(mesh, &file).await?;
    match json {
        true => print_json(&stored),
        false => println(stored.text("/url").unwrap_or_default()),
    }
}

async fn get(mesh: &NatsClient, url: &str, to: Option<&Path>, force: bool) -> CliResult {
    if to == Some(Path::new("-")) {
        let mut stdout = std::io::stdout().lock();
        download(mesh, url, &mut stdout).await?;
        stdout.flush().map_err(|error| CliError::new(FAILED, error))?;
        return Ok(ExitCode::SUCCESS);
    }
    let path = match to {
        Some(path) => path.to_owned(),
        None => local_path(mesh, url).await?,
    };
    let save_error = |error: std::io::Error| {
        CliError::new(FAILED, error)
            .context(format!("cannot save {}", path.display()))
            .hint("choose another file with `--to`, or overwrite it with `--force`")
    };
    if force {
        // Removed, not truncated: the file could be a symbolic link.
        let _ = std::fs::remove_file(&path);
    }
    let mut file = std::fs::File::create_new(&path).map_err(save_error)?;
    match download(mesh, url, &mut file).await {
        Ok(size) => {
            eprintln_dim(format_args!("saved: {} ({})", path.display(), format_size(size)));
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => {
            let _ = std::fs::remove_file(&path);
            Err(error)
        }
    }
}

/// The name under which a file was stored, in the current directory. A name from others is never a path or a hidden file.
async fn local_path(mesh: &NatsClient, url: &str) -> CliResult<PathBuf> {
    let name = transfer::stored_name(mesh, url).await?.unwrap_or_default();
    let name: String = last_component(&name).chars().filter(|c| !c.is_control()).collect();
    let name = name.trim_start_matches(['.', '-']);
    let fallback = url.rsplit('/').next().unwrap_or("file");
    Ok(PathBuf::from(if name.is_empty() { fallback } else { name }))
}

async fn list(mesh: &NatsClient, json: bool) -> CliResult {
    let reply = request(mesh, "list", &json!({})).await?;
    let files = reply.list("/files");
    if json {
        return print_json(&files);
    }
    if files.is_empty() {
        eprintln_dim("no files; `a2a-bridge files put FILE` uploads one");
        return Ok(ExitCode::SUCCESS);
    }
    let text = |file: &Value, key: &str| one_line(file.text(key).unwrap_or("-"));
    let rows = files.iter().map(|file| {
        let size = file.get("size").and_then(Value::as_u64).map(format_size).unwrap_or_default();
        vec![
            (Colour::Bold, text(file, "/name")),
            (Colour::Plain, size),
            (Colour::Plain, text(file, "/mime_type")),
            (Colour::Plain, text(file, "/modified")),
            (Colour::Plain, text(file, "/url")),
        ]
    });
    print_table(&["NAME", "SIZE", "TYPE", "STORED", "URL"], rows)
}
