//! Which replicas a decision must look at, from the columns of the ledger as they lie in Python's lists.
//!
//! Attributes are read by the names that `policy/evaluation.py`, `policy/base.py` and `types.py` give them.

use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use warmfront_core::cost::{Candidate, Candidates, Memory, MemoryTerms, Reuse, Row, Scarce, Terms};
use warmfront_core::rendezvous;

const AGE_BUCKETS: usize = 16;

/// Bounds of what one request costs at each replica that may be chosen.
#[pyclass(frozen, module = "warmfront._core")]
pub(crate) struct Bounds {
    candidates: Mutex<Candidates>,
    hashes: Py<PyList>,
    tie_s: f64,
}

#[pymethods]
impl Bounds {
    /// Computes them all.
    ///
    /// `memory`: the constants of `prices.MEMORY`; `tie_s`: costs this close are equal.
    #[new]
    fn new(evaluation: Evaluation<'_>, memory: (f64, f64, f64, f64), tie_s: f64) -> PyResult<Self> {
        let terms = evaluation.terms(memory);
        let reader = Reader::new(&evaluation)?;
        let rows = if evaluation.fleet.is_everyone {
            (0..evaluation.fleet.eligible.len()).map(|slot| reader.candidate(&terms, slot)).collect::<PyResult<_>>()
        } else {
            let slots: Vec<usize> = evaluation.fleet.eligible.extract()?;
            slots.into_iter().map(|slot| reader.candidate(&terms, slot)).collect()
        }?;
        let hashes = evaluation.fleet.hash.clone().unbind();
        Ok(Self { candidates: Mutex::new(Candidates::new(rows)), hashes, tie_s })
    }

    /// The slots to look at first: of `count` that look best, and of those that other rules would choose.
    fn first(&self, count: usize) -> Vec<u32> {
        self.candidates.lock().first(count)
    }

    /// Those that may still be among the best, by what was settled.
    fn rest(&self, count: usize) -> Vec<u32> {
        self.candidates.lock().rest(count)
    }

    /// Takes over the costs of replicas that were looked at.
    fn settle(&self, costs: Vec<Costs>) {
        let mut candidates = self.candidates.lock();
        for each in costs {
            candidates.settle(each.slot, each.total_s, each.total_s - each.withheld_s, each.blind_s);
        }
    }

    /// Of those that cost nearly as little as the cheapest the one that is preferred, unless it was looked at.
    ///
    /// The one with the emptiest memory; of equals the favourite of `key`, or with `None` the one unused for longest.
    fn favourite(&self, py: Python<'_>, key: Option<u64>) -> PyResult<Option<u32>> {
        let hashes = self.hashes.bind(py);
        self.candidates.lock().favourite(self.tie_s, |row| match key {
            Some(key) => Ok(rendezvous::mix(key, hashes.get_item(row.slot as usize)?.extract()?)),
            None => Ok(u64::MAX - row.last_used),
        })
    }

    /// The slots that a key prefers by rendezvous hashing, best first.
    fn preferred(&self, py: Python<'_>, key: u64, count: usize) -> PyResult<Vec<u32>> {
        let hashes = self.hashes.bind(py);
        let preference = |slot: u32| Ok((rendezvous::mix(key, hashes.get_item(slot as usize)?.extract()?), slot));
        let slots: Vec<u32> = self.candidates.lock().rows().iter().map(|row| row.slot).collect();
        let mut ranked = slots.into_iter().map(preference).collect::<PyResult<Vec<_>>>()?;
        ranked.sort_unstable_by(|one, other| other.cmp(one));
        Ok(ranked.into_iter().take(count).map(|(_, slot)| slot).collect())
    }

    /// max(W, M) + T + mem + net of each replica, in the order of `eligible`: not bounds, but what they are.
    fn seen_s(&self) -> Vec<f64> {
        self.candidates.lock().rows().iter().map(|row| row.bound.seen_s).collect()
    }

    /// What is known of each replica, in the order of `eligible`: at least the cost, with full credit, by load alone.
    fn bounds_s(&self) -> Vec<(f64, f64, f64)> {
        let of_row = |row: &Candidate| (row.bound.total_s, row.bound.trusting_s, row.bound.blind_s);
        self.candidates.lock().rows().iter().map(of_row).collect()
    }
}

/// What `Evaluation.costs` says of a replica.
#[derive(FromPyObject)]
struct Costs {
    slot: u32,
    total_s: f64,
    withheld_s: f64,
    blind_s: f64,
}

#[derive(FromPyObject)]
struct Evaluation<'py> {
    fleet: Fleet<'py>,
    overlap: Overlap<'py>,
    config: Config,
    deepest: Bound<'py, PyList>,
    loads: Loads,
    scales: Bound<'py, PyList>,
    mean_cost_s: Bound<'py, PyList>,
    loads_s: Option<Bound<'py, PyList>>,
    alpha: f64,
    beta: f64,
    prompt_tokens: u64,
    output_tokens: f64,
    full_prefill: f64,
    full_paid: f64,
    frontier: u64,
    found: f64,
    gain: f64,
    price_base: f64,
    stall_own: f64,
    arrivals_mean: f64,
    busy_mean: f64,
    own_decay: f64,
    arrival_weight: f64,
    decode_weight: f64,
    shared_tokens: f64,
    usual_weight: f64,
    own_weight: f64,
    session_tokens: f64,
    later_turns: f64,
    doubt: f64,
}

