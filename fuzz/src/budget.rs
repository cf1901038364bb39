//! Limits on CPU time and allocated memory per byte of input.
//!
//! They are generous: several times what the worst linear input needs. Code that is quadratic in the size of the input
//! exceeds them with inputs of the size that the fuzzers create.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// The largest input that the fuzzers create.
pub const MAX_INPUT: usize = 512 << 10;

#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Peak of the allocated memory: this, …
    memory: usize,
    /// … and this for each byte of input.
    memory_per_byte: usize,
    /// CPU time: this, …
    time: Duration,
    /// … and this for each byte of input.
    time_per_byte: Duration,
}

/// The limits of a target.
pub fn limits(target: &str) -> Limits {
    let (memory, memory_per_byte, milliseconds, nanoseconds_per_byte) = match target {
        // Aliases repeat nodes without bytes, up to a limit (300 bytes become 1,000 agents with four problems each, in
        // 50 ms). Every node has a position, and a wrong one a message with an excerpt. A mapping compares its keys
        // with each other; the file is the operator's own.
        "settings" => (16 << 20, 1_000, 400, 20_000),
        // Decoded in four dialects, one after the other.
        "result" | "event" => (1 << 20, 160, 40, 1_000),
        // Written and parsed again.
        "card" => (1 << 20, 300, 40, 1_000),
        _ => (1 << 20, 160, 40, 500),
    };
    let (time, time_per_byte) =
        (Duration::from_millis(milliseconds), Duration::from_nanos(nanoseconds_per_byte));
    Limits { memory, memory_per_byte, time, time_per_byte }
}

/// What one input needed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Cost {
    pub memory: usize,
    pub time: Duration,
}

impl Limits {
    /// Runs the decoder; the cost and whether the input is valid.
    pub fn measure(decode: fn(&[u8]) -> bool, input: &[u8]) -> (Cost, bool) {
        let (before, began) = (CURRENT.load(Relaxed), cpu_time());
        PEAK.store(before, Relaxed);
        let is_valid = decode(input);
        let time = cpu_time().saturating_sub(began);
        (Cost { memory: PEAK.load(Relaxed).saturating_sub(before), time }, is_valid)
    }

    /// Runs the decoder; whether the input is valid, or which limit it exceeds. Time counts only if two more runs need
    /// it too, because the first may load pages.
    pub fn check(&self, decode: fn(&[u8]) -> bool, input: &[u8]) -> Result<(Cost, bool), String> {
        let (mut cost, is_valid) = Self::measure(decode, input);
        let most = self.memory + self.memory_per_byte * input.len();
        if cost.memory > most {
            return Err(format!(
                "{} bytes allocated for {} bytes of input; the limit is {most}",
                cost.memory,
                input.len()
            ));
        }
        let longest = self.time + self.time_per_byte * u32::try_from(input.len()).unwrap_or(u32::MAX);
        for _ in 0..2 {
            if cost.time > longest {
                cost.time = cost.time.min(Self::measure(decode, input).0.time);
            }
        }
        if cost.time > longest {
            return Err(format!(
                "{:?} of CPU time for {} bytes of input; the limit is {longest:?}",
                cost.time,
                input.len()
            ));
        }
        Ok((cost, is_valid))
    }
}

fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a valid `timespec`.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

static CURRENT: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, which counts. Fuzzers have one thread.
pub struct CountingAllocator;

fn add(bytes: usize) {
    let now = CURRENT.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(now, Relaxed);
}

// SAFETY: all calls go to the system's allocator unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        CURRENT.fetch_sub(layout.size(), Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size);
        let moved = unsafe { System.realloc(pointer, layout, size) };
        CURRENT.fetch_sub(layout.size(), Relaxed);
        moved
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
