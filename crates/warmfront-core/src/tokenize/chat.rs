//! Chat requests: from the fields of a body to what a template is rendered with.
//!
//! Mirrors what the engine does between validation and rendering (`docs/explanation/tokens.md` lists the rules). The
//! converters of the Responses and Messages APIs end here too. What the engine answers with an error is a fallback: the
//! body is forwarded and the engine says why it refuses.

use std::sync::Arc;

use minijinja::value::Value;

use super::Fallback;
use super::detect::ContentFormat;
use super::python::{self, Dict};
use super::template::is_space;
use super::version::Version;
use crate::http::json::{self, Json};
use crate::http::request::ParsedBody;

/// Fields of a content part that the engine's schemas know; all others are handed to templates that take parts.
const KNOWN_PART_FIELDS: &[&str] = &[
    "audio_embeds",
    "audio_url",
    "closed",
    "data",
    "file",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "name",
    "prompt_cache_breakpoint",
    "refusal",
    "text",
    "thinking",
    "type",
    "uuid",
    "video_embeds",
    "video_url",
];

/// Names that `apply_chat_template` takes for itself: in the request's own kwargs they are errors.
const RESERVED_KWARGS: &[&str] = &[
    "chat_template",
    "tokenize",
    "conversation",
    "messages",
    "model_config",
    "tokenizer",
    "return_assistant_tokens_mask",
];

const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// The mark behind the final message, cut away again after rendering. Its trailing space tells whether the template
/// trimmed the message.
const CONTINUE_MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

pub(super) type Pairs = json::Fields;

/// One conversation on its way into a template.
#[derive(Debug, Default)]
pub(super) struct Conversation {
    /// In the shape of chat completions.
    pub(super) messages: Vec<Json>,
    pub(super) tools: Option<Vec<Json>>,
    /// Keyword arguments of the request, the explicit fields already merged in.
    pub(super) kwargs: Pairs,
    pub(super) request_template: Option<Arc<str>>,
    /// Prompt token ids that the request brings along; rendering is skipped.
    pub(super) token_ids: Option<Vec<u32>>,
}

/// Reads a chat body.
pub(super) fn conversation(
    body: &ParsedBody,
    version: Version,
    exclude_tools_when_none: bool,
) -> Result<Conversation, Fallback> {
    let messages = body.some("messages").and_then(Json::as_list).ok_or(Fallback::InvalidRequest)?;
    let tools = match body.some("tools") {
        None => None,
        Some(tools) => Some(chat_tools(tools)?),
    };
    let is_off = body.some("tool_choice").and_then(Json::as_str).is_some_and(|choice| &**choice == "none");
    Ok(Conversation {
        messages: messages.iter().map(in_schema_order).collect(),
        tools: tools.filter(|_| !(is_off && exclude_tools_when_none)),
        kwargs: chat_kwargs(body, version)?,
        request_template: body.some("chat_template").and_then(Json::as_str).filter(|text| !text.is_empty()).cloned(),
        token_ids: reused_token_ids(body, messages, version)?,
    })
}

/// Merges as the engine does: `null` and `"auto"` never override.
pub(super) fn merge(defaults: Pairs, overrides: Pairs) -> Pairs {
    let mut merged = defaults;
    for (key, value) in overrides {
        let is_unset = matches!(&value, Json::Null) || value.as_str().is_some_and(|text| &**text == "auto");
        if is_unset {
            continue;
        }
        match merged.iter_mut().find(|(name, _)| *name == key) {
            Some(entry) => entry.1 = value,
            None => merged.push((key, value)),
        }
    }
    merged
}

/// `chat_template_kwargs` of a request, refused when they name what is not theirs.
pub(super) fn request_kwargs(body: &ParsedBody) -> Result<Pairs, Fallback> {
    match body.some("chat_template_kwargs") {
        None => Ok(Vec::new()),
        Some(Json::Map(pairs)) if !pairs.iter().any(|(key, _)| RESERVED_KWARGS.contains(&&**key)) => Ok(pairs.clone()),
        Some(_) => Err(Fallback::InvalidRequest),
    }
}

/// `reasoning_effort` and what it implies.
pub(super) fn effort(kwargs: &Pairs, effort: Option<&Json>, version: Version) -> Pairs {
    let Some(effort) = effort else {
        return Vec::new();
    };
    let mut pairs = vec![(Arc::from("reasoning_effort"), effort.clone())];
    let is_explicit = kwargs.iter().any(|(key, _)| &**key == "enable_thinking");
    if !is_explicit && version >= Version::EFFORT_SETS_THINKING {
        let thinks = effort.as_str().is_none_or(|effort| &**effort != "none");
        pairs.push((Arc::from("enable_thinking"), Json::Bool(thinks)));
    }
    pairs
}

