"""Answers to the admin API: the shapes of `explain`, `fleet` and `policy` as structs, and what fills them.

JSON of these structs is the body of an `Answered`. They are the contract with `warmfront explain`, `warmfront fleet`
and the admin API; field names carry their units.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from warmfront.policy.base import Fleet, Guarded, ReplicaCost, Term
from warmfront.policy.estimators import Learned
from warmfront.router.accuracy import Accuracy
from warmfront.router.fleet import Pool
from warmfront.router.health import State
from warmfront.types import Choice, EventState, Overlap, Request, Slot


class OverlapTokens(Struct, frozen=True):
    """Leading prompt tokens a replica holds, by the slowest tier that counts; `active` are in use right now."""

    device: int
    confirmed: int
    host: int
    disk: int
    active: int


class ReplicaExplanation(Struct, frozen=True):
    """One replica's part of an explanation."""

    id: str
    slot: Slot
    ready: bool
    overlap: OverlapTokens
    predicted_cached_tokens: int
    terms: list[Term]
    factors: list[Term]
    total: float | None
    """Sum of the terms; `None` when the policy gives no cost or the replica may not be chosen."""


class Explanation(Struct, frozen=True):
    """What would be decided about a request, and why."""

    pool: str
    model: str
    policy: str
    prompt_tokens: int
    blocks: int
    basis: str
    fallback: str | None
    route: str
    choice: str | None
    """Id of the best replica; `None`: the request would be held."""
    choices: list[str]
    reason: str
    replicas: list[ReplicaExplanation]


class AccuracyReport(Struct, frozen=True):
    """Predicted against reported cached tokens."""

    answers: int
    predicted_cached_tokens: int
    reported_cached_tokens: int
    mean_error_tokens: float | None
    p99_error_tokens: int | None
    exact_matches: int
    unreported_answers: int
    mismatch: bool
    note: str | None


class ReplicaReport(Struct, frozen=True):
    """One replica as the router sees it."""

    id: str
    slot: Slot
    url: str
    ready: bool
    standing: State
    """Whether it gets new work, by its requests: `serving`, `paused`, `slow_start`, `open` or `half_open`."""
    standing_reason: str
    notes: list[str]
    in_flight: int
    foreign_requests: float
    pending_requests: int
    pending_tokens: int
    pending_s: float
    context_tokens: float
    expected_output_tokens: float
    block_size: int | None
    capacity_tokens: int | None
    engine_running: float | None
    engine_waiting: float | None
    engine_kv_usage: float | None
    net_s: float
    """net."""
    reuses: bool
    """r: what it holds is counted on; false while its prefills take as long as if nothing were cached."""
    prefill_scale: float
    decode_base_s: float
    decode_request_s: float
    decode_token_s: float
    residence_s: float
    accuracy: AccuracyReport
    events: EventState


class LearnedReport(Struct, frozen=True):
    """What a pool has learned, by the symbols of the policy page."""

    prefill_token_s: float
    """α."""
    prefill_pair_s: float
    """β."""
    prefill_samples: int
    host_load_s: float
    """ℓ: seconds a token."""
    disk_load_s: float
    adapter_load_s: float
    """ℓ_a."""
    load_samples: int
    decode_samples: int
    output_tokens: float
    """ô."""
    new_tokens: float
    """n̄."""
    continuation: list[float]
    """m_t for turns 0 to 6 and later."""
    credit_exact: list[float]
    """η by age bucket (log2 quarter seconds; the last: never sent there) for replicas with live events."""
    credit_approximate: list[float]
    """The same for the others."""


class PoolReport(Struct, frozen=True):
    """One pool."""

    name: str
    models: dict[str, str | None]
    tokens: str
    tokens_reason: str | None
    waiting: int
    in_flight: int
    learned: LearnedReport
    guard: Guarded | None
    """Whether affinity pays, measured; `None`: the policy has no guard, or has decided nothing."""
    replicas: list[ReplicaReport]


class FleetReport(Struct, frozen=True):
    """Answer to `fleet`."""

    version: int
    time_s: float
    policy: str
    policy_errors: int
    stray_events: dict[str, int]
    """Events about requests or replicas that are not known (any more), by kind."""
    pools: list[PoolReport]


class PolicyReport(Struct, frozen=True):
    """Answer to `policy`: the configured constants, what each pool learned, and whether affinity pays there."""

    name: str
    known: list[str]
    constants: dict[str, object]
    learned: dict[str, LearnedReport]
    guard: dict[str, Guarded] = {}
    """By pool, where the policy has one and has decided something."""


class Problem(Struct, frozen=True):
    """Why a question has no answer."""

    error: str


