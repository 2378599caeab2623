"""What the admin API can change: the configuration, and who gets new requests.

Answers say what is true when they are sent: a replica that is said to drain is not chosen any more, a configuration
that is said to be in force decides the next request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from warmfront.config import Config, ConfigSources, reload_request
from warmfront.control import drain
from warmfront.control.answers import as_json
from warmfront.control.files import write_private
from warmfront.control.fleet import FleetKeeper
from warmfront.control.generations import Generations
from warmfront.control.link import Link
from warmfront.control.reload import Change, change
from warmfront.control.servable import require_servable
from warmfront.errors import ClientError, ConfigError, CoreError, InvalidRequestError
from warmfront.ports.preflight import within_descriptors

logger = logging.getLogger(__name__)


class Changes:
    """Handlers of `POST /admin/reload`, `/admin/drain` and their like; reloads on a signal, too."""

    def __init__(
        self,
        generations: Generations,
        *,
        link: Link,
        sources: ConfigSources | None,
        config_path: Path | None,
        on_change: Callable[[Config, FleetKeeper], None],
    ) -> None:
        """Prepare.

        Args:
            generations: The configuration in force.
            link: To the core.
            sources: Where the configuration is read from again; `None`: it was handed over as an object.
            config_path: File from which this process starts again; it is kept up to date.
            on_change: Called after a change.
        """
        self._generations = generations
        self._link = link
        self._sources = sources
        self._config_path = config_path
        self._on_change = on_change
        self._reloading = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """Return what is added to the admin API."""
        replica = r"/admin/replicas/{replica:.+}"
        return [
            web.post("/admin/reload", self._post_reload),
            web.post("/admin/drain", self._post_drain),
            web.post("/admin/undrain", self._post_undrain),
            web.post(f"{replica}/drain", self._post_replica_drain),
            web.post(f"{replica}/undrain", self._post_replica_undrain),
        ]

    async def follow_signals(self) -> None:
        """Reload each time the data process passes on that somebody asked for it. Never returns."""
        while True:
            await self._link.reloads.wait()
            self._link.reloads.clear()
            try:
                await self.reload()
            except ConfigError:
                continue  # said in the log; the configuration before stays in force
            except ClientError as error:
                logger.error("the configuration is not reloaded: %s", error)

    async def reload(self) -> Change:
        """Read the configuration again and put it in force.

        Raises:
            ConfigError: It is wrong, and the one before stays in force; logged here.
        """
        async with self._reloading:
            try:
                changed = await self._apply()
            except ConfigError as error:
                logger.error("the configuration is not reloaded, the one before stays in force: %s", error)
                await self._ask("reload_refused")
                raise
        logger.info("configuration reloaded; changed: %s", ", ".join(changed.applied) or "nothing")
        if changed.restart_needed:
            logger.warning("these values need a restart of the router: %s", ", ".join(changed.restart_needed))
        return changed

    async def _apply(self) -> Change:
        changed = await asyncio.to_thread(self._read)
        if changed.applied:
            await self._ask("reload", reload_request(changed.effective))
            self._keep(changed.effective)
            await self._generations.replace(changed.effective)
            self._on_change(self._generations.config, self._generations.fleet)
        return changed

    def _keep(self, config: Config) -> None:
        """Let a control process that has to start again start with what is in force."""
        if self._config_path is None:
            return
        try:
            write_private(self._config_path, msgspec.json.encode(config))
        except OSError as error:
            logger.error("a control process that is restarted will have the configuration before: %s", error.strerror)

    def _read(self) -> Change:
        if self._sources is None:
            raise ConfigError("this router was not started from a file or a command line: there is nothing to read")
        config, _ = self._sources.load()
        require_servable(config)
        return change(self._generations.config, within_descriptors(config))

    async def _ask(self, question: str, payload: bytes = b"") -> dict[str, Any]:
        timeout_s = self._generations.config.control.answer_timeout_s
        reply = await self._link.ask(question, payload=payload, timeout_s=timeout_s)
        if reply.status != 200:
            raise CoreError(f"the data process answers {reply.status} to {question!r}: {reply.body.decode()}")
        return msgspec.json.decode(reply.body, type=dict[str, Any])

    # -- handlers

    async def _post_reload(self, request: web.Request) -> web.Response:
        try:
            changed = await self.reload()
        except ConfigError as error:
            raise InvalidRequestError(str(error)) from error
        return as_json({"applied": changed.applied, "restart_needed": changed.restart_needed})

    async def _post_drain(self, request: web.Request) -> web.Response:
        return as_json(await self._ask("drain"))

    async def _post_undrain(self, request: web.Request) -> web.Response:
        return as_json(await self._ask("undrain"))

    async def _post_replica_drain(self, request: web.Request) -> web.Response:
        return await self._drain_replica(request, is_draining=True)

    async def _post_replica_undrain(self, request: web.Request) -> web.Response:
        return await self._drain_replica(request, is_draining=False)

    async def _drain_replica(self, request: web.Request, *, is_draining: bool) -> web.Response:
        """Mark replicas, wait until the core has taken it, and say what still runs on them."""
        fleet = self._generations.fleet
        name = request.match_info["replica"]
        replicas = drain.named(fleet.update, name)
        if not replicas:
            raise InvalidRequestError(f"there is no replica {name}; `GET /admin/fleet` lists them")
        version = fleet.drain(replicas, is_draining=is_draining)
        await self._link.state_since(version, timeout_s=self._generations.config.control.answer_timeout_s)
        logger.info("%s: %s", "draining" if is_draining else "in service again", ", ".join(replicas))
        in_flight = _in_flight(await self._ask("fleet"))
        rows = [{"id": each, "draining": is_draining, "in_flight": in_flight.get(each)} for each in replicas]
        return as_json({"replicas": rows})


def _in_flight(router: dict[str, Any]) -> dict[str, int]:
    """Requests that run on each replica, by id, as the router answers."""
    rows = [row for pool in router.get("pools", []) for row in pool.get("replicas", [])]
    return {row["id"]: row["in_flight"] for row in rows}
