"""`warmfront calibrate`: time a live engine and fit the latency model to it."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Any

import click
import msgspec

from warmfront.cli.output import number, show, show_json, table
from warmfront.errors import WarmfrontError

if TYPE_CHECKING:
    from warmfront.lab.calibrate.fit import Fit
    from warmfront.lab.calibrate.probes import Measured, Plan

POSITIVE = click.IntRange(min=1)


class ExtraMissingError(WarmfrontError):
    """An optional package is not installed."""


@click.command(name="calibrate")
@click.argument("url")
@click.option("--model", metavar="NAME", help="Model to ask for; default: the first that the engine serves.")
@click.option("--tokens-max", type=click.IntRange(min=64), default=4096, show_default=True, help="Longest prompt.")
@click.option("--sequences-max", type=POSITIVE, default=16, show_default=True, help="Most streams side by side.")
@click.option("--output-tokens", type=click.IntRange(min=8), default=64, show_default=True, help="Length of a stream.")
@click.option("--repeats", type=POSITIVE, default=3, show_default=True, help="How often each prefill is timed.")
@click.option("--batched-tokens", type=POSITIVE, default=2048, show_default=True,
              help="Prompt tokens in one step: the engine's --max-num-batched-tokens.")  # fmt: skip
@click.option("--sequences-limit", type=POSITIVE, default=256, show_default=True,
              help="Sequences in one step: the engine's --max-num-seqs. Goes into the preset.")  # fmt: skip
@click.option("--kv-tokens", type=POSITIVE, help="KV capacity in tokens; default: what the engine's metrics say.")
@click.option("--seed", type=int, help="Seed of the prompts; default: random, so that none is cached.")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write a preset: `warmfront engine --preset FILE`, or `preset` in a regime.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print constants, residuals and every probe as JSON.")
def command(
    url: str,
    model: str | None,
    tokens_max: int,
    sequences_max: int,
    output_tokens: int,
    repeats: int,
    batched_tokens: int,
    sequences_limit: int,
    kv_tokens: int | None,
    seed: int | None,
    save: Path | None,
    as_json: bool,
) -> None:
    """Time the engine at URL and fit the constants of the latency model to it.

    The engine must have nothing else to do: other requests would be taken for slowness. Sends some dozens of requests
    with random prompts; ends with the constants and with how well they explain what was measured.
    """
    if importlib.util.find_spec("scipy") is None:
        raise ExtraMissingError("calibrate needs scipy: pip install 'warmfront[lab]'")
    from warmfront.lab.calibrate.fit import fit
    from warmfront.lab.calibrate.probes import plan

    todo = plan(tokens_max=tokens_max, sequences_max=sequences_max, output_tokens=output_tokens, repeats=repeats)
    measured = asyncio.run(_measure(url, model, todo, SystemRandom() if seed is None else Random(seed)))
    fitted = fit(measured, batched_tokens=batched_tokens)
    if save is not None:
        _save(save, url, measured, fitted, kv_tokens=kv_tokens, batched_tokens=batched_tokens, limit=sequences_limit)
    if as_json:
        show_json({"url": url, "measured": msgspec.to_builtins(measured), "fit": msgspec.to_builtins(fitted)})
    else:
        _show(url, measured, fitted)


async def _measure(url: str, model: str | None, todo: Plan, rng: Random) -> Measured:
    import aiohttp

    from warmfront.clock import MonotonicClock
    from warmfront.control.reading import LINE_BYTES_MAX
    from warmfront.lab.calibrate.probes import REQUEST_TIMEOUT_S, Prober
    from warmfront.lab.display import bar

    timeout, connector = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=LINE_BYTES_MAX) as session:
        with bar("probing") as done:
            return await Prober(session, url, model=model, clock=MonotonicClock(), rng=rng).measure(todo, done=done)


def _save(
    path: Path, url: str, measured: Measured, fitted: Fit, *, kv_tokens: int | None, batched_tokens: int, limit: int
) -> None:
    from warmfront.sim.latency import Preset, save_preset

    capacity = kv_tokens or measured.kv_tokens
    if capacity is None:
        raise click.UsageError("the engine's metrics do not tell its KV capacity: give --kv-tokens")
    preset = Preset(fitted.latency, capacity, batched_tokens, limit)
    try:
        save_preset(path, preset, source=f"warmfront calibrate {url}, model {measured.model}")
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error


def _show(url: str, measured: Measured, fitted: Fit) -> None:
    rows = table("constant", "#value", "unit", title=f"{measured.model} at {url}")
    for name, unit, scale, value in _constants(fitted):
        rows.add_row(name, "not seen" if value == 0.0 else f"{value * scale:,.4g}", unit)
    probes = len(measured.prefills) + len(measured.decodes)
    show(
        rows,
        f"KV capacity: {number(measured.kv_tokens)} tokens",
        f"residual of {probes} probes: {fitted.residual_rms:.1%} RMS, {fitted.residual_worst:.1%} at worst "
        f"({fitted.worst})",
    )


def _constants(fitted: Fit) -> list[tuple[str, str, float, Any]]:
    """Name, unit, factor into that unit and value in seconds, in the order of the formula."""
    latency = fitted.latency
    return [
        ("request, outside the model", "ms", 1e3, fitted.request_s),
        ("step", "ms", 1e3, latency.base_s),
        ("prompt token", "µs", 1e6, latency.prefill_token_s),
        ("pair of query and key", "ns", 1e9, latency.attention_pair_s),
        ("decoding sequence", "µs", 1e6, latency.decode_sequence_s),
        ("token of context", "ns", 1e9, latency.context_token_s),
    ]
