"""What a policy sees, what it answers, and how it explains itself.

A policy belongs to one pool, so state such as a rotation never mixes models. It reads the columns of `Fleet` and never
writes them: the router keeps them (`router/fleet.py`). What is easy to get wrong: rows exist for every slot ever given,
also for replicas that are gone or not ready. Only the slots handed in (`fleet.eligible`) may be chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress
from random import Random
from typing import Protocol

from msgspec import Struct

from warmfront.policy.adapters import Adapters
from warmfront.policy.estimators import Learned
from warmfront.policy.fairness import Shares
from warmfront.types import Choice, Overlap, Request, Slot

RATE_WINDOW_S = 30.0
"""Time constant of the decayed arrival and work rates."""
WEIGHT_MAX = 16.0
"""Largest weight of a priority, and the inverse of the smallest: a client may send any number."""
REBASE_AFTER_S = 20 * RATE_WINDOW_S
"""Scaled rates are rebased beyond this age, so that they never overflow."""


class Term(Struct, frozen=True):
    """One number of an explanation."""

    name: str
    symbol: str
    unit: str
    value: float


class ReplicaCost(Struct, frozen=True):
    """Why a replica costs what it costs. `terms` add up to `total`; `factors` are what they were made of."""

    slot: Slot
    cached_tokens: int
    terms: list[Term]
    factors: list[Term]
    total: float
    """In the unit of the terms; the smallest wins."""


class Fleet:
    """One pool: one column per fact, one row per slot. Read-only for policies.

    Columns of unknown facts hold `None`; terms that need them vanish.
    """

    def __init__(self, pool: str, *, rng: Random, learned: Learned, adapters: Adapters) -> None:
        self.pool = pool
        self.rng = rng
        self.learned = learned
        self.adapters = adapters
        """Which adapters each replica has loaded, by our own dispatches."""
        self.shares = Shares()
        """How much each flow uses of the pool."""
        self.now_s = 0.0
        self.held_s = 0.0
        """How long the oldest request that the router holds has waited: work that no replica's row shows."""
        self.membership = 0
        """Grows whenever a slot gets or loses its replica."""
        self.eligible: list[Slot] = []
        """Slots that may be chosen: present, ready, and not tried already by the request in hand. Set by `allow`."""
        self.allowed: frozenset[Slot] = frozenset()
        """The same as a set."""
        self.is_eligible: list[bool] = []
        """The same as a column."""
        self.is_everyone = True
        """Every row may be chosen: columns need no filter."""
        self.choices_max = 1
        self.priority_step = 1.0
        """How much more a request weighs than one whose priority is 1 higher."""

        self.slot: list[Slot] = []
        """The row numbers themselves."""
        self.id: list[str | None] = []
        self.hash: list[int] = []
        """64-bit hash of the replica's id, for rendezvous hashing; independent of slots."""
        self.ready: list[bool] = []
        self.exact: list[bool] = []
        """The replica's KV events are live and complete enough to be believed."""
        self.block_size: list[int | None] = []
        self.capacity_tokens: list[int | None] = []
        self.in_flight: list[int] = []
        """Requests sent and not ended, queued ones included."""
        self.net_s: list[float] = []
        """net: the way there and back, less what engines' own pauses hide of it; 0 where it is not known."""
        self.foreign: list[float] = []
        """Requests the engine reports beyond ours: other routers, direct callers."""
        self.requests: list[float] = []
        """B: both together."""
        self.weight: list[float] = []
        """The same, each of ours counted with the weight of its priority: those that a delay here would hurt."""
        self.kv_usage: list[float | None] = []
        self.pending: list[int] = []
        """Requests sent that have no first token yet."""
        self.pending_weight: list[float] = []
        """The same by weight."""
        self.pending_tokens: list[int] = []
        """Prompt tokens those must still compute."""
        self.pending_s: list[float] = []
        """PW: predicted prefill seconds of those."""
        self.busy_since_s: list[float] = []
        """t0: last first token, or the start of the busy period."""
        self.context_tokens: list[float] = []
        """K: prompt tokens plus half the expected outputs of all requests in flight."""
        self.output_tokens: list[float] = []
        """Expected output tokens of all requests in flight."""
        self.admission_s: list[float] = []
        """Seconds until the engine runs one more request; above 0 where it is known to run no more at once."""
        self.next_step_s: list[float] = []
        """(θ0 + τ(B + 1, K))/2: seconds between two tokens of one more request, without its own context, over its whole
        answer: what runs now runs beside half of it."""
        self.next_step_token_s: list[float] = []
        """What each token of that context adds for all of them: θ2·(B + 1)/2, by weight."""
        self.last_used: list[int] = []
        """Number of the last dispatch; smaller means longer ago, so ties by it rotate."""
        self.arrivals: list[float] = []
        """Dispatches by weight, decayed: multiply by `decay()`."""
        self.work_s: list[float] = []
        """Prefill seconds dispatched, decayed: multiply by `decay()`."""
        self.rates_origin_s = 0.0
        self.dispatches = 0

    @property
    def slots(self) -> int:
        """Rows."""
        return len(self.id)

    def allow(self, slots: list[Slot]) -> None:
        """Say which slots may be chosen."""
        self.eligible, self.allowed = slots, frozenset(slots)
        self.is_everyone = len(slots) == self.slots
        self.is_eligible = [False] * self.slots
        for slot in slots:
            self.is_eligible[slot] = True

    def burden(self) -> tuple[float, float, float, float]:
        """Sum `requests`, `weight`, `arrivals` and `work_s` over the eligible slots."""
        if self.is_everyone:
            return sum(self.requests), sum(self.weight), sum(self.arrivals), sum(self.work_s)
        return self.total(self.requests), self.total(self.weight), self.total(self.arrivals), self.total(self.work_s)

    def total(self, column: list[float] | list[int]) -> float:
        """Sum a column over the eligible slots."""
        return sum(column if self.is_everyone else compress(column, self.is_eligible))

    def deepest(self, column: list[int]) -> int:
        """Return the largest value of a column of an overlap among the eligible slots."""
        if self.is_everyone and len(column) == len(self.eligible):
            return max(column, default=0)
        return max(compress(column, self.is_eligible), default=0)

    def rows(self, column: list[int], value: int) -> list[Slot]:
        """Return the eligible slots at which a column of an overlap has a value, which is not 0."""
        rows = [slot for slot in compress(self.slot, column) if column[slot] == value]  # most rows are 0
        return rows if self.is_everyone else [slot for slot in rows if self.is_eligible[slot]]

    def decay(self) -> float:
        """Factor that brings `arrivals` and `work_s` to the present."""
        return math.exp((self.rates_origin_s - self.now_s) / RATE_WINDOW_S)

    def weight_of(self, priority: int) -> float:
        """w: what delaying a request of this priority weighs; 1 for priority 0, more for lower numbers."""
        if priority == 0:
            return 1.0
        return float(min(WEIGHT_MAX, max(1.0 / WEIGHT_MAX, self.priority_step ** -max(-64, min(64, priority)))))

    def waiting_s(self, slot: Slot) -> float:
        """W: seconds a new request waits for compute, at least half of what is pending."""
        pending_s = self.pending_s[slot]
        return max(0.5 * pending_s, pending_s - (self.now_s - self.busy_since_s[slot]))


