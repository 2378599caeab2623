//! A client's socket with the limits of our patience built in.
//!
//! Between requests a client may be silent for the idle time-out; once it has begun a header it has the header time-out
//! for all of it; and it may not refuse our bytes for longer than the write time-out. While a request is being served
//! there is no limit on silence here: reading a body has its own. A time-out is an I/O error, so the connection and
//! everything that hangs on it is dropped. A connection that we close lingers: what the client is still sending is read
//! and thrown away for a moment, since closing on unread bytes resets the connection and may destroy an answer (such as
//! 413) before the client has read it. Timers are armed only while the socket has nothing to do, and are not moved
//! when a deadline moves: a timer that rings early is armed again.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::precedence::{GivesWay, Place};
use super::worded::Worded;
use crate::config::FrontConfig;

/// How long a closed connection lingers, and for how many bytes.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES_MAX: usize = 4 * 1024 * 1024;

/// What a connection is at. Shared by its socket and the answer.
#[derive(Debug, Default)]
pub(super) struct Busy {
    /// It is serving a request right now.
    is_serving: AtomicBool,
    /// Something of an answer of ours may still have to be written.
    has_answer: AtomicBool,
    /// Its answer has to end now.
    is_cut: AtomicBool,
    place: Arc<Place>,
}

impl Busy {
    pub(super) fn new(place: &Arc<Place>) -> Self {
        Self { place: Arc::clone(place), ..Self::default() }
    }

    /// Ends the answer that is being given with the next poll.
    pub(super) fn cut(&self) {
        self.is_cut.store(true, Ordering::Relaxed);
    }
}

/// Marks the connection as serving until dropped.
#[derive(Debug)]
pub(super) struct Serving {
    busy: Arc<Busy>,
    /// Once a part of the answer has gone out.
    gives_way: Option<GivesWay>,
}

impl Serving {
    pub(super) fn new(busy: &Arc<Busy>) -> Self {
        busy.is_serving.store(true, Ordering::Relaxed);
        busy.has_answer.store(true, Ordering::Relaxed);
        Self { busy: Arc::clone(busy), gives_way: None }
    }

    /// A part of the answer goes out: from now on requests without one go first.
    pub(super) fn passes(&mut self) {
        if self.gives_way.is_none() {
            self.gives_way = Some(self.busy.place.give_way());
        }
    }

    /// The answer has to end now.
    pub(super) fn is_cut(&self) -> bool {
        self.busy.is_cut.load(Ordering::Relaxed)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.busy.is_serving.store(false, Ordering::Relaxed);
    }
}

/// How long a client may keep us waiting.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) header: Duration,
    pub(super) idle: Duration,
    pub(super) write: Duration,
}

impl Limits {
    pub(super) fn of(config: &FrontConfig) -> Self {
        Self {
            header: Duration::from_secs_f64(config.header_timeout_s),
            idle: Duration::from_secs_f64(config.idle_timeout_s),
            write: Duration::from_secs_f64(config.write_timeout_s),
        }
    }
}

/// The socket. See the module text.
#[derive(Debug)]
pub(super) struct Patient<S> {
    socket: S,
    busy: Arc<Busy>,
    limits: Limits,
    /// Until when the client must have sent more; `None`: not waiting for it.
    read_until: Option<Instant>,
    /// The client has sent a part of a header.
    in_header: bool,
    read_timer: Option<Pin<Box<Sleep>>>,
    write_until: Option<Instant>,
    write_timer: Option<Pin<Box<Sleep>>>,
    lingering: Option<Lingering>,
    /// Written in place of an answer that is none of ours.
    worded: Option<Worded>,
}

/// Our half is closed; the client may still be sending.
#[derive(Debug)]
struct Lingering {
    until: Instant,
    bytes: usize,
}

impl<S> Patient<S> {
    pub(super) fn new(socket: S, busy: Arc<Busy>, limits: Limits) -> Self {
        Self {
            socket,
            busy,
            limits,
            read_until: None,
            in_header: false,
            read_timer: None,
            write_until: None,
            write_timer: None,
            lingering: None,
            worded: None,
        }
    }

