//! The index for tests: the same operations as `warmfront.reference.index`, so that the two can be compared.
//!
//! The live router reaches its indexes through the core and never through this class.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use warmfront_core::block::{BlockExtras, BlockHasher, ExtraKey, SeqHash};
use warmfront_core::index::{Feed, Index as CoreIndex, IndexOptions, Restoring, SlotRecord};
use warmfront_core::kv::wire::{self, ExtraKeys, KvEvent, Stored, Tier};

/// Adds what this module has to the extension module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Index>()?;
    module.add_function(wrap_pyfunction!(hash_tokens, module)?)?;
    module.add_function(wrap_pyfunction!(decode_batch, module)?)
}

/// One index over the replicas of a pool.
#[pyclass(frozen, module = "warmfront._core")]
pub(crate) struct Index {
    core: Arc<CoreIndex>,
}

#[pymethods]
impl Index {
    #[new]
    #[pyo3(signature = (*, block_size, seed=0, lookahead=0, facts_max=67_108_864, predicted_ttl_s=5.0, approximate_ttl_s=600.0))]
    fn new(
        block_size: u32,
        seed: u64,
        lookahead: u32,
        facts_max: u64,
        predicted_ttl_s: f64,
        approximate_ttl_s: f64,
    ) -> Self {
        let options = IndexOptions { block_size, seed, lookahead, facts_max, predicted_ttl_s, approximate_ttl_s };
        Self { core: Arc::new(CoreIndex::new(options)) }
    }

    /// Adds a replica; without `exact` it has no events.
    #[pyo3(signature = (slot, *, exact=true, capacity_blocks=None))]
    fn add_slot(&self, slot: u32, exact: bool, capacity_blocks: Option<u64>) {
        self.core.add_slot(slot, if exact { Feed::Exact } else { Feed::Approximate }, capacity_blocks);
    }

    fn remove_slot(&self, slot: u32) {
        self.core.remove_slot(slot);
    }

    fn forget_confirmed(&self, slot: u32) {
        self.core.forget_confirmed(slot);
    }

    fn doubt(&self, slot: u32) {
        self.core.doubt(slot);
    }

    fn note_lag(&self, slot: u32, lag_s: f64) {
        self.core.note_lag(slot, lag_s);
    }

    fn set_stale(&self, slot: u32, stale: bool) {
        self.core.set_stale(slot, stale);
    }

