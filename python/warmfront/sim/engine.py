"""The core's engine model as hosts on the wall clock use it: submit, step, abort, reset.

The model itself is `crates/warmfront-sim`; `warmfront.reference.engine` says in plain Python what it does. A host calls
`step`, lets `duration_s` pass on whatever clock it has, and calls again; between steps it may submit, abort and reset.
Nothing here does I/O, reads a clock or draws a random number, so equal calls give equal steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import msgspec

from warmfront import core
from warmfront.errors import ConfigError
from warmfront.reference.request import (
    CacheEvent,
    Cleared,
    Counters,
    Dropped,
    EngineRequest,
    Offloaded,
    Removed,
    Sequence,
    State,
    StepResult,
    Stored,
)
from warmfront.sim.latency import LatencyModel


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Shape of one engine."""

    latency: LatencyModel
    blocks: int
    """KV blocks, the null block included."""
    block_size: int = 16
    max_model_tokens: int = 8192
    """Prompt and answer together."""
    max_batched_tokens: int = 2048
    max_sequences: int = 256
    host_blocks: int = 0
    """Blocks of a second tier in host memory; 0: none."""
    disk_blocks: int = 0
    adapter_slots: int = 0
    """Adapters on the device at a time; 0: all, always."""

    def __post_init__(self) -> None:
        if self.max_sequences > self.max_batched_tokens:
            raise ConfigError(
                "max_sequences must not exceed max_batched_tokens: every decode needs a token of the budget"
            )
        if (self.blocks - 1) * self.block_size < self.max_model_tokens:
            raise ConfigError(
                f"{self.max_model_tokens} tokens do not fit {self.blocks - 1} blocks of {self.block_size}"
            )


@dataclass(slots=True, eq=False)
class _Sequence(Sequence):
    id: int = 0


class Engine:
    """One engine: submit, step, abort, reset."""

    def __init__(self, config: EngineConfig) -> None:
        """Start idle with an empty cache."""
        self.config = config
        self._core = core.SimEngine(msgspec.json.encode(config))
        self._sequences: dict[int, _Sequence] = {}
        self._ids = count()

    @property
    def running(self) -> int:
        """Admitted sequences."""
        return self._core.running

    @property
    def waiting(self) -> int:
        """Sequences that wait for admission."""
        return self._core.waiting

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._core.has_work

    @property
    def kv_usage(self) -> float:
        """Share of blocks held by sequences: 0 for a warm idle cache, as `vllm:kv_cache_usage_perc`."""
        return self._core.kv_usage

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds, cached or not."""
        return self._core.free_blocks

    @property
    def resident(self) -> dict[int, int]:
        """Copies of every cached hash. For tests and inspection: this copies."""
        return dict(self._core.resident())

    @property
    def counters(self) -> Counters:
        """Totals since the start."""
        return Counters(*self._core.counters())

    def blocks(self, sequence: Sequence) -> list[int]:
        """Return the physical blocks of a sequence; none once it has ended."""
        return self._core.blocks(_own(sequence).id)

    def submit(self, request: EngineRequest) -> Sequence:
        """Queue a request.

        Raises:
            ValueError: It could never run: no prompt, no answer, or longer than the model takes.
        """
        sequence = _Sequence(request, id=next(self._ids))
        self._core.submit(
            sequence.id,
            request.prompt_tokens,
            request.output_tokens,
            request.hashes,
            request.adapter,
            request.reads_cache,
        )
        self._sequences[sequence.id] = sequence
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence. Its full blocks stay cached. No effect on one that has ended."""
        known = self._sequences.pop(_own(sequence).id, None)
        if known is not None:
            self._core.abort(known.id)
            known.state = State.ENDED

    def reset(self, *, preempt_running: bool = False) -> bool:
        """Clear the cache; the event leaves with the next step, as in vLLM.

        Returns:
            False when sequences hold blocks and `preempt_running` is not set: nothing happened.
        """
        is_cleared, preempted = self._core.reset(preempt_running)
        self._note_preempted(preempted)
        return is_cleared

    def step(self) -> StepResult:
        """Schedule once and account for it.

        Returns:
            A result with an empty `sampled` and only base duration when there was nothing to do.
        """
        duration_s, sampled, finished, admitted, preempted, events, prefill_tokens, decode_tokens = self._core.step()
        found = self._sequences
        result = StepResult(
            duration_s=duration_s,
            sampled=[found[id_] for id_ in sampled],
            finished=[found[id_] for id_ in finished],
            admitted=[found[id_] for id_, _ in admitted],
            preempted=self._note_preempted(preempted),
            events=[self._event(*event) for event in events],
            prefill_tokens=prefill_tokens,
            decode_tokens=decode_tokens,
        )
        for id_, cached_tokens in admitted:
            found[id_].state, found[id_].cached_tokens = State.PREFILL, cached_tokens
        for id_ in sampled:
            found[id_].state = State.DECODE
        for id_ in finished:
            found.pop(id_).state = State.ENDED
        return result

    def _note_preempted(self, ids: list[int]) -> list[_Sequence]:
        sequences = [self._sequences[id_] for id_ in ids]
        for sequence in sequences:
            sequence.state = State.WAITING
            sequence.preemptions += 1
        return sequences

    def _event(self, kind: str, subject: int, first: int, blocks: int) -> CacheEvent:
        if kind == "stored":
            return Stored(self._sequences[subject].request, first, blocks)
        if kind == "removed":
            return Removed(subject)
        if kind == "cleared":
            return Cleared()
        moved, _, tier = kind.partition("_")
        return Offloaded(subject, tier) if moved == "offloaded" else Dropped(subject, tier)


def _own(sequence: Sequence) -> _Sequence:
    assert isinstance(sequence, _Sequence)  # `submit` made it.
    return sequence
