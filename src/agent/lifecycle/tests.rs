//! Transitions on paused time.

use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use rstest::rstest;
use tokio::time::advance;

use super::*;
use crate::a2a::card::{Card, CardError};

const PID: i32 = 4711;

fn lifecycle(agent: &str) -> Lifecycle {
    let text = format!("nats: {{ url: 'nats://127.0.0.1:4222' }}\nagents: [{{ name: a, {agent} }}]");
    let config = config::parse(&text, "test", &|_| None).unwrap();
    Lifecycle::new("a".into(), Arc::new(config.agents.into_iter().next().unwrap()))
}

fn launched(more: &str) -> Lifecycle {
    lifecycle(&format!("url: 'http://127.0.0.1:9000', command: agent, {more}"))
}

fn attached() -> Lifecycle {
    lifecycle("url: 'http://127.0.0.1:9000'")
}

fn launch(agent: &mut Lifecycle) -> Step {
    let process = LaunchedProcess { pid: PID, launched: Instant::now(), started: SystemTime::now() };
    let config = Arc::clone(&agent.config);
    agent.on(AgentEvent::Launched { process, config })
}

fn card(name: &str) -> KnownCard {
    let card = Card::from_value(serde_json::json!({ "name": name })).unwrap();
    let interface = crate::a2a::card::Interface {
        url: "http://127.0.0.1:9000".parse().unwrap(),
        dialect: crate::a2a::dialect::Dialect::V1,
        tenant: None,
        reason: String::new(),
        is_confirmed: true,
        failure: None,
    };
    KnownCard { card: Arc::new(card), interface }
}

fn ready(more: &str) -> Lifecycle {
    let mut agent = launched(more);
    launch(&mut agent);
    assert_eq!(agent.on(AgentEvent::CardRead(card("one"))), Step::Watch);
    agent
}

fn ready_attached() -> Lifecycle {
    let mut agent = attached();
    agent.on(AgentEvent::CardRead(card("one")));
    agent
}

fn code(code: i32) -> Exit {
    Exit::Known(ExitStatus::from_raw(code << 8))
}

fn probe_timeout() -> AgentEvent {
    let url = "http://127.0.0.1:9000".to_owned();
    let error = CardError::Timeout { url, limit: Duration::from_secs(1) };
    AgentEvent::ProbeFailed { error: ProbeError::Card(error), busy: false }
}

fn probe_refused() -> AgentEvent {
    let error = CardError::NotListening { url: "http://127.0.0.1:9000".to_owned() };
    AgentEvent::ProbeFailed { error: ProbeError::Card(error), busy: false }
}

fn diagnosis(text: &str) -> Diagnosis {
    Diagnosis::new(text, "do something")
}

fn command(running: bool, generation: u64) -> AgentEvent {
    AgentEvent::Commanded(DesiredState { running, generation })
}

/// The back-off that the agent waits for now.
fn delay(step: Step) -> Duration {
    match step {
        Step::Wait(Some(until)) => until.saturating_duration_since(Instant::now()),
        other => panic!("{other:?} is no back-off"),
    }
}

#[track_caller]
fn assert_about(delay: Duration, seconds: f64) {
    let delay = delay.as_secs_f64();
    assert!((seconds * 0.79..=seconds * 1.21).contains(&delay), "{delay} for {seconds}");
}

#[tokio::test(start_paused = true)]
async fn a_launched_agent_is_ready_after_its_process_and_its_card() {
    let mut agent = launched("");
    assert_eq!((agent.step(), agent.state()), (Step::Start, AgentState::Starting));
    assert_eq!(launch(&mut agent), Step::AwaitReady);
    let status = agent.status();
    assert_eq!((status.state, status.pid), (AgentState::Starting, Some(PID)));
    assert_eq!(status.url, "http://127.0.0.1:9000/");
    assert_eq!(agent.on(AgentEvent::CardRead(card("one"))), Step::Watch);
    let status = agent.status();
    assert_eq!((status.state, status.pid, status.restarts), (AgentState::Ready, Some(PID), 0));
    assert_eq!(status.known, Some(card("one")));
}

