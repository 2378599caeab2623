"""The core's index against the plain one, on generated sequences of operations."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warmfront import _core, reference
from warmfront.types import RequestId, Slot

BLOCK_SIZE = 4
SLOTS = 4
SEED = 5
HYBRID = 2
"""This slot mostly has two cache groups."""
APPROXIMATE = 3
"""This slot has no events of its own and room for few blocks."""

Path = tuple[int, ...]
"""A prompt: one small number a block. Few numbers, so that paths share prefixes."""


class Flavour(NamedTuple):
    """What separates prompts of equal tokens."""

    adapter: str | None
    salt: str | None


FLAVOURS = [Flavour(None, None), Flavour("a", None), Flavour(None, "a"), Flavour("a", "s")]

paths = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
slots = st.integers(0, SLOTS - 1)
flavours = st.sampled_from([FLAVOURS[0]] * 8 + FLAVOURS)
tiers = st.sampled_from(["GPU"] * 8 + ["cpu", "CPU", "STORAGE", "remote", None])
schemes = st.sampled_from(["shared"] * 5 + ["own", "clashing"])


def tokens_of(path: Path) -> list[int]:
    return [number * 70_000 + offset for number in path for offset in range(BLOCK_SIZE)]


def name(path: Path, slot: int, flavour: Flavour, scheme: str) -> int:
    """What the engine in `slot` calls the last block of `path`."""
    content = reference.chain(tokens_of(path), BLOCK_SIZE, adapter=flavour.adapter, salt=flavour.salt)[-1]
    if scheme == "own":
        return content ^ (slot + 1)
    return content % 5 if scheme == "clashing" else content


def extra_keys(flavour: Flavour, first: int, count: int, tagged: bool) -> list[list[Any] | None]:
    keys: list[list[Any] | None] = []
    for block in range(first, first + count):
        adapter = [["lora", flavour.adapter, "/path"] if tagged else flavour.adapter] if flavour.adapter else []
        salt = [["cache_salt", flavour.salt] if tagged else flavour.salt] if flavour.salt and block == 0 else []
        keys.append(adapter + salt or None)
    return keys


class Store(NamedTuple):
    """Blocks `first..` of `path` appear on a tier, in a cache group."""

    slot: int
    path: Path
    first: int
    flavour: Flavour
    scheme: str
    medium: str | None
    group: int | None
    kind: str | None
    window: int
    tagged: bool
    keep: int
    """Blocks from the end that a sparse group retains."""

    def event(self) -> dict[str, Any]:
        first = min(self.first, len(self.path) - 1)
        names = [
            name(self.path[: end + 1], self.slot, self.flavour, self.scheme) for end in range(first, len(self.path))
        ]
        sparse = self.kind == "sliding_window"
        parent = name(self.path[:first], self.slot, self.flavour, self.scheme) if first else None
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": names[-self.keep :] if sparse else names,
            "parent_block_hash": parent,
            "token_ids": tokens_of(self.path[first:]),
            "block_size": BLOCK_SIZE,
            "lora_id": 1 if self.flavour.adapter else None,
            "medium": self.medium,
            "lora_name": self.flavour.adapter,
        }
        if not sparse:
            event["extra_keys"] = extra_keys(self.flavour, first, len(names), self.tagged)
        if self.group is not None:
            event |= {"group_idx": self.group, "kv_cache_spec_kind": self.kind}
        if sparse:
            event["kv_cache_spec_sliding_window"] = self.window
        return event


class Placeholder(NamedTuple):
    """A tier says that it has a block, without tokens."""

    slot: int
    path: Path
    flavour: Flavour
    scheme: str
    medium: str

    def event(self) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": [name(self.path, self.slot, self.flavour, self.scheme)],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "lora_id": None,
            "medium": self.medium,
            "lora_name": None,
        }


class Remove(NamedTuple):
    """The last blocks of `path` leave a tier."""

    slot: int
    path: Path
    count: int
    flavour: Flavour
    scheme: str
    medium: str | None
    group: int | None

    def event(self) -> dict[str, Any]:
        ends = range(max(len(self.path) - self.count, 0), len(self.path))
        names = [name(self.path[: end + 1], self.slot, self.flavour, self.scheme) for end in reversed(ends)]
        return {"type": "BlockRemoved", "block_hashes": names, "medium": self.medium, "group_idx": self.group}


class Clear(NamedTuple):
    slot: int

    def event(self) -> dict[str, Any]:
        return {"type": "AllBlocksCleared"}


class Dispatch(NamedTuple):
    id: int
    path: Path
    slot: int
    flavour: Flavour


class Hybrid(NamedTuple):
    """A prompt is stored in a sliding-window group, which keeps its last blocks, and in full attention."""

    slot: int
    path: Path
    keep: int
    window: int

    def events(self) -> list[dict[str, Any]]:
        shared = {"slot": self.slot, "path": self.path, "first": 0, "flavour": FLAVOURS[0], "scheme": "shared"}
        shared |= {"medium": "GPU", "window": self.window, "tagged": True, "keep": self.keep}
        return [
            Store(**shared, group=0, kind="sliding_window").event(),
            Store(**shared, group=1, kind="full_attention").event(),
        ]


class Control(NamedTuple):
    """Anything that is neither an event nor a dispatch."""

    what: str
    argument: int


groups = st.sampled_from(
    [(None, None)] * 8 + [(1, "full_attention"), (0, "sliding_window"), (2, "mamba"), (3, "full_attention")]
)
stores = st.builds(
    lambda place, **fields: Store(group=place[0], kind=place[1], **fields),
    groups,
    slot=slots,
    path=paths,
    first=st.integers(0, 3),
    flavour=flavours,
    scheme=schemes,
    medium=tiers,
    window=st.sampled_from([1, 4, 5, 9, 40]),
    tagged=st.booleans(),
    keep=st.integers(1, 3),
)
removals = st.builds(
    Remove, slots, paths, st.integers(1, 3), flavours, schemes, tiers, st.sampled_from([None, None, 0, 1, 2, 3])
)
placeholders = st.builds(Placeholder, slots, paths, flavours, schemes, st.sampled_from(["CPU", "STORAGE"]))
clears = st.builds(Clear, slots)
dispatches = st.builds(Dispatch, st.integers(1, 4), paths, slots, flavours)
hybrids = st.builds(Hybrid, st.just(HYBRID), paths, st.integers(1, 3), st.sampled_from([5, 9]))
controls = st.builds(
    Control,
    st.sampled_from(
        [
            "release",
            "release",
            "release",
            "withdraw",
            "wait",
            "wait",
            "wait",
            "stale",
            "fresh",
            "forget",
            "doubt",
            "lag",
            "replace",
            "remove",
        ]
    ),
    st.integers(0, 4),
)
operations = st.one_of(
    stores, stores, stores, hybrids, removals, removals, placeholders, clears, dispatches, dispatches, controls
)


class Both:
    """The two indexes side by side."""

    def __init__(self) -> None:
        times = {"predicted_ttl_s": 5.0, "approximate_ttl_s": 20.0}
        self.core = _core.Index(block_size=BLOCK_SIZE, seed=SEED, **times)
        self.plain = reference.Index(block_size=BLOCK_SIZE, **times)
        self.now_s = 0.0
        for slot in range(SLOTS):
            self.add(slot)

    def add(self, slot: int) -> None:
        options = {"exact": slot != APPROXIMATE, "capacity_blocks": 5 if slot == APPROXIMATE else None}
        self.core.add_slot(slot, **options)
        self.plain.add_slot(Slot(slot), **options)

    def each(self, call: Callable[[Any], None]) -> None:
        call(self.core)
        call(self.plain)

    def run(self, operation: Any) -> None:
        match operation:
            case Dispatch(id, path, slot, flavour):
                self.core.dispatch(id, core_hashes(path, flavour), slot, self.now_s)
                self.plain.dispatch(RequestId(id), plain_hashes(path, flavour), Slot(slot), self.now_s)
            case Control(what, argument):
                self.control(what, argument)
            case Hybrid():
                self.apply(operation.slot, operation.events())
            case _:
                self.apply(operation.slot, [operation.event()])

    def apply(self, slot: int, events: list[Any]) -> None:
        payload = msgspec.msgpack.encode([1.5, events, 0])
        core = self.core.apply(slot, payload, self.now_s)
        plain = self.plain.apply(Slot(slot), reference.decode(payload), self.now_s)
        assert {key: value for key, value in core.items() if value} == {
            key: value for key, value in plain.items() if value
        }

    def control(self, what: str, argument: int) -> None:
        slot = argument % SLOTS
        match what:
            case "release":
                self.each(lambda index: index.release(argument))
            case "withdraw":
                self.each(lambda index: index.withdraw(argument))
            case "wait":
                self.now_s += argument * 2.5
            case "stale" | "fresh":
                self.each(lambda index: index.set_stale(slot, what == "stale"))
            case "lag":
                self.each(lambda index: index.note_lag(slot, argument * 2.0))
            case "doubt":
                self.each(lambda index: index.doubt(slot))
            case "forget":
                self.each(lambda index: index.forget_confirmed(slot))
            case "remove":
                self.each(lambda index: index.remove_slot(slot))
            case "replace":
                self.add(slot)

    def compare(self, path: Path, flavour: Flavour) -> None:
        ours, theirs = core_hashes(path, flavour), plain_hashes(path, flavour)
        core, plain = self.core.overlap(ours, self.now_s), self.plain.overlap(theirs, self.now_s)
        core["frontier_key"] = ours.index(core["frontier_key"]) if core["frontier_key"] is not None else None
        key = plain["frontier_key"]
        plain["frontier_key"] = theirs.index(int(key)) if isinstance(key, int) else None
        assert core == plain
        self.compare_stats()

    def compare_stats(self) -> None:
        core, plain = self.core.stats(SLOTS), self.plain.stats()
        assert {key: core[key] for key in plain} == plain
        for slot, row in enumerate(core["slots"]):
            state = self.plain.slots.get(Slot(slot))
            assert (row is None) == (state is None)
            if state is not None:
                assert row == {
                    "confirmed": len(state.confirmed()),
                    "predicted": len(state.predicted),
                    "predictions": state.predictions,
                    "unconfirmed": state.unconfirmed,
                    "evicted": state.evicted,
                    "regretted": state.regretted,
                    "active": len(+state.users),
                }


def core_hashes(path: Path, flavour: Flavour) -> list[int]:
    return list(_core.hash_tokens(tokens_of(path), BLOCK_SIZE, SEED, flavour.adapter, flavour.salt))


def plain_hashes(path: Path, flavour: Flavour) -> list[int]:
    return reference.chain(tokens_of(path), BLOCK_SIZE, adapter=flavour.adapter, salt=flavour.salt)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(operations, max_size=40), st.lists(st.tuples(paths, flavours), min_size=1, max_size=3))
def test_core_index_agrees_with_reference(sequence: list[Any], probes: list[tuple[Path, Flavour]]) -> None:
    both = Both()
    for operation in sequence:
        both.run(operation)
        both.compare_stats()
        asked = [(operation.path, getattr(operation, "flavour", FLAVOURS[0]))] if hasattr(operation, "path") else []
        for path, flavour in asked + probes:
            both.compare(path, flavour)


@pytest.mark.parametrize("seed", range(40))
def test_long_random_lives_of_a_fleet_agree(seed: int) -> None:
    """Weighted so that stores, removals and dispatches meet the same few prompts, as drawn lists rarely do."""
    random, both = Random(seed), Both()
    for _ in range(150):
        operation = next_operation(random)
        both.run(operation)
        both.compare(random_path(random), FLAVOURS[0])
        if hasattr(operation, "path"):
            both.compare(operation.path, getattr(operation, "flavour", FLAVOURS[0]))


def random_path(random: Random) -> Path:
    return tuple(random.choices([0, 1], weights=[3, 1], k=random.randint(1, 5)))


def next_operation(random: Random) -> Any:
    slot, path = random.randrange(SLOTS), random_path(random)
    flavour = FLAVOURS[0] if random.random() < 0.9 else random.choice(FLAVOURS)
    scheme = random.choices(["shared", "own", "clashing"], weights=[12, 2, 1])[0]
    medium = random.choices(["GPU", "CPU", "STORAGE"], weights=[12, 1, 1])[0]
    kind = random.choices(
        ["store", "hybrid", "remove", "dispatch", "placeholder", "clear", "control"], weights=[30, 5, 25, 20, 3, 1, 20]
    )[0]
    match kind:
        case "store":
            first = random.choice([0, 0, 1, 2])
            return Store(slot, path, first, flavour, scheme, medium, None, None, 0, random.random() < 0.5, 1)
        case "hybrid":
            return Hybrid(HYBRID, path, random.randint(1, 3), random.choice([5, 9]))
        case "remove":
            group = random.choice([0, 1]) if slot == HYBRID else None
            return Remove(slot, path, random.randint(1, 2), flavour, scheme, medium, group)
        case "dispatch":
            return Dispatch(random.randint(1, 4), path, slot, flavour)
        case "placeholder":
            return Placeholder(slot, path, flavour, scheme, "CPU")
        case "clear":
            return Clear(slot)
    what = ["release", "withdraw", "wait", "stale", "fresh", "forget", "doubt", "lag", "replace"]
    return Control(random.choices(what, weights=[16, 3, 8, 1, 4, 1, 1, 2, 1])[0], random.randint(1, 4))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(paths, st.integers(0, 3), st.booleans()), min_size=1, max_size=60))
def test_copies_and_evictions_of_one_replica_agree(moves: list[tuple[Path, int, bool]]) -> None:
    both = Both()
    plain = FLAVOURS[0]
    for path, first, stores_it in moves:
        if stores_it:
            both.run(Store(0, path, first, plain, "shared", "GPU", None, None, 0, False, 1))
        else:
            both.run(Remove(0, path, first + 1, plain, "shared", "GPU", None))
        both.compare(path, plain)


@pytest.mark.parametrize("style", ["map", "array"])
def test_both_decode_maps_and_arrays_alike(style: str) -> None:
    store = Store(0, (1, 2), 0, FLAVOURS[3], "shared", "GPU", 0, "full_attention", 0, False, 1).event()
    fields = [*reference.events.STORED_FIELDS]
    event: Any = store if style == "map" else ["BlockStored", *(store.get(field) for field in fields)]
    payload = msgspec.msgpack.encode([1.5, [event], None])
    ts, events, rank, unknown = _core.decode_batch(payload)
    plain = reference.decode(payload)
    stored = plain.events[0]
    assert isinstance(stored, reference.Stored)
    assert (ts, rank, unknown) == (plain.ts, plain.rank, plain.unknown_events)
    assert events[0]["block_hashes"] == stored.block_hashes
    assert events[0]["token_ids"] == stored.token_ids
    assert events[0]["kind"] == stored.kind
