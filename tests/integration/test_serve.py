"""`warmfront serve` in front of embedded engines: the whole way of a request, and what fleets do to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import cast

import openai
import pytest
from support import wire
from support.service import free_port, wait_for

from .conftest import WARMFRONT, EmbeddedEngine, Serve, Start

QUESTION = "Which clouds come before a warm front, and how long before the rain do they come? " * 8
REPLICA, PREDICTED = "x-warmfront-replica", "x-warmfront-predicted-cached-tokens"
PROMPTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2},
    "/v1/completions": {"prompt": QUESTION, "max_tokens": 2},
    "/v1/responses": {"input": QUESTION, "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2},
}


@pytest.fixture
def engines(tmp_path: Path, start: Start) -> list[EmbeddedEngine]:
    return [cast(EmbeddedEngine, start(EmbeddedEngine(tmp_path / f"engine-{name}.log"))) for name in "ab"]


@pytest.fixture
def serve(tmp_path: Path, start: Start, engines: list[EmbeddedEngine]) -> Serve:
    router = cast(Serve, start(Serve(tmp_path / "serve.log", list(engines))))
    wait_for(lambda: streams(router)["live"] == 2, "both event streams live", timeout_s=20)
    return router


def streams(router: Serve) -> dict[str, int]:
    """Return how many replicas' event streams are live, stale or absent."""
    pools = wire.get(f"{router.url}/ready").json()["pools"]
    return cast(dict[str, int], pools[0]["events"]) if pools else {"live": 0}


def resident(router: Serve) -> dict[str, int]:
    """Return the tokens that each replica is known to hold of the chat question."""
    url = f"{router.admin_url}/admin/explain?path=/v1/chat/completions"
    answer = wire.post(url, PROMPTS["/v1/chat/completions"])
    assert answer.status == 200, answer.body
    return {row["id"]: row["overlap"]["confirmed"] for row in answer.json()["replicas"]}


@pytest.mark.bug(86, 157, 182)
@pytest.mark.parametrize("path", PROMPTS)
def test_a_prompt_returns_to_the_replica_that_holds_it_and_the_prediction_is_exact(serve: Serve, path: str) -> None:
    first = wire.post(serve.url + path, PROMPTS[path])
    assert (first.status, first.headers[PREDICTED]) == (200, "0"), first.body
    for _ in range(3):
        again = wire.post(serve.url + path, PROMPTS[path])
        assert again.headers[REPLICA] == first.headers[REPLICA]
        assert int(again.headers[PREDICTED]) == wire.cached_tokens(again.json()) > 0


def test_the_backlog_shows_what_is_in_flight_and_the_limits_in_force(serve: Serve) -> None:
    path = "/v1/chat/completions"
    assert wire.post(serve.url + path, PROMPTS[path], headers={"x-session-id": "s"}).status == 200

    def backlog() -> dict[str, object]:
        return cast(dict[str, object], wire.get(f"{serve.url}/health/backlog").json())

    wait_for(lambda: backlog()["in_flight_requests"] == 0, "nothing in flight", timeout_s=10)
    assert backlog()["limits"] == {
        "queue": 1024,
        "queue_per_flow": None,
        "in_flight": None,
        "in_flight_per_replica": None,
    }
    (pool,) = cast(list[dict[str, object]], backlog()["pools"])
    assert (pool["waiting"], pool["oldest_wait_s"], pool["rejected_total"]) == (0, 0.0, {})
    assert 'warmfront_session_keys_total{source="header"} 1' in wire.get(f"{serve.url}/metrics").body.decode()


def test_different_first_prompts_spread_over_idle_replicas(serve: Serve) -> None:
    bodies = [{"prompt": f"{number}: {QUESTION}", "max_tokens": 1} for number in range(8)]
    chosen = {wire.post(f"{serve.url}/v1/completions", body).headers[REPLICA] for body in bodies}
    assert len(chosen) == 2


@pytest.mark.bug(53, 119)
def test_an_engine_that_restarts_is_forgotten_and_learned_again(serve: Serve, engines: list[EmbeddedEngine]) -> None:
    path = "/v1/chat/completions"
    url = wire.post(serve.url + path, PROMPTS[path]).headers[REPLICA]
    wait_for(lambda: resident(serve)[url] > 0, "the prompt confirmed", timeout_s=10)
    engine = next(engine for engine in engines if engine.url == url)
    engine.kill()
    answer = wire.post(serve.url + path, PROMPTS[path])
    assert (answer.status, answer.headers[REPLICA] == url) == (200, False)
    engine.start()
    engine.wait()
    wait_for(lambda: resident(serve)[url] == 0, "the empty engine known as empty", timeout_s=20)
    wait_for(lambda: streams(serve)["live"] == 2, "both event streams live", timeout_s=20)
    again = wire.post(serve.url + path, PROMPTS[path])
    assert int(again.headers[PREDICTED]) == wire.cached_tokens(again.json())


def test_the_way_to_each_engine_is_measured_and_told(serve: Serve) -> None:
    def ways() -> list[float | None]:
        (pool,) = wire.get(f"{serve.admin_url}/admin/fleet").json()["pools"]
        return [row["load"]["rtt_s"] for row in pool["replicas"]]

    wait_for(lambda: None not in ways(), "both ways measured", timeout_s=30)
    assert all(0.0 < way_s < 0.5 for way_s in ways() if way_s is not None)
    (pool,) = wire.get(f"{serve.admin_url}/admin/fleet").json()["pools"]
    assert all("net_s" in row["router"] for row in pool["replicas"])


