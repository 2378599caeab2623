//! One task per replica that keeps its event stream: connect, receive, replay, apply.
//!
//! [`super::sequence`] decides, this module does. Messages of one replica are applied by its one task, so they stay in
//! order. Decoding and applying are CPU work of about a microsecond a block; a replay of ten thousand batches is seconds
//! of it. The tasks therefore run on a thread of their own (`runtime.rs`), where the operating system can take the
//! processor away from them in favour of streams, and yield to one another after [`SLICE_BYTES`].

use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Duration, Interval, MissedTickBehavior, interval_at};

use super::replay::{Answer, Replay, parse_live};
use super::sequence::{Action, Counts, Input, Phase, Position, Sequence};
use super::zmtp::{Kind, Socket, ZmtpError};
use crate::backoff::{Backoff, seconds};
use crate::clock::Clock;
use crate::config::KvConfig;
use crate::fleet::{EventSource, EventState};
use crate::meter::Meter;

/// Payload applied before other tasks get their turn; about a millisecond of work.
const SLICE_BYTES: usize = 64 * 1024;
/// A peer that answers heartbeats and was silent for two of these is gone.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// How long a connection attempt may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// First look for lost messages after a connection: the subscription may have reached the publisher after our replay.
const FIRST_CHECK: Duration = Duration::from_secs(1);

/// What one batch did to the index.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Applied {
    /// Wall time the engine wrote into the batch.
    pub written_s: f64,
    pub blocks_stored: u64,
    pub blocks_removed: u64,
    pub cleared: u64,
    pub unknown_parents: u64,
    /// Stores whose shape makes no sense.
    pub malformed: u64,
    /// Block size that the engine named, if the batch stored anything.
    pub block_size: Option<u32>,
}

/// Where the batches of one replica go.
pub trait Sink: Send + Sync {
    /// Applies one batch. The error says what is wrong with the bytes.
    fn apply(&self, payload: &[u8], now_s: f64) -> Result<Applied, String>;
    /// Drops all confirmed facts.
    fn forget(&self);
    /// Some batches are lost: keeps the facts, counts no copies.
    fn doubt(&self);
    /// Whether the facts may lag behind the engine or belong to a dead one.
    fn set_stale(&self, stale: bool);
    /// The last batch came so late.
    fn note_lag(&self, lag_s: f64);
}

/// What a subscription shares with the fleet.
#[derive(Clone)]
pub struct Watched {
    /// Replica id, for logs and metrics.
    pub replica: String,
    pub state: Arc<Mutex<EventState>>,
    /// Told when the state (not a counter) has changed.
    pub changed: Arc<Notify>,
    pub meter: Arc<dyn Meter>,
    /// Where the stream is.
    pub place: Place,
}

/// Where a stream is, `None` before its first batch. Held while a message is applied, which may yield in between:
/// whoever holds it sees the facts of exactly this position, and keeps the stream (and no other) waiting.
pub type Place = Arc<tokio::sync::Mutex<Option<Position>>>;

/// One replica's event stream; [`Subscription::run`] never returns, dropping it ends it.
pub struct Subscription {
    source: EventSource,
    config: KvConfig,
    clock: Clock,
    sink: Arc<dyn Sink>,
    watched: Watched,
    sequence: Sequence,
    replay: Running,
    counted: Counts,
    unknown_parents_in_row: u64,
    slice_bytes: usize,
}

enum Running {
    Idle,
    Opening(Pin<Box<dyn Future<Output = Result<Replay, ZmtpError>> + Send>>),
    Open(Replay),
}

impl Running {
    /// The next thing the replay brings, as an input. Safe to drop while it waits.
    async fn next(&mut self) -> Input {
        loop {
            let result = match self {
                Self::Idle => pending().await,
                Self::Opening(opening) => match opening.as_mut().await {
                    Ok(replay) => {
                        *self = Self::Open(replay);
                        continue;
                    }
                    Err(error) => Err(error),
                },
                Self::Open(replay) => replay.next().await,
            };
            return match result {
                Ok(Answer::Batch { number, payload }) => Input::Replayed { number, payload },
                Ok(Answer::End) => {
                    *self = Self::Idle;
                    Input::ReplayEnded
                }
                Err(error) => {
                    *self = Self::Idle;
                    Input::ReplayFailed(error.to_string())
                }
            };
        }
    }
}

impl Subscription {
    pub fn new(source: EventSource, config: KvConfig, clock: Clock, sink: Arc<dyn Sink>, watched: Watched) -> Self {
        let sequence = Sequence::new(source.replay.is_some());
        Self {
            source,
            config,
            clock,
            sink,
            watched,
            sequence,
            replay: Running::Idle,
            counted: Counts::default(),
            unknown_parents_in_row: 0,
            slice_bytes: 0,
        }
    }

