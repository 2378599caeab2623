"""From timed probes to the constants of the latency model, by non-negative least squares.

    TTFT = request + chunks · base + prefill_token · n + attention_pair · A
    gap  = base + decode_sequence · B + context_token · K

Both kinds are fitted together, because they share `base`. `request` is what a request costs outside the model: HTTP,
tokenizing, queueing; it is reported and not part of a preset. Errors are relative: a gap of 10 ms weighs as much as a
prefill of 2 s. No constant can be negative: time that a probe cannot tell apart goes to the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from warmfront.lab.calibrate.probes import DecodeProbe, Measured, PrefillProbe
from warmfront.sim.latency import LatencyModel

CONSTANTS = ("request_s", "base_s", "prefill_token_s", "attention_pair_s", "decode_sequence_s", "context_token_s")
"""Columns of the fit, in order."""


class Fit(Struct, frozen=True):
    """What came out, and how well it explains the probes."""

    request_s: float
    """Seconds a request outside the model."""
    latency: LatencyModel
    residual_rms: float
    """Root mean square of the relative errors of all probes: 0.05 means 5 %."""
    residual_worst: float
    """The largest of them."""
    worst: str
    """The probe that has it, in words."""
    undetermined: list[str]
    """Constants that came out as zero: too small to be seen beside the others, or never exercised."""


def fit(measured: Measured, *, batched_tokens: int) -> Fit:
    """Fit the constants.

    Args:
        measured: At least one prefill and one decode probe.
        batched_tokens: Prompt tokens that the engine computes in one step (`--max-num-batched-tokens`).

    Raises:
        ValueError: A kind of probe is missing.
    """
    from scipy.optimize import nnls  # optional: only this command needs it

    if not measured.prefills or not measured.decodes:
        raise ValueError("need prefill and decode probes")
    rows = [_prefill_row(probe, batched_tokens) for probe in measured.prefills]
    rows += [_decode_row(probe) for probe in measured.decodes]
    seconds = [probe.ttft_s for probe in measured.prefills] + [probe.gap_s for probe in measured.decodes]
    relative = [[value / second for value in row] for row, second in zip(rows, seconds, strict=True)]
    # Columns differ by ten orders of magnitude: solve for constants in units of each column's mean.
    scales = [sum(column) / len(column) or 1.0 for column in zip(*relative, strict=True)]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in relative]
    solution, _ = nnls(scaled, [1.0] * len(scaled))
    constants = [float(value) / scale for value, scale in zip(solution, scales, strict=True)]
    errors = [sum(a * b for a, b in zip(row, constants, strict=True)) - 1.0 for row in relative]
    worst = max(range(len(errors)), key=lambda row: abs(errors[row]))
    return Fit(
        request_s=constants[0],
        latency=LatencyModel(**dict(zip(CONSTANTS[1:], constants[1:], strict=True))),
        residual_rms=math.sqrt(sum(error * error for error in errors) / len(errors)),
        residual_worst=abs(errors[worst]),
        worst=_describe(measured, worst),
        undetermined=[name for name, value in zip(CONSTANTS, constants, strict=True) if value == 0.0],
    )


def _prefill_row(probe: PrefillProbe, batched_tokens: int) -> Sequence[float]:
    new = probe.new_tokens
    pairs = new * (probe.context_tokens + 0.5 * (new + 1))  # as the engine model counts them
    return (1.0, float(math.ceil(new / batched_tokens)), float(new), pairs, 0.0, 0.0)


def _decode_row(probe: DecodeProbe) -> Sequence[float]:
    return (0.0, 1.0, 0.0, 0.0, float(probe.sequences), probe.context_tokens)


def _describe(measured: Measured, row: int) -> str:
    if row < len(measured.prefills):
        prefill = measured.prefills[row]
        return f"prefill of {prefill.new_tokens:,} tokens: {prefill.ttft_s:.4f} s"
    decode = measured.decodes[row - len(measured.prefills)]
    context = f"{decode.context_tokens:,.0f} tokens of context"
    return f"{decode.sequences} streams, {context}: {decode.gap_s:.4f} s a token"
