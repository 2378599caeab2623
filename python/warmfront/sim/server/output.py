"""The way out of a job: counts its tokens and writes them into the client's connection.

A streaming answer has one task that waits for the end; its tokens are written by the step loop straight into the
connection, one system call each. Waking a task for each token would cost several times as much.
"""

from __future__ import annotations

import json

from aiohttp import HttpVersion11, web

from warmfront.reference.request import Sequence as EngineSequence
from warmfront.sim.server.dialect import Dialect
from warmfront.sim.server.job import Choice, Job
from warmfront.sim.server.metrics import EngineMetrics
from warmfront.sim.tokens import BuiltinTokenizer


class TokenTexts:
    """Texts of tokens, remembered in the form in which frames need them."""

    def __init__(self, tokenizer: BuiltinTokenizer) -> None:
        """Decode with `tokenizer`; what is remembered is bounded by its vocabulary."""
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}

    def of_token(self, token: int) -> bytes:
        """Return a token's text as a JSON string; the stop token has none."""
        text = self._known.get(token)
        if text is None:
            shown = "" if token == self._tokenizer.stop_token else self._tokenizer.decode([token])
            text = self._known[token] = json.dumps(shown, ensure_ascii=False).encode()
        return text

    def of_answer(self, choice: Choice) -> str:
        """Return the whole text of an answer."""
        tokens = choice.answer.tokens
        return self._tokenizer.decode(tokens[:-1] if choice.answer.reason == "stop" else tokens)


class Output:
    """Listener of a job's sequences; writes the stream when there is one."""

    def __init__(self, dialect: Dialect, job: Job, metrics: EngineMetrics, texts: TokenTexts) -> None:
        """Listen for `job`; nothing is written until `stream`."""
        self.job = job
        self.choice_of: dict[EngineSequence, Choice] = {}
        self._metrics = metrics
        self._texts = texts
        self._dialect = dialect
        self._left = len(job.choices)
        self._request: web.Request | None = None
        self._chunked = False
        self._opened = False

    def admitted(self, sequence: EngineSequence, now_s: float) -> None:
        """Note the time spent waiting."""
        self._metrics.queue.observe(max(0.0, now_s - self.job.arrived_s))

    def token(self, sequence: EngineSequence, now_s: float) -> None:
        """Count a token and stream it."""
        choice = self.choice_of[sequence]
        if choice.emitted:
            self._metrics.itl.observe(now_s - choice.last_token_s)
        else:
            self._metrics.ttft.observe(now_s - self.job.arrived_s)
        choice.last_token_s = now_s
        choice.emitted += 1
        if self._request is None:
            return
        data = self._dialect.token(self.job, choice, self._texts.of_token(choice.answer.tokens[choice.emitted - 1]))
        if not self._opened:
            self._opened = True
            data = self._dialect.opening(self.job) + data
        self._write(data)

    def finished(self, sequence: EngineSequence, now_s: float) -> None:
        """Wake the handler when all answers are complete."""
        self._metrics.finished(self.choice_of[sequence], seconds=now_s - self.job.arrived_s)
        self._left -= 1
        if not self._left:
            self.job.done.set()

    def texts(self) -> list[str]:
        """Return the text of each answer."""
        return [self._texts.of_answer(choice) for choice in self.job.choices]

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Send headers at once, then whatever `token` writes until all answers are complete."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        self._chunked = request.version >= HttpVersion11
        if self._chunked:
            response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(b"")  # Some versions hold the headers back until the first write.
        self._request = request
        await self.job.done.wait()
        await response.write(self._dialect.ending(self.job, self.texts()))
        await response.write_eof()
        return response

    def _write(self, data: bytes) -> None:
        """Write behind the response object's back: what a client does not read is bounded by the answer's length."""
        transport = self._request.transport if self._request is not None else None
        if transport is None or transport.is_closing():
            return  # The handler is being cancelled.
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
