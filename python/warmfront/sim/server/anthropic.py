"""`/v1/messages`, the Anthropic shape, as vLLM answers it."""

from __future__ import annotations

from typing import Any

from warmfront.errors import InvalidRequestError
from warmfront.sim.server.dialect import Body, frame, messages_of, positive
from warmfront.sim.server.job import Choice, Job
from warmfront.sim.tokens import BILLING_HEADER, BuiltinTokenizer, render


class Messages:
    """Messages with text blocks; vLLM turns them into chat messages, the system text first."""

    id_prefix = "chatcmpl-"

    def prompts(self, body: Body, tokenizer: BuiltinTokenizer) -> list[list[int]]:
        """Render system and messages as one conversation."""
        system = "".join(_system_texts(body.get("system")))
        turns: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        turns += messages_of(body)
        return [tokenizer.encode(render(turns))]

    def tokens_max(self, body: Body) -> int | None:
        """Return `max_tokens`."""
        return positive(body, "max_tokens")

    def opening(self, job: Job) -> bytes:
        """Return `message_start` and the start of the one text block."""
        message = self._message(job, [], None) | {"usage": {"input_tokens": job.prompt_tokens, "output_tokens": 0}}
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return frame({"type": "message_start", "message": message}, event="message_start") + frame(
            block, event="content_block_start"
        )

    def token(self, job: Job, choice: Choice, text: bytes) -> bytes:
        """Return one `content_block_delta`."""
        return (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":%b}}\n\n'
        ) % text

    def ending(self, job: Job, texts: list[str]) -> bytes:
        """Return the end of block and message, usage with it."""
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": _stop_reason(job), "stop_sequence": None},
            "usage": _usage(job),
        }
        return (
            frame({"type": "content_block_stop", "index": 0}, event="content_block_stop")
            + frame(delta, event="message_delta")
            + frame({"type": "message_stop"}, event="message_stop")
        )

    def complete(self, job: Job, texts: list[str]) -> dict[str, Any]:
        """Return the message."""
        return self._message(job, [{"type": "text", "text": texts[0]}], _stop_reason(job)) | {"usage": _usage(job)}

    def _message(self, job: Job, content: list[dict[str, Any]], stop_reason: str | None) -> dict[str, Any]:
        return {
            "id": job.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": job.model,
            "stop_reason": stop_reason,
            "stop_sequence": None,
        }


def _usage(job: Job) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": job.cached_tokens}
    return {"input_tokens": job.prompt_tokens, "output_tokens": job.output_tokens} | (
        cached if job.tells_cached_tokens else {}
    )


def _stop_reason(job: Job) -> str:
    return "max_tokens" if job.choices[0].answer.reason == "length" else "end_turn"


def _system_texts(system: object) -> list[str]:
    if system is None:
        return []
    if isinstance(system, str):
        return [system]
    if not isinstance(system, list) or not all(isinstance(block, dict) for block in system):
        raise InvalidRequestError("system must be a string or text blocks")
    texts = [str(block.get("text", "")) for block in system if block.get("type") == "text"]
    return [text for text in texts if not text.startswith(BILLING_HEADER)]
