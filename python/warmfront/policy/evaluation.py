"""The arithmetic of `marginal_cost`: what one request costs at each replica.

An `Evaluation` belongs to one decision. Making it computes what is the same for all replicas; `costs` then runs one
loop, nearly without calls, over the replicas asked for, and decisions and explanations both read its result. In a fleet
of more than a few, the core says who need not be looked at: `Bounds` does the same arithmetic for all replicas, without
records (`crates/warmfront-core/src/cost.rs`). What is easy to get wrong: a bound must never exceed the cost. It may
lack a term that only adds, and then more replicas are looked at than need be; one that can be negative has to be in
both.

Source: docs/explanation/policies.md, section "marginal_cost", with the same symbols.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from warmfront.config import CostConfig
from warmfront.core import Bounds
from warmfront.policy import prices
from warmfront.policy.base import RATE_WINDOW_S, Fleet, cached_tokens_max
from warmfront.policy.estimators import AGE_BUCKETS, TURN_BUCKETS
from warmfront.policy.prices import Costs
from warmfront.types import Overlap, Request, Slot

FEW = 12
"""Fleets up to this size are evaluated in full: bounds would cost more than they save."""

_by_slot = attrgetter("slot")


class Evaluation:
    """One request against a fleet."""

    __slots__ = (
        "alpha",
        "arrival_weight",
        "arrivals_mean",
        "beta",
        "bounds",
        "busy_mean",
        "config",
        "decode_weight",
        "deepest",
        "doubt",
        "fleet",
        "found",
        "frontier",
        "full_paid",
        "full_prefill",
        "gain",
        "later_turns",
        "loads",
        "loads_s",
        "mean_cost_s",
        "output_tokens",
        "overdraft",
        "overlap",
        "own_decay",
        "own_weight",
        "price_base",
        "prompt_tokens",
        "scales",
        "session_tokens",
        "shared_tokens",
        "stall_own",
        "tie_key",
        "usual_weight",
    )

    def __init__(
        self,
        request: Request,
        overlap: Overlap,
        fleet: Fleet,
        config: CostConfig,
        *,
        prefix_rate: float,
        mean_cost_s: list[float],
        doubt: float = 0.0,
    ) -> None:
        """Compute what is the same for all replicas.

        Args:
            request: To be placed.
            overlap: At least one row per slot.
            fleet: Columns.
            config: Constants.
            prefix_rate: Requests per second that begin like the deepest known part of this prompt.
            mean_cost_s: c̄, one row per slot.
            doubt: Part of the cache's advantage that does not count.
        """
        learned = fleet.learned
        self.overlap, self.fleet, self.config, self.mean_cost_s = overlap, fleet, config, mean_cost_s
        self.doubt = doubt
        self.bounds: Bounds | None = None
        self.tie_key = None if request.route == "load" or request.basis == "none" else request.prefix_key
        self.prompt_tokens = prompt_tokens = request.prompt_tokens
        self.output_tokens = output_tokens = learned.expected_output_tokens(request.output_tokens_max)
        self.alpha = alpha = learned.prefill.alpha
        self.beta, self.scales = learned.prefill.beta, learned.prefill.scale
        # Reuse: engines load what lies on a slower tier, whether or not that is quicker than computing it. Where it is
        # not, it is no reason to make another copy.
        self.deepest, self.loads = overlap.disk, learned.loads
        worth = overlap.device
        if alpha > learned.loads.host_s:
            worth = overlap.disk if alpha > learned.loads.disk_s else overlap.host
        self.frontier = frontier = fleet.deepest(worth)
        self.gain = self.found = 0.0
        if prefix_rate and frontier:
            holders = fleet.rows(worth, frontier)
            if len(holders) < len(fleet.eligible):  # else nobody could make a copy
                # N: requests that would pay back one more copy of the deepest prefix
                self.gain = prefix_rate * config.copy_horizon_s / (len(holders) + 1)
                self.found = self._found(holders)
        self.full_prefill = self.full_paid = self._prefill_s(max(1.0, prompt_tokens))
        if self.gain:
            warm_s = min(self.full_prefill, self._prefill_s(max(1.0, prompt_tokens - self.found)))
            self.full_paid = warm_s + (self.full_prefill - warm_s) / (1.0 + self.gain)
        self.loads_s = None
        if request.adapter is not None:
            self.loads_s = fleet.adapters.loads_s(request.adapter, fleet.now_s, learned.loads.adapter_s)
        # What is the same for all replicas in the price of prefill work. Others count by their weight over our own.
        self.own_weight = own_weight = fleet.weight_of(request.priority)
        requests, weight_total, arrivals, work_s = fleet.burden()
        self.usual_weight = weight_total / max(1.0, requests) if weight_total else own_weight
        mix = config.fleet_mix
        mean, own, decay = mix / len(fleet.eligible), 1.0 - mix, fleet.decay() / RATE_WINDOW_S
        self.overdraft = fleet.shares.overdraft(request.flow)
        # What others wait weighs more against a flow that uses more than its share.
        others = (1.0 + config.fairness_weight * self.overdraft) / own_weight
        stall = config.ttft_target_s / (learned.expected_output_tokens(None) * config.tpot_target_s) * others
        # Of a replica that runs nothing
        self.price_base = 1.0 + stall * prices.STALL_MIX * weight_total / len(fleet.eligible)
        self.arrivals_mean = mean * decay * arrivals
        self.busy_mean = mean * decay * work_s
        self.stall_own, self.own_decay, self.arrival_weight = (
            stall * (1.0 - prices.STALL_MIX),
            own * decay,
            config.arrival_weight * others,
        )
        self.decode_weight = (
            config.ttft_target_s / config.tpot_target_s * prices.decode_share(request, learned.output_tokens)
        )
        self.shared_tokens = prompt_tokens / own_weight
        # Conversations.
        turn = request.turn
        self.later_turns = later = learned.continuation.later[turn if turn < TURN_BUCKETS else TURN_BUCKETS - 1]
        self.session_tokens = output_tokens + later * (learned.new_tokens + learned.output_tokens)

    def best(self, count: int) -> list[Costs]:
        """Return the costs of all replicas that may be chosen first to `count`-th, in the order of their slots.

        Among them are the one that is preferred of those that tie with the cheapest, and the ones that are cheapest by
        load alone and with full credit.
        """
        slots = self.fleet.eligible
        return self.costs(slots) if len(slots) <= max(FEW, count) else self._pruned(count)

    def seen_s(self) -> list[float]:
        """Return W or M, T, mem and net of any request at each replica that may be chosen, in order."""
        return self._bounded().seen_s()

    def preferred(self, key: int, count: int) -> list[Costs]:
        """Return the costs of the replicas that a key prefers, best first."""
        return self.costs(self._bounded().preferred(key, count))

    def costs(self, slots: Sequence[Slot]) -> list[Costs]:  # noqa: C901 - one loop without calls
        """Compute everything about some replicas, in the order given."""
        config, fleet, overlap, mean_cost_s = self.config, self.fleet, self.overlap, self.mean_cost_s
        learned, now_s = fleet.learned, fleet.now_s
        prompt_tokens, output_tokens = self.prompt_tokens, self.output_tokens
        alpha, beta, scales = self.alpha, self.beta, self.scales
        deepest, host, device, ages = self.deepest, overlap.host, overlap.device, overlap.age_s
        credits, bucket, unsent = learned.credit.factor, learned.credit.bucket, AGE_BUCKETS
        reuses = learned.reuse.factor
        frontier, gain, full_prefill, full_paid = self.frontier, self.gain, self.full_prefill, self.full_paid
        warm_new = max(1.0, prompt_tokens - self.found)
        price_base, stall_own, price_max = self.price_base, self.stall_own, config.price_max
        arrivals_mean, busy_mean, own_decay = self.arrivals_mean, self.busy_mean, self.own_decay
        held_s = fleet.held_s
        arrival_weight, busy_max, weight = self.arrival_weight, config.utilisation_max, self.decode_weight
        pending_s, busy_since_s, ways_s = fleet.pending_s, fleet.busy_since_s, fleet.net_s
        steps_s, steps_token_s = fleet.next_step_s, fleet.next_step_token_s
        weighed, arrivals, work_s, admissions_s = fleet.weight, fleet.arrivals, fleet.work_s, fleet.admission_s
        capacity, outputs, foreign, kv_usage = fleet.capacity_tokens, fleet.output_tokens, fleet.foreign, fleet.kv_usage
        active, active_tokens, resident = overlap.active, overlap.active_tokens, overlap.resident_tokens
        memory_threshold, eviction_unit, regret = config.memory_threshold, self._eviction_unit(), learned.regret.share
        (host_load_s, disk_load_s, _), loads_s = self.loads.costs, self.loads_s
        own_weight, shared_tokens = self.own_weight, self.shared_tokens
        later_turns, session_tokens = self.later_turns, self.session_tokens
        future = config.future_weight * later_turns
        exact, block_size, doubt, overdraft = fleet.exact, fleet.block_size, self.doubt, self.overdraft
        limit_size: int | None = None
        limit = prompt_tokens - 1 if prompt_tokens else 0
        length = float(prompt_tokens)  # arithmetic on floats alone is the interpreter's fast path
        cold_new = length if length > 1.0 else 1.0
        adapter_load = tier_load = 0.0
        found: list[Costs] = []
        for slot in slots:
            depth, scale = deepest[slot], scales[slot]
            cold_prefill = scale * full_prefill
            # n, p: tokens to compute and their seconds
            if depth:
                if block_size[slot] != limit_size:
                    limit_size = block_size[slot]
                    limit = cached_tokens_max(prompt_tokens, limit_size)
                cached = depth if depth < limit else limit
                age_s = ages[slot]
                credit = reuses[slot] * credits[exact[slot]][unsent if age_s < 0.0 else bucket(age_s)]
                new = length - credit * cached
                if new < 1.0:
                    new = 1.0
                own_prefill = scale * new * (alpha + beta * (length - 0.5 * new))
                paid_prefill = own_prefill
                if gain > 0.0 and depth < frontier:  # p̃: a new copy of a hot prefix is an investment
                    warm = warm_new if warm_new < new else new
                    warm_prefill = scale * warm * (alpha + beta * (length - 0.5 * warm))
                    paid_prefill = warm_prefill + (own_prefill - warm_prefill) / (1.0 + gain)
                tier_load = 0.0
                if depth > device[slot]:
                    tier_load = (host[slot] - device[slot]) * host_load_s + (depth - host[slot]) * disk_load_s
                    own_prefill += tier_load
                    paid_prefill += tier_load
            else:
                cached, credit, new, tier_load = 0, 1.0, cold_new, 0.0
                own_prefill = cold_prefill
                paid_prefill = scale * full_paid
            if loads_s is not None:
                adapter_load, adapter_share = loads_s[slot]
                own_prefill += adapter_load
                paid_prefill += adapter_share
                cold_prefill += adapter_share
            # W: wait for compute
            compute_wait = pending_s[slot]
            if compute_wait:
                half = 0.5 * compute_wait
                compute_wait -= now_s - busy_since_s[slot]
                if compute_wait < half:
                    compute_wait = half
            # T: own decoding, and what it costs the others
            decode = weight * (steps_s[slot] + steps_token_s[slot] * shared_tokens)
            # X: what a second of prefill costs everybody here
            rate = arrivals_mean + own_decay * arrivals[slot]
            busy = busy_mean + own_decay * work_s[slot]
            if busy > busy_max:
                busy = busy_max
            price = (
                price_base
                + stall_own * weighed[slot]
                + arrival_weight * rate * (compute_wait + held_s + own_prefill) / (1.0 - busy)
            )
            if price > price_max:
                price = price_max
            prefill = paid_prefill * price
            # M, mem, ev: memory
            memory = eviction = used = 0.0
            memory_wait = admissions_s[slot]
            tokens_max = capacity[slot]
            if tokens_max:
                need = prompt_tokens - active[slot] + output_tokens
                in_use = active_tokens[slot] + prices.OUTPUT_HELD * outputs[slot]
                if foreign[slot]:
                    in_use = max(in_use, (kv_usage[slot] or 0.0) * tokens_max)
                used = (in_use + need) / tokens_max
                if used > memory_threshold:
                    scarce_wait, memory = self._scarcity(slot, used, need, rate)
                    if scarce_wait > memory_wait:
                        memory_wait = scarce_wait
                held = resident[slot]
                if held:
                    full = held / tokens_max
                    eviction = eviction_unit * scale * regret[slot] * full * full * (new + session_tokens) * price
            # C
            waiting = compute_wait if compute_wait > memory_wait else memory_wait
            later = future * mean_cost_s[slot]
            reuse = (cold_prefill - paid_prefill) * price
            net = ways_s[slot]
            trusting = waiting + prefill + eviction + decode + memory + later + net
            found.append(
                Costs(
                    trusting + doubt * reuse,
                    slot,
                    cached,
                    waiting,
                    prefill,
                    eviction,
                    decode,
                    memory,
                    later,
                    net,
                    doubt * reuse,
                    trusting + reuse,
                    new,
                    own_prefill,
                    paid_prefill,
                    compute_wait,
                    memory_wait,
                    price,
                    credit,
                    used,
                    gain if depth < frontier else 0.0,
                    later_turns,
                    tier_load,
                    adapter_load,
                    own_weight,
                    overdraft,
                )
            )
        return found

    def _scarcity(self, slot: Slot, used: float, need: float, rate: float) -> tuple[float, float]:
        """Return M and mem of a replica whose memory is `used` with this request's `need`, at `rate` arrivals."""
        fleet, config = self.fleet, self.config
        residence_s = fleet.learned.residence_s[slot]
        wait_s = (used - prices.MEMORY_FULL) * residence_s if used > prices.MEMORY_FULL else 0.0
        tokens = fleet.context_tokens[slot] + prices.OUTPUT_HELD * fleet.output_tokens[slot] + need
        chance = prices.chance_of_full(used, tokens / (fleet.capacity_tokens[slot] or 1), fleet.requests[slot] + 1.0)
        work_s = need * residence_s / (fleet.capacity_tokens[slot] or 1)
        slack = 1.0 - min(prices.MEMORY_UTILISATION_MAX, used)
        others = fleet.pending_weight[slot] + rate * (wait_s + work_s) / slack
        delayed = min(prices.MEMORY_QUEUE_MAX, others / self.own_weight)
        return wait_s, config.memory_weight * work_s * chance * (1.0 + delayed)

    def _pruned(self, count: int) -> list[Costs]:
        """Evaluate the replicas that look best, those that may still be better, then who is preferred among equals."""
        bounds = self._bounded()
        found = self._settled(bounds.first(count))
        if rest := bounds.rest(count):
            found += self._settled(rest)
        while (favourite := bounds.favourite(self.tie_key)) is not None:
            found += self._settled([favourite])
        return sorted(found, key=_by_slot)

    def _settled(self, slots: list[Slot]) -> list[Costs]:
        costs = self.costs(slots)
        self._bounded().settle(costs)
        return costs

    def _bounded(self) -> Bounds:
        if self.bounds is None:
            self.bounds = Bounds(self, prices.MEMORY, prices.TIE_S)
        return self.bounds

    def _eviction_unit(self) -> float:
        return self.config.eviction_weight * self.alpha * self.usual_weight / self.own_weight

    def _prefill_s(self, new: float) -> float:
        """Seconds to compute `new` tokens at the end of the prompt, on a replica of scale 1."""
        return new * (self.alpha + self.beta * (self.prompt_tokens - 0.5 * new))

    def _found(self, holders: list[Slot]) -> float:
        """Return how many tokens of the deepest prefix the best of its `holders` is expected to find.

        Another copy is worth no more.
        """
        exact, ages_s, learned = self.fleet.exact, self.overlap.age_s, self.fleet.learned
        credit, reuse = learned.credit, learned.reuse.factor
        # Few: most were never sent the prefix.
        kinds = {(reuse[slot], exact[slot], ages_s[slot]) for slot in holders}
        return self.frontier * max([r * credit.factor[is_exact][credit.bucket(age_s)] for r, is_exact, age_s in kinds])
