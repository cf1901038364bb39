//! `call` on a terminal: questions, answers and hidden input.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::pty::openpty;
use nix::sys::signal::Signal;

use super::Stage;
use crate::support::commands::{ended, interrupt, on};
use crate::support::eventually;

const PATIENCE: Duration = Duration::from_secs(10);

/// A command whose stdin, stdout and stderr are a terminal.
struct Screen {
    child: Child,
    keys: File,
    shown: Arc<Mutex<String>>,
}

impl Screen {
    fn run(stage: &Stage, arguments: &[&str]) -> Self {
        let pty = openpty(None, None).unwrap();
        let side = || Stdio::from(pty.slave.try_clone().unwrap());
        let mut command = on(&stage.server.url(), arguments);
        command.env("TERM", "xterm");
        let child = command.stdin(side()).stdout(side()).stderr(side()).spawn().unwrap();
        drop(command);
        let keys = File::from(pty.master);
        let mut screen = keys.try_clone().unwrap();
        let shown = Arc::<Mutex<String>>::default();
        let writer = Arc::clone(&shown);
        std::thread::spawn(move || {
            let mut piece = [0; 1024];
            // When the other side closes, Linux returns an error and other systems the end of the file.
            while let Ok(count @ 1..) = screen.read(&mut piece) {
                writer.lock().unwrap().push_str(&String::from_utf8_lossy(&piece[..count]));
            }
        });
        Self { child, keys, shown }
    }

    async fn shows(&self, text: &str) -> String {
        eventually(PATIENCE, || async {
            let shown = self.shown.lock().unwrap().clone();
            shown.contains(text).then_some(shown)
        })
        .await
    }

    fn types(&mut self, line: &str) {
        self.keys.write_all(line.as_bytes()).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_question_is_answered_on_the_terminal() {
    let stage = Stage::new().await;
    let mut screen = Screen::run(&stage, &["call", "demo.report", "-p", "topic=tides", "-p", "audience=all"]);
    screen.shows("? Which format would you like: PDF or Markdown?").await;
    screen.shows("> ").await;
    screen.types("Word\n");
    screen.shows("I cannot write that.").await;
    screen.types("pdf\n");
    screen.shows("Report: Write a report about tides for all").await;
    assert_eq!(ended(&mut screen.child).await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_answer_is_hidden() {
    let stage = Stage::new().await;
    let mut screen = Screen::run(&stage, &["call", "demo.auth", "x"]);
    screen.shows("your input is hidden").await;
    screen.shows("> ").await;
    screen.types("t0ps3cret\n");
    let shown = screen.shows("Signed in; the work is done.").await;
    assert!(!shown.contains("t0ps3cret"), "{shown}");
    assert_eq!(ended(&mut screen.child).await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_question_shows_how_to_answer_later() {
    let stage = Stage::new().await;
    let mut screen = Screen::run(&stage, &["call", "demo.auth", "x"]);
    screen.shows("> ").await;
    interrupt(&screen.child, Signal::SIGINT);
    let shown = screen.shows("call demo --answer").await;
    assert!(shown.contains("interrupted; the agent still waits for an answer"), "{shown}");
    assert_eq!(ended(&mut screen.child).await.code(), Some(130));
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_stops_waiting_for_a_call() {
    let stage = Stage::new().await;
    let mut screen = Screen::run(&stage, &["call", "demo.slow", "6"]);
    screen.shows("waiting for the agent").await;
    interrupt(&screen.child, Signal::SIGINT);
    screen.shows("interrupted; the task may still be running").await;
    assert_eq!(ended(&mut screen.child).await.code(), Some(130));
}
