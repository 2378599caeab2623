"""The page says what the results say, the bad first."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.lab_figures import figures, regime, results, three_policies, two_classes
from warmfront.errors import ConfigError
from warmfront.lab import grid
from warmfront.lab.regimes_page import read_reasons, render
from warmfront.lab.results import Cell, Results

ROOT = Path(__file__).resolve().parents[3]


def ahead() -> Results:
    """The default wins or ties everywhere."""
    return results(
        *(
            Cell("chat", policy, load, figures(ttft_p99_s=ttft))
            for load in (4.0, 8.0)
            for policy, ttft in (("marginal_cost", 0.4), ("peer", 0.41))
        )
    )


def test_every_target_is_on_the_page_with_its_verdict() -> None:
    page = render(three_policies(), {})
    assert "| marginal_cost is within 3 % of the best in every cell | 5 of 6 cells; worst 0.80" in page
    assert page.count("| **missed** |") == 2
    assert page.count("| not measured |") == 2


def test_means_over_other_cells_are_shown_beside_those_of_the_default_in_the_same_cells() -> None:
    cells = [cell for cell in three_policies().cells if (cell.policy, cell.load) != ("peer", 8.0)]
    line = next(line for line in render(results(*cells), {}).splitlines() if line.startswith("| `peer` |"))
    assert line.split(" | ")[1] == "0.928"
    assert line.split(" | ")[6] == "1.000"


def test_lost_cells_are_in_plain_sight_with_their_reason() -> None:
    page = render(three_policies(), {"chat": "The peer knows more."})
    assert "| chat at 8 | TTFT p99 | ▼ 0.80 | 1.00 s | 0.800 s (peer) | nobody |" in page
    assert "| chat | highest load | ▼ 0.80 | 8.00 | 10.0 (peer) | - |" in page
    assert "In 1 of the 1 cells (highest loads left out) that is nobody" in page
    assert "- **chat**: The peer knows more." in page
    assert page.index("## Targets") < page.index("## Where marginal_cost loses") < page.index("## Each policy")


def test_a_lost_cell_without_a_reason_says_so() -> None:
    assert "- **chat**: not explained yet" in render(three_policies(), {})


def test_a_reason_for_a_regime_that_is_not_lost_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not lose: chat"):
        render(ahead(), {"chat": "It was lost once."})
    assert "Nowhere by more than 3 %." in render(ahead(), {})


def test_only_the_best_has_a_full_score() -> None:
    close = {"marginal_cost": 0.5004, "peer": 0.5}
    page = render(results(*(Cell("chat", name, 4.0, figures(ttft_p99_s=ttft)) for name, ttft in close.items())), {})
    assert "| chat at 4 | 0.500 s | **1.00** | 0.99 |" in page


def test_every_policy_has_a_column_in_every_table_of_scores() -> None:
    page = render(three_policies(), {})
    assert page.count("| regime and load | best figure | `marginal_cost` | `peer` | `slow` |") == 4
    assert "| chat at 8 | 0.800 s | ▼ 0.80 | **1.00** | 0.00 |" in page


def test_results_without_the_default_policy_are_refused() -> None:
    with pytest.raises(ConfigError, match="lack the default policy"):
        render(results(Cell("chat", "peer", 4.0, figures())), {})


def test_what_was_not_run_is_said() -> None:
    cells = [cell for cell in three_policies().cells if (cell.policy, cell.load) != ("peer", 4.0)]
    page = render(results(*cells, regimes=(regime("chat"), regime("rag"))), {})
    assert "**Regimes that were not run: rag.**" in page
    assert "**1 cells of the regimes below were not run.**" in page
    assert "| chat at 4 | 0.400 s | **1.00** | - | 0.50 |" in page
    assert "were not run" not in render(three_policies(), {})


def test_groups_have_rows_of_their_own_and_all_requests_are_shown_in_brackets() -> None:
    page = render(two_classes(), {"serving": "People come first."})
    assert "| serving at 4, batch | goodput | ▼ 0.80 | 8.00 | 10.0 (peer) |" in page
    assert "| marginal_cost is within 3 % of the best in every cell | 4 of 5 cells; worst 0.80: goodput" in page
    assert "| serving at 4, people | 0.200 s | **1.00** | 0.50 |" in page
    assert "| (serving at 4) | 1.00 s | (0.12) | (1.00) |" in page
    assert "| (serving at 4, batch) | 1.00 s | (0.11) | (1.00) |" in page
    assert page.index("## ITL p99") < page.index("## TPOT p99") < page.index("## The regimes")
    assert "TTFT 1 s, TPOT 100 ms; people: the same; batch: TTFT 60 s, TPOT 100 ms, by goodput alone |" in page
    assert "a row of its own" in page
    assert "a row of its own" not in render(three_policies(), {})


def test_the_same_results_give_the_same_page() -> None:
    assert render(three_policies(), {}) == render(three_policies(), {})


@pytest.mark.parametrize(("text", "message"), [("chat = 3", "chat: expected text"), ("chat", "reasons.toml")])
def test_a_wrong_file_of_reasons_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "reasons.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_reasons(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_reasons(tmp_path / "missing.toml")


@pytest.mark.skipif(not (ROOT / grid.DATA).exists(), reason="an installed package has no page")
def test_the_page_in_the_tree_is_what_its_data_says() -> None:
    assert (ROOT / grid.PAGE).read_text(encoding="utf-8") == grid.page(ROOT), (
        "run python -m warmfront.lab.page --render"
    )
    assert (ROOT / grid.DATA).stat().st_size < 2**20
