//! One connection of the load generator: writes a request, reads its answer, notes when what came.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::time::Instant;

use mio::net::TcpStream;
use mio::{Interest, Registry, Token};

use crate::client::{Requests, Tally};
use crate::http::{self, Part, Reader, Side};
use crate::samples::push;

/// What one read brought.
pub enum Got {
    /// Nothing for now.
    Nothing,
    /// A part of the answer.
    Part,
    /// The last part of the answer.
    End,
}

/// A connection that is idle or waits for one answer.
pub struct Connection {
    socket: TcpStream,
    reader: Reader,
    out: Vec<u8>,
    sent: usize,
    /// When the request in progress left; `None`: idle.
    began: Option<Instant>,
    has_byte: bool,
    last_event: Option<Instant>,
    refused: bool,
    newline: bool,
}

impl Connection {
    /// Connects in the background; nothing is sent yet.
    pub fn open(target: SocketAddr, registry: &Registry, slot: usize) -> io::Result<Self> {
        let mut socket = TcpStream::connect(target)?;
        registry.register(&mut socket, Token(slot), Interest::READABLE | Interest::WRITABLE)?;
        Ok(Self {
            socket,
            reader: Reader::new(Side::Response),
            out: Vec::new(),
            sent: 0,
            began: None,
            has_byte: false,
            last_event: None,
            refused: false,
            newline: false,
        })
    }

    /// Starts a request; its time begins here, so that a fresh connection's set-up is part of it.
    pub fn begin(&mut self, requests: &mut dyn Requests) -> io::Result<()> {
        self.out.clear();
        self.sent = 0;
        requests.append(&mut self.out);
        self.began = Some(Instant::now());
        (self.has_byte, self.last_event, self.refused) = (false, None, false);
        self.flush()
    }

    /// Waits for an answer or is in the middle of one.
    pub fn is_busy(&self) -> bool {
        self.began.is_some()
    }

    /// Has a request without a first event.
    pub fn waits(&self) -> bool {
        self.is_busy() && self.last_event.is_none()
    }

    /// Writes what is left of the request until the socket would block.
    pub fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.out.len() {
            match self.socket.write(&self.out[self.sent..]) {
                Ok(size) => self.sent += size,
                Err(error) if is_later(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads once and takes note of what came.
    pub fn read(&mut self, buffer: &mut [u8], tally: &mut Tally) -> io::Result<Got> {
        let size = match self.socket.read(buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(size) => size,
            Err(error) if is_later(&error) => return Ok(Got::Nothing),
            Err(error) => return Err(error),
        };
        let began = self.began.ok_or(io::ErrorKind::InvalidData)?;
        if !self.has_byte {
            self.has_byte = true;
            push(&mut tally.first_byte_us, began.elapsed());
        }
        self.take(&buffer[..size], began, tally)
    }

    fn take(&mut self, bytes: &[u8], began: Instant, tally: &mut Tally) -> io::Result<Got> {
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
            self.note_event(began, tally);
        }
        if !complete {
            return Ok(Got::Part);
        }
        tally.requests += 1;
        tally.refused += u64::from(self.refused);
        push(&mut tally.latencies_us, began.elapsed());
        self.began = None;
        Ok(Got::End)
    }

    fn note_event(&mut self, began: Instant, tally: &mut Tally) {
        let now = Instant::now();
        match self.last_event.replace(now) {
            Some(last) => push(&mut tally.gaps_us, now - last),
            None => push(&mut tally.first_event_us, now - began),
        }
    }

    /// Counts a request without a first byte or event with the time it has waited so far.
    pub fn note_waiting(&self, tally: &mut Tally) {
        let Some(began) = self.began else {
            return;
        };
        if !self.has_byte {
            tally.waiting += 1;
            push(&mut tally.first_byte_us, began.elapsed());
        }
        if self.last_event.is_none() {
            push(&mut tally.first_event_us, began.elapsed());
        }
    }

    /// Looks at the beginning of an answer that nobody has read: whether one with a status of 2xx is there.
    pub fn is_answered(&mut self, buffer: &mut [u8]) -> bool {
        let began = self.read(buffer, &mut Tally::default());
        matches!(began, Ok(Got::Part | Got::End)) && !self.refused
    }
}

/// The socket would block, or is not connected yet.
fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected)
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
}
