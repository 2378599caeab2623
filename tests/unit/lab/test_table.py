"""The table in the terminal, as it stands."""

from __future__ import annotations

import io

from rich.console import Console
from support.lab_figures import figures, results, three_policies, two_classes
from warmfront.lab.results import Cell, Results
from warmfront.lab.table import tables

GOLDEN = """\
chat: title of chat, 4 requests/s
policy              TTFT p99     goodput        ITL p99  hit rate  failed  imbalance  TTFT p50  TTFT p90  end to end p99
marginal_cost  0.400 s  1.00  10.0  1.00  20.0 ms  1.00    50.0 %       0       1.25   0.100 s   0.200 s          5.00 s
peer           0.500 s ▼0.80  10.0  1.00  20.0 ms  1.00    50.0 %       0       1.25   0.100 s   0.200 s          5.00 s
slow           0.800 s ▼0.50  10.0  1.00  20.0 ms  1.00       0 %       0       1.25   0.100 s   0.200 s          5.00 s
TTFT p99: marginal_cost, 25 % ahead of peer
goodput: 3 policies tie
ITL p99: 3 policies tie

chat: title of chat, 8 requests/s
policy              TTFT p99     goodput        ITL p99  hit rate  failed  imbalance  TTFT p50  TTFT p90  end to end p99
marginal_cost   1.00 s ▼0.80  12.0  1.00  20.0 ms  1.00    50.0 %       0       1.25   0.100 s   0.200 s          5.00 s
peer           0.800 s  1.00  11.0 ▼0.91  25.0 ms ▼0.80    50.0 %       0       1.25   0.100 s   0.200 s          5.00 s
slow             never ▼0.00  4.00 ▼0.33  50.0 ms ▼0.40    50.0 %       3       1.25   0.100 s   0.200 s          5.00 s
TTFT p99: peer, 25 % ahead of marginal_cost
goodput: marginal_cost, 9 % ahead of peer
ITL p99: marginal_cost, 25 % ahead of peer

highest load with p99 TTFT and p99 TPOT within the targets
policy               chat
peer           10.0  1.00
marginal_cost  8.00 ▼0.80
slow           none ▼0.00

over all cells (TTFT p99, goodput, ITL p99)
policy         geometric mean  worst  within 3 %  worst cell
marginal_cost           0.963   0.80      5 of 6  TTFT p99, chat at 8
peer                    0.915   0.80      3 of 6  ITL p99, chat at 8
slow                    0.296   0.00      2 of 6  TTFT p99, chat at 8
"""


def printed(shown: Results, width: int = 200) -> str:
    text = io.StringIO()
    console = Console(file=text, width=width, highlight=False, markup=False)
    for part in tables(shown, width=width):
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def test_the_table_is_as_it_was_agreed() -> None:
    assert printed(three_policies()) == GOLDEN.rstrip()


def test_losing_cells_are_marked_without_colour() -> None:
    lines = printed(three_policies()).splitlines()
    (row,) = [line for line in lines if line.startswith("slow") and "never" in line]
    assert "never ▼0.00" in row


GROUPS = """\
serving: title of serving, 4 requests/s
policy             TTFT p99     goodput        ITL p99  hit rate  failed  imbalance  TTFT p50  TTFT p90  end to end p99
peer           1.00 s  1.00  10.0  1.00  20.0 ms  1.00    50.0 %       0       1.25   0.100 s   0.200 s          5.00 s
marginal_cost  8.00 s  0.12  10.0  1.00  20.0 ms  1.00    50.0 %       0       1.25   0.100 s   0.200 s          5.00 s
ITL p99: 2 policies tie

serving at 4, people
policy              TTFT p99     goodput       TPOT p99  hit rate  failed  TTFT p50  TTFT p90  end to end p99
marginal_cost  0.200 s  1.00  10.0  1.00  20.0 ms  1.00    50.0 %       0   0.100 s   0.200 s          5.00 s
peer           0.400 s ▼0.50  10.0  1.00  20.0 ms  1.00    50.0 %       0   0.100 s   0.200 s          5.00 s
TTFT p99: marginal_cost, 100 % ahead of peer
goodput: 2 policies tie
TPOT p99: 2 policies tie

serving at 4, batch
policy             TTFT p99     goodput       TPOT p99  hit rate  failed  TTFT p50  TTFT p90  end to end p99
peer           1.00 s  1.00  10.0  1.00  20.0 ms  1.00    50.0 %       0   0.100 s   0.200 s          5.00 s
marginal_cost  9.00 s  0.11  8.00 ▼0.80  20.0 ms  1.00    50.0 %       0   0.100 s   0.200 s          5.00 s
goodput: peer, 25 % ahead of marginal_cost

over all cells (TTFT p99, goodput, ITL p99, TPOT p99)
policy         geometric mean  worst  within 3 %  worst cell
marginal_cost           0.972   0.80      4 of 5  goodput, serving at 4, batch
peer                    0.841   0.50      4 of 5  TTFT p99, serving at 4, people
"""


def test_groups_have_tables_of_their_own_and_only_what_is_judged_is_marked() -> None:
    assert printed(two_classes()) == GROUPS.rstrip()


def test_one_policy_alone_has_no_ranking() -> None:
    text = printed(results(Cell("chat", "a", 4.0, figures())))
    assert "over all cells" not in text
    assert "TTFT p99: 0.500 s" in text


def test_a_narrow_terminal_gets_fewer_columns_and_whole_cells() -> None:
    text = printed(three_policies(), width=80)
    assert "…" not in text
    assert "marginal_cost  0.400 s  1.00  10.0  1.00  20.0 ms  1.00    50.0 %       0" in text
    assert "end to end" not in text
    assert "end to end" in printed(three_policies(), width=200)
