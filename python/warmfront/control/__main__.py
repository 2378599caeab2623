"""Entry of the control process: `python -m warmfront.control --config FILE --socket PATH`.

The data process starts it. The configuration comes as a JSON file that only this user may read, since it can hold
keys.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import click
import msgspec

from warmfront.config import Config
from warmfront.control.process import run
from warmfront.errors import WarmfrontError
from warmfront.obs import logs

logger = logging.getLogger("warmfront.control")


@click.command()
@click.option("--config", "config_path", type=click.Path(path_type=Path), required=True, help="JSON file.")
@click.option("--socket", type=click.Path(path_type=Path), required=True, help="Unix socket of the data process.")
def main(config_path: Path, socket: Path) -> None:
    """Run the control process."""
    try:
        config = msgspec.json.decode(config_path.read_bytes(), type=Config)
    except (OSError, msgspec.DecodeError) as error:
        raise click.ClickException(f"cannot read {config_path}: {error}") from error
    logs.configure(config.log.level)
    try:
        asyncio.run(run(config, socket))
    except WarmfrontError as error:
        logger.error("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
