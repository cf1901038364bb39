//! `run`: serve until told to stop.

use crate::text::error_chain;
use std::future::pending;
use std::path::Path;
use std::pin::pin;
use std::process::ExitCode;

use futures_util::FutureExt as _;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{DEFECT, Failure, TROUBLE, UNAVAILABLE};
use crate::bridge::{Bridge, BridgeError};
use crate::config::{self, Config};

pub(super) async fn run(config: Config) -> Result<ExitCode, Failure> {
    let defect = |error: std::io::Error| Failure::new(DEFECT, error);
    let mut stop = StopSignals::new().map_err(defect)?;
    let hang_up = signal(SignalKind::hangup()).map_err(defect)?;
    look_after_orphans();
    if config.agents.is_empty() {
        tracing::warn!("the settings name no agents; there is nothing to bridge");
    }
    let bridge = tokio::select! {
        bridge = Bridge::connect(&config) => bridge.map_err(failure)?,
        name = stop.next() => {
            tracing::info!("{name} before the bridge was up");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let mut serving = pin!(serve(&bridge, config, hang_up).fuse());
    let ended = tokio::select! {
        ended = &mut serving => ended,
        () = bridge.failed() => {
            tracing::error!("stopping after a defect");
            Ok(())
        }
        name = stop.next() => {
            tracing::info!("{name}: stopping; once more stops at once");
            Ok(())
        }
    };
    // A start or a reload under way has agents that only it knows, so it goes on to its end.
    tokio::select! {
        () = bridge.stop() => {}
        () = hurried(&mut stop, &bridge) => {}
        () = async { let _ = serving.await; pending().await } => {}
    }
    ended?;
    Ok(ExitCode::from(if bridge.has_panicked() { DEFECT } else { 0 }))
}

/// Serves the agents, and reads the settings again whenever somebody asks for it.
async fn serve(bridge: &Bridge, config: Config, mut hang_up: Signal) -> Result<(), Failure> {
    let file = config.file.clone();
    bridge.serve(config).await.map_err(failure)?;
    tracing::info!(
        agents = bridge.agents().len(),
        "serving; Ctrl-C or SIGTERM stops, SIGHUP reads the settings again"
    );
    while hang_up.recv().await.is_some() {
        reload(bridge, file.as_deref()).await;
    }
    Ok(())
}

/// Reads the settings again; if they are bad, everything stays as it is.
async fn reload(bridge: &Bridge, file: Option<&Path>) {
    let Some(file) = file else {
        return tracing::error!("SIGHUP: the settings did not come from a file");
    };
    let config = match config::load(file) {
        Ok(config) => config,
        Err(error) => {
            return tracing::error!(
                "SIGHUP: the settings are not taken over, everything stays as it is\n{error}"
            );
        }
    };
    match bridge.reload(config).await {
        Ok(done) => {
            tracing::info!(
                kept = done.kept, added = ?done.added, changed = ?done.changed, removed = ?done.removed,
                "SIGHUP: settings taken over"
            );
            if done.needs_restart {
                tracing::warn!(
                    "`nats`, `metrics` and `shutdown_grace` change only when the bridge is started anew"
                );
            }
        }
        Err(error) => {
            tracing::error!(error = error_chain(&error), "SIGHUP: an agent cannot be served");
        }
    }
}

/// Orphans below us come to us, and we see them to their end.
#[cfg(target_os = "linux")]
fn look_after_orphans() {
    use crate::process::{guard, reaper};
    // Not by path: the file may be replaced by a newer one while we run.
    guard::use_program("/proc/self/exe");
    if let Err(error) = reaper::become_subreaper() {
        tracing::warn!(%error, "orphans of agents will not be seen");
    }
    tokio_util::task::TaskTracker::new().spawn(async {
        if let Err(error) = reaper::run().await {
            tracing::warn!(%error, "orphans of agents will stay zombies");
        }
    });
}

#[cfg(not(target_os = "linux"))]
fn look_after_orphans() {
    tracing::warn!(
        "on this system an agent is ended with its process group: what leaves the group by setsid stays, agents \
         outlive a bridge that is killed with -9, and nobody checks whose port it is"
    );
}

/// A second signal skips every grace time; a third leaves everything as it is.
async fn hurried(stop: &mut StopSignals, bridge: &Bridge) {
    let name = stop.next().await;
    tracing::warn!("{name} again: stopping at once");
    bridge.skip_grace_periods();
    stop.next().await;
}

fn failure(error: BridgeError) -> Failure {
    let code = match error {
        BridgeError::Connect(_) => UNAVAILABLE,
        BridgeError::Subject(_) | BridgeError::Auth { .. } => super::CONFIG,
        BridgeError::Http(_)
        | BridgeError::Publish { .. }
        | BridgeError::Control { .. }
        | BridgeError::Stopping
        | BridgeError::Metrics { .. } => TROUBLE,
    };
    let hint = match &error {
        BridgeError::Connect(error) if error.is_refused() => Some(
            "the server wants other credentials: `credentials`, `user` and `password`, `token` or `nkey` under \
             `nats` in the settings",
        ),
        BridgeError::Connect(_) => {
            Some("is a nats-server running there? `nats.url` in the settings says where to look")
        }
        _ => None,
    };
    let failure = Failure::new(code, error);
    match hint {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    fn new() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "Ctrl-C",
        }
    }
}
