//! Prompts: admission, what is found in caches, chunks.
//!
//! At most one prompt is unfinished between steps: a chunk ends early only when the budget is used up.

use std::sync::Arc;

use super::tiers::Loads;
use super::{Admitted, Block, Engine, SequenceId, State};

/// Prefill work of one step, as it adds up.
#[derive(Default)]
pub(super) struct Prefill {
    pub(super) room: u64,
    pub(super) tokens: u64,
    pub(super) pairs: f64,
    /// Waiting for KV from slower tiers and for adapters.
    pub(super) load_s: f64,
    pub(super) complete: Vec<SequenceId>,
}

impl Prefill {
    /// Nothing yet; at most `room` tokens.
    pub(super) fn new(room: u64) -> Self {
        Self { room, ..Self::default() }
    }

    /// Takes note of `chunk` tokens computed behind `context` earlier ones.
    fn add(&mut self, chunk: u64, context: u64) {
        self.room -= chunk;
        self.tokens += chunk;
        self.pairs += chunk as f64 * (context as f64 + 0.5 * (chunk as f64 + 1.0));
    }
}

/// What a waiting sequence finds.
struct Found {
    on_device: Vec<Block>,
    on_tiers: Loads,
}

impl Engine {
    pub(super) fn continue_prefills(&mut self, prefill: &mut Prefill, preempted: &mut Vec<SequenceId>) {
        if self.prefilling.is_empty() {
            return;
        }
        let ids: Vec<SequenceId> = self.prefilling.values().copied().collect();
        for id in ids {
            if prefill.room > 0 && self.sequences[&id].state == State::Prefill {
                self.compute(id, prefill, preempted);
            }
        }
    }

    /// Admits waiting sequences in order until something is used up or the first does not fit. One that finds all adapter
    /// slots in use lets those behind it pass, as in vLLM.
    pub(super) fn admit(&mut self, prefill: &mut Prefill) -> Vec<Admitted> {
        let mut admitted = Vec::new();
        let mut place = 0;
        while let Some(id) = self.waiting.get(place).copied()
            && prefill.room > 0
            && self.running() < self.config.max_sequences as usize
        {
            if !self.adapters.has_room(self.sequences[&id].request.adapter.as_ref()) {
                place += 1;
                continue;
            }
            let Some(found) = self.find(id) else { break };
            self.waiting.remove(place);
            admitted.push(self.enter(id, found, prefill));
            self.compute(id, prefill, &mut Vec::new());
        }
        admitted
    }

    /// What is cached of a sequence; `None`: the rest does not fit beside what others hold.
    fn find(&self, id: SequenceId) -> Option<Found> {
        let sequence = &self.sequences[&id];
        let (total, size) = (sequence.known_tokens(), u64::from(self.config.block_size));
        // At least one token is always computed: that is why an exact multiple hits one block less.
        let limit = if sequence.request.reads_cache { (total - 1) / size } else { 0 } as usize;
        let hashes = &sequence.request.hashes[..limit.min(sequence.request.hashes.len())];
        let on_device = self.pool.lookup(hashes);
        let on_tiers = self.tiers.lookup(&hashes[on_device.len()..]);
        let needed = total.div_ceil(size) as usize - on_device.len();
        let room = self.pool.free() - self.pool.idle(&on_device);
        (needed <= room).then_some(Found { on_device, on_tiers })
    }

    /// Lets a sequence run, with what was found for it.
    fn enter(&mut self, id: SequenceId, found: Found, prefill: &mut Prefill) -> Admitted {
        self.pool.touch(&found.on_device);
        self.admissions += 1;
        let size = self.config.block_size;
        let sequence = self.sequences.get_mut(&id).expect("a waiting sequence");
        let on_device = found.on_device.len();
        sequence.order = self.admissions;
        sequence.state = State::Prefill;
        sequence.registered = on_device;
        sequence.computed = on_device as u64 * u64::from(size);
        sequence.blocks = found.on_device;
        self.prefilling.insert(sequence.order, id);
        let cached_tokens = (on_device + found.on_tiers.blocks()) as u32 * size;
        let (is_first, total) = (sequence.cached_tokens.is_none(), sequence.known_tokens());
        // Pre-empted before: only the first admission is reported and counted.
        let cached_tokens = *sequence.cached_tokens.get_or_insert(cached_tokens);
        if is_first {
            self.counters.prompt_tokens += total;
        }
        if is_first && sequence.request.reads_cache {
            self.counters.queried_tokens += total;
            self.counters.hit_tokens += u64::from(cached_tokens);
        }
        if self.adapters.enter(sequence.request.adapter.as_ref()) {
            self.counters.adapter_loads += 1;
            prefill.load_s += self.config.latency.adapter_s;
        }
        self.load(id, on_device, found.on_tiers, prefill);
        Admitted { sequence: id, cached_tokens }
    }

    /// Brings the blocks behind the first `first` of a sequence from slower tiers onto the device.
    fn load(&mut self, id: SequenceId, first: usize, loads: Loads, prefill: &mut Prefill) {
        if loads.blocks() == 0 {
            return;
        }
        let (size, latency) = (u64::from(self.config.block_size), self.config.latency);
        let behind = first + loads.blocks();
        let hashes = Arc::clone(&self.sequences[&id].request.hashes);
        self.tiers.used(&hashes[first..behind]);
        self.allocate(id, loads.blocks());
        let computed = behind as u64 * size;
        self.sequences.get_mut(&id).expect("an admitted sequence").computed = computed;
        self.register(id, computed);
        self.counters.loaded_tokens += loads.blocks() as u64 * size;
        prefill.load_s += latency.host_token_s * (loads.host as u64 * size) as f64;
        prefill.load_s += latency.disk_token_s * (loads.disk as u64 * size) as f64;
    }

    /// Computes the next chunk of a prompt, unless the sequence finds no block and loses its own instead.
    fn compute(&mut self, id: SequenceId, prefill: &mut Prefill, preempted: &mut Vec<SequenceId>) {
        let sequence = &self.sequences[&id];
        let (total, context) = (sequence.known_tokens(), sequence.computed);
        let chunk = (total - context).min(prefill.room);
        let after = context + chunk;
        let blocks = after.div_ceil(u64::from(self.config.block_size)) as usize;
        let missing = blocks.saturating_sub(sequence.blocks.len());
        if missing > 0 && !self.grow(id, missing, preempted) {
            return;
        }
        prefill.add(chunk, context);
        self.sequences.get_mut(&id).expect("a running sequence").computed = after;
        self.register(id, after);
        if after == total {
            prefill.complete.push(id);
        }
    }
}
