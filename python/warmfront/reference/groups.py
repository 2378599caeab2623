"""Cache groups of one replica (hybrid models), plainly.

The first group of full attention is the main one and carries the chain of blocks. Every other group is a multiset of
engine hashes that never teaches tokens, since its stores may be sparse.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from warmfront.reference.events import Stored

GROUPS_MAX = 64
"""Cache groups of a replica that are remembered."""


class Place(Enum):
    """Where blocks belong, unless in a row of `Groups.others`."""

    MAIN = "main"
    NOWHERE = "nowhere"


@dataclass
class Group:
    """A group other than the main one."""

    number: int
    need_tokens: int | None
    """Tokens before the end of a prefix that the group must have; `None`: all."""
    block_size: int
    members: Counter[int] = field(default_factory=Counter)
    """Physical copies by engine hash."""


@dataclass
class Groups:
    """All groups of a replica."""

    main: int | None = None
    others: list[Group] = field(default_factory=list)

    def place(self, group: int | None) -> int | Literal[Place.MAIN, Place.NOWHERE]:
        """Where a removal or an event of another tier belongs."""
        untaught = self.main is None and not self.others
        if group is None or untaught or group == self.main:
            return Place.MAIN
        return next((row for row, other in enumerate(self.others) if other.number == group), Place.NOWHERE)

    def learn(self, stored: Stored) -> int | Literal[Place.MAIN, Place.NOWHERE]:
        """Where a store on the device belongs; learns the roles of groups."""
        number = stored.group if stored.group is not None else (self.main or 0)
        if number == self.main:
            return Place.MAIN
        for row, other in enumerate(self.others):
            if other.number == number:
                other.block_size = stored.block_size
                return row
        kind = stored.kind or "unknown"
        if self.main is None and kind in ("full", "unknown"):
            self.main = number
            return Place.MAIN
        if len(self.others) == GROUPS_MAX:
            return Place.NOWHERE
        self.others.append(Group(number, _need_tokens(kind, stored.window), stored.block_size))
        return len(self.others) - 1

    def remove(self, row: int, name: int) -> bool:
        """Remove one copy. False when there is none."""
        members = self.others[row].members
        if not members[name]:
            return False
        members[name] -= 1
        return True

    def clear(self) -> None:
        """Empty every group but keep what is known of their roles."""
        for group in self.others:
            group.members.clear()


def _need_tokens(kind: str, window: int | None) -> int | None:
    if kind == "full":
        return None
    if kind == "mamba":
        return 1
    # A position sees itself and the `window - 1` tokens before it.
    return max(window - 1, 0) if kind == "window" and window is not None else 0
