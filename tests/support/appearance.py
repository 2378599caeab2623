"""Names for hashes, so that two sides with hashes of their own can be compared."""

from __future__ import annotations

from collections.abc import Hashable


class Appearance:
    """Hashes by the number of their first appearance."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, hash_: Hashable) -> int | None:
        """Return the number of a hash; `None` for none."""
        return None if hash_ is None else self._numbers.setdefault(hash_, len(self._numbers))
