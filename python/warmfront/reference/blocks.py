"""Tokens → blocks → sequence hashes, plainly.

A sequence hash names a block and everything before it. The hash function is a parameter: the core uses seeded XXH3-64,
the default here is BLAKE2b, and tests compare the two by what is equal to what and never by value. What one would get
wrong: a request and an event must end at the same hash for the same content, so both reduce their extra keys to
`Extras`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

HashFunction = Callable[[bytes], int]
"""Bytes → 64-bit number."""

ROOT = 0
"""What stands before the first block."""


class Extras(NamedTuple):
    """What separates blocks with equal tokens.

    Attributes:
        adapter: Served adapter name, part of every block.
        texts: Media identifiers in order and then, on the first block, the salt. They share one class because engines
            before vLLM 0.19 write both as bare strings.
        others: Digests of prompt embeddings and numbers of unknown meaning.
    """

    adapter: str | None = None
    texts: tuple[str, ...] = ()
    others: tuple[bytes | int, ...] = ()


NO_EXTRAS = Extras()


def blake_64(data: bytes) -> int:
    """The default hash function: the first eight bytes of BLAKE2b."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


def next_hash(parent: int, tokens: Sequence[int], extras: Extras, hash_function: HashFunction = blake_64) -> int:
    """Hash of the block `tokens` behind `parent`."""
    return hash_function(repr((parent, tuple(tokens), tuple(extras))).encode())


def full_blocks(tokens: Sequence[int], block_size: int) -> Iterator[Sequence[int]]:
    """Consecutive runs of `block_size` tokens; what is left over is no block."""
    for start in range(0, len(tokens) - block_size + 1, block_size):
        yield tokens[start : start + block_size]


def chain(
    tokens: Sequence[int],
    block_size: int,
    *,
    adapter: str | None = None,
    salt: str | None = None,
    hash_function: HashFunction = blake_64,
) -> list[int]:
    """Sequence hashes of all full blocks of a prompt.

    Args:
        tokens: Token ids; 1,000 of them at block size 16 are 62 blocks.
        block_size: Tokens in a block.
        adapter: Served adapter name.
        salt: The request's `cache_salt`; it separates the first block, and through the chain all others.
        hash_function: See the module.

    Returns:
        One number a block.
    """
    hashes: list[int] = []
    parent = ROOT
    for block, run in enumerate(full_blocks(tokens, block_size)):
        texts = (salt,) if block == 0 and salt is not None else ()
        parent = next_hash(parent, run, Extras(adapter, texts), hash_function)
        hashes.append(parent)
    return hashes
