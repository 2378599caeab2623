"""`/v1/chat/completions` and `/v1/completions`, as vLLM answers them."""

from __future__ import annotations

from typing import Any

from warmfront.errors import InvalidRequestError
from warmfront.sim.server.dialect import Body, frame, messages_of, openai_usage, positive
from warmfront.sim.server.job import Choice, Job
from warmfront.sim.tokens import BuiltinTokenizer, render

DONE = b"data: [DONE]\n\n"


class Chat:
    """Chat completions."""

    id_prefix = "chatcmpl-"

    def prompts(self, body: Body, tokenizer: BuiltinTokenizer) -> list[list[int]]:
        """Render the messages; `kv_transfer_params.prompt_token_ids` replaces them, as from vLLM 0.27."""
        transfer = body.get("kv_transfer_params")
        if isinstance(transfer, dict) and (given := transfer.get("prompt_token_ids")):
            return [_checked_tokens(given, tokenizer)]
        unfinished = bool(body.get("continue_final_message", False))
        opened = bool(body.get("add_generation_prompt", True))
        if unfinished and opened:
            raise InvalidRequestError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
        text = render(messages_of(body), add_generation_prompt=opened, continue_final_message=unfinished)
        return [tokenizer.encode(text)]

    def tokens_max(self, body: Body) -> int | None:
        """Return `max_completion_tokens` or the older `max_tokens`."""
        return positive(body, "max_completion_tokens", "max_tokens")

    def opening(self, job: Job) -> bytes:
        """Return the chunk of each choice that carries only the role."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            frame(
                _chunk(job, "chat.completion.chunk")
                | {"choices": [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]}
            )
            for choice in job.choices
        )

    def token(self, job: Job, choice: Choice, text: bytes) -> bytes:
        """Return one content chunk."""
        return (
            b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b,"choices":[{"index":%d,'
            b'"delta":{"content":%b},"logprobs":null,"finish_reason":%b,"token_ids":null}]}\n\n'
        ) % (job.id_json, job.created, job.model_json, choice.index, text, _reason(choice))

    def ending(self, job: Job, texts: list[str]) -> bytes:
        """Return usage, when asked for, and the end mark."""
        return _stream_end(job, "chat.completion.chunk")

    def complete(self, job: Job, texts: list[str]) -> dict[str, Any]:
        """Return the `chat.completion` object."""
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.answer.reason,
                "stop_reason": None,
            }
            for choice, text in zip(job.choices, texts, strict=True)
        ]
        return _chunk(job, "chat.completion") | {"choices": choices, "usage": openai_usage(job)}


class Completions:
    """Text completions: a prompt is a string, a list of strings, token ids or a list of lists of them."""

    id_prefix = "cmpl-"

    def prompts(self, body: Body, tokenizer: BuiltinTokenizer) -> list[list[int]]:
        """Return one list of ids a prompt."""
        prompt = body.get("prompt")
        if not isinstance(prompt, (str, list)):
            raise InvalidRequestError("prompt: Input should be a valid string or list")
        if not prompt:
            raise InvalidRequestError("Either prompt or prompt_embeds must be provided and non-empty.")
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            return [_one_prompt(item, tokenizer) for item in prompt]
        return [_one_prompt(prompt, tokenizer)]

    def tokens_max(self, body: Body) -> int | None:
        """Return `max_tokens`; 16 when absent, as the API has it."""
        return positive(body, "max_tokens") or 16

    def opening(self, job: Job) -> bytes:
        """Return nothing: a completion stream begins with text."""
        return b""

    def token(self, job: Job, choice: Choice, text: bytes) -> bytes:
        """Return one text chunk."""
        return (
            b'data: {"id":%b,"object":"text_completion","created":%d,"model":%b,"choices":[{"index":%d,'
            b'"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":null,"token_ids":null}]}\n\n'
        ) % (job.id_json, job.created, job.model_json, choice.index, text, _reason(choice))

    def ending(self, job: Job, texts: list[str]) -> bytes:
        """Return usage, when asked for, and the end mark."""
        return _stream_end(job, "text_completion")

    def complete(self, job: Job, texts: list[str]) -> dict[str, Any]:
        """Return the `text_completion` object."""
        choices = [
            {
                "index": choice.index,
                "text": text,
                "logprobs": None,
                "finish_reason": choice.answer.reason,
                "stop_reason": None,
            }
            for choice, text in zip(job.choices, texts, strict=True)
        ]
        return _chunk(job, "text_completion") | {"choices": choices, "usage": openai_usage(job)}


def _one_prompt(prompt: object, tokenizer: BuiltinTokenizer) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return _checked_tokens(prompt, tokenizer)


def _checked_tokens(tokens: object, tokenizer: BuiltinTokenizer) -> list[int]:
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise InvalidRequestError("prompt: Input should be a list of token ids")
    for token in tokens:
        if not 0 <= token < tokenizer.vocabulary_size:
            raise InvalidRequestError(f"Token id {token} is out of vocabulary")
    return tokens


def _chunk(job: Job, kind: str) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": job.created, "model": job.model}


def _reason(choice: Choice) -> bytes:
    return b'"%b"' % choice.answer.reason.encode() if choice.is_last_token else b"null"


def _stream_end(job: Job, kind: str) -> bytes:
    usage = frame(_chunk(job, kind) | {"choices": [], "usage": openai_usage(job)}) if job.include_usage else b""
    return usage + DONE
