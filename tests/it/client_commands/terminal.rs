//! `call` on a terminal: prompts for answers, hidden input, Ctrl-C.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};

use nix::pty::openpty;
use nix::sys::signal::Signal;
use rstest::rstest;

use super::Stage;
use crate::support::commands::{command_on, exit_status, send_signal};
use crate::support::eventually;

/// A command whose stdin, stdout and stderr are a terminal.
struct Terminal {
    child: Child,
    keyboard: File,
    shown: Arc<Mutex<String>>,
}

impl Terminal {
    fn run(stage: &Stage, arguments: &[&str]) -> Self {
        let pty = openpty(None, None).unwrap();
        let side = || Stdio::from(pty.slave.try_clone().unwrap());
        let mut command = command_on(&stage.server.url(), arguments);
        command.env("TERM", "xterm");
        let child = command.stdin(side()).stdout(side()).stderr(side()).spawn().unwrap();
        drop(command);
        let keyboard = File::from(pty.master);
        let mut screen = keyboard.try_clone().unwrap();
        let shown = Arc::<Mutex<String>>::default();
        let writer = Arc::clone(&shown);
        std::thread::spawn(move || {
            let mut piece = [0; 1024];
            // When the last process closes the other side, Linux returns an error and macOS the end of the file.
            while let Ok(count @ 1..) = screen.read(&mut piece) {
                writer.lock().unwrap().push_str(&String::from_utf8_lossy(&piece[..count]));
            }
        });
        Self { child, keyboard, shown }
    }

    async fn shows(&self, text: &str) -> String {
        eventually(|| async {
            let shown = self.shown.lock().unwrap().clone();
            shown.contains(text).then_some(shown)
        })
        .await
    }

    fn types(&mut self, line: &str) {
        self.keyboard.write_all(line.as_bytes()).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn follow_up_is_prompted_for_on_the_terminal() {
    let stage = Stage::new().await;
    let mut terminal =
        Terminal::run(&stage, &["call", "demo.report", "-p", "topic=tides", "-p", "audience=all"]);
    terminal.shows("? Which format would you like: PDF or Markdown?").await;
    terminal.shows("> ").await;
    terminal.types("Word\n");
    terminal.shows("I cannot write that.").await;
    terminal.types("pdf\n");
    terminal.shows("Report: Write a report about tides for all").await;
    assert_eq!(exit_status(&mut terminal.child).await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn question_of_a_stream_is_shown_once() {
    let stage = Stage::new().await;
    let mut terminal = Terminal::run(
        &stage,
        &["call", "demo.report", "-p", "topic=tides", "-p", "audience=all", "--stream"],
    );
    terminal.shows("> ").await;
    terminal.types("pdf\n");
    let shown = terminal.shows("Report: Write a report about tides for all").await;
    assert_eq!(shown.matches("Which format").count(), 1, "{shown}");
    assert_eq!(exit_status(&mut terminal.child).await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_is_shown_with_the_elapsed_seconds_and_what_the_agent_does() {
    let stage = Stage::new().await;
    let mut terminal = Terminal::run(&stage, &["call", "demo.slow", "3"]);
    terminal.shows("1 s waiting for the agent (Ctrl-C stops waiting)").await;
    let shown = terminal.shows("took 3").await;
    // The line is cleared before the reply.
    assert!(shown.contains("\r\u{1b}[2Kworked for 3 s"), "{shown:?}");
    assert_eq!(exit_status(&mut terminal.child).await.code(), Some(0));

    let mut terminal = Terminal::run(&stage, &["call", "demo.slow", "2", "--stream"]);
    terminal.shows("1 s waiting for the agent (Ctrl-C cancels the task)").await;
    terminal.shows("worked for 2 s").await;
    assert_eq!(exit_status(&mut terminal.child).await.code(), Some(0));

    let mut terminal = Terminal::run(&stage, &["call", "demo.stream", "one two three four five", "--stream"]);
    terminal.shows("first text after ").await;
    assert_eq!(exit_status(&mut terminal.child).await.code(), Some(0));
}

#[rstest]
#[case::ctrl_c(Signal::SIGINT)]
#[case::terminated(Signal::SIGTERM)]
#[tokio::test(flavor = "multi_thread")]
async fn top_draws_until_it_is_ended_and_leaves_the_table(#[case] signal: Signal) {
    let stage = Stage::new().await;
    let mut terminal = Terminal::run(&stage, &["top", "--interval", "500ms"]);
    let shown = terminal.shows("demo").await;
    assert!(shown.contains("\u{1b}[?1049h") && shown.contains("1 agent, 0.0 calls/s"), "{shown:?}");
    send_signal(&terminal.child, signal);
    terminal.shows("\u{1b}[?1049l").await;
    assert_eq!(exit_status(&mut terminal.child).await.code(), Some(0));
    terminal.shows("demo").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn secret_is_not_echoed() {
    let stage = Stage::new().await;
    let mut terminal = Terminal::run(&stage, &["call", "demo.auth", "x"]);
    terminal.shows("your input is hidden").await;
    terminal.shows("> ").await;
    terminal.types("t0ps3cret\n");
    let shown = terminal.shows("Signed in; the work is done.").await;
    assert!(!shown.contains("t0ps3cret"), "{shown}");
    assert_eq!(exit_status(&mut terminal.child).await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_at_a_follow_up_prints_how_to_answer_it_later() {
    let stage = Stage::new().await;
    let mut terminal = Terminal::run(&stage, &["call", "demo.auth", "x"]);
    terminal.shows("> ").await;
    send_signal(&terminal.child, Signal::SIGINT);
    let shown = terminal.shows("call demo --answer").await;
    assert!(shown.contains("interrupted; the agent is still waiting for an answer"), "{shown}");
    assert_eq!(exit_status(&mut terminal.child).await.code(), Some(130));
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_interrupts_a_waiting_call() {
    let stage = Stage::new().await;
    let mut terminal = Terminal::run(&stage, &["call", "demo.slow", "6"]);
    terminal.shows("waiting for the agent").await;
    send_signal(&terminal.child, Signal::SIGINT);
    terminal.shows("interrupted; the task may still be running").await;
    assert_eq!(exit_status(&mut terminal.child).await.code(), Some(130));
}
