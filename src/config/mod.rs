//! The configuration: the YAML file, checked as a whole before anything starts.
//!
//! `settings` declares every setting once: key, aliases, kind, default, example, and the text that
//! users read. **To add a setting, add it there**; the struct that the rest of the bridge sees, the reader,
//! `a2a-bridge schema`, `config/full.yaml` and the settings reference of the manual all follow from the
//! declaration. `declare` explains how, `kinds` has the kinds of values, `rules` the rules across keys.
//!
//! [`load()`] is the only way in: it reads a file, expands `${NAME}`, and reports all problems together
//! with file, line and column. The steps are `load` (YAML to a tree), `redact` (where the secrets are),
//! `node` (duplicate and merge keys), `expand` (variables), and then the readers of the declared settings.
//! The tree is our own because serde stops at the first error and does not know positions.

mod agent;
mod declare;
mod environment;
mod expand;
mod kinds;
mod load;
mod node;
mod problems;
mod redact;
mod rules;
mod settings;
#[cfg(test)]
mod tests;
pub(crate) mod values;

pub(crate) use agent::Port;
pub(crate) use environment::Environment;
pub(crate) use kinds::{
    A2aVersion, ArtifactEvent, Binding, CallLogging, CallerBinding, EventRecord, GatewayRole, HistoryMode,
    JetStreamMode, KeyPlace, NatsUrl, Restart, StateReplicas, parse_word, without_user_info,
};
pub use load::parse;
pub(crate) use load::{load, load_nats, load_with};
pub(crate) use problems::ConfigError;
pub use settings::Config;
pub(crate) use settings::{
    AgentConfig, AgentLimits, Auth, EventsConfig, FilesConfig, GatewayConfig, GatewayLimits, GatewayTls,
    GatewayToken, HistoryConfig, IdentityConfig, JetStreamConfig, MetricsConfig, NatsConfig, OAuth2, Skills,
    TlsFiles, schema,
};
