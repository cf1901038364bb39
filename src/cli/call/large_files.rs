//! Files of a request that do not fit into a message, and replies that the bridge has stored.

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::reply::CallReply;
use super::request::usage;
use super::save::SaveArgs;
use crate::cli::client::{JsonFields as _, NatsClient};
use crate::cli::files::{LocalFile, download, upload};
use crate::cli::output::{eprintln_dim, one_line};
use crate::cli::{CliError, CliResult, FAILED};

/// Room in a message for headers and the fields around files.
const OVERHEAD: u64 = 8 << 10;
/// A whole reply is in memory, so it is limited.
const MAX_REPLY: u64 = 256 << 20;

/// The files that a request sends.
#[derive(Debug)]
pub(super) struct RequestFiles(Vec<RequestFile>);

#[derive(Debug)]
enum RequestFile {
    Url(String),
    Local(LocalFile),
}

impl RequestFile {
    /// The bytes that it takes in a message.
    fn inline_size(&self) -> u64 {
        match self {
            Self::Url(url) => url.len() as u64,
            Self::Local(file) => file.size.div_ceil(3) * 4 + file.name.len() as u64 + 100,
        }
    }
}

impl RequestFiles {
    pub(super) fn new(files: &[String]) -> CliResult<Self> {
        let file = |file: &String| {
            if ["https://", "http://", "obj://"].iter().any(|scheme| file.starts_with(scheme)) {
                return Ok(RequestFile::Url(file.clone()));
            }
            let opened = LocalFile::open(Path::new(file));
            opened
                .map(RequestFile::Local)
                .map_err(|error| usage(format!("cannot read `--file {file}`: {error}")))
        };
        files.iter().map(file).collect::<CliResult<_>>().map(Self)
    }

    /// Adds the files to a request. Uploads the largest ones if the request does not fit into a message.
    pub(super) async fn add_to(self, body: &mut Value, mesh: &NatsClient) -> CliResult<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        let room =
            (mesh.client.max_payload() as u64).saturating_sub(OVERHEAD + body.to_string().len() as u64);
        let mut total: u64 = self.0.iter().map(RequestFile::inline_size).sum();
        let mut order: Vec<usize> = (0..self.0.len()).collect();
        order.sort_by_key(|index| std::cmp::Reverse(self.0.get(*index).map(RequestFile::inline_size)));
        let mut values: Vec<Option<Value>> = self.0.iter().map(|_| None).collect();
        for index in order {
            let (Some(file), Some(value)) = (self.0.get(index), values.get_mut(index)) else { continue };
            *value = Some(match file {
                RequestFile::Url(url) => url.as_str().into(),
                RequestFile::Local(local) if total > room => {
                    total = total.saturating_sub(file.inline_size());
                    let stored = upload(mesh, local).await?;
                    stored.get("url").cloned().unwrap_or_default()
                }
                RequestFile::Local(local) => {
                    let bytes = local
                        .read()
                        .map_err(|error| usage(format!("cannot read `--file {}`: {error}", local.name)))?;
                    json!({"name": local.name, "mime_type": local.media_type, "bytes": STANDARD.encode(bytes)})
                }
            });
        }
        if let Some(body) = body.as_object_mut() {
            body.insert("files".to_owned(), values.into_iter().flatten().collect());
        }
        Ok(())
    }
}

async fn fetch_whole(mesh: &NatsClient, url: &str, size: u64) -> CliResult<Value> {
    if size > MAX_REPLY {
        return Err(CliError::msg(FAILED, format!("it has {size} bytes; use `a2a-bridge files get {url}`")));
    }
    let mut whole = Vec::new();
    download(mesh, url, &mut whole).await?;
    serde_json::from_slice(&whole)
        .map_err(|error| CliError::new(FAILED, error).context("the stored reply is not JSON"))
}

impl CallReply {
    /// Downloads what the bridge has stored: the whole reply, and the files if they are to be saved.
    pub(in crate::cli) async fn fetch(&mut self, mesh: &NatsClient, save: &SaveArgs) -> CliResult<()> {
        if let Some(url) = self.value().text("/full_reply/url").map(str::to_owned) {
            let size = self.value().pointer("/full_reply/size").and_then(Value::as_u64).unwrap_or(u64::MAX);
            match fetch_whole(mesh, &url, size).await {
                Ok(whole) => *self = Self::from_value(whole),
                Err(error) => {
                    let reason = one_line(&format!("{:#}", error.error));
                    eprintln_dim(format_args!(
                        "this is the beginning of the reply; cannot fetch the rest: {reason}"
                    ));
                }
            }
        }
        for file in self.files_mut() {
            // Only this command says what it has saved.
            file.as_object_mut().and_then(|file| file.remove("saved"));
        }
        let Some(dir) = save.dir() else { return Ok(()) };
        let mut written = Vec::new();
        for (number, file) in self.files_mut().iter_mut().enumerate() {
            let Some(url) = file.text("/url").filter(|url| url.starts_with("obj://")).map(str::to_owned)
            else {
                continue;
            };
            let (mut target, path) = save.create(dir, file, number, &written)?;
            if let Err(error) = download(mesh, &url, &mut target).await {
                let _ = std::fs::remove_file(&path);
                return Err(error);
            }
            file["saved"] = path.display().to_string().into();
            written.push(path);
        }
        Ok(())
    }
}
