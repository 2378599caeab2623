//! Incremental reader of HTTP/1.1 messages, for requests and responses.
//!
//! It hands out borrowed parts of what it is fed and keeps only an unfinished header or chunk-size line. Responses that
//! end with the connection are read until then; the caller sees no `End` for them.

use std::fmt;

const HEAD_BYTES_MAX: usize = 64 * 1024;
const CHUNK_LINE_BYTES_MAX: usize = 256;

/// Which kind of message is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Request,
    Response,
}

/// One piece of a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Part<'a> {
    /// The header block, with its final empty line.
    Head(&'a [u8]),
    /// Bytes of the body, without chunk framing.
    Data(&'a [u8]),
    /// The message is complete.
    End,
}

/// The bytes are no HTTP message that this reader knows.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed(&'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

#[derive(Debug)]
enum State {
    Head,
    Length(usize),
    ChunkSize,
    ChunkData(usize),
    ChunkEnd(usize),
    Trailer,
    UntilClose,
}

/// Reads one message after another from a connection.
#[derive(Debug)]
pub struct Reader {
    side: Side,
    state: State,
    line: Vec<u8>,
}

impl Reader {
    pub fn new(side: Side) -> Self {
        Self { side, state: State::Head, line: Vec::new() }
    }

    /// Reads all of `input` and hands the parts to `take`, in order.
    pub fn feed(&mut self, mut input: &[u8], mut take: impl FnMut(Part<'_>)) -> Result<(), Malformed> {
        while !input.is_empty() {
            match self.state {
                State::Head => input = self.head(input, &mut take)?,
                State::Length(left) => {
                    let (data, rest) = input.split_at(left.min(input.len()));
                    take(Part::Data(data));
                    input = rest;
                    self.state = State::Length(left - data.len());
                    if left == data.len() {
                        self.end(&mut take);
                    }
                }
                State::ChunkSize => input = self.chunk_size(input)?,
                State::ChunkData(left) => {
                    let (data, rest) = input.split_at(left.min(input.len()));
                    take(Part::Data(data));
                    input = rest;
                    self.state =
                        if left == data.len() { State::ChunkEnd(2) } else { State::ChunkData(left - data.len()) };
                }
                State::ChunkEnd(left) => {
                    let skipped = left.min(input.len());
                    input = &input[skipped..];
                    self.state = if left == skipped { State::ChunkSize } else { State::ChunkEnd(left - skipped) };
                }
                State::Trailer => input = self.trailer(input, &mut take)?,
                State::UntilClose => {
                    take(Part::Data(input));
                    input = &[];
                }
            }
        }
        Ok(())
    }

    fn end(&mut self, take: &mut impl FnMut(Part<'_>)) {
        self.state = State::Head;
        take(Part::End);
    }

    fn head<'a>(&mut self, input: &'a [u8], take: &mut impl FnMut(Part<'_>)) -> Result<&'a [u8], Malformed> {
        let before = self.line.len();
        let room = (HEAD_BYTES_MAX - before).min(input.len());
        self.line.extend_from_slice(&input[..room]);
        let from = before.saturating_sub(3);
        let Some(at) = find(&self.line[from..], b"\r\n\r\n") else {
            return if self.line.len() == HEAD_BYTES_MAX { Err(Malformed("header too long")) } else { Ok(&[]) };
        };
        self.line.truncate(from + at + 4);
        let rest = &input[self.line.len() - before..];
        if self.side == Side::Response && status(&self.line) == Some(100) {
            self.line.clear();
            return Ok(rest);
        }
        self.state = self.framing()?;
        take(Part::Head(&self.line));
        self.line.clear();
        if matches!(self.state, State::Length(0)) {
            self.end(take);
        }
        Ok(rest)
    }

    fn framing(&self) -> Result<State, Malformed> {
        if self.side == Side::Response && matches!(status(&self.line), Some(204 | 304)) {
            return Ok(State::Length(0));
        }
        if header(&self.line, "transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked")) {
            return Ok(State::ChunkSize);
        }
        match header(&self.line, "content-length") {
            Some(value) => value.parse().map(State::Length).map_err(|_| Malformed("content-length is no number")),
            None if self.side == Side::Response => Ok(State::UntilClose),
            None => Ok(State::Length(0)),
        }
    }

    fn chunk_size<'a>(&mut self, input: &'a [u8]) -> Result<&'a [u8], Malformed> {
        let (rest, complete) = self.take_line(input)?;
        if complete {
            let text = std::str::from_utf8(&self.line).map_err(|_| Malformed("chunk size is no text"))?;
            let digits = text.split(';').next().unwrap_or_default().trim();
            let size = usize::from_str_radix(digits, 16).map_err(|_| Malformed("chunk size is no number"))?;
            self.state = if size == 0 { State::Trailer } else { State::ChunkData(size) };
            self.line.clear();
        }
        Ok(rest)
    }

    fn trailer<'a>(&mut self, input: &'a [u8], take: &mut impl FnMut(Part<'_>)) -> Result<&'a [u8], Malformed> {
        let (rest, complete) = self.take_line(input)?;
        if complete {
            let is_last = self.line == b"\r\n";
            self.line.clear();
            if is_last {
                self.end(take);
            }
        }
        Ok(rest)
    }

    /// Moves bytes up to the end of a line into `line`; tells what follows and whether the line is complete.
    fn take_line<'a>(&mut self, input: &'a [u8]) -> Result<(&'a [u8], bool), Malformed> {
        let end = input.iter().position(|byte| *byte == b'\n');
        let (line, rest) = input.split_at(end.map_or(input.len(), |at| at + 1));
        if self.line.len() + line.len() > CHUNK_LINE_BYTES_MAX {
            return Err(Malformed("chunk line too long"));
        }
        self.line.extend_from_slice(line);
        Ok((rest, end.is_some()))
    }
}

/// The status of a response head.
pub fn status(head: &[u8]) -> Option<u16> {
    std::str::from_utf8(head.get(9..12)?).ok()?.parse().ok()
}

/// Method and path of a request head.
pub fn request_line(head: &[u8]) -> Option<(&str, &str)> {
    let line = head.split(|byte| *byte == b'\r').next()?;
    let mut words = std::str::from_utf8(line).ok()?.split(' ');
    Some((words.next()?, words.next()?))
}

/// The value of the first header of that name.
pub fn header<'a>(head: &'a [u8], name: &str) -> Option<&'a str> {
    head.split(|byte| *byte == b'\n').skip(1).find_map(|line| {
        let (key, value) = line.split_at_checked(name.len())?;
        let value = value.strip_prefix(b":")?;
        key.eq_ignore_ascii_case(name.as_bytes()).then(|| std::str::from_utf8(value).ok().map(str::trim))?
    })
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(side: Side, bytes: &[u8], step: usize) -> Result<(usize, Vec<u8>, usize), Malformed> {
        let (mut heads, mut body, mut ends) = (0, Vec::new(), 0);
        let mut reader = Reader::new(side);
        for piece in bytes.chunks(step) {
            reader.feed(piece, |part| match part {
                Part::Head(_) => heads += 1,
                Part::Data(data) => body.extend_from_slice(data),
                Part::End => ends += 1,
            })?;
        }
        Ok((heads, body, ends))
    }

    #[test]
    fn messages_read_the_same_in_pieces_of_any_size() {
        let bytes = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc\
            HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;x=1\r\nde\r\nA\r\nfghijklmno\r\n0\r\nx: y\r\n\r\n\
            HTTP/1.1 204 No Content\r\n\r\n";
        for step in 1..bytes.len() {
            assert_eq!(read(Side::Response, bytes, step).unwrap(), (3, b"abcdefghijklmno".to_vec(), 3), "step {step}");
        }
    }

    #[test]
    fn requests_without_length_have_no_body() {
        let bytes = b"GET /a HTTP/1.1\r\nhost: b\r\n\r\nPOST /c HTTP/1.1\r\ncontent-length: 1\r\n\r\nx";
        assert_eq!(read(Side::Request, bytes, 7).unwrap(), (2, b"x".to_vec(), 2));
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(read(Side::Response, b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", 64).is_err());
        assert!(read(Side::Response, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 64).is_err());
        assert!(read(Side::Request, &vec![b'a'; HEAD_BYTES_MAX + 1], 4096).is_err());
    }

    #[test]
    fn heads_tell_status_line_and_headers() {
        let head = b"HTTP/1.1 503 No\r\nRetry-After:  7\r\n\r\n";
        assert_eq!(status(head), Some(503));
        assert_eq!(header(head, "retry-after"), Some("7"));
        assert_eq!(header(head, "retry"), None);
        assert_eq!(request_line(b"POST /v1/x HTTP/1.1\r\n\r\n"), Some(("POST", "/v1/x")));
    }
}
