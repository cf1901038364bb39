//! One endpoint: its subscriptions, and the task that reads them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use async_nats::{Message, Subscriber};
use futures_util::{FutureExt, StreamExt};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use super::request::{Accounting, EndpointStats, ServiceRequest};
use super::{EndpointInfo, Handler, ServiceContext};
use crate::bus::identity::{Entrance, Identity};
use crate::bus::subject::ReplyGuard;

/// An endpoint as INFO and STATS show it.
#[derive(Debug, Clone)]
pub(super) struct ListedEndpoint {
    pub(super) info: Arc<EndpointInfo>,
    pub(super) stats: Arc<EndpointStats>,
}

enum ReaderCommand {
    Serve(Handler),
    /// Unsubscribe at the server, and keep reading until the token is cancelled.
    Drain(CancellationToken),
}

/// The subscriptions of one endpoint.
pub(super) struct Subscriptions {
    pub(super) direct: Subscriber,
    pub(super) gateway: Option<Subscriber>,
}

impl Subscriptions {
    /// The next message of either subscription; `None` once one of them has ended, because the client is closed. Does
    /// not lose a message if the future is dropped.
    async fn next(&mut self) -> Option<(Message, Entrance)> {
        let Some(gateway) = &mut self.gateway else {
            return Some((self.direct.next().await?, Entrance::Direct));
        };
        tokio::select! {
            message = self.direct.next() => Some((message?, Entrance::Direct)),
            message = gateway.next() => Some((message?, Entrance::Gateway)),
        }
    }

    /// See the module docs of `service`: for the server this means "now", for the client "never", so the client still
    /// knows the subscriptions when the last messages arrive.
    async fn unsubscribe_at_server(&mut self) -> Result<(), async_nats::UnsubscribeError> {
        self.direct.unsubscribe_after(u64::MAX).await?;
        match &mut self.gateway {
            Some(gateway) => gateway.unsubscribe_after(u64::MAX).await,
            None => Ok(()),
        }
    }
}

pub(super) struct EndpointTask {
    pub(super) listed: ListedEndpoint,
    commands: watch::Sender<ReaderCommand>,
    /// Cancelled once UNSUB is written or has failed.
    pub(super) unsubscribed: CancellationToken,
    /// Ends when the handler has received the last message.
    pub(super) task: JoinHandle<()>,
}

impl EndpointTask {
    /// Serves the endpoint, and adds its requests to `stats`.
    pub(super) fn start(
        context: &ServiceContext,
        info: EndpointInfo,
        handler: Handler,
        subscriptions: Subscriptions,
        stats: Arc<EndpointStats>,
    ) -> Self {
        let reader = EndpointReader {
            guard: Arc::clone(&context.guard),
            identity: Arc::clone(&context.identity),
            subject: info.subject.clone(),
            stats: Arc::clone(&stats),
            handler: handler.clone(),
        };
        let (commands, received) = watch::channel(ReaderCommand::Serve(handler));
        let unsubscribed = CancellationToken::new();
        let task = context.tasks.spawn(reader.run(subscriptions, received, unsubscribed.clone()));
        Self { listed: ListedEndpoint { info: Arc::new(info), stats }, commands, unsubscribed, task }
    }

    pub(super) fn subject(&self) -> &str {
        &self.listed.info.subject
    }

    /// Changes what INFO shows and who handles requests; the subscription and the statistics stay.
    pub(super) fn update(&mut self, info: EndpointInfo, handler: Handler) {
        self.listed.info = Arc::new(info);
        self.commands.send_replace(ReaderCommand::Serve(handler));
    }

    /// Unsubscribes at the server, and keeps reading until `applied` is cancelled.
    pub(super) fn drain(&self, applied: &CancellationToken) {
        self.commands.send_replace(ReaderCommand::Drain(applied.clone()));
    }
}

struct EndpointReader {
    guard: Arc<ReplyGuard>,
    identity: Arc<Identity>,
    subject: String,
    stats: Arc<EndpointStats>,
    handler: Handler,
}

impl EndpointReader {
    async fn run(
        mut self,
        mut subscriptions: Subscriptions,
        mut commands: watch::Receiver<ReaderCommand>,
        unsubscribed: CancellationToken,
    ) {
        // Whichever way this task ends, nothing waits for it forever.
        let unsubscribed = unsubscribed.drop_guard();
        let applied = loop {
            tokio::select! {
                biased;
                changed = commands.changed() => match &*commands.borrow_and_update() {
                    ReaderCommand::Drain(applied) => break applied.clone(),
                    ReaderCommand::Serve(handler) if changed.is_ok() => self.handler = Arc::clone(handler),
                    // The service was dropped without a stop.
                    ReaderCommand::Serve(_) => return,
                },
                message = subscriptions.next() => match message {
                    Some((message, entrance)) => self.handle(message, entrance),
                    None => return,
                },
            }
        };

        let sent = applied.run_until_cancelled(subscriptions.unsubscribe_at_server()).await;
        let sent = sent.map_or_else(|| Err("timed out".to_owned()), |sent| sent.map_err(|e| e.to_string()));
        if let Err(error) = sent {
            warn!(subject = self.subject, error, "cannot drain the endpoint; requests in flight may be lost");
        }
        drop(unsubscribed);
        while let Some(message) = applied.run_until_cancelled(subscriptions.next()).await {
            match message {
                Some((message, entrance)) => self.handle(message, entrance),
                None => return,
            }
        }
        // By now every message is in the buffer. Unconstrained, because after 128 messages in a row tokio
        // reports an empty buffer to let other tasks run.
        while let Some(Some((message, entrance))) =
            tokio::task::unconstrained(subscriptions.next()).now_or_never()
        {
            self.handle(message, entrance);
        }
    }

    fn handle(&self, message: Message, entrance: Entrance) {
        let accounting = Accounting::begin(&self.stats);
        match &message.reply {
            // The caller could not learn the result, so the request does not run.
            None => return accounting.fail(400, "no reply subject"),
            Some(reply) if !self.guard.allows(reply) => {
                return accounting.fail(403, "reply subject refused");
            }
            Some(_) => {}
        }
        // A panic in one request must not end the endpoint. The request counts itself as `internal` when it
        // is dropped, and the panic hook has logged the cause.
        let caller = self.identity.caller(&message, entrance);
        let request = ServiceRequest { message, caller, accounting };
        if catch_unwind(AssertUnwindSafe(|| (self.handler)(request))).is_err() {
            error!(subject = self.subject, "a request handler panicked");
        }
    }
}
