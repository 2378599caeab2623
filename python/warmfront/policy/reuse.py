"""Whether engines reuse what their events say that they hold, told by how long prefills take.

An engine may cease to reuse and go on publishing events, and its answers may not say what was cached, or say it long
after the first token. A prefill says it at once: one that finds its prefix takes a tenth of the time of one that does
not. What is easy to get wrong: a slow engine is not one that has ceased to reuse. So a prefill tells something only
where both expectations lie far apart, and one that took any third time tells next to nothing.

Source: E. S. Page, "Continuous inspection schemes", Biometrika 1954; docs/explanation/policies.md, section "Engines
that cease to reuse".
"""

from __future__ import annotations

import math
from bisect import bisect_right

from msgspec import Struct

from warmfront.types import Slot

SPREAD = 0.35
"""Of measured prefills around what was expected, in e-folds: they end with a step, and share it with others."""
STRAY = 0.02
"""Share of prefills that take any other time, per e-fold: one in ten, over five e-folds."""
TELLING = 4.0
"""Seconds if nothing is found over seconds if all is, from which on a prefill tells: then an engine twice as slow as
expected lies in the middle."""
CHANGES = 1e-4
"""Chance that an engine has ceased to reuse, or begun again, since the prefill before, while others have not."""
UNTESTED_S = 300.0
"""A replica that is not sent what it holds shows nothing any more: so long after it last did it is trusted again."""
SAME_STEP = 0.5
"""Part of a step within which first tokens are of one step."""
_HEIGHT = 1.0 / (SPREAD * math.sqrt(2.0 * math.pi))
_REPORTED = math.log((_HEIGHT + STRAY) / STRAY)
"""Evidence of an answer that tells: that of the clearest prefill."""


class Trial(Struct):
    """First tokens of one step, and what the time that they took says of reuse."""

    seconds: float
    closed_s: float
    """First tokens later than this are of another step."""
    is_telling: bool
    found_s: float
    """Expected if all was found that was claimed; what decodes in the same step included."""
    missed_s: float
    """Expected if nothing was."""
    members: int = 0
    evidence: float = 0.0
    """Logarithm of the likelihood of reuse over the other; 0: tells nothing."""
    is_reused: bool = True
    """What was believed when it had been judged."""

    def add(self, found_s: float, missed_s: float, *, is_telling: bool) -> None:
        """Count one more first token."""
        self.members += 1
        self.is_telling = self.is_telling and is_telling
        self.found_s += found_s
        self.missed_s += missed_s
        self.evidence = 0.0
        if self.is_telling and self.seconds > 0.0 and self.missed_s >= TELLING * self.found_s:
            found, missed = _density(self.seconds / self.found_s), _density(self.seconds / self.missed_s)
            self.evidence = math.log((found + STRAY) / (missed + STRAY))


