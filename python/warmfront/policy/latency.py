"""Learned latency of a pool: seconds of prefill and seconds between two tokens.

Prefill is learned for the pool and scaled per replica; decode is learned per replica. Prefill models are not learned
per replica from scratch: a replica priced too dear gets no samples and stays dear. An error common to all replicas is
harmless; only a difference between replicas moves a choice.

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
POOL_SAMPLES_MIN = 20
"""Samples of the pool before replicas are told apart: the first to be measured would only seem faster than a prior that
is too slow for all, and get all requests of an idle fleet."""
SHRINK = 0.005
"""Share by which a replica's scale returns to the pool with each sample."""
KEPT = 0.99
"""Share of a replica's old measurements kept per sample."""
SAMPLE_WEIGHT = 0.2
"""Weight of a measured second against the one of the presumption that a replica is like the others."""
SECONDS_A_TOKEN_MIN = 1e-6
SECONDS_A_STEP_MIN = 1e-4
_REQUESTS_UNIT, _TOKENS_UNIT = 1e-2, 1e-5
_VARIANCE_MAX = 0.1
_GAP_VARIANCE = 1.6e-5
"""Of a measured gap, in square seconds: 4 ms squared."""
_PRIOR_SPREAD = (0.02, 0.005, 0.005)
"""How wrong the prior may be: seconds a step, a hundred requests, 100,000 tokens. Were the last two less certain, the
first gaps of a fast engine would be put down to them, and load would look free until there was much of it."""
_LEAST = (SECONDS_A_STEP_MIN, 0.0, 0.0)
"""Smallest allowed constants."""
ASTRAY_MAX = 3
"""Gaps in a row, each too far from the expected one to be believed, after which the expectation is given up."""


class Scale:
    """How much slower each replica is than its pool: a ratio of sums that forgets, drawn towards 1.

    Its standard error is known from how far measurements lie from it, and a ratio that differs from 1 by no more than
    that is taken for 1: equal replicas differ by some per cent of chance, and that is dear where prefill is.
    """

    def __init__(self) -> None:
        self.factor: list[float] = []
        self._measured: list[float] = []
        self._expected: list[float] = []
        self._squares: list[float] = []
        """Squared errors of what was measured, weighed as in the sums: in square seconds."""

    def grow(self) -> None:
        """Add a row."""
        for column in (self.factor, self._measured, self._expected):
            column.append(1.0)
        self._squares.append(0.0)

    def reset(self, slot: Slot) -> None:
        """Forget a replica: the slot belongs to another one now."""
        self.factor[slot] = self._measured[slot] = self._expected[slot] = 1.0
        self._squares[slot] = 0.0

    def add(self, slot: Slot, seconds: float, expected_s: float) -> None:
        """Compare seconds measured with those expected of the pool; one measurement counts at most fourfold.

        Five seconds weigh as much as the presumption that the replica is like the others.
        """
        seconds = min(seconds, 4 * expected_s * self.factor[slot])
        measured = KEPT * self._measured[slot] + SAMPLE_WEIGHT * seconds
        expected = KEPT * self._expected[slot] + SAMPLE_WEIGHT * expected_s
        measured += SHRINK * (expected - measured)
        self._measured[slot], self._expected[slot] = measured, expected
        ratio = measured / expected
        error_s = SAMPLE_WEIGHT * (seconds - ratio * expected_s)
        squares = self._squares[slot] = KEPT * KEPT * self._squares[slot] + error_s * error_s
        self.factor[slot] = 1.0 + _beyond_error(ratio - 1.0, squares / (expected * expected))


