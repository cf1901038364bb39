//! Caches what is made of an agent's card: cards can be large, and many requests need the same result.

use std::sync::{Arc, Mutex, PoisonError};

use crate::agent::status::KnownCard;

#[derive(Debug)]
pub(super) struct PerCard<T>(Mutex<Option<(KnownCard, T)>>);

impl<T> Default for PerCard<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone> PerCard<T> {
    /// The cached value if it was made of this card, else a new one.
    pub(super) fn get_or_make(&self, known: &KnownCard, make: impl FnOnce() -> T) -> T {
        let mut cached = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_current =
            |(of, _): &&(KnownCard, T)| Arc::ptr_eq(&of.card, &known.card) && of.interface == known.interface;
        if let Some((_, value)) = cached.as_ref().filter(is_current) {
            return value.clone();
        }
        let (_, value) = cached.insert((known.clone(), make()));
        value.clone()
    }
}
