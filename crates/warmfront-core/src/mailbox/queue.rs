//! The queues themselves: events towards the router, decisions back to the requests that wait.
//!
//! Many threads push, one thread (the deciding thread) receives. `receive` sleeps on a condition variable and is woken by
//! the push itself; while it sleeps it also keeps the time for `Tick` and `Paced`, so no timer thread exists. There is no
//! buffer of commands: a command is handed straight to the request that waits for it, and what one would get wrong is the
//! bound: decisions that requests have not picked up yet are counted, and the deciding thread waits beyond the limit.
//!
//! While a [`Mailbox::carry`] runs on the requests' runtime, wake-ups cross between the threads once a batch instead of
//! once an event: a push asks the carrier to ring, and the carrier's turn comes after the tasks that are ready now; a
//! batch of commands wakes the carrier, which wakes the requests from their own thread. Without a carrier each wakes its
//! receiver itself. How requests fare that have their decision wakes nobody while none waits for one: it lies in the
//! queue until the router looks next, which is before it decides anything.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};
use thiserror::Error;
use tokio::sync::{Notify, oneshot};

use super::pace::PaceBook;
use super::{
    Choice, Command, Event, PaceCell, RequestFacts, RequestId, Slot, Standing, decode_commands, encode_events,
};
use crate::clock::Clock;
use crate::config::QueueConfig;
use crate::error::{CoreError, Face};
use crate::metrics::{Gauge, Histogram, Metrics};
use std::sync::Arc;

/// Events that may wait for the next one that is urgent, so that a decision never has a crowd before it.
pub(super) const PATIENT_EVENTS_MAX: usize = 32;

/// What the router decided for one request.
#[derive(Clone, Debug, PartialEq)]
pub enum Decision {
    Dispatch {
        choices: Vec<Choice>,
        reason: String,
    },
    Shed {
        face: Face,
        retry_after_s: Option<f64>,
    },
    /// Nobody else takes it: what the last attempt left is the answer.
    Deliver,
}

/// Replicas that are not in full service, by pool; pools without any are absent.
pub type Standings = BTreeMap<String, Vec<Standing>>;

/// The router's answer to a question of the admin API: JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub body: Bytes,
}

/// The event queue has no room, or the router has stopped.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the event queue is full")]
pub struct Full;

/// What [`Mailbox::receive`] brings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received {
    /// An encoded batch, `[[tag, ...], ...]`.
    Events(Vec<u8>),
    /// Nothing happened for as long as the caller was ready to wait.
    Nothing,
    /// The mailbox is closed and everything in it has been received.
    Closed,
}

/// Both queues. See the module text.
#[derive(Debug)]
pub struct Mailbox {
    clock: Clock,
    limits: QueueConfig,
    queue: Mutex<Queue>,
    filled: Condvar,
    waiting: Mutex<Waiting>,
    picked_up: Condvar,
    /// There is something for the carrier to do.
    errand: Notify,
    /// The same, for those who should let the carrier go first.
    has_errand: AtomicBool,
    pace: PaceBook,
    standings: Mutex<Standings>,
    /// Requests that have entered and not ended: while there are any, time is told.
    in_flight: AtomicUsize,
    last_id: AtomicU64,
    event_depth: Gauge,
    command_depth: Gauge,
    decision_seconds: Histogram,
}

#[derive(Debug)]
struct Queue {
    events: VecDeque<Event>,
    closed: bool,
    /// The deciding thread waits, and nobody has been asked to wake it.
    is_asleep: bool,
    has_carrier: bool,
    /// When `Tick` and `Paced` are due again.
    next_tick_s: f64,
    /// When the last batch was handed out; `None` once its commands have come back.
    handed_out_s: Option<f64>,
}

#[derive(Debug, Default)]
struct Waiting {
    decisions: HashMap<RequestId, oneshot::Sender<Decision>>,
    answers: HashMap<RequestId, oneshot::Sender<Answer>>,
    /// Decisions on their way with the carrier.
    carried: Vec<(RequestId, oneshot::Sender<Decision>, Decision)>,
    has_carrier: bool,
    /// Decisions sent whose request has not picked them up.
    undelivered: usize,
    closed: bool,
}

