//! `gateway`: serves the agents on NATS over HTTP until a signal stops it.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use tokio::signal::unix::{SignalKind, signal};

use super::run::{NO_NATS, REJECTED_BY_NATS, StopSignals, UNUSABLE_FILE, raise_file_limit};
use super::{CliError, CliResult, ConfigArgs, FAILED, INTERNAL_ERROR, INVALID_CONFIG, UNAVAILABLE};
use crate::bus::connect::{ConnectError, FirstConnection};
use crate::config::{self, Config};
use crate::gateway::{Gateway, GatewayError};
use crate::text::error_chain;

const DETAILS: &str = "\
Signals:
  SIGTERM, SIGINT (Ctrl-C)  stop; requests in flight may finish within `shutdown_grace`,
                            and a second signal skips this grace period
  SIGHUP                    reload tokens, origins, limits and the certificate";

#[derive(Debug, clap::Args)]
#[command(after_help = DETAILS)]
pub(super) struct GatewayArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Exit with code 69 if NATS is not reachable within 10 seconds, instead of waiting for it
    #[arg(long)]
    fail_fast: bool,
}

pub(super) async fn run(args: GatewayArgs) -> CliResult {
    let config = args.config.load()?;
    let mut stop = StopSignals::new().map_err(CliError::internal)?;
    let mut hang_up = signal(SignalKind::hangup()).map_err(CliError::internal)?;
    raise_file_limit();
    let first = if args.fail_fast { FirstConnection::FailFast } else { FirstConnection::Wait };
    let gateway = tokio::select! {
        gateway = Gateway::start(&config, first) => gateway.map_err(gateway_error)?,
        name = stop.next() => {
            tracing::info!("received {name} during startup; stopping");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let mut has_failed = false;
    loop {
        tokio::select! {
            name = stop.next() => {
                tracing::info!("received {name}; stopping. Send it again to skip the grace period");
                break;
            }
            () = gateway.failed() => {
                tracing::error!("stopping after an internal error");
                has_failed = true;
                break;
            }
            _ = hang_up.recv() => reload(&gateway, &args.config.config),
        }
    }
    tokio::select! {
        () = gateway.stop() => {}
        name = stop.next() => {
            tracing::warn!("received {name} again; skipping the grace period");
            gateway.skip_grace_period();
        }
    }
    Ok(ExitCode::from(if has_failed { INTERNAL_ERROR } else { 0 }))
}

fn reload(gateway: &Arc<Gateway>, file: &Path) {
    match config::load(file) {
        Ok(config) => reload_with(gateway, &config),
        Err(error) => {
            for problem in error.log_lines() {
                tracing::error!(problem, "invalid configuration");
            }
            tracing::error!("reload failed; keeping the current configuration");
        }
    }
}

/// Gives the gateway its part of a new configuration.
pub(super) fn reload_with(gateway: &Arc<Gateway>, config: &Config) {
    match gateway.reload(config) {
        Ok(()) => tracing::info!("configuration of the gateway reloaded"),
        Err(error) => {
            let error = error_chain(&error);
            tracing::error!(error, "reload of the gateway failed; keeping its current configuration");
        }
    }
}

pub(super) fn gateway_error(error: GatewayError) -> CliError {
    match &error {
        GatewayError::Connect(cause) => {
            if matches!(cause, ConnectError::Tls { .. } | ConnectError::Credentials { .. }) {
                return CliError::new(INVALID_CONFIG, error).hint(UNUSABLE_FILE);
            }
            let hint = if cause.is_refused() { REJECTED_BY_NATS } else { NO_NATS };
            CliError::new(UNAVAILABLE, error).hint(hint)
        }
        GatewayError::Subject(_) => CliError::new(INVALID_CONFIG, error),
        GatewayError::Tls(_) => {
            CliError::new(INVALID_CONFIG, error).hint("correct the file, or its path under `gateway.tls`")
        }
        GatewayError::Listen { .. } => CliError::new(FAILED, error)
            .hint("another program may use this port: choose another one as `gateway.listen`"),
    }
}
