//! Counts the instructions of a call with callgrind, which do not depend on how busy the machine is.
//! Only those in user space: callgrind does not see the kernel.

use std::path::Path;

use anyhow::{Context as _, ensure};

use crate::load::{self, Form, Target, Until};
use crate::measure::{NO_WORSE, PROMPT, a2a, alone, target};
use crate::report::{Report, Row, Sample};
use crate::stage::{Process, Stage};

/// Calls of the shorter and of the longer run. The difference of the two runs has neither the start nor
/// the stop of the process in it, nor the first calls, which open connections.
const FEW: u64 = 500;
const MANY: u64 = 2_500;

/// Instructions per call of the floor and of each program, once per round.
pub async fn count(stage: &mut Stage, rounds: usize, report: &mut Report) -> anyhow::Result<()> {
    let log = stage.folder.join("callgrind.%p.log");
    stage.wrap(vec![
        "valgrind".to_owned(),
        "--tool=callgrind".to_owned(),
        "--callgrind-out-file=/dev/null".to_owned(),
        format!("--log-file={}", log.display()),
    ]);
    let stage = &*stage;
    for in_flight in [1, 64] {
        let mut floor = Vec::new();
        let mut programs = vec![Vec::new(); stage.programs().len()];
        for _ in 0..rounds {
            let few = of_floor(stage, in_flight, FEW).await?;
            floor.push(per_call(few, of_floor(stage, in_flight, MANY).await?)?);
            for (index, counts) in programs.iter_mut().enumerate() {
                let few = of_program(stage, index, in_flight, FEW).await?;
                counts.push(per_call(few, of_program(stage, index, in_flight, MANY).await?)?);
            }
        }
        let median = |counts: &[f64]| counts.iter().copied().collect::<Sample>().median();
        let ratio = |to: &[f64]| programs[0].iter().zip(to).map(|(bridge, other)| bridge / other).collect();
        let baseline = programs.get(1).map(Vec::as_slice);
        let figure = format!("instructions per call, {in_flight} in flight");
        report.add(Row {
            floor: Some(median(&floor)),
            baseline: baseline.map(median),
            to_floor: Some(ratio(&floor)),
            to_baseline: baseline.map(ratio),
            baseline_goal: Some(NO_WORSE),
            ..alone(&figure, "", median(&programs[0]), None)
        });
    }
    Ok(())
}

async fn of_floor(stage: &Stage, in_flight: usize, calls: u64) -> anyhow::Result<u64> {
    let target = target(&["floor.call".to_owned()], a2a("SendMessage"), Form::Single);
    counted(stage, stage.floor(1)?, &target, in_flight, calls).await
}

async fn of_program(stage: &Stage, index: usize, in_flight: usize, calls: u64) -> anyhow::Result<u64> {
    let bridge = stage.bridge(stage.programs()[index], &["/echo/0".to_owned()]).await?;
    let target = target(&bridge.subjects, PROMPT.into(), Form::Single);
    counted(stage, bridge.process, &target, in_flight, calls).await
}

/// Instructions of the process from its start to its end.
async fn counted(
    stage: &Stage,
    mut process: Process,
    target: &Target,
    in_flight: usize,
    calls: u64,
) -> anyhow::Result<u64> {
    load::call(&stage.client, target, in_flight, Until::Calls(calls)).await?;
    process.stop();
    collected(&stage.folder.join(format!("callgrind.{}.log", process.id())))
}

/// The total that callgrind writes at the end: `==123== Collected : 456`.
fn collected(log: &Path) -> anyhow::Result<u64> {
    let text = std::fs::read_to_string(log).context("callgrind wrote no log")?;
    let total = text.lines().find_map(|line| line.split_once("Collected : "));
    let (_, total) = total.with_context(|| format!("callgrind did not finish:\n{text}"))?;
    Ok(total.trim().parse()?)
}

fn per_call(few: u64, many: u64) -> anyhow::Result<f64> {
    ensure!(many > few, "{MANY} calls took no more instructions than {FEW}");
    Ok((many - few) as f64 / (MANY - FEW) as f64)
}
