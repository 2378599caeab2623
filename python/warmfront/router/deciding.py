"""Calling the policy: the one place where a policy may fail.

Each pool has a policy of its own, so that rotations and learned state never mix models. Whatever a policy raises, or
names that may not be named, is counted, and that request goes to the least loaded replica.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from warmfront.config import PolicyConfig
from warmfront.policy import registry
from warmfront.policy.base import Fleet, Policy, ReplicaCost, capped_tokens
from warmfront.policy.baselines import by_load, choices
from warmfront.router.meter import Meter
from warmfront.types import Choice, Overlap, Request, Slot

logger = logging.getLogger(__name__)

POLICY_ERROR = "policy_error"


_Chosen = Callable[[Request, Overlap, Fleet, Slot], None]


class Decision(NamedTuple):
    """An ordered list of choices and a word on why: `warm`, `spill`, `cold`, `load`, `retry` or `policy_error`."""

    choices: list[Choice]
    reason: str


class Decider:
    """The configured policy, one instance for each pool."""

    def __init__(self, config: PolicyConfig, meter: Meter) -> None:
        self._config = config
        self._factory = registry.factory(config.name)
        self._meter = meter
        self._policies: dict[str, tuple[Policy, _Chosen | None]] = {}
        """By pool, with the method that takes note of choices, where the policy has one."""
        self.errors = 0

    def reconfigure(self, config: PolicyConfig) -> None:
        """Use another policy or other constants. What pools have learned stays; it is not the policy's."""
        if config == self._config:
            return
        self._factory = registry.factory(config.name)
        self._config = config
        self._policies.clear()

    def forget(self, pool: str) -> None:
        """Drop the policy of a pool that is gone."""
        self._policies.pop(pool, None)

    @staticmethod
    def known() -> list[str]:
        """Return the names of all policies."""
        return registry.names()

    def decide(self, request: Request, overlap: Overlap, fleet: Fleet, *, retry: bool) -> Decision | None:
        """Choose, and let the policy take note of it. `None`: the policy wants to hold the request."""
        try:
            policy, chosen = self._policy(fleet)
            ranked = self._choose(policy, request, overlap, fleet)
            if not ranked:
                return None
            if chosen is not None:
                chosen(request, overlap, fleet, ranked[0].slot)
        except Exception as error:
            return self._least_loaded(request, overlap, fleet, error)
        return Decision(ranked, "retry" if retry else _reason(request, overlap, fleet, ranked[0]))

    def explain(
        self, request: Request, overlap: Overlap, fleet: Fleet
    ) -> tuple[Sequence[ReplicaCost], Decision | None]:
        """Return every replica's cost and what `decide` would answer, without side effects."""
        if not fleet.eligible:
            return [], None
        state = fleet.rng.getstate()
        try:
            policy, _ = self._policy(fleet)
            explain: Any = getattr(policy, "explain", None)
            costs = [] if explain is None else explain(request, overlap, fleet)
            ranked = self._choose(policy, request, overlap, fleet)
        except Exception as error:
            return [], self._least_loaded(request, overlap, fleet, error)
        finally:
            fleet.rng.setstate(state)
        return costs, Decision(ranked, _reason(request, overlap, fleet, ranked[0])) if ranked else None

    def _policy(self, fleet: Fleet) -> tuple[Policy, _Chosen | None]:
        known = self._policies.get(fleet.pool)
        if known is None:
            policy = self._factory(self._config)
            known = self._policies[fleet.pool] = policy, getattr(policy, "chosen", None)
        return known

    def _choose(self, policy: Policy, request: Request, overlap: Overlap, fleet: Fleet) -> list[Choice]:
        ranked = list(policy.choose(request, overlap, fleet)[: fleet.choices_max])
        slots, is_eligible = [choice.slot for choice in ranked], fleet.is_eligible
        for slot in slots:
            if not 0 <= slot < len(is_eligible) or not is_eligible[slot]:
                raise ValueError(f"policy {self._config.name} chose slot {slot}, which may not be chosen")
        if len(set(slots)) != len(slots):
            raise ValueError(f"policy {self._config.name} chose a slot twice")
        return ranked

    def _least_loaded(self, request: Request, overlap: Overlap, fleet: Fleet, error: Exception) -> Decision:
        self.errors += 1
        self._meter.count("warmfront_policy_errors_total", (), 1)
        if self.errors & (self.errors - 1) == 0:  # 1st, 2nd, 4th, 8th …: a broken policy fails for every request
            logger.error("policy %s failed (%d times so far)", self._config.name, self.errors, exc_info=error)
        return Decision(choices(by_load(fleet, fleet.eligible), request, overlap, fleet), POLICY_ERROR)


def _reason(request: Request, overlap: Overlap, fleet: Fleet, first: Choice) -> str:
    if request.route == "load" or request.basis == "none":
        return "load"
    reachable = capped_tokens(fleet.deepest(overlap.disk), request.prompt_tokens, fleet.block_size[first.slot])
    if not reachable:
        return "cold"
    return "warm" if first.cached_tokens >= reachable else "spill"
