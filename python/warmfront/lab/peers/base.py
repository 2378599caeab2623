"""What the policies of others are given, and how they answer.

They run behind the same router as everybody else: load is the router's own ledger (`fleet`), exact knowledge of caches
is the router's index (`overlap`). What the systems know beyond that (scraped metrics, their own history) comes through
a `View`. What is easy to get wrong: `overlap.device` contains what the router predicts from its own dispatches. Systems
that believe KV events alone must read `events_only` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from warmfront.lab.model import SimRequest
from warmfront.policy.base import Fleet, Policy, capped_tokens
from warmfront.types import Choice, EngineLoad, Overlap, Request, Slot

CHARACTERS_PER_TOKEN = 4
"""How bounds and thresholds given in characters become tokens. llm-d estimates with the same figure."""


class View(Protocol):
    """What a simulated run tells a peer policy beside the policy interface. One for each run."""

    block_size: int
    """Tokens a block, the same for all replicas."""

    def blocks(self, request: Request) -> Sequence[int]:
        """Return the chained hashes of the prompt's full blocks: equal prefixes have equal hashes."""

    def prompt(self, request: Request) -> SimRequest:
        """Return the request as the workload made it."""

    def load(self, interval_s: float) -> Sequence[EngineLoad]:
        """Return engine metrics by slot, as a scraper with that interval saw them last."""


PeerFactory = Callable[[View], Policy]
"""Makes the policy of one pool in one run."""


class Prompts:
    """The blocks of the request in hand: fetched once, however often a decision needs them."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._last: tuple[Request | None, Sequence[int]] = (None, ())

    def __call__(self, request: Request) -> Sequence[int]:
        """Return the chained hashes of the prompt's full blocks."""
        if self._last[0] is not request:
            self._last = (request, self._view.blocks(request))
        return self._last[1]


class Members:
    """Notices when a slot got another replica, so that nothing is believed of the new one."""

    def __init__(self) -> None:
        self._membership = -1
        self._ids: list[str | None] = []

    def changed(self, fleet: Fleet) -> list[Slot]:
        """Return the slots whose replica left or was replaced since the last call."""
        if fleet.membership == self._membership:
            return []
        before, self._ids = self._ids, list(fleet.id)
        self._membership = fleet.membership
        return [Slot(row) for row, name in enumerate(before) if name is not None and name != self._ids[row]]


def events_only(overlap: Overlap, fleet: Fleet) -> list[int]:
    """Return depths by slot as KV events alone tell them, shape (slots,), in tokens.

    A replica without live events is taken as the index has it, from the router's own dispatches: every system of this
    kind has such a mode, though an operator must switch it on.
    """
    if all(fleet.exact[slot] for slot in fleet.eligible):
        return overlap.confirmed
    return [
        confirmed if exact else device
        for confirmed, device, exact in zip(overlap.confirmed, overlap.device, fleet.exact, strict=False)
    ]


def cheapest_first(costs: Sequence[float], fleet: Fleet) -> list[Slot]:
    """Order the eligible slots by cost, one each and in their order; equal costs are drawn at random."""
    draw = fleet.rng.random
    return [
        slot for _, _, slot in sorted((cost, draw(), slot) for cost, slot in zip(costs, fleet.eligible, strict=True))
    ]


def then_by_load(first: Slot, fleet: Fleet) -> list[Slot]:
    """Put the others behind `first`, fewest requests first: fallbacks for a connection that fails."""
    if fleet.choices_max == 1:
        return [first]
    in_flight = fleet.in_flight
    others = sorted((slot for slot in fleet.eligible if slot != first), key=lambda slot: in_flight[slot])
    return [first, *others]


def choices(order: Sequence[Slot], depths: Sequence[int], request: Request, fleet: Fleet) -> list[Choice]:
    """Turn an order of slots into choices that expect `depths` (tokens by slot), capped as the engine caps them."""
    tokens, sizes = request.prompt_tokens, fleet.block_size
    return [Choice(slot, capped_tokens(depths[slot], tokens, sizes[slot])) for slot in order[: fleet.choices_max]]
