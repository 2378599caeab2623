//! Reads a request's body whole, within its limits.
//!
//! The body is kept as it came: routing needs all of it before the first byte may go on, and a failed connection to an
//! engine must not cost the client its request.

use std::future::Future;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt as _;
use thiserror::Error;
use tokio::time::{Instant, Sleep};

/// Memory reserved on the word of a `Content-Length`; what comes beyond grows with what really arrives.
const RESERVE_BYTES_MAX: u64 = 1024 * 1024;
/// Slowest pace of a whole body, beyond one pause: a client that writes a byte a second keeps its connection for about
/// the time of one pause, and not for as many seconds as it announced bytes.
const BYTES_PER_S_MIN: f64 = 1024.0;

/// Why a body could not be read.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub(crate) enum BodyError {
    #[error("The request body is larger than {0} bytes.")]
    TooLarge(usize),
    #[error("The request body did not arrive in time.")]
    Timeout,
    #[error("The request body could not be read.")]
    Broken,
}

/// Reads `body` to its end. `pause` bounds the time between two pieces, and with [`BYTES_PER_S_MIN`] that of them all.
pub(crate) async fn read<B>(body: B, bytes_max: usize, pause: Duration) -> Result<Bytes, BodyError>
where
    B: Body<Data = Bytes>,
{
    let announced = body.size_hint();
    if announced.lower() > bytes_max as u64 {
        return Err(BodyError::TooLarge(bytes_max)); // unread, so that a client waiting for `100 Continue` sends nothing
    }
    let mut body = pin!(body);
    let mut first: Option<Bytes> = None;
    let mut whole = BytesMut::new();
    let mut length = 0;
    let mut patience = Patience { pause, since: None };
    while let Some(piece) = next(&mut body, &mut patience, length).await {
        let piece = piece?;
        length += piece.len();
        if length > bytes_max {
            return Err(BodyError::TooLarge(bytes_max));
        }
        if first.is_none() && whole.is_empty() {
            first = Some(piece); // most bodies are one piece and are never copied
            continue;
        }
        if let Some(first) = first.take() {
            whole.reserve(announced.exact().unwrap_or(0).min(RESERVE_BYTES_MAX).max(length as u64) as usize);
            whole.extend_from_slice(&first);
        }
        whole.extend_from_slice(&piece);
    }
    Ok(first.unwrap_or_else(|| whole.freeze()))
}

/// How long a client may keep us waiting. The clock is read only where it does.
struct Patience {
    pause: Duration,
    /// When we first had to wait.
    since: Option<Instant>,
}

impl Patience {
    /// When to give up on the next piece, after `length` bytes.
    fn until(&mut self, length: usize) -> Instant {
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        let earned = Duration::from_secs_f64(length as f64 / BYTES_PER_S_MIN);
        (now + self.pause).min(since + self.pause + earned)
    }
}

/// The next piece of data, or an error when patience ends. A timer exists only where the piece is not there yet.
async fn next<B>(
    body: &mut std::pin::Pin<&mut B>,
    patience: &mut Patience,
    length: usize,
) -> Option<Result<Bytes, BodyError>>
where
    B: Body<Data = Bytes>,
{
    let mut timer: Option<std::pin::Pin<Box<Sleep>>> = None;
    loop {
        let mut frame = body.frame();
        let frame = std::future::poll_fn(|cx| {
            if let Poll::Ready(frame) = std::pin::Pin::new(&mut frame).poll(cx) {
                return Poll::Ready(Ok(frame));
            }
            let timer = timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(patience.until(length))));
            timer.as_mut().poll(cx).map(|()| Err(BodyError::Timeout))
        });
        match frame.await {
            Err(error) => return Some(Err(error)),
            Ok(None) => return None,
            Ok(Some(Err(_))) => return Some(Err(BodyError::Broken)),
            Ok(Some(Ok(frame))) => {
                if let Ok(data) = frame.into_data() {
                    return Some(Ok(data));
                } // trailers belong to the hop
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body::Frame;
    use http_body_util::{Full, StreamBody};

    use super::*;

    fn pieces(pieces: &[&'static str]) -> impl Body<Data = Bytes> + use<> {
        let frames: Vec<_> =
            pieces.iter().map(|piece| Ok::<_, Infallible>(Frame::data(Bytes::from_static(piece.as_bytes())))).collect();
        StreamBody::new(futures_util::stream::iter(frames))
    }

    const PAUSE: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn one_piece_is_not_copied_and_many_are_joined() {
        let one = Bytes::from_static(b"whole");
        assert_eq!(read(Full::new(one.clone()), 5, PAUSE).await.unwrap().as_ptr(), one.as_ptr());
        assert_eq!(read(pieces(&["a", "bc", "d"]), 4, PAUSE).await.unwrap(), "abcd");
        assert_eq!(read(pieces(&[]), 4, PAUSE).await.unwrap(), "");
    }

    #[tokio::test]
    async fn too_large_is_noticed_by_announcement_and_by_arrival() {
        assert_eq!(read(Full::new(Bytes::from_static(b"12345")), 4, PAUSE).await, Err(BodyError::TooLarge(4)));
        assert_eq!(read(pieces(&["123", "45"]), 4, PAUSE).await, Err(BodyError::TooLarge(4)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_pauses_too_long_is_given_up() {
        let silent = StreamBody::new(futures_util::stream::pending::<Result<Frame<Bytes>, Infallible>>());
        let start = Instant::now();
        assert_eq!(read(silent, 4, PAUSE).await, Err(BodyError::Timeout));
        assert_eq!(start.elapsed(), PAUSE);
    }

    fn dripping(piece: &'static str) -> impl Body<Data = Bytes> {
        StreamBody::new(futures_util::stream::unfold((), move |()| async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            Some((Ok::<_, Infallible>(Frame::data(Bytes::from_static(piece.as_bytes()))), ()))
        }))
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_writes_a_byte_a_second_is_given_up_and_one_with_a_pace_is_not() {
        let start = Instant::now();
        assert_eq!(read(dripping("x"), 1 << 30, PAUSE).await, Err(BodyError::Timeout));
        assert_eq!(start.elapsed().as_secs(), 60);
        let steady: &str = Box::leak("x".repeat(2048).into_boxed_str());
        assert_eq!(read(dripping(steady), 1 << 20, PAUSE).await, Err(BodyError::TooLarge(1 << 20)), "512 s later");
    }
}
