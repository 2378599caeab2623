"""A long run can be stopped, continued and trusted: what is kept is keyed by all that it depends on."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from support.lab_figures import GOOD, regime, three_policies
from warmfront.clock import ManualClock
from warmfront.config import PolicyConfig, RouterConfig
from warmfront.errors import ConfigError
from warmfront.lab import cache, grid, page, results_file
from warmfront.lab import regime as regimes
from warmfront.lab.cells import CellTask, SearchTask
from warmfront.lab.fingerprint import closure, fingerprint
from warmfront.lab.peers import PEERS
from warmfront.lab.plan import policies
from warmfront.lab.search import Sustained

CELL = CellTask(regime(), "round_robin", 4.0, 1)
SEARCH = SearchTask(regime(), "round_robin", (1, 2))
SUSTAINED = Sustained(8.0, ((8.0, True), (12.0, False)))


def test_what_was_kept_is_there_after_opening_the_file_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "cache.jsonl"
    with cache.Cache(path) as kept:
        assert kept.get(CELL) is None
        kept.put(CELL, GOOD)
        kept.put(SEARCH, SUSTAINED)
    with cache.Cache(path) as kept:
        assert kept.get(CELL) == GOOD
        assert kept.get(SEARCH) == SUSTAINED


def test_a_line_that_was_cut_off_is_dropped_and_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "cache.jsonl"
    with cache.Cache(path) as kept:
        kept.put(CELL, GOOD)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    with cache.Cache(path) as kept:
        assert kept.get(CELL) == GOOD
        kept.put(SEARCH, SUSTAINED)
    with cache.Cache(path) as kept:
        assert kept.get(SEARCH) == SUSTAINED


def test_a_file_of_another_kind_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "cache.jsonl"
    path.write_text("hello\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cache\.jsonl, line 1"), cache.Cache(path):
        pass


@pytest.mark.parametrize(
    "other",
    [
        replace(CELL, seed=2),
        replace(CELL, load=5.0),
        replace(CELL, policy="random"),
        replace(CELL, regime=regime("other")),
        replace(CELL, regime=replace(regime(), requests=11)),
        replace(CELL, regime=regime(ttft_s=0.5)),
        replace(CELL, config=RouterConfig(policy=PolicyConfig(seed=1))),
        SearchTask(regime(), "round_robin", (1,)),
    ],
    ids=str,
)
def test_a_task_that_differs_has_another_key(other: CellTask | SearchTask) -> None:
    assert cache.key(other) != cache.key(CELL)


def test_what_a_regime_says_about_itself_does_not_change_a_run() -> None:
    reworded = replace(regime(loads=(1.0,)), title="new", expects="new", tags=("new",))
    assert cache.key(replace(CELL, regime=reworded)) == cache.key(CELL)


def test_a_search_depends_on_the_loads_it_begins_at() -> None:
    assert cache.key(replace(SEARCH, regime=regime(loads=(1.0,)))) != cache.key(SEARCH)


def test_imports_are_followed_through_the_package() -> None:
    reached = closure(cache.ROOTS)
    assert {
        "warmfront.lab.model",
        "warmfront.router.router",
        "warmfront.lab.workloads.registry",
        "warmfront._core",
    } <= reached


def test_a_policy_depends_on_its_own_module_and_on_no_other_policy() -> None:
    roots = (*cache.ROOTS, PEERS["cacheroute"].__module__)
    reached = closure(roots)
    assert "warmfront.lab.peers.cacheroute" in reached
    assert not {"warmfront.lab.peers.dynamo", "warmfront.policy.marginal_cost"} & reached
    assert "warmfront.policy.marginal_cost" in closure(("warmfront.policy.marginal_cost",))


def test_every_policy_of_others_says_in_which_module_it_is() -> None:
    for name, factory in PEERS.items():
        assert factory.__module__.startswith("warmfront.lab.peers."), name
        assert factory.__module__ in closure((factory.__module__,)), name


def test_a_changed_source_changes_the_fingerprint() -> None:
    assert fingerprint(["warmfront.lab.measures"]) == fingerprint(["warmfront.lab.measures"])
    assert fingerprint(["warmfront.lab.measures"]) != fingerprint(["warmfront.lab.model"])


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ((1.0,), (1.0,)),
        ((1.0, 2.0), (1.0, 2.0)),
        ((1.0, 2.0, 3.0), (2.0, 3.0)),
        ((4.0, 3.0, 2.0, 1.0), (2.0, 3.0)),
        ((1.0, 2.0, 3.0, 4.0, 5.0), (2.0, 4.0)),
        (tuple(map(float, range(1, 17))), (2.0, 4.0)),
    ],
)
def test_two_loads_of_a_regime_are_shown(loads: tuple[float, ...], chosen: tuple[float, ...]) -> None:
    assert grid.with_two_loads(regime(loads=loads)).loads == chosen


def small_grid() -> grid.Grid:
    return grid.Grid(
        regimes=(regime("a"), regime("b")), policies=("marginal_cost", "random"), seeds=(1, 2), searched=("b",)
    )


def test_a_grid_goes_seed_by_seed_and_searches_last() -> None:
    tasks = small_grid().tasks()
    assert [str(task) for task in tasks[:3]] == [
        "a at 4 with marginal_cost, seed 1",
        "a at 4 with random, seed 1",
        "a at 8 with marginal_cost, seed 1",
    ]
    assert [task.seed for task in tasks if isinstance(task, CellTask)] == [1] * 8 + [2] * 8
    assert [str(task) for task in tasks[16:]] == [
        "highest load of b with marginal_cost",
        "highest load of b with random",
    ]


def test_what_is_to_do_is_estimated_from_what_was_done_in_the_same_regime(tmp_path: Path) -> None:
    whole = small_grid()
    cell, search = whole.tasks()[0], whole.tasks()[-1]
    with cache.Cache(tmp_path / "cache.jsonl") as kept:
        unknown = grid.RUN_S_PER_REQUEST * cell.regime.requests
        assert grid.estimate_s([cell, search], whole, kept) == pytest.approx(unknown * (1 + grid.SEARCH_RUNS))
        kept.put(cell, replace(GOOD, wall_s=7.0))
        assert grid.estimate_s([cell], whole, kept) == 7.0


def test_a_cell_that_lacks_a_seed_is_left_out_of_the_results(tmp_path: Path) -> None:
    whole = small_grid()
    with cache.Cache(tmp_path / "cache.jsonl") as kept:
        for task in whole.tasks():
            if isinstance(task, CellTask) and (task.policy, task.seed) != ("random", 2):
                kept.put(task, GOOD)
        done = [(task, found) for task in whole.tasks() if (found := kept.get(task)) is not None]
    assert {cell.policy for cell in whole.results(done, command="").cells} == {"marginal_cost"}


def test_a_run_keeps_what_it_did_and_tells_what_failed(tmp_path: Path) -> None:
    wrong = replace(CELL, regime=replace(regime(), workload={"kind": "nothing"}))
    with cache.Cache(tmp_path / "cache.jsonl") as kept:
        failures = grid.run([wrong], kept, jobs=1, budget_s=None, clock=ManualClock())
        assert kept.get(wrong) is None
    (failure,) = failures
    assert failure.startswith("chat at 4 with round_robin, seed 1: ")


def whole_grid() -> grid.Grid:
    """The grid of the command with `--seed 3 --search none`."""
    shown = tuple(grid.with_two_loads(regimes.load(name)) for name in regimes.names())
    return grid.Grid(regimes=shown, policies=tuple(policies()), seeds=(3,))


def test_the_command_makes_the_page_of_what_is_done(tmp_path: Path) -> None:
    (tmp_path / grid.REASONS).parent.mkdir(parents=True)
    (tmp_path / grid.REASONS).touch()
    path, tasks = tmp_path / "cache.jsonl", whole_grid().tasks()
    with cache.Cache(path) as kept:
        for task in tasks:
            if task.regime.name == "chat":
                kept.put(task, GOOD)
    arguments = ["--seed", "3", "--search", "none", "--root", str(tmp_path), "--cache", str(path)]
    estimated = CliRunner().invoke(page.main, [*arguments, "--estimate"])
    assert estimated.output.startswith(f"{len(tasks) - 2 * len(policies())} of {len(tasks)} tasks to do, about ")
    made = CliRunner().invoke(page.main, [*arguments, "--only", "chat"])
    assert made.exit_code == 0, made.output
    text = (tmp_path / grid.PAGE).read_text(encoding="utf-8")
    assert 'make lab LAB="--seed 3 --search none"' in text
    assert "| chat at " in text
    assert "**Regimes that were not run: " in text
    rendered = CliRunner().invoke(page.main, ["--render", "--root", str(tmp_path)])
    assert rendered.exit_code == 0
    assert (tmp_path / grid.PAGE).read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "nothing"), "no regimes named nothing"),
        (("--policy", "chance"), "no policy named 'chance'"),
        (("--seed", "one"), "--seed one: expected numbers"),
        (("--search", "nothing"), "no regimes named nothing"),
    ],
)
def test_wrong_options_of_the_command_are_one_clear_line(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = CliRunner().invoke(page.main, [*arguments, "--cache", str(tmp_path / "cache.jsonl")])
    assert result.exit_code == 1
    assert message in result.output


def test_a_contest_with_the_seed_of_the_page_is_refused(tmp_path: Path) -> None:
    (tmp_path / "docs/explanation").mkdir(parents=True)
    results_file.write(three_policies(), tmp_path / grid.DATA)
    run = CliRunner().invoke(
        page.main, ["--contest", "1", "--cache", str(tmp_path / "cache.jsonl"), "--root", str(tmp_path)]
    )
    assert run.exit_code == 1
    assert "seed 1 has chosen the cells" in run.output


def test_a_contest_asks_for_the_lost_cells_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "docs/explanation").mkdir(parents=True)
    results_file.write(three_policies(), tmp_path / grid.DATA)
    arguments = ["--contest", "7,8", "--policy", "marginal_cost", "--only", "chat", "--estimate"]
    run = CliRunner().invoke(page.main, [*arguments, "--cache", str(tmp_path / "cache.jsonl"), "--root", str(tmp_path)])
    assert "2 of 6 tasks to do" in run.output
