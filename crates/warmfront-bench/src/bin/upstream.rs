//! An engine that answers at once: `upstream --ports 4 --stream true --pace-ms 20`.
//!
//! One process and one thread serve several ports, so that a router sees several servers. Bodies are read and dropped;
//! whether chat completions stream is a flag of the process, because looking into a body would cost more than the answer.
//! The first line of standard output is `{"ports": […]}`. What else the routers under test ask of an engine (models,
//! health, metrics, `SGLang`'s server information, vLLM's render endpoint) is answered from constants.

use std::collections::VecDeque;
use std::error::Error;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};
use warmfront_bench::flags::Flags;
use warmfront_bench::http::{self, Part, Reader, Side};

#[path = "upstream/answers.rs"]
mod answers;

use answers::Answers;

const FLAGS: &[&str] = &["ports", "first-port", "stream", "pace-ms", "events", "eager", "model", "render"];
const READ_BYTES: usize = 256 * 1024;
const EVENTS_MAX: usize = 1024;
/// Events written to one stream before the next one has its turn.
const BURST: u32 = 32;

struct Connection {
    socket: TcpStream,
    reader: Reader,
    path: String,
    body_bytes: usize,
    out: Vec<u8>,
    sent: usize,
    events_left: u32,
    queued: bool,
}

struct Upstream {
    poll: Poll,
    listeners: Vec<TcpListener>,
    connections: Vec<Option<Connection>>,
    free: Vec<usize>,
    answers: Answers,
    events: u32,
    streams: bool,
    /// The first event follows the head at once; otherwise after one pace.
    eager: bool,
    pace: Option<Duration>,
    /// Streams with an event to write, by the time it is due; all have the same period, so a queue keeps the order.
    due: VecDeque<(Instant, usize)>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let flags = Flags::from_env(FLAGS)?;
    let pace_ms: u64 = flags.get("pace-ms", 0)?;
    let mut upstream = Upstream {
        poll: Poll::new()?,
        listeners: Vec::new(),
        connections: Vec::new(),
        free: Vec::new(),
        answers: Answers::new(&flags.get("model", "m".to_owned())?, flags.get("render", false)?),
        events: flags.get("events", 200)?,
        streams: flags.get("stream", false)?,
        eager: flags.get("eager", false)?,
        pace: (pace_ms > 0).then(|| Duration::from_millis(pace_ms)),
        due: VecDeque::new(),
    };
    let ports = upstream.listen(flags.get("ports", 4)?, flags.get("first-port", 0)?)?;
    println!("{}", serde_json::json!({ "ports": ports }));
    Ok(upstream.run()?)
}

