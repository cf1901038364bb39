use std::sync::LazyLock;

use rstest::rstest;

use super::super::assemble::task_content;
use super::*;

struct Reported {
    artifacts: usize,
    response: String,
    states: Vec<String>,
}

fn rules() -> ArtifactRules {
    ArtifactRules { response: vec!["*".into()], notice: vec!["plan_*".into()] }
}

fn builder(rules: &ArtifactRules, max_size: usize, reports_content: bool) -> TaskBuilder<'_> {
    static MEMORY: LazyLock<Arc<MemoryAccount>> = LazyLock::new(|| MemoryAccount::unlimited("fake"));
    TaskBuilder::new(rules, max_size, reports_content, &MEMORY)
}

fn reported(builder: &mut TaskBuilder<'_>, events: &[&str]) -> Reported {
    let mut reported = Reported { artifacts: 0, response: String::new(), states: Vec::new() };
    for event in events {
        for event in builder.apply(Event::decode(event).unwrap()).unwrap() {
            match event {
                ProgressEvent::Artifact { .. } => reported.artifacts += 1,
                ProgressEvent::Response(text) => reported.response.push_str(&text),
                ProgressEvent::State { state, .. } => reported.states.push(state.to_string()),
                ProgressEvent::Task { .. } => {}
            }
        }
    }
    reported
}

fn artifact(id: &str, name: &str, text: &str, append: bool) -> String {
    format!(
        r#"{{"artifactUpdate":{{"taskId":"t","append":{append},"artifact":{{"artifactId":"{id}","name":"{name}","parts":[{{"text":"{text}"}}]}}}}}}"#
    )
}

fn events(list: &[String]) -> Vec<&str> {
    list.iter().map(String::as_str).collect()
}

#[test]
fn pieces_are_reported_as_they_arrive_and_parallel_artifacts_stay_separate() {
    let (rules, list) = (
        rules(),
        [
            artifact("a", "x", "Hel", false),
            artifact("p", "plan_1", "first", false),
            artifact("a", "x", "lo", true),
            artifact("b", "y", "second", false),
            artifact("a", "x", "!", true),
        ],
    );
    let mut builder = builder(&rules, 10_000, true);
    let reported = reported(&mut builder, &events(&list));
    assert_eq!((reported.artifacts, reported.response.as_str()), (5, "Hello\nsecond\n!"));
    let texts: Vec<_> =
        builder.task().unwrap().artifacts.iter().map(|a| a.parts[0].as_text().unwrap()).collect();
    assert_eq!(texts, ["Hello!", "first", "second"]);
}

#[test]
fn a_closing_artifact_and_text_that_is_resent_with_every_token_are_streamed_once() {
    let (rules, list) = (
        rules(),
        [
            artifact("s", "streaming_result", "one ", false),
            artifact("s", "streaming_result", "two", true),
            artifact("f", "final_result", "one two", false),
        ],
    );
    assert_eq!(reported(&mut builder(&rules, 1000, true), &events(&list)).response, "one two");
    let whole = [artifact("s", "x", "one", false), artifact("s", "x", "one two", false)];
    assert_eq!(reported(&mut builder(&rules, 1000, true), &events(&whole)).response, "one two");
}

