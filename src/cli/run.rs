//! `run`: serves the configured agents until a signal stops the bridge.

use std::future::pending;
use std::path::Path;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;

use futures_util::FutureExt as _;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::gateway::{gateway_error, reload_with};
use super::systemd::Systemd;
use super::{CliError, CliResult, ConfigArgs, FAILED, INTERNAL_ERROR, INVALID_CONFIG, UNAVAILABLE};
use crate::background::OnPanic;
use crate::bridge::{Bridge, BridgeError, ReloadError};
use crate::bus::connect::{ConnectError, FirstConnection};
use crate::config::{self, Config, Environment};
use crate::gateway::Gateway;
#[cfg(target_os = "linux")]
use crate::process::cgroup::Cgroups;
use crate::process::child::{ProcessHost, is_inherited};
use crate::text::error_chain;

pub(super) const UNUSABLE_FILE: &str = "correct the file, or its path under `nats`";
pub(super) const REJECTED_BY_NATS: &str = "the server rejects these credentials: set `credentials`, `user` and `password`, \
                                           `token` or `nkey` under `nats` in the configuration";
pub(super) const NO_NATS: &str =
    "is a nats-server running there? Set its URL as `nats.url` in the configuration";
pub(super) const NO_JETSTREAM: &str = "start nats-server 2.11 or newer with `-js`, and give the bridge the permissions in \
                                       deploy/nats-permissions.conf; or set `nats.jetstream.mode: auto`";

const DETAILS: &str = "\
Signals:
  SIGTERM, SIGINT (Ctrl-C)  stop; calls in flight may finish within `shutdown_grace`,
                            and a second signal skips this grace period
  SIGHUP                    reload the configuration file";

#[derive(Debug, clap::Args)]
#[command(after_help = DETAILS)]
pub(super) struct RunArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Exit with code 69 if NATS is not reachable within 10 seconds, instead of waiting for it
    #[arg(long)]
    fail_fast: bool,
}

impl RunArgs {
    fn first_connection(&self) -> FirstConnection {
        if self.fail_fast { FirstConnection::FailFast } else { FirstConnection::Wait }
    }
}

/// Reads the configuration, and protects the process from the agents that it will launch. Call it before other threads
/// start.
pub(super) fn prepare(args: &RunArgs) -> CliResult<(Config, Environment)> {
    // Other processes of the same user can then read neither the memory nor the environment of the bridge. It also
    // leaves no core dumps.
    #[cfg(target_os = "linux")]
    if let Err(error) = nix::sys::prctl::set_dumpable(false) {
        tracing::warn!(%error, "agents that run as the same user may read the memory of the bridge");
    }
    let mut environment = Environment::default();
    let config = config::load_with(&args.config.config, &environment)
        .map_err(|error| CliError::new(INVALID_CONFIG, error))?;
    environment.hide(is_inherited);
    Ok((config, environment))
}

pub(super) async fn run(args: RunArgs, config: Config, environment: Environment) -> CliResult {
    let mut stop = StopSignals::new().map_err(CliError::internal)?;
    let hang_up = signal(SignalKind::hangup()).map_err(CliError::internal)?;
    let host = process_host();
    let systemd = Arc::new(Systemd::from_environment());
    let (reporting, stop_reporting) = (Arc::clone(&systemd), host.tasks.stop.clone());
    host.tasks.spawn("systemd", OnPanic::Log, async move { reporting.report(stop_reporting).await });
    systemd.waiting_for_nats();
    if config.agents.is_empty() {
        tracing::warn!("the configuration has no agents; the bridge has nothing to serve");
    }
    let bridge = tokio::select! {
        bridge = Bridge::connect(&config, host, args.first_connection()) => bridge.map_err(bridge_error)?,
        name = stop.next() => {
            systemd.stopping();
            tracing::info!("received {name} during startup; stopping");
            return Ok(ExitCode::SUCCESS);
        }
    };
    let gateway = match start_gateway(&config, args.first_connection()).await {
        Ok(gateway) => gateway,
        Err(error) => {
            bridge.stop().await;
            return Err(error);
        }
    };
    let services = Services { bridge: &bridge, gateway: gateway.as_ref(), systemd: &systemd };
    let mut serving = pin!(services.serve(config, &environment, hang_up).fuse());
    let result = tokio::select! {
        result = &mut serving => result,
        () = services.gateway_failed() => {
            tracing::error!("stopping after an internal error of the gateway");
            Ok(())
        }
        () = bridge.stopping() => {
            tracing::error!("stopping after an internal error");
            Ok(())
        }
        name = stop.next() => {
            tracing::info!("received {name}; stopping. Send it again to skip the grace period");
            Ok(())
        }
    };
    systemd.stopping();
    // A start or reload in progress must finish: only it knows the agents that it has started so far.
    tokio::select! {
        () = services.stop() => {}
        () = services.stop_faster(&mut stop) => {}
        () = async { let _ = serving.await; pending().await } => {}
    }
    result?;
    Ok(ExitCode::from(if bridge.has_panicked() { INTERNAL_ERROR } else { 0 }))
}

