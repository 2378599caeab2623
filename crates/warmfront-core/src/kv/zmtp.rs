//! The part of ZMTP 3 that a subscriber needs: SUB and DEALER, NULL security, tcp and ipc, as a client.
//!
//! Why not the `zeromq` crate (0.7): it reserves the length that a peer announces before a byte of it has come, so one
//! bad frame header aborts the process; it puts no bound on multipart messages; and it reconnects by itself without
//! telling, while for us a reconnect is the only sign of a restarted engine. Here memory follows the bytes that really
//! came and stays under a bound, and a broken connection is an error to the caller.
//!
//! Specification: <https://rfc.zeromq.org/spec/23/>. We announce version 3.0, in which a subscription is an ordinary
//! message; every libzmq since 4.0 takes it. Heartbeats are ZMTP 3.1: we answer a PING always, and send one only to peers
//! that announced 3.1.

use std::io;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

/// Frames of one message; engines send four at most.
const FRAMES_MAX: usize = 8;
/// Length of a command: handshakes and heartbeats.
const COMMAND_BYTES_MAX: usize = 4096;
/// What one read may take from the socket at once.
const READ_BYTES: usize = 64 * 1024;
/// Buffer kept between messages.
const KEPT_BYTES: usize = 1024 * 1024;
/// Heartbeat answers that wait because the peer does not read.
const OUTGOING_BYTES_MAX: usize = 16 * 1024;

const GREETING_BYTES: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// Why a connection ended. The texts go to operators.
#[derive(Debug, Error)]
pub enum ZmtpError {
    #[error("`{0}` is neither tcp://host:port nor ipc://path")]
    Endpoint(String),
    #[error("cannot connect to {endpoint}: {source}")]
    Connect { endpoint: String, source: io::Error },
    #[error("no answer from {0} in time")]
    Timeout(String),
    #[error("the connection broke: {0}")]
    Broken(#[from] io::Error),
    #[error("the peer closed the connection")]
    Closed,
    #[error("the peer does not speak ZMTP 3 without encryption: {0}")]
    Protocol(&'static str),
    #[error("a message of {bytes} bytes is over the bound of {bytes_max}")]
    TooLarge { bytes: u64, bytes_max: usize },
}

/// What we are towards the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Subscriber,
    Dealer,
}

impl Kind {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Subscriber => b"SUB",
            Self::Dealer => b"DEALER",
        }
    }
}

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// One connection. Dropping it closes it.
pub struct Socket {
    stream: Box<dyn Stream>,
    incoming: BytesMut,
    /// Frames of the message that is not complete yet.
    frames: Vec<Bytes>,
    outgoing: BytesMut,
    bytes_max: usize,
    heartbeats: bool,
    /// Whether anything came since this was last asked.
    heard: bool,
}

/// One frame as it came.
struct Frame {
    flags: u8,
    body: Bytes,
}

impl Socket {
    /// Connects and shakes hands.
    ///
    /// `bytes_max` bounds a whole message. The timeout covers everything up to the handshake.
    pub async fn connect(endpoint: &str, kind: Kind, bytes_max: usize, timeout: Duration) -> Result<Self, ZmtpError> {
        let connect = async {
            let stream = open(endpoint).await?;
            let mut socket = Self {
                stream,
                incoming: BytesMut::new(),
                frames: Vec::new(),
                outgoing: BytesMut::new(),
                bytes_max,
                heartbeats: false,
                heard: true,
            };
            socket.shake_hands(kind).await?;
            Ok(socket)
        };
        tokio::time::timeout(timeout, connect).await.unwrap_or_else(|_| Err(ZmtpError::Timeout(endpoint.into())))
    }

    /// Asks a publisher for all messages whose first frame begins with `topic`.
    pub async fn subscribe(&mut self, topic: &[u8]) -> Result<(), ZmtpError> {
        let mut body = vec![1];
        body.extend_from_slice(topic);
        self.send(&[&body]).await
    }

    /// Sends one message.
    pub async fn send(&mut self, frames: &[&[u8]]) -> Result<(), ZmtpError> {
        for (place, frame) in frames.iter().enumerate() {
            let more = if place + 1 < frames.len() { MORE } else { 0 };
            put_frame(&mut self.outgoing, more, frame);
        }
        self.flush().await
    }

    /// The next message. Safe to drop while it waits: what came stays in the socket.
    pub async fn receive(&mut self) -> Result<Vec<Bytes>, ZmtpError> {
        loop {
            while let Some(frame) = self.next_frame()? {
                if frame.flags & COMMAND != 0 {
                    self.answer(&frame.body)?;
                } else if let Some(message) = self.collect(frame)? {
                    return Ok(message);
                }
            }
            self.flush().await?;
            self.read().await?;
        }
    }

    /// Whether the peer would answer a heartbeat.
    pub fn has_heartbeats(&self) -> bool {
        self.heartbeats
    }

    /// Sends a heartbeat; whatever comes back counts as heard.
    pub async fn ping(&mut self) -> Result<(), ZmtpError> {
        put_frame(&mut self.outgoing, COMMAND, b"\x04PING\0\0");
        self.flush().await
    }

    /// Whether anything came since the last call.
    pub fn take_heard(&mut self) -> bool {
        std::mem::take(&mut self.heard)
    }

    async fn flush(&mut self) -> Result<(), ZmtpError> {
        while !self.outgoing.is_empty() {
            self.stream.write_buf(&mut self.outgoing).await?;
        }
        Ok(())
    }

