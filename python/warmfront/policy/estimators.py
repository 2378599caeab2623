"""What a pool learns instead of being given weights.

Owned by the router's ledger, which feeds it whatever policy is in charge; policies read it. All start from priors that
may be wrong by a factor of two. Nothing here reads a clock: times come from events.

Source: docs/explanation/policies.md, section "What is learned".
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from warmfront.config import CostConfig
from warmfront.policy.latency import DecodeModel, PrefillModel
from warmfront.policy.loads import LOADED_SHARE, NOTHING, LoadModel, Loads
from warmfront.policy.reuse import Reuse
from warmfront.types import Slot

TURN_BUCKETS = 8
"""Turns 0 to 6 and all later ones."""
CONTINUATION_PRIOR = (6.0, 10.0)
"""Successors over requests, before anything is known: 0.6 later requests each."""
CONTINUATION_FORGET = 0.999
CONTINUATION_INTERVAL = 16
"""Arrivals between two solutions for N_T."""
OUTPUT_PRIOR_TOKENS = 200.0
OUTPUT_TOKENS_MIN = 8.0
NEW_PRIOR_TOKENS = 500.0
RESIDENCE_PRIOR_S = 5.0
AGE_BUCKETS = 16
CREDIT_PRIOR_TOKENS = 2000.0
CREDIT_FORGET = 0.99
PREFILL_SHARE_MAX = 0.6
"""Share of prefill above which stretched gaps say little about decoding."""
STRETCHED_TRUST = 0.2
"""Weight of what is left of stretched gaps, against a gap without prefill."""
STRETCH_S = 2.0
"""Time over which stretched gaps are added up: long against the longest of them."""
REGRET_INTERVAL_S = 1.0
REGRET_EVICTIONS_MAX = 20_000.0
"""Evictions of a replica beyond which older ones count half."""
GAP_BOUND = 0.9
"""A gap stretched by prefill is believed when it is below this part of what was expected without."""
SEQUENCES_SCRAPES = 3
"""Reports in a row that show nearly as many running as ever, and never more, while others wait."""
SEQUENCES_NEARLY = 0.95
"""The last to end may not have been replaced yet."""
SEQUENCES_WAITING = 0.05
"""Requests that wait over those that run: fewer may only have arrived since the last step began."""
SEQUENCES_KV_MAX = 0.9
"""Share of KV memory above which others may wait for memory."""
GROUPS_MAX = 8
"""First tokens after which a long busy period is cut into a sample."""


class Credit:
    """η: how much of a predicted overlap the engines really found, by age and by feed.

    Age is log2 seconds since the prefix was last sent there; a bucket of its own holds prefixes that we never sent.
    Replicas with live events and those without are kept apart, so that one lost stream does not discredit the others.
    """

    def __init__(self) -> None:
        size = AGE_BUCKETS + 1
        self.reported = {exact: [CREDIT_PRIOR_TOKENS] * size for exact in (True, False)}
        self.predicted = {exact: [CREDIT_PRIOR_TOKENS] * size for exact in (True, False)}
        self.factor = {exact: [1.0] * size for exact in (True, False)}

    @staticmethod
    def bucket(age_s: float) -> int:
        """Return the row for an age; negative means never sent."""
        if age_s < 0:
            return AGE_BUCKETS
        bucket = int(age_s * 4.0).bit_length()
        return bucket if bucket < AGE_BUCKETS else AGE_BUCKETS - 1

    def learn(self, bucket: int, *, exact: bool, predicted_tokens: int, reported_tokens: int) -> None:
        """Compare one answer with its prediction. More than predicted counts as all of it."""
        if predicted_tokens <= 0:
            return
        reported, predicted = self.reported[exact], self.predicted[exact]
        reported[bucket] = CREDIT_FORGET * reported[bucket] + min(reported_tokens, predicted_tokens)
        predicted[bucket] = CREDIT_FORGET * predicted[bucket] + predicted_tokens
        self.factor[exact][bucket] = reported[bucket] / predicted[bucket]


class Regret:
    """g: probability that an evicted token is wanted again.

    The index counts evictions since the start, and those asked for again. Old ones are forgotten here, or a day of one
    kind of traffic would decide what the next hour's evictions cost. What is easy to get wrong: counts are kept by
    replica but tell the same to all. A few long documents are most of what one replica evicts, so its own share is
    largely chance, and a replica that is taken for too precious stays idle and never learns better.
    """

    def __init__(self, config: CostConfig) -> None:
        self._prior, self._prior_evictions = config.regret_prior, config.regret_prior_evictions
        self._counts: list[tuple[float, float]] = []
        """By slot: evicted and regretted blocks, halved whenever they are many."""
        self._seen: list[tuple[int, int] | None] = []
        self._followed_s: float | None = None
        self.share: list[float] = []
        """g, once for each slot."""

    def grow(self) -> None:
        """Add a row."""
        self._counts.append((0.0, 0.0))
        self._seen.append(None)
        self.share.append(self.share[0] if self.share else self._prior)

    def reset(self, slot: Slot) -> None:
        """Forget a replica: the slot belongs to another one now."""
        self._counts[slot], self._seen[slot] = (0.0, 0.0), None

    def follow(self, now_s: float, evicted: list[int], regretted: list[int]) -> None:
        """Take over the counters of the index, at most once in `REGRET_INTERVAL_S`.

        Args:
            now_s: Present.
            evicted: Blocks removed since the start, by slot. Fewer than before: an overlap that knows nothing.
            regretted: Those of them that were asked for again.
        """
        if self._followed_s is not None and now_s - self._followed_s < REGRET_INTERVAL_S:
            return
        self._followed_s = now_s
        # An overlap may have rows for slots that are not known here yet.
        rows = zip(self._seen.copy(), zip(evicted, regretted, strict=True), strict=False)
        for slot, (before, counters) in enumerate(rows):
            if before is not None and counters[0] < before[0]:
                continue
            self._seen[slot] = counters
            if before is not None and before != counters:
                self._add(slot, counters[0] - before[0], counters[1] - before[1])
        evictions = self._prior_evictions + sum(count for count, _ in self._counts)
        regrets = self._prior_evictions * self._prior + sum(count for _, count in self._counts)
        share = min(1.0, regrets / evictions)
        self.share = [share] * len(self._counts)

    def _add(self, slot: int, evicted: int, regretted: int) -> None:
        total_evicted, total_regretted = self._counts[slot]
        total_evicted, total_regretted = total_evicted + evicted, total_regretted + regretted
        if total_evicted > REGRET_EVICTIONS_MAX:
            total_evicted, total_regretted = 0.5 * total_evicted, 0.5 * total_regretted
        self._counts[slot] = total_evicted, total_regretted


class Sequences:
    """S: how many requests an engine runs at once, where it was seen to be the limit.

    Engines do not announce it. What is easy to get wrong: requests also wait for a prefill that fills the steps, but
    then the number that runs varies.
    """

    def __init__(self) -> None:
        self.limit: list[float | None] = []
        """S by slot; `None`: not known to matter."""
        self._most: list[float] = []
        self._reports: list[int] = []

    def grow(self) -> None:
        """Add a row."""
        self.limit.append(None)
        self._most.append(0.0)
        self._reports.append(0)

    def reset(self, slot: Slot) -> None:
        """Forget a replica: the slot belongs to another one now."""
        self.limit[slot], self._most[slot], self._reports[slot] = None, 0.0, 0

    def seen(self, slot: Slot, *, running: float, waiting: float, kv_usage: float) -> None:
        """Take the engine's own counts. One that runs nothing while requests wait is starting or stopped: no limit."""
        if running < 1:
            self._reports[slot] = 0
            return
        if running > self._most[slot]:
            self.limit[slot], self._most[slot], self._reports[slot] = None, running, 0
        is_full = running >= SEQUENCES_NEARLY * self._most[slot]
        if not is_full or waiting < max(1.0, SEQUENCES_WAITING * running) or kv_usage > SEQUENCES_KV_MAX:
            self._reports[slot] = 0
            return
        self._reports[slot] += 1
        if self._reports[slot] >= SEQUENCES_SCRAPES and self.limit[slot] is None:
            self._conclude(self._most[slot], slot)

    def _conclude(self, limit: float, slot: Slot) -> None:
        """Note a limit, also for those that were never seen to run more: a pool is usually configured alike."""
        self.limit[slot] = limit
        for other, most in enumerate(self._most):
            if self.limit[other] is None and most <= limit:
                self.limit[other] = limit


