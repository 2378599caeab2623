"""Trace files: what is written is read again, and a bad line is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from warmfront.errors import ConfigError
from warmfront.lab import regime
from warmfront.lab.model import SimRequest
from warmfront.lab.traces import azure, locate, mooncake, workload
from warmfront.lab.workloads import Draw, read

HEADER = b'{"format": "warmfront-workload", "version": 1}\n'
ROW: dict[str, Any] = {"key": 0, "job": 0, "at_s": 0.0, "prompt": [[1, 5]], "output_tokens": 1}


def saved(path: Path, table: dict[str, Any], requests: int = 300) -> Path:
    header = workload.Header(format=workload.FORMAT, version=workload.VERSION)
    jobs = read(table).limited_jobs(Draw(seed=0, load=5.0, requests=requests))
    path.write_bytes(b"".join(workload.encode(header, jobs)))
    return path


def replayed(table: dict[str, Any], load: float, requests: int = 300) -> list[SimRequest]:
    source = read(table).source(Draw(seed=0, load=load, requests=requests))
    sent = list(source.arrivals())
    for request in sent:  # grows while it is read
        sent += source.finished(request, request.at_s + 1.0)
    return sent


PARTS = [
    {"group": "a", "flow": "f", "priority": 3, "workload": {"kind": "chat"}},
    {"adapter": "x", "workload": {"kind": "siblings"}},
]


@pytest.mark.parametrize(
    "table",
    [
        {"kind": "unique"},
        {"kind": "chat"},
        {"kind": "fan_out"},
        {"kind": "siblings"},
        {"kind": "mixture", "parts": PARTS},
        {"kind": "mooncake"},
    ],
    ids=lambda table: str(table["kind"]),
)
def test_a_workload_file_replays_what_was_written(table: dict[str, Any], tmp_path: Path) -> None:
    path = saved(tmp_path / "w.jsonl", table)
    again = replayed({"kind": "trace", "file": str(path)}, 1.0)
    first = replayed(table, 5.0)
    assert [msgspec.structs.replace(request, at_s=0.0) for request in again] == [
        msgspec.structs.replace(request, at_s=0.0) for request in first
    ]
    assert [request.at_s for request in again] == pytest.approx([request.at_s for request in first])


def test_a_regime_finds_its_trace_beside_itself(tmp_path: Path) -> None:
    saved(tmp_path / "w.jsonl", {"kind": "unique"}, requests=20)
    (tmp_path / "mine.toml").write_text(
        'title = "t"\nexpects = "e"\nloads = [1.0]\n[workload]\nkind = "trace"\nfile = "w.jsonl"\n'
        '[fleet]\nengines = [{ preset = "demo" }]\n[slo]\nttft_s = 1.0\n',
        encoding="utf-8",
    )
    found = regime.load(str(tmp_path / "mine.toml"))
    assert len(list(regime.source(found, 1.0, 0).arrivals())) == 20


def test_a_deep_conversation_is_read_without_recursion(tmp_path: Path) -> None:
    rows = [ROW, *({**ROW, "key": key, "at_s": None, "after": key - 1} for key in range(1, 5000))]
    path = tmp_path / "deep.jsonl"
    path.write_bytes(HEADER + b"\n".join(msgspec.json.encode(row) for row in rows))
    (job,) = workload.jobs(path)
    assert sum(1 for _ in job.walk()) == 5000
    assert len(replayed({"kind": "trace", "file": str(path)}, 1.0, requests=3000)) == 3000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "Expected `array` of length >= 1"),
        ({"output_tokens": 0}, "Expected `int` >= 1 - at `$.output_tokens`"),
        ({"tokens": 1}, "unknown field `tokens`"),
        ({"at_s": None}, "expected either at_s or after"),
        ({"after": 0}, "expected either at_s or after"),
        ({"key": 0}, "key 0 is not new"),
        ({"at_s": None, "after": 7}, "after: no line above has the key 7"),
        ({"at_s": 0.5}, "at_s 0.5 is before that of a line above"),
    ],
)
def test_a_bad_line_of_a_workload_file_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    lines = [{**ROW, "at_s": 1.0}, {**ROW, "key": 1, "at_s": 2.0, **change}]
    path.write_bytes(HEADER + b"\n".join(msgspec.json.encode(line) for line in lines))
    with pytest.raises(ConfigError) as caught:
        list(workload.rows(path))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": the file is empty"),
        (b"{}\n", ":1: Object missing required field `format`"),
        (b'{"format": "x", "version": 1}', ":1: expected format warmfront-workload version 1, got x 1"),
        (HEADER.replace(b"1}", b"2}"), ":1: expected format warmfront-workload version 1, got warmfront-workload 2"),
    ],
)
def test_a_file_that_is_no_workload_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        workload.jobs(path)
    assert str(caught.value) == f"{path}{message}"


MOONCAKE = b'{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{\n", "Input data was truncated"),
        (b'{"timestamp": 5, "input_length": 600, "output_length": 3}', "missing required field `hash_ids`"),
        (MOONCAKE.replace(b"[1, 2]", b"[1]").replace(b"600", b"1600"), "hash_ids: expected 4 for 1600 tokens, got 1"),
        (MOONCAKE.replace(b": 5", b": 4"), "timestamp 4 is before the line above"),
    ],
)
def test_a_bad_line_in_mooncakes_format_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(MOONCAKE + line)
    with pytest.raises(ConfigError) as caught:
        list(mooncake.rows(path))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert message in str(caught.value)


def test_the_azure_format_is_read_as_published(tmp_path: Path) -> None:
    path = tmp_path / "published.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
        encoding="utf-8",
    )
    rows = list(azure.rows(path))
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(374, 44), (396, 109)]
    assert [row.at_s for row in rows] == pytest.approx([0.0, 4.314579])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b,c\n", ":1: expected the header"),
        ("t_s,input_tokens,output_tokens\n0.0,1,1\n1.0,5\n", ":3: expected 3 fields, got 2"),
        ("t_s,input_tokens,output_tokens\n0.0,x,1\n", ":2: invalid literal for int()"),
        ("t_s,input_tokens,output_tokens\n0.0,0,1\n", ":2: expected at least 1 input token"),
        ("t_s,input_tokens,output_tokens\n1.0,1,1\n0.0,1,1\n", ":3: the time is before that of the line above"),
    ],
)
def test_a_bad_line_in_azures_format_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        list(azure.rows(path))
    assert str(caught.value).startswith(f"{path}{message}")


@pytest.mark.parametrize("name", ["mooncake", "there/is.none"])
def test_a_trace_that_is_not_there_is_answered_with_those_that_are(name: str) -> None:
    with pytest.raises(ConfigError, match="azure_llm_2023_code, azure_llm_2023_conv, mooncake_conversation"):
        locate(name)
