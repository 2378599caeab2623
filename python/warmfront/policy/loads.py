"""Learned costs of loading: seconds for a token of KV from host memory or from disk, and for an adapter.

The configured values are priors. A busy period of prefill in which something was loaded took longer than what was
computed in it explains, and the rest is what loading took. Pooled, as prefill is: a replica priced too dear would get
no samples. What is easy to get wrong: a period with loads must not teach the prefill model as well, or loading and
computing would each learn the other's error.

Source: docs/explanation/policies.md, section "What is learned".
"""

from __future__ import annotations

from typing import NamedTuple

from warmfront.config import CostConfig

FORGET = 0.99
"""Share of old knowledge kept per sample."""
PRIOR_SAMPLES = 2.0
"""Weight of the priors, in samples."""
LOADED_SHARE = 0.1
"""Tokens loaded over tokens computed below which a period is one of prefill: it teaches that alone."""
LOADED_TOKENS_MIN = 500
"""Shorter loads say more about everything else."""
SWEEPS = 3
"""Of the solution, one cost after the other: rarely more than one of them occurs in a pool."""


class Loads(NamedTuple):
    """What was loaded instead of computed."""

    host_tokens: float = 0.0
    disk_tokens: float = 0.0
    adapters: float = 0.0

    def __bool__(self) -> bool:
        """Whether there was anything."""
        return self.host_tokens > 0.0 or self.disk_tokens > 0.0 or self.adapters > 0.0


NOTHING = Loads()


class LoadModel:
    """`seconds = ℓ_host·host tokens + ℓ_disk·disk tokens + ℓ_a·adapters`, none of them below 0."""

    def __init__(self, config: CostConfig) -> None:
        self._prior = [config.host_load_s, config.disk_load_s, config.adapter_load_s]
        self.costs = list(self._prior)
        """ℓ_host, ℓ_disk, ℓ_a. One that was configured as 0 stays 0."""
        self.samples = 0
        self._products = [0.0] * 9
        self._sums = [0.0] * 3

    @property
    def host_s(self) -> float:
        """Seconds a token from host memory."""
        return self.costs[0]

    @property
    def disk_s(self) -> float:
        """Seconds a token from disk."""
        return self.costs[1]

    @property
    def adapter_s(self) -> float:
        """Seconds an adapter."""
        return self.costs[2]

    def seconds(self, loads: Loads) -> float:
        """Predict how long loading takes."""
        if loads is NOTHING:
            return 0.0
        host_s, disk_s, adapter_s = self.costs
        return host_s * loads.host_tokens + disk_s * loads.disk_tokens + adapter_s * loads.adapters

    def sample(self, seconds: float, computed_s: float, loads: Loads) -> None:
        """Learn from a busy period.

        Args:
            seconds: That it took.
            computed_s: Of these, what computing and decoding explain.
            loads: In it.
        """
        if loads.host_tokens + loads.disk_tokens < LOADED_TOKENS_MIN and not loads.adapters:
            return
        weight = 1.0 / (seconds * seconds)  # errors are relative, so that one stall of many seconds says little
        rest_s = max(0.0, seconds - computed_s)
        products = [weight * left * right for left in loads for right in loads]
        self._products = [FORGET * old + new for old, new in zip(self._products, products, strict=True)]
        self._sums = [FORGET * old + weight * amount * rest_s for old, amount in zip(self._sums, loads, strict=True)]
        self.samples += 1
        self._solve()

    def _solve(self) -> None:
        """Least squares drawn towards the priors, by coordinates."""
        kept = FORGET**self.samples
        # The prior fades, too, and weighs as much as samples like those seen: in a period a small cost is a small part.
        prior_share = PRIOR_SAMPLES * kept * (1.0 - FORGET) / (1.0 - kept)
        for _ in range(SWEEPS):
            for row, prior in enumerate(self._prior):
                products = self._products[3 * row : 3 * row + 3]
                if prior > 0.0 and products[row] > 0.0:
                    others = sum(products[other] * self.costs[other] for other in range(3) if other != row)
                    ridge = prior_share * products[row]
                    found = (self._sums[row] - others + ridge * prior) / (products[row] + ridge)
                    self.costs[row] = max(0.0, found)
