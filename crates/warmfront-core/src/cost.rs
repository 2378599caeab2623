//! What a request costs at each replica, to tell which replicas cannot be chosen.
//!
//! The same arithmetic as `Evaluation.costs` in `policy/evaluation.py`, operation by operation, without its records. That
//! one decides and explains: what is computed here only says which replicas it need not look at. What is easy to get
//! wrong: a bound must never exceed the cost. A term that only adds may be missing here, and then more replicas are looked
//! at than need be; one that can be negative may not.
//!
//! Source: docs/explanation/policies.md, section `marginal_cost`, with the same symbols.

mod candidates;

pub use candidates::{Candidate, Candidates};
pub use libm::erfc;

/// What is the same for all replicas of one decision. Seconds and tokens.
#[derive(Clone, Debug)]
pub struct Terms {
    pub now_s: f64,
    pub held_s: f64,
    /// L, ô.
    pub prompt_tokens: u64,
    pub output_tokens: f64,
    /// α and β of the prefill, and its seconds without any reuse at scale 1: p₀, p̃.
    pub alpha: f64,
    pub beta: f64,
    pub full_prefill_s: f64,
    pub full_paid_s: f64,
    /// Tokens of the deepest prefix anywhere, what of them is found there, and how many requests pay for another copy.
    pub frontier: u64,
    pub found: f64,
    pub gain: f64,
    /// Of X.
    pub price_base: f64,
    pub price_max: f64,
    pub stall_own: f64,
    pub arrivals_mean: f64,
    pub busy_mean: f64,
    pub busy_max: f64,
    pub own_decay: f64,
    pub arrival_weight: f64,
    /// Of T.
    pub decode_weight: f64,
    pub shared_tokens: f64,
    /// Of ev and F.
    pub eviction_unit: f64,
    pub session_tokens: f64,
    pub future: f64,
    /// 1 − c.
    pub doubt: f64,
    pub own_weight: f64,
    pub memory: MemoryTerms,
}

/// Of M and mem.
#[derive(Clone, Debug)]
pub struct MemoryTerms {
    pub threshold: f64,
    pub weight: f64,
    /// Share in use from which on requests wait.
    pub full: f64,
    pub utilisation_max: f64,
    pub queue_max: f64,
    /// Part of its expected output that a request in flight holds.
    pub output_held: f64,
}

/// One replica.
#[derive(Clone, Debug, Default)]
pub struct Row {
    pub pending_s: f64,
    pub busy_since_s: f64,
    pub step_s: f64,
    pub step_token_s: f64,
    pub weight: f64,
    pub arrivals: f64,
    pub work_s: f64,
    pub admission_s: f64,
    pub scale: f64,
    pub mean_cost_s: f64,
    /// net: there and back.
    pub net_s: f64,
    /// What it holds of the prompt; `None`: nothing.
    pub reuse: Option<Reuse>,
    /// Seconds that loading the adapter takes, and what of them this request answers for.
    pub adapter: Option<(f64, f64)>,
    /// `None`: its capacity is not known.
    pub memory: Option<Memory>,
}

/// What a replica holds of the prompt.
#[derive(Clone, Copy, Debug)]
pub struct Reuse {
    pub depth: u64,
    /// Tokens that its engine finds at a time.
    pub block_size: Option<u64>,
    /// r·η.
    pub credit: f64,
    /// ℓ: to load what is not on the device.
    pub load_s: f64,
}

/// The KV memory of a replica, in tokens.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    pub capacity: f64,
    /// Share in use with this request, and the tokens that it needs more.
    pub used: f64,
    pub need: f64,
    /// Tokens held, and g; `None`: nothing that could be evicted.
    pub resident: Option<(f64, f64)>,
    /// `None`: memory is not scarce.
    pub scarce: Option<Scarce>,
}

/// What says how long a scarce memory makes wait.
#[derive(Clone, Copy, Debug)]
pub struct Scarce {
    /// R.
    pub residence_s: f64,
    /// Of the requests without a first token.
    pub pending_weight: f64,
    /// Requests that share the memory, and their tokens when none of them shares a block; this one among them.
    pub requests: f64,
    pub tokens: f64,
}

/// At most what a replica costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    pub total_s: f64,
    pub trusting_s: f64,
    pub blind_s: f64,
    /// max(W, M) + T + mem + net, of which mean costs are made; not a bound but what it is.
    pub seen_s: f64,
}

