"""Compares our token ids with the engine's own, once per engine process, with a few fixed requests.

The engine's render endpoint gives exactly the ids that it computes with, but most servers refuse it; `/tokenize` gives
the same for the requests below, which avoid the fields it ignores. This happens off the decision path, and traffic
does not wait for it: a mismatch means that overlap is predicted from wrong ids, so it is said loudly.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import aiohttp
import msgspec
from msgspec import Struct

from warmfront.control.link import Link, UnansweredError
from warmfront.control.reading import read_body
from warmfront.errors import WarmfrontError
from warmfront.types import TemplateOptions

Prompt = Callable[[str, bytes], Awaitable[list[list[int]]]]
"""Path and body of a request → the token ids of its prompts, by our own tokenizer."""

OpenTokenizer = Callable[[str, TemplateOptions], Awaitable[Prompt]]
"""Path and options → that tokenizer. Raises `NotLoadedError` where it is not there yet."""

TIMEOUT_S = 10.0
"""For one question; engines tokenize in the process that serves requests."""

ANSWER_BYTES_MAX = 4 * 1024 * 1024

CHAT = "/v1/chat/completions"
RENDER = "/v1/chat/completions/render"
TOKENIZE = "/tokenize"

CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Which block holds the prefix?"}]},
    {
        "messages": [
            {"role": "system", "content": "Answer in one line.\nBe exact."},
            {"role": "user", "content": "Grüße, 世界 🙂  two  spaces"},
            {"role": "assistant", "content": "Grüße zurück."},
            {"role": "user", "content": "def f(x):\n\treturn x ** 2"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "first part"}, {"type": "text", "text": "second"}]}
        ]
    },
)
"""Plain turns, a longer conversation with text that tokenizers disagree on, and content in parts."""


class TokenCheck(Struct, frozen=True):
    """What the comparison found."""

    state: Literal["verified", "mismatch", "unverified"]
    reason: str
    """In words: with what it was compared, where it differs, or why it could not be compared."""
    is_passing: bool = False
    """Whether asking again may help: the engine did not answer at all."""

    @property
    def note(self) -> str | None:
        """What an operator should read about it; `None` when all is well."""
        return None if self.state == "verified" else f"tokens {self.state}: {self.reason}"


class NotLoadedError(WarmfrontError):
    """The data process has another tokenizer now, or none: to be asked again later."""


class RefusedError(WarmfrontError):
    """The data process cannot give the token ids of a request."""


class _Sample(Struct, frozen=True):
    """Payload of the question `tokens`."""

    tokenizer: str
    template: TemplateOptions
    body: str


async def load(path: str, template: TemplateOptions) -> Prompt:
    """Load a tokenizer of our own: seconds of work and hundreds of megabytes, for where no data process runs.

    Raises:
        WarmfrontError: It cannot be loaded.
        ImportError: The core is not built.
    """
    from warmfront.core import Tokenizer  # the core is not needed where nothing is compared

    tokenizer = await asyncio.to_thread(Tokenizer, path, msgspec.json.encode(template).decode())

    async def prompt(endpoint: str, body: bytes) -> list[list[int]]:
        return await asyncio.to_thread(tokenizer.prompt, endpoint, body)

    return prompt


def of_data_process(link: Link, *, timeout_s: float) -> OpenTokenizer:
    """Use the tokenizer that requests go through, over the link. It is asked once before any engine is."""

    async def open_tokenizer(path: str, template: TemplateOptions) -> Prompt:
        async def prompt(endpoint: str, body: bytes) -> list[list[int]]:
            payload = msgspec.json.encode(_Sample(path, template, body.decode()))
            try:
                reply = await link.ask("tokens", payload=payload, path=endpoint, timeout_s=timeout_s)
            except UnansweredError as error:
                raise NotLoadedError(str(error)) from error
            if reply.status == 409:
                raise NotLoadedError(f"{path} is not loaded")
            if reply.status != 200:
                raise RefusedError(reply.body.decode(errors="replace"))
            return msgspec.json.decode(reply.body, type=list[list[int]])

        with contextlib.suppress(RefusedError):  # the comparison says so
            await prompt(CHAT, msgspec.json.encode(CHATS[0]))
        return prompt

    return open_tokenizer


async def compare(
    prompt: Prompt,
    *,
    http: aiohttp.ClientSession,
    url: str,
    headers: Mapping[str, str],
    model: str,
    tls: ssl.SSLContext | bool = True,
) -> TokenCheck:
    """Ask one server for the token ids of each fixed request and compare.

    Args:
        prompt: Our tokenizer.
        http: Session to ask with.
        url: The server, without trailing slash.
        headers: Sent along.
        model: Base model name to put into the requests.
        tls: What aiohttp takes as `ssl`.

    Raises:
        NotLoadedError: Our tokenizer is not there yet, or not any more.
    """
    path, refusal = RENDER, ""
    compared, is_passing = 0, False
    for chat in CHATS:
        request = {"model": model} | chat
        theirs = await _ask(http, url + path, headers, request, tls)
        if path == RENDER and theirs.status in (403, 404, 405):
            path, refusal = TOKENIZE, f"{RENDER} answers {theirs.status}"
            theirs = await _ask(http, url + path, headers, request, tls)
        if theirs.ids is None:
            refusal, is_passing = f"{path} {theirs.problem}", theirs.status is None
            continue
        try:
            ours = (await prompt(CHAT, msgspec.json.encode(request)))[0]
        except NotLoadedError:
            raise
        except Exception as error:  # the edge to the tokenizer: whatever it raises means that nothing can be compared
            return TokenCheck("unverified", f"our tokenizer cannot render a plain chat: {error}")
        if ours != theirs.ids:
            return TokenCheck("mismatch", _difference(ours, theirs.ids, f"{url}{path}"))
        compared += 1
    if not compared:
        return TokenCheck("unverified", f"the engine tells no token ids: {refusal}", is_passing)
    return TokenCheck("verified", f"{compared} requests compared with {url}{path}")


class _Theirs(Struct, frozen=True):
    status: int | None = None
    ids: list[int] | None = None
    problem: str = ""


class _Ids(Struct, frozen=True):
    """Both answers: render names the ids `token_ids`, `/tokenize` names them `tokens`."""

    token_ids: list[int] | None = None
    tokens: list[int] | None = None


async def _ask(
    http: aiohttp.ClientSession,
    url: str,
    headers: Mapping[str, str],
    request: dict[str, Any],
    tls: ssl.SSLContext | bool,
) -> _Theirs:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with http.post(url, json=request, headers=headers, timeout=timeout, ssl=tls) as response:
            body = await read_body(response, bytes_max=ANSWER_BYTES_MAX)
            status = response.status
    except TimeoutError:
        return _Theirs(problem=f"does not answer within {TIMEOUT_S:g} s")
    except (aiohttp.ClientError, ValueError) as error:
        return _Theirs(problem=f"fails: {error}")
    if status != 200:
        return _Theirs(status, problem=f"answers {status}")
    try:
        answer = msgspec.json.decode(body, type=_Ids | list[_Ids])
    except (msgspec.DecodeError, RecursionError) as error:
        return _Theirs(status, problem=f"cannot be read: {error}")
    first = answer if isinstance(answer, _Ids) else (answer[0] if answer else _Ids())
    ids = first.token_ids if first.token_ids is not None else first.tokens
    return _Theirs(status, ids, "" if ids is not None else "gives no token ids")


def _difference(ours: list[int], theirs: list[int], where: str) -> str:
    place = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    sample = f"ours {ours[place : place + 4]}, the engine's {theirs[place : place + 4]}"
    return f"ours differ from {where} at token {place} of {len(theirs)} ({sample}); check `tokenizer`, `chat_template`"
