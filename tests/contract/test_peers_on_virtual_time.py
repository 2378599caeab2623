"""Every peer runs behind the real router on virtual time and never falls back to the least loaded replica."""

from __future__ import annotations

import logging

import pytest
from msgspec.structs import replace
from warmfront.lab import regime
from warmfront.lab.peers import PEERS
from warmfront.lab.run import run

REQUESTS = 40


@pytest.mark.parametrize("shipped", ["crash", "agent-host", "no-events"])
@pytest.mark.parametrize("name", sorted(PEERS))
def test_a_peer_serves_a_regime_without_an_error(name: str, shipped: str, caplog: pytest.LogCaptureFixture) -> None:
    declared = replace(regime.load(shipped), requests=REQUESTS)
    with caplog.at_level(logging.WARNING, logger="warmfront.router.deciding"):
        result = run(declared, name, declared.loads[0], seed=1)
    assert [record for record in caplog.records if record.name == "warmfront.router.deciding"] == []
    assert len(result.outcomes) >= REQUESTS
    assert all(outcome.finished_s is not None for outcome in result.outcomes)
