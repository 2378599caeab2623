"""What the router has learned, written down and taken up again after a restart.

`piece` tells it a few replicas at a time, so that no decision waits for the whole; `Memory` holds what a former process
told until the pools and replicas that it is about are there. Only numbers, names of adapters, and the ids of pools and
replicas.

What is easy to get wrong: a number may come from another version, or from a peer. A stored value is taken only where it
has the very shape of the value it replaces and is finite; anything else leaves the prior, which learning corrects.
Moments are stored as ages, since every process has a clock of its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeGuard

import msgspec
from msgspec import Struct

from warmfront.policy.guard import CREDITS, HOLD_DOUBLINGS_MAX, Guard
from warmfront.policy.rates import Rates
from warmfront.policy.watch import Watch
from warmfront.router.accuracy import WINDOW, Accuracy
from warmfront.router.deciding import Decider
from warmfront.router.fleet import Pool
from warmfront.types import Slot

logger = logging.getLogger(__name__)

TELL, TAKE = "memory", "remember"
"""The two questions: tell a piece, take a piece up."""

REPLICAS_A_PIECE = 32
"""About half a millisecond of the deciding thread."""
KEYS_MAX = 2048
"""Prefixes, and adapters, whose rate is told: those asked for last, another half of a millisecond."""
NAME_CHARS_MAX = 512
"""No name of an adapter is longer."""
RESIDENT = "Adapters.resident"
"""Where a replica's adapters are kept until it is there."""
REPLICAS_MAX = 65_536
"""Remembered replicas that wait for theirs; more are dropped."""
MAGNITUDE_MAX = 1e30
"""No number that is learned is larger: squares of pairs of tokens are the largest."""


class Kept(NamedTuple):
    """Where an estimator is, and which of its attributes are kept; a test compares this with the classes."""

    path: str
    """From `Learned`; empty: that itself."""
    shared: tuple[str, ...] = ()
    """Of the whole pool."""
    by_slot: tuple[str, ...] = ()
    """Lists with a row a slot."""
    left: tuple[str, ...] = ()
    """Not kept: constants, parts listed on their own, and what is in progress."""


KEPT = (
    Kept(
        "",
        shared=("output_tokens", "new_tokens"),
        by_slot=("residence_s",),
        left=(
            *("prefill", "decode", "loads", "credit", "reuse", "continuation", "regret", "sequences"),
            *("_busy", "_prefilled_s", "_paced_s", "_stretches", "_progress_s"),
        ),
    ),
    Kept("prefill", shared=("alpha", "beta", "samples", "_outliers", "_sums"), left=("_prior_s", "_scale")),
    Kept("prefill._scale", by_slot=("factor", "_measured", "_expected", "_squares")),
    Kept(
        "decode",
        shared=("samples",),
        by_slot=("base", "per_request", "per_token", "_covariance", "_astray"),
        left=("_prior",),
    ),
    Kept("loads", shared=("costs", "samples", "_products", "_sums"), left=("_prior",)),
    Kept("credit", shared=("reported", "predicted", "factor")),
    Kept(
        "reuse",
        # A few prefills show it again.
        left=(
            *("factor", "_against", "_changed", "_confirmed", "_is_hearsay", "_shown_s", "_events", "_began_s"),
            *("_is_usable", "_open", "_doubted"),
        ),
    ),
    Kept("continuation", shared=("_successors", "_requests", "_arrivals", "later"), left=("_turns_max",)),
    Kept(
        "regret",
        by_slot=("_counts",),
        # The index counts from zero again; the share is made of the counts of the whole pool.
        left=("share", "_prior", "_prior_evictions", "_seen", "_followed_s"),
    ),
    Kept("sequences", by_slot=("limit", "_most", "_reports")),
)
"""The estimators of a pool."""

