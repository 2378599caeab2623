//! Connections to engines: opened within a time-out, kept for reuse, and polled by the very task that needs them.
//!
//! A connection has no task of its own. Whoever uses it polls hyper's driver together with the answer it waits for, so a
//! chunk costs one wake-up, and dropping the user closes the socket, which is how an engine learns that its client left.
//! Idle connections lie in a list and are looked at when taken: one that the engine closed is thrown away. A POST is sent
//! at most once: only while not a byte of it has been written may another connection be tried. An engine's close that
//! is still on its way when the request is written is a 502: that the kernel took our bytes does not say whether the
//! engine read them, and a prompt computed twice is worse than an error. The idle time-out lies below the engines' own
//! (vLLM: 5 s) so that we are the ones who close.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Body as _, Frame};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use socket2::SockRef;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::client::TlsStream;

use super::quiet::Quiet;
use super::tls::{self, ClientTls};
use crate::config::UpstreamConfig;
use crate::fleet::TlsOptions;
use crate::metrics::{Gauge, Metrics};

/// Most bytes read from an engine and not yet handed on, and most of a header. Bounds the memory of a stream whose
/// client does not read: each piece read is also copied behind what waits for the client.
const BUFFER_BYTES_MAX: usize = 32 * 1024;
/// Times that a poll looks again because its parts woke one another; then the task is scheduled instead.
const TURNS_MAX: usize = 8;

/// Why an exchange with an engine failed.
#[derive(Debug, Error)]
pub(crate) enum UpstreamError {
    /// Nobody was asked.
    #[error("the replica has left the fleet")]
    Left,
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    #[error("cannot connect in time")]
    ConnectTimeout,
    #[error("TLS: {0}")]
    Tls(io::Error),
    /// Not a byte was written.
    #[error("the connection closed before the request was sent")]
    Unsent,
    #[error("the connection broke: {0}")]
    Broken(hyper::Error),
    #[error("the connection closed without an answer")]
    NoAnswer,
    #[error("no answer in time")]
    FirstByteTimeout,
    /// Status 101. Nobody asked for another protocol, and what follows is not HTTP.
    #[error("the engine switched protocols unasked")]
    Switched,
}

impl UpstreamError {
    /// Whether the engine cannot have begun to work on the request.
    pub(crate) fn is_before_sending(&self) -> bool {
        matches!(self, Self::Left | Self::Connect(_) | Self::ConnectTimeout | Self::Tls(_) | Self::Unsent)
    }

    /// Label value of `warmfront_upstream_failures_total`.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Left => "left",
            Self::Connect(_) => "connect",
            Self::ConnectTimeout => "connect_timeout",
            Self::Tls(_) => "tls",
            Self::Unsent => "closed_unsent",
            Self::Broken(_) => "broken",
            Self::NoAnswer => "no_answer",
            Self::FirstByteTimeout => "first_byte_timeout",
            Self::Switched => "switched_protocols",
        }
    }

    /// Whether the engine did answer, but not in HTTP as we read it.
    pub(crate) fn is_nonsense(&self) -> bool {
        match self {
            Self::Broken(error) => error.is_parse(),
            Self::Switched => true,
            _ => false,
        }
    }
}

/// All servers' connections.
#[derive(Debug)]
pub(crate) struct Upstream {
    config: UpstreamConfig,
    metrics: Arc<Metrics>,
    tls: Arc<ClientTls>,
    servers: Mutex<HashMap<String, Arc<Server>>>,
}

/// One engine server's connections. Ranks of a server share them.
#[derive(Debug)]
struct Server {
    authority: String,
    /// `None`: plain HTTP.
    tls: Option<TlsOptions>,
    idle: Mutex<VecDeque<(Box<Link>, Instant)>>,
    idle_max: usize,
    open: Gauge,
}

impl Upstream {
    pub(crate) fn new(config: UpstreamConfig, metrics: Arc<Metrics>) -> Self {
        Self { config, metrics, tls: Arc::default(), servers: Mutex::default() }
    }

    pub(crate) fn config(&self) -> &UpstreamConfig {
        &self.config
    }

