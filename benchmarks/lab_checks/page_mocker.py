"""The part of the page about Dynamo's mocker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lab_checks.mocker import DIFFERS as BOUND
from lab_checks.mocker import PLACED
from lab_checks.text import Difference, milliseconds, signed, table

DIFFERS = "More than 5 % apart"
COLUMNS = {
    "hit_rate": "hit rate",
    "ttft_mean_ms": "TTFT mean",
    "ttft_p50_ms": "p50",
    "ttft_p90_ms": "p90",
    "ttft_p99_ms": "p99",
    "tpot_mean_ms": "TPOT mean",
    "tpot_p50_ms": "p50",
    "tpot_p99_ms": "p99",
}
NAMES = {
    "ttft_p50_ms": "TTFT p50",
    "ttft_p90_ms": "TTFT p90",
    "ttft_p99_ms": "TTFT p99",
    "tpot_p50_ms": "TPOT p50",
    "tpot_p99_ms": "TPOT p99",
}

TEXT = """\
## Dynamo's mocker

The mocker of `{name}` {version} replays the first requests of the Mooncake traces on virtual time, with
engines of {blocks:,} blocks of {block_tokens} tokens. The lab runs the same requests with the preset `dynamo-mocker`,
which has the mocker's polynomials for the time of a step, and with events that take no time, as in the replay.
Percentiles are nearest ranks over single requests on both sides; times are in milliseconds.

`round_robin` compares engines alone: both send every request to the same replica. `kv_router` is Dynamo's own router
against `dynamo_kv`, its published rule in `warmfront.lab.peers`; both draw among replicas of equal cost, so the figures
are means of {runs} runs. In the third row of such a case the lab sends each request where Dynamo's router sent it.

{table}

- With `round_robin`, the largest difference of all figures is {engines}.
- With Dynamo's placement, it is {placed}.
- With its router against ours, it is {routers}.
- Of {all:,} decisions of Dynamo's router, {cheapest:,} have the lowest cost by our statement of its rule; in {drawn:,}
  of them several replicas have it, and one is drawn.

Rules that were expected to matter turned out to be the same in both models: blocks can be shared within the step that
computes them, a complete hit computes its last block again, chunks end only with the budget, a freed prompt is evicted
tail first, blocks that answers fill are cached. Two remain different and are not modelled: a block computed twice at
once is cached once by the mocker and twice by vLLM and the lab; and the mocker rounds the tokens of a step down to a
multiple of its prompts."""


def render(part: Mapping[str, Any]) -> str:
    """Return the section up to its list of differences."""
    plain = [case for case in part["cases"] if case["router"] == "round_robin"]
    routed = [case for case in part["cases"] if case["router"] != "round_robin"]
    return TEXT.format(
        **part["peer"],
        blocks=part["blocks"],
        block_tokens=part["block_tokens"],
        runs=len(part["seeds"]),
        table=table(["", *COLUMNS.values()], _rows(part["cases"])),
        engines=_worst(plain, "warmfront"),
        placed=_worst(routed, PLACED),
        routers=_worst(routed, "warmfront"),
        **{name: sum(case["decisions"][name] for case in routed) for name in routed[0]["decisions"]},
    )


def differences(part: Mapping[str, Any]) -> list[Difference]:
    """Return what is further apart than the bound."""
    found = []
    for case in part["cases"]:
        for name in COLUMNS:
            theirs, ours = case["dynamo"], case["warmfront"]
            apart = _apart(theirs, ours, name)
            if abs(apart) > BOUND:
                told = f"{_name(name)}: Dynamo {_told(theirs, name)}, the lab {_told(ours, name)}: {signed(apart)}"
                found.append(Difference(_subject(case), told))
    return found


def _rows(cases: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for case in cases:
        subject = f"**{case['name']}**, `{case['router']}`"
        yield [f"{subject}: Dynamo", *(_shown(case["dynamo"]["mean"], name) for name in COLUMNS)]
        yield ["the lab", *(_compared(case, "warmfront", name) for name in COLUMNS)]
        if PLACED in case:
            yield ["the lab, placed as Dynamo did", *(_compared(case, PLACED, name) for name in COLUMNS)]


def _compared(case: Mapping[str, Any], side: str, name: str) -> str:
    return f"{_shown(case[side]['mean'], name)} ({signed(_apart(case['dynamo'], case[side], name))})"


def _apart(theirs: Mapping[str, Any], ours: Mapping[str, Any], name: str) -> float:
    return float(ours["mean"][name] / theirs["mean"][name] - 1)


def _worst(cases: Sequence[Mapping[str, Any]], side: str) -> str:
    apart, name, case = max(
        ((abs(_apart(case["dynamo"], case[side], name)), name, case["name"]) for case in cases for name in COLUMNS),
    )
    return f"{100 * apart:.2f} % ({_name(name)}; {case})"


def _told(side: Mapping[str, Any], name: str) -> str:
    """Return a mean with the range of its runs."""
    mean, least, most = (_shown(side[key], name) for key in ("mean", "least", "most"))
    return mean if least == most else f"{mean} (runs: {least} to {most})"


def _shown(figures: Mapping[str, float], name: str) -> str:
    return f"{figures[name]:.3f}" if name == "hit_rate" else milliseconds(figures[name])


def _name(name: str) -> str:
    return NAMES.get(name, COLUMNS[name])


def _subject(case: Mapping[str, Any]) -> str:
    return f"{case['name']}, {case['router']}"