impl Mailbox {
    #[must_use]
    pub fn new(clock: Clock, limits: QueueConfig, metrics: &Metrics) -> Self {
        let queue = Queue {
            events: VecDeque::new(),
            closed: false,
            is_asleep: false,
            has_carrier: false,
            next_tick_s: clock.now_s() + limits.tick_interval_s,
            handed_out_s: None,
        };
        Self {
            clock,
            limits,
            queue: Mutex::new(queue),
            filled: Condvar::new(),
            waiting: Mutex::new(Waiting::default()),
            picked_up: Condvar::new(),
            errand: Notify::new(),
            has_errand: AtomicBool::new(false),
            pace: PaceBook::default(),
            standings: Mutex::default(),
            in_flight: AtomicUsize::new(0),
            last_id: AtomicU64::new(0),
            event_depth: metrics.gauge("warmfront_event_queue_depth", &[]),
            command_depth: metrics.gauge("warmfront_command_queue_depth", &[]),
            decision_seconds: metrics.histogram("warmfront_decision_duration_seconds", &[]),
        }
    }

    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// A number for a new request; from 1, so that 0 never names one.
    pub fn next_id(&self) -> RequestId {
        self.last_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Asks the router for a decision: pushes `Arrived`. Requests go through [`super::InFlight`], which also reports
    /// how they end.
    pub fn decide(&self, facts: RequestFacts) -> Result<oneshot::Receiver<Decision>, Full> {
        let id = facts.id;
        let receiver = self.wait_for_decision(id).ok_or(Full)?;
        let queue = self.queue.lock();
        if queue.closed || queue.events.len() >= self.limits.events_max {
            drop(queue);
            self.forget(id);
            return Err(Full);
        }
        self.put(queue, Event::Arrived(facts));
        Ok(receiver)
    }

    /// Runs errands between the two threads until dropped. For the runtime that the requests run on.
    pub async fn carry(&self) {
        let _carrier = Carrier::new(self);
        loop {
            self.errand.notified().await;
            self.has_errand.store(false, Ordering::Relaxed); // before the work: what comes meanwhile is another errand
            self.filled.notify_one();
            self.waiting.lock().hand_over();
        }
    }

    fn send_carrier(&self) {
        self.has_errand.store(true, Ordering::Relaxed);
        self.errand.notify_one();
    }

    /// The carrier has something to do: a request waits for its decision, or the router for a request.
    pub(crate) fn has_errand(&self) -> bool {
        self.has_errand.load(Ordering::Relaxed)
    }

    /// Registers `id` for one more decision; `None` once the mailbox is closed. Call before the event that asks for it.
    pub(super) fn wait_for_decision(&self, id: RequestId) -> Option<oneshot::Receiver<Decision>> {
        let (sender, receiver) = oneshot::channel();
        let mut waiting = self.waiting.lock();
        if waiting.closed {
            return None;
        }
        waiting.decisions.insert(id, sender);
        Some(receiver)
    }

    /// The request of this id waits no more. Gives back a decision that was on its way to it.
    pub(super) fn forget(&self, id: RequestId) -> Option<Decision> {
        let mut waiting = self.waiting.lock();
        waiting.decisions.remove(&id);
        let row = waiting.carried.iter().position(|(carried, ..)| *carried == id)?;
        Some(waiting.carried.swap_remove(row).2)
    }

    /// The request has its decision in hand (or dropped it unseen).
    pub(super) fn delivered(&self) {
        let mut waiting = self.waiting.lock();
        waiting.undelivered = waiting.undelivered.saturating_sub(1);
        let has_room = waiting.undelivered < self.limits.commands_max;
        drop(waiting);
        if has_room {
            self.picked_up.notify_one();
        }
    }

    /// Asks the router something for the admin API: pushes `Asked`. The receiver fails when the mailbox closes.
    pub fn ask(
        &self,
        question: &str,
        request: Option<RequestFacts>,
        payload: Bytes,
    ) -> Result<oneshot::Receiver<Answer>, Full> {
        let (sender, receiver) = oneshot::channel();
        let id = request.as_ref().map_or_else(|| self.next_id(), |facts| facts.id);
        {
            let mut waiting = self.waiting.lock();
            if waiting.closed || waiting.answers.len() >= self.limits.batch_max {
                return Err(Full);
            }
            waiting.answers.insert(id, sender);
        }
        self.push(Event::Asked { id, time_s: self.clock.now_s(), question: question.to_owned(), request, payload });
        Ok(receiver)
    }

    pub(super) fn entered(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn left(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    /// What the router last said of replicas that are not in full service.
    pub fn standings(&self) -> Standings {
        self.standings.lock().clone()
    }

    /// Puts an event in the queue. Never blocks and always takes it: ends of requests are bounded by the requests in
    /// flight, fleet and configuration changes by their senders.
    pub fn push(&self, event: Event) {
        self.put(self.queue.lock(), event);
    }

    fn put(&self, mut queue: MutexGuard<'_, Queue>, event: Event) {
        let is_urgent = is_urgent(&event) || queue.events.len() >= PATIENT_EVENTS_MAX || self.has_undecided();
        queue.events.push_back(event);
        if !is_urgent {
            return; // it is there when the router looks next: before any decision, and with the next tick
        }
        let (was_asleep, has_carrier) = (std::mem::take(&mut queue.is_asleep), queue.has_carrier);
        drop(queue);
        if was_asleep && has_carrier {
            self.send_carrier();
        } else if was_asleep {
            self.filled.notify_one();
        } // otherwise it looks before it sleeps
    }

    /// Where streams of this replica note the gaps between their tokens.
    pub fn pace(&self, pool: &str, slot: Slot) -> Arc<PaceCell> {
        self.pace.cell(pool, slot)
    }

    /// Waits for events, at most `wait`, and takes up to `queues.batch_max` of them.
    ///
    /// For the deciding thread alone, called without the GIL.
    pub fn receive(&self, wait: Duration) -> Received {
        let deadline_s = self.clock.now_s() + wait.as_secs_f64();
        let mut queue = self.queue.lock();
        loop {
            let now_s = self.clock.now_s();
            if now_s >= queue.next_tick_s {
                queue.next_tick_s = now_s + self.limits.tick_interval_s;
                self.tell_time(&mut queue, now_s);
            }
            if !queue.events.is_empty() {
                let count = queue.events.len().min(self.limits.batch_max);
                let batch: Vec<Event> = queue.events.drain(..count).collect();
                self.event_depth.set(queue.events.len() as f64);
                queue.handed_out_s = Some(now_s);
                drop(queue);
                return Received::Events(encode_events(&batch));
            }
            if queue.closed {
                return Received::Closed;
            }
            let pause_s = deadline_s.min(queue.next_tick_s) - now_s;
            if now_s >= deadline_s {
                return Received::Nothing;
            }
            queue.is_asleep = true;
            self.filled.wait_for(&mut queue, Duration::from_secs_f64(pause_s.max(0.0)));
            queue.is_asleep = false;
        }
    }

    /// Appends `Paced` if streams moved, and `Tick` if some request is in flight: a silent engine makes no events.
    fn tell_time(&self, queue: &mut Queue, time_s: f64) {
        queue.events.extend(self.pace.flush(time_s));
        if self.in_flight.load(Ordering::Relaxed) > 0 || self.has_undecided() {
            queue.events.push_back(Event::Tick { time_s });
        }
    }

    /// Takes a batch of commands and wakes the requests they are for. Waits, without the GIL, while more than
    /// `queues.commands_max` decisions have not been picked up.
    ///
    /// A command for a request that is gone is no error: its client left while the router decided.
    pub fn command(&self, bytes: &[u8]) -> Result<(), CoreError> {
        let commands = decode_commands(bytes)?;
        if let Some(handed_out_s) = self.queue.lock().handed_out_s.take() {
            self.decision_seconds.observe(self.clock.now_s() - handed_out_s);
        }
        let mut waiting = self.waiting.lock();
        for command in commands {
            while waiting.undelivered >= self.limits.commands_max && !waiting.closed {
                self.send_carrier();
                self.picked_up.wait(&mut waiting);
            }
            match command {
                Command::Dispatch { id, choices, reason } => {
                    waiting.deliver(id, Decision::Dispatch { choices, reason });
                }
                Command::Shed { id, code, retry_after_s } => {
                    waiting.deliver(id, Decision::Shed { face: Face::by_code(&code), retry_after_s });
                }
                Command::Deliver { id } => waiting.deliver(id, Decision::Deliver),
                Command::Standing { pool, rows } => {
                    let mut standings = self.standings.lock();
                    if rows.is_empty() {
                        standings.remove(&pool);
                    } else {
                        standings.insert(pool, rows);
                    }
                }
                Command::Answered { id, status, body } => {
                    if let Some(sender) = waiting.answers.remove(&id) {
                        let _gone = sender.send(Answer { status, body });
                    }
                }
            }
        }
        self.command_depth.set(waiting.undelivered as f64);
        let is_carried = !waiting.carried.is_empty();
        drop(waiting);
        if is_carried {
            self.send_carrier();
        }
        Ok(())
    }

    /// Closes the mailbox: requests that wait are told, new ones are refused, and `receive` ends once it has drained.
    pub fn close(&self) {
        {
            let mut waiting = self.waiting.lock();
            waiting.closed = true;
            waiting.hand_over();
            waiting.decisions.clear();
            waiting.answers.clear();
        }
        self.queue.lock().closed = true;
        self.picked_up.notify_all();
        self.filled.notify_all();
    }

    fn has_undecided(&self) -> bool {
        !self.waiting.lock().decisions.is_empty()
    }

    /// Requests that wait for a decision.
    pub fn undecided(&self) -> usize {
        self.waiting.lock().decisions.len()
    }

    #[cfg(test)]
    pub(super) fn is_asleep(&self) -> bool {
        self.queue.lock().is_asleep
    }

    /// Events in the queue.
    pub fn depth(&self) -> usize {
        self.queue.lock().events.len()
    }
}

impl Waiting {
    fn deliver(&mut self, id: RequestId, decision: Decision) {
        let Some(sender) = self.decisions.remove(&id) else {
            tracing::debug!(request_id = id, "command for a request that is gone");
            return;
        };
        self.undelivered += 1;
        self.carried.push((id, sender, decision));
        if !self.has_carrier {
            self.hand_over();
        }
    }

    /// Gives the requests their decisions.
    fn hand_over(&mut self) {
        for (_, sender, decision) in self.carried.drain(..) {
            if sender.send(decision).is_err() {
                self.undelivered -= 1; // its client has left
            }
        }
    }
}

/// Whether the router has to hear of an event although no request waits for a decision. It need not hear at once how
/// requests fare that have theirs: that changes only what it decides next.
fn is_urgent(event: &Event) -> bool {
    !matches!(event, Event::FirstToken { .. } | Event::Finished { .. } | Event::Cancelled { .. })
}

/// Takes over the wake-ups while it lives.
struct Carrier<'a>(&'a Mailbox);

impl<'a> Carrier<'a> {
    fn new(mailbox: &'a Mailbox) -> Self {
        mailbox.queue.lock().has_carrier = true;
        mailbox.waiting.lock().has_carrier = true;
        Self(mailbox)
    }
}

impl Drop for Carrier<'_> {
    fn drop(&mut self) {
        self.0.queue.lock().has_carrier = false;
        self.0.filled.notify_one();
        self.0.has_errand.store(false, Ordering::Relaxed);
        let mut waiting = self.0.waiting.lock();
        waiting.has_carrier = false;
        waiting.hand_over();
    }
}
