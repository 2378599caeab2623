"""The engine model: continuous batching over a paged prefix cache, one step at a time.

The executable specification of the core's engine (`crates/warmfront-sim`), without slower tiers and adapter slots. A
plain state machine: a host submits requests, calls `step`, lets `duration_s` pass on whatever clock it has, and
calls again; between steps it may submit, abort and reset. Nothing here does I/O, reads a clock or draws a random
number, so equal calls give equal steps.

Follows vLLM's scheduler (0.24 and later, fcfs): running sequences first, then waiting ones in order; a head of line
that does not fit blocks those behind it; the whole prompt must fit before a request is admitted although blocks are
taken chunk by chunk; when a running sequence finds no block, the one admitted last gives up all of its own.

Decoding sequences are not visited in every step. Each step gives every one of them one token, so counters move by a
tick, and a sequence is looked at only when it needs a block, completes one, or ends (`_due`). That makes virtual time
fast and changes no outcome.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from warmfront.reference.blockpool import BlockPool
from warmfront.reference.request import CacheEvent, Counters, EngineRequest, Sequence, State, StepResult, Stored


class Timing(Protocol):
    """How long a step takes."""

    def step_s(
        self, *, prefill_tokens: int, attention_pairs: float, decode_sequences: int, context_tokens: int
    ) -> float:
        """Return the duration of one step."""


class Shape(Protocol):
    """Shape of one engine: `sim.engine.EngineConfig`, without tiers and adapter slots."""

    @property
    def latency(self) -> Timing:
        """How long a step takes."""

    @property
    def blocks(self) -> int:
        """KV blocks, the null block included."""

    @property
    def block_size(self) -> int:
        """Tokens a block."""

    @property
    def max_model_tokens(self) -> int:
        """Prompt and answer together."""

    @property
    def max_batched_tokens(self) -> int:
        """Tokens in one step."""

    @property
    def max_sequences(self) -> int:
        """Sequences in one step."""


@dataclass(slots=True, eq=False)
class _Sequence(Sequence):
    order: int = 0
    """Number of the last admission: running sequences are served in this order."""
    blocks: list[int] = field(default_factory=list)
    registered: int = 0
    """Leading blocks that are in the cache under their hash."""
    computed: int = 0
    """Tokens with KV when `tick` was current; see `Engine._computed_tokens`."""
    emitted: int = 0
    """Answer tokens produced when `tick` was current."""
    tick: int = 0
    due: int = 0
    """Tick at which a decoding sequence next needs more than one more token of context."""


class Engine:
    """One engine: submit, step, abort, reset."""

    def __init__(self, config: Shape) -> None:
        """Start idle with an empty cache."""
        self.config = config
        self.counters = Counters()
        self.pool = BlockPool(config.blocks)
        self._waiting: deque[_Sequence] = deque()
        self._prefilling: dict[int, _Sequence] = {}
        self._decoding: dict[int, _Sequence] = {}
        self._due: dict[int, list[_Sequence]] = {}
        self._tick = 0
        self._admissions = 0
        self._context_tokens = 0

    @property
    def running(self) -> int:
        """Admitted sequences."""
        return len(self._decoding) + len(self._prefilling)

    @property
    def waiting(self) -> int:
        """Sequences that wait for admission."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._decoding or self._prefilling or self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of blocks held by sequences."""
        return self.pool.usage

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self.pool.free

    @property
    def resident(self) -> dict[int, int]:
        """Copies of every cached hash."""
        return self.pool.resident

    def blocks(self, sequence: Sequence) -> list[int]:
        """Return the physical blocks of a sequence; none once it has ended."""
        assert isinstance(sequence, _Sequence)  # `submit` made it.
        return sequence.blocks

    def _computed_tokens(self, sequence: _Sequence) -> int:
        """Return how many of a sequence's tokens have KV."""
        passed = self._tick - sequence.tick if sequence.state is State.DECODE else 0
        return sequence.computed + passed

    def _emitted_tokens(self, sequence: _Sequence) -> int:
        """Return how many tokens of the answer exist."""
        passed = self._tick - sequence.tick if sequence.state is State.DECODE else 0
        return sequence.emitted + passed

    def submit(self, request: EngineRequest) -> Sequence:
        """Queue a request.

        Raises:
            ValueError: It could never run: no prompt, no answer, or longer than the model takes.
        """
        total = request.prompt_tokens + request.output_tokens
        if request.prompt_tokens < 1 or request.output_tokens < 1 or total > self.config.max_model_tokens:
            raise ValueError(
                f"{request.prompt_tokens} + {request.output_tokens} tokens: need at least 1 + 1, "
                f"at most {self.config.max_model_tokens}"
            )
        sequence = _Sequence(request)
        self._waiting.append(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence. Its full blocks stay cached. No effect on one that has ended."""
        assert isinstance(sequence, _Sequence)  # `submit` made it.
        if sequence.state is State.ENDED:
            return
        if sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        else:
            self._leave(sequence)
        sequence.state = State.ENDED
        self.counters.aborted += 1

    def reset(self, *, preempt_running: bool = False) -> bool:
        """Clear the cache; the event leaves with the next step, as in vLLM.

        Returns:
            False when sequences hold blocks and `preempt_running` is not set: nothing happened.
        """
        if preempt_running:
            for sequence in [*reversed(self._prefilling.values()), *reversed(self._decoding.values())]:
                self._preempt(sequence)
        return self.pool.clear()

    def step(self) -> StepResult:
        """Schedule once and account for it.

        Returns:
            A result with an empty `sampled` and only base duration when there was nothing to do.
        """
        preempted: list[_Sequence] = []
        ending = self._advance_decodes(preempted)
        decoded = list(self._decoding.values())
        prefill = _Prefill(self.config.max_batched_tokens - len(decoded))
        self._continue_prefills(prefill, preempted)
        admitted = [] if preempted else self._admit(prefill)
        self._tick += 1
        self._context_tokens += len(decoded)
        context_tokens = self._context_tokens
        finished = self._end(ending) + self._begin_decodes(prefill.complete)
        self._count(len(decoded) + len(prefill.complete), prefill.tokens, len(finished))
        return StepResult(
            duration_s=self.config.latency.step_s(
                prefill_tokens=prefill.tokens,
                attention_pairs=prefill.pairs,
                decode_sequences=len(decoded),
                context_tokens=context_tokens,
            ),
            sampled=decoded + prefill.complete,
            finished=finished,
            admitted=admitted,
            preempted=preempted,
            events=self._take_events(),
            prefill_tokens=prefill.tokens,
            decode_tokens=len(decoded),
        )

    def _count(self, generated: int, computed: int, finished: int) -> None:
        self.counters.steps += 1
        self.counters.generated_tokens += generated
        self.counters.computed_tokens += computed
        self.counters.finished += finished

    # Decode. `_tick` counts completed steps, so while a step is scheduled all counts are those of the step before.

    def _advance_decodes(self, preempted: list[_Sequence]) -> list[_Sequence]:
        """Give every decoding sequence the slot of one token; return those whose answer this token completes."""
        now = self._tick + 1
        ending: list[_Sequence] = []
        for sequence in sorted(self._due.pop(now, ()), key=_by_order):
            if sequence.state is not State.DECODE or sequence.due != now:
                continue  # It left, or came back with another appointment.
            computed = self._computed_tokens(sequence)
            if computed == len(sequence.blocks) * self.config.block_size and not self._grow(sequence, 1, preempted):
                continue
            computed += 1
            if computed % self.config.block_size == 0:
                self._register(sequence, computed)
            emitted = self._emitted_tokens(sequence) + 1
            if emitted >= sequence.request.output_tokens:
                ending.append(sequence)
            else:
                self._appoint(sequence, now, computed, emitted)
        return ending

    def _appoint(self, sequence: _Sequence, tick: int, computed: int, emitted: int) -> None:
        """Note when a sequence, so far after `tick`, must be looked at again: new block, full block or end."""
        size = self.config.block_size
        wait = min(-computed % size, (-computed - 1) % size, sequence.request.output_tokens - emitted - 1)
        sequence.due = tick + 1 + wait
        self._due.setdefault(sequence.due, []).append(sequence)

    def _begin_decodes(self, complete: list[_Sequence]) -> list[_Sequence]:
        """Let sequences with a computed prompt sample their next token; return those that this ends."""
        ending: list[_Sequence] = []
        for sequence in complete:
            del self._prefilling[sequence.order]
            sequence.emitted += 1
            sequence.tick = self._tick
            sequence.state = State.DECODE
            self._decoding[sequence.order] = sequence
            self._context_tokens += sequence.computed
            if sequence.emitted >= sequence.request.output_tokens:
                ending.append(sequence)
            else:
                self._appoint(sequence, self._tick, sequence.computed, sequence.emitted)
        return self._end(ending)

    def _end(self, ending: list[_Sequence]) -> list[_Sequence]:
        for sequence in ending:
            self._leave(sequence)
            sequence.state = State.ENDED
        return ending

    # Prefill. At most one prompt is unfinished between steps: a chunk ends early only when the budget is used up.

    def _continue_prefills(self, prefill: _Prefill, preempted: list[_Sequence]) -> None:
        for sequence in list(self._prefilling.values()):
            if prefill.room > 0 and sequence.state is State.PREFILL:
                self._compute(sequence, prefill, preempted)

    def _admit(self, prefill: _Prefill) -> list[_Sequence]:
        """Admit waiting sequences in order until something is used up or the first does not fit."""
        admitted: list[_Sequence] = []
        while self._waiting and prefill.room > 0 and self.running < self.config.max_sequences:
            sequence = self._waiting[0]
            total = self._known_tokens(sequence)
            # At least one token is always computed: that is why an exact multiple hits one block less.
            limit = (total - 1) // self.config.block_size if sequence.request.reads_cache else 0
            hits = self.pool.lookup(sequence.request.hashes, limit)
            needed = -(-total // self.config.block_size) - len(hits)
            if needed > self.pool.free - self.pool.idle(hits):
                break
            self._waiting.popleft()
            self._enter(sequence, hits, total)
            admitted.append(sequence)
            self._compute(sequence, prefill, [])
        return admitted

    def _enter(self, sequence: _Sequence, hits: list[int], total: int) -> None:
        self.pool.touch(hits)
        self._admissions += 1
        sequence.order = self._admissions
        sequence.state = State.PREFILL
        sequence.blocks = hits
        sequence.registered = len(hits)
        sequence.computed = len(hits) * self.config.block_size
        self._prefilling[sequence.order] = sequence
        if sequence.cached_tokens is not None:
            return  # Pre-empted before: only the first admission is reported and counted.
        sequence.cached_tokens = sequence.computed
        self.counters.prompt_tokens += total
        if sequence.request.reads_cache:
            self.counters.queried_tokens += total
            self.counters.hit_tokens += sequence.computed

    def _compute(self, sequence: _Sequence, prefill: _Prefill, preempted: list[_Sequence]) -> None:
        """Compute the next chunk of a prompt, unless the sequence finds no block and loses its own instead."""
        total = self._known_tokens(sequence)
        chunk = min(total - sequence.computed, prefill.room)
        after = sequence.computed + chunk
        missing = -(-after // self.config.block_size) - len(sequence.blocks)
        if missing > 0 and not self._grow(sequence, missing, preempted):
            return
        prefill.add(chunk, context=sequence.computed)
        sequence.computed = after
        self._register(sequence, after)
        if after == total:
            prefill.complete.append(sequence)

    def _known_tokens(self, sequence: _Sequence) -> int:
        """Tokens to compute before the next can be sampled: the prompt and, once pre-empted, the answer so far."""
        return sequence.request.prompt_tokens + sequence.emitted

    # Blocks

    def _grow(self, sequence: _Sequence, count: int, preempted: list[_Sequence]) -> bool:
        """Add blocks, pre-empting from the end of the running order; False when the sequence itself had to go."""
        while self.pool.free < count:
            victim = self._last_running()
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        sequence.blocks.extend(self.pool.allocate(count))
        return True

    def _register(self, sequence: _Sequence, computed: int) -> None:
        """Put blocks that became full into the cache and announce them."""
        first = sequence.registered
        full = min(computed // self.config.block_size, len(sequence.request.hashes))
        if full <= first:
            return
        self.pool.register(sequence.blocks[first:full], sequence.request.hashes[first:full])
        sequence.registered = full
        self.pool.events.append(Stored(sequence.request, first, full - first))

    def _last_running(self) -> _Sequence:
        """Return the sequence admitted last: an unfinished prefill, or the newest that decodes."""
        return next(reversed((self._prefilling or self._decoding).values()))

    def _preempt(self, sequence: _Sequence) -> None:
        self._leave(sequence)
        sequence.preemptions += 1
        self.counters.preemptions += 1
        sequence.state = State.WAITING
        sequence.computed = 0
        self._waiting.appendleft(sequence)

    def _leave(self, sequence: _Sequence) -> None:
        """Take a sequence out of the running ones and give its blocks back."""
        if sequence.state is State.DECODE:
            del self._decoding[sequence.order]
            self._context_tokens -= self._computed_tokens(sequence)
            sequence.emitted = self._emitted_tokens(sequence)
        else:
            del self._prefilling[sequence.order]
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.registered = 0

    def _take_events(self) -> list[CacheEvent]:
        events = self.pool.events
        self.pool.events = []
        return events


class _Prefill:
    """Prefill work of one step, as it adds up."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.tokens = 0
        self.pairs = 0.0
        self.complete: list[_Sequence] = []

    def add(self, chunk: int, *, context: int) -> None:
        """Take note of `chunk` tokens computed behind `context` earlier ones."""
        self.room -= chunk
        self.tokens += chunk
        self.pairs += chunk * (context + 0.5 * (chunk + 1))


def _by_order(sequence: _Sequence) -> int:
    return sequence.order
