from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from conftest import RecordedEngine
from warmfront.clock import MonotonicClock
from warmfront.config import Config, ControlConfig, FleetConfig, ServerConfig, TlsConfig, redacted
from warmfront.control import listening, security
from warmfront.control.authentication import authentication
from warmfront.control.discovery.static import StaticDiscovery
from warmfront.control.files import read_secret
from warmfront.control.fleet import FleetKeeper
from warmfront.control.report import fleet_report
from warmfront.errors import ClientError, ConfigError

TOKEN = "t0ken-of-the-admin-api"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n", encoding="ascii")
    return path


@pytest.fixture
async def guarded(token_file: Path) -> AsyncIterator[TestClient[Any, Any]]:
    """One admin route behind the middleware."""

    @web.middleware
    async def plainly(request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        try:
            return await handler(request)  # type: ignore[no-any-return]  # a handler of aiohttp
        except ClientError as error:
            return web.json_response(error.body(), status=error.status)

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="inside")

    authenticate = authentication(ControlConfig(admin_token_file=str(token_file)))
    application = web.Application(middlewares=[plainly, authenticate])
    application.add_routes([web.get("/health", answer), web.get("/admin/fleet", answer)])
    async with TestClient(TestServer(application)) as client:
        yield client


@pytest.mark.bug(95, 179)
@pytest.mark.parametrize(
    ("given", "status"),
    [
        ([], 401),
        ([f"Bearer {TOKEN}"], 200),
        ([f"bearer  {TOKEN} "], 200),
        ([TOKEN], 401),
        ([f"Basic {TOKEN}"], 401),
        ([f"Bearer {TOKEN}x"], 401),
        ([f"Bearer {TOKEN[:-1]}"], 401),
        (["Bearer "], 401),
        (["Bearer \u00fc"], 401),
        ([f"Bearer {TOKEN}", f"Bearer {TOKEN}"], 401),
    ],
)
async def test_only_the_token_opens_the_admin_api(guarded: TestClient[Any, Any], given: list[str], status: int) -> None:
    headers = [("Authorization", value) for value in given]
    response = await guarded.get("/admin/fleet", headers=headers)
    assert response.status == status
    if status == 401:
        body = await response.json()
        assert body["error"]["code"] == "invalid_api_key"
        assert TOKEN not in str(body)


async def test_unknown_admin_paths_want_the_token_too_and_health_does_not(guarded: TestClient[Any, Any]) -> None:
    assert (await guarded.get("/nothing")).status == 401
    assert (await guarded.get("/health")).status == 200
    assert (await guarded.get("/health/")).status == 401


async def test_a_new_token_counts_at_once_and_an_empty_file_changes_nothing(
    guarded: TestClient[Any, Any], token_file: Path
) -> None:
    async def status(token: str) -> int:
        return (await guarded.get("/admin/fleet", headers={"authorization": f"Bearer {token}"})).status

    token_file.write_text("another-one", encoding="ascii")  # noqa: ASYNC240 - a few bytes
    assert (await status(TOKEN), await status("another-one")) == (401, 200)
    token_file.write_text("", encoding="ascii")  # noqa: ASYNC240
    assert (await status(""), await status("another-one")) == (401, 200)


@pytest.mark.bug(179)
@pytest.mark.parametrize(
    ("address", "is_loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("router.example:1", False),
    ],
)
def test_an_admin_port_that_others_reach_needs_a_token(address: str, is_loopback: bool, token_file: Path) -> None:
    security.require_safe_admin(ControlConfig(admin_listen=address, admin_token_file=str(token_file)))
    if is_loopback:
        security.require_safe_admin(ControlConfig(admin_listen=address))
        return
    with pytest.raises(ConfigError, match="needs admin_token_file"):
        security.require_safe_admin(ControlConfig(admin_listen=address))


