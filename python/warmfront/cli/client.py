"""Asks the admin API of a running router."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

import msgspec

from warmfront.errors import PathNotFoundError, WarmfrontError

TIMEOUT_S = 30.0


class AdminError(WarmfrontError):
    """The router cannot be asked, or refuses."""


def ask(admin: str, path: str, body: bytes | None = None) -> dict[str, Any]:
    """Return the JSON object that the admin API answers.

    Args:
        admin: Base URL.
        path: Path with query.
        body: Sent by POST when given.

    Raises:
        AdminError: No answer, or an error; the message is the router's own.
    """
    url = admin.rstrip("/") + path
    try:
        request = urllib.request.Request(url, data=body, headers={"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return msgspec.json.decode(response.read(), type=dict[str, Any])
    except urllib.error.HTTPError as error:
        raise AdminError(_message(error)) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        said = getattr(reason, "strerror", None) or reason
        raise AdminError(f"cannot ask {url}: {said}; is the router running, and is --admin right?") from error


def _message(error: urllib.error.HTTPError) -> str:
    try:
        told = msgspec.json.decode(error.read(), type=dict[str, dict[str, Any]])["error"]
        if told.get("code") != PathNotFoundError.code:  # the clients' port of a router knows no admin path
            return str(told["message"])
    except (msgspec.DecodeError, KeyError):
        pass
    return f"{error.url} answers {error.code}; is --admin the address of the admin API?"
