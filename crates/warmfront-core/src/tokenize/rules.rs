//! Truncation and special tokens, as a request asks for them.

use super::Fallback;
use crate::http::json::Json;
use crate::http::request::{Endpoint, ParsedBody};

/// How many tokens are kept and which are added.
#[derive(Clone, Copy, Debug)]
pub(super) struct TokenRules {
    pub(super) add_special_tokens: bool,
    pub(super) truncate: Option<i128>,
    pub(super) side: Option<Side>,
    pub(super) wants_output: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Left,
    Right,
}

impl TokenRules {
    /// The rules of one request.
    pub(super) fn of(endpoint: Endpoint, body: &ParsedBody) -> Result<Self, Fallback> {
        let side = match body.some("truncation_side").map(|side| side.as_str().map(|side| &**side)) {
            None => None,
            Some(Some("left")) => Some(Side::Left),
            Some(Some("right")) => Some(Side::Right),
            Some(_) => return Err(Fallback::InvalidRequest),
        };
        let truncate = match body.some("truncate_prompt_tokens") {
            None => None,
            Some(Json::Int(limit)) => Some(*limit),
            Some(_) => return Err(Fallback::InvalidRequest),
        };
        let add_special_tokens = match body.some("add_special_tokens") {
            None => !matches!(endpoint, Endpoint::Chat | Endpoint::Messages),
            Some(Json::Bool(adds)) => *adds,
            Some(_) => return Err(Fallback::InvalidRequest),
        };
        let is_auto =
            body.some("truncation").and_then(Json::as_str).is_some_and(|truncation| &**truncation != "disabled");
        let wants_output = body.output_tokens_max.is_some_and(|tokens| tokens > 0);
        let truncate = if is_auto { Some(-1) } else { truncate };
        Ok(Self { add_special_tokens, truncate, side, wants_output })
    }
}
