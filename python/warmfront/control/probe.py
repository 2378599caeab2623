"""Asks one server, again and again, and keeps what is believed about it.

Every server has its own task, so a slow one delays nobody. Load is asked each round, identity (version, models, event
sources) every few rounds and whenever the process may be another one. A round fails when `/health` does; after
`unready_after` failures in a row the server is not ready, and one success makes it ready again. What was learned
stays: a server that is down keeps its models, so that its pool knows it is missing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus

import aiohttp
import msgspec
from msgspec import Struct

from warmfront.clock import Clock
from warmfront.config import ControlConfig, EventsConfig, ServerConfig
from warmfront.control import engine_metrics, events
from warmfront.control.dialects import AUTO, questions
from warmfront.control.engine_metrics import EngineMetrics
from warmfront.control.facts import Answer, ModelCard, Round, ServerFacts
from warmfront.control.reading import read_body
from warmfront.control.security import EngineAccess
from warmfront.engines import DIALECTS, EventDefaults
from warmfront.errors import ConfigError
from warmfront.types import EventSource

logger = logging.getLogger(__name__)

ANSWER_BYTES_MAX = 16 * 1024 * 1024
"""Longer answers are not read to their end and count as failed."""

IDENTITY_EVERY = 5
"""Rounds between two questions for models, version and event sources."""

MODELS_MAX = 4096
"""Entries of `/v1/models` beyond this are ignored."""

SUGGESTED_EVENTS = '{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:6557"}'
"""Value of vLLM's `--kv-events-config`; the replay port leaves room for ranks behind the event port."""

ROUNDS_TIMED = 16
"""Rounds whose quickest answers are kept: a way that became longer is noticed after so many."""

JITTER = 0.1
"""Share by which the pause between rounds varies, so that servers are not all asked at the same moment."""


class ServerProbe:
    """Keeps `facts` about one server current."""

    def __init__(
        self,
        server: ServerConfig,
        *,
        http: aiohttp.ClientSession,
        config: ControlConfig,
        clock: Clock,
        rng: random.Random,
        on_round: Callable[[ServerFacts, ServerFacts], None],
        facts: ServerFacts | None = None,
    ) -> None:
        """Prepare; nothing is asked yet.

        Args:
            server: Whom to ask; its URL has no trailing slash.
            http: Shared session.
            config: Intervals and limits.
            clock: For the age of load figures.
            rng: Seeded source of jitter.
            on_round: Called with the facts before and after each round.
            facts: What is believed already; `None`: nothing.
        """
        self.facts = facts or ServerFacts(server)
        self.access = EngineAccess(server)
        self._dialect = questions(server.engine)
        self._http = http
        self._config = config
        self._clock = clock
        self._rng = rng
        self._on_round = on_round
        self._rounds = 0

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            try:
                await self.ask_once()
            except Exception:  # the edge to a foreign server: what it says must not end the other probes
                logger.exception("probe failed", extra={"replica": self.facts.server.url})
            spread = self._rng.uniform(1 - JITTER, 1 + JITTER)
            await asyncio.sleep(self._config.probe_interval_s * spread)

    async def ask_once(self) -> None:
        """Do one round and take its answers into account."""
        self._take_secrets()
        before = self.facts
        is_identity_due = self._rounds % IDENTITY_EVERY == 0 or not before.ready
        answers = await self._ask_load()
        if is_identity_due or _may_be_another(before, answers):
            answers = await self._ask_identity(answers)
        self._rounds += 1
        self.facts = advance(before, answers, unready_after=self._config.unready_after, now_s=self._clock.now_s())
        self._on_round(before, self.facts)

    def _take_secrets(self) -> None:
        """Read headers from their files; one that cannot be read fails the round, as the engine would."""
        try:
            secrets = self.access.secret_headers()
        except ConfigError as error:
            logger.warning("%s", error, extra={"replica": self.facts.server.url})
            return
        if secrets != self.facts.secret_headers:
            self.facts = msgspec.structs.replace(self.facts, secret_headers=secrets)

    async def _ask_load(self) -> Round:
        dialect = self._dialect
        health, metrics = await asyncio.gather(self._get(dialect.health_path), self._get(dialect.metrics_path))
        return Round(health=health, metrics=engine_metrics.parse(_text(metrics)) if metrics.is_ok else None)

    async def _ask_identity(self, answers: Round) -> Round:
        models, version, sources = await asyncio.gather(
            self._get(self._dialect.models_path),
            self._get(self._dialect.version_path),
            self._get(self._dialect.events.sources_path if self._dialect.events else None),
        )
        listening = await self._ask_default_port(answers.metrics) if sources.is_absent else None
        return msgspec.structs.replace(answers, models=models, version=version, sources=sources, listening=listening)

    async def _ask_default_port(self, metrics: EngineMetrics | None) -> dict[int, bool] | None:
        """Look for publishers where the engine's default is, for engines that cannot be asked."""
        defaults = _event_defaults(metrics)
        if self.facts.server.events != "auto" or metrics is None or defaults is None or defaults.port is None:
            return None
        return await events.listening(
            self.facts.server, metrics.ranks, port=defaults.port, timeout_s=self._config.probe_timeout_s
        )

    async def _get(self, path: str | None) -> Answer:
        server = self.facts.server
        if path is None:
            return Answer(status=HTTPStatus.NOT_FOUND)
        timeout = aiohttp.ClientTimeout(total=self._config.probe_timeout_s)
        try:
            tls = self.access.tls()
            asked_s = self._clock.now_s()
            async with self._http.get(
                server.url + path, headers=self.facts.headers, timeout=timeout, ssl=tls
            ) as response:
                took_s = self._clock.now_s() - asked_s
                body = await read_body(response, bytes_max=ANSWER_BYTES_MAX)
                return Answer(status=response.status, body=body, took_s=took_s)
        except TimeoutError:
            return Answer(error=f"no answer to {path} within {self._config.probe_timeout_s:g} s")
        except (aiohttp.ClientSSLError, ConfigError) as error:
            return Answer(error=f"TLS: {error}")
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            return Answer(
                error="connection refused" if refused else f"cannot connect: {error.os_error.strerror}",
                is_refused=refused,
            )
        except (aiohttp.ClientError, ValueError) as error:
            return Answer(error=f"{path}: {str(error) or type(error).__name__}")