impl Terms {
    pub fn bound(&self, row: &Row) -> Bound {
        let length = self.prompt_tokens as f64;
        // n, p, p̃
        let mut cold_s = row.scale * self.full_prefill_s;
        let (new, mut own_s, mut paid_s) = match &row.reuse {
            Some(reuse) => self.prefill(reuse, row.scale),
            None => (length.max(1.0), cold_s, row.scale * self.full_paid_s),
        };
        if let Some((load_s, share_s)) = row.adapter {
            own_s += load_s;
            paid_s += share_s;
            cold_s += share_s;
        }
        // W, T
        let mut compute_wait_s = row.pending_s;
        if compute_wait_s != 0.0 {
            let half = 0.5 * compute_wait_s;
            compute_wait_s = (compute_wait_s - (self.now_s - row.busy_since_s)).max(half);
        }
        let decode_s = self.decode_weight * (row.step_s + row.step_token_s * self.shared_tokens);
        // X
        let rate = self.arrivals_mean + self.own_decay * row.arrivals;
        let busy = (self.busy_mean + self.own_decay * row.work_s).min(self.busy_max);
        let delayed = self.arrival_weight * rate * (compute_wait_s + self.held_s + own_s) / (1.0 - busy);
        let price = (self.price_base + self.stall_own * row.weight + delayed).min(self.price_max);
        // M, mem, ev
        let (mut memory_wait_s, mut memory_s, mut eviction_s) = (row.admission_s, 0.0, 0.0);
        if let Some(memory) = &row.memory {
            let (wait_s, cost_s) = self.scarcity(memory, rate);
            memory_wait_s = memory_wait_s.max(wait_s);
            memory_s = cost_s;
            if let Some((resident, regret)) = memory.resident {
                let full = resident / memory.capacity;
                let unit = self.eviction_unit * row.scale * regret * full * full;
                eviction_s = unit * (new + self.session_tokens) * price;
            }
        }
        // C
        let waiting_s = compute_wait_s.max(memory_wait_s);
        let reuse_s = (cold_s - paid_s) * price;
        let later_s = self.future * row.mean_cost_s;
        let trusting_s = waiting_s + paid_s * price + eviction_s + decode_s + memory_s + later_s + row.net_s;
        let withheld_s = self.doubt * reuse_s;
        let total_s = trusting_s + withheld_s;
        Bound {
            total_s,
            trusting_s: total_s - withheld_s,
            blind_s: trusting_s + reuse_s,
            seen_s: waiting_s + decode_s + memory_s + row.net_s,
        }
    }

    /// Tokens to compute where a part of the prompt is held, their seconds, and those after investment.
    fn prefill(&self, reuse: &Reuse, scale: f64) -> (f64, f64, f64) {
        let length = self.prompt_tokens as f64;
        let last = self.prompt_tokens.saturating_sub(1);
        let limit = match reuse.block_size {
            Some(size) if size > 0 => last / size * size,
            _ => last,
        };
        let new = (length - reuse.credit * reuse.depth.min(limit) as f64).max(1.0);
        let own_s = self.seconds(new, scale);
        let mut paid_s = own_s;
        if self.gain > 0.0 && reuse.depth < self.frontier {
            let warm_s = self.seconds((length - self.found).max(1.0).min(new), scale);
            paid_s = warm_s + (own_s - warm_s) / (1.0 + self.gain);
        }
        (new, own_s + reuse.load_s, paid_s + reuse.load_s)
    }

    fn seconds(&self, new: f64, scale: f64) -> f64 {
        scale * new * (self.alpha + self.beta * (self.prompt_tokens as f64 - 0.5 * new))
    }

    /// The memory of a replica that has `in_use` tokens in use, `active` of them of this prompt, and nothing resident.
    pub fn memory(&self, capacity: f64, in_use: f64, active: f64) -> Memory {
        let need = self.prompt_tokens as f64 - active + self.output_tokens;
        Memory { capacity, used: (in_use + need) / capacity, need, resident: None, scarce: None }
    }

    pub fn is_scarce(&self, memory: &Memory) -> bool {
        memory.used > self.memory.threshold
    }

