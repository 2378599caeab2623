//! The Responses API as a conversation, the way the engine converts it.
//!
//! Items that carry reasoning, text and calls of one answer become one assistant message. A request that continues a
//! stored response cannot be reproduced here: its history lives in the engine.

use std::sync::Arc;

use super::Fallback;
use super::chat::{self, Conversation, Pairs};
use super::python;
use super::version::Version;
use crate::http::json::Json;
use crate::http::request::ParsedBody;

/// Separates namespace and name of a tool inside a namespace.
const NAMESPACE_SEPARATOR: &str = "__";

/// Tools that the engine runs or ignores; they never reach a template.
const UNSHOWN_TOOLS: &[&str] = &[
    "web_search",
    "web_search_preview",
    "web_search_2025_08_26",
    "web_search_preview_2025_03_11",
    "file_search",
    "code_interpreter",
    "computer_use_preview",
    "image_generation",
    "local_shell",
    "mcp",
];

/// Reads a Responses body.
pub(super) fn conversation(
    body: &ParsedBody,
    version: Version,
    exclude_tools_when_none: bool,
) -> Result<Conversation, Fallback> {
    if body.some("previous_response_id").is_some() || body.some("previous_input_messages").is_some() {
        return Err(Fallback::StoredHistory);
    }
    let mut messages = Vec::new();
    if let Some(instructions) = body.some("instructions").filter(|text| text.is_truthy()) {
        let text = instructions.as_str().ok_or(Fallback::InvalidRequest)?;
        messages.push(Json::map([("role", Json::text("system")), ("content", Json::Str(Arc::clone(text)))]));
    }
    let input = body.some("input").ok_or(Fallback::InvalidRequest)?;
    match input {
        Json::Str(text) => {
            messages.push(Json::map([("role", Json::text("user")), ("content", Json::Str(Arc::clone(text)))]));
        }
        Json::List(items) => messages.extend(from_items(items)?),
        _ => return Err(Fallback::InvalidRequest),
    }
    let is_off = body.some("tool_choice").and_then(Json::as_str).is_some_and(|choice| &**choice == "none");
    Ok(Conversation {
        token_ids: chat::reused_token_ids(body, &messages, version)?,
        messages,
        tools: tools(body)?.filter(|_| !(is_off && exclude_tools_when_none)),
        kwargs: kwargs(body, continues(input), version)?,
        request_template: None,
    })
}

fn kwargs(body: &ParsedBody, continues: bool, version: Version) -> Result<Pairs, Fallback> {
    let kwargs = chat::request_kwargs(body)?;
    let mut explicit: Pairs = vec![
        (Arc::from("add_generation_prompt"), Json::Bool(!continues)),
        (Arc::from("continue_final_message"), Json::Bool(continues)),
    ];
    let effort = body.some("reasoning").and_then(|reasoning| reasoning.some("effort"));
    explicit.extend(chat::effort(&kwargs, effort, version));
    Ok(chat::merge(kwargs, explicit))
}

/// Whether the last item is an unfinished message that the model should go on with.
fn continues(input: &Json) -> bool {
    let Some(last) = input.as_list().and_then(<[Json]>::last) else {
        return false;
    };
    let text = |key: &str| last.get(key).and_then(Json::as_str).map(|text| &**text);
    matches!(text("type"), None | Some("message" | "reasoning"))
        && matches!(text("status"), Some("in_progress" | "incomplete"))
}

fn tools(body: &ParsedBody) -> Result<Option<Vec<Json>>, Fallback> {
    let Some(tools) = body.some("tools") else {
        return Ok(None);
    };
    let tools = tools.as_list().ok_or(Fallback::InvalidRequest)?;
    if tools.is_empty() {
        return Ok(None);
    }
    let mut shown = Vec::new();
    for tool in tools {
        match tool.get("type").and_then(Json::as_str).map(|kind| &**kind) {
            Some("function") => shown.push(chat::chat_tool(Some(tool), None)?),
            Some("namespace") => shown.extend(namespaced_tools(tool)?),
            Some(kind) if UNSHOWN_TOOLS.contains(&kind) => {}
            _ => return Err(Fallback::UnsupportedContent),
        }
    }
    Ok(Some(shown))
}

fn namespaced_tools(namespace: &Json) -> Result<Vec<Json>, Fallback> {
    let outer = namespace.get("name").and_then(Json::as_str).ok_or(Fallback::InvalidRequest)?;
    let inner = namespace.get("tools").and_then(Json::as_list).ok_or(Fallback::InvalidRequest)?;
    let mut shown = Vec::new();
    for tool in inner {
        let (Json::Map(pairs), Some(name)) = (tool, tool.get("name").and_then(Json::as_str)) else {
            return Err(Fallback::InvalidRequest);
        };
        if tool.get("type").and_then(Json::as_str).is_none_or(|kind| &**kind != "function") {
            continue;
        }
        let full = Json::text(&format!("{outer}{NAMESPACE_SEPARATOR}{name}"));
        let renamed = pairs.iter().map(|(key, value)| match &**key {
            "name" => (Arc::clone(key), full.clone()),
            _ => (Arc::clone(key), value.clone()),
        });
        shown.push(chat::chat_tool(Some(&Json::Map(renamed.collect())), None)?);
    }
    Ok(shown)
}

