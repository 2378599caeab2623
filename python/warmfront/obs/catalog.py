"""Every metric of warmfront, as data.

One list feeds the registry in the core, the reference page and the tests. Code names a metric of this list or fails:
the core refuses unknown names. Names hold the base unit, counters end in `_total`; label values are capped by
`metrics.label_values_max`, so no label may carry anything that grows with requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from msgspec import Struct

Kind = Literal["counter", "gauge", "histogram"]

PREFIX = "warmfront_"
UNITS = ("seconds", "tokens", "blocks", "bytes")
"""Base units; the name of every metric that has a unit says which."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
LONG_SECONDS = (*SECONDS, 900.0, 3600.0)
"""For whole requests: an agent's answer may take an hour."""
SHORT_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0)
BLOCKS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)
REGRETS = (-30.0, -10.0, -3.0, -1.0, -0.3, -0.1, -0.03, 0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
TOKEN_ERRORS = (-4096.0, -1024.0, -256.0, -64.0, -16.0, -1.0, 0.0, 1.0, 16.0, 64.0, 256.0, 1024.0, 4096.0)


class Metric(Struct, frozen=True):
    """One family of time series."""

    name: str
    kind: Kind
    help: str
    """One sentence: what it counts, and what a surprising value means."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, in the unit of the name."""

    @property
    def unit(self) -> str | None:
        """The base unit in its name; `None` for plain counts and shares."""
        words = self.name.split("_")
        return next((unit for unit in UNITS if unit in words), None)


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(PREFIX + name, "counter", help, labels)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(PREFIX + name, "gauge", help, labels)


def _histogram(name: str, buckets: Sequence[float], help: str, *labels: str) -> Metric:
    return Metric(PREFIX + name, "histogram", help, labels, tuple(buckets))


REQUESTS = [
    _counter("requests_total", "Requests answered, by how they ended.", "model", "outcome"),
    _histogram(
        "request_duration_seconds", LONG_SECONDS, "From the request read to the last byte of the answer sent.", "model"
    ),
    _histogram("ttft_seconds", SECONDS, "From the request read to the first token passed on.", "model"),
    _histogram("itl_seconds", SECONDS, "Gap between two tokens of a stream, as passed on.", "model"),
    _gauge("connections", "Client connections open now."),
    _counter(
        "refused_clients_total",
        "Requests turned away at the door: no or unknown key, too many streams, doubtful framing, failed TLS.",
        "reason",
    ),
    _gauge("streams", "Answers being streamed now."),
    _counter("relayed_bytes_total", "Bytes passed on: up to engines, down to clients.", "direction"),
]

DECISIONS = [
    _histogram("decision_duration_seconds", SHORT_SECONDS, "Time of one `Router.step`: a batch of events decided."),
    _histogram("queue_duration_seconds", SECONDS, "Wait for a replica before the dispatch.", "model"),
    _gauge("waiting_requests", "Requests that wait for a replica.", "pool"),
    _gauge("event_queue_depth", "Events not yet taken by the router; arrivals are refused when it is full."),
    _gauge("command_queue_depth", "Commands not yet carried out; the router waits when it is full."),
    _counter("policy_errors_total", "Decisions in which the policy failed; the least loaded replica was taken."),
    _histogram(
        "regret_seconds",
        REGRETS,
        "Realised cost of a stream less what load alone was expected to cost; a mean above 0: affinity loses.",
        "pool",
    ),
    _gauge(
        "affinity_credit", "Part of the cache's advantage that counts: 1, or less where the guard saw it lose.", "pool"
    ),
    _gauge(
        "affinity_gain_seconds",
        "Measured gain over placing by load, per decision on which they differ; below 0: the guard will act.",
        "pool",
    ),
    _gauge("affinity_sentinels", "Decisions made by the rival rule to compare, since the policy began.", "pool"),
]

FLOW = [
    _gauge(
        "waiting_band_requests", "Requests that wait, by priority band; lower bands are served first.", "pool", "band"
    ),
    _gauge("oldest_wait_seconds", "How long the first of the waiting requests has waited.", "pool"),
    _gauge("pool_requests", "Requests dispatched and not yet ended.", "pool"),
    _gauge("flow_limit", "Limits of flow control in force, each per pool; infinite: none.", "limit"),
    _counter(
        "held_total",
        "Requests that had to wait, by what held the queue: nothing ready, a limit, or an estimated wait everywhere.",
        "pool",
        "reason",
    ),
    _counter("shed_total", "Requests refused by the router, by the code that the client got.", "pool", "reason"),
    _counter(
        "session_keys_total",
        "Requests by where their session key was found; `none` is normal: prefixes need no key.",
        "source",
    ),
]

PROMPTS = [
    _counter("prompt_tokens_total", "Prompt tokens of dispatched requests.", "model"),
    _histogram("overlap_blocks", BLOCKS, "Leading blocks that the chosen replica was expected to hold.", "model"),
    _counter(
        "predicted_cached_tokens_total",
        "Prompt tokens expected to be cached, over requests whose answer reported them.",
        "replica",
    ),
    _counter("reported_cached_tokens_total", "Cached prompt tokens as the engine reported them.", "replica"),
    _histogram(
        "cached_tokens_error",
        TOKEN_ERRORS,
        "Reported minus predicted cached tokens of one answer; far from 0: the index does not see what the engine has.",
        "replica",
    ),
    _counter(
        "unconfirmed_predictions_total",
        "Predicted prompts that the engine's events never confirmed; when it grows, our tokens are not the engine's.",
        "replica",
    ),
    _counter("fallbacks_total", "Requests whose tokens could not be reproduced, by reason; routed by bytes.", "reason"),
    _histogram("tokenize_duration_seconds", SHORT_SECONDS, "Rendering and tokenizing one prompt.", "model"),
    _counter("segment_cache_hits_total", "Prompt segments found already tokenized."),
    _gauge("segment_cache_bytes", "Memory of already tokenized prompt segments."),
    _gauge("approximate_pools", "Pools without a tokenizer: routed by bytes, not by tokens."),
]

KV_EVENTS = [
    _counter("kv_events_total", "KV events applied, by kind.", "replica", "kind"),
    _gauge("kv_event_lag_seconds", "Age of the last KV event batch when it arrived, by the engine's clock.", "replica"),
    _gauge("kv_state", "1 for the state the replica's event stream is in; lossy: not used.", "replica", "state"),
    _counter("kv_gaps_total", "Skipped sequence numbers noticed.", "replica"),
    _counter("kv_replays_total", "Replays asked for, by result.", "replica", "result"),
    _counter("kv_restarts_total", "Streams that began anew: the engine was restarted.", "replica"),
    _counter("kv_malformed_total", "Messages that could not be decoded, or were too large.", "replica"),
    _counter("kv_unknown_parents_total", "Stored blocks whose parent is not known; they cannot be placed.", "replica"),
]

INDEX = [
    _gauge("index_blocks", "Distinct blocks known.", "pool"),
    _gauge("index_facts", "Pairs of replica and block, by kind: confirmed or predicted.", "pool", "kind"),
    _gauge("index_bytes", "Memory of the index.", "pool"),
    _counter(
        "index_room_evictions_total",
        "Facts dropped because the index was full; overlap is understated since.",
        "pool",
    ),
]

SNAPSHOTS = [
    _gauge(
        "snapshot_age_seconds", "Time since this process last wrote its snapshot; far over the interval: it cannot."
    ),
    _gauge("snapshot_bytes", "Size of the last snapshot."),
    _gauge("snapshot_write_seconds", "From the first piece copied to the file in place."),
    _gauge(
        "snapshot_hold_seconds",
        "Longest time for which the last snapshot kept a lock of the index; decisions wait no longer than that.",
    ),
    _counter("snapshot_failures_total", "Snapshots that could not be written; the one before stays.", "reason"),
    _counter(
        "snapshot_refusals_total", "Files, peers and replicas' facts that were not taken up, by reason.", "reason"
    ),
    _counter("snapshot_restored_facts_total", "Facts of a former process that were taken up.", "pool"),
]

REPLICAS = [
    _gauge("discovery_up", "1 while the source gives lists of servers; 0: its last list is kept.", "source"),
    _gauge("discovery_servers", "Servers in the last list of the source.", "source"),
    _gauge("discovery_age_seconds", "Time since the source last gave a list.", "source"),
    _gauge("replica_requests", "Requests dispatched and not yet ended.", "replica"),
    _gauge("replica_prefill_tokens", "Prompt tokens dispatched and not yet computed, by our ledger.", "replica"),
    _gauge("replica_ready", "1 while the replica may be chosen.", "replica"),
    _gauge(
        "replica_reuses",
        "1 while what the replica holds is counted on; 0: its prefills take as long as if nothing were cached.",
        "replica",
    ),
    _gauge(
        "replica_standing",
        "1 for how the replica stands by its requests: serving, paused, slow_start, open or half_open.",
        "replica",
        "state",
    ),
    _counter("circuit_opens_total", "Times the replica's circuit opened, by the last failure.", "replica", "reason"),
    _counter(
        "retries_total",
        "Failed attempts that the client saw nothing of, by failure and what followed: again, or why not.",
        "failure",
        "answer",
    ),
    _gauge("engine_running", "Running requests, as the engine reports them.", "replica"),
    _gauge("engine_waiting", "Waiting requests, as the engine reports them.", "replica"),
    _gauge("engine_kv_usage", "Share of KV blocks that running requests use, as the engine reports it.", "replica"),
    _counter("upstream_failures_total", "Failed attempts to reach or read an engine, by kind.", "replica", "kind"),
    _gauge("upstream_connections", "Connections open to the engine.", "replica"),
]

PROCESS = [
    _counter("control_restarts_total", "Times the control process was started again."),
    _counter("config_reloads_total", "Configurations read again while the router ran, by outcome.", "outcome"),
    _gauge("draining", "1 while this process takes leave of its clients."),
    _gauge("fleet_age_seconds", "Time since the control process last reported the fleet."),
    _gauge("build_info", "1, with the version as label.", "version"),
]

SECTIONS: dict[str, list[Metric]] = {
    "Requests": REQUESTS,
    "Decisions": DECISIONS,
    "Flow control": FLOW,
    "Prompts and predictions": PROMPTS,
    "KV events": KV_EVENTS,
    "Index": INDEX,
    "Snapshots": SNAPSHOTS,
    "Replicas": REPLICAS,
    "Process": PROCESS,
}
"""The catalogue by subject, in the order of the reference page."""

METRICS: list[Metric] = [metric for section in SECTIONS.values() for metric in section]
"""The whole catalogue."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_UNBOUNDED_LABELS = frozenset({"request_id", "id", "user", "session", "prompt"})


def problems(metrics: Sequence[Metric]) -> list[str]:
    """Say what breaks the naming rules, one sentence each; empty: nothing does."""
    found = [f"{metric.name}: {problem}" for metric in metrics for problem in _problems_of(metric)]
    names = [metric.name for metric in metrics]
    twice = sorted(name for name in set(names) if names.count(name) > 1)
    return found + [f"{name}: declared {names.count(name)} times" for name in twice]


def _problems_of(metric: Metric) -> list[str]:
    is_histogram = metric.kind == "histogram"
    rules = {
        f"does not begin with {PREFIX}": not metric.name.startswith(PREFIX),
        "has characters outside a-z, 0-9 and _": _NAME.fullmatch(metric.name) is None,
        "a counter ends in _total": metric.kind == "counter" and not metric.name.endswith("_total"),
        "only a counter ends in _total": metric.kind != "counter" and metric.name.endswith("_total"),
        "a histogram names its unit": is_histogram and metric.unit is None,
        "a histogram needs ascending buckets": is_histogram and not _ascending(metric.buckets),
        "only a histogram has buckets": not is_histogram and bool(metric.buckets),
        "the help is not a sentence": not metric.help.endswith(".") or len(metric.help) < 15,
        "has a label without bound": not _UNBOUNDED_LABELS.isdisjoint(metric.labels),
        "a label is not a plain name": any(_NAME.fullmatch(label) is None for label in metric.labels),
    }
    return [problem for problem, broken in rules.items() if broken]


def _ascending(buckets: Sequence[float]) -> bool:
    return bool(buckets) and all(low < high for low, high in pairwise(buckets))
