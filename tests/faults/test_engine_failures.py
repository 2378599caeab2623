"""Real engines killed, stopped and overloaded behind a real router: what clients see, and what the router says."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from integration.conftest import EmbeddedEngine, Serve, Start
from support import wire
from support.service import wait_for

REPLICA = "x-warmfront-replica"
COMPLETIONS = "/v1/completions"
QUESTION = "Which clouds come before a warm front, and how long before the rain do they come? " * 8


class SmallEngine(EmbeddedEngine):
    """One that runs a single request and lets a single one wait."""

    def command(self) -> list[str]:
        return [*super().command(), "--max-num-seqs", "1", "--max-num-queued-reqs", "1"]


def engines_of(kind: type[EmbeddedEngine], tmp_path: Path, start: Start) -> list[EmbeddedEngine]:
    return [cast(EmbeddedEngine, start(kind(tmp_path / f"engine-{name}.log"))) for name in "ab"]


def router_of(engines: list[EmbeddedEngine], tmp_path: Path, start: Start, *settings: str) -> Serve:
    router = cast(Serve, start(Serve(tmp_path / "serve.log", list(engines), *settings)))
    wait_for(lambda: serving(router) == 2, "two replicas serving", timeout_s=20)
    return router


def serving(router: Serve) -> int:
    pools = wire.get(f"{router.url}/ready").json()["pools"]
    return int(pools[0]["serving"]) if pools else 0


def standings(router: Serve) -> dict[str, str]:
    """Return how each replica stands, by URL."""
    pools = wire.get(f"{router.admin_url}/admin/fleet").json()["pools"]
    return {row["id"]: (row["router"] or {}).get("standing", "") for pool in pools for row in pool["replicas"]}


def metric(router: Serve, name: str, **labels: str) -> float:
    """Add up the series of a metric that have these labels."""
    lines = wire.get(f"{router.url}/metrics").body.decode().splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = [line for line in lines if line.startswith(name) and all(each in line for each in wanted)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


@contextmanager
def streaming(url: str, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    """Begin a stream; its first line has been read."""
    connection = wire.connect(url)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    response.readline()
    try:
        yield response
    finally:
        connection.close()


def engine_at(engines: list[EmbeddedEngine], url: str | None) -> EmbeddedEngine:
    return next(engine for engine in engines if engine.url == url)


OPEN_STREAMS: list[tuple[str, dict[str, Any], Callable[[Any], str]]] = [
    (COMPLETIONS, {"prompt": QUESTION, "max_tokens": 2000}, lambda data: str(data["error"]["code"])),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2000},
        lambda data: str(data["error"]["code"]),
    ),
    ("/v1/responses", {"input": QUESTION, "max_output_tokens": 2000}, lambda data: str(data["code"])),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2000},
        lambda data: {"api_error": "upstream_unreachable"}[data["error"]["type"]],
    ),
]


@pytest.mark.bug(54, 55)
@pytest.mark.parametrize(("path", "body", "code"), OPEN_STREAMS, ids=[path for path, _, _ in OPEN_STREAMS])
def test_a_stream_whose_engine_is_killed_ends_with_one_error_event_and_a_clean_end(
    tmp_path: Path, start: Start, path: str, body: dict[str, Any], code: Callable[[Any], str]
) -> None:
    engines = engines_of(EmbeddedEngine, tmp_path, start)
    router = router_of(engines, tmp_path, start)
    with streaming(router.url, path, body | {"stream": True, "ignore_eos": True}) as response:
        engine_at(engines, response.headers[REPLICA]).kill()
        rest = response.read()  # raises where the body is cut
    event = rest.rstrip().rsplit(b"\n\n", 1)[-1]
    data = json.loads(event[event.index(b"data: ") + 6 :])
    assert code(data) == "upstream_unreachable"
    assert b"[DONE]" not in rest
    assert b"127.0.0.1" not in event
    assert metric(router, "warmfront_upstream_failures_total", kind="midstream") == 1
    assert metric(router, "warmfront_requests_total", outcome="failed") == 1


@pytest.mark.bug(113, 117, 119)
def test_no_client_sees_that_an_idle_engine_was_killed(tmp_path: Path, start: Start) -> None:
    engines = engines_of(EmbeddedEngine, tmp_path, start)
    router = router_of(engines, tmp_path, start)
    engines[0].kill()
    for number in range(12):
        answer = wire.post(router.url + COMPLETIONS, {"prompt": f"{number}: {QUESTION}", "max_tokens": 1})
        assert (answer.status, answer.headers[REPLICA]) == (200, engines[1].url)
    wait_for(lambda: serving(router) == 1, "the dead engine out of service", timeout_s=15)
    engines[0].start()
    engines[0].wait()
    numbers = itertools.count(100)

    def is_back() -> bool:
        """Ask once more: a circuit closes by live traffic."""
        prompt = f"{next(numbers)}: {QUESTION}"
        assert wire.post(router.url + COMPLETIONS, {"prompt": prompt, "max_tokens": 1}).status == 200
        return serving(router) == 2 and set(standings(router).values()) == {"serving"}

    wait_for(is_back, "full service again", timeout_s=60)

    def ask(number: int) -> str:
        return wire.post(router.url + COMPLETIONS, {"prompt": f"{number} {QUESTION}", "max_tokens": 20}).headers[
            REPLICA
        ]

    with ThreadPoolExecutor(12) as clients:  # at once: one after the other, all may go to the one that seems faster
        assert set(clients.map(ask, range(12))) == {engine.url for engine in engines}


@pytest.mark.bug(121)
def test_a_frozen_engine_is_noticed_by_its_streams_and_serves_again_once_it_moves(tmp_path: Path, start: Start) -> None:
    engines = engines_of(EmbeddedEngine, tmp_path, start)
    # Probes alone would notice a stopped process; here only the requests may.
    settings = ("router.health.frozen_after_s=1.5", "control.unready_after=1000", "router.policy.name=round_robin")
    router = router_of(engines, tmp_path, start, *settings)
    for number in range(12):  # the speed of prefill is learned
        with streaming(
            router.url, COMPLETIONS, {"prompt": f"{number} {QUESTION}", "max_tokens": 2, "stream": True}
        ) as it:
            it.read()
    body = {"prompt": QUESTION, "stream": True, "ignore_eos": True, "max_tokens": 4000}
    with streaming(router.url, COMPLETIONS, body) as response:
        frozen = engine_at(engines, response.headers[REPLICA])
        assert frozen.process is not None
        os.killpg(frozen.process.pid, signal.SIGSTOP)
        try:
            wait_for(lambda: standings(router)[frozen.url] == "open", "the standstill noticed", timeout_s=10)
            for number in range(4):
                answer = wire.post(router.url + COMPLETIONS, {"prompt": f"{number}? {QUESTION}", "max_tokens": 1})
                assert (answer.status, answer.headers[REPLICA] == frozen.url) == (200, False)
        finally:
            os.killpg(frozen.process.pid, signal.SIGCONT)
        assert response.readline() is not None
        wait_for(lambda: standings(router)[frozen.url] in ("slow_start", "serving"), "progress seen", timeout_s=10)
        assert metric(router, "warmfront_circuit_opens_total", reason="frozen") == 1


def test_an_overloaded_engine_is_relieved_by_the_other_and_its_refusal_passes_when_both_are_full(
    tmp_path: Path, start: Start
) -> None:
    engines = engines_of(SmallEngine, tmp_path, start)
    router = router_of(engines, tmp_path, start)

    def ask(number: int) -> wire.Answer:
        body = {"prompt": f"{number} {QUESTION}", "max_tokens": 60, "ignore_eos": True}
        return wire.post(router.url + COMPLETIONS, body)

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(12)))
    statuses = [answer.status for answer in answers]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= len(engines), "each engine runs at least one"
    refused = next(answer for answer in answers if answer.status == 503)
    direct = refused.json()["error"]
    assert "code" in direct
    assert "warmfront" not in json.dumps(direct)
    assert metric(router, "warmfront_retries_total", failure="rejected", answer="again") > 0
    assert "open" not in standings(router).values()
    assert wire.get(f"{router.url}/ready").status == 200


@pytest.mark.bug(82)
def test_a_stream_that_outlives_the_grace_time_ends_with_an_error_event(tmp_path: Path, start: Start) -> None:
    engines = engines_of(EmbeddedEngine, tmp_path, start)
    router = router_of(engines, tmp_path, start, "front.grace_s=0.5")
    body = {"prompt": QUESTION, "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with streaming(router.url, COMPLETIONS, body) as response:
        assert router.process is not None
        router.process.terminate()
        rest = response.read()
        assert router.process.wait(timeout=20) == 0
    data = json.loads(rest.rstrip().rsplit(b"data: ", 1)[-1])
    assert data["error"]["code"] == "router_overloaded"
    assert b"[DONE]" not in rest
