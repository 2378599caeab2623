"""What goes into the engine model and what comes out of a step.

A request arrives with its answer: the model decides *when* tokens come, never which. Blocks are named by hashes that
the caller computes (`hashing.chain_hashes`, or ids of a trace), so the model itself never looks at a token.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass, field
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


CacheEvent = Stored | Removed | Cleared


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
    order: int = 0
    """Number of the last admission: running sequences are served in this order."""
    blocks: list[int] = field(default_factory=list)
    registered: int = 0
    """Leading blocks that are in the cache under their hash."""
    computed: int = 0
    """Tokens with KV when `tick` was current; see `Engine.computed_tokens`."""
    emitted: int = 0
    """Answer tokens produced when `tick` was current."""
    tick: int = 0
    due: int = 0
    """Tick at which a decoding sequence next needs more than one more token of context."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one engine step did. Outputs become visible when the step ends, `duration_s` after it began."""

    duration_s: float
    sampled: list[Sequence]
    """Sequences that produced one token, in running order: decodes, then those whose prefill is complete."""
    finished: list[Sequence]
    """Those of `sampled` whose answer is complete."""
    admitted: list[Sequence]
    preempted: list[Sequence]
    events: list[CacheEvent]
    """In true order, with what happened since the step before (a reset)."""
    prefill_tokens: int
    decode_tokens: int
