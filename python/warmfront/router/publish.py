"""Gauges of the ledger: only rows that changed since the last step are set."""

from __future__ import annotations

from warmfront.router.fleet import Pool
from warmfront.router.flow import Flow
from warmfront.router.health import STATES
from warmfront.router.meter import Meter
from warmfront.types import ReplicaUpdate

REQUESTS = "warmfront_replica_requests"
PREFILL_TOKENS = "warmfront_replica_prefill_tokens"
READY = "warmfront_replica_ready"
WAITING = "warmfront_waiting_requests"
STANDING = "warmfront_replica_standing"
RUNNING, QUEUED, KV_USAGE = "warmfront_engine_running", "warmfront_engine_waiting", "warmfront_engine_kv_usage"


def publish(meter: Meter, pools: dict[str, Pool], flow: Flow) -> None:
    """Set the gauges of every row that changed. The core drops those of replicas that left."""
    for pool in pools.values():
        waiting = flow.depth(pool.name)
        if waiting != pool.published_waiting:
            pool.published_waiting = waiting
            meter.set(WAITING, (pool.name,), waiting)
        for slot in sorted(pool.touched):
            labels = (pool.replicas[slot].replica.id,)
            meter.set(REQUESTS, labels, pool.fleet.in_flight[slot])
            meter.set(PREFILL_TOKENS, labels, pool.fleet.pending_tokens[slot])
        pool.touched.clear()
        for slot in sorted(pool.reloaded):
            _publish_engine(meter, pool.replicas[slot].replica)
        pool.reloaded.clear()
        for slot in sorted(pool.rejudged):
            standing = pool.health.verdict(slot, pool.fleet.now_s).state
            for state in STATES:
                meter.set(STANDING, (pool.replicas[slot].replica.id, state), 1.0 if state == standing else 0.0)
        pool.rejudged.clear()


def _publish_engine(meter: Meter, replica: ReplicaUpdate) -> None:
    labels, load = (replica.id,), replica.load
    meter.set(READY, labels, 1.0 if replica.ready else 0.0)
    for gauge, value in ((RUNNING, load.running), (QUEUED, load.waiting), (KV_USAGE, load.kv_usage)):
        if value is not None:
            meter.set(gauge, labels, value)
