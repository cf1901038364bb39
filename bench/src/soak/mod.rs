//! Runs the bridge under a mixed, steady load for hours, with faults now and then, and records whether its memory,
//! descriptors and latency stay as they are. Run it with `scripts/soak`.

mod plot;
mod record;
mod site;
mod workload;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use record::{Recorder, Sample};
use site::Site;
use workload::Workload;

pub async fn run(seconds: &str, folder: &Path) -> anyhow::Result<ExitCode> {
    let total = Duration::from_secs(seconds.parse().context("the duration is not a number of seconds")?);
    std::fs::create_dir_all(folder)?;
    let mut site = Site::start().await?;
    let recorder = Arc::new(Recorder::default());
    let workload = Workload::start(&site, &recorder).await?;
    let samples = observe(&mut site, &recorder, total, folder).await;
    workload.stop().await;
    site.stop();
    let samples = samples?;
    plot::write_all(&samples, folder)?;
    print!("{}", recorder.table());
    let verdict = record::verdict(&samples, &recorder);
    println!("{}", verdict.text);
    println!("samples and plots are in {}", folder.display());
    Ok(if verdict.is_flat { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Takes samples and causes faults until the time is over.
async fn observe(
    site: &mut Site,
    recorder: &Recorder,
    total: Duration,
    folder: &Path,
) -> anyhow::Result<Vec<Sample>> {
    let (start, mut samples) = (Instant::now(), Vec::new());
    let every = (total / 60).clamp(Duration::from_secs(1), Duration::from_secs(10));
    let mut faults = faults(total);
    let mut csv = record::Csv::create(&folder.join("soak.csv"))?;
    while start.elapsed() < total {
        tokio::time::sleep(every).await;
        let mut events = Vec::new();
        for fault in faults.iter_mut().filter(|fault| start.elapsed() >= fault.next) {
            fault.next += fault.every;
            recorder.disturb();
            (fault.cause)(site).with_context(|| fault.name.to_owned())?;
            events.push(fault.name);
        }
        let sample = recorder.sample(&site.bridge, start.elapsed(), events)?;
        csv.write(&sample)?;
        samples.push(sample);
    }
    Ok(samples)
}

/// Something that happens to a bridge in production now and then.
struct Fault {
    name: &'static str,
    next: Duration,
    every: Duration,
    cause: fn(&mut Site) -> anyhow::Result<()>,
}

/// A short run has some of each, a long one has them every few minutes. None happens in the last tenth.
fn faults(total: Duration) -> Vec<Fault> {
    let fault = |name, share: u32, most: u64, cause| {
        let every = (total / share).clamp(Duration::from_secs(8), Duration::from_secs(most));
        Fault { name, next: every, every, cause }
    };
    vec![
        fault("NATS server restarted", 3, 20 * 60, Site::restart_nats),
        fault("configuration reloaded", 5, 5 * 60, Site::reload),
        fault("agent killed", 4, 3 * 60, Site::kill_agent),
    ]
}
