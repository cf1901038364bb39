//! `health`: asks a bridge on this machine whether it works, for health checks of containers and plugin hosts.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum;

use super::output::{one_line, println};
use super::{CliError, CliResult, ConfigArgs, FAILED, INVALID_CONFIG, UNAVAILABLE};
use crate::config::MetricsConfig;
use crate::text::shorten;

const DEFAULT_TIMEOUT: u64 = 5;
/// Maximum bytes of a reason: another program may listen on the port.
const MAX_REASON: usize = 200;

const DETAILS: &str = "\
The command reads `metrics.listen` in the configuration, and requests `/readyz` there (or `/healthz` with `--live`).

Exit codes: 0 the bridge works, 1 it does not (stdout has the reason), 69 nothing answers, 78 no `metrics.listen`.

Examples:
  a2a-bridge health                  # it serves, and is connected to NATS
  a2a-bridge health --agents any     # and at least one agent is ready
  a2a-bridge health --live           # its process answers";

#[derive(Debug, clap::Args)]
#[command(after_help = DETAILS)]
pub(super) struct HealthArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Agents that must be ready, too
    #[arg(long, value_name = "WHICH")]
    agents: Option<RequiredAgents>,
    /// Check only that the process answers, whether it is connected to NATS or not
    #[arg(long, conflicts_with = "agents")]
    live: bool,
    /// Seconds to wait for the answer
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_TIMEOUT, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RequiredAgents {
    // At least one.
    Any,
    All,
}

pub(super) async fn run(args: HealthArgs) -> CliResult {
    let config = args.config.load()?;
    let Some(MetricsConfig { listen }) = config.metrics else {
        let message =
            "the configuration has no `metrics.listen`, so a bridge that runs with it has no health checks";
        return Err(CliError::msg(INVALID_CONFIG, message)
            .hint("add `metrics: { listen: \"127.0.0.1:9464\" }`, and restart the bridge"));
    };
    let path = match (args.live, args.agents) {
        (true, _) => "/healthz",
        (false, None) => "/readyz",
        (false, Some(RequiredAgents::Any)) => "/readyz?agents=any",
        (false, Some(RequiredAgents::All)) => "/readyz?agents=all",
    };
    let url = format!("http://{}{path}", reachable(listen));
    let unreachable = |error: reqwest::Error| {
        CliError::new(UNAVAILABLE, error.without_url())
            .context(format!("no bridge answers at {url}"))
            .hint("is a bridge running with this configuration, and on this machine?")
    };
    let timeout = Duration::from_secs(args.timeout);
    let http = reqwest::Client::builder().no_proxy().timeout(timeout).build().map_err(CliError::internal)?;
    let response = http.get(&url).send().await.map_err(unreachable)?;
    let is_ok = response.status().is_success();
    let reason = if is_ok { "ok".to_owned() } else { reason(response).await };
    println(&reason)?;
    Ok(ExitCode::from(if is_ok { 0 } else { FAILED }))
}

/// The reason of a bridge that is not ready.
async fn reason(mut response: reqwest::Response) -> String {
    let status = response.status();
    let body = response.chunk().await.ok().flatten().unwrap_or_default();
    let text = one_line(&String::from_utf8_lossy(body.get(..MAX_REASON.min(body.len())).unwrap_or_default()));
    match text.trim() {
        "" => format!("HTTP {}", status.as_u16()),
        text => shorten(text, MAX_REASON),
    }
}

/// A bridge that listens on all addresses answers on the loopback address.
fn reachable(mut listen: SocketAddr) -> SocketAddr {
    match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => listen.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => listen.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    listen
}
