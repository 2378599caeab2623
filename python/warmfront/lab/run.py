"""One run: a regime, a policy, a load and a seed give outcomes.

Builds the fleet that the regime declares, enters its changes (replicas that join, leave, crash) into the agenda, and
runs the workload through the router on virtual time. Built-in policies are named in the configuration; peers are made
by their own factories from a `View`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

import msgspec
from msgspec.structs import replace

from warmfront import core
from warmfront.clock import Clock, MonotonicClock
from warmfront.config import IndexConfig, PolicyConfig, RouterConfig
from warmfront.errors import ConfigError
from warmfront.lab.model import EngineSpec, FleetSpec, Outcome, Regime, RunResult, SimRequest, Source
from warmfront.policy import registry
from warmfront.policy.base import Policy
from warmfront.ports.sim import Agenda, SimIndex, SimPort, SimView, Stages, Watcher
from warmfront.router import Router
from warmfront.sim.engine import EngineConfig
from warmfront.sim.latency import preset
from warmfront.types import EngineLoad, Request, Slot


class View(Protocol):
    """What a peer may look at besides what the router tells every policy."""

    block_size: int

    def blocks(self, request: Request) -> Sequence[int]:
        """Return the chained hashes of the prompt's full blocks: equal prefixes have equal hashes."""

    def prompt(self, request: Request) -> SimRequest:
        """Return the request as the workload made it."""

    def load(self, interval_s: float) -> Sequence[EngineLoad]:
        """Return what a scraper with this interval saw last, one row a slot."""


PeerFactory = Callable[[View], Policy]


def run(
    regime: Regime,
    policy: str,
    load: float,
    seed: int,
    *,
    config: RouterConfig | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RunResult:
    """Run a regime once.

    Args:
        regime: Workload, fleet and how it is seen.
        policy: A built-in policy, a plugin or a peer.
        load: In the regime's own unit.
        seed: Of the workload, of the policy's random numbers and of lost events.
        config: Of the router; its policy's name and seed are replaced.
        progress: Told how many requests have ended and how many the regime has.

    Raises:
        ConfigError: The policy, a preset or the workload is not known, or a request does not fit the fleet.
    """
    source = import_module("warmfront.lab.regime").source(regime, load, seed)
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
    fleet = open_fleet(regime.fleet, agenda, seed=seed)
    view = SimView(fleet, agenda, block_size=regime.fleet.block_size)
    chosen = _choose(policy, config or RouterConfig(), view, seed=seed)
    router = Router(chosen.config, SimIndex(fleet, stages), policies=chosen.make)
    port = SimPort(fleet, router, source, agenda=agenda, view=view, stages=stages)
    port.watcher = chosen
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


def open_fleet(spec: FleetSpec, agenda: Agenda, *, seed: int) -> core.SimFleet:
    """Build the fleet at time zero, and enter what will happen to it into the agenda.

    Raises:
        ConfigError: A preset is not known.
    """
    index = IndexConfig()
    names = sorted({name for engine in spec.engines for name in engine.adapters})
    fleet = core.SimFleet(
        block_size=spec.block_size,
        seed=seed,
        publish=spec.events.publish,
        delay_s=spec.events.delay_s,
        loss=spec.events.loss,
        adapters=names,
        facts_max=index.facts_max,
        predicted_ttl_s=index.predicted_ttl_s,
        approximate_ttl_s=index.approximate_ttl_s,
    )
    for engine in spec.engines:
        config = msgspec.json.encode(engine_config(engine, block_size=spec.block_size))
        lacks = [name for name in names if name not in engine.adapters]
        for _ in range(engine.count):
            _Replica(fleet, agenda, engine, config, lacks).enter()
    agenda.every(spec.scrape_s, fleet.probe, first_s=0.0)
    return fleet


def engine_config(spec: EngineSpec, *, block_size: int) -> EngineConfig:
    """Return the engine that a spec names.

    Raises:
        ConfigError: The preset is not known.
    """
    try:
        chosen = preset(spec.preset, speed=spec.speed)
    except KeyError as error:
        raise ConfigError(f"fleet.engines: no preset named {spec.preset!r}") from error
    blocks = (spec.kv_tokens or chosen.kv_tokens) // block_size
    return EngineConfig(
        latency=chosen.latency,
        blocks=1 + blocks,
        block_size=block_size,
        max_model_tokens=blocks * block_size,
        max_batched_tokens=chosen.max_batched_tokens,
        max_sequences=chosen.max_sequences,
        host_blocks=spec.host_tokens // block_size,
        disk_blocks=spec.disk_tokens // block_size,
        adapter_slots=spec.adapter_slots if spec.adapters else 0,
    )


@dataclass(frozen=True, slots=True)
class _Replica:
    """One replica's life, as its spec tells it."""

    fleet: core.SimFleet
    agenda: Agenda
    spec: EngineSpec
    config: bytes
    lacks: list[str]

    def enter(self) -> None:
        """Join now or later."""
        if self.spec.joins_s > 0:
            self.agenda.add(self.spec.joins_s, self._join)
        else:
            self._join()

    def _join(self) -> None:
        spec, fleet = self.spec, self.fleet
        slot = fleet.join(self.config, caching=spec.caching, lacks=self.lacks)
        if spec.startup_s > 0:
            fleet.probe()
            self.agenda.add(spec.joins_s + spec.startup_s, lambda: fleet.start(slot))
        else:
            fleet.start(slot)
        if spec.leaves_s is not None:
            self.agenda.add(spec.leaves_s, lambda: self._leave(slot))
        if spec.crashes_s is not None:
            self.agenda.add(spec.crashes_s, lambda: fleet.crash(slot))
            self.agenda.add(spec.crashes_s + spec.restart_s, lambda: fleet.start(slot))

    def _leave(self, slot: int) -> None:
        self.fleet.leave(slot)
        self.fleet.probe()


class _Chosen:
    """The policy under test: how the router gets it, and what it is told besides."""

    def __init__(self, config: RouterConfig, make: registry.PolicyFactory) -> None:
        self.config = config
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
        guarded = getattr(self._policy, "guarded", None)
        if guarded is None:
            return {}
        return {name: float(value) for name, value in msgspec.structs.asdict(guarded()).items()}

    def _pass(self, hook: str, request: Request, slot: Slot, now_s: float) -> None:
        told: Any = getattr(self._policy, hook, None)
        if told is not None:
            told(request, slot, now_s)


def _choose(policy: str, config: RouterConfig, view: View, *, seed: int) -> _Chosen:
    """Find a policy by name.

    Raises:
        ConfigError: There is none.
    """
    config = replace(config, policy=replace(config.policy, seed=seed))
    if policy in registry.names():
        named = replace(config, policy=replace(config.policy, name=policy))
        return _Chosen(named, registry.factory(policy))
    peers = cast(dict[str, PeerFactory], import_module("warmfront.lab.peers").PEERS)
    if policy not in peers:
        raise ConfigError(f"no policy named {policy!r}; known: {', '.join([*registry.names(), *sorted(peers)])}")
    return _Chosen(config, lambda _config: peers[policy](view))


__all__ = ["Outcome", "PeerFactory", "View", "Watcher", "engine_config", "open_fleet", "run", "run_source"]
