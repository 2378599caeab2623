"""The nouns of the lab: what a workload sends, what a fleet is, what a run yields.

A prompt is a list of segments. Two prompts share a prefix as far as their segments are equal, so no workload needs
token ids; the simulator derives chained block hashes from them. Times are virtual seconds from the start of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from msgspec import Struct

Segment = tuple[int, int]
"""Content id and length in tokens. The same id always means the same tokens, cut to the length."""


class SimRequest(Struct, frozen=True):
    """One request of a workload."""

    key: int
    """Number in the order of creation, from 0, unique in one run."""
    at_s: float
    prompt: tuple[Segment, ...]
    output_tokens: int
    """What the engine will generate, at least 1."""
    output_tokens_max: int | None = None
    """What the request says; the router knows no more."""
    answer: int | None = None
    """Content id of the answer, when a later prompt contains it."""
    session: int | None = None
    turn: int = 0
    flow: str = "default"
    priority: int = 0
    adapter: str | None = None
    group: str = ""
    """Part of a mixture this belongs to; results can be split by it."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(tokens for _, tokens in self.prompt)


class Source(Protocol):
    """A workload that runs: deterministic under its seed, whatever the policy does."""

    def arrivals(self) -> Iterator[SimRequest]:
        """Yield the requests that do not depend on answers, `at_s` never decreasing."""

    def finished(self, request: SimRequest, now_s: float) -> Sequence[SimRequest]:
        """Return what follows an answer: the next turn, children; each with `at_s >= now_s`."""


class EngineSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Some equal replicas."""

    preset: str
    count: int = 1
    speed: float = 1.0
    """Every latency constant is divided by it."""
    kv_tokens: int | None = None
    """Instead of the preset's."""
    host_tokens: int = 0
    """Size of a second tier in host memory; 0: none."""
    host_token_s: float | None = None
    """Seconds to load a token's KV from there, instead of the preset's: storage that is not what a router presumes."""
    disk_tokens: int = 0
    caching: bool = True
    """False: the engine reuses nothing, whatever its events say."""
    uncached: tuple[float, float] | None = None
    """Shares of the run's requests between which it reuses nothing, although it does before and after."""
    rtt_s: float = 0.0
    """The way from the router and back."""
    adapters: tuple[str, ...] = ()
    """Adapters it serves; requests for others of the fleet are not for it."""
    adapter_slots: int | None = None
    """Adapters on the device at a time, of which the least recently used one makes room; absent: all it serves."""
    joins_s: float = 0.0
    startup_s: float = 0.0
    """Seconds from joining until ready."""
    leaves_s: float | None = None
    """Drained from then on: no new requests, streams finish."""
    crashes_s: float | None = None
    restart_s: float = 10.0
    """Seconds from a crash until ready again, with an empty cache."""


class EventSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to KV events between engine and router."""

    publish: bool = True
    delay_s: float = 0.02
    loss: float = 0.0
    """Share of batches that never arrive and are not replayed."""


class FleetSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet and how well it is seen."""

    engines: tuple[EngineSpec, ...]
    block_size: int = 64
    events: EventSpec = EventSpec()
    reports_cached: bool = True
    """False: answers do not say how many tokens were cached, as vLLM's do not unless it is asked to."""
    scrape_s: float = 1.0
    """Interval of engine metrics."""


class Slo(Struct, frozen=True, forbid_unknown_fields=True):
    """Targets of one request."""

    ttft_s: float
    tpot_s: float = 0.1
    ttft_prefills: float = 0.0
    """Cold prefills of the request's own prompt that are added to `ttft_s`."""


Comparable = Literal["ttft_p99_s", "goodput", "tpot_p99_s"]
"""Fields of `measures.Figures` by which policies can be compared within a group."""


class Group(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests that are measured by themselves: a tenant, a priority, a part of a mixture, a stretch of the run.

    Those belong to it that agree with every selector given. A request belongs to the first group it agrees with.
    """

    name: str
    part: str | None = None
    """`group` of the workload's part."""
    flow: str | None = None
    priority: int | None = None
    between: tuple[float, float] | None = None
    """Shares of the run's requests, by the order in which they were made: from the first up to below the second."""
    ttft_s: float | None = None
    """Target of its own; what is not given is the regime's. The same holds of the next two."""
    tpot_s: float | None = None
    ttft_prefills: float | None = None
    compared: tuple[Comparable, ...] = ("ttft_p99_s", "goodput", "tpot_p99_s")
    """What policies are compared by here. For work that nobody waits for that is goodput alone: late within its target
    is not worse than early. Empty: its figures are shown only."""

    def selects(self, *, part: str, flow: str, priority: int, share: float) -> bool:
        """Return whether it agrees with a request of these labels, made behind a share of the others."""
        is_labelled = self.part in (None, part) and self.flow in (None, flow) and self.priority in (None, priority)
        return is_labelled and (self.between is None or self.between[0] <= share < self.between[1])

    def slo(self, regime: Slo) -> Slo:
        """Return its targets in a regime with these."""
        return Slo(
            ttft_s=regime.ttft_s if self.ttft_s is None else self.ttft_s,
            tpot_s=regime.tpot_s if self.tpot_s is None else self.tpot_s,
            ttft_prefills=regime.ttft_prefills if self.ttft_prefills is None else self.ttft_prefills,
        )


class Regime(Struct, frozen=True, forbid_unknown_fields=True):
    """One declarative file: a workload, a fleet, targets, and the loads at which to try them."""

    name: str
    title: str
    expects: str
    """What a good policy does here, in a sentence."""
    workload: dict[str, object]
    """`kind` and that kind's parameters; see lab/workloads."""
    fleet: FleetSpec
    slo: Slo
    loads: tuple[float, ...]
    """What the workload's rate is multiplied to, in its own unit, from easy to overloaded."""
    unit: str = "requests/s"
    requests: int = 5000
    warmup: float = 0.15
    """Share of the first requests that is not counted."""
    tags: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    """Classes of requests with figures of their own. Requests of none are in the figures of all only."""


class Outcome(Struct):
    """What became of one request. Seconds of virtual time; `None`: never."""

    key: int
    group: str
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    slot: int | None = None
    dispatched_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    """Reported by the engine at first admission."""
    predicted_tokens: int = 0
    attempts: int = 1
    error: str | None = None
    flow: str = "default"
    priority: int = 0


class RunResult(Struct):
    """One run: one regime, one policy, one load, one seed."""

    regime: str
    policy: str
    load: float
    seed: int
    outcomes: list[Outcome]
    gaps: list[tuple[float, int]]
    """Histogram of all gaps between two tokens: upper bound in seconds (bounds grow by 2 %), count."""
    busy_s: list[float]
    """By slot: seconds in which the engine computed."""
    imbalance: list[float]
    """Most requests in flight at a replica over the mean, at each arrival."""
    preemptions: int
    ended_s: float
    wall_s: float
    """Real seconds that the run took."""
    stages_s: dict[str, float] = {}
    """Where those went: `router`, `index`, `engines`, `workload`, `rest`."""
    guard: dict[str, float] = {}
    """Figures of the policy's guard at the end, when it has one."""
