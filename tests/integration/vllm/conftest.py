"""Two real vLLM servers and a small one, shared by all tests of this folder, and routers in front of them.

The servers start once a session, all that the collected tests need at the same time. Nothing is skipped: where the
environment cannot be built, the tests fail with the reason.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.service import Service

from .engine import Engine
from .mirror import Mirror
from .router import Router

ROOT = Path(__file__).parents[3]
ENVIRONMENT_TIMEOUT_S = 3600.0
SMALL_BLOCKS = 40
"""KV blocks of the small server: 39 that can be used, 4,992 tokens."""
SERVICES = pytest.StashKey[list[Service]]()
FOLDER = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SERVICES] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of every service's log with a failure."""
    report = yield
    if report.failed and FOLDER in item.path.parents:
        report.sections += [
            (f"log of {service.log.name}", service.log_tail()) for service in item.config.stash[SERVICES]
        ]
    return report


@pytest.fixture(scope="session")
def environment() -> Path:
    """The folder with vLLM and the models; built now where it is missing."""
    script = ROOT / "scripts/vllm_env.py"
    built = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=ENVIRONMENT_TIMEOUT_S, check=False
    )
    if built.returncode != 0:
        pytest.fail(f"scripts/vllm_env.py cannot build the environment for real engines\n{built.stderr[-4000:]}")
    return Path(built.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def fleet(
    environment: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Engine]]:
    """All servers that the collected tests name, started side by side."""
    folder = tmp_path_factory.mktemp("vllm")
    needed = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    engines: dict[str, Engine] = {}
    if "engines" in needed:
        engines |= {name: Engine(environment, folder / f"engine-{name}.log") for name in ("a", "b")}
    if "small_engine" in needed:
        engines["small"] = Engine(environment, folder / "engine-small.log", blocks=SMALL_BLOCKS)
    with ExitStack() as stack:
        for engine in engines.values():
            stack.enter_context(_running(engine, request.config))
        yield engines


@pytest.fixture(scope="session")
def engines(fleet: dict[str, Engine]) -> tuple[Engine, Engine]:
    """Two equal servers that answer."""
    pair = fleet["a"], fleet["b"]
    for engine in pair:
        engine.wait()
    return pair


@pytest.fixture(scope="session")
def small_engine(fleet: dict[str, Engine]) -> Engine:
    """A server whose cache holds few prompts."""
    fleet["small"].wait()
    return fleet["small"]


@pytest.fixture(scope="session")
def mirrors(engines: tuple[Engine, Engine]) -> tuple[Mirror, Mirror]:
    """What the two servers hold, read from their events without warmfront."""
    return Mirror(engines[0]), Mirror(engines[1])


@pytest.fixture(scope="session")
def start_router(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Router]]:
    """Start routers that live until the session's end: `start_router(urls, policy=…)`."""
    folder = tmp_path_factory.mktemp("routers")
    with ExitStack() as stack:
        started: list[Router] = []

        def start(urls: list[str], *, policy: str | None = None) -> Router:
            router = Router(folder / f"router-{len(started)}.log", urls, policy=policy)
            started.append(router)
            stack.enter_context(_running(router, request.config))
            router.wait()
            return router

        yield start


@pytest.fixture(scope="session")
def router(engines: tuple[Engine, Engine], start_router: Callable[..., Router]) -> Router:
    """The router as it comes, in front of both servers."""
    return start_router([engine.url for engine in engines])


@pytest.fixture(scope="session")
def spreading_router(engines: tuple[Engine, Engine], start_router: Callable[..., Router]) -> Router:
    """A router that sends every prompt to both servers in turn and predicts all the same."""
    return start_router([engine.url for engine in engines], policy="round_robin")


@pytest.fixture(scope="session")
def small_router(small_engine: Engine, start_router: Callable[..., Router]) -> Router:
    """A router in front of the small server alone."""
    return start_router([small_engine.url])


@contextmanager
def _running(service: Service, config: pytest.Config) -> Iterator[None]:
    config.stash[SERVICES].append(service)
    service.start()
    try:
        yield
    finally:
        service.stop()