/// An artifact without an id.
fn nameless(name: &str, text: &str, append: bool) -> String {
    artifact("", name, text, append).replace(r#""artifactId":"","#, "")
}

#[test]
fn the_streamed_text_is_the_message_in_the_end() {
    let data =
        r#"{"artifactUpdate":{"taskId":"t","artifact":{"artifactId":"d","parts":[{"data":{"n":1}}]}}}"#;
    let snapshot = r#"{"task":{"id":"t","status":{"state":"working"},"artifacts":[{"parts":[{"text":"a"}]},{"parts":[{"text":"ab"}]}]}}"#;
    let rules = rules();
    for (list, message) in [
        (vec![nameless("n1", "one", false), nameless("n2", "two", true)], "one\ntwo"),
        (vec![nameless("n1", "one", false), nameless("n2", "one more", false)], "one\none more"),
        (vec![snapshot.to_owned()], "a\nab"),
        // Text that looks like a repetition at first is streamed once it differs.
        (
            vec![
                artifact("a", "x", "ha", false),
                artifact("b", "y", "ha", false),
                artifact("b", "y", "ho", true),
            ],
            "ha\nhaho",
        ),
        (
            vec![
                artifact("a", "x", "ha", false),
                artifact("b", "y", "ha", false),
                artifact("a", "x", "ha", true),
            ],
            "haha\nha",
        ),
        (
            vec![
                artifact("a", "x", "ha", false),
                artifact("b", "y", "ha", false),
                artifact("a", "x", "ho", true),
                artifact("b", "y", "ho", true),
            ],
            "haho",
        ),
        (
            vec![artifact("a", "x", "one", false), data.to_owned(), artifact("a", "x", " two", true)],
            "one two",
        ),
    ] {
        let mut builder = builder(&rules, 1000, true);
        let response = reported(&mut builder, &events(&list)).response;
        let (content, _) = task_content(builder.task().unwrap(), "", &rules).unwrap();
        assert_eq!(content.message, message);
        assert_eq!(response + builder.not_streamed(message), message);
    }
}

#[test]
fn no_token_of_parallel_artifacts_is_lost() {
    let rules = rules();
    let list = [("a", "ha"), ("b", "ha"), ("a", "ha"), ("b", "ho"), ("a", "ha")];
    let list = list.map(|(id, text)| artifact(id, id, text, true));
    let response = reported(&mut builder(&rules, 1000, true), &events(&list)).response;
    assert_eq!(response, "haha\nhaho\nha");
}

#[test]
fn a_snapshot_after_a_gap_reports_only_new_content_and_artifacts_before_states() {
    let rules = rules();
    let mut builder = builder(&rules, 1000, true);
    reported(&mut builder, &events(&[artifact("a", "x", "one", false)]));
    let snapshot = r#"{"task":{"id":"t","status":{"state":"TASK_STATE_COMPLETED"},"artifacts":[
        {"artifactId":"a","name":"x","parts":[{"text":"one two"}]},{"artifactId":"b","name":"y","parts":[{"text":"three"}]}]}}"#;
    let changes = reported(&mut builder, &[snapshot, snapshot]);
    assert_eq!((changes.artifacts, changes.response.as_str()), (2, " two\nthree"));
    assert_eq!(changes.states, ["completed"]);
    assert!(builder.is_settled());
}

#[test]
fn artifacts_without_ids_are_told_apart_by_their_place_in_a_task() {
    let rules = rules();
    let mut builder = builder(&rules, 1000, true);
    let snapshot = r#"{"task":{"id":"t","status":{"state":"working"},"artifacts":[{"parts":[{"text":"a"}]},{"parts":[{"text":"b"}]}]}}"#;
    assert_eq!(reported(&mut builder, &[snapshot, snapshot]).response, "a\nb");
    let task = builder.task().unwrap();
    assert_eq!((task.id.as_str(), task.artifacts.len()), ("t", 2));
}

#[test]
fn a_stale_question_at_the_start_of_a_stream_does_not_end_it() {
    let rules = rules();
    let mut builder = builder(&rules, 1000, true);
    let old = r#"{"task":{"id":"t","status":{"state":"TASK_STATE_INPUT_REQUIRED"}}}"#;
    builder.apply_first_after_answer(Event::decode(old).unwrap()).unwrap();
    assert!(!builder.is_settled());
    reported(
        &mut builder,
        &[r#"{"kind":"status-update","taskId":"t","status":{"state":"input-required"},"final":true}"#],
    );
    assert!(builder.is_settled() && builder.is_stream_finished());
}

#[test]
fn the_size_of_a_task_is_limited_and_replaced_content_does_not_count() {
    let rules = rules();
    let mut builder = builder(&rules, 800, false);
    let snapshot = r#"{"task":{"id":"t","status":{"state":"working"},"history":[{"role":"user","parts":[{"text":"0123456789012345678901234567890123456789"}]}],
        "artifacts":[{"artifactId":"a","parts":[{"text":"0123456789012345678901234567890123456789"}]}]}}"#;
    for _ in 0..100 {
        builder.apply(Event::decode(snapshot).unwrap()).unwrap();
    }
    let more = artifact("b", "x", "0123456789012345678901234567890123456789", true);
    assert_eq!(builder.apply(Event::decode(&more).unwrap()).unwrap_err(), SizeError::TooLarge);
}

