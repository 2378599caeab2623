"""Predicted against reported cached tokens: does the router believe the truth?

Every answer that reports cached tokens is compared with what its dispatch predicted. A replica whose predictions stay
wrong has a cause that an operator must remove (another template, another block size, missing events); it is said once
when it begins and once when it ends. Only prompts hashed from exact tokens count for that: bytes are coarse by nature.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from warmfront.types import Request, Usage

logger = logging.getLogger(__name__)

ANSWERS_MIN = 20
"""Fewer answers prove nothing."""
WINDOW = 256
"""Answers that percentiles and the verdict look at."""
OFF_ABOVE, OFF_BELOW = 0.20, 0.10
"""Share of tokens off at which a mismatch begins, and below which it ends."""
NOT_REPORTED = "engine does not report cached tokens: start vLLM with --enable-prompt-tokens-details"


@dataclass
class Accuracy:
    """One replica's record."""

    replica: str
    answers: int = 0
    predicted_tokens: int = 0
    reported_tokens: int = 0
    absolute_error_tokens: int = 0
    exact_matches: int = 0
    unreported: int = 0
    """Answers with usage but without cached tokens."""
    is_mismatched: bool = False
    _recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Predicted and reported tokens of the last answers to exact prompts."""
    _off: int = 0
    _whole: int = 0
    """Sums over `_recent`: absolute error, and the larger of the two."""

    def add(self, request: Request, predicted_tokens: int, usage: Usage) -> bool:
        """Compare one answer; return whether it could be compared."""
        reported = usage.cached_tokens
        if reported is None:
            self.unreported += 1
            return False
        self.answers += 1
        self.predicted_tokens += predicted_tokens
        self.reported_tokens += reported
        self.absolute_error_tokens += abs(reported - predicted_tokens)
        self.exact_matches += reported == predicted_tokens
        if request.basis == "tokens":
            self._remember(predicted_tokens, reported)
            self._judge()
        return True

    def mean_error_tokens(self) -> float | None:
        """Mean absolute error of all answers."""
        return self.absolute_error_tokens / self.answers if self.answers else None

    def p99_error_tokens(self) -> int | None:
        """99th percentile of the absolute error of the last exact prompts."""
        errors = sorted(abs(predicted - reported) for predicted, reported in self._recent)
        return errors[min(len(errors) - 1, int(0.99 * len(errors)))] if errors else None

    @property
    def is_silent(self) -> bool:
        """Whether the engine has answered and never told what was cached."""
        return self.unreported > 0 and not self.answers

    def note(self) -> str | None:
        """Say what is missing, if something is."""
        return NOT_REPORTED if self.is_silent else None

    def _remember(self, predicted: int, reported: int) -> None:
        if len(self._recent) == WINDOW:
            oldest = self._recent[0]
            self._off -= abs(oldest[0] - oldest[1])
            self._whole -= max(oldest)
        self._recent.append((predicted, reported))
        self._off += abs(predicted - reported)
        self._whole += max(predicted, reported)

    def _judge(self) -> None:
        if len(self._recent) < ANSWERS_MIN:
            return
        share = self._off / max(1, self._whole)
        if not self.is_mismatched and share > OFF_ABOVE:
            self.is_mismatched = True
            logger.warning(
                "replica %s: predicted cached tokens are %.0f %% off over %d answers; likely causes: tokenizer or chat "
                "template differ from the engine's, block size differs, KV events missing",
                self.replica,
                100 * share,
                len(self._recent),
            )
        elif self.is_mismatched and share < OFF_BELOW:
            self.is_mismatched = False
            logger.info("replica %s: predicted cached tokens are right again (%.0f %% off)", self.replica, 100 * share)
