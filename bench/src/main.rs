//! How fast the bridge is, compared with the least that any bridge can do, and with another build of
//! itself. Run it with `scripts/bench`.
//!
//! One program in three roles, each in a process of its own: the [`agent`], the [`floor`], and
//! the callers, which start the others together with a NATS server and the bridge and measure.

mod agent;
mod floor;
mod instructions;
mod load;
mod measure;
mod report;
mod stage;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use measure::Extent;

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["agent"] => agent::run().await?,
        ["floor", nats, call, stream] => floor::run(nats, call, stream).await?,
        options => return measured(options).await,
    }
    Ok(ExitCode::SUCCESS)
}

async fn measured(options: &[&str]) -> anyhow::Result<ExitCode> {
    let mut extent = Extent {
        rounds: 3,
        turns: 6,
        turn: Duration::from_millis(500),
        events: 1000,
        is_short: options.contains(&"--short"),
        only: None,
    };
    if extent.is_short {
        (extent.turns, extent.turn) = (2, Duration::from_millis(250));
    }
    let counts_instructions = options.contains(&"--instructions");
    let (mut json, mut baseline) = (None, None);
    let mut options = options.iter().filter(|option| !matches!(**option, "--short" | "--instructions"));
    while let Some(option) = options.next() {
        let value = options.next().with_context(|| format!("{option} needs a value"))?;
        match *option {
            "--json" => json = Some(*value),
            "--baseline" => baseline = Some(executable(value)?),
            "--only" => extent.only = Some(names(value)?),
            "--rounds" => extent.rounds = value.parse()?,
            "--turns" => extent.turns = value.parse()?,
            unknown => bail!("{unknown} is not an option"),
        }
    }
    ensure!(extent.rounds > 0 && extent.turns > 0, "--rounds and --turns must be at least 1");
    let mut report = report::Report::new(baseline.is_some());
    let mut stage = stage::Stage::start(baseline).await?;
    if counts_instructions {
        instructions::count(&mut stage, extent.rounds, &mut report).await?;
    } else {
        measure::all(&stage, &extent, &mut report).await?;
    }
    print!("{}", report.table());
    if let Some(file) = json {
        std::fs::write(file, serde_json::to_string_pretty(&report.json())?)?;
    }
    let far_off = report.far_off();
    if extent.is_short && !far_off.is_empty() {
        eprintln!("beyond the limit, which is far from the goal:\n  {}", far_off.join("\n  "));
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

fn executable(path: &str) -> anyhow::Result<std::path::PathBuf> {
    let path = Path::new(path);
    ensure!(path.is_file(), "the baseline {} is not a file", path.display());
    Ok(path.canonicalize()?)
}

fn names(list: &str) -> anyhow::Result<Vec<String>> {
    let names: Vec<String> = list.split(',').map(str::to_owned).collect();
    for name in &names {
        let known = measure::NAMES;
        ensure!(known.contains(&name.as_str()), "--only {name}: the measurements are {}", known.join(", "));
    }
    Ok(names)
}