/// The gateway within the bridge, if it is configured.
async fn start_gateway(config: &Config, first: FirstConnection) -> CliResult<Option<Arc<Gateway>>> {
    let is_configured = config.gateway.as_ref().is_some_and(|gateway| gateway.listen.is_some());
    if !is_configured {
        return Ok(None);
    }
    Gateway::start(config, first).await.map(Some).map_err(gateway_error)
}

/// What `run` serves.
struct Services<'a> {
    bridge: &'a Bridge,
    gateway: Option<&'a Arc<Gateway>>,
    systemd: &'a Systemd,
}

impl Services<'_> {
    /// Serves the agents, and reloads the configuration on SIGHUP.
    async fn serve(&self, config: Config, environment: &Environment, mut hang_up: Signal) -> CliResult<()> {
        let Self { bridge, gateway, systemd } = self;
        let file = config.file.clone();
        bridge.serve(config).await.map_err(bridge_error)?;
        tracing::info!(
            agents = bridge.agents().len(),
            "serving; stop with Ctrl-C or SIGTERM, reload the configuration with SIGHUP"
        );
        systemd.ready(bridge.agents().len());
        while hang_up.recv().await.is_some() {
            systemd.reloading();
            reload(bridge, *gateway, environment, file.as_deref()).await;
            systemd.ready(bridge.agents().len());
        }
        Ok(())
    }

    async fn gateway_failed(&self) {
        match self.gateway {
            Some(gateway) => gateway.failed().await,
            None => pending().await,
        }
    }

    /// Stops both at the same time: requests in flight at the gateway need the bridge.
    async fn stop(&self) {
        let gateway = async {
            if let Some(gateway) = self.gateway {
                gateway.stop().await;
            }
        };
        tokio::join!(gateway, self.bridge.stop());
    }

    /// A second signal skips all grace periods; a third one exits immediately.
    async fn stop_faster(&self, stop: &mut StopSignals) {
        let name = stop.next().await;
        tracing::warn!("received {name} again; skipping the grace period");
        self.bridge.skip_grace_periods();
        if let Some(gateway) = self.gateway {
            gateway.skip_grace_period();
        }
        stop.next().await;
    }
}

