"""Servers from a file that is looked at again and again.

Looking means asking for its size and times; it is read when those are others. Polling instead of notices of the kernel:
those do not come for network file systems and for the links that Kubernetes swaps under mounted configuration.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import yaml

from warmfront.config import FileSource, ServerConfig, parse_yaml
from warmfront.control.discovery import DiscoveryError
from warmfront.control.discovery.lists import LIST_BYTES_MAX, servers_of
from warmfront.control.files import version_of


class FileReader:
    """Reads one file when it is another one."""

    def __init__(self, config: FileSource) -> None:
        self.name = f"file {config.path}"
        self.interval_s = config.interval_s
        self._path = Path(config.path)
        self._seen: tuple[int, ...] | None = None
        self._problem: DiscoveryError | None = None

    async def read(self) -> list[ServerConfig] | None:
        """Return the servers in the file; `None` when it is the file of last time.

        Raises:
            DiscoveryError: It cannot be read, or is no list of servers; again each time until it is another file.
        """
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[ServerConfig] | None:
        try:
            status = self._path.stat()
            seen = version_of(status)
            if seen == self._seen:
                if self._problem is not None:
                    raise self._problem
                return None
            if status.st_size > LIST_BYTES_MAX:
                raise DiscoveryError(f"{status.st_size} bytes; at most {LIST_BYTES_MAX} are read")
            content = self._path.read_bytes()
        except OSError as error:
            self._seen = None
            raise DiscoveryError(f"cannot read it: {error.strerror}") from error
        self._seen, self._problem = seen, None
        try:
            return servers_of(_parse(self._path, content))
        except DiscoveryError as error:
            self._problem = error
            raise


def _parse(path: Path, content: bytes) -> object:
    try:
        text = content.decode()
        return msgspec.json.decode(text) if path.suffix == ".json" else parse_yaml(text)
    except (msgspec.DecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise DiscoveryError(f"it cannot be parsed: {' '.join(str(error).split())}") from error