    /// M and mem.
    fn scarcity(&self, memory: &Memory, rate: f64) -> (f64, f64) {
        let Some(scarce) = &memory.scarce else { return (0.0, 0.0) };
        let (terms, used) = (&self.memory, memory.used);
        let wait_s = if used > terms.full { (used - terms.full) * scarce.residence_s } else { 0.0 };
        let chance = terms.chance_of_full(used, scarce.tokens / memory.capacity, scarce.requests);
        let work_s = memory.need * scarce.residence_s / memory.capacity;
        let slack = 1.0 - used.min(terms.utilisation_max);
        let others = scarce.pending_weight + rate * (wait_s + work_s) / slack;
        let delayed = (others / self.own_weight).min(terms.queue_max);
        (wait_s, terms.weight * work_s * chance * (1.0 + delayed))
    }
}

impl MemoryTerms {
    /// φ: see `prices.chance_of_full`.
    fn chance_of_full(&self, used: f64, size: f64, requests: f64) -> f64 {
        let deviation = size / requests.sqrt();
        if deviation <= 0.0 {
            return if used >= self.full { 1.0 } else { 0.0 };
        }
        0.5 * erfc((self.full - used) / (std::f64::consts::SQRT_2 * deviation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 100 tokens of 1 ms each, at a price of 1.
    fn terms() -> Terms {
        Terms {
            now_s: 10.0,
            held_s: 0.0,
            prompt_tokens: 100,
            output_tokens: 20.0,
            alpha: 1e-3,
            beta: 0.0,
            full_prefill_s: 0.1,
            full_paid_s: 0.1,
            frontier: 64,
            found: 64.0,
            gain: 0.0,
            price_base: 1.0,
            price_max: 10.0,
            stall_own: 0.0,
            arrivals_mean: 0.0,
            busy_mean: 0.0,
            busy_max: 0.9,
            own_decay: 0.0,
            arrival_weight: 1.0,
            decode_weight: 0.0,
            shared_tokens: 100.0,
            eviction_unit: 0.0,
            session_tokens: 0.0,
            future: 0.0,
            doubt: 0.0,
            own_weight: 1.0,
            memory: MemoryTerms {
                threshold: 0.5,
                weight: 1.0,
                full: 0.97,
                utilisation_max: 0.9,
                queue_max: 30.0,
                output_held: 0.5,
            },
        }
    }

    fn row() -> Row {
        Row { scale: 1.0, ..Row::default() }
    }

    fn close(one: f64, other: f64) -> bool {
        (one - other).abs() < 1e-12
    }

    #[test]
    fn an_idle_replica_costs_the_prefill_of_what_it_does_not_hold() {
        let warm = Row { reuse: Some(Reuse { depth: 64, block_size: Some(16), credit: 0.5, load_s: 0.002 }), ..row() };
        assert!(close(terms().bound(&row()).total_s, 0.1));
        let bound = terms().bound(&warm);
        assert!(close(bound.total_s, 0.068 + 0.002));
        assert!(close(bound.blind_s, 0.1));
        let all = Row { reuse: Some(Reuse { depth: 112, block_size: Some(16), credit: 1.0, load_s: 0.0 }), ..row() };
        assert!(close(terms().bound(&all).total_s, 0.004), "the last token is always computed");
        assert!(close(Terms { doubt: 1.0, ..terms() }.bound(&warm).total_s, 0.1));
    }

    #[test]
    fn pending_prefill_makes_wait_for_what_is_left_of_it_and_for_half_at_least() {
        let wait_s = |busy_since_s| terms().bound(&Row { pending_s: 4.0, busy_since_s, ..row() }).seen_s;
        assert!(close(wait_s(9.0), 3.0));
        assert!(close(wait_s(2.0), 2.0));
    }

    #[test]
    fn memory_costs_by_the_chance_that_it_fills_and_makes_wait_when_it_is_full() {
        let terms = terms();
        let bound = |in_use, tokens| {
            let mut memory = terms.memory(1000.0, in_use, 0.0);
            let scarce = Scarce { residence_s: 5.0, pending_weight: 0.0, requests: 4.0, tokens };
            memory.scarce = terms.is_scarce(&memory).then_some(scarce);
            terms.bound(&Row { memory: Some(memory), net_s: 0.25, ..row() })
        };
        let work_s = 0.12 * 5.0;
        assert!(close(bound(300.0, 1000.0).seen_s, 0.25));
        assert!(close(bound(850.0, 1000.0).seen_s, 0.25 + work_s * 0.5));
        assert!(close(bound(1080.0, 0.0).seen_s, 0.25 + work_s + 0.23 * 5.0));
        let above = bound(600.0, 1000.0).seen_s - 0.25;
        assert!(above > 0.0 && above < work_s * 0.5, "half a deviation below full: {above}");
    }
}
