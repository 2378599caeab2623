//! The Messages API (Anthropic's shape) as a conversation, the way the engine converts it.

use std::sync::Arc;

use super::Fallback;
use super::chat::{self, Conversation, Pairs};
use super::python;
use super::version::Version;
use crate::http::json::Json;
use crate::http::request::ParsedBody;

const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// What the engine finds out about its template at start.
#[derive(Clone, Debug)]
pub(super) struct TemplateFacts {
    /// The template refuses system messages behind the first place, so they are merged to the front.
    pub(super) merges_systems: bool,
    /// `reasoning_effort` for `thinking: disabled`: `none`, or `low` where the template does not heed `none`.
    pub(super) disabled_effort: &'static str,
}

/// Reads a Messages body.
pub(super) fn conversation(
    body: &ParsedBody,
    facts: &TemplateFacts,
    version: Version,
    exclude_tools_when_none: bool,
) -> Result<Conversation, Fallback> {
    let source = body.some("messages").and_then(Json::as_list).ok_or(Fallback::InvalidRequest)?;
    let mut messages = Vec::new();
    let mut system = system_texts(body.some("system"))?;
    if facts.merges_systems {
        for message in source.iter().filter(|message| role(message) == Some("system")) {
            system.extend(inline_system(message)?);
        }
    }
    if !system.is_empty() {
        messages.push(Json::map([("role", Json::text("system")), ("content", Json::text(&system.concat()))]));
    }
    for message in source {
        convert(message, facts.merges_systems, &mut messages)?;
    }
    let messages: Vec<Json> = messages.iter().map(chat::in_schema_order).collect();
    let choice = body.some("tool_choice").and_then(|choice| choice.get("type")).and_then(Json::as_str);
    let is_off = choice.is_some_and(|choice| &**choice == "none");
    Ok(Conversation {
        token_ids: chat::reused_token_ids(body, &messages, version)?,
        messages,
        tools: tools(body)?.filter(|_| !(is_off && exclude_tools_when_none)),
        kwargs: kwargs(body, facts, version)?,
        request_template: None,
    })
}

fn role(message: &Json) -> Option<&str> {
    message.get("role").and_then(Json::as_str).map(|role| &**role)
}

fn kind(block: &Json) -> Option<&str> {
    block.get("type").and_then(Json::as_str).map(|kind| &**kind)
}

fn nonempty<'b>(block: &'b Json, key: &str) -> Option<&'b Arc<str>> {
    block.get(key).and_then(Json::as_str).filter(|text| !text.is_empty())
}

/// The texts of a top-level `system`. A plain string keeps its billing header; the chat rules cut its first line.
fn system_texts(system: Option<&Json>) -> Result<Vec<Arc<str>>, Fallback> {
    match system {
        None => Ok(Vec::new()),
        Some(Json::Str(text)) => Ok(if text.is_empty() { Vec::new() } else { vec![Arc::clone(text)] }),
        Some(Json::List(blocks)) => Ok(block_texts(blocks)),
        Some(_) => Err(Fallback::InvalidRequest),
    }
}

fn block_texts(blocks: &[Json]) -> Vec<Arc<str>> {
    let texts = blocks.iter().filter(|block| kind(block) == Some("text")).filter_map(|block| nonempty(block, "text"));
    texts.filter(|text| !text.starts_with(BILLING_HEADER)).cloned().collect()
}

fn inline_system(message: &Json) -> Result<Option<Arc<str>>, Fallback> {
    match message.get("content") {
        Some(Json::Str(text)) => {
            Ok(Some(Arc::clone(text)).filter(|text| !text.is_empty() && !text.starts_with(BILLING_HEADER)))
        }
        Some(Json::List(blocks)) => {
            if blocks.iter().any(|block| matches!(kind(block), Some("tool_addition" | "tool_removal"))) {
                return Err(Fallback::UnsupportedContent);
            }
            let texts = block_texts(blocks);
            Ok(if texts.is_empty() { None } else { Some(Arc::from(texts.concat())) })
        }
        _ => Err(Fallback::InvalidRequest),
    }
}

fn convert(message: &Json, merges_systems: bool, messages: &mut Vec<Json>) -> Result<(), Fallback> {
    let role = role(message).ok_or(Fallback::InvalidRequest)?;
    if role == "system" {
        if let Some(text) = inline_system(message)?.filter(|_| !merges_systems) {
            messages.push(Json::map([("role", Json::text("system")), ("content", Json::Str(text))]));
        }
        return Ok(());
    }
    let mut pairs: Pairs = vec![(Arc::from("role"), Json::text(role))];
    match message.get("content") {
        Some(Json::Str(text)) => pairs.push((Arc::from("content"), Json::Str(Arc::clone(text)))),
        Some(Json::List(blocks)) => pairs.extend(convert_blocks(blocks, role, messages)?),
        _ => return Err(Fallback::InvalidRequest),
    }
    let has_content = pairs.iter().any(|(key, _)| &**key == "content");
    if role != "user" || has_content {
        messages.push(Json::Map(pairs));
    }
    Ok(())
}