    /// Sends `request` to the server at `authority` (`host:port`) and waits for the header of its answer. `tls`: how to
    /// speak TLS with it, if at all.
    ///
    /// A reused connection that turns out dead before a byte was written is replaced by a fresh one, once.
    pub(crate) async fn exchange(
        &self,
        authority: &str,
        tls: Option<&TlsOptions>,
        request: impl Fn() -> Request<Full<Bytes>>,
    ) -> Result<(Response<()>, Exchange), UpstreamError> {
        let server = self.server(authority, tls);
        if let Some(link) = self.idle_link(&server) {
            match self.send(link, request()).await {
                Err(UpstreamError::Unsent) => {}
                result => return result,
            }
        }
        let link = self.connect(&server).await?;
        self.send(link, request()).await
    }

    /// Closes connections that have been idle for too long, and forgets servers without any, idle or in use.
    pub(crate) fn sweep(&self) {
        let Some(oldest) = Instant::now().checked_sub(self.idle_timeout()) else { return };
        let mut servers = self.servers.lock();
        servers.retain(|_, server| {
            let mut idle = server.idle.lock();
            while idle.front().is_some_and(|(_, since)| *since < oldest) {
                idle.pop_front();
            }
            Arc::strong_count(server) > 1 || Arc::weak_count(server) > 0
        });
    }

    /// Whether certificates or authorities were read from files.
    pub(crate) fn has_files(&self) -> bool {
        self.tls.has_files()
    }

    /// Reads certificates and authorities again that have changed. Blocks on the file system.
    pub(crate) fn refresh(&self) {
        self.tls.refresh();
    }

    pub(crate) fn first_byte_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.config.first_byte_timeout_s)
    }

    pub(crate) fn idle_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.config.idle_timeout_s)
    }

    /// The connections of a server. Those made for other TLS options are forgotten: the server was configured anew.
    fn server(&self, authority: &str, tls: Option<&TlsOptions>) -> Arc<Server> {
        let mut servers = self.servers.lock();
        if let Some(server) = servers.get(authority)
            && server.tls.as_ref() == tls
        {
            return Arc::clone(server);
        }
        let scheme = if tls.is_some() { "https" } else { "http" };
        let server = Arc::new(Server {
            authority: authority.to_owned(),
            tls: tls.cloned(),
            idle: Mutex::default(),
            idle_max: self.config.idle_connections_per_server,
            open: self.metrics.gauge("warmfront_upstream_connections", &[&format!("{scheme}://{authority}")]),
        });
        servers.insert(authority.to_owned(), Arc::clone(&server));
        server
    }

    /// The most recently used idle connection that is still alive.
    fn idle_link(&self, server: &Server) -> Option<Box<Link>> {
        let now = Instant::now();
        loop {
            let (mut link, since) = server.idle.lock().pop_back()?;
            if now.duration_since(since) < self.idle_timeout() && link.is_still_alive() {
                return Some(link);
            }
        }
    }

    async fn connect(&self, server: &Arc<Server>) -> Result<Box<Link>, UpstreamError> {
        let written = Arc::new(AtomicU64::new(0));
        let look = Arc::new(AtomicBool::new(false));
        let opening = async {
            let socket = TcpStream::connect(&server.authority).await.map_err(UpstreamError::Connect)?;
            socket.set_nodelay(true).map_err(UpstreamError::Connect)?;
            let open = OpenCount::new(&server.open);
            let socket = Counted { socket, written: Arc::clone(&written), look: Arc::clone(&look), open };
            let Some(options) = &server.tls else { return Ok(Wire::Plain(socket)) };
            let secured = self.tls.connect(options, tls::host_of(&server.authority), socket).await;
            secured.map(|socket| Wire::Tls(Box::new(socket))).map_err(UpstreamError::Tls)
        };
        let limit = Duration::from_secs_f64(self.config.connect_timeout_s);
        let socket = match tokio::time::timeout(limit, opening).await {
            Ok(connected) => connected?,
            Err(_elapsed) => return Err(UpstreamError::ConnectTimeout),
        };
        let (sender, driver) = http1::Builder::new()
            .max_buf_size(BUFFER_BYTES_MAX)
            .handshake(TokioIo::new(socket))
            .await
            .map_err(|_| UpstreamError::Unsent)?;
        Ok(Box::new(Link { sender, driver, written, look, quiet: Quiet::new(), server: Arc::downgrade(server) }))
    }

    async fn send(
        &self,
        mut link: Box<Link>,
        request: Request<Full<Bytes>>,
    ) -> Result<(Response<()>, Exchange), UpstreamError> {
        let response = match tokio::time::timeout(self.first_byte_timeout(), link.send(request)).await {
            Ok(answered) => answered?,
            Err(_elapsed) => return Err(UpstreamError::FirstByteTimeout),
        };
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return Err(UpstreamError::Switched);
        }
        let (parts, incoming) = response.into_parts();
        let length = incoming.size_hint().exact();
        Ok((Response::from_parts(parts, ()), Exchange { link: Some(link), incoming, length }))
    }
}

