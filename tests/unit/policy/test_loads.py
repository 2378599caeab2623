"""What loading costs, learned from busy periods whatever the configured values were."""

from __future__ import annotations

import random

import pytest
from warmfront.config import CostConfig
from warmfront.policy.estimators import Learned
from warmfront.policy.loads import LoadModel, Loads
from warmfront.router.fleet import loads_of
from warmfront.types import Slot

HOST_S, DISK_S, ADAPTER_S = 5.5e-6, 44e-6, 0.02
TOKEN_S = 60e-6


def model(factor: float = 1.0) -> LoadModel:
    """A model whose priors are wrong by a factor."""
    prior = CostConfig(host_load_s=factor * HOST_S, disk_load_s=factor * DISK_S, adapter_load_s=factor * ADAPTER_S)
    return LoadModel(prior)


def teach(taught: LoadModel, samples: int, *, kinds: str = "h", seed: int = 3) -> None:
    """Let periods of some thousand loaded tokens pass, beside computing that is known within a tenth."""
    rng = random.Random(seed)
    for _ in range(samples):
        loads = Loads(
            rng.randrange(1000, 20_000) if "h" in kinds else 0.0,
            rng.randrange(0, 4000) if "d" in kinds else 0.0,
            rng.choice([0, 1, 2]) if "a" in kinds else 0.0,
        )
        computed_s = rng.randrange(100, 600) * TOKEN_S
        load_s = HOST_S * loads.host_tokens + DISK_S * loads.disk_tokens + ADAPTER_S * loads.adapters
        taught.sample(computed_s + load_s, computed_s * rng.uniform(0.9, 1.1), loads)


@pytest.mark.parametrize("factor", [0.01, 0.25, 1.0, 4.0, 60.0])
def test_a_wrong_prior_is_corrected(factor: float) -> None:
    taught = model(factor)
    teach(taught, 60)
    if factor <= 4.0:
        assert taught.host_s == pytest.approx(HOST_S, rel=0.15)
    teach(taught, 400)
    assert taught.host_s == pytest.approx(HOST_S, rel=0.1)
    assert taught.disk_s == factor * DISK_S, "nothing was loaded from disk"


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_loads_of_all_kinds_are_told_apart(factor: float) -> None:
    taught = model(factor)
    teach(taught, 600, kinds="hda")
    assert taught.costs == pytest.approx([HOST_S, DISK_S, ADAPTER_S], rel=0.2)


def test_a_cost_that_was_configured_as_nothing_stays_nothing() -> None:
    taught = LoadModel(CostConfig(host_load_s=0.0))
    teach(taught, 100, kinds="ha")
    assert taught.host_s == 0.0
    assert taught.adapter_s != CostConfig().adapter_load_s


def test_a_period_that_was_shorter_than_its_computing_makes_nothing_negative() -> None:
    taught = model()
    for _ in range(50):
        taught.sample(0.1, 0.3, Loads(host_tokens=5000))
    assert 0.0 <= taught.host_s < 0.1 * CostConfig().host_load_s


def test_a_short_load_teaches_nothing() -> None:
    taught = model()
    taught.sample(0.5, 0.1, Loads(host_tokens=300, disk_tokens=100))
    assert (taught.samples, taught.costs) == (0, model().costs)


def learned() -> Learned:
    made = Learned(CostConfig())
    made.grow()
    return made


def test_a_period_with_loads_teaches_what_loading_costs_and_not_what_computing_does() -> None:
    made, slot = learned(), Slot(0)
    for number in range(40):
        made.dispatched(slot, 10.0 * number, new_tokens=700, alone=True, usable=True)
        seconds = 700 * CostConfig().prefill_prior_s + 8000 * 40e-6
        made.first_token(
            slot, 10.0 * number + seconds, new_tokens=700, prompt_tokens=8700, last=True, loads=Loads(host_tokens=8000)
        )
    assert made.loads.host_s == pytest.approx(40e-6, rel=0.1)
    assert made.prefill.samples == 0


def test_what_was_to_be_loaded_is_corrected_by_the_answer() -> None:
    made, slot = learned(), Slot(0)
    made.dispatched(slot, 0.0, new_tokens=700, alone=True, usable=True)
    expected, found = Loads(host_tokens=8000), Loads(host_tokens=2000)
    busy = made.first_token(slot, 0.9, new_tokens=700, prompt_tokens=8700, last=True, certain=False, loads=expected)
    assert busy is not None
    made.resolved(slot, busy, guessed=700, computed=6700, prompt_tokens=8700, guessed_loads=expected, loads=found)
    assert (busy.tokens, busy.loads) == (6700, found)
    assert (made.loads.samples, made.prefill.samples) == (1, 0)


@pytest.mark.parametrize(
    ("cached_tokens", "loads"),
    [(0, (0, 0)), (64, (0, 0)), (100, (36, 0)), (320, (256, 0)), (400, (256, 80)), (9999, (256, 192))],
)
def test_what_is_found_beyond_the_device_was_loaded_from_the_tier_where_it_lay(
    cached_tokens: int, loads: tuple[int, int]
) -> None:
    assert loads_of((1.0, 64, 64, 320, 512), cached_tokens)[:2] == loads
