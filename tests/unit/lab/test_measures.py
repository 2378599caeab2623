"""Figures of runs that are small enough to be worked out by hand."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace
from support.lab_figures import GOOD, figures, outcome, regime, result
from warmfront.lab.measures import Measures, Targets, cold_prefill_s, histogram_percentile, mean, measure, percentile
from warmfront.lab.model import Group, Outcome
from warmfront.sim.latency import preset


def test_latencies_are_counted_from_the_arrival() -> None:
    measured = measure(result(outcome(0, 0.25, 1.25), outcome(1, 0.5, 2.5)), regime())
    assert (measured.ttft_p50_s, measured.ttft_p99_s) == (0.25, 0.5)
    assert measured.tpot_p50_s == pytest.approx(0.1)
    assert measured.tpot_p99_s == pytest.approx(0.2)
    assert measured.e2e_p99_s == pytest.approx(2.5)


def test_a_request_that_did_not_finish_is_infinitely_late_in_every_latency() -> None:
    cut_short = outcome(1, 0.1, None, error="engine died")
    measured = measure(result(outcome(0, 0.1, 0.2), cut_short), regime())
    assert (measured.requests, measured.failures) == (2, 1)
    assert measured.ttft_p50_s == pytest.approx(0.1)
    assert (measured.ttft_p99_s, measured.tpot_p99_s, measured.e2e_p99_s) == (None, None, None)
    assert measured.good_share == 0.5


def test_an_error_after_the_last_token_is_a_failure_too() -> None:
    assert measure(result(outcome(0, 0.1, 0.2, error="reset")), regime()).failures == 1


def test_the_first_arrivals_are_not_counted_whatever_their_place_in_the_list() -> None:
    late_first = [outcome(9, 0.1, 0.2), *(outcome(key, 0.9, 1.0) for key in range(9))]
    measured = measure(result(*late_first, imbalance=[4.0] * 9 + [2.0]), regime(warmup=0.9))
    assert measured.requests == 1
    assert measured.ttft_p99_s == pytest.approx(0.1)
    assert measured.imbalance == 2.0


def test_goodput_counts_requests_that_meet_both_targets_per_second_of_arrivals() -> None:
    outcomes = [
        outcome(0, 1.0, 2.0),  # both at the target itself
        outcome(1, 1.1, 1.2),  # late
        outcome(2, 0.5, 2.5),  # slow: 0.2 s a token
        outcome(4, 0.5, 0.6),
    ]
    measured = measure(result(*outcomes), regime())
    assert (measured.ttft_share, measured.tpot_share, measured.good_share) == (0.75, 0.75, 0.5)
    assert measured.goodput == 2 / 4
    assert measured.throughput == pytest.approx(4 / 4.6)
    assert measured.overrun_p99 == pytest.approx(1.1)


def test_a_burst_in_one_moment_is_measured_over_the_whole_run() -> None:
    measured = measure(result(outcome(0, 0.1, 0.2), ended_s=4.0), regime())
    assert measured.goodput == 0.25


def test_an_answer_of_one_token_has_no_gap() -> None:
    measured = measure(result(outcome(0, 0.1, 0.1, output_tokens=1)), regime())
    assert measured.tpot_p99_s is None
    assert measured.good_share == 1.0


def test_hits_are_a_share_of_the_prompt_tokens_that_engines_took() -> None:
    outcomes = [outcome(0, 0.1, 0.2, cached_tokens=6), outcome(1, 0.1, 0.2, prompt_tokens=20), outcome(2, None, None)]
    assert measure(result(*outcomes), regime()).hit_rate == 6 / 30


def test_busy_is_the_mean_share_of_the_run() -> None:
    assert measure(result(outcome(0, 0.1, 0.2), busy_s=[10.0, 30.0]), regime()).busy == pytest.approx(0.2)


def test_a_run_without_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="no requests"):
        measure(result(), regime())


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 50.0), (0.9, 90.0), (0.99, 99.0), (0.991, 100.0), (0.001, 1.0), (1.0, 100.0)]
)
def test_a_percentile_is_a_value_that_occurred(share: float, expected: float) -> None:
    assert percentile([float(value) for value in range(100, 0, -1)], share) == expected


def test_a_percentile_of_nothing_or_of_what_never_came_is_not_a_number() -> None:
    assert percentile([], 0.5) is None
    assert percentile([1.0, math.inf], 0.99) is None
    assert percentile([1.0, math.inf], 0.5) == 1.0


def test_the_percentile_of_a_histogram_is_the_bound_of_its_bin() -> None:
    bins = [(0.02, 1), (0.01, 98), (0.03, 0), (0.04, 1)]
    assert histogram_percentile(bins, 0.98) == 0.01
    assert histogram_percentile(bins, 0.99) == 0.02
    assert histogram_percentile(bins, 1.0) == 0.04
    assert histogram_percentile([], 0.5) is None


def test_a_cold_prefill_goes_in_steps_of_the_batch_limit() -> None:
    demo = preset("demo")
    first, second = 18e-3 + 220e-6 * 1024 + 6e-9 * 1024 * 1025 / 2, 18e-3 + 220e-6 * 10 + 6e-9 * (10 * 1024 + 55)
    assert cold_prefill_s(demo, 1034) == pytest.approx(first + second)


def test_a_target_may_grow_with_the_prompt() -> None:
    demanding = regime(ttft_s=0.5, ttft_prefills=2.0)
    asked = outcome(0, 0.1, 0.2, prompt_tokens=100)
    assert Targets(demanding).ttft_s(asked) == pytest.approx(0.5 + 2 * cold_prefill_s(preset("demo"), 100))
    assert Targets(regime(ttft_s=0.5)).ttft_s(asked) == 0.5


PEOPLE = Group(name="people", priority=0)
BATCH = Group(name="batch", priority=10, ttft_s=5.0, tpot_s=0.5)


def of_classes(*outcomes: Outcome, warmup: float = 0.0, groups: tuple[Group, ...] = (PEOPLE, BATCH)) -> Measures:
    return measure(result(*outcomes), replace(regime(warmup=warmup), groups=groups))


def test_each_group_is_measured_by_itself_and_against_targets_of_its_own() -> None:
    measured = of_classes(
        outcome(0, 0.5, 1.5),
        outcome(1, 4.0, 8.0, priority=10, cached_tokens=10),  # late and slow for a person, in time for the batch
        outcome(2, 6.0, 7.0, priority=10),
        outcome(3, 2.0, 3.0),
    )
    people, batch = measured.groups["people"], measured.groups["batch"]
    assert (people.ttft_p50_s, people.ttft_p99_s, people.requests) == (0.5, 2.0, 2)
    assert (batch.ttft_p50_s, batch.ttft_p99_s, batch.hit_rate) == (4.0, 6.0, 0.5)
    assert (people.good_share, batch.good_share) == (0.5, 0.5)
    assert (people.goodput, batch.goodput) == (1 / 3, 1.0)
    assert (people.overrun_p99, batch.overrun_p99) == (2.0, 1.2)


def test_the_figures_of_all_requests_hold_each_to_the_targets_of_its_group() -> None:
    rows = [outcome(0, 0.5, 1.5), outcome(1, 4.0, 8.0, priority=10), outcome(2, 4.0, 5.0, priority=3)]
    measured = of_classes(*rows)
    assert (measured.ttft_share, measured.tpot_share, measured.good_share) == (2 / 3, 1.0, 2 / 3)
    assert sum(each.requests for each in measured.groups.values()) == 2  # priority 3 is in no group
    assert measure(result(*rows), regime()).good_share == 1 / 3


def test_a_group_is_chosen_by_part_flow_and_priority_and_the_first_that_agrees_has_it() -> None:
    rows = [outcome(0, 0.1, 0.2, flow="a"), outcome(1, 0.1, 0.2, flow="a", priority=1), outcome(2, 0.1, 0.2)]
    rows[2].group = "docs"
    groups = (Group(name="urgent a", flow="a", priority=0), Group(name="a", flow="a"), Group(name="d", part="docs"))
    assert {name: each.requests for name, each in of_classes(*rows, groups=groups).groups.items()} == {
        "urgent a": 1,
        "a": 1,
        "d": 1,
    }


def test_a_group_may_be_a_stretch_of_the_run() -> None:
    groups = (Group(name="first half", between=(0.0, 0.5)), Group(name="rest", between=(0.5, 1.0)))
    measured = of_classes(*(outcome(key, 0.1, 0.2) for key in (0, 4, 5, 9)), groups=groups)  # a run of ten
    assert {name: each.requests for name, each in measured.groups.items()} == {"first half": 2, "rest": 2}
    assert Group(name="all", between=(0.0, 1.0)).selects(part="", flow="", priority=0, share=0.99)


def test_the_warm_up_is_of_all_requests_and_a_group_that_has_none_left_is_not_there() -> None:
    measured = of_classes(outcome(0, 0.1, 0.2), outcome(1, 0.1, 0.2, priority=10), warmup=0.5)
    assert list(measured.groups) == ["batch"]


def test_seeds_of_groups_are_averaged_where_all_have_them() -> None:
    first = of_classes(outcome(0, 0.2, 0.3), outcome(1, 0.1, 0.2, priority=10))
    second = of_classes(outcome(0, 0.4, 0.5))
    averaged = mean([first, second])
    assert list(averaged.groups) == ["people"]
    assert averaged.groups["people"].ttft_p99_s == pytest.approx(0.3)


def test_a_load_holds_when_it_does_for_each_group_by_which_policies_are_compared() -> None:
    calm = [outcome(key, 0.1, 0.2) for key in range(300)]
    classes = replace(regime(), groups=(PEOPLE, BATCH))
    assert of_classes(*calm, outcome(300, 1.0, 2.0, priority=10)).holds_in(classes)
    failing = of_classes(*calm, outcome(300, 6.0, 7.0, priority=10))
    assert failing.holds, "99 % of all are in time"
    assert not failing.holds_in(classes)
    assert failing.holds_in(replace(classes, groups=(PEOPLE, replace(BATCH, compared=()))))


def test_seeds_are_averaged_and_one_that_never_came_makes_the_mean_infinite() -> None:
    averaged = mean([GOOD, figures(ttft_p50_s=0.3, ttft_p99_s=None, goodput=20.0)])
    assert averaged.ttft_p50_s == pytest.approx(0.2)
    assert averaged.ttft_p99_s is None
    assert averaged.goodput == 15.0


def test_a_load_holds_when_99_of_100_requests_meet_each_target() -> None:
    assert figures(ttft_share=0.99, tpot_share=0.99).holds
    assert not figures(ttft_share=0.989).holds
    assert not figures(tpot_share=0.989).holds