class Continuation:
    """m_t: how many later requests a conversation brings, by the number of answers it holds already."""

    def __init__(self, turns_max: float) -> None:
        successors, requests = CONTINUATION_PRIOR
        self._turns_max = turns_max
        self._successors = [successors] * TURN_BUCKETS
        self._requests = [requests] * TURN_BUCKETS
        self._arrivals = 0
        self.later: list[float] = [0.0] * TURN_BUCKETS
        """N_T by turn bucket."""
        self._solve()

    def arrived(self, turn: int) -> None:
        """Count a request at `turn` as successor of one at the turn before."""
        bucket = turn if turn < TURN_BUCKETS else TURN_BUCKETS - 1
        if turn > 0:
            self._successors[turn - 1 if turn <= TURN_BUCKETS else TURN_BUCKETS - 1] += 1.0
        self._requests[bucket] = CONTINUATION_FORGET * self._requests[bucket] + 1.0
        self._successors[bucket] *= CONTINUATION_FORGET
        self._arrivals += 1
        if self._arrivals % CONTINUATION_INTERVAL == 0:
            self._solve()

    def rates(self) -> list[float]:
        """Return successors per request, by turn bucket."""
        return [successors / requests for successors, requests in zip(self._successors, self._requests, strict=True)]

    def _solve(self) -> None:
        last = self._successors[-1] / self._requests[-1]
        value = last / (1.0 - min(0.95, last))
        self.later[-1] = min(self._turns_max, value)
        for bucket in range(TURN_BUCKETS - 2, -1, -1):
            value = min(8.0, self._successors[bucket] / self._requests[bucket]) * (1.0 + value)
            self.later[bucket] = min(self._turns_max, value)