    /// Decodes and applies one payload; returns the counts of the report by name.
    fn apply<'py>(&self, py: Python<'py>, slot: u32, payload: &[u8], now_s: f64) -> PyResult<Bound<'py, PyDict>> {
        let report = py
            .detach(|| wire::decode(payload).map(|batch| self.core.apply(slot, &batch, now_s)))
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let dict = PyDict::new(py);
        dict.set_item("stored", report.stored)?;
        dict.set_item("duplicates", report.duplicates)?;
        dict.set_item("removed", report.removed)?;
        dict.set_item("unknown_removals", report.unknown_removals)?;
        dict.set_item("cleared", report.cleared)?;
        dict.set_item("unknown_parents", report.unknown_parents)?;
        dict.set_item("offloaded", report.offloaded)?;
        dict.set_item("unknown_placeholders", report.unknown_placeholders)?;
        dict.set_item("malformed", report.malformed)?;
        dict.set_item("unknown_events", report.unknown_events)?;
        dict.set_item("other_block_size", report.other_block_size)?;
        dict.set_item("lookahead", report.lookahead)?;
        Ok(dict)
    }

    /// Columns by name, in blocks.
    fn overlap<'py>(&self, py: Python<'py>, hashes: Vec<u64>, now_s: f64) -> PyResult<Bound<'py, PyDict>> {
        let overlap = self.core.overlap(&sequence(hashes), now_s);
        let dict = PyDict::new(py);
        dict.set_item("device", overlap.device)?;
        dict.set_item("confirmed", overlap.confirmed)?;
        dict.set_item("host", overlap.host)?;
        dict.set_item("disk", overlap.disk)?;
        dict.set_item("active", overlap.active)?;
        dict.set_item("active_blocks", overlap.active_blocks)?;
        dict.set_item("resident", overlap.resident)?;
        dict.set_item("evicted", overlap.evicted)?;
        dict.set_item("regretted", overlap.regretted)?;
        dict.set_item("age_s", overlap.age_s)?;
        dict.set_item("frontier_key", overlap.frontier_key)?;
        Ok(dict)
    }

    fn dispatch(&self, id: u64, hashes: Vec<u64>, slot: u32, now_s: f64) {
        self.core.dispatched(id, &sequence(hashes), slot, now_s);
    }

    fn release(&self, id: u64) {
        self.core.released(id);
    }

    fn withdraw(&self, id: u64) {
        self.core.withdrawn(id);
    }

    /// What is known of a slot, as bytes: what a snapshot holds of one replica.
    fn record<'py>(&self, py: Python<'py>, slot: u32, now_s: f64) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.core.record(slot, now_s).encode())
    }

    /// Puts a record back into a slot that knows nothing. Its facts are unverified until `set_stale(slot, False)`.
    ///
    /// Raises `ValueError` when the bytes are no record; nothing has changed then.
    fn restore(&self, slot: u32, record: &[u8], copied_s: f64, now_s: f64) -> PyResult<()> {
        let record = SlotRecord::decode(record).map_err(PyValueError::new_err)?;
        let mut restoring = Restoring::new(Arc::clone(&self.core), record, slot, copied_s);
        while restoring.step(now_s) {}
        Ok(())
    }

    /// Sizes of the whole index; `slots` has one row a slot, `None` where there is no replica.
    fn stats<'py>(&self, py: Python<'py>, slots: u32) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.core.stats();
        let dict = PyDict::new(py);
        dict.set_item("blocks", stats.blocks)?;
        dict.set_item("confirmed_facts", stats.confirmed_facts)?;
        dict.set_item("predicted_facts", stats.predicted_facts)?;
        dict.set_item("offloaded_facts", stats.offloaded_facts)?;
        dict.set_item("evicted_for_room", stats.evicted_for_room)?;
        dict.set_item("in_flight", stats.in_flight)?;
        dict.set_item("bytes", stats.bytes)?;
        let rows = PyList::empty(py);
        for slot in 0..slots {
            rows.append(self.slot_stats(py, slot)?)?;
        }
        dict.set_item("slots", rows)?;
        Ok(dict)
    }
}

impl Index {
    fn slot_stats<'py>(&self, py: Python<'py>, slot: u32) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(stats) = self.core.slot_stats(slot) else { return Ok(None) };
        let dict = PyDict::new(py);
        dict.set_item("confirmed", stats.confirmed)?;
        dict.set_item("predicted", stats.predicted)?;
        dict.set_item("predictions", stats.predictions)?;
        dict.set_item("unconfirmed", stats.unconfirmed)?;
        dict.set_item("evicted", stats.evicted)?;
        dict.set_item("regretted", stats.regretted)?;
        dict.set_item("active", stats.active)?;
        Ok(Some(dict))
    }
}

fn sequence(hashes: Vec<u64>) -> Vec<SeqHash> {
    hashes.into_iter().map(SeqHash).collect()
}

/// Sequence hashes of the full blocks of a prompt.
#[pyfunction]
#[pyo3(signature = (tokens, block_size, seed=0, adapter=None, salt=None))]
fn hash_tokens(
    tokens: Vec<u32>,
    block_size: u32,
    seed: u64,
    adapter: Option<String>,
    salt: Option<String>,
) -> Vec<u64> {
    let extras = BlockExtras { adapter, salt, media: Vec::new() };
    BlockHasher::new(seed, block_size).chain(&tokens, &extras).into_iter().map(|hash| hash.0).collect()
}