class Reuse:
    """r: whether each replica reuses, as far as its prefills and its answers tell: 1 until the opposite is likelier.

    Evidence against what is believed of a replica is added up, never below 0, until it outweighs the odds of that.
    Those are high, unless other replicas have shown that they changed since this one last confirmed it: what stops
    reuse seldom stops it in one engine alone.
    """

    def __init__(self) -> None:
        self.factor: list[float] = []
        """r by slot: 1 or 0."""
        self._against: list[float] = []
        """Evidence against it."""
        self._changed: list[int] = []
        """When evidence of its own last showed that it had changed; 0: never. In events, as the next."""
        self._confirmed: list[int] = []
        """When evidence of its own last confirmed what is believed; 0: never."""
        self._is_hearsay: list[bool] = []
        """What is believed of it was concluded from others."""
        self._shown_s: list[float] = []
        """When it last showed anything."""
        self._events = 0
        """What is later has a higher number."""
        self._began_s: list[float] = []
        """When the prefill in progress began."""
        self._is_usable: list[bool] = []
        """Its time will tell something."""
        self._open: dict[Slot, Trial] = {}
        """Not judged yet."""
        self._doubted = 0
        """Replicas that are taken not to reuse."""

    def grow(self) -> None:
        """Add a row."""
        self.factor.append(1.0)
        for column in (self._against, self._shown_s, self._began_s):
            column.append(0.0)
        for counts in (self._changed, self._confirmed):
            counts.append(0)
        for flags in (self._is_hearsay, self._is_usable):
            flags.append(False)

    def reset(self, slot: Slot) -> None:
        """Forget a replica: the slot belongs to another one now."""
        self._doubted -= self.factor[slot] == 0.0
        self.factor[slot], self._against[slot] = 1.0, 0.0
        self._changed[slot] = self._confirmed[slot] = 0
        self._is_hearsay[slot] = self._is_usable[slot] = False
        self._open.pop(slot, None)

    def began(self, slot: Slot, began_s: float) -> None:
        """Note the start of a prefill with none before it."""
        self._began_s[slot], self._is_usable[slot] = began_s, True

    def spoiled(self, slot: Slot) -> None:
        """Note that the time of what is in progress will tell nothing."""
        self._is_usable[slot] = False

    def first_token(
        self,
        slot: Slot,
        now_s: float,
        *,
        found_s: float,
        missed_s: float,
        step_s: float,
        is_telling: bool,
        is_usable: bool,
    ) -> Trial:
        """Note the end of a prefill, which the first tokens of the same step share.

        Args:
            slot: Where.
            now_s: When it ended.
            found_s: Expected if all was found that was claimed to be cached.
            missed_s: Expected if nothing was.
            step_s: What a step takes there without any prefill in it.
            is_telling: What was claimed is what events said, and expectations are to be trusted.
            is_usable: The time of what follows will tell something.
        """
        trial = self._open.get(slot)
        if trial is None:
            trial = self._open[slot] = Trial(
                seconds=now_s - self._began_s[slot],
                closed_s=now_s + SAME_STEP * step_s,
                is_telling=self._is_usable[slot],
                found_s=step_s,
                missed_s=step_s,
            )
        self._began_s[slot], self._is_usable[slot] = now_s, is_usable
        trial.add(found_s, missed_s, is_telling=is_telling)
        return trial

    def judge(self, now_s: float) -> list[Slot]:
        """Judge by the steps that are over; return the slots of which something else is believed now."""
        if not self._open and not self._doubted:
            return []
        changed: list[Slot] = []
        for slot, trial in [(slot, trial) for slot, trial in self._open.items() if trial.closed_s < now_s]:
            del self._open[slot]
            if trial.evidence:
                self._shown_s[slot] = now_s
                changed += self._confirm(slot, trial.evidence) + self._weigh(slot, trial.evidence)
            trial.is_reused = bool(self.factor[slot])
        if self._doubted:
            for row in [row for row, factor in enumerate(self.factor) if not factor]:
                if now_s - self._shown_s[row] > UNTESTED_S:
                    self._change(row)
                    changed.append(Slot(row))
        return changed

    def reported(self, slot: Slot, trial: Trial, *, is_found: bool) -> list[Slot]:
        """Put what an answer tells in place of what the time of its prefill did; return as `judge`.

        Where the time told nothing an answer does not, either: what waits for memory is evicted meanwhile.
        """
        if not trial.evidence:
            return []
        evidence = _REPORTED if is_found else -_REPORTED
        return self._weigh(slot, (evidence - trial.evidence) / trial.members)

    def _confirm(self, slot: Slot, evidence: float) -> list[Slot]:
        """Take note if evidence agrees with what is believed; what was hearsay is then known, and others may follow."""
        if (evidence > 0.0) != bool(self.factor[slot]):
            return []
        self._events += 1
        self._confirmed[slot] = self._events
        if not self._is_hearsay[slot]:
            return []
        self._is_hearsay[slot], self._changed[slot] = False, self._events
        return self._followers(slot)

    def _weigh(self, slot: Slot, evidence: float) -> list[Slot]:
        against = self._against[slot] + (-evidence if self.factor[slot] else evidence)
        self._against[slot] = against = max(0.0, against)
        if against == 0.0 or against <= self._odds(slot, *self._news(1.0 - self.factor[slot])):
            return []
        self._change(slot)
        self._events += 1
        self._changed[slot] = self._confirmed[slot] = self._events
        return [slot, *self._followers(slot)]

    def _followers(self, slot: Slot) -> list[Slot]:
        """Change what is believed of others if a change of one replica makes that likelier; return their slots."""
        believed = self.factor[slot]
        news, replicas = self._news(believed)
        followers = [
            Slot(other)
            for other, factor in enumerate(self.factor)
            if factor != believed
            and self._confirmed[other]
            and self._against[other] > self._odds(other, news, replicas)
        ]
        for other in followers:
            self._change(other)
            self._is_hearsay[other] = True
        return followers

    def _change(self, slot: int) -> None:
        self._doubted += 1 if self.factor[slot] else -1
        self.factor[slot], self._against[slot], self._is_hearsay[slot] = 1.0 - self.factor[slot], 0.0, False

    def _news(self, factor: float) -> tuple[list[int], int]:
        """Return when replicas showed that they had changed to `factor`, ascending, and how many show anything."""
        rows = zip(self.factor, self._changed, strict=True)
        return sorted([when for each, when in rows if each == factor]), sum(map(bool, self._confirmed))

    def _odds(self, slot: int, news: list[int], replicas: int) -> float:
        """Return the logarithm of the odds of what is believed of a replica, before evidence of its own.

        Args:
            slot: Of it.
            news: When others showed that they had changed to the opposite.
            replicas: How many show anything.
        """
        heard = len(news) - bisect_right(news, self._confirmed[slot])
        chance = max(CHANGES, heard / max(replicas, heard + 1))
        return math.log((1.0 - chance) / chance)


def _density(ratio: float) -> float:
    """Return that of measured over expected seconds, per e-fold."""
    distance = math.log(ratio) / SPREAD
    return _HEIGHT * math.exp(-0.5 * distance * distance)
