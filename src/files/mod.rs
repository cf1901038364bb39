//! Files that requests and replies refer to, and the rules for them. Nothing here knows NATS: `bus::object_store`
//! implements [`FileStore`].
//!
//! A file is never in memory as a whole. A request that refers to a file becomes an HTTP body that reads the file while it is
//! sent; the bytes of a large file in a response go to the store while they are received.
//!
//! | type | meaning |
//! | --- | --- |
//! | [`ObjectUrl`] | `obj://bucket/name`, validated |
//! | [`StoredFile`] | a file in the store, with its size and digest |
//! | [`CallFiles`] | what one call may do with files: its caller, its limits |

pub(crate) mod base64_stream;
mod call;
mod error;
pub(crate) mod fetch;
mod media_types;
#[cfg(test)]
pub(crate) mod memory_store;
mod object_url;
mod store;

pub(crate) use call::{CallFiles, FileAccess, FileMode, FileRules};
pub(crate) use error::FileError;
pub(crate) use media_types::{extension, last_component, media_type};
pub(crate) use object_url::ObjectUrl;
pub(crate) use store::{FileDescription, StoredFile, TemporaryFile};
pub(crate) use store::{FileReader, FileStore, FileWriter};