fn chat_kwargs(body: &ParsedBody, version: Version) -> Result<Pairs, Fallback> {
    let kwargs = request_kwargs(body)?;
    let flag = |field: &str, default: bool| match body.some(field) {
        None => Ok(default),
        Some(Json::Bool(value)) => Ok(*value),
        Some(_) => Err(Fallback::InvalidRequest),
    };
    let mut explicit = vec![
        (Arc::from("add_generation_prompt"), Json::Bool(flag("add_generation_prompt", true)?)),
        (Arc::from("continue_final_message"), Json::Bool(flag("continue_final_message", false)?)),
    ];
    if let Some(documents) = body.some("documents") {
        explicit.push((Arc::from("documents"), documents.clone()));
    }
    explicit.extend(effort(&kwargs, body.some("reasoning_effort"), version));
    Ok(merge(kwargs, explicit))
}

/// Ids that a client or a prefill router hands over so that the engine need not tokenize again.
pub(super) fn reused_token_ids(
    body: &ParsedBody,
    messages: &[Json],
    version: Version,
) -> Result<Option<Vec<u32>>, Fallback> {
    let ids = body.some("kv_transfer_params").and_then(|params| params.some("prompt_token_ids"));
    let Some(ids) = ids.filter(|_| version >= Version::REUSED_TOKEN_IDS) else {
        return Ok(None);
    };
    if body.some("echo").is_some_and(Json::is_truthy) || messages.iter().any(has_media) {
        return Ok(None);
    }
    token_ids(ids).filter(|ids| !ids.is_empty()).map(Some).ok_or(Fallback::InvalidRequest)
}

/// A list of token ids, or nothing if any element is something else.
pub(super) fn token_ids(ids: &Json) -> Option<Vec<u32>> {
    ids.as_list()?.iter().map(|id| u32::try_from(id.as_int()?).ok()).collect()
}

fn has_media(message: &Json) -> bool {
    let parts = message.get("content").and_then(Json::as_list).unwrap_or_default();
    parts.iter().any(|part| match part {
        Json::Map(_) => {
            let kind = part.get("type").map_or(Some("text"), |kind| kind.as_str().map(|kind| &**kind));
            !kind.is_some_and(|kind| is_text_type(kind) || kind == "tool_reference")
        }
        _ => false,
    })
}

fn is_text_type(kind: &str) -> bool {
    matches!(kind, "text" | "input_text" | "output_text" | "refusal" | "thinking")
}

/// Tools in the order in which the engine's schema writes them; unknown keys go, a missing description is `null`.
fn chat_tools(tools: &Json) -> Result<Vec<Json>, Fallback> {
    let tools = tools.as_list().filter(|tools| !tools.is_empty()).ok_or(Fallback::InvalidRequest)?;
    tools.iter().map(|tool| chat_tool(tool.some("function"), tool.some("defer_loading"))).collect()
}

/// One tool from its function object.
pub(super) fn chat_tool(function: Option<&Json>, defer_loading: Option<&Json>) -> Result<Json, Fallback> {
    let function = function.ok_or(Fallback::InvalidRequest)?;
    let name = function.get("name").and_then(Json::as_str).ok_or(Fallback::InvalidRequest)?;
    let or_null = |key: &str| (Arc::from(key), function.get(key).cloned().unwrap_or(Json::Null));
    let mut inner =
        vec![(Arc::from("name"), Json::Str(Arc::clone(name))), or_null("description"), or_null("parameters")];
    let deferred = function.some("defer_loading").or(defer_loading);
    inner.extend(function.some("strict").map(|strict| (Arc::from("strict"), strict.clone())));
    inner.extend(deferred.map(|deferred| (Arc::from("defer_loading"), deferred.clone())));
    let mut outer: Pairs = vec![(Arc::from("type"), Json::text("function")), (Arc::from("function"), Json::Map(inner))];
    outer.extend(defer_loading.map(|deferred| (Arc::from("defer_loading"), deferred.clone())));
    Ok(Json::Map(outer))
}

