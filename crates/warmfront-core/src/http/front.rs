//! The port that clients talk to: accepts connections, bounds them, and ends them in order.
//!
//! One task a connection; it serves the requests, polls the engines' connections and writes the answers. The function
//! runs on whatever runtime calls it, so one I/O thread means a runtime of one thread and no synchronisation.

use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::patience::{Busy, Limits, Patient, Serving};
use super::proxy::{self, Front};

/// Pause after a failed accept: out of file descriptors, most likely, and trying at once would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Failed accepts between two lines in the log: one line per 10 s of a lasting shortage.
const ACCEPT_FAILURES_PER_LINE: u64 = 200;
/// Room in hyper's buffer beyond the header limit, so that an oversized header reaches us and gets a proper answer.
const HEADER_BYTES_SLACK: usize = 8 * 1024;

/// How long answers that are cut at the end of the grace time may take to say so.
const CUT_TIME: Duration = Duration::from_secs(1);

/// Tells the front to stop. Clones are one switch.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<StopState>);

#[derive(Debug, Default)]
struct StopState {
    is_set: AtomicBool,
    /// The grace time is over: answers end now.
    is_cut: AtomicBool,
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

    /// Ends what has not ended by itself.
    fn cut(&self) {
        self.0.is_cut.store(true, Ordering::Release);
        self.0.notify.notify_waiters();
    }

    fn is_cut(&self) -> bool {
        self.0.is_cut.load(Ordering::Acquire)
    }

    async fn wait_for_cut(&self) {
        let mut notified = pin!(self.0.notify.notified());
        notified.as_mut().enable();
        if !self.is_cut() {
            notified.await; // `set` was before
        }
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
                Ok((socket, _)) if connections.len() < connections_max => {
                    failures = 0;
                    connections.spawn(serve_connection(socket, Arc::clone(&front), stop.clone()));
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
    if tokio::time::timeout(grace, drain(&mut connections)).await.is_err() {
        tracing::warn!("{} connections are cut at the end of the grace time", connections.len());
        stop.cut();
        let _slow = tokio::time::timeout(CUT_TIME, drain(&mut connections)).await; // the rest goes without a word
    }
    connections.shutdown().await;
    open.set(0.0);
    carrier.abort();
    note_end(carrier.await);
}

async fn drain(connections: &mut JoinSet<()>) {
    while let Some(ended) = connections.join_next().await {
        note_end(ended);
    }
}

fn note_end(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!("a connection's task panicked: {error}");
    }
}

async fn serve_connection(socket: TcpStream, front: Arc<Front>, stop: Stop) {
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!("client connection: {error}"); // already closed
        return;
    }
    let config = &front.config;
    let busy = Arc::<Busy>::default();
    let socket = Patient::new(socket, Arc::clone(&busy), Limits::of(config));
    let service = service_fn(|request| {
        let front = Arc::clone(&front);
        let serving = Serving::new(&busy);
        async move {
            let uri = request.uri().clone();
            let mut answer = pin!(proxy::answer(front, request));
            let answer = std::future::poll_fn(|cx| {
                if serving.is_cut() { Poll::Ready(None) } else { answer.as_mut().poll(cx).map(Some) }
            });
            let mut response = answer.await.unwrap_or_else(|| proxy::shutting_down(uri.path()));
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
    let mut cut = pin!(stop.wait_for_cut());
    let mut is_watching = false;
    let mut is_stopping = false;
    let mut is_cut = false;
    let ended = std::future::poll_fn(|cx| {
        // The switch is polled once to leave our waker there; afterwards its flag is enough, once a wake-up.
        if !is_stopping && (!is_watching || stop.is_set()) {
            is_watching = true;
            if stopped.as_mut().poll(cx).is_ready() {
                is_stopping = true;
                connection.as_mut().graceful_shutdown();
            }
        }
        if is_stopping && !is_cut && cut.as_mut().poll(cx).is_ready() {
            is_cut = true;
            busy.cut();
        }
        connection.as_mut().poll(cx)
    })
    .await;
    if let Err(error) = ended {
        tracing::debug!("client connection: {error}");
    }
}
