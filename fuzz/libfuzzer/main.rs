//! Runs the target that `FUZZ_TARGET` names with libFuzzer.
#![no_main]

use std::sync::LazyLock;

use a2a_bridge_fuzz::{Target, mutate, target};
use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").expect("FUZZ_TARGET names the target");
    target(&name).expect("FUZZ_TARGET is a target")
});

fuzz_target!(|data: &[u8]| {
    if let Err(reason) = TARGET.limits.check(TARGET.decode, data) {
        panic!("{reason}");
    }
});

// Half of the mutations are of bytes, which follow the coverage closely, and half are of values.
fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let mut random = fastrand::Rng::with_seed(u64::from(seed));
    if random.bool() {
        return fuzzer_mutate(data, size, max_size);
    }
    let input = data[..size].to_vec();
    let mut mutated = mutate::mutate(&mut random, &input, &input);
    mutated.truncate(max_size);
    data[..mutated.len()].copy_from_slice(&mutated);
    mutated.len()
});
