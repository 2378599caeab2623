"""One run: a regime, a policy, a load and a seed give outcomes.

Runs a workload through the router on virtual time, over the fleet that the regime declares. Built-in policies are named
in the configuration; peers are made by their own factories from a `SimView`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import asdict, replace

from warmfront.clock import Clock, MonotonicClock
from warmfront.config import PolicyConfig, RouterConfig
from warmfront.errors import ConfigError
from warmfront.lab import regime as regimes
from warmfront.lab.fleet import open_fleet
from warmfront.lab.later import Later
from warmfront.lab.model import Regime, RunResult, Source
from warmfront.lab.peers import PEERS
from warmfront.policy import registry
from warmfront.policy.base import Policy
from warmfront.ports.agenda import Agenda
from warmfront.ports.sim import SimIndex, SimPort, Stages
from warmfront.ports.sim_view import SimView
from warmfront.router import Router
from warmfront.types import Request, Slot


def run(
    regime: Regime,
    policy: str,
    load: float,
    seed: int,
    *,
    later: int = 0,
    config: RouterConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RunResult:
    """Run a regime once.

    Args:
        regime: Workload, fleet and how it is seen.
        policy: A built-in policy, a plugin or a peer.
        load: In the regime's own unit.
        seed: Of the workload, of the policy's random numbers and of lost events.
        later: Above 0: each request comes up to a millisecond later, by this draw (`lab.later`).
        config: Of the router; its policy's name and seed are replaced.
        progress: Told how many requests have ended and how many the regime has.

    Raises:
        ConfigError: The policy, a preset or the workload is not known, or a request does not fit the fleet.
    """
    source = regimes.source(regime, load, seed)
    if later:
        source = Later(source, later)
    return run_source(regime, source, policy, load, seed, config=config, progress=progress)


def run_source(
    regime: Regime,
    source: Source,
    policy: str,
    load: float,
    seed: int,
    *,
    config: RouterConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
    clock: Clock | None = None,
) -> RunResult:
    """Run a workload that is already made. See `run`; `clock` measures how long the run takes."""
    stages = Stages(clock or MonotonicClock())
    began_s = stages.clock.now_s()
    agenda = Agenda()
    fleet = open_fleet(regime.fleet, agenda, seed=seed, requests=regime.requests)
    view = SimView(fleet, agenda, block_size=regime.fleet.block_size)
    chosen = _choose(policy, config or RouterConfig(), view, seed=seed)
    router = Router(chosen.config, SimIndex(fleet, stages), policies=chosen.make)
    port = SimPort(fleet, router, source, agenda=agenda, view=view, stages=stages)
    port.watcher = chosen if chosen.is_peer else None
    port.reports_cached = regime.fleet.reports_cached
    if progress is not None:
        port.progress = lambda ended: progress(ended, regime.requests)
    ended_s = port.run()
    wall_s = stages.clock.now_s() - began_s
    known_s = {
        "router": stages.router_s,
        "index": stages.index_s,
        "engines": stages.engines_s,
        "workload": stages.workload_s,
    }
    return RunResult(
        regime=regime.name,
        policy=policy,
        load=load,
        seed=seed,
        outcomes=list(port.outcomes.values()),
        gaps=fleet.gaps(),
        busy_s=fleet.busy_s(),
        imbalance=fleet.imbalance(),
        preemptions=fleet.preemptions,
        ended_s=ended_s,
        wall_s=wall_s,
        stages_s={**known_s, "rest": wall_s - sum(known_s.values())},
        guard=chosen.figures(),
    )


class _Chosen:
    """The policy under test: how the router gets it, and what it is told besides."""

    def __init__(self, config: RouterConfig, make: registry.PolicyFactory, *, is_peer: bool) -> None:
        self.config = config
        self.is_peer = is_peer
        self._make = make
        self._policy: Policy | None = None

    def make(self, config: PolicyConfig) -> Policy:
        """Make the policy of the only pool."""
        self._policy = self._make(config)
        return self._policy

    def first_token(self, request: Request, slot: Slot, now_s: float) -> None:
        """Pass it on to a policy that wants to know."""
        self._pass("first_token", request, slot, now_s)

    def finished(self, request: Request, slot: Slot, now_s: float) -> None:
        """Pass it on to a policy that wants to know."""
        self._pass("finished", request, slot, now_s)

    def figures(self) -> dict[str, float]:
        """Return the figures of the policy's guard, when it has one."""
        guarded: Any = getattr(self._policy, "guarded", None)
        if guarded is None:
            return {}
        return {name: float(figure) for name, figure in asdict(guarded()).items()}

    def _pass(self, hook: str, request: Request, slot: Slot, now_s: float) -> None:
        told: Any = getattr(self._policy, hook, None)
        if told is not None:
            told(request, slot, now_s)


def _choose(policy: str, config: RouterConfig, view: SimView, *, seed: int) -> _Chosen:
    """Find a policy by name.

    Raises:
        ConfigError: There is none.
    """
    config = replace(config, policy=replace(config.policy, seed=seed))
    if policy in registry.names():
        named = replace(config, policy=replace(config.policy, name=policy))
        return _Chosen(named, registry.factory(policy), is_peer=False)
    if policy not in PEERS:
        raise ConfigError(f"no policy named {policy!r}; known: {', '.join([*registry.names(), *sorted(PEERS)])}")
    return _Chosen(config, lambda _config: PEERS[policy](view), is_peer=True)
