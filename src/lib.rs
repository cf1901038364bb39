//! a2a-bridge publishes the skills of A2A agents as actions on NATS.
//!
//! This page describes the architecture: the modules, the path of a request, and ownership. The program is
//! [`main`]; the other items are internal.
//!
//! # Glossary
//!
//! | term | meaning |
//! | --- | --- |
//! | agent | a program that speaks A2A |
//! | launched agent | an agent whose process the bridge starts |
//! | attached agent | an agent that runs elsewhere |
//! | live agent | one running agent as calls see it |
//! | card | an agent's description of itself |
//! | skill | what an agent offers in its card |
//! | action | a skill published on NATS, or a built-in action |
//! | call | one request for an action |
//! | task | the agent's unit of work (A2A's term) |
//! | settled | a task that is final, or waits for the caller |
//! | follow-up | a waiting question of an agent, and the id that answers it |
//! | session | a conversation; A2A's `contextId`; with an event log, also what was said in it |
//! | projection | what is stored of a session, derived from its events |
//! | lineage | a fork and its ancestors |
//! | run | the state machine that carries one call to its reply; in the event log, a call with the answers to its questions |
//! | frame | one message of a streamed reply |
//! | replica | one of several bridges with the same configuration |
//! | front door | an adapter that turns the messages of one protocol into requests |
//! | dialect | a version of A2A with one binding; some SDKs have a variant of their own |
//! | binding | how A2A uses HTTP: JSON-RPC or REST |
//! | instance | one bridge's NATS service for an agent; its id distinguishes replicas |
//! | supervisor | starts, checks and restarts one agent |
//! | configuration | the YAML file; one key of it is a setting |
//!
//! # Modules
//!
//! ```text
//! cli ──> bridge ──┬──────────────────────> agent ──┬──> process   child processes, their output and exit
//!                  │                          ▲     └──> a2a       cards, dialects, calls, streams
//!                  └──> bus ──> dispatch ─────┴─> action ──┬──> a2a
//!                       front doors, one way in            └──> state    follow-ups, tasks, sessions, keys
//! cli ──> gateway ──> NATS   HTTP for the agents of all bridges; a client that needs no bridge in its process
//! ```
//!
//! | module | owns | does not know |
//! | --- | --- | --- |
//! | [`config`] | the configuration: reading, validating, explaining | everything else except [`secrets`] |
//! | [`process`] | one child process and its descendants, and the back-off between starts | A2A, NATS |
//! | [`a2a`] | the client side of A2A: cards, dialects, send, stream, get, cancel | NATS, processes |
//! | [`agent`] | supervision of one agent: process and card determine its [status](agent::AgentStatus) | NATS |
//! | [`reply`] | the result of a request: outcome or error, and the error codes | how it is sent |
//! | [`state`] | what the bridge remembers between calls, on a [`StateStore`](state::StateStore) that replicas may share | NATS, A2A calls |
//! | [`action`] | from a request body to a reply: parameters, runs, messages | NATS |
//! | [`events`] | the event log: which calls are logged, their events, and frames made from them, on an [`EventStore`](events::store::EventStore) | NATS |
//! | [`dispatch`] | the rules that apply to every request, through any front door | NATS |
//! | [`files`] | files by reference: URLs, limits, fetching, and the interface of the store | NATS, A2A |
//! | [`bus`] | NATS: connection, subjects, one service per agent, front doors, control commands | how processes run |
//! | [`gateway`] | HTTP for the agents of all bridges, as a client of NATS | processes, A2A |
//! | [`bridge`] | the order in which everything starts, reloads and stops | |
//! | [`cli`] | arguments, exit codes, output for people | |
//!
//! Several modules share [`memory`] (the memory budget), [`offload`] (long synchronous work), [`secrets`] (credentials
//! and their redaction), [`background`] (background tasks),
//! [`telemetry`] (logs and spans), [`json`], [`text`] and [`yaml`]. [`metrics`] exports the counts of the
//! others, and [`demo_agent`] is a separate agent for tests and first steps.
//!
//! Dependencies point downwards only. If two siblings need each other, they share a small type below both:
//! [`a2a::LiveAgent`] is one running agent as calls see it; `agent` creates it and `action` uses it.
//!
//! # The path of a request
//!
//! 1. A message reaches an endpoint of the agent's [service](bus::service). If it has no reply subject, or one that
//!    the [`ReplyGuard`](bus::subject::ReplyGuard) refuses, the endpoint counts an error and does not run it.
//! 2. A front door, [`bus::actions`] or [`bus::agent_protocol`], turns the message into a
//!    [`Request`](dispatch::request::Request): operation, reply mode, options, idempotency key.
//! 3. The [`Dispatcher`](dispatch::Dispatcher) detects a repeated request, takes a permit (without one the reply is
//!    `busy`), counts the call as in flight, and catches panics.
//! 4. [`Actions`](action::actions::Actions) builds the message for the agent. An answer to a question first
//!    *claims* its [follow-up id](state::follow_ups), so that the id works once.
//! 5. `CallRun`, the state machine in `action::run`, sends the message and follows the task: it reads a stream,
//!    subscribes again, or polls. It sends the message once, unless the agent's response proves that nothing ran
//!    ([`a2a::retry`]). A task builder (`action::task_builder`) collects all events; the front door receives them
//!    through [`Progress`](action::progress::Progress).
//! 6. When the task settles, [`assemble`](action::assemble) builds the reply, a question gets a follow-up id, and
//!    [`state::tasks`] records the task.
//! 7. The reply stays typed until the front door encodes it ([`bus::encoded_reply`], [`bus::frames`]).
//!
//! The supervisor of an agent is not on this path; it writes two watch channels. Skill endpoints exist only while
//! the agent is ready, so that callers get *no responders* immediately instead of a timeout. The built-in actions
//! (answers, tasks, the card) exist as long as the bridge serves the agent.
//!
//! # Extension points
//!
//! - A **front door** is an adapter in front of [`dispatch`], whose page lists its duties.
//!   `Bridge::open_front_doors` in `bridge.rs` starts the front doors of each agent.
//! - A **store** implements [`StateStore`](state::StateStore) in `state/mod.rs`. `OpenStore::open` in
//!   `bridge/store.rs` chooses the store, which `Bridge::connect` passes to [`State::new`](state::State::new).
//! - An **event log** implements [`EventStore`](events::store::EventStore) in `events/store.rs`. `open_log` in `bridge.rs` opens it.
//! - A **dialect** is a variant of [`Dialect`](a2a::dialect::Dialect), its parameters in `a2a/dialect/send.rs`, and
//!   its rules in `a2a/choose.rs`.
//! - A **setting** is one declaration in `config/settings.rs`.
//!
//! # Where each decision is made
//!
//! | decision | place |
//! | --- | --- |
//! | whether a subject prefix or a reply pattern is valid | `subject_prefix` and `subject_pattern` in `config/values.rs`, for the configuration and for `Subjects` and `ReplyGuard` |
//! | whether a reply subject is allowed | `EndpointReader::handle` in `bus/service/endpoint.rs`, with `ReplyGuard::allows` in `bus/subject/reply_guard.rs`; control requests and discovery use the same guard |
//! | who calls, and whether the bridge serves that caller | `Identity::caller` in `bus/identity.rs`, for every endpoint, called by `EndpointReader::handle` in `bus/service/endpoint.rs` |
//! | what others than the caller see of a task | `publish_updates` in `bus/publication.rs`, with `reply::without_content` |
//! | how much of an agent's calls in flight and state one tenant, and one caller, may take | `FairPermits::try_acquire` in `dispatch/fair_permits.rs`; `AgentQuota::is_fair` in `state/quota.rs` |
//! | the form of a reply: headers `A2A-Reply`, `A2A-Frames`, limits | `Headers::read` in `bus/headers.rs`; `FrameSelector::select` in `events/selection.rs` applies it to frames |
//! | whether a call is logged | `Logged::begin` in `events/logged.rs`, with `EventLog::wants` in `events/log.rs` |
//! | which event an artifact becomes, and how long it is kept | `TypeRules::kind` in `events/mapping.rs`; `Encoder` in `events/codec.rs` |
//! | when held events are stored, and the order of batches | `RunLog` in `events/run_log.rs` |
//! | whether a batch was stored, and whether the log is available | `JetStreamEventStore` in `bus/event_log/mod.rs` |
//! | how an adopted task or an answer continues a log | `events/resume.rs`; `Dispatcher::adopt_task` in `dispatch/maintenance.rs` |
//! | what an attached caller gets | `bus/attach.rs`, with `events/attach.rs` |
//! | whether a request is `busy` because of `max_in_flight` or another limit on calls | `Permits::take` and `try_acquire` in `dispatch/permits.rs`; a full quota of state is `busy` too, see `state/quota.rs` |
//! | whether the bridge that runs a call is gone, for `a2a-bridge call` | `BridgeWatch::gone` in `cli/call/bridge_watch.rs`; the bridge names itself in `FrameWriter::started` in `bus/frames.rs` |
//! | where a command finds NATS, and with which credentials | `NatsArgs::source` in `cli/nats_args.rs`; contexts of the `nats` tool in `cli/nats_context.rs` |
//! | which tasks operators see in a list | `Tasks::list` in `state/tasks/list.rs`, for `Controller::send_tasks` in `bus/control.rs` |
//! | whether a discovery request waits for its answer or is dropped | `read` in `bus/service/responder.rs` |
//! | whether there is memory for a request, a response or a reply | `MemoryAccount::charge` in `memory.rs`; `Dispatcher::arrive` charges requests, `Outbox::publish` in `bus/outbox.rs` charges what waits to be sent; `FetchMemory` in `files/fetch.rs` charges files that are fetched, `FileServer::accept` in `bus/file_service.rs` requests for files |
//! | when freed memory returns to the system | `run` in `memory/reclaimer.rs` |
//! | whether an agent waits for others before it sends, because the server is slow | `Outbox::pass_gate` in `bus/outbox.rs`; `bus/outbox/congestion.rs` says what is slow |
//! | when a sent message no longer counts in the send window of its agent | `Confirmations::confirm` in `bus/outbox/confirmations.rs` |
//! | whether another replica is alive, unreachable or dead | `PeerTable` in `bus/peers/table.rs`; `NatsPeers::ping_periodically` in `bus/peers/liveness.rs` decides which failures count |
//! | whether a request is kept, so that another replica can run it | `Forwarder::may_forward` in `bus/peers/forward.rs`; `Progress::runs_here` ends that |
//! | whether a replica runs a request that another one forwards | `NatsPeers::try_accept` in `bus/peers/calls.rs` |
//! | whether a request is a repeat | `Dispatcher::call` in `dispatch/mod.rs`, with `Idempotency::reserve` in `state/idempotency.rs` |
//! | which replica follows a task, and when another one takes it over | the owner in `TaskRecord` in `state/tasks.rs`; `dispatch/maintenance.rs` adopts tasks, `action/adoption.rs` follows them |
//! | whether a request runs at another replica | `Actions::locate` in `action/location.rs` for tasks, `answer_elsewhere` in `action/follow_up.rs` for answers, `Sessions::place` in `state/sessions.rs` for sessions |
//! | whether a replica is alive | `bus/peers/table.rs` |
//! | what a claim of a dead replica means | `FollowUps::claim` in `state/follow_ups.rs` |
//! | which answer claims a follow-up id | `answer` in `action/follow_up.rs`, with `FollowUps::claim` in `state/follow_ups.rs` |
//! | whether a call has a line in the call log, and what it says | `CallEntry` in `dispatch/call_log.rs` |
//! | under which skill a call is counted | `Operation::label` in `dispatch/request.rs`, with `CallStats::ended` in `agent/call_stats.rs` |
//! | who may use a route of the gateway, how often, and what browsers may do | `Guard::admit` in `gateway/router.rs`, with `gateway/auth.rs` |
//! | which headers of an HTTP request reach a bridge | `PASSED_ON` in `gateway/rest/calls.rs` |
//! | whether an agent that does not reply is unknown or unavailable, for HTTP clients | `Context::absent` in `gateway/context.rs`, with `gateway/directory.rs` |
//! | whether the client of an event stream is too slow | `Events::send` in `gateway/sse.rs` |
//! | whether there is memory for the body of an HTTP request | `Charge::add` in `gateway/body.rs` |
//! | whether `/readyz` succeeds | `Metrics::not_ready_reason` in `metrics.rs` |
//! | what the bridge reports to systemd | `cli/systemd.rs` |
//! | whether a call counts as in flight, so that its agent is not considered hung | `Dispatcher::call` in `dispatch/mod.rs`; `agent/health_check.rs` reads the count |
//! | whether a message may be sent again | `Retry` in `a2a/retry.rs`, which also lists the senders |
//! | whether a process may get requests for a launched agent | `AgentPort::owner` before a card is read, `AgentPort::check_peer` for a new connection, in `process/agent_port.rs` |
//! | whether a host gets credentials | `DialectChooser::client` in `a2a/choose.rs`, with `AddressPolicy::is_trusted` in `a2a/address.rs` |
//! | redaction of credentials in errors | `Dispatcher::guarded` in `dispatch/mod.rs`, with `ActionError::redacted` in `reply/error.rs`; `Actions::record_untracked` in `action/actions.rs` for errors that are stored with a task; `secrets.rs` knows the secrets |
//! | which events are messages, and what a session is | `fold` in `events/sessions/summary.rs`, with `events/sessions/messages.rs` |
//! | which replica's update of a session's record wins | `project` in `events/sessions/projector.rs`: the one that has seen the last revision |
//! | which events a fork has, and where redacted ones are | `Lineage` in `events/sessions/lineage.rs` |
//! | what a deleted session leaves to its forks | `Sessions::remove` in `events/sessions/removal.rs` |
//! | whether an agent gets the conversation so far | `RunLog::history` in `events/run_log.rs`, with `events/sessions/history.rs` |
//! | redaction of credentials in what an agent serves in place of a card | `parse` in `a2a/card/fetch.rs`, before the error quotes it |
//! | which characters a terminal or a log does not get | `is_unprintable` in `text.rs`; `cli/output.rs` and `telemetry/log_format.rs` apply it |
//! | whether an agent that rejects probes, or fails on them, is ready | `ProbeFailure::prevents_calls` in `a2a/choose.rs`; `probe::read_card` in `agent/probe.rs` applies it |
//! | which settings of an agent a reload applies without a restart of its process | `APPLIED_WITHOUT_RESTART` in `config/agent.rs`; `Changes::new` in `bridge.rs` sorts the agents |
//! | which credentials a connection to NATS uses, also after a reload | `NatsCredentials::auth` in `bus/connect/credentials.rs` |
//! | whether the bridge waits for a NATS server that it cannot reach, and what it logs about an outage | `connect` and `EventLog` in `bus/connect.rs` |
//! | what happens to a NATS message that cannot be parsed | `vendor/README.md`; `bus/connect.rs` logs and counts it |
//! | redaction of credentials in the failure reason of a task | `TaskRecorder::record` in `action/run/recorder.rs`, and `CallRun::report` in `action/run/mod.rs` for streams |
//! | whether a file of a reply goes by reference, and whether a reply is stored whole | `encode` in `bus/reply_files.rs`, called by `EncodedReply::prepare` in `bus/encoded_reply.rs`; `reference_parts` for frames |
//! | whether a file of a response goes to the store while it is received | `HttpResponse::store_files` in `a2a/http.rs`; `FileFilter` in `a2a/http/received_files.rs` finds it |
//! | who may read a file | `ObjectStore::metadata` in `bus/object_store/mod.rs` |
//! | how much a caller and a tenant may store | `Quota::grant` in `bus/object_store/quota.rs` |
//! | whether the bridge fetches a URL, and from which addresses | `FetchRules` in `files/fetch.rs` |
//! | which chunks of incomplete files are removed | `sweep` in `bus/object_store/sweeper.rs` |
//! | how an interrupted stream continues | `CallRun::check` in `action/run/mod.rs`; the loop is `CallRun::follow` |
//! | user, limits and environment of a launched agent | `launch` in `process/guarded.rs`; `Launch::exec` in `process/launch.rs` applies them |
//! | whether and when an agent restarts after an exit | `Lifecycle::after_failure` in `agent/lifecycle.rs`; `Backoff::next_delay` in `process/restart.rs` computes the delay |
//! | whether state is shared in JetStream | `OpenStore::open` in `bridge/store.rs`, with `JetStreamStore::detect` in `bus/jetstream/detection.rs` |
//! | whether a write of shared state has won, lost, or may still take effect | `Written::result` in `bus/jetstream/mod.rs` |
//! | whether a request to JetStream is sent at all | `Breaker::enter` in `bus/jetstream/breaker.rs` |
//! | what happens to a write while JetStream is unavailable | `ReplicatedStore::write_shared` in `state/replicated/mod.rs`; `state/replicated/flusher.rs` writes it later |
//! | which state is evicted or refused | `Entry::put` and `AgentRows::evict` in `state/table.rs`, with `state/table/holders.rs`; `state/quota.rs` has the quotas; each module of `state` says with a `Lifetime` what is protected |
//! | whether a call is `busy` because its task or question could not be recorded | `AgentQuota::reserve` in `state/quota.rs`, called by `Dispatcher::admit` in `dispatch/mod.rs`; `Operation::call_kind` in `dispatch/request.rs` says how much room a call may take |
//! | when expired state is removed | `State::sweep_periodically` in `state/mod.rs`, with `BoundedTable::sweep_step` in `state/table.rs` |
//! | whether a reply that is too large is shortened (questions, error data) or refused as `too_large` | `EncodedReply::new` in `bus/encoded_reply.rs`; `bus/agent_protocol/chunks.rs` for the agent protocol |
//! | whether an agent's response exceeds `max_response_size` | `HttpResponse::body` in `a2a/http.rs` and `SseParser` for what is sent, `Meter::add` in `a2a/meter.rs` for what is decoded, `TaskBuilder::resize` in `action/task_builder.rs` for the whole task |
//! | whether a call is `busy` because of `limits.memory` | `MemoryAccount::add` in `memory.rs`, with less memory while `memory/reclaimer.rs` finds that the process is near its limit; the same places as for `max_response_size` charge it, and `TaskRecorder::cover_reply` in `action/run/recorder.rs` for the reply |
//! | whether a response belongs to its request, and whether a connection is reused | `ResponseId::judge` and `allows_reuse` in `a2a/client/response.rs`, with `a2a/response_ids.rs` |
//! | whether work leaves the workers of the runtime | `offload::run` and `offload::block` in `offload.rs` |
//!
//! # Ownership
//!
//! | type | owns | lifetime |
//! | --- | --- | --- |
//! | [`Bridge`](bridge::Bridge) | the connection, the background tasks, the agents and their publications | the process |
//! | [`Agent`](agent::Agent) | a handle: status, live agent, commands to the supervisor | until dropped |
//! | [`LiveAgent`](a2a::LiveAgent) | the client of one running agent | one start, one card |
//! | [`Publication`](bus::publication::Publication) | an agent's service and registry entry | until withdrawn |
//! | [`Dispatcher`](dispatch::Dispatcher) | the permits of one agent | as long as its publication |
//! | [`NatsPeers`](bus::peers::NatsPeers) | what is known about other replicas, and the subscriptions for their requests | the process |
//! | [`State`](state::State) | follow-ups, tasks, sessions, idempotency keys | the process |
//! | [`BackgroundTasks`](background::BackgroundTasks) | all background tasks and their stop token | the process |
//!
//! # Limits
//!
//! Everything from outside is limited: bodies and nesting ([`config`] has limits per agent), cards, published
//! skills, calls in flight, follow-ups, recorded tasks and sessions, output lines, queued log lines, and queued
//! [spans](telemetry::spans). Dropped lines, spans and state are counted.
//!
//! State is limited in bytes. Each agent has an equal share of three sixteenths of `limits.memory`, and a part of it for
//! each kind of entry (`state::quota`), so that agents never evict or refuse each other's entries. Within an agent, expired
//! entries go first, then the oldest that have ended, of the caller that holds the most. What runs or waits is never evicted: running and submitted tasks,
//! open questions, idempotency keys. If only these remain, new requests are `busy`, before the agent runs: submissions
//! first, answers last (`state::quota::CallKind`).

// The documentation is built with `--document-private-items`.
#![allow(rustdoc::private_intra_doc_links)]

mod a2a;
mod action;
mod agent;
mod background;
mod bridge;
mod bus;
mod caller;
mod cli;
mod config;
mod demo_agent;
mod dispatch;
mod events;
mod failpoint;
mod files;
mod fuzz;
mod gateway;

mod json;
mod memory;
mod metrics;
mod offload;
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
    pub use crate::bridge::Bridge;
    pub use crate::bus::connect::FirstConnection;
    pub use crate::bus::control::AgentReport;
    pub use crate::bus::jetstream::{JetStreamAbsence, SharedStore};
    pub use crate::bus::service;
    pub use crate::bus::subject::{ReplyGuard, Subjects, Token};
    pub use crate::config::{Config, parse as parse_config};
    pub use crate::fuzz::{TARGETS as FUZZ_TARGETS, Target as FuzzTarget};
    pub use crate::process::{child, credentials, output, ports, procfs};
    pub use crate::secrets::Secrets;
    pub use crate::state::{StoreUnavailable, WriteError};
}
