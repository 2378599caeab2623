//! The engine model: continuous batching over a paged prefix cache, one step at a time.
//!
//! A plain state machine. A host submits requests, calls [`Engine::step`], lets the step's duration pass on whatever clock it
//! has, and calls again; between steps it may submit, abort and reset. Equal calls give equal steps. The executable
//! specification is `python/warmfront/reference/engine.py`; a differential test compares every step.
//!
//! Follows vLLM's scheduler (0.24 and later, fcfs): running sequences first, then waiting ones in order; a head of line
//! that does not fit blocks those behind it; the whole prompt must fit before a request is admitted although blocks are
//! taken chunk by chunk; when a running sequence finds no block, the one admitted last gives up all of its own.
//!
//! Decoding sequences are not visited in every step. Each step gives every one of them one token, so counters move by a
//! tick, and a sequence is looked at only when it needs a block, completes one, or ends ([`due`]).

mod adapters;
mod due;
mod latency;
mod list;
mod pool;
mod schedule;
mod tiers;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use serde::Deserialize;
use thiserror::Error;
use warmfront_core::index::FastMap;
use warmfront_core::kv::wire::Tier;

use adapters::Adapters;
use due::Due;
pub use latency::Latency;
pub use pool::{Block, BlockPool};
use tiers::Tiers;

/// Number of a sequence, given by the host and never used twice in one engine.
pub type SequenceId = u64;

/// Shape of one engine.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineConfig {
    pub latency: Latency,
    /// KV blocks, the null block included.
    pub blocks: u32,
    pub block_size: u32,
    /// Prompt and answer together.
    pub max_model_tokens: u32,
    pub max_batched_tokens: u32,
    pub max_sequences: u32,
    /// Blocks of the tier in host memory.
    #[serde(default)]
    pub host_blocks: u32,
    #[serde(default)]
    pub disk_blocks: u32,
    /// Adapters on the device at a time; 0: all, always.
    #[serde(default)]
    pub adapter_slots: u32,
}

/// Why an engine or a request is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum EngineError {
    #[error("max_sequences must not exceed max_batched_tokens: every decode needs a token of the budget")]
    Budget,
    #[error("{tokens} tokens do not fit {blocks} blocks of {block_size}")]
    Memory { tokens: u32, blocks: u32, block_size: u32 },
    #[error("{prompt} + {output} tokens: need at least 1 + 1, at most {most}")]
    Length { prompt: u32, output: u32, most: u32 },
    #[error("an engine needs blocks, and each at least one token")]
    Empty,
}

impl EngineConfig {
    fn check(&self) -> Result<(), EngineError> {
        if self.blocks < 2 || self.block_size == 0 {
            return Err(EngineError::Empty);
        }
        if self.max_sequences > self.max_batched_tokens {
            return Err(EngineError::Budget);
        }
        let blocks = self.blocks - 1;
        if u64::from(blocks) * u64::from(self.block_size) < u64::from(self.max_model_tokens) {
            let (tokens, block_size) = (self.max_model_tokens, self.block_size);
            return Err(EngineError::Memory { tokens, blocks, block_size });
        }
        Ok(())
    }
}

/// One sequence to compute.
#[derive(Clone, Debug)]
pub struct EngineRequest {
    pub prompt_tokens: u32,
    /// Length of the answer.
    pub output_tokens: u32,
    /// Chained hash of each full block of prompt and answer together, as far as blocks may be cached.
    pub hashes: Arc<[u64]>,
    pub adapter: Option<Arc<str>>,
    /// False: nothing is looked up; the blocks are stored all the same.
    pub reads_cache: bool,
}

/// What has happened to the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheEvent {
    /// Blocks `first` to `first + count - 1` of a sequence are on the device.
    Stored { sequence: SequenceId, first: u32, count: u32 },
    /// One copy of a block has left the device.
    Removed { hash: u64 },
    /// A block lies on a slower tier now.
    Offloaded { tier: Tier, hash: u64 },
    /// A block has left a slower tier.
    Dropped { tier: Tier, hash: u64 },
    /// Everything has left the device.
    Cleared,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Waiting,
    Prefill,
    Decode,
}

/// A request inside the engine.
#[derive(Debug)]
struct Sequence {
    request: EngineRequest,
    state: State,
    cached_tokens: Option<u32>,
    /// Number of the last admission: running sequences are served in this order.
    order: u64,
    blocks: Vec<Block>,
    /// Leading blocks that are in the cache under their hash.
    registered: usize,
    /// Tokens with KV when `tick` was current.
    computed: u64,
    /// Answer tokens produced when `tick` was current.
    emitted: u64,
    tick: u64,
    /// Tick at which a decoding sequence next needs more than one more token of context.
    due: u64,
}

impl Sequence {
    /// Tokens to compute before the next can be sampled: the prompt and, once pre-empted, the answer so far.
    fn known_tokens(&self) -> u64 {
        u64::from(self.request.prompt_tokens) + self.emitted
    }

    fn passed(&self, tick: u64) -> u64 {
        if self.state == State::Decode { tick - self.tick } else { 0 }
    }
}

