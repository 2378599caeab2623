"""Several sources as one: what is kept, what is told, what survives a restart."""

from __future__ import annotations

import asyncio
import logging
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest
from conftest import until
from warmfront.clock import ManualClock
from warmfront.config import ServerConfig
from warmfront.control.discovery import DiscoveryError
from warmfront.control.discovery.combined import Combined

STATIC, A, B = (ServerConfig(url=f"http://10.0.0.{host}:8000") for host in (9, 1, 2))


class Scripted:
    """A source that says what the test sets."""

    interval_s = 0.001

    def __init__(self, name: str, *says: ServerConfig) -> None:
        self.name = name
        self.says: list[ServerConfig] | Exception | None = list(says)
        self.reads = 0

    async def read(self) -> list[ServerConfig] | None:
        self.reads += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


class Followed:
    """A discovery at work, and the lists it gave."""

    def __init__(self, discovery: Combined) -> None:
        self.discovery = discovery
        self.lists: list[list[ServerConfig]] = []

    async def follow(self) -> None:
        async with aclosing(self.discovery.servers()) as lists:
            async for servers in lists:
                self.lists.append(servers)

    async def expect(self, *servers: ServerConfig) -> None:
        await until(lambda: self.lists and self.lists[-1] == list(servers), f"the list {servers}")


Follow = Callable[..., Followed]


@pytest.fixture
async def follow() -> AsyncIterator[Follow]:
    tasks: list[asyncio.Task[None]] = []

    def start(*sources: Scripted, memory: Path | None = None, clock: ManualClock | None = None) -> Followed:
        followed = Followed(Combined([STATIC], sources, clock=clock or ManualClock(), memory=memory))
        tasks.append(asyncio.create_task(followed.follow()))
        return followed

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def rounds(*sources: Scripted) -> None:
    """Wait until each source was asked twice more."""
    wanted = [source.reads + 2 for source in sources]
    await until(lambda: all(source.reads >= reads for source, reads in zip(sources, wanted, strict=True)))


async def test_sources_and_the_configuration_make_one_list_in_their_order(follow: Follow) -> None:
    one, two = Scripted("one", A), Scripted("two", ServerConfig(url=A.url, engine="vllm"), B)
    followed = follow(one, two)
    await followed.expect(STATIC, A, B)
    assert followed.lists == [[STATIC, A, B]], "the first list has every source in it; a second name adds nothing"


@pytest.mark.bug(127, 129)
async def test_what_a_list_does_not_name_any_more_is_gone(follow: Follow) -> None:
    source = Scripted("one", A, B)
    followed = follow(source)
    await followed.expect(STATIC, A, B)
    source.says = [B]
    await followed.expect(STATIC, B)
    source.says = []
    await followed.expect(STATIC)


async def test_a_source_that_fails_keeps_its_last_list_and_says_so_once(
    follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    source, clock = Scripted("one", A), ManualClock(100.0)
    followed = follow(source, clock=clock)
    await followed.expect(STATIC, A)
    source.says = DiscoveryError("no answer")
    await rounds(source)
    clock.advance(7.0)
    await rounds(source)
    assert followed.lists == [[STATIC, A]]
    (state,) = followed.discovery.states()
    assert (state.name, state.servers, state.age_s, state.error) == ("one", 1, 7.0, "no answer")
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["one: no answer; its last list of 1 servers is kept"]
    source.says = None
    await until(lambda: followed.discovery.states()[0].error is None)
    assert followed.discovery.states()[0].age_s == 0.0, "an unchanged list is a fresh one"
    assert "one gives lists again" in caplog.text


async def test_a_source_that_breaks_in_an_unknown_way_ends_no_other(
    follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    broken, other = Scripted("broken"), Scripted("other", A)
    broken.says = RuntimeError("on purpose")
    followed = follow(broken, other)
    await followed.expect(STATIC, A)
    other.says = [B]
    await followed.expect(STATIC, B)
    assert caplog.text.count("Traceback") == 1


async def test_after_a_restart_a_source_that_is_down_still_has_its_servers(follow: Follow, tmp_path: Path) -> None:
    memory = tmp_path / "discovery.json"
    first = follow(Scripted("one", ServerConfig(url=A.url, headers={"authorization": "Bearer k"})), memory=memory)
    await until(lambda: first.lists)
    assert stat.S_IMODE(memory.stat().st_mode) == 0o600, "it holds keys"
    down = Scripted("one")
    down.says = DiscoveryError("no answer")
    second = follow(down, memory=memory)
    await until(lambda: second.lists)
    assert second.lists == first.lists
    memory.write_text("{")
    third = follow(down, memory=memory)
    await third.expect(STATIC)
