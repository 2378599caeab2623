"""The history that approximate policies share: depths, gaps, bounds, and its memory."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.peers import prompt
from warmfront.lab.peers.history import History, Recency
from warmfront.types import Slot

A, B, C = Slot(0), Slot(1), Slot(2)


def test_depths_end_at_the_first_block_that_a_slot_was_not_sent() -> None:
    history = History(100)
    history.insert([1, 2, 3], A, 0.0)
    history.insert([1, 2, 9, 4], B, 0.0)
    assert history.depths([1, 2, 3, 4], 3) == [3, 2, 0]
    assert history.depths([7], 3) == [0, 0, 0]
    assert history.depths([], 2) == [0, 0]


def test_hits_count_over_gaps_but_end_where_nobody_holds_a_block() -> None:
    history = History(100)
    history.insert([1, 2, 3, 5], A, 0.0)
    history.insert([2, 3], B, 0.0)
    assert history.hits([1, 2, 3], 2) == [3, 2]
    assert history.hits([1, 2, 3, 4, 5], 2) == [3, 2]
    assert history.hits([2, 1, 3], 2) == [3, 2]


def test_the_least_recent_prompt_loses_its_tail_first() -> None:
    history = History(5)
    history.insert([1, 2, 3], A, 0.0)
    history.insert([4, 5, 6], A, 0.0)
    assert history.depths([1, 2, 3], 1) == [2]
    assert history.depths([4, 5, 6], 1) == [3]
    assert history.held(A) == 5


def test_or_its_head_where_a_system_does_it_so() -> None:
    history = History(5, head_first=True)
    history.insert([1, 2, 3], A, 0.0)
    history.insert([4, 5, 6], A, 0.0)
    assert history.depths([1, 2, 3], 1) == [0]
    assert history.hits([2, 3], 1) == [2]


def test_using_a_prompt_again_keeps_it() -> None:
    history = History(5)
    history.insert([1, 2], A, 0.0)
    history.insert([3, 4], A, 0.0)
    history.insert([1, 2], A, 0.0)
    history.insert([5, 6], A, 0.0)
    assert history.depths([1, 2], 1) == [2]
    assert history.depths([3, 4], 1) == [1]


def test_bounds_are_for_each_slot_or_for_all_together() -> None:
    apart, together = History(2), History(2, together=True)
    for history in (apart, together):
        history.insert([1, 2], A, 0.0)
        history.insert([1, 2], B, 0.0)
        history.insert([3, 4], B, 0.0)
    assert apart.depths([1, 2], 2) == [2, 0]
    assert together.depths([1, 2], 2) == [0, 0]
    assert together.depths([3, 4], 2) == [0, 2]


def test_blocks_expire_by_their_last_use() -> None:
    for together in (False, True):
        history = History(100, together=together)
        history.insert([1, 2], A, 0.0)
        history.insert([1], A, 5.0)
        history.expire(5.0)
        assert history.depths([1, 2], 1) == [1]
        assert len(history) == 1


def test_a_forgotten_slot_takes_its_blocks_along() -> None:
    for together in (False, True):
        history = History(100, together=together)
        history.insert([1, 2], A, 0.0)
        history.insert([2, 3], B, 0.0)
        history.forget(A)
        assert history.depths([1, 2], 2) == [0, 0]
        assert history.depths([2, 3], 2) == [0, 2]
        history.forget(C)
        history.insert([1], A, 1.0)
        assert history.depths([1], 2) == [1, 0]


def test_the_owner_of_a_block_is_the_first_that_was_sent_it_until_it_falls_out_there() -> None:
    history = History(2, owned=True)
    assert history.owner(1) is None
    history.insert([1], B, 0.0)
    history.insert([1, 2], A, 0.0)
    history.insert([1], C, 0.0)
    assert history.owner(1) == B
    assert history.owner(2) == A
    history.insert([3, 4], B, 0.0)
    assert history.owner(1) == A
    history.insert([1], B, 0.0)
    assert history.owner(1) == A
    for slot in (A, B, C):
        history.forget(slot)
    assert history.owner(1) is None


def test_repeated_prompts_do_not_grow_the_memory() -> None:
    recency = Recency(10)
    for stamp in range(1, 1001):
        recency.use([1, 2, 3, 4], stamp, 0.0)
    assert len(recency) == 4
    assert recency._queued <= 24


@settings(max_examples=60, deadline=None)
@given(
    sent=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 6)), max_size=40),
    bound=st.integers(1, 9),
    head_first=st.booleans(),
)
def test_a_history_equals_one_that_moves_every_block(
    sent: list[tuple[int, int, int]], bound: int, head_first: bool
) -> None:
    history = History(bound, head_first=head_first)
    plain: dict[int, list[int]] = {0: [], 1: [], 2: []}  # by slot, the least recent first
    for slot, name, blocks in sent:
        used = prompt(name, blocks)
        history.insert(used, Slot(slot), 0.0)
        kept = [block for block in plain[slot] if block not in used]
        plain[slot] = (kept + (used if head_first else used[::-1]))[-bound:]
    for name in range(4):
        expected = [_leading(prompt(name, 6), set(plain[slot])) for slot in range(3)]
        assert history.depths(prompt(name, 6), 3) == expected
    assert len(history) == len({block for held in plain.values() for block in held})


def _leading(blocks: list[int], held: set[int]) -> int:
    depth = 0
    while depth < len(blocks) and blocks[depth] in held:
        depth += 1
    return depth
