//! An engine's answer on its way to the client: bytes unchanged, read along, ended properly.
//!
//! The body of the client's response polls the engine's connection itself, in the client's task. It is polled only while
//! the client's buffer has room, so a client that does not read holds back the engine instead of filling memory, and
//! dropping it (the client left) closes the engine's connection. When the engine dies half-way, a stream ends with one
//! error event in its protocol and without the end marker; any other body is cut, which the client sees as an error.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http_body::{Body, Frame, SizeHint};
use thiserror::Error;

use super::account::{Account, End};
use super::answer::{self, Shape};
use super::sse::{Kind, Observer};
use super::upstream::{Exchange, UpstreamError};
use crate::clock::Clock;
use crate::error::UPSTREAM_UNREACHABLE;
use crate::mailbox::{InFlight, Outcome, PaceCell, Slot};
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

/// See the module text.
#[derive(Debug)]
pub struct Relay {
    exchange: Exchange,
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
        exchange: Exchange,
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
        let mut relay = Self {
            exchange,
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
        if seen.first_token {
            self.flight.first_token(now_s, self.route.slot);
            if self.status < 400 {
                self.account.first_token(now_s);
            }
        }
        if seen.events > 0 {
            if let Some(last_s) = self.last_event_s {
                self.pace.note(seen.events, now_s - last_s);
                self.gaps.observe_many((now_s - last_s) / f64::from(seen.events), u64::from(seen.events));
            }
            self.last_event_s = Some(now_s);
        }
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
        let replica = self.route.replica.as_str();
        tracing::warn!(request_id = self.route.request_id, replica, "the answer broke off: {error}");
        self.account.metrics().inc("warmfront_upstream_failures_total", &[replica, "midstream"], 1);
        self.account.ends(End::Failed);
        self.flight.ends(Outcome::Failed { error: "midstream".to_owned(), tried: self.route.tried.clone() });
        if self.observer.is_done() {
            self.settle(); // only the framing behind the end marker was missing
            return None;
        }
        if !matches!(self.observer.kind(), Kind::Events) || self.remaining.is_some() {
            return Some(Err(Cut));
        }
        let gap = if self.observer.is_inside_event() { "\n\n" } else { "" };
        let event = answer::error_event(self.route.shape, UPSTREAM_UNREACHABLE, "The engine stopped answering.");
        Some(Ok(Frame::data(format!("{gap}{event}").into())))
    }
}

/// What the observer may look for in a body with these headers.
fn kind_of(headers: &HeaderMap) -> Kind {
    if headers.contains_key(CONTENT_ENCODING) {
        return Kind::Opaque;
    }
    let content_type = headers.get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    if content_type.starts_with(b"text/event-stream") {
        Kind::Events
    } else if content_type.starts_with(b"application/json") {
        Kind::Json
    } else {
        Kind::Opaque
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
        loop {
            match std::task::ready!(relay.exchange.poll_frame(cx)) {
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { continue }; // trailers belong to the hop
                    relay.note(&data);
                    if relay.remaining == Some(0) {
                        relay.finish(); // hyper stops polling at the announced length
                    }
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Some(Err(error)) => return Poll::Ready(relay.fail(&error)),
                None => {
                    relay.finish();
                    return Poll::Ready(None);
                }
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        self.exchange.size_hint()
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
