"""The HTTP surface: paths, limits and answers of a vLLM server, over one `Runner`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random

from aiohttp import web

from warmfront.clock import Clock, wall_time_s
from warmfront.errors import InvalidRequestError
from warmfront.reference.request import CacheEvent, EngineRequest, StepResult
from warmfront.sim.answers import AnswerWriter
from warmfront.sim.engine import Engine
from warmfront.sim.hashing import chain_hashes
from warmfront.sim.server.anthropic import Messages
from warmfront.sim.server.bodies import Handler, NotFoundError, OverloadError, body_of, errors, string_of
from warmfront.sim.server.dialect import Body, Dialect
from warmfront.sim.server.job import Choice, Job
from warmfront.sim.server.metrics import EngineMetrics
from warmfront.sim.server.openai import Chat, Completions
from warmfront.sim.server.output import Output, TokenTexts
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
    logs_requests: bool = False
    """A line for each request that is taken, with its id."""
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
        self._texts = TokenTexts(self._tokenizer)
        self._started = int(wall_time_s())

    def application(self) -> web.Application:
        """Return the application with all routes."""
        application = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[errors])
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
            body = await body_of(request)
            job, adapter = self._job(dialect, body, request.headers.get("X-Request-Id"))
            self._check_room(len(job.choices))
            output = Output(dialect, job, self.metrics, self._texts)
            if self._options.logs_requests:
                log.info("request %s taken", job.id)
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
        raise NotFoundError(f"The model `{name}` does not exist.")

    def _check_room(self, sequences: int) -> None:
        limit = self._options.queued_requests_max
        if limit is not None and self._engine.waiting + sequences > limit:
            self.metrics.rejections["max_num_queued_reqs"] += 1
            raise OverloadError(f"The engine has {self._engine.waiting} queued requests; the limit is {limit}.")

    def _submit(self, output: Output, body: Body, adapter: str | None, session_id: str | None) -> None:
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
        body = await body_of(request)
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
            tokens = self._tokenizer.encode(string_of(body, "prompt"))
        names = [self._tokenizer.token_name(token) for token in tokens] if body.get("return_token_strs") else None
        limit = self._engine.config.max_model_tokens
        return web.json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": names})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        tokens = body.get("tokens")
        if not isinstance(tokens, list):
            raise InvalidRequestError("tokens must be a list of token ids")
        return web.json_response({"prompt": self._tokenizer.decode(tokens)})

    async def _count_tokens(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        self._resolve(body.get("model"))
        return web.json_response({"input_tokens": len(Messages().prompts(body, self._tokenizer)[0])})

    async def _embeddings(self, request: web.Request) -> web.Response:
        body = await body_of(request)
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


def _embedding(tokens: Sequence[int]) -> list[float]:
    digest = blake2b(repr(list(tokens)).encode(), digest_size=EMBEDDING_SIZE).digest()
    return [byte / 127.5 - 1.0 for byte in digest]
