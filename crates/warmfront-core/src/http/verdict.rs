//! A look at the beginning of an engine's answer, before the client has seen a byte of it.
//!
//! A healthy answer passes at once: for a stream the first event is looked at for an error (engines answer overload with
//! 200 and an error in the first chunk), for anything else the status is enough. An answer that refuses the request
//! or reports a fault is read whole, so that it can wait here while the request is tried elsewhere, and goes out byte for
//! byte when nobody else takes it. What one would get wrong: errors may be long or never end. One that is not complete
//! within [`HELD_BYTES_MAX`] and [`HELD_TIME_MAX`] is not held; it passes on as it comes and is the answer.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, RETRY_AFTER};
use http::{Response, StatusCode};
use memchr::memmem;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::sse::Kind;
use super::upstream::{Exchange, UpstreamError};
use crate::mailbox::Failure;

/// Most that is held of an engine's error.
pub(crate) const HELD_BYTES_MAX: usize = 64 * 1024;
/// How long an engine may take to send the rest of an error, or of the first event of a stream.
const HELD_TIME_MAX: Duration = Duration::from_secs(1);
/// A stream may begin with it.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// What to do with an answer.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// Pass it on: these bytes of its body first, then what comes.
    Passes(Bytes),
    /// It is an error and complete. The request may be tried elsewhere.
    Failed { failure: Failure, body: Bytes },
}

/// What the observer may look for in a body with these headers.
pub(crate) fn kind_of(headers: &HeaderMap) -> Kind {
    if headers.contains_key(CONTENT_ENCODING) {
        return Kind::Opaque;
    }
    let content_type = headers.get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    if is_type(content_type, b"text/event-stream") {
        Kind::Events
    } else if is_type(content_type, b"application/json") {
        Kind::Json
    } else {
        Kind::Opaque
    }
}

/// Whether a header's value begins with this type, in whatever letters.
fn is_type(value: &[u8], name: &[u8]) -> bool {
    value.get(..name.len()).is_some_and(|start| start.eq_ignore_ascii_case(name))
}

/// Looks at an answer. `quiet_from`: when to give up waiting for a stream's first chunk and let the answer begin.
///
/// Fails when the engine dies, or is silent until `deadline`, before the first chunk of a stream, and when it dies inside
/// of an error: nothing of it has reached the client yet.
pub(crate) async fn look(
    answered: &Response<()>,
    exchange: &mut Exchange,
    deadline: Instant,
    quiet_from: Option<Instant>,
) -> Result<Verdict, UpstreamError> {
    let status = answered.status();
    if let Some(accepted) = tells_of_failure(status) {
        let error = if accepted { "server_error" } else { "rejected" };
        return held(exchange, Bytes::new(), failure(error, status.as_u16(), accepted, answered.headers())).await;
    }
    if !status.is_success() || kind_of(answered.headers()) != Kind::Events {
        return Ok(Verdict::Passes(Bytes::new()));
    }
    let until = quiet_from.map_or(deadline, |from| from.min(deadline));
    let first = match tokio::time::timeout_at(until, exchange.next()).await {
        Ok(Some(first)) => first?,
        Ok(None) => return Ok(Verdict::Passes(Bytes::new())),
        Err(_) if until < deadline => return Ok(Verdict::Passes(Bytes::new())),
        Err(_elapsed) => return Err(UpstreamError::FirstByteTimeout),
    };
    let first = if is_whole(&first) { first } else { Box::pin(completed(exchange, first, until)).await? };
    let Some(status) = stream_error(&first) else { return Ok(Verdict::Passes(first)) };
    let is_refusal = is_refusal(status);
    if (400..500).contains(&status) && !is_refusal {
        return Ok(Verdict::Passes(first)); // the client's own fault
    }
    let error = if is_refusal { "stream_rejected" } else { "stream_error" };
    held(exchange, first, failure(error, status, !is_refusal, answered.headers())).await
}

/// Whether the engine may have worked on a request that it answers so; `None`: the answer is no failure of the engine.
fn tells_of_failure(status: StatusCode) -> Option<bool> {
    match status.as_u16() {
        status if is_refusal(status) => Some(false),
        500..=599 => Some(true),
        _ => None,
    }
}

