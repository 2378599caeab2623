from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest
from warmfront import config_schema
from warmfront.config import COUNT_MAX, SECONDS_MAX, Config
from warmfront.config_schema import Field

FIELDS = [field for section in config_schema.sections() for field in section.fields]

UNIT_SUFFIXES = ("_s", "_s_max", "_bytes", "_bytes_max", "_max")
PLAIN_NUMBERS = {
    "port": "a number of TCP",
    "io_threads": "counts are plural nouns",
    "compute_threads": "counts are plural nouns",
    "idle_connections_per_server": "counts are plural nouns",
    "unready_after": "failures, as its documentation says",
    "queue_max_per_flow": "requests, as `queue_max`",
    "in_flight_max_per_replica": "requests, as `in_flight_max`",
    "seed": "no unit",
    "block_size": "tokens, by the glossary",
    "block_size_default": "tokens, by the glossary",
    "load_bound": "a ratio",
    "share": "a share",
    "budget_share": "a share",
    "failure_share": "a share",
    "failures_in_a_row": "counts are plural nouns",
    "failures_min": "counts are plural nouns",
    "frozen_prefill_factor": "a ratio",
    "margin": "a share",
    "priority_step": "a ratio",
    "arrival_weight": "a weight",
    "fairness_weight": "a weight",
    "memory_weight": "a weight",
    "eviction_weight": "a weight",
    "future_weight": "a weight",
    "memory_threshold": "a share",
    "regret_prior": "a probability",
    "regret_prior_evictions": "counts are plural nouns",
    "fleet_mix": "a share",
}
"""Numbers without a unit at the end of their name, and why."""


def name(field: Field) -> str:
    return field.path.rpartition(".")[2]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.path)
def test_every_field_is_documented(field: Field) -> None:
    assert len(field.doc) >= 15, f"say in a sentence what {field.path} is for"
    assert field.doc.endswith("."), field.path


@pytest.mark.parametrize(
    "field", [field for field in FIELDS if field.type.startswith(("number", "integer"))], ids=lambda field: field.path
)
def test_every_number_says_its_unit(field: Field) -> None:
    assert name(field).endswith(UNIT_SUFFIXES) or name(field) in PLAIN_NUMBERS, field.path


def test_no_number_is_too_large_for_a_clock_or_a_sum() -> None:
    def bound(node: dict[str, Any]) -> float:
        return float(node.get("maximum", node.get("exclusiveMaximum", math.inf)))

    numbers = [
        (name, kind)
        for part in config_schema.schema()["$defs"].values()
        for name, node in part.get("properties", {}).items()
        for kind in node.get("anyOf", [node])
        if kind.get("type") == "integer" or (kind.get("type") == "number" and name.endswith(("_s", "_s_max")))
    ]
    assert len(numbers) > 50
    assert {name for name, kind in numbers if bound(kind) > max(SECONDS_MAX, COUNT_MAX)} == {"seed"}
    assert all(bound(kind) <= SECONDS_MAX for name, kind in numbers if name.endswith(("_s", "_s_max")))


def test_every_section_is_documented() -> None:
    assert all(len(section.doc) >= 5 for section in config_schema.sections())


def test_every_value_of_the_tree_is_listed_once() -> None:
    paths = [field.path for field in FIELDS]
    assert len(paths) == len(set(paths))
    tree = msgspec.to_builtins(Config())
    flat = {key for key, value in tree["front"].items() if not isinstance(value, dict)}
    assert {f"front.{key}" for key in flat} <= set(paths)
    assert {"front.headers.remove", "front.tls.cert", "control.admin_tls.cert"} <= set(paths)
    assert {"fleet.servers[].url", "fleet.models.<name>.tokenizer", "fleet.servers[].events.endpoint"} <= set(paths)


def test_the_schema_describes_every_property() -> None:
    schema = config_schema.schema()
    properties = [node for part in schema["$defs"].values() for node in part.get("properties", {}).values()]
    assert len(properties) > 70
    assert all(re.search(r"\w", node["description"]) for node in properties)


def test_the_schema_refuses_unknown_fields() -> None:
    assert config_schema.schema()["$defs"]["FrontConfig"]["additionalProperties"] is False