def _may_be_another(before: ServerFacts, answers: Round) -> bool:
    """Whether the process may have been replaced since the last round, so that its identity is asked at once."""
    if before.was_refused or answers.health.is_refused:
        return True
    if before.metrics is None or answers.metrics is None:
        return False
    return answers.metrics.started_s != before.metrics.started_s or _went_back(before.metrics, answers.metrics)


def advance(before: ServerFacts, answers: Round, *, unready_after: int, now_s: float) -> ServerFacts:
    """Return what is believed after a round. Pure.

    Args:
        before: What was believed.
        answers: What came back.
        unready_after: Failed rounds in a row that make a ready server unready.
        now_s: Time on the control process's own clock.
    """
    failure = _failure(answers)
    if failure is not None:
        failures = before.failures + 1
        is_down = failures >= unready_after or not before.ready
        return msgspec.structs.replace(
            before,
            failures=failures,
            ready=not is_down,
            reason=failure if is_down else "",
            was_refused=before.was_refused or answers.health.is_refused,
        )
    metrics = answers.metrics
    cards = _cards(answers.models) or before.cards
    reason = "" if cards else _no_models(answers.models)
    restarts = before.restarts + _is_restart(before, metrics)
    after = msgspec.structs.replace(
        before,
        ready=not reason,
        reason=reason,
        failures=0,
        was_refused=False,
        engine=_engine(before, metrics),
        version=_version(answers.version) or before.version,
        incarnation=_incarnation(before, metrics, restarts),
        restarts=restarts,
        cards=cards,
        metrics=metrics or before.metrics,
        scraped_s=now_s if metrics else before.scraped_s,
        took_s=(*before.took_s, *_quickest(answers))[-ROUNDS_TIMED:],
    )
    return _with_sources(after, answers, is_same_process=after.incarnation == before.incarnation)


def _quickest(answers: Round) -> list[float]:
    """Return the least time of an answer, if there is one."""
    given = [answer for answer in (answers.health, answers.models, answers.version, answers.sources) if answer]
    return sorted(answer.took_s for answer in given if answer.took_s is not None)[:1]


def _failure(answers: Round) -> str | None:
    """Why the round failed; a server without `/health` fails only when it does not answer at all."""
    health = answers.health
    if health.error is not None:
        return health.error
    return None if health.is_ok or health.is_absent else f"/health answers {health.status}"


