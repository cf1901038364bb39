//! Why a file cannot be read or stored.

use crate::memory::OutOfMemory;
use crate::reply::error::{ActionError, Code};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// Malformed, or refused by the configuration.
    #[error("{0}")]
    Invalid(String),
    /// Missing, deleted, a link, or of another caller. The caller must not learn which of these.
    #[error("the file is unknown or has expired")]
    NotFound,
    #[error("{0}")]
    TooLarge(String),
    /// The digest or the size in the metadata of the file is not that of its content.
    #[error("the content of the file does not match its digest; store the file again")]
    Corrupt,
    /// There is no room in the store or in memory. There may be room later.
    #[error("{0}")]
    Full(String),
    #[error("the file store is not available: {0}; try again")]
    Unavailable(String),
}

impl FileError {
    pub(crate) fn too_large(what: &str, limit: u64, setting: &str) -> Self {
        Self::TooLarge(format!("{what} is larger than {limit} bytes (`{setting}`)"))
    }

    /// Several files are too large together.
    pub(crate) fn too_many(what: &str, limit: u64) -> Self {
        Self::TooLarge(format!("{what} exceed {limit} bytes in total (`files.max_request`)"))
    }

    pub(crate) fn code(&self) -> Code {
        match self {
            Self::Invalid(_) | Self::Corrupt => Code::InvalidRequest,
            Self::NotFound => Code::NotFound,
            Self::TooLarge(_) => Code::TooLarge,
            Self::Full(_) => Code::Busy,
            Self::Unavailable(_) => Code::StateUnavailable,
        }
    }
}

impl From<OutOfMemory> for FileError {
    fn from(error: OutOfMemory) -> Self {
        Self::Full(format!("{error}; try again"))
    }
}

impl From<FileError> for ActionError {
    fn from(error: FileError) -> Self {
        Self::new(error.code(), error.to_string())
    }
}
