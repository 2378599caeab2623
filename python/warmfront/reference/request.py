"""What goes into an engine model and what comes out of a step: the nouns of the core's engine and of the reference.

A request arrives with its answer: the model decides *when* tokens come, never which. Blocks are named by hashes that
the caller computes (`sim.hashing.chain_hashes`, or ids of a trace), so the model itself never looks at a token.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True, eq=False)
class EngineRequest:
    """One sequence to compute. A request with `n > 1` or several prompts is several of these."""

    id: str
    prompt_tokens: int
    output_tokens: int
    """Length of the answer, at least 1."""
    hashes: Row[int]
    """Chained hash of each full block of prompt and answer together, as far as blocks may be cached."""
    tokens: Row[int] | None = None
    """Prompt and answer. Only KV events carry them; `None` where nobody reads events."""
    adapter: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    reads_cache: bool = True
    """False: the lookup is skipped, as vLLM does for `prompt_logprobs`; the blocks are stored all the same."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks `first` to `first + count - 1` of a request have entered the cache."""

    request: EngineRequest
    first: int
    count: int

    @property
    def hashes(self) -> Row[int]:
        """Hashes of the stored blocks, in order."""
        return self.request.hashes[self.first : self.first + self.count]

    @property
    def parent(self) -> int | None:
        """Hash of the block before, `None` at the start of a sequence."""
        return self.request.hashes[self.first - 1] if self.first else None


@dataclass(frozen=True, slots=True)
class Removed:
    """One copy of a block has left the cache."""

    hash: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything has left the cache."""


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A block lies on a slower tier now, `cpu` or `disk`."""

    hash: int
    tier: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A block has left a slower tier."""

    hash: int
    tier: str


CacheEvent = Stored | Removed | Cleared | Offloaded | Dropped


class State(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine. Hosts read it and keep it as a handle; only the engine changes it."""

    request: EngineRequest
    state: State = State.WAITING
    cached_tokens: int | None = None
    """Prompt tokens found in the cache at first admission; `None` before."""
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one engine step did. Outputs become visible when the step ends, `duration_s` after it began."""

    duration_s: float
    sampled: Row[Sequence]
    """Sequences that produced one token, in running order: decodes, then those whose prefill is complete."""
    finished: Row[Sequence]
    """Those of `sampled` whose answer is complete."""
    admitted: Row[Sequence]
    preempted: Row[Sequence]
    events: list[CacheEvent]
    """In true order, with what happened since the step before (a reset)."""
    prefill_tokens: int
    decode_tokens: int


@dataclass(slots=True)
class Counters:
    """Totals since the start, as vLLM counts them."""

    steps: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens computed, those after a pre-emption included."""
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0
    loaded_tokens: int = 0
    """Read back from slower tiers."""
    adapter_loads: int = 0
