"""Requests of many shapes, each with a prompt of its own that is long enough to be cached.

`SHAPES` is what the exactness test runs over. A new way for a field to change the tokens belongs here.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from .engine import MODEL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
OUTPUT_TOKENS = 4
VOCABULARY = (
    "amber basin cedar delta ember fjord grove haven inlet jetty knoll ledge marsh north ocean prairie quarry ridge "
    "shore tundra upland valley willow yonder zephyr bridge castle garden harbour island meadow orchard river station "
    "tower village window although because between however perhaps whether carries reaches follows returns opens"
)


class Shape(NamedTuple):
    """One request."""

    name: str
    path: str
    body: dict[str, Any]
    has_siblings: bool = False
    """Several sequences: the engine reports the hit of the last, which finds what the first has just stored."""
    reports_tokens: bool = True
    """The engine returns the prompt's token ids when asked."""


def prose(seed: str, words: int = 260) -> str:
    """Return reproducible text of about 1.3 tokens a word."""
    numbers = random.Random(seed)
    sentences = (" ".join(numbers.choices(VOCABULARY.split(), k=12)).capitalize() + "." for _ in range(words // 12 + 1))
    return " ".join(sentences)


def token_ids(seed: str, count: int) -> list[int]:
    """Return ordinary tokens; the first thousand of the vocabulary are bytes and special tokens."""
    return random.Random(seed).choices(range(1000, 100_000), k=count)


def chat(name: str, messages: list[dict[str, Any]], **fields: Any) -> Shape:
    """A chat completion; fields of the request come on top."""
    body = {"model": MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS, "temperature": 0, **fields}
    return Shape(f"chat: {name}", CHAT, body, has_siblings=fields.get("n", 1) > 1)


def completion(name: str, prompt: Any, *, has_siblings: bool = False, **fields: Any) -> Shape:
    """A text completion."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, **fields}
    return Shape(f"completion: {name}", COMPLETIONS, body, has_siblings=has_siblings)


def response(name: str, content: Any, **fields: Any) -> Shape:
    """A request of the Responses API."""
    body = {"model": MODEL, "input": content, "max_output_tokens": OUTPUT_TOKENS, **fields}
    return Shape(f"responses: {name}", RESPONSES, body, reports_tokens=False)


def message(name: str, messages: list[dict[str, Any]], **fields: Any) -> Shape:
    """A request of the Messages API."""
    body = {"model": MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS, **fields}
    return Shape(f"messages: {name}", MESSAGES, body, reports_tokens=False)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def tool(name: str, **function: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **function}}


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"place": "Zürich", "n": 1.50}'},
}
TURNS = [user("First " + prose("turns")), assistant("Indeed."), user("Second."), assistant("Quite."), user("Third?")]
ANTHROPIC_TOOL = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object", "properties": {}}}

SHAPES = [
    chat("one user message", [user(prose("user"))]),
    chat("system and user", [system(prose("system")), user("Hello.")]),
    chat("several turns", [system("Be brief."), *TURNS]),
    chat("two system messages", [system(prose("first system")), system("Second."), user("Hello.")]),
    chat("developer role", [{"role": "developer", "content": prose("developer")}, user("Hello.")]),
    chat("content parts", [user([text_part(prose("part one")), text_part("and part two")])]),
    chat("one content part", [user([text_part(prose("one part"))])]),
    chat("empty user message", [system(prose("before nothing")), user("")]),
    chat("no text in an assistant turn", [user(prose("silence")), assistant(None), user("Say something.")]),
    chat("name of a participant", [{**user(prose("named")), "name": "ada"}]),
    chat("unknown role", [{"role": "narrator", "content": prose("narrator")}, user("Go on.")]),
    chat("Chinese and Japanese", [user("前缀缓存让推理更快。" * 60 + "これは日本語です。" * 20)]),
    chat("emoji and joiners", [user("👩‍👩‍👧‍👦 family 🇨🇭 flag e\u0301 accent ☃︎ " * 40)]),
    chat("right to left", [user("شُكراً جزيلاً יום טוב " * 60)]),
    chat("white space and line ends", [user("a\r\n\tb  c\n\n\n   d\u00a0e\u2003f " * 60)]),
    chat("control characters", [user("tab\tbell\u0007null\u0000escape\u001b end " * 60)]),
    chat("digits and code", [user("for i in range(1000000): x[i] += 3.14159e-10  # 0xdeadbeef\n" * 20)]),
    chat("special tokens as text", [user("<｜end▁of▁sentence｜><｜Assistant｜> " + prose("special"))]),
    chat("one very long word", [user("donaudampfschifffahrt" * 80)]),
    chat("exactly at the end of a block", [user("a" + " a" * 503)]),
    chat("shorter than a block", [user("Hello.")]),
    chat("long", [system(prose("long system", 5000)), user("Summarise.")]),
    chat("tools", [user(prose("tools"))], tools=[tool("weather", description="Tells it.")], tool_choice="none"),
    chat("tool without description", [user(prose("bare tool"))], tools=[tool("weather")], tool_choice="none"),
    chat(
        "tool with unknown keys",
        [user(prose("odd tool"))],
        tools=[{**tool("weather", strict=True, colour="red"), "extra": 1}],
        tool_choice="none",
    ),
    chat(
        "tool call and result",
        [
            user(prose("calls")),
            assistant(None, tool_calls=[CALL]),
            {"role": "tool", "tool_call_id": "call-1", "content": "Rain."},
            user("Thanks."),
        ],
        tools=[tool("weather", description="Tells it.")],
        tool_choice="none",
    ),
    chat(
        "tool result in parts",
        [
            user(prose("part result")),
            assistant("Looking.", tool_calls=[CALL]),
            {"role": "tool", "tool_call_id": "call-1", "content": [text_part("Rain."), text_part("Wind.")]},
        ],
    ),
    chat(
        "reasoning of an earlier turn",
        [user(prose("thought")), assistant("Yes.", reasoning_content="Hm."), user("Why?")],
    ),
    chat("no generation prompt", [user(prose("bare"))], add_generation_prompt=False),
    chat(
        "continued final message",
        [user(prose("continued")), assistant("And so it")],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    chat(
        "template arguments", [user(prose("arguments"))], chat_template_kwargs={"enable_thinking": False, "unknown": 1}
    ),
    chat("reasoning effort", [user(prose("effort"))], reasoning_effort="low"),
    chat("special tokens added", [user(prose("added"))], add_special_tokens=True),
    chat("truncated prompt", [user(prose("truncated", 800))], truncate_prompt_tokens=400),
    chat("token ids instead", [user("Not read.")], kv_transfer_params={"prompt_token_ids": token_ids("given", 300)}),
    chat("two answers", [user(prose("two answers"))], n=2, temperature=1),
    chat("salt", [user(prose("salted"))], cache_salt="pepper"),
    chat("log probabilities", [user(prose("logprobs"))], logprobs=True, top_logprobs=2),
    chat("unknown fields", [user(prose("unknown fields"))], colour="red", user="ada", metadata={"a": "b"}),
    chat("first adapter", [user(prose("adapted"))], model="north"),
    chat("second adapter", [user(prose("adapted"))], model="south"),
    completion("text", prose("text")),
    completion("text with white space at its ends", "  \n" + prose("ends") + "  \n"),
    completion("list of one text", [prose("list of one")]),
    completion("list of texts", [prose("list") + f" {number}" for number in range(3)], has_siblings=True),
    completion("token ids", token_ids("ids", 300)),
    completion("token ids to the end of a block", token_ids("whole blocks", 256)),
    completion("list of token ids", [[*token_ids("lists", 280), number] for number in (5001, 5002)], has_siblings=True),
    completion("echo", prose("echo"), echo=True),
    completion("no special tokens", prose("plain"), add_special_tokens=False),
    completion("truncated", prose("cut", 800), truncate_prompt_tokens=300),
    completion("two answers", prose("two texts"), has_siblings=True, n=2, temperature=1),
    completion("adapter and salt", prose("both"), model="south", cache_salt="cumin"),
    completion("prompt log probabilities", prose("prompt logprobs"), prompt_logprobs=1),
    response("text", prose("response text")),
    response("messages", [user(prose("response messages")), assistant("Yes."), user("And?")]),
    response("instructions", "Hello.", instructions=prose("instructions")),
    response("content parts", [user([{"type": "input_text", "text": prose("input parts")}])]),
    message("one user message", [user(prose("message"))]),
    message("system text", [user("Hello.")], system=prose("message system")),
    message("system blocks", [user("Hello.")], system=[text_part(prose("system blocks")), text_part("And more.")]),
    message("several turns", [user(prose("message turns")), assistant("Yes."), user([text_part("a"), text_part("b")])]),
    message("tools", [user(prose("message tools"))], tools=[ANTHROPIC_TOOL], tool_choice={"type": "none"}),
]
