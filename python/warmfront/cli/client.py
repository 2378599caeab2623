"""Asks the admin API of a running router."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click
import msgspec

from warmfront.cli import options
from warmfront.control.files import read_secret
from warmfront.errors import PathNotFoundError, WarmfrontError

TIMEOUT_S = 30.0


class AdminError(WarmfrontError):
    """The router cannot be asked, or refuses."""


def ask(admin: str, path: str, body: bytes | None = None) -> dict[str, Any]:
    """Return the JSON object that the admin API answers; token and authority are those of `options.admin`.

    Args:
        admin: Base URL.
        path: Path with query.
        body: Sent by POST when given.

    Raises:
        AdminError: No answer, or an error; the message is the router's own.
        ConfigError: The token cannot be read.
    """
    url = admin.rstrip("/") + path
    try:
        headers = {"content-type": "application/json"} | _authorization()
        request = urllib.request.Request(url, data=body, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=_context(url)) as response:
            return msgspec.json.decode(response.read(), type=dict[str, Any])
    except urllib.error.HTTPError as error:
        raise AdminError(_message(error)) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        said = getattr(reason, "strerror", None) or reason
        raise AdminError(f"cannot ask {url}: {said}; is the router running, and is --admin right?") from error


def _authorization() -> dict[str, str]:
    path = _given(options.TOKEN_FILE)
    return {} if path is None else {"authorization": f"Bearer {read_secret(str(path))}"}


def _context(url: str) -> ssl.SSLContext | None:
    authority = _given(options.CA_FILE)
    if not url.startswith("https://"):
        return None
    return ssl.create_default_context(cafile=None if authority is None else str(authority))


def _given(place: str) -> Path | None:
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(place)


def _message(error: urllib.error.HTTPError) -> str:
    try:
        told = msgspec.json.decode(error.read(), type=dict[str, dict[str, Any]])["error"]
        if told.get("code") != PathNotFoundError.code:  # the clients' port of a router knows no admin path
            return str(told["message"])
    except (msgspec.DecodeError, KeyError):
        pass
    return f"{error.url} answers {error.code}; is --admin the address of the admin API?"
