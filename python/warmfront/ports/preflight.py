"""What is checked before the first thread starts: a router that cannot work says so in one line and ends.

Whatever fails later fails in the control process, which is started again and again while clients are served: right for
an admin port that is lost at night, wrong for one that was taken when the operator pressed return.
"""

from __future__ import annotations

import logging
import resource
import socket

import msgspec

from warmfront.config import Config
from warmfront.control import security
from warmfront.errors import ConfigError

logger = logging.getLogger(__name__)

DESCRIPTORS_KEPT = 128
"""File descriptors for everything that is neither a client's connection nor an engine's: KV events, files, runtime."""


def check(config: Config) -> None:
    """Look at the admin address, which only a start takes; `servable` looks at what a reload may bring, too.

    Raises:
        ConfigError: It is taken, or open to others without a token.
    """
    security.require_safe_admin(config.control)
    if config.front.handover is None:  # else the process before may have it for a while yet
        _check_address(config.control.admin_listen)


def within_descriptors(config: Config) -> Config:
    """Take all file descriptors that the system grants, and no more clients than these carry.

    Each client needs two, its own and its engine's. Without the second its request would fail, and the engine would be
    blamed for it.
    """
    limit = _raise_limit()
    carried = max(1, (limit - DESCRIPTORS_KEPT) // 2)
    if config.front.connections_max <= carried:
        return config
    logger.warning(
        "front.connections_max is %d here instead of %d: the process may open %d files (ulimit -n)",
        carried,
        config.front.connections_max,
        limit,
    )
    front = msgspec.structs.replace(config.front, connections_max=carried)
    return msgspec.structs.replace(config, front=front)


def _raise_limit() -> int:
    """Raise the soft limit to the hard one; return what holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # a container may forbid it, and some systems cap the hard limit further
        logger.warning("the limit of open files stays at %d: %s", soft, error)
        return soft
    return hard


def _check_address(address: str) -> None:
    """Bind the address once as the control process will, and let go of it."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"control.admin_listen: cannot listen on {address}: {error}") from error
