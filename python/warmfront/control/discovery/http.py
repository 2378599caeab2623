"""Servers from a URL that answers a JSON list."""

from __future__ import annotations

from http import HTTPStatus

import aiohttp
import msgspec

from warmfront.config import HttpSource, ServerConfig
from warmfront.control.discovery import DiscoveryError
from warmfront.control.discovery.lists import LIST_BYTES_MAX, servers_of
from warmfront.control.reading import read_body


class HttpReader:
    """Asks one URL, and says with its `etag` what it knows already."""

    def __init__(self, config: HttpSource, http: aiohttp.ClientSession) -> None:
        self.name = f"http {config.url.partition('?')[0]}"  # a query may hold a key
        self.interval_s = config.interval_s
        self._config = config
        self._http = http
        self._etag: str | None = None

    async def read(self) -> list[ServerConfig] | None:
        """Return the servers; `None` when the answer is 304.

        Raises:
            DiscoveryError: No answer, another status than 200, or no list of servers.
        """
        config = self._config
        headers = config.headers | ({"if-none-match": self._etag} if self._etag else {})
        timeout = aiohttp.ClientTimeout(total=config.timeout_s)
        try:
            async with self._http.get(config.url, headers=headers, timeout=timeout, allow_redirects=False) as response:
                if response.status == HTTPStatus.NOT_MODIFIED and self._etag:
                    return None
                if response.status != HTTPStatus.OK:
                    raise DiscoveryError(f"it answers {response.status}")
                servers = servers_of(msgspec.json.decode(await read_body(response, bytes_max=LIST_BYTES_MAX)))
                _require_no_secrets_of_ours(servers)
                self._etag = response.headers.get("etag")
        except TimeoutError as error:
            raise DiscoveryError(f"no answer within {config.timeout_s:g} s") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise DiscoveryError(f"its answer is not JSON: {error}") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise DiscoveryError(_reason(error)) from error
        return servers


def _require_no_secrets_of_ours(servers: list[ServerConfig]) -> None:
    """Refuse a list that would have files or variables of this machine sent to an address of its own choice."""
    for server in servers:
        if server.headers_from_file or server.headers_from_env:
            raise DiscoveryError(f"{server.url}: a list from elsewhere names no files or variables of this machine")


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.os_error.strerror}"
    return str(error) or type(error).__name__
