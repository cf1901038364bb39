//! Counts the instructions of a call with callgrind. Unlike times, they do not depend on the load of the
//! machine. Callgrind counts user space only, not the kernel.

use std::path::Path;

use anyhow::{Context as _, ensure};

use crate::load::{self, ReplyForm, StopAfter, Target};
use crate::measure::{NO_WORSE, PROMPT, a2a_request};
use crate::report::{Report, Row, Sample};
use crate::testbed::{Process, Program, Testbed};

/// Calls of the shorter and of the longer run. The difference of the two runs excludes the start and the
/// stop of the process, and the first calls, which open connections.
const FEW: u64 = 500;
const MANY: u64 = 2_500;

/// Measures the floor and each program once per round.
pub async fn measure(testbed: &mut Testbed, rounds: usize, report: &mut Report) -> anyhow::Result<()> {
    let log = testbed.folder.join("callgrind.%p.log");
    testbed.wrapper = vec![
        "valgrind".to_owned(),
        "--tool=callgrind".to_owned(),
        "--callgrind-out-file=/dev/null".to_owned(),
        format!("--log-file={}", log.display()),
    ];
    let testbed = &*testbed;
    // The floor is the side without a program.
    let sides: Vec<Option<Program>> =
        std::iter::once(None).chain(testbed.programs().iter().copied().map(Some)).collect();
    for in_flight in [1, 64] {
        let mut counts: Vec<Vec<f64>> = vec![Vec::new(); sides.len()];
        for _ in 0..rounds {
            for (side, counts) in sides.iter().zip(&mut counts) {
                let few = count(testbed, *side, in_flight, FEW).await?;
                let many = count(testbed, *side, in_flight, MANY).await?;
                ensure!(many > few, "{MANY} calls took no more instructions than {FEW}");
                counts.push((many - few) as f64 / (MANY - FEW) as f64);
            }
        }
        let median = |counts: &[f64]| counts.iter().copied().collect::<Sample>().median();
        let ratio = |to: &[f64]| counts[1].iter().zip(to).map(|(bridge, other)| bridge / other).collect();
        let baseline = counts.get(2).map(Vec::as_slice);
        report.add(Row {
            figure: format!("instructions per call, {in_flight} in flight"),
            floor: Some(median(&counts[0])),
            bridge: median(&counts[1]),
            baseline: baseline.map(median),
            to_floor: Some(ratio(&counts[0])),
            to_baseline: baseline.map(ratio),
            baseline_goal: Some(NO_WORSE),
            ..Row::default()
        });
    }
    Ok(())
}

/// Instructions of a process from its start to its end.
async fn count(
    testbed: &Testbed,
    program: Option<Program>,
    in_flight: usize,
    calls: u64,
) -> anyhow::Result<u64> {
    let (mut process, target): (Process, Target) = match program {
        None => {
            let subjects = ["floor.call".to_owned()];
            (testbed.floor(1)?, Target::new(&subjects, a2a_request("SendMessage"), ReplyForm::Single))
        }
        Some(program) => {
            let bridge = testbed.bridge(program, &["/echo/0".to_owned()]).await?;
            (bridge.process, Target::new(&bridge.subjects, PROMPT.into(), ReplyForm::Single))
        }
    };
    load::call(&testbed.client, &target, in_flight, StopAfter::Calls(calls)).await?;
    process.stop();
    read_total(&testbed.folder.join(format!("callgrind.{}.log", process.id())))
}

/// Reads the total that callgrind writes at the end: `==123== Collected : 456`.
fn read_total(log: &Path) -> anyhow::Result<u64> {
    let text = std::fs::read_to_string(log).context("callgrind wrote no log")?;
    let total = text.lines().find_map(|line| line.split_once("Collected : "));
    let (_, total) = total.with_context(|| format!("callgrind did not finish:\n{text}"))?;
    Ok(total.trim().parse()?)
}
