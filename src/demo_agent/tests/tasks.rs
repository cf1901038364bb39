//! Tasks over A2A 1.0: turns, contexts, states and content.

use futures_util::StreamExt as _;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use super::super::protocol::ProtocolVersion;
use super::super::skills::DemoSkill;
use super::super::tasks::{DemoTasks, MAX_TASKS};
use super::{Demo, all, demo, message, reply, request, state, text_of, with};

fn returning(params: Value) -> Value {
    let mut params = params;
    params["configuration"] = json!({"returnImmediately": true});
    params
}

/// The task once it is over.
async fn finished(demo: &Demo, id: &Value) -> Value {
    let get = || demo.call("GetTask", json!({"id": id}));
    let follow = demo.post(request("SubscribeToTask", json!({"id": id}))).send().await.unwrap();
    follow.text().await.unwrap();
    get().await["result"].clone()
}

#[tokio::test]
async fn an_echo_is_a_completed_task_in_the_exact_shape_of_the_protocol() {
    let demo = demo(&[]).await;
    let task = demo.send("echo hello é你 world").await;
    let (id, context) = (&task["id"], &task["contextId"]);
    let parts = json!([{"text": "echo hello é你 world"}]);
    let expected = json!({
        "id": id,
        "contextId": context,
        "status": {"state": "TASK_STATE_COMPLETED", "timestamp": task["status"]["timestamp"]},
        "artifacts": [{"artifactId": task["artifacts"][0]["artifactId"], "name": "echo", "parts": parts}],
        "history": [
            {"messageId": "m-1", "contextId": context, "taskId": id, "role": "ROLE_USER", "parts": parts},
        ],
    });
    assert_eq!(task, expected);
    assert!(task["status"]["timestamp"].as_str().unwrap().ends_with('Z'));
    assert_eq!(demo.call("GetTask", json!({"id": id})).await["result"], expected);
}

