"""What chance alone does to a figure bounds what a comparison of figures can say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from support.lab_figures import figures, results, two_classes
from warmfront.errors import ConfigError
from warmfront.lab import grid, page, repeats, results_file, run
from warmfront.lab import regime as regimes
from warmfront.lab.later import LATER_S_MAX, Later
from warmfront.lab.model import SimRequest
from warmfront.lab.regimes_page import render
from warmfront.lab.repeats import Repeat, Repeats
from warmfront.lab.results import Cell, Results

ONE = SimRequest(key=0, at_s=1.0, prompt=((1, 10),), output_tokens=5)


class Requests:
    """Two requests a hair apart, each of which has a successor."""

    def arrivals(self) -> Iterator[SimRequest]:
        yield ONE
        yield replace(ONE, key=1, at_s=1.0 + 1e-6)

    def finished(self, request: SimRequest, now_s: float) -> Sequence[SimRequest]:
        return [replace(request, key=request.key + 2, at_s=now_s)]


def one_seed(*cells: Cell) -> Results:
    return replace(results(*cells), seeds=(1,))


def two_policies() -> Results:
    """`peer` is best in TTFT, the default policy in the rest."""
    own, peer = figures(ttft_p99_s=1.0), figures(ttft_p99_s=0.5, goodput=9.0, itl_p99_s=0.03)
    return one_seed(Cell("chat", "marginal_cost", 4.0, own), Cell("chat", "peer", 4.0, peer))


def again(found: Results, **ttft_s: float) -> Repeats:
    done = [
        (task, figures(ttft_p99_s=ttft_s[task.policy])) for task in repeats.tasks(found, 1) if task.policy in ttft_s
    ]
    return repeats.repeats(found, done, draw=1, command="make lab")


def repeat(before: float | None, after: float | None, metric: str = "TTFT p99") -> Repeat:
    return Repeat("chat", 4.0, None, metric, "peer", True, before, after)


def test_requests_come_up_to_a_millisecond_later_and_never_in_another_order() -> None:
    moved = list(Later(Requests(), 1).arrivals())
    delays_s = [after.at_s - before.at_s for before, after in zip(Requests().arrivals(), moved, strict=True)]
    assert all(0.0 <= delay_s <= LATER_S_MAX for delay_s in delays_s)
    assert any(delays_s)
    assert [request.at_s for request in moved] == sorted(request.at_s for request in moved)


def test_a_delay_is_the_request_s_own_whatever_came_before_it() -> None:
    whole = Later(Requests(), 1)
    list(whole.arrivals())
    assert whole.finished(ONE, 2.0) == Later(Requests(), 1).finished(ONE, 2.0)
    assert whole.finished(ONE, 2.0) != Later(Requests(), 2).finished(ONE, 2.0)
    assert whole.finished(ONE, 2.0)[0].at_s >= 2.0


def test_a_run_with_later_requests_is_the_same_each_time_and_another_one() -> None:
    small = replace(regimes.load("chat"), requests=60)
    first, same, usual = (run.run(small, "round_robin", 2.0, 1, later=draw) for draw in (1, 1, 0))
    assert first.outcomes == same.outcomes
    assert first.outcomes != usual.outcomes


def test_the_best_of_each_row_and_the_default_run_again_once() -> None:
    found = [(task.policy, task.load, task.seed, task.later) for task in repeats.tasks(two_policies(), 3)]
    assert sorted(found) == [("marginal_cost", 4.0, 1, 3), ("peer", 4.0, 1, 3)]


@pytest.mark.parametrize(("seeds", "draw"), [((1, 2), 1), ((1,), 0)])
def test_means_and_draws_that_are_none_are_refused(seeds: tuple[int, ...], draw: int) -> None:
    with pytest.raises(ConfigError):
        repeats.tasks(replace(two_policies(), seeds=seeds), draw)


def test_each_row_is_held_against_the_same_row_of_before(tmp_path: Path) -> None:
    found = again(two_policies(), marginal_cost=1.0, peer=0.6)
    ttft = [row for row in found.rows if row.metric == "TTFT p99"]
    assert [(row.policy, row.is_best, row.before, row.after) for row in ttft] == [
        ("marginal_cost", False, 1.0, 1.0),
        ("peer", True, 0.5, 0.6),
    ]
    results_file.write_rows(found, tmp_path / "repeats.json", rows="rows")
    assert results_file.read_rows(tmp_path / "repeats.json", Repeats) == found
    assert results_file.read_rows(tmp_path / "none.json", Repeats) is None


def test_a_row_of_a_group_is_held_against_that_group() -> None:
    classes = replace(two_classes(), seeds=(1,))
    done = [(task, classes.at(task.regime.name, task.load)[task.policy]) for task in repeats.tasks(classes, 1)]
    rows = repeats.repeats(classes, done, draw=1, command="make lab").rows
    assert {row.group for row in rows} == {"people", "batch", None}
    assert all(row.before == row.after for row in rows)


def test_a_run_that_is_lacking_leaves_its_rows_out() -> None:
    assert {row.policy for row in again(two_policies(), peer=0.5).rows} == {"peer"}


@pytest.mark.parametrize(
    ("row", "score", "is_worse"),
    [
        (repeat(1.0, 1.0), 1.0, False),
        (repeat(1.0, 1.02), 1.0 / 1.02, False),
        (repeat(1.0, 2.0), 0.5, True),
        (repeat(2.0, 1.0), 0.5, False),
        (repeat(10.0, 5.0, "goodput"), 0.5, True),
        (repeat(5.0, 10.0, "goodput"), 0.5, False),
        (repeat(None, None), 1.0, False),
        (repeat(1.0, None), 0.0, True),
        (repeat(None, 1.0), 0.0, False),
    ],
)
def test_a_figure_is_compared_with_itself_in_the_direction_of_its_metric(
    row: Repeat, score: float, is_worse: bool
) -> None:
    assert row.score() == pytest.approx(score)
    assert row.is_worse() is is_worse


def test_the_page_says_how_many_rows_the_best_of_all_would_hold() -> None:
    found = two_policies()
    shown = render(found, {}, None, again(found, marginal_cost=0.9, peer=0.6))
    assert "| TTFT p99 | 0 of 1 | 1 of 1 | 16.7 % | 0 of 1 |" in shown
    assert "in about 2 of 3 rows, and not in all" in shown
    assert shown.index("## Targets") < shown.index("## How far a figure can be trusted")


def test_a_repeat_asks_for_the_best_and_no_others(tmp_path: Path) -> None:
    (tmp_path / grid.DATA).parent.mkdir(parents=True)
    cells = [
        Cell("chat", name, 4.0, figures(ttft_p99_s=each))
        for name, each in (("marginal_cost", 1.0), ("session", 0.5), ("random", 2.0))
    ]
    results_file.write(one_seed(*cells), tmp_path / grid.DATA)
    common = ["--cache", str(tmp_path / "cache.jsonl"), "--root", str(tmp_path), "--estimate"]
    asked = CliRunner().invoke(page.main, ["--repeat", "1", *common])
    assert asked.output.startswith("2 of 2 tasks to do")
    both = CliRunner().invoke(page.main, ["--repeat", "1", "--contest", "2", *common])
    assert both.exit_code == 1
    assert "give one of them" in both.output


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "repeats.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"repeats\.json"):
        results_file.read_rows(tmp_path / "repeats.json", Repeats)
