//! The frames of a streamed reply, collected to its end and checked for the rules of every stream.

use serde_json::Value;

use super::caller::{Call, Inbox, Reply};

/// A whole stream.
#[derive(Debug, Clone)]
pub struct Stream {
    /// Type and data of every frame, in order.
    pub frames: Vec<(String, Value)>,
    /// The result, with the headers of its message.
    pub result: Reply,
    /// The number of keep-alives, which have no sequence number.
    pub keep_alives: usize,
}

impl Call {
    /// Sends the request in mode `stream` and collects the frames up to the empty message.
    pub async fn stream(self) -> Stream {
        Stream::collect(self.mode("stream").begin().await).await
    }

    /// Sends the request in this mode and returns its only reply, or the result of its stream.
    pub async fn reply_in_mode(self, mode: &str) -> Reply {
        self.mode(mode).begin().await.reply_in_mode(mode).await
    }
}

impl Inbox {
    /// The only reply to a request in this mode, or the result of its stream.
    pub async fn reply_in_mode(self, mode: &str) -> Reply {
        match mode {
            "stream" => Stream::collect(self).await.result,
            _ => self.only_reply().await,
        }
    }
}

impl Stream {
    pub async fn collect(mut inbox: Inbox) -> Self {
        let (mut frames, mut keep_alives) = (Vec::new(), 0);
        let mut result = None;
        loop {
            let message = inbox.reply().await;
            if message.text.is_empty() {
                assert!(message.headers.is_empty(), "the end has headers: {message:?}");
                break;
            }
            assert!(result.is_none(), "a frame after the result: {message:?}");
            if message.header("A2A-Seq").is_none() {
                assert_eq!((&message["type"], &message["data"]), (&"status".into(), &"ack".into()));
                assert!(!frames.is_empty(), "a keep-alive before the first frame");
                keep_alives += 1;
                continue;
            }
            let sequence = message.header("A2A-Seq").and_then(|value| value.parse().ok());
            assert_eq!(sequence, Some(frames.len()), "{message:?}");
            let kind = message["type"].as_str().expect("a type").to_owned();
            let data = message["data"].clone();
            if kind == "result" {
                result = Some(Reply { body: data.clone(), ..message });
            }
            frames.push((kind, data));
        }
        let result = result.unwrap_or_else(|| panic!("no result in {frames:?}"));
        if let Some(beyond) = inbox.reply_within(std::time::Duration::from_millis(100)).await {
            panic!("a message after the end: {beyond:?}");
        }
        Self { frames, result, keep_alives }
    }

    /// The data of all frames of one type.
    pub fn all(&self, kind: &str) -> Vec<&Value> {
        self.frames.iter().filter(|(own, _)| own == kind).map(|(_, data)| data).collect()
    }

    /// The types of all frames, with repetitions of one type as one.
    pub fn outline(&self) -> String {
        let mut kinds: Vec<&str> = self.frames.iter().map(|(kind, _)| kind.as_str()).collect();
        kinds.dedup();
        kinds.join(" ")
    }

    /// The text of all `response` frames.
    pub fn response(&self) -> String {
        self.all("response").iter().filter_map(|data| data.as_str()).collect()
    }

    /// The states of all `state` frames.
    pub fn states(&self) -> Vec<&str> {
        self.all("state").iter().filter_map(|data| data["state"].as_str()).collect()
    }
}