#[tokio::test]
async fn an_echo_gives_files_back_and_numbers_exactly_as_they_came() {
    let demo = demo(&[]).await;
    let parts = r#"[{"raw":"iVBORwAB","filename":"a.png","mediaType":"image/png"},{"url":"https://example.org/a"},{"data":{"a":1,"b":1.0,"c":123456789012345678901234567890}}]"#;
    let body = format!(
        r#"{{"jsonrpc":"2.0","id":1,"method":"SendMessage","params":{{"message":{{"messageId":"m","role":"ROLE_USER","parts":{parts}}}}}}}"#
    );
    let answer = demo.post(body).send().await.unwrap().text().await.unwrap();
    assert!(answer.contains(&format!(r#""name":"echo","parts":{parts}"#)), "{answer}");
}

#[tokio::test]
async fn a_report_asks_until_it_knows_the_format() {
    let demo = demo(&[]).await;
    let asked = demo.send("report about tides for sailors").await;
    assert_eq!(state(&asked), "TASK_STATE_INPUT_REQUIRED");
    let question = &asked["status"]["message"];
    assert_eq!(question["parts"][0]["text"], "Which format would you like: PDF or Markdown?");
    assert_eq!(question["parts"][1]["data"]["state"], "input-required");
    assert_eq!(question["role"], "ROLE_AGENT");
    assert_eq!(asked.get("artifacts"), None);

    let again = demo.call("SendMessage", reply(&asked, "papyrus")).await["result"]["task"].clone();
    assert_eq!(state(&again), "TASK_STATE_INPUT_REQUIRED");

    let done = demo.call("SendMessage", reply(&asked, "PDF, please")).await["result"]["task"].clone();
    assert_eq!(state(&done), "TASK_STATE_COMPLETED");
    assert_eq!(done["id"], asked["id"]);
    assert_eq!(done["artifacts"][0]["name"], "report");
    assert_eq!(done["artifacts"][0]["parts"][0]["text"], "Report: report about tides for sailors");
    assert_eq!(done["artifacts"][0]["parts"][1]["filename"], "report.pdf");
    let texts: Vec<_> = done["history"].as_array().unwrap().iter().map(text_of).collect();
    let question = "Which format would you like: PDF or Markdown?";
    let again = format!("I cannot write that. {question}");
    assert_eq!(texts, ["report about tides for sailors", question, "papyrus", &again, "PDF, please"]);
}

#[tokio::test]
async fn a_refinement_is_a_new_task_with_a_new_artifact_of_the_same_name() {
    let demo = demo(&[]).await;
    let asked = demo.send("report about tides").await;
    let first = demo.call("SendMessage", reply(&asked, "markdown")).await["result"]["task"].clone();
    let fields = json!({"contextId": first["contextId"], "referenceTaskIds": [first["id"]]});
    let refine = with(message("Make it shorter"), &fields);
    let second = demo.call("SendMessage", refine).await["result"]["task"].clone();
    assert_eq!(state(&second), "TASK_STATE_COMPLETED");
    assert_eq!(second["contextId"], first["contextId"]);
    assert_ne!(second["id"], first["id"]);
    let (old, new) = (&first["artifacts"][0], &second["artifacts"][0]);
    assert_eq!(old["name"], new["name"]);
    assert_ne!(old["artifactId"], new["artifactId"]);
    assert_eq!(new["parts"][1]["filename"], "report.md");
}

#[tokio::test]
async fn a_finished_task_takes_no_message_no_subscriber_and_no_cancel() {
    let demo = demo(&[]).await;
    let task = demo.send("echo hi").await;
    let error = demo.call("SendMessage", reply(&task, "again")).await["error"].clone();
    assert_eq!(error["code"], -32004);
    assert_eq!(error["data"][0]["reason"], "UNSUPPORTED_OPERATION");
    assert_eq!(error["data"][0]["@type"], "type.googleapis.com/google.rpc.ErrorInfo");
    let id = json!({"id": task["id"]});
    assert_eq!(demo.call("SubscribeToTask", id.clone()).await["error"]["code"], -32004);
    let error = demo.call("CancelTask", id).await["error"].clone();
    assert_eq!(
        (&error["code"], &error["data"][0]["reason"]),
        (&json!(-32002), &json!("TASK_NOT_CANCELABLE"))
    );
}

#[tokio::test]
async fn slow_work_can_be_followed_and_cancelled() {
    let demo = demo(&[]).await;
    let task = demo.call("SendMessage", returning(message("slow 60"))).await["result"]["task"].clone();
    assert_eq!(state(&task), "TASK_STATE_SUBMITTED");
    let mut events = demo.stream("SubscribeToTask", json!({"id": task["id"]})).await;
    assert_eq!(events.next().await.unwrap()["task"]["id"], task["id"]);
    let canceled = demo.call("CancelTask", json!({"id": task["id"]})).await["result"].clone();
    assert_eq!(state(&canceled), "TASK_STATE_CANCELED");
    let rest = all(events).await;
    assert_eq!(state(&rest.last().unwrap()["statusUpdate"]), "TASK_STATE_CANCELED");
}

#[tokio::test]
async fn a_task_goes_on_when_its_caller_disconnects() {
    let demo = demo(&[]).await;
    let body = request("SendMessage", with(message("slow 1"), &json!({"contextId": "c-1"})));
    let address = demo.url.trim_start_matches("http://").trim_end_matches('/');
    let mut caller = TcpStream::connect(address).await.unwrap();
    let head = format!("POST / HTTP/1.1\r\nHost: demo\r\nContent-Length: {}\r\n\r\n", body.len());
    caller.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    let id = loop {
        let page = demo.call("ListTasks", json!({"contextId": "c-1"})).await["result"].clone();
        if page["totalSize"] == 1 {
            break page["tasks"][0]["id"].clone();
        }
    };
    drop(caller);
    assert_eq!(state(&finished(&demo, &id).await), "TASK_STATE_COMPLETED");
}

#[tokio::test]
async fn tasks_of_one_context_run_side_by_side() {
    let demo = demo(&[]).await;
    let context = json!({"contextId": "c-1"});
    let slow = demo.call("SendMessage", returning(with(message("slow 60"), &context))).await;
    let echo = demo.call("SendMessage", with(message("echo hi"), &context)).await["result"]["task"].clone();
    assert_eq!(state(&echo), "TASK_STATE_COMPLETED");
    assert_eq!(echo["contextId"], "c-1");
    let page = demo.call("ListTasks", context).await["result"].clone();
    let ids: Vec<_> = page["tasks"].as_array().unwrap().iter().map(|task| &task["id"]).collect();
    assert_eq!(ids, [&echo["id"], &slow["result"]["task"]["id"]]);
}

#[tokio::test]
async fn a_message_to_a_working_task_joins_its_turn() {
    let demo = demo(&[]).await;
    let task = demo.call("SendMessage", returning(message("slow 1"))).await["result"]["task"].clone();
    let joined = demo.call("SendMessage", reply(&task, "hurry")).await["result"]["task"].clone();
    assert_eq!(joined["id"], task["id"]);
    assert_eq!(state(&joined), "TASK_STATE_COMPLETED");
}

#[tokio::test]
async fn auth_completes_with_a_follow_up_or_by_itself() {
    let plain = demo(&[]).await;
    let asked = plain.send("auth").await;
    assert_eq!(state(&asked), "TASK_STATE_AUTH_REQUIRED");
    assert_eq!(asked["status"]["message"]["parts"][1]["data"]["auth_type"], "api_key");
    let done = plain.call("SendMessage", reply(&asked, "my key")).await["result"]["task"].clone();
    assert_eq!(state(&done), "TASK_STATE_COMPLETED");

    let waiting = demo(&["--auth-after", "100ms"]).await;
    let asked = waiting.send("auth").await;
    assert_eq!(state(&asked), "TASK_STATE_AUTH_REQUIRED");
    assert_eq!(state(&finished(&waiting, &asked["id"]).await), "TASK_STATE_COMPLETED");
}

#[rstest::rstest]
#[case("completed", "TASK_STATE_COMPLETED")]
#[case("failed", "TASK_STATE_FAILED")]
#[case("canceled", "TASK_STATE_CANCELED")]
#[case("rejected", "TASK_STATE_REJECTED")]
#[case("input-required", "TASK_STATE_INPUT_REQUIRED")]
#[case("auth-required", "TASK_STATE_AUTH_REQUIRED")]
#[case("working", "TASK_STATE_WORKING")]
#[case("submitted", "TASK_STATE_SUBMITTED")]
#[case("unknown", "TASK_STATE_PONDERING")]
#[tokio::test]
async fn a_task_ends_in_the_state_that_is_named(#[case] word: &str, #[case] expected: &str) {
    let demo = demo(&[]).await;
    let task = demo.send(&format!("state {word}")).await;
    assert_eq!(state(&task), expected);
    if matches!(word, "working" | "submitted") {
        assert_eq!(state(&finished(&demo, &task["id"]).await), "TASK_STATE_COMPLETED");
    }
}

#[tokio::test]
async fn failures_say_why() {
    let demo = demo(&[]).await;
    let failed = demo.send("fail for lack of wind").await;
    assert_eq!(state(&failed), "TASK_STATE_FAILED");
    assert_eq!(text_of(&failed["status"]["message"]), "planned failure: for lack of wind");
    assert_eq!(state(&demo.send("reject this").await), "TASK_STATE_REJECTED");
}

#[tokio::test]
async fn the_metadata_chooses_the_skill_and_leaves_the_text_alone() {
    let demo = demo(&[]).await;
    let chosen = with(message("stream of words"), &json!({"metadata": {"skill_id": "fail"}}));
    let task = demo.call("SendMessage", chosen).await["result"]["task"].clone();
    assert_eq!(text_of(&task["status"]["message"]), "planned failure: stream of words");
}

#[tokio::test]
async fn each_skill_answers_with_its_content() {
    let demo = demo(&[]).await;
    let parts = demo.send("file please").await["artifacts"][0]["parts"].clone();
    let file = json!({"raw": "iVBORwAB", "filename": "a.png", "mediaType": "image/png"});
    assert_eq!(parts, json!([file, {"data": {"n": 1, "f": 1.5, "l": [1, null]}}]));
    assert_eq!(text_of(&demo.send("big 2000000").await["artifacts"][0]).len(), 2_000_000);
    let direct = demo.call("SendMessage", message("message hello")).await["result"]["message"].clone();
    assert_eq!(direct["parts"], json!([{"text": "hello"}]));
    assert_eq!(direct.get("taskId"), None);
    let streamed = all(demo.stream("SendStreamingMessage", message("message")).await).await;
    assert_eq!(streamed[0]["message"]["role"], "ROLE_AGENT");
}

#[tokio::test]
async fn the_skills_metadata_and_headers_show_what_came_with_a_message() {
    let demo = demo(&[]).await;
    let fields =
        json!({"contextId": "c-1", "referenceTaskIds": ["t-1"], "metadata": {"skill_id": "metadata"}});
    let mut params = with(message("hi"), &fields);
    params["configuration"] = json!({"acceptedOutputModes": ["text/plain"]});
    let task = demo.call("SendMessage", params).await["result"]["task"].clone();
    let expected = json!({
        "metadata": {"skill_id": "metadata"},
        "contextId": "c-1",
        "referenceTaskIds": ["t-1"],
        "acceptedOutputModes": ["text/plain"],
    });
    assert_eq!(task["artifacts"][0]["parts"][0]["data"], expected);

    let sent = demo.post(request("SendMessage", message("headers"))).header("traceparent", "00-ab-cd-01");
    let answer: Value = serde_json::from_str(&sent.send().await.unwrap().text().await.unwrap()).unwrap();
    let seen = &answer["result"]["task"]["artifacts"][0]["parts"][0]["data"];
    assert_eq!(seen["traceparent"], "00-ab-cd-01");
}

#[tokio::test]
async fn the_history_has_at_most_the_requested_length() {
    let demo = demo(&[]).await;
    let asked = demo.send("report").await;
    let done = demo.call("SendMessage", reply(&asked, "pdf")).await["result"]["task"].clone();
    assert_eq!(done["history"].as_array().unwrap().len(), 3);
    let get = async |length| demo.call("GetTask", json!({"id": done["id"], "historyLength": length})).await;
    assert_eq!(get(1).await["result"]["history"][0]["parts"][0]["text"], "pdf");
    assert_eq!(get(0).await["result"].get("history"), None);
    assert_eq!(get(9).await["result"]["history"].as_array().unwrap().len(), 3);
}

#[tokio::test]
async fn an_agent_that_ignores_blocking_returns_at_once() {
    let demo = demo(&["--ignore-blocking"]).await;
    let task = demo.send("slow 1").await;
    assert_eq!(state(&task), "TASK_STATE_SUBMITTED");
    assert_eq!(state(&finished(&demo, &task["id"]).await), "TASK_STATE_COMPLETED");
}

#[test]
fn the_oldest_task_is_forgotten_when_there_are_too_many() {
    let tasks = DemoTasks::default();
    let open = || {
        let message = serde_json::from_value(message("hi")["message"].clone()).unwrap();
        let (view, _) = tasks.open(ProtocolVersion::V1.new_task("c-1".into()), DemoSkill::Echo, message);
        view.task.id
    };
    let ids: Vec<_> = (0..=MAX_TASKS).map(|_| open()).collect();
    assert!(tasks.get(&ids[0]).is_err());
    assert!(tasks.get(&ids[1]).is_ok());
    let list = tasks.list(Some("c-1"));
    assert_eq!((list.len(), &list[0].id), (MAX_TASKS, &ids[MAX_TASKS]));
}
