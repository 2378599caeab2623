"""Where servers come from.

A `Source` is one place that is asked again and again; `Discovery` is what the fleet follows: complete lists, never
differences, so that a change that was missed heals with the next list. A source that fails keeps its last list.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from warmfront.config import ServerConfig
from warmfront.errors import WarmfrontError
from warmfront.types import SourceState


class DiscoveryError(WarmfrontError):
    """A source gives no list now; the message says why, without secrets."""


class Source(Protocol):
    """One place that knows servers."""

    name: str
    """As shown in metrics and in `degraded`; the same for the same place, without secrets."""
    interval_s: float
    """Pause between two questions."""

    async def read(self) -> list[ServerConfig] | None:
        """Return all servers that exist there; `None`: the same as last time.

        Raises:
            DiscoveryError: The source cannot be asked, or what it says cannot be used.
        """


class Discovery(Protocol):
    """All sources together."""

    def servers(self) -> AsyncGenerator[list[ServerConfig]]:
        """Yield all servers that exist, again whenever that changes.

        Ends when nothing can change any more. The first list comes once every source was asked.
        """

    def states(self) -> list[SourceState]:
        """Return how each source does."""