/// Chat messages pass a schema that writes tool calls in its own order.
pub(super) fn in_schema_order(message: &Json) -> Json {
    let (Json::Map(pairs), Some(calls)) = (message, message.get("tool_calls").and_then(Json::as_list)) else {
        return message.clone();
    };
    let ordered: Vec<Json> = calls
        .iter()
        .map(|call| {
            let call = first_keys(call, &["id", "function", "type"]);
            let Json::Map(fields) = call else { return call };
            let fields = fields.into_iter().map(|(key, value)| match &*key {
                "function" => (key, first_keys(&value, &["arguments", "name"])),
                _ => (key, value),
            });
            Json::Map(fields.collect())
        })
        .collect();
    let replaced = pairs.iter().map(|(key, value)| match &**key {
        "tool_calls" => (Arc::clone(key), Json::List(ordered.clone())),
        _ => (Arc::clone(key), value.clone()),
    });
    Json::Map(replaced.collect())
}

/// The object with these keys first, in this order.
fn first_keys(object: &Json, keys: &[&str]) -> Json {
    let Json::Map(pairs) = object else {
        return object.clone();
    };
    let first = keys.iter().filter_map(|key| pairs.iter().find(|(name, _)| &**name == *key));
    let rest = pairs.iter().filter(|(name, _)| !keys.contains(&&**name));
    Json::Map(first.chain(rest).cloned().collect())
}

/// The messages as the template sees them.
pub(super) fn messages(
    messages: &[Json],
    format: ContentFormat,
    knows_developer: bool,
    version: Version,
) -> Result<Vec<Shown>, Fallback> {
    let mut shown =
        messages.iter().map(|message| shown_message(message, format, version)).collect::<Result<Vec<_>, _>>()?;
    let has_developer = shown.iter().any(|message| role_of(message) == Some("developer"));
    if has_developer && !knows_developer && version >= Version::DEVELOPER_TO_SYSTEM {
        shown = merge_systems(shown.into_iter().map(developer_to_system).collect());
    }
    if shown.is_empty() { Err(Fallback::InvalidRequest) } else { Ok(shown) }
}

/// A message as the template sees it.
pub(super) type Shown = Vec<(Arc<str>, Value)>;

fn find<'m>(message: &'m Shown, key: &str) -> Option<&'m Value> {
    message.iter().find(|(name, _)| &**name == key).map(|(_, value)| value)
}

fn role_of(message: &Shown) -> Option<&str> {
    find(message, "role").and_then(Value::as_str)
}

fn shown_message(message: &Json, format: ContentFormat, version: Version) -> Result<Shown, Fallback> {
    let role = message.get("role").and_then(Json::as_str).ok_or(Fallback::InvalidRequest)?;
    let mut parts = content_parts(message)?;
    if &**role == "system" && version >= Version::CHAT_BILLING_HEADER {
        parts = parts.into_iter().filter_map(without_billing_header).collect();
    }
    let content = match format {
        ContentFormat::String => joined(parts),
        ContentFormat::Parts if &**role == "tool" && parts.iter().all(Part::is_text) => {
            joined_all(parts.iter().map(|part| Arc::clone(&part.text)))
        }
        ContentFormat::Parts => python::list(parts.into_iter().map(Part::into_value).collect()),
    };
    let mut shown = vec![(Arc::from("role"), Value::from(Arc::clone(role))), (Arc::from("content"), content)];
    match &**role {
        "assistant" => shown.extend(assistant_extras(message)?),
        "tool" => {
            shown.extend(message.get("tool_call_id").map(|id| (Arc::from("tool_call_id"), python::value(id))));
        }
        _ => {}
    }
    for key in ["name", "task"] {
        shown.extend(
            message.get(key).and_then(Json::as_str).map(|text| (Arc::from(key), Value::from(Arc::clone(text)))),
        );
    }
    if &**role == "developer" {
        let tools = message.get("tools").map_or_else(|| Value::from(()), python::value);
        shown.push((Arc::from("tools"), tools));
    }
    Ok(shown)
}

/// A text part, or a reference to a tool, which templates of either format see as it is.
struct Part {
    kind: &'static str,
    text: Arc<str>,
    extra: Pairs,
}

impl Part {
    fn text(text: &Arc<str>) -> Self {
        Self { kind: "text", text: Arc::clone(text), extra: Vec::new() }
    }

    fn is_text(&self) -> bool {
        self.kind == "text"
    }

    fn into_value(self) -> Value {
        let key = if self.is_text() { "text" } else { "name" };
        let mut pairs = vec![(Arc::from("type"), Value::from(self.kind)), (Arc::from(key), Value::from(self.text))];
        pairs.extend(self.extra.iter().map(|(key, value)| (Arc::clone(key), python::value(value))));
        python::dict(pairs)
    }
}

