"""HTTP requests as the tests send them: plain, with every byte of the answer."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any, NamedTuple
from urllib.parse import urlsplit

TIMEOUT_S = 120.0


class Answer(NamedTuple):
    """A complete answer."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def connect(url: str, *, timeout_s: float = TIMEOUT_S) -> http.client.HTTPConnection:
    """Open a connection to the server of a URL; the caller closes it."""
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)


def post(url: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
    """Send JSON, or bytes as they are."""
    content = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    return _send("POST", url, content, {"content-type": "application/json", **(headers or {})})


def get(url: str, headers: Mapping[str, str] | None = None) -> Answer:
    return _send("GET", url, None, headers or {})


def _send(method: str, url: str, content: bytes | None, headers: Mapping[str, str]) -> Answer:
    parts = urlsplit(url)
    target = f"{parts.path}?{parts.query}" if parts.query else parts.path
    with closing(connect(url)) as connection:
        connection.request(method, target, content, dict(headers))
        response = connection.getresponse()
        body = response.read()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)


def cached_tokens(answer: Any) -> int:
    """Return the cached prompt tokens that an answer reports, whichever API it belongs to."""
    usage = answer["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"] or 0)
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return int(details["cached_tokens"])


def at(by_url: Mapping[str, int], url: str, default: int) -> int:
    """Look a server up by its URL or by a name that ends in its authority."""
    authority = urlsplit(url).netloc
    return next((value for name, value in by_url.items() if name.rstrip("/").endswith(authority)), default)
