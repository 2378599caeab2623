//! What the router needs to know of a request body, read in one pass.
//!
//! Nothing is validated that is not used: roles, types and ranges are the engine's business, and its error reaches the
//! client unchanged. Only a body that is no JSON object is refused here. A body that is readable but whose tokens cannot
//! be reproduced carries the reason in [`ParsedBody::flaw`]; the caller then hashes its bytes.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use thiserror::Error;

use super::json::{self, Flaw, Json};
use crate::tokenize::Fallback;

/// What a path asks for. Only the first four carry a prompt that an engine caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    Chat,
    Completions,
    Responses,
    Messages,
    Other,
}

impl Endpoint {
    /// The endpoint of a path; the query is ignored.
    #[must_use]
    pub fn of(path: &str) -> Self {
        match path.split(['?', '#']).next().unwrap_or_default() {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completions,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Messages,
            _ => Self::Other,
        }
    }

    /// Whether this field can change tokens, routing or accounting. Everything else is stepped over.
    fn wants(self, field: &str) -> bool {
        let common = matches!(
            field,
            "model"
                | "stream"
                | "n"
                | "priority"
                | "cache_salt"
                | "user"
                | "session_id"
                | "metadata"
                | "vllm_xargs"
                | "prompt_logprobs"
        );
        common
            || match self {
                Self::Chat => matches!(
                    field,
                    "messages"
                        | "tools"
                        | "tool_choice"
                        | "documents"
                        | "add_generation_prompt"
                        | "continue_final_message"
                        | "chat_template"
                        | "chat_template_kwargs"
                        | "reasoning_effort"
                        | "add_special_tokens"
                        | "truncate_prompt_tokens"
                        | "truncation_side"
                        | "kv_transfer_params"
                        | "echo"
                        | "top_logprobs"
                        | "max_tokens"
                        | "max_completion_tokens"
                        | "stream_options"
                        | "prompt_cache_key"
                ),
                Self::Completions => matches!(
                    field,
                    "prompt"
                        | "prompt_embeds"
                        | "suffix"
                        | "echo"
                        | "logprobs"
                        | "add_special_tokens"
                        | "truncate_prompt_tokens"
                        | "truncation_side"
                        | "max_tokens"
                        | "stream_options"
                        | "prompt_cache_key"
                ),
                Self::Responses => matches!(
                    field,
                    "input"
                        | "instructions"
                        | "tools"
                        | "tool_choice"
                        | "reasoning"
                        | "truncation"
                        | "chat_template_kwargs"
                        | "previous_response_id"
                        | "previous_input_messages"
                        | "conversation"
                        | "kv_transfer_params"
                        | "max_output_tokens"
                        | "prompt_cache_key"
                ),
                Self::Messages => matches!(
                    field,
                    "messages"
                        | "system"
                        | "tools"
                        | "tool_choice"
                        | "thinking"
                        | "output_config"
                        | "chat_template_kwargs"
                        | "kv_transfer_params"
                        | "max_tokens"
                ),
                Self::Other => false,
            }
    }
}

/// The body is no JSON object. Shown to the client as 400.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ParseError {
    #[error("The request body is not valid JSON (near byte {0}).")]
    Malformed(usize),
    #[error("The request body is nested too deeply (near byte {0}).")]
    TooDeep(usize),
}

/// The facts of one body. Strings are shared with the prompt, so a clone is cheap.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts about one body")]
pub struct ParsedBody {
    /// `None`: the client names no model and gets the engine's first.
    pub model: Option<Arc<str>>,
    pub stream: bool,
    /// `stream_options.include_usage`.
    pub include_usage: bool,
    /// Answers asked for; at least 1.
    pub n: u32,
    pub output_tokens_max: Option<u32>,
    /// Body only; the header `X-Vllm-Priority` overrides it.
    pub priority: Option<i64>,
    /// An engine may find another priority in this body than we do: it has one that is no integer, which engines are free
    /// to read as one, or is not known in full.
    pub may_hide_priority: bool,
    pub cache_salt: Option<Arc<str>>,
    /// Who or what conversation this is: the most specific of the usual fields.
    pub session: Option<Session>,
    /// Answers of the model already in the conversation.
    pub turns: u32,
    /// The engine looks the prompt up in its cache. It does not where it has to give log probabilities of the prompt.
    pub reads_cache: bool,
    /// Why tokens cannot be reproduced although the body could be read.
    pub flaw: Option<Fallback>,
    pub(crate) fields: Json,
}

