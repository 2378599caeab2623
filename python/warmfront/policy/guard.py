"""The guard: does cache affinity pay, by what really happened, and if not, how far to trust it.

Where the rule in force and its rival (placing by load alone) would choose different replicas, one decision in a block
of `1 / share`, at a position drawn at random, is made by the rival. The block then compares what that one request
suffered and imposed with all others of the block, which came at the same time. A test that may be read after every
block (a wealth that multiplies while the rival wins) decides when to lower the credit; once it is below 1 the rule
with full credit takes turns as the rival, so that the way back is tested too.

What is easy to get wrong: outcomes have heavy tails and follow the load of the minute, so two running means are no
test. Here the draw alone makes a block fair: whatever the distribution and however the blocks depend on each other, a
rival that changes nothing is as often better as worse, so the wealth is a martingale. See docs/explanation/guard.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from warmfront.config import GuardConfig

Rival = Literal["load", "cache"]
"""By load alone, or with full credit."""

CREDITS = (0.0, 0.25, 0.5, 1.0)
"""Levels of the credit; a step is to the next one."""
WEALTH_ALARM = 500.0
"""Wealth at which a rival has won: one that is no better gets there once in 500 blocks, at the most."""
SUSPICION = 0.3
"""Evidence from which blocks are `SUSPECT_SHARE` times shorter, so that the rival is tried more often."""
SUSPECT_SHARE = 4
CALM_DOUBLINGS_MAX = 3
"""Blocks double in size with each that full credit wins in a row, this often: trials are not free."""
STAKE_MIN, STAKE_MAX = 0.05, 0.75
"""Share of the wealth that a block may win or lose."""
RESULTS_KEPT = 0.98
"""Share of what former blocks say about the size of results that is kept with each block."""
RESULT_PRIOR = (0.4, 0.8)
"""Four imagined blocks with a mean of 0.1 and a mean square of 0.2: their sum and sum of squares."""
SCALE_SPREADS = 2.0
"""Differences beyond this many mean absolute differences count as this many."""
BLOCKS_OPEN_MAX = 64
"""Blocks that wait for outcomes; the oldest beyond it is given up."""
BLOCKS_TRIED_MIN = 20
"""Blocks that a level of the credit is tried for before it may be raised without proof."""
HOLD_DOUBLINGS_MAX = 4
"""Times that the hold before an untested restoration doubles."""


@dataclass
class _Block:
    """Decisions on which both rules differ, one of them made by the rival."""

    rival: Rival
    size: int
    entered: int = 0
    waiting: int = 0
    """Decisions whose outcome has not come."""
    usual_s: list[float] = field(default_factory=list)
    rival_s: float | None = None


@dataclass
class Wealth:
    """A sequential test by betting: starts at 1, restarts there, multiplies while the results are positive."""

    value: float = 1.0
    _sum: float = RESULT_PRIOR[0]
    _squares: float = RESULT_PRIOR[1]

    def add(self, result: float) -> None:
        """Take one block's result, -1 to 1; the stake depends on former results only."""
        stake = max(STAKE_MIN, min(STAKE_MAX, self._sum / self._squares))
        self.value = min(WEALTH_ALARM, max(1.0, self.value) * (1.0 + stake * result))
        self._sum = RESULTS_KEPT * self._sum + result
        self._squares = RESULTS_KEPT * self._squares + result * result


