//! The engine model and the fleet of the lab.

use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use warmfront_core::error::CoreError;
use warmfront_core::index::IndexOptions;
use warmfront_core::mailbox::encode_events;
use warmfront_sim::content::Segment;
use warmfront_sim::engine::{CacheEvent, Engine, EngineConfig, EngineError, EngineRequest};
use warmfront_sim::fleet::{Arrival, Fleet, FleetOptions};

use crate::errors::to_py;
use crate::port::{Columns, columns};

/// Adds what this module has to the extension module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<SimEngine>()?;
    module.add_class::<SimFleet>()
}

fn read_config(config: &[u8]) -> PyResult<EngineConfig> {
    serde_json::from_slice(config).map_err(|error| PyValueError::new_err(error.to_string()))
}

fn bad_config(error: &EngineError) -> PyErr {
    to_py(CoreError::Config(error.to_string()))
}

/// `(kind, sequence or hash, first block, blocks)`; kinds: `stored`, `removed`, `cleared`, and of slower tiers
/// `offloaded_cpu`, `offloaded_disk`, `dropped_cpu`, `dropped_disk`.
type PlainEvent = (&'static str, u64, u32, u32);

/// Duration, sampled, finished, admitted with cached tokens, pre-empted, events, prefill tokens, decodes.
type PlainStep = (f64, Vec<u64>, Vec<u64>, Vec<(u64, u32)>, Vec<u64>, Vec<PlainEvent>, u64, u64);

fn plain_event(event: &CacheEvent) -> PlainEvent {
    use warmfront_core::kv::wire::Tier;
    match *event {
        CacheEvent::Stored { sequence, first, count } => ("stored", sequence, first, count),
        CacheEvent::Removed { hash } => ("removed", hash, 0, 0),
        CacheEvent::Cleared => ("cleared", 0, 0, 0),
        CacheEvent::Offloaded { tier: Tier::Cpu, hash } => ("offloaded_cpu", hash, 0, 0),
        CacheEvent::Offloaded { hash, .. } => ("offloaded_disk", hash, 0, 0),
        CacheEvent::Dropped { tier: Tier::Cpu, hash } => ("dropped_cpu", hash, 0, 0),
        CacheEvent::Dropped { hash, .. } => ("dropped_disk", hash, 0, 0),
    }
}

/// One engine, stepped by its host. Methods may be called from one thread at a time only.
#[pyclass(frozen)]
pub(crate) struct SimEngine {
    engine: Mutex<Engine>,
}

#[pymethods]
impl SimEngine {
    /// `config` is the JSON of `warmfront.sim.engine.EngineConfig`. Raises `ConfigError`.
    #[new]
    fn new(config: &[u8]) -> PyResult<Self> {
        let engine = Engine::new(read_config(config)?).map_err(|error| bad_config(&error))?;
        Ok(Self { engine: Mutex::new(engine) })
    }

    /// Queues a request under a number never used before. Raises `ValueError` when it could never run.
    fn submit(
        &self,
        id: u64,
        prompt_tokens: u32,
        output_tokens: u32,
        hashes: Vec<u64>,
        adapter: Option<&str>,
        reads_cache: bool,
    ) -> PyResult<()> {
        let adapter = adapter.map(Arc::from);
        let request = EngineRequest { prompt_tokens, output_tokens, hashes: hashes.into(), adapter, reads_cache };
        self.engine.lock().submit(id, request).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    fn abort(&self, id: u64) {
        self.engine.lock().abort(id);
    }

    /// Whether the cache was cleared, and which sequences were pre-empted for it.
    fn reset(&self, preempt_running: bool) -> (bool, Vec<u64>) {
        self.engine.lock().reset(preempt_running)
    }

    fn step(&self) -> PlainStep {
        let mut engine = self.engine.lock();
        let before: Vec<u64> = engine.decoding().collect();
        let result = engine.step();
        let mut sampled = before;
        sampled.retain(|id| !result.preempted.contains(id));
        sampled.extend(&result.complete);
        (
            result.duration_s,
            sampled,
            result.finished,
            result.admitted.iter().map(|admitted| (admitted.sequence, admitted.cached_tokens)).collect(),
            result.preempted,
            result.events.iter().map(plain_event).collect(),
            result.prefill_tokens,
            result.decodes,
        )
    }

    #[getter]
    fn running(&self) -> usize {
        self.engine.lock().running()
    }

    #[getter]
    fn waiting(&self) -> usize {
        self.engine.lock().waiting()
    }

    #[getter]
    fn has_work(&self) -> bool {
        self.engine.lock().has_work()
    }

    /// Share of blocks held by sequences.
    #[getter]
    fn kv_usage(&self) -> f64 {
        self.engine.lock().pool().usage()
    }

    /// Blocks that no sequence holds.
    #[getter]
    fn free_blocks(&self) -> usize {
        self.engine.lock().pool().free()
    }

    /// Physical blocks of a sequence; empty once it has ended.
    fn blocks(&self, id: u64) -> Vec<u32> {
        self.engine.lock().blocks(id).to_vec()
    }

    /// Every cached hash with its number of copies.
    fn resident(&self) -> Vec<(u64, usize)> {
        self.engine.lock().pool().resident().collect()
    }

    /// Steps; tokens queried, hit, of prompts, generated, computed; pre-emptions, finished, aborted; tokens loaded from
    /// slower tiers, adapters loaded.
    fn counters(&self) -> [u64; 11] {
        let engine = self.engine.lock();
        let counters = engine.counters();
        [
            counters.steps,
            counters.queried_tokens,
            counters.hit_tokens,
            counters.prompt_tokens,
            counters.generated_tokens,
            counters.computed_tokens,
            counters.preemptions,
            counters.finished,
            counters.aborted,
            counters.loaded_tokens,
            counters.adapter_loads,
        ]
    }
}

/// Engines on virtual time with the router's index. Methods may be called from one thread at a time only.
#[pyclass(frozen)]
pub(crate) struct SimFleet {
    fleet: Mutex<Fleet>,
}

#[pymethods]
impl SimFleet {
    #[new]
    #[pyo3(signature = (*, block_size, seed=0, publish=true, delay_s=0.0, loss=0.0, adapters=Vec::new(),
        facts_max=20_000_000, predicted_ttl_s=10.0, approximate_ttl_s=600.0, trace=false))]
    #[allow(clippy::too_many_arguments, reason = "keywords of a Python constructor")]
    fn new(
        block_size: u32,
        seed: u64,
        publish: bool,
        delay_s: f64,
        loss: f64,
        adapters: Vec<String>,
        facts_max: u64,
        predicted_ttl_s: f64,
        approximate_ttl_s: f64,
        trace: bool,
    ) -> Self {
        let index =
            IndexOptions { block_size, facts_max, predicted_ttl_s, approximate_ttl_s, ..IndexOptions::default() };
        let options = FleetOptions { index, publish, delay_s, loss, seed, trace, adapters };
        Self { fleet: Mutex::new(Fleet::new(options)) }
    }

    /// Adds a replica whose process does not run yet; returns its slot. Raises `ConfigError`.
    #[pyo3(signature = (config, *, caching=true, lacks=Vec::new(), rtt_s=0.0))]
    fn join(&self, config: &[u8], caching: bool, lacks: Vec<String>, rtt_s: f64) -> PyResult<u32> {
        self.fleet.lock().join(read_config(config)?, caching, lacks, rtt_s).map_err(|error| bad_config(&error))
    }

    /// Whether a replica reuses what it holds, from the next request on; its KV events stay as they are.
    fn set_caching(&self, slot: u32, caching: bool) {
        self.fleet.lock().set_caching(slot, caching);
    }

    fn start(&self, slot: u32) {
        self.fleet.lock().start(slot);
    }

    fn leave(&self, slot: u32) {
        self.fleet.lock().leave(slot);
    }

    fn crash(&self, slot: u32) {
        self.fleet.lock().crash(slot);
    }

    /// Moves time until there are events to take, at most to `until_s`; returns the time then.
    fn advance(&self, py: Python<'_>, until_s: f64) -> f64 {
        py.detach(|| self.fleet.lock().advance(until_s))
    }

    /// Events since the last call, encoded as the live core encodes them; empty when there are none.
    fn take_events<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let events = self.fleet.lock().take_events();
        if events.is_empty() { PyBytes::new(py, &[]) } else { PyBytes::new(py, &encode_events(&events)) }
    }

    /// Tells the router about every replica as it is now.
    fn probe(&self) {
        self.fleet.lock().probe();
    }

    /// Tells the router the gaps between tokens since the last time.
    fn pace(&self) {
        self.fleet.lock().pace();
    }

    /// A request reaches the router now. `prompt` is a list of content and length in tokens.
    #[pyo3(signature = (id, prompt, output_tokens, *, output_tokens_max=None, answer=None, adapter=None,
        flow="default", priority=0, turn=0, affinity_key=None))]
    #[allow(clippy::too_many_arguments, reason = "keywords of a Python method")]
    fn arrive(
        &self,
        id: u64,
        prompt: Vec<(u64, u32)>,
        output_tokens: u32,
        output_tokens_max: Option<u32>,
        answer: Option<u64>,
        adapter: Option<String>,
        flow: &str,
        priority: i64,
        turn: u32,
        affinity_key: Option<u64>,
    ) {
        let prompt = prompt.into_iter().map(|(content, tokens)| Segment { content, tokens }).collect();
        let flow = flow.to_owned();
        self.fleet.lock().arrive(Arrival {
            id,
            prompt,
            output_tokens,
            output_tokens_max,
            answer,
            adapter,
            flow,
            priority,
            turn,
            affinity_key,
        });
    }

    /// Sends a request to the first of `slots` that can be reached. Raises `UnknownRequestError`.
    fn dispatch(&self, id: u64, slots: Vec<u32>) -> PyResult<()> {
        self.fleet.lock().dispatch(id, &slots).map_err(to_py)
    }

    fn shed(&self, id: u64) {
        self.fleet.lock().shed(id);
    }

    /// What each replica holds of the request's prompt. Raises `UnknownRequestError`.
    fn overlap<'py>(&self, py: Python<'py>, id: u64) -> PyResult<Columns<'py>> {
        let found = self.fleet.lock().overlap(id).map_err(to_py)?;
        columns(py, &found)
    }

    /// Notes that `slot` will hold the request's prompt. Raises `UnknownRequestError`.
    fn predict(&self, id: u64, slot: u32) -> PyResult<()> {
        self.fleet.lock().predict(id, slot).map_err(to_py)
    }

    /// Hashes of the full blocks of the request's prompt. Raises `UnknownRequestError`.
    fn blocks(&self, id: u64) -> PyResult<Vec<u64>> {
        self.fleet.lock().blocks(id).map_err(to_py)
    }

    /// Running, waiting and share of KV blocks held, by slot.
    fn loads(&self) -> Vec<(u64, u64, f64)> {
        self.fleet.lock().loads().iter().map(|load| (load.running, load.waiting, load.kv_usage)).collect()
    }

    /// Histogram of gaps between tokens: upper bound in seconds, and count.
    fn gaps(&self) -> Vec<(f64, u64)> {
        self.fleet.lock().gaps()
    }

    /// Every step that has ended, when asked for at the start: slot, end in seconds, prompt tokens, decodes.
    fn trace(&self) -> Vec<(u32, f64, u64, u64)> {
        let fleet = self.fleet.lock();
        fleet.trace().iter().map(|step| (step.slot, step.end_s, step.prefill_tokens, step.decodes)).collect()
    }

    /// Seconds in which each engine computed, by slot.
    fn busy_s(&self) -> Vec<f64> {
        self.fleet.lock().busy_s()
    }

    /// Most requests in flight at a replica over the mean, at each arrival.
    fn imbalance(&self) -> Vec<f64> {
        self.fleet.lock().imbalance().to_vec()
    }

    #[getter]
    fn preemptions(&self) -> u64 {
        self.fleet.lock().preemptions()
    }

    /// Batches of KV events that never arrived.
    #[getter]
    fn lost_batches(&self) -> u64 {
        self.fleet.lock().lost_batches()
    }
}