fn content_parts(message: &Json) -> Result<Vec<Part>, Fallback> {
    match message.get("content") {
        None | Some(Json::Null) => Ok(Vec::new()),
        Some(Json::Str(text)) => Ok(vec![Part::text(text)]),
        Some(Json::List(parts)) => parts.iter().filter_map(|part| content_part(part).transpose()).collect(),
        Some(_) => Err(Fallback::InvalidRequest),
    }
}

/// One part; `None` for a text without text, which the engine skips.
fn content_part(part: &Json) -> Result<Option<Part>, Fallback> {
    let pairs = match part {
        Json::Str(text) => return Ok(Some(Part::text(text))),
        Json::Map(pairs) => pairs,
        _ => return Err(Fallback::InvalidRequest),
    };
    let Some(kind) = part.some("type").and_then(Json::as_str) else {
        return Err(Fallback::Media);
    };
    if part.some("uuid").is_some() {
        return Err(Fallback::Media);
    }
    let (kind, key) = match &**kind {
        "text" | "input_text" | "output_text" => ("text", "text"),
        "refusal" => ("text", "refusal"),
        "thinking" => ("text", "thinking"),
        "tool_reference" => ("tool_reference", "name"),
        _ => return Err(Fallback::Media),
    };
    let text = match part.some(key) {
        Some(Json::Str(text)) => Arc::clone(text),
        None if matches!(part.get("type").and_then(Json::as_str).map(|kind| &**kind), Some("text" | "refusal")) => {
            return Ok(None);
        }
        _ => return Err(Fallback::InvalidRequest),
    };
    let is_extra = |(key, _): &&(Arc<str>, Json)| kind == "text" && !KNOWN_PART_FIELDS.contains(&&**key);
    Ok(Some(Part { kind, text, extra: pairs.iter().filter(is_extra).cloned().collect() }))
}

fn without_billing_header(part: Part) -> Option<Part> {
    if !part.is_text() || !part.text.starts_with(BILLING_HEADER) {
        return Some(part);
    }
    let rest = part.text.split_once('\n').map(|(_, rest)| rest).filter(|rest| !rest.is_empty())?;
    Some(Part { text: Arc::from(rest), ..part })
}

/// Text parts as one string. Empty parts leave no line, as in the engine.
fn joined(parts: Vec<Part>) -> Value {
    joined_all(parts.into_iter().map(|part| part.text).filter(|text| !text.is_empty()))
}

fn joined_all(mut texts: impl Iterator<Item = Arc<str>>) -> Value {
    let Some(first) = texts.next() else {
        return Value::from("");
    };
    let Some(second) = texts.next() else {
        return Value::from(first);
    };
    let mut all = String::with_capacity(first.len() + second.len() + 1);
    all.push_str(&first);
    for text in std::iter::once(second).chain(texts) {
        all.push('\n');
        all.push_str(&text);
    }
    Value::from(all)
}

fn assistant_extras(message: &Json) -> Result<Shown, Fallback> {
    let mut extras = Vec::new();
    match message.some("tool_calls") {
        None => {}
        Some(Json::List(calls)) if calls.is_empty() => {}
        Some(Json::List(calls)) => {
            let calls = calls.iter().map(tool_call).collect::<Result<Vec<_>, _>>()?;
            extras.push((Arc::from("tool_calls"), python::list(calls)));
        }
        Some(_) => return Err(Fallback::InvalidRequest),
    }
    let reasoning = message.some("reasoning").or_else(|| message.some("reasoning_content"));
    if let Some(reasoning) = reasoning {
        let reasoning = reasoning.as_str().ok_or(Fallback::InvalidRequest)?;
        for key in ["reasoning", "reasoning_content"] {
            extras.push((Arc::from(key), Value::from(Arc::clone(reasoning))));
        }
    }
    Ok(extras)
}

