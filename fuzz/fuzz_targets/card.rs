//! Any bytes as an agent card: parsed, and written in the form of v1.0. How to run it: `fuzz/Cargo.toml`.
#![no_main]

use a2a_bridge::internal::{Card, Dialect, Interface};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(card) = Card::parse(data) else {
        return;
    };
    let interface = Interface {
        url: url::Url::parse("http://127.0.0.1:1/").expect("a URL"),
        dialect: Dialect::V1,
        tenant: None,
        reason: String::new(),
        is_confirmed: true,
    };
    let written = card.to_v1(&interface, &card.skills);
    // The written card can be parsed, and has the same content.
    let again = Card::from_value(written.clone()).expect("a card of the bridge");
    assert_eq!(again.to_v1(&interface, &again.skills), written);
    let _ = card.security.to_string();
});
