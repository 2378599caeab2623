"""The OpenAPI documents name the paths that exist, and each of them refuses in the words of the error tree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from warmfront import errors
from warmfront.config import Config
from warmfront.control.admin import Admin
from warmfront.control.change import Changes
from warmfront.openapi import Port, document

ROOT = Path(__file__).resolve().parents[3]
ROUTES = (ROOT / "crates/warmfront-core/src/http/routes.rs").read_text(encoding="utf-8").partition("#[cfg(test)]")[0]
PARAMETER = re.compile(r"\{.*\}")


def statuses(base: type[errors.ClientError] = errors.ClientError) -> set[str]:
    return {str(base.status)}.union(*map(statuses, base.__subclasses__()))


def test_the_clients_document_names_every_path_of_the_routing_table() -> None:
    served = {path for path in re.findall(r'"(/[^"]*)"', ROUTES) if path not in {"/", "/v1/models/"}}
    described = {path for path in document("clients")["paths"] if not PARAMETER.search(path)}
    assert described == served


def test_the_admin_document_names_every_route_of_the_admin_port() -> None:
    nothing = cast(Any, None)
    changes = Changes(nothing, link=nothing, sources=None, config_path=None, on_change=nothing)
    admin = Admin(Config(), link=nothing, fleet=nothing, changes=changes.routes()).application()
    routes = (route for route in admin.router.routes() if route.method != "HEAD")
    served = {(route.method.lower(), cast(web.Resource, route.resource).canonical) for route in routes}
    described = {
        (method, path) for path, item in document("admin")["paths"].items() for method in item.keys() - {"parameters"}
    }
    assert described == served


@pytest.mark.parametrize("port", ["clients", "admin"])
def test_no_path_promises_a_status_that_no_error_has(port: Port) -> None:
    for path, item in document(port)["paths"].items():
        for operation in (each for name, each in item.items() if name != "parameters"):
            assert set(operation["responses"]) <= {"200"} | statuses(), path


@pytest.mark.parametrize("port", ["clients", "admin"])
def test_references_lead_somewhere(port: Port) -> None:
    tree = document(port)

    def check(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                found: Any = tree
                for part in node["$ref"].removeprefix("#/").split("/"):
                    found = found[part]
            for value in node.values():
                check(value)
        elif isinstance(node, list):
            for value in node:
                check(value)

    check(tree)
    assert tree["openapi"] == "3.1.0"
