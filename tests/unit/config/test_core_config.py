"""The core's half of the configuration is Rust; its fields are read from the source and compared."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from warmfront.config import Config, core_config
from warmfront.obs.catalog import METRICS

SOURCE = Path(__file__).resolve().parents[3] / "crates" / "warmfront-core" / "src" / "config.rs"
STRUCT = re.compile(r"pub struct (\w+) \{\n(.*?)\n\}", re.DOTALL)
FIELD = re.compile(r"^    pub (\w+): (.+),$", re.MULTILINE)


def rust_structs() -> dict[str, dict[str, str]]:
    return {name: dict(FIELD.findall(body)) for name, body in STRUCT.findall(SOURCE.read_text(encoding="utf-8"))}


def handed_over() -> dict[str, Any]:
    encoded = core_config(Config(), control_command=["python", "-m", "warmfront.control"], control_socket="/run/w.sock")
    return msgspec.json.decode(encoded, type=dict[str, Any])


def test_every_field_that_rust_expects_is_handed_over_and_no_other() -> None:
    structs, tree = rust_structs(), handed_over()
    assert set(tree) == set(structs["CoreConfig"])
    for field, kind in structs["CoreConfig"].items():
        if kind in structs:
            assert set(tree[field]) == set(structs[kind]), field
    assert all(set(metric) == set(structs["MetricConfig"]) for metric in tree["metrics"])


def test_values_have_the_type_that_rust_expects() -> None:
    expected = {"usize": int, "u64": int, "u32": int, "f64": float, "bool": bool, "String": str}
    structs, tree = rust_structs(), handed_over()
    for section, kind in structs["CoreConfig"].items():
        for field, rust in structs.get(kind, {}).items():
            if rust in expected:
                assert type(tree[section][field]) is expected[rust], f"{section}.{field}"


def test_the_catalogue_and_the_control_process_are_in_it() -> None:
    tree = handed_over()
    assert [metric["name"] for metric in tree["metrics"]] == [metric.name for metric in METRICS]
    assert tree["control"]["command"] == ["python", "-m", "warmfront.control"]
    assert tree["control"]["socket"] == "/run/w.sock"
    assert tree["label_values_max"] == 256


def test_whole_numbers_given_for_seconds_reach_rust_as_numbers_it_takes() -> None:
    config = msgspec.convert({"front": {"grace_s": 5}}, Config)
    assert b'"grace_s":5.0' in core_config(config)


def test_connections_are_taken_for_a_while_after_the_signal_in_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle_s(**front: float) -> float:
        tree = msgspec.json.decode(core_config(msgspec.convert({"front": front}, Config)))
        return float(tree["front"]["settle_s"])

    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert settle_s() == 0.0
    assert settle_s(settle_s=2.0) == 2.0
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert settle_s() == 5.0
    assert settle_s(grace_s=1.0) == 1.0, "a part of the grace time"
    assert settle_s(settle_s=0.0) == 0.0
