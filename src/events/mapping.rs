//! Which event an artifact becomes, by its name.

use std::collections::BTreeMap;

use super::event::EventType;
use crate::action::assemble::matches;
use crate::config::ArtifactEvent;

/// What an artifact is for the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ArtifactKind {
    /// An event of this type.
    Event(EventType),
    /// A part of the whole answer, which the last event of the call has. Only frames need the artifact itself.
    Answer,
}

/// Names that common agents use.
const DEFAULTS: [(&str, ArtifactKind); 12] = [
    ("output_start", ArtifactKind::Event(EventType::AgentTokenStart)),
    ("output_delta", ArtifactKind::Event(EventType::AgentToken)),
    ("streaming_result", ArtifactKind::Event(EventType::AgentToken)),
    ("output_end", ArtifactKind::Event(EventType::AgentTokenEnd)),
    ("tool_notification_start", ArtifactKind::Event(EventType::AgentToolCall)),
    ("tool_notification_complete", ArtifactKind::Event(EventType::AgentToolResult)),
    ("tool_result", ArtifactKind::Event(EventType::AgentToolResult)),
    ("execution_plan_*", ArtifactKind::Event(EventType::AgentArtifact)),
    ("full_output", ArtifactKind::Answer),
    ("partial_result", ArtifactKind::Answer),
    ("final_result", ArtifactKind::Answer),
    ("current_result", ArtifactKind::Answer),
];

/// The patterns of one agent, which take precedence over the defaults.
#[derive(Debug, Clone, Default)]
pub(crate) struct TypeRules(Vec<(String, ArtifactKind)>);

impl TypeRules {
    pub(crate) fn new(rules: &BTreeMap<String, ArtifactEvent>) -> Self {
        let mut rules: Vec<_> =
            rules.iter().map(|(pattern, event)| (pattern.clone(), (*event).into())).collect();
        // The longest pattern is the most specific one.
        rules.sort_by_key(|(pattern, _): &(String, ArtifactKind)| std::cmp::Reverse(pattern.len()));
        Self(rules)
    }

    /// `None` for a name that no rule mentions.
    pub(crate) fn kind(&self, name: Option<&str>) -> Option<ArtifactKind> {
        let name = name?;
        let own = self.0.iter().map(|(pattern, kind)| (pattern.as_str(), *kind));
        own.chain(DEFAULTS).find(|(pattern, _)| matches(pattern, name)).map(|(_, kind)| kind)
    }
}

impl From<ArtifactEvent> for ArtifactKind {
    fn from(event: ArtifactEvent) -> Self {
        Self::Event(match event {
            ArtifactEvent::TokenStart => EventType::AgentTokenStart,
            ArtifactEvent::Token => EventType::AgentToken,
            ArtifactEvent::TokenEnd => EventType::AgentTokenEnd,
            ArtifactEvent::ToolCall => EventType::AgentToolCall,
            ArtifactEvent::ToolResult => EventType::AgentToolResult,
            ArtifactEvent::Artifact => EventType::AgentArtifact,
            ArtifactEvent::Complete => return Self::Answer,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_can_map_its_own_names_and_override_the_defaults() {
        let rules = [("*", ArtifactEvent::Artifact), ("step_*", ArtifactEvent::ToolCall)];
        let rules = rules.into_iter().chain([("full_output", ArtifactEvent::Token)]);
        let rules = rules.map(|(pattern, event)| (pattern.to_owned(), event)).collect();
        let rules = TypeRules::new(&rules);
        let kind = |name| rules.kind(Some(name));
        assert_eq!(kind("step_1"), Some(ArtifactKind::Event(EventType::AgentToolCall)));
        assert_eq!(kind("full_output"), Some(ArtifactKind::Event(EventType::AgentToken)));
        assert_eq!(kind("final_result"), Some(ArtifactKind::Event(EventType::AgentArtifact)));
        let defaults = TypeRules::default();
        assert_eq!(defaults.kind(Some("final_result")), Some(ArtifactKind::Answer));
        assert_eq!((defaults.kind(Some("report")), defaults.kind(None)), (None, None));
    }
}
