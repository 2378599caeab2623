"""What is in a trace: rates, lengths, and how much of the input an endless cache would save.

Reuse is counted in full blocks, over one cache that never evicts and holds prompts and answers from the moment they are
sent: an upper bound for any router and any fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec import Struct

from warmfront.errors import ConfigError
from warmfront.lab.jobs import Job, Step
from warmfront.lab.model import Segment
from warmfront.lab.traces import lines, workload
from warmfront.lab.traces.mooncake import BLOCK_TOKENS as MOONCAKE_BLOCK_TOKENS

BLOCK_TOKENS = 64
"""Where the file does not say: the block size of the lab's fleets."""
PREFIX_TOKENS = 1024
"""Length of the beginnings that are told apart."""

Progress = Callable[[int, int], None]


class Spread(Struct, frozen=True):
    """Where the values of a quantity lie."""

    mean: float
    p50: float
    p99: float
    max: float


class Summary(Struct, frozen=True):
    """Figures of one trace. Times of what follows an answer are taken as if answers took no time."""

    requests: int
    follow_ups: int
    """Requests that wait for the answer to another."""
    jobs: int
    duration_s: float
    rate: float
    """Requests a second."""
    input_tokens: Spread
    output_tokens: Spread
    block_tokens: int
    reusable_share: float
    """Of the input tokens, with an endless cache."""
    prefixes: int
    """Different beginnings of 1,024 tokens, among prompts that are that long."""
    sessions: int
    turns: Spread
    """Requests of a session; a request without one counts as a session of its own."""


def detect(path: Path) -> tuple[str, int]:
    """Tell the kind of workload that replays a file, and the tokens of its blocks.

    Raises:
        ConfigError: It is none of the known formats.
    """
    if path.suffix == ".csv":
        return "azure", BLOCK_TOKENS
    for number, line in lines(path):
        try:
            first = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        if isinstance(first, dict) and "hash_ids" in first:
            return "mooncake", MOONCAKE_BLOCK_TOKENS
        if isinstance(first, dict) and "format" in first:
            return "trace", workload.header(path).block_tokens or BLOCK_TOKENS
        break
    raise ConfigError(f"{path}: expected a workload file, Mooncake's JSONL or Azure's CSV")


def summarise(jobs: Sequence[Job], block_tokens: int, progress: Progress | None = None) -> Summary:
    """Read through jobs once.

    Args:
        jobs: At least one, in the order of their times.
        block_tokens: Granularity of reuse.
        progress: Called with requests done and in all.

    Raises:
        ConfigError: There is no job.
    """
    if not jobs:
        raise ConfigError("the trace holds no request")
    sent = sorted(_times(jobs), key=lambda pair: pair[0])
    reuse = _Reuse(block_tokens)
    for done, (_, step) in enumerate(sent, start=1):
        reuse.add(step)
        if progress is not None and done % 100 == 0:
            progress(done, len(sent))
    inputs = [_length(step.prompt) for _, step in sent]
    duration_s = sent[-1][0] - sent[0][0]
    turns = _turns(step for _, step in sent)
    return Summary(
        requests=len(sent),
        follow_ups=len(sent) - sum(len(job.steps) for job in jobs),
        jobs=len(jobs),
        duration_s=duration_s,
        rate=len(sent) / duration_s if duration_s > 0 else 0.0,
        input_tokens=_spread(inputs),
        output_tokens=_spread([step.output_tokens for _, step in sent]),
        block_tokens=block_tokens,
        reusable_share=reuse.reused_tokens / sum(inputs),
        prefixes=len(reuse.prefixes),
        sessions=len(turns),
        turns=_spread(turns),
    )


def blocks(prompt: Iterable[Segment], block_tokens: int, root: int = 0) -> Iterator[int]:
    """Yield a number for each full block of a prompt: equal numbers mean equal blocks behind equal blocks.

    Args:
        prompt: Segments.
        block_tokens: Tokens in a block.
        root: What stands before the first block.
    """
    parent, pieces, room = root, [root], block_tokens
    for content, tokens in prompt:
        start = 0
        while start < tokens:
            taken = min(room, tokens - start)
            pieces += (content, start, taken)
            start, room = start + taken, room - taken
            if room == 0:
                parent = hash(tuple(pieces))
                yield parent
                pieces, room = [parent], block_tokens


class _Reuse:
    """An endless cache."""

    def __init__(self, block_tokens: int) -> None:
        self.reused_tokens = 0
        self.prefixes: set[int] = set()
        self._block_tokens = block_tokens
        self._held: set[int] = set()

    def add(self, step: Step) -> None:
        """Count what is held of a prompt, then hold it and its answer."""
        answer = ((step.answer, step.output_tokens),) if step.answer is not None else ()
        chain = list(blocks((*step.prompt, *answer), self._block_tokens, hash(step.adapter) if step.adapter else 0))
        full = chain[: _length(step.prompt) // self._block_tokens]
        for block in full:
            if block not in self._held:
                break
            self.reused_tokens += self._block_tokens
        self._held.update(chain)
        beginning = -(-PREFIX_TOKENS // self._block_tokens)
        if len(full) >= beginning:
            self.prefixes.add(full[beginning - 1])


def _times(jobs: Sequence[Job]) -> Iterator[tuple[float, Step]]:
    for job in jobs:
        waiting = [(job.at_s, step) for step in reversed(job.steps)]
        while waiting:
            earlier_s, step = waiting.pop()
            at_s = earlier_s + step.delay_s
            yield at_s, step
            waiting.extend((at_s, following) for following in reversed(step.then))


def _turns(steps: Iterable[Step]) -> list[int]:
    sessions: dict[int, int] = {}
    single = 0
    for step in steps:
        if step.session is None:
            single += 1
        else:
            sessions[step.session] = sessions.get(step.session, 0) + 1
    return [*sessions.values(), *([1] * single)]


def _length(prompt: Sequence[Segment]) -> int:
    return sum(tokens for _, tokens in prompt)


def _spread(values: Sequence[int]) -> Spread:
    ordered = sorted(values)
    return Spread(fmean(ordered), _quantile(ordered, 0.5), _quantile(ordered, 0.99), ordered[-1])


def _quantile(ordered: Sequence[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
