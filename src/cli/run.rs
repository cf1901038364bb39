//! `run`: serve until told to stop.

use std::process::ExitCode;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{DEFECT, Failure, TROUBLE, UNAVAILABLE};
use crate::bridge::{Bridge, BridgeError};
use crate::config::Config;

pub(super) async fn run(config: Config) -> Result<ExitCode, Failure> {
    let mut stop = StopSignals::new().map_err(|error| Failure::new(DEFECT, error))?;
    if config.agents.is_empty() {
        tracing::warn!("the settings name no agents; there is nothing to bridge");
    }
    let bridge = tokio::select! {
        bridge = Bridge::start(config) => bridge.map_err(failure)?,
        name = stop.next() => {
            tracing::info!("{name} before the bridge was up");
            return Ok(ExitCode::SUCCESS);
        }
    };
    tracing::info!(
        agents = bridge.agents().count(),
        "serving; Ctrl-C or SIGTERM stops"
    );
    tokio::select! {
        name = stop.next() => tracing::info!("{name}: stopping; once more stops at once"),
        () = bridge.failed() => tracing::error!("stopping after a defect"),
    }
    tokio::select! {
        () = bridge.stop() => {}
        () = hurried(&mut stop, &bridge) => {}
    }
    Ok(ExitCode::from(if bridge.has_defect() { DEFECT } else { 0 }))
}

/// A second signal skips every grace time; a third leaves everything as it is.
async fn hurried(stop: &mut StopSignals, bridge: &Bridge) {
    let name = stop.next().await;
    tracing::warn!("{name} again: stopping at once");
    bridge.hurry();
    stop.next().await;
}

fn failure(error: BridgeError) -> Failure {
    let code = match error {
        BridgeError::Connect(_) => UNAVAILABLE,
        BridgeError::Subject(_) | BridgeError::Auth { .. } => super::CONFIG,
        BridgeError::Http(_) | BridgeError::Publish { .. } => TROUBLE,
    };
    let is_connection = matches!(error, BridgeError::Connect(_));
    let failure = Failure::new(code, error);
    if is_connection {
        failure.hint("is a nats-server running there? `nats.url` in the settings says where to look")
    } else {
        failure
    }
}

struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "Ctrl-C",
        }
    }
}
