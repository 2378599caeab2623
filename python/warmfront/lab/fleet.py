"""From what a regime says of a fleet to engines on virtual time.

Each replica's life (joining, starting, leaving, crashing, coming back) is entered into the agenda of the run, by
time or by the number of requests that have come. What is easy to get wrong: a process that has started is chosen no
earlier than the next scrape, because only a scrape tells the router.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from warmfront import core
from warmfront.config import IndexConfig
from warmfront.lab.model import EngineSpec, FleetSpec
from warmfront.ports.agenda import Agenda
from warmfront.sim.engine import EngineConfig
from warmfront.sim.latency import preset


def open_fleet(spec: FleetSpec, agenda: Agenda, *, seed: int, requests: int = 0) -> core.SimFleet:
    """Build the fleet at time zero, and enter what will happen to it into the agenda.

    Args:
        spec: What there is.
        agenda: Of the run.
        seed: Of lost events.
        requests: Of the whole run, for what happens at a share of them.

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
            _Replica(fleet, agenda, engine, config, lacks, requests).enter()
    agenda.every(spec.scrape_s, fleet.probe, first_s=0.0)
    return fleet


def engine_config(spec: EngineSpec, *, block_size: int) -> EngineConfig:
    """Return the engine that a spec names.

    Raises:
        ConfigError: The preset is not known, or its file is none.
    """
    chosen = preset(spec.preset, speed=spec.speed)
    blocks = (spec.kv_tokens or chosen.kv_tokens) // block_size
    loading = {} if spec.host_token_s is None else {"host_token_s": spec.host_token_s}
    return EngineConfig(
        latency=replace(chosen.latency, **loading),
        blocks=1 + blocks,
        block_size=block_size,
        max_model_tokens=blocks * block_size,
        max_batched_tokens=chosen.max_batched_tokens,
        max_sequences=chosen.max_sequences,
        host_blocks=spec.host_tokens // block_size,
        disk_blocks=spec.disk_tokens // block_size,
        adapter_slots=len(spec.adapters) if spec.adapter_slots is None else spec.adapter_slots,
    )


@dataclass(frozen=True, slots=True)
class _Replica:
    """One replica's life, as its spec tells it."""

    fleet: core.SimFleet
    agenda: Agenda
    spec: EngineSpec
    config: bytes
    lacks: list[str]
    requests: int

    def enter(self) -> None:
        """Join now or later."""
        if self.spec.joins_s > 0:
            self.agenda.add(self.spec.joins_s, self._join)
        else:
            self._join()

    def _join(self) -> None:
        spec, fleet = self.spec, self.fleet
        slot = fleet.join(self.config, caching=spec.caching, lacks=self.lacks, rtt_s=spec.rtt_s)
        if spec.startup_s > 0:
            fleet.probe()
            self.agenda.add(spec.joins_s + spec.startup_s, lambda: fleet.start(slot))
        else:
            fleet.start(slot)
        if spec.uncached is not None:
            begin, end = (round(share * self.requests) for share in spec.uncached)
            self.agenda.add_after(begin, lambda: fleet.set_caching(slot, False))
            self.agenda.add_after(end, lambda: fleet.set_caching(slot, spec.caching))
        if spec.leaves_s is not None:
            self.agenda.add(spec.leaves_s, lambda: self._leave(slot))
        if spec.crashes_s is not None:
            self.agenda.add(spec.crashes_s, lambda: fleet.crash(slot))
            self.agenda.add(spec.crashes_s + spec.restart_s, lambda: fleet.start(slot))

    def _leave(self, slot: int) -> None:
        self.fleet.leave(slot)
        self.fleet.probe()