/// Too many requests, or not now: said before any work.
fn is_refusal(status: u16) -> bool {
    matches!(status, 429 | 503)
}

fn failure(error: &str, status: u16, accepted: bool, headers: &HeaderMap) -> Failure {
    Failure { error: error.to_owned(), status: Some(status), retry_after_s: retry_after_s(headers), accepted }
}

/// Whole seconds. A date is ignored: the clocks of engines are not ours.
fn retry_after_s(headers: &HeaderMap) -> Option<f64> {
    let seconds: u32 = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(f64::from(seconds))
}

/// Reads the rest of an error.
async fn held(exchange: &mut Exchange, first: Bytes, failure: Failure) -> Result<Verdict, UpstreamError> {
    let until = Instant::now() + HELD_TIME_MAX;
    let mut body = BytesMut::from(&first[..]);
    while body.len() <= HELD_BYTES_MAX {
        match tokio::time::timeout_at(until, exchange.next()).await {
            Ok(None) => {
                exchange.done();
                return Ok(Verdict::Failed { failure, body: body.freeze() });
            }
            Ok(Some(piece)) => body.extend_from_slice(&piece?),
            Err(_elapsed) => break,
        }
    }
    Ok(Verdict::Passes(body.freeze()))
}

/// Whether an event, or a comment, has come to its end.
fn is_whole(begun: &[u8]) -> bool {
    let text = begun.trim_ascii_start();
    memmem::find(text, b"\n\n").or_else(|| memmem::find(text, b"\n\r\n")).is_some()
}

/// Reads the rest of a stream's first event, which came in pieces. What takes too long passes as it is.
async fn completed(exchange: &mut Exchange, first: Bytes, until: Instant) -> Result<Bytes, UpstreamError> {
    let until = until.min(Instant::now() + HELD_TIME_MAX);
    let mut begun = BytesMut::from(&first[..]);
    while !is_whole(&begun) && begun.len() <= HELD_BYTES_MAX {
        match tokio::time::timeout_at(until, exchange.next()).await {
            Ok(Some(piece)) => begun.extend_from_slice(&piece?),
            Ok(None) | Err(_) => break,
        }
    }
    Ok(begun.freeze())
}

/// The HTTP status that the first event of a stream stands for, if it is an error.
fn stream_error(first: &[u8]) -> Option<u16> {
    let has_error = memmem::find_iter(first, b"\"error\"").any(|at| !is_null(&first[at + 7..]));
    if !has_error {
        return None; // as in every healthy stream: one search of a few hundred bytes
    }
    let data = first_data(first);
    let event: ErrorEvent<'_> = serde_json::from_slice(&data).ok()?;
    let inner = event.error.or(event.response.and_then(|response| response.error));
    if let Some(error) = inner {
        return match serde_json::from_str(error.get()).ok()? {
            Value::Object(fields) => Some(status_of(fields.get("code"), fields.get("type"))),
            Value::Null => None,
            _ => Some(500),
        };
    }
    let is_error = event.object == Some("error") || event.kind == Some("error");
    is_error.then(|| status_of(event.code.as_ref(), event.kind.map(Value::from).as_ref()))
}

/// A null behind a key: `"error": null` stands in healthy events of the Responses API.
fn is_null(rest: &[u8]) -> bool {
    let rest = rest.trim_ascii_start();
    rest.strip_prefix(b":").is_some_and(|value| value.trim_ascii_start().starts_with(b"null"))
}

/// The data of the first event that has any; lines are joined as clients join them.
fn first_data(begun: &[u8]) -> Vec<u8> {
    let lines = begun.strip_prefix(BYTE_ORDER_MARK).unwrap_or(begun).split(|byte| *byte == b'\n');
    let is_data = |line: &&[u8]| line.starts_with(b"data:");
    let of_event = lines.skip_while(|line| !is_data(line)).take_while(|line| !line.trim_ascii().is_empty());
    let values: Vec<&[u8]> = of_event.filter(is_data).map(|line| line[b"data:".len()..].trim_ascii()).collect();
    values.join(&b'\n')
}

