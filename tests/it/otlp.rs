//! Spans of calls at an OpenTelemetry collector.

#[cfg(not(feature = "otlp"))]
#[tokio::test]
async fn build_without_the_feature_logs_that_the_endpoint_is_ignored() {
    use crate::support::Bridge;

    let variable = "OTEL_EXPORTER_OTLP_ENDPOINT";
    let bridge = Bridge::without_agents().variable(variable, "http://127.0.0.1:4318").start_early().await;
    let log = bridge.log();
    assert!(log.contains("built without the `otlp` feature"), "{log}");
}

#[cfg(feature = "otlp")]
mod exported {
    use std::collections::BTreeMap;

    use serde_json::json;

    use crate::support::bridge::{AgentSettings, BridgeBuilder};
    use crate::support::caller::Call;
    use crate::support::collector::{Collector, Span};
    use crate::support::{Bridge, eventually, launched, wait_until};

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const PARENT: &str = "b7ad6b7169203331";
    const SERVER: u64 = 2;
    const ERROR: u64 = 2;

    /// A bridge that exports spans at once.
    fn exporting(agent: AgentSettings, collector: &Collector) -> BridgeBuilder {
        Bridge::with(agent)
            .log("info")
            .variable("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url())
            .variable("OTEL_BSP_SCHEDULE_DELAY", "20")
    }

    fn traceparent() -> String {
        format!("00-{TRACE}-{PARENT}-01")
    }

    fn attributes(span: &Span) -> BTreeMap<&str, &str> {
        span.attributes.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect()
    }

    #[tokio::test]
    async fn call_is_one_span_between_the_caller_and_the_agent() {
        let collector = Collector::start();
        let mut bridge = exporting(launched("demo", &[]), &collector)
            .variable("OTEL_EXPORTER_OTLP_HEADERS", "x-team=weather")
            .variable("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
            .start()
            .await;
        let call = bridge.prompt("demo.headers", "canary-prompt").header("traceparent", &traceparent());
        let reply = call.header("tracestate", "vendor=1").await.expect("COMPLETED");
        // The caller of this one has not sampled it.
        let unsampled = format!("00-{TRACE}-{PARENT}-00");
        bridge.prompt("demo.echo", "x").header("traceparent", &unsampled).await.expect("COMPLETED");
        let spans = collector.spans_after_stop(&mut bridge).await;

        let [span] = spans.as_slice() else { panic!("not one span: {spans:#?}") };
        assert_eq!((span.trace_id.as_str(), span.parent_id.as_str()), (TRACE, PARENT));
        assert_eq!((span.name.as_str(), span.kind, span.status), ("demo.headers", SERVER, 0));
        assert_eq!((span.state.as_str(), span.events), ("vendor=1", 0));
        let expected = [
            ("messaging.system", "nats"),
            ("messaging.operation.name", "process"),
            ("messaging.operation.type", "process"),
            ("messaging.destination.name", &bridge.subject("demo.headers")),
            ("gen_ai.agent.name", "demo"),
            ("gen_ai.conversation.id", reply["task"]["context_id"].as_str().unwrap()),
            ("a2a.action", "headers"),
            ("a2a.task.id", &reply.task_id()),
            ("a2a.outcome", "COMPLETED"),
        ];
        assert_eq!(attributes(span), expected.into());
        assert_eq!(span.resource["service.name"], "a2a-bridge");
        assert_eq!(span.resource["deployment.environment.name"], "test");

        assert_eq!(reply["data"]["traceparent"], format!("00-{TRACE}-{}-01", span.id));
        assert_eq!(reply["data"]["tracestate"], "vendor=1");

        for request in collector.requests() {
            assert_eq!((request.method.as_str(), request.path.as_str()), ("POST", "/v1/traces"));
            assert_eq!(request.header("content-type"), Some("application/x-protobuf"));
            assert_eq!(request.header("x-team"), Some("weather"));
        }
        let log = bridge.log();
        assert!(log.contains("exporting spans of calls") && !log.contains("WARN"), "{log}");
    }

    #[tokio::test]
    async fn call_without_a_trace_starts_one_and_propagates_it() {
        let collector = Collector::start();
        let mut bridge = exporting(launched("demo", &[]), &collector)
            .variable("OTEL_SERVICE_NAME", "bridge-7")
            .start()
            .await;
        let reply = bridge.prompt("demo.headers", "x").await.expect("COMPLETED");
        let spans = collector.spans_after_stop(&mut bridge).await;
        let [span] = spans.as_slice() else { panic!("not one span: {spans:#?}") };
        assert_eq!((span.parent_id.as_str(), span.resource["service.name"].as_str()), ("", "bridge-7"));
        assert_eq!(reply["data"]["traceparent"], format!("00-{}-{}-01", span.trace_id, span.id));
    }

    #[tokio::test]
    async fn failed_call_exports_the_error_code_but_no_texts() {
        const CANARY: &str = "canary-5b40";
        let collector = Collector::start();
        let agent = launched("demo", &["--bearer", CANARY]).set("bearer_token", CANARY);
        let mut bridge = exporting(agent, &collector)
            .log("trace")
            .variable("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer canary-collector")
            .start()
            .await;
        bridge.prompt("demo.http", "500").await.expect_error("agent_error");
        let failed = bridge.prompt("demo.fail", CANARY).await.expect("FAILED");
        bridge.get_task("demo", &failed.task_id()).await.expect("FAILED");
        bridge.get_task("demo", CANARY).await.expect_error("not_found");
        bridge.call("demo.echo", json!({"prompt": CANARY, "meta": 1})).await.expect_error("invalid_request");
        let asked = bridge.prompt("demo.auth", "x").await.expect("AUTH_REQUIRED");
        bridge.answer("demo", &asked.follow_up_id(), CANARY).await.expect("COMPLETED");
        let spans = collector.spans_after_stop(&mut bridge).await;

        let mut ends: Vec<_> = spans
            .iter()
            .map(|span| {
                assert_eq!(span.status_text, "");
                let attributes = attributes(span);
                let error = attributes.get("error.type").copied();
                assert_eq!(span.status == ERROR, error.is_some(), "{span:?}");
                let task = attributes.contains_key("a2a.task.id");
                (span.name.as_str(), attributes["a2a.outcome"], error, task)
            })
            .collect();
        ends.sort_unstable();
        let expected = [
            ("demo.auth", "AUTH_REQUIRED", None, true),
            ("demo.echo", "invalid_request", Some("invalid_request"), false),
            ("demo.fail", "FAILED", Some("task_failed"), true),
            ("demo.get_task", "FAILED", Some("task_failed"), true),
            ("demo.get_task", "not_found", Some("not_found"), false),
            ("demo.http", "agent_error", Some("agent_error"), false),
            ("demo.provide_required_input", "COMPLETED", None, true),
        ];
        assert_eq!(ends, expected);
        for request in collector.requests() {
            assert_eq!(request.header("authorization"), Some("Bearer canary-collector"));
            let body = String::from_utf8_lossy(&request.body);
            assert!(!body.contains("canary"), "{body}");
        }
        assert!(!bridge.log().contains("canary-collector"));
    }

    #[tokio::test]
    async fn streams_submitted_tasks_and_prompts_are_exported() {
        let collector = Collector::start();
        let bridge = exporting(launched("demo", &[]), &collector)
            .nats("agent_protocol", json!({"owner": "acme"}))
            .start()
            .await;
        let submitted = bridge.prompt("demo.slow", "60").mode("submit");
        let submitted = submitted.header("traceparent", &traceparent()).await.expect("WORKING");
        let call = bridge.prompt("demo.echo", "x").mode("stream");
        call.header("traceparent", &traceparent()).begin().await.reply().await;
        let subject = "agents.prompt.a2a.acme.demo";
        let prompted = eventually(|| async {
            let call =
                Call::new(&bridge.client, subject.into(), "hello").header("traceparent", &traceparent());
            let mut inbox = call.begin().await;
            (!inbox.reply().await.is_no_responders()).then_some(inbox)
        });
        let _open = prompted.await;
        let spans = collector.until(3).await;

        let mut ends: Vec<_> = spans
            .iter()
            .map(|span| {
                assert_eq!((span.trace_id.as_str(), span.parent_id.as_str()), (TRACE, PARENT));
                (span.name.as_str(), attributes(span)["a2a.outcome"], span.status)
            })
            .collect();
        ends.sort_unstable();
        let expected =
            [("demo.echo", "COMPLETED", 0), ("demo.prompt", "COMPLETED", 0), ("demo.slow", "WORKING", 0)];
        assert_eq!(ends, expected);
        bridge.cancel_task("demo", &submitted.task_id()).await;
    }

    #[tokio::test]
    async fn hanging_collector_delays_neither_calls_nor_the_stop() {
        let collector = Collector::hanging();
        let mut bridge = exporting(launched("demo", &[]), &collector)
            // Longer than any test may take.
            .variable("OTEL_EXPORTER_OTLP_TIMEOUT", "600000")
            .variable("OTEL_BSP_MAX_QUEUE_SIZE", "2")
            .variable("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
            .start()
            .await;
        bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
        wait_until(|| async { !collector.requests().is_empty() }).await;
        for _ in 0..10 {
            bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
        }
        assert!(bridge.stop().await.success());
        let log = bridge.log();
        assert!(log.contains("some spans of calls were not exported") && log.contains("lost=11"), "{log}");
    }

    #[tokio::test]
    async fn refusing_collector_is_logged_once() {
        let collector = Collector::answering(400);
        let mut bridge = exporting(launched("demo", &[]), &collector).start().await;
        for count in 1..=3 {
            bridge.prompt("demo.echo", "x").await.expect("COMPLETED");
            collector.until(count).await;
        }
        assert!(bridge.stop().await.success());
        let log = bridge.log();
        assert_eq!(log.matches("losing spans of calls").count(), 1, "{log}");
        assert!(log.contains("status code: 400"), "{log}");
    }

    #[tokio::test]
    async fn callers_trace_is_propagated_unchanged_without_a_collector() {
        let collector = Collector::start();
        let mut bridge =
            exporting(launched("demo", &[]), &collector).variable("OTEL_SDK_DISABLED", "true").start().await;
        let call = bridge.prompt("demo.headers", "x").header("traceparent", &traceparent());
        let reply = call.await.expect("COMPLETED");
        assert_eq!(reply["data"]["traceparent"], traceparent());
        assert_eq!(collector.spans_after_stop(&mut bridge).await.len(), 0);
    }

    #[tokio::test]
    async fn invalid_endpoint_is_logged_and_disables_the_export() {
        let variable = "OTEL_EXPORTER_OTLP_ENDPOINT";
        let bridge = Bridge::without_agents().variable(variable, "user:canary@collector").start_early().await;
        let log = bridge.log();
        assert!(log.contains("OTEL_EXPORTER_OTLP_ENDPOINT is not an http or https URL"), "{log}");
        assert!(!log.contains("canary"), "{log}");
    }
}
