//! Samples of the bridge, counts of the callers, and the verdict.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::testbed::Process;

/// After a fault, calls may fail for this long: a NATS server or an agent is away.
const DISTURBANCE: Duration = Duration::from_secs(15);
/// What the bridge remembers in the soak expires within two minutes; then memory is steady.
const WARM_UP: Duration = Duration::from_secs(180);
/// How much a figure may be higher at the end than at the start: this share, …
const GROWTH: f64 = 0.1;
/// … and this much in MiB, descriptors or threads.
const SLACK: f64 = 16.0;
/// Calls that may fail without a fault.
const MAX_FAILED: f64 = 0.001;

#[derive(Debug, Clone)]
pub struct Sample {
    pub at: Duration,
    pub memory: f64,
    /// Not a number if the system does not show them: the bridge is not dumpable, so that only root sees them.
    pub descriptors: f64,
    pub threads: f64,
    /// Of the calls since the last sample, in milliseconds.
    pub p50: f64,
    pub p99: f64,
    pub events: Vec<&'static str>,
}

#[derive(Debug, Default, Clone)]
struct Counts {
    ok: u64,
    failed: u64,
    /// Failed while a fault disturbed them.
    disturbed: u64,
    last_error: String,
}

#[derive(Default)]
pub struct Recorder {
    latencies: Mutex<Vec<Duration>>,
    counts: Mutex<BTreeMap<&'static str, Counts>>,
    disturbed: Mutex<Option<Instant>>,
}

impl Recorder {
    pub fn latency(&self, time: Duration) {
        self.latencies.lock().expect("no panic").push(time);
    }

    /// Calls that are running now, or begin soon, may fail.
    pub fn disturb(&self) {
        *self.disturbed.lock().expect("no panic") = Some(Instant::now());
    }

    pub fn ended(&self, operation: &'static str, start: Instant, result: &anyhow::Result<()>) {
        let disturbed = *self.disturbed.lock().expect("no panic");
        let is_disturbed = disturbed.is_some_and(|at| start < at + DISTURBANCE && Instant::now() > at);
        let mut counts = self.counts.lock().expect("no panic");
        let counts = counts.entry(operation).or_default();
        match result {
            Ok(()) => counts.ok += 1,
            Err(_) if is_disturbed => counts.disturbed += 1,
            Err(error) => {
                counts.failed += 1;
                counts.last_error = format!("{error:#}");
            }
        }
    }

    pub fn sample(
        &self,
        bridge: &Process,
        at: Duration,
        events: Vec<&'static str>,
    ) -> anyhow::Result<Sample> {
        let mut latencies = std::mem::take(&mut *self.latencies.lock().expect("no panic"));
        latencies.sort_unstable();
        let quantile = |share: f64| {
            let rank = (latencies.len() as f64 * share).ceil() as usize;
            latencies.get(rank.max(1) - 1).map_or(0.0, |time| time.as_secs_f64() * 1e3)
        };
        Ok(Sample {
            at,
            memory: bridge.rss()?,
            descriptors: bridge.entries("fd").unwrap_or(f64::NAN),
            threads: bridge.entries("task")?,
            p50: quantile(0.5),
            p99: quantile(0.99),
            events,
        })
    }

    fn failed(&self) -> f64 {
        let counts = self.counts.lock().expect("no panic");
        let (failed, all) = counts.values().fold((0, 0), |(failed, all), counts| {
            (failed + counts.failed, all + counts.ok + counts.failed + counts.disturbed)
        });
        failed as f64 / (all as f64).max(1.0)
    }

    /// One line for each kind of caller.
    pub fn table(&self) -> String {
        let mut text = format!("\n{:<26} {:>9} {:>7} {:>13}\n", "callers", "ok", "failed", "during faults");
        for (operation, counts) in self.counts.lock().expect("no panic").iter() {
            let Counts { ok, failed, disturbed, last_error } = counts;
            let _ = writeln!(text, "{operation:<26} {ok:>9} {failed:>7} {disturbed:>13}  {last_error}");
        }
        text
    }
}

pub struct Csv(std::fs::File);

impl Csv {
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        let mut file = std::fs::File::create(path)?;
        writeln!(file, "seconds,rss_mib,descriptors,threads,p50_ms,p99_ms,events")?;
        Ok(Self(file))
    }

    pub fn write(&mut self, sample: &Sample) -> anyhow::Result<()> {
        let Sample { at, memory, descriptors, threads, p50, p99, events } = sample;
        let (seconds, events) = (at.as_secs_f64(), events.join("; "));
        writeln!(self.0, "{seconds:.1},{memory:.1},{descriptors},{threads},{p50:.2},{p99:.2},{events}")?;
        Ok(())
    }
}

pub struct Verdict {
    pub text: String,
    pub is_flat: bool,
}

/// Compares the medians of the first, the middle and the last part of the run, after the warm-up.
pub fn verdict(samples: &[Sample], recorder: &Recorder) -> Verdict {
    let end = samples.last().map_or(Duration::ZERO, |sample| sample.at);
    let warm_up = WARM_UP.min(end / 4);
    let steady: Vec<_> = samples.iter().filter(|sample| sample.at >= warm_up).collect();
    let part = (steady.len() / 6).max(1);
    let middle = (steady.len() / 2).saturating_sub(part / 2);
    let parts =
        [&steady[..part.min(steady.len())], &steady[middle..], &steady[steady.len().saturating_sub(part)..]];
    let mut text = format!(
        "\n{:<14} {:>9} {:>9} {:>9}  after {} s of warm-up, medians of {part} samples\n",
        "",
        "start",
        "middle",
        "end",
        warm_up.as_secs()
    );
    let mut is_flat = true;
    let figures: [(&str, fn(&Sample) -> f64, bool); 5] = [
        ("memory, MiB", |sample| sample.memory, true),
        ("descriptors", |sample| sample.descriptors, true),
        ("threads", |sample| sample.threads, true),
        ("p50, ms", |sample| sample.p50, false),
        ("p99, ms", |sample| sample.p99, false),
    ];
    for (name, figure, must_be_flat) in figures {
        let [start, middle, end] =
            parts.map(|part| median(part.iter().take(steady.len() / 6 + 1).map(|sample| figure(sample))));
        let grows = must_be_flat && end > start * (1.0 + GROWTH) + SLACK;
        is_flat &= !grows;
        let note = match grows {
            true => "  GROWS",
            false if start.is_nan() => "  not readable by this user",
            false => "",
        };
        let _ = writeln!(text, "{name:<14} {start:>9.1} {middle:>9.1} {end:>9.1}{note}");
    }
    let failed = recorder.failed();
    if failed > MAX_FAILED {
        is_flat = false;
        let _ = writeln!(text, "{:.2}% of the operations failed without a fault", failed * 100.0);
    }
    text.push_str(if is_flat { "flat" } else { "NOT flat" });
    Verdict { text, is_flat }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}