def test_the_control_process_is_started_again_and_serving_goes_on(serve: Serve) -> None:
    def children() -> set[int]:
        assert serve.process is not None
        names = Path(f"/proc/{serve.process.pid}/task").glob("*/children")
        return {int(pid) for name in names for pid in name.read_text().split()}

    before = children()
    assert len(before) == 1
    os.kill(*before, signal.SIGKILL)
    assert wire.post(f"{serve.url}/v1/completions", PROMPTS["/v1/completions"]).status == 200
    wait_for(lambda: bool(children() - before), "a new control process", timeout_s=10)

    def has_admin() -> bool:
        try:
            return wire.get(f"{serve.admin_url}/admin/fleet").status == 200
        except OSError:
            return False

    wait_for(has_admin, "the admin API", timeout_s=20)
    assert wire.post(f"{serve.url}/v1/completions", PROMPTS["/v1/completions"]).status == 200


@pytest.mark.bug(82)
def test_a_termination_signal_lets_the_stream_in_flight_end(serve: Serve) -> None:
    body = PROMPTS["/v1/completions"] | {"max_tokens": 120, "stream": True}
    connection = wire.connect(serve.url)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    assert serve.process is not None
    serve.process.terminate()
    rest = response.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert serve.process.wait(timeout=20) == 0
    with pytest.raises(ConnectionRefusedError):
        wire.get(f"{serve.url}/health")
    connection.close()


@pytest.mark.bug(10, 101)
def test_a_client_that_leaves_frees_the_engine(serve: Serve, engines: list[EmbeddedEngine]) -> None:
    def running() -> float:
        pages = [wire.get(f"{engine.url}/metrics").body.decode() for engine in engines]
        lines = [line for page in pages for line in page.splitlines() if line.startswith("vllm:num_requests_running")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    body = PROMPTS["/v1/completions"] | {"max_tokens": 2000, "stream": True}
    connection = wire.connect(serve.url)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    assert connection.getresponse().readline().startswith(b"data: ")
    wait_for(lambda: running() == 1, "the request running", timeout_s=10)
    connection.close()
    wait_for(lambda: running() == 0, "the engine idle", timeout_s=5)


@pytest.mark.bug(93)
def test_unknown_models_and_paths_are_refused_in_the_openai_format(serve: Serve) -> None:
    unknown = wire.post(f"{serve.url}/v1/completions", {"model": "nobody", "prompt": "a"})
    assert (unknown.status, unknown.json()["error"]["code"]) == (404, "model_not_found")
    admin = wire.post(f"{serve.url}/reset_prefix_cache", {})
    assert (admin.status, admin.json()["error"]["code"]) == (404, "path_not_found")
    models = wire.get(f"{serve.url}/v1/models").json()
    assert [card["object"] for card in models["data"]] == ["model"]


@pytest.mark.bug(187)
def test_the_official_client_streams_through(serve: Serve) -> None:
    with openai.OpenAI(base_url=f"{serve.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        chunks = list(
            client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=5,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_metrics_agree_with_what_was_sent(serve: Serve) -> None:
    path = "/v1/completions"
    for _ in range(3):
        wire.post(serve.url + path, PROMPTS[path])
    page = wire.get(f"{serve.url}/metrics").body.decode()
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#"))
    total = sum(float(value) for name, value in values.items() if name.startswith("warmfront_requests_total"))
    predicted = sum(float(v) for n, v in values.items() if n.startswith("warmfront_predicted_cached_tokens_total"))
    reported = sum(float(v) for n, v in values.items() if n.startswith("warmfront_reported_cached_tokens_total"))
    assert total == 3
    assert predicted == reported > 0
    assert QUESTION[:20] not in page


@pytest.mark.bug(26, 29)
def test_no_tokenizer_is_said_loudly_and_still_routes_by_prefix(
    tmp_path: Path, start: Start, engines: list[EmbeddedEngine]
) -> None:
    empty = tmp_path / "no-model-here"
    empty.mkdir()
    router = cast(Serve, start(Serve(tmp_path / "approximate.log", list(engines), f"fleet.tokenizer={empty}")))
    wait_for(lambda: wire.get(f"{router.url}/ready").json()["pools"] != [], "a pool", timeout_s=20)
    pool = wire.get(f"{router.url}/ready").json()["pools"][0]
    assert (pool["tokens"], str(empty) in pool["reason"]) == ("approximate", True)
    assert "routed by bytes" in router.log_tail()
    path = "/v1/chat/completions"
    chosen = {wire.post(router.url + path, PROMPTS[path]).headers[REPLICA] for _ in range(4)}
    assert len(chosen) == 1


def test_a_recording_decided_again_gives_the_same_commands(
    tmp_path: Path, start: Start, engines: list[EmbeddedEngine]
) -> None:
    recording = tmp_path / "recording"
    router = start(Serve(tmp_path / "recorded.log", list(engines), f"router.record={recording}"))
    for number in range(6):
        wire.post(f"{router.url}/v1/completions", {"prompt": f"{number % 2}: {QUESTION}", "max_tokens": 2})
    router.stop()
    result = subprocess.run([WARMFRONT, "replay", str(recording)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    assert QUESTION[:20].encode() not in recording.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no servers"),
        (["--replica", "ftp://host"], "http://"),
        (["--replica", "http://127.0.0.1:1", "--set", "router.flow.queue_max=-1"], "router.flow.queue_max"),
        (["--replica", "http://127.0.0.1:1", "--policy", "best"], "best"),
        (["--replica", "http://127.0.0.1:1", "--listen", "{taken}"], "{taken}"),
    ],
)
def test_a_mistake_at_the_start_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [WARMFRONT, "serve", "--admin-listen", f"127.0.0.1:{free_port()}"]
        command += [argument.replace("{taken}", address) for argument in arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2, result.stderr
    assert words.replace("{taken}", address) in result.stderr
    assert "Traceback" not in result.stderr
