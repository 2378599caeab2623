"""Each source against the real thing: files, a name server on UDP, an HTTP server."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.dns_server import NameServer
from warmfront.config import Config, DnsSource, FileSource, HttpSource, ServerConfig, SrvSource, redacted
from warmfront.control.discovery import DiscoveryError, Source
from warmfront.control.discovery.dns import AddressReader, SrvReader
from warmfront.control.discovery.file import FileReader
from warmfront.control.discovery.http import HttpReader
from warmfront.control.discovery.lists import servers_of

A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8000"


async def urls(source: Source) -> list[str] | None:
    servers = await source.read()
    return None if servers is None else [server.url for server in servers]


async def failure(source: Source) -> str:
    with pytest.raises(DiscoveryError) as caught:
        await source.read()
    return str(caught.value)


# -- lists


def test_a_list_holds_urls_and_mappings() -> None:
    servers = servers_of([f"{A}/", {"url": B, "engine": "vllm", "id": "pod-7"}])
    assert servers == [ServerConfig(url=A), ServerConfig(url=B, engine="vllm", id="pod-7")]


@pytest.mark.bug(97)
@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([A, "10.0.0.2:8000"], "item 1.url: expected `http://host:port`"),
        ([{"url": A, "weight": 2}], "item 0: object contains unknown field `weight`"),
        ([{"url": A, "engine": "llama"}], "item 0.engine: no engine named 'llama'"),
        ([A, f"{A}/"], "listed twice"),
        ({"servers": [A]}, "expected a list"),
        (None, "expected a list"),
    ],
)
def test_a_list_with_anything_wrong_in_it_is_refused_with_the_place_named(items: object, words: str) -> None:
    with pytest.raises(DiscoveryError, match=words.replace("[", r"\[")):
        servers_of(items)


# -- files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "servers.yaml"


def replace(file: Path, text: str) -> None:
    draft = file.with_suffix(".new")
    draft.write_text(text)
    draft.replace(file)


async def test_a_file_is_read_again_when_it_is_another_one(file: Path) -> None:
    source = FileReader(FileSource(path=str(file)))
    replace(file, f"- {A}\n")
    assert await urls(source) == [A]
    assert await urls(source) is None
    replace(file, f"- {B}\n")
    assert await urls(source) == [B]


async def test_a_bad_file_is_said_each_time_until_it_is_mended(file: Path) -> None:
    source = FileReader(FileSource(path=str(file)))
    assert "cannot read it: No such file" in await failure(source)
    replace(file, "- 'half")
    assert "cannot be parsed" in await failure(source)
    assert "cannot be parsed" in await failure(source), "the same file is as bad as before"
    replace(file, "")
    assert "expected a list" in await failure(source), "an empty file is one that is being written"
    replace(file, "[]")
    assert await urls(source) == [], "an empty list is meant"


async def test_a_link_that_is_swapped_is_noticed(tmp_path: Path) -> None:
    """Kubernetes mounts configuration as a link to a folder, and swaps the link."""
    for name, url in (("one", A), ("two", B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "servers.json").write_text(f'["{url}"]')
    link = tmp_path / "data"
    link.symlink_to("one")
    source = FileReader(FileSource(path=str(link / "servers.json")))
    assert await urls(source) == [A]
    (tmp_path / "next").symlink_to("two")
    os.replace(tmp_path / "next", link)
    assert await urls(source) == [B]


# -- DNS


@pytest.fixture
async def names() -> AsyncIterator[NameServer]:
    server = NameServer()
    await server.start()
    yield server
    server.stop()


def addresses(names: NameServer, **options: object) -> AddressReader:
    settings = {"name": "engines.test.", "port": 8000, "timeout_s": 0.5, "nameservers": [names.address], **options}
    return AddressReader(msgspec.convert(settings, DnsSource))


async def test_each_address_of_a_name_is_a_server(names: NameServer) -> None:
    names.records["engines.test.", "A"] = ["10.0.0.2", "10.0.0.1"]
    source = addresses(names, engine="vllm", headers={"authorization": "Bearer k"})
    servers = await source.read()
    expected = [ServerConfig(url=url, engine="vllm", headers={"authorization": "Bearer k"}) for url in (A, B)]
    assert servers == expected
    assert source.name == "dns engines.test.:8000"


async def test_a_change_is_seen_at_once_whatever_the_time_to_live(names: NameServer) -> None:
    names.records["engines.test.", "A"] = ["10.0.0.1"]
    source = addresses(names)
    assert await urls(source) == [A]
    names.records["engines.test.", "A"] = ["10.0.0.2"]
    assert await urls(source) == [B]


async def test_a_server_with_two_addresses_counts_once(names: NameServer) -> None:
    names.records["engines.test.", "A"] = ["10.0.0.1"]
    names.records["engines.test.", "AAAA"] = ["fd00::1"]
    assert await urls(addresses(names)) == [A]
    assert await urls(addresses(names, family="ipv6")) == ["http://[fd00::1]:8000"]
    del names.records["engines.test.", "A"]
    assert await urls(addresses(names)) == ["http://[fd00::1]:8000"]


async def test_no_answer_and_no_records_are_failures_and_no_empty_lists(names: NameServer) -> None:
    source = addresses(names)
    assert "does not exist" in await failure(source)
    names.records["engines.test.", "TXT"] = ["a"]
    assert "does not contain an answer" in await failure(source)
    names.is_silent = True
    assert await failure(source) == "no answer in time"


async def test_srv_records_give_host_and_port(names: NameServer) -> None:
    name = "_http._tcp.engines.test."
    names.records[name, "SRV"] = ["0 5 8001 b.engines.test.", "0 5 8000 a.engines.test."]
    source = SrvReader(SrvSource(name=name, nameservers=[names.address], timeout_s=0.5))
    assert await urls(source) == ["http://a.engines.test:8000", "http://b.engines.test:8001"]


# -- HTTP


class Inventory:
    """A list of servers over HTTP."""

    def __init__(self) -> None:
        self.body = f'["{A}"]'
        self.status = 200
        self.etag: str | None = '"1"'
        self.asked: list[dict[str, str]] = []
        self.answers: list[int] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append({name.lower(): value for name, value in request.headers.items()})
        is_known = self.etag is not None and request.headers.get("if-none-match") == self.etag
        status = 304 if is_known else self.status
        self.answers.append(status)
        headers = {"etag": self.etag} if self.etag else {}
        return web.Response(status=status, text=None if is_known else self.body, headers=headers)


@pytest.fixture
async def inventory() -> AsyncIterator[tuple[Inventory, HttpReader]]:
    told = Inventory()
    application = web.Application()
    application.router.add_get("/engines", told.answer)
    async with TestServer(application) as server, aiohttp.ClientSession() as http:
        config = HttpSource(url=str(server.make_url("/engines?key=k")), headers={"x-key": "s"}, timeout_s=2.0)
        yield told, HttpReader(config, http)


async def test_a_list_over_http_is_read_and_an_unchanged_one_is_not_sent_again(
    inventory: tuple[Inventory, HttpReader],
) -> None:
    told, source = inventory
    assert await urls(source) == [A]
    assert await urls(source) is None
    told.body, told.etag = f'["{B}"]', '"2"'
    assert await urls(source) == [B]
    assert told.answers == [200, 304, 200]
    assert told.asked[0]["x-key"] == "s"
    assert "key=k" not in source.name


SECRETS = [
    {"url": A, "headers_from_file": {"x": "/etc/hostname"}},
    {"url": A, "headers_from_env": {"x": "${HOME}"}},
]


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (500, "[]", "it answers 500"),
        (302, "[]", "it answers 302"),
        (200, "<html>", "not JSON"),
        (200, "{}", "a list"),
        (200, "[" * 100_000, "not JSON"),
        *((200, json.dumps([secret]), "names no files or variables") for secret in SECRETS),
    ],
)
async def test_an_answer_that_is_no_list_is_a_failure(
    inventory: tuple[Inventory, HttpReader], status: int, body: str, words: str
) -> None:
    told, source = inventory
    told.status, told.body = status, body
    assert words in await failure(source)


async def test_nobody_at_the_url_is_a_failure(unused_tcp_port: int) -> None:
    async with aiohttp.ClientSession() as http:
        source = HttpReader(HttpSource(url=f"http://127.0.0.1:{unused_tcp_port}/"), http)
        assert "cannot connect" in await failure(source)


def test_secrets_of_sources_are_not_shown() -> None:
    discovery = [
        {"type": "http", "url": "http://i/l?key=very-hidden", "headers": {"x-key": "very-hidden"}},
        {"type": "file", "path": "f"},
    ]
    config = msgspec.convert({"fleet": {"discovery": discovery}}, Config)
    assert "very-hidden" not in str(redacted(config))
