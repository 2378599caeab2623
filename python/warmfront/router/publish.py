"""Gauges of the ledger and of what waits: only those that changed are set.

`/health/backlog` is made of the gauges about queues, in the core and without asking the router.
"""

from __future__ import annotations

import math

from warmfront.config import FlowConfig
from warmfront.router.fleet import Pool
from warmfront.router.flow import Flow, Queue
from warmfront.router.health import STATES
from warmfront.router.meter import Meter
from warmfront.types import ReplicaUpdate

REQUESTS = "warmfront_replica_requests"
PREFILL_TOKENS = "warmfront_replica_prefill_tokens"
READY = "warmfront_replica_ready"
REUSES = "warmfront_replica_reuses"
STANDING = "warmfront_replica_standing"
WAITING, BAND = "warmfront_waiting_requests", "warmfront_waiting_band_requests"
OLDEST, IN_FLIGHT, LIMIT = "warmfront_oldest_wait_seconds", "warmfront_pool_requests", "warmfront_flow_limit"
RUNNING, QUEUED, KV_USAGE = "warmfront_engine_running", "warmfront_engine_waiting", "warmfront_engine_kv_usage"


def publish_limits(meter: Meter, config: FlowConfig) -> None:
    """Set the limits in force; none is infinite."""
    limits = {
        "queue": config.queue_max,
        "queue_per_flow": config.queue_max_per_flow,
        "in_flight": config.in_flight_max,
        "in_flight_per_replica": config.in_flight_max_per_replica,
    }
    for name, limit in limits.items():
        meter.set(LIMIT, (name,), math.inf if limit is None else limit)


def publish(meter: Meter, pools: dict[str, Pool], flow: Flow, now_s: float) -> None:
    """Set the gauges of every row that changed. The core drops those of replicas and pools that left."""
    for pool in pools.values():
        _publish_queue(meter, pool, flow.queue(pool.name), now_s)
        for slot in sorted(pool.touched):
            labels = (pool.replicas[slot].replica.id,)
            meter.set(REQUESTS, labels, pool.fleet.in_flight[slot])
            meter.set(PREFILL_TOKENS, labels, pool.fleet.pending_tokens[slot])
        pool.touched.clear()
        for slot in sorted(pool.reloaded):
            _publish_engine(meter, pool.replicas[slot].replica)
            meter.set(REUSES, (pool.replicas[slot].replica.id,), pool.fleet.learned.reuse.factor[slot])
        pool.reloaded.clear()
        for slot in sorted(pool.rejudged):
            standing = pool.health.verdict(slot, pool.fleet.now_s).state
            for state in STATES:
                meter.set(STANDING, (pool.replicas[slot].replica.id, state), 1.0 if state == standing else 0.0)
        pool.rejudged.clear()


def _publish_queue(meter: Meter, pool: Pool, queue: Queue | None, now_s: float) -> None:
    figures = {IN_FLIGHT: float(len(pool.flights)), WAITING: 0.0, OLDEST: 0.0}
    if queue is not None:
        figures[WAITING] = float(len(queue))
        figures[OLDEST] = now_s - queue.oldest_s() if queue else 0.0
        figures |= {f"{BAND}/{band}": float(count) for band, count in queue.by_band().items()}
    before = pool.published
    for key, value in figures.items():
        if before.get(key, 0.0) != value:
            _set(meter, pool, key, value)
    pool.published = figures


def _set(meter: Meter, pool: Pool, key: str, value: float) -> None:
    gauge, _, band = key.partition("/")
    meter.set(gauge, (pool.name, band) if band else (pool.name,), value)


def _publish_engine(meter: Meter, replica: ReplicaUpdate) -> None:
    labels, load = (replica.id,), replica.load
    meter.set(READY, labels, 1.0 if replica.ready else 0.0)
    for gauge, value in ((RUNNING, load.running), (QUEUED, load.waiting), (KV_USAGE, load.kv_usage)):
        if value is not None:
            meter.set(gauge, labels, value)
