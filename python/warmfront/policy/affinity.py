"""Preference for one replica by key: rendezvous hashing.

No table and no state, so every router gives the same answer, and a replica that joins or leaves moves only its own
share of the keys. What is easy to get wrong: hash the replica's id and never its slot, since slots are given again.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from warmfront.types import Slot

_MASK = (1 << 64) - 1


def stable_hash(text: str) -> int:
    """Return 64 bits that depend on `text` alone, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def mix(first: int, second: int) -> int:
    """Combine two 64-bit numbers into one where every input bit matters (the finaliser of splitmix64)."""
    value = (first ^ (second * 0x9E3779B97F4A7C15)) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def ranked(key: int, slots: Iterable[Slot], hashes: list[int]) -> list[Slot]:
    """Order slots by preference of `key`, best first."""
    return sorted(slots, key=lambda slot: mix(key, hashes[slot]), reverse=True)