#[rstest]
#[case::on_failure("", 1, AgentState::BackingOff)]
#[case::on_success("", 0, AgentState::Stopped)]
#[case::always("restart: always", 0, AgentState::BackingOff)]
#[case::never("restart: never", 3, AgentState::Failed)]
#[case::never_on_success("restart: never", 0, AgentState::Stopped)]
#[tokio::test(start_paused = true)]
async fn the_next_state_is_public_while_descendants_still_exit(
    #[values(false, true)] was_unhealthy: bool,
    #[case] settings: &str,
    #[case] exit: i32,
    #[case] follows: AgentState,
) {
    let mut agent = ready(settings);
    if was_unhealthy {
        agent.on(AgentEvent::Suspended(PID));
        assert_eq!(agent.state(), AgentState::Unhealthy);
    }
    assert_eq!(agent.on(AgentEvent::Exited(code(exit))), Step::StopProcess);
    let exiting = agent.status();
    assert_eq!((exiting.state, exiting.pid, exiting.started), (follows, None, None));
    assert_eq!(exiting.last_exit.as_ref().unwrap().0, format!("exited with code {exit}"));
    assert!(exiting.last_error.as_ref().unwrap().contains("exited with code"));
    assert_eq!(exiting.next_try.is_some(), follows == AgentState::BackingOff);
    agent.on(AgentEvent::TreeExited { exit: code(exit), last_line: None });
    // Others see one change, not two.
    assert_eq!(agent.status(), exiting);
}

#[tokio::test(start_paused = true)]
async fn an_exit_that_cannot_be_read_is_a_failure() {
    let mut agent = ready("restart: on-failure");
    agent.on(AgentEvent::Exited(Exit::Unknown));
    assert_eq!(agent.state(), AgentState::BackingOff);
}

#[tokio::test(start_paused = true)]
async fn the_backoff_begins_with_the_exit_and_the_restart_waits_for_the_tree() {
    let mut agent = ready("");
    agent.on(AgentEvent::Exited(code(1)));
    advance(Duration::from_millis(500)).await;
    let left = delay(agent.on(AgentEvent::TreeExited { exit: code(1), last_line: None }));
    assert!(left <= Duration::from_millis(700), "{left:?}");
    advance(Duration::from_secs(1)).await;
    assert_eq!(agent.on(AgentEvent::BackoffElapsed), Step::Start);
    let status = agent.status();
    assert_eq!((status.state, status.restarts, status.next_try), (AgentState::Starting, 1, None));
    assert!(status.last_error.unwrap().contains("exited with code 1"), "a restart does not hide the reason");
}

#[tokio::test(start_paused = true)]
async fn backoffs_double_until_the_agent_was_ready_for_the_stable_time() {
    let mut agent = launched("stable_after: 10s");
    for seconds in [1.0, 2.0, 4.0] {
        launch(&mut agent);
        agent.on(AgentEvent::Exited(code(3)));
        assert_about(delay(agent.on(AgentEvent::TreeExited { exit: code(3), last_line: None })), seconds);
        agent.on(AgentEvent::BackoffElapsed);
    }
    for (ready_for, seconds) in [(9, 8.0), (11, 1.0)] {
        launch(&mut agent);
        agent.on(AgentEvent::CardRead(card("one")));
        advance(Duration::from_secs(ready_for)).await;
        agent.on(AgentEvent::Exited(code(3)));
        assert_about(delay(agent.on(AgentEvent::TreeExited { exit: code(3), last_line: None })), seconds);
        agent.on(AgentEvent::BackoffElapsed);
    }
}

#[tokio::test(start_paused = true)]
async fn too_many_restarts_in_the_window_fail_the_agent_until_a_command() {
    let mut agent = launched("max_restarts: 1, restart_window: 1m");
    let crash = |agent: &mut Lifecycle| {
        launch(agent);
        agent.on(AgentEvent::Exited(code(3)));
        agent.on(AgentEvent::TreeExited { exit: code(3), last_line: None })
    };
    assert!(matches!(crash(&mut agent), Step::Wait(Some(_))));
    agent.on(AgentEvent::BackoffElapsed);
    assert_eq!((crash(&mut agent), agent.state()), (Step::Wait(None), AgentState::Failed));
    assert_eq!(agent.on(command(true, 1)), Step::Start);
    assert_eq!((agent.state(), agent.status().restarts), (AgentState::Starting, 2));
    // The command reset the budget; later the window expires.
    assert!(matches!(crash(&mut agent), Step::Wait(Some(_))));
    agent.on(AgentEvent::BackoffElapsed);
    advance(Duration::from_secs(60)).await;
    assert!(matches!(crash(&mut agent), Step::Wait(Some(_))));
}

#[tokio::test(start_paused = true)]
async fn a_command_and_its_state_become_visible_together() {
    let mut agent = ready("");
    let seen = |agent: &Lifecycle| (agent.status().generation, agent.status().state);
    assert_eq!(agent.on(command(false, 1)), Step::StopProcess);
    assert_eq!(seen(&agent), (1, AgentState::Starting));
    assert_eq!(agent.status().pid, Some(PID), "it is not stopped while its process runs");
    assert_eq!(agent.on(AgentEvent::TreeExited { exit: code(0), last_line: None }), Step::Wait(None));
    assert_eq!(seen(&agent), (1, AgentState::Stopped));
    assert_eq!(agent.status().last_error.as_deref(), Some("stopped on request"));
    assert_eq!(agent.on(command(true, 2)), Step::Start);
    assert_eq!(seen(&agent), (2, AgentState::Starting));
    assert_eq!(agent.status().last_error, None);
    launch(&mut agent);
    agent.on(AgentEvent::CardRead(card("one")));
    assert_eq!(agent.on(command(true, 3)), Step::StopProcess);
    assert_eq!(seen(&agent), (3, AgentState::Starting));
    assert_eq!(agent.on(AgentEvent::TreeExited { exit: code(0), last_line: None }), Step::Start);
    // A start after a stop is not a restart.
    assert_eq!((seen(&agent), agent.status().restarts), ((3, AgentState::Starting), 1));
}

