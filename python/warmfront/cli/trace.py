"""`warmfront trace`: workload files for the lab, from regimes and from logs."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import msgspec
from rich.table import Table

from warmfront.cli import options
from warmfront.cli.output import number, show, show_json, table
from warmfront.errors import ConfigError
from warmfront.lab import regime as regimes
from warmfront.lab import workloads
from warmfront.lab.display import bar
from warmfront.lab.traces import access_log, locate, workload
from warmfront.lab.traces.summary import PREFIX_TOKENS, Spread, Summary, detect, summarise

REQUESTS_MAX = 10_000_000
"""Most requests that are read from one file."""

_out = click.option(
    "--out", default="-", show_default=True, metavar="FILE", help="File to write; `-` is standard output."
)


@click.group(name="trace")
def command() -> None:
    """Make, inspect and import workload files.

    A workload file is JSONL: times, prompts as content ids, lengths of answers; never text. The lab replays it with
    kind = "trace".
    """


@command.command()
@click.argument("regime")
@click.option("--load", type=click.FloatRange(min=0, min_open=True), help="Default: the middle one of the regime's.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Another seed, another draw.")
@click.option("--requests", type=click.IntRange(min=1), help="How many; default from the regime.")
@_out
def make(regime: str, load: float | None, seed: int, requests: int | None, out: str) -> None:
    """Write the workload of a regime.

    REGIME is the name of a shipped one, or a TOML file.
    """
    found = regimes.load(regime)
    rate = found.loads[len(found.loads) // 2] if load is None else load
    total = requests or found.requests
    draw = workloads.Draw(seed=seed, load=rate, requests=total)
    made = workloads.read(found.workload)
    if made.waits:
        raise ConfigError(
            f"{regime}: its users wait for answers, so there are no times to write; "
            'make a file from a regime without `arrival`, and replay that with arrival = {process = "closed"}'
        )
    header = workload.Header(
        format=workload.FORMAT, version=workload.VERSION, origin=f"regime {found.name}, load {rate:g}, seed {seed}"
    )
    _write(out, _counted(workload.encode(header, made.limited_jobs(draw)), total))


@command.command()
@click.argument("file")
@click.option(
    "--block-tokens", type=click.IntRange(min=1), help="Granularity of reuse; default: the file's own, or 64."
)
@options.as_json
def inspect(file: str, block_tokens: int | None, as_json: bool) -> None:
    """Show what is in a trace.

    FILE is a workload file, a trace in Mooncake's or Azure's format, or the name of a shipped one:
    mooncake_conversation, mooncake_synthetic, azure_llm_2023_conv, azure_llm_2023_code.
    """
    path = locate(file)
    kind, block_tokens_told = detect(path)
    draw = workloads.Draw(seed=0, load=1.0, requests=REQUESTS_MAX)
    with bar("reading") as progress:
        jobs = list(workloads.read({"kind": kind, "file": str(path)}).limited_jobs(draw))
        summary = summarise(jobs, block_tokens or block_tokens_told, progress)
    if as_json:
        show_json(msgspec.to_builtins(summary))
    else:
        show(*_tables(summary))


@command.command("import")
@click.argument("access_log_file", metavar="ACCESS_LOG", type=click.Path(path_type=Path))
@_out
@click.option("--salt", metavar="TEXT", help="Key of the hashes, to compare files; default: random and forgotten.")
@click.option("--tokenizer", metavar="PATH", help="Model directory or tokenizer.json; default: 4 bytes a token.")
@click.option("--block-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens hashed as one.")
@click.option("--output-tokens", type=click.IntRange(min=1), default=256, show_default=True,
              help="Length of answers about which the log says nothing.")  # fmt: skip
def import_(
    access_log_file: Path, out: str, salt: str | None, tokenizer: str | None, block_tokens: int, output_tokens: int
) -> None:
    """Turn a log of requests into a workload file without text.

    ACCESS_LOG is JSONL: {"time": seconds or ISO 8601, "body": the OpenAI body of a chat or completion}; optional are
    "usage" or "response" (the engine's) or "answer" (text), for the length of the answer. Prompts become salted hashes
    of their blocks.
    """
    chosen = access_log.Options(
        salt=_salt(salt),
        block_tokens=block_tokens,
        output_tokens=output_tokens,
        tokenize=_tokenize(tokenizer) if tokenizer else None,
    )
    with bar("hashing") as progress:
        imported = access_log.read(access_log_file, chosen, progress)
    if not imported.jobs:
        raise ConfigError(f"{access_log_file}: no line holds a prompt")
    header = workload.Header(
        format=workload.FORMAT,
        version=workload.VERSION,
        origin=f"access log, {'tokens' if tokenizer else 'bytes'}",
        block_tokens=block_tokens,
    )
    _write(out, workload.encode(header, imported.jobs))
    click.echo(f"{len(imported.jobs):,} requests", err=True)
    for note, times in imported.notes.most_common():
        click.echo(f"{note}: {times:,}", err=True)


def _salt(text: str | None) -> bytes:
    if text is None:
        return secrets.token_bytes(access_log.SALT_BYTES_MAX)
    salt = text.encode()
    if not 1 <= len(salt) <= access_log.SALT_BYTES_MAX:
        raise ConfigError(f"--salt: expected 1 to {access_log.SALT_BYTES_MAX} bytes, got {len(salt)}")
    return salt


def _tokenize(path: str) -> access_log.Tokenize:
    from warmfront.core import Tokenizer  # loads the compiled module

    try:
        return Tokenizer(path).prompt
    except ValueError as error:
        raise ConfigError(f"--tokenizer {path}: {error}") from error


def _counted(encoded: Iterable[bytes], total: int) -> Iterator[bytes]:
    with bar("writing") as progress:
        for done, line in enumerate(encoded):
            progress(done, total)
            yield line


def _write(out: str, encoded: Iterable[bytes]) -> None:
    if out == "-":
        sys.stdout.buffer.writelines(encoded)
        return
    try:
        with Path(out).open("wb") as file:
            file.writelines(encoded)
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}") from error


def _tables(summary: Summary) -> list[Table | str]:
    facts = table("", "#")
    for name, value in (
        ("requests", number(summary.requests)),
        ("of these after an answer", number(summary.follow_ups)),
        ("jobs", number(summary.jobs)),
        ("duration (s)", number(summary.duration_s, 1)),
        ("requests/s", number(summary.rate, 2)),
        (f"reusable with an endless cache, blocks of {summary.block_tokens}", f"{100 * summary.reusable_share:.1f} %"),
        (f"different beginnings of {PREFIX_TOKENS:,} tokens", number(summary.prefixes)),
        ("sessions", number(summary.sessions)),
    ):
        facts.add_row(name, value)
    spreads = table("", "#mean", "#p50", "#p99", "#max")
    for name, spread in (
        ("input tokens", summary.input_tokens),
        ("output tokens", summary.output_tokens),
        ("turns of a session", summary.turns),
    ):
        spreads.add_row(name, *_cells(spread))
    return [facts, "", spreads]


def _cells(spread: Spread) -> list[str]:
    return [number(spread.mean, 1), number(spread.p50), number(spread.p99), number(spread.max)]
