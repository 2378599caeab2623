"""Tokens of the built-in model: its byte-level BPE and its chat template in plain Python.

The model directory beside this file is an ordinary Hugging Face one, and the router reads it as such with its own
Rust code. The engine server uses this module instead, so that the two compute every prompt independently and a
disagreement shows up as a wrong prediction. Exact for the built-in model only: its pre-tokenizer knows ASCII classes,
and its template prints roles and contents.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from warmfront.errors import InvalidRequestError

MODEL_DIRECTORY = Path(__file__).parent / "model"
"""The built-in model: tokenizer.json, tokenizer_config.json with a chat template, config.json."""

BILLING_HEADER = "x-anthropic-billing-header"
START, END, STOP = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
PIECE_PATTERN = r" ?[A-Za-z]+| ?[0-9]+| ?[^ \t\r\nA-Za-z0-9]+|[ \t\r\n]+(?![^ \t\r\n])|[ \t\r\n]+"
"""How text falls into pieces that are merged separately; the same in tokenizer.json."""
WORD_CACHE_MAX = 65_536
"""Pieces whose tokens are remembered."""


def byte_alphabet() -> list[str]:
    """Return the printable stand-in of each byte, as GPT-2 defined it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + rank) for rank, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]


class BuiltinTokenizer:
    """Encodes and decodes with the built-in model."""

    def __init__(self, directory: Path = MODEL_DIRECTORY) -> None:
        """Read `tokenizer.json`.

        Raises:
            OSError: The file cannot be read.
        """
        content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        self._alphabet = byte_alphabet()
        self._byte_of = {name: byte for byte, name in enumerate(self._alphabet)}
        self._ids: dict[str, int] = content["model"]["vocab"]
        self._names = {token: name for name, token in self._ids.items()}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(content["model"]["merges"])}
        self._special: dict[str, int] = {token["content"]: token["id"] for token in content["added_tokens"]}
        self._special_names = {token: name for name, token in self._special.items()}
        self._split = re.compile("(" + "|".join(re.escape(name) for name in self._special) + ")")
        self._pieces = re.compile(PIECE_PATTERN)
        self._known: dict[str, list[int]] = {}

    @cached_property
    def vocabulary_size(self) -> int:
        """Ids below this are valid."""
        return len(self._ids) + len(self._special)

    @property
    def stop_token(self) -> int:
        """The token that ends an answer."""
        return self._special[END]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. Names of special tokens in it become those, as in vLLM."""
        tokens: list[int] = []
        for part in self._split.split(text):
            if (special := self._special.get(part)) is not None:
                tokens.append(special)
                continue
            for piece in self._pieces.findall(part):
                known = self._known.get(piece)
                tokens += self._merged(piece) if known is None else known
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become replacement characters.

        Raises:
            InvalidRequestError: An id is out of the vocabulary.
        """
        data = bytearray()
        for token in tokens:
            data += self.token_bytes(token)
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token."""
        if (special := self._special_names.get(token)) is not None:
            return special.encode()
        name = self._names.get(token)
        if name is None:
            raise InvalidRequestError(f"Token id {token} is out of vocabulary")
        return bytes(self._byte_of[character] for character in name)

    def token_name(self, token: int) -> str:
        """Return a token as the vocabulary spells it."""
        return self._special_names.get(token) or self._names[token]

    def _merged(self, piece: str) -> list[int]:
        """Merge the bytes of one piece, the pair of lowest rank first, its leftmost occurrence first."""
        parts = [self._alphabet[byte] for byte in piece.encode()]
        while len(parts) > 1:
            best = min(itertools.pairwise(parts), key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            parts = _merge(parts, best)
        tokens = [self._ids[part] for part in parts]
        if len(self._known) >= WORD_CACHE_MAX:
            self._known.clear()
        self._known[piece] = tokens
        return tokens


def _merge(parts: Sequence[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    position = 0
    while position < len(parts):
        if tuple(parts[position : position + 2]) == pair:
            merged.append(parts[position] + parts[position + 1])
            position += 2
        else:
            merged.append(parts[position])
            position += 1
    return merged


def render(
    messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True, continue_final_message: bool = False
) -> str:
    """Print a conversation as the built-in chat template does, after vLLM's normalisation of messages.

    Args:
        messages: OpenAI messages; contents are strings, text parts or null. Tools are not printed by this template.
        add_generation_prompt: Open the assistant's turn at the end.
        continue_final_message: Leave the last message open instead.

    Raises:
        InvalidRequestError: A message has no role or a content that is not text.
    """
    turns = [f"{START}{role}\n{content}{END}\n" for role, content in _normalised(messages)]
    text = "".join(turns)
    if continue_final_message:
        return text.removesuffix(f"{END}\n")
    return text + f"{START}assistant\n" if add_generation_prompt else text


def _normalised(messages: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return roles and contents. With a `developer` turn, all system texts become one message at the front."""
    turns: list[tuple[str, str]] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequestError("every message needs a role")
        turns.append((message["role"], _text(message.get("content"), is_system=message["role"] == "system")))
    if all(role != "developer" for role, _content in turns):
        return turns
    turns = [("system" if role == "developer" else role, content) for role, content in turns]
    if all(role != "system" for role, _content in turns[1:]):
        return turns
    system = "\n\n".join(content for role, content in turns if role == "system" and content)
    return [("system", system), *(turn for turn in turns if turn[0] != "system")]


def _text(content: object, *, is_system: bool) -> str:
    if content is None:
        return ""
    if not isinstance(content, str | list):
        raise InvalidRequestError("content must be a string or a list of parts")
    texts = [content] if isinstance(content, str) else [_part(part) for part in content]
    if is_system:
        texts = [without_billing_header(text) for text in texts]
    return "\n".join(text for text in texts if text)


def without_billing_header(text: str) -> str:
    """Drop the first line of a system text when it is the header that some clients put there."""
    return text.partition("\n")[2] if text.startswith(BILLING_HEADER) else text


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequestError("only text parts are supported")
