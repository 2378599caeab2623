"""Learned latency of a pool: seconds of prefill and seconds between two tokens.

Both are learned for the pool and scaled per replica, not per replica from scratch: one priced too dear would get no
samples and stay dear. An error common to all replicas is harmless; only a difference between them moves a choice.

Source: docs/explanation/policies.md, section "What is learned".
"""

from __future__ import annotations

from warmfront.config import CostConfig
from warmfront.types import Slot

FORGET = 0.999
"""Share of old knowledge kept per sample."""
PRIOR_SAMPLES = 4.0
"""Weight of the prior, in samples."""
PAIR_PRIOR_S = 2e-9
"""Scale of the prior for seconds a (query, key) pair."""
SAMPLE_TOKENS_MIN = 600
"""Shorter busy periods say more about overhead than about prefill."""
PREFILL_OVER_DECODE_MIN = 1.0
"""Prefill of a sample over the decoding in the same steps."""
RATIO_MAX, RATIO_MIN = 8.0, 0.05
"""Samples this far from the prediction are accidents: a stall, a wrong overlap."""
OUTLIERS_MAX = 8
"""Accidents in a row after which they are the truth: the engine is another class of machine than the prior."""
PREFILL_UNIT_S = 5.0
"""Seconds of prefill that weigh as much as the presumption that a replica is like its pool."""
GAP_UNIT_S = 2.0
"""Seconds of gaps, one an interval, that do."""
SHRINK = 0.005
"""Share by which a replica's scale returns to the pool with each sample."""
SECONDS_A_TOKEN_MIN = 1e-6
SECONDS_A_STEP_MIN = 1e-4
_REQUESTS_UNIT, _TOKENS_UNIT = 1e-2, 1e-5
_VARIANCE_MAX = 0.1
_GAP_VARIANCE = 1e-4
"""Of a measured gap, in square seconds."""
GAP_FORGET = 0.9998
"""Share of old knowledge kept per gap: a pool of eight reports thirty a second."""


class Scale:
    """How much slower each replica is than its pool: a ratio of sums that forgets, drawn towards 1."""

    def __init__(self) -> None:
        self.factor: list[float] = []
        self._measured: list[float] = []
        self._expected: list[float] = []

    def grow(self) -> None:
        """Add a row."""
        for column in (self.factor, self._measured, self._expected):
            column.append(1.0)

    def reset(self, slot: Slot) -> None:
        """Forget a replica: the slot belongs to another one now."""
        self.factor[slot] = self._measured[slot] = self._expected[slot] = 1.0

    def add(self, slot: Slot, seconds: float, expected_s: float, *, unit_s: float) -> None:
        """Compare seconds measured with those expected of the pool; one measurement counts at most fourfold.

        `unit_s` of measurements weigh as much as the presumption that the replica is like the others. It must be large
        enough for the pool to learn first: a replica that seems fast because the pool's prior is slow would get all
        requests.
        """
        measured = 0.99 * self._measured[slot] + min(seconds, 4 * expected_s * self.factor[slot]) / unit_s
        expected = 0.99 * self._expected[slot] + expected_s / unit_s
        measured += SHRINK * (expected - measured)
        self._measured[slot], self._expected[slot] = measured, expected
        self.factor[slot] = measured / expected


class PrefillModel:
    """`p = s·(α·n + β·n·(L − n/2))` for n tokens to compute of a prompt of L."""

    def __init__(self, config: CostConfig) -> None:
        self._prior_s = config.prefill_prior_s
        self.alpha = config.prefill_prior_s
        """Seconds a token."""
        self.beta = 0.0
        """Seconds a pair of query and key."""
        self.samples = 0
        self._outliers = 0
        self._scale = Scale()
        self._sums = [0.0] * 5

    @property
    def scale(self) -> list[float]:
        """s: this replica over the pool."""
        return self._scale.factor

    def grow(self) -> None:
        """Add a row."""
        self._scale.grow()

    def reset(self, slot: Slot) -> None:
        """Forget a replica: the slot belongs to another one now."""
        self._scale.reset(slot)

    def seconds(self, slot: Slot, new_tokens: float, prompt_tokens: int) -> float:
        """Predict the prefill of one request."""
        return self.scale[slot] * new_tokens * (self.alpha + self.beta * (prompt_tokens - 0.5 * new_tokens))

    def sample(self, slot: Slot, seconds: float, tokens: float, pairs: float, *, decode_s: float = 0.0) -> None:
        """Learn from one busy period: `seconds` for `tokens` computed against `pairs` of query and key.

        `decode_s` of them went to decoding in the same steps. A period that is mostly decoding says nothing about
        prefill that could be told apart.
        """
        seconds -= decode_s
        if tokens < SAMPLE_TOKENS_MIN or seconds <= decode_s * PREFILL_OVER_DECODE_MIN:
            return
        predicted = self.alpha * tokens + self.beta * pairs
        if RATIO_MIN <= seconds / predicted <= RATIO_MAX:
            self._outliers = 0
        else:
            self._outliers += 1
            if self._outliers <= OUTLIERS_MAX:
                return
        self._scale.add(slot, seconds, predicted, unit_s=PREFILL_UNIT_S)
        self._fit(seconds / self.scale[slot], tokens, pairs)
        self.samples += 1

    def _fit(self, seconds: float, tokens: float, pairs: float) -> None:
        """Least squares for relative errors, drawn towards the prior."""
        weight = 1.0 / (seconds * seconds)
        new = (tokens * tokens, tokens * pairs, pairs * pairs, tokens * seconds, pairs * seconds)
        self._sums = [FORGET * old + weight * value for old, value in zip(self._sums, new, strict=True)]
        ridge_alpha = PRIOR_SAMPLES / (self._prior_s * self._prior_s)
        ridge_beta = PRIOR_SAMPLES / (PAIR_PRIOR_S * PAIR_PRIOR_S)
        a11, a12, a22 = self._sums[0] + ridge_alpha, self._sums[1], self._sums[2] + ridge_beta
        b1, b2 = self._sums[3] + ridge_alpha * self._prior_s, self._sums[4]
        determinant = a11 * a22 - a12 * a12
        if determinant <= 0:
            return
        alpha, beta = (b1 * a22 - b2 * a12) / determinant, (a11 * b2 - a12 * b1) / determinant
        if beta < 0:
            alpha, beta = b1 / a11, 0.0
        self.alpha, self.beta = max(SECONDS_A_TOKEN_MIN, alpha), beta


