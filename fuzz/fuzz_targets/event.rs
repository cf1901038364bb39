//! Any bytes as the data of a stream's event, in every dialect. How to run it: `fuzz/Cargo.toml`.
#![no_main]

use a2a_bridge::internal::Dialect;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    for dialect in [Dialect::V01, Dialect::V03, Dialect::V03Rest, Dialect::V1Rest] {
        let _ = dialect.read_event(data);
    }
});
