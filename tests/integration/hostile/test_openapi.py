"""Requests made from our OpenAPI documents, good and bad ones: every answer is one that the documents promise."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import checks
from support.raw_engine import RawEngine
from warmfront.openapi import document

from integration.conftest import Serve

BY_LOAD = "/v1/embeddings"
"""One for all that are routed by load: they are described and treated alike."""

DESCRIBED = document("clients")
PLAIN = DESCRIBED["paths"][BY_LOAD]
CLIENTS = schemathesis.openapi.from_dict(
    {
        **DESCRIBED,
        "paths": {path: item for path, item in DESCRIBED["paths"].items() if path == BY_LOAD or item != PLAIN},
    }
)
TAKES_LEAVE = "/admin/drain"
"""Would end the router that these tests share."""
ADMIN = schemathesis.openapi.from_dict(document("admin")).exclude(path=TAKES_LEAVE)
for described in (CLIENTS, ADMIN):
    described.config.phases.coverage.enabled = False  # a hundred listed cases a path, which take most of the time
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
TIMEOUT_S = 30.0
BOUNDED = settings(
    max_examples=8,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
)


@CLIENTS.parametrize()
@BOUNDED
def test_every_answer_on_the_clients_port_is_documented(
    case: schemathesis.Case, router: Serve, shared_engine: RawEngine
) -> None:
    shared_engine.reset()  # also of what other tests told it to do
    # `/ready` may say 503: what other tests did to the engine is not long ago.
    wanted = CHECKS[1:] if case.path == "/ready" else CHECKS
    case.call_and_validate(base_url=router.url, checks=wanted, timeout=TIMEOUT_S)


@ADMIN.parametrize()
@BOUNDED
@pytest.mark.usefixtures("shared_engine")
def test_every_answer_on_the_admin_port_is_documented(case: schemathesis.Case, router: Serve) -> None:
    case.call_and_validate(base_url=router.admin_url, checks=CHECKS, timeout=TIMEOUT_S)