GUARD_COUNTS = ("alarms", "rivals", "_doublings", "_tried", "_won")
"""Never negative: block sizes and waits are powers of two of them."""
GUARD_KEPT = ("credit", "gain_s", "_spread_s", "_cost_s", *GUARD_COUNTS)
GUARD_TESTS = ("_lower", "_raise")
"""Sequential tests: `Wealth`."""
GUARD_TEST_KEPT = ("value", "_sum", "_squares")
GUARD_LEFT = ("_config", "_size", "_blocks", "_number", "_position", "_stepped_s")
"""Of these the last is kept as an age."""
WATCH_KEPT = ("_decisions", "_differing")
ACCURACY_KEPT = (
    *("answers", "predicted_tokens", "reported_tokens", "absolute_error_tokens", "exact_matches", "unreported"),
    *("is_mismatched", "_off", "_whole"),
)
ACCURACY_LEFT = ("replica", "_recent")
"""The last answers are kept as a list."""


class Piece(Struct, frozen=True):
    """Some replicas of one pool, and with the first of them what the pool has learned."""

    pool: str = ""
    shared: dict[str, Any] = {}
    guard: dict[str, Any] = {}
    replicas: dict[str, dict[str, Any]] = {}
    """By replica id."""
    resident: dict[str, Any] = {}
    """By replica id: its incarnation and the adapters it has loaded. Replicas without any are left out."""
    prefixes: Any = []
    """Rates: sequence hash, count, and seconds since it was that."""
    adapters: Any = []
    """The same of adapters, by name."""
    next: str | None = None
    """What to ask for the next piece; `None`: this is the last."""


class Taken(Struct, frozen=True):
    """What became of a piece."""

    pools: int
    """Pools that wait for their replicas."""
    replicas: int
    """Replicas that are waited for."""


_piece = msgspec.json.Decoder(Piece)


def piece(pools: dict[str, Pool], decider: Decider, payload: bytes) -> Piece:
    """Tell a piece.

    Args:
        pools: All.
        decider: Has the guards.
        payload: Empty for the first piece, then `next` of the one before.
    """
    name, _, row = payload.decode(errors="replace").rpartition("@")
    names = sorted(pools)
    if not payload:
        name = names[0] if names else ""
    first = int(row) if row.isdecimal() else 0
    following = [other for other in names if other > name]
    after = f"{following[0]}@0" if following else None
    pool = pools.get(name)
    if pool is None:  # it has left since it was named
        return Piece(next=after)
    slots = sorted(pool.replicas)
    told = slots[first : first + REPLICAS_A_PIECE]
    behind = first + len(told)
    now_s, is_first = pool.fleet.now_s, first == 0
    prefixes = decider.prefixes(pool.fleet) if is_first else None
    return Piece(
        pool=name,
        shared=_shared(pool) if is_first else {},
        guard=_guard(decider.watch(pool.fleet), now_s) if is_first else {},
        replicas={pool.replicas[slot].replica.id: _replica(pool, slot) for slot in told},
        resident=dict(_resident(pool, told)),
        prefixes=prefixes.newest(KEYS_MAX, now_s) if prefixes is not None else [],
        adapters=pool.fleet.adapters.rates.newest(KEYS_MAX, now_s) if is_first else [],
        next=f"{name}@{behind}" if behind < len(slots) else after,
    )


class Memory:
    """What a former process told, until it is given to the pools and replicas that it is about."""

    def __init__(self) -> None:
        self._shared: dict[str, Piece] = {}
        """By pool."""
        self._replicas: dict[tuple[str, str], dict[str, Any]] = {}
        """By pool and replica id."""

    def take(self, payload: bytes) -> Taken | None:
        """Keep a piece; `None`: it cannot be read."""
        try:
            told = _piece.decode(payload)
        except (msgspec.MsgspecError, RecursionError):
            logger.exception("calibration of a former process cannot be read")
            return None
        if told.shared or told.guard:
            self._shared[told.pool] = told
        for replica, values in told.replicas.items():
            if len(self._replicas) < REPLICAS_MAX:
                self._replicas[told.pool, replica] = {**values, RESIDENT: told.resident.get(replica)}
        return Taken(len(self._shared), len(self._replicas))

    def give(self, pool: Pool, decider: Decider) -> None:
        """Hand a pool, and those of its replicas that are there, what is kept for them; once."""
        if not self._shared and not self._replicas:
            return
        shared = self._shared.pop(pool.name, None)
        if shared is not None:
            for where, name, _ in _attributes(pool, of_slots=False):
                _put(where, name, shared.shared.get(f"{type(where).__name__}.{name}"))
            _put_guard(decider.watch(pool.fleet), shared.guard, pool.fleet.now_s)
            _put_rates(decider.prefixes(pool.fleet), shared.prefixes, int, pool.fleet.now_s)
            _put_rates(pool.fleet.adapters.rates, shared.adapters, str, pool.fleet.now_s)
        for slot, state in pool.replicas.items():
            values = self._replicas.pop((pool.name, state.replica.id), None)
            if values is not None:
                _put_replica(pool, slot, values)
                pool.relearned(slot)


