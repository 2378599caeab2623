"""The ledger: what is in flight at each replica, one `Pool` per model.

Every dispatch is charged to a row and discharged in the same amounts, so all columns are zero when nothing is in
flight; sums of floats are set to zero, not subtracted to it, when their row has no request left. What is easy to get
wrong: a replica may leave while it serves, and its slot may be given to another one. Its requests are then detached
from the row, so that their ends discharge nothing.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from random import Random

from msgspec import Struct

from warmfront.config import CostConfig, HealthConfig
from warmfront.policy.adapters import Adapters
from warmfront.policy.affinity import stable_hash
from warmfront.policy.base import RATE_WINDOW_S, REBASE_AFTER_S, Ended, Fleet
from warmfront.policy.estimators import AGE_BUCKETS, BusyPeriod, Credit, Learned
from warmfront.policy.latency import POOL_SAMPLES_MIN
from warmfront.policy.loads import NOTHING, Loads
from warmfront.policy.reuse import Trial
from warmfront.router.accuracy import Accuracy
from warmfront.router.health import Health, Stretch
from warmfront.router.turns import Waiting
from warmfront.types import Choice, EngineLoad, Finished, Overlap, PoolState, ReplicaState, Request, RequestId, Slot

logger = logging.getLogger(__name__)

REPORT_S_MAX = 5.0
"""Older reports of engines say nothing of the present."""
NET_S_IGNORED = 0.002
"""Part of the way there and back that counts as none: what is measured of it is mostly the server's own pauses, and
ours, which must not tell equal replicas apart."""
SCRAPE_JITTER_S = 0.05
"""Two ages of one scrape, told at different times, agree within this."""
MEMORY_DELAYS = 0.9
"""Share of KV memory in use above which prefill times say more about memory than about prefill."""
PREFILL_SAMPLES_MIN = 3
"""Measured prefills before the predicted ones say how long a replica may be silent."""
BESIDE = 0.5
"""Part of an answer during which what runs now still runs: of requests as long as it, half are over on average. Who
comes later comes to all replicas alike. It also halves what chance in the slopes of equal replicas does."""
CERTAIN_SHARE_MAX = 0.1
"""Part of a prompt that may be expected in the cache where answers do not tell, if its prefill is to teach."""
SLOTS_MAX = 65_536
"""Slots beyond this are ignored: no fleet has them, a broken message might."""


Held = tuple[float, int, int, int, int]
"""What a choice was expected to hold of a prompt: seconds since it was last sent there (negative: never), and its
leading tokens by events alone, on the device, there or in host memory, in any tier."""


def loads_of(held: Held, cached_tokens: int) -> Loads:
    """Return what is loaded from slower tiers where so many tokens are found in all."""
    _, _, device, host, disk = held
    if disk <= device:
        return NOTHING
    found = min(cached_tokens, disk)
    from_host, from_disk = max(0, min(found, host) - device), max(0, found - max(host, device))
    return Loads(from_host, from_disk) if from_host or from_disk else NOTHING


class Priced(Struct):
    """Seconds of prefill at a replica, by what may turn out of it."""

    found_s: float = 0.0
    """If it reuses what it holds."""
    missed_s: float = 0.0
    """If it does not."""

    def add(self, found_s: float, missed_s: float) -> None:
        """Add to both; never below 0."""
        self.found_s = max(0.0, self.found_s + found_s)
        self.missed_s = max(0.0, self.missed_s + missed_s)

    def expected(self, *, is_reused: bool) -> float:
        """Return what is expected of a replica that reuses, or of one that does not."""
        return self.found_s if is_reused else self.missed_s


class Flight(Struct):
    """One dispatched request and what it is charged with."""

    request: Request
    attempts: int
    tried: list[Slot]
    """Replicas that could not be reached in earlier attempts."""
    choices: list[Choice]
    held: list[Held]
    """For each choice, what it was expected to hold before this dispatch."""
    slot: Slot | None = None
    """Row that is charged; `None`: the replica is gone."""
    predicted_tokens: int = 0
    """Cached tokens expected there."""
    credit_bucket: int = AGE_BUCKETS
    """Row of the reuse credit that this expectation was weighed with."""
    is_certain: bool = True
    """What it will compute is known before its answer tells."""
    loads: Loads = NOTHING
    """Expected to be loaded there."""
    is_confirmed: bool = True
    """Events say that they are there."""
    is_trusted: bool = True
    """It was charged as if the replica reuses what it holds."""
    trial: Trial | None = None
    """What its first token said of reuse."""
    sample: BusyPeriod | None = None
    """Busy period of prefill that waits for the cached tokens of this answer."""
    sent_s: float = 0.0
    first_token_s: float | None = None
    is_prefilling: bool = False
    new_tokens: int = 0
    found_s: float = 0.0
    """Seconds of prefill if the replica reuses what it holds."""
    missed_s: float = 0.0
    """The same if it does not."""
    output_tokens: float = 0.0
    context_tokens: float = 0.0
    weight: float = 1.0

    @property
    def tokens(self) -> float:
        """What its flow is charged with: tokens to compute and to produce."""
        return self.new_tokens + self.output_tokens

    def loaded(self, slot: Slot, cached_tokens: int) -> Loads:
        """Return what `slot` loaded if it found so many tokens; what it is no choice for was not expected there."""
        held = next((held for choice, held in zip(self.choices, self.held, strict=True) if choice.slot == slot), None)
        found = NOTHING if held is None else loads_of(held, cached_tokens)
        return found._replace(adapters=self.loads.adapters) if self.loads.adapters else found


@dataclass
class Pool:
    """A pool's columns, its requests in flight and what it has learned."""

    name: str
    fleet: Fleet
    health: Health
    flights: dict[RequestId, Flight] = field(default_factory=dict)
    touched: set[Slot] = field(default_factory=set)
    """Rows that changed since metrics were last published."""
    reloaded: set[Slot] = field(default_factory=set)
    """Rows whose readiness, engine load or reuse may have changed since then."""
    rejudged: set[Slot] = field(default_factory=set)
    """Rows whose health changed since then."""
    saturated: dict[Slot, int] = field(default_factory=dict)
    """Rows whose engine reports a queue of its own and full memory, and the requests in flight at which it has room."""
    reported_s: float = 0.0
    """When that was last told."""
    scraped: set[Slot] = field(default_factory=set)
    """Rows of which the last state of the fleet brought a new report of the engine, and not the one before again."""
    held_s: float = -math.inf
    """When a request could last not be placed."""
    releases: int = 0
    """Grows whenever KV memory may have become free, or with the rows that may be chosen."""
    published: dict[str, float] = field(default_factory=dict)
    """Gauges of the queue as they were last published."""
    accuracy: dict[str, Accuracy] = field(default_factory=dict)
    """By replica id."""
    replicas: dict[Slot, ReplicaState] = field(default_factory=dict)
    state: PoolState | None = None
    ready: list[Slot] = field(default_factory=list)
    """Rows that the control process finds ready, ascending."""
    lacking: dict[str, set[Slot]] = field(default_factory=dict)
    """Model → rows that do not serve it, for models that some replica lacks: adapters are loaded one by one."""
    _peaks: dict[Slot, tuple[int, int]] = field(default_factory=dict)
    _reports: dict[Slot, tuple[EngineLoad, float]] = field(default_factory=dict)
    """The last report of each row, and the moment it speaks of."""
    _worked: dict[Slot, tuple[float, float]] = field(default_factory=dict)
    """Counter of an engine's work, and when it was read last."""
    _due: list[tuple[float, RequestId]] = field(default_factory=list)
    _active_tokens: list[int] = field(default_factory=list)
    """Tokens of distinct blocks in use, by slot, as the last overlap told."""
    _hidden: dict[Slot, int] = field(default_factory=dict)
    """Pending requests whose first token will not be seen."""
    _pending: list[Priced] = field(default_factory=list)
    """Prefill seconds without a first token, by slot."""
    _work: list[Priced] = field(default_factory=list)
    """Prefill seconds dispatched, decayed as in the fleet."""
    _weights: list[float] = field(default_factory=list)
    """Weights of our requests in flight, by slot."""

    @classmethod
    def create(
        cls, name: str, *, config: CostConfig, health: HealthConfig | None = None, seed: int, choices_max: int
    ) -> Pool:
        """Make an empty pool whose random numbers depend on the seed and its name only."""
        fleet = Fleet(name, rng=Random(f"{seed}:{name}"), learned=Learned(config), adapters=Adapters(config))
        fleet.choices_max, fleet.priority_step = choices_max, config.priority_step
        return cls(name, fleet, Health(health or HealthConfig()))

    # -- who is there

    def follow(self, state: PoolState) -> None:
        """Take over the replicas as they are now."""
        self.state = state
        self.releases += 1
        present = {each.slot: each for each in state.replicas if 0 <= each.slot < SLOTS_MAX}
        for slot in [slot for slot in self.replicas if slot not in present]:
            self._leave(slot)
        self.scraped.clear()
        joined = [slot for slot, replica in present.items() if self.fleet_id(slot) != replica.replica.id]
        for slot, replica in present.items():
            self._place(slot, replica)
        self.replicas = present
        self.lacking = {}
        for slot, each in present.items():
            for model in each.replica.lacks:
                self.lacking.setdefault(model, set()).add(slot)
        self.ready = [slot for slot in sorted(present) if self.fleet.ready[slot]]
        self.health.follow(self.ready, joined, self.fleet.now_s)
        self.fleet.allow(self.health.admitted(self.fleet.in_flight, self.fleet.now_s))

    def serving(self, model: str) -> list[Slot]:
        """Return the rows that may be chosen and serve `model`; the very list of the fleet when all of them do.

        Where only replicas without new work serve it, they do: none of them is the model's last one taken away.
        """
        lacking = self.lacking.get(model)
        if not lacking:
            return self.fleet.eligible
        able = [slot for slot in self.fleet.eligible if slot not in lacking]
        return able or [slot for slot in self.ready if slot not in lacking]

    def untried(self, model: str, tried: list[Slot]) -> list[Slot]:
        """Return the rows for a request that failed at others: of `serving`, or else those still in slow start.

        What limits them is a preference; the request has no other place to go.
        """
        rows = [slot for slot in self.serving(model) if slot not in tried]
        if rows:
            return rows
        others = {*tried, *self.lacking.get(model, ())}
        return [slot for slot in self.ready if slot not in others and self.health.is_slow(slot, self.fleet.now_s)]

    def examine(self, now_s: float) -> None:
        """Judge what prefills tell, look for replicas that stand still, and let the policy choose among the others."""
        self._rebelieve(self.fleet.learned.reuse.judge(now_s))
        if self.flights and self.health.due(now_s):
            fleet = self.fleet
            is_young = fleet.learned.prefill.samples < PREFILL_SAMPLES_MIN
            stretches = [
                Stretch(pending_s, is_young or foreign > 0.0, self._tells_work(Slot(slot), now_s))
                for slot, (pending_s, foreign) in enumerate(zip(fleet.pending_s, fleet.foreign, strict=True))
            ]
            self.health.check(now_s, stretches)
        if self.health.watches:
            self.admit(now_s)

    def admit(self, now_s: float) -> None:
        """Bring the rows that may be chosen up to date."""
        admitted = self.health.admitted(self.fleet.in_flight, now_s)
        if admitted is not self.fleet.eligible and admitted != self.fleet.eligible:
            self.fleet.allow(admitted)
            self.releases += 1  # a replica that comes back may have room for whoever waits for memory

    def slots_of(self, names: Collection[str]) -> list[Slot]:
        """Return the rows of replicas by id, those that are there."""
        return [slot for slot in self.replicas if self.fleet.id[slot] in names] if names else []

    def fleet_id(self, slot: Slot) -> str | None:
        """Return the id of the replica in a row; `None`: there is none."""
        return self.fleet.id[slot] if slot < self.fleet.slots else None

    def leave_all(self) -> None:
        """Detach everything: the pool is gone."""
        for slot in list(self.replicas):
            self._leave(slot)
        self.replicas = {}
        self.ready = []
        self.fleet.allow([])

    def _place(self, slot: Slot, state: ReplicaState) -> None:
        fleet, replica = self.fleet, state.replica
        while fleet.slots <= slot:
            self._grow()
        if fleet.id[slot] != replica.id:
            if fleet.id[slot] is not None:
                self._leave(slot)
            fleet.id[slot], fleet.hash[slot] = replica.id, stable_hash(replica.id)
            fleet.membership += 1
            fleet.learned.reset(slot)
            fleet.adapters.reset(slot)
        fleet.ready[slot] = replica.ready
        fleet.exact[slot] = state.events.state == "live"
        fleet.block_size[slot] = replica.block_size or state.events.block_size
        fleet.capacity_tokens[slot] = replica.capacity_tokens
        fleet.kv_usage[slot] = replica.load.kv_usage
        fleet.net_s[slot] = max(0.0, (replica.load.rtt_s or 0.0) - NET_S_IGNORED)
        self.replicas[slot] = state
        if self._is_new_report(slot, replica.load):
            self.scraped.add(slot)
            self._take_report(slot, replica.load)
        self.reloaded.add(slot)
        self._changed(slot)

    def _is_new_report(self, slot: Slot, load: EngineLoad) -> bool:
        """Whether a load is not the one that was told before: states of the fleet come more often than scrapes."""
        now_s = self.fleet.now_s
        if load.age_s is None:
            return True
        before, moment_s = self._reports.get(slot, (None, -math.inf))
        if load == before or now_s - load.age_s <= moment_s + SCRAPE_JITTER_S:
            return False
        self._reports[slot] = (load, now_s - load.age_s)
        return True

    def _take_report(self, slot: Slot, load: EngineLoad) -> None:
        is_fresh = (load.age_s or 0.0) <= REPORT_S_MAX
        if is_fresh and load.running is not None and load.waiting is not None and load.kv_usage is not None:
            self.fleet.learned.sequences.seen(slot, running=load.running, waiting=load.waiting, kv_usage=load.kv_usage)
        self.fleet.foreign[slot] = self._foreign(slot, load.running, load.waiting)
        if load.worked_tokens is None:
            return
        before, _ = self._worked.get(slot, (None, 0.0))
        self._worked[slot] = (load.worked_tokens, self.fleet.now_s - (load.age_s or 0.0))
        if before is not None and load.worked_tokens != before:
            self.health.worked(slot, self.fleet.now_s)

    def _tells_work(self, slot: Slot, now_s: float) -> bool:
        """Whether the counters of an engine's work were read just now."""
        _, read_s = self._worked.get(slot, (0.0, -math.inf))
        return now_s - read_s <= REPORT_S_MAX

    def _foreign(self, slot: Slot, running: float | None, waiting: float | None) -> float:
        """Requests at the engine that are not ours.

        A scrape is up to a second old, so it is held against the most we had in flight since the one before last.
        """
        older, recent = self._peaks.get(slot, (0, 0))
        now = self.fleet.in_flight[slot]
        self._peaks[slot] = (recent, now)
        if running is None and waiting is None:
            return 0.0
        return max(0.0, (running or 0.0) + (waiting or 0.0) - max(older, recent, now))

    def _leave(self, slot: Slot) -> None:
        for flight in self.flights.values():
            if flight.slot == slot:
                flight.slot = None
                flight.is_prefilling = False
        fleet = self.fleet
        name = fleet.id[slot]
        if name is not None:
            self.accuracy.pop(name, None)
        fleet.id[slot], fleet.hash[slot] = None, 0
        fleet.ready[slot] = fleet.exact[slot] = False
        fleet.block_size[slot] = fleet.capacity_tokens[slot] = fleet.kv_usage[slot] = None
        fleet.in_flight[slot] = fleet.pending[slot] = fleet.pending_tokens[slot] = fleet.last_used[slot] = 0
        for column in (
            fleet.net_s,
            fleet.foreign,
            fleet.requests,
            fleet.weight,
            fleet.pending_weight,
            fleet.pending_s,
            fleet.context_tokens,
            fleet.output_tokens,
        ):
            column[slot] = 0.0
        fleet.arrivals[slot] = fleet.work_s[slot] = 0.0
        self._pending[slot], self._work[slot] = Priced(), Priced()
        fleet.learned.reuse.reset(slot)  # or a row without a replica would be judged, and told
        fleet.membership += 1
        self.health.leave(slot)
        self._peaks.pop(slot, None)
        self._reports.pop(slot, None)
        self._worked.pop(slot, None)
        self._hidden.pop(slot, None)
        self._weights[slot] = 0.0
        self.touched.discard(slot)
        self.reloaded.discard(slot)
        self.rejudged.discard(slot)

    def _grow(self) -> None:
        fleet = self.fleet
        fleet.slot.append(Slot(fleet.slots))
        fleet.id.append(None)
        fleet.hash.append(0)
        for flags in (fleet.ready, fleet.exact):
            flags.append(False)
        for unknown in (fleet.block_size, fleet.capacity_tokens):
            unknown.append(None)
        fleet.kv_usage.append(None)
        for counts in (fleet.in_flight, fleet.pending, fleet.pending_tokens, fleet.last_used):
            counts.append(0)
        for sums in (fleet.net_s, fleet.foreign, fleet.pending_s, fleet.context_tokens, fleet.output_tokens):
            sums.append(0.0)
        for rates in (
            fleet.arrivals,
            fleet.work_s,
            fleet.busy_since_s,
            fleet.requests,
            fleet.weight,
            fleet.pending_weight,
            fleet.admission_s,
            fleet.next_step_s,
            fleet.next_step_token_s,
        ):
            rates.append(0.0)
        self._weights.append(0.0)
        self._pending.append(Priced())
        self._work.append(Priced())
        fleet.learned.grow()
        fleet.adapters.grow()

    # -- what is in flight

    def dispatch(self, waiting: Waiting, choices: list[Choice], overlap: Overlap, now_s: float) -> Flight:
        """Charge the first choice of a request, and return what it is charged with."""
        request, ages_s, confirmed = waiting.request, overlap.age_s, overlap.confirmed
        device, host, disk = overlap.device, overlap.host, overlap.disk
        held = [
            (ages_s[slot], confirmed[slot], device[slot], host[slot], disk[slot])
            for slot in [choice.slot for choice in choices]
        ]
        flight = Flight(request, waiting.attempts + 1, waiting.tried, choices, held)
        self.flights[request.id] = flight
        self._active_tokens = overlap.active_tokens
        if request.route == "prefix" and request.basis != "none":
            self.fleet.learned.regret.follow(now_s, overlap.evicted_blocks, overlap.regretted_blocks)
        self._charge(flight, choices[0].slot, now_s)
        self.fleet.shares.add(request.flow, flight.tokens, now_s)
        return flight

    def move(self, flight: Flight, slot: Slot, now_s: float) -> bool:
        """Charge another choice instead; return whether its replica is there."""
        self._discharge(flight)
        if slot not in self.replicas:
            return False
        self._charge(flight, slot, now_s)
        return True

    def first_token(self, flight: Flight, now_s: float) -> None:
        """Release the prefill charge."""
        slot = flight.slot
        if slot is None or not flight.is_prefilling:
            if flight.first_token_s is None:
                flight.first_token_s = now_s
            return
        last = self.fleet.pending[slot] == 1
        if flight.request.stream:
            usable, step_s = not self._hidden.get(slot) and not self._crowded(slot), self._step_s(slot)
            flight.trial = self._try_reuse(flight, slot, now_s, is_usable=usable, step_s=step_s)
            is_reused = bool(self.fleet.learned.reuse.factor[slot])
            flight.sample = self.fleet.learned.first_token(
                slot,
                now_s,
                new_tokens=flight.new_tokens,
                prompt_tokens=flight.request.prompt_tokens,
                last=last,
                usable=usable,
                step_s=step_s,
                # What was computed while the engine ceased to reuse, or began to, is known when the answer tells.
                certain=flight.is_certain and flight.is_trusted == is_reused,
                loads=flight.loads,
            )
        else:
            self.fleet.learned.abandoned(slot, last=last)
        self._release_prefill(flight, slot)
        self.fleet.busy_since_s[slot] = now_s
        flight.first_token_s = now_s

    def reported(self, flight: Flight, slot: Slot, cached_tokens: int, now_s: float) -> None:
        """Compare what an answer reports as cached with what was predicted."""
        learned, predicted, trial = self.fleet.learned, flight.predicted_tokens, flight.trial
        self._rebelieve(learned.reuse.judge(now_s))
        if trial is not None and predicted:
            self._rebelieve(learned.reuse.reported(slot, trial, is_found=2 * cached_tokens >= predicted))
        if trial is None or trial.is_reused:  # else it is the engine that reuses nothing, and no part of η
            learned.credit.learn(
                flight.credit_bucket,
                exact=self.fleet.exact[slot],
                predicted_tokens=predicted,
                reported_tokens=cached_tokens,
            )

    def _try_reuse(self, flight: Flight, slot: Slot, now_s: float, *, is_usable: bool, step_s: float) -> Trial:
        """Let the time of a prefill tell whether the replica reuses what events say that it holds."""
        fleet, prefill, tokens = self.fleet, self.fleet.learned.prefill, flight.request.prompt_tokens
        self._rebelieve(fleet.learned.reuse.judge(now_s))
        return fleet.learned.reuse.first_token(
            slot,
            now_s,
            found_s=prefill.seconds(slot, max(1, tokens - flight.predicted_tokens), tokens),
            missed_s=prefill.seconds(slot, max(1, tokens), tokens),
            step_s=step_s,
            is_telling=flight.is_confirmed and flight.loads is NOTHING and prefill.samples >= POOL_SAMPLES_MIN,
            is_usable=is_usable and not fleet.foreign[slot] and not fleet.admission_s[slot],
        )

    def _rebelieve(self, slots: Sequence[Slot]) -> None:
        """Take note that something else is believed of the reuse of some replicas."""
        for slot in slots:
            if self.fleet.learned.reuse.factor[slot]:
                logger.info("pool %s: replica %s reuses again what it holds", self.name, self.fleet.id[slot])
            else:
                logger.warning(
                    "pool %s: replica %s takes as long for prompts as if nothing of them were cached; its events say "
                    "that it is. Its cache is not counted on until that ends",
                    self.name,
                    self.fleet.id[slot],
                )
            self.reloaded.add(slot)
            self._price(slot)

    def _price(self, slot: Slot) -> None:
        """Bring the seconds of prefill up to date with what is believed of reuse."""
        fleet, is_reused = self.fleet, bool(self.fleet.learned.reuse.factor[slot])
        fleet.pending_s[slot] = self._pending[slot].expected(is_reused=is_reused)
        fleet.work_s[slot] = self._work[slot].expected(is_reused=is_reused)

    def end(self, request_id: RequestId) -> Flight | None:
        """Release everything that a request is charged with; return its flight if it was in flight."""
        flight = self.flights.pop(request_id, None)
        if flight is not None:
            self._discharge(flight)
        return flight

    def assume_first_tokens(self, now_s: float) -> None:
        """Release the prefill of answers that do not stream, once it is due: their first token cannot be seen."""
        while self._due and self._due[0][0] <= now_s:
            due_s, request_id = heapq.heappop(self._due)
            flight = self.flights.get(request_id)
            if flight is not None and flight.is_prefilling and not flight.request.stream:
                self.first_token(flight, due_s)

    def paced(self, gaps_s: dict[Slot, float], now_s: float) -> None:
        """Learn the gap between two tokens, by slot, from the requests that decode now."""
        requests, context_tokens = dict.fromkeys(gaps_s, 0), dict.fromkeys(gaps_s, 0.0)
        for flight in self.flights.values():
            slot = flight.slot
            if slot is not None and slot in gaps_s and not flight.is_prefilling:
                requests[slot] += 1
                context_tokens[slot] += flight.context_tokens
        for slot, gap_s in gaps_s.items():
            if slot in self.replicas:
                self.fleet.learned.paced(
                    slot,
                    now_s,
                    gap_s=gap_s,
                    requests=requests[slot],
                    context_tokens=context_tokens[slot],
                    progress_s=self._progress_s(slot, now_s),
                )
                self._changed(slot)

    def _charge(self, flight: Flight, slot: Slot, now_s: float) -> None:
        fleet, learned, request = self.fleet, self.fleet.learned, flight.request
        fleet.now_s = now_s
        _expect(flight, slot, reports=self._reports_cached(slot))
        credit = learned.credit.factor[fleet.exact[slot]][flight.credit_bucket]
        prompt_tokens = request.prompt_tokens
        new_tokens = max(1, round(prompt_tokens - flight.predicted_tokens * credit))
        if request.adapter is not None and not fleet.adapters.has(slot, request.adapter):
            flight.loads = flight.loads._replace(adapters=1.0)
        loads_s = learned.loads.seconds(flight.loads)
        flight.found_s = learned.prefill.seconds(slot, new_tokens, prompt_tokens) + loads_s
        flight.missed_s = learned.prefill.seconds(slot, max(1, prompt_tokens), prompt_tokens) + loads_s
        flight.is_trusted = bool(learned.reuse.factor[slot])
        if not flight.is_trusted:
            new_tokens = max(1, prompt_tokens)
        output_tokens = learned.expected_output_tokens(request.output_tokens_max)
        context_tokens = prompt_tokens + 0.5 * output_tokens
        flight.slot, flight.sent_s, flight.first_token_s, flight.is_prefilling = slot, now_s, None, True
        flight.new_tokens, flight.trial = new_tokens, None
        flight.output_tokens, flight.context_tokens = output_tokens, context_tokens
        alone = fleet.pending[slot] == 0
        if alone:
            fleet.busy_since_s[slot] = now_s
        usable = request.stream and not self._crowded(slot)
        step_s = self._step_s(slot) if alone else 0.0
        learned.dispatched(
            slot,
            now_s,
            new_tokens=new_tokens,
            alone=alone,
            usable=usable,
            step_s=step_s,
            net_s=fleet.net_s[slot],
        )
        if request.adapter is not None:
            fleet.adapters.used(slot, request.adapter, now_s)
        self.health.sent(slot, request, now_s)
        flight.weight = weight = fleet.weight_of(request.priority)
        fleet.in_flight[slot] += 1
        self._weights[slot] += weight
        fleet.pending[slot] += 1
        fleet.pending_weight[slot] += weight
        fleet.pending_tokens[slot] += new_tokens
        self._pending[slot].add(flight.found_s, flight.missed_s)
        fleet.context_tokens[slot] += context_tokens
        fleet.output_tokens[slot] += output_tokens
        fleet.dispatches += 1
        fleet.last_used[slot] = fleet.dispatches
        self._count_rates(slot, flight, now_s)
        self._price(slot)
        if not request.stream:
            self._hidden[slot] = self._hidden.get(slot, 0) + 1
            heapq.heappush(self._due, (now_s + fleet.pending_s[slot], request.id))
        self._changed(slot)

    def _reports_cached(self, slot: Slot) -> bool:
        """Whether the answers of a replica tell how many tokens were cached, as far as is known."""
        accuracy = self.accuracy.get(self.fleet.id[slot] or "")
        return accuracy is None or not accuracy.is_silent

    def _progress_s(self, slot: Slot, now_s: float) -> float:
        """How long the prefill in progress has taken, as far as it was expected to take that long."""
        return max(0.0, min(self.fleet.pending_s[slot], now_s - self.fleet.busy_since_s[slot]))

    def _step_s(self, slot: Slot) -> float:
        """Expected gap between two tokens of those that decode now."""
        fleet = self.fleet
        in_flight = fleet.in_flight[slot]
        if not in_flight:
            return 0.0
        decoding = in_flight - fleet.pending[slot]
        return fleet.learned.decode.seconds(slot, decoding, fleet.context_tokens[slot] * decoding / in_flight)

    def _crowded(self, slot: Slot) -> bool:
        """Whether memory is so full that prefills wait for it. Shared blocks count once."""
        capacity = self.fleet.capacity_tokens[slot]
        if capacity is None:
            return False
        active = self._active_tokens[slot] if slot < len(self._active_tokens) else 0
        return active + self.fleet.output_tokens[slot] > MEMORY_DELAYS * capacity

    def relearned(self, slot: Slot) -> None:
        """Bring the columns up to date after what is learned of a replica was replaced."""
        self._changed(slot)

    def _changed(self, slot: Slot) -> None:
        """Bring the columns up to date that follow from others."""
        self.touched.add(slot)
        fleet, decode = self.fleet, self.fleet.learned.decode
        fleet.requests[slot] = requests = fleet.in_flight[slot] + fleet.foreign[slot]
        fleet.weight[slot] = weight = self._weights[slot] + fleet.foreign[slot]
        fleet.admission_s[slot] = fleet.learned.admission_s(slot, requests)
        base_s, loaded_s = decode.base[slot], decode.seconds(slot, requests + 1.0, fleet.context_tokens[slot])
        fleet.next_step_s[slot] = base_s + BESIDE * (loaded_s - base_s)
        fleet.next_step_token_s[slot] = BESIDE * decode.per_token[slot] * (weight + 1.0)

    def _count_rates(self, slot: Slot, flight: Flight, now_s: float) -> None:
        fleet = self.fleet
        age_s = now_s - fleet.rates_origin_s
        if age_s > REBASE_AFTER_S:
            factor = math.exp(-age_s / RATE_WINDOW_S)
            fleet.arrivals[:] = [value * factor for value in fleet.arrivals]
            fleet.work_s[:] = [value * factor for value in fleet.work_s]
            self._work[:] = [Priced(work.found_s * factor, work.missed_s * factor) for work in self._work]
            fleet.rates_origin_s, age_s = now_s, 0.0
        present = math.exp(age_s / RATE_WINDOW_S)
        fleet.arrivals[slot] += present * flight.weight
        self._work[slot].add(present * flight.found_s, present * flight.missed_s)

    def _release_prefill(self, flight: Flight, slot: Slot) -> None:
        fleet = self.fleet
        fleet.pending[slot] -= 1
        fleet.pending_tokens[slot] -= flight.new_tokens
        if fleet.pending[slot]:
            self._pending[slot].add(-flight.found_s, -flight.missed_s)
            self._price(slot)
            fleet.pending_weight[slot] = max(0.0, fleet.pending_weight[slot] - flight.weight)
        else:
            self._pending[slot] = Priced()
            fleet.pending_s[slot] = fleet.pending_weight[slot] = 0.0
        if not flight.request.stream:
            self._hidden[slot] -= 1
        flight.is_prefilling = False
        self.touched.add(slot)

    def _discharge(self, flight: Flight) -> None:
        slot, fleet = flight.slot, self.fleet
        self.releases += 1
        if slot is None:
            return
        if flight.is_prefilling:
            fleet.learned.abandoned(slot, last=fleet.pending[slot] == 1)
            self._release_prefill(flight, slot)
        self.health.ended(slot, flight.request)
        fleet.in_flight[slot] -= 1
        if fleet.in_flight[slot]:
            fleet.context_tokens[slot] = max(0.0, fleet.context_tokens[slot] - flight.context_tokens)
            fleet.output_tokens[slot] = max(0.0, fleet.output_tokens[slot] - flight.output_tokens)
            self._weights[slot] = max(0.0, self._weights[slot] - flight.weight)
        else:
            fleet.context_tokens[slot] = fleet.output_tokens[slot] = self._weights[slot] = 0.0
        flight.slot = None
        self._changed(slot)