fn from_items(items: &[Json]) -> Result<Vec<Json>, Fallback> {
    let mut messages: Vec<Json> = Vec::new();
    for item in items {
        let kind = item.get("type").and_then(Json::as_str).map(|kind| &**kind);
        let role = item.get("role").and_then(Json::as_str).map(|role| &**role);
        match (kind, role) {
            (Some("function_call"), _) => {
                let name = text(item, "name")?;
                let name = match item.some("namespace").and_then(Json::as_str).filter(|outer| !outer.is_empty()) {
                    Some(outer) => Json::text(&format!("{outer}{NAMESPACE_SEPARATOR}{name}")),
                    None => Json::Str(name),
                };
                add_call(&mut messages, item, name, Json::Str(text(item, "arguments")?))?;
            }
            (Some("custom_tool_call"), _) => {
                let input = item.some("input").cloned().unwrap_or_else(|| Json::text(""));
                let arguments = python::dumps(&Json::map([("input", input)]), false);
                add_call(&mut messages, item, Json::Str(text(item, "name")?), Json::text(&arguments))?;
            }
            (Some("reasoning"), _) => {
                let reasoning = reasoning_text(item)?;
                add_to_answer(&mut messages, "reasoning", Json::Str(reasoning));
            }
            (Some("function_call_output" | "custom_tool_call_output"), _) => messages.push(Json::map([
                ("role", Json::text("tool")),
                ("content", item.get("output").cloned().unwrap_or(Json::Null)),
                ("tool_call_id", item.get("call_id").cloned().unwrap_or(Json::Null)),
            ])),
            (_, Some("assistant")) => match answer_text(item)? {
                Some(text) => add_to_answer(&mut messages, "content", Json::Str(text)),
                None => messages.push(item.clone()),
            },
            (None | Some("message"), Some(_)) => messages.push(item.clone()),
            _ => return Err(Fallback::UnsupportedContent),
        }
    }
    Ok(messages)
}

fn text(item: &Json, key: &str) -> Result<Arc<str>, Fallback> {
    item.get(key).and_then(Json::as_str).cloned().ok_or(Fallback::InvalidRequest)
}

/// The first text of an answer, whichever way its content is written.
fn answer_text(item: &Json) -> Result<Option<Arc<str>>, Fallback> {
    match item.get("content") {
        Some(Json::Str(text)) => Ok(Some(Arc::clone(text))),
        Some(Json::List(parts)) => match parts.first() {
            Some(part) if part.get("type").and_then(Json::as_str).is_some_and(|kind| &**kind == "refusal") => {
                Err(Fallback::UnsupportedContent)
            }
            Some(part) => Ok(part.some("text").and_then(Json::as_str).cloned()),
            None => Err(Fallback::UnsupportedContent),
        },
        _ => Ok(None),
    }
}

fn reasoning_text(item: &Json) -> Result<Arc<str>, Fallback> {
    if item.some("encrypted_content").is_some_and(Json::is_truthy) {
        return Err(Fallback::UnsupportedContent);
    }
    let summary = item.get("summary").and_then(Json::as_list).ok_or(Fallback::InvalidRequest)?;
    let content = item.some("content").and_then(Json::as_list).unwrap_or_default();
    match content.first().or_else(|| summary.first()) {
        Some(part) => text(part, "text"),
        None => Ok(Arc::from("")),
    }
}

/// Adds `key` to the answer being built, or starts a new one if there is none or it has that key already.
fn add_to_answer(messages: &mut Vec<Json>, key: &str, value: Json) {
    if let Some(Json::Map(pairs)) = messages.last_mut().filter(|message| is_answer(message))
        && !pairs.iter().any(|(name, value)| &**name == key && !matches!(value, Json::Null))
    {
        pairs.retain(|(name, _)| &**name != key);
        pairs.push((Arc::from(key), value));
        return;
    }
    messages.push(Json::map([("role", Json::text("assistant")), (key, value)]));
}

fn add_call(messages: &mut Vec<Json>, item: &Json, name: Json, arguments: Json) -> Result<(), Fallback> {
    let call = Json::map([
        ("id", Json::Str(text(item, "call_id")?)),
        ("function", Json::map([("name", name), ("arguments", arguments)])),
        ("type", Json::text("function")),
    ]);
    if let Some(Json::Map(pairs)) = messages.last_mut().filter(|message| is_answer(message)) {
        match pairs.iter_mut().find(|(key, _)| &**key == "tool_calls") {
            Some((_, Json::List(calls))) => calls.push(call),
            Some((_, other)) => *other = Json::List(vec![call]),
            None => pairs.push((Arc::from("tool_calls"), Json::List(vec![call]))),
        }
        return Ok(());
    }
    messages.push(Json::map([("role", Json::text("assistant")), ("tool_calls", Json::List(vec![call]))]));
    Ok(())
}

fn is_answer(message: &Json) -> bool {
    message.get("role").and_then(Json::as_str).is_some_and(|role| &**role == "assistant")
}
