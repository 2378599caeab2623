"""Where servers come from. A source yields the complete list each time it changes; the first list comes at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from warmfront.config import ServerConfig


class Discovery(Protocol):
    """One source of servers."""

    name: str
    """As shown when the source is down."""

    def servers(self) -> AsyncIterator[list[ServerConfig]]:
        """Yield all servers that exist, again whenever that changes. Ends when nothing can change any more."""
