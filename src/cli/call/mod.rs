//! `call`: asks a skill, answers the agent's questions, shows what comes back.
//!
//! ```text
//! body ──> exchange ──> reply ──> show
//!             ^           │ needs input
//!             └── answer ─┘ (terminal)
//! ```

mod body;
mod exchange;
mod files;
mod reply;
mod show;
mod view;

use std::process::ExitCode;

use serde_json::{Value, json};

use super::client::{Connection, Mesh, Silence};
use super::discover::discover;
use super::output::{Output, remark};
use super::terminal::{self, Answer, Echo, Interrupts};
use super::{Failure, INTERRUPTED, TROUBLE, USAGE};
use crate::bus::subject::Token;
use crate::config::values::parse_duration;

pub(super) use exchange::{Came, Exchange, Mode};
pub(super) use files::Save;
pub(super) use reply::Reply;
pub(super) use show::Show;

const HOW: &str = "How to ask";
const EXAMPLES: &str = "\
Examples:
  a2a-bridge call demo.echo 'hello'
  a2a-bridge call demo.report -p topic=tides -p audience=sailors --save out
  git diff | a2a-bridge call review.summarize - --stream
  a2a-bridge call demo.slow 3600 --submit";

/// Options of `call`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// Agent and skill, with a dot between
    #[arg(value_name = "AGENT.SKILL")]
    target: String,
    #[command(flatten)]
    content: body::Content,
    /// Answer the question with this follow-up id; then the target is the agent alone
    #[arg(long, value_name = "ID", help_heading = HOW)]
    answer: Option<String>,
    /// Show the answer while it is written; Ctrl-C cancels the task
    #[arg(long, conflicts_with = "submit", help_heading = HOW)]
    stream: bool,
    /// Do not wait: print the task's id, see `task`
    #[arg(long, help_heading = HOW)]
    submit: bool,
    /// The most that it may take, such as `30s`; never more than the bridge allows
    #[arg(long, value_name = "TIME", value_parser = checked_duration, help_heading = HOW)]
    timeout: Option<String>,
    /// Never ask on the terminal; a question of the agent then ends the call with exit code 1
    #[arg(long, help_heading = HOW)]
    no_input: bool,
    #[command(flatten)]
    save: Save,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    connection: Connection,
}

fn checked_duration(text: &str) -> Result<String, String> {
    parse_duration(text).map(|_| text.to_owned())
}

pub(super) async fn run(args: Args) -> Result<ExitCode, Failure> {
    let body = match &args.answer {
        None => args.content.body()?,
        Some(id) => args.content.answer(id)?,
    };
    let mesh = args.connection.connect().await?;
    let mut interrupts = Interrupts::new()?;
    let (agent, skill) = target(&args.target, mesh.subjects.prefix());
    let mut exchange = Exchange {
        mesh: &mesh,
        agent: Token::new(agent),
        mode: match (args.stream, args.submit) {
            (true, _) => Mode::Stream,
            (_, true) => Mode::Submit,
            _ => Mode::Final,
        },
        timeout: args.timeout.clone(),
        json: args.output.is_json(),
    };
    let came = first(&mut exchange, agent, skill, &args, &body, &mut interrupts).await?;
    let show = Show { agent, connection: &args.connection, save: &args.save };
    let may_ask = !args.no_input && !exchange.json && terminal::has_somebody();
    let came = converse(&exchange, came, &show, may_ask, &mut interrupts).await?;
    if !exchange.json {
        return show.reply(&came);
    }
    if !came.shown {
        came.reply.print_raw()?;
    }
    let well = matches!(came.reply.status(), "COMPLETED" | "WORKING");
    Ok(if well { ExitCode::SUCCESS } else { ExitCode::from(TROUBLE) })
}

/// `AGENT.SKILL`, or a whole subject.
fn target<'a>(target: &'a str, prefix: &str) -> (&'a str, &'a str) {
    let short = target.strip_prefix(prefix).and_then(|rest| rest.strip_prefix(".action.")).unwrap_or(target);
    short.split_once('.').unwrap_or((short, ""))
}

