"""Made-up answers: plain words in sentences, the same for the same prompt on every engine.

Encoding an answer's text gives its tokens again, so the blocks that decoding fills are found by the next turn of the
conversation, as with a real model.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Literal

from warmfront.sim.tokens import BuiltinTokenizer
from warmfront.sim.words import NOUNS, OTHERS, VERBS

FinishReason = Literal["stop", "length"]

NATURAL_TOKENS_MIN = 12
"""Shortest answer that ends by itself."""
NATURAL_TOKENS_MEAN = 96
"""Mean of what is added to that, exponentially distributed: most answers are short, some are long."""
SENTENCE_WORDS_MIN, SENTENCE_WORDS_MAX = 5, 14


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of one answer; the last is the stop token when it ended by itself."""

    tokens: list[int]
    reason: FinishReason


class AnswerWriter:
    """Writes answers with the words of one tokenizer."""

    def __init__(self, tokenizer: BuiltinTokenizer, *, seed: int = 0) -> None:
        """Prepare the words.

        Args:
            tokenizer: Of the built-in model.
            seed: Another seed gives other answers.
        """
        words = sorted({*NOUNS, *VERBS, *OTHERS})
        self._first = [tokenizer.encode(word.capitalize())[0] for word in words]
        self._begin = [tokenizer.encode(" " + word.capitalize())[0] for word in words]
        self._inside = [tokenizer.encode(" " + word)[0] for word in words]
        self._period = tokenizer.encode(".")[0]
        self._stop = tokenizer.stop_token
        self._seed = seed

    def write(self, prompt: Sequence[int], *, tokens_max: int, choice: int = 0, ignore_stop: bool = False) -> Answer:
        """Answer a prompt with at most `tokens_max` tokens."""
        digest = blake2b(array("I", prompt).tobytes(), digest_size=8).digest()
        random = Random(int.from_bytes(digest, "big") ^ (self._seed << 8) ^ choice)
        natural = NATURAL_TOKENS_MIN + int(random.expovariate(1 / NATURAL_TOKENS_MEAN))
        if ignore_stop or natural >= tokens_max:
            return Answer(self._sentences(random, tokens_max), "length")
        return Answer([*self._sentences(random, natural - 1), self._stop], "stop")

    def _sentences(self, random: Random, count: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < count:
            tokens.append(random.choice(self._begin if tokens else self._first))
            tokens += random.choices(self._inside, k=random.randint(SENTENCE_WORDS_MIN, SENTENCE_WORDS_MAX))
            tokens.append(self._period)
        return tokens[:count]
