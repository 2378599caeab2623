"""Whether a request may be sent now, or is better held in the router.

Two kinds of limit. *Hard* ones are the operator's (`in_flight_max`, `in_flight_max_per_replica`): nothing goes beyond.
*Soft* ones are estimates, and apply only to policies that make them (`policy.base.Patient`): a request is held while
every replica would make it wait, or reports a queue of its own and full KV memory. What is easy to get wrong: an
estimate may be off by any factor, so it never idles an engine. A replica with fewer than `BEHIND` requests before their
first token has room, however long those are expected to take.

Source: docs/explanation/architecture.md, section "Flow control".
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from warmfront.config import FlowConfig
from warmfront.policy.base import Fleet
from warmfront.policy.prices import MEMORY_FULL
from warmfront.router.fleet import REPORT_S_MAX, Pool
from warmfront.types import Overlap, Request, Slot

SPARED_SHARE = 0.25
"""Saturated replicas are left out while they are no more than this share of those that may be chosen."""
EASE_S = 30.0
"""A pool that held nothing for so long has room."""
BEHIND = 4
"""Requests without a first token that an engine always gets: some that it computes at once, and some behind."""


class Held(Struct, frozen=True):
    """Why a request is not sent now."""

    reason: str
    """A label of `warmfront_held_total`."""
    stops_all: bool = True
    """Nothing else of the pool can be sent either."""
    is_soft: bool = False
    """It is an estimate: when the queue is full, the request may be sent all the same."""


NOT_READY = Held("not_ready")
FULL = Held("in_flight_limit")
FULL_FOR_ONE = Held("in_flight_limit", stops_all=False)
BY_POLICY = Held("policy", stops_all=False)
ENGINE_QUEUE = Held("engine_queue", is_soft=True)
ENGINE_QUEUE_FOR_ONE = Held("engine_queue", stops_all=False, is_soft=True)
NO_TIME = Held("estimated_wait", is_soft=True)
NO_TIME_FOR_ONE = Held("estimated_wait", stops_all=False, is_soft=True)
NO_MEMORY = Held("estimated_memory", is_soft=True)
NO_MEMORY_FOR_ONE = Held("estimated_memory", stops_all=False, is_soft=True)


class Admission:
    """The limits of a router. Pure: all state is the pool's."""

    def __init__(self, config: FlowConfig) -> None:
        self._per_replica = config.in_flight_max_per_replica
        self._in_all = config.in_flight_max
        self._kv_usage_max = config.kv_usage_max
        self.holds_by_estimate = config.late_binding

    def follow(self, pool: Pool) -> None:
        """Look at what engines report: which of them has a queue of its own because its KV memory is full.

        Such an engine has room again when as many requests have ended as waited in it; the report is a second old. The
        same report told again says the same: it must not begin that count anew.
        """
        pool.reported_s, before = pool.fleet.now_s, pool.saturated
        pool.saturated = {}
        for slot, state in pool.replicas.items():
            load = state.replica.load
            if not load.waiting or load.kv_usage is None or (load.age_s or 0.0) > REPORT_S_MAX:
                continue
            if load.kv_usage >= self._kv_usage_max:
                room = pool.fleet.in_flight[slot] - int(load.waiting)
                pool.saturated[slot] = room if slot in pool.scraped else before.get(slot, room)

    def within_limits(self, pool: Pool, slots: list[Slot]) -> list[Slot]:
        """Return the slots that the operator's limits leave; the very list when all are left."""
        if self.is_full(pool):
            return []
        limit = self._per_replica
        if limit is None:
            return slots
        in_flight = pool.fleet.in_flight
        free = [slot for slot in slots if in_flight[slot] < limit]
        return slots if len(free) == len(slots) else free

    def is_full(self, pool: Pool) -> bool:
        """Return whether the pool as a whole may have no request more."""
        return self._in_all is not None and len(pool.flights) >= self._in_all

    @staticmethod
    def unsaturated(pool: Pool, slots: list[Slot]) -> list[Slot]:
        """Return the slots whose engine has room by its own report; the very list when all have."""
        in_flight, saturated = pool.fleet.in_flight, pool.saturated
        if not saturated or pool.fleet.now_s - pool.reported_s > REPORT_S_MAX:
            return slots
        free = [slot for slot in slots if slot not in saturated or in_flight[slot] <= saturated[slot]]
        return slots if len(free) == len(slots) else free


def spared(pool: Pool, slots: list[Slot], roomy: list[Slot]) -> list[Slot]:
    """Return the slots to choose among: without the saturated ones if those are few and the pool has room elsewhere.

    A saturated replica is the warm one of many requests. Sent elsewhere they are computed anew, which a pool with room
    bears and a full one does not: there it fills the next replica, and the next.

    Args:
        pool: Theirs.
        slots: That may be chosen.
        roomy: Those of them whose engine has room by its own report.
    """
    if roomy is slots or pool.fleet.now_s - pool.held_s <= EASE_S:
        return slots
    return roomy if len(slots) - len(roomy) <= SPARED_SHARE * len(slots) else slots


def held_by_ledger(fleet: Fleet, slots: Sequence[Slot], patience_s: float, *, is_anyone: bool) -> Held | None:
    """Say why a request is held, by engines' reports and the ledger alone; `None`: some replica is ready for more.

    Args:
        fleet: Columns.
        slots: Whose engines have room by their own report.
        patience_s: Seconds that a request may wait before it is computed.
        is_anyone: Any other request of the pool would meet the same.
    """
    if not slots:
        return ENGINE_QUEUE if is_anyone else ENGINE_QUEUE_FOR_ONE
    now_s, pending, admission_s = fleet.now_s, fleet.pending, fleet.admission_s
    pending_s, busy_since_s = fleet.pending_s, fleet.busy_since_s
    for slot in slots:  # all of them at each event of a full fleet, so `Fleet.waiting_s` is spelled out
        if pending[slot] < BEHIND:
            return None
        work_s = pending_s[slot]
        is_soon = 0.5 * work_s <= patience_s and work_s - (now_s - busy_since_s[slot]) <= patience_s
        if is_soon and admission_s[slot] <= patience_s:
            return None
    return NO_TIME if is_anyone else NO_TIME_FOR_ONE


def has_memory(fleet: Fleet, slots: Sequence[Slot], patience_s: float, request: Request, overlap: Overlap) -> bool:
    """Return whether some replica that is ready for more would also have KV memory within `patience_s`.

    Args:
        fleet: Columns.
        slots: To look at.
        patience_s: Seconds that a request may wait.
        request: To be placed.
        overlap: Of this request, fresh.
    """
    pending, admission_s, capacity = fleet.pending, fleet.admission_s, fleet.capacity_tokens
    output_tokens = fleet.learned.expected_output_tokens(request.output_tokens_max)
    for slot in slots:
        if pending[slot] < BEHIND:
            return True
        if admission_s[slot] > patience_s or fleet.waiting_s(slot) > patience_s:
            continue
        tokens_max = capacity[slot]
        if not tokens_max:
            return True
        need = request.prompt_tokens - overlap.active[slot] + output_tokens
        used = (overlap.active_tokens[slot] + fleet.output_tokens[slot] + need) / tokens_max
        if (used - MEMORY_FULL) * fleet.learned.residence_s[slot] <= patience_s:
            return True
    return False
