//! Any bytes as the answer to a call, on every wire. How to run it: `fuzz/Cargo.toml`.
#![no_main]

use a2a_bridge::internal::{Dialect, RpcError};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    for dialect in [Dialect::V01, Dialect::V03, Dialect::V03Rest, Dialect::V1Rest] {
        let answer = dialect.read_answer(data).is_ok();
        let task = dialect.read_task(data).is_ok();
        assert!(answer || !task, "a task is an answer");
    }
    let _ = RpcError::in_body(data);
});
