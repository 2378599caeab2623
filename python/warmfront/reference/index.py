"""Which replica holds which block, plainly.

One `Index` serves the replicas of a pool that have one block size. A fact is *confirmed* by a KV event or *predicted*
by our own dispatch. What one would get wrong: residency is a multiset; a block is gone when its last copy is.
Dropping facts for lack of room (`facts_max`) is the core's own business and not specified here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from warmfront.reference.blocks import ROOT, HashFunction, blake_64, full_blocks, next_hash
from warmfront.reference.events import Batch, Cleared, Removed, Stored
from warmfront.reference.groups import Groups, Place
from warmfront.types import RequestId, Slot

GHOSTS_MIN = 64
"""Ghosts of one slot when it holds little."""

AGES_MAX = 65_536
"""Prefixes for which the last dispatch is remembered."""

AGE_BLOCKS = 64
"""How many blocks before the frontier the last dispatch is looked for: answers are cached behind prompts."""


@dataclass
class Offloaded:
    """A block on slower tiers, by one engine hash."""

    key: int
    copies: Counter[str] = field(default_factory=Counter)
    """Host copies under `host`, others under `disk`."""


@dataclass
class Ghosts:
    """Blocks that were evicted not long ago."""

    rows: deque[list[int | bool]] = field(default_factory=deque)
    """`[key, still a ghost]`, oldest first."""
    live: dict[int, list[int | bool]] = field(default_factory=dict)

    def add(self, key: int, resident: int) -> None:
        """Note an eviction; as many rows stay as the slot holds blocks."""
        if key not in self.live:
            self.live[key] = [key, True]
            self.rows.append(self.live[key])
        while len(self.rows) > max(resident, GHOSTS_MIN):
            oldest, is_live = self.rows.popleft()
            if is_live:
                del self.live[int(oldest)]

    def take(self, key: int) -> bool:
        """The block is asked for again. True when it was a ghost."""
        row = self.live.pop(key, None)
        if row is not None:
            row[1] = False
        return row is not None


@dataclass
class SlotState:
    """What is known of one replica."""

    exact: bool
    capacity_blocks: int | None
    stale: bool = False
    names: dict[int, int] = field(default_factory=dict)
    """Engine hash → key, of blocks on the device."""
    copies: Counter[int] = field(default_factory=Counter)
    """Physical copies by engine hash."""
    offloaded: dict[int, Offloaded] = field(default_factory=dict)
    groups: Groups = field(default_factory=Groups)
    predicted: dict[int, float] = field(default_factory=dict)
    """Key → time of the last dispatch, oldest first."""
    users: Counter[int] = field(default_factory=Counter)
    """Key → requests in flight."""
    ghosts: Ghosts = field(default_factory=Ghosts)
    evicted: int = 0
    regretted: int = 0
    unconfirmed: int = 0
    predictions: int = 0

    def confirmed(self) -> set[int]:
        """Keys on the device by events."""
        return set(self.names.values())

    def trusted(self) -> set[int]:
        """Keys on the device by events that are believed."""
        return set() if self.stale else self.confirmed()

    def device(self) -> set[int]:
        """Keys taken to be on the device."""
        return self.trusted() | set(self.predicted)

    def resident(self) -> int:
        """Blocks taken to be on the device, counted as the ledger does."""
        return len(self.trusted()) + len(self.predicted)

    def on_tier(self, *tiers: str) -> set[int]:
        """Keys on slower tiers."""
        if self.stale:
            return set()
        return {row.key for row in self.offloaded.values() if any(row.copies[tier] for tier in tiers)}

    def resolve(self, name: int) -> int | None:
        """The key that the engine calls `name`, if the slot holds it anywhere."""
        if name in self.names:
            return self.names[name]
        return self.offloaded[name].key if name in self.offloaded else None

    def touch(self, key: int, now_s: float) -> bool:
        """Make the prediction the newest. True when it is new."""
        known = self.predicted.pop(key, None) is not None
        self.predicted[key] = now_s
        return not known

    def evict(self, key: int) -> None:
        """Count an eviction and remember its ghost."""
        self.evicted += 1
        self.ghosts.add(key, self.resident())

    def has_member(self, group: int, key: int) -> bool:
        """A cache group has the block, or will: a prediction covers all groups."""
        if key in self.predicted:
            return True
        members = self.groups.others[group].members
        return any(members[name] for name, other in self.names.items() if other == key)


@dataclass
class InFlight:
    """A dispatched request."""

    slot: Slot
    keys: list[int]
    fresh: set[int]
    """Keys whose prediction this request made."""


class Index:
    """The plain index. Methods mirror the core's."""

    def __init__(
        self,
        *,
        block_size: int,
        predicted_ttl_s: float = 5.0,
        approximate_ttl_s: float = 600.0,
        hash_function: HashFunction = blake_64,
    ) -> None:
        self.block_size = block_size
        self.predicted_ttl_s = predicted_ttl_s
        self.approximate_ttl_s = approximate_ttl_s
        self.hash_function = hash_function
        self.slots: dict[Slot, SlotState] = {}
        self.rows = 0
        self.in_flight: dict[RequestId, InFlight] = {}
        self.ages: dict[int, dict[Slot, float]] = {}

    def add_slot(self, slot: Slot, *, exact: bool = True, capacity_blocks: int | None = None) -> None:
        """Add a replica without any facts, in place of one that had the slot."""
        self.remove_slot(slot)
        self.slots[slot] = SlotState(exact, capacity_blocks)
        self.rows = max(self.rows, slot + 1)

    def remove_slot(self, slot: Slot) -> None:
        """The replica is gone, and all its facts with it."""
        self.slots.pop(slot, None)
        self.in_flight = {id: request for id, request in self.in_flight.items() if request.slot != slot}
        for times in self.ages.values():
            times.pop(slot, None)

    def forget_confirmed(self, slot: Slot) -> None:
        """What is known from events is void; predictions stay."""
        if (state := self.slots.get(slot)) is not None:
            self._clear(state)
            state.offloaded.clear()
            state.groups = Groups()

    def set_stale(self, slot: Slot, stale: bool) -> None:
        """While stale, a slot counts with its predictions only."""
        if (state := self.slots.get(slot)) is None:
            return
        state.stale = stale
        if not stale:
            for key in state.confirmed() & set(state.predicted):
                del state.predicted[key]

    # Events

    def apply(self, slot: Slot, batch: Batch, now_s: float) -> Counter[str]:
        """Apply one batch in order, then end the predictions whose time is up. Returns counts by name."""
        report: Counter[str] = Counter(unknown_events=batch.unknown_events)
        if (state := self.slots.get(slot)) is not None:
            for event in batch.events:
                match event:
                    case Stored(tier="gpu"):
                        self._stored(state, event, report)
                    case Stored():
                        self._stored_on_tier(state, event, report)
                    case Removed():
                        self._removed(state, event, report)
                    case Cleared():
                        self._clear(state)
                        report["cleared"] += 1
        self.expire(now_s)
        return report

    def _stored(self, state: SlotState, stored: Stored, report: Counter[str]) -> None:
        if stored.block_size == 0:
            report["malformed"] += 1
            return
        place = state.groups.learn(stored)
        if place is Place.MAIN:
            for name, key in self._chain(state, stored, report):
                report["stored"] += 1
                report["duplicates"] += self._confirm(state, key, name)
        elif place is Place.NOWHERE:
            report["malformed"] += 1
        else:
            state.groups.others[place].members.update(stored.block_hashes)
            report["stored"] += len(stored.block_hashes)

    def _stored_on_tier(self, state: SlotState, stored: Stored, report: Counter[str]) -> None:
        if state.groups.place(stored.group) is not Place.MAIN:
            return
        if stored.block_size > 0 and stored.token_ids:
            for name, key in self._chain(state, stored, report):
                report["offloaded"] += 1
                self._offload(state, stored.tier, key, name)
            return
        for name in stored.block_hashes:
            if (known := state.resolve(name)) is None:
                report["unknown_placeholders"] += 1
            else:
                report["offloaded"] += 1
                self._offload(state, stored.tier, known, name)

    def _chain(self, state: SlotState, stored: Stored, report: Counter[str]) -> list[tuple[int, int]]:
        """Pairs (engine hash, key) of a dense run of blocks; empty when it cannot be understood."""
        if stored.block_size != self.block_size:
            report["other_block_size"] = stored.block_size
            return []
        if len(stored.token_ids) != len(stored.block_hashes) * self.block_size:
            report["malformed"] += 1
            return []
        key: int | None = ROOT if stored.parent is None else state.resolve(stored.parent)
        if key is None:
            report["unknown_parents"] += len(stored.block_hashes)
            return []
        pairs: list[tuple[int, int]] = []
        for block, run in enumerate(full_blocks(stored.token_ids, self.block_size)):
            key = next_hash(key, run, stored.extras(block), self.hash_function)
            pairs.append((stored.block_hashes[block], key))
        return pairs

    @staticmethod
    def _confirm(state: SlotState, key: int, name: int) -> bool:
        """Note a physical copy. True when the slot had the block under this name already."""
        known = state.names.get(name) == key
        if not known:
            # What the engine named so before cannot be there any more.
            state.copies[name] = 0
        state.names[name] = key
        state.copies[name] += 1
        if not known:
            state.predicted.pop(key, None)
        return known

    @staticmethod
    def _offload(state: SlotState, tier: str, key: int, name: int) -> None:
        row = state.offloaded.setdefault(name, Offloaded(key))
        row.copies["host" if tier == "cpu" else "disk"] += 1

    def _removed(self, state: SlotState, removed: Removed, report: Counter[str]) -> None:
        place = state.groups.place(removed.group)
        for name in removed.block_hashes:
            if removed.tier != "gpu":
                known = place is Place.MAIN and self._unload(state, removed.tier, name)
            elif place is Place.MAIN:
                known = self._evict_copy(state, name)
            else:
                known = place is not Place.NOWHERE and state.groups.remove(place, name)
            report["removed" if known else "unknown_removals"] += 1

    @staticmethod
    def _evict_copy(state: SlotState, name: int) -> bool:
        if name not in state.names:
            return False
        state.copies[name] -= 1
        if state.copies[name] == 0:
            key = state.names.pop(name)
            if key not in state.confirmed():
                state.evict(key)
        return True

    @staticmethod
    def _unload(state: SlotState, tier: str, name: int) -> bool:
        row, kind = state.offloaded.get(name), "host" if tier == "cpu" else "disk"
        if row is None or not row.copies[kind]:
            return False
        row.copies[kind] -= 1
        if not row.copies.total():
            del state.offloaded[name]
        return True

    @staticmethod
    def _clear(state: SlotState) -> None:
        state.names.clear()
        state.copies.clear()
        state.groups.clear()

    # Dispatches

    def dispatch(self, id: RequestId, hashes: Sequence[int], slot: Slot, now_s: float) -> None:
        """A request goes to `slot`: its blocks are in use there and predicted to be held."""
        self.expire(now_s)
        self.withdraw(id)
        if (state := self.slots.get(slot)) is None:
            return
        self._regret(state, hashes)
        self._note_ages(slot, hashes, now_s)
        state.users.update(hashes)
        fresh: set[int] = set()
        for key in reversed(hashes):
            if key not in state.trusted() and state.touch(key, now_s):
                state.predictions += 1
                fresh.add(key)
        self.in_flight[id] = InFlight(slot, list(hashes), fresh)
        while not state.exact and state.capacity_blocks is not None and state.resident() > state.capacity_blocks:
            if not state.predicted:
                break
            key = next(iter(state.predicted))
            del state.predicted[key]
            state.evict(key)

    def _regret(self, state: SlotState, hashes: Sequence[int]) -> None:
        for key in set(hashes) - state.device():
            for evicter in self.slots.values():
                evicter.regretted += evicter.ghosts.take(key)

    def _note_ages(self, slot: Slot, hashes: Sequence[int], now_s: float) -> None:
        frontier = self._frontier(hashes)
        for key in ([hashes[frontier - 1]] if frontier else []) + list(hashes[-1:]):
            if key not in self.ages and len(self.ages) == AGES_MAX:
                del self.ages[next(iter(self.ages))]
            self.ages.setdefault(key, {})[slot] = now_s

    def release(self, id: RequestId) -> None:
        """The request ended; its blocks are no longer in use."""
        if (request := self.in_flight.pop(id, None)) is not None:
            users = self.slots[request.slot].users
            users.subtract(request.keys)

    def withdraw(self, id: RequestId) -> None:
        """The request ended without having been computed: its predictions are void too."""
        if (request := self.in_flight.get(id)) is None:
            return
        state = self.slots[request.slot]
        for key in request.fresh:
            if state.users[key] == 1:
                state.predicted.pop(key, None)
        self.release(id)

    def expire(self, now_s: float) -> None:
        """End predictions whose time is up, or start their time anew while the block is in use."""
        for state in self.slots.values():
            ttl_s = self.predicted_ttl_s if state.exact else self.approximate_ttl_s
            due = [key for key, touched_s in state.predicted.items() if touched_s + ttl_s <= now_s]
            for key in due:
                if state.users[key] and ttl_s > 0:
                    state.touch(key, now_s)
                    continue
                del state.predicted[key]
                state.unconfirmed += state.exact and not state.stale

    # Lookup

    def overlap(self, hashes: Sequence[int], now_s: float) -> dict[str, list[int] | list[float] | int | None]:
        """Columns in blocks, one row a slot, by the names of the core's."""
        self.expire(now_s)
        frontier = self._frontier(hashes)
        device = self._column(lambda state: self._usable(state, hashes[: _depth(hashes, state.device())]))
        host_raw = self._column(lambda state: _depth(hashes, state.device() | state.on_tier("host")))
        disk_raw = self._column(lambda state: _depth(hashes, state.device() | state.on_tier("host", "disk")))
        return {
            "device": device,
            "confirmed": self._column(lambda state: self._usable(state, hashes[: _depth(hashes, state.trusted())])),
            "host": host_raw,
            "disk": disk_raw,
            "active": self._column(lambda state: _depth(hashes, set(+state.users))),
            "active_blocks": self._column(lambda state: len(+state.users)),
            "resident": self._column(SlotState.resident),
            "evicted": self._column(lambda state: state.evicted),
            "regretted": self._column(lambda state: state.regretted),
            "age_s": self._ages_s(hashes, frontier, now_s),
            "frontier_key": hashes[frontier - 1] if frontier else None,
        }

    def _column(self, value: Callable[[SlotState], int]) -> list[int]:
        return [value(self.slots[slot]) if slot in self.slots else 0 for slot in map(Slot, range(self.rows))]

    def _frontier(self, hashes: Sequence[int]) -> int:
        """Deepest device or host depth of any slot."""
        depths = (_depth(hashes, state.device() | state.on_tier("host")) for state in self.slots.values())
        return max(depths, default=0)

    def _usable(self, state: SlotState, held: Sequence[int]) -> int:
        """Longest prefix of `held` at which every cache group has what it needs."""
        return next(length for length in range(len(held), -1, -1) if self._groups_serve(state, held[:length]))

    def _groups_serve(self, state: SlotState, held: Sequence[int]) -> bool:
        for number, group in enumerate(state.groups.others):
            if group.need_tokens == 0:
                continue
            stride = max(group.block_size // self.block_size, 1)
            if len(held) % stride:
                return False
            ends = held[stride - 1 :: stride]
            need = len(ends) if group.need_tokens is None else -(-group.need_tokens // (stride * self.block_size))
            if not all(state.has_member(number, key) for key in ends[max(len(ends) - need, 0) :]):
                return False
        return True

    def _ages_s(self, hashes: Sequence[int], frontier: int, now_s: float) -> list[float]:
        ages_s = [-1.0] * self.rows
        for key in hashes[max(frontier - AGE_BLOCKS, 0) : frontier]:
            for slot, time_s in self.ages.get(key, {}).items():
                age_s = max(now_s - time_s, 0.0)
                ages_s[slot] = age_s if ages_s[slot] < 0 else min(ages_s[slot], age_s)
        return ages_s

    def stats(self) -> dict[str, int]:
        """Sizes of the whole index, by the names of the core's."""
        states = self.slots.values()
        keys: set[int] = set()
        for state in states:
            keys |= state.confirmed() | set(state.predicted) | set(+state.users)
            keys |= {row.key for row in state.offloaded.values()}
        return {
            "blocks": len(keys),
            "confirmed_facts": sum(len(state.confirmed()) for state in states),
            "predicted_facts": sum(len(state.predicted) for state in states),
            "offloaded_facts": sum(len(state.offloaded) for state in states),
            "in_flight": len(self.in_flight),
        }


def _depth(hashes: Sequence[int], held: set[int]) -> int:
    """How many leading hashes are held."""
    return next((depth for depth, key in enumerate(hashes) if key not in held), len(hashes))