#[rstest]
#[case::backing_off(false, true)]
#[case::stop_while_backing_off(true, false)]
#[tokio::test(start_paused = true)]
async fn a_command_cuts_a_backoff_short(#[case] is_attached: bool, #[case] running: bool) {
    let mut agent = if is_attached { attached() } else { launched("") };
    assert!(matches!(agent.on(AgentEvent::NotStarted(diagnosis("no"))), Step::Wait(Some(_))));
    let step = agent.on(command(running, 1));
    let expected =
        if running { (Step::Start, AgentState::Starting) } else { (Step::Wait(None), AgentState::Stopped) };
    assert_eq!((step, agent.state()), expected);
    assert_eq!((agent.status().generation, agent.status().next_try), (1, None));
}

#[tokio::test(start_paused = true)]
async fn an_attached_agent_is_shown_as_backing_off_while_it_is_probed_again() {
    let mut agent = attached();
    let step = agent.on(AgentEvent::NotStarted(diagnosis("no")));
    assert_about(delay(step), 0.5);
    assert_eq!(agent.on(AgentEvent::BackoffElapsed), Step::Start);
    let status = agent.status();
    assert_eq!((status.state, status.restarts), (AgentState::BackingOff, 0));
    assert_eq!(status.last_error.as_deref(), Some("no"));
    assert_about(delay(agent.on(AgentEvent::NotStarted(diagnosis("no")))), 1.0);
    agent.on(AgentEvent::BackoffElapsed);
    assert_eq!(agent.on(AgentEvent::CardRead(card("one"))), Step::Watch);
    assert_eq!((agent.state(), agent.status().last_error), (AgentState::Ready, None));
}

#[tokio::test(start_paused = true)]
async fn an_attached_agent_without_a_listener_is_lost_immediately() {
    let mut agent = ready_attached();
    assert!(matches!(agent.on(probe_refused()), Step::Wait(Some(_))));
    assert_eq!(agent.state(), AgentState::BackingOff);
}

#[tokio::test(start_paused = true)]
async fn a_few_failed_probes_make_an_agent_unhealthy_and_one_good_card_ready() {
    let mut agent = ready("readiness: { failures: 2 }, liveness: { failures: 9 }");
    assert_eq!((agent.on(probe_timeout()), agent.state()), (Step::Watch, AgentState::Ready));
    agent.on(probe_timeout());
    assert_eq!((agent.state(), agent.status().pid), (AgentState::Unhealthy, Some(PID)));
    agent.on(AgentEvent::CardRead(card("two")));
    assert_eq!((agent.state(), agent.status().known), (AgentState::Ready, Some(card("two"))));
    // The count begins again.
    agent.on(probe_timeout());
    assert_eq!(agent.state(), AgentState::Ready);
}

#[tokio::test(start_paused = true)]
async fn a_hung_process_is_unhealthy_until_it_exits_and_a_busy_one_is_not_hung() {
    let mut agent = ready("liveness: { failures: 2 }, readiness: { failures: 9 }");
    for _ in 0..5 {
        let AgentEvent::ProbeFailed { error, .. } = probe_timeout() else { unreachable!() };
        assert_eq!(agent.on(AgentEvent::ProbeFailed { error, busy: true }), Step::Watch);
    }
    agent.on(probe_timeout());
    assert_eq!(agent.on(probe_timeout()), Step::StopProcess);
    let status = agent.status();
    assert_eq!((status.state, status.pid), (AgentState::Unhealthy, Some(PID)));
    assert!(status.last_error.unwrap().contains("failed 2 liveness checks in a row"));
    advance(Duration::from_secs(30)).await;
    // It did not exit by itself, so its exit code means nothing, and the back-off begins now.
    assert_about(delay(agent.on(AgentEvent::TreeExited { exit: code(0), last_line: None })), 1.0);
    assert_eq!((agent.state(), agent.status().pid), (AgentState::BackingOff, None));
}

