//! `attach`: shows a logged call that runs or has ended, as `call --stream` does.

use serde_json::{Value, json};

use super::call::{CallMode, Caller, ReplyPrinter, SaveArgs};
use super::discover::discover;
use super::nats_args::NatsArgs;
use super::output::OutputArgs;
use super::terminal::Interrupts;
use super::{CliError, CliResult};
use crate::bus::subject::Token;

const DETAILS: &str = "\
The bridge must log the call: its configuration has `events`, and the call has a session or the header `A2A-Log: on`. \
Ctrl-C detaches; the call goes on.

Examples:
  a2a-bridge attach demo 5f2c
  a2a-bridge attach demo 5f2c --from 12 --output json
  a2a-bridge attach demo --run 01890a5d-ac96-774b-bcce-b302099a8057";

#[derive(Debug, clap::Args)]
#[command(after_help = DETAILS)]
pub(super) struct AttachArgs {
    /// Name of the agent
    agent: String,
    /// Id of the task
    #[arg(allow_hyphen_values = true, required_unless_present = "run", conflicts_with = "run")]
    task: Option<String>,
    /// Id of the run in the event log, instead of the task
    #[arg(long, value_name = "ID")]
    run: Option<String>,
    /// Number of the first frame to show
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    from: u64,
    #[command(flatten)]
    save: SaveArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    nats: NatsArgs,
}

pub(super) async fn run(args: AttachArgs) -> CliResult {
    let mesh = args.nats.connect().await?;
    let interrupts = Interrupts::new()?;
    let (agent, json) = (Token::new(&args.agent), args.output.is_json());
    let printer = ReplyPrinter { agent: &args.agent, nats: &args.nats, save: &args.save, json };
    let subject = mesh.subjects.attach(&agent);
    let caller = Caller {
        mesh: &mesh,
        interrupts: &interrupts,
        printer: &printer,
        agent,
        mode: CallMode::Attached,
        timeout: None,
    };
    let body: Value = match (&args.task, &args.run) {
        (Some(task), _) => json!({ "task_id": task, "from": args.from }),
        (None, run) => json!({ "run": run, "from": args.from }),
    };
    let mut result = match caller.send(subject, &body).await {
        Err(error) if CliError::is_no_responders(&error) => {
            let discovery = discover(&mesh).await?;
            discovery.instance(&args.agent, &mesh)?;
            return Err(error
                .hint("the bridge of this agent has no event log: add `events: {}` to its configuration"));
        }
        result => result?,
    };
    if !json {
        result.reply.fetch(&mesh, &args.save).await?;
    }
    printer.print(&result)
}