/// A sequence that began to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    pub sequence: SequenceId,
    /// Found in the cache at *first* admission, which is what engines report.
    pub cached_tokens: u32,
}

/// What one step did. Outputs become visible when the step ends, `duration_s` after it began.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepResult {
    pub duration_s: f64,
    /// Sequences that decoded one token each: those that decoded before, in running order, without the pre-empted.
    pub decodes: u64,
    /// Sequences whose prompt is complete and which produced a token, in running order.
    pub complete: Vec<SequenceId>,
    /// Those whose answer is complete.
    pub finished: Vec<SequenceId>,
    pub admitted: Vec<Admitted>,
    pub preempted: Vec<SequenceId>,
    /// In true order, with what happened since the step before (a reset).
    pub events: Vec<CacheEvent>,
    pub prefill_tokens: u64,
}

/// Totals since the start, as vLLM counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub steps: u64,
    pub queried_tokens: u64,
    pub hit_tokens: u64,
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
    /// Prompt tokens computed, those after a pre-emption included.
    pub computed_tokens: u64,
    pub preemptions: u64,
    pub finished: u64,
    pub aborted: u64,
    /// Loaded from slower tiers.
    pub loaded_tokens: u64,
    pub adapter_loads: u64,
}

/// One engine: submit, step, abort, reset.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    counters: Counters,
    pool: BlockPool,
    tiers: Tiers,
    adapters: Adapters,
    sequences: FastMap<SequenceId, Sequence>,
    waiting: VecDeque<SequenceId>,
    /// By order of admission.
    prefilling: BTreeMap<u64, SequenceId>,
    decoding: BTreeMap<u64, SequenceId>,
    due: Due,
    /// Completed steps: while a step is scheduled all counts are those of the step before.
    tick: u64,
    admissions: u64,
    /// Tokens with KV of all decoding sequences.
    context_tokens: u64,
    events: Vec<CacheEvent>,
}

impl Engine {
    /// Starts idle with an empty cache.
    pub fn new(config: EngineConfig) -> Result<Self, EngineError> {
        config.check()?;
        Ok(Self {
            counters: Counters::default(),
            pool: BlockPool::new(config.blocks),
            tiers: Tiers::new(config.host_blocks as usize, config.disk_blocks as usize),
            adapters: Adapters::new(config.adapter_slots as usize),
            sequences: FastMap::default(),
            waiting: VecDeque::new(),
            prefilling: BTreeMap::new(),
            decoding: BTreeMap::new(),
            due: Due::new(config.block_size),
            tick: 0,
            admissions: 0,
            context_tokens: 0,
            events: Vec::new(),
            config,
        })
    }

    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Admitted sequences.
    pub fn running(&self) -> usize {
        self.decoding.len() + self.prefilling.len()
    }

    /// Sequences that wait for admission.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether [`Engine::step`] would do anything.
    pub fn has_work(&self) -> bool {
        !self.sequences.is_empty()
    }

    /// Sequences that decode, in running order.
    pub fn decoding(&self) -> impl Iterator<Item = SequenceId> {
        self.decoding.values().copied()
    }

    /// Physical blocks of a sequence; empty once it has ended.
    pub fn blocks(&self, id: SequenceId) -> &[Block] {
        self.sequences.get(&id).map_or(&[], |sequence| &sequence.blocks)
    }

    /// Queues a request. `id` is one that was never used before.
    pub fn submit(&mut self, id: SequenceId, request: EngineRequest) -> Result<(), EngineError> {
        let (prompt, output, most) = (request.prompt_tokens, request.output_tokens, self.config.max_model_tokens);
        if prompt < 1 || output < 1 || u64::from(prompt) + u64::from(output) > u64::from(most) {
            return Err(EngineError::Length { prompt, output, most });
        }
        let sequence = Sequence {
            request,
            state: State::Waiting,
            cached_tokens: None,
            order: 0,
            blocks: Vec::new(),
            registered: 0,
            computed: 0,
            emitted: 0,
            tick: 0,
            due: 0,
        };
        self.sequences.insert(id, sequence);
        self.waiting.push_back(id);
        Ok(())
    }

    /// Drops a sequence. Its full blocks stay cached. No effect on one that has ended.
    pub fn abort(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get(&id) else { return };
        if sequence.state == State::Waiting {
            self.waiting.retain(|other| *other != id);
        } else {
            self.leave(id);
        }
        self.sequences.remove(&id);
        self.counters.aborted += 1;
    }

    /// Clears the cache; the event leaves with the next step, as in vLLM. False: sequences hold blocks and
    /// `preempt_running` is not set, and nothing happened. Returns the pre-empted ones, in their order.
    pub fn reset(&mut self, preempt_running: bool) -> (bool, Vec<SequenceId>) {
        let mut preempted = Vec::new();
        if preempt_running {
            preempted.extend(self.prefilling.values().rev());
            preempted.extend(self.decoding.values().rev());
            preempted.iter().for_each(|id| self.preempt(*id));
        }
        let cleared = self.pool.clear();
        if cleared {
            self.events.push(CacheEvent::Cleared);
        }
        (cleared, preempted)
    }
}
