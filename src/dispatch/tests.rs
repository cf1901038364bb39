//! The rules for every request, without an agent that answers.

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::action::actions::CallShutdown;
use crate::agent::Predecessors;
use crate::memory::MemoryAccount;
use crate::process::child::ProcessHost;

/// The dispatcher of an agent that does not exist, with these lines in its configuration.
fn dispatcher(lines: &str) -> Dispatcher {
    let text = format!(
        "nats: {{ url: 'nats://127.0.0.1:4222' }}\nagents: [{{ name: a, url: 'http://127.0.0.1:9', {lines} }}]"
    );
    let config = crate::config::parse(&text, "test", &|_| None).unwrap().agents.remove(0);
    let (http, skip_grace) = (crate::a2a::http_client().unwrap(), CancellationToken::new());
    let agent = Agent::start(
        config,
        &http,
        &ProcessHost::default(),
        skip_grace,
        Predecessors::default(),
        MemoryAccount::unlimited(),
    )
    .unwrap();
    let actions = Actions::new(
        Arc::clone(&agent.name),
        Arc::clone(&agent.config),
        agent.live.clone(),
        Arc::default(),
        mpsc::channel(1).0,
        CallShutdown::default(),
        agent.secrets.clone(),
    );
    Dispatcher::new(agent, actions, TaskTracker::new())
}

#[tokio::test]
async fn a_panic_is_an_internal_error_after_which_the_agent_may_have_been_reached() {
    let dispatcher = dispatcher("");
    let work = async {
        // Not at the first poll, as in a call that waits for its agent.
        tokio::task::yield_now().await;
        assert!(dispatcher.agent.name.is_empty(), "a bug");
        Ok(())
    };
    let error = dispatcher.guarded(work).await.unwrap_err();
    assert_eq!(error.info.code, Code::Internal);
    assert!(error.reached_agent, "a repeated request must not run twice");
}

#[tokio::test]
async fn errors_do_not_show_the_agents_credentials() {
    let dispatcher = dispatcher("bearer_token: canary-bearer-1f0c");
    let failed = async { Err::<(), _>(ActionError::new(Code::TaskFailed, "Bearer canary-bearer-1f0c")) };
    assert_eq!(dispatcher.guarded(failed).await.unwrap_err().message, "Bearer ***");
}

#[tokio::test]
async fn lookups_have_their_own_limit() {
    let dispatcher = dispatcher("max_in_flight: 1");
    let mut permits: Vec<_> = std::iter::from_fn(|| dispatcher.permits.lookup().ok()).take(10_000).collect();
    let refused = dispatcher.read_card(|| Ok(())).unwrap_err();
    assert_eq!(refused.info.code, Code::Busy);
    assert!(refused.message.contains("lookups"), "{}", refused.message);
    assert_eq!(dispatcher.agent.calls.outcomes()["busy"], 1, "the refusal counts");

    // Lookups take no permit of a call, and a call takes none of theirs.
    let call = dispatcher.permit().now_or_never().unwrap().unwrap();
    assert!(dispatcher.permit().now_or_never().is_none(), "that was the only permit");
    permits.pop();
    let read = || Ok(dispatcher.permits.lookup().is_err());
    assert!(dispatcher.read_card(read).unwrap(), "a lookup holds a permit while it reads");
    assert!(dispatcher.read_card(read).unwrap(), "and releases it");
    drop(call);
}
