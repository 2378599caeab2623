"""A peer policy with a fleet and an overlap that tests set by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from warmfront.config import CostConfig
from warmfront.lab.model import SimRequest
from warmfront.lab.peers import PEERS
from warmfront.policy.base import no_overlap
from warmfront.router.fleet import Pool
from warmfront.types import Choice, EngineLoad, PoolState, ReplicaState, Request, Slot

from support.routing import replica, request


class PlainView:
    """Answers with what it was told."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.of: dict[int, Sequence[int]] = {}
        self.loads: list[EngineLoad] = []
        self.intervals: set[float] = set()

    def blocks(self, request: Request) -> Sequence[int]:
        return self.of[request.id]

    def prompt(self, request: Request) -> SimRequest:
        return SimRequest(key=request.id, at_s=request.time_s, prompt=((0, request.prompt_tokens),), output_tokens=1)

    def load(self, interval_s: float) -> Sequence[EngineLoad]:
        self.intervals.add(interval_s)
        return self.loads


class Peer:
    """One policy and what it sees. Blocks have 16 tokens unless said otherwise."""

    def __init__(
        self, name: str, replicas: int = 3, *, block_size: int = 16, seed: int = 1, choices_max: int = 1
    ) -> None:
        self.view = PlainView(block_size)
        self.policy = PEERS[name](self.view)
        self.pool = Pool.create("m", config=CostConfig(), seed=seed, choices_max=choices_max)
        self.follow([replica(slot, block_size=block_size) for slot in range(replicas)])
        self.number = 0

    def follow(self, replicas: list[ReplicaState]) -> None:
        """Change who is there."""
        self.pool.follow(PoolState("m", {"m": None}, "exact", None, replicas))
        self.overlap = no_overlap(self.fleet)

    @property
    def fleet(self) -> Any:
        return self.pool.fleet

    def holds(self, **columns: list[int]) -> None:
        """Set columns of the overlap; `device` sets the tiers below and the confirmed depth too."""
        if "device" in columns:
            lower = {"confirmed": columns["device"], "host": columns["device"], "disk": columns["device"]}
            columns = {**lower, **columns}
        self.overlap = replace(self.overlap, **columns)

    def ask(self, blocks: Sequence[int] = (), **changes: Any) -> list[Choice]:
        """Return the choices for a prompt of these blocks, or of `prompt_tokens`."""
        return list(self.policy.choose(self._request(blocks, changes), self.overlap, self.fleet))

    def send(self, blocks: Sequence[int] = (), **changes: Any) -> Slot:
        """Decide and let the policy take note."""
        arrived = self._request(blocks, changes)
        slot = self.policy.choose(arrived, self.overlap, self.fleet)[0].slot
        self.note(arrived, slot)
        return slot

    def place(self, slot: int, blocks: Sequence[int], **changes: Any) -> None:
        """Let the policy note that a prompt went to `slot`, whatever it would have chosen."""
        arrived = self._request(blocks, changes)
        self.policy.choose(arrived, self.overlap, self.fleet)
        self.note(arrived, Slot(slot))

    def note(self, arrived: Request, slot: Slot) -> None:
        chosen = getattr(self.policy, "chosen", None)
        if chosen is not None:
            chosen(arrived, self.overlap, self.fleet, slot)

    def slots(self, blocks: Sequence[int] = (), times: int = 40, **changes: Any) -> set[int]:
        """Return every slot that is chosen first when asked again and again."""
        return {self.ask(blocks, **changes)[0].slot for _ in range(times)}

    def _request(self, blocks: Sequence[int], changes: dict[str, Any]) -> Request:
        self.number += 1
        self.view.of[self.number] = blocks
        values = {"prompt_tokens": len(blocks) * self.view.block_size, "blocks": len(blocks), **changes}
        return request(self.number, time_s=self.fleet.now_s, **values)


def prompt(name: int, blocks: int) -> list[int]:
    """Make distinct block hashes: prompts of one name are prefixes of each other."""
    return [name * 1_000_003 + block for block in range(1, blocks + 1)]
