"""`docs/explanation/regimes.md` from a file of results, and from nothing else.

The page has to be believed, so what speaks against the default policy comes first: targets it misses, cells it loses
with the reason (hand-written, one a regime), then everything. The same results give the same page, byte for byte; a
test compares them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from warmfront.errors import ConfigError
from warmfront.lab import ranking
from warmfront.lab.contest import Rounds
from warmfront.lab.model import Group, Regime, Slo
from warmfront.lab.ranking import HIGHEST, Comparison, Duel, Standing, shown_score
from warmfront.lab.repeats import Repeats, trust
from warmfront.lab.results import COMPARED, COMPARED_IN_GROUPS, WITHIN, Results
from warmfront.lab.targets import DEFAULT, by_metric, verdicts

NO_REASON = "not explained yet"
BETTER_SHOWN = 2
"""Names of policies in one cell of a table."""

INTRODUCTION = """\
# Every policy in every regime

<!-- Rendered by `make lab` from regimes.json and regimes.reasons.toml. Do not edit. -->

Each cell of the tables below is one policy in one [regime](#the-regimes) at one load, run by `warmfront simulate` on
virtual time: the router that serves, over [modelled engines](engine-model.md). A score compares it with the best
policy of the same row: **1.00** is the best, 0.50 is twice as late or half as good, higher is always better. Only the
best has 1.00; what is close is rounded down. `{default}` is the default policy. The others are baselines, and the
published rules of other routers, stated again in `warmfront.lab.peers`; they are not those routers' code."""

CONTEST = """\
## The same cells under other seeds

A cell is in the table above because seed {chosen} went badly for `{default}`, or well for one of two dozen others.
Here it meets the two that were best, under seeds {seeds}. `mean` is the geometric mean over these seeds of its score
against the better of the two, so that they may take turns: above 1 it is better than both. `medians` compares each
policy's median. `spread` is its own largest figure over its smallest: what is small against it says little.

Of {cells} cells, {lost} are lost by more than 3 % in the mean, {level} are level, {won} are won.

{table}

```bash
{command}
```"""

REPEATS = """\
## How far a figure can be trusted

The same requests again, each up to a millisecond later, which no policy could know or use. Whoever was best in a row
ran again, and so did `{default}`. A row that its own best policy does not find again within 3 % cannot tell who is
within 3 % of it: of {rows} rows that holds for {rows_again}. In {rows_worse} of the others the best policy itself falls
more than 3 % behind what it had before. So a policy that is as good as the best one of every single row is to be
expected within 3 % in about {attainable} of {rows} rows, and not in all.

{table}

```bash
{command}
```"""

GROUPS = """\
Some regimes hold requests of several classes, each with a row of its own here and, where the
[regime](#the-regimes) says so, targets of its own: `priorities at 60, people`. Policies are then judged by these rows
and not by the one of all requests, which is in the tables of scores in brackets. In means, the rows of one regime, load
and metric count as one together."""

METHOD = """\
## How this was made

Version {version}, {machine}; means over seeds {seeds}. A request that does not finish is infinitely late and stays in
the percentiles; the first requests of a run, while caches fill, are not counted. Goodput: requests per second that meet
the targets for TTFT and TPOT. ITL: over all gaps between two tokens. Geometric means count no score below {floor:g}.
The exact definitions are in `warmfront.lab.measures`.

All of it again, and one row:

```bash
{command}
warmfront simulate {regime} --load {load:g} --seed {seeds_typed} --policy all
```

All figures in their units are in [regimes.json](regimes.json)."""


def render(
    results: Results, reasons: Mapping[str, str], rounds: Rounds | None = None, repeats: Repeats | None = None
) -> str:
    """Return the page.

    Args:
        results: With the default policy and at least one other.
        reasons: Regime → why the default policy loses there.
        rounds: The cells that were lost, under other seeds.
        repeats: What the best policies do when requests come a little later.

    Raises:
        ConfigError: The default policy was not run, or a reason is about a regime that it does not lose.
    """
    if DEFAULT not in results.policies():
        raise ConfigError(f"the results lack the default policy, {DEFAULT}")
    everything = ranking.comparisons(results)
    compared = ranking.judged(everything)
    highest = ranking.highest_loads(results)
    lost = ranking.losing([*compared, *highest], DEFAULT)
    idle = set(reasons) - {comparison.regime for comparison in lost}
    if idle:
        raise ConfigError(f"reasons for regimes that {DEFAULT} does not lose: {', '.join(sorted(idle))}")
    order = [standing.policy for standing in ranking.standings(compared)]
    parts = [INTRODUCTION.format(default=DEFAULT)]
    parts += [GROUPS] if any(row.group is not None for row in everything) else []
    parts += [*_missing(results), _targets_table(results)]
    parts += [_repeats(repeats)] if repeats is not None and repeats.rows else []
    parts += [_lost(lost, reasons, ranking.better_everywhere(compared, DEFAULT))]
    parts += [_contest(rounds)] if rounds is not None and rounds.cells else []
    parts += [_standings(compared, highest)]
    for title in dict.fromkeys(row.metric for row in everything):
        parts += [_scores(title, [row for row in everything if row.metric == title], order)]
    parts += [_scores(HIGHEST, highest, order)] if highest else []
    parts += [_regimes(results.regimes), _method(results)]
    return "\n\n".join(parts) + "\n"


def read_reasons(path: Path) -> dict[str, str]:
    """Read the hand-written file: one line a regime, `name = "why"`.

    Raises:
        ConfigError: It is not there, or holds something else.
    """
    try:
        reasons = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    wrong = [name for name, reason in reasons.items() if not isinstance(reason, str)]
    if wrong:
        raise ConfigError(f"{path}: {wrong[0]}: expected text")
    return reasons


def _missing(results: Results) -> list[str]:
    """Say what was not run, so that nobody takes a part for the whole."""
    places, policies = results.places(), results.policies()
    idle = [regime.name for regime in results.regimes if regime.name not in {name for name, _ in places}]
    lacking = len(places) * len(policies) - len(results.cells)
    parts = [f"**Regimes that were not run: {', '.join(idle)}.**"] if idle else []
    return parts + ([f"**{lacking} cells of the regimes below were not run.**"] if lacking else [])


def _targets_table(results: Results) -> str:
    words = {True: "met", False: "**missed**", None: "not measured"}
    rows = [(verdict.target, verdict.measured, words[verdict.is_met]) for verdict in verdicts(results)]
    return "## Targets\n\n" + _table(("target", "measured", ""), rows)


def _lost(lost: Sequence[Comparison], reasons: Mapping[str, str], better: ranking.Better) -> str:
    heading = f"## Where {DEFAULT} loses"
    if not lost:
        return f"{heading}\n\nNowhere by more than 3 %."
    rows = [
        (
            row.place,
            row.metric,
            f"▼ {shown_score(row.scores[DEFAULT])}",
            row.figures[DEFAULT],
            f"{row.figures[row.best()]} ({row.best()})",
            "-" if row.load is None else ", ".join(better[row.place, row.metric][:BETTER_SHOWN]) or "nobody",
        )
        for row in lost
    ]
    why = [f"- **{name}**: {reasons.get(name, NO_REASON)}" for name in dict.fromkeys(row.regime for row in lost)]
    head = ("regime and load", "metric", "score", "its figure", "best", "better without being worse elsewhere")
    cells = [row for row in lost if row.load is not None]
    traded = sum(not better[row.place, row.metric] for row in cells)
    note = (
        "More than 3 % behind the best, the worst first. The last column names who is better in this metric and at "
        f"most 3 % worse in the other two of the same regime and load. In {traded} of the {len(cells)} cells (highest "
        "loads left out) that is nobody: who wins there pays for it in another metric."
    )
    return f"{heading}\n\n{note}\n\n{_table(head, rows)}\n\nWhy:\n\n" + "\n".join(why)


def _repeats(repeats: Repeats) -> str:
    """Show how far chance alone moves the figures that policies are compared by."""
    found = trust(repeats.rows)
    rows = [
        (
            each.title,
            f"{each.best_again} of {each.rows}",
            f"{each.best_worse} of {each.rows}",
            f"{100 * each.moved:.1f} %",
            f"{each.own_again} of {each.own_rows}",
        )
        for each in found
    ]
    head = (
        "metric",
        "best policy within 3 % of itself",
        "more than 3 % worse than itself",
        "its figure moved, median",
        f"{DEFAULT} within 3 % of itself",
    )
    everything = found[-1]
    return REPEATS.format(
        default=DEFAULT,
        rows=everything.rows,
        rows_again=everything.best_again,
        rows_worse=everything.best_worse,
        attainable=everything.rows - everything.best_worse,
        table=_table(head, rows),
        command=repeats.command,
    )


def _contest(rounds: Rounds) -> str:
    """Show whether what one seed says is what others say."""
    rows = [
        (
            cell.place,
            cell.metric,
            f"{cell.mean_score():.2f}",
            f"{cell.median_score():.2f}",
            f"{sum(score >= WITHIN for score in cell.scores())} of {len(rounds.seeds)}",
            f"{cell.spread():.2f}",
            ", ".join(cell.rivals),
            cell.verdict(),
        )
        for cell in rounds.cells
    ]
    verdicts = [cell.verdict() for cell in rounds.cells]
    head = ("regime and load", "metric", "mean", "medians", "within 3 %", "spread", "against", "")
    return CONTEST.format(
        default=DEFAULT,
        chosen=", ".join(map(str, rounds.chosen_by)),
        seeds=", ".join(map(str, rounds.seeds)),
        cells=len(verdicts),
        lost=verdicts.count("lost"),
        level=verdicts.count("level"),
        won=verdicts.count("won"),
        table=_table(head, rows),
        command=rounds.command,
    )


def _standings(compared: Sequence[Comparison], highest: Sequence[Comparison]) -> str:
    groups = [rows for _, rows in by_metric(compared)] + ([list(highest)] if highest else [])
    titles = ["all", *(metric.title for metric in COMPARED), *([HIGHEST] if highest else [])]
    columns = [{standing.policy: standing.mean for standing in ranking.standings(rows)} for rows in groups]
    duels = ranking.duels(compared, DEFAULT)
    rows = [_standing(standing, columns, duels.get(standing.policy)) for standing in ranking.standings(compared)]
    head = ("policy", *titles, f"{_code(DEFAULT)} in the same cells", "worst cell", "within 3 %")
    note = (
        "Geometric means of scores. A policy that was not run in some cell is averaged over the others, which flatters "
        f"it if that was a hard one: its column `all` compares with what {_code(DEFAULT)} has in the same cells."
    )
    return f"## Each policy over all cells\n\n{note}\n\n{_table(head, rows)}"


def _standing(standing: Standing, columns: Sequence[Mapping[str, float]], duel: Duel | None) -> tuple[str, ...]:
    policy = standing.policy
    means = [f"{column[policy]:.3f}" if policy in column else "-" for column in columns]
    worst = f"{shown_score(standing.worst_score)}: {standing.worst.metric}, {standing.worst.place}"
    same = f"{duel.own:.3f}" if duel else "-"
    return (_code(policy), *means, same, worst, f"{standing.at_best} of {standing.cells}")


def _scores(title: str, rows: Sequence[Comparison], order: Sequence[str]) -> str:
    lines = [(_place(row), row.figures[row.best()], *(_score(row, policy) for policy in order)) for row in rows]
    head = ("regime and load", "best figure", *(_code(policy) for policy in order))
    heading = title[0].upper() + title[1:]
    return f"## {heading}\n\n{_table(head, lines)}"


def _place(row: Comparison) -> str:
    return row.place if row.is_judged else f"({row.place})"


def _score(row: Comparison, policy: str) -> str:
    if policy not in row.scores:
        return "-"
    score = row.scores[policy]
    shown = shown_score(score)
    if not row.is_judged:
        return f"({shown})"
    if score == 1.0:
        return f"**{shown}**"
    return f"▼ {shown}" if policy == DEFAULT and score < WITHIN else shown


def _regimes(regimes: Sequence[Regime]) -> str:
    rows = [(_code(regime.name), regime.title, regime.expects, _loads(regime), _targets(regime)) for regime in regimes]
    return "## The regimes\n\n" + _table(("regime", "what it is", "what a good policy does", "loads", "targets"), rows)


def _loads(regime: Regime) -> str:
    return f"{', '.join(f'{load:g}' for load in regime.loads)} {regime.unit}"


def _targets(regime: Regime) -> str:
    return "; ".join([_slo(regime.slo), *(group_in_words(group, regime.slo) for group in regime.groups)])


def group_in_words(group: Group, slo: Slo) -> str:
    """Say what a group of a regime with some targets is held to, and by what policies are compared there."""
    own = group.slo(slo)
    targets = "" if own == slo else f" {_slo(own)}"
    titles = [metric.title for metric in COMPARED_IN_GROUPS if metric.field in group.compared]
    by = (
        "shown only"
        if not titles
        else f"by {' and '.join(titles)} alone"
        if len(titles) < len(COMPARED_IN_GROUPS)
        else ""
    )
    return f"{group.name}:{targets or ' the same'}{f', {by}' if by else ''}"


def _slo(slo: Slo) -> str:
    prefills = f" + {slo.ttft_prefills:g} cold prefills" if slo.ttft_prefills else ""
    return f"TTFT {slo.ttft_s:g} s{prefills}, TPOT {1000 * slo.tpot_s:g} ms"


def _method(results: Results) -> str:
    regime, load = results.places()[-1]
    return METHOD.format(
        version=results.version,
        command=results.command,
        machine=results.machine,
        seeds=", ".join(map(str, results.seeds)),
        seeds_typed=",".join(map(str, results.seeds)),
        floor=ranking.FLOOR,
        regime=regime,
        load=load,
    )


def _code(name: str) -> str:
    return f"`{name}`"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