/// A decoded payload as plain lists and dicts: `[ts, events, rank, unknown events]`.
#[pyfunction]
fn decode_batch<'py>(py: Python<'py>, payload: &[u8]) -> PyResult<Bound<'py, PyList>> {
    let batch = wire::decode(payload).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let events = PyList::empty(py);
    for event in &batch.events {
        events.append(event_dict(py, event)?)?;
    }
    let list = PyList::empty(py);
    list.append(batch.ts)?;
    list.append(events)?;
    list.append(batch.rank)?;
    list.append(batch.unknown_events)?;
    Ok(list)
}

fn event_dict<'py>(py: Python<'py>, event: &KvEvent) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    match event {
        KvEvent::Stored(stored) => stored_dict(py, stored, &dict)?,
        KvEvent::Removed(removed) => {
            dict.set_item("type", "removed")?;
            dict.set_item("block_hashes", removed.block_hashes.iter().map(|hash| hash.0).collect::<Vec<_>>())?;
            dict.set_item("tier", tier_word(removed.tier))?;
            dict.set_item("group", removed.group)?;
        }
        KvEvent::Cleared => dict.set_item("type", "cleared")?,
    }
    Ok(dict)
}

fn stored_dict(py: Python<'_>, stored: &Stored, dict: &Bound<'_, PyDict>) -> PyResult<()> {
    dict.set_item("type", "stored")?;
    dict.set_item("block_hashes", stored.block_hashes.iter().map(|hash| hash.0).collect::<Vec<_>>())?;
    dict.set_item("parent", stored.parent.map(|hash| hash.0))?;
    dict.set_item("token_ids", &stored.token_ids)?;
    dict.set_item("block_size", stored.block_size)?;
    dict.set_item("lora_id", stored.lora_id)?;
    dict.set_item("lora_name", &stored.lora_name)?;
    dict.set_item("tier", tier_word(stored.tier))?;
    dict.set_item("group", stored.group)?;
    dict.set_item("kind", stored.kind.map(|kind| format!("{kind:?}").to_lowercase()))?;
    dict.set_item("window", stored.window)?;
    dict.set_item("session_id", &stored.session_id)?;
    let width = stored.lookahead.max(1) as usize;
    dict.set_item("lookahead", stored.lookahead_tokens.chunks(width).map(<[u32]>::to_vec).collect::<Vec<_>>())?;
    match &stored.extra_keys {
        ExtraKeys::Absent => dict.set_item("extra_keys", py.None()),
        ExtraKeys::Plain => dict.set_item("extra_keys", PyList::empty(py)),
        ExtraKeys::Each(each) => {
            let blocks = PyList::empty(py);
            for keys in each {
                let block = PyList::empty(py);
                for key in keys {
                    block.append(key_item(py, key)?)?;
                }
                blocks.append(block)?;
            }
            dict.set_item("extra_keys", blocks)
        }
    }
}

fn key_item<'py>(py: Python<'py>, key: &ExtraKey) -> PyResult<Bound<'py, PyAny>> {
    Ok(match key {
        ExtraKey::Adapter(name) => ("adapter", name).into_pyobject(py)?.into_any(),
        ExtraKey::Text(text) => ("text", text).into_pyobject(py)?.into_any(),
        ExtraKey::Item(identifier, offset) => ("item", identifier, offset).into_pyobject(py)?.into_any(),
        ExtraKey::Bytes(bytes) => ("bytes", PyBytes::new(py, bytes)).into_pyobject(py)?.into_any(),
        ExtraKey::Int(number) => ("int", number).into_pyobject(py)?.into_any(),
    })
}

fn tier_word(tier: Tier) -> &'static str {
    match tier {
        Tier::Gpu => "gpu",
        Tier::Cpu => "cpu",
        Tier::Disk => "disk",
        Tier::Remote => "remote",
    }
}
