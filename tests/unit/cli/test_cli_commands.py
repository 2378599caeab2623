from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result
from warmfront.cli import COMMANDS, check, main
from warmfront.config import Config, SnapshotConfig


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=stdin)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_exists_and_says_what_the_list_says(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.name == name
    assert command.help


def test_help_lists_every_command_without_importing_any() -> None:
    code = (
        "import sys; from warmfront.cli import main; main(['--help'], standalone_mode=False);"
        "print(sorted(name for name in sys.modules if name.startswith('warmfront.cli.')"
        " or name in ('aiohttp', 'rich', 'warmfront.core')), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in COMMANDS)
    assert done.stderr.strip() == "[]"


def test_commands_that_ask_a_router_import_no_server() -> None:
    code = "import sys, warmfront.cli.client; print('aiohttp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_version_is_one_line() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.output.startswith("warmfront ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve",),
        ("serve", "--replica", "http://a:1", "--set", "front.io_threads=0"),
        ("serve", "--replica", "not a url"),
        ("serve", "--replica", "http://a:1", "--tokenizer", "/nowhere"),
        ("serve", "--replica", "http://a:1", "--admin-listen", "203.0.113.1:1"),
        ("serve", "--set", "fleet.servers=[{url: 'http://a:1', engine: tgi}]"),
        ("config", "--set", "nothing=1"),
        ("config", "--config", "/nowhere/w.yaml"),
        ("check",),
        ("serve", "--replica", "http://a:1", "--policy", "nope"),
        ("check", "--replica", "http://a:1", "--tokenizer", "/nowhere/model"),
        ("engine", "--block-size", "0"),
        ("fleet", "--admin", "http://127.0.0.1:1"),
        ("fleet", "--admin", "nonsense"),
        ("explain", "--admin", "http://127.0.0.1:1", "-"),
        ("explain", "/nowhere/request.json"),
        ("no-such-command",),
    ],
    ids=" ".join,
)
def test_an_error_is_one_clear_line_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, stdin=b"{}")
    assert result.exit_code == 2
    (line,) = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert len(line) > len("Error: ") + 10
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "content",
    [b"fleet: [1,2", b"\xff\xfe\x00", b"log: \x00", b"[" * 5000, b"log: !!int x"],
    ids=["cut", "no_utf_8", "control_character", "deep", "tag"],
)
def test_a_file_that_cannot_be_read_is_named_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.yaml"
    path.write_bytes(content)
    result = run("config", "--config", str(path))
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith(f"Error: {path} is not ")


def test_serve_refuses_an_admin_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run("serve", "--replica", "http://127.0.0.1:1", "--admin-listen", address)
    assert result.exit_code == 2
    assert f"control.admin_listen: cannot listen on {address}" in result.output


def test_config_prints_a_file_that_gives_the_same_configuration(tmp_path: Path) -> None:
    printed = run("config", "--replica", "http://a:1", "--policy", "round_robin", "--set", "log.level=debug").output
    tree = yaml.safe_load(printed)
    assert tree["router"]["policy"]["name"] == "round_robin"
    assert "# log.level: --set" in printed
    assert "# router.policy.name: command line" in printed
    path = tmp_path / "w.yaml"
    path.write_text(printed, encoding="utf-8")
    assert yaml.safe_load(run("config", "--config", str(path)).output) == tree
    assert msgspec.convert(tree, Config).fleet.servers[0].url == "http://a:1"


def test_config_can_print_its_schema() -> None:
    schema = msgspec.json.decode(run("config", "--schema").output)
    assert schema["$ref"] == "#/$defs/Config"