#[derive(FromPyObject)]
struct Config {
    price_max: f64,
    utilisation_max: f64,
    memory_threshold: f64,
    memory_weight: f64,
    eviction_weight: f64,
    future_weight: f64,
}

/// What it costs to load one token from a slower tier.
#[derive(FromPyObject)]
struct Loads {
    host_s: f64,
    disk_s: f64,
}

/// Columns of the ledger.
#[derive(FromPyObject)]
struct Fleet<'py> {
    now_s: f64,
    held_s: f64,
    is_everyone: bool,
    learned: Learned<'py>,
    eligible: Bound<'py, PyList>,
    hash: Bound<'py, PyList>,
    exact: Bound<'py, PyList>,
    block_size: Bound<'py, PyList>,
    capacity_tokens: Bound<'py, PyList>,
    foreign: Bound<'py, PyList>,
    net_s: Bound<'py, PyList>,
    requests: Bound<'py, PyList>,
    weight: Bound<'py, PyList>,
    kv_usage: Bound<'py, PyList>,
    pending_weight: Bound<'py, PyList>,
    pending_s: Bound<'py, PyList>,
    busy_since_s: Bound<'py, PyList>,
    context_tokens: Bound<'py, PyList>,
    output_tokens: Bound<'py, PyList>,
    admission_s: Bound<'py, PyList>,
    next_step_s: Bound<'py, PyList>,
    next_step_token_s: Bound<'py, PyList>,
    last_used: Bound<'py, PyList>,
    arrivals: Bound<'py, PyList>,
    work_s: Bound<'py, PyList>,
}

#[derive(FromPyObject)]
struct Learned<'py> {
    credit: Credit<'py>,
    reuse: Reused<'py>,
    regret: Regret<'py>,
    residence_s: Bound<'py, PyList>,
}

#[derive(FromPyObject)]
struct Credit<'py> {
    factor: Bound<'py, PyDict>,
}

#[derive(FromPyObject)]
struct Reused<'py> {
    factor: Bound<'py, PyList>,
}

#[derive(FromPyObject)]
struct Regret<'py> {
    share: Bound<'py, PyList>,
}

#[derive(FromPyObject)]
struct Overlap<'py> {
    device: Bound<'py, PyList>,
    host: Bound<'py, PyList>,
    active: Bound<'py, PyList>,
    active_tokens: Bound<'py, PyList>,
    resident_tokens: Bound<'py, PyList>,
    age_s: Bound<'py, PyList>,
}

impl Evaluation<'_> {
    fn terms(&self, (full, utilisation_max, queue_max, output_held): (f64, f64, f64, f64)) -> Terms {
        let config = &self.config;
        Terms {
            now_s: self.fleet.now_s,
            held_s: self.fleet.held_s,
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            alpha: self.alpha,
            beta: self.beta,
            full_prefill_s: self.full_prefill,
            full_paid_s: self.full_paid,
            frontier: self.frontier,
            found: self.found,
            gain: self.gain,
            price_base: self.price_base,
            price_max: config.price_max,
            stall_own: self.stall_own,
            arrivals_mean: self.arrivals_mean,
            busy_mean: self.busy_mean,
            busy_max: config.utilisation_max,
            own_decay: self.own_decay,
            arrival_weight: self.arrival_weight,
            decode_weight: self.decode_weight,
            shared_tokens: self.shared_tokens,
            eviction_unit: config.eviction_weight * self.alpha * self.usual_weight / self.own_weight,
            session_tokens: self.session_tokens,
            future: config.future_weight * self.later_turns,
            doubt: self.doubt,
            own_weight: self.own_weight,
            memory: MemoryTerms {
                threshold: config.memory_threshold,
                weight: config.memory_weight,
                full,
                utilisation_max,
                queue_max,
                output_held,
            },
        }
    }
}

/// Reads one row after the other.
struct Reader<'a, 'py> {
    evaluation: &'a Evaluation<'py>,
    /// η by age: of replicas without live events, and with them.
    credits: [Vec<f64>; 2],
    is_offloadable: bool,
}

impl<'a, 'py> Reader<'a, 'py> {
    fn new(evaluation: &'a Evaluation<'py>) -> PyResult<Self> {
        let factor = &evaluation.fleet.learned.credit.factor;
        let credits = [factor.as_any().get_item(false)?.extract()?, factor.as_any().get_item(true)?.extract()?];
        Ok(Self { evaluation, credits, is_offloadable: !evaluation.deepest.is(&evaluation.overlap.device) })
    }