class BusyPeriod(Struct):
    """Prefill going on without a break at one replica."""

    start_s: float
    last_s: float
    tokens: float = 0.0
    pairs: float = 0.0
    loads: Loads = NOTHING
    groups: int = 0
    decode_s: float = 0.0
    """Part of it that the steps took for decoding."""
    usable: bool = True
    unresolved: int = 0
    """Requests in it whose cached tokens are a guess that their answers will correct."""
    seconds: float | None = None
    """How long it took, once it is over."""

    def add(self, tokens: float, prompt_tokens: int, loads: Loads, *, sign: float = 1.0) -> None:
        """Count what one prefill computed and loaded; `sign` -1 takes it back."""
        self.tokens += sign * tokens
        self.pairs += sign * tokens * (prompt_tokens - 0.5 * tokens)
        if loads is not NOTHING:
            host, disk, adapters = self.loads
            self.loads = Loads(
                host + sign * loads.host_tokens, disk + sign * loads.disk_tokens, adapters + sign * loads.adapters
            )


@dataclass(slots=True)
class Stretch:
    """Intervals between two tokens that prefill stretched, added up."""

    seconds: float = 0.0
    steps: float = 0.0
    prefill_s: float = 0.0
    requests: float = 0.0
    """Times seconds, as the next."""
    context_tokens: float = 0.0
    is_clean: bool = False
    """The last interval had no prefill."""

    def add(self, seconds: float, gap_s: float, requests: int, context_tokens: float) -> None:
        """Add an interval with a mean gap."""
        self.seconds += seconds
        self.steps += seconds / gap_s
        self.requests += requests * seconds
        self.context_tokens += context_tokens * seconds

    def restart(self) -> None:
        """Begin anew."""
        self.seconds = self.steps = self.prefill_s = self.requests = self.context_tokens = 0.0
        self.is_clean = False


