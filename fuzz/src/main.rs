//! Fuzzes all decoders in turns. Without instrumentation: an input that is valid becomes part of the corpus, so that
//! later ones are variations of it.
//!
//! ```text
//! fuzz run SECONDS SEED [TARGET..]
//! fuzz replay TARGET FILE..          runs inputs and prints what they cost
//! fuzz seeds DIRECTORY               writes the seeds of every target into a directory of its own
//! ```

mod seeds;

use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use a2a_bridge_fuzz::budget::{Cost, MAX_INPUT};
use a2a_bridge_fuzz::mutate::mutate;
use a2a_bridge_fuzz::{Target, target, targets};
use anyhow::{Context as _, bail, ensure};
use fastrand::Rng;

/// Inputs that were found are replaced beyond this number.
const MAX_CORPUS: usize = 2_000;
/// How long one target runs before it is the next one's turn.
const TURN: Duration = Duration::from_millis(250);

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["run", seconds, seed, names @ ..] => {
            run(Duration::from_secs(seconds.parse()?), seed.parse()?, names)
        }
        ["replay", name, files @ ..] => replay(&target(name)?, files),
        ["seeds", folder] => write_seeds(Path::new(folder)),
        _ => bail!(
            "usage: fuzz run SECONDS SEED [TARGET..] | fuzz replay TARGET FILE.. | fuzz seeds DIRECTORY"
        ),
    }
}

struct Fuzzer {
    target: Target,
    corpus: Vec<Vec<u8>>,
    seeds: usize,
    runs: u64,
    valid: u64,
    /// The highest cost per byte of inputs of at least 4 KiB.
    worst: Cost,
}

impl Fuzzer {
    fn new(target: Target) -> anyhow::Result<Self> {
        let corpus = seeds::of(target.name)?;
        ensure!(!corpus.is_empty(), "there are no seeds for {}", target.name);
        let seeds = corpus.len();
        Ok(Self { target, corpus, seeds, runs: 0, valid: 0, worst: Cost::default() })
    }

    /// Runs one input; `None` if it is fine.
    fn fails(&mut self, input: &[u8]) -> Option<String> {
        self.runs += 1;
        let Target { decode, limits, .. } = self.target;
        let checked = std::panic::catch_unwind(AssertUnwindSafe(|| limits.check(decode, input)));
        match checked {
            Err(_) => Some("it panics".to_owned()),
            Ok(Err(reason)) => Some(reason),
            Ok(Ok((cost, is_valid))) => {
                self.keep(input, cost, is_valid);
                None
            }
        }
    }

    fn keep(&mut self, input: &[u8], cost: Cost, is_valid: bool) {
        if input.len() >= 4 << 10 {
            self.worst.memory = self.worst.memory.max(cost.memory / input.len());
            self.worst.time = self.worst.time.max(cost.time / u32::try_from(input.len()).unwrap_or(u32::MAX));
        }
        if is_valid {
            self.valid += 1;
        }
    }

    fn turn(&mut self, random: &mut Rng) -> Result<(), (Vec<u8>, String)> {
        let began = Instant::now();
        while began.elapsed() < TURN {
            let pick = |random: &mut Rng| random.usize(0..self.corpus.len());
            let (one, other) = (pick(random), pick(random));
            let input = mutate(random, &self.corpus[one], &self.corpus[other]);
            let before = self.valid;
            if let Some(reason) = self.fails(&input) {
                return Err((input, reason));
            }
            // Small ones, so that the corpus stays quick.
            if self.valid > before && input.len() < MAX_INPUT / 16 {
                if self.corpus.len() < self.seeds + MAX_CORPUS {
                    self.corpus.push(input);
                } else {
                    let place = random.usize(self.seeds..self.corpus.len());
                    self.corpus[place] = input;
                }
            }
        }
        Ok(())
    }
}

fn run(time: Duration, seed: u64, names: &[&str]) -> anyhow::Result<()> {
    let mut fuzzers = Vec::new();
    for target in targets().filter(|target| names.is_empty() || names.contains(&target.name)) {
        fuzzers.push(Fuzzer::new(target)?);
    }
    ensure!(!fuzzers.is_empty() && fuzzers.len() >= names.len(), "no such target: {}", names.join(" "));
    let (mut random, began) = (Rng::with_seed(seed), Instant::now());
    for fuzzer in &mut fuzzers {
        for input in fuzzer.corpus.clone() {
            if let Some(reason) = fuzzer.fails(&input) {
                return failure(fuzzer.target.name, &input, &reason, seed);
            }
        }
    }
    while began.elapsed() < time {
        for fuzzer in &mut fuzzers {
            if let Err((input, reason)) = fuzzer.turn(&mut random) {
                return failure(fuzzer.target.name, &input, &reason, seed);
            }
        }
    }
    println!(
        "{:<10} {:>6} {:>10} {:>7}  most per byte of inputs of 4 KiB or more",
        "target", "seeds", "runs", "valid"
    );
    for fuzzer in fuzzers {
        let Fuzzer { target, seeds, runs, valid, worst, .. } = fuzzer;
        let share = valid * 100 / runs.max(1);
        println!(
            "{:<10} {seeds:>6} {runs:>10} {share:>6}%  {} bytes, {:?}",
            target.name, worst.memory, worst.time
        );
    }
    Ok(())
}

fn failure(target: &str, input: &[u8], reason: &str, seed: u64) -> anyhow::Result<()> {
    let folder = PathBuf::from("fuzz/artifacts").join(target);
    std::fs::create_dir_all(&folder)?;
    let file = folder.join(format!("seed-{seed}-{}-bytes", input.len()));
    std::fs::write(&file, input)?;
    let start = String::from_utf8_lossy(&input[..input.len().min(200)]).into_owned();
    bail!("{target}: {reason}\nthe input is in {} and begins with {start:?}", file.display())
}

fn replay(target: &Target, files: &[&str]) -> anyhow::Result<()> {
    for file in files {
        let input = std::fs::read(file).with_context(|| format!("cannot read {file}"))?;
        match target.limits.check(target.decode, &input) {
            Ok((cost, is_valid)) => println!("{file}: {} bytes, valid: {is_valid}, {cost:?}", input.len()),
            Err(reason) => bail!("{file}: {reason}"),
        }
    }
    Ok(())
}

fn write_seeds(folder: &Path) -> anyhow::Result<()> {
    for target in targets() {
        let folder = folder.join(target.name);
        std::fs::create_dir_all(&folder)?;
        for (index, seed) in seeds::of(target.name)?.iter().enumerate() {
            std::fs::write(folder.join(format!("seed-{index}")), seed)?;
        }
    }
    Ok(())
}
