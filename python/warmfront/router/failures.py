"""Where a prompt failed lately, so that the client's own retry goes elsewhere.

A client that got an error, or half an answer, asks again within seconds. Its prompt is warm where it failed, so
affinity alone would send it back there. Clients mark retries in many ways or in none; the same prompt in the same
flow, soon after it failed, is a retry whatever it says. What is easy to get wrong: this is a preference and no more.
Where every replica has failed a prompt, all of them may be asked again.
"""

from __future__ import annotations

from collections.abc import Iterable

from warmfront.types import Request

PROMPTS_MAX = 4096
"""Failed prompts that are remembered; of more, the one that failed longest ago goes."""

Prompt = tuple[str, str, int, int, int]


class Failures:
    """Failed prompts of all pools, by the replicas at which they failed."""

    def __init__(self) -> None:
        self._failed: dict[Prompt, tuple[float, frozenset[str]]] = {}
        """When it failed last, and the ids of the replicas at which it did; the oldest first."""

    def note(self, request: Request, replicas: Iterable[str], now_s: float, *, kept_s: float) -> None:
        """Remember a failure that the client was told of.

        Args:
            request: That failed.
            replicas: Ids of those that failed it.
            now_s: Present.
            kept_s: How long such a memory lasts; those of the same prompt that are older are over.
        """
        failed = frozenset(replicas)
        if not failed or kept_s <= 0.0 or request.basis == "none":
            return
        prompt = _prompt(request)
        before_s, before = self._failed.pop(prompt, (now_s, frozenset[str]()))
        self._failed[prompt] = (now_s, failed | before if now_s - before_s <= kept_s else failed)
        if len(self._failed) > PROMPTS_MAX:
            del self._failed[next(iter(self._failed))]

    def of(self, request: Request, now_s: float, *, kept_s: float) -> frozenset[str]:
        """Return the ids of the replicas at which this prompt failed lately."""
        if not self._failed:
            return frozenset()
        failed_s, replicas = self._failed.get(_prompt(request), (0.0, frozenset[str]()))
        return replicas if now_s - failed_s <= kept_s else frozenset()


def _prompt(request: Request) -> Prompt:
    return (request.pool, request.flow, request.prefix_key, request.prompt_tokens, request.turn)
