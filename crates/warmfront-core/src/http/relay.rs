//! An engine's answer on its way to the client: bytes unchanged, read along, ended properly.
//!
//! The body of the client's response polls the engine's connection itself, in the client's task. It is polled only while
//! the client's buffer has room, so a client that does not read holds back the engine instead of filling memory, and
//! dropping it (the client left) closes the engine's connection. When the engine dies half-way, or the process stops, a
//! stream ends with one error event in its protocol and without the end marker; any other body is cut, which the client
//! sees as an error.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use thiserror::Error;
use tokio::time::{Instant, Sleep};

use super::account::{Account, End};
use super::answer::{self, Shape};
use super::sse::{Kind, Observer};
use super::upstream::{Exchange, UpstreamError};
use super::verdict::kind_of;
use crate::clock::Clock;
use crate::error::{Face, ROUTER_OVERLOADED, UPSTREAM_UNREACHABLE};
use crate::mailbox::{Failure, InFlight, Outcome, PaceCell, Slot};
use crate::metrics::{Counter, Gauge, Histogram};

/// The body was cut because the engine's was.
#[derive(Debug, Error)]
#[error("the engine's answer ended early")]
pub struct Cut;

/// What the relay has to know about its request.
#[derive(Debug)]
pub(crate) struct Route {
    pub slot: Slot,
    pub replica: String,
    /// Slots tried in vain before this one, and this one.
    pub tried: Vec<Slot>,
    pub shape: Shape,
    pub request_id: String,
}

/// Where the bytes come from.
#[derive(Debug)]
pub(crate) struct Source {
    pub exchange: Exchange,
    /// What was read of the body already; empty: nothing.
    pub first: Bytes,
    /// Silence after which a stream's client gets a comment.
    pub keep_alive: Option<Duration>,
}

/// Sends a comment now and then while a stream is silent.
#[derive(Debug)]
struct KeepAlive {
    pause: Duration,
    timer: Pin<Box<Sleep>>,
    /// Something went to the client since the timer was set: it is set again instead of ringing.
    has_sent: bool,
}

/// An event that every client of a stream ignores.
const COMMENT: &[u8] = b": keep-alive\n\n";

/// See the module text.
#[derive(Debug)]
pub struct Relay {
    exchange: Exchange,
    first: Bytes,
    keep_alive: Option<Box<KeepAlive>>,
    /// Bytes of the body still to come, where the engine announced their number.
    remaining: Option<u64>,
    state: State,
    status: u16,
    observer: Observer,
    flight: InFlight,
    account: Account,
    route: Route,
    clock: Clock,
    pace: Arc<PaceCell>,
    gaps: Histogram,
    last_event_s: Option<f64>,
    sent_bytes: Counter,
    _open: Open,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Flowing,
    /// Everything has been handed on, or the error event has.
    Over,
}

/// Counts a stream as open until dropped.
#[derive(Debug)]
struct Open(Option<Gauge>);

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(streams) = &self.0 {
            streams.add(-1.0);
        }
    }
}

impl Relay {
    /// Takes over an answer whose header has come.
    pub(crate) fn new(
        Source { exchange, first, keep_alive }: Source,
        (status, headers): (u16, &HeaderMap),
        (flight, account, route): (InFlight, Account, Route),
        (clock, pace): (Clock, Arc<PaceCell>),
    ) -> Self {
        let kind = kind_of(headers);
        let metrics = account.metrics();
        let streams = (kind == Kind::Events).then(|| metrics.gauge("warmfront_streams", &[]));
        if let Some(streams) = &streams {
            streams.add(1.0);
        }
        let remaining = exchange.length();
        let keep_alive = keep_alive
            .filter(|_| kind == Kind::Events && remaining.is_none())
            .map(|pause| Box::new(KeepAlive::new(pause)));
        let mut relay = Self {
            exchange,
            first,
            keep_alive,
            remaining,
            state: State::Flowing,
            status,
            observer: Observer::new(kind),
            gaps: account.gaps(),
            sent_bytes: metrics.counter("warmfront_relayed_bytes_total", &["down"]),
            flight,
            account,
            route,
            clock,
            pace,
            last_event_s: None,
            _open: Open(streams),
        };
        if remaining == Some(0) {
            relay.finish(); // no body: nobody will poll it
        }
        relay
    }

    fn note(&mut self, bytes: &[u8]) {
        self.sent_bytes.inc(bytes.len() as u64);
        if let Some(remaining) = &mut self.remaining {
            *remaining = remaining.saturating_sub(bytes.len() as u64);
        }
        let seen = self.observer.chunk(bytes);
        if !seen.first_token && seen.events == 0 {
            return;
        }
        let now_s = self.clock.now_s();
        if seen.first_token && self.status < 400 {
            self.flight.first_token(now_s, self.route.slot);
            self.account.first_token(now_s);
        }
        if seen.events > 0 {
            if let Some(last_s) = self.last_event_s {
                self.pace.note(seen.events, now_s - last_s);
                self.gaps.observe_many((now_s - last_s) / f64::from(seen.events), u64::from(seen.events));
            }
            self.last_event_s = Some(now_s);
        }
    }

