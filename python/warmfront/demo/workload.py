"""The demo's traffic: conversations with a shared system prompt, some of several turns, and one-off prompts.

All of it follows from a seed, so both policies see the same conversations at the same times. A conversation starts at
its planned time however busy the fleet is (open loop); its next turn follows the answer after a pause, as a person's
would.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from warmfront.sim.words import NOUNS, OTHERS, VERBS

Kind = Literal["question", "chat", "one-off"]


@dataclass(frozen=True, slots=True)
class Mix:
    """Shape of the traffic. Lengths are words; a word is a little more than one token."""

    rate: float = 9.0
    """Conversations that start in a second, on average."""
    assistants: int = 24
    """System prompts that conversations share, the first ones more popular."""
    system_words: int = 1400
    question_words: int = 30
    one_off_words: int = 900
    chat_turns: int = 4
    chat_share: float = 0.2
    one_off_share: float = 0.15
    answer_tokens_min: int = 16
    answer_tokens_max: int = 64
    pause_s: float = 1.0
    """Between an answer and the next turn."""


MIX = Mix()
"""What the demo sends."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One client's plan."""

    start_s: float
    kind: Kind
    system: str | None
    turns: tuple[str, ...]
    answer_tokens: tuple[int, ...]
    pause_s: float


def plan(mix: Mix, *, seconds: float, seed: int) -> list[Conversation]:
    """Return every conversation that starts within `seconds`, in order of start."""
    random = Random(seed)
    systems = [_system(random, mix.system_words) for _ in range(mix.assistants)]
    popularity = [1 / (rank + 1) ** 0.5 for rank in range(mix.assistants)]
    conversations: list[Conversation] = []
    start_s = random.expovariate(mix.rate)
    while start_s < seconds:
        kind = _kind(random, mix)
        system = None if kind == "one-off" else random.choices(systems, popularity)[0]
        conversations.append(_conversation(random, mix, start_s, kind, system))
        start_s += random.expovariate(mix.rate)
    return conversations


def _kind(random: Random, mix: Mix) -> Kind:
    drawn = random.random()
    if drawn < mix.one_off_share:
        return "one-off"
    return "chat" if drawn < mix.one_off_share + mix.chat_share else "question"


def _conversation(random: Random, mix: Mix, start_s: float, kind: Kind, system: str | None) -> Conversation:
    turns = mix.chat_turns if kind == "chat" else 1
    words = mix.one_off_words if kind == "one-off" else mix.question_words
    return Conversation(
        start_s=start_s,
        kind=kind,
        system=system,
        turns=tuple(_text(random, words) for _ in range(turns)),
        answer_tokens=tuple(random.randint(mix.answer_tokens_min, mix.answer_tokens_max) for _ in range(turns)),
        pause_s=mix.pause_s,
    )


def _system(random: Random, words: int) -> str:
    role = " ".join(random.choice(NOUNS) for _ in range(2))
    return f"You are the assistant of the {role} team.\n\n{_text(random, words)}"


def _text(random: Random, words: int) -> str:
    sentences: list[str] = []
    written = 0
    while written < words:
        length = min(random.randint(6, 14), words - written)
        chosen = [random.choice(random.choice((NOUNS, VERBS, OTHERS))) for _ in range(length)]
        sentences.append(" ".join(chosen).capitalize() + ".")
        written += length
    return " ".join(sentences)