/// A key that the requests of one conversation or one user share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// The field it was found in.
    pub field: &'static str,
    pub key: Arc<str>,
}

impl ParsedBody {
    /// A field of the body, if the endpoint looks at it and it is not `null`.
    pub(crate) fn some(&self, field: &str) -> Option<&Json> {
        self.fields.some(field)
    }
}

/// Reads a body.
///
/// # Errors
/// It is not JSON, or not an object. An empty body counts as neither.
pub fn parse(endpoint: Endpoint, body: &Bytes) -> Result<ParsedBody, ParseError> {
    let (text, encoding_flaw) = decode(body);
    let (fields, flaw) = json::parse_fields(&text, |field| endpoint.wants(field))
        .map_err(|error| if error.is_too_deep { ParseError::TooDeep } else { ParseError::Malformed }(error.offset))?;
    let fields = Json::Map(fields);
    let priority = fields.get("priority").and_then(Json::as_int).and_then(|value| i64::try_from(value).ok());
    let is_priority_odd = priority.is_none() && fields.get("priority").is_some();
    let may_hide_priority = is_priority_odd || flaw == Some(Flaw::Size);
    let flaw = encoding_flaw.or(flaw.map(|_| Fallback::UnreadableText));
    Ok(ParsedBody {
        model: fields.get("model").and_then(Json::as_str).filter(|name| !name.is_empty()).cloned(),
        stream: fields.get("stream").is_some_and(Json::is_truthy),
        include_usage: fields
            .get("stream_options")
            .and_then(|options| options.get("include_usage"))
            .is_some_and(Json::is_truthy),
        n: count(&fields, "n").unwrap_or(1).max(1),
        output_tokens_max: ["max_completion_tokens", "max_tokens", "max_output_tokens"]
            .into_iter()
            .find_map(|field| count(&fields, field)),
        priority,
        may_hide_priority,
        cache_salt: fields.get("cache_salt").and_then(Json::as_str).cloned(),
        session: session(&fields),
        turns: turns(endpoint, &fields),
        reads_cache: !wants_prompt_logprobs(endpoint, &fields),
        flaw,
        fields,
    })
}

/// UTF-8 without a copy; UTF-16 and UTF-32, which Python detects, with one. Anything else is read lossily.
fn decode(body: &Bytes) -> (Cow<'_, str>, Option<Fallback>) {
    if let Ok(text) = std::str::from_utf8(body)
        && !text.as_bytes().iter().take(4).any(|byte| *byte == 0)
    {
        return (Cow::Borrowed(text), None);
    }
    let wide = |read: fn([u8; 2]) -> u16, skip: usize| {
        let units = body[skip..].chunks_exact(2).map(|pair| read([pair[0], pair[1]]));
        char::decode_utf16(units).map(|unit| unit.unwrap_or(char::REPLACEMENT_CHARACTER)).collect::<String>()
    };
    let text = match body.get(..2) {
        Some([0xff, 0xfe]) => wide(u16::from_le_bytes, 2),
        Some([0xfe, 0xff]) => wide(u16::from_be_bytes, 2),
        Some([_, 0]) => wide(u16::from_le_bytes, 0),
        Some([0, _]) => wide(u16::from_be_bytes, 0),
        _ => String::from_utf8_lossy(body).into_owned(),
    };
    (Cow::Owned(text), Some(Fallback::UnreadableText))
}

fn count(fields: &Json, field: &str) -> Option<u32> {
    fields.get(field).and_then(Json::as_int).map(|value| value.clamp(0, u32::MAX.into()) as u32)
}

