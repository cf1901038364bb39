//! Figures of the bridge's own process, under the names that all Prometheus client libraries use.

use std::fmt;
use std::fs;
use std::sync::OnceLock;

use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage};
use nix::sys::time::TimeVal;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType::{Counter, Gauge};

use crate::process::procfs::Stat;

/// Clock ticks per second in `/proc`, the same on every architecture that the bridge supports.
const TICKS_PER_SECOND: f64 = 100.0;

/// What the system does not report is left out.
#[derive(Debug, Default)]
pub(super) struct ProcessFigures {
    cpu_seconds: Option<f64>,
    start_time: Option<f64>,
    resident: Option<u64>,
    virtual_memory: Option<u64>,
    threads: Option<u64>,
    open_files: Option<u64>,
    max_files: Option<u64>,
}

impl ProcessFigures {
    pub(super) fn read() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let figure = |name: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(name))?;
            value.split_ascii_whitespace().next()?.parse::<u64>().ok()
        };
        let kilobytes = |name: &str| figure(name)?.checked_mul(1024);
        let usage = getrusage(UsageWho::RUSAGE_SELF).ok();
        Self {
            cpu_seconds: usage.map(|usage| seconds(usage.user_time()) + seconds(usage.system_time())),
            start_time: start_time(),
            resident: kilobytes("VmRSS:"),
            virtual_memory: kilobytes("VmSize:"),
            threads: figure("Threads:"),
            open_files: open_files(),
            max_files: getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(soft, _)| soft),
        }
    }

    pub(super) fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        // The encoder adds `_total`.
        if let Some(seconds) = self.cpu_seconds {
            let (name, help) = ("process_cpu_seconds", "CPU time of the bridge, without its agents.");
            let mut counter = encoder.encode_descriptor(name, help, None, Counter)?;
            counter.encode_counter::<NoLabelSet, _, u64>(&seconds, None)?;
        }
        if let Some(seconds) = self.start_time {
            let (name, help) = ("process_start_time_seconds", "Start time of the bridge, in Unix time.");
            encoder.encode_descriptor(name, help, None, Gauge)?.encode_gauge(&seconds)?;
        }
        for (name, help, value) in [
            ("process_resident_memory_bytes", "Resident memory.", self.resident),
            ("process_virtual_memory_bytes", "Virtual memory.", self.virtual_memory),
            ("process_threads", "Threads.", self.threads),
            ("process_open_fds", "Open file descriptors.", self.open_files),
            ("process_max_fds", "Maximum number of open file descriptors.", self.max_files),
        ] {
            if let Some(value) = value {
                encoder.encode_descriptor(name, help, None, Gauge)?.encode_gauge(&value)?;
            }
        }
        Ok(())
    }
}

#[expect(clippy::cast_precision_loss, reason = "seconds and microseconds of CPU time are far below 2^52")]
fn seconds(time: TimeVal) -> f64 {
    time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6
}

/// Computed once: the boot time follows corrections of the clock, and a start time that moves would look like a restart.
#[expect(clippy::cast_precision_loss, reason = "ticks since boot are far below 2^52")]
fn start_time() -> Option<f64> {
    static START: OnceLock<Option<f64>> = OnceLock::new();
    *START.get_or_init(|| {
        let own = Stat::read(std::process::id().cast_signed())?;
        let text = fs::read_to_string("/proc/stat").ok()?;
        let boot = text.lines().find_map(|line| line.strip_prefix("btime "))?;
        Some(boot.trim().parse::<f64>().ok()? + own.start as f64 / TICKS_PER_SECOND)
    })
}

/// Linux 6.2 and later report the number as the size of the directory. Others have to list it.
fn open_files() -> Option<u64> {
    match fs::metadata("/proc/self/fd").ok()?.len() {
        // The descriptor of the directory is one of them.
        0 => Some((fs::read_dir("/proc/self/fd").ok()?.count() as u64).saturating_sub(1)),
        count => Some(count),
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn the_figures_are_plausible() {
        let before = ProcessFigures::read();
        let resident = before.resident.unwrap();
        assert!(resident > 1 << 20 && before.virtual_memory.unwrap() > resident, "{before:?}");
        assert!(before.threads.unwrap() >= 1 && before.cpu_seconds.unwrap() >= 0.0, "{before:?}");
        assert!(before.open_files.unwrap() < before.max_files.unwrap(), "{before:?}");
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
        let start = before.start_time.unwrap();
        assert!(start > now - 24.0 * 3600.0 && start < now + 2.0, "{start} {now}");
        let files: Vec<_> = (0..200).map(|_| fs::File::open("/dev/null").unwrap()).collect();
        let after = ProcessFigures::read();
        assert!(after.open_files.unwrap() >= before.open_files.unwrap() + 100, "{before:?} {after:?}");
        drop(files);
        assert_eq!(after.start_time, before.start_time);
    }
}