/// A connection to an engine and hyper's two ends of it. More than a kilobyte: passed around in a box.
struct Link {
    sender: SendRequest<Full<Bytes>>,
    driver: Connection<TokioIo<Wire>, Full<Bytes>>,
    written: Arc<AtomicU64>,
    /// Whether the socket asks the kernel itself.
    look: Arc<AtomicBool>,
    quiet: Quiet,
    /// Gone with the configuration that it belonged to: then this connection serves nobody after the present request.
    server: Weak<Server>,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Link").finish_non_exhaustive()
    }
}

impl Link {
    /// As `is_alive`, for a connection that has lain idle: also notices a close that tokio has not heard of yet.
    fn is_still_alive(&mut self) -> bool {
        self.look.store(true, Ordering::Relaxed);
        let is_alive = self.is_alive();
        self.look.store(false, Ordering::Relaxed);
        is_alive
    }

    /// Polls the connection once: one that the engine closed ends.
    fn is_alive(&mut self) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        Pin::new(&mut self.driver).poll(&mut cx).is_pending() && self.sender.is_ready()
    }

    async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, UpstreamError> {
        let before = self.written.load(Ordering::Relaxed);
        let mut response = pin!(self.sender.try_send_request(request));
        let driver = &mut self.driver;
        let quiet = &self.quiet;
        let result = std::future::poll_fn(|cx| {
            let inside = quiet.enter(cx.waker());
            let mut quiet_cx = Context::from_waker(inside.waker());
            for _ in 0..TURNS_MAX {
                let is_closed = Pin::new(&mut *driver).poll(&mut quiet_cx).is_ready();
                if let Poll::Ready(result) = response.as_mut().poll(&mut quiet_cx) {
                    return Poll::Ready(Some(result));
                }
                if is_closed {
                    return Poll::Ready(None);
                }
                if !inside.take_dropped() {
                    return Poll::Pending;
                }
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
        let is_sent = self.written.load(Ordering::Relaxed) > before;
        match result {
            Some(Ok(response)) => Ok(response),
            _ if !is_sent => Err(UpstreamError::Unsent),
            Some(Err(error)) => Err(UpstreamError::Broken(error.into_error())),
            None => Err(UpstreamError::NoAnswer),
        }
    }

    /// Puts the connection back for reuse, if it can take another request.
    fn put_back(mut self: Box<Self>) {
        let Some(server) = self.server.upgrade() else { return };
        if !self.is_alive() {
            return;
        }
        let mut idle = server.idle.lock();
        if idle.len() < server.idle_max {
            idle.push_back((self, Instant::now()));
        }
    }
}

/// The body of an engine's answer and the connection it comes from.
#[derive(Debug)]
pub(crate) struct Exchange {
    link: Option<Box<Link>>,
    incoming: Incoming,
    /// Of the body, where the engine announced it.
    length: Option<u64>,
}

impl Exchange {
    pub(crate) fn length(&self) -> Option<u64> {
        self.length
    }

    /// The next piece of the body: moves the connection on, then takes what it brought.
    pub(crate) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, UpstreamError>>> {
        let Some(link) = &mut self.link else { return Poll::Ready(None) };
        let inside = link.quiet.enter(cx.waker());
        let mut quiet_cx = Context::from_waker(inside.waker());
        for _ in 0..TURNS_MAX {
            let is_closed = Pin::new(&mut link.driver).poll(&mut quiet_cx).is_ready();
            if let Poll::Ready(frame) = Pin::new(&mut self.incoming).poll_frame(&mut quiet_cx) {
                return Poll::Ready(frame.map(|frame| frame.map_err(UpstreamError::Broken)));
            }
            if is_closed {
                return Poll::Ready(Some(Err(UpstreamError::NoAnswer)));
            }
            if !inside.take_dropped() {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// The next data of the body; `None` at its end.
    pub(crate) async fn next(&mut self) -> Option<Result<Bytes, UpstreamError>> {
        loop {
            match std::future::poll_fn(|cx| self.poll_frame(cx)).await? {
                Ok(frame) => {
                    let Ok(data) = frame.into_data() else { continue }; // trailers belong to the hop
                    return Some(Ok(data));
                }
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// The body has been read to its end: the connection may serve another request.
    pub(crate) fn done(&mut self) {
        if let Some(link) = self.link.take() {
            link.put_back();
        }
    }
}

/// Counts open connections.
#[derive(Debug)]
struct OpenCount(Gauge);

impl OpenCount {
    fn new(gauge: &Gauge) -> Self {
        gauge.add(1.0);
        Self(gauge.clone())
    }
}

impl Drop for OpenCount {
    fn drop(&mut self) {
        self.0.add(-1.0);
    }
}

/// A socket that counts what was written to it: whether a request has left us decides whether it may be sent again.
#[derive(Debug)]
struct Counted {
    socket: TcpStream,
    written: Arc<AtomicU64>,
    look: Arc<AtomicBool>,
    #[allow(dead_code, reason = "held for its drop")]
    open: OpenCount,
}

impl Counted {
    fn note(&self, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = &result {
            self.written.fetch_add(*bytes as u64, Ordering::Relaxed);
        }
        result
    }
}

impl Counted {
    /// Asks the kernel: tokio's answer is as old as the last time its thread waited for events.
    fn look(&self) -> Poll<io::Result<()>> {
        match SockRef::from(&self.socket).peek(&mut [MaybeUninit::uninit()]) {
            Ok(0) => Poll::Ready(Ok(())), // closed; the empty read says so
            Ok(_) => Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, "an answer that nobody asked for"))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

impl AsyncRead for Counted {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.socket).poll_read(cx, buffer);
        if result.is_pending() && self.look.load(Ordering::Relaxed) { self.look() } else { result }
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write(cx, bytes);
        self.note(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write_vectored(cx, slices);
        self.note(result)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

/// What HTTP is spoken over: the socket itself, or TLS on it.
enum Wire {
    Plain(Counted),
    Tls(Box<TlsStream<Counted>>),
}

impl AsyncRead for Wire {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_read(cx, buffer),
            Self::Tls(socket) => Pin::new(socket).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_write(cx, bytes),
            Self::Tls(socket) => Pin::new(socket).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_write_vectored(cx, slices),
            Self::Tls(socket) => Pin::new(socket).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_flush(cx),
            Self::Tls(socket) => Pin::new(socket).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(socket) => Pin::new(socket).poll_shutdown(cx),
            Self::Tls(socket) => Pin::new(socket).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;
    use crate::config::{MetricConfig, MetricKind};

    fn upstream() -> Upstream {
        let config = UpstreamConfig {
            connect_timeout_s: 2.0,
            first_byte_timeout_s: 10.0,
            idle_connections_per_server: 1,
            idle_timeout_s: 60.0,
        };
        let connections = MetricConfig {
            name: "warmfront_upstream_connections".into(),
            kind: MetricKind::Gauge,
            help: String::new(),
            labels: vec!["replica".into()],
            buckets: vec![],
        };
        Upstream::new(config, Arc::new(Metrics::new(&[connections], 1)))
    }

    /// On one thread without a pause, so that tokio has no chance to hear of the close.
    #[tokio::test]
    async fn a_close_that_tokio_has_not_heard_of_is_noticed() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let authority = listener.local_addr().unwrap().to_string();
        let engine = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            assert!(socket.read(&mut [0; 1024]).unwrap() > 0);
            socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").unwrap();
            socket
        });
        let upstream = upstream();
        let request = || Request::get("/").body(Full::default()).unwrap();
        let (_, mut exchange) = upstream.exchange(&authority, None, request).await.unwrap();
        let body = std::future::poll_fn(|cx| exchange.poll_frame(cx)).await.unwrap().unwrap();
        assert_eq!(body.into_data().unwrap(), "{}");
        exchange.done();
        let server = upstream.server(&authority, None);
        upstream.idle_link(&server).expect("it is alive").put_back();
        drop(engine.join().unwrap());
        let start = std::time::Instant::now();
        while let Some(link) = upstream.idle_link(&server) {
            assert!(start.elapsed() < Duration::from_secs(5), "the close is not noticed");
            link.put_back();
        }
    }
}
