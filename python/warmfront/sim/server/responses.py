"""`/v1/responses`, without stored state, as vLLM answers it."""

from __future__ import annotations

import json
from typing import Any

from warmfront.errors import InvalidRequestError
from warmfront.sim.server.dialect import Body, frame, positive
from warmfront.sim.server.job import Choice, Job
from warmfront.sim.tokens import BuiltinTokenizer, render


class Responses:
    """Input is a string or messages; `instructions` come first as a system message."""

    id_prefix = "resp_"

    def prompts(self, body: Body, tokenizer: BuiltinTokenizer) -> list[list[int]]:
        """Render instructions and input as one conversation."""
        instructions, given = body.get("instructions"), body.get("input")
        turns: list[dict[str, Any]] = [] if not instructions else [{"role": "system", "content": instructions}]
        if isinstance(given, str):
            turns.append({"role": "user", "content": given})
        elif isinstance(given, list) and all(isinstance(item, dict) for item in given):
            turns += given
        else:
            raise InvalidRequestError("input must be a string or a list of messages")
        return [tokenizer.encode(render(turns))]

    def tokens_max(self, body: Body) -> int | None:
        """Return `max_output_tokens`."""
        return positive(body, "max_output_tokens")

    def opening(self, job: Job) -> bytes:
        """Return the events up to the first delta."""
        started = self._response(job, "in_progress", [])
        item = {"id": _item_id(job), "content": [], "role": "assistant", "status": "in_progress", "type": "message"}
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        return (
            _event("response.created", 0, response=started)
            + _event("response.in_progress", 1, response=started)
            + _event("response.output_item.added", 2, item=item, output_index=0)
            + _event(
                "response.content_part.added", 3, content_index=0, item_id=_item_id(job), output_index=0, part=part
            )
        )

    def token(self, job: Job, choice: Choice, text: bytes) -> bytes:
        """Return one text delta."""
        return (
            b"event: response.output_text.delta\n"
            b'data: {"content_index":0,"delta":%b,"item_id":%b,"logprobs":[],"output_index":0,"sequence_number":%d,'
            b'"type":"response.output_text.delta"}\n\n'
        ) % (text, json.dumps(_item_id(job)).encode(), choice.emitted + 3)

    def ending(self, job: Job, texts: list[str]) -> bytes:
        """Return the events after the last delta."""
        number = job.output_tokens + 4
        where: dict[str, Any] = {"content_index": 0, "item_id": _item_id(job), "output_index": 0}
        item = self._item(job, texts[0])
        return (
            _event("response.output_text.done", number, **where, logprobs=[], text=texts[0])
            + _event("response.content_part.done", number + 1, **where, part=item["content"][0])
            + _event("response.output_item.done", number + 2, item=item, output_index=0)
            + _event("response.completed", number + 3, response=self.complete(job, texts))
        )

    def complete(self, job: Job, texts: list[str]) -> dict[str, Any]:
        """Return the response object."""
        limited = job.choices[0].answer.reason == "length"
        usage = {
            "input_tokens": job.prompt_tokens,
            "input_tokens_details": {"cached_tokens": job.cached_tokens},
            "output_tokens": job.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": job.prompt_tokens + job.output_tokens,
        }
        response = self._response(job, "incomplete" if limited else "completed", [self._item(job, texts[0])])
        reason = {"reason": "max_output_tokens"} if limited else None
        return response | {"usage": usage, "incomplete_details": reason}

    def _item(self, job: Job, text: str) -> dict[str, Any]:
        content: list[dict[str, Any]] = [{"annotations": [], "text": text, "type": "output_text", "logprobs": None}]
        return {
            "id": _item_id(job),
            "content": content,
            "role": "assistant",
            "status": "completed",
            "type": "message",
        }

    def _response(self, job: Job, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": job.id,
            "created_at": job.created,
            "incomplete_details": None,
            "instructions": None,
            "metadata": None,
            "model": job.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0,
            "status": status,
            "usage": None,
        }


def _item_id(job: Job) -> str:
    return "msg_" + job.id.removeprefix("resp_")


def _event(kind: str, number: int, **content: Any) -> bytes:
    return frame(content | {"sequence_number": number, "type": kind}, event=kind)
