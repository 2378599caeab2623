"""Regime files: all that ship are sound, and a wrong one is refused with file and field."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from warmfront.errors import ConfigError
from warmfront.lab import regime

PLAIN = """
title = "t"
expects = "e"
loads = [1.0, 2.0]

[workload]
kind = "unique"

[fleet]
engines = [{ preset = "demo", count = 2 }]

[slo]
ttft_s = 1.0
"""


def write(directory: Path, text: str, name: str = "mine.toml") -> str:
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", regime.names())
def test_a_shipped_regime_loads_and_yields_requests(name: str) -> None:
    found = regime.load(name)
    assert found.name == name
    assert found.title
    assert found.expects.endswith(".")
    assert found.tags
    assert len(found.loads) >= 4
    assert 2500 <= found.requests <= 6000
    source = regime.source(found, found.loads[0], 0)
    sent = list(itertools.islice(source.arrivals(), 200))
    for request in sent:  # grows while it is read
        if len(sent) < 200:
            sent += source.finished(request, request.at_s + 1.0)
    assert len(sent) >= 200 or len(sent) == found.requests
    assert all(request.prompt_tokens >= 1 and request.output_tokens >= 1 for request in sent)
    assert all(request.output_tokens <= (request.output_tokens_max or request.output_tokens) for request in sent)
    smallest = min(engine.kv_tokens or 301_808 for engine in found.fleet.engines)
    assert max(request.prompt_tokens + request.output_tokens for request in sent) < smallest, "fits into any cache"
    adapters = {adapter for engine in found.fleet.engines for adapter in engine.adapters}
    assert {request.adapter for request in sent} - {None} <= adapters


def test_a_regime_of_ones_own_loads_by_path(tmp_path: Path) -> None:
    found = regime.load(write(tmp_path, PLAIN))
    assert (found.name, found.loads, found.fleet.engines[0].count) == ("mine", (1.0, 2.0), 2)


def test_extending_merges_tables_and_replaces_lists(tmp_path: Path) -> None:
    text = 'extends = "rag"\nloads = [1.0]\n[workload]\ndocuments = 10\n[fleet]\nengines = [{ preset = "demo" }]\n'
    found, base = regime.load(write(tmp_path, text)), regime.load("rag")
    assert found.workload == {**base.workload, "documents": 10}
    assert found.loads == (1.0,)
    assert [engine.preset for engine in found.fleet.engines] == ["demo"]
    assert (found.slo, found.title, found.name) == (base.slo, base.title, "mine")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("loads = [1.0, 2.0]", "loads = []", "loads: expected at least one positive number"),
        ("loads = [1.0, 2.0]", "loads = [2.0, 1.0]", "loads: expected at least one positive number"),
        ("loads = [1.0, 2.0]", 'loads = "many"', "loads: expected `array`, got `str`"),
        ("loads = [1.0, 2.0]", "loads = [1.0]\nrequests = 0", "requests: expected at least 1"),
        ("loads = [1.0, 2.0]", "loads = [1.0]\nwarmup = 1.0", "warmup: expected a share from 0 to below 1"),
        ("ttft_s = 1.0", "ttft_s = 0.0", "slo.ttft_s: expected more than 0"),
        ('title = "t"', "", "object missing required field `title`"),
        ("count = 2", "count = 0", "fleet.engines[0].count: expected at least 1"),
        ("count = 2", "cuont = 2", "fleet.engines[0]: object contains unknown field `cuont`"),
        ("count = 2", "leaves_s = 0.0", "fleet.engines[0].leaves_s: expected later than joins_s"),
        ("count = 2", "count = 2, rtt_s = -1", "fleet.engines[0].rtt_s: expected 0 or more"),
        ("count = 2", "count = 2, uncached = [0.5, 0.5]", "fleet.engines[0].uncached: expected two shares"),
        ("[slo]", "[fleet.events]\nloss = 1.5\n[slo]", "fleet.events.loss: expected a share from 0 to 1"),
        ('kind = "unique"', 'kind = "uniqeu"', "workload.kind: expected one of adapters, agent"),
        ('kind = "unique"', 'kind = "unique"\nprompt = -1', "workload.prompt: expected `float` >= 0.0"),
        ('kind = "unique"', 'kind = "unique"\nprefix = 1', "workload: object contains unknown field `prefix`"),
        (
            'kind = "unique"',
            'kind = "unique"\noutput = { shape = "lognormal", mean = 5, cv = 0.0, max = 9 }',
            "workload.output.cv: expected `float` > 0.0",
        ),
        (
            'kind = "unique"',
            'kind = "churn"\narrival = { process = "closed" }',
            "workload.arrival: kind churn changes with time",
        ),
        (
            'kind = "unique"',
            'kind = "azure"\narrival = { process = "poisson" }',
            "workload.arrival: kind azure has arrival times of its own",
        ),
        (
            'kind = "unique"',
            'kind = "mixture"\nparts = [{ workload = { kind = "agent", turns = "many" } }]',
            "parts[0].workload.turns: expected `float | object`",
        ),
        (
            'kind = "unique"',
            'kind = "mixture"\nparts = [{ workload = { kind = "azure" } }]',
            "parts[0].workload.kind: azure has arrival times of its own and cannot be a part",
        ),
        ("[slo]", "[slo", "(at line 12, column 5)"),
        ("[slo]", '[[groups]]\nname = "a"\n[slo]', "groups[0].name: expected a name, and at least one of part, flow"),
        ("[slo]", '[[groups]]\nname = "a"\nflow = "a"\n' * 2 + "[slo]", "groups: expected a name of its own for each"),
        ("[slo]", '[[groups]]\nname = "a"\nflow = "a"\nttft_s = 0\n[slo]', "groups[0].ttft_s: expected more than 0"),
        (
            "[slo]",
            '[[groups]]\nname = "a"\nflow = "a"\ncompared = ["itl_p99_s"]\n[slo]',
            "groups[0].compared[0]: invalid enum value",
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write(tmp_path, PLAIN.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        regime.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_an_unknown_name_is_answered_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"no regime is called ragg; there are adapters, .*rag, "):
        regime.load("ragg")


def test_a_regime_that_extends_itself_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    write(tmp_path, f'extends = "{path}"\n')
    with pytest.raises(ConfigError, match="extends: expected the name of a regime, at most 4 deep"):
        regime.load(path)


def test_a_load_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="load: expected more than 0, got 0"):
        regime.source(regime.load("unique"), 0.0, 0)
