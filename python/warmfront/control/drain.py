"""Replicas that an operator has taken out of service. Pure.

A drained replica stays in the fleet, with its slot and what is known about its cache, and is not ready: it gets no new
requests, and its streams end by themselves. The mark travels with the fleet to the core and back, so that a control
process that was restarted still knows it.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from warmfront.types import FleetState, FleetUpdate, ReplicaUpdate

NOTE = "draining: takes no new requests"


def drained(update: FleetUpdate, replicas: Collection[str]) -> FleetUpdate:
    """Return the fleet in which these replicas, named by id, take no new requests."""
    if not replicas:
        return update
    pools = [
        msgspec.structs.replace(pool, replicas=[_mark(each) if each.id in replicas else each for each in pool.replicas])
        for pool in update.pools
    ]
    return msgspec.structs.replace(update, pools=pools)


def named(update: FleetUpdate, name: str) -> list[str]:
    """Return the ids that a name of an operator stands for: one replica, or all ranks of a server; scheme optional."""
    wanted = {f"{scheme}{name.rstrip('/')}" for scheme in ("", "http://", "https://")}
    replicas = [replica for pool in update.pools for replica in pool.replicas]
    return [replica.id for replica in replicas if not wanted.isdisjoint({replica.id, replica.url})]


def still_drained(state: FleetState | None) -> set[str]:
    """Return the replicas that the core knows as drained."""
    pools = state.pools if state is not None else []
    return {each.replica.id for pool in pools for each in pool.replicas if each.replica.draining}


def server_of(replica: str) -> str:
    """Return the URL in a replica's id."""
    return replica.partition("#")[0]


def _mark(replica: ReplicaUpdate) -> ReplicaUpdate:
    return msgspec.structs.replace(replica, ready=False, draining=True, notes=[NOTE, *replica.notes])
