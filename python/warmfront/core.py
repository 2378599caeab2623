"""The only importer of the Rust module.

Everything else takes these names from here, so that the boundary is one line long and tests can see what crosses it.
"""

from __future__ import annotations

from warmfront._core import (
    Bounds,
    Index,
    Port,
    SimEngine,
    SimFleet,
    Tokenizer,
    decode_batch,
    erfc,
    error_faces,
    hash_tokens,
    read_commands,
    sample_events,
    version,
)

__all__ = [
    "Bounds",
    "Index",
    "Port",
    "SimEngine",
    "SimFleet",
    "Tokenizer",
    "decode_batch",
    "erfc",
    "error_faces",
    "hash_tokens",
    "read_commands",
    "sample_events",
    "version",
]
