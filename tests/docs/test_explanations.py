"""Tables on the explanation pages list what the code has, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from warmfront.config import IndexConfig
from warmfront.control.reload import LIVE
from warmfront.policy.registry import BUILTIN
from warmfront.sim.latency import PRESETS, preset

ROOT = Path(__file__).resolve().parents[2]
ROW_NAME = re.compile(r"^\| `([\w.-]+)`", re.MULTILINE)


def page(name: str) -> str:
    return (ROOT / "docs" / "explanation" / name).read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_the_tokens_page_lists_every_reason_for_a_fallback() -> None:
    source = ROOT / "crates" / "warmfront-core" / "src" / "tokenize" / "fallback.rs"
    reasons = re.findall(r'Self::\w+ => "(\w+)"', source.read_text(encoding="utf-8"))
    assert ROW_NAME.findall(section(page("tokens.md"), "What falls back")) == reasons


def test_the_policies_page_lists_every_policy() -> None:
    assert set(ROW_NAME.findall(page("policies.md").partition("\n## ")[0])) == set(BUILTIN)


def test_the_engine_page_lists_every_preset_with_its_cache() -> None:
    told = re.findall(r"^\| `([\w.-]+)` \| .* \| ([\d,]+) \|$", section(page("engine-model.md"), "Time"), re.MULTILINE)
    assert {name for name, _ in told} == set(PRESETS)
    for name, tokens in told:
        assert abs(int(tokens.replace(",", "")) / preset(name).kv_tokens - 1) < 0.01, name


def test_the_index_page_tells_the_default_lives_of_predictions() -> None:
    text = page("index.md")
    assert f"({IndexConfig().predicted_ttl_s:g} s on an exact feed)" in text
    assert f"({IndexConfig().approximate_ttl_s / 60:g} minutes)" in text


def test_the_page_about_reloads_names_everything_that_takes_effect_at_once() -> None:
    text = (ROOT / "docs/how-to/change-a-running-router.md").read_text(encoding="utf-8")
    assert [path for path in LIVE if f"`{path}`" not in text] == []
