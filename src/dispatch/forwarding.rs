//! Forwards all requests of an agent, for tests of forwarding itself.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::action::progress::Progress;
use crate::action::request::CallOptions;
use crate::reply::Reply;
use crate::reply::error::{ActionError, Code};
use crate::state::peers::InstanceId;

static TARGETS: LazyLock<Mutex<HashMap<String, InstanceId>>> = LazyLock::new(Mutex::default);

/// From now on, requests to an agent with this name run at another replica.
pub(crate) fn set(agent: &str, to: InstanceId) {
    TARGETS.lock().unwrap_or_else(PoisonError::into_inner).insert(agent.to_owned(), to);
}

/// The reply of the other replica, or the reason why there is none.
pub(super) async fn forward(
    agent: &str,
    options: &CallOptions,
    progress: &mut impl Progress,
) -> Option<Reply> {
    let to = TARGETS.lock().unwrap_or_else(PoisonError::into_inner).get(agent).copied()?;
    if options.is_forwarded {
        return None;
    }
    let forwarded = progress.forward(to).await;
    Some(forwarded.unwrap_or_else(|error| Err(ActionError::new(Code::Internal, error.to_string()))))
}
