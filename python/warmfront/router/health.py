"""Which replicas of a pool get new work, judged by the requests that were sent to them.

Each replica has a circuit. Failures in a row, or a large share of failures, open it: the replica gets nothing until its
time is over, then one request of live traffic at a time, and full service again when one of them succeeds. A frozen
engine (its streams stand still while another replica could do the work) opens it too, and any progress closes it.
Where no stream could tell, the counters of the engine's own metrics do: as long as they move, it lives.
A refusal (429, 503) is no failure: the replica is left alone for as long as it asks. A replica that comes back starts
with few requests at once.

What is easy to get wrong: taking replicas away makes the others fuller. So at most a share of those that are ready is
ever taken away, and never the last one; the rest stay in service whatever their circuit says. Nothing here has a clock:
times come with the events. What clients do wrong (4xx) never counts, neither for nor against a replica.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from warmfront.config import HealthConfig
from warmfront.types import Request, RequestId, Slot

SHARE_WINDOW_S = 30.0
"""Time constant over which successes and failures are remembered for their share."""
CHECK_INTERVAL_S = 0.25
"""How often streams are checked for a standstill."""
GAP_S = 2.0
"""A longer time without a check says that we stood still, not the engines."""
DOUBT = 3.0
"""Factor on the time after which a replica counts as frozen, while its speed is not known or others use it too, or only
its counters can tell: they are read once a second, and a long prefill moves them at its end."""
ROWS_MAX = 16
"""Lists of admitted rows that are kept at once."""
FROZEN = "frozen"

State = Literal["serving", "paused", "slow_start", "open", "half_open"]
STATES: tuple[State, ...] = get_args(State)


class Verdict(NamedTuple):
    """How a replica stands."""

    state: State
    reason: str


SERVING = Verdict("serving", "")


class Stretch(NamedTuple):
    """What a replica has in hand, for telling slow from frozen."""

    pending_s: float
    """Predicted seconds of prefill that it still has to do."""
    is_doubtful: bool
    """Its speed is not known, or others send it work as well."""
    tells_work: bool = False
    """Counters of its work were read just now."""


@dataclass(slots=True)
class _Vitals:
    """What is remembered of one replica. Times in seconds."""

    circuit: Literal["closed", "open", "half_open"] = "closed"
    reason: str = ""
    row: int = 0
    """Failures in a row."""
    good: float = 0.0
    bad: float = 0.0
    counted_s: float = 0.0
    """When `good` and `bad` were last brought up to date."""
    opened: int = 0
    """Times opened without a long healthy time between."""
    changed_s: float = -math.inf
    """When the circuit last opened or closed."""
    until_s: float = 0.0
    """Until when it is open."""
    paused_until_s: float = -math.inf
    slow_since_s: float = -math.inf
    probe: RequestId | None = None
    """The one request that a half-open circuit has let through."""
    streams: int = 0
    """Streams in flight."""
    progress_s: float = 0.0
    """When one of them last moved, or the first of them was sent."""
    plain: int = 0
    """Other requests in flight: nothing of their answers is seen before the end."""
    worked_s: float = 0.0
    """When the replica last showed that it works, by its counters or an answer, or the first of them was sent."""


class Health:
    """The circuits of one pool. Called by the router with what happened; see the module text."""

    def __init__(self, config: HealthConfig) -> None:
        self.config = config
        self._vitals: dict[Slot, _Vitals] = {}
        self._watched: set[Slot] = set()
        """Ready rows that are not in full service; empty nearly always."""
        self._told: dict[Slot, Verdict] = {}
        """What was last reported of rows that were not in full service."""
        self._ready: list[Slot] = []
        self._present: frozenset[Slot] = frozenset()
        """The same."""
        self._rows: dict[frozenset[Slot], list[Slot]] = {}
        """The ready rows without some of them, as lately asked for: made anew at each event, they take most of its time
        in a large fleet."""
        self._serves = False
        """The pool has sent a request: whoever joins now joins a running fleet."""
        self._checked_s = -math.inf
        self.opens: list[tuple[Slot, str]] = []
        """Circuits that opened since the caller last emptied this, with the reason."""

    # -- who is there

    def follow(self, ready: Sequence[Slot], joined: Sequence[Slot], now_s: float) -> None:
        """Take over which rows are ready.

        Args:
            ready: Ascending.
            joined: Those of them that hold another replica than before.
            now_s: Present.
        """
        before = self._present
        self._ready, self._present = list(ready), frozenset(ready)
        self._rows.clear()
        for slot in joined:
            self.leave(slot)
        for slot in ready:
            is_back = slot not in before or slot in joined
            vitals = self._vitals.setdefault(slot, _Vitals(progress_s=now_s, counted_s=now_s))
            if is_back and self._serves:
                self._close(slot, vitals, now_s)
        self._watched &= self._present

    def leave(self, slot: Slot) -> None:
        """Forget the replica of a row."""
        self._vitals.pop(slot, None)
        self._watched.discard(slot)

    # -- what happened

    def sent(self, slot: Slot, request: Request, now_s: float) -> None:
        """Note that a request goes to a replica."""
        vitals = self._vitals.get(slot)
        if vitals is None:
            return
        self._serves = True
        if request.stream:
            if vitals.streams == 0:
                vitals.progress_s = now_s
            vitals.streams += 1
        else:
            if vitals.plain == 0:
                vitals.worked_s = now_s
            vitals.plain += 1
        if vitals.circuit == "half_open" and vitals.probe is None:
            vitals.probe = request.id

    def ended(self, slot: Slot, request: Request) -> None:
        """Note that a request has left a replica, after its outcome was told."""
        vitals = self._vitals.get(slot)
        if vitals is None:
            return
        if request.stream and vitals.streams:
            vitals.streams -= 1
        elif not request.stream and vitals.plain:
            vitals.plain -= 1
        if vitals.probe == request.id:
            vitals.probe = None

    def progressed(self, slot: Slot, now_s: float) -> None:
        """Note that a stream of the replica moved."""
        vitals = self._vitals.get(slot)
        if vitals is None:
            return
        vitals.progress_s = now_s
        if vitals.circuit != "closed" and vitals.reason == FROZEN:
            self._close(slot, vitals, now_s)

    def worked(self, slot: Slot, now_s: float) -> None:
        """Note that the replica works: its counters moved, or it answered. Of its streams that says nothing."""
        vitals = self._vitals.get(slot)
        if vitals is None:
            return
        vitals.worked_s = now_s
        if vitals.circuit != "closed" and vitals.reason == FROZEN and not vitals.streams:
            self._close(slot, vitals, now_s)

    def succeeded(self, slot: Slot, request: Request, now_s: float) -> None:
        """Note an answer without error: the first token of a stream, the end of anything else."""
        vitals = self._vitals.get(slot)
        if vitals is None:
            return
        vitals.row = 0
        self._count(vitals, now_s, good=1.0)
        if vitals.circuit == "half_open" and vitals.probe == request.id:
            self._close(slot, vitals, now_s)

    def failed(self, slot: Slot, request: Request, reason: str, now_s: float) -> None:
        """Note an attempt that the replica did not answer, or answered with a fault of its own."""
        vitals = self._vitals.get(slot)
        if vitals is None or vitals.circuit == "open":
            return
        vitals.row += 1
        self._count(vitals, now_s, bad=1.0)
        config = self.config
        is_mostly_bad = vitals.bad >= config.failures_min and (
            vitals.bad >= config.failure_share * (vitals.bad + vitals.good)
        )
        is_probe = vitals.circuit == "half_open" and vitals.probe == request.id
        if is_probe or (vitals.circuit == "closed" and (vitals.row >= config.failures_in_a_row or is_mostly_bad)):
            self._open(slot, vitals, reason, now_s)

    def refused(self, slot: Slot, retry_after_s: float | None, now_s: float) -> None:
        """Note that the replica has no room: it is left alone for a moment."""
        vitals = self._vitals.get(slot)
        if vitals is None:
            return
        pause_s = self.config.pause_s if retry_after_s is None else min(retry_after_s, self.config.pause_s_max)
        vitals.paused_until_s = max(vitals.paused_until_s, now_s + pause_s)
        self._watch(slot)

    # -- what follows

    def check(self, now_s: float, stretches: Sequence[Stretch]) -> None:
        """Open the circuits of replicas that stand still; called when `due`.

        Only while another replica could take over: when all stand still, the cause is not one engine.

        Args:
            now_s: Present.
            stretches: What each replica has in hand, by slot.
        """
        elapsed_s = now_s - self._checked_s
        self._checked_s = now_s
        if elapsed_s > GAP_S:
            for vitals in self._vitals.values():
                vitals.progress_s = max(vitals.progress_s, now_s)
                vitals.worked_s = max(vitals.worked_s, now_s)
            return
        still = [slot for slot in self._ready if self._stands_still(self._vitals[slot], stretches[slot], now_s)]
        if not still or len(still) == len(self._ready):
            return
        for slot in still:
            if self._vitals[slot].circuit != "open":
                self._open(slot, self._vitals[slot], FROZEN, now_s)

    def due(self, now_s: float) -> bool:
        """Whether `check` has something to do."""
        return now_s - self._checked_s >= CHECK_INTERVAL_S

    @property
    def watches(self) -> bool:
        """Whether any replica is not in full service: `admitted` may change with time and with each dispatch."""
        return bool(self._watched)

    def admitted(self, in_flight: Sequence[int], now_s: float) -> list[Slot]:
        """Return the ready rows that may get new work.

        Args:
            in_flight: Requests in flight, by slot.
            now_s: Present.

        Returns:
            All but at most `ejected_share_max` of the ready rows, and one at least. Rows in slow start that have as
            much in flight as they may rest too, while another one is there. Ascending.
        """
        ready = self._ready
        if not self._watched:
            return ready
        self._pass_time(now_s)
        unwanted = sorted(
            (vitals.circuit == "closed", vitals.changed_s, slot)
            for slot, vitals in ((slot, self._vitals[slot]) for slot in self._watched)
            if self._is_unwanted(vitals, now_s)
        )
        ejected = {slot for _, _, slot in unwanted[: self.ejected_max()]}
        admitted = self._without(ejected)
        slow = {slot for slot in self._watched if slot not in ejected and self.is_slow(slot, now_s)}
        if not slow:
            return admitted
        most = max(map(in_flight.__getitem__, self._without(ejected | slow)), default=0)
        filled = {slot for slot in slow if in_flight[slot] >= self._limit(self._vitals[slot], most, now_s)}
        return self._without(ejected | filled) if len(filled) < len(admitted) else admitted

    def ejected_max(self) -> int:
        """Count how many of the ready replicas may be taken away at once."""
        return min(int(self.config.ejected_share_max * len(self._ready)), max(0, len(self._ready) - 1))

    def verdict(self, slot: Slot, now_s: float) -> Verdict:
        """Say how a replica stands."""
        vitals = self._vitals.get(slot)
        if vitals is None or slot not in self._watched:
            return SERVING
        if vitals.circuit != "closed":
            return Verdict(vitals.circuit, vitals.reason)
        if now_s < vitals.paused_until_s:
            return Verdict("paused", "it asked to be left alone")
        if now_s < vitals.slow_since_s + self.config.slow_start_s:
            return Verdict("slow_start", "it has come back")
        return SERVING

    def is_slow(self, slot: Slot, now_s: float) -> bool:
        """Whether a replica has come back and may not have its full share yet."""
        return self.verdict(slot, now_s).state == "slow_start"

    @property
    def has_news(self) -> bool:
        """Whether `changes` may return something."""
        return bool(self._watched or self._told or self.opens)

    def changes(self, now_s: float) -> dict[Slot, Verdict]:
        """Return the verdicts that are others than when last asked, by slot."""
        present = self.limited(now_s)
        both = sorted({*present, *self._told})
        changed = {slot: present.get(slot, SERVING) for slot in both if present.get(slot) != self._told.get(slot)}
        self._told = present
        return changed

    def limited(self, now_s: float) -> dict[Slot, Verdict]:
        """Return the verdicts of all replicas that are not in full service, by slot."""
        verdicts = {slot: self.verdict(slot, now_s) for slot in sorted(self._watched)}
        return {slot: verdict for slot, verdict in verdicts.items() if verdict is not SERVING}

    def _without(self, slots: set[Slot]) -> list[Slot]:
        """Return the ready rows but some: the very list of before while those are the same."""
        key = frozenset(slots)
        rows = self._rows.get(key)
        if rows is None:
            if len(self._rows) >= ROWS_MAX:
                self._rows.clear()
            rows = self._rows[key] = [slot for slot in self._ready if slot not in key]
        return rows

    # -- one circuit

    def _watch(self, slot: Slot) -> None:
        """Let a row be judged from now on; one that is not ready gets nothing anyway, and is no share of the rest."""
        if slot in self._present:
            self._watched.add(slot)

    def _open(self, slot: Slot, vitals: _Vitals, reason: str, now_s: float) -> None:
        if vitals.circuit == "closed" and now_s - vitals.changed_s > self.config.open_s_max:
            vitals.opened = 0
        open_s = min(self.config.open_s * 2.0 ** min(vitals.opened, 32), self.config.open_s_max)
        vitals.circuit, vitals.reason, vitals.probe = "open", reason, None
        vitals.opened += 1
        vitals.changed_s, vitals.until_s = now_s, now_s + open_s
        self._watch(slot)
        self.opens.append((slot, reason))

    def _close(self, slot: Slot, vitals: _Vitals, now_s: float) -> None:
        vitals.circuit, vitals.reason, vitals.probe = "closed", "", None
        vitals.row, vitals.good, vitals.bad = 0, 0.0, 0.0
        vitals.changed_s = vitals.slow_since_s = vitals.progress_s = vitals.worked_s = now_s
        self._watch(slot)

    def _pass_time(self, now_s: float) -> None:
        for slot in list(self._watched):
            vitals = self._vitals[slot]
            # What is there tells; nobody else need wait there.
            awaits_progress = vitals.reason == FROZEN and vitals.streams + vitals.plain > 0
            if vitals.circuit == "open" and now_s >= vitals.until_s and not awaits_progress:
                vitals.circuit = "half_open"
                vitals.progress_s = vitals.worked_s = now_s
            if self.verdict(slot, now_s) is SERVING:
                self._watched.discard(slot)

    def _is_unwanted(self, vitals: _Vitals, now_s: float) -> bool:
        is_probed = vitals.circuit == "half_open" and vitals.probe is not None
        return vitals.circuit == "open" or is_probed or now_s < vitals.paused_until_s

    def _limit(self, vitals: _Vitals, most: int, now_s: float) -> int:
        """Requests at once, growing to what the busiest of the others has."""
        share = (now_s - vitals.slow_since_s) / self.config.slow_start_s
        return max(1, math.ceil(share * most))

    def _stands_still(self, vitals: _Vitals, stretch: Stretch, now_s: float) -> bool:
        limit_s = max(self.config.frozen_after_s, self.config.frozen_prefill_factor * stretch.pending_s)
        if vitals.streams:
            return now_s - vitals.progress_s > (DOUBT * limit_s if stretch.is_doubtful else limit_s)
        return vitals.plain > 0 and stretch.tells_work and now_s - vitals.worked_s > DOUBT * limit_s

    @staticmethod
    def _count(vitals: _Vitals, now_s: float, *, good: float = 0.0, bad: float = 0.0) -> None:
        if vitals.good or vitals.bad:
            kept = math.exp(min(0.0, vitals.counted_s - now_s) / SHARE_WINDOW_S)
            vitals.good, vitals.bad = vitals.good * kept, vitals.bad * kept
        vitals.good, vitals.bad, vitals.counted_s = vitals.good + good, vitals.bad + bad, now_s