/// The keys that blocks add to their message. Results of tools become messages of their own, before it.
fn convert_blocks(blocks: &[Json], role: &str, messages: &mut Vec<Json>) -> Result<Pairs, Fallback> {
    let (mut texts, mut calls, mut reasoning) = (Vec::new(), Vec::new(), Vec::new());
    for block in blocks {
        match kind(block) {
            Some("text") => texts.extend(nonempty(block, "text").cloned()),
            Some("thinking") => reasoning.extend(block.get("thinking").and_then(Json::as_str).cloned()),
            Some("redacted_thinking" | "tool_reference") => {}
            Some("tool_use") => calls.push(tool_use(block)?),
            Some("tool_result") if role == "user" => messages.extend(tool_result(block)?),
            Some("tool_result") => texts.push(Arc::from(format!("Tool result: {}", printed(block.some("content"))))),
            Some("image") => return Err(Fallback::Media),
            _ => return Err(Fallback::UnsupportedContent),
        }
    }
    let mut pairs = Pairs::new();
    if !reasoning.is_empty() {
        pairs.push((Arc::from("reasoning"), Json::text(&reasoning.concat())));
    }
    if !calls.is_empty() {
        pairs.push((Arc::from("tool_calls"), Json::List(calls)));
    }
    let content = match texts.as_slice() {
        [] => None,
        [only] => Some(Json::Str(Arc::clone(only))),
        many => Some(Json::List(many.iter().map(text_part).collect())),
    };
    pairs.extend(content.map(|content| (Arc::from("content"), content)));
    Ok(pairs)
}

fn text_part(text: &Arc<str>) -> Json {
    Json::map([("type", Json::text("text")), ("text", Json::Str(Arc::clone(text)))])
}

/// Python's `str` of a block's content.
fn printed(content: Option<&Json>) -> String {
    match content {
        Some(content) if content.is_truthy() => python::value(content).to_string(),
        _ => String::new(),
    }
}

fn tool_use(block: &Json) -> Result<Json, Fallback> {
    // Without an id the engine makes one up from the time.
    let id = nonempty(block, "id").ok_or(Fallback::UnsupportedContent)?;
    let name = block.get("name").and_then(Json::as_str).cloned().unwrap_or_default();
    let arguments = block.some("input").cloned().unwrap_or(Json::Map(Vec::new()));
    Ok(Json::map([
        ("id", Json::Str(Arc::clone(id))),
        ("type", Json::text("function")),
        ("function", Json::map([("name", Json::Str(name)), ("arguments", arguments)])),
    ]))
}

fn tool_result(block: &Json) -> Result<Vec<Json>, Fallback> {
    let id = Json::Str(block.get("tool_use_id").and_then(Json::as_str).cloned().unwrap_or_default());
    let mut references = Vec::new();
    let text = match block.some("content") {
        None => Arc::from(""),
        Some(Json::Str(text)) => Arc::clone(text),
        Some(Json::List(items)) => {
            let mut texts = Vec::new();
            for item in items {
                match kind(item) {
                    Some("text") => texts.push(item.get("text").and_then(Json::as_str).cloned().unwrap_or_default()),
                    Some("image") => return Err(Fallback::Media),
                    Some("tool_reference") => {
                        let name = nonempty(item, "tool_name").or_else(|| nonempty(item, "name"));
                        references.extend(name.map(|name| {
                            Json::map([("type", Json::text("tool_reference")), ("name", Json::Str(Arc::clone(name)))])
                        }));
                    }
                    _ => {}
                }
            }
            Arc::from(texts.join("\n"))
        }
        Some(_) => return Err(Fallback::InvalidRequest),
    };
    let message =
        |content: Json| Json::map([("role", Json::text("tool")), ("tool_call_id", id.clone()), ("content", content)]);
    let mut messages = vec![message(Json::Str(text))];
    if !references.is_empty() {
        messages.push(message(Json::List(references)));
    }
    Ok(messages)
}

fn tools(body: &ParsedBody) -> Result<Option<Vec<Json>>, Fallback> {
    let Some(tools) = body.some("tools") else {
        return Ok(None);
    };
    let tools = tools.as_list().ok_or(Fallback::InvalidRequest)?;
    tools.iter().map(tool).collect::<Result<Vec<_>, _>>().map(Some)
}

fn tool(tool: &Json) -> Result<Json, Fallback> {
    let Some(Json::Map(schema)) = tool.get("input_schema") else {
        return Err(Fallback::InvalidRequest);
    };
    let mut schema = schema.clone();
    if !schema.iter().any(|(key, _)| &**key == "type") {
        schema.push((Arc::from("type"), Json::text("object")));
    }
    let or_null = |key: &str| tool.get(key).cloned().unwrap_or(Json::Null);
    let function = Json::map([
        ("name", or_null("name")),
        ("description", or_null("description")),
        ("parameters", Json::Map(schema)),
        ("strict", or_null("strict")),
        ("defer_loading", or_null("defer_loading")),
    ]);
    chat::chat_tool(Some(&function), None)
}

/// `output_config.effort`, unless thinking is switched off.
fn kwargs(body: &ParsedBody, facts: &TemplateFacts, version: Version) -> Result<Pairs, Fallback> {
    let kwargs = chat::request_kwargs(body)?;
    let mut explicit: Pairs = vec![
        (Arc::from("add_generation_prompt"), Json::Bool(true)),
        (Arc::from("continue_final_message"), Json::Bool(false)),
    ];
    let is_disabled = body.some("thinking").and_then(|thinking| kind(thinking)) == Some("disabled");
    let disabled = Json::text(facts.disabled_effort);
    let configured = body.some("output_config").and_then(|config| config.some("effort"));
    let effort = if is_disabled { Some(&disabled) } else { configured };
    explicit.extend(chat::effort(&kwargs, effort, version));
    Ok(chat::merge(kwargs, explicit))
}