def _attributes(pool: Pool, *, of_slots: bool) -> Iterator[tuple[Any, str, Any]]:
    """Every kept attribute: its object, its name, its value."""
    for kept in KEPT:
        where: Any = pool.fleet.learned
        for part in kept.path.split(".") if kept.path else []:
            where = getattr(where, part)
        for name in kept.by_slot if of_slots else kept.shared:
            yield where, name, getattr(where, name)


def _shared(pool: Pool) -> dict[str, Any]:
    return {f"{type(where).__name__}.{name}": _plain(value) for where, name, value in _attributes(pool, of_slots=False)}


def _replica(pool: Pool, slot: Slot) -> dict[str, Any]:
    told = {f"{type(where).__name__}.{name}": rows[slot] for where, name, rows in _attributes(pool, of_slots=True)}
    accuracy = pool.accuracy.get(pool.replicas[slot].replica.id)
    if accuracy is not None:
        told |= {f"Accuracy.{name}": getattr(accuracy, name) for name in ACCURACY_KEPT}
        told["Accuracy.recent"] = list(accuracy._recent)
    return told


def _put_replica(pool: Pool, slot: Slot, values: dict[str, Any]) -> None:
    for where, name, rows in _attributes(pool, of_slots=True):
        key = f"{type(where).__name__}.{name}"
        if key not in values:
            continue
        value = values[key]
        if _is_limit(value) if name == "limit" else _fits(value, rows[slot]):
            rows[slot] = tuple(value) if isinstance(value, list) and isinstance(rows[slot], tuple) else value
    _put_resident(pool, slot, values.get(RESIDENT))
    name = pool.replicas[slot].replica.id
    accuracy = Accuracy(name)
    recent = values.get("Accuracy.recent")
    if not _are_pairs(recent) or any(
        not _fits(values.get(f"Accuracy.{kept}"), getattr(accuracy, kept)) for kept in ACCURACY_KEPT
    ):
        return
    for kept in ACCURACY_KEPT:
        setattr(accuracy, kept, values[f"Accuracy.{kept}"])
    accuracy._recent.extend((predicted, reported) for predicted, reported in recent)
    pool.accuracy.setdefault(name, accuracy)


def _resident(pool: Pool, slots: Iterable[Slot]) -> Iterator[tuple[str, list[Any]]]:
    for slot in slots:
        if names := pool.fleet.adapters.resident(slot):
            replica = pool.replicas[slot].replica
            yield replica.id, [replica.incarnation, names]


def _put_resident(pool: Pool, slot: Slot, stored: Any) -> None:
    """Believe which adapters a replica has loaded, unless it is another process by now."""
    if not isinstance(stored, list) or len(stored) != 2 or stored[0] != pool.replicas[slot].replica.incarnation:
        return
    names = stored[1]
    if isinstance(names, list) and all(_is_key(each, str) for each in names):
        pool.fleet.adapters.restore(slot, names)


def _put_rates(rates: Rates[Any] | None, rows: Any, kind: type, now_s: float) -> None:
    """Add the rows that are some: a key, a count, an age."""
    if rates is None or not isinstance(rows, list):
        return
    taken = [tuple(row) for row in rows[:KEYS_MAX] if isinstance(row, list) and len(row) == 3 and _is_rate(row, kind)]
    rates.take(taken, now_s)


