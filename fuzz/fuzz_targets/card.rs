//! Parses arbitrary bytes as an agent card and converts the card to v1.0.
//! See `fuzz/Cargo.toml` for how to run it.
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
    let converted = card.to_v1(&interface);
    // A converted card parses, and converts to itself.
    let parsed = Card::from_value(converted.clone()).expect("our own card");
    assert_eq!(parsed.to_v1(&interface), converted);
    let _ = card.security().to_string();
});
