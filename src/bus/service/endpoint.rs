//! One endpoint: a subscription, and the task that reads it until it has left without a loss.

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
use crate::bus::subject::ReplyGuard;

/// An endpoint as INFO and STATS show it.
#[derive(Debug, Clone)]
pub(super) struct Listed {
    pub(super) endpoint: Arc<EndpointInfo>,
    pub(super) stats: Arc<EndpointStats>,
}

enum Order {
    Serve(Handler),
    /// Tell the server to send nothing more, read on until the token says that it has done so.
    Leave(CancellationToken),
}

pub(super) struct Running {
    listed: Listed,
    orders: watch::Sender<Order>,
    /// Cancelled when the server has been told to send nothing more (or will never be).
    told: CancellationToken,
    task: JoinHandle<()>,
}

impl Running {
    /// Serves the endpoint, and counts its requests on from `stats`.
    pub(super) fn start(
        context: &ServiceContext,
        endpoint: EndpointInfo,
        handler: Handler,
        subscriber: Subscriber,
        stats: Arc<EndpointStats>,
    ) -> Self {
        let listed = Listed { endpoint: Arc::new(endpoint), stats };
        let reader = Reader {
            guard: Arc::clone(&context.guard),
            stats: Arc::clone(&listed.stats),
            handler: handler.clone(),
        };
        let (orders, received) = watch::channel(Order::Serve(handler));
        let told = CancellationToken::new();
        let task = context.tasks.spawn(reader.serve(subscriber, received, told.clone()));
        Self { listed, orders, told, task }
    }

    pub(super) fn subject(&self) -> &str {
        &self.listed.endpoint.subject
    }

    pub(super) fn listed(&self) -> Listed {
        self.listed.clone()
    }

    /// The same subscription and counts, with a new face and a new handler.
    pub(super) fn swap(&mut self, endpoint: EndpointInfo, handler: Handler) {
        self.listed.endpoint = Arc::new(endpoint);
        self.orders.send_replace(Order::Serve(handler));
    }

    /// Has the server told to send nothing more. Goes on reading until `settled`.
    pub(super) fn leave(&self, settled: &CancellationToken) {
        self.orders.send_replace(Order::Leave(settled.clone()));
    }

    /// Resolves when what [`leave`](Self::leave) ordered is on its way to the server.
    pub(super) async fn told(&self) {
        self.told.cancelled().await;
    }

    /// Resolves when the last message was handed to its handler.
    pub(super) async fn ended(self) {
        if let Err(error) = self.task.await {
            error!(subject = self.listed.endpoint.subject, %error, "endpoint task failed");
        }
    }
}

struct Reader {
    guard: Arc<ReplyGuard>,
    stats: Arc<EndpointStats>,
    handler: Handler,
}

impl Reader {
    async fn serve(
        mut self,
        mut subscriber: Subscriber,
        mut orders: watch::Receiver<Order>,
        told: CancellationToken,
    ) {
        // However this ends, nobody waits for it in vain.
        let told = told.drop_guard();
        let settled = loop {
            tokio::select! {
                biased;
                changed = orders.changed() => match &*orders.borrow_and_update() {
                    Order::Leave(settled) => break settled.clone(),
                    Order::Serve(handler) if changed.is_ok() => self.handler = Arc::clone(handler),
                    // The service is gone without having been stopped.
                    Order::Serve(_) => return,
                },
                message = subscriber.next() => match message {
                    Some(message) => self.take(message),
                    None => return,
                },
            }
        };

        // See the module docs of `service`: the server takes this for "at once", the client for
        // "never", so that the client still knows the subscription when the last messages come.
        let asked = settled.run_until_cancelled(subscriber.unsubscribe_after(u64::MAX)).await;
        if !matches!(asked, Some(Ok(()))) {
            warn!("endpoint could not be unsubscribed in order; requests under way may be lost");
        }
        drop(told);
        loop {
            tokio::select! {
                biased;
                () = settled.cancelled() => break,
                message = subscriber.next() => match message {
                    Some(message) => self.take(message),
                    None => return,
                },
            }
        }
        // Everything is in the buffer by now. Unconstrained, because tokio has a task that read 128
        // messages in a row believe that there are none, to let others run.
        while let Some(Some(message)) = tokio::task::unconstrained(subscriber.next()).now_or_never() {
            self.take(message);
        }
    }

    fn take(&self, message: Message) {
        let accounting = Accounting::begin(&self.stats);
        match &message.reply {
            // Nobody would know what became of it, so it is not run.
            None => return accounting.fail(400, "no reply subject"),
            Some(reply) if !self.guard.allows(reply) => return accounting.fail(403, "reply subject refused"),
            Some(_) => {}
        }
        // A defect in one request must not take the endpoint along: the call counts itself as
        // `internal` when it is dropped, and the panic hook has said what happened.
        if catch_unwind(AssertUnwindSafe(|| (self.handler)(ServiceRequest { message, accounting }))).is_err()
        {
            error!("a request's handler panicked");
        }
    }
}