def _beyond_error(found: float, variance: float) -> float:
    """Return what is left of a difference once chance is taken off: its square exceeds the true one by the variance.

    Source: the positive part of W. James, C. Stein, "Estimation with quadratic loss", Berkeley Symposium 1961, for one
    coordinate.
    """
    return found * max(0.0, 1.0 - variance / (found * found)) if found else 0.0


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
        return self._scale.factor[slot] * new_tokens * (self.alpha + self.beta * (prompt_tokens - 0.5 * new_tokens))

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
        if self.samples >= POOL_SAMPLES_MIN:
            self._scale.add(slot, seconds, predicted)
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
    """`τ = θ0 + θ1·B + θ2·K`: seconds between two tokens with B requests and K tokens of context, by replica.

    Not by pool: a slow replica gets fewer requests, so across replicas more requests go with shorter steps, and a
    common model would conclude that load is free.
    """

    def __init__(self, config: CostConfig) -> None:
        self._prior = (config.decode_prior_s, 0.0, config.decode_prior_token_s)
        self.base: list[float] = []
        self.per_request: list[float] = []
        self.per_token: list[float] = []
        self.samples = 0
        self._covariance: list[list[list[float]]] = []
        self._astray: list[int] = []

    def grow(self) -> None:
        """Add a row."""
        for column, value in zip((self.base, self.per_request, self.per_token), self._prior, strict=True):
            column.append(value)
        self._covariance.append(_start())
        self._astray.append(0)

    def reset(self, slot: Slot) -> None:
        """Forget a replica."""
        self.base[slot], self.per_request[slot], self.per_token[slot] = self._prior
        self._covariance[slot] = _start()
        self._astray[slot] = 0

    def seconds(self, slot: Slot, requests: float, context_tokens: float) -> float:
        """Predict the gap between two tokens."""
        return self.base[slot] + self.per_request[slot] * requests + self.per_token[slot] * context_tokens

    def sample(self, slot: Slot, gap_s: float, requests: float, context_tokens: float, *, trust: float = 1.0) -> None:
        """Learn from a mean gap (recursive least squares, errors clipped).

        Args:
            slot: Where.
            gap_s: Measured.
            requests: That decoded.
            context_tokens: Theirs.
            trust: Weight of the sample, 1 for a gap that no prefill touched.
        """
        inputs = (1.0, requests * _REQUESTS_UNIT, context_tokens * _TOKENS_UNIT)
        matrix = self._covariance[slot]
        product = [sum(entry * value for entry, value in zip(row, inputs, strict=True)) for row in matrix]
        scale = FORGET * _GAP_VARIANCE / trust + sum(
            value * entry for value, entry in zip(inputs, product, strict=True)
        )
        predicted_s = self.seconds(slot, requests, context_tokens)
        bound = 0.5 * predicted_s + 0.02  # of the prediction, so that one stall of many seconds stays one small step
        error = max(-bound, min(bound, gap_s - predicted_s))
        self._astray[slot] = self._astray[slot] + 1 if abs(gap_s - predicted_s) > bound else 0
        gain = [entry / scale for entry in product]
        matrix = [[(matrix[row][col] - gain[row] * product[col]) / FORGET for col in range(3)] for row in range(3)]
        found = _nearest(
            [
                self.base[slot] + gain[0] * error,
                self.per_request[slot] / _REQUESTS_UNIT + gain[1] * error,
                self.per_token[slot] / _TOKENS_UNIT + gain[2] * error,
            ],
            matrix,
        )
        self.base[slot], self.per_request[slot], self.per_token[slot] = (
            found[0],
            found[1] * _REQUESTS_UNIT,
            found[2] * _TOKENS_UNIT,
        )
        self._covariance[slot] = _bounded(matrix)
        if self._astray[slot] > ASTRAY_MAX:
            self._covariance[slot] = _start()
        self.samples += 1


def _nearest(found: list[float], matrix: list[list[float]]) -> list[float]:
    """Return the allowed constants that agree best with what was found, in the unit of the covariance `matrix`.

    Requests and their tokens come and go together, so a gap that is shorter than expected may take a lot from one slope
    and give nearly as much to the other. Were the first one only cut off at 0, what the other got would stay: the
    expected gap would move away from the measured one, further with each sample. Here the others follow, as far as the
    covariance says that they go together.
    """
    found, known = found.copy(), [row.copy() for row in matrix]
    for _ in _LEAST:
        lacks = [least - value for least, value in zip(_LEAST, found, strict=True)]
        worst = max(range(3), key=lambda row: lacks[row] / _PRIOR_SPREAD[row])
        variance = known[worst][worst]
        if lacks[worst] <= 0.0 or variance <= 0.0:
            break
        shares = [row[worst] / variance for row in known]
        found = [value + share * lacks[worst] for value, share in zip(found, shares, strict=True)]
        known = [
            [known[row][col] - shares[row] * variance * shares[col] for col in range(3)] for row in range(3)
        ]  # what stays uncertain once this one is known
    return [max(least, value) for least, value in zip(_LEAST, found, strict=True)]


def _start() -> list[list[float]]:
    return [[spread * spread if row == col else 0.0 for col in range(3)] for row, spread in enumerate(_PRIOR_SPREAD)]


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