#[rstest]
#[case::parts_without_content(&[r#"{"url":""}"#; 100])]
#[case::parts_with_little_content(&[r#"{"data":1}"#; 100])]
#[case::long_names_of_files(&[concat!(r#"{"url":"","filename":"0123456789012345678901234567890123456789"#, r#"0123456789012345678901234567890123456789"}"#); 40])]
fn the_size_of_a_task_counts_allocations(#[case] parts: &[&str]) {
    let rules = rules();
    let mut builder = builder(&rules, 8000, false);
    let parts = parts.join(",");
    let update = format!(
        r#"{{"artifactUpdate":{{"taskId":"t","append":true,"artifact":{{"artifactId":"a","parts":[{parts}]}}}}}}"#
    );
    assert!(parts.len() < 8000);
    assert_eq!(builder.apply(Event::decode(&update).unwrap()).unwrap_err(), SizeError::TooLarge);
}

#[test]
fn a_name_that_replaces_another_counts() {
    let rules = rules();
    let mut builder = builder(&rules, 4000, false);
    let named = |id: usize, name: &str| {
        let update = format!(
            r#"{{"artifactUpdate":{{"taskId":"t","artifact":{{"artifactId":"{id}","name":"{name}","parts":[]}}}}}}"#
        );
        Event::decode(&update).unwrap()
    };
    (0..10).for_each(|id| drop(builder.apply(named(id, "n")).unwrap()));
    let long = "n".repeat(200);
    let replaced: Result<Vec<_>, _> = (0..10).map(|id| builder.apply(named(id, &long))).collect();
    assert_eq!(replaced.unwrap_err(), SizeError::TooLarge);
}

#[test]
fn a_million_tokens_are_one_part() {
    let rules = rules();
    let mut builder = builder(&rules, 1 << 20, false);
    let token = artifact("a", "x", "t", true);
    for _ in 0..10_000 {
        builder.apply(Event::decode(&token).unwrap()).unwrap();
    }
    assert_eq!(builder.task().unwrap().artifacts[0].parts.len(), 1);
}

