//! Publishes the skills of A2A agents as actions on a NATS mesh.
//!
//! This page is the architecture: what the parts are, how a request goes through them, and who
//! owns what. The program is [`cli::main`]; everything else can be used, and is tested, without it.
//!
//! # The parts
//!
//! ```text
//! cli ──> bridge ──┬──────────────────────> agent ──┬──> process   a child process, its output, its exit
//!                  │                          ▲     └──> a2a       cards, dialects, calls, streams
//!                  └──> bus ──> dispatch ─────┴─> action ──┬──> a2a
//!                       front doors, one way in            └──> state    follow-ups, tasks, sessions, keys
//! ```
//!
//! | module | owns | does not know |
//! | --- | --- | --- |
//! | [`config`] | the settings file: reading, checking, explaining | everything else but [`secrets`] |
//! | [`process`] | one child in its own process group, the back-off between its starts | A2A, NATS |
//! | [`a2a`] | the client side of A2A: the card, the dialects, send, stream, get, cancel | NATS, processes |
//! | [`agent`] | supervising one agent: process and card make a [status](agent::Status) | NATS |
//! | [`reply`] | what comes of a request: outcome or error, and the table of error codes | how it is sent |
//! | [`state`] | what is remembered between calls, on a [`StateStore`](state::StateStore) | NATS, A2A calls |
//! | [`action`] | from a checked request to a reply: parameters, the run of a call, messages | NATS |
//! | [`dispatch`] | what holds for every request, whichever front door it came through | NATS |
//! | [`bus`] | NATS: the connection, subjects, one service per agent, the front doors, orders to supervisors | how processes are run |
//! | [`bridge`] | the order in which all this starts, reloads and stops | |
//! | [`cli`] | arguments, exit codes, output for people | |
//!
//! Shared by several of them: [`secrets`] (credentials, and how they are redacted), [`background`] (background tasks),
//! [`telemetry`] (logs and spans) and `json`. [`metrics`] reads what the others count, and [`demo_agent`] is an agent
//! of its own for tests and first steps.
//!
//! Nothing points back up. If two siblings need each other, what they share is a small type below
//! both: [`a2a::Instance`] is a running agent as calls see it, written by `agent`, read by `action`.
//!
//! # The way of a request
//!
//! 1. A message reaches an endpoint of the agent's [service](bus::service). Without a reply subject, or with one
//!    outside the [guard](bus::subject::ReplyGuard), `service::endpoint` counts it as an error and does not run it.
//! 2. A front door, [`bus::actions`] or [`bus::agent_protocol`], turns it into a
//!    [`Request`](dispatch::request::Request): operation, reply mode, options, idempotency key.
//! 3. The [`Dispatcher`](dispatch::Dispatcher) decides whether the same request was seen before, takes a
//!    permit (without one the reply is `busy`), counts the call as in flight, and guards against panics.
//! 4. [`Actions`](action::actions::Actions) makes the message for the agent. An answer to a question first
//!    *claims* its [follow-up id](state::follow_ups), so that it works once.
//! 5. `CallRun`, the state machine in `action::run`, sends the message, at most once unless the agent's answer
//!    proves that nothing ran ([`a2a::retry`]), and follows the task: it reads a stream, subscribes again, or
//!    polls. Every event goes through the [task builder](action::task_builder); the front door learns of it through
//!    [`Progress`](action::progress::Progress).
//! 6. When the task has settled, [`assemble`](action::assemble) makes the message, a question gets a
//!    follow-up id, and [`Tasks`](state::tasks) records the task.
//! 7. The reply stays typed up to the front door, which turns it into bytes ([`bus::encoded_reply`], [`bus::frames`]).
//!
//! The supervisor of an agent is not on this path. It writes two watch channels. The endpoints of skills exist
//! only while the agent is ready, so that callers get *no responders* at once instead of a timeout; the built-in
//! actions (answers, tasks, the card) are always there.
//!
//! # Where things are plugged in
//!
//! - A **front door** is an adapter in front of [`dispatch`], whose page lists what it has to do. `Bridge::open_front_doors` in
//!   `bridge.rs` gives each agent its front doors.
//! - A **store** implements [`StateStore`](state::StateStore) in `state/mod.rs`. `Bridge::connect` in `bridge.rs` makes
//!   one and hands it to [`State::new`](state::State::new).
//! - A **dialect** of A2A is a variant of [`Dialect`](a2a::dialect::Dialect) and a file beside it.
//!
//! # Where it is decided
//!
//! | what | where |
//! | --- | --- |
//! | a reply subject is refused | `EndpointReader::handle` in `bus/service/endpoint.rs`, by `ReplyGuard::allows` in `bus/subject/reply_guard.rs`; control requests and discovery use the same guard |
//! | the form of a reply: headers `A2A-Reply`, `A2A-Frames`, limits | `Headers::read` in `bus/headers.rs`; frames obey it in `FrameWriter::select` in `bus/frames.rs` |
//! | a request is `busy` because of `max_in_flight` | `Permits::take` in `dispatch/permits.rs` |
//! | a request is a repeat | `Dispatcher::call` in `dispatch/mod.rs`, by `Idempotency::reserve` in `state/idempotency.rs` |
//! | an answer claims its follow-up id | `answer` in `action/answer.rs`, by `FollowUps::claim` in `state/follow_ups.rs` |
//! | a call counts as in flight, so that its agent is not taken for hung | `Dispatcher::call` in `dispatch/mod.rs`; `agent/watch.rs` asks |
//! | a message may be sent again | `Retry` in `a2a/retry.rs`, which also lists who sends it |
//! | a credential is withheld from a host | `Chooser::client` in `a2a/choose.rs`, by `AddressPolicy::is_trusted` in `a2a/address.rs` |
//! | a credential is redacted in an error | `Dispatcher::guarded` in `dispatch/mod.rs`, by `ActionError::redacted` in `reply/error.rs` (`secrets.rs` knows what is a secret) |
//! | a credential is redacted in the reason of a failed task | `TaskRecorder::record` in `action/run/recorder.rs`, and `CallRun::report` in `action/run/mod.rs` for streams |
//! | a stream that was cut off goes on | `CallRun::follow` in `action/run/mod.rs` |
//! | an exit leads to a restart or not, and when | `Lifecycle::next` in `agent/lifecycle.rs`; the pause is `Backoff::pause` in `process/restart.rs` |
//! | state makes room, or refuses | `BoundedTable::evict` and `BoundedTable::put` in `state/table.rs`; `MemoryStore` in `state/memory.rs` says which kind does what |
//! | expired state leaves the memory | `State::sweep_periodically` in `state/mod.rs`, by `BoundedTable::sweep_step` in `state/table.rs` |
//! | a reply becomes bytes, and is cut if it is too large | `bus/encoded_reply.rs` |
//!
//! # Who owns what
//!
//! | type | owns | lives |
//! | --- | --- | --- |
//! | [`Bridge`](bridge::Bridge) | the connection, the tasks, the agents and their publications | the process |
//! | [`Agent`](agent::Agent) | a handle: status, the live instance, orders to its supervisor | until dropped |
//! | [`Instance`](a2a::Instance) | the way to one running agent | one start, one card |
//! | [`Publication`](bus::publication::Publication) | an agent's service and registry entry | until withdrawn |
//! | [`Dispatcher`](dispatch::Dispatcher) | the permits of one agent | as long as its publication |
//! | [`State`](state::State) | follow-ups, tasks, sessions, idempotency keys | the process |
//! | [`BackgroundTasks`](background::BackgroundTasks) | every background task and the token that ends them | the process |
//!
//! # What is bounded
//!
//! Everything that comes from outside: bodies and nesting ([`config`] has the limits per agent), cards,
//! published skills, calls in flight, follow-ups, remembered tasks and sessions, output lines, lines that wait
//! to be logged, and [spans](telemetry::spans) that wait for a collector. Dropped lines and spans are counted; evicted
//! state is not: to its owner it looks as if it had expired.
//! State is bounded in bytes. A full table evicts the oldest entries of the agent that holds the most, so that a
//! busy agent does not cost a quiet one its entries; idempotency keys are never evicted, new ones are refused.

mod a2a;
mod action;
mod agent;
mod background;
mod bridge;
mod bus;
mod cli;
mod config;
mod demo_agent;
mod dispatch;
mod json;
mod metrics;
mod process;
mod reply;
mod secrets;
mod state;

mod telemetry;
mod text;
mod yaml;

pub use cli::main;
#[cfg(target_os = "linux")]
pub use process::guard;

/// Internal items that the integration tests and fuzz targets use. This is not an API.
#[doc(hidden)]
pub mod internal {
    pub use crate::a2a::card::{Card, Interface};
    pub use crate::a2a::dialect::{Dialect, RpcError};
    pub use crate::bridge::Bridge;
    pub use crate::bus::control::AgentReport;
    pub use crate::bus::service;
    pub use crate::bus::subject::{ReplyGuard, Subjects, Token};
    pub use crate::config::{Config, parse as parse_config};
    pub use crate::process::{child, guard, output, ports, procfs};
    pub use crate::secrets::Secrets;
}
