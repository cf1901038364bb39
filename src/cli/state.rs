//! `state`: what replicas share in JetStream.

use std::process::ExitCode;
use std::sync::Arc;

use serde::Serialize;

use super::nats_args::NatsArgs;
use super::output::{Colour, OutputArgs, eprintln_dim, format_size, print_json, print_table};
use super::{CliError, CliResult, FAILED, UNAVAILABLE};
use crate::bus::jetstream::summary::{BucketSummary, Owner, RecordCounts, buckets, owners};
use crate::bus::jetstream::{Api, ApiError};
use crate::bus::object_store::ObjectStore;

const DETAILS: &str = "\
The records may hold replies of agents, so this command needs the permissions of the bridge's own NATS user \
(deploy/nats-permissions.conf).

Examples:
  a2a-bridge state                  # buckets, and records by agent and bridge
  a2a-bridge state --buckets        # without reading the records
  a2a-bridge state --json";

#[derive(Debug, clap::Args)]
#[command(after_help = DETAILS)]
pub(super) struct StateArgs {
    /// Show the buckets only, without reading the records
    #[arg(long)]
    buckets: bool,
    #[command(flatten)]
    nats: NatsArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Serialize)]
struct Report {
    buckets: Vec<BucketSummary>,
    #[serde(skip_serializing_if = "Option::is_none")]
    owners: Option<Vec<OwnerReport>>,
}

#[derive(Serialize)]
struct OwnerReport {
    #[serde(flatten)]
    owner: Owner,
    follow_ups: u64,
    tasks: u64,
    sessions: u64,
    idempotency_keys: u64,
    replies: u64,
}

impl OwnerReport {
    fn new((owner, counts): (Owner, RecordCounts)) -> Self {
        let [follow_ups, tasks, sessions, idempotency_keys, replies] = counts;
        Self { owner, follow_ups, tasks, sessions, idempotency_keys, replies }
    }

    fn counts(&self) -> [u64; 5] {
        [self.follow_ups, self.tasks, self.sessions, self.idempotency_keys, self.replies]
    }
}

pub(super) async fn run(args: StateArgs) -> CliResult {
    let mesh = args.nats.connect().await?;
    let api = Api::new(mesh.client.clone(), Arc::clone(&mesh.events));
    let prefix = mesh.subjects.prefix();
    let buckets = buckets(&api, prefix, &ObjectStore::bucket_name(prefix)).await.map_err(failed)?;
    let owners = match args.buckets {
        true => None,
        false => {
            let owners = owners(&api, prefix).await.map_err(failed)?;
            Some(owners.into_iter().map(OwnerReport::new).collect())
        }
    };
    let report = Report { buckets, owners };
    if args.output.is_json() {
        return print_json(&report);
    }
    if report.buckets.is_empty() {
        let message = format!("no bridge with the subject prefix `{prefix}` shares state in JetStream");
        return Err(CliError::msg(FAILED, message)
            .hint("set `--prefix` (or A2A_BRIDGE_PREFIX) to the bridge's `nats.subject_prefix`; the log of the bridge says why it does not share state"));
    }
    print_buckets(&report.buckets)?;
    match report.owners {
        Some(owners) if !owners.is_empty() => print_owners(&owners),
        Some(_) => {
            eprintln_dim("no records");
            Ok(ExitCode::SUCCESS)
        }
        None => Ok(ExitCode::SUCCESS),
    }
}

fn print_buckets(buckets: &[BucketSummary]) -> CliResult {
    let rows = buckets.iter().map(|bucket| {
        let limit = u64::try_from(bucket.max_bytes).map_or_else(|_| "none".to_owned(), format_size);
        let (colour, lagging) = match bucket.lagging_replicas {
            0 => (Colour::Plain, String::new()),
            lagging => (Colour::Yellow, format!(" ({lagging} behind)")),
        };
        vec![
            (Colour::Bold, bucket.bucket.clone()),
            (Colour::Plain, bucket.records.to_string()),
            (Colour::Plain, format_size(bucket.bytes)),
            (Colour::Plain, limit),
            (colour, format!("{}{lagging}", bucket.replicas)),
            (Colour::Plain, bucket.leader.clone().unwrap_or_else(|| "-".to_owned())),
        ]
    });
    print_table(&["BUCKET", "RECORDS", "SIZE", "LIMIT", "REPLICAS", "LEADER"], rows)
}

fn print_owners(owners: &[OwnerReport]) -> CliResult {
    eprintln_dim("");
    let rows = owners.iter().map(|owner| {
        let names = [
            (Colour::Bold, owner.owner.agent.clone()),
            (Colour::Plain, owner.owner.owner.clone().unwrap_or_else(|| "-".to_owned())),
        ];
        let counts = owner.counts().map(|count| (Colour::Plain, count.to_string()));
        names.into_iter().chain(counts).collect()
    });
    print_table(&["AGENT", "OWNER", "FOLLOW-UPS", "TASKS", "SESSIONS", "KEYS", "REPLIES"], rows)
}

fn failed(error: ApiError) -> CliError {
    let hint = match &error {
        ApiError::Denied { .. } => {
            "use the NATS user of the bridge; deploy/nats-permissions.conf shows what it may do"
        }
        ApiError::NoResponders { .. } => {
            "the server has no JetStream, so bridges on it keep their state in memory"
        }
        _ => "try again",
    };
    CliError::new(UNAVAILABLE, error).hint(hint)
}
