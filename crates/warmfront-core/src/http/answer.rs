//! Answers that warmfront gives itself: errors in the protocol of the path, and the body type of all answers.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};
use http_body::{Body, Frame, SizeHint};

use super::access::Share;
use super::patience::Serving;
use super::relay::{Cut, Relay};
use super::request::Endpoint;
use crate::error::Face;

/// How a protocol writes errors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Shape {
    /// `{"error": {"message", "type", "param", "code"}}`
    #[default]
    OpenAi,
    /// The same body; in a stream an `error` event with the fields at the top.
    Responses,
    /// `{"type": "error", "error": {"type", "message"}}`
    Anthropic,
}

impl Shape {
    pub(crate) fn of(endpoint: Endpoint) -> Self {
        match endpoint {
            Endpoint::Messages => Self::Anthropic,
            Endpoint::Responses => Self::Responses,
            Endpoint::Chat | Endpoint::Completions | Endpoint::Other => Self::OpenAi,
        }
    }
}

/// A body of our own or an engine's.
#[derive(Debug)]
pub struct Reply {
    content: Content,
    /// While this lives the connection counts as busy.
    serving: Option<Serving>,
    /// While this lives the request counts among those of its client.
    share: Option<Share>,
}

#[derive(Debug)]
enum Content {
    Whole(Option<Bytes>),
    Relay(Box<Relay>),
}

impl Reply {
    pub(super) fn whole(bytes: impl Into<Bytes>) -> Self {
        let bytes = Some(bytes.into()).filter(|bytes| !bytes.is_empty());
        Self { content: Content::Whole(bytes), serving: None, share: None }
    }

    pub(super) fn relay(relay: Relay) -> Self {
        Self { content: Content::Relay(Box::new(relay)), serving: None, share: None }
    }

    /// Keeps the connection busy until this body is gone.
    pub(super) fn hold(&mut self, serving: Serving) {
        self.serving = Some(serving);
    }

    /// Counts the request as running until this body is gone.
    pub(super) fn count(&mut self, share: Option<Share>) {
        self.share = share;
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        let Self { content, serving, .. } = &mut *self;
        match content {
            Content::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Content::Relay(relay) if serving.as_ref().is_some_and(Serving::is_cut) => Poll::Ready(relay.cut()),
            Content::Relay(relay) => {
                let frame = std::task::ready!(Pin::new(&mut **relay).poll_frame(cx));
                serving.iter_mut().for_each(Serving::passes);
                Poll::Ready(frame)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.content, Content::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Content::Relay(relay) => relay.size_hint(),
        }
    }
}

pub(crate) fn json(status: u16, body: impl Into<Bytes>) -> Response<Reply> {
    with_type(status, "application/json", body)
}

pub(crate) fn with_type(status: u16, content_type: &'static str, body: impl Into<Bytes>) -> Response<Reply> {
    let mut response = Response::new(Reply::whole(body));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// An error of our own, in the shape of the path's protocol.
pub(crate) fn error(shape: Shape, face: Face, message: &str) -> Response<Reply> {
    json(face.status, error_body(shape, face, message))
}

/// Tells the client when to come back, in whole seconds, rounded up.
pub(crate) fn retry_after(response: &mut Response<Reply>, seconds: f64) {
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds.ceil().max(1.0) as u64));
}

fn error_body(shape: Shape, face: Face, message: &str) -> String {
    match shape {
        Shape::OpenAi | Shape::Responses => face.body(message),
        Shape::Anthropic => serde_json::json!({
            "type": "error",
            "error": {"type": anthropic_type(face.status), "message": message},
        })
        .to_string(),
    }
}

/// The last event of a stream that broke, `events` of which have passed.
pub(crate) fn error_event(shape: Shape, face: Face, message: &str, events: u32) -> String {
    match shape {
        Shape::OpenAi => format!("data: {}\n\n", face.body(message)),
        Shape::Anthropic => format!("event: error\ndata: {}\n\n", error_body(shape, face, message)),
        Shape::Responses => {
            let body = serde_json::json!({
                "type": "error",
                "sequence_number": events, // engines number from 0
                "code": face.code,
                "message": message,
                "param": null,
            });
            format!("event: error\ndata: {body}\n\n")
        }
    }
}

/// The error types of Anthropic's API by status.
fn anthropic_type(status: u16) -> &'static str {
    match status {
        400 | 405 | 408 | 415 | 431 => "invalid_request_error",
        401 => "authentication_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        _ => "api_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{MODEL_NOT_FOUND, UPSTREAM_UNREACHABLE};

    // bug 55
    #[test]
    fn each_protocol_gets_its_own_error_event() {
        let event = |shape| error_event(shape, UPSTREAM_UNREACHABLE, "Gone.", 3);
        assert!(event(Shape::OpenAi).starts_with("data: {\"error\":{\"message\":\"Gone.\""));
        let responses = event(Shape::Responses);
        let data = responses.strip_prefix("event: error\ndata: ").and_then(|data| data.strip_suffix("\n\n")).unwrap();
        let data: serde_json::Value = serde_json::from_str(data).unwrap();
        assert_eq!((data["type"].as_str(), data["sequence_number"].as_u64()), (Some("error"), Some(3)));
        assert_eq!(
            event(Shape::Anthropic),
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\"Gone.\"}}\n\n"
        );
    }

    #[test]
    fn an_anthropic_client_gets_an_anthropic_error() {
        let body = error_body(Shape::Anthropic, MODEL_NOT_FOUND, "No model.");
        assert_eq!(body, r#"{"type":"error","error":{"type":"not_found_error","message":"No model."}}"#);
    }

    #[test]
    fn the_time_to_come_back_is_rounded_up() {
        for (seconds, header) in [(0.0, "1"), (1.2, "2"), (30.0, "30")] {
            let mut response = error(Shape::OpenAi, MODEL_NOT_FOUND, "");
            retry_after(&mut response, seconds);
            assert_eq!(response.headers()[RETRY_AFTER], header);
        }
    }
}
