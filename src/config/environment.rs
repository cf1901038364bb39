//! The environment variables that a configuration may refer to.
//!
//! They often hold secrets. Everyone who may read `/proc/PID/environ` sees the environment with which a process was
//! started, whatever it has done to its variables since. A bridge therefore moves them to its own memory.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use secrecy::{ExposeSecret as _, SecretString};

use super::redact::names_secret;

/// Variables that the bridge or its libraries read after the start. They are never hidden, even if a configuration refers
/// to them: an empty `SSL_CERT_FILE`, for example, makes TLS fail.
const READ_LATER: [&str; 18] = [
    // Certificates of authorities.
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    // The directory for records of processes.
    "XDG_RUNTIME_DIR",
    // Output.
    "TERM",
    "COLORTERM",
    "NO_COLOR",
    "RUST_LOG",
    "RUST_BACKTRACE",
    "RUST_LIB_BACKTRACE",
    // The runtime and the C library.
    "TOKIO_WORKER_THREADS",
    "GLIBC_TUNABLES",
    "RES_OPTIONS",
    "LOCALDOMAIN",
    "HOSTALIASES",
    "LOGNAME",
    // systemd.
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
];
/// The exporter of spans reads these.
const READ_LATER_PREFIX: &str = "OTEL_";

/// The variables of this process, with those that it has hidden.
#[derive(Debug, Default)]
pub(crate) struct Environment {
    /// `None` if the value is not UTF-8.
    hidden: BTreeMap<String, Option<SecretString>>,
    /// The variables that a configuration has referred to.
    used: RefCell<BTreeSet<String>>,
}

impl Environment {
    pub(super) fn get(&self, name: &str) -> Option<String> {
        self.used.borrow_mut().insert(name.to_owned());
        match self.hidden.get(name) {
            Some(value) => value.as_ref().map(|value| value.expose_secret().to_owned()),
            None => std::env::var(name).ok(),
        }
    }

    /// Moves the variables that the configuration has used, and others whose names suggest a secret, out of the
    /// environment of this process. Call it before other threads read the environment. It keeps the variables that
    /// `is_inherited` selects, and those that are [read later](READ_LATER).
    pub(crate) fn hide(&mut self, is_inherited: impl Fn(&str) -> bool) {
        let used = self.used.take();
        let is_kept = |name: &str| is_inherited(name) || is_read_later(name);
        let is_hidden = |name: &str| (used.contains(name) || names_secret(name)) && !is_kept(name);
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok().map(SecretString::from)))
        });
        self.hidden.extend(variables.filter(|(name, _)| is_hidden(name)));
        #[cfg(target_os = "linux")]
        overwrite(|name| str::from_utf8(name).is_ok_and(|name| self.hidden.contains_key(name)));
    }
}

fn is_read_later(name: &str) -> bool {
    READ_LATER.contains(&name) || name.starts_with(READ_LATER_PREFIX)
}

/// Overwrites the values of variables where the kernel shows them. Removing a variable would not change that memory.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "the memory with the initial environment is only reachable through `environ`")]
fn overwrite(is_hidden: impl Fn(&[u8]) -> bool) {
    use std::ffi::{CStr, c_char};

    unsafe extern "C" {
        static environ: *const *mut c_char;
    }
    // SAFETY: POSIX defines `environ` as a list of strings `NAME=value` that ends with a null pointer; the strings are in
    // writable memory of this process. Only bytes inside of a string are written, behind its `=`. No other thread
    // reads the environment yet: the only one that exists writes log lines.
    unsafe {
        let mut entry = environ;
        while !entry.is_null() && !(*entry).is_null() {
            let text = CStr::from_ptr(*entry).to_bytes();
            let name = text.split(|byte| *byte == b'=').next().unwrap_or_default();
            let (start, end) = (name.len() + 1, text.len());
            if is_hidden(name) && start < end {
                std::ptr::write_bytes((*entry).add(start), 0, end - start);
            }
            entry = entry.add(1);
        }
    }
}
