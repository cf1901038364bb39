//! The HTTP server: routes, the bearer token, and the stop.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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

use super::tasks::DemoTasks;
use super::{DemoAgentArgs, card, rpc};

const MAX_BODY: usize = 256 << 20;
/// For requests in flight when the agent stops; then it drops their connections.
const GRACE_PERIOD: Duration = Duration::from_secs(1);

pub(super) struct DemoAgent {
    pub(super) args: DemoAgentArgs,
    /// The agent's own address, with a slash at the end.
    pub(super) url: String,
    pub(super) tasks: DemoTasks,
    pub(super) background: TaskTracker,
    served_card: AtomicBool,
}

/// Serves on `listener` until `stop`.
pub(super) async fn serve(
    listener: TcpListener,
    args: DemoAgentArgs,
    stop: CancellationToken,
) -> io::Result<()> {
    let agent = DemoAgent {
        url: format!("http://{}/", listener.local_addr()?),
        tasks: DemoTasks::default(),
        background: TaskTracker::new(),
        served_card: AtomicBool::new(false),
        args,
    };
    let server = axum::serve(listener, routes(Arc::new(agent)))
        .with_graceful_shutdown(stop.clone().cancelled_owned())
        .into_future();
    let grace_period = async {
        stop.cancelled().await;
        sleep(GRACE_PERIOD).await;
    };
    tokio::select! {
        ended = server => ended,
        () = grace_period => Ok(()),
    }
}

fn routes(agent: Arc<DemoAgent>) -> Router {
    let mut routes = Router::new().route("/", post(call)).route("/moved/agent-card.json", get(moved_card));
    if !agent.args.only_old_card_path {
        routes = routes.route("/.well-known/agent-card.json", get(get_card));
    }
    if !agent.args.only_new_card_path {
        routes = routes.route("/.well-known/agent.json", get(get_card));
    }
    routes.layer(DefaultBodyLimit::max(MAX_BODY)).with_state(agent)
}

async fn call(State(agent): State<Arc<DemoAgent>>, headers: HeaderMap, body: Bytes) -> Response {
    if !agent.is_authorized(&headers) {
        return unauthorized();
    }
    rpc::answer(agent, headers, &body).await
}

async fn get_card(State(agent): State<Arc<DemoAgent>>, headers: HeaderMap) -> Response {
    if agent.args.card_auth && !agent.is_authorized(&headers) {
        return unauthorized();
    }
    if agent.served_card.swap(true, Ordering::Relaxed) {
        sleep(agent.args.slow_card).await;
    }
    card::answer(&agent).await
}

/// The target of the redirect of `--broken-card redirect`.
async fn moved_card(State(agent): State<Arc<DemoAgent>>) -> Response {
    rpc::json_response(card::card(&agent).get())
}

fn unauthorized() -> Response {
    (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, "Bearer")], "Unauthorized").into_response()
}

impl DemoAgent {
    fn is_authorized(&self, headers: &HeaderMap) -> bool {
        let given = headers.get(header::AUTHORIZATION);
        self.args.bearer.as_ref().is_none_or(|token| given.is_some_and(|it| it == &format!("Bearer {token}")))
    }
}
