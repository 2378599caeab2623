"""`warmfront serve` with keys and over TLS: real processes, real certificates, the official client."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import trustme
from support import wire
from support.service import wait_for
from support.tls import HOST, TlsEngine, write_certificate

from .conftest import WARMFRONT, EmbeddedEngine, Serve, Start

MARK = "a-prompt-that-nobody-may-see"
ENGINE_KEY, ADMIN_TOKEN = "engine-key-0123456789", "admin-token-0123456789"


class SecureServe(Serve):
    """A router whose ports speak TLS; `trust` checks its certificate."""

    def __init__(self, log: Path, authority: trustme.CA, *settings: str) -> None:
        super().__init__(log, [], *settings)
        self.trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        authority.configure_trust(self.trust)

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self.port}"

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.health_path, timeout=5, context=self.trust) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls_engine(tmp_path: Path, authority: trustme.CA) -> Iterator[Callable[..., TlsEngine]]:
    started: list[TlsEngine] = []

    def begin(**options: Any) -> TlsEngine:
        engine = TlsEngine(write_certificate(tmp_path, f"engine{len(started)}", authority), **options)
        engine.start()
        started.append(engine)
        return engine

    yield begin
    for engine in started:
        engine.stop()


def add_key(file: Path, name: str, *options: str) -> str:
    command = [WARMFRONT, "keys", "add", name, "--file", str(file), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def health(connection: HTTPSConnection) -> int:
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    return response.status


def setting(path: str, value: Any) -> str:
    return f"{path}={json.dumps(value)}"


@pytest.mark.bug(133)
def test_the_official_client_streams_over_tls_to_an_engine_behind_mutual_tls(
    tmp_path: Path, authority: trustme.CA, tls_engine: Callable[..., TlsEngine], start: Start
) -> None:
    engine = tls_engine(wants_certificate=True)
    ours = write_certificate(tmp_path, "router", authority)
    keys = tmp_path / "keys.json"
    key = add_key(keys, "team-a")
    secret = tmp_path / "engine-key"
    secret.write_text(f"Bearer {ENGINE_KEY}\n", encoding="ascii")
    server = {
        "url": engine.url,
        "ca": ours["ca"],
        "client_cert": ours["cert"],
        "client_key": ours["key"],
        "headers_from_file": {"authorization": str(secret)},
    }
    router = cast(
        SecureServe,
        start(
            SecureServe(
                tmp_path / "serve.log",
                authority,
                setting("front.tls", {"cert": ours["cert"], "key": ours["key"]}),
                setting("front.keys_file", str(keys)),
                setting("fleet.servers", [server]),
            )
        ),
    )
    transport = openai.DefaultHttpxClient(verify=router.trust)
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key=key, max_retries=0, http_client=transport) as client:
        stream = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "warmfront"
        answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
        assert answer.choices[0].message.content == "warm"
    with (
        openai.DefaultHttpxClient(verify=router.trust) as transport,
        openai.OpenAI(base_url=f"{router.url}/v1", api_key="wrong", max_retries=0, http_client=transport) as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.models.list()
    assert refused.value.code == "invalid_api_key"
    chats = [headers for path, headers in engine.heard if path == "/v1/chat/completions"]
    assert [headers["authorization"] for headers in chats] == [f"Bearer {ENGINE_KEY}"] * 2
    assert all(headers["authorization"] == f"Bearer {ENGINE_KEY}" for _, headers in engine.heard), "probes too"


def test_a_renewed_certificate_serves_new_clients_and_a_bad_one_changes_nothing(
    tmp_path: Path, authority: trustme.CA, tls_engine: Callable[..., TlsEngine], start: Start
) -> None:
    engine = tls_engine()
    ours = write_certificate(tmp_path, "router", authority)
    router = cast(
        SecureServe,
        start(
            SecureServe(
                tmp_path / "serve.log",
                authority,
                setting("front.tls", {"cert": ours["cert"], "key": ours["key"]}),
                setting("fleet.servers", [{"url": engine.url, "ca": ours["ca"]}]),
            )
        ),
    )
    with closing(HTTPSConnection(HOST, router.port, timeout=30, context=router.trust)) as kept:
        assert health(kept) == 200
        Path(ours["cert"]).write_text("no certificate", encoding="ascii")
        wait_for(lambda: "stays in charge" in router.log_tail(), "the bad file noticed", timeout_s=20)
        assert router.is_healthy()
        renewed = trustme.CA()
        write_certificate(tmp_path, "router", renewed)
        trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        renewed.configure_trust(trust)
        old, router.trust = router.trust, trust
        wait_for(router.is_healthy, "the new certificate", timeout_s=20)
        router.trust = old
        assert not router.is_healthy()
        assert health(kept) == 200, "an open connection keeps its session"


def test_a_port_with_a_client_authority_lets_in_only_its_certificates(
    tmp_path: Path, authority: trustme.CA, tls_engine: Callable[..., TlsEngine], start: Start
) -> None:
    engine = tls_engine()
    ours = write_certificate(tmp_path, "router", authority)
    router = SecureServe(
        tmp_path / "serve.log",
        authority,
        setting("front.tls", {"cert": ours["cert"], "key": ours["key"], "client_ca": ours["ca"]}),
        setting("fleet.servers", [{"url": engine.url, "ca": ours["ca"]}]),
    )
    authority.issue_cert("client.example").configure_cert(router.trust)
    start(router)
    for stranger in (None, trustme.CA()):
        trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        authority.configure_trust(trust)
        if stranger is not None:
            stranger.issue_cert("client.example").configure_cert(trust)
        with closing(HTTPSConnection(HOST, router.port, timeout=30, context=trust)) as client, pytest.raises(OSError):  # noqa: PT011 - TLS and sockets differ in how they say it
            health(client)
    with socket.create_connection((HOST, router.port)) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: r\r\n\r\n")
        assert b"HTTP/1.1" not in plain.recv(1000)
    assert router.is_healthy()


def test_an_engine_whose_certificate_nobody_vouches_for_gets_no_request(
    tmp_path: Path, tls_engine: Callable[..., TlsEngine], start: Start
) -> None:
    engine = tls_engine()
    router = Serve(tmp_path / "serve.log", [], setting("fleet.servers", [{"url": engine.url}]))
    router.health_path = "/health"
    start(router)
    wait_for(lambda: "not ready: TLS: " in router.log_tail(), "the probe's refusal", timeout_s=20)
    assert engine.heard == []


@pytest.mark.bug(114, 166)
def test_no_secret_and_no_prompt_is_in_anything_the_router_writes_or_tells(tmp_path: Path, start: Start) -> None:
    engine = start(EmbeddedEngine(tmp_path / "engine.log"))
    keys, token, gateway = tmp_path / "keys.json", tmp_path / "token", tmp_path / "gateway"
    key = add_key(keys, "team-a")
    token.write_text(ADMIN_TOKEN, encoding="ascii")
    gateway.write_text("gateway-secret-0123456789", encoding="ascii")
    recording = tmp_path / "recording"
    server = {"url": engine.url, "headers": {"authorization": f"Bearer {ENGINE_KEY}"}}
    router = cast(
        Serve,
        start(
            Serve(
                tmp_path / "serve.log",
                [],
                "log.level=debug",
                setting("front.keys_file", str(keys)),
                setting("front.trusted_secret_file", str(gateway)),
                setting("control.admin_token_file", str(token)),
                setting("router.record", str(recording)),
                setting("fleet.servers", [server]),
            )
        ),
    )
    headers = {"x-warmfront-gateway-secret": "gateway-secret-0123456789", "cookie": "session=cookie-0123456789"}
    body = {"messages": [{"role": "user", "content": MARK}], "max_tokens": 2, "user": "user-0123456789"}
    path = f"{router.url}/v1/chat/completions"
    with_key = headers | {"authorization": f"Bearer {key}"}
    admin = {"authorization": f"Bearer {ADMIN_TOKEN}"}
    told = [
        wire.post(path, body, with_key),
        wire.post(path, body | {"model": "nobody"}, with_key),
        wire.post(path, b'{"messages": [' + MARK.encode(), with_key),
        wire.post(path, body, headers | {"authorization": "Bearer wrong-key-0123456789"}),
        wire.post(path, body, headers | {"x-api-key": "wrong-key-0123456789"}),
        wire.post(f"{router.url}/sleep", body, with_key),
        wire.get(f"{router.url}/metrics", with_key),
        wire.get(f"{router.admin_url}/admin/fleet", admin),
        wire.get(f"{router.admin_url}/admin/config", admin),
        wire.get(f"{router.admin_url}/admin/policy", admin),
        wire.get(f"{router.admin_url}/admin/fleet", {"authorization": "Bearer wrong-token-0123456789"}),
        wire.post(f"{router.admin_url}/admin/explain", body, admin),
    ]
    assert [answer.status for answer in told] == [200, 404, 400, 401, 401, 404, 200, 200, 200, 200, 401, 200]
    engine.kill()
    told.append(wire.post(path, body, with_key))
    assert told[-1].status >= 500
    router.stop()
    outputs = {f"answer {number}": answer.body for number, answer in enumerate(told)}
    outputs |= {f"headers {number}": str(answer.headers).encode() for number, answer in enumerate(told)}
    outputs |= {"log": router.log.read_bytes(), "recording": recording.read_bytes(), "keys": keys.read_bytes()}
    secrets = [key, ENGINE_KEY, ADMIN_TOKEN, MARK]
    secrets += ["gateway-secret-0123456789", "cookie-0123456789", "wrong-key-0123456789", "wrong-token-0123456789"]
    secrets += ["user-0123456789"]
    found = [(name, secret) for name, text in outputs.items() for secret in secrets if secret.encode() in text]
    assert found == []
    assert len(outputs["recording"]) > 1000
    assert b'"level":"debug"' in outputs["log"]


@pytest.mark.bug(179)
def test_an_open_admin_port_without_a_token_is_refused_at_the_start() -> None:
    command = [WARMFRONT, "serve", "--replica", "http://127.0.0.1:1", "--admin-listen", "0.0.0.0:0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, "needs admin_token_file" in result.stderr) == (2, True), result.stderr


def test_the_command_line_asks_an_admin_port_with_token_and_tls(
    tmp_path: Path, start: Start, authority: trustme.CA
) -> None:
    engine = start(EmbeddedEngine(tmp_path / "engine.log"))
    ours = write_certificate(tmp_path, "router", authority)
    token = tmp_path / "token"
    token.write_text(ADMIN_TOKEN, encoding="ascii")
    router = cast(
        Serve,
        start(
            Serve(
                tmp_path / "serve.log",
                [engine],
                setting("control.admin_token_file", str(token)),
                setting("control.admin_tls", {"cert": ours["cert"], "key": ours["key"]}),
            )
        ),
    )
    command = [WARMFRONT, "fleet", "--admin", f"https://{HOST}:{router.admin_port}", "--admin-ca", ours["ca"]]

    def ask(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], capture_output=True, text=True, timeout=60)

    refused = ask()
    assert (refused.returncode, "needs its token" in refused.stderr) == (2, True), refused.stderr
    allowed = ask("--admin-token-file", str(token))
    assert (allowed.returncode, engine.url in allowed.stdout) == (0, True), allowed.stderr


def test_a_router_is_seeded_by_another_over_tls_with_certificates_and_a_token(
    tmp_path: Path, start: Start, authority: trustme.CA
) -> None:
    engine = start(EmbeddedEngine(tmp_path / "engine.log"))
    ours, theirs = (write_certificate(tmp_path, name, authority) for name in ("first", "second"))
    token = tmp_path / "token"
    token.write_text(f"Bearer {ADMIN_TOKEN}\n", encoding="ascii")
    (tmp_path / "admin").write_text(ADMIN_TOKEN, encoding="ascii")
    tls = {"cert": ours["cert"], "key": ours["key"], "client_ca": ours["ca"]}
    guard = (setting("control.admin_tls", tls), setting("control.admin_token_file", str(tmp_path / "admin")))
    first = cast(Serve, start(Serve(tmp_path / "first.log", [engine], *guard)))
    wait_for(lambda: is_live(first), "the event stream live", timeout_s=20)
    prompt = {"prompt": "clouds come before the rain and wind comes after it. " * 12, "max_tokens": 2}
    wire.post(f"{first.url}/v1/completions", prompt)
    whole = {
        "seed_ca": ours["ca"],
        "seed_client_cert": theirs["cert"],
        "seed_client_key": theirs["key"],
        "seed_headers_from_file": {"authorization": str(token)},
    }
    said = {
        "tls": ({**whole, "seed_ca": write_certificate(tmp_path, "stranger", trustme.CA())["ca"]}, "certificate"),
        "token": ({**whole, "seed_headers_from_file": {}}, "401"),
        "nothing": (whole, None),
    }
    for lack, (settings, reason) in said.items():
        peer = settings | {"seed_from": f"https://{HOST}:{first.admin_port}"}
        second = cast(Serve, start(Serve(tmp_path / f"{lack}.log", [engine], setting("snapshot", peer))))
        wait_for(partial(is_live, second), "the event stream live", timeout_s=20)
        restored = wire.get(f"{second.admin_url}/admin/snapshot/state").json()["restored"]
        if reason is None:
            assert (restored["from"], restored["replicas_restored"]) == (peer["seed_from"], 1)
        else:
            assert restored["from"] is None
            assert reason in restored["refused"][0].lower()
        assert ADMIN_TOKEN not in second.log.read_text()
        second.stop()


def is_live(router: Serve) -> bool:
    pools = wire.get(f"{router.url}/ready").json()["pools"]
    return bool(pools) and pools[0]["events"]["live"] == 1


@pytest.mark.parametrize("field", ["front.keys_file", "front.trusted_secret_file", "front.tls.cert"])
def test_a_file_that_is_not_there_is_one_line_at_the_start(tmp_path: Path, field: str) -> None:
    absent = str(tmp_path / "absent")
    settings = [setting("front.tls", {"cert": absent, "key": absent})] if "tls" in field else [setting(field, absent)]
    command = [WARMFRONT, "serve", "--replica", "http://127.0.0.1:1", "--listen", "127.0.0.1:0", "--admin-listen"]
    command += ["127.0.0.1:0", "--set", *settings]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, absent in result.stderr) == (2, True), result.stderr
    assert "Traceback" not in result.stderr