    /// Goes on where a former process was, whose facts are in the index.
    #[must_use]
    pub async fn resumed(self, position: Position) -> Self {
        *self.watched.place.lock().await = Some(position);
        Self { sequence: Sequence::resume(self.source.replay.is_some(), position), ..self }
    }

    /// Keeps the stream for ever.
    pub async fn run(mut self) {
        let mut pause = Backoff::new(self.config.reconnect_delay_s, self.config.reconnect_delay_s_max);
        if self.sequence.position().is_none() {
            self.sink.set_stale(true);
        }
        self.publish(Some("connecting"));
        loop {
            let error = match connect(&self.source, self.config.message_bytes_max).await {
                Ok(socket) => {
                    pause.reset();
                    self.stay(socket).await
                }
                Err(error) => error,
            };
            self.replay = Running::Idle;
            self.take(Input::Disconnected(error.to_string())).await;
            tokio::time::sleep(pause.grow()).await;
        }
    }

    /// Works one connection until it breaks; returns why.
    async fn stay(&mut self, mut socket: Socket) -> ZmtpError {
        let interval = seconds(self.config.replay_check_interval_s);
        let mut check = ticks(FIRST_CHECK.min(interval), interval);
        let mut heartbeat = ticks(HEARTBEAT, HEARTBEAT);
        let mut pinged = false;
        self.take(Input::Connected).await;
        loop {
            let input = tokio::select! {
                message = socket.receive() => match message {
                    Ok(frames) => live_input(frames),
                    Err(error) => return error,
                },
                input = self.replay.next() => {
                    self.count_replay(&input);
                    input
                }
                _ = check.tick() => Input::Probe,
                _ = heartbeat.tick() => match beat(&mut socket, &mut pinged).await {
                    Ok(()) => continue,
                    Err(error) => return error,
                },
            };
            self.take(input).await;
        }
    }

    /// Feeds the machine and does what it says, including what follows from the batches themselves.
    async fn take(&mut self, input: Input) {
        let place = Arc::clone(&self.watched.place);
        let mut place = place.lock().await;
        let mut next = Some(input);
        while let Some(input) = next.take() {
            if let Input::Malformed(reason) = &input {
                self.count_malformed(reason);
            }
            let phase = self.sequence.phase();
            for action in self.sequence.take(input) {
                match action {
                    Action::Apply { payload, .. } => {
                        next = self.apply(&payload).or(next);
                        self.take_turns(payload.len()).await;
                    }
                    Action::Replay { from, again } => self.start_replay(from, again),
                    Action::Forget => {
                        self.unknown_parents_in_row = 0;
                        self.sink.forget();
                    }
                    Action::Doubt => {
                        self.unknown_parents_in_row = 0;
                        self.sink.doubt();
                    }
                    Action::Trust(trusted) => self.sink.set_stale(!trusted),
                }
            }
            *place = self.sequence.position();
            let changed = phase != self.sequence.phase();
            self.publish(changed.then(|| name(self.sequence.phase())));
        }
    }

    /// Applies one batch; returns what the machine has to hear about it.
    fn apply(&mut self, payload: &Bytes) -> Option<Input> {
        let applied = match self.sink.apply(payload, self.clock.now_s()) {
            Ok(applied) => applied,
            Err(reason) => return Some(Input::Malformed(format!("a batch could not be decoded: {reason}"))),
        };
        self.count_batch(&applied);
        self.unknown_parents_in_row =
            if applied.unknown_parents > 0 { self.unknown_parents_in_row + applied.unknown_parents } else { 0 };
        if self.unknown_parents_in_row <= self.config.unknown_parents_max {
            return None;
        }
        let blocks = std::mem::take(&mut self.unknown_parents_in_row);
        Some(Input::Distrust(format!("{blocks} blocks in a row had unknown parents")))
    }

    async fn take_turns(&mut self, bytes: usize) {
        self.slice_bytes += bytes;
        if self.slice_bytes >= SLICE_BYTES {
            self.slice_bytes = 0;
            tokio::task::yield_now().await;
        }
    }

    fn start_replay(&mut self, from: u64, again: bool) {
        let Some(endpoint) = self.source.replay.clone() else { return };
        let pause = if again { seconds(self.config.reconnect_delay_s) } else { Duration::ZERO };
        let (bytes_max, timeout) = (self.config.message_bytes_max, seconds(self.config.replay_timeout_s));
        self.replay = Running::Opening(Box::pin(async move {
            tokio::time::sleep(pause).await;
            Replay::start(&endpoint, from, bytes_max, timeout).await
        }));
    }

