//! Counts what decoding allocates, while it decodes: a few bytes of JSON may become a hundred in memory.
//!
//! serde calls the implementations of `Deserialize` without a context, so the meter of the current decoding is in a
//! variable of the thread. Without one, nothing is counted.

use std::cell::RefCell;
use std::sync::Arc;

use serde::de;

use crate::memory::{MemoryAccount, MemoryCharge, SizeError};

/// Shorter text is decoded without charging an account: it becomes a few hundred KiB at most.
const UNCHARGED: usize = 4 << 10;
/// The account is charged in steps of this size.
const STEP: usize = 64 << 10;

thread_local! { static METER: RefCell<Option<Meter>> = const { RefCell::new(None) } }

#[derive(Debug)]
pub(super) struct Meter {
    account: Option<Arc<MemoryAccount>>,
    charge: Option<MemoryCharge>,
    /// What is charged in addition: the text that is decoded.
    text: usize,
    used: usize,
    limit: usize,
    /// How much may be used before the charge must grow.
    covered: usize,
    exceeded: Option<SizeError>,
}

impl Meter {
    /// For `text` bytes of JSON, which are already in `charge`. What is decoded from them may take `limit` bytes.
    pub(super) fn new(
        account: &Arc<MemoryAccount>,
        charge: Option<MemoryCharge>,
        text: usize,
        limit: usize,
    ) -> Self {
        let account = (text > UNCHARGED).then(|| Arc::clone(account));
        Self { account, charge, text, used: 0, limit, covered: 0, exceeded: None }
    }

    /// Runs `decode` with this meter. Returns its result, and the charge for what it has decoded.
    pub(super) fn run<T>(
        mut self,
        decode: impl FnOnce() -> T,
    ) -> Result<(T, Option<MemoryCharge>), SizeError> {
        METER.with_borrow_mut(|meter| *meter = Some(self));
        let decoded = decode();
        self = METER.take().expect("the meter from above");
        if let Some(exceeded) = self.exceeded {
            return Err(exceeded);
        }
        // Without the text, which is dropped soon. A charge can always shrink.
        if let Some(account) = &self.account {
            account.cover(&mut self.charge, self.used)?;
        }
        Ok((decoded, self.charge))
    }

    fn add(&mut self, bytes: usize) -> Result<(), SizeError> {
        self.used = self.used.saturating_add(bytes);
        if self.used > self.limit {
            return Err(SizeError::TooLarge);
        }
        if self.used > self.covered
            && let Some(account) = &self.account
        {
            let covered = self.used + STEP;
            account.cover(&mut self.charge, self.text + covered)?;
            self.covered = covered;
        }
        Ok(())
    }
}

/// Counts an allocation, before or after it happens.
pub(super) fn allocate<E: de::Error>(bytes: usize) -> Result<(), E> {
    METER.with_borrow_mut(|meter| {
        let Some(meter) = meter else { return Ok(()) };
        let exceeded = meter.exceeded.or_else(|| meter.add(bytes).err());
        meter.exceeded = exceeded;
        if exceeded.is_some() { Err(E::custom("it is too large")) } else { Ok(()) }
    })
}

/// Forgets what was decoded so far, because it was dropped.
pub(super) fn restart() {
    METER.with_borrow_mut(|meter| meter.as_mut().map(|meter| meter.used = 0));
}

/// Appends to a list, and counts the memory of the list and that of the item's content.
pub(super) fn push<T, E: de::Error>(list: &mut Vec<T>, item: T, content: usize) -> Result<(), E> {
    let more = if list.len() == list.capacity() { list.len().max(1) } else { 0 };
    allocate(more * size_of::<T>() + content)?;
    list.reserve_exact(more);
    list.push(item);
    Ok(())
}
