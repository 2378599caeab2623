"""Calling the policy: the one place where a policy may fail.

Each pool has a policy of its own, so that rotations and learned state never mix models. Whatever a policy raises, or
names that may not be named, is counted, and that request goes to the least loaded replica.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from warmfront.config import PolicyConfig
from warmfront.policy import registry
from warmfront.policy.base import Ended, Fleet, Guarded, Policy, ReplicaCost, capped_tokens
from warmfront.policy.baselines import by_load, choices
from warmfront.policy.rates import Rates
from warmfront.policy.watch import Watch
from warmfront.router.fleet import Flight, outcome
from warmfront.router.meter import Meter
from warmfront.types import Choice, Finished, Overlap, Request, Slot

logger = logging.getLogger(__name__)

POLICY_ERROR = "policy_error"


class _Known(NamedTuple):
    """A policy with its optional methods that follow decisions."""

    policy: Policy
    chosen: Callable[[Request, Overlap, Fleet, Slot], None] | None
    ended: Callable[[Request, Fleet, Ended], float | None] | None
    patience_s: float


class Decision(Struct, frozen=True, gc=False):
    """An ordered list of choices and a word on why: `warm`, `spill`, `cold`, `load`, `retry` or `policy_error`."""

    choices: list[Choice]
    reason: str


class Decider:
    """The configured policy, one instance for each pool."""

    def __init__(self, config: PolicyConfig, meter: Meter, policies: registry.PolicyFactory | None = None) -> None:
        """Use `policies` to make policies, instead of what the registry has under the configured name."""
        self._config = config
        self._factory = policies or registry.factory(config.name)
        self._meter = meter
        self._policies: dict[str, _Known] = {}
        """By pool."""
        self._published: dict[str, tuple[float, float, int]] = {}
        """What was last published of each pool's guard."""
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
        self._published.pop(pool, None)

    @staticmethod
    def known() -> list[str]:
        """Return the names of all policies."""
        return registry.names()

    def decide(self, request: Request, overlap: Overlap, fleet: Fleet, *, retry: bool) -> Decision | None:
        """Choose, and let the policy take note of it. `None`: the policy wants to hold the request."""
        try:
            known = self._policy(fleet)
            ranked = self._choose(known.policy, request, overlap, fleet)
            if not ranked:
                return None
            if known.chosen is not None:
                known.chosen(request, overlap, fleet, ranked[0].slot)
        except Exception as error:
            return self._least_loaded(request, overlap, fleet, error)
        return Decision(ranked, "retry" if retry else _reason(request, overlap, fleet, ranked[0]))

    def ended(self, flight: Flight, fleet: Fleet, now_s: float, answer: Finished | None) -> None:
        """Tell the policy what became of a stream, if it wants to know, and publish what it concludes."""
        known = self._policies.get(fleet.pool)
        if known is None or known.ended is None or not flight.request.stream:
            return
        try:
            regret_s = known.ended(flight.request, fleet, outcome(flight, now_s, answer))
        except Exception as error:
            self._failed(error)
            return
        if regret_s is not None:
            self._meter.observe("warmfront_regret_seconds", (fleet.pool,), regret_s)
            self._publish(fleet.pool)

    def patience_s(self, fleet: Fleet) -> float:
        """Return the wait beyond which a pool's policy would rather hold a request; infinite: it makes no estimates."""
        known = self._policies.get(fleet.pool)
        try:
            return (known or self._policy(fleet)).patience_s
        except Exception as error:
            self._failed(error)
            return math.inf

    def watch(self, fleet: Fleet) -> Watch | None:
        """Return what guards a pool; `None`: its policy has no guard, or cannot be made."""
        try:
            policy = self._policy(fleet).policy
        except Exception as error:
            self._failed(error)
            return None
        watch: Any = getattr(policy, "watch", None)
        return watch if isinstance(watch, Watch) else None

    def prefixes(self, fleet: Fleet) -> Rates[int] | None:
        """Return how often each prefix of a pool is asked for; `None`: its policy does not count that."""
        try:
            policy = self._policy(fleet).policy
        except Exception as error:
            self._failed(error)
            return None
        prefixes: Any = getattr(policy, "prefixes", None)
        return prefixes if isinstance(prefixes, Rates) else None

    def guarded(self, pool: str) -> Guarded | None:
        """Return the state of a pool's guard; `None`: its policy has none, or has decided nothing."""
        known = self._policies.get(pool)
        guarded: Any = None if known is None else getattr(known.policy, "guarded", None)
        state: Guarded | None = None if guarded is None else guarded()
        return state if state is not None and state.decisions else None

    def explain(
        self, request: Request, overlap: Overlap, fleet: Fleet
    ) -> tuple[Sequence[ReplicaCost], Decision | None]:
        """Return every replica's cost and what `decide` would answer, without side effects."""
        if not fleet.eligible:
            return [], None
        state = fleet.rng.getstate()
        try:
            policy = self._policy(fleet).policy
            explain: Any = getattr(policy, "explain", None)
            costs = [] if explain is None else explain(request, overlap, fleet)
            ranked = self._choose(policy, request, overlap, fleet)
        except Exception as error:
            return [], self._least_loaded(request, overlap, fleet, error)
        finally:
            fleet.rng.setstate(state)
        return costs, Decision(ranked, _reason(request, overlap, fleet, ranked[0])) if ranked else None

    def _policy(self, fleet: Fleet) -> _Known:
        known = self._policies.get(fleet.pool)
        if known is None:
            policy = self._factory(self._config)
            known = _Known(
                policy,
                getattr(policy, "chosen", None),
                getattr(policy, "ended", None),
                getattr(policy, "patience_s", math.inf),
            )
            self._policies[fleet.pool] = known
        return known

    def _choose(self, policy: Policy, request: Request, overlap: Overlap, fleet: Fleet) -> list[Choice]:
        ranked = list(policy.choose(request, overlap, fleet)[: fleet.choices_max])
        slots = [choice.slot for choice in ranked]
        if not fleet.allowed.issuperset(slots):
            others = sorted(set(slots) - fleet.allowed)
            raise ValueError(f"policy {self._config.name} chose slots {others}, which may not be chosen")
        if len(set(slots)) != len(slots):
            raise ValueError(f"policy {self._config.name} chose a slot twice")
        return ranked

    def _publish(self, pool: str) -> None:
        guarded = self.guarded(pool)
        if guarded is None:
            return
        state = (guarded.credit, guarded.gain_s, guarded.rivals)
        if state == self._published.get(pool):
            return
        names = ("warmfront_affinity_credit", "warmfront_affinity_gain_seconds", "warmfront_affinity_sentinels")
        for name, value in zip(names, state, strict=True):
            self._meter.set(name, (pool,), value)
        before = self._published.get(pool, (1.0, 0.0, 0))[0]
        if before != guarded.credit:
            verdict = "loses to load alone" if guarded.credit < before else "pays again, or is tried again"
            logger.warning("pool %s: cache affinity %s; its credit is now %g", pool, verdict, guarded.credit)
        self._published[pool] = state

    def _failed(self, error: Exception) -> None:
        self.errors += 1
        self._meter.count("warmfront_policy_errors_total", (), 1)
        if self.errors & (self.errors - 1) == 0:  # 1st, 2nd, 4th, 8th …: a broken policy fails for every request
            logger.error("policy %s failed (%d times so far)", self._config.name, self.errors, exc_info=error)

    def _least_loaded(self, request: Request, overlap: Overlap, fleet: Fleet, error: Exception) -> Decision:
        self._failed(error)
        return Decision(choices(by_load(fleet, fleet.eligible), request, overlap, fleet), POLICY_ERROR)


def _reason(request: Request, overlap: Overlap, fleet: Fleet, first: Choice) -> str:
    if request.route == "load" or request.basis == "none":
        return "load"
    reachable = capped_tokens(fleet.deepest(overlap.disk), request.prompt_tokens, fleet.block_size[first.slot])
    if not reachable:
        return "cold"
    return "warm" if first.cached_tokens >= reachable else "spill"
