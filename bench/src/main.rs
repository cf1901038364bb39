//! Measures the bridge and compares it with the floor, the least that any bridge can do, and with another
//! build of itself. Run it with `scripts/bench`.
//!
//! This program has three roles, each in its own process: the [`agent`], the [`floor`], and the callers.
//! The callers start everything else, including a NATS server and the bridge, and measure.
//!
//! The [`soak`] is a run of its own, over hours: `scripts/soak`.

mod agent;
mod floor;
mod instructions;
mod load;
mod measure;
mod plot;
mod report;
mod soak;
mod testbed;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use measure::Plan;

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["soak", seconds, folder] => return soak::run(seconds, Path::new(folder)).await,
        ["agent"] => agent::run().await?,
        ["floor", nats, call, stream] => floor::run(nats, call, stream).await?,
        options => return run_benchmark(options).await,
    }
    Ok(ExitCode::SUCCESS)
}

async fn run_benchmark(options: &[&str]) -> anyhow::Result<ExitCode> {
    let mut plan = Plan {
        rounds: 3,
        turns: 6,
        turn: Duration::from_millis(500),
        events: 1000,
        is_short: options.contains(&"--short"),
        only: None,
    };
    if plan.is_short {
        (plan.turns, plan.turn) = (2, Duration::from_millis(250));
    }
    let counts_instructions = options.contains(&"--instructions");
    let (mut json, mut baseline, mut plots, mut from) = (None, None, None, None);
    let mut options = options.iter().filter(|option| !matches!(**option, "--short" | "--instructions"));
    while let Some(option) = options.next() {
        let value = *options.next().with_context(|| format!("{option} needs a value"))?;
        match *option {
            "--json" => json = Some(value),
            "--plots" => plots = Some(Path::new(value)),
            "--from" => from = Some(value),
            "--baseline" => baseline = Some(executable(value)?),
            "--only" => plan.only = Some(measurements(value)?),
            "--rounds" => plan.rounds = value.parse()?,
            "--turns" => plan.turns = value.parse()?,
            unknown => bail!("unknown option {unknown}"),
        }
    }
    ensure!(plan.rounds > 0 && plan.turns > 0, "--rounds and --turns must be at least 1");
    if let Some(file) = from {
        let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?;
        let report = serde_json::from_str(&text).with_context(|| format!("{file} is not valid JSON"))?;
        plot::write_all(&report, plots.context("--from needs --plots")?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut report = report::Report::new(baseline.is_some());
    let mut testbed = testbed::Testbed::start(baseline).await?;
    if counts_instructions {
        instructions::measure(&mut testbed, plan.rounds, &mut report).await?;
    } else {
        measure::all(&testbed, &plan, &mut report).await?;
    }
    print!("{}", report.table());
    let saved = report.json();
    if let Some(file) = json {
        std::fs::write(file, serde_json::to_string_pretty(&saved)?)?;
    }
    if let Some(folder) = plots {
        plot::write_all(&saved, folder)?;
    }
    let exceeded = report.limits_exceeded();
    if plan.is_short && !exceeded.is_empty() {
        eprintln!(
            "figures beyond their limits, which are much looser than the goals:\n  {}",
            exceeded.join("\n  ")
        );
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

fn executable(path: &str) -> anyhow::Result<PathBuf> {
    let path = Path::new(path);
    ensure!(path.is_file(), "the baseline {} is not a file", path.display());
    Ok(path.canonicalize()?)
}

fn measurements(list: &str) -> anyhow::Result<Vec<String>> {
    let names: Vec<String> = list.split(',').map(str::to_owned).collect();
    for name in &names {
        let known = measure::NAMES;
        ensure!(known.contains(&name.as_str()), "--only {name}: the measurements are {}", known.join(", "));
    }
    Ok(names)
}
