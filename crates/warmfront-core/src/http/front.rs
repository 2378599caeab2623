//! The port that clients talk to: accepts connections, bounds them, and ends them in order.
//!
//! One task a connection; it serves the requests, polls the engines' connections and writes the answers. The function
//! runs on whatever runtime calls it, so one I/O thread means a runtime of one thread and no synchronisation.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::access::Peer;
use super::patience::{Busy, Limits, Patient, Serving};
use super::proxy::{self, Front};

/// Pause after a failed accept: out of file descriptors, most likely, and trying at once would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Failed accepts between two lines in the log: one line per 10 s of a lasting shortage.
const ACCEPT_FAILURES_PER_LINE: u64 = 200;
/// Room in hyper's buffer beyond the header limit, so that an oversized header reaches us and gets a proper answer.
const HEADER_BYTES_SLACK: usize = 8 * 1024;

/// How often files of keys and certificates are looked at.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// Tells the front to stop. Clones are one switch.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<StopState>);

#[derive(Debug, Default)]
struct StopState {
    is_set: AtomicBool,
    notify: Notify,
}

impl Stop {
    pub fn set(&self) {
        self.0.is_set.store(true, Ordering::Release);
        self.0.notify.notify_waiters();
    }

    pub fn is_set(&self) -> bool {
        self.0.is_set.load(Ordering::Acquire)
    }

    /// Ready once stopped.
    pub async fn wait(&self) {
        let mut notified = pin!(self.0.notify.notified());
        notified.as_mut().enable();
        if !self.is_set() {
            notified.await;
        }
    }
}

/// Serves clients until `stop`, then lets running answers end, at most for the grace time.
pub async fn serve(listener: TcpListener, front: Arc<Front>, stop: Stop) {
    let connections_max = front.config.connections_max;
    let open = front.metrics.gauge("warmfront_connections", &[]);
    let mut connections = JoinSet::new();
    let mailbox = Arc::clone(front.mailbox());
    let carrier = tokio::spawn(async move { mailbox.carry().await });
    let watch = tokio::spawn(watch_files(Arc::clone(&front)));
    let mut sweep = tokio::time::interval(front.upstream.idle_timeout());
    let mut stopped = pin!(stop.wait());
    let mut failures = 0_u64;
    loop {
        tokio::select! {
            biased;
            () = &mut stopped => break,
            Some(ended) = connections.join_next() => {
                note_end(ended);
                open.set(connections.len() as f64);
            }
            accepted = listener.accept() => match accepted {
                Ok((socket, address)) if connections.len() < connections_max => {
                    failures = 0;
                    connections.spawn(serve_connection((socket, address), Arc::clone(&front), stop.clone()));
                    open.set(connections.len() as f64);
                }
                Ok(_) => {} // dropped, hence closed
                Err(error) => {
                    if failures.is_multiple_of(ACCEPT_FAILURES_PER_LINE) {
                        tracing::warn!("cannot accept a connection: {error}");
                    }
                    failures += 1;
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            _ = sweep.tick() => front.upstream.sweep(),
        }
    }
    drop(listener);
    let grace = Duration::from_secs_f64(front.config.grace_s);
    let drained = async {
        while let Some(ended) = connections.join_next().await {
            note_end(ended);
        }
    };
    if tokio::time::timeout(grace, drained).await.is_err() {
        tracing::warn!("{} connections were cut at the end of the grace time", connections.len());
    }
    connections.shutdown().await;
    open.set(0.0);
    for task in [carrier, watch] {
        task.abort();
        note_end(task.await);
    }
}

/// Reads keys, secrets and certificates again when they change.
async fn watch_files(front: Arc<Front>) {
    if !front.has_files() {
        return;
    }
    let mut interval = tokio::time::interval(WATCH_INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        let front = Arc::clone(&front);
        note_end(tokio::task::spawn_blocking(move || front.refresh()).await);
    }
}

fn note_end(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!("a connection's task panicked: {error}");
    }
}

async fn serve_connection((socket, address): (TcpStream, SocketAddr), front: Arc<Front>, stop: Stop) {
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!("client connection: {error}"); // already closed
        return;
    }
    let peer = front.access.peer(address);
    match &front.tls {
        None => converse(socket, peer, Arc::clone(&front), stop).await,
        Some(tls) => {
            let limit = Duration::from_secs_f64(front.config.header_timeout_s);
            let refused = match tokio::time::timeout(limit, tls.accept(socket)).await {
                Ok(Ok(socket)) => return Box::pin(converse(socket, peer, Arc::clone(&front), stop)).await,
                Ok(Err(error)) => error.to_string(),
                Err(_elapsed) => "not in time".to_owned(),
            };
            tracing::debug!("TLS with a client: {refused}");
            front.metrics.inc("warmfront_refused_clients_total", &["tls"], 1);
        }
    }
}

/// Serves the requests of one connection.
async fn converse<S>(socket: S, peer: Peer, front: Arc<Front>, stop: Stop)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let config = &front.config;
    let busy = Arc::<Busy>::default();
    let socket = Patient::new(socket, Arc::clone(&busy), Limits::of(config));
    let service = service_fn(|request| {
        let front = Arc::clone(&front);
        let serving = Serving::new(&busy);
        async move {
            let mut response = proxy::answer(front, peer, request).await;
            response.body_mut().hold(serving);
            Ok::<_, Infallible>(response)
        }
    });
    let connection = http1::Builder::new()
        .header_read_timeout(None)
        .writev(false) // an event with its chunk framing is copied into one write: cheaper than four slices
        .max_headers(config.headers_max)
        .max_buf_size(config.header_bytes_max + HEADER_BYTES_SLACK)
        .serve_connection(TokioIo::new(socket), service);
    let mut connection = pin!(connection);
    let mut stopped = pin!(stop.wait());
    let mut is_watching = false;
    let mut is_stopping = false;
    let ended = std::future::poll_fn(|cx| {
        // The switch is polled once to leave our waker there; afterwards its flag is enough, once a wake-up.
        if !is_stopping && (!is_watching || stop.is_set()) {
            is_watching = true;
            if stopped.as_mut().poll(cx).is_ready() {
                is_stopping = true;
                connection.as_mut().graceful_shutdown();
            }
        }
        connection.as_mut().poll(cx)
    })
    .await;
    if let Err(error) = ended {
        tracing::debug!("client connection: {error}");
    }
}
