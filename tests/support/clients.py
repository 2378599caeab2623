"""Clients that go on asking while something happens to the server, and remember each failure."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any
from urllib.parse import urlsplit

from support.service import wait_for

TIMEOUT_S = 20.0


class Clients:
    """Two threads: one with a new connection for each request, one that keeps its connection as long as it may."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        parts = urlsplit(url)
        self._address, self._path, self._body = parts.netloc, parts.path, json.dumps(body)
        self._stopped = threading.Event()
        self._counts = [0, 0]
        self.failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(place, keeps), daemon=True)
            for place, keeps in enumerate((False, True))
        ]
        for thread in self._threads:
            thread.start()

    def wait_for(self, answers: int) -> None:
        """Block until each thread has had so many more answers."""
        wanted = [count + answers for count in self._counts]
        wait_for(
            lambda: bool(self.failures) or all(have >= want for have, want in zip(self._counts, wanted, strict=True)),
            f"{answers} answers",
            timeout_s=TIMEOUT_S,
        )
        assert self.failures == [], self.failures

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)

    def _ask(self, place: int, keeps: bool) -> None:
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        while not self._stopped.is_set():
            try:
                connection.request("POST", self._path, self._body, {"content-type": "application/json"})
                answer = connection.getresponse()
                body = answer.read()
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(repr(error))
                return
            if answer.status != http.client.OK:
                self.failures.append(f"status {answer.status}: {answer.msg} {body[:200]!r}")
                return
            self._counts[place] += 1
            if not keeps:
                connection.close()
        connection.close()