    /// Looks at a piece on its way out.
    fn pass(&mut self, data: Bytes) -> Frame<Bytes> {
        self.note(&data);
        if let Some(keep_alive) = &mut self.keep_alive {
            keep_alive.has_sent = true;
        }
        if self.remaining == Some(0) {
            self.finish(); // hyper stops polling at the announced length
        }
        Frame::data(data)
    }

    /// A comment for a client that has heard nothing for long, between two events.
    fn poll_comment(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        let Some(keep_alive) = &mut self.keep_alive else { return Poll::Pending };
        while keep_alive.poll(cx).is_ready() {
            if !self.observer.is_inside_event() {
                return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(COMMENT)))));
            }
        }
        Poll::Pending
    }

    /// The answer has come in full.
    fn finish(&mut self) {
        self.state = State::Over;
        self.exchange.done();
        self.settle();
    }

    fn settle(&mut self) {
        let usage = self.observer.usage();
        let chunks = self.observer.events().saturating_sub(1);
        self.flight.ends(Outcome::Finished { slot: self.route.slot, status: self.status, usage, chunks });
        self.account.ends(if self.status < 400 { End::Finished } else { End::EngineError });
    }

    /// The engine died half-way.
    fn fail(&mut self, error: &UpstreamError) -> Option<Result<Frame<Bytes>, Cut>> {
        self.state = State::Over;
        if self.observer.is_done() {
            self.settle(); // only the framing behind the end marker was missing
            return None;
        }
        let replica = self.route.replica.as_str();
        tracing::warn!(request_id = self.route.request_id, replica, "the answer broke off: {error}");
        self.account.metrics().inc("warmfront_upstream_failures_total", &[replica, "midstream"], 1);
        self.account.ends(End::Failed);
        let failure = Failure { error: "midstream".to_owned(), accepted: true, ..Failure::default() };
        self.flight.ends(Outcome::Failed { failure, tried: self.route.tried.clone() });
        Some(self.last_words(UPSTREAM_UNREACHABLE, "The engine stopped answering."))
    }

    /// The process stops and waits no longer.
    pub(crate) fn cut(&mut self) -> Option<Result<Frame<Bytes>, Cut>> {
        if self.state == State::Over {
            return None;
        }
        self.state = State::Over;
        if self.observer.is_done() {
            self.settle();
            return None;
        }
        self.account.ends(End::Cut); // the ledger hears of it as of a client that left
        Some(self.last_words(ROUTER_OVERLOADED, "The router is shutting down."))
    }

    /// Tells the client that no more comes: an event where the protocol has one, else a body without its end.
    fn last_words(&self, face: Face, message: &str) -> Result<Frame<Bytes>, Cut> {
        if !matches!(self.observer.kind(), Kind::Events) || self.remaining.is_some() {
            return Err(Cut);
        }
        let gap = if self.observer.is_inside_event() { "\n\n" } else { "" };
        let event = answer::error_event(self.route.shape, face, message, self.observer.events());
        Ok(Frame::data(format!("{gap}{event}").into()))
    }
}

impl KeepAlive {
    fn new(pause: Duration) -> Self {
        let timer = Box::pin(tokio::time::sleep(pause));
        Self { pause, timer, has_sent: false }
    }

    /// Ready when the client has heard nothing for a pause.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            std::task::ready!(self.timer.as_mut().poll(cx));
            self.timer.as_mut().reset(Instant::now() + self.pause);
            if !std::mem::take(&mut self.has_sent) {
                return Poll::Ready(());
            }
        }
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        let relay = &mut *self;
        if relay.state == State::Over {
            return Poll::Ready(None);
        }
        if !relay.first.is_empty() {
            let first = std::mem::take(&mut relay.first);
            return Poll::Ready(Some(Ok(relay.pass(first))));
        }
        loop {
            match relay.exchange.poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    let Ok(data) = frame.into_data() else { continue }; // trailers belong to the hop
                    return Poll::Ready(Some(Ok(relay.pass(data))));
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(relay.fail(&error)),
                Poll::Ready(None) => {
                    relay.finish();
                    return Poll::Ready(None);
                }
                Poll::Pending => return relay.poll_comment(cx),
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        self.remaining.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // A client that closes right behind the end marker has got everything.
        if self.state == State::Flowing && self.observer.is_done() {
            self.settle();
        }
    }
}