class Guard:
    """Test and controller of one pool. Pure: times are given, chance comes from the caller."""

    def __init__(self, config: GuardConfig, *, scale_s: float) -> None:
        """Start with full credit.

        Args:
            config: Share of the rival, margin, and hold.
            scale_s: A usual difference between two outcomes, until some were seen.
        """
        self._config = config
        self._size = max(2, round(1.0 / config.share))
        self.credit = 1.0
        self.gain_s = 0.0
        """Seconds by which the rule in force beat load alone, per decision on which they differ; recent mean."""
        self.alarms = 0
        """Times the credit was lowered."""
        self.rivals = 0
        """Decisions made by a rival."""
        self._spread_s, self._cost_s = scale_s, scale_s
        self._lower, self._raise = Wealth(), Wealth()
        self._blocks: dict[int, _Block] = {}
        self._number = self._position = 0
        self._stepped_s = -math.inf
        self._doublings = self._tried = 0
        self._won = 0
        """Blocks in a row that full credit won against load alone."""

    @property
    def rival(self) -> Rival:
        """The rule that the present block tries."""
        block = self._blocks.get(self._number)
        return "load" if block is None else block.rival

    @property
    def is_rivals_turn(self) -> bool:
        """Whether the rival makes the next decision on which both rules differ."""
        block = self._blocks.get(self._number)
        return block is not None and block.entered == self._position

    @property
    def evidence(self) -> float:
        """How far the test against the rule in force has come, from 0 to 1: then the credit falls."""
        return max(0.0, math.log(self._lower.value) / math.log(WEALTH_ALARM))

    def entered(self, rng: Random) -> int:
        """Count a decision on which both rules differ; return the number of its block."""
        self.rivals += self.is_rivals_turn
        block = self._blocks.get(self._number)
        if block is None or block.entered == block.size:
            block = self._begin(rng)
        block.entered += 1
        block.waiting += 1
        return self._number

    def ended(self, number: int, now_s: float, *, by_rival: bool, regret_s: float | None, cost_s: float) -> None:
        """Take an outcome.

        Args:
            number: Block of the decision.
            now_s: Present.
            by_rival: Whether the rival made it.
            regret_s: What it cost, less what the rival was expected to cost there and then. The expectation is the same
                for both, so it takes out of the comparison what made this request dear: its length, a full fleet.
                `None`: not known.
            cost_s: That expectation.
        """
        self._relax(now_s)
        block = self._blocks.get(number)
        if block is None:
            return
        block.waiting -= 1
        self._cost_s += 0.01 * (cost_s - self._cost_s)
        if regret_s is not None:
            if by_rival:
                block.rival_s = regret_s
            else:
                block.usual_s.append(regret_s)
        if block.waiting == 0 and block.entered == block.size:
            del self._blocks[number]
            self._close(block, now_s)

    def _relax(self, now_s: float) -> None:
        """Raise the credit by a step when it was low for long without new evidence against it.

        Single requests cannot show what affinity is worth to a fleet that no longer gathers prefixes, so the way back
        must also be tried without proof. Each relapse doubles the wait.
        """
        if self.credit == 1.0 or now_s - self._stepped_s < self._hold_s():
            return
        if self._tried >= BLOCKS_TRIED_MIN and self.evidence <= SUSPICION:
            self._step(+1, now_s)
            self._doublings = min(HOLD_DOUBLINGS_MAX, self._doublings + 1)

    def _hold_s(self) -> float:
        return self._config.hold_s * 2.0**self._doublings

    def _begin(self, rng: Random) -> _Block:
        """Open a block. Its first decision is never the rival's: it was made before the draw."""
        self._number += 1
        size = self._size << min(CALM_DOUBLINGS_MAX, self._won)
        if self.credit and self.evidence > SUSPICION:
            size = max(2, self._size // SUSPECT_SHARE)
        self._position = rng.randrange(1, size)
        is_lowering = self.credit == 1.0 or (self.credit > 0.0 and self._number % 2 == 1)
        block = self._blocks[self._number] = _Block("load" if is_lowering else "cache", size)
        if len(self._blocks) > BLOCKS_OPEN_MAX:
            del self._blocks[min(self._blocks)]
        return block

    def _close(self, block: _Block, now_s: float) -> None:
        if block.rival_s is None or not block.usual_s:
            return
        self._tried += 1
        sign = 1.0 if block.rival == "load" else -1.0
        against = [sign * (usual_s - block.rival_s) for usual_s in block.usual_s]  # positive: less credit is better
        margin_s, scale_s = self._config.margin * self._cost_s, SCALE_SPREADS * self._spread_s
        self._lower.add(_mean([max(-1.0, min(1.0, (each - margin_s) / scale_s)) for each in against]))
        self._raise.add(_mean([max(-1.0, min(1.0, (-each - margin_s) / scale_s)) for each in against]))
        self._spread_s += 0.05 * (_mean([abs(each) for each in against]) - self._spread_s)
        if block.rival == "load":
            self.gain_s += 0.05 * (-_mean(against) - self.gain_s)
            self._won = self._won + 1 if self.credit == 1.0 and _mean(against) < 0.0 else 0
        if self.credit > 0.0 and self._lower.value >= WEALTH_ALARM:
            self.alarms += 1
            self._step(-1, now_s)
        elif self.credit < 1.0 and self._raise.value >= WEALTH_ALARM:
            self._doublings = 0
            self._step(+1, now_s)

    def _step(self, direction: int, now_s: float) -> None:
        """Go to another level. What was tried under the former one says nothing about this one."""
        if direction < 0 and now_s - self._stepped_s > 2.0 * self._hold_s():
            self._doublings = 0
        level = CREDITS.index(self.credit) + direction
        self.credit = CREDITS[max(0, min(len(CREDITS) - 1, level))]
        self._lower, self._raise = Wealth(), Wealth()
        self._blocks.clear()
        self._stepped_s, self._tried, self._won = now_s, 0, 0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
