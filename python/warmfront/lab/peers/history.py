"""What was sent where: the memory of policies that do not hear from the engines.

A block is in the history of a slot from the request that sent it there until it falls out of a bound; nothing tells
what the engine really kept. One dictionary holds a bit mask of slots for each block, so a lookup costs one step a
block whatever the number of replicas. Recency is kept by request and not by block, which makes a request of 500 blocks
one entry. What is easy to get wrong: systems differ in which end of a prompt they forget first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from warmfront.types import Slot


class Recency:
    """Distinct blocks in the order of their last use, at most `blocks_max` of them."""

    def __init__(self, blocks_max: int, *, head_first: bool = False) -> None:
        """Bound a memory.

        Args:
            blocks_max: Distinct blocks, at least 1.
            head_first: Of blocks used by one request, drop the first of the prompt first instead of the last.
        """
        self.blocks_max = blocks_max
        self._head_first = head_first
        self._stamps: dict[int, int] = {}
        """Block → number of its last use."""
        self._uses: deque[tuple[int, float, Sequence[int]]] = deque()
        """Number, time and blocks; blocks with a later stamp are stale."""
        self._queued = 0
        """Blocks in all uses, stale ones included."""

    def __len__(self) -> int:
        return len(self._stamps)

    def __iter__(self) -> Iterator[int]:
        return iter(self._stamps)

    def use(self, blocks: Sequence[int], stamp: int, now_s: float) -> list[int]:
        """Note a use and return what falls out. `stamp` is positive and grows."""
        self._stamps.update(dict.fromkeys(blocks, stamp))
        self._uses.append((stamp, now_s, blocks))
        self._queued += len(blocks)
        dropped = self._trim()
        if self._queued > 2 * self.blocks_max:
            self._compact()
        return dropped

    def expire(self, before_s: float) -> list[int]:
        """Drop and return the blocks that were last used before `before_s`."""
        dropped: list[int] = []
        while self._uses and self._uses[0][1] < before_s:
            stamp, _, blocks = self._uses.popleft()
            self._queued -= len(blocks)
            dropped += self._drop(self._live(stamp, blocks))
        return dropped

    def _live(self, stamp: int, blocks: Sequence[int]) -> list[int]:
        stamps = self._stamps
        return [block for block in blocks if stamps.get(block) == stamp]

    def _drop(self, blocks: list[int]) -> list[int]:
        for block in blocks:
            del self._stamps[block]
        return blocks

    def _trim(self) -> list[int]:
        dropped: list[int] = []
        while (surplus := len(self._stamps) - self.blocks_max) > 0:
            stamp, used_s, blocks = self._uses.popleft()
            self._queued -= len(blocks)
            live = self._live(stamp, blocks)
            cut = surplus if self._head_first else max(0, len(live) - surplus)
            gone, kept = (live[:cut], live[cut:]) if self._head_first else (live[cut:], live[:cut])
            dropped += self._drop(gone)
            if kept:
                self._uses.appendleft((stamp, used_s, kept))
                self._queued += len(kept)
        return dropped

    def _compact(self) -> None:
        """Throw stale entries away, so that the queue stays in proportion to the bound."""
        kept = [(stamp, used_s, self._live(stamp, blocks)) for stamp, used_s, blocks in self._uses]
        self._uses = deque(use for use in kept if use[2])
        self._queued = len(self._stamps)


class History:
    """Blocks by the slots they were sent to."""

    def __init__(
        self, blocks_max: int, *, together: bool = False, head_first: bool = False, owned: bool = False
    ) -> None:
        """Make an empty history.

        Args:
            blocks_max: Distinct blocks remembered: for each slot, or in all.
            together: One bound for all slots; a block then falls out for all of them at once.
            head_first: See `Recency`.
            owned: Remember which slot was sent a block first.
        """
        self._blocks_max = blocks_max
        self._head_first = head_first
        self._together = Recency(blocks_max, head_first=head_first) if together else None
        self._by_slot: dict[Slot, Recency] = {}
        self._masks: dict[int, int] = {}
        """Block → bit mask of slots, never 0."""
        self._owners: dict[int, Slot] | None = {} if owned else None
        self._stamp = 0

    def __len__(self) -> int:
        return len(self._masks)

    def held(self, slot: Slot) -> int:
        """Return how many blocks a slot is believed to hold; needs bounds by slot."""
        recency = self._by_slot.get(slot)
        return len(recency) if recency is not None else 0

    def insert(self, blocks: Sequence[int], slot: Slot, now_s: float) -> None:
        """Note that a prompt went to a slot."""
        masks, owners, bit = self._masks, self._owners, 1 << slot
        for block in blocks:
            held = masks.get(block, 0)
            if not held & bit:
                masks[block] = held | bit
                if owners is not None and not held:
                    owners[block] = slot
        self._stamp += 1
        if self._together is not None:
            self._erase(self._together.use(blocks, self._stamp, now_s))
            return
        recency = self._by_slot.get(slot)
        if recency is None:
            recency = self._by_slot[slot] = Recency(self._blocks_max, head_first=self._head_first)
        self._clear(recency.use(blocks, self._stamp, now_s), slot)

    def expire(self, before_s: float) -> None:
        """Forget what was last sent before `before_s`."""
        if self._together is not None:
            self._erase(self._together.expire(before_s))
        for slot, recency in self._by_slot.items():
            self._clear(recency.expire(before_s), slot)

    def forget(self, slot: Slot) -> None:
        """Forget a slot: its replica is gone."""
        recency = self._by_slot.pop(slot, None)
        self._clear([*(self._masks if self._together is not None else recency or ())], slot)

    def depths(self, blocks: Sequence[int], slots: int) -> list[int]:
        """Count leading blocks without a gap, shape (slots,)."""
        masks = self._masks
        row = [0] * slots
        alive, depth = (1 << slots) - 1, 0
        for block in blocks:
            held = masks.get(block, 0) & alive
            if held != alive:
                _assign(row, alive ^ held, depth)
                alive = held
                if not alive:
                    return row
            depth += 1
        _assign(row, alive, depth)
        return row

    def hits(self, blocks: Sequence[int], slots: int) -> list[int]:
        """Count blocks held, gaps or not, up to the first that nobody holds, shape (slots,)."""
        masks = self._masks
        row = [0] * slots
        everybody = (1 << slots) - 1
        run_mask, run = 0, 0
        for block in blocks:
            held = masks.get(block, 0) & everybody
            if held == run_mask and held:
                run += 1
                continue
            _add(row, run_mask, run)
            if not held:
                return row
            run_mask, run = held, 1
        _add(row, run_mask, run)
        return row

    def owner(self, block: int) -> Slot | None:
        """Return the slot that was sent a block first and has it still, or one that took its place."""
        return self._owners.get(block) if self._owners is not None else None

    def _clear(self, blocks: Sequence[int], slot: Slot) -> None:
        """Take one slot's bit from blocks."""
        masks, owners, bit = self._masks, self._owners, 1 << slot
        for block in blocks:
            held = masks[block] & ~bit
            if held:
                masks[block] = held
            else:
                del masks[block]
            if owners is not None and owners[block] == slot:
                if held:
                    owners[block] = Slot((held & -held).bit_length() - 1)
                else:
                    del owners[block]

    def _erase(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._masks.pop(block, None)
            if self._owners is not None:
                self._owners.pop(block, None)


def _assign(row: list[int], mask: int, value: int) -> None:
    while mask:
        lowest = mask & -mask
        row[lowest.bit_length() - 1] = value
        mask ^= lowest


def _add(row: list[int], mask: int, value: int) -> None:
    while mask:
        lowest = mask & -mask
        row[lowest.bit_length() - 1] += value
        mask ^= lowest
