//! Publishes the skills of A2A agents as actions on a NATS mesh.
//!
//! This page is the architecture: what the parts are, how a request goes through them, and who
//! owns what. The program is [`cli::main`]; everything else can be used, and is tested, without it.
//!
//! # The parts
//!
//! ```text
//! cli ──> bridge ──┬──> agent ──┬──> process      a child process, its output, its end
//!                  │            └──> a2a          cards, dialects, calls, streams
//!                  └──> bus ───────> action ──> a2a
//!                       NATS         what a skill does when asked
//! ```
//!
//! | module | owns | knows nothing of |
//! | --- | --- | --- |
//! | [`config`] | the settings file: reading, checking, explaining | everything else |
//! | [`process`] | one child in its own process group, the pauses between its starts | A2A, NATS |
//! | [`a2a`] | one agent's HTTP face: the card, the wire, send, stream, get, cancel | NATS, processes |
//! | [`agent`] | one agent's life: process and card make a [status](agent::Status) | NATS |
//! | [`action`] | from a checked request to a reply: parameters, follow-ups, tasks, messages | NATS |
//! | [`bus`] | the connection, subjects, one service per agent, envelopes and frames | processes |
//! | [`bridge`] | the order in which all this starts and stops | |
//! | [`cli`] | arguments, exit codes, words for people | |
//!
//! Nothing points back up. If two siblings need each other, what they share is a small type below
//! both: [`a2a::Instance`] is a running agent as calls see it, written by `agent`, read by `action`.
//!
//! # A request's way
//!
//! 1. A message reaches an endpoint of the agent's [service](bus::service). Without a reply subject it
//!    is not run; to a subject outside the [guard](bus::subject::ReplyGuard) nothing is ever published.
//! 2. The [desk](bus::desk) reads the headers, looks whether the same request was seen before, and takes
//!    a permit; without one the answer is `busy`.
//! 3. The body becomes an [`action::request`]; from here on everything is valid by type.
//! 4. [`Actions`](action::run::Actions) sends it, once. An answer to a question first *takes* its
//!    follow-up id, so that it works once.
//! 5. What the agent tells goes through the [fold](action::fold), whether it comes as one answer, as a
//!    stream, or from polling; whoever listens ([`action::progress`]) hears of it as it comes.
//! 6. When the task has settled, [`assemble`](action::assemble) makes the message, a question gets a
//!    follow-up id, and the reply goes back through the [envelope](bus::envelope).
//!
//! The agent's loop is not on this path. It writes two watch channels; endpoints exist only while
//! the agent is ready, so that callers get *no responders* at once instead of a timeout.
//!
//! # Who owns what
//!
//! | type | owns | lives |
//! | --- | --- | --- |
//! | [`Bridge`](bridge::Bridge) | the connection, the tasks, the agents and their publications | the process |
//! | [`Agent`](agent::Agent) | a handle: status, the live instance, the order to stop | until dropped |
//! | [`Instance`](a2a::Instance) | the way to one running agent | one start, one card |
//! | [`Publication`](bus::publication::Publication) | an agent's service and registry entry | until withdrawn |
//! | [`Desk`](bus::desk::Desk) | the permits of one agent | as long as its publication |
//! | [`Memory`](action::run::Memory) | follow-ups, tasks, sessions, idempotency keys | the process |
//! | [`Tasks`](tasks::Tasks) | every background task and the token that ends them | the process |
//!
//! # What is bounded
//!
//! Everything that comes from outside: bodies and nesting ([`config`] names the limits per agent), cards,
//! skills, calls in flight, follow-ups, remembered tasks and sessions, output lines; and what waits to
//! be logged, and the [spans](telemetry::spans) that wait for a collector. What is dropped is counted or
//! logged.

pub mod a2a;
pub mod action;
pub mod agent;
pub mod bridge;
pub mod bus;
pub mod cli;
pub mod config;
pub mod demo_agent;
pub mod dispatch;
mod json;
pub mod metrics;
pub mod process;
pub mod reply;
pub mod state;
pub mod tasks;
pub mod telemetry;
