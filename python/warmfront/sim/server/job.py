"""One HTTP request while the engine computes it: its sequences, its listener, where its bytes go."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

from warmfront.reference.request import Sequence
from warmfront.sim.answers import Answer


@dataclass(slots=True, eq=False)
class Choice:
    """One answer of a request."""

    index: int
    prompt: list[int]
    answer: Answer
    sequence: Sequence | None = None
    emitted: int = 0
    last_token_s: float = 0.0

    @property
    def is_last_token(self) -> bool:
        """Whether the token emitted last ends the answer."""
        return self.emitted == len(self.answer.tokens)


@dataclass(slots=True, eq=False)
class Job:
    """What the dialects need to print an answer."""

    id: str
    created: int
    model: str
    stream: bool
    include_usage: bool
    tells_cached_tokens: bool
    choices: list[Choice]
    prompts: int
    """Distinct prompts: usage counts each once, however many answers it gets."""
    arrived_s: float
    done: asyncio.Event = field(default_factory=asyncio.Event)
    id_json: bytes = field(init=False)
    """`id` as JSON, made once for all frames: a client may choose it by a header."""
    model_json: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.id_json = json.dumps(self.id).encode()
        self.model_json = json.dumps(self.model).encode()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        answers = len(self.choices) // self.prompts
        return sum(len(choice.prompt) for choice in self.choices[::answers])

    @property
    def output_tokens(self) -> int:
        """Tokens emitted so far."""
        return sum(choice.emitted for choice in self.choices)

    @property
    def cached_tokens(self) -> int:
        """Of one sequence, the last, as vLLM reports it; not the sum."""
        sequence = self.choices[-1].sequence
        return 0 if sequence is None else sequence.cached_tokens or 0
