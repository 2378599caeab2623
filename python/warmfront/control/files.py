"""Files that only this user may read, replaced whole."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Put `content` at `path` so that a reader sees the file before or the file after, and nobody else reads it.

    Raises:
        OSError: The file cannot be written; the one before is unchanged.
    """
    draft = path.with_name(f"{path.name}.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
    draft.replace(path)