#[test]
fn an_artifact_that_comes_first_names_task_and_conversation() {
    let rules = rules();
    let mut builder = builder(&rules, 1000, true);
    let update = |context: &str| {
        let artifact = r#""artifact":{"artifactId":"a","parts":[{"text":"x"}]}"#;
        format!(r#"{{"artifactUpdate":{{"taskId":"t",{context}{artifact}}}}}"#)
    };
    reported(&mut builder, &events(&[update(r#""contextId":"c","#), update("")]));
    let task = builder.task().unwrap();
    assert_eq!((task.id.as_str(), task.context_id.as_deref()), ("t", Some("c")));
}

#[test]
fn each_of_very_many_artifacts_is_found_again() {
    let rules = rules();
    let mut builder = builder(&rules, 1 << 30, false);
    for round in 0..2 {
        for number in 0..20_000 {
            let piece = artifact(&format!("a{number}"), "x", &format!("{round}."), round > 0);
            builder.apply(Event::decode(&piece).unwrap()).unwrap();
        }
    }
    let artifacts = &builder.task().unwrap().artifacts;
    assert_eq!(artifacts.len(), 20_000);
    let text = |artifact: &Artifact| artifact.parts.iter().filter_map(Part::as_text).collect::<String>();
    assert!(artifacts.iter().all(|artifact| text(artifact) == "0.1."));
}

#[test]
fn a_replaced_artifact_frees_its_parts() {
    let rules = rules();
    let mut builder = builder(&rules, 1 << 20, false);
    let parts = vec![r#"{"data":1}"#; 5_000].join(",");
    let update = |parts: &str| {
        format!(r#"{{"artifactUpdate":{{"taskId":"t","artifact":{{"artifactId":"a","parts":[{parts}]}}}}}}"#)
    };
    for parts in [parts.as_str(), ""] {
        builder.apply(Event::decode(&update(parts)).unwrap()).unwrap();
    }
    let task = builder.task.as_ref().unwrap();
    assert_eq!(task.artifacts[0].parts.capacity(), 0);
}

#[test]
fn a_long_name_is_matched_once() {
    // Matching it for each token would take minutes.
    let rules = ArtifactRules { response: vec!["*b*c*".into()], notice: vec!["*d".into()] };
    let mut builder = builder(&rules, 64 << 20, true);
    let name = "b".repeat(4 << 20) + "c";
    builder.apply(Event::decode(&artifact("a", &name, "", false)).unwrap()).unwrap();
    let token = artifact("a", "", "t", true);
    let mut response = 0;
    for _ in 0..20_000 {
        let progress = builder.apply(Event::decode(&token).unwrap()).unwrap();
        response += progress.iter().filter(|event| matches!(event, ProgressEvent::Response(_))).count();
    }
    assert_eq!(response, 20_000);
}

#[test]
fn repeated_snapshots_of_many_artifacts_cost_their_own_size_only() {
    let rules = rules();
    let mut builder = builder(&rules, 1 << 30, true);
    let artifacts: Vec<_> = (0..40_000)
        .map(|number| format!(r#"{{"artifactId":"a{number}","parts":[{{"text":"{number}"}}]}}"#))
        .collect();
    let snapshot = format!(
        r#"{{"task":{{"id":"t","status":{{"state":"working"}},"artifacts":[{}]}}}}"#,
        artifacts.join(",")
    );
    assert_eq!(reported(&mut builder, &[&snapshot, &snapshot, &snapshot]).artifacts, 40_000);
    let (content, _) = task_content(builder.task().unwrap(), "", &rules).unwrap();
    assert_eq!(content.artifacts.len(), 40_000);
}

#[test]
fn a_streamed_text_is_held_once() {
    let memory = MemoryAccount::unlimited("fake");
    let rules = rules();
    let mut builder = TaskBuilder::new(&rules, 16 << 20, true, &memory);
    let token = artifact("a", "x", &"t".repeat(1 << 10), true);
    for _ in 0..4096 {
        builder.apply(Event::decode(&token).unwrap()).unwrap();
    }
    let text = match &builder.task().unwrap().artifacts[0].parts[..] {
        [Part::Text(text)] => text,
        parts => panic!("{} parts", parts.len()),
    };
    assert_eq!(text.len(), 4 << 20);
    assert!(text.capacity() <= text.len() / 8 * 9 + (1 << 10), "{}", text.capacity());
    assert!((text.capacity()..5 << 20).contains(&memory.used()), "{}", memory.used());
    drop(builder);
    assert_eq!(memory.used(), 0);
}

#[test]
fn the_failure_of_another_task_is_charged_while_it_may_count() {
    let memory = MemoryAccount::unlimited("fake");
    let rules = rules();
    let mut builder = TaskBuilder::new(&rules, 16 << 20, true, &memory);
    let status = |task: &str, state: &str, text: &str| {
        let update = serde_json::json!({"kind": "status-update", "taskId": task, "contextId": "c", "status":
            {"state": state, "message": {"role": "agent", "parts": [{"kind": "text", "text": text}]}}});
        Event::decode(&update.to_string()).unwrap()
    };
    builder.apply(status("t", "working", "")).unwrap();
    builder.apply(status("other", "failed", &"x".repeat(1 << 20))).unwrap();
    assert!(memory.used() >= 1 << 20, "{}", memory.used());
    builder.apply(status("t", "working", "")).unwrap();
    assert!(memory.used() < 1 << 20, "{}", memory.used());
}