impl Upstream {
    fn listen(&mut self, count: u16, first: u16) -> io::Result<Vec<u16>> {
        for offset in 0..count {
            let port = if first == 0 { 0 } else { first + offset };
            let mut listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], port)))?;
            self.poll.registry().register(&mut listener, Token(usize::from(offset)), Interest::READABLE)?;
            self.listeners.push(listener);
        }
        self.listeners.iter().map(|listener| listener.local_addr().map(|address| address.port())).collect()
    }

    fn run(&mut self) -> io::Result<()> {
        let mut events = Events::with_capacity(EVENTS_MAX);
        let mut buffer = vec![0; READ_BYTES];
        loop {
            let wait = self.due.front().map(|(due, _)| due.saturating_duration_since(Instant::now()));
            match self.poll.poll(&mut events, wait) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            }
            for event in &events {
                match event.token().0.checked_sub(self.listeners.len()) {
                    None => self.accept(event.token().0)?,
                    Some(slot) => self.advance(slot, &mut buffer),
                }
            }
            self.write_due();
        }
    }

    fn accept(&mut self, listener: usize) -> io::Result<()> {
        loop {
            let mut socket = match self.listeners[listener].accept() {
                Ok((socket, _)) => socket,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => return Err(error),
            };
            socket.set_nodelay(true)?;
            let slot = self.free.pop().unwrap_or(self.connections.len());
            let token = Token(self.listeners.len() + slot);
            self.poll.registry().register(&mut socket, token, Interest::READABLE | Interest::WRITABLE)?;
            let connection = Connection {
                socket,
                reader: Reader::new(Side::Request),
                path: String::new(),
                body_bytes: 0,
                out: Vec::new(),
                sent: 0,
                events_left: 0,
                queued: false,
            };
            if slot == self.connections.len() {
                self.connections.push(None);
            }
            self.connections[slot] = Some(connection);
        }
    }

    fn advance(&mut self, slot: usize, buffer: &mut [u8]) {
        if self.serve(slot, buffer).is_err() {
            self.close(slot);
        }
    }

    /// Drops a connection. Its place is free at once unless the queue still names it.
    fn close(&mut self, slot: usize) {
        if self.connections[slot].take().is_some_and(|connection| !connection.queued) {
            self.free.push(slot);
        }
    }

    /// Reads requests until the socket would block, answering each.
    fn serve(&mut self, slot: usize, buffer: &mut [u8]) -> io::Result<()> {
        loop {
            let Some(connection) = self.connections[slot].as_mut() else {
                return Ok(());
            };
            connection.flush()?;
            let size = match connection.socket.read(buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(size) => size,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            };
            if connection.take(&buffer[..size])? {
                self.answer(slot)?;
            }
        }
        if self.connections[slot].as_ref().is_some_and(Connection::may_write_event) {
            self.enqueue(slot, Instant::now());
        }
        Ok(())
    }

    fn answer(&mut self, slot: usize) -> io::Result<()> {
        let Some(connection) = self.connections[slot].as_mut() else {
            return Ok(());
        };
        let is_chat = matches!(connection.path.as_str(), "/v1/chat/completions" | "/v1/completions" | "/generate");
        if !is_chat || !self.streams {
            self.answers.append(&connection.path, connection.body_bytes, &mut connection.out);
            return Ok(());
        }
        connection.out.extend_from_slice(answers::STREAM_HEAD);
        connection.events_left = self.events;
        if self.eager {
            connection.flush()?;
            connection.write_events(1, &self.answers)?;
        }
        if self.pace.is_some() {
            self.enqueue(slot, Instant::now());
        }
        Ok(())
    }

    fn enqueue(&mut self, slot: usize, at: Instant) {
        let Some(connection) = self.connections[slot].as_mut().filter(|connection| !connection.queued) else {
            return;
        };
        connection.queued = true;
        let due = at + self.pace.unwrap_or_default();
        self.due.push_back((due, slot));
    }

    /// Writes the events that are due, at most one round over all streams.
    fn write_due(&mut self) {
        let now = Instant::now();
        for _ in 0..self.due.len() {
            let Some((due, slot)) = self.due.front().copied().filter(|(due, _)| *due <= now) else {
                return;
            };
            self.due.pop_front();
            let Some(connection) = self.connections[slot].as_mut() else {
                self.free.push(slot);
                continue;
            };
            connection.queued = false;
            let burst = if self.pace.is_some() { 1 } else { BURST };
            match connection.write_events(burst, &self.answers) {
                Err(_) => self.close(slot),
                Ok(()) if self.connections[slot].as_ref().is_some_and(Connection::may_write_event) => {
                    self.enqueue(slot, due);
                }
                Ok(()) => {}
            }
        }
    }
}

impl Connection {
    /// A stream has events left and the socket took all earlier bytes.
    fn may_write_event(&self) -> bool {
        self.events_left > 0 && self.sent == self.out.len()
    }

    /// Takes note of received bytes; tells whether they completed a request.
    fn take(&mut self, bytes: &[u8]) -> io::Result<bool> {
        let mut complete = false;
        let (path, body_bytes) = (&mut self.path, &mut self.body_bytes);
        let parts = self.reader.feed(bytes, |part| match part {
            Part::Head(head) => {
                *body_bytes = 0;
                path.clear();
                path.push_str(http::request_line(head).map_or("", |(_, target)| target));
            }
            Part::Data(data) => *body_bytes += data.len(),
            Part::End => complete = true,
        });
        parts.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
        Ok(complete)
    }

    /// Writes up to `burst` events, each with a call of its own as an engine does.
    fn write_events(&mut self, burst: u32, answers: &Answers) -> io::Result<()> {
        for _ in 0..burst {
            if !self.may_write_event() {
                break;
            }
            self.out.extend_from_slice(answers.event());
            self.events_left -= 1;
            if self.events_left == 0 {
                self.out.extend_from_slice(answers::STREAM_END);
            }
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.out.len() {
            match self.socket.write(&self.out[self.sent..]) {
                Ok(size) => self.sent += size,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.out.clear();
        self.sent = 0;
        Ok(())
    }
}
