"""Entry of the control process: `python -m warmfront.control --config FILE --socket PATH [--sources FILE]`.

The data process starts it. The configuration comes as a JSON file that only this user may read, since it can hold
keys; after a reload the file holds the new one, so that this process starts again with what is in force.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import click
import msgspec

from warmfront.config import Config, ConfigSources
from warmfront.control.process import run
from warmfront.errors import WarmfrontError
from warmfront.obs import logs

logger = logging.getLogger("warmfront.control")


@click.command()
@click.option("--config", "config_path", type=click.Path(path_type=Path), required=True, help="JSON file.")
@click.option("--socket", type=click.Path(path_type=Path), required=True, help="Unix socket of the data process.")
@click.option("--sources", "sources_path", type=click.Path(path_type=Path), help="Where it was read from, JSON.")
def main(config_path: Path, socket: Path, sources_path: Path | None) -> None:
    """Run the control process."""
    sources = None
    try:
        config = msgspec.json.decode(config_path.read_bytes(), type=Config)
        if sources_path is not None:
            sources = msgspec.json.decode(sources_path.read_bytes(), type=ConfigSources)
    except (OSError, msgspec.DecodeError) as error:
        raise click.ClickException(f"cannot read {config_path}: {error}") from error
    logs.configure(config.log.level)
    try:
        asyncio.run(run(config, socket, config_path=config_path, sources=sources))
    except WarmfrontError as error:
        logger.error("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