@pytest.mark.parametrize("content", [b"", b" \n", b"a\nb", b"\xff", b"x" * 5000])
def test_what_is_no_secret_is_refused_without_being_quoted(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_secret(str(path))
    assert str(path) in str(caught.value)


async def test_headers_from_files_reach_the_engine_and_follow_their_files(
    engine: RecordedEngine, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    path.write_text("Bearer one\n", encoding="ascii")
    server = ServerConfig(url=engine.url, headers={"x-a": "1"}, headers_from_file={"authorization": str(path)})
    fleet = FleetConfig(servers=[server])
    keeper = FleetKeeper(Config(fleet=fleet), http=http, clock=MonotonicClock())
    update = await keeper.look_once(StaticDiscovery(fleet))
    assert engine.headers[-1]["authorization"] == "Bearer one"
    assert update.pools[0].replicas[0].headers == {"x-a": "1", "authorization": "Bearer one"}
    access = security.EngineAccess(server)
    assert access.secret_headers() == {"authorization": "Bearer one"}
    path.write_text("Bearer two", encoding="ascii")
    assert access.secret_headers() == {"authorization": "Bearer two"}
    path.unlink()
    assert access.secret_headers() == {"authorization": "Bearer two"}


async def test_headers_from_the_environment_reach_the_engine_and_are_shown_nowhere(
    engine: RecordedEngine, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "very-secret\n")
    server = ServerConfig(url=engine.url, headers_from_env={"authorization": "Bearer ${ENGINE_KEY}"})
    config = Config(fleet=FleetConfig(servers=[server]))
    keeper = FleetKeeper(config, http=http, clock=MonotonicClock())
    update = await keeper.look_once(StaticDiscovery(config.fleet))
    assert engine.headers[-1]["authorization"] == "Bearer very-secret"
    assert update.pools[0].replicas[0].headers == {"authorization": "Bearer very-secret"}
    assert "very-secret" not in str(redacted(config)) + msgspec.json.encode(config).decode()
    assert "very-secret" not in str(fleet_report(update, keeper.facts, {}, None, {}))


@pytest.mark.bug(133)
async def test_a_probe_speaks_tls_with_the_servers_own_authority_and_certificate(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    paths = written(tmp_path, authority)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    (tmp_path / "stranger.pem").write_bytes(stranger.cert_pem.bytes())

    async def reason(**options: str) -> str:
        fleet = FleetConfig(servers=[msgspec.convert({"url": url, **options}, ServerConfig)])
        keeper = FleetKeeper(Config(fleet=fleet), http=http, clock=MonotonicClock())
        await keeper.look_once(StaticDiscovery(fleet))
        return keeper.facts[0].reason

    own = {"client_cert": paths["cert"], "client_key": paths["key"]}
    assert "TLS" not in await reason(ca=paths["ca"], **own)
    assert (await reason(ca=str(tmp_path / "stranger.pem"), **own)).startswith("TLS: ")
    assert (await reason(**own)).startswith("TLS: ")
    assert "TLS: cannot read" in await reason(ca=str(tmp_path / "absent.pem"), **own)
    assert await reason(ca=paths["ca"]) != "its models are not known yet"
    await runner.cleanup()


def written(folder: Path, authority: trustme.CA) -> dict[str, str]:
    """Write a certificate for this machine, its key and its authority; return the paths."""
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    content = {
        "ca": authority.cert_pem.bytes(),
        "cert": b"".join(blob.bytes() for blob in certificate.cert_chain_pems),
        "key": certificate.private_key_pem.bytes(),
    }
    paths = {name: folder / f"{name}.pem" for name in content}
    for name, path in paths.items():
        path.write_bytes(content[name])
    return {name: str(path) for name, path in paths.items()}


async def test_the_admin_certificate_is_renewed_in_place_and_a_bad_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "WATCH_INTERVAL_S", 0.01)
    old, new = trustme.CA(), trustme.CA()
    paths = written(tmp_path, old)
    tls = TlsConfig(cert=paths["cert"], key=paths["key"])
    context = security.server_context(tls)
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    port = runner.addresses[0][1]
    following = asyncio.create_task(listening.follow_certificate(tls, context))

    async def is_signed_by(authority: trustme.CA) -> bool:
        trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        authority.configure_trust(trust)
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
        except ssl.SSLError:
            return False
        writer.close()
        return True

    assert await is_signed_by(old)
    broken = Path(paths["cert"])
    broken.write_text("no certificate", encoding="ascii")  # noqa: ASYNC240 - a few bytes, between two connections
    for _ in range(20):
        assert await is_signed_by(old)
    written(tmp_path, new)
    async with asyncio.timeout(10):
        while not await is_signed_by(new):
            pass  # each look is a connection, which lets the follower run
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await runner.cleanup()
