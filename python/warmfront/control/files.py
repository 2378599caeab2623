"""Files that only this user may read: replaced whole, and read as one secret. Imports no server: the CLI uses it."""

from __future__ import annotations

import os
from pathlib import Path

from warmfront.errors import ConfigError

SECRET_BYTES_MAX = 4096
"""A longer file is no file with a token."""


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


def read_secret(path: str) -> str:
    """Return a file's content without the white space around it.

    Raises:
        ConfigError: It cannot be read, is empty, too long, or no header could carry it.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    secret = content.strip()
    if not secret or len(content) > SECRET_BYTES_MAX:
        raise ConfigError(f"{path} is {'too long' if secret else 'empty'}: expected one secret")
    if not all(0x20 <= byte < 0x7F for byte in secret):
        raise ConfigError(f"{path} holds more than one line of plain characters")
    return secret.decode("ascii")
