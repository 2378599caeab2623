"""Keeps the set of probes, and tells the core the fleet whenever it is another one.

Changes of substance go out at once; load figures alone at most twice per probe interval, since each server reports its
own at its own moment. The update always carries the whole fleet, so a lost one heals with the next. After a
restart of this process the core still has a fleet: the first update then waits until every server was asked once, since
one that lacks the servers nobody has asked yet would take them away.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable, Collection
from contextlib import aclosing
from pathlib import Path

import aiohttp
import msgspec

from warmfront.clock import Clock
from warmfront.config import Config, ServerConfig
from warmfront.control import verify
from warmfront.control.discovery import Discovery
from warmfront.control.drain import drained, server_of
from warmfront.control.facts import ServerFacts
from warmfront.control.pools import awaited, fleet_update
from warmfront.control.probe import ServerProbe
from warmfront.control.verify import NotLoadedError, OpenTokenizer, Prompt, TokenCheck
from warmfront.types import EngineLoad, FleetUpdate, PoolUpdate, ReplicaUpdate

logger = logging.getLogger(__name__)

GATHER_S = 0.05
"""Pause after looking at what changed, so that the rounds of many servers are taken together: the whole fleet is built
anew each time, 2 ms for 256 servers."""

LOAD_SHARE = 0.5
"""Share of the probe interval that passes at least between two updates in which only load figures changed."""

SERVERS_MAX = 4096
"""Servers beyond this are not probed; said in `degraded`."""


class FleetKeeper:
    """The probes, the token checks, and the update that follows from both."""

    def __init__(
        self,
        config: Config,
        *,
        http: aiohttp.ClientSession,
        clock: Clock,
        send: Callable[[FleetUpdate], Awaitable[None]] | None = None,
        open_tokenizer: OpenTokenizer = verify.load,
        seed: int | None = None,
        before: FleetKeeper | None = None,
    ) -> None:
        """Prepare; `run` starts the probes.

        Args:
            config: The whole configuration.
            http: Session for probes, shared.
            clock: For ages.
            send: Takes each update; awaited, so a slow core slows only this. Needed by `run` alone.
            open_tokenizer: Gives our tokenizer, for the comparison with engines.
            seed: For jitter; `None`: from the system.
            before: The keeper under the configuration before, which has ended. What it found out about servers that
                are configured as they were is believed until they are asked again.
        """
        self.checks: dict[str, TokenCheck] = dict(before.checks) if before else {}
        self.update: FleetUpdate = FleetUpdate(version=before.update.version if before else 0, pools=[])
        self.drained: set[str] = set(before.drained) if before else set()
        """Replicas that take no new requests because an operator said so, by id."""
        self._drained_since = 0
        self._known = {facts.server.url: facts for facts in before.facts} if before else {}
        self._discovery: Discovery | None = None
        self._config = config
        self._http = http
        self._clock = clock
        self._send = send
        self._open_tokenizer = open_tokenizer
        self._rng = random.Random(seed)
        self._probes: dict[str, ServerProbe] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._degraded: list[str] = []
        self._changed = asyncio.Event()
        self._checked: dict[str, bytes] = dict(before._checked) if before else {}
        self._asked: set[str] = set()

    @property
    def facts(self) -> list[ServerFacts]:
        """Facts of all servers, in the order of discovery."""
        return [probe.facts for probe in self._probes.values()]

    async def run(self, discovery: Discovery, *, core_has_fleet: bool = False) -> None:
        """Follow `discovery`, probe, report; until cancelled.

        Args:
            discovery: Tells the servers.
            core_has_fleet: Report nothing before every server was asked once.
        """
        assert self._send is not None, "run needs somebody to report to"
        self._discovery = discovery
        async with asyncio.TaskGroup() as tasks, aclosing(discovery.servers()) as lists:
            tasks.create_task(self._report(self._send, core_has_fleet=core_has_fleet))
            tasks.create_task(self._verify())
            async for servers in lists:
                self._follow(servers, tasks)

    async def look_once(self, discovery: Discovery) -> FleetUpdate:
        """Ask every server once, compare tokens, and return the fleet that follows."""
        self._discovery = discovery
        async with aclosing(discovery.servers()) as lists:
            servers = await anext(lists)
        self._probes = {server.url: self._probe(server) for server in servers}
        await asyncio.gather(*(probe.ask_once() for probe in self._probes.values()))
        self._rebuild()
        await asyncio.gather(*(self._verify_pool(pool) for pool in self.update.pools))
        self._rebuild()
        return self.update

    def _follow(self, servers: list[ServerConfig], tasks: asyncio.TaskGroup) -> None:
        """Start probes of new servers, end those of servers that are gone or configured anew."""
        wanted = {server.url: server for server in servers[:SERVERS_MAX]}
        self._degraded = [f"more than {SERVERS_MAX} servers"] if len(servers) > SERVERS_MAX else []
        for url in [url for url, probe in self._probes.items() if wanted.get(url) != probe.facts.server]:
            self._tasks.pop(url).cancel()
            del self._probes[url]
            self.checks.pop(url, None)
            self._checked.pop(url, None)
            self._asked.discard(url)
            self.drained -= {replica for replica in self.drained if server_of(replica) == url}
        for url, server in wanted.items():
            if url not in self._probes:
                self._probes[url] = self._probe(server)
                self._tasks[url] = tasks.create_task(self._probes[url].run(), name=f"probe {url}")
        self._changed.set()

    def drain(self, replicas: Collection[str], *, is_draining: bool) -> int:
        """Give replicas no new requests from now on, or give them some again.

        Returns:
            The number of the first update that says so.
        """
        drained = self.drained | set(replicas) if is_draining else self.drained - set(replicas)
        if drained != self.drained:
            self.drained, self._drained_since = drained, self.update.version + 1
            self._changed.set()
        return self._drained_since

    def _probe(self, server: ServerConfig) -> ServerProbe:
        known = self._known.pop(server.url, None)
        facts = known if known is not None and known.server == server else None
        if facts is not None and facts.is_asked:
            self._asked.add(server.url)
        return ServerProbe(
            server,
            http=self._http,
            config=self._config.control,
            clock=self._clock,
            rng=random.Random(self._rng.random()),
            on_round=self._take_note,
            facts=facts,
        )

    def _take_note(self, before: ServerFacts, after: ServerFacts) -> None:
        self._asked.add(after.server.url)
        _log_change(before, after)
        self._changed.set()

    async def _report(self, send: Callable[[FleetUpdate], Awaitable[None]], *, core_has_fleet: bool) -> None:
        """Send an update whenever one is due."""
        sent: FleetUpdate | None = None
        sent_s = self._clock.now_s()
        while True:
            await self._changed.wait()
            self._changed.clear()
            if core_has_fleet and sent is None and not self._asked.issuperset(self._probes):
                continue
            self._rebuild()
            age_s = self._clock.now_s() - sent_s
            is_urgent = sent is None or _without_load(self.update) != _without_load(sent)
            if is_urgent or age_s >= LOAD_SHARE * self._config.control.probe_interval_s:
                sent, sent_s = self.update, self._clock.now_s()
                await send(sent)
            await asyncio.sleep(GATHER_S)

    def _rebuild(self) -> None:
        sources = self._discovery.states() if self._discovery is not None else []
        down = [f"{source.name}: {source.error}" for source in sources if source.error is not None]
        update = fleet_update(
            self.facts,
            self._config.fleet,
            version=self.update.version + 1,
            now_s=self._clock.now_s(),
            is_tokenizer=is_tokenizer,
            checks=self.checks,
            degraded=[*self._degraded, *down],
        )
        is_partial = not self._asked.issuperset(self._probes)
        update = msgspec.structs.replace(update, sources=sources, is_partial=is_partial)
        self.update = drained(awaited(self.update, update), self.drained)

    async def _verify(self) -> None:
        """Compare tokens with each engine process once, again when tokenizer or template are others."""
        while True:
            for pool in self.update.pools:
                await self._verify_pool(pool)
            await asyncio.sleep(self._config.control.probe_interval_s)

    async def _verify_pool(self, pool: PoolUpdate) -> None:
        due = {replica.url: replica for replica in pool.replicas if replica.ready and self._is_unchecked(pool, replica)}
        if pool.tokenizer is None or not due:
            return
        try:
            prompt = await self._open_tokenizer(pool.tokenizer, pool.template)
            checks = await asyncio.gather(*(self._compare(pool, replica, prompt) for replica in due.values()))
        except NotLoadedError:
            return  # the next round asks again
        except Exception as error:  # the edge to the tokenizer: the pool works without this comparison
            failed = TokenCheck("unverified", f"{pool.tokenizer} cannot be loaded: {error}")
            checks = [failed] * len(due)
        for replica, check in zip(due.values(), checks, strict=True):
            self._take_check(pool, replica, check)

    async def _compare(self, pool: PoolUpdate, replica: ReplicaUpdate, prompt: Prompt) -> TokenCheck:
        model = next(name for name, adapter in pool.models.items() if adapter is None and name not in replica.lacks)
        return await verify.compare(
            prompt,
            http=self._http,
            url=replica.url,
            headers=replica.headers,
            model=model,
            tls=self._probes[replica.url].access.tls(),
        )

    def _take_check(self, pool: PoolUpdate, replica: ReplicaUpdate, check: TokenCheck) -> None:
        if not check.is_passing:
            self._checked[replica.url] = _check_key(pool, replica)
        if check == self.checks.get(replica.url):
            return
        self.checks[replica.url] = check
        self._changed.set()
        level = logging.INFO if check.state == "verified" else logging.WARNING
        logger.log(level, "tokens %s: %s", check.state, check.reason, extra={"replica": replica.url})

    def _is_unchecked(self, pool: PoolUpdate, replica: ReplicaUpdate) -> bool:
        return self._checked.get(replica.url) != _check_key(pool, replica)


def _check_key(pool: PoolUpdate, replica: ReplicaUpdate) -> bytes:
    """Everything a comparison depends on."""
    return msgspec.json.encode([pool.tokenizer, pool.template, replica.incarnation])


def is_tokenizer(path: str) -> bool:
    """Whether a path names a tokenizer file, or a directory with one, that can be read here."""
    place = Path(path)
    file = place / "tokenizer.json" if place.is_dir() else place
    return place.is_absolute() and file.name == "tokenizer.json" and os.access(file, os.R_OK)


def _without_load(update: FleetUpdate) -> list[PoolUpdate | str | bool]:
    """What makes an update urgent: everything but load figures."""
    pools = [
        msgspec.structs.replace(
            pool, replicas=[msgspec.structs.replace(replica, load=EngineLoad()) for replica in pool.replicas]
        )
        for pool in update.pools
    ]
    return [*pools, *update.degraded, update.is_partial]


def _log_change(before: ServerFacts, after: ServerFacts) -> None:
    extra = {"replica": after.server.url}
    if after.ready and not before.ready:
        logger.info("ready: %s %s", after.engine, after.version or "of unknown version", extra=extra)
    elif (before.ready and not after.ready) or (not after.ready and after.reason != before.reason):
        logger.warning("not ready: %s", after.reason, extra=extra)
    if before.incarnation and after.incarnation != before.incarnation:
        logger.info("engine was restarted", extra=extra)
    if after.sources_note and after.sources_note != before.sources_note:
        logger.warning("%s", after.sources_note, extra=extra)
