//! The refusals that hyper writes by itself, with a body that says what is wrong.
//!
//! A request whose head cannot be read never reaches our code: hyper answers 400, 414 or 431 without a body and closes. It
//! has no hook for that, so the answer is replaced where it is written, see [`Patient`](super::patience). Which protocol
//! the path speaks is not known by then: the body is in the OpenAI form.

use crate::error::{Face, HEADERS_TOO_LARGE, INVALID_BODY, URI_TOO_LONG};

/// Longer heads are not hyper's own.
const HEAD_BYTES_MAX: usize = 512;

/// An answer in place of another one, and how much of it has been written.
#[derive(Debug)]
pub(super) struct Worded {
    text: Vec<u8>,
    written: usize,
}

impl Worded {
    /// What to write instead of a whole answer of hyper's own; `None`: these bytes are none.
    pub(super) fn instead_of(bytes: &[u8]) -> Option<Self> {
        let head = std::str::from_utf8(bytes.get(..bytes.len().min(HEAD_BYTES_MAX + 1))?).ok()?;
        let fields = head.strip_prefix("HTTP/1.1 ")?.strip_suffix("\r\n\r\n")?;
        let (face, message): (Face, _) = match fields.get(..3)? {
            "400" => (INVALID_BODY, "The request is not valid HTTP."),
            "414" => (URI_TOO_LONG, "The path of the request is too long."),
            "431" => (HEADERS_TOO_LARGE, "The request header is too large."),
            _ => return None,
        };
        let kept = head.replace("\r\n\r\n", "\r\n").replace("content-length: 0\r\n", "");
        let body = face.body(message);
        let text = format!("{kept}content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        Some(Self { text: text.into_bytes(), written: 0 })
    }

    /// What is still to be written; empty: nothing.
    pub(super) fn rest(&self) -> &[u8] {
        &self.text[self.written..]
    }

    pub(super) fn wrote(&mut self, bytes: usize) {
        self.written += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_hyper_answers_by_itself_is_put_into_words() {
        let own = b"HTTP/1.1 414 URI Too Long\r\nconnection: close\r\ncontent-length: 0\r\ndate: today\r\n\r\n";
        let text = String::from_utf8(Worded::instead_of(own).unwrap().text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 414 URI Too Long\r\nconnection: close\r\ndate: today\r\n"), "{head}");
        assert!(head.ends_with(&format!("\r\ncontent-length: {}", body.len())), "{head}");
        assert!(body.contains("\"uri_too_long\""));
        for other in
            ["HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 400 Bad Request\r\n", "data: x\r\n\r\n", "HTTP/1.1 4", ""]
        {
            assert!(Worded::instead_of(other.as_bytes()).is_none(), "{other}");
        }
    }
}
