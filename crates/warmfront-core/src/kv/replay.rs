//! One replay: ask an engine for the batches it still keeps, from a number on.
//!
//! Each replay has a connection of its own, so that late answers to an earlier, abandoned one cannot be mistaken for it.
//! The end marker says that the engine has sent all it wanted, not that all of it arrived: up to vLLM 0.32 its socket
//! drops what does not fit, silently. [`super::sequence`] looks for the holes. A request that the engine does not
//! understand is never answered, so silence is an error after a timeout.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout_at};

use super::zmtp::{Kind, Socket, ZmtpError};

/// Sequence number of the end marker.
const END: [u8; 8] = [0xff; 8];

/// One answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Batch { number: u64, payload: Bytes },
    End,
}

/// A running replay. Dropping it abandons it.
pub struct Replay {
    socket: Socket,
    endpoint: String,
    timeout: Duration,
    /// When silence becomes an error.
    deadline: Instant,
}

impl Replay {
    /// Connects and asks for all batches with a number of at least `from`.
    pub async fn start(endpoint: &str, from: u64, bytes_max: usize, timeout: Duration) -> Result<Self, ZmtpError> {
        let mut socket = Socket::connect(endpoint, Kind::Dealer, bytes_max, timeout).await?;
        socket.send(&[b"", &from.to_be_bytes()]).await?;
        Ok(Self { socket, endpoint: endpoint.into(), timeout, deadline: Instant::now() + timeout })
    }

    /// The next answer. Safe to drop while it waits; the timeout starts anew with each answer, not with each call.
    pub async fn next(&mut self) -> Result<Answer, ZmtpError> {
        let message = timeout_at(self.deadline, self.socket.receive())
            .await
            .map_err(|_| ZmtpError::Timeout(self.endpoint.clone()))??;
        self.deadline = Instant::now() + self.timeout;
        parse(message).ok_or(ZmtpError::Protocol("an answer that is not a batch"))
    }
}

/// `["", topic, number, payload]` since vLLM 0.26, `["", number, payload]` before; the end marker has either form.
fn parse(mut frames: Vec<Bytes>) -> Option<Answer> {
    let payload = frames.pop()?;
    let number: [u8; 8] = frames.pop()?.as_ref().try_into().ok()?;
    let prefix_fits = matches!(frames.len(), 1 | 2) && frames[0].is_empty();
    match number {
        _ if !prefix_fits => None,
        END => Some(Answer::End),
        number => Some(Answer::Batch { number: u64::from_be_bytes(number), payload }),
    }
}

/// Splits a live message `[topic, number, payload]`.
pub fn parse_live(mut frames: Vec<Bytes>) -> Option<(u64, Bytes)> {
    let payload = frames.pop()?;
    let number: [u8; 8] = frames.pop()?.as_ref().try_into().ok()?;
    (frames.len() == 1 && number != END).then_some((u64::from_be_bytes(number), payload))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(parts: &[&'static [u8]]) -> Vec<Bytes> {
        parts.iter().map(|part| Bytes::from_static(part)).collect()
    }

    #[test]
    fn answers_with_and_without_a_topic_are_read() {
        let batch = Some(Answer::Batch { number: 70, payload: Bytes::from_static(b"x") });
        assert_eq!(parse(frames(&[b"", b"kv-events", b"\0\0\0\0\0\0\0\x46", b"x"])), batch);
        assert_eq!(parse(frames(&[b"", b"\0\0\0\0\0\0\0\x46", b"x"])), batch);
        assert_eq!(parse(frames(&[b"", b"", &END, b""])), Some(Answer::End));
        assert_eq!(parse(frames(&[b"", &END, b""])), Some(Answer::End));
    }

    #[test]
    fn other_messages_are_refused() {
        assert_eq!(parse(frames(&[])), None);
        assert_eq!(parse(frames(&[b"", b"short", b"x"])), None);
        assert_eq!(parse(frames(&[b"not empty", &END, b""])), None);
        assert_eq!(parse_live(frames(&[b"topic", b"short", b"x"])), None);
    }
}
