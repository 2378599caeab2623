"""The HTTP surface: paths, limits, errors and streams of a vLLM server, over one `Runner`.

A streaming answer has one task that waits for the end; its tokens are written by the step loop straight into the
connection, one system call each. Waking a task for each token would cost several times as much.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Any

from aiohttp import HttpVersion11, web

from warmfront.clock import Clock, wall_time_s
from warmfront.errors import ClientError, InvalidRequestError
from warmfront.sim.answers import AnswerWriter
from warmfront.sim.engine import Engine
from warmfront.sim.hashing import chain_hashes
from warmfront.sim.request import CacheEvent, EngineRequest, StepResult
from warmfront.sim.request import Sequence as EngineSequence
from warmfront.sim.server.anthropic import Messages
from warmfront.sim.server.dialect import Body, Dialect
from warmfront.sim.server.job import Choice, Job
from warmfront.sim.server.metrics import EngineMetrics
from warmfront.sim.server.openai import Chat, Completions
from warmfront.sim.server.publisher import KvPublisher
from warmfront.sim.server.responses import Responses
from warmfront.sim.server.runner import Runner
from warmfront.sim.tokens import MODEL_DIRECTORY, BuiltinTokenizer, render

log = logging.getLogger(__name__)

VERSION = "0.32.0"
"""The vLLM version whose surface this follows; `GET /version` answers it so that routers pick the right rules."""
BODY_BYTES_MAX = 64 * 1024 * 1024
CHOICES_MAX = 64
"""Answers of one request, all prompts together."""
TOKENS_DEFAULT = 256
"""Longest answer where the request names none."""
EMBEDDING_SIZE = 64
DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": Chat(),
    "/v1/completions": Completions(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What `/v1/models` tells."""

    names: tuple[str, ...]
    """Accepted in `model`; the first is the one answered."""
    adapters: dict[str, str]
    """Name to path of each LoRA adapter."""
    root: str = str(MODEL_DIRECTORY)
    """The model directory, as vLLM tells it; a router on the same machine reads the tokenizer there."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Behaviour that vLLM has as command line options."""

    queued_requests_max: int | None = None
    """503 beyond this many waiting sequences; unbounded when absent."""
    prompt_tokens_details: bool = True
    """Tell cached tokens in `usage`. Off by default in vLLM; on here, where they are the point."""
    seed: int = 0
    hash_seed: bytes = b""


