"""The router's own restart, with real processes: what it knew is there again, and what is no longer true is not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any, cast

import pytest
from support import wire
from support.service import wait_for

from .conftest import EmbeddedEngine, Serve, Start

PATH = "/v1/completions"
REPLICA, PREDICTED = "x-warmfront-replica", "x-warmfront-predicted-cached-tokens"
PROMPTS = [f"Front {number}: " + "clouds come before the rain and wind comes after it. " * 12 for number in range(8)]


class ForgetfulEngine(EmbeddedEngine):
    """Keeps too few batches to replay its life, as an engine that has run for days."""

    def command(self) -> list[str]:
        return [*super().command(), "--kv-events-buffer-steps", "12"]


class SilentEngine(EmbeddedEngine):
    """Publishes no events."""

    def command(self) -> list[str]:
        return [*super().command(), "--no-kv-events"]


def complete(router: Serve, prompt: str) -> tuple[str, int, int]:
    """Return the replica, and the cached tokens that were predicted and reported."""
    answer = wire.post(router.url + PATH, {"prompt": prompt, "max_tokens": 2})
    assert answer.status == 200, answer.body
    return answer.headers[REPLICA], int(answer.headers[PREDICTED]), wire.cached_tokens(answer.json())


def events(router: Serve) -> dict[str, int]:
    pools = wire.get(f"{router.url}/ready").json()["pools"]
    return cast(dict[str, int], pools[0]["events"]) if pools else {"live": 0}


def memory(router: Serve) -> dict[str, Any]:
    return cast(dict[str, Any], wire.get(f"{router.admin_url}/admin/snapshot/state").json())


def learned(router: Serve) -> dict[str, Any]:
    pools = wire.get(f"{router.admin_url}/admin/policy").json()["learned"]
    return cast(dict[str, Any], next(iter(pools.values())))


def settings(path: Path) -> tuple[str, ...]:
    return (f"snapshot.path={path}", "snapshot.interval_s=1", "front.grace_s=5")


def end(router: Serve, how: str) -> None:
    """End the router's process alone; its control process has to notice."""
    assert router.process is not None
    if how == "SIGKILL":
        asked_s = time.monotonic()
        wait_for(lambda: is_written_since(router, asked_s), "a snapshot with all that was learned", timeout_s=20)
    router.process.send_signal(signal.Signals[how])
    router.process.wait(timeout=20)
    router.process = None


def is_written_since(router: Serve, asked_s: float) -> bool:
    """Whether a snapshot was begun after `asked_s` and is in place."""
    state = memory(router)
    return state["age_s"] is not None and state["age_s"] + state["write_s"] < time.monotonic() - asked_s


def is_listening(router: Serve) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", router.port)):
        return True
    return False


def again(router: Serve) -> None:
    router.start()
    router.wait()


@pytest.mark.bug(45)
@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_a_restarted_router_knows_what_engines_hold_beyond_what_they_replay(
    tmp_path: Path, start: Start, how: str
) -> None:
    engines = [start(ForgetfulEngine(tmp_path / f"engine-{name}.log")) for name in "ab"]
    router = cast(Serve, start(Serve(tmp_path / "serve.log", engines, *settings(tmp_path / "snapshot"))))
    wait_for(lambda: events(router)["live"] == 2, "both event streams live", timeout_s=20)
    homes = {prompt: complete(router, prompt)[0] for prompt in PROMPTS}
    for prompt in PROMPTS:
        assert complete(router, prompt)[0] == homes[prompt]
    before = learned(router)
    end(router, how)
    again(router)
    wait_for(lambda: events(router)["live"] == 2, "both event streams live", timeout_s=20)
    assert learned(router) == before
    for prompt in PROMPTS:
        home, predicted, reported = complete(router, prompt)
        assert (home, predicted) == (homes[prompt], reported)
        assert reported > 0
    state = memory(router)["restored"]
    assert (state["from"], state["replicas_restored"], state["refused"]) == ("file", 2, [])


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_requests_that_come_before_a_restarted_router_knows_its_engines_are_answered(
    tmp_path: Path, start: Start, how: str
) -> None:
    engines = [start(EmbeddedEngine(tmp_path / f"engine-{name}.log")) for name in "ab"]
    router = cast(Serve, start(Serve(tmp_path / "serve.log", engines)))
    assert router.process is not None
    for _ in range(3):
        router.process.send_signal(signal.Signals[how])
        router.process.wait(timeout=20)
        router.process = None
        router.start()
        wait_for(lambda: is_listening(router), "somebody listens", timeout_s=20)
        models = wire.get(f"{router.url}/v1/models").json()["data"]
        assert complete(router, PROMPTS[0])[0] in {engine.url for engine in engines}
        assert len(models) == 1


def test_a_router_whose_engines_do_not_answer_says_so_in_time(tmp_path: Path, start: Start) -> None:
    frozen = start(EmbeddedEngine(tmp_path / "engine.log"))
    assert frozen.process is not None
    os.killpg(frozen.process.pid, signal.SIGSTOP)
    router = Serve(tmp_path / "serve.log", [frozen], "front.fleet_wait_s=0.5", "control.probe_timeout_s=30")
    router.health_path = "/health"
    start(router)
    answer = wire.post(router.url + PATH, {"prompt": "Hello", "max_tokens": 2})
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "no_ready_replica"
    ready = wire.get(f"{router.url}/ready")
    assert (ready.status, ready.json()["partial"]) == (503, True)


