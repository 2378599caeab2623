"""The paged KV cache: which physical block holds which hash, and which block is taken next.

Follows vLLM's block pool, so the order of removals is exact: the free list is an LRU queue from which allocation
takes the head; a freed sequence gives its blocks back tail first; blocks without a hash go to the head (0.24 and
later). A free block keeps its hash until it is taken. One would expect equal hashes to share a block; they do not: a
block computed twice is cached twice, and each copy is removed with an event of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from warmfront.reference.request import CacheEvent, Cleared, Removed


class BlockPool:
    """Blocks 1 to `blocks - 1`; block 0 is vLLM's null block and never used."""

    def __init__(self, blocks: int) -> None:
        """Start with an empty cache.

        Args:
            blocks: As `vllm:cache_config_info{num_gpu_blocks}`, the null block included.
        """
        self.events: list[CacheEvent] = []
        """What has happened to the cache since the engine took this list."""
        self._usable = blocks - 1
        self._references = [0] * blocks
        self._hash_of: list[int | None] = [None] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, blocks))
        self._cached: dict[int, int] = {}
        self._copies: dict[int, list[int]] = {}

    @property
    def usable(self) -> int:
        """Blocks that sequences can hold."""
        return self._usable

    @property
    def free(self) -> int:
        """Blocks that no sequence holds, cached or not."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks held by sequences: 0 for a warm idle cache, as `vllm:kv_cache_usage_perc`."""
        return 1.0 - len(self._free) / self._usable

    @property
    def resident(self) -> dict[int, int]:
        """Copies of every cached hash. For tests and inspection: this copies."""
        return {hash_: 1 + len(self._copies.get(hash_, ())) for hash_ in self._cached}

    def lookup(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Return the blocks of the longest cached prefix of at most `limit` blocks; the oldest copy of each."""
        blocks: list[int] = []
        cached = self._cached
        for position in range(min(limit, len(hashes))):
            block = cached.get(hashes[position])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def idle(self, blocks: Sequence[int]) -> int:
        """Count those of `blocks` that are free: taking them lessens the room for others."""
        references = self._references
        return sum(1 for block in blocks if not references[block])

    def touch(self, blocks: Sequence[int]) -> None:
        """Hold blocks found by `lookup`."""
        references = self._references
        for block in blocks:
            if not references[block]:
                del self._free[block]
            references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the free list; what they cached is removed.

        The caller has checked `free`.
        """
        take, references, hash_of = self._free.popitem, self._references, self._hash_of
        taken = [take(last=False)[0] for _ in range(count)]
        for block in taken:
            references[block] = 1
            hash_ = hash_of[block]
            if hash_ is not None:
                self._uncache(block, hash_)
                self.events.append(Removed(hash_))
        return taken

    def register(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """Put full blocks into the cache under their hashes. The caller announces them."""
        cached, hash_of = self._cached, self._hash_of
        for block, hash_ in zip(blocks, hashes, strict=True):
            hash_of[block] = hash_
            if cached.setdefault(hash_, block) != block:
                self._copies.setdefault(hash_, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks, given in sequence order."""
        references, free, hash_of = self._references, self._free, self._hash_of
        for block in reversed(blocks):
            references[block] -= 1
            if references[block]:
                continue
            free[block] = None
            if hash_of[block] is None:
                free.move_to_end(block, last=False)

    def clear(self) -> bool:
        """Forget every hash; refused while a sequence holds a block. The order of the free list stays."""
        if len(self._free) != self._usable:
            return False
        self._hash_of = [None] * len(self._hash_of)
        self._cached.clear()
        self._copies.clear()
        self.events.append(Cleared())
        return True

    def _uncache(self, block: int, hash_: int) -> None:
        self._hash_of[block] = None
        copies = self._copies.get(hash_)
        if copies is None:
            del self._cached[hash_]
            return
        if self._cached[hash_] == block:
            self._cached[hash_] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[hash_]
