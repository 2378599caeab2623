//! What the router needs to know of a request body.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    Chat,
    Completions,
    Responses,
    Messages,
    Other,
}

impl Endpoint {
    #[must_use]
    pub fn of(path: &str) -> Self {
        match path {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completions,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Messages,
            _ => Self::Other,
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("The request body is not a JSON object.")]
pub struct ParseError;

#[derive(Clone, Debug, Default)]
pub struct ParsedBody {
    pub model: Option<Arc<str>>,
    pub stream: bool,
    pub output_tokens_max: Option<u32>,
    pub priority: Option<i64>,
    pub cache_salt: Option<Arc<str>>,
    pub session: Option<Session>,
    pub turns: u32,
}

#[derive(Clone, Debug)]
pub struct Session {
    pub field: &'static str,
    pub key: Arc<str>,
}

pub fn parse(_endpoint: Endpoint, body: &Bytes) -> Result<ParsedBody, ParseError> {
    let value: Value = serde_json::from_slice(body).map_err(|_| ParseError)?;
    let fields = value.as_object().ok_or(ParseError)?;
    let text = |name: &str| fields.get(name).and_then(Value::as_str).map(Arc::from);
    Ok(ParsedBody {
        model: text("model"),
        stream: fields.get("stream").and_then(Value::as_bool).unwrap_or(false),
        output_tokens_max: fields.get("max_tokens").and_then(Value::as_u64).map(|max| max as u32),
        priority: fields.get("priority").and_then(Value::as_i64),
        cache_salt: text("cache_salt"),
        session: text("session_id").map(|key| Session { field: "session_id", key }),
        turns: 0,
    })
}
