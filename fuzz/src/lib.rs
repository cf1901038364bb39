//! What both fuzzers share: the limits for one input, and mutations that suit JSON, YAML and event streams.

pub mod budget;
pub mod mutate;

use a2a_bridge::internal::{FUZZ_TARGETS, FuzzTarget};
use anyhow::Context as _;

/// A decoder and what it may need.
pub struct Target {
    pub name: &'static str,
    pub decode: FuzzTarget,
    pub limits: budget::Limits,
}

/// All decoders.
pub fn targets() -> impl Iterator<Item = Target> {
    FUZZ_TARGETS.iter().map(|(name, decode)| Target { name, decode: *decode, limits: budget::limits(name) })
}

pub fn target(name: &str) -> anyhow::Result<Target> {
    let names = || targets().map(|target| target.name).collect::<Vec<_>>().join(", ");
    targets().find(|target| target.name == name).with_context(|| format!("the targets are {}", names()))
}
