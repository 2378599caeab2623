from __future__ import annotations

from warmfront.reference.blockpool import BlockPool
from warmfront.reference.request import Removed


def test_allocation_takes_the_least_recently_freed_and_the_tail_of_a_sequence_first() -> None:
    pool = BlockPool(7)
    first, second = pool.allocate(3), pool.allocate(3)
    pool.register(first, [11, 12, 13])
    pool.register(second, [21, 22, 23])
    pool.release(second)
    pool.release(first)
    pool.allocate(6)
    assert pool.events == [Removed(hash_) for hash_ in (23, 22, 21, 13, 12, 11)]


def test_blocks_without_a_hash_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.register(blocks[:2], [1, 2])
    pool.release(blocks)
    assert pool.allocate(1) == blocks[2:]
    assert pool.events == []


def test_a_block_computed_twice_is_cached_twice_and_found_until_both_are_gone() -> None:
    pool = BlockPool(4)
    for _ in range(2):
        block = pool.allocate(1)
        pool.register(block, [9])
        pool.release(block)
    assert pool.resident == {9: 2}
    pool.allocate(2)
    assert pool.lookup([9], 1) == [2]  # Taken were a fresh block and the older copy.
    pool.allocate(1)
    assert pool.events == [Removed(9), Removed(9)]
    assert pool.lookup([9], 1) == []


def test_touched_blocks_are_not_evicted() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.register(blocks, [1, 2])
    pool.release(blocks)
    pool.touch(pool.lookup([1, 2], 1))
    assert pool.idle(blocks) == 1
    pool.allocate(1)
    assert pool.events == [Removed(2)]
    assert pool.usage == 1.0


def test_clearing_is_refused_while_a_block_is_held() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(1)
    pool.register(blocks, [1])
    assert not pool.clear()
    pool.release(blocks)
    assert pool.clear()
    assert pool.resident == {}