/// With `echo`, the log probabilities that are asked for the answer are given for the prompt too.
fn wants_prompt_logprobs(endpoint: Endpoint, fields: &Json) -> bool {
    let is_given = |field| fields.get(field).is_some_and(|value| !matches!(value, Json::Null));
    let echoed = if endpoint == Endpoint::Chat { "top_logprobs" } else { "logprobs" };
    is_given("prompt_logprobs") || (fields.get("echo").is_some_and(Json::is_truthy) && is_given(echoed))
}

/// The most specific key that stays the same over a conversation first: a conversation, then a cache key, then a user.
/// `previous_response_id` names another answer with every turn; it keeps only the forks of one turn together.
fn session(fields: &Json) -> Option<Session> {
    let nested = |outer: &str, inner: &str| fields.get(outer).and_then(|value| value.get(inner)).cloned();
    let candidates = [
        ("session_id", fields.get("session_id").cloned()),
        ("conversation", fields.get("conversation").cloned()),
        ("conversation.id", nested("conversation", "id")),
        ("vllm_xargs.session_id", nested("vllm_xargs", "session_id")),
        ("prompt_cache_key", fields.get("prompt_cache_key").cloned()),
        ("metadata.user_id", nested("metadata", "user_id")),
        ("user", fields.get("user").cloned()),
        ("previous_response_id", fields.get("previous_response_id").cloned()),
    ];
    candidates.into_iter().find_map(|(field, value)| {
        let key = value?.as_str().filter(|key| !key.is_empty())?.clone();
        Some(Session { field, key })
    })
}