def test_check_says_what_is_wrong_and_fails() -> None:
    result = run("check", "--replica", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "problem: http://127.0.0.1:1: connection refused" in result.output


class AdminStub(ThreadingHTTPServer):
    """Answers as the admin API does, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), AdminHandler)
        self.answer: tuple[int, Any] = (200, {})
        self.snapshot: dict[str, Any] = {"age_s": None, "failure": None, "restored": {"from": None, "refused": []}}
        self.asked: list[tuple[str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class AdminHandler(BaseHTTPRequestHandler):
    server: AdminStub

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.asked.append((self.path, body))
        status, content = self.server.answer
        if self.path == "/admin/snapshot/state":
            status, content = 200, self.server.snapshot
        encoded = msgspec.json.encode(content)
        self.send_response(status)
        self.send_header("content-length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def admin() -> Iterator[AdminStub]:
    with AdminStub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def replica(name: str, *, cached: int, cost: float) -> dict[str, Any]:
    return {
        "id": name,
        "slot": 0,
        "ready": True,
        "overlap": {"device": cached, "confirmed": cached, "host": cached, "disk": cached, "active": 0},
        "predicted_cached_tokens": cached,
        "terms": [
            {"name": "wait", "symbol": "W", "unit": "s", "value": 0.25},
            {"name": "memory", "symbol": "M", "unit": "s", "value": cost - 0.25},
        ],
        "factors": [{"name": "price", "symbol": "X", "unit": "1", "value": 1.5}],
        "total": cost,
    }


EXPLANATION: dict[str, Any] = {
    "pool": "m",
    "model": "m",
    "policy": "marginal_cost",
    "prompt_tokens": 12345,
    "blocks": 771,
    "basis": "tokens",
    "fallback": None,
    "route": "prefix",
    "choice": "http://[fe80::2]:8000",
    "choices": ["http://[fe80::2]:8000", "http://a:8000"],
    "reason": "cheapest",
    "replicas": [
        replica("http://a:8000", cached=0, cost=0.5),
        replica("http://[fe80::2]:8000", cached=12336, cost=0.25),
    ],
}


def test_explain_shows_every_term_with_its_unit_and_marks_the_choice(admin: AdminStub, tmp_path: Path) -> None:
    admin.answer = (200, EXPLANATION)
    path = tmp_path / "request.json"
    path.write_bytes(b'{"model": "m", "prompt": "x"}')
    result = run("explain", str(path), "--admin", admin.url, "--path", "/v1/completions")
    assert result.exit_code == 0, result.output
    assert admin.asked == [("/admin/explain?path=/v1/completions", b'{"model": "m", "prompt": "x"}')]
    for text in ("12,345 prompt tokens", "exact tokens", "wait (s)", "memory (s)", "12,336", "0.2500", "0.5000"):
        assert text in result.output
    marked = [line for line in result.output.splitlines() if line.startswith("▶  http")]
    assert len(marked) == 2, "in the table of overlaps and in that of costs"
    assert all(line.startswith("▶  http://[fe80::2]:8000") for line in marked)
    assert "price" not in result.output
    assert "price (1)" in run("explain", str(path), "--admin", admin.url, "--factors").output


def test_explain_reads_standard_input_and_can_print_json(admin: AdminStub) -> None:
    admin.answer = (200, EXPLANATION)
    result = run("explain", "--admin", admin.url, "--json", stdin=b'{"model": "m"}')
    assert msgspec.json.decode(result.output) == EXPLANATION
    assert admin.asked[0][1] == b'{"model": "m"}'


def test_a_refusal_of_the_router_is_told_in_its_own_words(admin: AdminStub) -> None:
    admin.answer = (404, {"error": {"message": "no pool serves x", "type": "t", "param": None, "code": "c"}})
    result = run("explain", "--admin", admin.url, stdin=b"{}")
    assert (result.exit_code, result.output) == (2, "Error: no pool serves x\n")


def test_the_clients_port_is_told_from_the_admin_port(admin: AdminStub) -> None:
    admin.answer = (404, {"error": {"message": "There is no such path.", "code": "path_not_found"}})
    result = run("fleet", "--admin", admin.url)
    assert result.exit_code == 2
    assert "is --admin the address of the admin API?" in result.output


def test_factors_of_many_replicas_are_not_cut_off(admin: AdminStub) -> None:
    named = [replica(f"http://replica-{number}:8000", cached=0, cost=0.5) for number in range(4)]
    admin.answer = (200, EXPLANATION | {"replicas": named})
    output = run("explain", "--admin", admin.url, "--factors", stdin=b"{}").output
    (row,) = [line for line in output.splitlines() if line.startswith("price (1)")]
    assert row.split()[2:] == ["1.5000"] * 4
    assert "…" not in output


FLEET: dict[str, Any] = {
    "version": 3,
    "degraded": ["http://c:1: connection refused"],
    "servers": [],
    "router": {},
    "pools": [
        {
            "name": "m",
            "models": {"m": None, "lora": "lora"},
            "tokens": "approximate",
            "tokens_reason": "no tokenizer",
            "replicas": [
                {
                    "id": "http://a:1",
                    "ready": True,
                    "notes": ["tokenizer unknown: routed by bytes"],
                    "load": {"running": 3.0, "waiting": None, "kv_usage": 0.5, "age_s": 0.1},
                    "events": {"state": "live", "lag_s": 0.0123},
                    "router": {
                        "in_flight": 7,
                        "accuracy": {"predicted_cached_tokens": 1600, "reported_cached_tokens": 1584},
                    },
                },
                {
                    "id": "http://b:1",
                    "ready": False,
                    "notes": [],
                    "load": {"running": None, "waiting": None, "kv_usage": None, "age_s": None},
                    "events": None,
                    "router": None,
                },
            ],
        }
    ],
}


def test_fleet_shows_load_events_accuracy_and_notes(admin: AdminStub) -> None:
    admin.answer = (200, FLEET)
    output = run("fleet", "--admin", admin.url).output
    for text in ("pool m · also lora · tokens approximate (no tokenizer)", "50 %", "live", "0.012", "1,600", "1,584"):
        assert text in output
    assert "http://a:1: tokenizer unknown: routed by bytes" in output
    assert "! http://c:1: connection refused" in output


def test_fleet_can_print_json(admin: AdminStub) -> None:
    admin.answer = (200, FLEET)
    printed = msgspec.json.decode(run("fleet", "--admin", admin.url, "--json").output)
    assert printed == FLEET | {"snapshot": admin.snapshot}


def test_fleet_says_what_was_restored_what_was_refused_and_what_cannot_be_written(admin: AdminStub) -> None:
    admin.answer = (200, {"pools": [], "degraded": []})
    restored = {"from": "file", "replicas": 4, "replicas_restored": 3, "facts": 6140, "refused": ["http://b:1: torn"]}
    admin.snapshot = {"path": "/s", "age_s": 7.0, "bytes": 9000, "facts": 6200, "failures": 2, "failure": "disk full"}
    admin.snapshot["restored"] = restored
    output = " ".join(run("fleet", "--admin", admin.url).output.split())
    assert "memory: 6,140 facts of 3 of 4 replicas restored from the file" in output
    assert "snapshot /s: 7 s old, 9,000 bytes, 6,200 facts" in output
    assert "! not restored: http://b:1: torn" in output
    assert "! the snapshot cannot be written (2 times): disk full" in output


@pytest.mark.parametrize(
    ("path", "words"),
    [("{folder}", "is a folder"), ("{folder}/none/snapshot", "does not exist"), ("{folder}/snapshot", None)],
)
def test_check_says_whether_snapshots_can_be_written(tmp_path: Path, path: str, words: str | None) -> None:
    trouble = check.snapshot_trouble(SnapshotConfig(path=path.format(folder=tmp_path)))
    assert trouble is None if words is None else words in str(trouble)
    assert check.snapshot_trouble(SnapshotConfig()) is None


def test_a_router_that_knows_nothing_yet_says_so(admin: AdminStub) -> None:
    admin.answer = (200, {"pools": [], "degraded": []})
    assert "No server has named a model yet." in run("fleet", "--admin", admin.url).output


def test_reload_says_what_changed_and_what_needs_a_restart(admin: AdminStub) -> None:
    admin.answer = (200, {"applied": ["fleet.servers", "front.grace_s"], "restart_needed": ["front.io_threads"]})
    output = run("reload", "--admin", admin.url).output
    assert output == "changed: fleet.servers, front.grace_s\nneeds a restart: front.io_threads\n"
    assert admin.asked == [("/admin/reload", b"")]


def test_a_configuration_that_is_refused_is_an_error(admin: AdminStub) -> None:
    admin.answer = (400, {"error": {"message": "front.grace_s: expected > 0", "code": "invalid_body"}})
    result = run("reload", "--admin", admin.url)
    assert (result.exit_code, "front.grace_s: expected > 0" in result.output) == (2, True)


def test_drain_takes_a_replica_or_the_router_out_of_service_and_back(admin: AdminStub) -> None:
    admin.answer = (200, {"replicas": [{"id": "http://a:1#0", "draining": True, "in_flight": 3}]})
    output = run("drain", "http://a:1#0", "--admin", admin.url).output
    assert output == "http://a:1#0: draining, 3 requests in flight\n"
    admin.answer = (200, {"draining": False, "connections": 2, "requests": 1})
    output = run("drain", "--undo", "--admin", admin.url).output
    assert output == "in service: 2 connections, 1 requests in flight\n"
    assert [path for path, _ in admin.asked] == ["/admin/replicas/http%3A%2F%2Fa%3A1%230/drain", "/admin/undrain"]


def test_check_looks_at_the_servers_that_discovery_finds(tmp_path: Path) -> None:
    (tmp_path / "servers.json").write_text('["http://127.0.0.1:1"]')
    config = tmp_path / "warmfront.yaml"
    config.write_text(f"fleet: {{discovery: [{{type: file, path: {tmp_path / 'servers.json'}}}]}}")
    result = run("check", "--config", str(config))
    assert (result.exit_code, result.output) == (1, "problem: http://127.0.0.1:1: connection refused\n")


def test_plugins_lists_groups() -> None:
    assert run("plugins").exit_code == 0
