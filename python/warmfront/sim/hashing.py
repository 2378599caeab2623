"""Names for blocks: a chained 64-bit hash of tokens and of what else separates caches.

Engine hashes are opaque to a router, so vLLM's own rule is not copied; its structure is: a block's hash covers its
parent and, in every block, the adapter; the cache salt enters with the first block only.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b


def chain_hashes(
    tokens: Sequence[int],
    *,
    block_size: int,
    seed: bytes = b"",
    adapter: str | None = None,
    cache_salt: str | None = None,
) -> list[int]:
    """Hash every full block of `tokens`.

    Args:
        tokens: Token ids below 2**32.
        block_size: Tokens a block.
        seed: Distinguishes processes, as vLLM's hash of nothing does; at most 64 bytes.
        adapter: Name of the LoRA adapter.
        cache_salt: Salt of the request.

    Returns:
        One unsigned 64-bit number for each full block.
    """
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    data = memoryview(packed).cast("B")
    width = block_size * packed.itemsize
    common = b"" if adapter is None else b"adapter\0" + adapter.encode()
    parent = blake2b(b"" if cache_salt is None else b"salt\0" + cache_salt.encode(), digest_size=8, key=seed).digest()
    hashes: list[int] = []
    for start in range(0, len(data) - width + 1, width):
        digest = blake2b(parent, digest_size=8)
        digest.update(data[start : start + width])
        digest.update(common)
        parent = digest.digest()
        hashes.append(int.from_bytes(parent, "big"))
    return hashes
