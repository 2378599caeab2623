"""Files that only this user may read: replaced whole, and read as one secret. Imports no server: the CLI uses it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from warmfront.errors import ConfigError

Version = tuple[int, int, int, int, int]

SECRET_BYTES_MAX = 4096
"""A longer file is no file with a token."""


def write_private(path: Path, content: bytes) -> None:
    """Put `content` at `path` so that a reader sees the file before or the file after, and nobody else reads it.

    It is on disk when this returns. A file that is there keeps its mode: whoever was let in by it stays let in.

    Raises:
        OSError: The file cannot be written; the one before is unchanged.
    """
    target = path.resolve()
    mode = target.stat().st_mode & 0o777 if target.exists() else None
    descriptor, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(draft, mode)
        os.replace(draft, target)
    except OSError:
        os.unlink(draft)
        raise


def version_of(status: os.stat_result) -> Version:
    """Return what tells one version of a file from another, its content unread."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


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
