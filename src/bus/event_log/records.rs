//! Records that are derived from the log, in two key-value buckets.
//!
//! | record | bucket | key |
//! | --- | --- | --- |
//! | summary of a session | sessions | `<owner>.<session>` |
//! | positions of messages | sessions | `<owner>.<session>.<number>` |
//! | run | runs | `<owner>.<session>.<run>` |

use std::collections::HashMap;
use std::sync::Arc;

use async_nats::HeaderMap;
use bytes::Bytes;
use futures_util::stream::{BoxStream, StreamExt as _};
use serde::Deserialize;
use serde_json::json;

use super::reader::Reader;
use super::{Confirmation, JetStreamEventStore};
use crate::bus::jetstream::ApiError;
use crate::bus::jetstream::api::code;
use crate::bus::subject::Token;
use crate::events::records::{LogRecord, RecordFilter, RecordKey, RecordPart};
use crate::events::store::{AppendError, LogUnavailable};

/// Sessions that are listed from the log itself.
const MAX_SESSIONS: usize = 100_000;

#[derive(Deserialize)]
struct SubjectsInfo {
    state: SubjectsState,
}

#[derive(Deserialize)]
struct SubjectsState {
    #[serde(default)]
    subjects: Option<HashMap<String, u64>>,
}

impl JetStreamEventStore {
    fn record_subject(&self, key: &RecordKey) -> (String, String) {
        let RecordKey { owner, session, part } = key;
        let session = Token::new(session);
        let (bucket, rest) = match part {
            RecordPart::Summary => (&self.sessions, String::new()),
            RecordPart::Positions(number) => (&self.sessions, format!(".{number}")),
            RecordPart::Run(run) => (&self.runs, format!(".{run}")),
        };
        (format!("KV_{bucket}"), format!("$KV.{bucket}.{owner}.{session}{rest}"))
    }

    pub(super) fn record_filter(&self, filter: &RecordFilter) -> (String, String) {
        let (bucket, rest) = match filter {
            RecordFilter::Summaries { owner } => (&self.sessions, format!("{owner}.*")),
            RecordFilter::Positions { owner, session } => {
                (&self.sessions, format!("{owner}.{}.*", Token::new(session)))
            }
            RecordFilter::Runs { owner, session } => {
                (&self.runs, format!("{owner}.{}.*", Token::new(session)))
            }
        };
        (format!("KV_{bucket}"), format!("$KV.{bucket}.{rest}"))
    }

    pub(super) async fn get_record(&self, key: &RecordKey) -> Result<Option<LogRecord>, LogUnavailable> {
        let (stream, subject) = self.record_subject(key);
        let found = self.get_from(&stream, &json!({ "last_by_subj": subject })).await?;
        let found = found.filter(|found| !found.body.is_empty());
        Ok(found.map(|found| LogRecord { value: found.body, revision: found.sequence }))
    }

    pub(super) async fn put_record(
        &self,
        key: &RecordKey,
        value: Bytes,
        expected: u64,
    ) -> Result<u64, AppendError> {
        let (_, subject) = self.record_subject(key);
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Expected-Last-Subject-Sequence", expected.to_string());
        let passage = self.enter()?;
        let written = self.api.request::<Confirmation>(&subject, Some(headers), value).await;
        if let Err(ApiError::Refused {
            code: code::WRONG_LAST_SEQUENCE | code::WRONG_LAST_SEQUENCE_IN_FLIGHT,
            ..
        }) = &written
        {
            passage.succeeded();
            return Err(AppendError::Exists);
        }
        if let Err(error @ ApiError::Refused { .. }) = &written {
            // Most likely the bucket is full. The log itself can be written all the same.
            passage.succeeded();
            tracing::debug!(%error, "cannot write a record of the event log");
            return Err(LogUnavailable.into());
        }
        Ok(self.finish(passage, written)?.seq)
    }

    pub(super) fn scan_records(
        &self,
        filter: &RecordFilter,
        after: u64,
    ) -> BoxStream<'_, Result<LogRecord, LogUnavailable>> {
        let (stream, subject) = self.record_filter(filter);
        let records = Reader::new(self, stream, subject, after).into_stream();
        let records = records
            .filter(|found| std::future::ready(found.as_ref().map_or(true, |found| !found.body.is_empty())));
        records
            .map(|found| found.map(|found| LogRecord { value: found.body, revision: found.sequence }))
            .boxed()
    }

    pub(super) async fn remove_records(&self, filter: &RecordFilter) -> Result<(), LogUnavailable> {
        let (stream, subject) = self.record_filter(filter);
        let passage = self.enter()?;
        let operation = format!("STREAM.PURGE.{stream}");
        let purged: Result<serde_json::Value, _> =
            self.api.call(&operation, Some(&json!({ "filter": subject }))).await;
        self.finish(passage, purged).map(drop)
    }

    /// The subjects of a stream that match a filter, with the number of messages of each.
    pub(super) async fn subjects_of(
        &self,
        stream: &str,
        filter: &str,
    ) -> Result<HashMap<String, u64>, LogUnavailable> {
        let passage = self.enter()?;
        let operation = format!("STREAM.INFO.{stream}");
        let body = json!({ "subjects_filter": filter });
        let info = self.api.call::<SubjectsInfo>(&operation, Some(&body)).await;
        Ok(self.finish(passage, info)?.state.subjects.unwrap_or_default())
    }

    /// The ids are in the batches: a subject may have only a hash of an id.
    pub(super) async fn list_sessions(&self, owner: &str) -> Result<Vec<Arc<str>>, LogUnavailable> {
        let filter = self.subjects.session_events(owner);
        let subjects = self.subjects_of(&self.stream, &filter).await?;
        let mut sessions = Vec::new();
        for subject in subjects.into_keys().take(MAX_SESSIONS) {
            if let Some(last) = self.last(&subject).await?
                && let Some(session) = last.decode()?.session
            {
                sessions.push(session);
            }
        }
        Ok(sessions)
    }
}
