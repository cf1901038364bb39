//! The bridge's side of a child under a guard.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};

use super::brand::Brand;
use super::child::{Exit, Host, Order, Phase, Spec, Started, pid_of, read_output, surround};
use super::guard;
use super::output::Output;
use super::reaper::{self, Kin};
use crate::tasks::OnFailure;

pub(super) async fn start(program: &Path, spec: &Spec, host: &Host, output: &Output) -> io::Result<Started> {
    let (ours, theirs) = guard::tie()?;
    let mut command = std::process::Command::new(program);
    command
        .arg0(format!("a2a-bridge: guard of {}", spec.agent))
        .arg(guard::WORD)
        .arg(spec.stop_signal.as_str())
        .args(&spec.command);
    let mut command = tokio::process::Command::from(command);
    surround(&mut command, spec, host);
    command.stdin(Stdio::from(theirs));
    let mut child = reaper::spawn(&mut command)?;
    // The command holds a copy of the guard's end, and the guard's death would go unseen.
    drop(command);
    read_output(&mut child, host, output);
    let guard_pid = pid_of(&child);
    // There as long as nobody has waited for it.
    let brand = Brand::of(guard_pid);
    let mark = host.records.as_ref().map(|records| records.mark(&spec.agent));
    let kin = Kin { brand, mark };
    let (reports, orders) = UnixStream::from_std(ours)?.into_split();
    let mut reports = BufReader::new(reports).lines();
    let first = reports.next_line().await?.unwrap_or_default();
    let pid = match first.split_once(' ') {
        Some(("started", pid)) => pid.parse().ok(),
        Some(("failed", number)) => {
            let number = number.parse().unwrap_or_default();
            reaper::wait(&mut child).await;
            return Err(io::Error::from_raw_os_error(number));
        }
        _ => None,
    };
    let Some(pid) = pid else {
        reaper::wait(&mut child).await;
        reaper::end_orphans(&kin).await;
        return Err(io::Error::other("the guard process ended before it said a word"));
    };
    let (told, phase) = watch::channel(Phase::Running);
    let (sender, received) = mpsc::channel(4);
    let keeper = Keeper { agent: Arc::clone(&spec.agent), child, kin, told, orders };
    host.tasks.spawn("agent guard", OnFailure::StopBridge, keeper.run(reports, received));
    Ok(Started { pid, guard: Some(guard_pid), phase, orders: sender })
}

struct Keeper {
    agent: Arc<str>,
    child: tokio::process::Child,
    kin: Kin,
    told: watch::Sender<Phase>,
    orders: OwnedWriteHalf,
}

impl Keeper {
    async fn run(
        mut self,
        mut reports: Lines<BufReader<OwnedReadHalf>>,
        mut received: mpsc::Receiver<Order>,
    ) {
        let mut exit = None;
        let mut open = true;
        loop {
            tokio::select! {
                report = reports.next_line() => {
                    let Ok(Some(report)) = report else { break };
                    if let Some(status) = report.strip_prefix("exited ").map(guard::read_status) {
                        exit = Some(status);
                        self.told.send_replace(Phase::Exited(status));
                    }
                }
                order = received.recv(), if open => {
                    let line = match order {
                        Some(Order::Stop(grace)) => format!("stop {}\n", grace.as_millis()),
                        Some(Order::Kill) => "kill\n".to_owned(),
                        None => {
                            open = false;
                            continue;
                        }
                    };
                    // A guard that is gone is noticed by the end of its reports.
                    let _ = self.orders.write_all(line.as_bytes()).await;
                }
            }
        }
        let orderly = reaper::wait(&mut self.child).await;
        if !orderly {
            tracing::warn!(agent = %self.agent, "a guard process was killed; ending what it guarded");
            reaper::end_orphans(&self.kin).await;
        }
        let exit = if orderly { exit.unwrap_or(Exit::Unknown) } else { Exit::WithGuard };
        self.told.send_replace(Phase::Gone(exit));
    }
}