@pytest.mark.bug(53)
def test_an_engine_that_restarted_while_the_router_was_away_is_not_believed(tmp_path: Path, start: Start) -> None:
    engines = [start(ForgetfulEngine(tmp_path / f"engine-{name}.log")) for name in "ab"]
    router = cast(Serve, start(Serve(tmp_path / "serve.log", engines, *settings(tmp_path / "snapshot"))))
    wait_for(lambda: events(router)["live"] == 2, "both event streams live", timeout_s=20)
    homes = {prompt: complete(router, prompt)[0] for prompt in PROMPTS}
    end(router, "SIGTERM")
    emptied = next(engine for engine in engines if engine.url == homes[PROMPTS[0]])
    emptied.kill()
    emptied.start()
    emptied.wait()
    again(router)
    wait_for(lambda: events(router)["live"] == 2, "both event streams live", timeout_s=20)
    for prompt in PROMPTS:
        home, predicted, reported = complete(router, prompt)
        assert predicted == reported, "a claim on an empty cache"
        assert reported > 0 or homes[prompt] == emptied.url
        assert homes[prompt] == emptied.url or home == homes[prompt]


@pytest.mark.bug(53)
def test_predictions_about_silent_engines_come_back_and_do_not_outlive_what_is_known(
    tmp_path: Path, start: Start
) -> None:
    engines = [start(SilentEngine(tmp_path / f"engine-{name}.log")) for name in "ab"]
    router = cast(Serve, start(Serve(tmp_path / "serve.log", engines, *settings(tmp_path / "snapshot"))))
    homes = {prompt: complete(router, prompt)[0] for prompt in PROMPTS}
    end(router, "SIGTERM")
    again(router)
    wait_for(lambda: memory(router)["restored"]["replicas_restored"] == 2, "both replicas restored", timeout_s=20)
    for prompt in PROMPTS:
        home, predicted, reported = complete(router, prompt)
        assert (home, predicted) == (homes[prompt], reported)
        assert reported > 0


@pytest.mark.parametrize("content", [b"", b"not a snapshot at all", b"WARMSNAP\x01\x00\x00\x00\x01\x00\x00\x00"])
def test_a_broken_file_is_named_and_stops_nothing(tmp_path: Path, start: Start, content: bytes) -> None:
    path = tmp_path / "snapshot"
    path.write_bytes(content)
    engine = start(EmbeddedEngine(tmp_path / "engine.log"))
    router = cast(Serve, start(Serve(tmp_path / "serve.log", [engine], *settings(path))))
    assert complete(router, PROMPTS[0])[1:] == (0, 0)
    (refused,) = memory(router)["restored"]["refused"]
    assert str(path) in refused
    assert "the snapshot is not used" in router.log.read_text()
    assert "warmfront_snapshot_refusals_total" in wire.get(f"{router.url}/metrics").body.decode()
    if content.startswith(b"not"):
        wait_for(lambda: memory(router)["failures"] > 0, "the snapshot not written", timeout_s=15)
        assert path.read_bytes() == content, "what was never a snapshot is never written over"
    else:
        wait_for(lambda: path.read_bytes() != content, "a whole snapshot in its place", timeout_s=15)


def test_a_second_router_is_seeded_by_the_first(tmp_path: Path, start: Start) -> None:
    engines = [start(ForgetfulEngine(tmp_path / f"engine-{name}.log")) for name in "ab"]
    first = cast(Serve, start(Serve(tmp_path / "first.log", engines)))
    wait_for(lambda: events(first)["live"] == 2, "both event streams live", timeout_s=20)
    homes = {prompt: complete(first, prompt)[0] for prompt in PROMPTS}
    second = cast(Serve, start(Serve(tmp_path / "second.log", engines, f"snapshot.seed_from={first.admin_url}")))
    wait_for(lambda: events(second)["live"] == 2, "both event streams live", timeout_s=20)
    assert memory(second)["restored"]["from"] == first.admin_url
    for prompt in PROMPTS:
        home, predicted, reported = complete(second, prompt)
        assert (home, predicted) == (homes[prompt], reported)
        assert reported > 0
    assert [path for path in tmp_path.iterdir() if path.suffix != ".log"] == [], "no file is left"


def test_a_peer_that_gives_nothing_delays_no_request(tmp_path: Path, start: Start) -> None:
    engine = start(EmbeddedEngine(tmp_path / "engine.log"))
    nobody = "snapshot.seed_from=http://127.0.0.1:9"
    router = cast(Serve, start(Serve(tmp_path / "serve.log", [engine], nobody)))
    assert complete(router, PROMPTS[0])[1:] == (0, 0)
    wait_for(lambda: events(router)["live"] == 1, "the event stream live", timeout_s=20)
    (refused,) = memory(router)["restored"]["refused"]
    assert "127.0.0.1:9" in refused


def test_a_snapshot_holds_neither_prompts_nor_keys(tmp_path: Path, start: Start) -> None:
    path = tmp_path / "snapshot"
    engine = start(EmbeddedEngine(tmp_path / "engine.log"))
    secret = "sk-secret-of-the-engine"
    fleet = json.dumps([{"url": engine.url, "headers": {"authorization": f"Bearer {secret}"}}])
    router = cast(Serve, start(Serve(tmp_path / "serve.log", [], f"fleet.servers={fleet}", *settings(path))))
    complete(router, "The password of the tower is swordfish. " * 20)
    end(router, "SIGTERM")
    content = path.read_bytes()
    assert content.startswith(b"WARMSNAP")
    assert path.stat().st_mode & 0o077 == 0
    for word in (b"swordfish", b"password", secret.encode()):
        assert word not in content
