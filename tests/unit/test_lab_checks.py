"""The page about checks of the lab says what its figures say, and the workloads it compares are what they claim."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("warmfront.core", reason="the core is not built", exc_type=ImportError)

from warmfront.demo.workload import MIX, Conversation, plan
from warmfront.lab.model import SimRequest
from warmfront.sim.tokens import BuiltinTokenizer, render

ROOT = Path(__file__).parents[2]


class Checks(NamedTuple):
    ladder: Any
    mocker: Any
    page: Any
    processes: Any


@pytest.fixture(scope="module")
def checks() -> Iterator[Checks]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from lab_checks import ladder, mocker, page, processes

    yield Checks(ladder, mocker, page, processes)
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture
def data(checks: Checks) -> Any:
    return checks.page.read(ROOT)


def test_the_page_follows_from_the_data(checks: Checks, data: Any) -> None:
    assert (ROOT / checks.page.PAGE).read_text(encoding="utf-8") == checks.page.render(
        data, checks.page.read_reasons(ROOT)
    ), "run: python benchmarks/lab_check.py render"
    assert list(data) == ["mocker", "ladder", "processes"]
    assert (ROOT / checks.page.DATA).stat().st_size < 200_000


def test_every_difference_has_a_reason(checks: Checks, data: Any) -> None:
    assert "not explained yet" not in checks.page.render(data, checks.page.read_reasons(ROOT))


def test_a_difference_without_a_reason_says_so(checks: Checks, data: Any) -> None:
    case = data["mocker"]["cases"][0]
    case["warmfront"]["mean"]["ttft_p50_ms"] = 1.06 * case["dynamo"]["mean"]["ttft_p50_ms"]
    page = checks.page.render(data, checks.page.read_reasons(ROOT))
    _, _, listed = page.partition(f"**{case['name']}, {case['router']}**")
    assert "TTFT p50" in listed.splitlines()[2]
    assert "+6.0 %" in listed.splitlines()[2]
    assert listed.splitlines()[4] == "Why: not explained yet"


def test_a_reason_for_what_does_not_differ_is_refused(checks: Checks, data: Any) -> None:
    with pytest.raises(ValueError, match="processes: reasons for what does not differ: nothing"):
        checks.page.render(data, checks.page.read_reasons(ROOT) | {"processes": {"nothing": "but why"}})


def test_engines_of_both_simulators_agree(data: Any) -> None:
    """In every figure, as long as requests go to the same replicas."""
    for case in data["mocker"]["cases"]:
        ours = case["warmfront"] if case["router"] == "round_robin" else case["placed"]
        theirs = case["dynamo"]["mean"]
        assert ours["mean"]["ttft_mean_ms"] == pytest.approx(theirs["ttft_mean_ms"], rel=0.001), case["name"]
        for name, value in theirs.items():
            assert ours["mean"][name] == pytest.approx(value, rel=0.05), (case["name"], case["router"], name)


def test_a_stage_of_the_ladder_begins_a_second_after_the_last_answer_of_the_one_before(checks: Checks) -> None:
    stages = (checks.ladder.Stage(2.0, 3.0), checks.ladder.Stage(1.0, 4.0))
    ladder = checks.ladder.Ladder(stages, seed=1)
    first: list[SimRequest] = list(ladder.arrivals())
    assert len(first) == 6
    assert all(0 <= request.at_s <= 3 for request in first)
    assert [list(ladder.finished(request, 10.0)) for request in first[:-1]] == [[]] * 5
    second = ladder.finished(first[-1], 20.0)
    assert len(second) == 4
    assert all(21 <= request.at_s <= 25 for request in second)
    assert [list(ladder.finished(request, 30.0)) for request in second] == [[]] * 4
    assert ladder.stage_of == [0] * 6 + [1] * 4


def test_answers_of_the_ladder_are_as_long_as_reported(checks: Checks) -> None:
    lengths = sorted(
        request.output_tokens for request in checks.ladder.Ladder((checks.ladder.Stage(500.0, 20.0),), 1).arrivals()
    )
    assert lengths[-1] <= 1000
    assert lengths[len(lengths) // 2] == pytest.approx(998, abs=1)
    assert lengths[len(lengths) // 20] == pytest.approx(193, abs=80)
    assert sum(lengths) / len(lengths) == pytest.approx(937, rel=0.02)


def test_the_ladder_sends_every_prompt_before_any_comes_again(checks: Checks) -> None:
    ladder = checks.ladder.Ladder((checks.ladder.Stage(100.0, 15.0),), seed=1)
    prompts = [request.prompt for request in ladder.arrivals()]
    assert len(set(prompts[:750])) == 750
    assert prompts[:750] == prompts[750:]
    assert len({prompt[0] for prompt in prompts}) == 150
    assert {sum(tokens for _, tokens in prompt) for prompt in prompts} == {7200}


def test_knee_and_plateau_are_read_off_a_curve(checks: Checks) -> None:
    rates, curve = [10.0, 20.0, 40.0, 60.0], [50.0, 91.0, 100.0, 98.0]
    assert checks.ladder.knee(rates, curve) == 20.0
    assert checks.ladder.plateau(rates, curve) == 99.0


def test_conversations_on_virtual_time_are_as_long_as_their_texts(checks: Checks) -> None:
    tokenizer = BuiltinTokenizer()
    planned = plan(replace(MIX, system_words=40, one_off_words=30), seconds=3.0, seed=2)
    source = checks.processes.Conversations(planned)
    for conversation, request in zip(planned, list(source.arrivals()), strict=True):
        messages = opening(conversation)
        for turn, tokens in zip(conversation.turns, conversation.answer_tokens, strict=True):
            messages.append({"role": "user", "content": turn})
            assert request.prompt_tokens == len(tokenizer.encode(render(messages)))
            assert request.output_tokens == tokens
            messages.append({"role": "assistant", "content": " cloud" * tokens})
            following = source.finished(request, 5.0)
            request = following[0] if following else request
        assert not following


def opening(conversation: Conversation) -> list[dict[str, str]]:
    return [] if conversation.system is None else [{"role": "system", "content": conversation.system}]


def test_a_trace_head_is_what_the_lab_runs(checks: Checks) -> None:
    """Dynamo reads the file, the lab its own reader: the same requests in the same order."""
    from warmfront.lab import regime as regimes

    case = checks.mocker.Case("mooncake_synthetic", 40, 2, 4.0)
    lines = [json.loads(line) for line in checks.mocker._head(case)]
    ours = list(regimes.source(checks.mocker.regime(case), case.speed, 1).arrivals())
    assert [(line["input_length"], line["output_length"]) for line in lines] == [
        (request.prompt_tokens, request.output_tokens) for request in ours
    ]
    assert [(line["timestamp"] - lines[0]["timestamp"]) / 4000 for line in lines] == pytest.approx(
        [request.at_s for request in ours]
    )
