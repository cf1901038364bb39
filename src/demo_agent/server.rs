//! The HTTP side: routes, tokens, counting, and the end.

use std::future::pending;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tokio::net::TcpListener;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::rpc::Fault;
use super::store::Store;
use super::wire::Protocol;
use super::{Args, card, mischief, rpc};

const NEW_CARD: &str = "/.well-known/agent-card.json";
const OLD_CARD: &str = "/.well-known/agent.json";
const MAX_BODY: usize = 256 << 20;
/// For requests under way when the agent is told to stop; then their connections are dropped.
const GRACE: Duration = Duration::from_secs(1);
/// From the answer of the last call before a planned crash to the crash.
const LAST_WORDS: Duration = Duration::from_millis(50);

/// The running agent.
pub(super) struct Agent {
    pub(super) args: Args,
    /// Its own address, with a slash at the end.
    pub(super) url: String,
    pub(super) store: Store,
    pub(super) tasks: TaskTracker,
    /// How many were sent to it, for a planned crash.
    pub(super) messages: AtomicU64,
    /// How often it was asked for its card.
    cards: AtomicU64,
}

/// Serves on `listener` until `stop`.
pub(super) async fn serve(listener: TcpListener, args: Args, stop: CancellationToken) -> io::Result<()> {
    let url = format!("http://{}/", listener.local_addr()?);
    let tasks = TaskTracker::new();
    let agent = Agent {
        args,
        url,
        store: Store::new(),
        tasks,
        messages: AtomicU64::new(0),
        cards: AtomicU64::new(0),
    };
    let server = axum::serve(listener, routes(Arc::new(agent)))
        .with_graceful_shutdown(stop.clone().cancelled_owned())
        .into_future();
    let too_late = async {
        stop.cancelled().await;
        sleep(GRACE).await;
    };
    tokio::select! {
        ended = server => ended,
        () = too_late => Ok(()),
    }
}

fn routes(agent: Arc<Agent>) -> Router {
    if agent.args.hang {
        return Router::new().fallback(pending::<Response>);
    }
    let mut routes = Router::new().route("/", post(call)).route("/moved/agent-card.json", get(moved_card));
    if !agent.args.only_old_card_path {
        routes = routes.route(NEW_CARD, get(get_card));
    }
    if !agent.args.only_new_card_path {
        routes = routes.route(OLD_CARD, get(get_card));
    }
    routes.layer(DefaultBodyLimit::max(MAX_BODY)).with_state(agent)
}

async fn call(State(agent): State<Arc<Agent>>, headers: HeaderMap, body: Bytes) -> Response {
    if !agent.knows(&headers) {
        return unauthorized();
    }
    let response = rpc::answer(&agent, &headers, &body).await;
    let messages = agent.messages.load(Ordering::Relaxed);
    if agent.args.crash_after.is_some_and(|last| messages >= last) {
        agent.tasks.spawn(async {
            sleep(LAST_WORDS).await;
            mischief::exit(mischief::CRASHED);
        });
    }
    response
}

async fn get_card(State(agent): State<Arc<Agent>>, headers: HeaderMap) -> Response {
    if agent.args.card_auth && !agent.knows(&headers) {
        return unauthorized();
    }
    if agent.cards.fetch_add(1, Ordering::Relaxed) > 0 {
        sleep(agent.args.slow_card).await;
    }
    card::serve(&agent).await
}

async fn moved_card(State(agent): State<Arc<Agent>>) -> Response {
    card::good(&agent)
}

fn unauthorized() -> Response {
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], "Unauthorized").into_response()
}

impl Agent {
    fn knows(&self, headers: &HeaderMap) -> bool {
        let given = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
        self.args.bearer.as_ref().is_none_or(|token| given == Some(format!("Bearer {token}").as_bytes()))
    }

    /// 1.0 refuses what it was not asked in; 0.3 knows no version header.
    pub(super) fn check_version(&self, headers: &HeaderMap) -> Result<(), Fault> {
        match headers.get("a2a-version").map(|version| version.as_bytes()) {
            Some(version) if self.args.protocol == Protocol::V1 && version != b"1.0" => {
                Err(Fault::Version(String::from_utf8_lossy(version).into_owned()))
            }
            _ => Ok(()),
        }
    }
}
