"""Which replicas an operator means, and what becomes of them."""

from __future__ import annotations

from warmfront.control.drain import NOTE, drained, named, still_drained
from warmfront.types import (
    EventState,
    FleetState,
    FleetUpdate,
    PoolState,
    PoolUpdate,
    ReplicaState,
    ReplicaUpdate,
    Slot,
)


def replica(id: str, *, ready: bool = True) -> ReplicaUpdate:
    return ReplicaUpdate(id=id, url=id.partition("#")[0], rank=None, engine="vllm", ready=ready, notes=["known"])


FLEET = FleetUpdate(
    version=4,
    pools=[
        PoolUpdate(
            name="m",
            models={"m": None},
            tokenizer=None,
            replicas=[replica("http://a:1"), replica("http://b:1#0"), replica("http://b:1#1")],
        )
    ],
)


def test_a_drained_replica_stays_and_is_not_ready() -> None:
    kept, marked, _ = drained(FLEET, {"http://b:1#0"}).pools[0].replicas
    assert kept == FLEET.pools[0].replicas[0]
    assert (marked.ready, marked.draining, marked.notes) == (False, True, [NOTE, "known"])


def test_a_name_stands_for_a_replica_or_for_all_ranks_of_a_server() -> None:
    for name in ("http://a:1", "http://a:1/", "a:1"):
        assert named(FLEET, name) == ["http://a:1"]
    assert named(FLEET, "b:1") == ["http://b:1#0", "http://b:1#1"]
    assert named(FLEET, "http://b:1#1") == ["http://b:1#1"]
    assert named(FLEET, "http://c:1") == []
    secure = FleetUpdate(version=1, pools=[PoolUpdate("m", {"m": None}, None, [replica("https://s:1")])])
    assert named(secure, "s:1") == ["https://s:1"]


def test_what_is_drained_is_read_back_from_the_core() -> None:
    replicas = drained(FLEET, {"http://a:1"}).pools[0].replicas
    rows = [ReplicaState(slot=Slot(slot), replica=each, events=EventState()) for slot, each in enumerate(replicas)]
    pool = PoolState(name="m", models={"m": None}, tokens="exact", tokens_reason=None, replicas=rows)
    assert still_drained(FleetState(version=4, pools=[pool])) == {"http://a:1"}
    assert still_drained(None) == set()
