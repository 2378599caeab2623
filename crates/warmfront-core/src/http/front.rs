//! The port that clients talk to: accepts connections, bounds them, and ends them in order.
//!
//! The end has three steps, see [`Stop`](super::stop): readiness fails and answers ask for the connection to be closed; after the
//! settle time nothing is accepted any more, and what the kernel had accepted for us by then is still served; running
//! answers end. A client is refused by none of them.
//!
//! One task a connection: it serves the requests, polls the engines' connections and writes the answers. The function runs
//! on whatever runtime calls it, so one I/O thread means a runtime of one thread and no synchronisation.

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use arc_swap::ArcSwap;
use http::header::{CONNECTION, HeaderValue};
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use super::access::Peer;
use super::answer::Reply;
use super::patience::{Busy, Limits, Patient, Serving};
use super::precedence::{Line, Turn};
use super::proxy::{self, Front};
use super::stop::Stop;
use super::{overview, routes};
use crate::config::FrontConfig;
use crate::metrics::Gauge;

/// Pause after a failed accept: out of file descriptors, most likely, and trying at once would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Failed accepts between two lines in the log: one line per 10 s of a lasting shortage.
const ACCEPT_FAILURES_PER_LINE: u64 = 200;
/// Room in hyper's buffer beyond the header limit, so that an oversized header reaches us and gets a proper answer.
const HEADER_BYTES_SLACK: usize = 8 * 1024;

/// How often files of keys and certificates are looked at.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// After another process has taken over, how long connections without a request may stay.
const LINGER: Duration = Duration::from_secs(5);

/// How long answers that are cut at the end of the grace time may take to say so.
const CUT_TIME: Duration = Duration::from_secs(1);

/// The front in force. Clones are one place; whoever reads it keeps what it got, and with it the connections to engines of
/// a configuration that may have been replaced: nothing but a request may keep one for long.
#[derive(Clone, Debug)]
pub struct Fronts(Arc<ArcSwap<Front>>);

impl Fronts {
    pub fn current(&self) -> Arc<Front> {
        self.0.load_full()
    }

    /// Requests that begin from now on go through `front`.
    pub fn replace(&self, front: Front) {
        self.0.store(Arc::new(front));
    }
}

impl From<Arc<Front>> for Fronts {
    fn from(front: Arc<Front>) -> Self {
        Self(Arc::new(ArcSwap::new(front)))
    }
}

/// Serves clients until `stop`, then lets running answers end, at most for the grace time.
pub async fn serve(listener: TcpListener, fronts: impl Into<Fronts>, stop: Stop) {
    let fronts = fronts.into();
    let mut clients = Clients {
        open: fronts.current().metrics.gauge("warmfront_connections", &[]),
        tasks: JoinSet::new(),
        line: Line::default(),
        fronts: fronts.clone(),
        stop: stop.clone(),
    };
    let front = fronts.current();
    front.outset.begin(seconds(front.config.fleet_wait_s));
    let mailbox = Arc::clone(front.mailbox());
    drop(front);
    let carrier = tokio::spawn(async move { mailbox.carry().await });
    let watch = tokio::spawn(watch_files(fronts.clone()));
    clients.accept_until(&listener, stop.wait()).await;
    let end = Instant::now() + seconds(fronts.current().config.grace_s);
    if stop.is_handed_over() {
        drop(listener);
        // Nothing presses: a connection that is in use ends after its next answer, and none is closed under a request.
        clients.ended_by(end.min(Instant::now() + LINGER)).await;
    } else {
        let settle = seconds(fronts.current().config.settle_s).min(end - Instant::now());
        clients.accept_until(&listener, tokio::time::sleep(settle)).await;
        clients.take_accepted(listener);
    }
    stop.close();
    clients.end_by(end).await;
    for task in [carrier, watch] {
        task.abort();
        note_end(task.await);
    }
}

/// Reads keys, secrets and certificates again when they change: those of the front in force, which is not held in between.
async fn watch_files(fronts: Fronts) {
    let mut interval = tokio::time::interval(WATCH_INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        let front = fronts.current();
        if front.has_files() {
            note_end(tokio::task::spawn_blocking(move || front.refresh()).await);
        }
    }
}

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

/// All connections of clients.
struct Clients {
    open: Gauge,
    tasks: JoinSet<()>,
    line: Line,
    fronts: Fronts,
    stop: Stop,
}