fn turns(endpoint: Endpoint, fields: &Json) -> u32 {
    let list = if endpoint == Endpoint::Responses { "input" } else { "messages" };
    let Some(items) = fields.get(list).and_then(Json::as_list) else {
        return 0;
    };
    let is_answer = |item: &&Json| item.get("role").and_then(Json::as_str).is_some_and(|role| &**role == "assistant");
    items.iter().filter(is_answer).count() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(endpoint: Endpoint, body: &str) -> ParsedBody {
        parse(endpoint, &Bytes::copy_from_slice(body.as_bytes())).expect("an object")
    }

    #[test]
    fn paths_become_endpoints() {
        assert_eq!(Endpoint::of("/v1/chat/completions"), Endpoint::Chat);
        assert_eq!(Endpoint::of("/v1/completions?x=1"), Endpoint::Completions);
        assert_eq!(Endpoint::of("/v1/responses"), Endpoint::Responses);
        assert_eq!(Endpoint::of("/v1/messages"), Endpoint::Messages);
        assert_eq!(Endpoint::of("/v1/messages/count_tokens"), Endpoint::Other);
    }

    #[test]
    fn facts_are_found() {
        let body = read(
            Endpoint::Chat,
            r#"{"model":"m","stream":true,"stream_options":{"include_usage":true},"n":3,"max_tokens":5,
               "max_completion_tokens":7,"priority":-2,"cache_salt":"s","user":"u","prompt_cache_key":"k",
               "messages":[{"role":"user"},{"role":"assistant"},{"role":"oddball"}]}"#,
        );
        assert_eq!((body.model.as_deref(), body.stream, body.include_usage, body.n), (Some("m"), true, true, 3));
        assert_eq!((body.output_tokens_max, body.priority, body.turns), (Some(7), Some(-2), 1));
        assert_eq!(body.session, Some(Session { field: "prompt_cache_key", key: "k".into() }));
        assert_eq!(body.cache_salt.as_deref(), Some("s"));
    }

    #[test]
    fn a_conversation_is_found_under_the_names_that_the_protocols_give_it() {
        let session =
            |endpoint, body| read(endpoint, body).session.map(|session| (session.field, session.key.to_string()));
        let found = |field, key: &str| Some((field, key.to_owned()));
        assert_eq!(session(Endpoint::Chat, r#"{"user": "u", "prompt_cache_key": ""}"#), found("user", "u"));
        assert_eq!(
            session(Endpoint::Messages, r#"{"metadata": {"user_id": "a_session_b"}}"#),
            found("metadata.user_id", "a_session_b")
        );
        assert_eq!(
            session(Endpoint::Responses, r#"{"previous_response_id": "r", "conversation": {"id": "c"}}"#),
            found("conversation.id", "c")
        );
        assert_eq!(
            session(Endpoint::Responses, r#"{"previous_response_id": "r"}"#),
            found("previous_response_id", "r")
        );
        assert_eq!(session(Endpoint::Chat, r#"{"user": 7, "metadata": "u", "session_id": null}"#), None);
    }

    #[test]
    fn prompts_that_need_log_probabilities_do_not_read_the_cache() {
        let reads = |endpoint, body| read(endpoint, body).reads_cache;
        assert!(reads(Endpoint::Completions, r#"{"prompt": "a", "logprobs": 1, "prompt_logprobs": null}"#));
        assert!(!reads(Endpoint::Completions, r#"{"prompt": "a", "prompt_logprobs": 0}"#));
        assert!(!reads(Endpoint::Completions, r#"{"prompt": "a", "logprobs": 1, "echo": true}"#));
        assert!(reads(Endpoint::Chat, r#"{"messages": [], "echo": true}"#));
        assert!(!reads(Endpoint::Chat, r#"{"messages": [], "echo": true, "top_logprobs": 2}"#));
    }

    // bug 70
    #[test]
    fn absent_and_odd_values_are_left_to_the_engine() {
        let body = read(Endpoint::Chat, r#"{"model":7,"n":"many","stream":null,"messages":"no","temperature":NaN}"#);
        assert_eq!((body.model.as_deref(), body.n, body.stream, body.turns), (None, 1, false, 0));
        assert_eq!(body.flaw, None);
    }

    #[test]
    fn a_priority_that_engines_may_read_otherwise_than_we_do_is_noticed() {
        let asked = |body: &str| {
            let body = read(Endpoint::Chat, body);
            (body.priority, body.may_hide_priority)
        };
        assert_eq!(asked("{}"), (None, false));
        assert_eq!(asked(r#"{"priority": -3}"#), (Some(-3), false));
        for odd in ["\"-100\"", "-100.0", "true", "null", "-99999999999999999999", "[-1]"] {
            assert_eq!(asked(&format!(r#"{{"priority": {odd}}}"#)), (None, true), "{odd}");
        }
        let long = format!(r#"{{"prompt": ["\ud800"{}], "priority": -3}}"#, ",0".repeat(json::VALUES_MAX));
        let body = read(Endpoint::Completions, &long);
        assert_eq!((body.priority, body.may_hide_priority), (None, true));
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for body in ["", "[]", "null", "{\"a\":1", "{} x", "model=m"] {
            assert!(parse(Endpoint::Chat, &Bytes::copy_from_slice(body.as_bytes())).is_err(), "{body}");
        }
    }

    #[test]
    fn text_that_tokens_cannot_be_made_of_is_a_flaw_and_no_error() {
        let surrogate = read(Endpoint::Chat, r#"{"model":"m","messages":[{"role":"user","content":"\ud800"}]}"#);
        assert_eq!((surrogate.model.as_deref(), surrogate.flaw), (Some("m"), Some(Fallback::UnreadableText)));
        let wide: Vec<u8> = r#"{"model":"m"}"#.encode_utf16().flat_map(u16::to_le_bytes).collect();
        let wide = parse(Endpoint::Chat, &Bytes::from(wide)).expect("UTF-16");
        assert_eq!((wide.model.as_deref(), wide.flaw), (Some("m"), Some(Fallback::UnreadableText)));
        let broken = parse(Endpoint::Chat, &Bytes::from_static(b"{\"model\":\"m\xff\"}")).expect("lossy");
        assert_eq!(broken.flaw, Some(Fallback::UnreadableText));
    }

    proptest::proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(body in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            for endpoint in [Endpoint::Chat, Endpoint::Completions, Endpoint::Responses, Endpoint::Messages, Endpoint::Other] {
                let _ = parse(endpoint, &Bytes::from(body.clone()));
            }
        }
    }
}