def _expect(flight: Flight, slot: Slot, *, reports: bool) -> None:
    """Note what was predicted for `slot`: nothing, when it was no choice.

    A replica that `reports` how many tokens were cached would soon show that its events are not to be believed. Of one
    that does not, the time of a prefill says something only if hardly anything was to be found in its cache: an engine
    that has stopped to reuse would look like a slow one.
    """
    flight.predicted_tokens, flight.credit_bucket, flight.is_certain, flight.sample = 0, AGE_BUCKETS, True, None
    flight.loads, flight.is_confirmed = NOTHING, True
    for choice, held in zip(flight.choices, flight.held, strict=True):
        if choice.slot == slot:
            flight.predicted_tokens, flight.credit_bucket = choice.cached_tokens, Credit.bucket(held[0])
            is_cold = choice.cached_tokens <= CERTAIN_SHARE_MAX * flight.request.prompt_tokens
            flight.is_confirmed = held[1] >= choice.cached_tokens
            flight.is_certain = flight.is_confirmed and (reports or is_cold)
            flight.loads = loads_of(held, choice.cached_tokens)
            return


def outcome(flight: Flight, now_s: float, answer: Finished | None) -> Ended:
    """Say what became of a dispatched request that ends now; `answer`: it was complete."""
    first_token_s = flight.first_token_s if flight.request.stream else None
    usage, token_s = None, None
    if answer is not None and 200 <= answer.status < 300 and answer.slot == flight.slot:
        usage = answer.usage
        tokens = answer.chunks if usage is None or usage.output_tokens is None else usage.output_tokens - 1
        if first_token_s is not None and tokens > 0:
            token_s = (now_s - first_token_s) / tokens
    return Ended(
        slot=flight.slot,
        first_token_s=None if first_token_s is None else first_token_s - flight.sent_s,
        lasted_s=now_s - flight.sent_s,
        token_s=token_s,
        cached_tokens=None if usage is None else usage.cached_tokens,
    )


def padded(overlap: Overlap, slots: int) -> Overlap:
    """Give every column at least one row per slot: a replica may be known here before the index has met it."""
    missing = slots - len(overlap.device)
    if missing <= 0:
        return overlap
    zeros = [0] * missing
    return Overlap(
        device=overlap.device + zeros,
        confirmed=overlap.confirmed + zeros,
        host=overlap.host + zeros,
        disk=overlap.disk + zeros,
        active=overlap.active + zeros,
        active_tokens=overlap.active_tokens + zeros,
        resident_tokens=overlap.resident_tokens + zeros,
        evicted_blocks=overlap.evicted_blocks + zeros,
        regretted_blocks=overlap.regretted_blocks + zeros,
        age_s=overlap.age_s + [-1.0] * missing,
        frontier_key=overlap.frontier_key,
    )
