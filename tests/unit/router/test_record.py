from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.routing import PlainIndex, fleet, replica, request
from warmfront.config import PolicyConfig, RouterConfig
from warmfront.ports.replay import replay
from warmfront.router.record import BYTES_MAX, RecordedRouter, RecordingError, open_router, read
from warmfront.router.router import Router
from warmfront.types import Arrived, Dispatch, Event, Finished, FirstToken, FleetChanged, Usage


def drive(router: RecordedRouter, seed: int = 3, requests: int = 200) -> None:
    """Let requests come and go on three replicas."""
    rng = random.Random(seed)
    router.step([FleetChanged(0.0, fleet([replica(slot) for slot in range(3)]))])
    running: list[Dispatch] = []
    for number in range(requests):
        now_s = 0.05 * number
        events: list[Event] = [Arrived(request(number, time_s=now_s, prefix_key=rng.randrange(9)))]
        if len(running) > 8:
            ended = running.pop(rng.randrange(len(running)))
            slot = ended.choices[0].slot
            usage = Usage(1600, ended.choices[0].cached_tokens, rng.randrange(200))
            events += [FirstToken(ended.id, now_s, slot), Finished(ended.id, now_s, slot, 200, usage, 9)]
        running += [command for command in router.step(events) if isinstance(command, Dispatch)]


def recorded(path: Path, *, policy: str = "marginal_cost", bytes_max: int = BYTES_MAX) -> RecordedRouter:
    index = PlainIndex()
    index.slots = 3
    return RecordedRouter(RouterConfig(policy=PolicyConfig(name=policy)), index, path=path, bytes_max=bytes_max)


@pytest.mark.parametrize("policy", ["marginal_cost", "random", "power_of_two"])
def test_a_recording_replays_to_the_same_bytes(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "run.wf"
    router = recorded(path, policy=policy)
    drive(router)
    router.close()
    report = replay(path)
    assert report.is_identical, report.first_difference
    assert report.steps == 201
    assert report.commands == 200


def test_another_policy_on_the_same_recording_is_seen_to_differ(tmp_path: Path) -> None:
    path = tmp_path / "run.wf"
    router = recorded(path)
    drive(router)
    router.close()
    report = replay(path, config=RouterConfig(policy=PolicyConfig(name="round_robin")))
    assert not report.is_identical
    assert report.first_difference is not None


def test_a_recording_that_reaches_its_bound_ends_and_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.wf"
    router = recorded(path, bytes_max=20_000)
    drive(router)
    assert path.stat().st_size <= 20_000
    assert caplog.text.count("serving goes on") == 1
    assert replay(path).is_identical


def test_a_full_disk_ends_the_recording_and_serving_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no device that is always full")
    router = recorded(full)
    drive(router, requests=5)
    assert caplog.text.count("serving goes on") == 1


def test_a_frame_cut_off_at_the_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.wf"
    router = recorded(path)
    drive(router, requests=20)
    router.close()
    path.write_bytes(path.read_bytes()[:-3])
    report = replay(path)
    assert report.is_identical
    assert report.steps == 20


@pytest.mark.parametrize("content", [b"", b"hello", b"\x00\x00\x00\x01\xc0", b"\xff\xff\xff\xff"])
def test_other_files_are_not_recordings(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(RecordingError):
        read(path)
    with pytest.raises(RecordingError, match="cannot read"):
        read(tmp_path / "absent")


def test_the_configuration_decides_whether_a_router_records(tmp_path: Path) -> None:
    assert isinstance(open_router(RouterConfig(), PlainIndex()), Router)
    path = tmp_path / "run.wf"
    router = open_router(RouterConfig(record=str(path)), PlainIndex())
    assert isinstance(router, RecordedRouter)
    router.close()
    with pytest.raises(RecordingError, match="cannot record"):
        open_router(RouterConfig(record=str(tmp_path / "no" / "such")), PlainIndex())