    /// Nothing came: rings when the client has been silent too long.
    fn wait_for_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.busy.is_serving.load(Ordering::Relaxed) {
            self.read_until = None;
            self.in_header = false;
            return Poll::Pending;
        }
        let limit = if self.in_header { self.limits.header } else { self.limits.idle };
        let until = *self.read_until.get_or_insert_with(|| Instant::now() + limit);
        rings(&mut self.read_timer, until, cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }

    fn note_read(&mut self) {
        if self.busy.is_serving.load(Ordering::Relaxed) {
            self.in_header = false;
            self.read_until = None;
        } else if !self.in_header {
            self.in_header = true;
            self.read_until = None; // the header's time starts with its first byte
        }
    }

    /// An answer for which our code was never asked.
    fn is_not_ours(&self) -> bool {
        !self.busy.has_answer.load(Ordering::Relaxed)
    }

    fn note_write<T>(&mut self, result: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.write_until = None;
            return result;
        }
        let until = *self.write_until.get_or_insert_with(|| Instant::now() + self.limits.write);
        rings(&mut self.write_timer, until, cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Ready once `until` has passed. The timer may be set to an earlier time from before; then it is set again.
fn rings(timer: &mut Option<Pin<Box<Sleep>>>, until: Instant, cx: &mut Context<'_>) -> Poll<()> {
    let timer = timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
    if timer.deadline() > until {
        timer.as_mut().reset(until);
    }
    while timer.as_mut().poll(cx).is_ready() {
        if Instant::now() >= until {
            return Poll::Ready(());
        }
        timer.as_mut().reset(until);
    }
    Poll::Pending
}

/// Writes all of an answer.
fn instead<S: AsyncWrite>(mut socket: Pin<&mut S>, cx: &mut Context<'_>, worded: &mut Worded) -> Poll<io::Result<()>> {
    while !worded.rest().is_empty() {
        match std::task::ready!(socket.as_mut().poll_write(cx, worded.rest()))? {
            0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
            bytes => worded.wrote(bytes),
        }
    }
    Poll::Ready(Ok(()))
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.socket).poll_read(cx, buffer);
        if result.is_pending() {
            return self.wait_for_read(cx);
        }
        self.note_read();
        result
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.worded.is_none() && self.is_not_ours() {
            self.worded = Worded::instead_of(bytes);
        }
        let Self { socket, worded, .. } = &mut *self;
        let result = match worded {
            Some(worded) => instead(Pin::new(socket), cx, worded).map_ok(|()| bytes.len()),
            None => Pin::new(socket).poll_write(cx, bytes),
        };
        self.note_write(result, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.socket).poll_write_vectored(cx, slices);
        self.note_write(result, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    /// The wait for the next request begins here too: hyper has asked to read while the answer was still being made, and
    /// does not ask again before something comes. Whenever an answer ends it flushes.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        std::task::ready!(Pin::new(&mut self.socket).poll_flush(cx))?;
        if !self.busy.is_serving.load(Ordering::Relaxed) {
            self.busy.has_answer.store(false, Ordering::Relaxed);
        }
        match self.wait_for_read(cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) | Poll::Pending => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.lingering.is_none() {
            std::task::ready!(Pin::new(&mut self.socket).poll_shutdown(cx))?;
            self.lingering = Some(Lingering { until: Instant::now() + LINGER, bytes: 0 });
        }
        let Self { socket, read_timer, lingering: Some(lingering), .. } = &mut *self else { unreachable!("set above") };
        loop {
            let mut scratch = [0; 4096];
            let mut buffer = ReadBuf::new(&mut scratch);
            match Pin::new(&mut *socket).poll_read(cx, &mut buffer) {
                Poll::Pending => return rings(read_timer, lingering.until, cx).map(Ok),
                Poll::Ready(Err(_)) => return Poll::Ready(Ok(())), // the client has gone
                Poll::Ready(Ok(())) => lingering.bytes += buffer.filled().len(),
            }
            if buffer.filled().is_empty() || lingering.bytes >= LINGER_BYTES_MAX {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    const LIMITS: Limits =
        Limits { header: Duration::from_secs(10), idle: Duration::from_secs(75), write: Duration::from_secs(120) };

    async fn read_fails_after(patient: &mut Patient<tokio::io::DuplexStream>) -> (io::ErrorKind, Duration) {
        let start = Instant::now();
        let mut buffer = [0; 16];
        loop {
            if let Err(error) = patient.read(&mut buffer).await {
                return (error.kind(), start.elapsed());
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_client_is_dropped_after_the_idle_timeout() {
        let (socket, _client) = duplex(64);
        let mut patient = Patient::new(socket, Arc::default(), LIMITS);
        let (kind, after) = read_fails_after(&mut patient).await;
        assert_eq!((kind, after.as_secs()), (io::ErrorKind::TimedOut, 75));
    }

    #[tokio::test(start_paused = true)]
    async fn a_header_that_trickles_has_one_deadline() {
        let (socket, mut client) = duplex(64);
        let mut patient = Patient::new(socket, Arc::default(), LIMITS);
        let trickle = tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_secs(3)).await;
                if client.write_all(b"x").await.is_err() {
                    return;
                }
            }
        });
        let (kind, after) = read_fails_after(&mut patient).await;
        assert_eq!((kind, after.as_secs()), (io::ErrorKind::TimedOut, 13));
        trickle.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn there_is_no_limit_while_a_request_is_served() {
        let (socket, _client) = duplex(64);
        let busy = Arc::default();
        let mut patient = Patient::new(socket, Arc::clone(&busy), LIMITS);
        let serving = Serving::new(&busy);
        let mut buffer = [0; 16];
        let waited = tokio::time::timeout(Duration::from_secs(1000), patient.read(&mut buffer)).await;
        assert!(waited.is_err(), "still waiting");
        drop(serving);
        assert_eq!(read_fails_after(&mut patient).await.1.as_secs(), 75);
    }

    #[tokio::test(start_paused = true)]
    async fn a_read_that_was_begun_while_serving_fails_when_the_client_is_idle_afterwards() {
        let (socket, _client) = duplex(64);
        let busy = Arc::default();
        let mut patient = Patient::new(socket, Arc::clone(&busy), LIMITS);
        let serving = Serving::new(&busy);
        let mut buffer = [0; 16];
        let mut read = ReadBuf::new(&mut buffer);
        let polled = std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut patient).poll_read(cx, &mut read))).await;
        assert!(polled.is_pending());
        drop(serving);
        let start = Instant::now();
        let failed = std::future::poll_fn(|cx| match Pin::new(&mut patient).poll_flush(cx) {
            Poll::Ready(Ok(())) => Poll::Pending, // armed: it wakes us by itself
            flushed => flushed,
        });
        assert_eq!(failed.await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(start.elapsed().as_secs(), 75);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_nothing_is_dropped_after_the_write_timeout() {
        let (socket, mut client) = duplex(4);
        let mut patient = Patient::new(socket, Arc::default(), LIMITS);
        patient.write_all(b"1234").await.unwrap();
        let start = Instant::now();
        let reader = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_secs(100)).await;
            client.read_exact(&mut [0; 2]).await.unwrap();
            client
        });
        let error = patient.write_all(b"5678").await.unwrap_err();
        assert_eq!((error.kind(), start.elapsed().as_secs()), (io::ErrorKind::TimedOut, 220));
        drop(reader.await.unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_closed_connection_lingers_for_what_is_still_being_sent() {
        let (socket, mut client) = duplex(64);
        let mut patient = Patient::new(socket, Arc::default(), LIMITS);
        let start = Instant::now();
        let closing = tokio::spawn(async move { patient.shutdown().await });
        client.write_all(&[0; 1000]).await.unwrap();
        assert_eq!(client.read(&mut [0; 8]).await.unwrap(), 0, "our half is closed at once");
        closing.await.unwrap().unwrap();
        assert_eq!(start.elapsed(), LINGER);
    }
}