def explanation(
    request: Request,
    *,
    pool: Pool,
    policy: str,
    overlap: Overlap,
    costs: Sequence[ReplicaCost],
    choices: Sequence[Choice],
    reason: str,
) -> Explanation:
    """Put one decision in words and numbers."""
    by_slot = {cost.slot: cost for cost in costs}
    predicted = {choice.slot: choice.cached_tokens for choice in choices}
    names = [_name(pool.fleet, choice.slot) for choice in choices]
    return Explanation(
        pool=pool.name,
        model=request.model,
        policy=policy,
        prompt_tokens=request.prompt_tokens,
        blocks=request.blocks,
        basis=request.basis,
        fallback=request.fallback,
        route=request.route,
        choice=names[0] if names else None,
        choices=names,
        reason=reason,
        replicas=[
            _replica_explanation(pool.fleet, slot, overlap, by_slot.get(slot), predicted.get(slot, 0))
            for slot in sorted(pool.replicas)
        ],
    )


def _replica_explanation(
    fleet: Fleet, slot: Slot, overlap: Overlap, cost: ReplicaCost | None, predicted: int
) -> ReplicaExplanation:
    return ReplicaExplanation(
        id=_name(fleet, slot),
        slot=slot,
        ready=fleet.ready[slot],
        overlap=OverlapTokens(
            device=overlap.device[slot],
            confirmed=overlap.confirmed[slot],
            host=overlap.host[slot],
            disk=overlap.disk[slot],
            active=overlap.active[slot],
        ),
        predicted_cached_tokens=predicted if cost is None else cost.cached_tokens,
        terms=[] if cost is None else cost.terms,
        factors=[] if cost is None else cost.factors,
        total=None if cost is None else cost.total,
    )


def pool_report(pool: Pool, *, waiting: int, guard: Guarded | None) -> PoolReport:
    """Report a pool's rows."""
    state = pool.state
    return PoolReport(
        name=pool.name,
        models={} if state is None else state.models,
        tokens="loading" if state is None else state.tokens,
        tokens_reason=None if state is None else state.tokens_reason,
        waiting=waiting,
        in_flight=len(pool.flights),
        learned=learned_report(pool.fleet.learned),
        guard=guard,
        replicas=[_replica_report(pool, slot) for slot in sorted(pool.replicas)],
    )


def learned_report(learned: Learned) -> LearnedReport:
    """Report what a pool has learned."""
    return LearnedReport(
        prefill_token_s=learned.prefill.alpha,
        prefill_pair_s=learned.prefill.beta,
        prefill_samples=learned.prefill.samples,
        host_load_s=learned.loads.host_s,
        disk_load_s=learned.loads.disk_s,
        adapter_load_s=learned.loads.adapter_s,
        load_samples=learned.loads.samples,
        decode_samples=learned.decode.samples,
        output_tokens=learned.output_tokens,
        new_tokens=learned.new_tokens,
        continuation=learned.continuation.rates(),
        credit_exact=learned.credit.factor[True],
        credit_approximate=learned.credit.factor[False],
    )


def _replica_report(pool: Pool, slot: Slot) -> ReplicaReport:
    fleet, learned = pool.fleet, pool.fleet.learned
    state = pool.replicas[slot]
    replica = state.replica
    verdict = pool.health.verdict(slot, fleet.now_s)
    return ReplicaReport(
        id=replica.id,
        slot=slot,
        url=replica.url,
        ready=replica.ready,
        standing=verdict.state,
        standing_reason=verdict.reason,
        notes=replica.notes,
        in_flight=fleet.in_flight[slot],
        foreign_requests=fleet.foreign[slot],
        pending_requests=fleet.pending[slot],
        pending_tokens=fleet.pending_tokens[slot],
        pending_s=fleet.pending_s[slot],
        context_tokens=fleet.context_tokens[slot],
        expected_output_tokens=fleet.output_tokens[slot],
        block_size=fleet.block_size[slot],
        capacity_tokens=fleet.capacity_tokens[slot],
        engine_running=replica.load.running,
        engine_waiting=replica.load.waiting,
        engine_kv_usage=replica.load.kv_usage,
        net_s=fleet.net_s[slot],
        reuses=bool(learned.reuse.factor[slot]),
        prefill_scale=learned.prefill.scale[slot],
        decode_base_s=learned.decode.base[slot],
        decode_request_s=learned.decode.per_request[slot],
        decode_token_s=learned.decode.per_token[slot],
        residence_s=learned.residence_s[slot],
        accuracy=_accuracy_report(pool.accuracy.get(replica.id, Accuracy(replica.id))),
        events=state.events,
    )


def _accuracy_report(accuracy: Accuracy) -> AccuracyReport:
    return AccuracyReport(
        answers=accuracy.answers,
        predicted_cached_tokens=accuracy.predicted_tokens,
        reported_cached_tokens=accuracy.reported_tokens,
        mean_error_tokens=accuracy.mean_error_tokens(),
        p99_error_tokens=accuracy.p99_error_tokens(),
        exact_matches=accuracy.exact_matches,
        unreported_answers=accuracy.unreported,
        mismatch=accuracy.is_mismatched,
        note=accuracy.note(),
    )


def _name(fleet: Fleet, slot: Slot) -> str:
    return fleet.id[slot] or f"slot {slot}"
