//! What an agent gets of a session in which it has not taken part.

use std::collections::VecDeque;

use serde_json::json;
use uuid::Uuid;

use super::lineage::Lineage;
use super::messages::{FoundMessage, Role};
use super::projector::{SessionRef, project};
use crate::a2a::model::Part;
use crate::config::{HistoryConfig, HistoryMode};
use crate::events::codec::raw;
use crate::events::log::EventLog;
use crate::events::store::LogUnavailable;
use crate::text::head;

/// What was said before a run, if its agent takes part for the first time.
pub(crate) async fn read(
    log: &EventLog,
    session: &SessionRef,
    (agent, run): (&str, Uuid),
    has_logged_message: bool,
) -> Result<Option<Part>, LogUnavailable> {
    let HistoryConfig { mode, messages, bytes } = &log.history;
    if *mode == HistoryMode::None {
        return Ok(None);
    }
    let store = &*log.store;
    let Some(found) = project(store, session).await? else { return Ok(None) };
    if found.summary.had(agent, run) {
        return Ok(None);
    }
    let count = found.summary.message_count;
    let lineage = Lineage::of(store, session, found.summary).await?;
    // Those of the run itself are not part of it.
    let first = count.saturating_sub(*messages as u64 + 2);
    let after = match first {
        0 => 0,
        first => lineage.position(store, first).await?.map_or(0, |position| position.event.saturating_sub(1)),
    };
    let mut quoted: VecDeque<FoundMessage> = VecDeque::new();
    lineage
        .messages(store, after, |message| {
            if message.run != Some(run) {
                quoted.push_back(message);
                if quoted.len() > *messages + usize::from(has_logged_message) {
                    quoted.pop_front();
                }
            }
        })
        .await?;
    if has_logged_message {
        quoted.pop_back();
    }
    let mut left = usize::try_from(*bytes).unwrap_or(usize::MAX);
    let mut fitting: Vec<(Role, &str)> = Vec::new();
    for message in quoted.iter().rev().filter(|message| !message.content.is_redacted) {
        let text = head(&message.content.text, left);
        if left == 0 {
            break;
        }
        fitting.push((message.content.role, text));
        left = left.saturating_sub(text.len() + 16);
    }
    fitting.reverse();
    Ok((!fitting.is_empty()).then(|| part(*mode, &fitting)))
}

fn part(mode: HistoryMode, messages: &[(Role, &str)]) -> Part {
    if mode == HistoryMode::Data {
        let messages: Vec<_> =
            messages.iter().map(|(role, content)| json!({ "role": role, "content": content })).collect();
        return Part::Data(raw(&json!({ "history": messages })));
    }
    let mut text = String::from("The conversation so far:\n\n");
    for (role, content) in messages {
        let role = match role {
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::System => "system",
            Role::Tool => "tool",
        };
        text.push_str(&format!("{role}: {content}\n\n"));
    }
    text.push_str("The next message of the user:\n\n");
    Part::Text(text)
}
