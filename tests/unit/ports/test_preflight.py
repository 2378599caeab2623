from __future__ import annotations

import resource
import socket
from collections.abc import Iterator

import msgspec
import pytest
from warmfront.config import Config, load
from warmfront.errors import ConfigError
from warmfront.ports import preflight


@pytest.fixture
def restored_limit() -> Iterator[tuple[int, int]]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield limits
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def config(*overrides: str) -> Config:
    return load(environment={}, overrides=["control.admin_listen=127.0.0.1:0", *overrides])


def test_a_configuration_that_names_nothing_outside_passes() -> None:
    preflight.check(config())


def test_an_admin_address_that_is_taken_ends_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"control.admin_listen: cannot listen on {address}"):
            preflight.check(config(f"control.admin_listen={address}"))


def test_connections_leave_descriptors_for_the_engines(restored_limit: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, restored_limit[1]))
    given = config("front.connections_max=100000000")
    fitted = preflight.within_descriptors(given)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard
    assert fitted.front.connections_max == max(1, (hard - preflight.DESCRIPTORS_KEPT) // 2)
    few = msgspec.structs.replace(given, front=msgspec.structs.replace(given.front, connections_max=10))
    assert preflight.within_descriptors(few) is few
