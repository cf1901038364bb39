//! `task list`: the tasks that the bridges have seen.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::process::ExitCode;

use futures_util::StreamExt as _;
use serde::Serialize;

use crate::bus::control::{ControlRequest, TaskSummary, TasksReply};
use crate::cli::CliResult;
use crate::cli::client::NatsClient;
use crate::cli::control::{REPLY_TIMEOUT, request_all};
use crate::cli::discover::discover;
use crate::cli::nats_args::NatsArgs;
use crate::cli::output::{Colour, OutputArgs, age, counted, eprintln_dim, print_json, print_table};

/// Agents that are asked at the same time.
const CONCURRENT: usize = 8;

#[derive(Debug, clap::Args)]
pub(super) struct ListArgs {
    /// Name of an agent; without it, all agents
    agent: Option<String>,
    /// Show only tasks that run or wait for an answer
    #[arg(long)]
    open: bool,
    /// Tasks to show
    #[arg(long, short = 'n', value_name = "NUMBER", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=500))]
    limit: u16,
}

/// A task as `--json` prints it.
#[derive(Debug, Serialize)]
struct ListedTask {
    agent: String,
    #[serde(flatten)]
    task: TaskSummary,
    /// The bridge that has seen it last.
    instance: String,
}

pub(super) async fn run(
    mesh: &NatsClient,
    args: &ListArgs,
    output: &OutputArgs,
    nats: &NatsArgs,
) -> CliResult {
    let agents = match &args.agent {
        Some(agent) => vec![agent.clone()],
        None => {
            let discovery = discover(mesh).await?;
            if discovery.agents.is_empty() && !output.is_json() {
                return Err(discovery.no_agents_error(mesh));
            }
            let mut names: Vec<_> = discovery.agents.into_iter().map(|agent| agent.agent).collect();
            names.dedup();
            names
        }
    };
    // Open tasks take precedence at the bridge. To show ended ones as well, the limit of the list is enough.
    let limit = if args.open { None } else { Some(usize::from(args.limit)) };
    let body = &ControlRequest { limit, ..ControlRequest::default() };
    let requests = agents.iter().map(async |agent| {
        let replies: CliResult<Vec<TasksReply>> =
            request_all(mesh, agent, "tasks", body, REPLY_TIMEOUT).await;
        replies.map_err(|error| error.context(format!("cannot list the tasks of `{agent}`")))
    });
    let mut replies = futures_util::stream::iter(requests).buffered(CONCURRENT);
    let (mut list, mut left_out) = (TaskList::default(), 0);
    while let Some(of_agent) = replies.next().await {
        for reply in of_agent? {
            left_out += reply.left_out;
            list.add(reply, args.open);
        }
    }
    let mut tasks = list.tasks;
    tasks.sort_by_key(|listed| std::cmp::Reverse(listed.task.updated));
    let limit = usize::from(args.limit);
    left_out += tasks.len().saturating_sub(limit);
    tasks.truncate(limit);
    if output.is_json() {
        return print_json(&tasks);
    }
    print(&tasks, args.open, left_out, &nats.suggested_flags())
}

/// The tasks of all replicas, each once.
#[derive(Default)]
struct TaskList {
    tasks: Vec<ListedTask>,
    /// By agent and id.
    index: HashMap<(String, String), usize>,
}

impl TaskList {
    /// Replicas may share tasks; the latest update counts.
    fn add(&mut self, reply: TasksReply, only_open: bool) {
        let TasksReply { agent, instance, tasks, .. } = reply;
        for task in tasks.into_iter().filter(|task| task.open || !only_open) {
            let listed = |task| ListedTask { agent: agent.clone(), task, instance: instance.clone() };
            match self.index.entry((agent.clone(), task.id.clone())) {
                Entry::Vacant(free) => {
                    free.insert(self.tasks.len());
                    self.tasks.push(listed(task));
                }
                Entry::Occupied(known) => {
                    if let Some(known) = self.tasks.get_mut(*known.get())
                        && known.task.updated < task.updated
                    {
                        *known = listed(task);
                    }
                }
            }
        }
    }
}

fn print(tasks: &[ListedTask], only_open: bool, left_out: usize, flags: &str) -> CliResult {
    let Some(newest) = tasks.first() else {
        let which = if only_open { "open tasks" } else { "tasks" };
        eprintln_dim(format_args!(
            "no {which}; a bridge forgets tasks after a while, and when it restarts without JetStream"
        ));
        return Ok(ExitCode::SUCCESS);
    };
    let plain = |text: String| (Colour::Plain, text);
    let rows = tasks.iter().map(|ListedTask { agent, task, .. }| {
        vec![
            plain(agent.clone()),
            plain(task.id.clone()),
            (state_colour(&task.state), task.state.clone()),
            plain(age(task.updated)),
            plain(task.skill.clone().unwrap_or_default()),
        ]
    });
    print_table(&["AGENT", "TASK", "STATE", "UPDATED", "SKILL"], rows)?;
    if left_out > 0 && !only_open {
        eprintln_dim(format_args!(
            "{} not shown; see `--limit` and `--open`",
            counted(left_out, "older task")
        ));
    }
    let (agent, id) = (&newest.agent, shlex::try_quote(&newest.task.id).unwrap_or_default());
    let verb = if newest.task.open { "watch" } else { "get" };
    eprintln_dim(format_args!("`a2a-bridge task {verb} {agent} {id}{flags}` shows what it says"));
    Ok(ExitCode::SUCCESS)
}

fn state_colour(state: &str) -> Colour {
    match state {
        "completed" => Colour::Green,
        "failed" | "rejected" => Colour::Red,
        "canceled" | "unknown" => Colour::Dim,
        _ => Colour::Yellow,
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::text::Timestamp;

    #[test]
    fn a_task_of_two_replicas_is_listed_once_with_its_latest_state() {
        let reply = |instance: &str, state: &str, seconds| TasksReply {
            agent: "demo".to_owned(),
            instance: instance.to_owned(),
            tasks: vec![TaskSummary {
                id: "t".to_owned(),
                state: state.to_owned(),
                open: state == "working",
                submitted: true,
                skill: None,
                context_id: None,
                updated: Timestamp(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)),
            }],
            left_out: 0,
        };
        for order in [[0, 1], [1, 0]] {
            let replies = [reply("a", "working", 1), reply("b", "completed", 2)];
            let mut list = TaskList::default();
            order.iter().for_each(|&index: &usize| list.add(replies[index].clone(), false));
            assert_eq!(list.tasks.len(), 1);
            assert_eq!(
                (list.tasks[0].instance.as_str(), list.tasks[0].task.state.as_str()),
                ("b", "completed")
            );
        }
    }
}
