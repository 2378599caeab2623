"""Change without pain: what clients see while fleets, configurations and processes change under them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import pytest
from support import wire
from support.clients import Clients
from support.service import wait_for

from .conftest import WARMFRONT, EmbeddedEngine, Serve, Start

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "Which clouds come before a warm front? " * 8, "max_tokens": 2}
REPLICA = "x-warmfront-replica"
EXCHANGE_S = 20.0
serials = itertools.count()


class ServeFile(Serve):
    """`warmfront serve` with everything but its addresses in a file."""

    def __init__(self, log: Path, config: Path, **extra: str) -> None:
        super().__init__(log, [])
        self.config, self.extra = config, extra

    def command(self) -> list[str]:
        command = [WARMFRONT, "serve", "--listen", f"127.0.0.1:{self.port}", "--config", str(self.config)]
        return [*command, "--admin-listen", f"127.0.0.1:{self.admin_port}"]

    def variables(self) -> dict[str, str]:
        return super().variables() | self.extra


class Fleet:
    """Engines in a list on disk, and a router that watches it."""

    def __init__(self, folder: Path, start: Start) -> None:
        self.folder, self.start = folder, start
        self.engines = [cast(EmbeddedEngine, start(EmbeddedEngine(folder / f"engine-{name}.log"))) for name in "ab"]
        self.list = folder / "servers.yaml"
        self.config = folder / "warmfront.yaml"
        self.name([engine.url for engine in self.engines])
        self.tree: dict[str, Any] = {
            "fleet": {"discovery": [{"type": "file", "path": str(self.list), "interval_s": 0.05}]},
            "control": {"probe_interval_s": 0.1},
        }
        self.write()

    def name(self, urls: list[str]) -> None:
        draft = self.list.with_suffix(".new")
        draft.write_text(json.dumps(urls))
        draft.replace(self.list)

    def write(self) -> None:
        self.config.write_text(json.dumps(self.tree))

    def serve(self, name: str = "serve") -> ServeFile:
        router = cast(ServeFile, self.start(ServeFile(self.folder / f"{name}.log", self.config)))
        wait_for(lambda: len(ready(router)) == len(self.engines), "all engines ready", timeout_s=EXCHANGE_S)
        return router

    def successor(self, before: ServeFile, name: str) -> ServeFile:
        """Start another process for the same addresses; the one before may still be there."""
        router = ServeFile(self.folder / f"{name}.log", self.config)
        router.port, router.admin_port, router.admin_url = before.port, before.admin_port, before.admin_url
        self.start(router)
        return router


@pytest.fixture
def fleet(tmp_path: Path, start: Start) -> Fleet:
    return Fleet(tmp_path, start)


def replicas(router: Serve) -> dict[str, dict[str, Any]]:
    report = wire.get(f"{router.admin_url}/admin/fleet").json()
    return {replica["id"]: replica for pool in report["pools"] for replica in pool["replicas"]}


def ready(router: Serve) -> list[str]:
    try:
        return [name for name, replica in replicas(router).items() if replica["ready"]]
    except OSError:
        return []  # the admin API comes a moment after the clients' port


def chosen(router: Serve, requests: int = 12) -> set[str]:
    """Send prompts that have nothing in common, and return where they went."""
    bodies = [{"prompt": f"{next(serials)} {BODY['prompt']}", "max_tokens": 1} for _ in range(requests)]
    return {wire.post(router.url + COMPLETIONS, body).headers[REPLICA] for body in bodies}


class Stream:
    """An answer that has begun and not ended."""

    def __init__(self, router: Serve, tokens: int = 150) -> None:
        body = BODY | {"max_tokens": tokens, "stream": True}
        self.connection = wire.connect(router.url)
        self.connection.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
        self.response = self.connection.getresponse()
        self.replica = self.response.headers[REPLICA]
        assert self.response.readline().startswith(b"data: ")

    def ends_well(self) -> bool:
        rest = self.response.read()
        self.connection.close()
        return rest.endswith(b"data: [DONE]\n\n")


def metrics(router: Serve) -> str:
    return wire.get(f"{router.url}/metrics").body.decode()


# -- who gets requests


@pytest.mark.bug(125, 126, 134, 142)
def test_a_server_that_leaves_the_list_gets_no_more_requests_and_finishes_its_stream(fleet: Fleet) -> None:
    router = fleet.serve()
    stream = Stream(router)
    fleet.name([engine.url for engine in fleet.engines if engine.url != stream.replica])
    wait_for(lambda: stream.replica not in replicas(router), "the server gone", timeout_s=EXCHANGE_S)
    assert stream.replica not in chosen(router)
    assert stream.ends_well()
    label = f'replica="{stream.replica}"'
    wait_for(lambda: label not in metrics(router), "its series gone", timeout_s=EXCHANGE_S)
    fleet.name([engine.url for engine in fleet.engines])
    wait_for(lambda: stream.replica in ready(router), "the server back", timeout_s=EXCHANGE_S)
    assert stream.replica in chosen(router)


def test_no_client_sees_that_the_only_server_is_replaced_by_another(
    fleet: Fleet, clients: Callable[[Serve], Clients]
) -> None:
    router = fleet.serve()
    first, second = fleet.engines

    def leave_only(engine: EmbeddedEngine) -> None:
        fleet.name([engine.url])
        wait_for(lambda: set(replicas(router)) <= {engine.url}, "the other one gone", timeout_s=EXCHANGE_S)

    leave_only(first)
    asking = clients(router)
    asking.wait_for(answers=3)
    signal_to(second, signal.SIGSTOP)  # does not say yet what it serves
    leave_only(second)
    waiting = f"{router.url}/health/backlog"
    wait_for(
        lambda: bool(asking.failures) or wire.get(waiting).json()["waiting_requests"] == 2,
        "both wait",
        timeout_s=EXCHANGE_S,
    )
    assert asking.failures == []
    assert "its last server left" in str(wire.get(f"{router.url}/ready").json()["degraded"])
    signal_to(second, signal.SIGCONT)
    asking.wait_for(answers=3)


def signal_to(engine: EmbeddedEngine, number: signal.Signals) -> None:
    assert engine.process is not None
    os.killpg(engine.process.pid, number)


@pytest.mark.bug(127, 129)
def test_a_list_that_cannot_be_read_takes_no_server_away(fleet: Fleet) -> None:
    router = fleet.serve()
    fleet.list.unlink()
    up = f'warmfront_discovery_up{{source="file {fleet.list}"}} '
    wait_for(lambda: f"{up}0" in metrics(router), "the source seen as down", timeout_s=EXCHANGE_S)
    assert len(chosen(router)) == 2
    assert any("cannot read it" in words for words in wire.get(f"{router.url}/ready").json()["degraded"])
    fleet.name([engine.url for engine in fleet.engines])
    wait_for(lambda: f"{up}1" in metrics(router), "the source seen as up", timeout_s=EXCHANGE_S)


@pytest.mark.bug(139)
def test_a_drained_replica_gets_no_new_request_once_the_answer_is_there(fleet: Fleet) -> None:
    router = fleet.serve()
    stream = Stream(router)
    path = f"{router.admin_url}/admin/replicas/{quote(stream.replica, safe='')}"
    answer = wire.post(f"{path}/drain", {}).json()
    assert answer == {"replicas": [{"id": stream.replica, "draining": True, "in_flight": 1}]}
    assert stream.replica not in chosen(router)
    assert stream.ends_well()
    shown = replicas(router)[stream.replica]
    assert (shown["draining"], shown["notes"][0]) == (True, "draining: takes no new requests")
    wire.post(f"{path}/undrain", {})
    assert stream.replica in chosen(router, 24)
    unknown = wire.post(f"{router.admin_url}/admin/replicas/nobody:1/drain", {})
    assert (unknown.status, "there is no replica nobody:1" in unknown.body.decode()) == (400, True)


def test_a_control_process_that_is_killed_forgets_neither_drains_nor_servers(fleet: Fleet) -> None:
    router = fleet.serve()
    drained = fleet.engines[0].url
    wire.post(f"{router.admin_url}/admin/replicas/{quote(drained, safe='')}/drain", {})
    fleet.list.unlink()
    (child,) = children(router)
    os.kill(child, signal.SIGKILL)
    wait_for(lambda: bool(children(router) - {child}), "a new control process", timeout_s=EXCHANGE_S)
    wait_for(lambda: ready(router) == [fleet.engines[1].url], "the new one knows", timeout_s=EXCHANGE_S)
    assert set(replicas(router)) == {engine.url for engine in fleet.engines}
    assert chosen(router) == {fleet.engines[1].url}


def children(router: Serve) -> set[int]:
    assert router.process is not None
    names = Path(f"/proc/{router.process.pid}/task").glob("*/children")
    return {int(pid) for name in names for pid in name.read_text().split()}


# -- configuration


@pytest.mark.bug(27)
def test_a_reload_drops_no_stream_and_forgets_no_cache(fleet: Fleet) -> None:
    router = fleet.serve()
    first = wire.post(router.url + COMPLETIONS, BODY)
    stream = Stream(router)
    policy = {"cost": {"price_max": 7.5}}
    fleet.tree |= {"front": {"body_bytes_max": 200, "io_threads": 2}, "router": {"policy": policy}}
    fleet.write()
    answer = wire.post(f"{router.admin_url}/admin/reload", {})
    assert answer.json() == {
        "applied": ["front.body_bytes_max", "router.policy.cost.price_max"],
        "restart_needed": ["front.io_threads"],
    }
    assert wire.post(router.url + COMPLETIONS, BODY).status == 413, "a bound of the front in force"
    assert wire.get(f"{router.admin_url}/admin/policy").json()["constants"]["cost"]["price_max"] == 7.5
    effective = wire.get(f"{router.admin_url}/admin/config").json()
    assert (effective["front"]["body_bytes_max"], effective["front"]["io_threads"]) == (200, 1)
    assert stream.ends_well(), "a request ends under the configuration it began with"
    fleet.tree["front"] = {}
    fleet.write()
    wire.post(f"{router.admin_url}/admin/reload", {})
    again = wire.post(router.url + COMPLETIONS, BODY)
    assert again.headers[REPLICA] == first.headers[REPLICA]
    assert int(again.headers["x-warmfront-predicted-cached-tokens"]) == wire.cached_tokens(again.json()) > 0


@pytest.mark.bug(139)
def test_a_bad_file_changes_nothing_and_is_said(fleet: Fleet) -> None:
    router = fleet.serve()
    fleet.tree["control"] = {"probe_interval_s": -1}
    fleet.write()
    answer = wire.post(f"{router.admin_url}/admin/reload", {})
    assert answer.status == 400
    words = f"control.probe_interval_s: expected `float` > 0.0 ({fleet.config})"
    assert answer.json()["error"]["message"] == words
    assert len(chosen(router)) == 2
    assert 'warmfront_config_reloads_total{outcome="refused"} 1' in metrics(router)
    log = router.log.read_text()
    assert log.count(f"the one before stays in force: {words}") == 1


@pytest.mark.bug(131)
def test_a_hangup_reloads_and_the_servers_of_the_new_file_alone_are_asked(fleet: Fleet) -> None:
    router = fleet.serve()
    kept = fleet.engines[1].url
    fleet.tree["fleet"] = {"servers": [{"url": kept}]}
    fleet.write()
    assert router.process is not None
    router.process.send_signal(signal.SIGHUP)
    wait_for(lambda: set(replicas(router)) == {kept}, "the new fleet", timeout_s=EXCHANGE_S)
    assert chosen(router) == {kept}
    (child,) = children(router)
    os.kill(child, signal.SIGKILL)
    wait_for(lambda: bool(children(router) - {child}), "a new control process", timeout_s=EXCHANGE_S)
    wait_for(lambda: ready(router) == [kept], "the reloaded configuration again", timeout_s=EXCHANGE_S)
    assert set(replicas(router)) == {kept}


# -- the process itself


@pytest.mark.bug(137)
def test_after_the_signal_readiness_fails_and_clients_are_served_until_the_settle_time_is_over(fleet: Fleet) -> None:
    fleet.tree["front"] = {"settle_s": 3.0}
    fleet.write()
    router = fleet.serve()
    kept = wire.connect(router.url)
    kept.request("GET", "/health")
    kept.getresponse().read()
    assert router.process is not None
    router.process.terminate()
    wait_for(lambda: wire.get(f"{router.url}/ready").status == 503, "readiness failing", timeout_s=EXCHANGE_S)
    kept.request("POST", COMPLETIONS, json.dumps(BODY), {"content-type": "application/json"})
    answer = kept.getresponse()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert wire.post(router.url + COMPLETIONS, BODY).status == 200
    assert router.process.wait(timeout=EXCHANGE_S) == 0
    with pytest.raises(ConnectionRefusedError):
        wire.get(f"{router.url}/health")
    log = router.log.read_text()
    assert "disconnected" not in log, "a normal stop warns of nothing"
    assert '"level":"error"' not in log


def test_a_router_that_is_drained_says_so_and_serves_and_can_come_back(fleet: Fleet) -> None:
    router = fleet.serve()
    answer = wire.post(f"{router.admin_url}/admin/drain", {}).json()
    assert (answer["draining"], answer["requests"]) == (True, 0)
    assert wire.get(f"{router.url}/ready").json() == {"ready": False, "draining": True}
    served = wire.post(router.url + COMPLETIONS, BODY)
    assert (served.status, served.headers["connection"]) == (200, "close")
    assert wire.post(f"{router.admin_url}/admin/undrain", {}).json()["draining"] is False
    assert wire.get(f"{router.url}/ready").status == 200
    assert wire.post(router.url + COMPLETIONS, BODY).headers.get("connection") != "close"


@pytest.fixture
def clients() -> Iterator[Callable[[Serve], Clients]]:
    running: list[Clients] = []

    def begin(router: Serve) -> Clients:
        running.append(Clients(router.url + COMPLETIONS, BODY | {"max_tokens": 1}))
        return running[-1]

    yield begin
    for each in running:
        each.stop()


def test_an_upgrade_refuses_and_resets_no_connection(fleet: Fleet, clients: Callable[[Serve], Clients]) -> None:
    fleet.tree["front"] = {"handover": str(fleet.folder / "handover.sock")}
    fleet.write()
    router = fleet.serve("first")
    stream = Stream(router)
    sent = clients(router)
    sent.wait_for(20)
    for name in ("second", "third"):
        successor = fleet.successor(router, name)
        assert router.process is not None
        assert router.process.wait(timeout=EXCHANGE_S) == 0
        router = successor
        sent.wait_for(20)
        wait_for(lambda router=router: len(ready(router)) == 2, "the admin API of the next", timeout_s=EXCHANGE_S)
        assert stream.ends_well() if name == "second" else True
    assert sent.failures == []


def test_a_connection_waits_at_the_socket_of_systemd_while_the_router_is_restarted(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        router = ServeFile(fleet.folder / "held.log", fleet.config, LISTEN_FDS="1")
        router.extra |= {"LISTEN_FDS_FIRST_FD": str(held.fileno())}
        router.port, router.descriptors = held.getsockname()[1], (held.fileno(),)
        fleet.start(router)
        wait_for(lambda: len(ready(router)) == 2, "all engines ready", timeout_s=EXCHANGE_S)
        assert wire.post(router.url + COMPLETIONS, BODY).status == 200
        router.stop()
        waiting = wire.connect(router.url)
        waiting.request("GET", "/health")
        router.start()
        assert waiting.getresponse().status == 200
        waiting.close()


def test_a_process_that_never_becomes_ready_takes_nothing_over(fleet: Fleet) -> None:
    fleet.tree["front"] = {"handover": str(fleet.folder / "handover.sock"), "handover_timeout_s": 0.5}
    fleet.write()
    router = fleet.serve()
    fleet.name([])
    wait_for(lambda: not replicas(router), "no servers", timeout_s=EXCHANGE_S)
    broken = ServeFile(fleet.folder / "broken.log", fleet.config)
    broken.port = router.port
    broken.start()
    try:
        assert broken.process is not None
        assert broken.process.wait(timeout=EXCHANGE_S) == 2
    finally:
        broken.kill()
    assert "the process before stays in charge" in broken.log.read_text()
    fleet.name([engine.url for engine in fleet.engines])
    wait_for(lambda: len(ready(router)) == 2, "the servers back", timeout_s=EXCHANGE_S)
    assert wire.post(router.url + COMPLETIONS, BODY).status == 200
