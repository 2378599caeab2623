"""How the admin API answers."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web


def as_json(content: Any, status: int = 200) -> web.Response:
    """Return `content`, structs of msgspec among it, as JSON."""
    return web.Response(status=status, body=msgspec.json.encode(content), content_type="application/json")
