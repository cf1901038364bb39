//! The Rust snippet of docs/src/calling.md; scripts/test-docs compares the two and runs it.
#![allow(clippy::print_stdout, clippy::indexing_slicing, reason = "an example for other people's code")]

use serde_json::{Value, json};

#[tokio::main]
async fn main() -> Result<(), async_nats::Error> {
    let url = std::env::var("NATS_URL").unwrap_or("nats://127.0.0.1:4222".into());
    let client = async_nats::ConnectOptions::new()
        .request_timeout(Some(std::time::Duration::from_secs(300)))
        .connect(url)
        .await?;
    let body = json!({"prompt": "hello"}).to_string();
    let message = client.request("a2a.action.demo.echo", body.into()).await?;
    let reply: Value = serde_json::from_slice(&message.payload)?;
    println!("{} {}", reply["status"], reply["message"]);
    Ok(())
}
