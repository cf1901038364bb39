//! Requests of this process that record the same task take turns, so that its changes are published in their order and
//! a question gets one id.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::OwnedMutexGuard;

use crate::state::RecordKey;

#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<HashMap<RecordKey, Weak<tokio::sync::Mutex<()>>>>);

impl Turns {
    pub(super) async fn wait(&self, key: RecordKey) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match turns.get(&key).and_then(Weak::upgrade) {
                Some(turn) => turn,
                None => {
                    let turn = Arc::default();
                    if turns.len() == turns.capacity() {
                        turns.retain(|_, turn| turn.strong_count() > 0);
                    }
                    turns.insert(key, Arc::downgrade(&turn));
                    turn
                }
            }
        };
        turn.lock_owned().await
    }
}