class DecodeModel:
    """`τ = s'·(θ0 + θ1·B + θ2·K)`: seconds between two tokens with B requests and K tokens of context.

    Learned for the pool and scaled per replica, as prefill is. A replica that is never without prefill shows no clean
    gap of its own; learned alone it could be taken for cheap, drown in requests, and never be found out.
    """

    def __init__(self, config: CostConfig) -> None:
        self.base, self.per_request, self.per_token = config.decode_prior_s, 0.0, config.decode_prior_token_s
        self.samples = 0
        self._scale = Scale()
        self._covariance = _start()

    @property
    def scale(self) -> list[float]:
        """s': this replica over the pool."""
        return self._scale.factor

    def grow(self) -> None:
        """Add a row."""
        self._scale.grow()

    def reset(self, slot: Slot) -> None:
        """Forget a replica."""
        self._scale.reset(slot)

    def seconds(self, slot: Slot, requests: float, context_tokens: float) -> float:
        """Predict the gap between two tokens."""
        return self.scale[slot] * (self.base + self.per_request * requests + self.per_token * context_tokens)

    def token_s(self, slot: Slot) -> float:
        """Return what one token of context adds to a gap."""
        return self.scale[slot] * self.per_token

    def sample(self, slot: Slot, gap_s: float, requests: float, context_tokens: float, *, trust: float = 1.0) -> None:
        """Learn from a mean gap (recursive least squares, errors clipped).

        Args:
            slot: Where.
            gap_s: Measured.
            requests: That decoded.
            context_tokens: Theirs.
            trust: Weight of the sample, 1 for a gap that no prefill touched.
        """
        expected_s = self.seconds(slot, requests, context_tokens) / self.scale[slot]
        self._scale.add(slot, gap_s, expected_s, unit_s=GAP_UNIT_S / trust)
        inputs = (1.0, requests * _REQUESTS_UNIT, context_tokens * _TOKENS_UNIT)
        matrix = self._covariance
        product = [sum(entry * value for entry, value in zip(row, inputs, strict=True)) for row in matrix]
        variance = _GAP_VARIANCE / trust + sum(value * entry for value, entry in zip(inputs, product, strict=True))
        bound = 0.5 * expected_s + 0.02  # of the prediction, so that one stall of many seconds stays one small step
        error = max(-bound, min(bound, gap_s / self.scale[slot] - expected_s))
        gain = [entry / variance for entry in product]
        self.base = max(SECONDS_A_STEP_MIN, self.base + gain[0] * error)
        self.per_request = max(0.0, self.per_request + gain[1] * error * _REQUESTS_UNIT)
        self.per_token = max(0.0, self.per_token + gain[2] * error * _TOKENS_UNIT)
        self._covariance = _bounded(
            [[(matrix[row][col] - gain[row] * product[col]) / GAP_FORGET for col in range(3)] for row in range(3)]
        )
        self.samples += 1


def _start() -> list[list[float]]:
    return [[1e-3, 0.0, 0.0], [0.0, 1e-4, 0.0], [0.0, 0.0, 1e-3]]


def _bounded(matrix: list[list[float]]) -> list[list[float]]:
    """Keep forgetting from blowing up directions that are never excited."""
    for row in range(3):
        if matrix[row][row] > _VARIANCE_MAX:
            factor = _VARIANCE_MAX / matrix[row][row]
            for col in range(3):
                matrix[row][col] *= factor
                matrix[col][row] *= factor
            matrix[row][row] = _VARIANCE_MAX
    return matrix
