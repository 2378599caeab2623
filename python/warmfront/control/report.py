"""The answer of `GET /admin/fleet`.

What was probed, what the core knows about events, what the router has in its ledger. Three sources, joined by replica
id. A part that is missing (the core has not reported yet) is `null`, never invented.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from warmfront.control.facts import ServerFacts
from warmfront.control.verify import TokenCheck
from warmfront.types import FleetState, FleetUpdate, PoolState, PoolUpdate, ReplicaState, ReplicaUpdate


def fleet_report(
    update: FleetUpdate,
    servers: Sequence[ServerFacts],
    checks: Mapping[str, TokenCheck],
    state: FleetState | None,
    router: Mapping[str, Any],
) -> dict[str, Any]:
    """Join the three sources.

    Args:
        update: What the core was told last.
        servers: Facts, for servers that are in no pool yet.
        checks: Token comparison by server URL.
        state: What the core reported last; `None`: nothing yet.
        router: The router's answer, `{"pools": [{"name", "replicas": [{"id", …}], …}], …}`.
    """
    pool_states = {pool.name: pool for pool in state.pools} if state else {}
    rows = _rows(router)
    pools = [_pool(pool, checks, pool_states.get(pool.name), rows) for pool in update.pools]
    router_pools = {pool["name"]: _without(pool, "replicas") for pool in router.get("pools", [])}
    for pool in pools:
        pool["router"] = router_pools.get(pool["name"])
    return {
        "version": update.version,
        "pools": pools,
        "servers": [facts.public() for facts in servers],
        "sources": msgspec.to_builtins(update.sources),
        "degraded": update.degraded,
        "router": _without(router, "pools"),
    }


def _pool(
    pool: PoolUpdate, checks: Mapping[str, TokenCheck], state: PoolState | None, rows: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    replica_states = {replica.replica.id: replica for replica in state.replicas} if state else {}
    return {
        "name": pool.name,
        "models": pool.models,
        "tokenizer": pool.tokenizer,
        "tokens": state.tokens if state else None,
        "tokens_reason": state.tokens_reason if state else None,
        "engine_version": pool.template.engine_version,
        "replicas": [
            _replica(replica, checks.get(replica.url), replica_states.get(replica.id), rows.get(replica.id))
            for replica in pool.replicas
        ],
    }


def _replica(
    replica: ReplicaUpdate, check: TokenCheck | None, state: ReplicaState | None, row: Mapping[str, Any] | None
) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(replica)
    source = shown.pop("events")
    del shown["headers"]
    shown["event_source"] = source
    shown["events"] = msgspec.to_builtins(state.events) if state else None
    shown["token_check"] = {"state": check.state, "reason": check.reason} if check else None
    shown["slot"] = state.slot if state else None
    shown["router"] = row
    shown["notes"] = [*replica.notes, *_standing_notes(row), *_event_notes(state), *_accuracy_notes(row)]
    return shown


def _event_notes(state: ReplicaState | None) -> list[str]:
    events = state.events if state else None
    is_broken = events is not None and events.state in ("stale", "lossy", "connecting") and events.reason
    return [f"KV events {events.state}: {events.reason}"] if events is not None and is_broken else []


def _standing_notes(row: Mapping[str, Any] | None) -> list[str]:
    standing, reason = (row or {}).get("standing", "serving"), (row or {}).get("standing_reason")
    return [f"{standing.replace('_', ' ')}: {reason}"] if standing != "serving" else []


def _accuracy_notes(row: Mapping[str, Any] | None) -> list[str]:
    note = (row or {}).get("accuracy", {}).get("note")
    return [note] if note else []


def _rows(router: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {row["id"]: row for pool in router.get("pools", []) for row in pool.get("replicas", [])}


def _without(mapping: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key != name}
