//! Keep-alive connections that send requests: a closed loop, or an open one at a steady rate.
//!
//! In a closed loop each connection sends its next request when its last answer is complete. In an open loop requests
//! leave when they are due, whatever the answers do, so that a slow router cannot slow down its own load. CPU and memory
//! of the router are read at the start and the end of the measured window; the time before the window warms caches and
//! connections up and is counted nowhere.

use std::io;
use std::mem;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::{Events, Poll};

use crate::connection::{Connection, Got};
use crate::process::{self, Usage};
use crate::samples::push;
use crate::schedule::Schedule;

const READ_BYTES: usize = 256 * 1024;
const EVENTS_MAX: usize = 1024;
const POLL_MAX: Duration = Duration::from_millis(50);
/// How long an open loop waits after the window for the first events of what it sent.
const GRACE: Duration = Duration::from_secs(2);

/// When requests leave.
#[derive(Clone, Copy, Debug)]
pub enum Departures {
    /// A closed loop: every connection always has one request.
    OnAnswer,
    /// An open loop: each request takes an idle connection, or opens one while there are fewer than the plan allows.
    Steady { per_s: f64, seed: u64 },
}

/// What to run.
pub struct Plan {
    pub target: SocketAddr,
    pub departures: Departures,
    /// Connections of a closed loop; the most that an open loop opens.
    pub connections: usize,
    pub warmup: Duration,
    pub window: Duration,
    /// Process trees whose CPU and memory are charged.
    pub pids: Vec<u32>,
    /// False: send one request a connection and never read the answer.
    pub reads: bool,
}

/// What happened inside the window.
#[derive(Debug, Default)]
pub struct Tally {
    pub requests: u64,
    /// Answers with a status other than 2xx; without reading, those that do not begin with one.
    pub refused: u64,
    /// Connections that broke or sent nonsense.
    pub broken: u64,
    /// Requests of an open loop that were due while no connection was free.
    pub unsent: u64,
    /// Requests of an open loop that had no byte of their answer a while after the window.
    pub waiting: u64,
    /// Server-sent events, counted by their final empty line.
    pub events: u64,
    pub body_bytes: u64,
    /// Microseconds from the first byte sent to the answer's end.
    pub latencies_us: Vec<u32>,
    /// Microseconds from the first byte sent to the answer's first byte; in an open loop also of requests that still wait.
    pub first_byte_us: Vec<u32>,
    /// Microseconds from the first byte sent to the end of the stream's first event; likewise.
    pub first_event_us: Vec<u32>,
    /// Microseconds between reads that completed at least one event of a stream.
    pub gaps_us: Vec<u32>,
    /// Microseconds by which requests of an open loop left after they were due.
    pub late_us: Vec<u32>,
    /// Requests in progress, added up over the departures of an open loop.
    pub open_sum: u64,
    pub window_s: f64,
    pub before: Usage,
    pub after: Usage,
    pub resident_bytes_max: u64,
}

impl Tally {
    /// CPU seconds that the charged processes used in the window.
    pub fn cpu_s(&self) -> f64 {
        self.after.cpu_s - self.before.cpu_s
    }
}

/// Appends one request, header and body.
pub trait Requests {
    fn append(&mut self, into: &mut Vec<u8>);
}

/// Runs the plan to its end.
pub fn drive(plan: &Plan, requests: &mut dyn Requests) -> io::Result<Tally> {
    let mut client = Client::new(plan, requests)?;
    client.run(plan.warmup)?;
    let before = process::usage(&plan.pids);
    let began = Instant::now();
    client.tally = Tally { before, ..Tally::default() };
    client.run(plan.window)?;
    client.tally.window_s = began.elapsed().as_secs_f64();
    client.tally.after = process::usage(&plan.pids);
    client.end()
}

struct Client<'a> {
    plan: &'a Plan,
    requests: &'a mut dyn Requests,
    poll: Poll,
    /// `None`: closed, and named in `free`.
    connections: Vec<Option<Connection>>,
    idle: Vec<usize>,
    free: Vec<usize>,
    schedule: Option<Schedule>,
    tally: Tally,
    buffer: Vec<u8>,
}

impl<'a> Client<'a> {
    fn new(plan: &'a Plan, requests: &'a mut dyn Requests) -> io::Result<Self> {
        let schedule = match plan.departures {
            Departures::OnAnswer => None,
            Departures::Steady { per_s, seed } => Some(Schedule::new(Instant::now(), per_s, seed)),
        };
        let mut client = Self {
            plan,
            requests,
            poll: Poll::new()?,
            connections: (0..plan.connections).map(|_| None).collect(),
            idle: Vec::new(),
            free: (0..plan.connections).rev().collect(),
            schedule,
            tally: Tally::default(),
            buffer: vec![0; READ_BYTES],
        };
        if client.schedule.is_none() {
            while let Some(slot) = client.free.pop() {
                client.start(slot)?;
            }
        }
        Ok(client)
    }

