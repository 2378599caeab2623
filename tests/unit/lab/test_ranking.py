"""Who wins where, on figures whose scores can be checked by eye."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from support.lab_figures import figures, regime, results, three_policies, two_classes
from warmfront.errors import ConfigError
from warmfront.lab import ranking
from warmfront.lab.results import Cell, Metric, scores, significant
from warmfront.lab.results_file import read, write


def test_lower_is_better_for_latencies_and_what_never_came_scores_nothing() -> None:
    assert scores({"a": 0.5, "b": 1.0, "c": None}, is_higher_better=False) == {"a": 1.0, "b": 0.5, "c": 0.0}


def test_higher_is_better_for_rates() -> None:
    assert scores({"a": 5.0, "b": 10.0, "c": 0.0}, is_higher_better=True) == {"a": 0.5, "b": 1.0, "c": 0.0}


@pytest.mark.parametrize("value", [0.0, None, 3.0])
def test_policies_that_tie_are_all_the_best(value: float | None) -> None:
    assert scores({"a": value, "b": value}, is_higher_better=True) == {"a": 1.0, "b": 1.0}


def test_zero_is_the_best_of_what_should_be_low() -> None:
    assert scores({"a": 0.0, "b": 1.0}, is_higher_better=False) == {"a": 1.0, "b": 0.0}


def test_standings_name_the_worst_cell_and_count_those_at_the_best() -> None:
    first, second, third = ranking.standings(ranking.comparisons(three_policies()))
    assert [first.policy, second.policy, third.policy] == ["marginal_cost", "peer", "slow"]
    assert (first.worst_score, first.worst.place, first.worst.metric) == (0.8, "chat at 8", "TTFT p99")
    assert (first.at_best, first.cells) == (5, 6)
    assert first.mean == pytest.approx(0.8 ** (1 / 6))
    assert third.mean == pytest.approx((0.5 * 0.01 * (4 / 12) * 0.4) ** (1 / 6))


def test_losing_cells_are_those_more_than_three_per_cent_behind_the_worst_first() -> None:
    compared = ranking.comparisons(three_policies())
    assert [(row.metric, row.load) for row in ranking.losing(compared, "peer")] == [
        ("ITL p99", 8.0),
        ("TTFT p99", 4.0),
        ("goodput", 8.0),
    ]
    assert [row.best() for row in ranking.losing(compared, "marginal_cost")] == ["peer"]


def test_a_policy_that_ties_is_not_strictly_best() -> None:
    tie = results(Cell("chat", "a", 4.0, figures()), Cell("chat", "b", 4.0, figures()))
    assert ranking.strictly_best(ranking.comparisons(tie), "a") == {"chat": False}
    assert ranking.strictly_best(ranking.comparisons(three_policies()), "marginal_cost") == {"chat": True}


def test_the_highest_load_is_the_one_that_was_searched_for() -> None:
    (highest,) = ranking.highest_loads(three_policies())
    assert highest.figures == {"marginal_cost": "8.00", "peer": "10.0", "slow": "none"}
    assert highest.scores == {"marginal_cost": 0.8, "peer": 1.0, "slow": 0.0}


def test_without_a_search_the_highest_load_is_estimated_between_the_loads_that_were_run() -> None:
    fails = {"ttft_share": 0.5}
    made = results(
        Cell("chat", "all", 4.0, figures()),
        Cell("chat", "half", 4.0, figures(overrun_p99=0.5)),
        Cell("chat", "none", 4.0, figures(overrun_p99=2.0, **fails)),
        Cell("chat", "all", 16.0, figures()),
        Cell("chat", "half", 16.0, figures(overrun_p99=2.0, **fails)),
        Cell("chat", "none", 16.0, figures(overrun_p99=9.0, **fails)),
    )
    (highest,) = ranking.highest_loads(made)
    assert highest.figures == {"all": "≥ 16.0", "half": "~ 8.00", "none": "< 4.00"}
    assert highest.scores == pytest.approx({"all": 1.0, "half": 0.5, "none": 0.0})


def test_one_load_alone_says_nothing_about_the_highest() -> None:
    assert ranking.highest_loads(results(Cell("chat", "a", 4.0, figures()))) == []


def test_results_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write(three_policies(), path)
    assert read(path) == three_policies()
    lines = path.read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith('  ["chat",') for line in lines) == 6


def test_a_file_of_another_kind_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"other\.json"):
        read(path)
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "missing.json")


def test_a_regime_with_groups_is_judged_by_them_and_by_what_they_lack() -> None:
    compared = ranking.comparisons(two_classes())
    assert [(row.metric, row.place) for row in ranking.judged(compared)] == [
        ("TTFT p99", "serving at 4, people"),
        ("goodput", "serving at 4, people"),
        ("goodput", "serving at 4, batch"),
        ("ITL p99", "serving at 4"),
        ("TPOT p99", "serving at 4, people"),
    ]
    assert [row.place for row in ranking.losing(ranking.judged(compared), "marginal_cost")] == ["serving at 4, batch"]
    shown = [(row.metric, row.place, row.scores["marginal_cost"]) for row in compared if not row.is_judged]
    assert ("TTFT p99", "serving at 4", 0.125) in shown
    assert ("TTFT p99", "serving at 4, batch", pytest.approx(1 / 9)) in shown


def test_the_groups_of_a_regime_weigh_as_much_as_one_row() -> None:
    rows = ranking.judged(ranking.comparisons(two_classes()))
    goodput = [row for row in rows if row.metric == "goodput"]
    assert [row.weight for row in goodput] == [0.5, 0.5]
    alone = ranking.comparisons(three_policies())
    (own,) = [each for each in ranking.standings([*goodput, alone[0]]) if each.policy == "marginal_cost"]
    assert own.mean == pytest.approx(0.8 ** (0.5 / 2))  # as if the regime had one row of 0.8 ** 0.5
    duel = ranking.duels([*goodput, alone[0]], "marginal_cost")["peer"]
    assert (duel.own, duel.other) == pytest.approx((0.8**0.25, 0.8**0.5))


def test_groups_that_are_shown_only_leave_the_judgement_to_all_requests() -> None:
    made = two_classes()
    groups = tuple(replace(group, compared=()) for group in made.regimes[0].groups)
    rows = ranking.judged(ranking.comparisons(replace(made, regimes=(replace(made.regimes[0], groups=groups),))))
    assert [(row.metric, row.place) for row in rows] == [
        (metric, "serving at 4") for metric in ("TTFT p99", "goodput", "ITL p99")
    ]


def test_results_with_groups_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write(two_classes(), path)
    assert read(path) == two_classes()


def test_a_file_of_the_format_before_groups_is_read(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write(three_policies(), path)
    tree = msgspec.json.decode(path.read_bytes())
    for name in ("format", "groups", "group_columns"):
        del tree[name]
    for old in tree["regimes"]:
        del old["groups"]
    path.write_bytes(msgspec.json.encode(tree))
    assert read(path) == three_policies()


@pytest.mark.parametrize("number", [3, 0, "2"])
def test_a_file_of_a_later_format_is_refused_by_name(tmp_path: Path, number: object) -> None:
    path = tmp_path / "results.json"
    write(three_policies(), path)
    tree = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode({**tree, "format": number}))
    with pytest.raises(ConfigError, match=rf"results\.json: format {number} is not known; this version reads up to 2"):
        read(path)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.00012345, "0.000123"), (0.9996, "1.00"), (12.345, "12.3"), (999.6, "1,000"), (123456.0, "123,456")],
)
def test_figures_have_three_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_a_metric_is_shown_in_its_unit() -> None:
    shown = figures(itl_p99_s=0.0254, hit_rate=0.5, ttft_p99_s=None)
    assert Metric("itl_p99_s", "", "ms").show(shown) == "25.4 ms"
    assert Metric("hit_rate", "", "%").show(shown) == "50.0 %"
    assert Metric("ttft_p99_s", "", "s").show(shown) == "never"


def test_regimes_keep_the_order_in_which_they_were_given() -> None:
    made = results(
        *(Cell(name, "a", load, figures()) for name in ("b", "a") for load in (8.0, 4.0)),
        regimes=(regime("b"), regime("a")),
    )
    assert made.places() == [("b", 4.0), ("b", 8.0), ("a", 4.0), ("a", 8.0)]
    assert math.isclose(ranking.geometric_mean([0.25, 1.0]), 0.5)


def test_who_wins_a_cell_and_pays_for_it_in_another_metric_is_not_better_everywhere() -> None:
    cells = results(
        Cell("chat", "own", 4.0, figures(ttft_p99_s=1.0, itl_p99_s=0.1)),
        Cell("chat", "trades", 4.0, figures(ttft_p99_s=0.2, itl_p99_s=0.2)),
        Cell("chat", "better", 4.0, figures(ttft_p99_s=0.5, itl_p99_s=0.102)),
        Cell("chat", "best", 4.0, figures(ttft_p99_s=0.4, itl_p99_s=0.1)),
    )
    found = ranking.better_everywhere(ranking.comparisons(cells), "own")
    assert found["chat at 4", "TTFT p99"] == ["best", "better"]
    assert found["chat at 4", "ITL p99"] == []
