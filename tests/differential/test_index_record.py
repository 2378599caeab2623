"""What a restarted router knows, against a reference that never restarted.

Both indexes live through the same random history; then the core's is written down slot by slot and put into a new one,
in another order of slots, and the history goes on: some slots are proved by their streams at once, others stay
unverified. Answers about what replicas hold must stay equal. Requests in flight and counters of evictions end with a
process and are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random
from typing import Any

import pytest
from differential.test_index import (
    APPROXIMATE,
    BLOCK_SIZE,
    FLAVOURS,
    SEED,
    SLOTS,
    Both,
    Control,
    Flavour,
    Path,
    Store,
    core_hashes,
    next_operation,
    operations,
    paths,
    plain_hashes,
    random_path,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from warmfront import _core, reference
from warmfront.types import Slot

HELD = ("device", "confirmed", "host", "disk", "resident")
AGE = "age_s"


class Restarted(Both):
    """The two indexes side by side; the core's may be replaced by one that was restored."""

    def control(self, what: str, argument: int) -> None:
        if what != "remove":  # nothing to restore
            super().control(what, argument)

    def end_requests(self) -> None:
        """No request survives the router."""
        for number in range(1, 5):
            self.control("release", number)

    def restart(self, order: Sequence[int], proved: Collection[int]) -> None:
        self.end_requests()
        records = {slot: self.core.record(slot, self.now_s) for slot in order}
        self.core = _core.Index(block_size=BLOCK_SIZE, seed=SEED, predicted_ttl_s=5.0, approximate_ttl_s=20.0)
        for slot in range(SLOTS):
            exact = slot != APPROXIMATE
            self.core.add_slot(slot, exact=exact, capacity_blocks=None if exact else 5)
        for slot in order:
            self.core.restore(slot, records[slot], self.now_s, self.now_s)
            self.plain.restored(Slot(slot))
            if slot in proved:
                self.control("fresh", slot)

    def compare_held(self, path: Path, flavour: Flavour) -> None:
        ours, theirs = core_hashes(path, flavour), plain_hashes(path, flavour)
        core, plain = self.core.overlap(ours, self.now_s), self.plain.overlap(theirs, self.now_s)
        assert {name: core[name] for name in HELD} == {name: plain[name] for name in HELD}
        assert core[AGE] == pytest.approx(plain[AGE])

    def compare_counts(self) -> None:
        self.core.overlap([], self.now_s)  # ends what is due
        self.plain.expire(self.now_s)
        core = self.core.stats(SLOTS)["slots"]
        for slot, row in enumerate(core):
            state = self.plain.slots[Slot(slot)]
            assert (row["confirmed"], row["predicted"]) == (len(state.confirmed()), len(state.predicted)), slot


@pytest.mark.parametrize("seed", range(60))
def test_a_restored_index_goes_on_as_one_that_never_stopped(seed: int) -> None:
    random, both = Random(seed), Restarted()
    for number in range(160):
        operation = next_operation(random)
        both.run(operation)
        if number % 40 == 39:
            both.restart(random.sample(range(SLOTS), SLOTS), random.sample(range(SLOTS), random.randint(0, SLOTS)))
            both.compare_counts()
        path = random_path(random)
        both.compare_held(path, FLAVOURS[0])
        if hasattr(operation, "path"):
            both.compare_held(operation.path, getattr(operation, "flavour", FLAVOURS[0]))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(operations, max_size=30),
    st.permutations(range(SLOTS)),
    st.sets(st.sampled_from(range(SLOTS))),
    st.lists(operations, max_size=15),
    st.lists(st.tuples(paths, st.sampled_from(FLAVOURS)), min_size=1, max_size=3),
)
def test_any_history_survives_a_restart(
    before: list[Any],
    order: list[int],
    proved: set[int],
    after: list[Any],
    probes: list[tuple[Path, Flavour]],
) -> None:
    both = Restarted()
    for operation in before:
        both.run(operation)
    both.restart(order, proved)
    for operation in [Control("wait", 0), *after]:
        both.run(operation)
        for path, flavour in probes:
            both.compare_held(path, flavour)


def test_unverified_facts_count_as_held_and_not_as_confirmed() -> None:
    both = Restarted()
    payload = store(both)
    assert payload
    record = both.core.record(0, 0.0)
    index = _core.Index(block_size=BLOCK_SIZE, seed=SEED)
    index.add_slot(0)
    index.restore(0, record, 0.0, 0.0)
    hashes = core_hashes((1, 1), FLAVOURS[0])
    columns = index.overlap(hashes, 0.0)
    assert (columns["device"], columns["confirmed"]) == ([2], [0])
    index.set_stale(0, False)
    assert index.overlap(hashes, 0.0)["confirmed"] == [2]


def test_a_dispatch_predicts_what_only_unverified_facts_hold() -> None:
    both = Restarted()
    store(both)
    record = both.core.record(0, 0.0)
    index = _core.Index(block_size=BLOCK_SIZE, seed=SEED)
    index.add_slot(0)
    index.restore(0, record, 0.0, 0.0)
    hashes = core_hashes((1, 1), FLAVOURS[0])
    index.dispatch(1, hashes, 0, 0.0)
    index.forget_confirmed(0)
    assert index.overlap(hashes, 0.0)["device"] == [2]


def store(both: Both) -> bool:
    both.run(Store(0, (1, 1), 0, FLAVOURS[0], "shared", "GPU", None, None, 0, False, 1))
    return True


def test_a_torn_record_changes_nothing() -> None:
    both = Restarted()
    store(both)
    record = both.core.record(0, 0.0)
    index = _core.Index(block_size=BLOCK_SIZE, seed=SEED)
    index.add_slot(0)
    for length in range(len(record)):
        with pytest.raises(ValueError, match=r"\w"):
            index.restore(0, record[:length], 0.0, 0.0)
    assert index.stats(1)["confirmed_facts"] == 0


def test_records_hold_hashes_and_no_tokens() -> None:
    tokens = [123_456_789] * BLOCK_SIZE
    index = _core.Index(block_size=BLOCK_SIZE, seed=SEED)
    index.add_slot(0)
    index.dispatch(1, list(_core.hash_tokens(tokens, BLOCK_SIZE, SEED, None, None)), 0, 0.0)
    assert (123_456_789).to_bytes(4, "little") not in index.record(0, 1.0)
    assert reference.chain(tokens, BLOCK_SIZE, adapter=None, salt=None)