def _cards(answer: Answer | None) -> tuple[ModelCard, ...]:
    if answer is None or not answer.is_ok:
        return ()
    try:
        entries = msgspec.json.decode(answer.body, type=_ModelList).data[:MODELS_MAX]
        return tuple(
            msgspec.structs.replace(msgspec.json.decode(raw, type=ModelCard), raw=bytes(raw).decode())
            for raw in entries
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()


class _ModelList(Struct, frozen=True):
    data: list[msgspec.Raw] = []


def _no_models(answer: Answer | None) -> str:
    if answer is None or answer.error is not None:
        return "its models are not known yet" if answer is None else (answer.error or "")
    if answer.status in (401, 403):
        return "/v1/models asks for an API key: put it into the server's `headers`"
    return f"/v1/models answers {answer.status}" if not answer.is_ok else "/v1/models names no model"


def _engine(before: ServerFacts, metrics: EngineMetrics | None) -> str:
    if before.server.engine != AUTO:
        return before.server.engine
    # A scrape that failed says nothing new.
    return (metrics.engine if metrics else None) or before.engine


def _event_defaults(metrics: EngineMetrics | None) -> EventDefaults | None:
    return DIALECTS[metrics.engine].events if metrics and metrics.engine else None


def _version(answer: Answer | None) -> str | None:
    if answer is None or not answer.is_ok:
        return None
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(answer.body, type=dict[str, str]).get("version")
    return None


def _is_restart(before: ServerFacts, metrics: EngineMetrics | None) -> bool:
    """Whether the process is another one, for servers that do not tell when it started."""
    if before.metrics is None or before.metrics.started_s is not None:
        return False
    return before.was_refused or (metrics is not None and _went_back(before.metrics, metrics))


def _went_back(before: EngineMetrics, after: EngineMetrics) -> bool:
    return any(
        _is_below(after.ranks[rank].prefix_queries, then.prefix_queries)
        or _is_below(after.ranks[rank].prefix_hits, then.prefix_hits)
        for rank, then in before.ranks.items()
        if rank in after.ranks
    )


def _is_below(now: float | None, then: float | None) -> bool:
    return now is not None and then is not None and now < then


def _incarnation(before: ServerFacts, metrics: EngineMetrics | None, restarts: int) -> int:
    """A number that changes with the engine process, and does not when this process is restarted.

    The engine's start time is such a number; without one it is the restarts seen, which a new control process forgets.
    """
    started_s = metrics.started_s if metrics else None
    if started_s is not None:
        return round(started_s * 100)
    return before.incarnation if metrics is None else restarts


def _with_sources(facts: ServerFacts, answers: Round, *, is_same_process: bool) -> ServerFacts:
    """Decide where KV events come from: configuration, then the engine's word, then the default port.

    A source that goes costs everything known about the replica, so no answer, or an error, changes nothing.
    """
    server = facts.server
    if server.events == "off":
        return _sources(facts, {}, "KV events are switched off in the configuration")
    if isinstance(server.events, EventsConfig):
        return _sources(facts, events.configured(server, server.events, facts.ranks), None)
    if answers.sources is not None and answers.sources.is_ok:
        return _announced(facts, answers.sources.body)
    if answers.sources is None or not answers.sources.is_absent or (facts.sources and is_same_process):
        return facts
    defaults = _event_defaults(answers.metrics)
    port, topic = (defaults.port or 0, defaults.topic) if defaults else (0, "")
    found = events.by_default_port(server, answers.listening or {}, port=port, topic=topic)
    return _sources(facts, found, None if found else _no_events(facts.engine))


def _announced(facts: ServerFacts, body: bytes) -> ServerFacts:
    try:
        found = events.announced(facts.server, body)
    except (msgspec.DecodeError, RecursionError) as error:
        return _sources(facts, {}, f"/kv_event_sources cannot be read: {error}")
    return _sources(facts, found, None if found else _no_events(facts.engine))


def _no_events(engine: str) -> str:
    if engine == "vllm":
        return f"publishes no KV events: start it with --kv-events-config '{SUGGESTED_EVENTS}'"
    return "publishes no KV events that are known: give `events` in the server's configuration if it does"


def _sources(facts: ServerFacts, sources: dict[int, EventSource], note: str | None) -> ServerFacts:
    return msgspec.structs.replace(facts, sources=sources, sources_note=note)


def _text(answer: Answer) -> str:
    return answer.body.decode("utf-8", errors="replace") if answer.is_ok else ""