async fn reload(
    bridge: &Bridge,
    gateway: Option<&Arc<Gateway>>,
    environment: &Environment,
    file: Option<&Path>,
) {
    let Some(file) = file else {
        return tracing::error!("reload failed: the configuration did not come from a file");
    };
    let config = match config::load_with(file, environment) {
        Ok(config) => config,
        Err(error) => {
            for problem in error.log_lines() {
                tracing::error!(problem, "invalid configuration");
            }
            return tracing::error!("reload failed; keeping the current configuration");
        }
    };
    if let Some(gateway) = gateway {
        reload_with(gateway, &config);
    }
    let done = match bridge.reload(config).await {
        Ok(done) => done,
        Err(ReloadError(errors)) => {
            for error in errors {
                tracing::error!(error = error_chain(&error), "reload failed");
            }
            return tracing::error!(
                "reload failed; keeping the current configuration. Fix the errors and send SIGHUP again"
            );
        }
    };
    for error in &done.failed {
        tracing::error!(error = error_chain(error), "the agent is not served with the new configuration");
    }
    let summary = if done.failed.is_empty() {
        "configuration reloaded"
    } else {
        "configuration reloaded except for failed agents; fix the errors and send SIGHUP again"
    };
    tracing::info!(
        kept = done.kept, added = ?done.added, changed = ?done.changed, updated = ?done.updated,
        removed = ?done.removed, failed = done.failed.len(),
        "{summary}"
    );
    if done.nats_credentials {
        tracing::info!("the credentials for NATS have changed; the bridge uses them when it connects again");
    }
    if !done.needs_restart.is_empty() {
        let settings = done.needs_restart.join(", ");
        tracing::warn!(settings, "these changes take effect only after a restart of the bridge");
    }
}

/// Runs agents under guards, and adopts and reaps processes that outlive the agent which started them.
#[cfg(target_os = "linux")]
pub(super) fn process_host() -> ProcessHost {
    // Not the path of the program: an upgrade may replace that file while the bridge runs.
    let mut host = ProcessHost::only_guarded("/proc/self/exe");
    host.soft_files = raise_file_limit();
    host.cgroups = Cgroups::detect().map(Arc::new);
    if let Some(cgroups) = &host.cgroups {
        let (group, controllers) = (cgroups.path().display(), cgroups.controllers());
        tracing::debug!(%group, ?controllers, "each agent gets a cgroup of its own");
    }
    // Fails on Linux before 3.4.
    if let Err(error) = nix::sys::prctl::set_child_subreaper(true) {
        tracing::warn!(%error, "cannot adopt orphans of agents");
    }
    let reaper = host.reaper.clone();
    tokio_util::task::TaskTracker::new().spawn(async move {
        if let Some(reaper) = reaper
            && let Err(error) = reaper.run().await
        {
            tracing::warn!(%error, "cannot reap orphans of agents");
        }
    });
    host
}

/// Raises the number of files that the bridge may open to the hard limit: every call in flight needs one. Returns the
/// limit from before, which agents get.
#[cfg(target_os = "linux")]
pub(super) fn raise_file_limit() -> Option<u64> {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};

    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    if let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        tracing::warn!(%error, soft, hard, "cannot raise the limit of open files");
    }
    Some(soft)
}

#[cfg(not(target_os = "linux"))]
pub(super) fn raise_file_limit() -> Option<u64> {
    None
}

#[cfg(not(target_os = "linux"))]
pub(super) fn process_host() -> ProcessHost {
    tracing::warn!(
        "this system is not Linux: the bridge stops an agent's process group only, so processes that called setsid \
         keep running, agents outlive a bridge killed with SIGKILL, and `verify_port` has no effect"
    );
    ProcessHost::default()
}

fn bridge_error(error: BridgeError) -> CliError {
    match &error {
        BridgeError::Connect(cause) => {
            if matches!(cause, ConnectError::Tls { .. } | ConnectError::Credentials { .. }) {
                return CliError::new(INVALID_CONFIG, error).hint(UNUSABLE_FILE);
            }
            let hint = if cause.is_refused() { REJECTED_BY_NATS } else { NO_NATS };
            CliError::new(UNAVAILABLE, error).hint(hint)
        }
        BridgeError::JetStream(_) => CliError::new(UNAVAILABLE, error).hint(NO_JETSTREAM),
        BridgeError::Subject(_) | BridgeError::Auth { .. } => CliError::new(INVALID_CONFIG, error),
        BridgeError::Http(_)
        | BridgeError::Peers(_)
        | BridgeError::Publish { .. }
        | BridgeError::Control { .. }
        | BridgeError::Files { .. }
        | BridgeError::Sessions { .. }
        | BridgeError::Stopping
        | BridgeError::Metrics { .. } => CliError::new(FAILED, error),
    }
}

pub(super) struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StopSignals {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    pub(super) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "Ctrl-C",
        }
    }
}