class Policy(Protocol):
    """The whole rule for one pool."""

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank the replicas worth trying, best first; empty to hold.

        Pure: no I/O, no clock; use `fleet.now_s` and `fleet.rng`. Only slots in `fleet.eligible` may be named, at most
        `fleet.choices_max` of them matter. `eligible` is never empty.
        """


class Learning(Protocol):
    """A policy that keeps state of its own. Optional."""

    def chosen(self, request: Request, overlap: Overlap, fleet: Fleet, slot: Slot) -> None:
        """Take note that `slot` was chosen, before the ledger is charged. Follows `choose` for the same request."""


class Ended(Struct, frozen=True):
    """What became of a dispatched request. Seconds; `None`: not known."""

    slot: Slot | None
    """Where it ended; `None`: that replica is gone."""
    first_token_s: float | None
    """From the dispatch to the first token, if it was seen."""
    lasted_s: float
    """From the dispatch to the end."""
    token_s: float | None = None
    """Mean gap between its tokens."""
    cached_tokens: int | None = None
    """As reported."""


class Patient(Protocol):
    """A policy whose estimates are good enough to hold a request in the router. Optional."""

    patience_s: float
    """Estimated wait at the best replica above which a request is decided later, with fresh facts."""


class Watching(Protocol):
    """A policy that compares what happened with what it expected. Optional."""

    def ended(self, request: Request, fleet: Fleet, outcome: Ended) -> float | None:
        """Take the outcome of a stream; return the regret in seconds, `None` if unknown: what load alone had saved.

        What does not stream is never told: when its first token came is not seen, only when it had all been decoded.
        """

    def guarded(self) -> Guarded:
        """Report how far affinity is trusted."""


class Guarded(Struct, frozen=True):
    """State of a policy's guard."""

    enabled: bool
    credit: float
    """Part of the cache's advantage that counts, 0 (load alone) to 1."""
    gain_s: float
    """Measured: seconds by which the rule in force beats load alone, per decision on which they differ."""
    evidence: float
    """How far the test against affinity has come, 0 to 1; at 1 the credit falls."""
    decisions: int
    differing: int
    """Decisions on which load alone would have chosen another replica."""
    rivals: int
    """Those of them made by the rival, to compare."""
    alarms: int
    """Times the credit was lowered."""


class Explaining(Protocol):
    """A policy that can say why. Optional."""

    def explain(self, request: Request, overlap: Overlap, fleet: Fleet) -> list[ReplicaCost]:
        """Return every eligible replica's cost by the arithmetic of `choose`, without side effects."""


def capped_tokens(depth: int, prompt_tokens: int, block_size: int | None) -> int:
    """Apply the engine's rule that the last token is always computed.

    A hit of the whole prompt counts one block less: at most `(prompt_tokens - 1) // block_size` blocks are found.
    Source: vLLM contract, "a hit is capped".
    """
    return min(depth, cached_tokens_max(prompt_tokens, block_size))


def cached_tokens_max(prompt_tokens: int, block_size: int | None) -> int:
    """Return the longest hit that an engine can have on a prompt, in tokens."""
    last = max(0, prompt_tokens - 1)
    return last // block_size * block_size if block_size else last


def no_overlap(fleet: Fleet) -> Overlap:
    """Return the overlap of a request without blocks: nothing held, memory in use as the ledger knows it."""
    zeros = [0] * fleet.slots
    in_use = [int(tokens) for tokens in fleet.context_tokens]
    return Overlap(
        device=zeros,
        confirmed=zeros,
        host=zeros,
        disk=zeros,
        active=zeros,
        active_tokens=in_use,
        resident_tokens=zeros,
        evicted_blocks=zeros,
        regretted_blocks=zeros,
        age_s=[-1.0] * fleet.slots,
        frontier_key=None,
    )
