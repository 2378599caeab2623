"""What the control process knows about one server, as values.

`answers` are what one round of questions brought; `ServerFacts` is what is believed after it. The step between the two
is `probe.advance`, which does no I/O.
"""

from __future__ import annotations

import hashlib
from typing import Any

from msgspec import Struct

from warmfront.config import ServerConfig
from warmfront.control.engine_metrics import EngineMetrics
from warmfront.types import EventSource

NOT_ASKED = "not yet probed"
ROUNDS_TIMED_MIN = 8
"""Rounds with an answer before the quickest of them says how long the way is."""


class Answer(Struct, frozen=True):
    """What came back for one question."""

    status: int | None = None
    """`None`: nothing came back; `error` says why."""
    body: bytes = b""
    error: str | None = None
    is_refused: bool = False
    """Nobody listens at the address: the process is not there."""
    took_s: float | None = None
    """From the question to the head of the answer; `None`: none came."""

    @property
    def is_ok(self) -> bool:
        """Whether the server answered with success."""
        return self.status is not None and 200 <= self.status < 300

    @property
    def is_absent(self) -> bool:
        """Whether the server answered that it has no such path."""
        return self.status in (404, 405)


class ModelCard(Struct, frozen=True):
    """One entry of `/v1/models`."""

    id: str
    parent: str | None = None
    """Set for adapters: the name of the base model."""
    root: str | None = None
    """Where the engine read the model (or adapter) from, on its own machine."""
    max_model_len: int | None = None
    raw: str = "{}"
    """The entry as the engine gave it, as JSON."""


class Round(Struct, frozen=True):
    """The answers of one round; `None`, where nothing else is said: not asked this time."""

    health: Answer
    metrics: EngineMetrics | None = None
    """`None`: the page could not be read."""
    models: Answer | None = None
    version: Answer | None = None
    sources: Answer | None = None
    listening: dict[int, bool] | None = None
    """Per rank: whether something that speaks ZMTP listens at the engine's default event port."""


class ServerFacts(Struct, frozen=True):
    """What is believed about one server. Facts outlive failed rounds; `ready` does not."""

    server: ServerConfig
    secret_headers: dict[str, str] = {}
    """Headers whose values were read from files."""
    ready: bool = False
    reason: str = NOT_ASKED
    """Why it is not ready; empty when it is."""
    failures: int = 0
    """Failed rounds in a row."""
    was_refused: bool = False
    """Nobody listened since the last success."""
    engine: str = "generic"
    version: str | None = None
    incarnation: int = 0
    restarts: int = 0
    """Restarts noticed without a start time."""
    cards: tuple[ModelCard, ...] = ()
    sources: dict[int, EventSource] = {}
    """Per rank: where KV events come from."""
    sources_note: str | None = None
    """Why there are none, in words."""
    metrics: EngineMetrics | None = None
    scraped_s: float | None = None
    """Time of `metrics` on our clock."""
    took_s: tuple[float, ...] = ()
    """Quickest answer of each of the last rounds that had one, the newest last."""

    @property
    def rtt_s(self) -> float | None:
        """The way there and back; `None`: not measured often enough.

        The least of several: an answer is late for many reasons, a connection that had to be opened among them, and
        early for none. The first ones are all late, since the router starts as well, and not equally late.
        """
        return min(self.took_s) if len(self.took_s) >= ROUNDS_TIMED_MIN else None

    @property
    def ranks(self) -> list[int]:
        """Data-parallel ranks behind this URL; one of them when nothing else is known."""
        known = self.metrics.ranks.keys() if self.metrics else set()
        return sorted(self.sources.keys() | known) or [0]

    @property
    def headers(self) -> dict[str, str]:
        """All headers that requests to the server carry."""
        return self.server.headers | self.secret_headers

    @property
    def is_asked(self) -> bool:
        """Whether the server was asked at least once."""
        return self.ready or self.failures > 0 or self.reason != NOT_ASKED

    @property
    def identity(self) -> int:
        """`incarnation`, mixed with the id that discovery gives the server: another one may get its address."""
        if self.server.id is None:
            return self.incarnation
        digest = hashlib.blake2b(f"{self.server.id}\0{self.incarnation}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) >> 1

    def public(self) -> dict[str, Any]:
        """Return what the admin API shows of the server itself, without headers."""
        return {
            "url": self.server.url,
            "engine": self.engine,
            "version": self.version,
            "ready": self.ready,
            "reason": self.reason or None,
            "models": [card.id for card in self.cards],
            "failures": self.failures,
        }
