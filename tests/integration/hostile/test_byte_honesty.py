"""What a client writes is what the engine reads, and what the engine writes is what the client reads."""

from __future__ import annotations

import gzip
import json
from itertools import chain

import pytest
from support.raw_engine import CARD, SSE_HEAD, RawEngine, Reply, answer, chunk, paced, stream

from integration.conftest import Serve

from .conftest import StartRouter
from .raw import CHAT, USER, post, raw_client, request

MESSAGES = json.dumps([USER])

BODIES = {
    "unknown fields": f'{{"messages":{MESSAGES},"vllm_xargs":{{"a":[{{}}]}},"x_new":{{"deep":[1,[2,[3]]]}}}}',
    "duplicate keys": f'{{"n":1,"messages":{MESSAGES},"n":2,"model":"raw","model":"raw"}}',
    "big integers": f'{{"messages":{MESSAGES},"seed":18446744073709551616,"x":123456789012345678901234567890}}',
    "spelling of numbers": f'{{"messages":{MESSAGES},"temperature":1e2,"top_p":1.0E+0,"x":-0,"y":0.10,"z":1E400}}',
    "spelling of text": '{"messages":[{"role":"user","content":"\\u00e9 é \\/ / \\ud83d\\ude00"}]}',
    "white space": f'\r\n {{ "messages" :\t{MESSAGES} ,\n "stream" : false }}\r\n ',
    "odd roles": '{"messages":[{"role":"wizard","content":"a"},{"role":"user","name":"bob","content":"b"}]}',
    "a name in a message": '{"messages":[{"role":"user","name":"alice","content":"a","x_mood":"good"}]}',
    "a stop list of null": f'{{"messages":{MESSAGES},"stop":[null,"x"],"stop_token_ids":null}}',
    "stream of null": f'{{"messages":{MESSAGES},"stream":null,"logprobs":null}}',
    "no tokens at least": f'{{"messages":{MESSAGES},"min_tokens":0,"max_tokens":1}}',
    "tools without parameters": f'{{"messages":{MESSAGES},"tools":[{{"type":"function","function":{{"name":"f"}}}}]}}',
    "not a number": f'{{"messages":{MESSAGES},"temperature":NaN,"x":Infinity}}',
    "no messages": '{"messages":[]}',
    "messages of another kind": '{"messages":"hello","temperature":"warm"}',
    "half a surrogate": '{"messages":[{"role":"user","content":"\\ud800"}]}',
}


@pytest.mark.bug(67, 69, 70, 71)
@pytest.mark.parametrize("name", BODIES)
def test_a_body_reaches_the_engine_byte_for_byte(router: Serve, engine: RawEngine, name: str) -> None:
    body = BODIES[name].encode()
    assert post(router.url, body).status == 200
    assert [heard.body for heard in engine.heard] == [body]


def test_text_that_is_no_utf_8_reaches_the_engine_as_it_is(router: Serve, engine: RawEngine) -> None:
    for body in (b'{"messages":[{"role":"user","content":"\xff\xfe"}]}', f'{{"messages":{MESSAGES}}}'.encode("utf-16")):
        assert post(router.url, body).status == 200
        assert engine.heard[-1].body == body


def test_a_compressed_request_is_refused_and_never_sent_changed(router: Serve, engine: RawEngine) -> None:
    body = gzip.compress(f'{{"messages":{MESSAGES}}}'.encode())
    refused = post(router.url, body, "Content-Encoding: gzip")
    assert (refused.status, refused.json()["error"]["code"]) == (415, "unsupported_encoding")
    assert engine.heard == []


@pytest.mark.bug(66, 61, 90)
def test_every_end_to_end_header_reaches_the_engine_and_no_other(router: Serve, engine: RawEngine) -> None:
    sent = ["User-Agent: mine/1", "X-Session-Id: s", "Traceparent: 00-1-2-01", "X-Two: a", "X-Two: b", "Cookie: a=1"]
    hop = ["Connection: keep-alive, X-Hop", "X-Hop: 1", "TE: trailers", "Proxy-Authorization: p", "Keep-Alive: 5"]
    post(router.url, {"messages": [USER]}, *sent, *hop)
    (heard,) = engine.heard
    assert heard.values("x-two") == [b"a", b"b"]
    for line in sent:
        name, _, value = line.partition(": ")
        assert value.encode() in heard.values(name.lower()), line
    for line in hop[1:]:
        assert heard.values(line.partition(":")[0].lower()) == [], line
    assert heard.values("host") == [engine.url.removeprefix("http://").encode()]
    assert len(heard.values("content-length")) == 1


@pytest.mark.bug(59, 61, 63, 65, 90)
def test_every_end_to_end_header_of_an_answer_reaches_the_client(router: Serve, engine: RawEngine) -> None:
    sent = [b"set-cookie: a=1", b"set-cookie: b=2", b"server: engine/1", b"x-next-session: n", b"x-odd: \xe9"]
    hop = [b"keep-alive: timeout=5", b"connection: keep-alive, x-hop", b"x-hop: 1"]
    engine.script = lambda _: answer(b"{}", *sent, *hop, content_type=b"application/json; charset=latin-1")
    got = post(router.url, {"messages": [USER]})
    assert got.values("set-cookie") == [b"a=1", b"b=2"]
    assert got.values("server") == [b"engine/1"]
    assert got.values("x-next-session") == [b"n"]
    assert got.values("x-odd") == [b"\xe9"]
    assert got.values("content-type") == [b"application/json; charset=latin-1"]
    assert got.values("x-hop") == got.values("keep-alive") == []