#[tokio::test(start_paused = true)]
async fn a_process_that_stays_suspended_is_stopped_and_one_that_resumes_is_not() {
    let mut agent = ready("liveness: { interval: 4s }");
    assert_eq!((agent.on(AgentEvent::Suspended(PID)), agent.state()), (Step::Watch, AgentState::Unhealthy));
    advance(Duration::from_secs(1)).await;
    assert_eq!(agent.on(AgentEvent::Suspended(PID)), Step::Watch, "too soon to tell");
    agent.on(AgentEvent::Resumed);
    advance(Duration::from_secs(4)).await;
    assert_eq!(agent.on(AgentEvent::Suspended(PID)), Step::Watch, "it begins again");
    advance(Duration::from_secs(2)).await;
    assert_eq!(
        (agent.on(AgentEvent::Suspended(PID)), agent.state()),
        (Step::StopProcess, AgentState::Unhealthy)
    );
}

#[tokio::test(start_paused = true)]
async fn a_start_that_takes_too_long_is_starting_until_its_process_exits() {
    let mut agent = launched("");
    agent.on(AgentEvent::Delayed(Some(diagnosis("slow"))));
    assert_eq!(agent.status().last_error.as_deref(), Some("slow"));
    agent.on(AgentEvent::Delayed(None));
    assert_eq!(agent.status().last_error, None);
    launch(&mut agent);
    assert_eq!(agent.on(AgentEvent::NotStarted(diagnosis("not ready"))), Step::StopProcess);
    let status = agent.status();
    assert_eq!((status.state, status.last_error.as_deref()), (AgentState::Starting, Some("not ready")));
    assert!(matches!(
        agent.on(AgentEvent::TreeExited { exit: code(0), last_line: None }),
        Step::Wait(Some(_))
    ));
    assert_eq!(agent.state(), AgentState::BackingOff);
}

#[tokio::test(start_paused = true)]
async fn on_shutdown_the_process_exits_first() {
    let mut agent = ready("");
    assert_eq!(agent.on(AgentEvent::Shutdown), Step::StopProcess);
    assert_eq!(agent.state(), AgentState::Starting);
    assert_eq!(
        (agent.on(AgentEvent::TreeExited { exit: code(0), last_line: None }), agent.state()),
        (Step::Finish, AgentState::Stopped)
    );
    let mut agent = ready_attached();
    assert_eq!((agent.on(AgentEvent::Shutdown), agent.state()), (Step::Finish, AgentState::Stopped));
}

#[tokio::test(start_paused = true)]
async fn an_event_that_comes_too_late_changes_nothing() {
    let mut agent = ready("");
    agent.on(command(false, 1));
    agent.on(AgentEvent::TreeExited { exit: code(0), last_line: None });
    let stopped = agent.status();
    let late = [
        AgentEvent::BackoffElapsed,
        AgentEvent::CardRead(card("two")),
        probe_timeout(),
        AgentEvent::Suspended(PID),
        AgentEvent::Exited(code(1)),
    ];
    for event in late {
        assert_eq!(agent.on(event), Step::Wait(None));
        assert_eq!(agent.status(), stopped);
    }
}

#[tokio::test(start_paused = true)]
async fn no_sequence_of_events_shows_a_process_that_exited_as_unhealthy() {
    let mut random = fastrand::Rng::with_seed(12);
    for _ in 0..2_000 {
        let mut agent = launched("restart: always, readiness: { failures: 1 }, liveness: { failures: 2 }");
        let (mut generation, mut has_process) = (0, false);
        for _ in 0..30 {
            let step = agent.step();
            let event = match (step, random.u8(0..6)) {
                (_, 0) if step != Step::StopProcess => {
                    generation += 1;
                    command(random.bool(), generation)
                }
                (Step::Start, 1) => AgentEvent::NotStarted(diagnosis("no")),
                (Step::Start, _) => {
                    has_process = true;
                    launch(&mut agent);
                    continue;
                }
                (Step::AwaitReady | Step::Watch, 1) => {
                    has_process = false;
                    AgentEvent::Exited(code(1))
                }
                (Step::AwaitReady, 2) => AgentEvent::NotStarted(diagnosis("slow")),
                (Step::AwaitReady | Step::Watch, 3) => AgentEvent::CardRead(card("one")),
                (Step::Watch, 4) => AgentEvent::Suspended(PID),
                (Step::Watch, _) => probe_timeout(),
                (Step::AwaitReady, _) => AgentEvent::Delayed(None),
                (Step::StopProcess, _) => {
                    has_process = false;
                    AgentEvent::TreeExited { exit: code(1), last_line: None }
                }
                (Step::Wait(_), _) => AgentEvent::BackoffElapsed,
                (Step::Finish, _) => break,
            };
            agent.on(event);
            advance(Duration::from_millis(random.u64(0..5_000))).await;
            let status = agent.status();
            if status.state == AgentState::Unhealthy || status.state == AgentState::Ready {
                assert!(has_process, "{:?}", agent.phase);
            }
            assert_eq!(status.pid.is_some(), has_process, "{:?}", agent.phase);
            assert_eq!(status.generation, generation);
        }
    }
}
