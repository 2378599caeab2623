//! A closed loop of keep-alive connections: each sends its next request when its last answer is complete.
//!
//! CPU and memory of the router are read at the start and the end of the measured window; the time before the window
//! warms caches and connections up and is counted nowhere.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};

use crate::http::{self, Part, Reader, Side};
use crate::process::{self, Usage};

const READ_BYTES: usize = 256 * 1024;
const EVENTS_MAX: usize = 1024;
/// Bound on kept latency samples; later ones are dropped.
const SAMPLES_MAX: usize = 8_000_000;
const POLL_MAX: Duration = Duration::from_millis(50);

/// What to run.
pub struct Plan {
    pub target: SocketAddr,
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
    /// Answers with a status other than 2xx.
    pub refused: u64,
    /// Connections that broke or sent nonsense.
    pub broken: u64,
    /// Server-sent events, counted by their final empty line.
    pub events: u64,
    pub body_bytes: u64,
    /// Microseconds from the first byte sent to the answer's end.
    pub latencies_us: Vec<u32>,
    /// Microseconds between reads that completed at least one event of a stream.
    pub gaps_us: Vec<u32>,
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

struct Connection {
    socket: TcpStream,
    reader: Reader,
    out: Vec<u8>,
    sent: usize,
    began: Instant,
    last_event: Option<Instant>,
    refused: bool,
    newline: bool,
}

/// Runs the plan to its end.
pub fn drive(plan: &Plan, requests: &mut dyn Requests) -> io::Result<Tally> {
    let mut client = Client { poll: Poll::new()?, connections: Vec::new(), tally: Tally::default() };
    for slot in 0..plan.connections {
        let connection = client.open(plan.target, slot, requests)?;
        client.connections.push(connection);
    }
    client.run(plan, requests, plan.warmup)?;
    let before = process::usage(&plan.pids);
    let began = Instant::now();
    client.tally = Tally { before, ..Tally::default() };
    client.run(plan, requests, plan.window)?;
    let mut tally = client.tally;
    tally.window_s = began.elapsed().as_secs_f64();
    tally.after = process::usage(&plan.pids);
    tally.resident_bytes_max = tally.resident_bytes_max.max(tally.after.resident_bytes);
    Ok(tally)
}

struct Client {
    poll: Poll,
    connections: Vec<Connection>,
    tally: Tally,
}

impl Client {
    fn open(&self, target: SocketAddr, slot: usize, requests: &mut dyn Requests) -> io::Result<Connection> {
        let mut socket = TcpStream::connect(target)?;
        self.poll.registry().register(&mut socket, Token(slot), Interest::READABLE | Interest::WRITABLE)?;
        let mut connection = Connection {
            socket,
            reader: Reader::new(Side::Response),
            out: Vec::new(),
            sent: 0,
            began: Instant::now(),
            last_event: None,
            refused: false,
            newline: false,
        };
        requests.append(&mut connection.out);
        Ok(connection)
    }

    fn run(&mut self, plan: &Plan, requests: &mut dyn Requests, time: Duration) -> io::Result<()> {
        let deadline = Instant::now() + time;
        let mut memory_due = Instant::now();
        let mut events = Events::with_capacity(EVENTS_MAX);
        let mut buffer = vec![0; READ_BYTES];
        loop {
            let now = Instant::now();
            if now >= deadline {
                return Ok(());
            }
            if now >= memory_due {
                memory_due = now + Duration::from_secs(1);
                let resident = process::usage(&plan.pids).resident_bytes;
                self.tally.resident_bytes_max = self.tally.resident_bytes_max.max(resident);
            }
            match self.poll.poll(&mut events, Some(POLL_MAX.min(deadline - now))) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            }
            for event in &events {
                let slot = event.token().0;
                if self.advance(slot, plan.reads, requests, &mut buffer).is_err() {
                    self.tally.broken += 1;
                    self.connections[slot] = self.open(plan.target, slot, requests)?;
                }
            }
        }
    }

    /// Writes and reads on one connection until both would block.
    fn advance(&mut self, slot: usize, reads: bool, requests: &mut dyn Requests, buffer: &mut [u8]) -> io::Result<()> {
        let connection = &mut self.connections[slot];
        connection.flush()?;
        if !reads {
            return Ok(());
        }
        loop {
            let size = match connection.socket.read(buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(size) => size,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(()),
                Err(error) => return Err(error),
            };
            if connection.take(&buffer[..size], &mut self.tally)? {
                connection.out.clear();
                connection.sent = 0;
                requests.append(&mut connection.out);
                connection.began = Instant::now();
                connection.flush()?;
            }
        }
    }
}

impl Connection {
    fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.out.len() {
            match self.socket.write(&self.out[self.sent..]) {
                Ok(size) => self.sent += size,
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected) => {
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Takes note of received bytes; tells whether they completed the answer.
    fn take(&mut self, bytes: &[u8], tally: &mut Tally) -> io::Result<bool> {
        let (mut events, mut body_bytes, mut complete) = (0, 0, false);
        let (refused, newline) = (&mut self.refused, &mut self.newline);
        let parts = self.reader.feed(bytes, |part| match part {
            Part::Head(head) => *refused = !matches!(http::status(head), Some(200..300)),
            Part::Data(data) => {
                body_bytes += data.len() as u64;
                events += count_events(data, newline);
            }
            Part::End => complete = true,
        });
        parts.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
        tally.events += events;
        tally.body_bytes += body_bytes;
        if events > 0 {
            self.note_gap(&mut tally.gaps_us);
        }
        if complete {
            tally.requests += 1;
            tally.refused += u64::from(self.refused);
            push(&mut tally.latencies_us, self.began.elapsed());
            self.last_event = None;
        }
        Ok(complete)
    }

    fn note_gap(&mut self, gaps_us: &mut Vec<u32>) {
        let now = Instant::now();
        if let Some(last) = self.last_event.replace(now) {
            push(gaps_us, now - last);
        }
    }
}

fn push(samples: &mut Vec<u32>, value: Duration) {
    if samples.len() < SAMPLES_MAX {
        samples.push(value.as_micros() as u32);
    }
}

/// Counts empty lines; `newline` carries over whether the last byte ended a line.
fn count_events(data: &[u8], newline: &mut bool) -> u64 {
    let mut events = 0;
    for byte in data {
        let ends = *byte == b'\n';
        events += u64::from(ends && *newline);
        *newline = ends && !*newline;
    }
    events
}

/// The sample below which `share` of the samples lie, in milliseconds; `None` without samples.
pub fn percentile_ms(samples_us: &mut [u32], share: f64) -> Option<f64> {
    let last = samples_us.len().checked_sub(1)?;
    let rank = (last as f64 * share).round() as usize;
    let (_, value, _) = samples_us.select_nth_unstable(rank);
    Some(f64::from(*value) / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_counted_across_reads() {
        let bytes = b"data: 1\n\ndata: 2\n\n: note\n\n";
        for step in 1..bytes.len() {
            let mut newline = false;
            let counted: u64 = bytes.chunks(step).map(|piece| count_events(piece, &mut newline)).sum();
            assert_eq!(counted, 3);
        }
    }

    #[test]
    fn percentiles_are_samples() {
        let mut samples: Vec<u32> = (1..=101).map(|value| value * 1000).collect();
        assert_eq!(percentile_ms(&mut samples, 0.5), Some(51.0));
        assert_eq!(percentile_ms(&mut samples, 1.0), Some(101.0));
        assert_eq!(percentile_ms(&mut [], 0.5), None);
    }
}