    /// Starts a request on a connection, which is opened where it is not.
    fn start(&mut self, slot: usize) -> io::Result<()> {
        if self.connections[slot].is_none() {
            self.connections[slot] = Some(Connection::open(self.plan.target, self.poll.registry(), slot)?);
        }
        if let Some(connection) = &mut self.connections[slot] {
            connection.begin(self.requests)?;
        }
        Ok(())
    }

    fn run(&mut self, time: Duration) -> io::Result<()> {
        let deadline = Instant::now() + time;
        let mut memory_due = Instant::now();
        let mut events = Events::with_capacity(EVENTS_MAX);
        loop {
            let now = Instant::now();
            if now >= deadline {
                return Ok(());
            }
            if now >= memory_due {
                memory_due = now + Duration::from_secs(1);
                let resident = process::usage(&self.plan.pids).resident_bytes;
                self.tally.resident_bytes_max = self.tally.resident_bytes_max.max(resident);
            }
            self.depart()?;
            let until = self.schedule.as_ref().map_or(deadline, |schedule| schedule.due().min(deadline));
            self.turn(&mut events, until)?;
        }
    }

    /// Waits for events, at most until then, and handles them.
    fn turn(&mut self, events: &mut Events, until: Instant) -> io::Result<()> {
        match self.poll.poll(events, Some(until.saturating_duration_since(Instant::now()).min(POLL_MAX))) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            other => other?,
        }
        for event in &*events {
            let slot = event.token().0;
            if self.advance(slot).is_err() {
                self.replace(slot)?;
            }
        }
        Ok(())
    }

    /// Starts the requests of an open loop that are due.
    fn depart(&mut self) -> io::Result<()> {
        let now = Instant::now();
        while let Some(due) = self.schedule.as_mut().and_then(|schedule| schedule.take(now)) {
            push(&mut self.tally.late_us, now - due);
            let Some(slot) = self.idle.pop().or_else(|| self.free.pop()) else {
                self.tally.unsent += 1;
                continue;
            };
            if self.start(slot).is_err() {
                self.replace(slot)?;
            }
            self.tally.open_sum += (self.connections.len() - self.idle.len() - self.free.len()) as u64;
        }
        Ok(())
    }

    /// Closes a connection that failed. A closed loop opens the next one at once.
    ///
    /// A server may close a connection that has no request; only one that had is counted as broken.
    fn replace(&mut self, slot: usize) -> io::Result<()> {
        let was_busy = self.connections[slot].take().is_some_and(|connection| connection.is_busy());
        self.tally.broken += u64::from(was_busy);
        if self.schedule.is_none() {
            return self.start(slot);
        }
        self.idle.retain(|idle| *idle != slot);
        self.free.push(slot);
        Ok(())
    }

    /// Writes and reads on one connection until both would block.
    fn advance(&mut self, slot: usize) -> io::Result<()> {
        let Some(connection) = &mut self.connections[slot] else {
            return Ok(());
        };
        connection.flush()?;
        if !self.plan.reads {
            return Ok(());
        }
        loop {
            match connection.read(&mut self.buffer, &mut self.tally)? {
                Got::Nothing => return Ok(()),
                Got::Part => {}
                Got::End if self.schedule.is_some() => self.idle.push(slot),
                Got::End => connection.begin(self.requests)?,
            }
        }
    }

    /// Adds what can be said only after the window.
    fn end(mut self) -> io::Result<Tally> {
        let mut tally = mem::take(&mut self.tally);
        tally.resident_bytes_max = tally.resident_bytes_max.max(tally.after.resident_bytes);
        if self.schedule.is_some() {
            self.wait_for_first_events()?;
            tally.first_byte_us.append(&mut self.tally.first_byte_us);
            tally.first_event_us.append(&mut self.tally.first_event_us);
            tally.broken += self.tally.broken;
            self.connections.iter().flatten().for_each(|connection| connection.note_waiting(&mut tally));
        }
        if !self.plan.reads {
            let silent = self.connections.iter_mut().flatten();
            let answered: usize = silent.map(|each| usize::from(each.is_answered(&mut self.buffer))).sum();
            tally.refused += (self.plan.connections - answered) as u64;
        }
        Ok(tally)
    }

    fn wait_for_first_events(&mut self) -> io::Result<()> {
        let deadline = Instant::now() + GRACE;
        let mut events = Events::with_capacity(EVENTS_MAX);
        while Instant::now() < deadline && self.connections.iter().flatten().any(Connection::waits) {
            self.turn(&mut events, deadline)?;
        }
        Ok(())
    }
}
