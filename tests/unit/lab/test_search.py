"""The search finds the highest load that holds, and says only what it saw."""

from __future__ import annotations

import pytest
from support.lab_figures import GOOD, figures, regime
from warmfront.lab.measures import Measures
from warmfront.lab.search import PROBES_MAX, TOLERANCE, Sustained, interpolate, search

BAD = figures(ttft_share=0.5)
REGIME = regime(loads=(4.0, 8.0, 16.0))


def hold_up_to(limit: float) -> Sustained:
    return search(regime(loads=(4.0, 8.0, 16.0)), lambda load: GOOD if load <= limit else BAD)


@pytest.mark.parametrize("limit", [0.9, 3.0, 7.99, 8.0, 11.0, 60.0])
def test_the_answer_held_and_is_within_the_tolerance_of_the_limit(limit: float) -> None:
    found = hold_up_to(limit)
    assert found.load <= limit <= found.load * TOLERANCE
    assert (found.load, True) in found.tried


def test_the_search_begins_in_the_middle_and_tries_no_load_twice() -> None:
    found = hold_up_to(11.0)
    assert found.tried[0][0] == 8.0
    assert len({load for load, _ in found.tried}) == len(found.tried) <= PROBES_MAX


def test_a_policy_that_never_holds_gets_zero_after_a_bounded_number_of_runs() -> None:
    found = hold_up_to(0.0)
    assert found.load == 0.0
    assert len(found.tried) == PROBES_MAX


def test_a_policy_that_always_holds_gets_the_highest_load_that_was_tried() -> None:
    found = hold_up_to(1e9)
    assert found.load == max(load for load, _ in found.tried)


def point(load: float, overrun: float | None, **changed: float) -> tuple[float, Measures]:
    held = overrun is not None and overrun <= 1
    return load, figures(**{"overrun_p99": overrun, "ttft_share": 1.0 if held else 0.9, **changed})


def test_between_two_loads_the_crossing_is_on_a_line_of_logarithms() -> None:
    assert interpolate([point(16.0, 2.0), point(4.0, 0.5)], REGIME) == pytest.approx(8.0)
    assert interpolate([point(4.0, 1.0), point(16.0, 2.0)], REGIME) == pytest.approx(4.0)


def test_beside_a_figure_that_is_infinite_the_last_load_that_holds_is_the_answer() -> None:
    assert interpolate([point(4.0, 0.5), point(16.0, None)], REGIME) == 4.0


def test_tokens_that_are_too_slow_end_the_line_as_well() -> None:
    assert interpolate([point(4.0, 0.5), point(8.0, 0.6, tpot_share=0.5), point(9.0, 0.7)], REGIME) == 4.0


def test_the_ends_of_the_line_are_said_as_they_are() -> None:
    assert interpolate([point(4.0, 0.5), point(8.0, 0.9)], REGIME) == 8.0
    assert interpolate([point(4.0, 1.5)], REGIME) is None
    assert interpolate([], REGIME) is None