    async fn read(&mut self) -> Result<(), ZmtpError> {
        if self.incoming.is_empty() && self.incoming.capacity() > KEPT_BYTES {
            self.incoming = BytesMut::new(); // what one huge message needed is not kept
        }
        self.incoming.reserve(READ_BYTES);
        let mut limited = (&mut self.incoming).limit(READ_BYTES);
        if self.stream.read_buf(&mut limited).await? == 0 {
            return Err(ZmtpError::Closed);
        }
        self.heard = true;
        Ok(())
    }

    async fn shake_hands(&mut self, kind: Kind) -> Result<(), ZmtpError> {
        self.outgoing.extend_from_slice(&greeting());
        put_frame(&mut self.outgoing, COMMAND, &ready(kind));
        self.flush().await?;
        while self.incoming.len() < GREETING_BYTES {
            self.read().await?;
        }
        let theirs = self.incoming.split_to(GREETING_BYTES);
        if theirs[0] != 0xff || theirs[9] & 1 != 1 || theirs[10] < 3 {
            return Err(ZmtpError::Protocol("another greeting"));
        }
        if &theirs[12..17] != b"NULL\0" {
            return Err(ZmtpError::Protocol("another security mechanism"));
        }
        self.heartbeats = (theirs[10], theirs[11]) > (3, 0);
        loop {
            match self.next_frame()? {
                None => self.read().await?,
                Some(frame) if frame.flags & COMMAND != 0 && frame.body.starts_with(b"\x05READY") => return Ok(()),
                Some(_) => return Err(ZmtpError::Protocol("no READY")),
            }
        }
    }

    /// Cuts one frame off what came; `None`: not all of it is here yet.
    fn next_frame(&mut self) -> Result<Option<Frame>, ZmtpError> {
        let Some(&flags) = self.incoming.first() else { return Ok(None) };
        if flags & !(MORE | LONG | COMMAND) != 0 {
            return Err(ZmtpError::Protocol("a frame with unknown flags"));
        }
        let header = if flags & LONG == 0 { 2 } else { 9 };
        if self.incoming.len() < header {
            return Ok(None);
        }
        let length = match flags & LONG {
            0 => u64::from(self.incoming[1]),
            _ => (&self.incoming[1..9]).get_u64(),
        };
        let room = if flags & COMMAND == 0 { self.room() } else { COMMAND_BYTES_MAX };
        if length > room as u64 {
            return Err(ZmtpError::TooLarge { bytes: length, bytes_max: self.bytes_max });
        }
        let length = length as usize;
        if self.incoming.len() < header + length {
            return Ok(None);
        }
        self.incoming.advance(header);
        Ok(Some(Frame { flags, body: self.incoming.split_to(length).freeze() }))
    }

    /// Bytes that the message being collected may still have.
    fn room(&self) -> usize {
        self.bytes_max - self.frames.iter().map(Bytes::len).sum::<usize>()
    }

    fn collect(&mut self, frame: Frame) -> Result<Option<Vec<Bytes>>, ZmtpError> {
        self.frames.push(frame.body);
        if frame.flags & MORE == 0 {
            return Ok(Some(std::mem::take(&mut self.frames)));
        }
        if self.frames.len() >= FRAMES_MAX {
            return Err(ZmtpError::Protocol("a message with too many frames"));
        }
        Ok(None)
    }

    fn answer(&mut self, command: &[u8]) -> Result<(), ZmtpError> {
        // PING carries a time to live of two bytes, then a context that the PONG returns.
        let Some(context) = command.strip_prefix(b"\x04PING").and_then(|rest| rest.get(2..)) else {
            return Ok(());
        };
        if self.outgoing.len() > OUTGOING_BYTES_MAX {
            return Err(ZmtpError::Protocol("a flood of heartbeats"));
        }
        let mut pong = b"\x04PONG".to_vec();
        pong.extend_from_slice(context);
        put_frame(&mut self.outgoing, COMMAND, &pong);
        Ok(())
    }
}

async fn open(endpoint: &str) -> Result<Box<dyn Stream>, ZmtpError> {
    let failed = |source| ZmtpError::Connect { endpoint: endpoint.into(), source };
    if let Some(address) = endpoint.strip_prefix("tcp://") {
        let stream = TcpStream::connect(address).await.map_err(failed)?;
        stream.set_nodelay(true)?;
        Ok(Box::new(stream))
    } else if let Some(path) = endpoint.strip_prefix("ipc://") {
        Ok(Box::new(UnixStream::connect(path).await.map_err(failed)?))
    } else {
        Err(ZmtpError::Endpoint(endpoint.into()))
    }
}

fn greeting() -> [u8; GREETING_BYTES] {
    let mut greeting = [0; GREETING_BYTES];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

fn ready(kind: Kind) -> Vec<u8> {
    let mut body = b"\x05READY".to_vec();
    put_property(&mut body, b"Socket-Type", kind.name());
    if kind == Kind::Dealer {
        put_property(&mut body, b"Identity", b"");
    }
    body
}

fn put_property(body: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    body.push(name.len() as u8);
    body.extend_from_slice(name);
    body.extend_from_slice(&(value.len() as u32).to_be_bytes());
    body.extend_from_slice(value);
}

fn put_frame(out: &mut BytesMut, flags: u8, body: &[u8]) {
    if let Ok(length) = u8::try_from(body.len()) {
        out.extend_from_slice(&[flags, length]);
    } else {
        out.put_u8(flags | LONG);
        out.put_u64(body.len() as u64);
    }
    out.extend_from_slice(body);
}