def _is_rate(row: list[Any], kind: type) -> bool:
    key, count, age_s = row
    return _is_key(key, kind) and all(_is_number(value) and value >= 0 for value in (count, age_s))


def _is_key(key: Any, kind: type) -> bool:
    """Whether a key is a name, or a sequence hash."""
    if isinstance(key, bool) or not isinstance(key, kind):
        return False
    return len(key) <= NAME_CHARS_MAX if isinstance(key, str) else isinstance(key, int) and 0 <= key < 1 << 64


def _is_limit(value: Any) -> bool:
    """A number of sequences, or none known."""
    return value is None or (_is_number(value) and value >= 1)


def _guard(watch: Watch | None, now_s: float) -> dict[str, Any]:
    if watch is None:
        return {}
    guard = watch.guard
    stepped_s = guard._stepped_s
    return {
        "values": {name: getattr(guard, name) for name in GUARD_KEPT},
        "tests": {
            test: {name: getattr(getattr(guard, test), name) for name in GUARD_TEST_KEPT} for test in GUARD_TESTS
        },
        "stepped_ago_s": now_s - stepped_s if math.isfinite(stepped_s) else None,
        "counts": {name: getattr(watch, name) for name in WATCH_KEPT},
    }


def _put_guard(watch: Watch | None, stored: dict[str, Any], now_s: float) -> None:
    """Take a guard up whole or not at all: half of a test is none."""
    values, tests, counts = (stored.get(name, {}) for name in ("values", "tests", "counts"))
    if watch is None or not _is_guard(watch.guard, values, tests) or values["credit"] not in CREDITS:
        return
    guard = watch.guard
    for name in GUARD_KEPT:
        setattr(guard, name, values[name])
    for test in GUARD_TESTS:
        for name in GUARD_TEST_KEPT:
            setattr(getattr(guard, test), name, tests[test][name])
    ago_s = stored.get("stepped_ago_s")
    guard._stepped_s = now_s - ago_s if _is_number(ago_s) else -math.inf
    for name in WATCH_KEPT:
        _put(watch, name, counts.get(name))


def _is_guard(guard: Guard, values: Any, tests: Any) -> bool:
    if not isinstance(values, dict) or not isinstance(tests, dict):
        return False
    has_values = all(_fits(values.get(name), getattr(guard, name)) for name in GUARD_KEPT)
    if not has_values or min(values[name] for name in GUARD_COUNTS) < 0 or values["_doublings"] > HOLD_DOUBLINGS_MAX:
        return False
    return all(
        isinstance(tests.get(test), dict) and _fits(tests[test].get(name), 0.0) and tests[test]["_squares"] > 0
        for test in GUARD_TESTS
        for name in GUARD_TEST_KEPT
    )


def _put(where: Any, name: str, stored: Any) -> None:
    """Replace an attribute by a stored value of the same shape."""
    value = getattr(where, name)
    if _fits(stored, _plain(value)):
        setattr(where, name, dict(zip(value, stored, strict=True)) if isinstance(value, dict) else stored)


def _plain(value: Any) -> Any:
    """A value as JSON holds it: of a mapping, the values in its own order, which is the same in every process."""
    return list(value.values()) if isinstance(value, dict) else value


def _fits(stored: Any, value: Any) -> bool:
    """Whether a stored value has the shape of another one: number for number, row for row."""
    if isinstance(value, list | tuple):
        is_alike = isinstance(stored, list | tuple) and len(stored) == len(value)
        return is_alike and all(_fits(each, like) for each, like in zip(stored, value, strict=True))
    if isinstance(value, bool):
        return isinstance(stored, bool)
    if isinstance(value, int):
        return isinstance(stored, int) and not isinstance(stored, bool) and _is_number(stored)
    return _is_number(stored)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAGNITUDE_MAX


def _are_pairs(value: Any) -> TypeGuard[list[tuple[int, int]]]:
    return isinstance(value, list) and len(value) <= WINDOW and all(_fits(pair, (0, 0)) for pair in value)
