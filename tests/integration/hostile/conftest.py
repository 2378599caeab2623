"""One router over one raw engine for all tests that need no settings of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.raw_engine import RawEngine, raw_engine

from integration.conftest import Located, Serve

StartRouter = Callable[..., Serve]


@pytest.fixture(scope="package")
def shared_engine() -> Iterator[RawEngine]:
    with raw_engine() as engine:
        yield engine


@pytest.fixture(scope="package")
def router(shared_engine: RawEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    router = Serve(tmp_path_factory.mktemp("router") / "serve.log", [shared_engine], "log.level=debug")
    router.start()
    try:
        router.wait()
        yield router
    finally:
        router.kill()


@pytest.fixture
def engine(shared_engine: RawEngine) -> RawEngine:
    """The engine behind `router`, with nothing heard yet."""
    shared_engine.reset()
    return shared_engine


@pytest.fixture
def start_router(tmp_path: Path) -> Iterator[StartRouter]:
    """Start a router with settings of its own; it ends with the test."""
    with ExitStack() as stack:

        def begin(engines: Sequence[Located], *settings: str) -> Serve:
            router = Serve(tmp_path / "serve.log", engines, *settings)
            router.start()
            stack.callback(router.kill)
            router.wait()
            return router

        yield begin
