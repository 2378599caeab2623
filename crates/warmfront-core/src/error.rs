//! What can go wrong, and the face each error shows to a client.
//!
//! The faces are the Rust half of one table; `python/warmfront/errors.py` is the other half and a test compares the two.

use thiserror::Error;

/// How an error looks from outside: HTTP status and the `type` and `code` of the OpenAI error body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Face {
    pub status: u16,
    pub kind: &'static str,
    pub code: &'static str,
}

const fn face(status: u16, kind: &'static str, code: &'static str) -> Face {
    Face { status, kind, code }
}

pub const INVALID_BODY: Face = face(400, "invalid_request_error", "invalid_body");
pub const CONTEXT_LENGTH_EXCEEDED: Face = face(400, "invalid_request_error", "context_length_exceeded");
pub const INVALID_API_KEY: Face = face(401, "invalid_request_error", "invalid_api_key");
pub const MODEL_NOT_FOUND: Face = face(404, "invalid_request_error", "model_not_found");
pub const PATH_NOT_FOUND: Face = face(404, "invalid_request_error", "path_not_found");
pub const METHOD_NOT_ALLOWED: Face = face(405, "invalid_request_error", "method_not_allowed");
pub const REQUEST_TIMEOUT: Face = face(408, "invalid_request_error", "request_timeout");
pub const BODY_TOO_LARGE: Face = face(413, "invalid_request_error", "body_too_large");
pub const URI_TOO_LONG: Face = face(414, "invalid_request_error", "uri_too_long");
pub const UNSUPPORTED_ENCODING: Face = face(415, "invalid_request_error", "unsupported_encoding");
pub const RATE_LIMIT_EXCEEDED: Face = face(429, "rate_limit_error", "rate_limit_exceeded");
pub const FLEET_SATURATED: Face = face(429, "rate_limit_error", "fleet_saturated");
pub const QUEUE_TIMEOUT: Face = face(429, "rate_limit_error", "queue_timeout");
pub const HEADERS_TOO_LARGE: Face = face(431, "invalid_request_error", "headers_too_large");
pub const INTERNAL_ERROR: Face = face(500, "server_error", "internal_error");
pub const UPSTREAM_UNREACHABLE: Face = face(502, "server_error", "upstream_unreachable");
pub const NO_READY_REPLICA: Face = face(503, "service_unavailable_error", "no_ready_replica");
pub const ROUTER_OVERLOADED: Face = face(503, "service_unavailable_error", "router_overloaded");
pub const UPSTREAM_TIMEOUT: Face = face(504, "server_error", "upstream_timeout");

/// Every face the core answers with. Exposed to Python as `core.error_faces()`.
pub const FACES: &[Face] = &[
    INVALID_BODY,
    CONTEXT_LENGTH_EXCEEDED,
    INVALID_API_KEY,
    MODEL_NOT_FOUND,
    PATH_NOT_FOUND,
    METHOD_NOT_ALLOWED,
    REQUEST_TIMEOUT,
    BODY_TOO_LARGE,
    URI_TOO_LONG,
    UNSUPPORTED_ENCODING,
    RATE_LIMIT_EXCEEDED,
    FLEET_SATURATED,
    QUEUE_TIMEOUT,
    HEADERS_TOO_LARGE,
    INTERNAL_ERROR,
    UPSTREAM_UNREACHABLE,
    NO_READY_REPLICA,
    ROUTER_OVERLOADED,
    UPSTREAM_TIMEOUT,
];

impl Face {
    /// The face with this `code`, as a `Shed` command names it. Unknown codes are our own bug and show as internal.
    #[must_use]
    pub fn by_code(code: &str) -> Self {
        FACES.iter().copied().find(|face| face.code == code).unwrap_or(INTERNAL_ERROR)
    }

    /// The OpenAI error body: `{"error": {"message", "type", "param", "code"}}`.
    #[must_use]
    pub fn body(&self, message: &str) -> String {
        serde_json::json!({"error": {"message": message, "type": self.kind, "param": null, "code": self.code}})
            .to_string()
    }
}

/// What the core itself reports to its caller (never to a client).
#[derive(Debug, Error)]
pub enum CoreError {
    #[error("configuration: {0}")]
    Config(String),
    #[error("cannot listen on {address}: {source}")]
    Listen { address: String, source: std::io::Error },
    #[error("cannot read {path}: {reason}")]
    File { path: String, reason: String },
    #[error("command queue: {0}")]
    Command(String),
    #[error("request {0} is not known: its client has left")]
    UnknownRequest(u64),
    #[error("a thread of the core has panicked; the log says where")]
    Panic,
    #[error("KV event stream: {0}")]
    EventStream(String),
}
