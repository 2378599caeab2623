"""The part of the page about the llm-d ladder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab_checks.ladder import BASELINE, PREFIX, STAGES, knee, plateau
from lab_checks.text import Difference, seconds, signed, table

DIFFERS = "More than 5 % apart from the published figures"
BOUND = 0.05
SIDES = {"baseline": BASELINE, "prefix": PREFIX}

TEXT = """\
## The ladder of llm-d

Published: {source}.

`baseline` is a Kubernetes service, `prefix` llm-d's router with exact knowledge of the caches. The lab sends the same
stages in the same order to one fleet: 15 requests a second for 50 s to warm up, then each rate for 20 to 38 s, the next
stage a second after the last answer; lengths of answers follow the guide's own report. The engines are eight of the
preset `qwen3-32b-tp2-h100`, which was fitted to llm-d's prefill rate and cache size and to none of these curves.
Against `baseline` stands `round_robin`, against `prefix` the scores of llm-d's guide, `llmd_precise`.

Output tokens a second, by requests a second:

{curves}

The shape:

{shape}

A curve has reached its *knee* at the lowest rate with {knee:.0%} of its highest throughput; its *plateau* is the mean
from {plateau_from:g} requests a second on. TTFT is over all requests of all stages; the last column weighs the p90 of
each stage by its requests. Two variants take one thing away each, to see what a difference is made of: *roomy* has
caches of {roomy_kv:,} tokens, in which all running requests fit (pre-emptions of `{prefix}` fall from
{tight_preempted:,} to {roomy_preempted:,}); *light* reads context at {light:.0%} of the preset's price."""


def render(part: Mapping[str, Any]) -> str:
    """Return the section up to its list of differences."""
    variants = part["variants"]
    return TEXT.format(
        source=part["published"]["source"],
        curves=_curves(part),
        shape=_shapes(part),
        knee=part["knee"],
        plateau_from=part["plateau_from"],
        prefix=PREFIX,
        roomy_kv=variants["roomy"]["kv_tokens"],
        tight_preempted=part["policies"][PREFIX]["preemptions"],
        roomy_preempted=variants["roomy"]["policies"][PREFIX]["preemptions"],
        light=variants["light"]["context_price"],
    )


def differences(part: Mapping[str, Any]) -> list[Difference]:
    """Return what of the shape is further apart than the bound."""
    found = []
    for side, policy in SIDES.items():
        theirs, ours = _shape(part, part["published"][side]), _shape(part, part["policies"][policy])
        for name, value in theirs.items():
            apart = ours[name] / value - 1
            if abs(apart) > BOUND:
                told = f"published {_shown(name, value)}, `{policy}` {_shown(name, ours[name])}: {signed(apart)}"
                found.append(Difference(f"{side}: {name}", told))
    return found


def _curves(part: Mapping[str, Any]) -> str:
    columns = _columns(part, part["policies"])
    values = [column["output_tokens_per_s"] for column in columns.values()]
    rows = zip(part["published"]["rates"], *values, strict=True)
    return table(["rate", *columns], ([f"{rate:g}", *(f"{value:,}" for value in row)] for rate, *row in rows))


def _shapes(part: Mapping[str, Any]) -> str:
    columns = _columns(part, part["policies"])
    for name, variant in part["variants"].items():
        columns |= {f"`{policy}`, {name}": curve for policy, curve in variant["policies"].items()}
    shapes = {name: _shape(part, column) for name, column in columns.items()}
    head = ["", *next(iter(shapes.values())), "mean of stages' p90"]
    rows = ([*(_shown(name, value) for name, value in shape.items())] for shape in shapes.values())
    by_stage = (_p90_by_stage(column) for column in columns.values())
    return table(head, ([name, *row, last] for name, row, last in zip(columns, rows, by_stage, strict=True)))


def _columns(part: Mapping[str, Any], policies: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the published curves and others by what they are called."""
    published = {f"published {side}": part["published"][side] for side in SIDES}
    return published | {f"`{policy}`": curve for policy, curve in policies.items()}


def _p90_by_stage(column: Mapping[str, Any]) -> str:
    if "ladder" not in column:
        return "not told"
    requests = [stage.rate * stage.seconds for stage in STAGES]
    weighed = sum(count * value for count, value in zip(requests, column["ttft_p90_s"], strict=True))
    return seconds(weighed / sum(requests))


def _shape(part: Mapping[str, Any], side: Mapping[str, Any]) -> dict[str, float]:
    rates, curve = part["published"]["rates"], side["output_tokens_per_s"]
    whole = side.get("ladder", side)
    return {
        "knee": knee(rates, curve),
        "plateau": plateau(rates, curve),
        "TTFT mean": whole["ttft_mean_s"],
        "TTFT p90": whole["ttft_p90_s"],
    }


def _shown(name: str, value: float) -> str:
    if name == "knee":
        return f"{value:g} requests/s"
    return f"{value:,.0f} tokens/s" if name == "plateau" else seconds(value)
