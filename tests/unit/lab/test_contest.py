"""A cell that one seed says is lost is run again under others, against those that were best there."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.lab_figures import figures, results
from warmfront.errors import ConfigError
from warmfront.lab import contest, results_file
from warmfront.lab.contest import Contest, Contested, Rounds
from warmfront.lab.measures import Measures
from warmfront.lab.regimes_page import render
from warmfront.lab.results import Cell, Results

SEEDS = (3, 4)


def lost_to(**ttft_s: float) -> Results:
    """One cell, of which the default policy's TTFT p99 is 1 s."""
    policies = {"marginal_cost": 1.0, **ttft_s}
    return results(*(Cell("chat", policy, 4.0, figures(ttft_p99_s=ttft)) for policy, ttft in policies.items()))


def contested(own: tuple[float | None, ...], **rivals: tuple[float | None, ...]) -> Contested:
    return Contested("chat", 4.0, "TTFT p99", own, rivals)


def test_a_lost_cell_meets_the_two_that_were_best_in_it() -> None:
    found = contest.contests(lost_to(third=0.9, first=0.5, second=0.6))
    assert found == [Contest("chat", 4.0, "TTFT p99", ("first", "second"))]


def test_a_cell_that_is_within_three_per_cent_is_not_contested() -> None:
    assert contest.contests(lost_to(peer=0.98)) == []


def test_every_policy_runs_under_every_seed_once() -> None:
    lost = lost_to(first=0.5, second=0.6)
    twice = [*contest.contests(lost), *contest.contests(lost)]
    found = [(task.policy, task.seed) for task in contest.tasks(twice, lost, SEEDS)]
    assert found == [(policy, seed) for policy in ("marginal_cost", "first", "second") for seed in SEEDS]


def test_the_seed_that_chose_the_cells_may_not_judge_them() -> None:
    lost = lost_to(first=0.5)
    with pytest.raises(ConfigError, match="seed 1 has chosen the cells"):
        contest.tasks(contest.contests(lost), lost, (1, 2))


def test_scores_compare_with_the_better_rival_of_each_seed() -> None:
    cell = contested((1.0, 1.0), first=(0.5, 4.0), second=(2.0, 2.0))
    assert cell.scores() == [0.5, 2.0]
    assert cell.mean_score() == pytest.approx(1.0)
    assert cell.median_score() == 2.0
    assert cell.verdict() == "level"


def test_a_higher_goodput_is_a_better_one() -> None:
    cell = Contested("chat", 4.0, "goodput", (10.0, 10.0), {"first": (8.0, 5.0), "second": (5.0, 8.0)})
    assert cell.scores() == [1.25, 1.25]
    assert cell.verdict() == "won"


def test_what_never_came_loses_to_all_but_what_never_came_either() -> None:
    assert contested((None, None), first=(1.0, None)).scores() == [0.0, 1.0]
    assert contested((None,), first=(1.0,)).verdict() == "lost"


def test_spread_is_of_the_default_policy_alone() -> None:
    assert contested((1.0, 4.0, 2.0), first=(9.0, 1.0, 1.0)).spread() == 4.0


def measured(results: Results, ttft_s: dict[str, float], seeds: tuple[int, ...]) -> Rounds:
    cells = contest.contests(results)
    done: list[tuple[contest.CellTask, Measures]] = [
        (task, figures(ttft_p99_s=ttft_s[task.policy] * task.seed))
        for task in contest.tasks(cells, results, SEEDS)
        if task.seed in seeds
    ]
    return contest.rounds(cells, results, done, seeds=SEEDS, command="make lab")


def test_figures_are_put_together_by_seed_and_come_back_from_the_file(tmp_path: Path) -> None:
    rounds = measured(lost_to(first=0.5), {"marginal_cost": 1.0, "first": 3.0}, SEEDS)
    assert rounds.cells == (contested((3.0, 4.0), first=(9.0, 12.0)),)
    results_file.write_rows(rounds, tmp_path / "contest.json", rows="cells")
    assert results_file.read_rows(tmp_path / "contest.json", Rounds) == rounds
    assert results_file.read_rows(tmp_path / "none.json", Rounds) is None


def test_a_cell_that_lacks_a_run_is_left_out() -> None:
    assert measured(lost_to(first=0.5), {"marginal_cost": 1.0, "first": 3.0}, (3,)).cells == ()


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "contest.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"contest\.json"):
        results_file.read_rows(tmp_path / "contest.json", Rounds)


def test_the_page_shows_what_other_seeds_say_below_what_the_first_says() -> None:
    lost = lost_to(first=0.5)
    page = render(lost, {}, measured(lost, {"marginal_cost": 1.0, "first": 3.0}, SEEDS))
    assert "| chat at 4 | TTFT p99 | 3.00 | 3.00 | 2 of 2 | 1.33 | first | won |" in page
    assert "Of 1 cells, 0 are lost by more than 3 % in the mean, 0 are level, 1 are won." in page
    assert page.index("## Where marginal_cost loses") < page.index("## The same cells under other seeds")
