"""The page of others' policies lists what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from warmfront.lab.peers import PEERS
from warmfront.policy.registry import BUILTIN

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "peer-policies.md"


def names(section: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    (body,) = re.findall(rf"^## {section}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE)


@pytest.mark.parametrize("section", ["Rules", "Sources and deviations"])
def test_every_peer_has_one_row_in_order(section: str) -> None:
    assert names(section) == sorted(PEERS)


def test_every_plain_policy_is_compared_with_what_others_ship() -> None:
    assert set(names("The plain policies")) == set(BUILTIN) - {"marginal_cost"}