class Learned:
    """Everything a pool has learned."""

    def __init__(self, config: CostConfig) -> None:
        self.prefill = PrefillModel(config)
        self.decode = DecodeModel(config)
        self.loads = LoadModel(config)
        self.credit = Credit()
        self.reuse = Reuse()
        self.continuation = Continuation(config.future_turns_max)
        self.regret = Regret(config)
        self.sequences = Sequences()
        self.output_tokens = OUTPUT_PRIOR_TOKENS
        """ô."""
        self.new_tokens = NEW_PRIOR_TOKENS
        """n̄: tokens a request computes on average."""
        self.residence_s: list[float] = []
        """R: seconds from first token to end."""
        self._busy: list[BusyPeriod | None] = []
        self._prefilled_s: list[float] = []
        """Predicted prefill seconds that ended since gaps were last reported."""
        self._paced_s: list[float | None] = []
        self._stretches: list[Stretch] = []
        self._progress_s: list[float] = []
        """How long the prefill in progress had taken when gaps were last reported."""

    def grow(self) -> None:
        """Add a row."""
        self.prefill.grow()
        self.decode.grow()
        self.reuse.grow()
        self.regret.grow()
        self.sequences.grow()
        self.residence_s.append(RESIDENCE_PRIOR_S)
        self._busy.append(None)
        self._prefilled_s.append(0.0)
        self._paced_s.append(None)
        self._progress_s.append(0.0)
        self._stretches.append(Stretch())

    def reset(self, slot: Slot) -> None:
        """Forget a replica: the slot belongs to another one now."""
        self.prefill.reset(slot)
        self.decode.reset(slot)
        self.reuse.reset(slot)
        self.regret.reset(slot)
        self.sequences.reset(slot)
        self.residence_s[slot] = RESIDENCE_PRIOR_S
        self._busy[slot], self._prefilled_s[slot], self._paced_s[slot] = None, 0.0, None
        self._progress_s[slot] = 0.0
        self._stretches[slot].restart()

    def expected_output_tokens(self, output_tokens_max: int | None) -> float:
        """ô of one request: never more than it asked for."""
        expected = max(OUTPUT_TOKENS_MIN, self.output_tokens)
        if output_tokens_max is None or output_tokens_max > expected:
            return expected
        return float(output_tokens_max)

    def admission_s(self, slot: Slot, requests: float) -> float:
        """Return how long one more request than `requests` waits until one of those ends, if all cannot run at once."""
        limit = self.sequences.limit[slot]
        if limit is None or requests < limit:
            return 0.0
        return (requests + 1.0 - limit) * self.residence_s[slot] / limit

    def dispatched(
        self,
        slot: Slot,
        now_s: float,
        *,
        new_tokens: float,
        alone: bool,
        usable: bool,
        step_s: float = 0.0,
        net_s: float = 0.0,
    ) -> None:
        """Note the start of a prefill; `alone` when nothing else is pending there.

        Args:
            slot: Where.
            now_s: When.
            new_tokens: To compute.
            alone: This opens a busy period.
            usable: First tokens of this request will be seen and memory does not delay it.
            step_s: What a step takes there now: half of one passes, on average, before a prefill begins.
            net_s: The way there and back, which is no part of the prefill.
        """
        self.new_tokens += 0.02 * (new_tokens - self.new_tokens)
        if alone:
            self._busy[slot] = BusyPeriod(now_s + net_s, now_s, decode_s=0.5 * step_s)
            self.reuse.began(slot, now_s + net_s + 0.5 * step_s)
        busy = self._busy[slot]
        if not usable:
            self.reuse.spoiled(slot)
            if busy is not None:
                busy.usable = False

    def first_token(
        self,
        slot: Slot,
        now_s: float,
        *,
        new_tokens: float,
        prompt_tokens: int,
        last: bool,
        step_s: float = 0.0,
        usable: bool = True,
        certain: bool = True,
        loads: Loads = NOTHING,
    ) -> BusyPeriod | None:
        """Note the end of a prefill.

        Args:
            slot: Where.
            now_s: When.
            new_tokens: Computed.
            prompt_tokens: Of the whole prompt.
            last: Nothing is pending behind it.
            step_s: What a step takes there without any prefill in it. It comes once with every group of first tokens,
                whatever their prompts, and is no part of what a token costs.
            usable: A sample that begins now would say something about prefill: memory delays nobody, and the first
                tokens of all that is pending will be seen.
            certain: `new_tokens` is known and not a guess at what a cache will save.
            loads: What was expected to be loaded.

        Returns:
            What to hand to `resolved` when the answer has told; `None`: nothing is open.
        """
        self._prefilled_s[slot] += self.prefill.seconds(slot, new_tokens, prompt_tokens) + self.loads.seconds(loads)
        busy = self._busy[slot]
        if busy is None:
            return None
        busy.unresolved += not certain
        busy.add(new_tokens, prompt_tokens, loads)
        if now_s > busy.last_s:
            busy.groups += 1
            busy.decode_s += step_s
            busy.last_s = now_s
        if last or busy.groups >= GROUPS_MAX:
            busy.seconds = now_s - busy.start_s
            self._sample(slot, busy)
            self._busy[slot] = None if last else BusyPeriod(now_s, now_s, usable=usable)
        return None if certain else busy

    def resolved(
        self,
        slot: Slot,
        busy: BusyPeriod,
        *,
        guessed: int,
        computed: int,
        prompt_tokens: int,
        guessed_loads: Loads = NOTHING,
        loads: Loads = NOTHING,
    ) -> None:
        """Put what was computed and loaded in place of the guess; the last one makes the busy period a sample."""
        busy.unresolved -= 1
        busy.add(guessed, prompt_tokens, guessed_loads, sign=-1.0)
        busy.add(computed, prompt_tokens, loads)
        self._sample(slot, busy)

    def _sample(self, slot: Slot, busy: BusyPeriod) -> None:
        if not busy.usable or busy.seconds is None or busy.unresolved:
            return
        loaded = busy.loads.host_tokens + busy.loads.disk_tokens
        if loaded <= LOADED_SHARE * busy.tokens and busy.loads.adapters <= 0.0:
            self.prefill.sample(slot, busy.seconds, busy.tokens, busy.pairs, decode_s=busy.decode_s)
        elif busy.seconds > 0.0:
            model = self.prefill
            computed_s = model.scale[slot] * (model.alpha * busy.tokens + model.beta * busy.pairs)
            self.loads.sample(busy.seconds, computed_s + busy.decode_s, busy.loads)

    def abandoned(self, slot: Slot, *, last: bool) -> None:
        """Note a prefill that ended without a visible first token: its busy period teaches nothing."""
        self.reuse.spoiled(slot)
        busy = self._busy[slot]
        if busy is not None:
            busy.usable = False
        if last:
            self._busy[slot] = None

    def paced(
        self,
        slot: Slot,
        now_s: float,
        *,
        gap_s: float,
        requests: int,
        context_tokens: float,
        progress_s: float = 0.0,
    ) -> None:
        """Learn the gap between tokens in the interval since the last call.

        Prefill stretches gaps, also one that begins in an interval and ends in the next. So a gap is believed as it is
        only after two intervals without prefill. The others are added up until they are long against a gap; what is
        left of them without the prefill predicted for them, divided by their steps, counts less. Where prefill is
        nearly all of it, a gap can only show that a step takes less than expected: the step is shorter than the gap.

        Args:
            slot: Where.
            now_s: When.
            gap_s: Mean of the interval.
            requests: That decode.
            context_tokens: Theirs.
            progress_s: How long the prefill in progress has taken so far; 0 when there is none.
        """
        before_s, self._paced_s[slot] = self._paced_s[slot], now_s
        progress_before_s, self._progress_s[slot] = self._progress_s[slot], progress_s
        prefilled_s, self._prefilled_s[slot] = self._prefilled_s[slot], 0.0
        stretch = self._stretches[slot]
        if before_s is None or now_s <= before_s or requests <= 0 or gap_s <= 0:
            stretch.restart()
            return
        if not prefilled_s and not progress_s and not progress_before_s:
            if stretch.is_clean:
                self.decode.sample(slot, gap_s, requests, context_tokens)
                return
            stretch.restart()
            stretch.is_clean = True
        else:
            stretch.is_clean = False
        stretch.add(now_s - before_s, gap_s, requests, context_tokens)
        stretch.prefill_s += prefilled_s + progress_s - progress_before_s
        if stretch.seconds >= STRETCH_S:
            self._learn_stretched(slot, stretch)
            stretch.restart()

    def _learn_stretched(self, slot: Slot, stretch: Stretch) -> None:
        requests, context_tokens = stretch.requests / stretch.seconds, stretch.context_tokens / stretch.seconds
        share = max(0.0, stretch.prefill_s / stretch.seconds)
        gap_s = stretch.seconds / stretch.steps
        if share <= PREFILL_SHARE_MAX:
            trust = STRETCHED_TRUST * (1.0 - share) ** 2
            self.decode.sample(slot, gap_s * (1.0 - share), requests, context_tokens, trust=trust)
        elif gap_s < GAP_BOUND * self.decode.seconds(slot, requests, context_tokens):
            self.decode.sample(slot, gap_s, requests, context_tokens, trust=STRETCHED_TRUST)

    def finished(self, slot: Slot, *, output_tokens: int | None, residence_s: float | None) -> None:
        """Learn from a complete answer."""
        if output_tokens is not None:
            self.output_tokens += 0.02 * (output_tokens - self.output_tokens)
        if residence_s is not None:
            self.residence_s[slot] += 0.05 * (residence_s - self.residence_s[slot])
