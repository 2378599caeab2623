"""Every public name that users and plugins meet says what it is."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest
from warmfront import config, errors, types
from warmfront.policy import base, registry

MODULES = (types, errors, config, base, registry)


def undocumented(module: ModuleType) -> Iterator[str]:
    """Public classes, functions and methods without a docstring of their own."""
    for name, thing in vars(module).items():
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(thing):
            if not thing.__doc__:
                yield name
            yield from (
                f"{name}.{method}"
                for method, function in vars(thing).items()
                if inspect.isfunction(function) and not method.startswith("_") and not function.__doc__
            )
        elif inspect.isfunction(thing) and not thing.__doc__:
            yield name


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_has_a_docstring(module: ModuleType) -> None:
    assert module.__doc__
    assert list(undocumented(module)) == []
