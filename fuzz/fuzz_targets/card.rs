//! Any bytes as an agent card: read, and shown again as v1.0. How to run it: `fuzz/Cargo.toml`.
#![no_main]

use a2a_bridge::internal::{Card, Interface};
use a2a_bridge::internal::Dialect;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(card) = Card::parse(data) else {
        return;
    };
    let interface = Interface {
        url: url::Url::parse("http://127.0.0.1:1/").expect("a URL"),
        dialect: Dialect::V1,
        tenant: None,
        because: String::new(),
    };
    let shown = card.to_v1(&interface);
    // What we show can be read again, and says the same.
    let again = Card::from_value(shown.clone()).expect("our own card");
    assert_eq!(again.to_v1(&interface), shown);
    let _ = card.security().to_string();
});
