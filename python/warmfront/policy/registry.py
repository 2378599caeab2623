"""Policies by name. Built-ins and plugins register alike, by an entry point in the group `warmfront.policies`.

The built-ins are also listed here, so that they exist when the package runs from a source tree; a test compares the
list with `pyproject.toml`. A plugin cannot take the name of a built-in.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from warmfront.config import PolicyConfig
from warmfront.errors import ConfigError
from warmfront.policy.base import Policy

GROUP = "warmfront.policies"

BUILTIN = {
    "least_loaded": "warmfront.policy.baselines:LeastLoaded",
    "marginal_cost": "warmfront.policy.marginal_cost:MarginalCost",
    "power_of_two": "warmfront.policy.baselines:PowerOfTwo",
    "prefix_hash": "warmfront.policy.baselines:PrefixHash",
    "random": "warmfront.policy.baselines:Random",
    "round_robin": "warmfront.policy.baselines:RoundRobin",
    "session": "warmfront.policy.baselines:Session",
}

PolicyFactory = Callable[[PolicyConfig], Policy]


def names() -> list[str]:
    """Return all policies that can be configured, sorted."""
    return sorted({*BUILTIN, *_plugins()})


def factory(name: str) -> PolicyFactory:
    """Return what makes policies of this name, one for each pool.

    Raises:
        ConfigError: No such policy, or its plugin cannot be loaded.
    """
    if name in BUILTIN:
        module, _, attribute = BUILTIN[name].partition(":")
        return cast(PolicyFactory, getattr(import_module(module), attribute))
    plugin = _plugins().get(name)
    if plugin is None:
        raise ConfigError(f"router.policy.name: no policy named {name!r}; known: {', '.join(names())}")
    try:
        return cast(PolicyFactory, plugin.load())
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"router.policy.name: plugin {plugin.value!r} cannot be loaded: {error}") from error


def _plugins() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILTIN}
