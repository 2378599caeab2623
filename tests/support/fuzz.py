"""Bytes and text near what is usual, and how many of them are tried.

A short run from a fixed seed belongs to the tests; `FUZZ_CASES` makes it a long one from a new seed (`make fuzz`).
"""

from __future__ import annotations

import os
from typing import NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

LONG = os.environ.get("FUZZ_CASES")
SETTINGS = settings(
    max_examples=int(LONG or 100),
    deadline=None,
    derandomize=LONG is None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Edit(NamedTuple):
    """Replace `removed` bytes at a place, given as a share of the length, by others, several times."""

    place: float
    removed: int
    inserted: bytes
    times: int

    def of(self, content: bytes) -> bytes:
        at = int(self.place * len(content))
        return content[:at] + self.inserted * self.times + content[at + self.removed :]


EDITS = st.lists(
    st.builds(Edit, st.floats(0, 1), st.integers(0, 40), st.binary(max_size=8), st.sampled_from([1, 1, 1, 2, 600])),
    max_size=5,
)


def near(*seeds: bytes) -> st.SearchStrategy[bytes]:
    """Make one of the seeds after some edits, often after none."""

    def changed(seed: bytes, edits: list[Edit]) -> bytes:
        for edit in edits:
            seed = edit.of(seed)
        return seed

    return st.builds(changed, st.sampled_from(seeds), EDITS)


def text_near(*seeds: str) -> st.SearchStrategy[str]:
    """Make the same of text; what is no UTF-8 any more is replaced."""
    return near(*(seed.encode() for seed in seeds)).map(lambda content: content.decode(errors="replace"))
