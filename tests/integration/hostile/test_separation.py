"""One request reaches one engine, no path leads around the routes, and no answer or log tells what is inside."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
from support import wire
from support.raw_engine import MODEL, RawEngine, Reply, answer, raw_engine
from support.service import free_port, wait_for

from integration.conftest import Serve

from .conftest import StartRouter
from .raw import CHAT, USER, post, raw_client, request

BODY = {"messages": [USER]}
KEY, WORDS = "sk-hostile-0123456789", "an utterly confidential sentence about clouds"


class Nobody:
    """A server that is not there."""

    url = f"http://127.0.0.1:{free_port()}"


@pytest.mark.bug(30)
def test_a_request_is_one_request_to_one_engine_and_nothing_else(start_router: StartRouter) -> None:
    with raw_engine() as one, raw_engine() as other:
        router = start_router([one, other])
        for number in range(16):
            assert post(router.url, {**BODY, "number": number}).status == 200
        lines = {heard.line for engine in (one, other) for heard in engine.heard}
        assert lines == {f"POST {CHAT} HTTP/1.1".encode()}
        assert len(one.heard) + len(other.heard) == 16


@pytest.mark.bug(31)
def test_requests_flow_while_engines_answer_no_question_of_the_routers(start_router: StartRouter) -> None:
    with raw_engine() as engine:
        router = start_router([engine], "control.unready_after=100")
        engine.is_mute = True
        asked = len(engine.asked)
        wait_for(lambda: len(engine.asked) > asked, "a question without an answer", timeout_s=10)
        for _ in range(50):
            assert post(router.url, BODY).status == 200


@pytest.mark.bug(89)
def test_models_are_listed_while_an_engine_is_down(start_router: StartRouter, engine: RawEngine) -> None:
    router = start_router([Nobody(), engine])
    listed = wire.get(f"{router.url}/v1/models")
    assert (listed.status, [card["id"] for card in listed.json()["data"]]) == (200, [MODEL])


@pytest.mark.bug(114)
def test_no_error_of_ours_names_an_engine_or_a_cause_inside(start_router: StartRouter) -> None:
    with raw_engine() as engine:
        router = start_router([engine], "upstream.first_byte_timeout_s=0.3")
        engine.script = lambda _: Reply([], "close")
        dropped = post(router.url, BODY)
        engine.script = lambda _: Reply([b"nonsense\r\n\r\n"], "close")
        nonsense = post(router.url, BODY)
        engine.script = lambda _: Reply([], "hang")
        silent = post(router.url, BODY)
    assert [dropped.status, nonsense.status, silent.status] == [502, 502, 504]
    for got in (dropped, nonsense, silent):
        error = got.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert str(engine.port).encode() not in got.head + got.body
        assert b"127.0.0.1" not in got.head + got.body
        assert b"os error" not in got.body


@pytest.mark.bug(166)
def test_neither_keys_nor_prompts_are_in_the_log_or_the_metrics(router: Serve, engine: RawEngine) -> None:
    body = {"messages": [{"role": "user", "content": WORDS}], "user": WORDS, "x": WORDS}
    headers = [f"Authorization: Bearer {KEY}", f"X-Api-Key: {KEY}", f"Cookie: {KEY}", f"X-Session-Id: {KEY}"]
    assert post(router.url, body, *headers).status == 200
    engine.script = lambda _: Reply([], "close")
    assert post(router.url, body, *headers).status == 502
    assert post(router.url, json.dumps(body).encode() + b"}", *headers).status == 400
    with raw_client(router.url) as client:
        client.send(request(b"{}", *headers, f"X-Bad\x01: {WORDS}"))
        client.read_to_end()
    assert "the request failed" in router.log.read_text()
    shown = router.log.read_text() + wire.get(f"{router.url}/metrics").body.decode()
    assert KEY not in shown
    assert WORDS not in shown


@pytest.mark.bug(159, 178)
def test_metrics_are_the_routers_own_and_do_not_grow_with_what_clients_ask_for(
    router: Serve, engine: RawEngine
) -> None:
    def names() -> set[str]:
        page = wire.get(f"{router.url}/metrics").body.decode()
        return {line.rsplit(" ", 1)[0] for line in page.splitlines() if line and not line.startswith("#")}

    assert post(router.url, BODY).status == 200
    wait_for(lambda: any('outcome="finished"' in name for name in names()), "the request counted", timeout_s=5)
    assert post(router.url, {**BODY, "model": "unknown-0"}).status == 404
    before = names()
    for number in range(30):
        assert post(router.url, {**BODY, "model": f"unknown-{number}"}).status == 404
        assert wire.get(f"{router.url}/nowhere/{number}").status == 404
        assert post(router.url, {**BODY, "user": f"u{number}"}, f"X-Session-Id: {number}").status == 200
    assert names() == before
    assert all(name.startswith("warmfront_") for name in before)


@pytest.mark.bug(93)
@pytest.mark.parametrize(
    "target",
    [
        "/metrics/",
        "/sleep",
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/invocations",
        "/collective_rpc",
        "/v1/chat/completions/../../sleep",
        "/v1/chat%2Fcompletions",
        "//sleep",
        "http://127.0.0.1:1/sleep",
        "http://evil.example/v1/chat/completions",
    ],
)
def test_no_target_reaches_an_engines_other_paths_or_another_host(
    router: Serve, engine: RawEngine, target: str
) -> None:
    got = post(router.url, BODY, path=target)
    assert got.status in {200, 400, 404, 405}
    assert {heard.line for heard in engine.heard} <= {f"POST {CHAT} HTTP/1.1".encode()}
    assert all(heard.values("host") == [engine.url.removeprefix("http://").encode()] for heard in engine.heard)


FRAMINGS = {
    "length and chunks": (["Content-Length: 4", "Transfer-Encoding: chunked"], b"2\r\n{}\r\n0\r\n\r\n"),
    "two lengths": (["Content-Length: 2", "Content-Length: 3"], b"{} "),
    "a length twice": (["Content-Length: 2", "Content-Length: 2"], b"{}"),
    "a list of lengths": (["Content-Length: 2, 2"], b"{}"),
    "two codings": (["Transfer-Encoding: chunked", "Transfer-Encoding: identity"], b"2\r\n{}\r\n0\r\n\r\n"),
    "another coding": (["Transfer-Encoding: xchunked"], b"2\r\n{}\r\n0\r\n\r\n"),
    "a coding in capitals": (["Transfer-Encoding: CHUNKED"], b"2\r\n{}\r\n0\r\n\r\n"),
    "a space before the colon": (["Content-Length : 2"], b"{}"),
    "a folded length": (["Content-Length:\r\n 2"], b"{}"),
    "a signed length": (["Content-Length: +2"], b"{}"),
    "a chunk size beyond 64 bits": (["Transfer-Encoding: chunked"], b"10000000000000002\r\n{}\r\n0\r\n\r\n"),
    "bare line ends in chunks": (["Transfer-Encoding: chunked"], b"2\n{}\n0\n\n"),
}


@pytest.mark.parametrize("name", FRAMINGS)
def test_a_body_whose_end_is_in_doubt_never_becomes_another_request(
    router: Serve, engine: RawEngine, name: str
) -> None:
    lines, body = FRAMINGS[name]
    with raw_client(router.url) as client, closing(client.socket):
        client.send(request(body, *lines, framing=False))
        got = client.answer()
    assert got.status in {200, 400, 413, 501}, got
    assert len(engine.heard) == (1 if got.status == 200 else 0)
    for heard in engine.heard:
        assert heard.body == b"{}"
        assert heard.values("content-length") == [b"2"]
        assert heard.values("transfer-encoding") == []


def test_what_follows_a_body_is_a_request_of_its_own(router: Serve, engine: RawEngine) -> None:
    engine.script = lambda heard: answer(heard.body)
    first, second = b'{"first":1}', b'{"second":2}'
    with raw_client(router.url) as client:
        client.send(request(first) + request(second) + b"POST /v1/comp")
        assert [client.answer().body, client.answer().body] == [first, second]
    assert [heard.body for heard in engine.heard] == [first, second]
