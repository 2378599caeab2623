"""Answering the admin API's questions from the router's state, without changing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from warmfront.config import PolicyConfig
from warmfront.errors import NoReplicaError
from warmfront.router import explain, memory
from warmfront.router.deciding import Decider
from warmfront.router.fleet import Pool
from warmfront.router.flow import Flow
from warmfront.types import Answered, Asked, Overlap, Request


class State(NamedTuple):
    """What questions are about."""

    now_s: float
    fleet_version: int
    policy: PolicyConfig
    decider: Decider
    flow: Flow
    pools: dict[str, Pool]
    strays: dict[str, int]
    overlap: Callable[[Request, Pool], Overlap]
    taken: memory.Taken | None = None
    """What became of the last piece of a former process's calibration."""


def answer(question: Asked, state: State) -> Answered:
    """Answer `explain`, `fleet`, `policy` or a question of memory; anything else is 404."""
    if question.question == memory.TELL:
        return _answered(question, memory.piece(state.pools, state.decider, question.payload))
    if question.question == memory.TAKE:
        return _taken(question, state.taken)
    if question.question == "explain":
        return _explain(question, state)
    if question.question == "fleet":
        return _answered(question, _fleet(state))
    if question.question == "policy":
        return _answered(question, _policy(state))
    return _answered(question, explain.Problem(f"no such question: {question.question}"), status=404)


def _explain(question: Asked, state: State) -> Answered:
    request = question.request
    if request is None:
        return _answered(question, explain.Problem("explain needs a request"), status=400)
    pool = state.pools.get(request.pool)
    if pool is None:
        return _answered(question, explain.Problem(f"no pool serves {request.model}"), status=404)
    pool.fleet.now_s = state.now_s
    overlap = state.overlap(request, pool)
    eligible = pool.fleet.eligible
    pool.fleet.allow(pool.serving(request.model))
    costs, decision = state.decider.explain(request, overlap, pool.fleet)
    pool.fleet.allow(eligible)
    body = explain.explanation(
        request,
        pool=pool,
        policy=state.policy.name,
        overlap=overlap,
        costs=costs,
        choices=[] if decision is None else decision.choices,
        reason=NoReplicaError.code if decision is None else decision.reason,
    )
    return _answered(question, body)


def _taken(question: Asked, taken: memory.Taken | None) -> Answered:
    if taken is None:
        return _answered(question, explain.Problem("the calibration cannot be read"), status=400)
    return _answered(question, taken)


def _fleet(state: State) -> explain.FleetReport:
    return explain.FleetReport(
        version=state.fleet_version,
        time_s=state.now_s,
        policy=state.policy.name,
        policy_errors=state.decider.errors,
        stray_events=dict(sorted(state.strays.items())),
        pools=[
            explain.pool_report(pool, waiting=state.flow.depth(name), guard=state.decider.guarded(name))
            for name, pool in state.pools.items()
        ],
    )


def _policy(state: State) -> explain.PolicyReport:
    return explain.PolicyReport(
        name=state.policy.name,
        known=state.decider.known(),
        constants=msgspec.to_builtins(state.policy),
        learned={name: explain.learned_report(pool.fleet.learned) for name, pool in state.pools.items()},
        guard={name: guarded for name in state.pools if (guarded := state.decider.guarded(name)) is not None},
    )


def _answered(question: Asked, body: msgspec.Struct, *, status: int = 200) -> Answered:
    return Answered(question.id, status, msgspec.json.encode(body))
