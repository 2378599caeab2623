"""Runs end to end: the real router, the real index, engines on virtual time."""

from __future__ import annotations

import msgspec
import pytest
from support.lab import Chats, regime
from warmfront.errors import ConfigError
from warmfront.lab import regime as regimes
from warmfront.lab.measures import measure
from warmfront.lab.model import EventSpec, RunResult
from warmfront.lab.run import run, run_source

H100 = "llama-3.1-8b-h100"


def chats(policy: str, *, seed: int = 1, rate: float = 30.0, **fleet: object) -> RunResult:
    source = Chats(seed=seed, sessions=120, rate=rate)
    return run_source(regime(**fleet), source, policy, 1.0, seed)  # type: ignore[arg-type]


def plain(result: RunResult) -> bytes:
    return msgspec.json.encode([result.outcomes, result.gaps, result.busy_s, result.imbalance, result.ended_s])


def test_every_request_ends_and_gets_all_its_tokens() -> None:
    result = chats("marginal_cost")
    assert len(result.outcomes) == 360
    assert all(each.error is None and each.finished_s is not None for each in result.outcomes)
    assert sum(count for _, count in result.gaps) == sum(each.output_tokens - 1 for each in result.outcomes)


@pytest.mark.parametrize("policy", ["marginal_cost", "power_of_two"])
def test_the_same_seed_gives_the_same_run(policy: str) -> None:
    assert plain(chats(policy)) == plain(chats(policy))
    assert plain(chats(policy)) != plain(chats(policy, seed=2))


def test_cached_tokens_are_predicted_exactly_when_events_come_at_once() -> None:
    result = chats("marginal_cost", rate=2.0, events=EventSpec(delay_s=0.0))
    assert sum(each.cached_tokens for each in result.outcomes) > 0
    wrong = [each for each in result.outcomes if each.cached_tokens != each.predicted_tokens]
    assert not wrong


def test_knowing_prefixes_beats_not_knowing_them() -> None:
    warm, blind = chats("marginal_cost"), chats("random")
    assert sum(each.cached_tokens for each in warm.outcomes) > 1.2 * sum(each.cached_tokens for each in blind.outcomes)


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        chats("nonsense")


def test_what_became_of_a_request_says_whose_it_was() -> None:
    described = regimes.load("priorities")
    result = run(msgspec.structs.replace(described, requests=60), "marginal_cost", 30.0, 1)
    labels = {(each.group, each.flow, each.priority) for each in result.outcomes}
    assert labels == {("people", "people", 0), ("batch", "batch", 10)}
    measured = measure(result, described)
    assert set(measured.groups) == {"people", "batch"}
    assert sum(each.requests for each in measured.groups.values()) == measured.requests


@pytest.mark.parametrize(("name", "first", "others"), [("fan-out", 1, 6), ("best-of-n", 1, 7)])
def test_requests_that_belong_together_say_which_of_them_came_first(name: str, first: int, others: int) -> None:
    described = msgspec.structs.replace(regimes.load(name), requests=(first + others) * 4, warmup=0.0)
    groups = measure(run(described, "marginal_cost", described.loads[0], 1), described).groups
    assert [each.requests for each in groups.values()] == [4 * first, 4 * others]