/// Templates want arguments as an object; what is none becomes an empty one.
fn tool_call(call: &Json) -> Result<Value, Fallback> {
    let is_function = call.get("type").is_none_or(|kind| kind.as_str().is_some_and(|kind| &**kind == "function"));
    let (Json::Map(fields), Some(Json::Map(function)), true) = (call, call.get("function"), is_function) else {
        return Err(Fallback::InvalidRequest);
    };
    let arguments = match call.get("function").and_then(|function| function.get("arguments")) {
        Some(Json::Map(pairs)) => python::value(&Json::Map(pairs.clone())),
        Some(Json::Str(text)) => match json::parse(text) {
            Ok((_, Some(_))) => return Err(Fallback::UnreadableText),
            Ok((Json::Map(pairs), None)) => python::value(&Json::Map(pairs)),
            _ => python::dict(Vec::new()),
        },
        _ => python::dict(Vec::new()),
    };
    let mut shown: Shown = function.iter().map(|(key, value)| (Arc::clone(key), python::value(value))).collect();
    match shown.iter_mut().find(|(key, _)| &**key == "arguments") {
        Some(entry) => entry.1 = arguments,
        None => shown.push((Arc::from("arguments"), arguments)),
    }
    let shown_function = python::dict(shown);
    let outer = fields.iter().map(|(key, value)| match &**key {
        "function" => (Arc::clone(key), shown_function.clone()),
        _ => (Arc::clone(key), python::value(value)),
    });
    Ok(python::dict(outer.collect()))
}

fn developer_to_system(message: Shown) -> Shown {
    if role_of(&message) != Some("developer") {
        return message;
    }
    let kept = message.into_iter().filter(|(key, _)| &**key != "tools");
    kept.map(|(key, value)| if &*key == "role" { (key, Value::from("system")) } else { (key, value) }).collect()
}

/// All system messages as one at the front, if more than one stands there or one stands elsewhere.
fn merge_systems(messages: Vec<Shown>) -> Vec<Shown> {
    let is_system = |message: &Shown| role_of(message) == Some("system");
    if !messages.iter().skip(1).any(is_system) {
        return messages;
    }
    let (systems, others): (Vec<Shown>, Vec<Shown>) = messages.into_iter().partition(is_system);
    let texts: Vec<String> = systems.iter().map(plain_content).filter(|text| !text.is_empty()).collect();
    let merged =
        vec![(Arc::from("role"), Value::from("system")), (Arc::from("content"), Value::from(texts.join("\n\n")))];
    std::iter::once(merged).chain(others).collect()
}

fn plain_content(message: &Shown) -> String {
    let Some(content) = find(message, "content") else {
        return String::new();
    };
    if let Some(text) = content.as_str() {
        return text.to_owned();
    }
    let parts = content.try_iter().into_iter().flatten();
    let texts = parts.filter_map(|part| part.get_attr("text").ok()?.as_str().map(str::to_owned));
    texts.collect::<Vec<_>>().join("\n")
}

/// Marks the end of the final message, so that everything the template puts behind it can be cut.
pub(super) struct Continuation {
    text: String,
}

impl Continuation {
    /// Puts the mark in place.
    pub(super) fn mark(messages: &mut [Shown], source: &str) -> Result<Self, Fallback> {
        let last = messages.last_mut().filter(|_| source.contains("content")).ok_or(Fallback::InvalidRequest)?;
        let content = last.iter_mut().find(|(key, _)| &**key == "content").map(|(_, value)| value);
        let content = content.ok_or(Fallback::InvalidRequest)?;
        if let Some(text) = content.as_str().map(str::to_owned) {
            *content = Value::from(text.clone() + CONTINUE_MARK);
            return Ok(Self { text });
        }
        let mut parts: Vec<Value> = content.try_iter().map_err(|_| Fallback::InvalidRequest)?.collect();
        let slot = parts.iter().rposition(|part| part.get_attr("text").is_ok_and(|text| text.as_str().is_some()));
        let slot = slot.ok_or(Fallback::InvalidRequest)?;
        let dict = parts[slot].downcast_object::<Dict>().ok_or(Fallback::InvalidRequest)?;
        let mut text = String::new();
        let marked = dict.0.iter().map(|(key, value)| {
            if &**key != "text" {
                return (Arc::clone(key), value.clone());
            }
            value.as_str().unwrap_or_default().clone_into(&mut text);
            (Arc::clone(key), Value::from(text.clone() + CONTINUE_MARK))
        });
        parts[slot] = python::dict(marked.collect());
        *content = python::list(parts);
        Ok(Self { text })
    }

    /// Cuts the rendered text where the mark stands.
    pub(super) fn cut(&self, mut rendered: String) -> Result<String, Fallback> {
        let mark = rendered.rfind(CONTINUE_MARK.trim_end()).ok_or(Fallback::TemplateError)?;
        if !rendered.contains(self.text.trim_matches(is_space)) {
            return Err(Fallback::TemplateError);
        }
        let keeps_space = rendered[mark..].starts_with(CONTINUE_MARK);
        rendered.truncate(mark);
        if !keeps_space {
            rendered.truncate(rendered.trim_end_matches(is_space).len());
        }
        Ok(rendered)
    }
}