class EngineServer:
    """Handlers of all paths."""

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Clock,
        model: ServedModel,
        options: ServerOptions,
        publisher: KvPublisher | None,
    ) -> None:
        """Serve an engine; `runner.run` must be running."""
        self.metrics = EngineMetrics(engine, model=model.names[0])
        self.runner = Runner(engine, clock, self)
        self._engine = engine
        self._clock = clock
        self._model = model
        self._options = options
        self._publisher = publisher
        self._tokenizer = BuiltinTokenizer()
        self._writer = AnswerWriter(self._tokenizer, seed=options.seed)
        self._random = Random(options.seed)
        self._texts: dict[int, bytes] = {}
        self._started = int(wall_time_s())

    def application(self) -> web.Application:
        """Return the application with all routes."""
        application = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors])
        for path, dialect in DIALECTS.items():
            application.router.add_post(path, self._generation(dialect))
        application.router.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.get("/kv_event_sources", self._kv_event_sources),
                web.get("/load", self._load),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.post("/v1/embeddings", self._embeddings),
                web.post("/v1/messages/count_tokens", self._count_tokens),
                web.post("/reset_prefix_cache", self._reset),
            ]
        )
        return application

    # What the runner reports

    def stepped(self, result: StepResult) -> None:
        """Count a step."""
        self.metrics.stepped(result)

    def changed(self, events: Sequence[CacheEvent]) -> None:
        """Publish what happened to the cache."""
        if self._publisher is not None:
            self._publisher.publish(events)

    # Generation

    def _generation(self, dialect: Dialect) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await _body(request)
            job, adapter = self._job(dialect, body, request.headers.get("X-Request-Id"))
            self._check_room(len(job.choices))
            output = _Output(self, dialect, job)
            try:
                self._submit(output, body, adapter, request.headers.get("X-Session-ID"))
                if job.stream:
                    return await output.stream(request)
                await job.done.wait()
                return web.json_response(dialect.complete(job, output.texts()))
            finally:
                for choice in job.choices:  # Also when the client has gone: this handler is then cancelled.
                    if choice.sequence is not None:
                        self.runner.abort(choice.sequence)

        return handle

    def _job(self, dialect: Dialect, body: Body, request_id: str | None) -> tuple[Job, str | None]:
        model, adapter = self._resolve(body.get("model"))
        prompts = dialect.prompts(body, self._tokenizer)
        answers = body.get("n") or 1
        if not isinstance(answers, int) or not 1 <= answers * len(prompts) <= CHOICES_MAX:
            raise InvalidRequestError(f"n must be between 1 and {CHOICES_MAX}, got {answers}.")
        asked = dialect.tokens_max(body)
        choices = [
            self._choice(prompts[index // answers], index, asked, ignore_stop=bool(body.get("ignore_eos", False)))
            for index in range(len(prompts) * answers)
        ]
        stream = bool(body.get("stream", False))
        options = body.get("stream_options") or {}
        if options and not stream:
            raise InvalidRequestError("Stream options can only be defined when `stream=True`.")
        name = request_id or str(body.get("request_id") or f"{self._random.getrandbits(64):016x}")
        job = Job(
            id=dialect.id_prefix + name,
            created=int(wall_time_s()),
            model=model,
            stream=stream,
            include_usage=bool(options.get("include_usage", False)),
            tells_cached_tokens=self._options.prompt_tokens_details,
            choices=choices,
            prompts=len(prompts),
            arrived_s=self._clock.now_s(),
        )
        return job, adapter

    def _choice(self, prompt: list[int], index: int, asked: int | None, *, ignore_stop: bool) -> Choice:
        limit = self._engine.config.max_model_tokens
        if len(prompt) >= limit:
            raise InvalidRequestError(
                f"This model's maximum context length is {limit} tokens. However, your prompt contains at least "
                f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. Please reduce "
                f"the length of the input prompt. (parameter=input_tokens, value={len(prompt)})"
            )
        if not prompt:
            raise InvalidRequestError(
                "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)"
            )
        tokens_max = min(asked or TOKENS_DEFAULT, limit - len(prompt))
        answer = self._writer.write(prompt, tokens_max=tokens_max, choice=index, ignore_stop=ignore_stop)
        return Choice(index, prompt, answer)

    def _resolve(self, name: object) -> tuple[str, str | None]:
        """Return the model name to answer and the adapter."""
        if name is None or name in self._model.names:
            return self._model.names[0], None
        if isinstance(name, str) and name in self._model.adapters:
            return name, name
        raise _NotFoundError(f"The model `{name}` does not exist.")

    def _check_room(self, sequences: int) -> None:
        limit = self._options.queued_requests_max
        if limit is not None and self._engine.waiting + sequences > limit:
            self.metrics.rejections["max_num_queued_reqs"] += 1
            raise _OverloadError(f"The engine has {self._engine.waiting} queued requests; the limit is {limit}.")

    def _submit(self, output: _Output, body: Body, adapter: str | None, session_id: str | None) -> None:
        salt = body.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise InvalidRequestError("Parameter 'cache_salt' must be a non-empty string if provided.")
        for choice in output.job.choices:
            tokens = choice.prompt + choice.answer.tokens
            request = EngineRequest(
                id=f"{output.job.id}-{choice.index}",
                prompt_tokens=len(choice.prompt),
                output_tokens=len(choice.answer.tokens),
                hashes=chain_hashes(
                    tokens,
                    block_size=self._engine.config.block_size,
                    seed=self._options.hash_seed,
                    adapter=adapter,
                    cache_salt=salt,
                ),
                tokens=tokens,
                adapter=adapter,
                cache_salt=salt,
                session_id=body.get("session_id") or session_id,
                reads_cache=body.get("prompt_logprobs") is None,
            )
            choice.sequence = self.runner.submit(request, output)
            output.choice_of[choice.sequence] = choice

    def text_of(self, token: int) -> bytes:
        """Return a token's text as a JSON string; the stop token has none."""
        text = self._texts.get(token)
        if text is None:
            shown = "" if token == self._tokenizer.stop_token else self._tokenizer.decode([token])
            text = self._texts[token] = json.dumps(shown, ensure_ascii=False).encode()
        return text

    def answer_text(self, choice: Choice) -> str:
        """Return the whole text of an answer."""
        tokens = choice.answer.tokens
        return self._tokenizer.decode(tokens[:-1] if choice.answer.reason == "stop" else tokens)

    # Everything else

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _models(self, request: web.Request) -> web.Response:
        base = {"object": "model", "created": self._started, "owned_by": "vllm"}
        limit = self._engine.config.max_model_tokens
        cards = [
            base | {"id": name, "root": self._model.root, "parent": None, "max_model_len": limit}
            for name in self._model.names
        ]
        cards += [
            base | {"id": name, "root": path, "parent": self._model.names[0], "max_model_len": None}
            for name, path in self._model.adapters.items()
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text=self.metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _kv_event_sources(self, request: web.Request) -> web.Response:
        return web.json_response({} if self._publisher is None else {"0": self._publisher.source})

    async def _load(self, request: web.Request) -> web.Response:
        return web.json_response({"server_load": self._engine.running + self._engine.waiting})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _body(request)
        self._resolve(body.get("model"))
        if "messages" in body:
            tokens = self._tokenizer.encode(
                render(
                    body["messages"],
                    add_generation_prompt=bool(body.get("add_generation_prompt", True)),
                    continue_final_message=bool(body.get("continue_final_message", False)),
                )
            )
        else:
            tokens = self._tokenizer.encode(_string(body, "prompt"))
        names = [self._tokenizer.token_name(token) for token in tokens] if body.get("return_token_strs") else None
        limit = self._engine.config.max_model_tokens
        return web.json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": names})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await _body(request)
        tokens = body.get("tokens")
        if not isinstance(tokens, list):
            raise InvalidRequestError("tokens must be a list of token ids")
        return web.json_response({"prompt": self._tokenizer.decode(tokens)})

    async def _count_tokens(self, request: web.Request) -> web.Response:
        body = await _body(request)
        self._resolve(body.get("model"))
        return web.json_response({"input_tokens": len(Messages().prompts(body, self._tokenizer)[0])})

    async def _embeddings(self, request: web.Request) -> web.Response:
        body = await _body(request)
        model, _adapter = self._resolve(body.get("model"))
        prompts = Completions().prompts({"prompt": body.get("input")}, self._tokenizer)
        data = [
            {"object": "embedding", "index": index, "embedding": _embedding(prompt)}
            for index, prompt in enumerate(prompts)
        ]
        tokens = sum(len(prompt) for prompt in prompts)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return web.json_response({"object": "list", "model": model, "data": data, "usage": usage})

    async def _reset(self, request: web.Request) -> web.Response:
        running = request.query.get("reset_running_requests", "").lower() == "true"
        return web.json_response({"success": self._engine.reset(preempt_running=running)})


class _Output:
    """Listener of a job's sequences; writes the stream when there is one."""

    def __init__(self, server: EngineServer, dialect: Dialect, job: Job) -> None:
        self.job = job
        self.choice_of: dict[EngineSequence, Choice] = {}
        self._server = server
        self._dialect = dialect
        self._left = len(job.choices)
        self._request: web.Request | None = None
        self._chunked = False
        self._opened = False

    def admitted(self, sequence: EngineSequence, now_s: float) -> None:
        """Note the time spent waiting."""
        self._server.metrics.queue.observe(max(0.0, now_s - self.job.arrived_s))

    def token(self, sequence: EngineSequence, now_s: float) -> None:
        """Count a token and stream it."""
        choice = self.choice_of[sequence]
        if choice.emitted:
            self._server.metrics.itl.observe(now_s - choice.last_token_s)
        else:
            self._server.metrics.ttft.observe(now_s - self.job.arrived_s)
        choice.last_token_s = now_s
        choice.emitted += 1
        if self._request is None:
            return
        data = self._dialect.token(self.job, choice, self._server.text_of(choice.answer.tokens[choice.emitted - 1]))
        if not self._opened:
            self._opened = True
            data = self._dialect.opening(self.job) + data
        self._write(data)

    def finished(self, sequence: EngineSequence, now_s: float) -> None:
        """Wake the handler when all answers are complete."""
        self._server.metrics.finished(self.choice_of[sequence], seconds=now_s - self.job.arrived_s)
        self._left -= 1
        if not self._left:
            self.job.done.set()

    def texts(self) -> list[str]:
        """Return the text of each answer."""
        return [self._server.answer_text(choice) for choice in self.job.choices]

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


class _NotFoundError(ClientError):
    status = 404
    type = "NotFoundError"


class _OverloadError(ClientError):
    status = 503
    type = "Service Unavailable"


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors in vLLM's shape; its `code` is the HTTP status."""
    try:
        return await handler(request)
    except ClientError as error:
        kind = "BadRequestError" if isinstance(error, InvalidRequestError) else error.type
        content = {"message": str(error), "type": kind, "param": None, "code": error.status}
        if request.path.startswith("/v1/messages"):
            body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": str(error)}}
        else:
            body = {"error": content}
        return web.json_response(body, status=error.status)
    except web.HTTPNotFound:
        return web.json_response({"detail": "Not Found"}, status=404)
    except web.HTTPMethodNotAllowed:
        return web.json_response({"detail": "Method Not Allowed"}, status=405)


async def _body(request: web.Request) -> Body:
    try:
        body = json.loads(await request.read())
    except ValueError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return body


def _string(body: Body, name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} must be a string")
    return value


def _embedding(tokens: Sequence[int]) -> list[float]:
    digest = blake2b(repr(list(tokens)).encode(), digest_size=EMBEDDING_SIZE).digest()
    return [byte / 127.5 - 1.0 for byte in digest]
