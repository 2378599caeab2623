"""Which replica holds which block, plainly.

One `Index` serves the replicas of a pool that have one block size. A fact is *confirmed* by a KV event or *predicted*
by our own dispatch. What one would get wrong: residency is a multiset; a block is gone when its last copy is.
Dropping facts for lack of room (`facts_max`) is the core's own business and not specified here.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from warmfront.reference.blocks import ROOT, HashFunction, blake_64, full_blocks, next_hash
from warmfront.reference.events import Batch, Cleared, Removed, Stored
from warmfront.reference.groups import Groups, Place
from warmfront.types import RequestId, Slot

GHOSTS_MIN = 64
"""Ghosts of one slot when it holds little."""

LAG_S_MAX = 60.0
"""Events may be later than this; predictions do not live longer for it."""

PROMPTS_MAX = 65_536
"""Dispatched prompts of one slot that are remembered."""

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


@dataclass(eq=False)
class Prompt:
    """A prompt that was dispatched to a slot: its blocks are covered, and thereby may be predicted."""

    keys: list[int]
    """From the first block on; capacity takes blocks off the end."""
    touched_s: float
    whole: bool = True
    """Nothing was taken off the end."""
    dispatches: int = 0
    """Those that were not withdrawn."""
    in_flight: int = 0


@dataclass
class SlotState:
    """What is known of one replica."""

    exact: bool
    capacity_blocks: int | None
    stale: bool = False
    unverified: bool = False
    lag_s: float = 0.0
    """What is known comes from a former process, and the event stream has not proved it yet."""
    names: dict[int, int] = field(default_factory=dict)
    """Engine hash → key, of blocks on the device."""
    is_doubtful: bool = False
    """Some events were lost: copies are not counted."""
    copies: Counter[int] = field(default_factory=Counter)
    """Physical copies by engine hash."""
    offloaded: dict[int, Offloaded] = field(default_factory=dict)
    groups: Groups = field(default_factory=Groups)
    predicted: set[int] = field(default_factory=set)
    """Keys that a dispatch said would come and no event has confirmed."""
    prompts: list[Prompt] = field(default_factory=list)
    """Oldest dispatch first."""
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

    def proved(self) -> set[int]:
        """Keys on the device by events that this process can answer for."""
        return set() if self.unverified else self.trusted()

    @property
    def is_exact_now(self) -> bool:
        """Whether events say what the slot holds; while they are not believed or not heard, our own dispatches do."""
        return self.exact and not self.stale and not self.unverified

    @property
    def is_over_capacity(self) -> bool:
        """Whether more is predicted than fits, and no event says what has gone.

        Unverified facts are not counted: a warm engine is full of them, and would leave no room for what is sent now.
        """
        if self.is_exact_now or self.capacity_blocks is None:
            return False
        return (len(self.predicted) if self.unverified else self.resident()) > self.capacity_blocks

    def device(self) -> set[int]:
        """Keys taken to be on the device."""
        return self.trusted() | self.predicted

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

    def covered(self) -> set[int]:
        """Keys of the dispatched prompts."""
        return {key for prompt in self.prompts for key in prompt.keys}

    def touch(self, keys: list[int], now_s: float) -> Prompt:
        """Make a prompt the newest."""
        known = (prompt for prompt in self.prompts if prompt.whole and prompt.keys == keys)
        prompt = next(known, None) or Prompt(list(keys), now_s)
        self.requeue(prompt, now_s)
        return prompt

    def requeue(self, prompt: Prompt, now_s: float) -> None:
        """Start a prompt's time anew."""
        if prompt in self.prompts:
            self.prompts.remove(prompt)
        self.prompts.append(prompt)
        prompt.touched_s = now_s

    def drop(self, prompt: Prompt) -> int:
        """Forget a prompt. Returns how many predictions ended: those that no other prompt covers."""
        self.prompts.remove(prompt)
        before = len(self.predicted)
        self.predicted &= self.covered()
        return before - len(self.predicted)

    def shed(self) -> int | None:
        """Take blocks off the end of the oldest prompt until one was predicted. `None`: there is no prediction."""
        while self.prompts:
            oldest = self.prompts[0]
            key, oldest.whole = oldest.keys.pop(), False
            covered = self.covered()
            if not oldest.keys or key in covered:
                # What is left of it belongs to prompts that were dispatched since.
                self.prompts.remove(oldest)
            if key in self.predicted - covered:
                self.predicted.remove(key)
                return key
        return None

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
    prompt: Prompt | None
    """`None`: it has no full block."""
    keys: list[int]


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
            state.is_doubtful = state.unverified = False
            state.offloaded.clear()
            state.groups = Groups()

    def doubt(self, slot: Slot) -> None:
        """Some events of the slot are lost: what is known stays, but a removal takes all copies of a block."""
        if (state := self.slots.get(slot)) is not None:
            state.is_doubtful = True
            state.copies = Counter(dict.fromkeys(state.copies, 1))

    def note_lag(self, slot: Slot, lag_s: float) -> None:
        """Let predictions of the slot live longer by the time by which its events are late."""
        if (state := self.slots.get(slot)) is not None:
            lag_s = math.floor(min(max(0.0, lag_s), LAG_S_MAX) + 0.5)
            state.lag_s = max(lag_s, state.lag_s - 1.0)

    def set_stale(self, slot: Slot, stale: bool) -> None:
        """While stale, a slot counts with its predictions only, which live as on an approximate feed."""
        if (state := self.slots.get(slot)) is None:
            return
        state.stale, state.unverified = stale, False
        if not stale:
            state.predicted -= state.confirmed()

    def restored(self, slot: Slot) -> None:
        """Another process goes on with what is known: until `set_stale`, facts are held but not confirmed."""
        state = self.slots[slot]
        state.stale, state.unverified, state.lag_s = False, state.exact, 0.0
        if not state.exact:
            state.predicted -= state.confirmed()

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
        state.copies[name] = 1 if state.is_doubtful else state.copies[name] + 1
        if not known:
            state.predicted.discard(key)
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
        fresh = set(hashes) - state.proved() - state.predicted
        state.predicted |= fresh
        state.predictions += len(fresh)
        prompt = state.touch(list(hashes), now_s) if hashes else None
        if prompt is not None:
            prompt.dispatches += 1
            prompt.in_flight += 1
        state.users.update(hashes)
        if len(state.prompts) > PROMPTS_MAX:
            state.drop(state.prompts[0])
        self.in_flight[id] = InFlight(slot, prompt, list(hashes))
        while state.is_over_capacity:
            if (key := state.shed()) is None:
                break
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
            self.slots[request.slot].users.subtract(request.keys)
            if request.prompt is not None:
                request.prompt.in_flight -= 1

    def withdraw(self, id: RequestId) -> None:
        """The request ended without having been computed: its predictions are void too.

        An equal dispatch may have computed the same: events say so, or one in flight will; without events it counts.
        """
        request = self.in_flight.get(id)
        self.release(id)
        if request is None or request.prompt is None:
            return
        state, prompt = self.slots[request.slot], request.prompt
        prompt.dispatches -= 1
        is_computed = prompt.in_flight > 0 if state.exact else prompt.dispatches > 0
        if not is_computed and prompt in state.prompts:
            state.drop(prompt)

    def expire(self, now_s: float) -> None:
        """End the predictions of prompts whose time is up, or start that anew while they are in flight."""
        for state in self.slots.values():
            ttl_s = self.predicted_ttl_s + state.lag_s if state.is_exact_now else self.approximate_ttl_s
            while state.prompts and state.prompts[0].touched_s + ttl_s <= now_s:
                oldest = state.prompts[0]
                if ttl_s > 0 and oldest.in_flight:
                    state.requeue(oldest, now_s)
                    continue
                ended = state.drop(oldest)
                if state.is_exact_now:
                    state.unconfirmed += ended

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
            "confirmed": self._column(lambda state: self._usable(state, hashes[: _depth(hashes, state.proved())])),
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
            keys |= state.confirmed() | state.covered() | set(+state.users)
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
