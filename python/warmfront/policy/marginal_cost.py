"""The default policy: send where a request's own delay plus the delay it imposes on others is smallest.

Everything is in seconds of time to first token. There is no term for affinity and none for balance: a warm replica
needs less work and memory, a busy one makes wait. One loop (`_evaluate`) computes all costs, for decisions and for
explanations alike; a decision may stop early for replicas that cannot win any more. What is easy to get wrong: only
own work is priced (`p·X`), never the work already queued, which is sunk.

Source: docs/explanation/policies.md, section "marginal_cost", with the same symbols.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from itertools import compress

from warmfront.config import PolicyConfig
from warmfront.policy import prices
from warmfront.policy.affinity import mix
from warmfront.policy.base import RATE_WINDOW_S, Ended, Fleet, Guarded, ReplicaCost, cached_tokens_max
from warmfront.policy.estimators import TURN_BUCKETS
from warmfront.policy.prices import Costs
from warmfront.policy.watch import Row, Watch
from warmfront.types import Choice, Overlap, Request, Slot


class MarginalCost:
    """Social marginal cost. State: the rate of hot prefixes, each replica's mean cost, and the guard."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config.cost
        self._watch = Watch(config)
        self._popularity: dict[int, tuple[float, float]] = {}
        self._mean_cost_s: list[float] = []
        self._ids: list[str | None] = []
        self._membership = -1
        self._averaged_s: float | None = None
        self._seen_s: list[float] | None = None

    def choose(self, request: Request, overlap: Overlap, fleet: Fleet) -> Sequence[Choice]:
        """Rank replicas by cost. Nearly equal ones are told apart by free memory, then by hash or by rotation."""
        self._follow(fleet)
        self._seen_s = self._costs_wanted(fleet)
        candidates = self._evaluate(request, overlap, fleet, seen_s=self._seen_s, details=None)
        ranked = self._break_tie(request, overlap, fleet, candidates)
        if self._config.ttft_limit_s is not None and request.priority <= 0:
            ranked = self._within_limit(request, overlap, fleet, ranked, self._config.ttft_limit_s)
        ranked = self._watch.considered(request, ranked)
        return [Choice(row[1], row[2]) for row in ranked[: fleet.choices_max]]

    def chosen(self, request: Request, overlap: Overlap, fleet: Fleet, slot: Slot) -> None:
        """Count the prefix and fold the costs that this arrival saw into the means."""
        self._count_prefix(overlap, fleet.now_s)
        self._watch.placed(request, fleet, slot)
        if self._seen_s is None:
            return
        elapsed_s = prices.COST_INTERVAL_S if self._averaged_s is None else fleet.now_s - self._averaged_s
        weight = 1.0 - math.exp(-elapsed_s / prices.COST_WINDOW_S)
        mean_s = self._mean_cost_s
        for row, seen_s in zip(fleet.eligible, self._seen_s, strict=True):
            mean_s[row] += weight * (seen_s - mean_s[row])
        self._averaged_s = fleet.now_s
        self._seen_s = None

    def ended(self, request: Request, fleet: Fleet, outcome: Ended) -> float | None:
        """Compare an outcome with what was expected, and tell the guard; return the regret in seconds."""
        return self._watch.ended(request, fleet, outcome)

    def guarded(self) -> Guarded:
        """Report how far affinity is trusted."""
        return self._watch.report()

    def explain(self, request: Request, overlap: Overlap, fleet: Fleet) -> list[ReplicaCost]:
        """Return every term for every eligible replica."""
        self._follow(fleet)
        details: list[Costs] = []
        self._evaluate(request, overlap, fleet, seen_s=None, details=details)
        return [costs.explained() for costs in details]

    def _within_limit(
        self, request: Request, overlap: Overlap, fleet: Fleet, ranked: list[Row], limit_s: float
    ) -> list[Row]:
        """Leave a replica whose first token would come too late for those where it comes in half the limit.

        Only while the fleet has room: in a saturated one the requests moved would make the others late too.
        """
        busy = fleet.decay() / RATE_WINDOW_S * fleet.total(fleet.work_s) / len(fleet.eligible)
        if busy >= prices.LIMIT_UTILISATION_MAX:
            return ranked
        details: list[Costs] = []
        self._evaluate(request, overlap, fleet, seen_s=None, details=details)
        first_token_s = {costs.slot: costs.waiting_s + costs.own_prefill_s for costs in details}
        if first_token_s[ranked[0][1]] <= limit_s:
            return ranked
        early = [costs for costs in details if first_token_s[costs.slot] < 0.5 * limit_s]
        early.sort(key=lambda costs: costs.total_s)
        return [costs.row() for costs in early] or ranked

    def _follow(self, fleet: Fleet) -> None:
        """Give new replicas a mean cost of zero: they attract new conversations."""
        if fleet.membership == self._membership:
            return
        known = {name: mean for name, mean in zip(self._ids, self._mean_cost_s, strict=True) if name is not None}
        self._ids = list(fleet.id)
        self._mean_cost_s = [0.0 if name is None else known.get(name, 0.0) for name in self._ids]
        self._membership = fleet.membership

    def _costs_wanted(self, fleet: Fleet) -> list[float] | None:
        due = self._averaged_s is None or fleet.now_s - self._averaged_s >= prices.COST_INTERVAL_S
        return [] if due else None

    def _count_prefix(self, overlap: Overlap, now_s: float) -> None:
        key = overlap.frontier_key
        if key is None:
            return
        rate = self._rate(key, now_s) + 1.0
        self._popularity.pop(key, None)
        self._popularity[key] = (rate, now_s)
        if len(self._popularity) > prices.PREFIXES_MAX:
            del self._popularity[next(iter(self._popularity))]

    def _rate(self, key: int, now_s: float) -> float:
        """Return the requests for a prefix in the last window, decayed."""
        count, counted_s = self._popularity.get(key, (0.0, now_s))
        return count * math.exp((counted_s - now_s) / prices.POPULARITY_WINDOW_S)

    def _copies_gain(self, overlap: Overlap, deepest: list[int], fleet: Fleet) -> tuple[int, float]:
        """Return the deepest depth anywhere and N, the requests that would pay back one more copy of it."""
        frontier = fleet.deepest(deepest)
        if not frontier or overlap.frontier_key is None:
            return frontier, 0.0
        rate = self._rate(overlap.frontier_key, fleet.now_s) / prices.POPULARITY_WINDOW_S
        if not rate:
            return frontier, 0.0
        copies = sum([deepest[slot] >= frontier for slot in fleet.eligible])
        return frontier, rate * self._config.copy_horizon_s / (copies + 1)

    def _evaluate(  # noqa: C901 - one loop without calls: it is the cost of every decision
        self,
        request: Request,
        overlap: Overlap,
        fleet: Fleet,
        *,
        seen_s: list[float] | None,
        details: list[Costs] | None,
    ) -> list[Row]:
        """Compute the cost of the eligible replicas.

        Args:
            request: To be placed.
            overlap: One row per slot.
            fleet: Columns.
            seen_s: Receives max(W, M) + T + mem of each eligible replica, if given.
            details: Receives everything about each eligible replica, if given.

        Returns:
            The replicas that may be among the best `choices_max`, ties included. Replicas that cannot are left out,
            unless `seen_s` or `details` ask for all. The guard is told which ones are best for its rivals.
        """
        config, learned, now_s = self._config, fleet.learned, fleet.now_s
        prompt_tokens = request.prompt_tokens
        output_tokens = learned.expected_output_tokens(request.output_tokens_max)
        alpha, beta, scales = learned.prefill.alpha, learned.prefill.beta, learned.prefill.scale
        # Reuse: tiers whose loading costs less than computing count.
        host_load_s, disk_load_s = config.host_load_s, config.disk_load_s
        deepest, host = overlap.device, overlap.device
        if alpha > host_load_s:
            deepest = host = overlap.host
            if alpha > disk_load_s:
                deepest = overlap.disk
        device, ages = overlap.device, overlap.age_s
        credits, bucket = learned.credit.factor, learned.credit.bucket
        frontier, gain = self._copies_gain(overlap, deepest, fleet)
        cold_new = max(1.0, prompt_tokens)
        full_prefill = cold_new * (alpha + beta * (prompt_tokens - 0.5 * cold_new))
        full_paid = full_prefill
        if gain > 0.0:
            warm = max(1.0, prompt_tokens - frontier)
            warm_prefill = warm * (alpha + beta * (prompt_tokens - 0.5 * warm))
            full_paid = warm_prefill + (full_prefill - warm_prefill) / (1.0 + gain)
        loads_s = fleet.adapters.loads_s(request.adapter, now_s)
        # What is the same for all replicas in the price of prefill work. Others count by their weight over our own.
        own_weight = fleet.weight_of(request.priority)
        weight_total = fleet.total(fleet.weight)
        usual_weight = weight_total / max(1.0, fleet.total(fleet.requests)) if weight_total else own_weight
        mean = config.fleet_mix / len(fleet.eligible)
        own, decay = 1.0 - config.fleet_mix, fleet.decay() / RATE_WINDOW_S
        stall = config.ttft_target_s / (learned.expected_output_tokens(None) * config.tpot_target_s) / own_weight
        price_max, busy_max = config.price_max, config.utilisation_max
        price_base = 1.0 + stall * mean * weight_total
        price_least = min(price_base, price_max)
        rate_mean = mean * decay * fleet.total(fleet.arrivals)
        busy_mean = mean * decay * fleet.total(fleet.work_s)
        stall_own, own_decay, arrival_weight = stall * own, own * decay, config.arrival_weight / own_weight
        weight = config.ttft_target_s / config.tpot_target_s * prices.decode_share(request, learned.output_tokens)
        shared_tokens = prompt_tokens / own_weight
        # Memory and conversations.
        capacity, outputs = fleet.capacity_tokens, fleet.output_tokens
        foreign, kv_usage = fleet.foreign, fleet.kv_usage
        active, active_tokens, resident = overlap.active, overlap.active_tokens, overlap.resident_tokens
        u0, memory_weight, residence_s = config.memory_threshold, config.memory_weight, learned.residence_s
        later_turns = learned.continuation.later[min(request.turn, TURN_BUCKETS - 1)]
        session_tokens = output_tokens + later_turns * (learned.new_tokens + learned.output_tokens)
        eviction_unit = config.eviction_weight * alpha * usual_weight / own_weight
        regret = learned.regret.share
        future = config.future_weight * later_turns
        mean_cost_s, pending = self._mean_cost_s, fleet.pending_weight
        exact, block_size = fleet.exact, fleet.block_size
        doubt = 1.0 - self._watch.credit
        all_wanted = seen_s is not None or details is not None or doubt > 0.0
        blind_best = best_believed = math.inf if self._watch.enabled else -math.inf
        blind_row: Row | None = None
        believed_row: Row | None = None
        last_used = fleet.last_used
        candidates: list[Row] = []
        best: list[float] = []
        choices_max = fleet.choices_max
        threshold = math.inf
        limit_size: int | None = None
        limit = cached_tokens_max(prompt_tokens, limit_size)
        columns = zip(
            fleet.slot,
            deepest,
            scales,
            fleet.pending_s,
            fleet.busy_since_s,
            fleet.next_step_s,
            fleet.next_step_token_s,
            fleet.weight,
            fleet.arrivals,
            fleet.work_s,
            strict=False,  # an overlap may have rows for slots that are not known here yet
        )
        rows = columns if len(fleet.eligible) == fleet.slots else compress(columns, fleet.is_eligible)

        for slot, depth, scale, compute_wait, busy_since, step, step_token, weighed, arrivals, work_s in rows:
            # n, p: tokens to compute and their seconds
            cold_prefill = scale * full_prefill
            if depth:
                if block_size[slot] != limit_size:
                    limit_size = block_size[slot]
                    limit = cached_tokens_max(prompt_tokens, limit_size)
                cached = depth if depth < limit else limit
                credit = credits[exact[slot]][bucket(ages[slot])]
                new = prompt_tokens - credit * cached
                if new < 1.0:
                    new = 1.0
                own_prefill = scale * new * (alpha + beta * (prompt_tokens - 0.5 * new))
                paid_prefill = own_prefill
                if gain > 0.0 and depth < frontier:  # p̃: a new copy of a hot prefix is an investment
                    warm = max(1.0, new - (frontier - depth))
                    warm_prefill = scale * warm * (alpha + beta * (prompt_tokens - 0.5 * warm))
                    paid_prefill = warm_prefill + (own_prefill - warm_prefill) / (1.0 + gain)
                if depth > device[slot]:
                    load = (host[slot] - device[slot]) * host_load_s + (depth - host[slot]) * disk_load_s
                    own_prefill += load
                    paid_prefill += load
            else:
                cached, credit, new = 0, 1.0, cold_new
                own_prefill = cold_prefill
                paid_prefill = scale * full_paid
            if loads_s is not None:
                own_prefill += loads_s[slot][0]
                paid_prefill += loads_s[slot][1]
                cold_prefill += loads_s[slot][1]
            # W: wait for compute
            if compute_wait:
                half = 0.5 * compute_wait
                compute_wait -= now_s - busy_since
                if compute_wait < half:
                    compute_wait = half
            # T: own decoding, and what it costs the others
            decode = weight * (step + step_token * shared_tokens)
            floor = compute_wait + decode
            if (
                floor + paid_prefill * price_least > threshold
                and floor + cold_prefill * price_least > blind_best
                and not all_wanted
            ):
                continue
            # X: what a second of prefill costs everybody here
            rate = rate_mean + own_decay * arrivals
            busy = busy_mean + own_decay * work_s
            if busy > busy_max:
                busy = busy_max
            price = (
                price_base + stall_own * weighed + arrival_weight * rate * (compute_wait + own_prefill) / (1.0 - busy)
            )
            if price > price_max:
                price = price_max
            prefill = paid_prefill * price
            if floor + prefill > threshold and floor + cold_prefill * price > blind_best and not all_wanted:
                continue
            # M, mem, ev: memory
            memory_wait = memory = eviction = used = 0.0
            tokens_max = capacity[slot]
            if tokens_max:
                need = prompt_tokens - active[slot] + output_tokens
                in_use = active_tokens[slot] + outputs[slot]
                if foreign[slot]:
                    in_use = max(in_use, (kv_usage[slot] or 0.0) * tokens_max)
                used = (in_use + need) / tokens_max
                if used > u0:
                    residence = residence_s[slot]
                    if used > prices.MEMORY_FULL:
                        memory_wait = (used - prices.MEMORY_FULL) * residence
                    activation = (used - u0) / (1.0 - u0)
                    if activation > 1.0:
                        activation = 1.0
                    memory_work = need * residence / tokens_max
                    slack = 1.0 - min(prices.MEMORY_UTILISATION_MAX, used)
                    delayed = (pending[slot] + rate * (memory_wait + memory_work) / slack) / own_weight
                    if delayed > prices.MEMORY_QUEUE_MAX:
                        delayed = prices.MEMORY_QUEUE_MAX
                    memory = memory_weight * memory_work * activation * activation * (1.0 + delayed)
                held = resident[slot]
                if held:
                    fullness = held / tokens_max
                    eviction = (
                        eviction_unit * scale * regret[slot] * fullness * fullness * (new + session_tokens) * price
                    )
            # C
            waiting = compute_wait if compute_wait > memory_wait else memory_wait
            later = future * mean_cost_s[slot]
            cost = waiting + prefill + eviction + decode + memory
            reuse = (cold_prefill - paid_prefill) * price
            believed = cost + later
            blind = believed + reuse
            total = believed + doubt * reuse
            if seen_s is not None:
                seen_s.append(waiting + decode + memory)
            if details is not None:
                details.append(
                    Costs(
                        slot,
                        cached,
                        waiting,
                        prefill,
                        eviction,
                        decode,
                        memory,
                        later,
                        doubt * reuse,
                        total,
                        blind,
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
                        0.0 if loads_s is None else loads_s[slot][0],
                        own_weight,
                    )
                )
            if total > threshold and blind > blind_best and not doubt:
                continue
            unshared = cost + (own_prefill - paid_prefill) * price
            row = (total, slot, cached, unshared, believed, blind, price, waiting, own_prefill)
            if blind <= blind_best and (
                blind < blind_best or blind_row is None or last_used[slot] < last_used[blind_row[1]]
            ):
                blind_best, blind_row = blind, row
            if doubt and believed < best_believed:
                best_believed, believed_row = believed, row
            if total <= threshold:
                candidates.append(row)
                insort(best, total)
                if len(best) > choices_max:
                    best.pop()
                if len(best) == choices_max:
                    threshold = best[-1] + prices.TIE_S
        self._watch.evaluated(blind_row, believed_row)
        return candidates

    @staticmethod
    def _break_tie(request: Request, overlap: Overlap, fleet: Fleet, candidates: list[Row]) -> list[Row]:
        """Order candidates by cost, the best choice among those that tie with the cheapest first."""
        candidates.sort()
        bound = candidates[0][0] + prices.TIE_S
        tied = [candidate for candidate in candidates if candidate[0] <= bound]
        if len(tied) == 1:
            return candidates
        capacity, in_use, outputs = fleet.capacity_tokens, overlap.active_tokens, fleet.output_tokens
        used = [(in_use[row[1]] + outputs[row[1]]) / (capacity[row[1]] or 1) for row in tied]
        least = min(used)
        emptiest = [candidate for candidate, share in zip(tied, used, strict=True) if share <= least]
        if request.route == "load" or request.basis == "none":
            first = min(emptiest, key=lambda candidate: fleet.last_used[candidate[1]])
        else:
            key, hashes = request.prefix_key, fleet.hash
            first = max(emptiest, key=lambda candidate: mix(key, hashes[candidate[1]]))
        return [first, *(candidate for candidate in candidates if candidate is not first)]
