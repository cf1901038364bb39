//! Any bytes as the response to a request, in every dialect. How to run it: `fuzz/Cargo.toml`.
#![no_main]

use a2a_bridge::internal::{Dialect, RpcError};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    for dialect in [Dialect::V01, Dialect::V03, Dialect::V03Rest, Dialect::V1Rest] {
        let sent = dialect.read_send_result(data).is_ok();
        let task = dialect.read_task(data).is_ok();
        assert!(sent || !task, "read_task accepts bytes that read_send_result rejects");
    }
    let _ = RpcError::in_body(data);
});
