//! Decodes arbitrary bytes as the data of a stream event, in the dialects that decode differently.
//! See `fuzz/Cargo.toml` for how to run it.
#![no_main]

use a2a_bridge::internal::Dialect;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    for dialect in [Dialect::V01, Dialect::V03, Dialect::V03Rest, Dialect::V1Rest] {
        let _ = dialect.read_event(data);
    }
});