/// The errors of the streamed protocols: `{"error": {…}}` (chat, completions, messages), `{"object": "error", …}` (older
/// vLLM), `{"type": "error", …}` and `{"type": "response.failed", "response": {"error": {…}}}` (Responses).
#[derive(Deserialize)]
struct ErrorEvent<'a> {
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    #[serde(borrow)]
    response: Option<FailedResponse<'a>>,
    #[serde(borrow)]
    object: Option<&'a str>,
    #[serde(borrow, rename = "type")]
    kind: Option<&'a str>,
    code: Option<Value>,
}

#[derive(Deserialize)]
struct FailedResponse<'a> {
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

fn status_of(code: Option<&Value>, kind: Option<&Value>) -> u16 {
    let number = code.and_then(|code| code.as_u64().or_else(|| code.as_str()?.parse().ok()));
    if let Some(status) = number.and_then(|number| u16::try_from(number).ok())
        && (400..600).contains(&status)
    {
        return status;
    }
    let mut words = [code, kind].into_iter().flatten().filter_map(Value::as_str);
    words
        .find_map(|word| match word {
            "overloaded_error" | "service_unavailable_error" | "ServiceUnavailableError" => Some(503),
            "rate_limit_error" | "rate_limit_exceeded" | "RateLimitError" => Some(429),
            "invalid_request_error" | "BadRequestError" | "invalid_prompt" => Some(400),
            _ => None,
        })
        .unwrap_or(500)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_every_protocol_are_read_from_the_first_event() {
        for (first, status) in [
            (
                r#"data: {"error":{"message":"full","type":"ServiceUnavailableError","param":null,"code":503}}"#,
                Some(503),
            ),
            (r#"data: {"error":{"message":"full","type":"RateLimitError","code":null}}"#, Some(429)),
            (r#"data: {"object":"error","message":"x","type":"BadRequestError","code":400}"#, Some(400)),
            (r#"data: {"error": {"message": "boom", "code": "server_error"}}"#, Some(500)),
            (r#"data: {"error": "boom"}"#, Some(500)),
            ("event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}", Some(503)),
            (
                "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"server_error\"}}}",
                Some(500),
            ),
            ("event: error\ndata: {\"type\":\"error\",\"code\":\"rate_limit_exceeded\"}", Some(429)),
            (r#"data: {"type":"response.created","response":{"error": null,"output":[]}}"#, None),
            (r#"data: {"choices":[{"delta":{"content":"\"error\": {"}}]}"#, None),
            (r#"data: {"choices":[],"error":null}"#, None),
            ("data: {\"error\"", None),
            (": ping", None),
            (": ping\n\ndata: {\"error\":{\"code\":503}}", Some(503)),
            ("data: {\"error\":{\"message\":\"full\",\r\ndata: \"code\":503}}\r", Some(503)),
            ("\u{feff}data: {\"error\":{\"code\":503}}", Some(503)),
            ("data: {\"choices\":[]}\n\ndata: {\"error\":{\"code\":503}}", None),
            ("", None),
        ] {
            assert_eq!(stream_error(format!("{first}\n\n").as_bytes()), status, "{first}");
        }
    }

    #[test]
    fn the_pause_an_engine_asks_for_is_read_in_seconds() {
        for (value, seconds) in
            [("3", Some(3.0)), (" 0 ", Some(0.0)), ("Wed, 21 Oct 2026 07:28:00 GMT", None), ("-1", None)]
        {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, value.parse().unwrap())]);
            assert_eq!(retry_after_s(&headers), seconds, "{value}");
        }
        assert_eq!(retry_after_s(&HeaderMap::new()), None);
    }

    #[test]
    fn only_refusals_are_known_not_to_have_been_worked_on() {
        for (status, accepted) in [
            (429, Some(false)),
            (503, Some(false)),
            (500, Some(true)),
            (502, Some(true)),
            (504, Some(true)),
            (200, None),
            (400, None),
            (404, None),
            (422, None),
        ] {
            assert_eq!(tells_of_failure(StatusCode::from_u16(status).unwrap()), accepted, "{status}");
        }
    }
}