/// The first request. When nobody serves it, it is found out what the user may have meant.
async fn first(
    exchange: &mut Exchange<'_>,
    agent: &str,
    skill: &str,
    args: &Args,
    body: &Value,
    interrupts: &mut Interrupts,
) -> Result<Came, Failure> {
    let subjects = &exchange.mesh.subjects;
    let subject = match (&args.answer, skill) {
        (Some(_), _) => Some(subjects.provide_required_input(&exchange.agent)),
        (None, "") => None,
        (None, skill) => Some(subjects.action(&exchange.agent, &Token::action(skill))),
    };
    if let Some(subject) = subject {
        match exchange.run(subject, body, interrupts).await? {
            Ok(came) => return Ok(came),
            Err(Silence::NoResponders) => {}
            Err(silence) => return Err(silence.failure("no reply")),
        }
    }
    let found = discover(exchange.mesh, None).await?;
    let instances = found.agents_named(agent);
    let Some(instance) = instances.first() else {
        return Err(found.no_agent(agent, exchange.mesh));
    };
    exchange.agent = Token::new(&instance.agent);
    let subject = if args.answer.is_some() {
        exchange.mesh.subjects.provide_required_input(&exchange.agent)
    } else if let ("", [only]) = (skill, instance.skills.as_slice()) {
        only.subject.clone()
    } else {
        found
            .skill(agent, skill, exchange.mesh)
            .map_err(|failure| match skill {
                "" => Failure { code: USAGE, ..failure },
                _ => failure,
            })?
            .subject
            .clone()
    };
    match exchange.run(subject, body, interrupts).await? {
        Ok(came) => Ok(came),
        Err(silence) => Err(silence.failure("no reply")),
    }
}

/// Answers the agent's questions for as long as it has some and somebody is there.
pub(super) async fn converse(
    exchange: &Exchange<'_>,
    mut came: Came,
    show: &Show<'_>,
    may_ask: bool,
    interrupts: &mut Interrupts,
) -> Result<Came, Failure> {
    while may_ask && let Some((id, _)) = came.reply.follow_up() {
        let echo = if came.reply.status() == "AUTH_REQUIRED" { Echo::Off } else { Echo::On };
        show.question(&came.reply);
        if echo == Echo::Off {
            remark("  what you type is not shown");
        }
        let answer = terminal::ask(echo, interrupts).await.map_err(|error| Failure::new(TROUBLE, error))?;
        let Answer::Line(line) = answer else {
            let error = anyhow::anyhow!("left without an answer; the agent waits");
            let hint = show.how_to_answer(&came.reply).unwrap_or_default();
            return Err(Failure::new(INTERRUPTED, error).hint(hint));
        };
        let body = json!({"follow_up_id": id, "user_response": line});
        let subject = exchange.mesh.subjects.provide_required_input(&exchange.agent);
        came = match exchange.run(subject, &body, interrupts).await? {
            Ok(came) => came,
            Err(silence) => return Err(silence.failure("no reply to the answer")),
        };
    }
    Ok(came)
}

/// Looks a task up, or cancels it.
pub(super) async fn ask_about(
    mesh: &Mesh,
    subject: String,
    agent: &str,
    task: &str,
) -> Result<Reply, Failure> {
    let body = json!({"task_id": task}).to_string();
    match mesh.ask(subject, body.into()).await? {
        Ok(message) => Reply::read(&message),
        Err(Silence::NoResponders) => Err(discover(mesh, None).await?.no_agent(agent, mesh)),
        Err(silence) => Err(silence.failure("no reply")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_agent_and_skill_or_a_whole_subject() {
        assert_eq!(target("demo.echo", "a2a"), ("demo", "echo"));
        assert_eq!(target("demo.a.b", "a2a"), ("demo", "a.b"));
        assert_eq!(target("demo", "a2a"), ("demo", ""));
        assert_eq!(target("acme.a2a.action.demo.echo", "acme.a2a"), ("demo", "echo"));
    }
}
