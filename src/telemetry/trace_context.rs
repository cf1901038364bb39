//! [W3C Trace Context](https://www.w3.org/TR/trace-context/): the headers `traceparent` and `tracestate`.

use reqwest::header::HeaderValue;

/// The only version that is specified.
const VERSION_00: &str = "00";
const INVALID_VERSION: &str = "ff";
/// Length of `version-trace_id-parent_id-flags`, the only fields of version 00.
const LENGTH: usize = 55;

/// The caller's trace context, which the bridge passes on to the agent.
#[derive(Debug, Clone, Default)]
pub struct TraceContext {
    pub(crate) parent: Option<HeaderValue>,
    pub(crate) state: Option<HeaderValue>,
}

impl TraceContext {
    pub(crate) fn trace_id(&self) -> Option<&str> {
        self.parent.as_ref()?.to_str().ok()?.split('-').nth(1)
    }
}

/// Whether a `traceparent` may be passed on. The specification tells receivers to ignore all others. Versions
/// above 00 may have further fields after a dash.
pub(crate) fn is_valid_traceparent(text: &str) -> bool {
    let Some((known, more)) = text.split_at_checked(LENGTH) else { return false };
    let mut fields = known.splitn(4, '-');
    let mut next = || fields.next().unwrap_or_default();
    let (version, trace_id, parent_id, flags) = (next(), next(), next(), next());
    let has_valid_end = match version {
        INVALID_VERSION => false,
        VERSION_00 => more.is_empty(),
        _ => more.is_empty() || more.starts_with('-'),
    };
    has_valid_end && is_hex(version, 2) && is_id(trace_id, 32) && is_id(parent_id, 16) && is_hex(flags, 2)
}

fn is_hex(field: &str, length: usize) -> bool {
    field.len() == length && field.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// An id of only zeros means "no id".
fn is_id(field: &str, length: usize) -> bool {
    is_hex(field, length) && field.bytes().any(|byte| byte != b'0')
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

    #[rstest]
    #[case::sampled("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")]
    #[case::not_sampled("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")]
    #[case::unknown_flags("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-ff")]
    #[case::a_later_version("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")]
    #[case::a_later_version_with_a_field("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-what")]
    #[case::a_later_version_with_an_empty_field("fe-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-")]
    fn a_valid_traceparent_names_its_trace(#[case] text: &str) {
        assert!(is_valid_traceparent(text));
        let context = TraceContext { parent: HeaderValue::from_str(text).ok(), state: None };
        assert_eq!(context.trace_id(), Some(TRACE));
        #[cfg(feature = "otlp")]
        assert_eq!(extracted(text), TRACE, "the exporter reads it the same way");
    }

    #[rstest]
    #[case::empty("")]
    #[case::no_trace_id("00-00000000000000000000000000000000-b7ad6b7169203331-01")]
    #[case::no_parent_id("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01")]
    #[case::the_reserved_version("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")]
    #[case::upper_case("00-0AF7651916CD43DD8448EB211C80319C-B7AD6B7169203331-01")]
    #[case::an_upper_case_version("0A-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")]
    #[case::upper_case_flags("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0A")]
    #[case::a_fifth_field("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-what")]
    #[case::a_fifth_field_that_is_empty("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-")]
    #[case::more_without_a_dash("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01what")]
    #[case::no_flags("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331")]
    #[case::a_short_id("00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01")]
    #[case::no_hex("00-0af7651916cd43dd8448eb211c80319g-b7ad6b7169203331-01")]
    #[case::space("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331- 1")]
    #[case::other_dashes("00_0af7651916cd43dd8448eb211c80319c_b7ad6b7169203331_01")]
    #[case::a_character_across_the_end("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0é")]
    fn an_invalid_traceparent_is_ignored(#[case] text: &str) {
        assert!(!is_valid_traceparent(text));
    }

    #[cfg(feature = "otlp")]
    fn extracted(text: &str) -> String {
        use opentelemetry::propagation::TextMapPropagator as _;
        use opentelemetry::trace::TraceContextExt as _;
        let carrier = std::collections::HashMap::from([("traceparent".to_owned(), text.to_owned())]);
        let context = opentelemetry_sdk::propagation::TraceContextPropagator::new().extract(&carrier);
        context.span().span_context().trace_id().to_string()
    }
}
