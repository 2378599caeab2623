"""Log lines: one JSON object each, to stderr, with the keys that the core writes too.

`time level logger message`, and where they apply `request_id` and `replica` (passed as `extra`). Prompt text, keys and
bodies are never logged; should a key reach a record all the same (a library's message, a traceback), it is masked here.
A traceback goes into the key `error`, so that a line stays a line.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from warmfront.obs.redaction import redacted

LEVELS = {"error": logging.ERROR, "warn": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
"""By the names of the configuration."""

_NAMES = {logging.CRITICAL: "error"}
_EXTRAS = ("request_id", "replica")


class JsonFormatter(logging.Formatter):
    """Turns a record into one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        line: dict[str, object] = {
            "time": _time(record.created),
            "level": _NAMES.get(record.levelno, record.levelname.lower()),
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        line |= {key: str(getattr(record, key)) for key in _EXTRAS if hasattr(record, key)}
        if record.exc_info:
            line["error"] = redacted(self.formatException(record.exc_info))
        return msgspec.json.encode(line, enc_hook=str).decode()


def configure(level: str, stream: TextIO | None = None) -> None:
    """Send all records of `level` and above to `stream` (default: stderr), replacing earlier handlers.

    Args:
        level: A key of `LEVELS`.
        stream: Where lines go.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=LEVELS[level], handlers=[handler], force=True)
    # One line per admin request is the caller's log, not ours.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def _time(created_s: float) -> str:
    """RFC 3339 in UTC with microseconds, as the core writes it."""
    return datetime.fromtimestamp(created_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