    fn count_batch(&self, applied: &Applied) {
        let (replica, meter) = (self.watched.replica.as_str(), &self.watched.meter);
        for (kind, blocks) in
            [("stored", applied.blocks_stored), ("removed", applied.blocks_removed), ("cleared", applied.cleared)]
        {
            if blocks > 0 {
                meter.add("warmfront_kv_events_total", &[replica, kind], blocks);
            }
        }
        if applied.unknown_parents > 0 {
            meter.add("warmfront_kv_unknown_parents_total", &[replica], applied.unknown_parents);
        }
        if applied.malformed > 0 {
            meter.add("warmfront_kv_malformed_total", &[replica], applied.malformed);
        }
        let mut state = self.watched.state.lock();
        state.batches += 1;
        state.malformed += applied.malformed;
        state.blocks_stored += applied.blocks_stored;
        state.blocks_removed += applied.blocks_removed;
        state.unknown_parents += applied.unknown_parents;
        state.block_size = applied.block_size.or(state.block_size);
        // Replayed batches are old by nature; the clocks of two machines differ, so a little less than zero is zero.
        if self.sequence.phase() == Phase::Live {
            let lag_s = (self.clock.wall_s() - applied.written_s).max(0.0);
            state.lag_s = Some(lag_s);
            self.sink.note_lag(lag_s);
            meter.set("warmfront_kv_event_lag_seconds", &[replica], lag_s);
        }
    }

    fn count_malformed(&self, reason: &str) {
        let count = {
            let mut state = self.watched.state.lock();
            state.malformed += 1;
            state.malformed
        };
        self.watched.meter.add("warmfront_kv_malformed_total", &[&self.watched.replica], 1);
        if count.is_power_of_two() {
            // A publisher that we cannot read sends thousands a second, all for the same reason.
            tracing::warn!(replica = self.watched.replica, reason, count, "a KV event message is malformed");
        }
    }

    fn count_replay(&self, input: &Input) {
        let result = match input {
            Input::ReplayEnded => "ended",
            Input::ReplayFailed(_) => "failed",
            _ => return,
        };
        self.watched.meter.add("warmfront_kv_replays_total", &[&self.watched.replica, result], 1);
    }

    /// Writes what the machine knows where the fleet reads it; `changed` is the name of a new state.
    fn publish(&mut self, changed: Option<&'static str>) {
        let counts = self.sequence.counts();
        {
            let mut state = self.watched.state.lock();
            state.gaps = counts.gaps;
            state.replays = counts.replays;
            state.restarts = counts.restarts;
            state.last_sequence = self.sequence.last();
            state.complete = self.sequence.complete();
            if state.reason.as_deref() != self.sequence.reason() {
                state.reason = self.sequence.reason().map(Into::into);
            }
            if let Some(name) = changed {
                state.state = name.into();
            }
        }
        let replica = self.watched.replica.as_str();
        let meter = &self.watched.meter;
        if counts != self.counted {
            meter.add("warmfront_kv_gaps_total", &[replica], counts.gaps - self.counted.gaps);
            meter.add("warmfront_kv_restarts_total", &[replica], counts.restarts - self.counted.restarts);
            self.counted = counts;
        }
        if let Some(name) = changed {
            for state in ["connecting", "catching_up", "live", "stale", "lossy"] {
                meter.set("warmfront_kv_state", &[replica, state], f64::from(u8::from(state == name)));
            }
            tracing::info!(replica, state = name, reason = self.sequence.reason(), "KV events");
            self.watched.changed.notify_one();
        }
    }
}

async fn connect(source: &EventSource, bytes_max: usize) -> Result<Socket, ZmtpError> {
    let mut socket = Socket::connect(&source.endpoint, Kind::Subscriber, bytes_max, CONNECT_TIMEOUT).await?;
    socket.subscribe(source.topic.as_bytes()).await?;
    Ok(socket)
}

fn name(phase: Phase) -> &'static str {
    match phase {
        Phase::Disconnected => "stale",
        Phase::CatchingUp => "catching_up",
        Phase::Live => "live",
        Phase::Lossy => "lossy",
    }
}

fn live_input(frames: Vec<Bytes>) -> Input {
    match parse_live(frames) {
        Some((number, payload)) => Input::Live { number, payload },
        None => Input::Malformed("a message is not topic, number, payload".into()),
    }
}

fn ticks(first: Duration, period: Duration) -> Interval {
    let period = period.max(Duration::from_millis(1));
    let mut ticks = interval_at(tokio::time::Instant::now() + first, period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Says that the peer is gone if it owes an answer to the last heartbeat.
async fn beat(socket: &mut Socket, pinged: &mut bool) -> Result<(), ZmtpError> {
    if !socket.has_heartbeats() {
        return Ok(());
    }
    if !socket.take_heard() && *pinged {
        return Err(ZmtpError::Timeout("the publisher".into()));
    }
    *pinged = true;
    socket.ping().await
}