    fn candidate(&self, terms: &Terms, slot: usize) -> PyResult<Candidate> {
        let fleet = &self.evaluation.fleet;
        let capacity: Option<i64> = fleet.capacity_tokens.get_item(slot)?.extract()?;
        let capacity = capacity.filter(|&tokens| tokens != 0).map(|tokens| tokens as f64);
        let (active, outputs) = (&self.evaluation.overlap.active_tokens, float(&fleet.output_tokens, slot)?);
        let in_use = count(active, slot)? + outputs;
        let memory = capacity.map(|capacity| self.memory(terms, slot, capacity, outputs)).transpose()?;
        Ok(Candidate {
            slot: slot as u32,
            last_used: fleet.last_used.get_item(slot)?.extract()?,
            used: in_use / capacity.unwrap_or(1.0),
            bound: terms.bound(&self.row(slot, memory)?),
            is_settled: false,
        })
    }

    fn row(&self, slot: usize, memory: Option<Memory>) -> PyResult<Row> {
        let (evaluation, fleet) = (self.evaluation, &self.evaluation.fleet);
        let pending_s = float(&fleet.pending_s, slot)?;
        Ok(Row {
            pending_s,
            busy_since_s: if pending_s == 0.0 { 0.0 } else { float(&fleet.busy_since_s, slot)? },
            step_s: float(&fleet.next_step_s, slot)?,
            step_token_s: float(&fleet.next_step_token_s, slot)?,
            weight: float(&fleet.weight, slot)?,
            arrivals: float(&fleet.arrivals, slot)?,
            work_s: float(&fleet.work_s, slot)?,
            admission_s: float(&fleet.admission_s, slot)?,
            scale: float(&evaluation.scales, slot)?,
            mean_cost_s: float(&evaluation.mean_cost_s, slot)?,
            net_s: float(&fleet.net_s, slot)?,
            reuse: self.reuse(slot)?,
            adapter: evaluation.loads_s.as_ref().map(|loads_s| loads_s.get_item(slot)?.extract()).transpose()?,
            memory,
        })
    }

    fn reuse(&self, slot: usize) -> PyResult<Option<Reuse>> {
        let (fleet, overlap) = (&self.evaluation.fleet, &self.evaluation.overlap);
        let depth: u64 = self.evaluation.deepest.get_item(slot)?.extract()?;
        if depth == 0 {
            return Ok(None);
        }
        let is_exact: bool = fleet.exact.get_item(slot)?.extract()?;
        let credit = self.credits[usize::from(is_exact)][age_bucket(float(&overlap.age_s, slot)?)];
        Ok(Some(Reuse {
            depth,
            block_size: fleet.block_size.get_item(slot)?.extract()?,
            credit: float(&fleet.learned.reuse.factor, slot)? * credit,
            load_s: if self.is_offloadable { self.load_s(slot, depth)? } else { 0.0 },
        }))
    }

    fn load_s(&self, slot: usize, depth: u64) -> PyResult<f64> {
        let (overlap, loads) = (&self.evaluation.overlap, &self.evaluation.loads);
        let (depth, device) = (depth as f64, count(&overlap.device, slot)?);
        if depth <= device {
            return Ok(0.0);
        }
        let host = count(&overlap.host, slot)?;
        Ok((host - device) * loads.host_s + (depth - host) * loads.disk_s)
    }

    fn memory(&self, terms: &Terms, slot: usize, capacity: f64, outputs: f64) -> PyResult<Memory> {
        let (fleet, overlap) = (&self.evaluation.fleet, &self.evaluation.overlap);
        let held = terms.memory.output_held * outputs;
        let mut in_use = count(&overlap.active_tokens, slot)? + held;
        if float(&fleet.foreign, slot)? != 0.0 {
            let reported: Option<f64> = fleet.kv_usage.get_item(slot)?.extract()?;
            in_use = in_use.max(reported.unwrap_or(0.0) * capacity);
        }
        let mut memory = terms.memory(capacity, in_use, count(&overlap.active, slot)?);
        let resident = count(&overlap.resident_tokens, slot)?;
        if resident != 0.0 {
            memory.resident = Some((resident, float(&fleet.learned.regret.share, slot)?));
        }
        if terms.is_scarce(&memory) {
            memory.scarce = Some(Scarce {
                residence_s: float(&fleet.learned.residence_s, slot)?,
                pending_weight: float(&fleet.pending_weight, slot)?,
                requests: float(&fleet.requests, slot)? + 1.0,
                tokens: float(&fleet.context_tokens, slot)? + held + memory.need,
            });
        }
        Ok(memory)
    }
}

fn float(column: &Bound<'_, PyList>, slot: usize) -> PyResult<f64> {
    column.get_item(slot)?.extract()
}

/// A whole number, for arithmetic with others that are not.
fn count(column: &Bound<'_, PyList>, slot: usize) -> PyResult<f64> {
    column.get_item(slot)?.extract::<i64>().map(|count| count as f64)
}

/// Row of the reuse credit for an age: see `estimators.Credit.bucket`.
fn age_bucket(age_s: f64) -> usize {
    if age_s < 0.0 {
        return AGE_BUCKETS;
    }
    let quarters = (age_s * 4.0) as u64;
    ((u64::BITS - quarters.leading_zeros()) as usize).min(AGE_BUCKETS - 1)
}