def test_a_compressed_answer_keeps_its_encoding_and_its_bytes(router: Serve, engine: RawEngine) -> None:
    packed = gzip.compress(b'{"choices":[],"usage":{"prompt_tokens":1}}')
    engine.script = lambda _: answer(packed, b"content-encoding: gzip", b"vary: accept-encoding")
    got = post(router.url, {"messages": [USER]}, "Accept-Encoding: gzip, br;q=0.5")
    assert engine.heard[0].values("accept-encoding") == [b"gzip, br;q=0.5"]
    assert (got.body, got.values("content-encoding")) == (packed, [b"gzip"])
    assert got.values("content-length") == [b"%d" % len(packed)]


STREAM = (
    b": a comment first\n\n"
    b'event: x\r\ndata: {"a":1}\r\nid: 7\r\nretry: 10\r\n\r\n'
    b"data: line one\ndata: line two\ndata:\n\n"
    b'data: {"choices":[{"delta":{"content":"h\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80"}}],"extra":1e2}\n\n'
    b"\rdata: alone\r\r"
    b":\n\ndata: [DONE]\n\n"
)


@pytest.mark.bug(67, 187)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, len(STREAM)])
def test_a_stream_reaches_the_client_byte_for_byte_however_it_is_cut(
    router: Serve, engine: RawEngine, size: int
) -> None:
    engine.script = lambda _: stream(*(STREAM[at : at + size] for at in range(0, len(STREAM), size)))
    got = post(router.url, {"messages": [USER], "stream": True})
    assert got.body == STREAM
    assert got.values("content-type") == [b"text/event-stream"]


@pytest.mark.bug(122)
def test_a_stream_may_take_longer_than_the_time_to_its_first_byte(start_router: StartRouter, engine: RawEngine) -> None:
    router = start_router([engine], "upstream.first_byte_timeout_s=0.4")
    pieces = [b"data: %d\n\n" % number for number in range(8)]
    engine.script = lambda _: Reply(chain([SSE_HEAD], paced([*map(chunk, pieces), b"0\r\n\r\n"], 0.1)))
    assert post(router.url, {"messages": [USER], "stream": True}).body == b"".join(pieces)


@pytest.mark.bug(77)
def test_a_chunked_request_reaches_the_engine_whole(router: Serve, engine: RawEngine) -> None:
    body = json.dumps({"messages": [USER]}).encode()
    with raw_client(router.url) as client:
        client.send(request(b"", "Transfer-Encoding: chunked", "Trailer: x-sum", framing=False))
        for at in range(0, len(body), 7):
            client.send(b"%x;ext=1\r\n%s\r\n" % (len(body[at : at + 7]), body[at : at + 7]))
        client.send(b"0\r\nx-sum: 1\r\n\r\n")
        assert client.answer().status == 200
    (heard,) = engine.heard
    assert (heard.body, heard.values("content-length")) == (body, [b"%d" % len(body)])
    assert heard.values("transfer-encoding") == heard.values("trailer") == heard.values("x-sum") == []


def test_a_client_that_waits_for_100_continue_is_told_to_go_on(router: Serve, engine: RawEngine) -> None:
    body = json.dumps({"messages": [USER]}).encode()
    with raw_client(router.url) as client:
        client.send(request(body, "Expect: 100-continue").removesuffix(body))
        assert client.answer().status == 100
        client.send(body)
        assert client.answer().status == 200
    assert engine.heard[0].body == body
    assert engine.heard[0].values("expect") == []


@pytest.mark.bug(75)
def test_a_form_with_a_file_reaches_the_engine_byte_for_byte(router: Serve, engine: RawEngine) -> None:
    body = (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nraw\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + bytes(range(256)) * 40
    ) + b"\r\n--b--\r\n"
    with raw_client(router.url) as client:
        client.send(request(body, "Content-Type: multipart/form-data; boundary=b", path="/v1/audio/transcriptions"))
        assert client.answer().status == 200
    assert engine.heard[0].body == body
    assert engine.heard[0].values("content-type") == [b"multipart/form-data; boundary=b"]


@pytest.mark.bug(85, 87)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/"])
def test_models_are_listed_with_every_field_of_the_engines_card(router: Serve, path: str) -> None:
    with raw_client(router.url) as client:
        client.send(f"GET {path} HTTP/1.1\r\nHost: router\r\n\r\n".encode())
        listed = client.answer()
    assert (listed.status, listed.json()["data"]) == (200, [CARD])


def test_the_query_reaches_the_engine_as_it_was_written(router: Serve, engine: RawEngine) -> None:
    assert post(router.url, {"messages": [USER]}, path=f"{CHAT}?beta=true&x=%2f%20&x=2").status == 200
    assert engine.heard[0].line == f"POST {CHAT}?beta=true&x=%2f%20&x=2 HTTP/1.1".encode()


@pytest.mark.bug(91)
def test_one_request_id_is_seen_by_the_client_and_by_the_engine(router: Serve, engine: RawEngine) -> None:
    given = post(router.url, {"messages": [USER]}, "X-Request-Id: mine-1")
    made = post(router.url, {"messages": [USER]})
    assert given.values("x-request-id") == engine.heard[0].values("x-request-id") == [b"mine-1"]
    assert made.values("x-request-id") == engine.heard[1].values("x-request-id") != [b"mine-1"]


def test_an_engines_error_reaches_the_client_byte_for_byte(router: Serve, engine: RawEngine) -> None:
    for status in (b"400 Bad Request", b"404 Not Found", b"422 Unprocessable", b"500 Oops"):
        body = b'{"error" : {"message":"' + status + b'","x":1e2}}'
        engine.script = lambda _, status=status, body=body: answer(body, b"x-why: 1", status=status)  # type: ignore[misc]
        got = post(router.url, {"messages": [USER]})
        assert (got.status, got.body, got.values("x-why")) == (int(status[:3]), body, [b"1"])