impl Clients {
    async fn accept_until(&mut self, listener: &TcpListener, end: impl Future<Output = ()>) {
        let mut end = pin!(end);
        let mut failures = 0_u64;
        let mut sweep = tokio::time::interval(self.fronts.current().upstream.idle_timeout());
        loop {
            tokio::select! {
                biased;
                () = &mut end => return,
                Some(ended) = self.tasks.join_next() => {
                    note_end(ended);
                    self.count();
                }
                accepted = listener.accept() => match accepted {
                    Ok(accepted) => {
                        failures = 0;
                        self.serve(accepted);
                    }
                    Err(error) => {
                        if failures.is_multiple_of(ACCEPT_FAILURES_PER_LINE) {
                            tracing::warn!("cannot accept a connection: {error}");
                        }
                        failures += 1;
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                },
                _ = sweep.tick() => self.fronts.current().upstream.sweep(),
            }
        }
    }

    /// Takes what the kernel has accepted for us already: closing the socket would reset these connections.
    ///
    /// Asked of the kernel and not of the runtime, which knows only what it has been told of.
    fn take_accepted(&mut self, listener: TcpListener) {
        let Ok(listener) = listener.into_std() else { return };
        while let Ok((socket, address)) = listener.accept() {
            let adopted = socket.set_nonblocking(true).and_then(|()| TcpStream::from_std(socket));
            match adopted {
                Ok(socket) => self.serve((socket, address)),
                Err(error) => tracing::debug!("client connection: {error}"),
            }
        }
    }

    /// Serves a connection, or closes it at once when there are too many.
    fn serve(&mut self, accepted: (TcpStream, SocketAddr)) {
        if self.tasks.len() < self.fronts.current().config.connections_max {
            let shared = (self.fronts.clone(), self.line.clone());
            self.tasks.spawn(serve_connection(accepted, shared, self.stop.clone()));
            self.count();
        }
    }

    fn count(&self) {
        self.open.set(self.tasks.len() as f64);
    }

    /// Whether all connections have ended by then.
    async fn ended_by(&mut self, end: Instant) -> bool {
        let ended = async {
            while let Some(ended) = self.tasks.join_next().await {
                note_end(ended);
                self.open.set(self.tasks.len() as f64);
            }
        };
        tokio::time::timeout_at(end, ended).await.is_ok()
    }

    async fn end_by(mut self, end: Instant) {
        if !self.ended_by(end).await {
            tracing::warn!("{} connections are cut at the end of the grace time", self.tasks.len());
            self.stop.cut();
            self.ended_by(Instant::now() + CUT_TIME).await; // the rest goes without a word
        }
        self.tasks.shutdown().await;
        self.open.set(0.0);
    }
}

fn note_end(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!("a connection's task panicked: {error}");
    }
}

async fn serve_connection((socket, address): (TcpStream, SocketAddr), (fronts, line): (Fronts, Line), stop: Stop) {
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!("client connection: {error}"); // already closed
        return;
    }
    let front = fronts.current();
    let peer = front.access.peer(address);
    let (tls, metrics) = (front.tls.clone(), Arc::clone(&front.metrics));
    let limit = seconds(front.config.header_timeout_s);
    drop(front);
    match tls {
        None => converse(socket, peer, (fronts, line), stop).await,
        Some(tls) => {
            let refused = match tokio::time::timeout(limit, tls.accept(socket)).await {
                Ok(Ok(socket)) => return Box::pin(converse(socket, peer, (fronts, line), stop)).await,
                Ok(Err(error)) => error.to_string(),
                Err(_elapsed) => "not in time".to_owned(),
            };
            tracing::debug!("TLS with a client: {refused}");
            metrics.inc("warmfront_refused_clients_total", &["tls"], 1);
        }
    }
}

/// Serves the requests of one connection.
async fn converse<S>(socket: S, peer: Peer, (fronts, line): (Fronts, Line), stop: Stop)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut turn = Turn::new(&line);
    let busy = Arc::new(Busy::new(turn.place()));
    let mailbox = Arc::clone(fronts.current().mailbox());
    let (socket, protocol) = under(&fronts.current().config, socket, &busy);
    let service = service_fn(|request| {
        let uri = request.uri().clone();
        let answered = answer(&fronts, &stop, (peer, request));
        let serving = Serving::new(&busy);
        async move {
            let mut answered = pin!(answered);
            let answer = std::future::poll_fn(|cx| {
                if serving.is_cut() { Poll::Ready(None) } else { answered.as_mut().poll(cx).map(Some) }
            });
            let mut response = answer.await.unwrap_or_else(|| proxy::shutting_down(uri.path()));
            response.body_mut().hold(serving);
            Ok::<_, Infallible>(response)
        }
    });
    let mut connection = pin!(protocol.serve_connection(TokioIo::new(socket), service));
    let mut closing = pin!(stop.closing());
    let mut cut = pin!(stop.cutting());
    let mut is_watching = false;
    let mut is_closing = false;
    let mut is_cut = false;
    let ended = std::future::poll_fn(|cx| {
        let Some(waker) = turn.take(cx, mailbox.has_errand()) else { return Poll::Pending };
        let cx = &mut Context::from_waker(waker);
        // The switch is polled once to leave our waker there, and again only when it has been thrown.
        if !is_closing && (!is_watching || stop.is_set()) {
            is_watching = true;
            if closing.as_mut().poll(cx).is_ready() {
                is_closing = true;
                connection.as_mut().graceful_shutdown();
            }
        }
        if is_closing && !is_cut && cut.as_mut().poll(cx).is_ready() {
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

/// The bounds of a connection: those of the configuration in force when it began.
fn under<S: AsyncRead + AsyncWrite>(config: &FrontConfig, socket: S, busy: &Arc<Busy>) -> (Patient<S>, http1::Builder) {
    let socket = Patient::new(socket, Arc::clone(busy), Limits::of(config));
    let mut protocol = http1::Builder::new();
    protocol
        .header_read_timeout(None)
        .writev(false) // an event with its chunk framing is copied into one write: cheaper than four slices
        .max_headers(config.headers_max)
        .max_buf_size(config.header_bytes_max + HEADER_BYTES_SLACK);
    (socket, protocol)
}

/// Answers one request by the front in force, and says goodbye where this process is taking leave.
fn answer(
    fronts: &Fronts,
    stop: &Stop,
    (peer, request): (Peer, Request<Incoming>),
) -> impl Future<Output = Response<Reply>> + use<> {
    let (front, stop) = (fronts.current(), stop.clone());
    async move {
        let is_last_look = stop.is_draining() && routes::is_ready(request.uri().path());
        let mut response = if is_last_look {
            overview::draining()
        } else {
            Box::pin(proxy::answer(front, peer, request)).await // hyper keeps room for it on each connection, idle or not
        };
        if stop.is_draining() {
            // Asked for instead of done: a client that closes by itself has no request under way into a closed socket.
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}
