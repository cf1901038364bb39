//! The floor: the least that any bridge can do. It POSTs each NATS request and publishes the response, or
//! each event of a stream. It does not parse, check or store anything.

use std::io::Write as _;
use std::time::Duration;

use async_nats::{Client, Message};
use bytes::{Buf as _, Bytes, BytesMut};
use futures_util::StreamExt as _;
use reqwest::header::{CONTENT_TYPE, HeaderValue};

/// Serves `floor.call` and `floor.stream` until killed.
pub async fn run(nats: &str, call_url: &str, stream_url: &str) -> anyhow::Result<()> {
    let client = async_nats::connect(nats).await?;
    // The bridge has the same settings.
    let http = reqwest::Client::builder()
        .redirect(reqwest::redirect::Policy::none())
        .no_proxy()
        .connect_timeout(Duration::from_secs(10))
        .pool_idle_timeout(Duration::from_secs(4))
        .tcp_nodelay(true)
        .build()?;
    let (call_url, stream_url): (reqwest::Url, reqwest::Url) = (call_url.parse()?, stream_url.parse()?);
    let mut calls = client.queue_subscribe("floor.call", "floor".into()).await?;
    let mut streams = client.queue_subscribe("floor.stream", "floor".into()).await?;
    client.flush().await?;
    println!("ready");
    std::io::stdout().flush()?;
    loop {
        let (message, is_stream) = tokio::select! {
            Some(message) = calls.next() => (message, false),
            Some(message) = streams.next() => (message, true),
            else => return Ok(()),
        };
        let url = if is_stream { &stream_url } else { &call_url };
        let (client, post) = (client.clone(), http.post(url.clone()));
        tokio::spawn(async move {
            if let Err(error) = forward(&client, post, message, is_stream).await {
                eprintln!("floor: {error:#}");
            }
        });
    }
}

async fn forward(
    client: &Client,
    post: reqwest::RequestBuilder,
    message: Message,
    is_stream: bool,
) -> anyhow::Result<()> {
    let Some(reply_to) = message.reply else { return Ok(()) };
    let json = HeaderValue::from_static("application/json");
    let mut response = post.header(CONTENT_TYPE, json).body(message.payload).send().await?;
    if !is_stream {
        return Ok(client.publish(reply_to, response.bytes().await?).await?);
    }
    let mut buffer = BytesMut::new();
    while let Some(chunk) = response.chunk().await? {
        buffer.extend_from_slice(&chunk);
        while let Some(end) = buffer.windows(2).position(|pair| pair == b"\n\n") {
            let event = buffer.split_to(end).freeze();
            buffer.advance(2);
            client.publish(reply_to.clone(), event).await?;
        }
    }
    Ok(client.publish(reply_to, Bytes::new()).await?)
}
