//! Hostile agents on plain sockets.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use serde_json::{Value, json};

use super::arena::lower_priority;
use crate::support::peer::card;

/// The variable with the port of the agent in [`agent_that_reopens_its_socket`].
const PORT: &str = "ISOLATE_AGENT_PORT";

/// An agent that answers the first request of a connection, and every later one with that same response, as if an
/// agent sent a second response that the next caller reads. Returns its port.
pub(super) fn repeating_agent() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        lower_priority();
        for connection in listener.incoming().flatten() {
            std::thread::spawn(move || serve(connection, true));
        }
    });
    port
}

/// Answers with the text of the request, or of the first one. Without repeats, the connection ends after a response.
fn serve(mut connection: TcpStream, repeats: bool) -> std::io::Result<()> {
    let mut reader = BufReader::new(connection.try_clone()?);
    let mut first = None;
    loop {
        let (mut line, mut length) = (String::new(), 0);
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let is_get = line.starts_with("GET");
        loop {
            line.clear();
            reader.read_line(&mut line)?;
            let lower = line.to_ascii_lowercase();
            if let Some(value) = lower.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or(0);
            }
            if line.trim_end().is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let request: Value = serde_json::from_slice(&body).unwrap_or_default();
        let answer = if is_get {
            card(&["ask"])
        } else if request["method"] != "SendMessage" {
            json!({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32001, "message": "Task not found"}})
        } else {
            let text = &request["params"]["message"]["parts"][0]["text"];
            let own = json!({"jsonrpc": "2.0", "id": request["id"],
                "result": {"message": {"messageId": "m", "role": "ROLE_AGENT", "parts": [{"text": text}]}}});
            first.get_or_insert(own).clone()
        };
        let body = answer.to_string();
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{}\r\n",
            body.len(),
            if repeats { "" } else { "Connection: close\r\n" }
        );
        connection.write_all((head + &body).as_bytes())?;
        if !repeats {
            return Ok(());
        }
    }
}

/// The settings of an agent that the bridge launches: this program, with a test that is an agent.
pub(super) fn reopening_agent() -> String {
    let program = std::env::current_exe().unwrap();
    let test = "isolate::raw_agents::agent_that_reopens_its_socket";
    let command = format!("{PORT}={{port}} exec {} --ignored --exact {test}", program.display());
    format!("url: http://127.0.0.1:{{port}}\nport: auto\nshell: true\ncommand: '{command}'")
}

/// Closes its listening socket after every connection and opens another one, so that the bridge has to find the owner
/// of the port again.
#[test]
#[ignore = "an agent for scripts/stress isolate"]
fn agent_that_reopens_its_socket() {
    lower_priority();
    let Some(port) = std::env::var(PORT).ok().and_then(|port| port.parse::<u16>().ok()) else {
        return;
    };
    loop {
        let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)) else {
            std::thread::yield_now();
            continue;
        };
        if let Ok((connection, _)) = listener.accept() {
            drop(listener);
            std::thread::spawn(move || serve(connection, false));
        }
    }
}
