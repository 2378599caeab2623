"""`warmfront check`: is this configuration right, and do its servers give what exact routing needs?"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import click

from warmfront.cli.options import Options, configuration
from warmfront.config import Config, SnapshotConfig
from warmfront.control.servable import require_servable
from warmfront.types import FleetUpdate


@click.command(name="check")
@configuration
def command(**options: Any) -> None:
    """Validate a configuration and look at its servers once.

    Says in words what is missing. Exit code 0: every server is ready and nothing contradicts; 1: something does not
    work; 2: the configuration is wrong.
    """
    config, _ = Options(**options).load()
    require_servable(config)
    logging.getLogger("warmfront").addHandler(logging.NullHandler())  # what is logged is printed below, in order
    update = asyncio.run(_look(config))
    trouble = snapshot_trouble(config.snapshot)
    click.echo("\n".join(lines(update) + ([f"problem: {trouble}"] if trouble else [])))
    is_ready = all(replica.ready for pool in update.pools for replica in pool.replicas)
    is_working = not update.degraded and is_ready and trouble is None
    raise SystemExit(0 if is_working else 1)


async def _look(config: Config) -> FleetUpdate:
    import aiohttp  # slow to import, and only this command of the light ones needs it

    from warmfront.clock import MonotonicClock
    from warmfront.control.discovery.build import discovery_of
    from warmfront.control.fleet import FleetKeeper

    async with aiohttp.ClientSession() as http:
        clock = MonotonicClock()
        keeper = FleetKeeper(config, http=http, clock=clock)
        return await keeper.look_once(discovery_of(config.fleet, http=http, clock=clock))


def snapshot_trouble(config: SnapshotConfig) -> str | None:
    """Say why snapshots cannot be written; `None`: they can, or none are wanted."""
    if config.path is None:
        return None
    path = Path(config.path)
    if path.is_dir():
        return f"snapshot.path: {path} is a folder; give the file's own name"
    if not path.parent.is_dir():
        return f"snapshot.path: the folder {path.parent} does not exist"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"snapshot.path: the folder {path.parent} cannot be written to"
    return None


def lines(update: FleetUpdate) -> list[str]:
    """Return the findings, one line each."""
    said = []
    for pool in update.pools:
        said.append(f"pool {pool.name}: {', '.join(pool.models)}; tokenizer {pool.tokenizer or 'unknown'}")
        for replica in pool.replicas:
            source = f"events from {replica.events.endpoint}" if replica.events else "no events"
            state = "ready" if replica.ready else "not ready"
            said.append(f"  {replica.id}: {state}, {replica.engine}, block size {replica.block_size or '?'}, {source}")
            said += [f"    - {note}" for note in replica.notes]
    return said + [f"problem: {problem}" for problem in update.degraded]
